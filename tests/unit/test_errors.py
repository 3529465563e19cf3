"""shared/errors.py: reasons, and missing packages."""

import json
import sys
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from redis.exceptions import ResponseError

from feedmill.shared.errors import (
    UserError,
    clause,
    explain_missing,
    json_line,
    printable,
)


def test_errors_of_pipelines_are_shown_without_the_command() -> None:
    """It may contain posts."""
    error = ResponseError(
        'Command # 4 (LPUSH feedmill {"body": "(a \n post) of pipeline"}) of pipeline caused '
        "error: No."
    )
    assert clause(error) == "No"


def test_missing_packages_are_explained_in_every_thread() -> None:
    def load() -> None:
        with explain_missing("A test", "worker"):
            raise ModuleNotFoundError(name="torch")

    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(UserError, match=("A test requires the package torch")),
    ):
        pool.submit(load).result()


def test_notebooks_show_the_sentence_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    make: Any = InteractiveShell
    shell = make()
    shell.user_ns["error"] = UserError("There is no such column.")
    shell.run_cell("raise error")
    assert capsys.readouterr().out.strip() == "UserError: There is no such column."


#: Unicode's categories of characters that print nothing: controls, formats, surrogates, and line
#: and paragraph ends.
INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
#: Characters of other categories that print nothing: fillers, joiners, and variation selectors.
IGNORABLE = (
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180f\u2065\u3164\ufe00\ufe0f\uffa0\ufff0"
    "\U000e0000\U000e0100\U000e0fff"
)


def test_invisible_characters_are_printed_as_escapes() -> None:
    characters = map(chr, range(sys.maxunicode + 1))
    invisible = [
        character
        for character in characters
        if unicodedata.category(character) in INVISIBLE
    ]
    for character in [*invisible, *IGNORABLE]:
        assert printable(f"a{character}b") == f"a{ascii(character)[1:-1]}b"
        written = json_line(f"a{character}b")
        assert (written.isprintable(), written.isascii()) == (True, True)
        assert json.loads(written) == f"a{character}b"


@pytest.mark.parametrize(
    "text", ["café ☕", "❤️ 1️⃣ 👩‍❤️‍👨", "می‌خواهم", "क्‍ष", "日本語", "a–b…"]
)
def test_words_and_emoji_are_printed_as_they_are(text: str) -> None:
    """Some are spelled with characters that are invisible elsewhere."""
    assert printable(text) == text
    assert json_line(text) == f'"{text}"'


@pytest.mark.parametrize(
    "text",
    [
        "a\u200db",
        "\u200d🙂",
        "a\ufe0f",
        "a\ufe0f\u200d🙂",
        "🙂\u200db",
        "❤\ufe0f\ufe0f",
    ],
)
def test_joiners_at_other_places_are_printed_as_escapes(text: str) -> None:
    shown = printable(text)
    assert shown != text
    assert printable(shown) == shown
