"""The contract of every sink of an export (feedmill/exporting/sink.py): files, folders, tables."""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feedmill.exporting.columns import COLUMNS, ExportFilter
from feedmill.exporting.files import (
    FileDestination,
    FolderDestination,
    batch_of,
    parts,
    post_ids,
)
from feedmill.exporting.postgres import TableDestination
from feedmill.exporting.request import DEFAULT_TABLE
from feedmill.exporting.sink import Destination, Sink
from feedmill.outcomes.rows import Place, RowReader
from feedmill.shared.errors import UserError
from feedmill.shared.messages import Post
from feedmill.shared.purge import purge_posts
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from tests.postgres import PostgresServer, postgres_folder
from tests.support import RedisServer, make_classification

KINDS = ("csv", "jsonl", "parquet", "csv.gz", "folder-jsonl", "folder-parquet", "table")


@pytest.fixture(scope="module")
def postgres_server() -> Iterator[PostgresServer]:
    programs = postgres_folder()
    if programs is None:
        pytest.skip("needs PostgreSQL: apt install postgresql")
    server = PostgresServer(programs)
    yield server
    server.stop()


class Target(NamedTuple):
    """A destination to test. ids: reads the posts' ids that are published in it, sorted."""

    destination: Destination
    ids: Callable[[], list[str]]


def file_target(out: Path, form: str) -> Target:
    def ids() -> list[str]:
        return sorted(post_ids(out, form)) if out.exists() else []

    return Target(FileDestination(out, form), ids)


def folder_target(out: Path, form: str) -> Target:
    def ids() -> list[str]:
        return sorted(
            post_id for path, _ in parts(out) for post_id in post_ids(path, form)
        )

    return Target(FolderDestination(out, form), ids)


def table_target(database: PostgresServer) -> Target:
    def ids() -> list[str]:
        query = f"SELECT id FROM {DEFAULT_TABLE} ORDER BY id"  # noqa: S608 - a constant
        return [post_id for (post_id,) in database.rows(query)]

    return Target(TableDestination(database.url, DEFAULT_TABLE), ids)


@pytest.fixture(params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    kind: str = request.param
    if kind == "table":
        database: PostgresServer = request.getfixturevalue("postgres_server")
        database.rows("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        return table_target(database)
    if kind.startswith("folder-"):
        return folder_target(tmp_path / "out", kind.removeprefix("folder-"))
    return file_target(tmp_path / f"out.{kind}", kind.removesuffix(".gz"))


FURTHER = "id,label,best_label,labels,language"
#: Values of the columns FURTHER.
Row = tuple[Any, ...]


def rows_of_file(path: Path, form: str) -> list[Row]:
    columns = FURTHER.split(",")
    records: list[dict[str, Any]]
    if form == "parquet":
        records = pq.read_table(path).to_pylist()
    else:
        with pa.input_stream(str(path), compression="detect") as file:
            lines = file.read().decode().splitlines()
        if form == "jsonl":
            records = [json.loads(line) for line in lines]
        else:
            records = []
            for record in csv.DictReader(lines):
                label = record["label"] or None
                labels = json.loads(record["labels"])
                language = record["language"] or None
                values = {"label": label, "labels": labels, "language": language}
                records.append({**record, **values})
    assert list(records[0]) == columns
    return [tuple(record.values()) for record in records]


@pytest.fixture(params=KINDS)
def further_target(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[Target, Callable[[], list[Row]]]:
    """A destination with the columns FURTHER, and a function that reads its rows."""
    kind: str = request.param
    form = kind.removeprefix("folder-").removesuffix(".gz")
    if kind == "table":
        database: PostgresServer = request.getfixturevalue("postgres_server")
        database.rows("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        query = f"SELECT {FURTHER} FROM {DEFAULT_TABLE} ORDER BY id"  # noqa: S608 - constants
        return table_target(database), lambda: database.rows(query)
    if kind.startswith("folder-"):
        out = tmp_path / "out"
        folder = Target(FolderDestination(out, form, FURTHER), list)

        def rows_of_parts() -> list[Row]:
            rows: list[Row] = []
            for path, _ in parts(out):
                rows += rows_of_file(path, form)
            return rows

        return folder, rows_of_parts
    path = tmp_path / f"out.{kind}"
    file = Target(FileDestination(path, form, FURTHER), list)
    return file, lambda: rows_of_file(path, form)


@pytest.fixture
def reader(redis: RedisServer) -> RowReader:
    return RowReader(redis.client)


def store(redis: RedisServer, *ids: str) -> None:
    results = [
        Result(Post(id=post_id, title="x"), make_classification(post_id))
        for post_id in ids
    ]
    ResultsStore(redis.client, Settings()).write(results)


def add_rows(sink: Sink, reader: RowReader, place: Place) -> Place:
    """Add all rows after a place; return the place after them."""
    for chunk in reader.chunks(place):
        place = chunk.place
        if chunk.rows:
            sink.add(batch_of(chunk.rows, sink.schema), place)
    return place


def export(target: Target, reader: RowReader) -> Sink:
    with target.destination.opened(ExportFilter(), reader, (), ()) as sink:
        sink.close(add_rows(sink, reader, sink.place))
    return sink


def test_publishes_each_row_once(
    redis: RedisServer, target: Target, reader: RowReader
) -> None:
    store(redis, "a", "b", "c")
    sink = export(target, reader)
    assert target.ids() == ["a", "b", "c"]
    assert (sink.written, sink.removed, sink.refused, sink.resumed) == (3, 0, 0, False)


def test_continues_or_starts_over(
    redis: RedisServer, target: Target, reader: RowReader
) -> None:
    """A second run leaves each row once, whether the sink continues or starts over."""
    store(redis, "a", "b")
    export(target, reader)
    store(redis, "c")
    sink = export(target, reader)
    assert target.ids() == ["a", "b", "c"]
    assert sink.resumed == sink.can_resume
    assert sink.written == (1 if sink.can_resume else 3)


def test_an_unfinished_run_is_repaired_by_the_next(
    redis: RedisServer, target: Target, reader: RowReader
) -> None:
    store(redis, "a", "b")
    with target.destination.opened(ExportFilter(), reader, (), ()) as sink:
        add_rows(sink, reader, sink.place)
    assert target.ids() in ([], ["a", "b"])
    store(redis, "c")
    export(target, reader)
    assert target.ids() == ["a", "b", "c"]


def test_resume_returns_the_place_of_the_first_unpublished_row(
    redis: RedisServer, target: Target, reader: RowReader
) -> None:
    store(redis, "a", "b")
    with target.destination.opened(ExportFilter(), reader, (), ()) as sink:
        add_rows(sink, reader, sink.place)
        place = sink.resume()
        assert place == sink.place
        sink.close(add_rows(sink, reader, place))
    assert target.ids() == ["a", "b"]
    assert sink.written == 2


def test_leaves_out_posts_purged_after_they_were_read(
    redis: RedisServer, target: Target, reader: RowReader
) -> None:
    store(redis, "a", "b")
    with target.destination.opened(ExportFilter(), reader, (), ()) as sink:
        place = add_rows(sink, reader, sink.place)
        purge_posts(redis.client, Settings(), ["a"])
        sink.close(place)
    assert target.ids() == ["b"]


def test_removes_posts_purged_after_the_export(
    redis: RedisServer, target: Target, reader: RowReader
) -> None:
    store(redis, "a", "b")
    export(target, reader)
    purge_posts(redis.client, Settings(), ["a"])
    assert target.destination.purge(reader) == 1
    assert target.ids() == ["b"]
    assert target.destination.purge(reader) == 0


def test_refuses_a_second_export_at_once(
    redis: RedisServer, target: Target, reader: RowReader
) -> None:
    store(redis, "a")
    with target.destination.opened(ExportFilter(), reader, (), ()) as sink:
        second = target.destination.opened(ExportFilter(), reader, (), ())
        with pytest.raises(UserError, match="Another export is writing"), second:
            pass
        sink.close(add_rows(sink, reader, sink.place))
    assert target.ids() == ["a"]


def test_resumes_only_with_the_same_selection(
    redis: RedisServer, target: Target, reader: RowReader
) -> None:
    store(redis, "a")
    sink = export(target, reader)
    other = target.destination.opened(ExportFilter(label="food"), reader, (), ())
    if not sink.can_resume:
        with other as replaced:
            assert not replaced.resumed
        return
    with pytest.raises(UserError, match="label"), other:
        pass
    assert target.ids() == ["a"]


def test_writes_the_best_label_and_the_labels_of_each_row(
    redis: RedisServer,
    reader: RowReader,
    further_target: tuple[Target, Callable[[], list[Row]]],
) -> None:
    """Results with independent labels list all labels above the threshold."""
    scores = {"x": 0.9, "y": 0.5, "z": 0.4}
    several = make_classification("a", label="x", scores=scores, labels_threshold=0.5)
    without = make_classification(
        "b", label=None, scores={"y": 0.6, "x": 0.3}, language="pt"
    )
    one = make_classification("c", label="x", scores=scores, language="en")
    weak = make_classification("d", label="x", scores=scores, labels_threshold=0.95)
    results = [
        Result(Post(id=classification.id, title="x"), classification)
        for classification in (several, without, one, weak)
    ]
    ResultsStore(redis.client, Settings()).write(results)
    target, rows = further_target
    export(target, reader)
    assert rows() == [
        ("a", "x", "x", ["x", "y"], None),
        ("b", None, "y", [], "pt"),
        ("c", "x", "x", ["x"], "en"),
        ("d", "x", "x", [], None),
    ]


def test_a_folder_of_an_earlier_version_keeps_its_columns(
    redis: RedisServer, reader: RowReader, tmp_path: Path
) -> None:
    store = ResultsStore(redis.client, Settings())
    store.write([Result(Post(id="a", title="x"), make_classification("a", label="x"))])
    earlier = FolderDestination(tmp_path, "csv", ",".join(COLUMNS))
    with earlier.opened(ExportFilter(), reader) as sink:
        sink.close(add_rows(sink, reader, sink.place))
    later = make_classification("b", label="x", language="en", labels_threshold=0.5)
    store.write([Result(Post(id="b", title="x"), later)])
    with FolderDestination(tmp_path, "csv").opened(ExportFilter(), reader) as sink:
        assert sink.resumed
        sink.close(add_rows(sink, reader, sink.place))
    headers = set()
    for path, _ in parts(tmp_path):
        header, *_ = path.read_text().splitlines()
        headers.add(header)
    assert headers == {",".join(COLUMNS)}


def test_a_column_of_the_users_own_takes_precedence(
    redis: RedisServer, reader: RowReader, tmp_path: Path
) -> None:
    extra = {"labels": "mine", "best_label": 1, "language": "Klingon"}
    post = Post(id="a", title="x", run="r", extra=extra)
    ResultsStore(redis.client, Settings()).write(
        [Result(post, make_classification("a", label="x"))]
    )
    for columns in (None, FURTHER):
        out = tmp_path / "out.jsonl"
        target = Target(FileDestination(out, "jsonl", columns), list)
        own = ("best_label", "labels", "language")
        with target.destination.opened(ExportFilter(), reader, own, ()) as sink:
            sink.close(add_rows(sink, reader, sink.place))
        record = json.loads(out.read_text())
        assert {name: record[name] for name in own} == extra
