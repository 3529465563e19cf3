"""feedmill/api/request.py: calls of `feedmill.classify` without a model."""

from collections.abc import Callable, Generator, Iterable
from typing import Any

import numpy
import pandas
import polars
import pyarrow
import pytest

from feedmill.api.items import columns_of
from feedmill.api.predictions import Prediction
from feedmill.api.request import Request, read_options
from feedmill.shared.errors import UserError
from feedmill.shared.messages import ClassifyOptions, Outcome, Post
from tests.support import make_classification, naming

LABELS = ["praise", "complaint"]
TEXTS = ["I love it", "It broke after a day"]


def by_words(posts: Iterable[Post], options: ClassifyOptions) -> Generator[tuple[Post, Outcome]]:
    """Classify as a complaint what broke."""
    for post in posts:
        scores = dict.fromkeys(options.labels or LABELS, 0.25) | {
            "complaint" if "broke" in post.text else "praise": 0.75
        }
        best = sorted(scores, key=lambda label: -scores[label])
        yield post, make_classification(post.id, label=best[0], scores={label: scores[label] for label in best})


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
    return Request(items, read_options(labels, None, multi_label), columns_of(title, body, id), **others).run(
        by_words, ()
    )


def test_attributes_of_a_frame_stay() -> None:
    frame = pandas.DataFrame({"text": TEXTS})
    frame.attrs["source"] = "a survey"
    assert classify(frame).attrs == {"source": "a survey"}


@pytest.mark.parametrize(
    "make", [pandas.Series, polars.Series, pandas.Index, pandas.Categorical, numpy.array, pyarrow.array]
)
def test_labels_may_be_a_column(make: Callable[[list[str]], Any]) -> None:
    assert classify(TEXTS, labels=make(LABELS)).labels == tuple(LABELS)


@pytest.mark.filterwarnings("ignore:.* have no label")
def test_some_text_among_other_items_is_enough() -> None:
    found = classify([None, 5, b"x", "", TEXTS[1]])
    assert [each.label for each in found] == [None, "praise", None, None, "complaint"]
    assert [each.error for each in classify([{"foo": "x"}, {"text": "x"}], body="txt")] == ["no key 'txt'"] * 2


@pytest.mark.parametrize(
    ("items", "arguments", "words"),
    [
        (pandas.DataFrame({"Customer Comment ": TEXTS, "n": TEXTS}), {"body": "Customer Coment"},
         ["Did you mean Customer Comment ?"]),
        (pandas.DataFrame(), {}, ["no column", "body="]),
        (polars.Series([1, 2]), {}, ["has the type Int64"]),
        (pyarrow.table({"text": [1]}), {}, ["'text'", "Int64"]),
        (5, {}, ["of type int"]),
        (TEXTS, {"labels": pandas.DataFrame({"name": LABELS})}, ["labels must be a list", "pandas.DataFrame"]),
        (TEXTS, {"labels": ["a", " "]}, ["labels: a label is empty"]),
        (TEXTS, {"labels": {"": "a", "b": "b"}}, ["labels: a label is empty"]),
    ],
)  # fmt: skip
def test_invalid_arguments_are_explained(items: Any, arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError, match=naming(*words)):
        classify(items, **arguments)


@pytest.mark.filterwarnings("ignore:.* have no label")
def test_arrow_table_keeps_its_columns() -> None:
    table = pyarrow.table({"n": [1, 2, 3], "text": pyarrow.array([*TEXTS, None]).dictionary_encode()})
    found = classify(table, scores=True)
    assert isinstance(found, pyarrow.Table)
    assert found.to_pydict() == {
        "n": [1, 2, 3],
        "text": [*TEXTS, None],
        "label": ["praise", "complaint", None],
        "label_score": [0.75, 0.75, None],
        "score_praise": [0.75, 0.25, None],
        "score_complaint": [0.25, 0.75, None],
    }


def test_ids_of_a_column_with_missing_values_are_whole() -> None:
    found = classify(pandas.DataFrame({"id": [1, None, 2.5], "text": "x"}).to_dict("records"))
    assert [each.id for each in found] == ["1", None, "2.5"]


def test_long_texts_are_cut() -> None:
    found = classify([{"title": "broke " * 1000, "text": "parcel " * 20_000}, "x"])
    assert [each.label for each in found] == ["complaint", "praise"]
    assert len(found[0].text) == 4_000 + len("\n\n") + 100_000


def test_predictions_keep_the_order_of_the_labels() -> None:
    found = classify(TEXTS[::-1])
    assert list(found[0].scores) == ["complaint", "praise"]
    for part in (found, found[1:]):
        assert part.labels == tuple(LABELS)
        assert list(part.to_frame(scores=True).columns)[-2:] == ["score_praise", "score_complaint"]


def test_predictions_become_dictionaries() -> None:
    found = classify([{"id": "a", "text": "<b>It broke</b>"}])
    assert found.to_dicts() == [
        {"id": "a", "text": "<b>It broke</b>", "label": "complaint", "score": 0.75,
         "scores": {"complaint": 0.75, "praise": 0.25}, "error": None}
    ]  # fmt: skip


def test_labels_above_a_threshold() -> None:
    found = Prediction("a", 0.9, {"a": 0.9, "b": 0.5, "c": -0.1})
    assert found.labels_above(0.5) == ["a", "b"]
    assert found.labels_above(0.95) == []
