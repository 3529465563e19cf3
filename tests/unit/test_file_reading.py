"""FileReading of producers/files.py: counting records and reading a file in batches."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from feedmill.producers import files
from feedmill.producers.files import REASONS_SHOWN, FileReading
from feedmill.producers.records import Columns, Filters
from feedmill.shared.errors import InputError


def reading(path: Path, filters: Filters | None = None, start: int = 0) -> tuple[FileReading, io.StringIO]:
    shown = io.StringIO()
    return FileReading(str(path), Console(file=shown, width=400), filters=filters or Filters(), start=start), shown


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Ten records: six posts, the first with an invalid score; one of another subreddit; three without a post."""
    path = tmp_path / "posts.jsonl"
    good = [{"id": str(number), "title": "x", "subreddit": "a"} for number in range(6)]
    others: list[object] = ["nope", {"id": "c", "body": "x", "link_id": "t3_1"}, good[0] | {"subreddit": "b"}]
    others.append(good[0] | {"title": "[deleted]"})
    records: list[object] = [good[0] | {"score": "many"}, *others[:2], *good[1:4], *others[2:], *good[4:]]
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return path


def test_counts_records_by_outcome(mixed: Path) -> None:
    read, shown = reading(mixed, Filters(frozenset({"a"})))
    assert [post.id for post in read.posts()] == list("012345")
    read.end()
    assert (read.records, read.skipped, read.left_out, read.removed) == (10, 1, 2, 1)
    assert read.complete
    first, second = shown.getvalue().splitlines()
    assert "(kept" in first
    assert "(skipped" in second


def test_deleted_texts_are_counted_apart(tmp_path: Path) -> None:
    path = tmp_path / "posts.jsonl"
    path.write_text('{"id": 1, "text": "[deleted]"}\n{"id": 2, "text": " "}\n')
    read, _ = reading(path)
    assert list(read.posts()) == []
    assert (read.without_text, read.removed_texts) == (2, 1)


def test_long_texts_are_cut_and_noted_once(tmp_path: Path) -> None:
    path = tmp_path / "posts.jsonl"
    path.write_text("".join(json.dumps({"id": number, "body": "word " * 30_000}) + "\n" for number in (1, 2)))
    read, shown = reading(path)
    assert [len(post.body) for post in read.posts()] == [100_000] * 2
    read.end()
    line = "body: only the first 100,000 characters are used"
    assert shown.getvalue() == f"{path}:1: {line} (kept)\n… and 1 more: {line}\n"
    assert read.skipped == 0


@pytest.mark.parametrize("posts", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("records", [1, 2, 5, 100])
def test_resumes_after_each_batch(mixed: Path, monkeypatch: pytest.MonkeyPatch, posts: int, records: int) -> None:
    monkeypatch.setattr(files, "TRIP_RECORDS", records)
    read, _ = reading(mixed)
    done: list[str] = []
    for trip in read.trips(posts):
        assert len(trip) <= posts
        done += [post.id for post in trip]
        others, _ = reading(mixed, start=read.records)
        assert done + [post.id for post in others.posts()] == ["0", "1", "2", "3", "0", "4", "5"]
        assert others.records == 10
    assert read.complete


def test_batch_ends_without_matching_posts(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "TRIP_RECORDS", 4)
    read, _ = reading(mixed, Filters(frozenset({"c"})))
    assert [(trip, read.records) for trip in read.trips(100)] == [([], 4), ([], 8), ([], 10)]


def test_truncated_file_is_incomplete(tmp_path: Path) -> None:
    path = tmp_path / "posts.gz"
    path.write_bytes(b"\x1f\x8b\x08")
    read, _ = reading(path)
    assert list(read.trips(10)) == [[]]
    assert not read.complete
    with pytest.raises(InputError, match=r"posts\.gz"):
        read.end()


def test_shows_the_first_record_of_each_reason(tmp_path: Path) -> None:
    path = tmp_path / "comments.jsonl"
    path.write_text('{"id": 0}\n' + "".join(f"[{number}]\n" for number in range(499)) + '{"id": 1}\n' * 500)
    read, shown = reading(path)
    assert list(read.posts()) == []
    read.end()
    assert read.skipped == 1000
    *lines, known, others = shown.getvalue().splitlines()
    assert len(lines) == REASONS_SHOWN
    assert re.search(r"\b500 more: .*title", known)
    assert re.search(r"\b479 more", others)


def test_sums_invalid_values_by_column(tmp_path: Path) -> None:
    """A column that only shares its name with one of Reddit's must not print a line per row."""
    path = tmp_path / "reviews.csv"
    path.write_text("id,Text,Ups,Date\n" + "".join(f"{row},good,4.5 stars,yesterday\n" for row in range(700)))
    read, shown = reading(path)
    assert len(list(read.posts())) == 700
    read.end()
    ups, date, *sums = shown.getvalue().splitlines()
    assert re.search(rf"{path}:2: score: .*column ups", ups)
    assert re.search(rf"{path}:2: created_utc: .*yesterday.*--date-format.*column date", date)
    assert sums == ["… and 699 more: column ups", "… and 699 more: column date"]
    assert read.skipped == 0


def test_notes_missing_id_columns_once(tmp_path: Path) -> None:
    """The note appears only if the command shows ids and the user chose no id column."""
    path = tmp_path / "posts.csv"
    path.write_text("ticket,channel,text\nT1,mail,x\nT2,web,y\n")
    for id_column, shows_ids, noted in [(None, True, True), (None, False, False), ("ticket", True, False)]:
        shown = io.StringIO()
        read = FileReading(
            str(path), Console(file=shown, width=200), columns=Columns.of(id_column), shows_ids=shows_ids
        )
        assert len(list(read.posts())) == 2
        assert shown.getvalue().count("\n") == noted
        assert not noted or re.search(rf"{path}.*--id-column", shown.getvalue())
