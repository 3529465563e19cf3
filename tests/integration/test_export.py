"""The rows of the stream, and exports to files, on a real Redis: formats, resuming, purging."""

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from feedmill.exporting import files
from feedmill.exporting.columns import COLUMNS, ExportFilter
from feedmill.exporting.files import (
    STATE_FILE,
    batch_of,
    opened,
    parts,
    post_ids,
    purge,
    schema_of,
)
from feedmill.outcomes.rows import Chunk, Place, RowReader, id_before, seconds_of
from feedmill.producers.files import FileSource
from feedmill.shared.errors import UserError
from feedmill.shared.keys import COUNTERS, RESULTS_STREAM, TOMBSTONE
from feedmill.shared.messages import Post
from feedmill.shared.purge import purge as purge_posts
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from feedmill.tables import format_of
from tests.support import RedisServer, make_classification

DAY = 86_400
#: 2026-11-20, noon, in Unix seconds.
NOON = 1_795_176_000
FORMATS = ["parquet", "csv", "jsonl"]
#: Endings of single files.
ENDINGS = ["parquet", "csv", "jsonl.gz", "csv.zst"]
BEGINNING = Place("0-0")


@pytest.fixture
def store(server: RedisServer) -> ResultsStore:
    return ResultsStore(server.client, Settings())


@pytest.fixture
def reader(server: RedisServer) -> RowReader:
    return RowReader(server.client)


def result(post_id: str, label: str = "food", **fields: Any) -> Result:
    found = make_classification(post_id, label, scores={label: 0.9, "other": 0.1})
    return Result(Post(id=post_id, title=f"title of {post_id}", **fields), found)


def add(server: RedisServer, at: float, *post_ids: str, label: str = "food") -> None:
    """Add stream entries as if they had been written at the given time."""
    for number, post_id in enumerate(post_ids):
        post, found = result(post_id, label)
        fields = {
            "id": post_id,
            "classification": found.model_dump_json(),
            "post": post.model_dump_json(),
        }
        server.client.xadd(RESULTS_STREAM, fields, id=f"{int(at * 1000)}-{number}")  # type: ignore[arg-type]
        server.client.hincrby(COUNTERS, "stored", 1)


def ids(reader: RowReader, place: Place = BEGINNING) -> list[str]:
    return [row.post["id"] for chunk in reader.chunks(place) for row in chunk.rows]


def layout(form: str, columns: Sequence[str] = COLUMNS) -> tuple[str, Any]:
    """Return a format and the schema of the columns in it."""
    return form, schema_of(columns, form == "parquet")


def run(
    out: Path,
    reader: RowReader,
    name: str,
    selection: ExportFilter | None = None,
    in_parts: bool | None = None,
) -> Any:
    in_parts = (name == "parquet" and not out.suffix) if in_parts is None else in_parts
    with opened(
        out,
        *layout(name.partition(".")[0]),
        selection or ExportFilter(),
        reader,
        in_parts,
    ) as target:
        place = target.place
        for chunk in reader.chunks(place):
            place = chunk.place
            target.add(
                batch_of((selection or ExportFilter()).of(chunk.rows), target.schema),
                place,
            )
        target.close(place)
    return target


def exported(out: Path) -> list[str]:
    """Return the ids in an export, in order."""
    paths = [path for path, _ in parts(out)] if out.is_dir() else [out]
    return [
        post_id
        for path in paths
        for post_id in post_ids(path, str(format_of(path.name)))
    ]


@pytest.fixture
def small_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("feedmill.outcomes.rows.FETCH_BYTES", 1)


# Rows.


@pytest.mark.usefixtures("small_fetches")
def test_reads_every_row_once_in_order(store: ResultsStore, reader: RowReader) -> None:
    wanted = [str(number) for number in range(230)]
    store.write([result(post_id) for post_id in wanted])
    assert ids(reader) == wanted
    chunk = reader.fetch(BEGINNING)
    assert (len(chunk.rows), chunk.ended, chunk.missed, chunk.left) == (
        50,
        False,
        None,
        180,
    )
    assert ids(reader, chunk.place) == wanted[50:]


@pytest.mark.parametrize(
    "damaged",
    [
        {"id": "x", "classification": "{", "post": '{"id": "x"}'},
        {"id": "x", "classification": "{}, {}", "post": '{"id": "x"}'},
        {"id": "x", "classification": "{}", "post": '{"id": "x"}'},
        {"id": "x", "classification": '{"label": "a", "scores": {}}', "post": "[1]"},
        {"other": "x"},
    ],
)
def test_skips_unreadable_entries(
    server: RedisServer,
    reader: RowReader,
    caplog: pytest.LogCaptureFixture,
    damaged: dict[str, str],
) -> None:
    add(server, NOON, "a")
    server.client.xadd(RESULTS_STREAM, damaged, id=f"{NOON + 1}000-0")  # type: ignore[arg-type]
    add(server, NOON + 2, "b")
    assert ids(reader) == ["a", "b"]
    assert f"{NOON + 1}000-0" in caplog.text


def test_reads_rows_between_since_and_until(
    server: RedisServer, reader: RowReader
) -> None:
    for number in range(5):
        add(server, NOON + number, str(number))
    assert ids(reader, Place(id_before(NOON + 2))) == ["2", "3", "4"]
    assert ids(RowReader(server.client, until=NOON + 2)) == ["0", "1"]


def test_rows_carry_the_latest_known_scores(
    store: ResultsStore, reader: RowReader
) -> None:
    store.write([result("1", score=5), result("2", score=6), result("3")])
    store.refresh_scores({"1": 50, "3": -7}, at=1.0)
    assert [row.post.get("score") for row in reader.fetch(BEGINNING).rows] == [
        50,
        6,
        -7,
    ]


def test_skips_rows_of_purged_posts(
    server: RedisServer, store: ResultsStore, reader: RowReader
) -> None:
    store.write([result(str(number)) for number in range(5)])
    server.client.set(TOMBSTONE + "1", 1)  # a purge begins with a tombstone
    server.client.set(TOMBSTONE + "4", 1)
    chunk = reader.fetch(BEGINNING)
    assert [row.post["id"] for row in chunk.rows] == ["0", "2", "3"]
    assert reader.fetch(chunk.place).rows == []
    assert reader.gone(iter(["0", "1", "9", "4"])) == {"1", "4"}


def test_reports_trimmed_rows_as_missed(server: RedisServer) -> None:
    store = ResultsStore(
        server.client, Settings.model_validate({"results_stream_length": 100})
    )
    reader = RowReader(server.client)
    store.write([result(str(number)) for number in range(10)])
    place = reader.fetch(BEGINNING).place
    for start in range(10, 1000, 90):
        store.write([result(str(number)) for number in range(start, start + 90)])
    chunk = reader.fetch(place)
    assert chunk.missed
    assert chunk.missed.count == int(chunk.rows[0].post["id"]) - 10
    assert reader.fetch(chunk.place).missed is None
    # all before it is trimmed
    until = RowReader(server.client, until=seconds_of(chunk.rows[0].entry))
    assert until.fetch(place)[:4] == ([], chunk.place, chunk.ended, chunk.missed)
    assert until.fetch(chunk.place) == Chunk([], chunk.place, ended=True)
    unknown = reader.fetch(Place("1-0")).missed  # the place may predate the first entry
    assert unknown
    assert unknown.count is None
    # from the beginning, nothing can have been missed
    assert reader.fetch(BEGINNING).missed is None


# Files.


@pytest.mark.parametrize("name", ENDINGS)
def test_interrupted_file_starts_over(
    tmp_path: Path, store: ResultsStore, reader: RowReader, name: str
) -> None:
    out, form = tmp_path / f"out.{name}", name.partition(".")[0]
    store.write([result(str(number)) for number in range(230)])
    run(out, reader, name)
    earlier = out.read_bytes()
    (tmp_path / f".out.{name}.partial").write_bytes(b"half")  # left by kill -9
    store.write([result("230")])
    with (  # noqa: PT012
        pytest.raises(KeyError),
        opened(out, *layout(form), ExportFilter(), reader) as target,
    ):
        target.add(
            batch_of(reader.fetch(target.place).rows, target.schema), target.place
        )
        raise KeyError
    assert out.read_bytes() == earlier
    assert (run(out, reader, name).written, len(exported(out))) == (231, 231)
    assert {path.name for path in tmp_path.iterdir()} <= {
        f"out.{name}",
        f".out.{name}.partial",
    }


@pytest.mark.parametrize("name", FORMATS)
def test_writes_one_part_per_day_and_appends_new_rows(
    tmp_path: Path, server: RedisServer, reader: RowReader, name: str
) -> None:
    out = tmp_path / "out"
    add(server, NOON, "1", "2")
    add(server, NOON + DAY, "3")
    add(server, NOON + 3 * DAY, "4", label="books")
    assert run(out, reader, name, in_parts=True).written == 4
    found = {str(path.relative_to(out)) for path, _ in parts(out)}
    assert found == {
        f"day=2026-11-20/part-{NOON}000-0_{NOON}000-1.{name}",
        f"day=2026-11-21/part-{NOON + DAY}000-0_{NOON + DAY}000-0.{name}",
        f"day=2026-11-23/part-{NOON + 3 * DAY}000-0_{NOON + 3 * DAY}000-0.{name}",
    }
    assert exported(out) == ["1", "2", "3", "4"]
    # Run again: first without new results, then with one, which gets a part file of its own.
    assert run(out, reader, name, in_parts=True).written == 0
    add(server, NOON + 3 * DAY + 1, "5")
    target = run(out, reader, name, in_parts=True)
    assert (target.resumed, target.written, exported(out)) == (
        True,
        1,
        ["1", "2", "3", "4", "5"],
    )


def test_documented_snippet_turns_parquet_into_jsonl(
    tmp_path: Path, store: ResultsStore, reader: RowReader
) -> None:
    posts = [
        result(
            "1", body="a\r\nb", score=3, created_utc=5.5, extra={"a": 1}, permalink="p"
        ),
        result("2"),
    ]
    store.write(posts)
    run(tmp_path / "results", reader, "parquet")
    page = (Path(__file__).parent.parent.parent / "docs" / "export.md").read_text()
    (snippet,) = [block for block in page.split("```python\n") if "to_batches" in block]
    script = snippet.partition("```")[0].replace(
        '"results"', repr(str(tmp_path / "results"))
    )
    lines: list[str] = []
    exec(script, {"print": lines.append})  # noqa: S102 - a snippet from our own documentation
    (tmp_path / "out.jsonl").write_text("\n".join(lines))
    assert list(FileSource(str(tmp_path / "out.jsonl")).items()) == [
        each.post for each in posts
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_parts_appear_only_when_complete(
    tmp_path: Path, server: RedisServer, reader: RowReader, name: str
) -> None:
    out = tmp_path / "out"
    add(server, NOON, "1", "2")
    add(server, NOON + DAY, "3")
    with opened(out, *layout(name), ExportFilter(), reader, in_parts=True) as target:
        chunk = reader.fetch(target.place)
        target.add(batch_of(chunk.rows, target.schema), chunk.place)  # not closed
    assert exported(out) == []
    left_over = out / "day=2026-11-21" / f".part-1-0_2-0.{name}.tmp"
    left_over.parent.mkdir()
    left_over.write_bytes(b"half")  # left by kill -9
    run(out, reader, name, in_parts=True)
    assert exported(out) == ["1", "2", "3"]
    assert not list(out.rglob("*.tmp"))


def test_resumes_after_a_crash_between_part_and_state(
    tmp_path: Path, server: RedisServer, reader: RowReader
) -> None:
    out = tmp_path / "out"
    add(server, NOON, "1", "2")
    run(out, reader, "jsonl", in_parts=True)
    before = (out / STATE_FILE).read_bytes()
    add(server, NOON + 1, "3")
    run(out, reader, "jsonl", in_parts=True)
    (out / STATE_FILE).write_bytes(
        before
    )  # killed between writing the part and the state
    add(server, NOON + 2, "4")
    run(out, reader, "jsonl", in_parts=True)
    assert exported(out) == ["1", "2", "3", "4"]


def test_parts_sort_in_stream_order(
    tmp_path: Path,
    server: RedisServer,
    reader: RowReader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add(server, NOON, *map(str, range(11)))
    for part_rows, until in ((9, 9), (2, 11)):
        monkeypatch.setattr(files, "PART_ROWS", part_rows)
        with opened(
            tmp_path / "out", *layout("csv"), ExportFilter(), reader, in_parts=True
        ) as target:
            (chunk,) = reader.chunks(target.place)
            rows = chunk.rows[: until - int(chunk.rows[0].post["id"])]
            target.add(
                batch_of(rows, target.schema),
                chunk.place._replace(cursor=rows[-1].entry),
            )
    assert [match[1] for _, match in parts(tmp_path / "out")] == [
        f"{NOON}000-0",
        f"{NOON}000-9",
    ]
    assert exported(tmp_path / "out") == [str(number) for number in range(11)]


# Purged posts.


def purge_now(server: RedisServer, *post_ids: str) -> None:
    purge_posts(server.client, Settings(), post_ids)


@pytest.mark.parametrize("name", [*FORMATS, *(f"out.{name}" for name in ENDINGS)])
def test_post_purged_before_it_is_published_is_left_out(
    tmp_path: Path, server: RedisServer, reader: RowReader, name: str
) -> None:
    in_parts, out, form = name in FORMATS, tmp_path / "out", name
    if not in_parts:
        out, form = tmp_path / name, name.split(".")[1]
    add(server, NOON, "1", "2", "3")
    add(server, NOON + DAY, "4")
    with opened(out, *layout(form), ExportFilter(), reader, in_parts) as target:
        chunk = reader.fetch(target.place)
        purge_now(server, "2", "4")
        target.add(batch_of(chunk.rows, target.schema), chunk.place)
        target.close(chunk.place)
    assert (exported(out), target.written) == (["1", "3"], 2)
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("name", FORMATS)
def test_next_run_removes_posts_purged_since(
    tmp_path: Path, server: RedisServer, reader: RowReader, name: str
) -> None:
    out = tmp_path / "out"
    add(server, NOON, "1", "2", "3")
    add(server, NOON + DAY, "4")
    run(out, reader, name, in_parts=True)
    purge_now(server, "2", "4")
    assert run(out, reader, name, in_parts=True).removed == 2
    assert exported(out) == ["1", "3"]
    assert not (out / "day=2026-11-21").exists()
    purge_now(server, "3")
    assert purge(out, name, reader) == 1
    assert purge(out, name, reader) == 0
    assert exported(out) == ["1"]
    add(server, NOON + 2 * DAY, "5")
    run(out, reader, name, in_parts=True)
    assert exported(out) == ["1", "5"]


@pytest.mark.parametrize("name", ENDINGS)
def test_purges_a_single_file_export(
    tmp_path: Path, server: RedisServer, reader: RowReader, name: str
) -> None:
    out = tmp_path / f"out.{name}"
    add(server, NOON, "1", "2")
    run(out, reader, name)
    purge_now(server, "1")
    assert purge(out, name.partition(".")[0], reader) == 1
    assert exported(out) == ["2"]
    assert list(tmp_path.iterdir()) == [out]


# Mistakes.


@pytest.fixture
def places(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "other").write_text("x")
    return tmp_path


@pytest.mark.parametrize("out", ["file", "folder"])
def test_rejects_unsuitable_output_paths(
    tmp_path: Path, places: Path, reader: RowReader, out: str
) -> None:
    with pytest.raises((UserError, OSError), match=f"/{out}"):
        run(places / out, reader, "parquet")
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("name", ["parquet", "csv"])
def test_rejects_a_second_export_to_the_same_path(
    tmp_path: Path, reader: RowReader, name: str
) -> None:
    with (
        opened(
            tmp_path / "out",
            *layout(name),
            ExportFilter(),
            reader,
            in_parts=name == "parquet",
        ),
        pytest.raises(UserError, match=re.escape(str(tmp_path / "out"))),
    ):
        run(tmp_path / "out", reader, name)


def test_resumes_an_export_killed_before_its_first_state(
    tmp_path: Path, server: RedisServer, reader: RowReader
) -> None:
    """The process was killed before it renamed the state file to its final name."""
    add(server, NOON, "1")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / f".{STATE_FILE}.tmp").write_text('{"vers')
    run(tmp_path / "out", reader, "parquet")
    assert len(list((tmp_path / "out").rglob("*.parquet"))) == 1
    assert not list(tmp_path.rglob("*.tmp"))


def test_rejects_a_folder_of_an_export_with_other_options(
    tmp_path: Path, server: RedisServer, reader: RowReader
) -> None:
    add(server, NOON, "1")
    run(tmp_path / "out", reader, "parquet")
    for name, wanted, flag in (
        ("csv", ExportFilter(), "format"),
        ("parquet", ExportFilter(since=1.0), "since"),
    ):
        with pytest.raises(UserError, match=f"--{flag}"):
            run(tmp_path / "out", reader, name, wanted, in_parts=True)
    with (
        pytest.raises(UserError, match="--columns"),
        opened(
            tmp_path / "out",
            *layout("parquet", ["id", "label"]),
            ExportFilter(),
            reader,
            in_parts=True,
        ),
    ):
        pass


@pytest.mark.parametrize(
    "damage",
    [
        {"place": None}, {"place": []}, {"place": {}}, {"place": {"cursor": 5}},
        {"place": {"cursor": "x"}},
        {"place": {"cursor": "5-0", "number": "x"}}, {"place": {"cursor": "5-0", "odd": 1}},
        {"format": "exe"},
        {"place": {"cursor": "18446744073709551615-18446744073709551615"}},
        {"format": []}, {"columns": 5}, {"columns": [5]}, "{}", "[]", "5", "null", "{", "",
    ],
    ids=json.dumps,
)  # fmt: skip
def test_damaged_state_of_a_folder_is_reported(
    tmp_path: Path, server: RedisServer, reader: RowReader, damage: dict[str, Any] | str
) -> None:
    add(server, NOON, "1")
    out = tmp_path / "out"
    run(out, reader, "parquet")
    state = json.loads((out / STATE_FILE).read_text())
    (out / STATE_FILE).write_text(
        damage if isinstance(damage, str) else json.dumps(state | damage)
    )
    for use in (
        partial(run, out, reader, "parquet"),
        partial(purge, out, "parquet", reader),
    ):
        with pytest.raises(UserError, match=re.escape(STATE_FILE)):
            use()


@pytest.mark.parametrize("out", ["file", "folder", "none"])
def test_purge_rejects_paths_that_are_no_export(
    places: Path, reader: RowReader, out: str
) -> None:
    with pytest.raises(UserError, match=re.escape(str(places / out))):
        purge(places / out, "csv", reader)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("id,title\n1,a\n\n2,b\n", "csv"), ('id,title\n1,"a\n', "csv"), ("title\na\n", "csv"),
        ('{"id":"1"}\n{"x":1}\n', "jsonl"), ('{"id":"1"}\n[]\n', "jsonl"),
        ("no Parquet", "parquet"),
    ],
)  # fmt: skip
def test_purging_a_file_with_a_row_without_an_id_is_a_mistake(
    tmp_path: Path, reader: RowReader, text: str, form: str
) -> None:
    (tmp_path / "own").write_text(text)
    with pytest.raises(UserError, match="own is damaged or not an export"):
        purge(tmp_path / "own", form, reader)
    assert (tmp_path / "own").read_text() == text


def test_purging_a_folder_with_a_damaged_part_is_a_mistake(
    tmp_path: Path, reader: RowReader
) -> None:
    part = tmp_path / "own" / "day=2026-11-20" / "part-1-0_2-0.parquet"
    part.parent.mkdir(parents=True)
    part.write_text("no Parquet")
    state = {
        "format": "parquet",
        "columns": ["id"],
        "place": {"cursor": "2-0", "number": None},
    }
    (tmp_path / "own" / STATE_FILE).write_text(json.dumps(state))
    with pytest.raises(UserError, match="own is damaged"):
        purge(tmp_path / "own", "parquet", reader)
