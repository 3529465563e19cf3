"""Languages are detected from texts: posts in others are left out, uncertain ones are not."""

import json
from pathlib import Path

import pytest

from feedmill.producers.files import FileSource
from feedmill.producers.records import Filters, LeftOut
from feedmill.shared.errors import UserError
from feedmill.shared.language import (
    is_foreign,
    known_languages,
    language_of,
    parse_languages,
)
from feedmill.shared.messages import Post

TEXTS = {
    "en": "The keeper saved two penalties in the last minutes of the match",
    "de": "Der Torwart hat in den letzten Minuten zwei Elfmeter gehalten",
    "fr": "Le gardien a arrêté deux penaltys dans les dernières minutes",
    "ru": "Вратарь отбил два пенальти на последних минутах матча",
    "ja": "ゴールキーパーが試合終了間際に二本のペナルティキックを止めた",
}


@pytest.mark.parametrize("code", TEXTS)
def test_detects_the_language_of_a_sentence(code: str) -> None:
    assert language_of(TEXTS[code]) == code


@pytest.mark.parametrize("text", ["", " ", "12:30", "ok", "😀😀", "\x00", "\ud83d"])
def test_a_text_without_enough_words_is_in_no_language(text: str) -> None:
    assert language_of(text) is None
    assert not is_foreign(text, {"en"})


def test_reads_only_the_start_of_a_long_text() -> None:
    long_text = TEXTS["en"] + " " + 100_000 * TEXTS["ru"]
    assert language_of(20 * (TEXTS["en"] + " ") + long_text) == "en"


def test_parses_codes() -> None:
    assert parse_languages("EN, pt") == {"en", "pt"}
    with pytest.raises(UserError, match=r"'xx' is not the code .* These can: .*\ben\b"):
        parse_languages("en,xx")
    assert {"en", "de", "zh"} <= known_languages()
    assert "zxx" not in known_languages()


@pytest.mark.parametrize("extra", [{}, {"label": "a", "scores": {"a": 1.0}}])
def test_files_leave_out_posts_in_other_languages(
    tmp_path: Path, extra: dict[str, object]
) -> None:
    """Also of an export, which has its own columns."""
    if extra:
        extra = extra | {"fingerprint": "f", "classified_at": "2026-02-01T00:00:00Z"}
    path = tmp_path / "posts.jsonl"
    records = [{"id": code, "title": text} for code, text in TEXTS.items()]
    records.append({"id": "short", "title": "ok"})
    lines = [json.dumps(record | extra) + "\n" for record in records]
    path.write_text("".join(lines))
    filters = Filters(languages=frozenset({"de", "fr"}))
    items = list(FileSource(str(path), filters).items())
    assert [item.id for item in items if isinstance(item, Post)] == [
        "de",
        "fr",
        "short",
    ]
    assert items.count(LeftOut.BY_FILTERS) == 3
