"""Training and test data: labels, duplicate texts, splits, and reading exports and files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from feedmill.cli.options import FileFlags
from feedmill.exporting.columns import COLUMNS
from feedmill.exporting.files import batch_of, schema_of
from feedmill.outcomes.rows import ResultRow
from feedmill.producers.records import Labelled
from feedmill.shared.errors import InputError
from feedmill.shared.messages import Post
from feedmill.shared.settings import Settings
from feedmill.tables.writing import writer_to
from feedmill.training.data import Collected, Dataset, collect, make_dataset, split
from feedmill.training.options import TrainOptions
from tests.support import naming

NOTES = Console(quiet=True)
UNREACHABLE = Settings.model_validate({"redis_url": "redis://127.0.0.1:1/0"})


def options_of(**options: Any) -> TrainOptions:
    given: dict[str, Any] = {
        "source": "x",
        "out": "y",
        "min_posts": 1,
        "split": "none",
    } | options
    return TrainOptions(**given)


def example(number: int, label: str = "a", text: str = "", **fields: Any) -> Labelled:
    return Labelled(
        Post(id=f"p{number}", title=text or f"text {number}", **fields), label
    )


def many(count: int) -> list[Labelled]:
    subreddits = [f"s{number % 7}" for number in range(count)]
    return [
        example(
            number,
            "ab"[number % 2],
            subreddit=subreddits[number],
            created_utc=float(count - number),
        )
        for number in range(count)
    ]


def ids(examples: list[Labelled]) -> set[str]:
    return {each.post.id for each in examples}


def test_drops_duplicate_texts() -> None:
    found = make_dataset(
        [example(1), example(2, "b"), example(3, "b", "TEXT  1")], options_of()
    )
    assert [each.post.id for each in found.train] == ["p1", "p2"]
    assert found.left_out == {"repeated text": 1}
    assert (found.labels, found.counts) == (("a", "b"), {"a": 1, "b": 1})


def test_random_split_is_stable_as_posts_are_added() -> None:
    train, test = split(many(1000), "random", 0.3, seed=7)
    assert 250 < len(test) < 350
    assert not ids(train) & ids(test)
    more_train, more_test = split(many(2000), "random", 0.3, seed=7)
    assert ids(train) < ids(more_train)
    assert ids(test) < ids(more_test)
    assert ids(split(many(1000), "random", 0.3, seed=8)[1]) != ids(test)


def test_splits_by_time_or_subreddit() -> None:
    train, test = split(many(100), "time", 0.25, seed=7)
    assert len(test) == 25
    assert max(each.post.created_utc or 0 for each in train) < min(
        each.post.created_utc or 0 for each in test
    )
    train, test = split(many(700), "subreddit", 0.5, seed=7)
    sides = [{each.post.subreddit for each in side} for side in (train, test)]
    assert all(sides)
    assert not sides[0] & sides[1]


@pytest.mark.parametrize(
    ("examples", "options", "named"),
    [
        ([], {}, "train"),
        ([example(1), example(2)], {}, "'a'"),
        (
            [example(1), example(2), example(3, "b")],
            {"min_posts": 2},
            naming("b (1)", 2),
        ),
        (
            [example(1), example(2, "b")],
            {"split": "random", "test_share": 1e-9},
            "test",
        ),
        ([example(1), example(2, "b")], {"split": "time"}, naming(2, "created_utc")),
        ([example(1), example(2, "b")], {"split": "subreddit"}, naming(2, "subreddit")),
    ],
)
def test_rejects_unsuitable_training_data(
    examples: list[Labelled], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        make_dataset(examples, options_of(**options))


# Reading.


def rows() -> list[ResultRow]:
    def row(number: int, label: str, score: float, **post: Any) -> ResultRow:
        scores = {label: score, "other": 1 - score}
        found: dict[str, Any] = {
            "label": label,
            "scores": scores,
            "model": "m",
            "revision": None,
            "weights": "w",
        }
        found |= {
            "fingerprint": f"f{number}",
            "classified_at": 1.0,
            "queued_seconds": None,
        }
        return ResultRow(
            f"{number}-0",
            found,
            {"id": f"p{number}", "title": f"=text {number}"} | post,
        )

    return [
        row(1, "food", 0.9, topic="Food"),
        row(2, "sports", 0.4),
        row(3, "sports", 0.8, subreddit="nba"),
    ]


def export(folder: Path, how: str, exported: Sequence[ResultRow] | None = None) -> Path:
    path = file = folder / f"export.{how}"
    if how == "folder":
        path = folder / "export"
        (path / "day=2026-11-21").mkdir(parents=True)
        file = path / "day=2026-11-21" / "part-1-0_3-0.jsonl"
    schema = schema_of(COLUMNS, how == "parquet")
    with file.open("wb") as opened:
        writer = writer_to(opened, file.suffix[1:], schema)
        writer.write(batch_of(exported or rows(), schema))
        writer.close()
    return path


def collected(path: Path, **options: Any) -> Collected:
    return collect(
        options_of(source=str(path), **options), FileFlags(), UNREACHABLE, NOTES
    )


@pytest.mark.parametrize("how", ["csv", "jsonl", "parquet", "folder"])
def test_reads_labels_of_an_export(tmp_path: Path, how: str) -> None:
    found = collected(export(tmp_path, how), targets="zero-shot")
    assert [(each.post.id, each.post.title, each.label) for each in found.examples] == [
        ("p1", "=text 1", "food"),
        ("p3", "=text 3", "sports"),
    ]
    counts = {"read": 3, "unlabelled": 1, "purged": None, "labelled_by": {"m": 3 - 1}}
    assert found.counts == counts | {"source": str(tmp_path / path_of(how))}
    soft = collected(tmp_path / path_of(how), targets="soft", min_score=0.0)
    assert [each.scores for each in soft.examples] == [
        row.found["scores"] for row in rows()
    ]
    topics = collected(tmp_path / path_of(how))
    assert [(each.post.id, each.label) for each in topics.examples] == [("p1", "Food")]


@pytest.mark.parametrize("how", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("targets", ["zero-shot", "soft"])
def test_leaves_out_exported_posts_that_fit_no_label(
    tmp_path: Path, how: str, targets: str
) -> None:
    exported = rows()
    exported[0].found["label"] = None
    path = export(tmp_path, how, exported)
    collection = collected(path, targets=targets, min_score=0.0)
    ids = [example.post.id for example in collection.examples]
    assert ids == ["p2", "p3"]


def path_of(how: str) -> str:
    return "export" if how == "folder" else f"export.{how}"


def test_reads_a_file_of_posts(tmp_path: Path) -> None:
    path = tmp_path / "posts.jsonl"
    path.write_text(
        "".join(
            json.dumps({"id": n, "title": f"t{n}", "topic": "ab"[n % 2]}) + "\n"
            for n in range(4)
        )
    )
    assert [each.label for each in collected(path).examples] == ["a", "b", "a", "b"]
    assert collected(path, limit=2).counts["read"] == 2


def test_class_weights_leave_out_labels_without_examples() -> None:
    """Soft targets have all labels; one that is never the best would otherwise outweigh all
    others.
    """
    scores = {"a": 0.5, "b": 0.3, "never": 0.2}
    train = [
        example(number, label)._replace(scores=scores)
        for number, label in enumerate("aaab")
    ]
    dataset = Dataset(("a", "b", "never"), train, [], {})
    (row,) = dataset.targets(train[:1], options_of(targets="soft", class_weights=True))
    assert row == pytest.approx([0.5 * 4 / 2 / 3, 0.3 * 4 / 2 / 1, 0.0])


@pytest.mark.parametrize("name", ["posts.jsonl", "posts.json", "posts.parquet"])
def test_labels_may_be_booleans(tmp_path: Path, name: str) -> None:
    """JSON and Parquet have true and false; in every format they are the labels "true" and
    "false".
    """
    rows = [
        {"id": str(number), "text": f"text {number}", "label": number % 2 == 0}
        for number in range(4)
    ]
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif name.endswith("jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows))
    options = options_of(source=str(path), head=True)
    examples = collect(options, FileFlags(), UNREACHABLE, NOTES).examples
    assert [example.label for example in examples] == ["true", "false"] * 2
