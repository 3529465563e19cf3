"""feedmill/api/request.py: calls of `feedmill.classify` without a model."""

from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import numpy
import pandas
import polars
import pyarrow
import pytest

import feedmill
from feedmill.api.arguments import naming_arguments
from feedmill.api.items import MAX_CHECKED_ITEMS, columns_of
from feedmill.api.predictions import Prediction, Predictions
from feedmill.api.request import Request, read_options
from feedmill.api.submission import SubmittedRun
from feedmill.shared.errors import SettingsError, UserError
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


@pytest.mark.parametrize("argument", ["multi_label", "scores", "progress"])
@pytest.mark.parametrize("given", ["no", 1, None])
def test_switches_must_be_bools(argument: str, given: Any) -> None:
    with pytest.raises(UserError, match=naming(f"{argument}= must be True or False", repr(given))):
        classify(pandas.Series(TEXTS), **{argument: given})


def test_switches_of_results_must_be_bools() -> None:
    with pytest.raises(UserError, match="scores= must be True or False, not 'no'"):
        classify(TEXTS).to_frame(scores="no")
    # Without a queue: arguments are checked before anything is read.
    with pytest.raises(UserError, match="scores= must be True or False, not 'no'"):
        object.__new__(SubmittedRun).to_frame(scores="no")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="progress= must be True or False, not 1"):
        object.__new__(SubmittedRun).wait(progress=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make", [pandas.Series, polars.Series, pandas.Index, pandas.Categorical, numpy.array, pyarrow.array]
)
def test_labels_may_be_a_column(make: Callable[[list[str]], Any]) -> None:
    assert classify(TEXTS, labels=make(LABELS)).labels == tuple(LABELS)


@pytest.mark.parametrize("make", [lambda: TEXTS, lambda: TEXTS[0], lambda: iter(TEXTS)])
@pytest.mark.parametrize(
    ("argument", "given"), [("scores", True), ("prefix", "x_"), ("body", "text"), ("title", "text"), ("id", "key")]
)
def test_arguments_without_effect_on_texts_are_refused(make: Callable[[], Any], argument: str, given: Any) -> None:
    with pytest.raises(UserError, match=f"{argument}="):
        classify(make(), **{argument: given})


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: [1, 2.5], "int"),
        (lambda: iter([None, 1]), "int"),
        (lambda: range(MAX_CHECKED_ITEMS + 1), "int"),
        (lambda: [["a"]], "list"),
        (lambda: [b"a"], "bytes"),
        (lambda: [{"text": 5}], "int"),
        (lambda: pandas.DataFrame([["a", "b"]]).to_numpy(), "numpy.ndarray"),
        (lambda: pandas.DataFrame({"text": ["a"]}).groupby("text"), "tuple"),
        (lambda: pandas.DataFrame({"text": [b"a", None]}), "bytes"),
        (lambda: pandas.Series([1, 2.5], dtype=object), "int"),
    ],
)
def test_items_without_any_text_are_refused(make: Callable[[], Any], kind: str) -> None:
    with pytest.raises(UserError, match=naming("is text", f"type {kind}")):
        classify(make())


def test_wrong_types_are_refused_before_the_model_is_loaded() -> None:
    with pytest.raises(UserError, match="type int"):
        Request([1, 2], ClassifyOptions(), columns_of(None, None, None))


@pytest.mark.filterwarnings("ignore:.* have no label")
def test_some_text_among_other_items_is_enough() -> None:
    found = classify([None, 5, b"x", "", TEXTS[1]])
    assert [each.label for each in found] == [None, "praise", None, None, "complaint"]
    assert [each.label for each in classify([None, float("nan")])] == [None, None]


@pytest.mark.parametrize(
    ("items", "arguments", "words"),
    [
        (pandas.DataFrame({"text": TEXTS}), {"body": ["text"]}, ["body=", "list", "title="]),
        (polars.DataFrame({"text": TEXTS}), {"body": polars.col("text")}, ["body=", "polars.Expr"]),
        ([{"text": TEXTS[0]}], {"title": ["text"]}, ["title=", "list"]),
        (pandas.DataFrame({"Customer Comment ": TEXTS, "n": TEXTS}), {"body": "Customer Coment"},
         ["Did you mean Customer Comment ?"]),
        (pandas.DataFrame(), {}, ["no column", "body="]),
        (polars.Series([1, 2]), {}, ["has the type Int64"]),
        (pyarrow.table({"text": [1]}), {}, ["'text'", "Int64"]),
        (5, {}, ["of type int"]),
        ([{"foo": "x"}, None], {}, ["item 0", "foo", "body="]),
        ([{"text": "x"}], {"body": "txt"}, ["item 0", "no key 'txt'"]),
        (pandas.DataFrame({"title": TEXTS, "n": [1, 2]}).iloc[0], {}, ["row", "to_dict()"]),
        (TEXTS, {"labels": pandas.DataFrame({"name": LABELS})}, ["labels must be a list", "pandas.DataFrame"]),
        (TEXTS, {"labels": polars.DataFrame({"name": LABELS})}, ["labels must be a list", "polars.DataFrame"]),
        (TEXTS, {"labels": pyarrow.table({"name": LABELS})}, ["labels must be a list", "pyarrow.Table"]),
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


def test_predictions_become_dictionaries_and_html() -> None:
    found = classify([{"id": "a", "text": "<b>It broke</b>"}])
    assert found.to_dicts() == [
        {"id": "a", "text": "<b>It broke</b>", "label": "complaint", "score": 0.75,
         "scores": {"complaint": 0.75, "praise": 0.25}, "error": None}
    ]  # fmt: skip
    page = found._repr_html_()
    assert "<td>complaint</td><td>0.75</td><td>&lt;b&gt;It broke&lt;/b&gt;</td>" in page
    assert "… and 1 more" in Predictions(list(found) * 11)._repr_html_()


def test_labels_above_a_threshold() -> None:
    found = Prediction("a", 0.9, {"a": 0.9, "b": 0.5, "c": -0.1})
    assert found.labels_above(0.5) == ["a", "b"]
    assert found.labels_above(0.95) == []
    with pytest.raises(UserError, match="threshold"):
        found.labels_above("x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "given", "named"),
    [
        ("FEEDMILL_DEVICE: cuda is not available.", {"device": "cuda"}, "device: cuda is not available."),
        ("Set FEEDMILL_DEVICE=cpu or FEEDMILL_MODEL.", {"device": "cuda"}, "Set device=cpu or FEEDMILL_MODEL."),
        ("Set FEEDMILL_MODEL to its folder.", {"model": "x"}, "Set model= to its folder."),
        ("Set FEEDMILL_MODEL to its folder.", {"model": None}, "Set FEEDMILL_MODEL to its folder."),
        ("Set FEEDMILL_MODEL_X, FEEDMILL_MODEL.", {"model": "x"}, "Set FEEDMILL_MODEL_X, model=."),
    ],
)
def test_errors_name_the_argument_that_was_given(text: str, given: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError) as raised, naming_arguments(**given):
        raise SettingsError(text)
    assert str(raised.value) == named


def test_errors_about_a_model_name_the_argument(tmp_path: Path) -> None:
    (tmp_path / "model").touch()
    with pytest.raises(UserError, match=r"Set model= to a folder"):
        feedmill.classify(TEXTS, LABELS, model=tmp_path / "model")
    with pytest.raises(UserError, match=r"Set model= to a folder"):
        feedmill.Classifier(tmp_path / "model")


def test_errors_about_redis_name_the_argument() -> None:
    with pytest.raises(UserError, match=r"or set redis_url=\."):
        feedmill.submit(TEXTS, LABELS, redis_url="redis://127.0.0.1:1/0")
    with pytest.raises(UserError, match=r"or set redis_url=\."):
        next(feedmill.results("redis://127.0.0.1:1/0"))
