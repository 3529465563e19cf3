"""feedmill/file_reading.py: what is counted, and how far a trip is."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from feedmill import file_reading as reading_module
from feedmill.file_reading import BAD_RECORDS_SHOWN, Reading
from producers.records import Filters
from shared.errors import InputError


def reading(path: Path, filters: Filters | None = None, start: int = 0) -> tuple[Reading, io.StringIO]:
    shown = io.StringIO()
    return Reading(str(path), Console(file=shown, width=200), filters or Filters(), start), shown


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Ten records: six posts, the first with a score that is none; one of another subreddit; three without a post."""
    path = tmp_path / "posts.jsonl"
    good = [{"id": str(number), "title": "x", "subreddit": "a"} for number in range(6)]
    others: list[object] = ["nope", {"id": "c", "body": "x", "link_id": "t3_1"}, good[0] | {"subreddit": "b"}]
    others.append(good[0] | {"title": "[deleted]"})
    records: list[object] = [good[0] | {"score": "many"}, *others[:2], *good[1:4], *others[2:], *good[4:]]
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return path


def test_counts(mixed: Path) -> None:
    read, shown = reading(mixed, Filters(frozenset({"a"})))
    assert [post.id for post in read.posts()] == list("012345")
    read.end()
    assert (read.records, read.wrong, read.skipped, read.left_out, read.removed) == (10, 2, 1, 2, 1)
    assert read.complete
    first, second = shown.getvalue().splitlines()
    assert first.endswith("(kept without this field)")
    assert second.endswith("(skipped)")


@pytest.mark.parametrize("posts", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("records", [1, 2, 5, 100])
def test_after_each_trip_another_run_can_go_on(
    mixed: Path, monkeypatch: pytest.MonkeyPatch, posts: int, records: int
) -> None:
    monkeypatch.setattr(reading_module, "TRIP_RECORDS", records)
    read, _ = reading(mixed)
    done: list[str] = []
    for trip in read.trips(posts):
        assert len(trip) <= posts
        done += [post.id for post in trip]
        others, _ = reading(mixed, start=read.records)
        assert done + [post.id for post in others.posts()] == ["0", "1", "2", "3", "0", "4", "5"]
        assert others.records == 10
    assert read.complete


def test_a_trip_ends_although_nothing_is_wanted(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_module, "TRIP_RECORDS", 4)
    read, _ = reading(mixed, Filters(frozenset({"c"})))
    assert [(trip, read.records) for trip in read.trips(100)] == [([], 4), ([], 8), ([], 10)]


def test_a_file_that_breaks_off_is_not_complete(tmp_path: Path) -> None:
    path = tmp_path / "posts.gz"
    path.write_bytes(b"\x1f\x8b\x08")
    read, _ = reading(path)
    assert list(read.trips(10)) == [[]]
    assert not read.complete
    assert not read.told_all
    with pytest.raises(InputError, match="cannot be read to its end"):
        read.end()


def test_comments_do_not_flood_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "comments.jsonl"
    path.write_text('{"id": "c", "body": "x", "link_id": "t3_1"}\n' * 1000)
    read, shown = reading(path)
    assert list(read.posts()) == []
    read.end()
    assert read.skipped == 1000
    *lines, last = shown.getvalue().splitlines()
    assert len(lines) == BAD_RECORDS_SHOWN
    assert last == "… and 980 more bad records"


def test_a_file_without_ids_is_told_once(tmp_path: Path) -> None:
    """To whoever looks for posts by their ids, and to nobody else."""
    path = tmp_path / "posts.csv"
    path.write_text("ticket,channel,text\nT1,mail,x\nT2,web,y\n")
    for id_column, shows_ids, told in [
        (None, True, "no id column (id, post_id), so ids are derived from the text; set --id-column to one of: "),
        (None, False, ""),
        ("ticket", True, ""),
    ]:
        shown = io.StringIO()
        read = Reading(str(path), Console(file=shown, width=200), id_column=id_column, shows_ids=shows_ids)
        assert len(list(read.posts())) == 2
        assert shown.getvalue() == (told and f"{path}: {told}ticket, channel\n")
