"""`feedmill.study` with a stand-in for the model: filters, partitions, page, card, continuing."""

import json
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from feedmill.offline.model import OfflineModel
from feedmill.producers.records import COMMENTS, POSTS, Filters
from feedmill.shared.errors import UserError
from feedmill.shared.messages import ClassifyOptions, Outcome, Post, PostError
from feedmill.shared.settings import Settings
from feedmill.studies import run
from feedmill.studies.observer import StudyObserver
from feedmill.studies.on_ray import count_actors
from feedmill.studies.request import StudyRequest
from feedmill.studies.result import StudyResult
from feedmill.studies.run import Study
from feedmill.studies.state import STATE_FILE
from tests import study

BOTH = Filters(kinds=frozenset({POSTS, COMMENTS}))
NOVEMBER, DECEMBER = 1_698_800_000, 1_701_400_000


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "load_offline", study.stand_in)


def submission(number: int, created: float | None = NOVEMBER, **fields: Any) -> Any:
    return {
        "id": f"p{number}", "title": f"title {number}", "selftext": "", "subreddit": "News",
        "created_utc": created, "author": "Ann", **fields,
    }  # fmt: skip


def reply(number: int, parent: int = 0, **fields: Any) -> Any:
    return {
        "id": f"c{number}", "body": f"reply {number}", "link_id": f"t3_p{parent}",
        "parent_id": f"t3_p{parent}", "subreddit": "news", "created_utc": DECEMBER,
        "author": "Bob", **fields,
    }  # fmt: skip


def write(path: Path, *records: Any) -> str:
    lines = [
        record if isinstance(record, str) else json.dumps(record) for record in records
    ]
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def studied(
    out: Path, *dumps: str, filters: Filters = BOTH, stop: Any = (), **options: Any
) -> StudyResult:
    request = StudyRequest(dumps=dumps, out=out, filters=filters, **options)
    return Study(request, Settings()).run(stop)


def ids_of(out: Path) -> dict[str, list[str]]:
    """Return the ids of each month."""
    ids: dict[str, list[str]] = {}
    for path in sorted(out.glob("data/month=*/*.parquet")):
        month = path.parent.name.removeprefix("month=")
        ids.setdefault(month, []).extend(pq.ParquetFile(path).read()["id"].to_pylist())
    return ids


def test_writes_labelled_parquet_by_month_a_page_and_a_card(tmp_path: Path) -> None:
    posts = write(
        tmp_path / "RS_2023.jsonl",
        submission(0),
        submission(1, None),
        submission(2, selftext="[deleted]"),
        "no JSON",
    )
    replies = write(tmp_path / "RC_2023.jsonl", reply(0), reply(1, parent=9))
    out = tmp_path / "study"
    result = studied(out, posts, replies, context=True)
    assert result == StudyResult(
        rows=4,
        records=6,
        removed=1,
        failed=0,
        malformed=1,
        complete=True,
        problems={},
        out=out,
    )
    assert ids_of(out) == {
        "2023-11": ["t3_p0"],
        "2023-12": ["t1_c0", "t1_c1"],
        "unknown": ["t3_p1"],
    }
    rows = pq.read_table(out / "data").to_pylist()
    by_id = {row["id"]: row for row in rows}
    assert by_id["t1_c0"]["kind"] == "comment"
    assert (by_id["t1_c0"]["title"], by_id["t1_c1"]["title"]) == ("title 0", "")
    assert {row["label"] for row in rows} <= set(study.LABELS)
    assert "author" not in by_id["t3_p0"]
    page = (out / "report.html").read_text()
    for words in ("<b>2</b>posts", "<b>2</b>comments", "r/news", "Labels over time"):
        assert words in page
    card = (out / "README.md").read_text()
    for words in (
        "2 posts and 2 comments",
        "RS\\_2023.jsonl",
        "stand-in",
        "title of the post",
    ):
        assert words in card
    assert not list(out.glob(".*"))  # the titles are gone


@pytest.mark.parametrize(
    ("filters", "ids"),
    [
        (BOTH._replace(subreddits=frozenset({"rust"})), {"t3_p1"}),
        (BOTH._replace(authors=frozenset({"bob"})), {"t1_c0"}),
        (BOTH._replace(words=("title",)), {"t3_p0", "t3_p1"}),
        (BOTH._replace(since=NOVEMBER + 1), {"t1_c0"}),
        (Filters(), {"t3_p0", "t3_p1"}),
    ],
)
def test_filters(tmp_path: Path, filters: Filters, ids: set[str]) -> None:
    dump = write(
        tmp_path / "dump.jsonl",
        submission(0),
        submission(1, subreddit="r/Rust"),
        reply(0),
    )
    out = tmp_path / "out"
    studied(out, dump, filters=filters)
    assert set().union(*ids_of(out).values()) == ids
    state = (out / STATE_FILE).read_text()
    assert "bob" not in state + (out / "README.md").read_text()


def test_a_stopped_study_continues_where_it_was(tmp_path: Path) -> None:
    records = [submission(number, NOVEMBER + 90_000 * number) for number in range(300)]
    records.insert(100, "no JSON")
    dump = write(tmp_path / "RS.jsonl", *records)
    whole = tmp_path / "whole"
    expected = studied(whole, dump)
    out = tmp_path / "out"
    runs = 0
    while not (result := studied(out, dump, stop=Stopping(41))).complete:
        runs += 1
        assert result.rows < 300
        assert sum(map(len, ids_of(out).values())) == result.rows
        assert "Not complete" in (out / "README.md").read_text()
    assert runs >= 5
    assert result == expected._replace(out=out)
    assert study.rows_of(out) == study.rows_of(whole)


class Stopping(list[int]):
    """Signals that arrive after some checks."""

    def __init__(self, checks: int) -> None:
        self._left = checks

    def __bool__(self) -> bool:
        self._left -= 1
        return self._left < 0


def test_parts_that_the_state_does_not_know_are_written_again(tmp_path: Path) -> None:
    """A process that is killed between the parts and the state leaves such parts."""
    dump = write(tmp_path / "RS.jsonl", *map(submission, range(20)))
    out = tmp_path / "out"
    studied(out, dump)
    expected = study.rows_of(out)
    [part] = out.glob("data/month=*/*.parquet")
    state = json.loads((out / STATE_FILE).read_text())
    state["dumps"][0] |= {"records": 0, "rows": 0, "is_done": False}
    (out / STATE_FILE).write_text(json.dumps(state))
    part.rename(part.with_name("part-0000-0000000001-0000000007.parquet"))
    part.with_name(".part-0000-0000000001-0000000020.parquet.tmp").write_text("x")
    assert studied(out, dump).rows == 20
    assert study.rows_of(out) == expected
    assert [path.name for path in out.glob("data/month=*/*")] == [part.name]


def test_refuses_to_mix_studies(tmp_path: Path) -> None:
    dump = write(tmp_path / "RS.jsonl", submission(0))
    other = write(tmp_path / "RC.jsonl", reply(0))
    out = tmp_path / "out"
    studied(out, dump)
    for dumps, options, words in (
        ([dump, other], {}, "without .*RC.jsonl"),
        ([other], {}, "without .*RC.jsonl"),
        ([dump], {"filters": Filters()}, "another --kind"),
        ([dump], {"options": ClassifyOptions(multi_label=True)}, "another columns"),
    ):
        with pytest.raises(UserError, match=words):
            studied(out, *dumps, **options)
    write(tmp_path / "RS.jsonl", submission(0), submission(1))
    with pytest.raises(UserError, match="RS.jsonl has changed"):
        studied(out, dump)
    (out / STATE_FILE).write_text("{}")
    with pytest.raises(UserError, match="Cannot read .*_study.json"):
        studied(out, dump)


def test_refuses_what_it_cannot_do_before_the_work(tmp_path: Path) -> None:
    dump = write(tmp_path / "RS.jsonl", submission(0))
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious.txt").touch()
    (tmp_path / "empty").mkdir()
    for out, dumps, options, words in (
        (full, [dump], {}, "contains other files"),
        (tmp_path / "RS.jsonl", [dump], {}, "is a file"),
        (tmp_path / "out", ["-"], {}, "no file -"),
        (tmp_path / "out", [str(tmp_path / "empty")], {}, "contains no dumps"),
        (tmp_path / "out", [dump], {"on": "spark"}, "--on"),
        (tmp_path / "out", [dump], {"actors": 2}, "--actors"),
        (tmp_path / "out", [dump], {"on": "ray", "actors": 0}, "--actors 0"),
        (tmp_path / "out", [dump], {"on": "ray", "actors": -1}, "--actors -1"),
        (tmp_path / "out", [dump], {"titles": [dump]}, "--titles needs"),
        (
            tmp_path / "out",
            [dump],
            {"filters": Filters(), "context": True},
            "--context",
        ),
    ):
        with pytest.raises(UserError, match=words):
            studied(out, *dumps, **options)
    assert not (tmp_path / "out").exists()
    assert [path.name for path in full.iterdir()] == ["precious.txt"]


def test_a_damaged_dump_is_named_and_the_others_are_studied(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    study.make_dumps(folder, posts=3000, comments=50)
    path = folder / "RS_2022.zst"
    path.write_bytes(path.read_bytes()[:-40])
    out = tmp_path / "out"
    result = studied(out, str(folder), context=True)
    assert result.complete
    [(name, problem)] = result.problems.items()
    assert name.endswith("RS_2022.zst")
    assert "truncated" in problem
    assert any(row.startswith("t1_") for ids in ids_of(out).values() for row in ids)
    assert "truncated" in (out / "README.md").read_text()


def test_failed_posts_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def classify(posts: Iterable[Post]) -> Generator[tuple[Post, Outcome]]:
        for post in posts:
            yield post, PostError(id=post.id, error="not finite")

    def load(*_: Any) -> OfflineModel:
        return study.stand_in()._replace(classify=classify)

    monkeypatch.setattr(run, "load_offline", load)
    dump = write(tmp_path / "RS.jsonl", submission(0), submission(1))
    result = studied(tmp_path / "out", dump)
    assert (result.rows, result.failed, result.complete) == (0, 2, True)


def test_a_folder_is_written_by_one_process(tmp_path: Path) -> None:
    dump = write(tmp_path / "RS.jsonl", submission(0))
    out = tmp_path / "out"

    class Second(StudyObserver):
        def watching(self, _: Study) -> Any:
            with pytest.raises(UserError, match="Another study is writing"):
                studied(out, dump)
            return super().watching(_)

    Study(StudyRequest(dumps=[dump], out=out), Settings(), Second()).run()


def test_rows_of_a_killed_run_equal_those_of_another(tmp_path: Path) -> None:
    counts = study.compare(tmp_path, posts=7_000, comments=7_000, kills=2)
    assert counts["kills"] >= 1
    assert (counts["missing"], counts["twice"], counts["equal"]) == (0, 0, True)


def test_reading_stops_while_filters_leave_everything_out(tmp_path: Path) -> None:
    dump = write(tmp_path / "RS.jsonl", *map(submission, range(50)))
    nothing = Filters(words=("nowhere",))
    result = studied(tmp_path / "out", dump, filters=nothing, stop=Stopping(20))
    assert (result.complete, result.rows) == (False, 0)
    assert 0 < result.records < 50
    result = studied(tmp_path / "out", dump, filters=nothing)
    assert (result.complete, result.records) == (True, 50)


@pytest.mark.parametrize(
    "name",
    [
        "rc_cars_submissions.jsonl",
        "NoStupidComments_submissions.jsonl",
        "cars_comments_submissions.jsonl",
        "posts_and_comments.jsonl",
        "comments-and-more.jsonl",
        "RC_all.jsonl",
    ],
)
def test_titles_are_read_whatever_a_file_is_called(tmp_path: Path, name: str) -> None:
    posts = write(tmp_path / name, submission(0))
    replies = write(tmp_path / "RC_2023-11.jsonl", reply(0))
    out = tmp_path / "study"
    studied(out, posts, replies, context=True)
    titles = {
        row["id"]: row["title"] for row in pq.read_table(out / "data").to_pylist()
    }
    assert titles["t1_c0"] == "title 0"


@pytest.mark.parametrize("name", ["RC_2022-11.jsonl", "cars_comments.jsonl"])
def test_a_file_that_is_named_for_its_titles_is_read(tmp_path: Path, name: str) -> None:
    titles = write(tmp_path / name, submission(0))
    replies = write(tmp_path / "replies.jsonl", reply(0))
    out = tmp_path / "study"
    studied(out, replies, context=True, titles=[titles])
    [row] = pq.read_table(out / "data").to_pylist()
    assert row["title"] == "title 0"


@pytest.mark.parametrize("name", ["RC_2023-11.jsonl", "Cars_comments.jsonl"])
def test_dumps_of_comments_are_not_read_for_titles(tmp_path: Path, name: str) -> None:
    notes: list[str] = []

    class Notes(StudyObserver):
        def note(self, message: str) -> None:
            notes.append(message)

    dump = write(tmp_path / name, reply(0))
    out = tmp_path / "study"
    request = StudyRequest(dumps=[dump], out=out, filters=BOTH, context=True)
    Study(request, Settings(), Notes()).run()
    assert notes == []


def test_a_dump_that_is_named_twice_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    dump = write(folder / "RS.jsonl", submission(0))
    (tmp_path / "link.jsonl").symlink_to(dump)
    (tmp_path / "linked").symlink_to(folder)
    monkeypatch.chdir(folder)
    result = studied(
        tmp_path / "out",
        "../dumps",
        "RS.jsonl",
        dump,
        str(tmp_path / "link.jsonl"),
        str(tmp_path / "linked"),
    )
    assert (result.rows, result.records) == (1, 1)


@pytest.mark.parametrize(
    ("asked", "resources", "nodes", "actors"),
    [
        (None, {"CPU": 16.0, "GPU": 4.0}, 2, 4),
        (None, {"CPU": 2.0, "GPU": 4.0}, 1, 2),
        (None, {"CPU": 16.0}, 3, 3),
        (4, {"CPU": 16.0, "GPU": 4.0}, 2, 4),
        (1, {"CPU": 16.0, "GPU": 4.0}, 2, 1),
        (16, {"CPU": 16.0}, 2, 16),
        (5, {"CPU": 16.0, "GPU": 4.0}, 2, None),
        (8, {"CPU": 2.0, "GPU": 8.0}, 2, None),
        (17, {"CPU": 16.0}, 2, None),
        (None, {}, 1, None),
    ],
)
def test_actors_have_a_place_on_the_cluster(
    asked: int | None, resources: dict[str, float], nodes: int, actors: int | None
) -> None:
    """Ray would wait without end for a place for the others."""
    if actors is not None:
        assert count_actors(asked, resources, nodes) == actors
        return
    with pytest.raises(UserError, match="start more nodes"):
        count_actors(asked, resources, nodes)


class Counting(Stopping):
    """A signal that arrives after some checks, and counts those after it."""

    late_checks = 0

    def __bool__(self) -> bool:
        is_here = super().__bool__()
        self.late_checks += is_here
        return is_here


@pytest.mark.parametrize("checks", range(8, 28))
def test_a_signal_loses_no_row_that_was_classified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checks: int
) -> None:
    """Between whichever two steps it arrives."""
    outcomes: list[str] = []

    def classify(posts: Iterable[Post]) -> Generator[tuple[Post, Outcome]]:
        for post, outcome in study.classify(posts):
            outcomes.append(post.id)
            yield post, outcome

    def load(*_: Any) -> OfflineModel:
        return study.stand_in()._replace(classify=classify)

    monkeypatch.setattr(run, "load_offline", load)
    dump = write(tmp_path / "RS.jsonl", *map(submission, range(50)))
    out = tmp_path / "out"
    result = studied(out, dump, stop=Stopping(checks))
    assert not result.complete
    assert 0 < result.rows == len(outcomes)
    assert ids_of(out) == {"2023-11": outcomes}


def test_reading_titles_stops_at_once(tmp_path: Path) -> None:
    """And the next run reads the file's titles as a whole."""
    posts = write(tmp_path / "RS.jsonl", *map(submission, range(50)))
    replies = write(tmp_path / "RC_2023-11.jsonl", reply(0, parent=49))
    out = tmp_path / "out"
    stop = Counting(20)
    result = studied(out, posts, replies, context=True, stop=stop)
    assert (result.complete, result.records) == (False, 0)
    assert stop.late_checks < 10
    assert studied(out, posts, replies, context=True).complete
    rows = pq.read_table(out / "data").to_pylist()
    titles = {row["id"]: row["title"] for row in rows}
    assert titles["t1_c0"] == "title 49"


def test_titles_that_a_power_failure_damaged_are_read_again(tmp_path: Path) -> None:
    posts = write(tmp_path / "RS.jsonl", submission(0))
    replies = write(tmp_path / "RC_2023-11.jsonl", reply(0))
    out = tmp_path / "out"
    out.mkdir()
    (out / run.TITLES_FILE).write_bytes(b"\xa5" * 9000)
    assert studied(out, posts, replies, context=True).complete
    rows = pq.read_table(out / "data").to_pylist()
    titles = {row["id"]: row["title"] for row in rows}
    assert titles["t1_c0"] == "title 0"
