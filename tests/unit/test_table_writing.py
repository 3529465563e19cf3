"""feedmill/tables/writing.py: every format, compression and formulas."""

import csv
import gzip
import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from feedmill.tables import format_of
from feedmill.tables.writing import JSON, writer_to

SCHEMA = pa.schema([
    ("text", pa.string()), ("time", pa.timestamp("us", tz="UTC")), ("right", pa.bool_()), ("number", pa.float64()),
    ("scores", pa.map_(pa.string(), pa.float64())), ("any", JSON),
])  # fmt: skip
TIME = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)
ROWS: list[dict[str, Any]] = [
    {"text": '=1,"\r\nä', "time": TIME, "right": True, "number": -0.1, "scores": [("a", 1e-17)], "any": '"-x"'},
    {"text": "", "time": TIME.replace(microsecond=5), "right": False, "number": 2.0, "scores": [], "any": "[1,null]"},
    dict.fromkeys(SCHEMA.names),
]


def write(path: Path, *batches: list[dict[str, Any]]) -> Path:
    with path.open("wb") as file:
        writer = writer_to(file, str(format_of(path.name)), SCHEMA, path.suffix)
        for rows in batches:
            writer.write(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
        writer.close()
    return path


def content(path: Path) -> bytes:
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes())
    if path.suffix == ".zst":
        return bytes(pa.input_stream(str(path), compression="zstd").read())
    return path.read_bytes()


@pytest.mark.parametrize("name", ["a.csv", "a.TSV", "a.csv.gz", "a.csv.zst"])
def test_writes_csv(tmp_path: Path, name: str) -> None:
    text = content(write(tmp_path / name, ROWS[:2], [], ROWS[2:])).decode()
    rows = list(csv.reader(io.StringIO(text, newline=""), delimiter="\t" if "TSV" in name else ","))
    assert rows == [
        SCHEMA.names,
        ["'=1,\"\r\nä", "2026-01-31T12:30:00+00:00", "true", "-0.1", '{"a":1e-17}', "'-x"],
        ["", "2026-01-31T12:30:00.000005+00:00", "false", "2", "{}", "[1,null]"],
        [""] * 6,
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson.gz", "a.jsonl.zst"])
def test_writes_jsonl(tmp_path: Path, name: str) -> None:
    records = list(map(json.loads, content(write(tmp_path / name, ROWS)).splitlines()))
    assert [list(record.values()) for record in records] == [
        ['=1,"\r\nä', "2026-01-31T12:30:00+00:00", True, -0.1, {"a": 1e-17}, "-x"],
        ["", "2026-01-31T12:30:00.000005+00:00", False, 2.0, {}, [1, None]],
        [None] * 6,
    ]
