"""Results with a language: stored records, files, frames and texts for people."""

import json
from pathlib import Path
from typing import Any

import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import feedmill
from feedmill.cli.main import application
from feedmill.shared.errors import SettingsError, UserError
from feedmill.shared.messages import Classification, applying_labels
from feedmill.shared.results import (
    BODY,
    CONTEXT,
    PACKED,
    pack,
    parse_context,
    split,
    unpack,
)
from feedmill.workers.models.classifiers import LabelSet
from tests.support import make_classification

LABELS = ["sports", "food"]
ENGLISH = "The keeper saved two penalties in the last minutes of the match"
GERMAN = "Der Torwart hat in den letzten Minuten zwei Elfmeter gehalten"
#: Words that every reader of any language writes.
UNCERTAIN = [
    "lol",
    "ok",
    "haha",
    "wow",
    "gg",
    "Messi",
    "123",
    "😀",
    "LOL!!!",
    "xD",
    "no",
]
FINGERPRINT = "f0443d56baefed70ea7db12a3a34028e"

scores = st.integers(0, 50_000).map(lambda steps: steps / 50_000)


@pytest.fixture(autouse=True)
def _no_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDMILL_TOKEN_BUDGET", "2048")  # measuring it takes seconds


def run(*arguments: str) -> Result:
    return CliRunner().invoke(application(), arguments)


def stored(classification: Classification) -> Classification:
    """Return a classification as it is read from the store."""
    record, context = pack(classification)
    contexts = {}
    if context is not None:
        (packed,) = split(context.record)
        assert packed.kind == CONTEXT
        contexts[context.id] = parse_context(packed.content)
    (packed,) = split(record)
    unpacked = unpack(classification.id, packed, contexts.get)
    assert unpacked is not None
    return unpacked


@given(
    language=st.none() | st.sampled_from(["en", "pt", "zho"]),
    threshold=st.none() | scores,
    post_scores=st.tuples(scores, scores),
    has_label=st.booleans(),
)
def test_the_store_keeps_the_language_and_the_labels_that_apply(
    language: str | None,
    threshold: float | None,
    post_scores: tuple[float, float],
    has_label: bool,
) -> None:
    best_first = sorted(post_scores, reverse=True)
    by_label = dict(zip(LABELS, best_first, strict=True))
    classification = make_classification(
        "x",
        label=LABELS[0] if has_label else None,
        scores=by_label,
        fingerprint=FINGERPRINT,
        language=language,
        labels_threshold=threshold,
    )
    unpacked = stored(classification)
    assert unpacked.language == language
    assert unpacked.label == classification.label
    assert unpacked.labels == classification.labels
    assert (unpacked.labels_threshold is None) == (threshold is None)


@pytest.mark.parametrize(
    "fields", [{"language": "ünit"}, {"labels_threshold": -0.9}, {"language": "en"}]
)
def test_stores_values_of_any_form(fields: dict[str, Any]) -> None:
    classification = make_classification("x", fingerprint=FINGERPRINT, **fields)
    unpacked = stored(classification)
    for name, value in fields.items():
        assert getattr(unpacked, name) == value


def test_a_result_without_a_language_is_stored_as_before() -> None:
    """Readers of earlier versions read the scores, and no further."""
    plain = make_classification("x", fingerprint=FINGERPRINT)
    record, _ = pack(plain)
    (packed,) = split(record)
    assert packed.kind == PACKED
    assert len(packed.content) == BODY.size + 2 * len(plain.scores)
    with_language = plain.model_copy(update={"language": "en"})
    longer, _ = pack(with_language)
    (packed_longer,) = split(longer)
    assert packed_longer.content.startswith(packed.content)
    values = json.loads(plain.model_dump_json())
    assert "language" not in values
    assert "labels_threshold" not in values
    assert Classification.model_validate(values) == plain


def test_only_the_best_label_applies_unless_each_is_scored_by_itself() -> None:
    by_label = {"a": 0.7, "b": 0.6, "c": 0.1}
    assert applying_labels("a", by_label, None) == ["a"]
    assert applying_labels("a", by_label, 0.6) == ["a", "b"]
    assert applying_labels("a", by_label, 0.8) == []
    assert applying_labels(None, by_label, 0.6) == []


def test_languages_are_part_of_what_a_result_is_stored_under() -> None:
    plain = LabelSet(("a",), multi_label=False, recipe="r")
    english = plain.with_languages(frozenset({"en"}))
    both = plain.with_languages(frozenset({"de", "en"}))
    assert len({plain.recipe, english.recipe, both.recipe}) == 3
    assert plain.with_languages(frozenset({"en", "de"})) is both
    assert english.with_threshold(0.5).languages == {"en"}


def test_items_in_other_languages_have_no_label() -> None:
    texts = [ENGLISH, GERMAN, *UNCERTAIN]
    predictions = feedmill.classify(texts, LABELS, languages="en")
    english, german, *uncertain = predictions
    assert (english.label, english.language) == ("sports", "en")
    assert (german.label, german.language) == (None, "de")
    assert german.best_label in LABELS
    assert german.score == german.scores[german.best_label]
    for prediction in uncertain:
        assert prediction.label in LABELS, prediction
        assert prediction.language is None
    both = feedmill.classify(texts, LABELS, languages="en,de")
    assert [prediction.label is None for prediction in both] == [False] * len(texts)
    plain = feedmill.classify(texts, LABELS)
    for prediction, with_language in zip(plain, predictions, strict=True):
        assert prediction.language is None
        assert prediction.scores == pytest.approx(with_language.scores, abs=1e-6)
    assert "language" not in plain.to_dicts()[0]
    assert predictions.to_dicts()[1]["language"] == "de"
    assert predictions.to_dicts()[1]["best_label"] == german.best_label


def test_frames_have_the_language_of_each_row() -> None:
    frame = pandas.DataFrame({"text": [ENGLISH, GERMAN, "lol"]})
    labelled = feedmill.classify(frame, LABELS, languages="en")
    languages = labelled["language"].replace({float("nan"): None})
    assert languages.tolist() == ["en", "de", None]
    assert labelled["label"].isna().tolist() == [False, True, False]
    assert labelled["best_label"].isna().tolist() == [False, False, False]
    assert "language" not in feedmill.classify(frame, LABELS).columns


@pytest.mark.parametrize("codes", ["klingon", "en;de", "xx"])
def test_refuses_codes_of_no_language(codes: str) -> None:
    with pytest.raises((SettingsError, UserError), match="language"):
        feedmill.classify("a text", LABELS, languages=codes)


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_a_labelled_file_has_the_language_of_each_row(
    form: str, tmp_path: Path
) -> None:
    source = tmp_path / "posts.csv"
    frame = pandas.DataFrame({"id": [1, 2], "text": [ENGLISH, GERMAN]})
    frame.to_csv(source, index=False)
    out = tmp_path / f"out.{form}"
    options = ("--labels", "sports,food", "--languages", "en", "--none", "off")
    done = run("classify", str(source), *options, "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "in another language" in done.stderr
    read = {"csv": pandas.read_csv, "parquet": pandas.read_parquet}.get(
        form, lambda path: pandas.read_json(path, lines=True)
    )
    rows = read(out)
    assert rows["language"].tolist() == ["en", "de"]
    assert rows["label"].isna().tolist() == [False, True]
    assert rows["best_label"].isna().tolist() == [False, False]


def test_a_file_whose_rows_are_all_in_other_languages_is_no_failure(
    tmp_path: Path,
) -> None:
    source = tmp_path / "posts.csv"
    source.write_text(f'id,text\n1,"{GERMAN}"\n2,\n')
    options = ("--labels", "sports,food", "--languages", "en")
    out = tmp_path / "out.csv"
    done = run("classify", str(source), *options, "--out", str(out))
    assert done.exit_code == 0, done.output


def test_printed_labels_say_the_language(tmp_path: Path) -> None:
    source = tmp_path / "posts.csv"
    source.write_text(f'id,text\n1,"{ENGLISH}"\n2,"{GERMAN}"\n')
    options = ("--labels", "sports,food", "--languages", "en", "--none", "off")
    done = run("classify", str(source), *options)
    assert "no label, language de" in done.stdout
    assert "1 of 2 posts, in another language" in done.stderr
    done = run("classify", str(source), *options, "--json")
    english, german = map(json.loads, done.stdout.splitlines())
    assert (english["language"], german["language"]) == ("en", "de")
    assert german["label"] is None
    assert german["best_label"] in LABELS
    done = run("classify", GERMAN, *options)
    assert "no label, language de" in done.stdout
