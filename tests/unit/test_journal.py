"""Outcomes that an interrupted labelling leaves for the next one."""

import os
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest

from feedmill.cli.offline import OutFlags, label_file
from feedmill.cli.options import FileFlags
from feedmill.offline.journal import Journal, journal_for
from feedmill.shared.errors import UserError
from feedmill.shared.messages import Outcome, Post, PostError, fingerprint
from feedmill.tables import Classify
from tests.support import as_jsonl, make_classification

RECIPE = "model and labels"


class Model:
    """A stand-in that counts the posts it classifies."""

    def __init__(self, recipe: str = RECIPE) -> None:
        self.recipe = recipe
        self.ids: list[str] = []

    def __call__(self, posts: Iterable[Post]) -> Generator[tuple[Post, Outcome]]:
        for post in posts:
            self.ids.append(post.id)
            if "poison" in post.text:
                yield post, PostError(id=post.id, error="not finite")
                continue
            score = len(post.text) / 7
            found = make_classification(
                post.id, label="a", scores={"a": score, "b": 0.1}
            )
            digest = fingerprint(post, self.recipe)
            yield post, found.model_copy(update={"fingerprint": digest})


def some(count: int, text: str = "text") -> list[Post]:
    return [
        Post(id=str(number), title=f"{text} {number}" if number % 5 else "poison")
        for number in range(count)
    ]


def label(out: Path, posts: list[Post], stop: int, model: Model) -> list[Outcome]:
    """Label posts, and end as a killed process does after `stop` of them."""
    journal = Journal(out)
    outcomes = []
    classify = journal.remembering(model, model.recipe)
    labelling = classify(iter(posts))
    for (post, outcome), _ in zip(labelling, range(stop), strict=False):
        assert outcome.id == post.id
        outcomes.append(outcome)
    labelling.close()
    return outcomes


def outcomes_file(out: Path) -> Path:
    [path] = out.parent.glob(".*.outcomes")
    return path


def test_a_second_run_classifies_only_the_rest(tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    posts = some(100)
    expected = label(tmp_path / "whole.csv", posts, 100, Model())
    (tmp_path / ".whole.csv.outcomes").unlink()
    label(out, posts, 40, Model())
    rest = Model()
    assert label(out, posts, 100, rest) == expected
    assert rest.ids == [str(number) for number in range(41, 100)]
    assert label(out, posts, 100, none := Model()) == expected
    assert none.ids == []


@pytest.mark.parametrize("cut", [0, 1, 100, 1000, 3000])
def test_a_damaged_end_is_classified_again(tmp_path: Path, cut: int) -> None:
    out = tmp_path / "out.parquet"
    posts = some(60)
    expected = label(out, posts, 60, Model())
    path = outcomes_file(out)
    data = path.read_bytes()
    for damaged in (
        data[: max(0, len(data) - cut)],
        data[: len(data) - cut] + b'{"x":\n',
    ):
        path.write_bytes(damaged)
        assert label(out, posts, 60, Model()) == expected


def test_changed_posts_and_models_are_classified_again(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    posts = some(30)
    label(out, posts, 30, Model())
    posts[20] = Post(id="20", title="changed")
    model = Model()
    outcomes = label(out, posts, 30, model)
    assert model.ids == [str(number) for number in range(20, 30)]
    assert outcomes[20].fingerprint == fingerprint(posts[20], RECIPE)  # type: ignore[union-attr]
    other = Model("another model")
    label(out, posts, 30, other)
    assert len(other.ids) == 30


def test_outputs_without_a_name_have_no_journal(tmp_path: Path) -> None:
    assert journal_for("-") is None
    assert journal_for("/dev/null") is None
    assert journal_for(None) is None
    journal = journal_for(str(tmp_path / "out.csv"))
    assert journal is not None
    journal.discard()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [UserError("GPU is full"), KeyboardInterrupt()])
def test_a_start_that_fails_leaves_the_outcomes_of_earlier_ones(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], error: BaseException
) -> None:
    """The model or the input fails: the next start continues."""
    posts = some(30)
    path = tmp_path / "posts.jsonl"
    path.write_text(as_jsonl(posts))
    out = tmp_path / "out.csv"
    label(out, posts, 20, Model())
    earlier = outcomes_file(out).read_bytes()

    def load() -> tuple[list[str], Classify]:
        raise error

    def start(posts: Path) -> None:
        flags = OutFlags(out=str(out))
        journal = Journal(out)
        label_file(str(posts), FileFlags(), flags, None, load, journal=journal)

    with pytest.raises(type(error)):
        start(path)
    assert outcomes_file(out).read_bytes() == earlier
    if isinstance(error, KeyboardInterrupt):
        assert "continues where an earlier one ended" in capfd.readouterr().err
    with pytest.raises(UserError):
        start(tmp_path / "not-mounted.jsonl")
    assert outcomes_file(out).read_bytes() == earlier


def test_a_start_that_labels_nothing_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "posts.jsonl"
    path.write_text(as_jsonl(some(3)))
    out = tmp_path / "out.csv"
    journal = Journal(out)

    def fail(_: Iterable[Post]) -> Generator[tuple[Post, Outcome]]:
        raise UserError("GPU is full")
        yield

    def load() -> tuple[list[str], Classify]:
        return ["a", "b"], journal.remembering(fail, RECIPE)

    flags = OutFlags(out=str(out))
    with pytest.raises(UserError, match="GPU"):
        label_file(str(path), FileFlags(), flags, None, load, journal=journal)
    assert [file.name for file in tmp_path.iterdir()] == ["posts.jsonl"]


@pytest.mark.parametrize(
    "line",
    [
        b"5",
        b"null",
        b"[]",
        b'"post"',
        b"[" * 500 + b"]" * 500,
        b'{"common":5}',
        b'{"common":null}',
        b'{"post":5}',
        b'{"error":5}',
        b"{}",
        b"\xff",
    ],
)
def test_a_line_that_is_no_outcome_is_classified_again(
    tmp_path: Path, line: bytes
) -> None:
    out = tmp_path / "out.csv"
    posts = some(30)
    expected = label(out, posts, 30, Model())
    path = outcomes_file(out)
    lines = path.read_bytes().splitlines()
    for place in (0, 1, 20):
        damaged = [*lines[:place], line, *lines[place:]]
        path.write_bytes(b"\n".join(damaged) + b"\n")
        assert label(out, posts, 30, Model()) == expected
        assert label(out, posts, 30, unused := Model()) == expected
        assert unused.ids == []


def test_outcomes_go_to_no_other_file(tmp_path: Path) -> None:
    """In a folder of everybody, another user may have made the journal's name a link."""
    precious = tmp_path / "precious.txt"
    precious.write_text("precious")
    out = tmp_path / "out.csv"
    name = tmp_path / ".out.csv.outcomes"

    def refused() -> None:
        with pytest.raises(UserError, match=r"\.out\.csv\.outcomes must be a file"):
            label(out, some(3), 3, Model())

    name.symlink_to(precious)
    refused()
    assert precious.read_text() == "precious"
    name.unlink()
    name.symlink_to(tmp_path / "new.txt")
    refused()
    assert not (tmp_path / "new.txt").exists()
    name.unlink()
    os.mkfifo(name)
    refused()
    name.unlink()
    name.mkdir()
    refused()
