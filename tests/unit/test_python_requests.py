"""feedmill/api/request.py: calls of `feedmill.classify` without a model."""

import sys
from collections.abc import Generator, Iterable
from typing import Any

import numpy
import pandas
import polars
import pyarrow
import pytest

from feedmill.api import request
from feedmill.api.request import Request, read_options
from feedmill.shared.errors import UserError
from feedmill.shared.messages import ClassifyOptions, Outcome, Post
from tests.support import make_classification, naming

LABELS = ["praise", "complaint"]
TEXTS = ["I love it", "It broke after a day"]


def by_words(
    posts: Iterable[Post], options: ClassifyOptions
) -> Generator[tuple[Post, Outcome]]:
    """Classify as a complaint what broke."""
    for post in posts:
        scores = dict.fromkeys(options.labels or LABELS, 0.25) | {
            "complaint" if "broke" in post.text else "praise": 0.75
        }
        best = sorted(scores, key=lambda label: -scores[label])
        yield (
            post,
            make_classification(
                post.id, label=best[0], scores={label: scores[label] for label in best}
            ),
        )


def classify(
    items: Any,
    labels: Any = LABELS,
    *,
    title: Any = None,
    body: Any = None,
    id: Any = None,  # noqa: A002 - as in feedmill.classify
    multi_label: Any = False,
    **others: Any,
) -> Any:
    return Request(
        items, read_options(labels, None, multi_label), (id, title, body), **others
    ).run(by_words, ())


def test_attributes_of_a_frame_stay() -> None:
    frame = pandas.DataFrame({"text": TEXTS})
    frame.attrs["source"] = "a survey"
    assert classify(frame).attrs == {"source": "a survey"}


@pytest.mark.parametrize("name", ["", "\n", "review"])
def test_the_only_column_may_have_any_name(name: str) -> None:
    assert classify(pyarrow.table({name: TEXTS}))["label"].to_pylist() == LABELS


@pytest.mark.parametrize(
    "given",
    [
        {"praise": "praise", "complaint": ["complaint"]}, tuple(LABELS), set(LABELS),
        pandas.Series(LABELS),
        polars.Series(LABELS), pandas.Categorical(LABELS), numpy.array(LABELS),
        pyarrow.array(LABELS), iter(LABELS),
    ],
)  # fmt: skip
def test_labels_may_be_any_collection(given: Any) -> None:
    assert sorted(classify(TEXTS, labels=given).labels) == sorted(LABELS)


@pytest.mark.filterwarnings("ignore:.* have no label")
def test_items_without_the_named_key_have_no_label() -> None:
    assert [
        each.error for each in classify([{"foo": "x"}, {"text": "x"}], body="txt")
    ] == ["no key 'txt'"] * 2


@pytest.mark.parametrize(
    ("items", "arguments", "words"),
    [
        (pandas.DataFrame({"Customer Comment ": TEXTS, "n": TEXTS}), {"body": "Customer Coment"},
         ["no column customer_coment", "Customer Comment"]),
        (pandas.DataFrame({"a": ["x"], "b": ["y"]}), {}, ["body=", "a, b"]),
        (polars.DataFrame({"text": ["x"]}), {"id": "key"}, ["key", "id=", "text"]),
        (pandas.DataFrame([["x", "y"]], columns=["text", "text"]), {},
        ["several columns", "text"]),
        (pandas.DataFrame({"text": ["x"], "label": ["y"]}), {}, ["label", "prefix="]),
        (polars.DataFrame({"text": ["x"], "score_praise": [1]}), {"scores": True},
        ["score_praise", "prefix="]),
        (pandas.DataFrame({"text": ["x"]}).style, {}, ["Styler", "DataFrame"]),
        (polars.Series([1, 2]), {}, ["has the type Int64"]),
        (b"bytes", {}, ["bytes"]),
        (TEXTS, {"labels": "praise, complaint"}, ["labels must be a list", "'praise, complaint'"]),
        (TEXTS, {"labels": 5}, ["labels", "int"]),
        (TEXTS, {"labels": pandas.DataFrame({"name": LABELS})},
        ["labels must be a list", "DataFrame"]),
        (TEXTS, {"labels": {"": "a", "b": "b"}}, ["labels: a label is empty"]),
    ],
)  # fmt: skip
def test_invalid_arguments_are_explained(
    items: Any, arguments: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UserError, match=naming(*words)):
        classify(items, **arguments)


def test_predictions_keep_the_order_of_the_labels() -> None:
    found = classify(TEXTS[::-1])
    assert list(found[0].scores) == ["complaint", "praise"]
    for part in (found, found[1:]):
        assert part.labels == tuple(LABELS)
        columns = ["text", "label", "label_score", "score_praise", "score_complaint"]
        assert list(part.to_frame(scores=True).columns) == columns


@pytest.mark.filterwarnings("ignore:.* have no label")
def test_frame_of_predictions_has_ids_and_errors_if_any_item_has() -> None:
    frame = classify(
        [{"id": 1, "text": TEXTS[0]}, {"text": TEXTS[1]}, {"id": 3, "text": None}]
    ).to_frame()
    assert list(frame.columns) == ["id", "text", "label", "label_score", "error"]
    assert frame["label"].tolist()[:2] == LABELS
    assert frame["error"].tolist()[2] == "no text"


def test_predictions_become_dictionaries() -> None:
    found = classify([{"id": "a", "text": "<b>It broke</b>"}])
    assert found.to_dicts() == [
        {"id": "a", "text": "<b>It broke</b>", "label": "complaint", "score": 0.75,
         "scores": {"complaint": 0.75, "praise": 0.25}, "error": None}
    ]  # fmt: skip


@pytest.mark.parametrize("missing", [(), ("pandas",), ("pandas", "polars")])
def test_notebooks_show_the_frame_and_run_no_markup_of_a_text(
    missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    predictions = classify(["<script>alert(1)</script>", *TEXTS])
    for package in missing:
        monkeypatch.setitem(sys.modules, package, None)
    shown = predictions._repr_html_()
    if missing == ("pandas", "polars"):
        assert shown is None
        return
    assert shown == predictions.to_frame()._repr_html_()
    assert "<table" in shown
    assert "complaint" in shown
    assert "<script>" not in shown


@pytest.mark.parametrize("count", [2, 200])
def test_notebooks_show_the_text_if_pandas_tables_are_off(count: int) -> None:
    predictions = classify(["I love it"] * count)
    with pandas.option_context("display.notebook_repr_html", False):
        assert predictions._repr_html_() is None
    assert predictions._repr_html_() is not None


@pytest.mark.parametrize("missing", [(), ("pandas",)])
def test_notebooks_show_the_start_of_many_items(
    missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of all of them would take as much memory again, for ten rows that are shown."""
    for package in missing:
        monkeypatch.setitem(sys.modules, package, None)
    predictions = classify(["I love it"] * 1_234)
    sizes = []
    make_frame = request.make_frame

    def measured(columns: dict[str, list[Any]]) -> Any:
        sizes.append(len(columns["text"]))
        return make_frame(columns)

    monkeypatch.setattr(request, "make_frame", measured)
    shown = predictions._repr_html_()
    assert shown is not None
    assert sizes == [request.SHOWN_ROWS]
    assert f"and {1_234 - request.SHOWN_ROWS:,} more" in shown
