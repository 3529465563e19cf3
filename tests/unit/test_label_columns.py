"""The columns `best_label` and `labels` of labelled files and frames."""

import csv
import json
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import narwhals as nw
import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openpyxl import load_workbook

from feedmill.api.request import Item, Predictions, Request
from feedmill.cli import offline
from feedmill.cli.offline import OutFlags
from feedmill.cli.options import FileFlags
from feedmill.offline.tally import NO_FIT, Tally
from feedmill.producers.files import FileSource
from feedmill.producers.records import DETECTED, NO_TEXT
from feedmill.shared.errors import UserError
from feedmill.shared.messages import Classification, ClassifyOptions, Outcome, Post
from feedmill.tables import LabelColumns
from tests.support import make_classification

LABELS = ("news", 'a "b", c', "ünit")
SCORES = {
    "fits": {'a "b", c': 0.8, "news": 0.5, "ünit": 0.1},
    "other": {"news": 0.3, "ünit": 0.2, 'a "b", c': 0.1},
}
NONE = ClassifyOptions(none=0.36)
MULTI_LABEL = ClassifyOptions(multi_label=True)
FORMS = ("csv", "tsv", "csv.gz", "jsonl", "parquet", "xlsx")


def classification_of(post: Post, options: ClassifyOptions) -> Classification:
    scores = SCORES[post.text]
    best = next(iter(scores))
    label: str | None = best
    if options.none is not None and scores[best] < options.none:
        label = None
    threshold = 0.5 if options.multi_label else None
    return make_classification(
        post.id, label=label, scores=scores, labels_threshold=threshold
    )


def engine(
    posts: Iterable[Post], options: ClassifyOptions
) -> Generator[tuple[Post, Outcome]]:
    for post in posts:
        yield post, classification_of(post, options)


def label_file(
    source: Path, out: Path, options: ClassifyOptions | None, **flags: Any
) -> Tally:
    def classify(posts: Iterable[Post]) -> Generator[tuple[Post, Outcome]]:
        return engine(posts, options or ClassifyOptions())

    return offline.label_file(
        str(source),
        FileFlags(),
        OutFlags(str(out), **flags),
        None,
        lambda: (LABELS, classify),
        options=options,
    )


@pytest.fixture(params=["in.csv", "in.jsonl", "in.parquet"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    name: str = request.param
    path = tmp_path / name
    frame = pandas.DataFrame({"id": ["1", "2", "3"], "text": ["fits", "other", ""]})
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    elif path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_parquet(path, index=False)
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of an output; empty cells are None, and lists in text are parsed."""
    form = path.name.removesuffix(".gz").rpartition(".")[2]
    rows: list[dict[str, Any]] = []
    if form == "parquet":
        rows = pq.read_table(path).to_pylist()
    elif form == "xlsx":
        header, *lines = load_workbook(path)["posts"].values
        rows = [dict(zip(header, line, strict=True)) for line in lines]
    else:
        with pa.input_stream(str(path), compression="detect") as file:
            text = file.read().decode()
        lines = text.splitlines()
        if form == "jsonl":
            rows = [json.loads(line) for line in lines]
        else:
            delimiter = "\t" if form == "tsv" else ","
            rows = list(csv.DictReader(lines, delimiter=delimiter))
    for row in rows:
        for name, cell in row.items():
            if cell == "":
                row[name] = None
            elif name.endswith("labels") and isinstance(cell, str):
                row[name] = json.loads(cell)
    return rows


@pytest.mark.parametrize("form", FORMS)
def test_files_keep_the_best_label_of_rows_without_one(
    source: Path, form: str, tmp_path: Path
) -> None:
    out = tmp_path / f"out.{form}"
    tally = label_file(source, out, NONE)
    rows = rows_of(out)
    assert list(rows[0]) == ["id", "text", "label", "label_score", "best_label"]
    assert [row["label"] for row in rows] == ['a "b", c', None, None]
    assert [row["best_label"] for row in rows] == ['a "b", c', "news", None]
    assert float(rows[1]["label_score"]) == 0.3
    assert tally.unlabelled == {NO_FIT: 1, NO_TEXT: 1}


@pytest.mark.parametrize("form", FORMS)
def test_files_list_all_labels_that_apply(
    source: Path, form: str, tmp_path: Path
) -> None:
    out = tmp_path / f"out.{form}"
    label_file(source, out, MULTI_LABEL, scores=True)
    rows = rows_of(out)
    score_columns = [f"score_{label}" for label in LABELS]
    assert list(rows[0]) == [
        "id", "text", "label", "label_score", "labels", *score_columns,
    ]  # fmt: skip
    assert [row["labels"] for row in rows] == [['a "b", c', "news"], [], None]
    assert [row["label"] for row in rows] == ['a "b", c', "news", None]
    label_file(source, out, MULTI_LABEL, min_score=0.2)
    assert rows_of(out)[1]["labels"] == ["news", "ünit"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [NONE, MULTI_LABEL])
def test_labelled_files_are_read_again(
    source: Path, form: str, options: ClassifyOptions, tmp_path: Path
) -> None:
    """The new columns are no text of a post, and stay as they are in a second copy."""
    first = tmp_path / f"first.{form}"
    second = tmp_path / "second.jsonl"
    label_file(source, first, options)
    with pytest.raises(UserError, match="--prefix"):
        label_file(first, second, options)
    label_file(first, second, options, prefix="new_")
    names = LabelColumns().of(options).names
    for row in rows_of(second):
        for name in names:
            value = row[name]
            if name == "labels" and value == []:
                assert row["new_labels"] == []
            elif name == "label_score" and value is not None:
                assert float(value) == row["new_label_score"]
            else:
                assert value == row[f"new_{name}"]
    texts = [
        row.post.text
        for row in FileSource(str(first), columns=DETECTED).rows()
        if isinstance(row.post, Post)
    ]
    assert texts == ["fits", "other"]


def test_files_of_calls_without_these_options_have_no_further_columns(
    source: Path, tmp_path: Path
) -> None:
    label_file(source, tmp_path / "plain.csv", None)
    header, *_ = (tmp_path / "plain.csv").read_text().splitlines()
    assert header == "id,text,label,label_score"


def test_only_rows_that_fit_no_label_are_no_failure(
    source: Path, tmp_path: Path
) -> None:
    """Beside a row without text, too."""
    strict = ClassifyOptions(none=1.0)
    tally = label_file(source, tmp_path / "out.csv", strict)
    assert not tally.labels
    assert not tally.has_failures


FRAMES = [pandas.DataFrame, polars.DataFrame, pa.table]


@pytest.mark.parametrize("make", FRAMES)
def test_frames_have_the_columns_of_their_options(make: Any) -> None:
    items = make({"text": ["fits", "other"]})
    names = (None, None, None)
    native = Request(items, NONE, names, prefix="p_").run(engine, LABELS)
    frame = nw.from_native(native, eager_only=True)
    assert frame["p_best_label"].to_list() == ['a "b", c', "news"]
    native = Request(items, MULTI_LABEL, names).run(engine, LABELS)
    frame = nw.from_native(native, eager_only=True)
    assert frame["labels"].to_list() == [['a "b", c', "news"], []]
    native = Request(items, ClassifyOptions(), names).run(engine, LABELS)
    frame = nw.from_native(native, eager_only=True)
    assert frame.columns == ["text", "label", "label_score", "label_error"]


def test_predictions_have_the_columns_of_their_options() -> None:
    names = (None, None, None)
    predictions = Request(["fits", "other"], NONE, names).run(engine, LABELS)
    assert [row["best_label"] for row in predictions.to_dicts()] == ['a "b", c', "news"]
    frame = predictions[1:].to_frame()
    assert list(frame.columns) == ["text", "label", "label_score", "best_label"]
    listed = Request(["fits", "other"], MULTI_LABEL, names).run(engine, LABELS)
    assert [row["labels"] for row in listed.to_dicts()] == [['a "b", c', "news"], []]
    assert listed.to_frame()["labels"].tolist() == [['a "b", c', "news"], []]
    failed = Predictions([Item("no text").prediction({"error": "no text"})])
    assert "best_label" not in failed.to_dicts()[0]


def test_the_summary_says_that_it_counts_best_labels(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    label_file(source, tmp_path / "out.csv", MULTI_LABEL)
    assert "rows by their best label" in capsys.readouterr().err
    label_file(source, tmp_path / "out.csv", None)
    assert "best label" not in capsys.readouterr().err


HINT = "Texts are read from the column Text only"


@pytest.mark.parametrize("titles", [["one", "two", "three"], ["", "", ""]])
def test_the_summary_names_the_columns_of_texts_if_most_rows_have_none(
    titles: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.csv"
    columns = {"Betreff": titles, "Text": ["fits", "", ""]}
    pandas.DataFrame(columns).to_csv(path, index=False)
    label_file(path, tmp_path / "out.csv", NONE)
    assert HINT in capsys.readouterr().err


def test_the_summary_names_no_columns_if_most_rows_have_a_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.csv"
    columns = {"Betreff": ["a", "b", "c"], "Text": ["fits", "other", ""]}
    pandas.DataFrame(columns).to_csv(path, index=False)
    label_file(path, tmp_path / "out.csv", NONE)
    assert HINT not in capsys.readouterr().err
