"""`feedmill.classify` and `feedmill.Classifier` with the embedded model."""

import json
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pandas
import polars
import pyarrow
import pytest

import feedmill as api
from feedmill import Classifier, Prediction, Predictions, UserError
from feedmill.api import classify as kept
from feedmill.producers.records import REMOVED
from feedmill.shared.errors import DeviceFull
from feedmill.shared.settings import Settings
from tests.support import FEEDMILL, _environment, naming, run

LABELS = ["praise", "complaint"]
TEXTS = ["I love it", "It broke after a day"]
EXPECTED = ["praise", "complaint"]
REASON = "no text"


@pytest.fixture(autouse=True)
def _settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Settings that all tests share, so that they share the kept model."""
    monkeypatch.setenv("FEEDMILL_TOKEN_BUDGET", "2048")
    monkeypatch.setenv(
        "FEEDMILL_CACHE_FOLDER", str(tmp_path_factory.getbasetemp() / "cache")
    )
    monkeypatch.setenv(
        "FEEDMILL_DATA_FOLDER", str(tmp_path_factory.getbasetemp() / "no-stack")
    )


@pytest.fixture(scope="module", autouse=True)
def _release() -> Iterator[None]:
    yield
    for classifier in kept._kept.values():
        classifier.close()
    kept._kept.clear()


def labels(found: Any) -> list[str | None]:
    return [each.label for each in found]


# Kinds of items.


def test_list_of_texts_returns_predictions_in_order() -> None:
    found = api.classify(TEXTS, labels=LABELS)
    assert isinstance(found, Predictions)
    assert labels(found) == EXPECTED
    assert [each.text for each in found] == TEXTS
    best = found[0]
    assert list(best.scores) == LABELS
    assert best.score == best.scores["praise"] > 0.5
    assert sum(best.scores.values()) == pytest.approx(1)
    assert (best.id, best.error) == (None, None)


@pytest.mark.parametrize(
    "item", [TEXTS[0], {"title": TEXTS[0]}, {"Text": TEXTS[0], "title": None, "id": 7}]
)
def test_single_item_returns_one_prediction(item: Any) -> None:
    found = api.classify(item, LABELS)
    assert isinstance(found, Prediction)
    assert (found.label, found.text) == ("praise", TEXTS[0])


@pytest.mark.parametrize(
    "make", [tuple, iter, numpy.array, pandas.Index, pyarrow.array, dict.fromkeys]
)
def test_other_iterables_are_lists_of_texts(make: Callable[[Any], Any]) -> None:
    items = make(TEXTS)
    assert (
        labels(api.classify(items.keys() if isinstance(items, dict) else items, LABELS))
        == EXPECTED
    )


def test_dictionaries_are_read_as_files_are() -> None:
    rows = [
        {
            "title": "It broke",
            "selftext": "after a day",
            "id": "a1",
            "score": "many",
            "author": "x",
        },
        {"headline": "It broke", "description": "after a day"},
        {"text": "It broke\n\nafter a day", "body": float("nan")},
        {"review": "It broke\n\nafter a day"},
    ]
    with pytest.warns(UserWarning, match=naming("1 of 4", "item 3", "review", "body=")):
        found = api.classify(rows, LABELS)
    assert [each.text for each in found[:3]] == ["It broke\n\nafter a day"] * 3
    assert [each.score for each in found[:3]] == pytest.approx(
        [found[0].score] * 3, abs=1e-3
    )
    assert [each.id for each in found] == ["a1", None, None, None]
    named = api.classify(rows[3:], LABELS, body="review")
    assert named[0].score == pytest.approx(found[0].score, abs=1e-3)


def test_scores_equal_those_of_the_command(tmp_path: Path) -> None:
    posts = [
        {"id": str(at), "title": text, "body": "words " * at}
        for at, text in enumerate(TEXTS * 20)
    ]
    (tmp_path / "posts.jsonl").write_text(
        "".join(json.dumps(post) + "\n" for post in posts)
    )
    command = [
        FEEDMILL,
        "classify",
        "posts.jsonl",
        "--labels",
        ",".join(LABELS),
        "--json",
        "--none",
        "off",
    ]
    said = run(command, tmp_path, _environment(tmp_path, FEEDMILL_DTYPE="float32"))
    expected = {
        found["id"]: found["scores"]
        for found in map(json.loads, said.stdout.splitlines())
    }
    with Classifier(dtype="float32") as classifier:
        found = classifier(posts, LABELS)
    assert {each.id: each.scores for each in found} == {
        post_id: pytest.approx(scores, abs=1e-5) for post_id, scores in expected.items()
    }


def test_missing_and_unusable_items_do_not_affect_others() -> None:
    items = [
        "I love it",
        None,
        float("nan"),
        pandas.NA,
        pandas.NaT,
        "  ",
        "[removed]",
        5,
        True,
        ["x"],
        numpy.array(["x", "y"]),
        b"x",
    ]
    with pytest.warns(
        UserWarning, match=naming("9 of 12 items", "item 1: no text", "item 3")
    ):
        found = api.classify(items, LABELS)
    assert [each.error for each in found] == [
        None, *[REASON] * 5, REMOVED, None, *["body: input should be a valid string"] * 3, None,
    ]  # fmt: skip
    assert found[0].label == "praise"
    assert found[7].text == "5"


def test_generator_is_read_as_needed() -> None:
    read = []

    def items() -> Iterator[str]:
        for number in range(40_000):
            read.append(number)
            yield TEXTS[number % 2]

    with Classifier() as classifier:
        stream = classifier.stream(items(), LABELS)
        assert [next(stream).label for _ in range(100)] == EXPECTED * 50
        assert len(read) < 2 * Settings().window_rows
        stream.close()  # type: ignore[attr-defined]
        assert labels(classifier(TEXTS, LABELS)) == EXPECTED


# Frames.


def test_pandas_frame_keeps_order_index_and_columns() -> None:
    frame = pandas.DataFrame(
        {
            "Title": [TEXTS[1], None, TEXTS[0]],
            "body": [float("nan"), None, ""],
            "n": [1, 2, 3],
        },
        index=["x", "x", 7],
    )
    before = frame.copy()
    with pytest.warns(UserWarning, match=naming("1 of 3 rows", "row 1: no text")):
        found = api.classify(frame, LABELS)
    assert type(found) is pandas.DataFrame
    assert list(found.index) == ["x", "x", 7]
    assert list(found.columns) == [
        "Title",
        "body",
        "n",
        "label",
        "label_score",
        "label_error",
    ]
    assert found["label"].isna().tolist() == [False, True, False]
    assert found["label"].tolist()[::2] == ["complaint", "praise"]
    assert found["label_score"].dtype == "float64"
    pandas.testing.assert_frame_equal(frame, before)
    pandas.testing.assert_frame_equal(found[frame.columns], before)


@pytest.mark.parametrize(
    "series",
    [
        pandas.Series(TEXTS, index=[3, 3]),
        pandas.Series(TEXTS, name="text", dtype="category"),
        polars.Series(TEXTS),
    ],
)
def test_series_returns_a_frame_of_its_texts(series: Any) -> None:
    found = api.classify(series, LABELS)
    assert list(found.columns) == ["text", "label", "label_score", "label_error"]
    assert list(found["label"]) == EXPECTED
    assert list(found["text"]) == TEXTS
    if isinstance(series, pandas.Series):
        assert list(found.index) == list(series.index)


# Batches of clusters, as Ray Data's `map_batches` passes them to a Classifier.


def arrays(columns: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: numpy.array(values, dtype=object) for name, values in columns.items()}


@pytest.mark.parametrize(
    "make", [arrays, pandas.DataFrame, polars.DataFrame, pyarrow.table]
)
def test_batch_keeps_its_kind_and_warns_once(make: Callable[[Any], Any]) -> None:
    batch = make(
        {"title": [TEXTS[1], None, "x" * 200_000, "[removed]"], "n": [1, 2, 3, 4]}
    )
    with Classifier(device="cpu", labels=LABELS) as classifier:
        with pytest.warns(UserWarning, match=naming("2 of 4 rows", "row 1: no text")):
            classifier(batch)
        found = classifier(batch, scores=True)  # another warning would be an error
    assert type(found) is type(batch)
    frame = (
        pandas.DataFrame(found)
        if isinstance(found, dict | pandas.DataFrame)
        else found.to_pandas()
    )
    scores = ["score_praise", "score_complaint"]
    assert list(frame.columns) == [
        "title",
        "n",
        "label",
        "label_score",
        *scores,
        "label_error",
    ]
    assert frame["n"].tolist() == [1, 2, 3, 4]
    assert (
        frame["label"].isna().tolist()
        == frame["label_score"].isna().tolist()
        == [False, True, False, True]
    )
    assert frame["label"][0] == "complaint"
    assert frame["label_error"].tolist() == ["", REASON, "", REMOVED]


def test_arrays_of_any_shape_pass_through() -> None:
    batch = {
        "text": numpy.array(TEXTS),
        "image": numpy.zeros((2, 3, 3)),
        "id": numpy.arange(2),
    }
    found = api.classify(batch, LABELS)
    assert found["label"].tolist() == EXPECTED
    assert (found["label_score"].dtype, found["image"].shape) == (
        numpy.float64,
        (2, 3, 3),
    )
    assert (
        api.classify(pyarrow.record_batch({"text": TEXTS}), LABELS)["label"].to_pylist()
        == EXPECTED
    )
    empty = api.classify({name: values[:0] for name, values in batch.items()}, LABELS)
    assert [len(values) for values in empty.values()] == [0] * 6
    with pytest.raises(UserError, match=naming("no column review", "body=")):
        api.classify(batch, LABELS, body="review")


def test_batch_that_does_not_fit_into_memory_is_halved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sizes = []
    with Classifier(device="cpu", labels=LABELS) as classifier:
        assert classifier._pipeline
        model = classifier._pipeline._pipelines[0].classifier
        forward = model.forward

        def with_little_memory(rows: Any) -> Any:
            if len(rows) > 2:
                raise DeviceFull("out of memory")
            sizes.append(len(rows))
            return forward(rows)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "forward", with_little_memory)
            found = classifier(arrays({"text": TEXTS * 8}))
    assert found["label"].tolist() == EXPECTED * 8
    assert sum(sizes) == 16
    assert "device out of memory" in caplog.text


@pytest.mark.parametrize(
    ("variables", "lanes"),
    [({}, 1), ({"RAY_RAYLET_PID": "1"}, len(os.sched_getaffinity(0)))],
)
def test_actor_of_ray_uses_all_its_cpus(
    tmp_path: Path, variables: dict[str, str], lanes: int
) -> None:
    """Ray sets OMP_NUM_THREADS=1 for an actor of one CPU. Elsewhere, such as in Spark, the
    variable counts.
    """
    program = (
        "import feedmill, numpy; found = feedmill.Classifier(device='cpu', labels=['praise', "
        "'complaint'])\n"
        "print(*found({'text': numpy.array(['It broke'] * 9)})['label'][:1], "
        "found._pipeline._pipelines[0]._lanes)"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    said = run([sys.executable, "-P", "-c", program], tmp_path, environment)
    assert said.stdout == f"complaint {min(lanes, 4)}\n"


# Arguments.


@pytest.mark.parametrize(
    ("items", "arguments", "words"),
    [
        (TEXTS, {"device": "gpu"}, ["device:", "'gpu'"]),
        (TEXTS, {"model": "/no/such/model"}, ["/no/such/model"]),
        ("", {}, [REASON]),
        ({"review": "x"}, {}, ["review", "body="]),
        (Path("posts.csv"), {}, ["Path", "feedmill classify"]),
    ],
)
def test_invalid_arguments_are_explained(
    items: Any, arguments: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UserError, match=naming(*words)):
        api.classify(items, **arguments)


def test_single_label_warns() -> None:
    with pytest.warns(
        UserWarning, match=naming("'praise'", "multi_label=True")
    ) as warned:
        api.classify(TEXTS, ["praise"])
    assert warned[0].filename == __file__
    found = api.classify(TEXTS, ["praise"], multi_label=True)
    assert found[0].score != found[1].score


# Reprs and frames of predictions.


def test_repr_counts_labels_and_shows_texts() -> None:
    with pytest.warns(UserWarning, match="1 of 13"):
        found = api.classify(
            [*TEXTS, None, *["It broke\n\x1b[31m" + "x" * 99] * 10], LABELS
        )
    head, *lines, last = repr(found).splitlines()
    assert head == "13 predictions: complaint 11, praise 1, no label 1"
    assert lines[0].startswith("  praise     0.")
    assert lines[0].endswith("  I love it")
    assert lines[2].endswith("(no text)")
    assert "\x1b" not in repr(found)
    assert max(map(len, lines)) < 100
    assert last == "… and 3 more"
    assert repr(found[0]).startswith("Prediction(label='praise', score=0.")
    assert repr(found[2]) == "Prediction(label=None, error='no text')"
    assert isinstance(found[:2], Predictions)


# The model.


def test_least_recently_used_model_is_released() -> None:
    api.classify(TEXTS, LABELS)
    first = weakref.ref(next(reversed(kept._kept.values())))
    for dtype in ("float32", "bfloat16"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FEEDMILL_DTYPE", dtype)
            assert labels(api.classify(TEXTS, LABELS)) == EXPECTED
    assert len(kept._kept) == kept.MAX_KEPT_MODELS
    assert first() is None
    assert labels(api.classify(TEXTS, LABELS)) == EXPECTED


def test_closed_classifier_is_refused() -> None:
    with Classifier(device="cpu", labels=LABELS) as classifier:
        assert classifier.labels == tuple(LABELS)
        assert labels(classifier(TEXTS)) == labels(classifier.stream(TEXTS)) == EXPECTED
        stream = classifier.stream(iter(TEXTS * 2), LABELS)
        assert next(stream).label == "praise"
        assert (classifier.device, len(classifier.labels)) == ("cpu", 2)
        assert "MiniLM" in repr(classifier)
        classifier.close()
        # a running call ends first
        assert [each.label for each in stream] == ["complaint", *EXPECTED]
    with pytest.raises(UserError, match="closed"):
        classifier(TEXTS)
    assert classifier._pipeline is None


def test_error_of_the_items_is_raised() -> None:
    def items() -> Iterator[str]:
        yield TEXTS[0]
        raise OSError("the file ended")

    with pytest.raises(OSError, match="the file ended"):
        api.classify(items(), LABELS)
    assert labels(api.classify(TEXTS, LABELS)) == EXPECTED


def test_progress_bar_is_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    api.classify(TEXTS, LABELS, progress=True)
    printed = capsys.readouterr()
    assert "2/2" in printed.err
    assert not printed.out
    api.classify(TEXTS, LABELS)
    assert not capsys.readouterr().err


def test_interrupt_ends_the_call_and_the_process(tmp_path: Path) -> None:
    program = """
import itertools, os, signal, sys, feedmill
def items():
    for number in itertools.count():
        if number == 3000:
            os.kill(os.getpid(), signal.SIGINT)
        yield f"It broke {number} times"
try:
    feedmill.classify(items(), labels=["praise", "complaint"])
except KeyboardInterrupt:
    print("interrupted", feedmill.classify("I love it", labels=["praise", "complaint"]).label)
"""
    done = run([sys.executable, "-P", "-c", program], tmp_path, os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "interrupted praise\n",
        "",
    )


# The package.


def test_dir_shows_the_public_names() -> None:
    assert dir(api) == sorted(api.__all__)
    assert [name for name in dir(api) if name != "__version__"] == [
        "AsyncClient", "Classification", "Classifier", "ClassifyOptions", "ClassifyTask",
        "Client", "DeadLetterEntry", "DeadLetters", "ExportCounts", "Forgotten", "MessageFailed",
        "Missed", "Post", "PostError", "PostRefused", "Prediction", "Predictions", "Purged",
        "RequestRefused", "Result", "ServerError", "StudyResult", "SubmittedRun", "UserError",
        "classify", "classify_task", "dead_letters", "evaluate", "export", "forget",
        "parse_outcomes", "purge", "results", "study", "submit", "train", "tune",
    ]  # fmt: skip
    for name in dir(api):
        assert getattr(api, name) is not None
