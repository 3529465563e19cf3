"""producers/parquet.py: bounded memory, text stored as bytes, and values that Python's types
cannot hold.
"""

import base64
import csv
import gzip
import io
import json
import os
import re
import sys
import uuid
from collections.abc import Callable
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feedmill.cli.offline import OutFlags, label_file
from feedmill.cli.options import FileFlags
from feedmill.producers import parquet
from feedmill.producers.files import FileSource
from feedmill.producers.records import BadRecord, Columns
from feedmill.shared.errors import InputError
from feedmill.shared.messages import Post
from tests.support import ROOT, long_cases, naming, run
from tests.unit.test_labelling import LABELS, classify

#: Code that labels a file with a stand-in for the model, and prints the growth of peak memory in
#: MiB.
LABELS_FILE = """
import re, sys
from pathlib import Path
import pyarrow.compute, pyarrow.parquet
from feedmill.cli.offline import OutFlags, label_file
from feedmill.cli.options import FileFlags
from feedmill.shared.errors import InputError
from tests.unit.test_labelling import classify
megabytes = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
before = megabytes()
try:
    label_file(sys.argv[1], FileFlags(), OutFlags(sys.argv[2]), None, lambda: ((), classify))
except InputError as error:
    print(error)
print(int(megabytes() - before))
"""
MEGABYTE = "x" * 1_000_000


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


def label(path: Path, out: Path, limit: int | None = None) -> None:
    label_file(
        str(path), FileFlags(), OutFlags(str(out)), limit, lambda: (LABELS, classify)
    )


def peak(path: Path, out: Path) -> tuple[str, int]:
    """Label a file in a process of its own, forked from one that has imported everything.

    Return its output before the last line, and the growth of its memory.
    """
    command = [sys.executable, "-c", LABELS_FILE, str(path), str(out)]
    done = run(command, ROOT, os.environ, seconds=300)
    assert done.returncode == 0, done.stderr
    *said, megabytes = done.stdout.splitlines()
    return " ".join(said), int(megabytes)


def growing(count: int) -> list[str]:
    """Return texts of a megabyte that share their beginnings."""
    return [f"{MEGABYTE}{number}" for number in range(count)]


EXPANDING: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "a dictionary": (lambda: {"text": ["good"] * 400, "other": [MEGABYTE] * 400}, {}),
    "a dictionary of bytes": (
        lambda: {"text": ["good"] * 400, "other": [MEGABYTE.encode()] * 400},
        {},
    ),
    "a dictionary of texts": (lambda: {"text": [MEGABYTE] * 400}, {}),
    "lists": (lambda: {"text": ["good"] * 400, "other": [[MEGABYTE]] * 400}, {}),
    "shared beginnings": (
        lambda: {"text": ["good"] * 400, "other": growing(400)},
        {
            "use_dictionary": False,
            "column_encoding": {"text": "PLAIN", "other": "DELTA_BYTE_ARRAY"},
        },
    ),
    "large cells": (
        lambda: {"text": ["good"] * 400, "other": growing(400)},
        {"use_dictionary": False, "write_batch_size": 1},
    ),
}


#: Ways by which a page, a dictionary or one cell expands; `make long` has the others.
USUAL_WAYS = ("a dictionary of bytes", "lists", "shared beginnings")
FURTHER_WAYS = [how for how in EXPANDING if how not in USUAL_WAYS]


@pytest.mark.parametrize("how", [*USUAL_WAYS, *long_cases(*FURTHER_WAYS)])
@pytest.mark.parametrize(
    "name", ["out.parquet", pytest.param("out.csv.gz", marks=pytest.mark.long)]
)
def test_a_small_file_takes_little_memory(tmp_path: Path, how: str, name: str) -> None:
    """Each file has at most some kilobytes on disk, and 400 MB in memory if all of its rows are
    decoded at once.
    """
    labels_in_little_memory(tmp_path, how, name)


def test_a_small_file_takes_little_memory_as_text(tmp_path: Path) -> None:
    labels_in_little_memory(tmp_path, "a dictionary of bytes", "out.csv.gz")


def labels_in_little_memory(tmp_path: Path, how: str, name: str) -> None:
    columns, options = EXPANDING[how]
    path = write(tmp_path / "in.parquet", columns(), compression="zstd", **options)
    _, megabytes = peak(path, tmp_path / name)
    assert megabytes < 400
    if name.endswith("parquet"):
        assert pq.read_metadata(tmp_path / name).num_rows == 400


def test_a_page_that_is_too_large_is_refused_before_it_is_unpacked(
    tmp_path: Path,
) -> None:
    columns = {"text": ["good", "x"], "other": ["y" * 300_000_000, "z"]}
    path = write(
        tmp_path / "in.parquet", columns, compression="zstd", use_dictionary=False
    )
    assert path.stat().st_size < 100_000
    said, megabytes = peak(path, tmp_path / "out.parquet")
    assert re.search(naming("column other", "300,000,015", "134,217,728"), said)
    assert megabytes < 200
    assert not (tmp_path / "out.parquet").exists()
    assert [
        post.body for post in FileSource(str(path)).items() if isinstance(post, Post)
    ] == [
        "good",
        "x",
    ]


def test_cells_that_are_too_long_are_named_and_the_others_read(tmp_path: Path) -> None:
    path = write(
        tmp_path / "in.parquet",
        {"text": ["good", "y" * 2_000_001, "x"], "url": ["u" * 2_000_001] * 3},
    )
    items = list(FileSource(str(path)).items())
    assert [item.body for item in items if isinstance(item, Post)] == ["good", "x"]
    bad = [item for item in items if isinstance(item, BadRecord)]
    assert [(item.where[-2:], item.skipped) for item in bad] == [
        (":1", False),
        (":2", True),
        (":3", False),
    ]
    assert ["column text" in item.reason for item in bad] == [False, True, False]


BYTES = {
    "id": [b"a", b"b", b"c"],
    "text": ["The keeper saved – good".encode(), b"=1+1", None],
    "label": [b"sports", b"food", b"food"],
}


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.binary())]
)
def test_text_that_is_stored_as_bytes_is_text(
    tmp_path: Path, kind: pa.DataType
) -> None:
    """Impala and old versions of Spark write text as BINARY without a note that it is text."""
    columns = {
        name: pa.array(values, pa.binary()).cast(kind) for name, values in BYTES.items()
    }
    path = write(tmp_path / "in.parquet", columns)
    posts = [
        item
        for item in FileSource(str(path), columns=Columns.of(keep=["label"])).items()
        if isinstance(item, Post)
    ]
    assert [(post.id, post.body, post.topic) for post in posts] == [
        ("a", "The keeper saved – good", "sports"),
        ("b", "=1+1", "food"),
    ]
    assert [post.extra for post in posts] == [{"label": "sports"}, {"label": "food"}]
    flags = OutFlags(str(tmp_path / "out.csv"), prefix="p_")
    label_file(str(path), FileFlags(), flags, None, lambda: ((), classify))
    header, *rows = csv.reader(io.StringIO((tmp_path / "out.csv").read_text()))
    assert header == ["id", "text", "label", "p_label", "p_label_score"]
    assert [row[:3] for row in rows] == [
        ["a", "The keeper saved – good", "sports"],
        ["b", "'=1+1", "food"],
        ["c", "", "food"],
    ]


@pytest.mark.parametrize("kind", [pa.binary(), pa.string()])
def test_bytes_that_are_not_utf8_are_named_by_column_and_row(
    tmp_path: Path, kind: pa.DataType
) -> None:
    texts = pa.array([b"good", b"caf\xe9", b"x"]).view(kind)
    path = write(
        tmp_path / "in.parquet",
        {"text": texts, "url": pa.array([b"\xff", b"u", None]).view(kind)},
    )
    items = list(FileSource(str(path)).items())
    assert [item.body for item in items if isinstance(item, Post)] == ["good", "x"]
    kept, skipped = (item for item in items if isinstance(item, BadRecord))
    assert (kept.where[-2:], kept.column, kept.skipped) == (":1", "url", False)
    assert (skipped.where[-2:], "column text" in skipped.reason, skipped.skipped) == (
        ":2",
        True,
        True,
    )
    label(path, tmp_path / "out.parquet")
    copied = pq.read_table(tmp_path / "out.parquet")
    assert copied.select(["text",
    "url"]).cast(pa.schema({"text": pa.binary(), "url": pa.binary()})).to_pylist() == [
        {"text": b"good", "url": b"\xff"}, {"text": b"caf\xe9", "url": b"u"},
        {"text": b"x", "url": None},
    ]  # fmt: skip
    assert copied["label"].to_pylist() == ["good", None, "bad"]


HOSTILE: dict[str, pa.Array] = {
    "far": pa.array([2**62, 0, None], pa.timestamp("us")),
    "farther": pa.array([-(2**62), 0, None], pa.timestamp("ms")),
    "days": pa.array([2**31 - 1, 0, None], pa.date32()),
    "zone": pa.array([0, 1, None], pa.timestamp("us", "Mars/Phobos")),
    "digits": pa.array([1, 1_700_000_000_123_456_789, None], pa.timestamp("ns", "UTC")),
    "time": pa.array([1, 86_399_999_999_999, None], pa.time64("ns")),
    "duration": pa.array([2**62, 0, None], pa.duration("s")),
    "text": pa.array([b"good", b"x", b"caf\xe9"]).view(pa.string()),
    "broken": pa.array([b"\xff\x00", b"ok", None]).view(pa.string()),
    "raw": pa.array([b"\xff\x00", b"ok", None], pa.binary()),
    "fixed": pa.array([b"\xff\xfe", b"ok", None], pa.binary(2)),
    "struct": pa.array([{"raw": b"\xff", "at": 2**62}, {"raw": b"ok", "at": 0}, None],
                       pa.struct({"raw": pa.binary(), "at": pa.timestamp("us")})),
    "list": pa.array([[2**62], [], None], pa.list_(pa.timestamp("us"))),
    "map": pa.array([[("k", 1), ("k", 2)], [], None], pa.map_(pa.string(), pa.int64())),
    "id": pa.array([uuid.UUID(int=number).bytes for number in range(3)], pa.uuid()),
    "infinite": pa.array([float("inf"), float("nan"), None]),
    "nothing": pa.nulls(3),
    "json": pa.array(['{"a": 1,\n "b": "c"}', "not JSON", None], pa.string()).cast(pa.json_()),
    "half": pa.array(['"half', '"whole"', None], pa.string()).cast(pa.json_()),
    "flag": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0, None], pa.int8())),
    "tensor": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int8(), [2]),
        pa.array([[1, 2], [3, 4], None], pa.list_(pa.int8(), 2))
    ),
}  # fmt: skip


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    return write(tmp_path / "in.parquet", HOSTILE, row_group_size=2)


def test_posts_are_read_whatever_other_columns_hold(hostile: Path) -> None:
    items = list(FileSource(str(hostile)).items())
    posts = [item for item in items if isinstance(item, Post)]
    assert [(post.id, post.body) for post in posts] == [
        (str(uuid.UUID(int=0)), "good"),
        (str(uuid.UUID(int=1)), "x"),
    ]
    assert [item.where[-2:] for item in items if isinstance(item, BadRecord)] == [":3"]


@pytest.mark.parametrize("name", ["date", "created_at", "edited"])
@pytest.mark.parametrize("kind", ["far", "days", "zone", "digits"])
def test_dates_that_cannot_be_read_cost_the_date_and_not_the_post(
    tmp_path: Path, name: str, kind: str
) -> None:
    path = write(
        tmp_path / "in.parquet", {"text": ["good", "x", "y"], name: HOSTILE[kind]}
    )
    items = list(FileSource(str(path)).items())
    posts = [item for item in items if isinstance(item, Post)]
    assert [post.body for post in posts] == ["good", "x", "y"]
    assert all(
        not item.skipped and item.column == name
        for item in items
        if isinstance(item, BadRecord)
    )
    assert len(items) == 3 + (kind in ("far", "days"))


def test_a_copy_in_parquet_has_the_same_values(hostile: Path, tmp_path: Path) -> None:
    label(hostile, tmp_path / "out.parquet")
    copied, given = pq.read_table(tmp_path / "out.parquet"), pq.read_table(hostile)
    assert copied.schema.field("digits").type == pa.timestamp("ns", "UTC")
    assert copied.schema.field("json").type == pa.json_()
    for name in HOSTILE:
        assert (
            copied[name].combine_chunks().equals(given[name].combine_chunks())
            or name == "infinite"
        ), name
    assert copied["label"].to_pylist() == ["good", "bad", None]


@pytest.mark.parametrize("out", ["out.csv", "out.tsv", "out.jsonl"])
def test_a_copy_in_text_has_every_row_and_readable_values(
    hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    label(hostile, tmp_path / out)
    text = (tmp_path / out).read_text("utf-8")
    if out.endswith("jsonl"):
        first, second, last = (json.loads(line) for line in text.splitlines())
    else:
        delimiter = "\t" if out.endswith("tsv") else ","
        first, second, last = csv.DictReader(io.StringIO(text), delimiter=delimiter)
    assert [row["label"] or None for row in (first, second, last)] == [
        "good",
        "bad",
        None,
    ]
    assert str(2**62) in first["far"]
    assert second["far"] == "1970-01-01T00:00:00"
    assert second["zone"].startswith("1970-01-01T00:00:00.000001")
    assert second["digits"] == "2023-11-14T22:13:20.123456789+00:00"
    assert (first["raw"], second["raw"]) == tuple(
        base64.b64encode(data).decode() for data in (b"\xff\x00", b"ok")
    )
    assert second["broken"] == "ok"
    assert "\ufffd" in first["broken"]
    assert first["id"] == str(uuid.UUID(int=0))
    in_cells = {
        "json": '{"a":1,"b":"c"}',
        "half": '"half',
        "flag": "1",
        "tensor": "[1,2]",
    }
    in_json = {"json": {"a": 1, "b": "c"}, "half": '"half', "flag": 1, "tensor": [1, 2]}
    values = in_json if out.endswith("jsonl") else in_cells
    assert {name: first[name] for name in values} == values
    assert (second["json"], second["half"]) == ("not JSON", "whole")
    noted = capsys.readouterr().err
    assert re.search(naming("raw", "fixed", "struct", "Base64"), noted)
    assert "broken" not in noted.splitlines()[0]


def test_a_copy_in_excel_has_texts_for_times_that_python_lacks(
    hostile: Path, tmp_path: Path
) -> None:
    label(hostile, tmp_path / "out.xlsx")
    header, first, second, _ = (
        openpyxl.load_workbook(tmp_path / "out.xlsx").worksheets[0].values
    )
    cells = dict(zip(header, first, strict=True))
    assert cells["label"] == "good"
    assert str(2**62) in cells["far"]
    assert cells["zone"] == "1970-01-01T00:00:00+00:00"
    assert dict(zip(header, second, strict=True))["far"] == datetime(1970, 1, 1)


def test_damage_in_a_column_that_is_only_copied_keeps_the_rows_before_it(
    tmp_path: Path,
) -> None:
    columns = {"text": ["good"] * 9, "other": [f"{number}" for number in range(9)]}
    path = write(
        tmp_path / "in.parquet",
        columns,
        row_group_size=3,
        compression="none",
        use_dictionary=False,
    )
    data = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(1).column(1).data_page_offset
    data[start : start + 20] = b"\xff" * 20
    path.write_bytes(data)
    with pytest.raises(InputError, match=f"Cannot read {path}"):
        label(path, tmp_path / "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet")["other"].to_pylist() == [
        "0",
        "1",
        "2",
    ]


#: Headers of pages, in Thrift's compact encoding, that are damaged.
DAMAGED_HEADERS = {
    "list of 2**63 booleans": b"\x19\xf1" + b"\xff" * 8 + b"\x7f",
    "list of 2**63 doubles": b"\x19\xf7" + b"\xff" * 8 + b"\x7f",
    "set of 2**63 bytes": b"\x1a\xf3" + b"\xff" * 8 + b"\x7f",
    "bytes without end": b"\x18" + b"\xff" * 8 + b"\x7f",
    "structs": b"\x1c" * 5_000,
    "lists": b"\x19" * 5_000,
    "an integer without end": b"\x15" + b"\xff" * 200_000,
    "a number as header": b"\x15\x00\x15\x00\x15\x00\x25\x02\x00",
}


@pytest.mark.parametrize("kind", DAMAGED_HEADERS)
def test_damage_in_the_header_of_a_page_is_named_at_once(
    tmp_path: Path, kind: str
) -> None:
    path = write(
        tmp_path / "in.parquet",
        {"text": [os.urandom(200_000).hex()]},
        use_dictionary=False,
        compression="none",
    )
    data = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(0).column(0).data_page_offset
    header = DAMAGED_HEADERS[kind]
    data[start : start + len(header)] = header
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"in\.parquet"):
        label(path, tmp_path / "out.csv")


@pytest.mark.parametrize("first", ["text", "other"])
def test_a_page_before_the_file_is_damage(tmp_path: Path, first: str) -> None:
    """The footer gives the place of each column's first page, and a damaged one can be
    negative.
    """
    columns = {first: ["good"]} | {"text": ["good"]}
    path = write(
        tmp_path / "in.parquet",
        columns,
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
    )
    data = path.read_bytes()
    offset = 0
    for place in range(len(data) - 8, 0, -1):
        path.write_bytes(data[:place] + b"\x07" + data[place + 1 :])  # -4
        try:
            offset = pq.read_metadata(path).row_group(0).column(0).data_page_offset
        except (OSError, ValueError):  # this byte means something else
            continue
        if offset == -4:
            break
    assert offset == -4
    with pytest.raises(InputError, match=r"in\.parquet"):
        label(path, tmp_path / "out.csv")


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_rows_of_many_groups_and_batches_stay_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]
) -> None:
    columns = {
        "id": [str(number) for number in range(1000)],
        "text": [f"good {number}" for number in range(1000)],
    }
    path = write(
        tmp_path / "in.parquet", columns, row_group_size=70, data_page_size=100
    )
    path.write_bytes(pack(path.read_bytes()))
    monkeypatch.setattr(parquet, "MAX_BATCH_BYTES", 1000)
    assert [
        post.id for post in FileSource(str(path)).items() if isinstance(post, Post)
    ] == columns["id"]
    label(path, tmp_path / "out.parquet", limit=900)
    copied = pq.read_table(tmp_path / "out.parquet")
    assert copied["text"].to_pylist() == columns["text"][:900]
    assert copied["label"].to_pylist() == ["good"] * 900


def empties(*sizes: int) -> pa.Array:
    """Return lists of so many empty lists, which take a few bytes in a file."""
    return pa.array([[[]] * size for size in sizes], pa.list_(pa.list_(pa.int32())))


def pairs(*sizes: int) -> pa.Array:
    """Return maps with so many equal pairs."""
    total = sum(sizes)
    offsets = pa.array([0, *accumulate(sizes)], pa.int32())
    return pa.MapArray.from_arrays(
        offsets, pa.array(["k"] * total), pa.array([1] * total)
    )


def records(*sizes: int) -> pa.Array:
    """Return lists of so many equal structs."""
    return pa.array([[{"a": 1, "b": [1]}] * size for size in sizes])


def nothings(*sizes: int) -> pa.Array:
    """Return lists of nulls, which take no memory in Arrow."""
    return pa.array([[None] * size for size in sizes], pa.list_(pa.null()))


LISTS: dict[str, Callable[..., pa.Array]] = {
    "lists": empties, "maps": pairs, "structs": records, "nulls": nothings,
}  # fmt: skip


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("name", ["out.csv", "out.jsonl", "out.xlsx"])
def test_a_cell_with_too_many_values_is_empty_and_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    name: str,
) -> None:
    """Every other cell and row is written, and a copy in Parquet has all values."""
    monkeypatch.setattr(parquet, "MAX_CELL_LISTED", 50)
    monkeypatch.setattr(parquet, "LISTED_AT_ONCE", 20)
    cells = LISTS[kind](2, 1000, 0, 3, 400, 4)
    path = write(
        tmp_path / "in.parquet",
        {"text": ["good"] * 6, "other": cells, "last": list("abcdef")},
    )
    flags = OutFlags(str(tmp_path / name))
    tally = label_file(str(path), FileFlags(), flags, None, lambda: (LABELS, classify))
    shown = capsys.readouterr().err.replace("\n", " ")
    assert re.search(r"column other: 2 cells.*empty in the output", shown)
    assert tally.has_failures
    rows = rows_of(tmp_path / name)
    assert [row["last"] for row in rows] == list("abcdef")
    assert [bool(row["other"]) for row in rows] == [
        True,
        False,
        name != "out.jsonl",
        True,
        False,
        True,
    ]
    label(path, tmp_path / "out.parquet")
    assert (
        pq.read_table(tmp_path / "out.parquet")["other"].combine_chunks().equals(cells)
    )


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of an output by column."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".csv":
        return list(csv.DictReader(io.StringIO(path.read_text())))
    header, *rows = (
        openpyxl.load_workbook(path).worksheets[0].iter_rows(values_only=True)
    )
    return [dict(zip(header, row, strict=True)) for row in rows]


@pytest.mark.parametrize("kind", LISTS)
def test_lists_of_a_small_file_take_little_memory(tmp_path: Path, kind: str) -> None:
    """Each file has at most some kilobytes on disk, and a gigabyte as Python's values."""
    cells = LISTS[kind](3_000_000)
    path = write(
        tmp_path / "in.parquet", {"text": ["good"], "other": cells}, compression="zstd"
    )
    assert path.stat().st_size < 10_000
    for name in ("out.csv", "out.jsonl"):
        shown, megabytes = peak(path, tmp_path / name)
        assert megabytes < 400, shown


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("group", [1, 8])
def test_lists_with_far_more_values_than_bytes_are_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, group: int
) -> None:
    """A row of them is cheap, but a file can have any number of such rows and row groups."""
    monkeypatch.setattr(parquet, "MAX_FILE_LISTED", 10_000)
    monkeypatch.setattr(parquet, "LISTED_PER_BYTE", 1)
    cells = LISTS[kind](*[5000] * 8)
    columns = {"text": ["good"] * 8, "other": cells}
    path = write(
        tmp_path / "in.parquet", columns, compression="zstd", row_group_size=group
    )
    for name in ("out.csv", "out.jsonl", "out.xlsx"):
        with pytest.raises(
            InputError,
            match=rf"{path.name}: row group .*column other.*values.*\.parquet",
        ):
            label(path, tmp_path / name)
        assert not (tmp_path / name).exists()
    label(path, tmp_path / "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 8
    assert (
        len([item for item in FileSource(str(path)).items() if isinstance(item, Post)])
        == 8
    )


def test_lists_in_a_column_that_is_read_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of nulls takes no bytes in Arrow, and eight each in Python."""
    monkeypatch.setattr(parquet, "MAX_CELL_LISTED", 50)
    monkeypatch.setattr(parquet, "LISTED_AT_ONCE", 20)
    for kind, make in LISTS.items():
        path = write(
            tmp_path / f"{kind}.parquet",
            {"text": ["good", "x"], "extra": make(1000, 2)},
        )
        items = list(FileSource(str(path)).items())
        assert [item.body for item in items if isinstance(item, Post)] == ["good", "x"]
        problems = [
            item
            for item in items
            if isinstance(item, BadRecord) and item.where.endswith(":1")
        ]
        assert [(item.column, item.skipped) for item in problems] == [("extra", False)]
        assert "longer than" in problems[0].reason


BAD_TEXTS = pa.Array.from_buffers(
    pa.large_string(),
    3,
    pa.array([b"ok", b"\xff\xfe", b"z"], pa.large_binary()).buffers(),
)


def undecodable(path: Path, groups: int = 1) -> Path:
    """Write a file with a column that Arrow cannot decode, as an int128 of another writer: 17
    bytes are too many.
    """
    raw = path.with_suffix(".raw")
    columns = {
        "text": ["good", "bad", "good"] * groups,
        "other": pa.array([b"x" * 17] * 3 * groups, pa.binary()),
        "last": list("abc") * groups,
    }
    write(raw, columns, store_schema=False, use_dictionary=False, row_group_size=3)
    data = raw.read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    footer = data[-8 - size : -8]
    end = footer.index(b"\x18\x05other") + len(b"\x18\x05other")
    # the fields of a column's kind, scale 2 and precision 38
    decimal = b"\x25\x0a\x15\x04\x15\x4c"
    footer = footer[:end] + decimal + footer[end:]
    path.write_bytes(
        data[: -8 - size] + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    )
    raw.unlink()
    return path


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl", "out.parquet", "out.xlsx"])
@pytest.mark.parametrize("how", ["decimal", "dictionary"])
def test_a_copied_column_that_cannot_be_decoded_costs_its_cells_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, how: str
) -> None:
    path = tmp_path / "in.parquet"
    if how == "decimal":
        undecodable(path, groups=3)
    else:
        places = pa.array([0, 1, 2] * 3, pa.int8())
        other = pa.DictionaryArray.from_arrays(places, BAD_TEXTS)
        write(
            path,
            {
                "text": ["good", "bad", "good"] * 3,
                "other": other,
                "last": list("abc") * 3,
            },
            row_group_size=3,
        )
    flags = OutFlags(str(tmp_path / name))
    tally = label_file(str(path), FileFlags(), flags, None, lambda: (LABELS, classify))
    shown = capsys.readouterr().err.replace("\n", " ")
    assert shown.count("column other: cannot be decoded") == 1
    assert tally.has_failures
    out = tmp_path / name
    rows = pq.read_table(out).to_pylist() if name == "out.parquet" else rows_of(out)
    assert [row["label"] for row in rows] == ["good", "bad", "good"] * 3
    assert [row["last"] for row in rows] == list("abc") * 3
    assert not any(row["other"] for row in rows)


def test_posts_are_read_beside_a_column_that_cannot_be_decoded(tmp_path: Path) -> None:
    other = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int8()), BAD_TEXTS)
    path = write(tmp_path / "in.parquet", {"text": ["good", "bad", "x"], "url": other})
    items = list(FileSource(str(path)).items())
    assert [item.body for item in items if isinstance(item, Post)] == [
        "good",
        "bad",
        "x",
    ]
    problems = [item for item in items if isinstance(item, BadRecord)]
    assert {(item.column, item.skipped) for item in problems} == {("url", False)}
    path = write(tmp_path / "in.parquet", {"text": other, "url": ["u", "v", "w"]})
    problems = [
        item for item in FileSource(str(path)).items() if isinstance(item, BadRecord)
    ]
    assert [item.skipped for item in problems] == [True] * 3
    assert all("column text" in item.reason for item in problems)


def test_a_column_that_is_never_empty_is_named_if_it_cannot_be_copied(
    tmp_path: Path,
) -> None:
    other = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int8()), BAD_TEXTS)
    schema = pa.schema(
        [pa.field("text", pa.string()), pa.field("other", other.type, nullable=False)]
    )
    table = pa.table([pa.array(["good"] * 3), other], schema=schema)
    pq.write_table(table, tmp_path / "in.parquet")
    with pytest.raises(InputError, match=r"column other.*without this column"):
        label(tmp_path / "in.parquet", tmp_path / "out.parquet")
    label(tmp_path / "in.parquet", tmp_path / "out.csv")
    assert [row["label"] for row in rows_of(tmp_path / "out.csv")] == ["good"] * 3


ODD: dict[str, tuple[pa.Array, list[Any]]] = {
    "keys of lists": (
        pa.array([[([1], 1)], [], None], pa.map_(pa.list_(pa.int8()), pa.int8())),
        [{"[1]": 1}, {}, None],
    ),
    "keys of structs": (
        pa.array([[({"a": 1}, 1)], [], None], pa.map_(pa.struct({"a": pa.int8()}), pa.int8())),
        [{'{"a":1}': 1}, {}, None],
    ),
    "keys of truth": (pa.array([[(True, 1)], [], None], pa.map_(pa.bool_(), pa.int8())),
    [{"true": 1}, {}, None]),
    "one name twice": (
        pa.StructArray.from_arrays([pa.array([1, 2, 3]), pa.array([4, 5, 6])], ["a", "a"]),
        [[["a", 1], ["a", 4]], [["a", 2], ["a", 5]], [["a", 3], ["a", 6]]],
    ),
    "JSON of bytes": (
        pa.ExtensionArray.from_storage(pa.json_(),
        pa.array([b"[1]", b"\xff", None], pa.binary()).view(pa.string())),
        [[1], "\ufffd", None],
    ),
    "durations": (pa.array([[1], [], None], pa.list_(pa.duration("ns"))), [["1"], [], None]),
    "views": (pa.array([[1], [], None], pa.list_view(pa.int8())), [[1], [], None]),
    "fixed": (pa.array([[1, 2], [3, 4], None], pa.list_(pa.int8(), 2)), [[1, 2], [3, 4], None]),
    "maps of maps": (
        pa.array([[("k", [("a", [1])])], [], None],
        pa.map_(pa.string(), pa.map_(pa.string(), pa.list_(pa.int8())))),
        [{"k": {"a": [1]}}, {}, None],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_values_of_any_kind_are_json(tmp_path: Path, kind: str) -> None:
    cells, expected = ODD[kind]
    path = write(tmp_path / "in.parquet", {"text": ["good"] * 3, "other": cells})
    label(path, tmp_path / "out.jsonl")
    assert [row["other"] for row in rows_of(tmp_path / "out.jsonl")] == expected
    sliced = pa.concat_arrays([cells.slice(2), cells]).slice(1)
    assert parquet.values_of(sliced, parquet.leniently) == parquet.values_of(
        cells, parquet.leniently
    )
