"""producers/files.py and records.py: all file formats, malformed records and resuming."""

import gzip
import io
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from rich.console import Console

from feedmill.producers import parquet
from feedmill.producers.files import (
    MAX_RECORD_SIZE,
    NOT_UTF8,
    REASONS_SHOWN,
    FileReading,
    FileSource,
    Item,
)
from feedmill.producers.records import BadRecord, Columns, Filters, Labelled, LeftOut
from feedmill.shared.errors import InputError, UserError
from feedmill.shared.messages import Post
from tests.support import ROOT, naming


def posts(tmp_path: Path, data: str | bytes, name: str = "file") -> list[Post]:
    found, bad = both(tmp_path, data, name)
    assert not bad
    return found


def both(
    tmp_path: Path, data: str | bytes, name: str = "file"
) -> tuple[list[Post], list[BadRecord]]:
    items = items_of(tmp_path, data, name=name)
    return [i for i in items if isinstance(i, Post)], [
        i for i in items if isinstance(i, BadRecord)
    ]


def items_of(
    tmp_path: Path,
    data: str | bytes,
    filters: Filters | None = None,
    name: str = "file",
) -> list[Item]:
    path = tmp_path / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return list(FileSource(str(path), filters or Filters()).items())


def read_until_error(source: FileSource) -> tuple[list[Post], str]:
    """Return the posts and the error's message, which is empty if the file was read to its end."""
    good: list[Post] = []
    try:
        good.extend(item for item in source.items() if isinstance(item, Post))
    except InputError as error:
        return good, str(error)
    return good, ""


def jsonl(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def zstd(data: bytes, **parameters: Any) -> bytes:
    return zstandard.ZstdCompressor(**parameters).compress(data)


def in_two_frames(data: bytes) -> bytes:
    """Compress into two frames: the first without a size in its header, the second with a size and
    a checksum.
    """
    half = len(data) // 2
    return zstd(data[:half], write_content_size=False) + zstd(
        data[half:], write_checksum=True
    )


def with_skippable_frames(data: bytes) -> bytes:
    """Compress like pzstd, with skippable frames around the data."""
    note = b"\x5a\x2a\x4d\x18" + (70_000).to_bytes(4, "little") + bytes(70_000)
    return note + zstd(data) + note


def with_a_long_window(data: bytes) -> bytes:
    """Wrap in an uncompressed frame with a window of 2 GiB, the maximum of `zstd --long=31`."""
    block = (len(data) << 3 | 1).to_bytes(3, "little") + data
    return b"\x28\xb5\x2f\xfd" + b"\x00" + bytes([(31 - 10) << 3]) + block


PACKED: list[Callable[[bytes], bytes]] = [
    gzip.compress,
    zstd,
    in_two_frames,
    with_skippable_frames,
    with_a_long_window,
]
TWO = [{"id": "1", "title": "one"}, {"id": "2", "title": "zwei – два"}]


@pytest.mark.parametrize(
    "data",
    [
        "\n".join(map(json.dumps, TWO)),
        "\r\n".join(map(json.dumps, TWO)) + "\r\n\r\n",
        json.dumps(TWO),
        json.dumps(TWO, indent=2),
        "﻿" + json.dumps(TWO),
        "  \n" + json.dumps(TWO),
        "id,title\n1,one\n2,zwei – два\n",
        "ID;Title\n1;one\n2;zwei – два\n",
        "id\ttitle\n1\tone\n2\tzwei – два",
    ],
)
@pytest.mark.parametrize("pack", [bytes, *PACKED])
def test_reads_every_format(
    tmp_path: Path, data: str, pack: Callable[[bytes], bytes]
) -> None:
    packed = pack(data.encode())
    assert [(post.id, post.title) for post in posts(tmp_path, packed)] == [
        ("1", "one"),
        ("2", "zwei – два"),
    ]


class SlowPipe(io.RawIOBase):
    """A pipe that delivers its first bytes one by one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._reads = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._reads += 1
        size = 1 if self._reads < 4 else len(buffer)
        part = self._data[:size]
        buffer[: len(part)] = part
        self._data = self._data[size:]
        return len(part)


@pytest.mark.parametrize("pack", [bytes, *PACKED])
def test_reads_pipes_that_deliver_single_bytes(
    monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]
) -> None:
    packed = pack("id,title\n1,one\n2,zwei – два\n".encode())
    pipe = io.BufferedReader(SlowPipe(packed))
    monkeypatch.setattr(sys, "stdin", Mock(buffer=pipe))
    items = list(FileSource("-").items())
    titles = [item.title for item in items if isinstance(item, Post)]
    assert titles == ["one", "zwei – два"]


@pytest.mark.parametrize("text", ["hi", "a\nb"])
def test_reads_pipes_of_few_bytes(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    pipe = io.BufferedReader(SlowPipe(text.encode()))
    monkeypatch.setattr(sys, "stdin", Mock(buffer=pipe))
    items = list(FileSource("-").items())
    bodies = [item.body for item in items if isinstance(item, Post)]
    assert bodies == text.split()


@pytest.mark.parametrize("start", [b"PAR1", b"PK\x03\x04"])
def test_names_tables_of_pipes_that_deliver_single_bytes(
    monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    pipe = io.BufferedReader(SlowPipe(start + bytes(100)))
    monkeypatch.setattr(sys, "stdin", Mock(buffer=pipe))
    with pytest.raises(InputError, match="cannot be read from a pipe"):
        list(FileSource("-").items())


def test_reads_parquet_after_a_short_frame(tmp_path: Path) -> None:
    table = tmp_path / "table"
    pq.write_table(pa.table({"id": ["1"], "title": ["one"]}), table)
    content = table.read_bytes()
    packed = zstd(content[:1]) + zstd(content[1:])
    assert [post.title for post in posts(tmp_path, packed)] == ["one"]


def test_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = io.BytesIO(zstd(b'{"id": 1, "title": "x"}'))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(packed)))
    assert [item.id for item in FileSource("-").items() if isinstance(item, Post)] == [
        "1"
    ]


@pytest.mark.parametrize(
    ("record", "field", "value"),
    [
        ({"headline": "x"}, "title", "x"),
        ({"title": "x", "label": "food"}, "topic", "food"),
        ({"title": "x", "label": True}, "topic", "true"),
        ({"title": "x", "topic": False}, "topic", "false"),
        ({"title": "x", "category": 0}, "topic", "0"),
        ({"title": "x", "score": "7"}, "score", 7),
        ({"title": "x", "permalink": "/r/x"}, "url", "/r/x"),
        ({"title": "x", "name": "t3_abc"}, "id", "t3_abc"),
        (
            {"title": "x", "url": "https://www.reddit.com/r/x/comments/1abc2/title/"},
            "id",
            "t3_1abc2",
        ),
        (
            {
                "title": "x",
                "permalink": "/r/x/comments/1abc2/t/",
                "url": "https://b.org/comments/9/",
            },
            "id",
            "t3_1abc2",
        ),
        ({"title": "x", "id": "1abc2", "selftext": ""}, "id", "t3_1abc2"),
        ({"title": "x", "id": "post-7", "selftext": ""}, "id", "post-7"),
        ({"title": "x", "post_id": 0, "fullname": "Jo Doe"}, "id", "0"),
        (
            {"title": "x", "permalink": "/r/x/comments/1/t/"},
            "permalink",
            "https://www.reddit.com/r/x/comments/1/t/",
        ),
        ({"title": "x", "edited": "False"}, "edited_utc", None),
        ({"title": "x", "edited": 1700000000}, "edited_utc", 1700000000.0),
        ({"title": "x", "over_18": "False"}, "nsfw", False),
        ({"title": "x", "created_utc": "1700000000.5"}, "created_utc", 1700000000.5),
        ({"title": "x", "timestamp": 1700000000000}, "created_utc", 1700000000.0),
        (
            {"title": "x", "date": "2023-11-14T23:13:20+01:00"},
            "created_utc",
            1700000000.0,
        ),
        ({"title": "x", "id": 1.0}, "id", "1"),
        ({"title": "x", "date": None, "subreddit": ""}, "subreddit", None),
    ],
)
def test_maps_common_field_names(
    tmp_path: Path, record: dict[str, object], field: str, value: object
) -> None:
    (post,) = posts(tmp_path, json.dumps(record))
    assert getattr(post, field) == value


@pytest.mark.parametrize(
    "data",
    [
        "Ticket Nr;id;name;Title\nT-1;5;t3_abc;x\n;6;;y\nT-3;7;;z",
        jsonl(
            {"ticket nr": "T-1", "id": 5, "name": "t3_abc", "title": "x"},
            {"id": 6, "title": "y"},
        )
        + jsonl({"ticket_nr": "T-3", "title": "z"}),
    ],
    ids=["csv", "lines"],
)
def test_id_column_replaces_the_id(tmp_path: Path, data: str) -> None:
    path = tmp_path / "tickets"
    path.write_text(data)
    first, bad, second, third = FileSource(
        str(path), columns=Columns.of("Ticket Nr")
    ).items()
    assert [getattr(post, "id", None) for post in (first, third)] == ["T-1", "T-3"]
    assert isinstance(bad, BadRecord)
    assert (bad.where, bad.skipped) == (
        f"{path}:{3 if data.startswith('T') else 2}",
        False,
    )
    assert "ticket_nr" in bad.reason
    assert isinstance(second, Post)
    assert second.id.startswith("text-")


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ("ticket,title\n1,x\n", ("channel", "ticket, title")),
        ('{"ticket": 1, "title": "x"}', ("channel", "ticket, title")),
        ("Ticket No,title,Chanel \n1,x,y\n", ("Ticket No, title, Chanel",)),
        ('{"Ticket No": 1, "title": "x"}', ("Ticket No, title",)),
        ("id,label,scores,fingerprint,classified_at,title\n1,a,,,,x\n", ("export",)),
    ],
)
def test_rejects_an_unknown_id_column(
    tmp_path: Path, data: str, named: tuple[str, ...]
) -> None:
    path = tmp_path / "file"
    path.write_text(data)
    with pytest.raises(InputError, match=naming(path, *named)):
        list(FileSource(str(path), columns=Columns.of("channel")).items())


@pytest.mark.parametrize(
    ("header", "columns", "named"),
    [
        ("id,title,title", Columns(), "title"),
        ("note,title,Note", Columns.of(body="note"), "note"),
        ("note,title,Note", Columns.of("note"), "note"),
        ("store,title,Store", Columns.of(keep=["store"]), "store"),
        ("note,title,Note", Columns(), None),
        ("title,note,title", Columns.of(body="note"), None),
    ],
)
def test_rejects_two_columns_of_one_name_that_it_reads(
    tmp_path: Path, header: str, columns: Columns, named: str | None
) -> None:
    path = tmp_path / "file.csv"
    path.write_text(f"{header}\n1,a parcel,b refund\n")
    if named is None:
        assert len(list(FileSource(str(path), columns=columns).items())) == 1
        return
    with pytest.raises(InputError, match=naming(path, "2 columns", named)):
        list(FileSource(str(path), columns=columns).items())


@pytest.mark.parametrize(
    ("data", "lacks_ids"),
    [
        ("ticket,,title,channel\n1,0,x\n", True),
        ('{"ticket": 1, "text": "x"}\n{"id": 2, "text": "y"}', True),
        ("id,title\n,x\n", False),
        ("name,title\nt3_1abc2,x\n", False),
        ("permalink,title\n/r/x/comments/1abc2/t/,x\n", False),
        ("id,label,scores,fingerprint,classified_at,title\n1,a,,,,x\n", False),
    ],
)
def test_knows_files_without_ids(tmp_path: Path, data: str, lacks_ids: bool) -> None:
    path = tmp_path / "file"
    path.write_text(data)
    source = FileSource(str(path))
    list(source.items())
    assert source.lacks_ids == lacks_ids


@pytest.mark.parametrize(
    "data",
    [
        'title\n"one, two"\nthree\n"one, two"\n',
        "name,title\nJo,x\nJo,y\nJo,x",  # a column `name` may name a person
        '[{"id": NaN, "title": "x"}, {"id": "", "post_id": null, "title": "y"}, {"title": "x"}]',
    ],
)
def test_derives_missing_ids_from_the_text(tmp_path: Path, data: str) -> None:
    first, other, again = posts(tmp_path, data)
    assert first.id == again.id != other.id
    assert first.id.startswith("text-")


LONG = json.dumps({"id": 1, "title": "x" * (MAX_RECORD_SIZE + 10)})
#: Content of a file, the ids of its posts, and the place of each bad record with a part of its
#: reason.
BAD_RECORDS: list[tuple[str, list[str], list[tuple[str, str]]]] = [
    (
        '{"id": 1, "title": "x"}\nnope\n\n[1]\n{"id": 2}\n"text"\n{"id": 3, "body": "y"}\n',
        ["1", "3"],
        [("2", "JSON"), ("4", "object"), ("5", "title or body"), ("6", "object")],
    ),
    (
        '[{"id": 1, "title": "x"},\n 5,\n {"id": 2 "title": "y"}]',
        ["1"],
        [("element 2", "object"), ("element 3", r"array.*character 10\b")],
    ),
    (
        "id,title\n1,x\n2,y,z\n3\n4,w\n",
        ["1", "4"],
        [("3", r"\b3 fields.*\b2 columns"), ("4", "title")],
    ),
    (
        f'{LONG}\n{{"id": 2, "title": "y"}}\n{LONG}',
        ["2"],
        [("1", "longer"), ("3", "longer")],
    ),
    ('{"id": ' + "[" * 100_000 + '\n{"id": 2, "title": "y"}\n', ["2"], [("1", "JSON")]),
    ('id,title\n1,"x\n2,"y"\n3,z\n', ["3"], [("2-3", "quot")]),
    ('id,title\n1,"a "b" c"\n2,y\n', ["2"], [("2", "quot")]),
    ('id,title\n1,"x\n2,y",z\n4,w\n', ["4"], [("2-3", "quot")]),
    ('id,"Title\r\n(short)",Text,"a\nb"\r\n1,x,y,z\r\n2\r\n', ["1"], [("5", "title")]),
    # Excel saves such bytes. Lines of plain ASCII are read; no encoding is guessed.
    (
        'id;title;size\r\n1;x;5\r\n2;K\udce4se;6\r\n3;"two\r\nna\udcefve lines";7\r\n4;y;8\r\n',
        ["1", "4"],
        [("3", NOT_UTF8), ("4-5", NOT_UTF8)],
    ),
    (
        '{"id": 1, "title": "x"}\n{"id": 2, "title": "K\udce4se"}\n',
        ["1"],
        [("2", NOT_UTF8)],
    ),
    (
        '[{"id": 1, "title": "x"},\n{"id": 2, "title": "K\udce4se"}]',
        ["1"],
        [("element 2", NOT_UTF8)],
    ),
]


@pytest.mark.parametrize(("data", "ids", "bad"), BAD_RECORDS)
def test_reports_bad_records_and_keeps_good_ones(
    tmp_path: Path, data: str, ids: list[str], bad: list[tuple[str, str]]
) -> None:
    good, found = both(tmp_path, data.encode("utf-8", "surrogateescape"), "posts.jsonl")
    assert [post.id for post in good] == ids
    assert [record.where.rsplit("/", 1)[1] for record in found] == [
        f"posts.jsonl:{place}" for place, _ in bad
    ]
    assert all(
        re.search(reason, record.reason)
        for record, (_, reason) in zip(found, bad, strict=True)
    )
    assert all(record.skipped for record in found)


def test_keeps_posts_with_invalid_score_or_date(tmp_path: Path) -> None:
    good, bad = both(
        tmp_path,
        '{"id": 1, "title": "x", "score": "•", "date": 1'
        + "0" * 400
        + ', "extra": [1]}\n',
    )
    assert [(post.id, post.score, post.created_utc, post.extra) for post in good] == [
        ("1", None, None, None)
    ]
    assert sorted(record.reason.split(":")[0] for record in bad) == [
        "created_utc",
        "extra",
        "score",
    ]
    assert not any(record.skipped for record in bad)


def test_reads_a_large_array(tmp_path: Path) -> None:
    many = [
        {"id": str(n), "title": "x", "body": "long " * (n % 3000)} for n in range(300)
    ]
    assert [post.id for post in posts(tmp_path, json.dumps(many))] == [
        str(n) for n in range(300)
    ]


#: Code that reads a file and prints its posts' ids, the number of bad records and the growth of
#: peak memory in MiB.
READS = """
import re, sys
from feedmill.producers.files import FileSource
from feedmill.producers.records import BadRecord
from feedmill.shared.errors import InputError
megabytes = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
before, found = megabytes(), []
try:
    found.extend(FileSource(sys.argv[1]).items())
except InputError as error:
    found.append(BadRecord("", str(error)))
bad = [item for item in found if isinstance(item, BadRecord)]
print([item.id for item in found if item not in bad], len(bad), int(megabytes() - before))
"""


@pytest.mark.parametrize(
    ("begins", "ends"),
    [
        (
            b'{"id": 1, "title": "x"}\n{"id": 2, "title": "',
            b'"}\n{"id": 3, "title": "y"}\n',
        ),
        (b'[{"id": 1, "title": "x"}, {"id": 2, "title": "', b'"}]'),
        (b"id,title\n1,x\n2," + b'"', b'"\n'),
    ],
    ids=["lines", "array", "csv"],
)
def test_compression_bombs_take_little_memory(
    tmp_path: Path, begins: bytes, ends: bytes
) -> None:
    """Read 150 KB that unpack to 150 MB."""
    path = tmp_path / "bomb.gz"
    path.write_bytes(
        gzip.compress(begins) + 150 * gzip.compress(b"x" * 2**20) + gzip.compress(ends)
    )
    done = subprocess.run(
        [sys.executable, "-c", READS, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    ids, bad, megabytes = re.fullmatch(r"\[(.*)\] (\d+) (\d+)\n", done.stdout).groups()  # type: ignore[union-attr]
    assert ids == ("'1', '3'" if begins.startswith(b"{") else "'1'")
    assert int(bad) > 0
    assert int(megabytes) < 100


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ("\r\n  \nid;title\n1;one\n2", 5),
        ("\ufeff\r\n\r\nid;title\r\n1;one\r\n2\r\n", 5),
        ("id|title\n1|one\n2", 3),
        ("id,title\r1,one\r2\r", 3),
        ('id;title;"a, b, c, d"\n1;one;x\n2', 3),
        ("id,title\n1,one\n,\n,\n\n2\n", 6),
    ],
)
def test_reads_csv_as_spreadsheets_write_it(
    tmp_path: Path, data: str, place: int
) -> None:
    good, bad = both(tmp_path, data)
    assert [(post.id, post.title) for post in good] == [("1", "one")]
    assert [record.where.rsplit(":", 1)[1] for record in bad] == [str(place)]


@pytest.mark.parametrize(
    "data",
    [
        b'id,title\r1,one\r2,"two\r',
        b"a\rb\x00\rc" * 50,
        b'"' + b"x" * 200_000 + b"\rid,title",
        b'"id,title\n1,x\n',
        b"\r\r\r",
    ],
)
def test_junk_is_an_input_error_or_a_bad_record(tmp_path: Path, data: bytes) -> None:
    try:
        _, bad = both(tmp_path, data)
    except InputError as error:
        assert str(tmp_path) in str(error)  # noqa: PT017 - junk may also be a bad record
    else:
        assert bad


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize(
    "data",
    [
        "id\ttitle\r\n1\tone\r\n2\tzwei – 😀\r\n",
        jsonl({"id": 1, "title": "one"}) + '{"id":2,"title":"zwei – 😀"}',
    ],
)
def test_reads_utf16_with_a_byte_order_mark(
    tmp_path: Path, data: str, encoding: str
) -> None:
    """Excel saves "Unicode text" as UTF-16."""
    found = posts(tmp_path, f"\ufeff{data}".encode(encoding))
    assert [(post.id, post.title) for post in found] == [
        ("1", "one"),
        ("2", "zwei – 😀"),
    ]


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1252", "Käse – 5 €"),
        ("latin-1", "Käse"),
        ("utf-16-le", "Käse 😀"),
        ("shift_jis", "日本"),
    ],
)
def test_reads_a_given_encoding(tmp_path: Path, encoding: str, text: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(f"id;title\n1;{text}\n".encode(encoding))
    (post,) = FileSource(str(path), encoding=encoding).items()
    assert isinstance(post, Post)
    assert post.title == text


def test_reports_bytes_that_the_given_encoding_lacks(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"id;title\n1;x\n2;\x81\n3;y\n")
    one, bad, three = FileSource(str(path), encoding="cp1252").items()
    assert isinstance(bad, BadRecord)
    assert bad.where.endswith(":3")
    assert isinstance(one, Post)
    assert isinstance(three, Post)


@pytest.mark.parametrize("encoding", ["utf-16", "idna", "klingon", "base64", "x\0"])
def test_rejects_unknown_and_wrong_encodings(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "file"
    path.write_bytes("id;text\n1;né\n".encode("cp1252"))
    with pytest.raises(UserError, match="--encoding"):
        list(FileSource(str(path), encoding=encoding).items())


NAN = '{"id": 1, "title": NaN, "body": "good", "score": NaN, "date": NaN, "topic": NaN}'


@pytest.mark.parametrize(
    "data",
    [
        NAN,
        f"[{NAN}]",
        NAN.replace("NaN", "null"),
        "id,title,body,score,date,topic\n1,,good,,,\n",
    ],
)
def test_missing_values_are_not_text(tmp_path: Path, data: str) -> None:
    assert posts(tmp_path, data) == [Post(id="1", body="good")]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", ("empty",)),
        (b"id,title", ("no posts",)),
        (b"\nid;title\r\n\r\n;\n", ("no posts",)),
        (b"foo,bar\n1,2\n", ("title", "body", "foo, bar")),
        (b"comment\nx\n", ("title", "body", "comment")),
        (b"PK\x03\x04", ("Excel", "CSV UTF-8")),
        (b"\xd0\xcf\x11\xe0", ("old Excel file", ".xlsx", "CSV UTF-8")),
        (b"sep=^\nid^title\n1^x\n", ("sep=^", "semicolons")),
        (b"PAR1", ("Parquet",)),
        (b"foo,b\x1b[31mar\n1,2\n", ("title", "body", r"foo, b\x1b[31mar")),
        (random.Random(1).randbytes(9000), ()),
        ("id,title\n1,x\n".encode("utf-16-le"), ()),
        (b"\x1f\x8b123", ()),
        (gzip.compress(b'{"id": 1, "title": "x"}\n' * 1000)[:-20], ()),
        (zstd(b'{"id": 1, "title": "x"}\n' * 1000)[:-3], ()),
        (zstd(b'{"id": 1, "title": "x"}\n') + b"PK", ()),
        (zstd(b'{"id": 1, "title": "x"}\n') + b"PK\x03\x04", ("zstd",)),
        (zstd(b'{"id": 1, "title": "x"}\n', write_checksum=True)[:-1] + b"\0", ()),
        (zstd(b"", write_content_size=False), ("empty",)),
        (b" [ ]\n", ("no posts",)),
    ],
)
def test_rejects_files_without_posts(
    tmp_path: Path, data: bytes, named: tuple[str, ...]
) -> None:
    with pytest.raises(InputError, match=naming(tmp_path / "file", *named)):
        both(tmp_path, data)


def test_reads_lines_of_plain_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"the parcel, or what is left of it\r\n\nrefund please \n\xff\n"
    good, bad = both(tmp_path, data, name="texts.TXT")
    assert [post.body for post in good] == [
        "the parcel, or what is left of it",
        "refund please",
    ]
    assert [record.where.rsplit(":", 1)[1] for record in bad] == ["4"]
    assert [
        post.body for post in posts(tmp_path, "id\ttext\n1\tx\n", name="table.txt")
    ] == ["x"]
    monkeypatch.setattr(
        "sys.stdin",
        io.TextIOWrapper(io.BufferedReader(io.BytesIO(b"where is my parcel\n"))),
    )
    (post,) = FileSource("-").items()
    assert isinstance(post, Post)
    assert (post.body, post.id[:5]) == ("where is my parcel", "text-")


@pytest.mark.parametrize(
    "data", ["Text;\nx;\ny\n", "Text,,\nx,,\ny,,\n", "Title;Text;\nx;;\ny;\n"]
)
def test_a_delimiter_at_the_end_of_the_header_is_no_column(
    tmp_path: Path, data: str
) -> None:
    assert [
        post.title or post.body for post in posts(tmp_path, data, name="one.csv")
    ] == [
        "x",
        "y",
    ]


def test_reads_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    day = datetime(2023, 11, 14, 22, 13, 20)
    rows = [
        {"id": number, "Title": f"x{number}", "date": day, "raw": b"\xff"}
        for number in range(3)
    ]
    monkeypatch.setattr(parquet, "MAX_ROWS", 2)
    path = tmp_path / "posts.parquet"
    pq.write_table(pa.Table.from_pylist([*rows, {"id": 3, "Title": None}]), path)
    good, (bad,) = both(tmp_path, path.read_bytes())
    assert [(post.id, post.title, post.created_utc) for post in good] == [
        (str(n), f"x{n}", 1700000000) for n in range(3)
    ]
    assert bad.where.endswith(":4")
    since = Filters(since=1700000001)
    assert not [
        post
        for post in items_of(tmp_path, path.read_bytes(), since)
        if isinstance(post, Post)
    ]
    pq.write_table(
        pa.table({"Title": pa.array([b"\xff", b"x"]).view(pa.string())}), path
    )
    damaged, intact = FileSource(str(path)).items()
    assert (isinstance(damaged, BadRecord), isinstance(intact, Post)) == (True, True)
    assert re.search(r"posts.parquet:1.*column Title.*UTF-8", str(damaged))


def test_a_column_without_a_name_is_no_title(tmp_path: Path) -> None:
    """pandas writes its index as such a column."""
    path = tmp_path / "file.csv"
    path.write_text(",comment\n0,x\n")
    columns = Columns.of(body="comment")
    (post,), (row,) = (
        FileSource(str(path), columns=columns).items(),
        FileSource(str(path), columns=columns).rows(),
    )
    assert isinstance(post, Post)
    assert isinstance(row.post, Post)
    assert [(each.title, each.body) for each in (post, row.post)] == [("", "x")] * 2


def test_truncated_zstd_gives_the_complete_records(tmp_path: Path) -> None:
    """Cut the file at random places and between two frames.

    Exactly the posts before the cut are read.
    """
    rng = random.Random(5)
    many = [
        {"id": str(number), "title": rng.randbytes(400).hex()} for number in range(500)
    ]
    frames = [zstd(jsonl(*many[start : start + 250]).encode()) for start in (0, 250)]
    packed, path = b"".join(frames), tmp_path / "posts.zst"
    cuts = [
        5,
        len(frames[0]) - 1,
        len(frames[0]),
        len(frames[0]) + 3,
        len(packed) - 1,
        len(packed),
    ]
    found = []
    for cut in [*cuts, *rng.sample(range(5, len(packed)), 20)]:
        path.write_bytes(packed[:cut])
        source = FileSource(str(path))
        good, why = read_until_error(source)
        assert [post.id for post in good] == [
            str(number) for number in range(len(good))
        ]
        assert (str(path) in why) != (cut in (len(frames[0]), len(packed)))
        assert source.done == source.size == cut
        found.append(len(good))
    # A missing byte damages only the last of a frame's blocks, which have at most 128 KiB.
    assert (found[0], found[2], found[3], found[5]) == (0, 250, 250, 500)
    assert 100 < found[1] < 250
    assert 350 < found[4] < 500


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python has zstd itself")
def test_zstd_needs_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "backports.zstd", None)
    monkeypatch.delattr("backports.zstd", raising=False)
    with pytest.raises(UserError, match=r"/posts.*feedmill\[dumps\]"):
        items_of(tmp_path, zstd(b"x"), name="posts")


#: A post as in a dump.
SUBMISSION = {
    "id": "17vcabc",
    "name": "t3_17vcabc",
    "title": "Which linter?",
    "selftext": "And why?",
}


@pytest.mark.parametrize("name", ["missing", ""])
def test_rejects_what_is_no_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=str(tmp_path / name)):
        list(FileSource(str(tmp_path / name)).items())


def test_rejects_comments(tmp_path: Path) -> None:
    comment = {
        "id": "k9a",
        "body": "Ruff.",
        "link_id": "t3_17vcabc",
        "parent_id": "t3_17vcabc",
        "created_utc": 1,
    }
    reply = comment | {"link_id": None, "parent_id": "t1_k9a"}
    good, bad = both(
        tmp_path,
        jsonl(comment, SUBMISSION, reply, {"id": 1, "body": "x", "parent_id": 5}),
    )
    assert [post.id for post in good] == ["t3_17vcabc", "1"]
    assert [("comment" in record.reason, record.skipped) for record in bad] == [
        (True, True)
    ] * 2


@pytest.mark.parametrize(
    ("filters", "ids"),
    [
        (Filters(frozenset({"python"})), ["1", "2", "3", "8"]),
        (Filters(frozenset({"python", "rust"})), ["1", "2", "3", "4", "8"]),
        (Filters(since=1700000000), ["1", "3", "4", "5"]),
        (Filters(until=1700000000), ["2", "8"]),
        (
            Filters(frozenset({"python"}), since=1600000000, until=1700000001),
            ["1", "2"],
        ),
    ],
)
@pytest.mark.parametrize(
    "form", [jsonl, lambda *records: json.dumps(records)], ids=["lines", "array"]
)
def test_filters_by_subreddit_and_time(
    tmp_path: Path, form: Callable[..., str], filters: Filters, ids: list[str]
) -> None:
    records = [
        {"id": 1, "title": "x", "subreddit": "Python", "created_utc": 1700000000},
        {"id": 2, "title": "x", "Subreddit": "r/python", "created_utc": "1699999999"},
        {"id": 3, "title": "x", "subreddit_name": "/r/PYTHON/", "date": "2023-11-15"},
        {"id": 4, "title": "x", "subreddit": "rust", "created_utc": 1700000000000},
        {"id": 5, "title": "x", "subreddit": None, "created_utc": 1700000001},
        {"id": 6, "title": "x", "subreddit": "go", "created_utc": "Tuesday"},
        {"id": 7, "title": "x", "subreddit": "pythonista", "text": "python"},
        {
            "id": 8,
            "title": "x",
            "subreddit": "python",
            "created_utc": 1500000000,
            "from": [{"subreddit": "go"}],
        },
        {"id": 9, "title": "x", "subreddit": "go", "from": [{"subreddit": "python"}]},
    ]
    items = items_of(tmp_path, form(*records), filters)
    assert [item.id for item in items if isinstance(item, Post)] == ids
    assert items.count(LeftOut.BY_FILTERS) == len(records) - len(ids)


# Counting records.


def reading(
    path: Path, filters: Filters | None = None
) -> tuple[FileReading, io.StringIO]:
    shown = io.StringIO()
    return FileReading(
        str(path), Console(file=shown, width=400), filters=filters or Filters()
    ), shown


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Ten records: six posts, the first with an invalid score; one of another subreddit; three
    without a post.
    """
    path = tmp_path / "posts.jsonl"
    good = [{"id": str(number), "title": "x", "subreddit": "a"} for number in range(6)]
    others: list[object] = [
        "nope",
        {"id": "c", "body": "x", "link_id": "t3_1"},
        good[0] | {"subreddit": "b"},
    ]
    others.append(good[0] | {"title": "[deleted]"})
    records: list[object] = [
        good[0] | {"score": "many"},
        *others[:2],
        *good[1:4],
        *others[2:],
        *good[4:],
    ]
    path.write_text(
        "\n".join(
            record if isinstance(record, str) else json.dumps(record)
            for record in records
        )
    )
    return path


def test_counts_records_by_outcome(mixed: Path) -> None:
    read, shown = reading(mixed, Filters(frozenset({"a"})))
    assert [post.id for post in read.posts()] == list("012345")
    read.end()
    assert (read.records, read.skipped, read.left_out, read.removed) == (10, 1, 2, 1)
    first, second = shown.getvalue().splitlines()
    assert "(kept" in first
    assert "(skipped" in second


def test_deleted_texts_are_counted_apart(tmp_path: Path) -> None:
    path = tmp_path / "posts.jsonl"
    path.write_text('{"id": 1, "text": "[deleted]"}\n{"id": 2, "text": " "}\n')
    read, _ = reading(path)
    assert list(read.posts()) == []
    assert (read.without_text, read.removed) == (1, 1)


def test_long_texts_are_cut_and_noted_once(tmp_path: Path) -> None:
    path = tmp_path / "posts.jsonl"
    path.write_text(
        "".join(
            json.dumps({"id": number, "body": "word " * 30_000}) + "\n"
            for number in (1, 2)
        )
    )
    read, shown = reading(path)
    assert [len(post.body) for post in read.posts()] == [100_000] * 2
    read.end()
    line = "body: only the first 100,000 characters are used"
    assert shown.getvalue() == f"{path}:1: {line} (kept)\n… and 1 more: {line}\n"
    assert read.skipped == 0


def test_truncated_file_is_incomplete(tmp_path: Path) -> None:
    path = tmp_path / "posts.gz"
    path.write_bytes(b"\x1f\x8b\x08")
    read, _ = reading(path)
    assert list(read.posts()) == []
    with pytest.raises(InputError, match=r"posts\.gz"):
        read.end()


def test_shows_the_first_record_of_each_reason(tmp_path: Path) -> None:
    path = tmp_path / "comments.jsonl"
    path.write_text(
        '{"id": 0}\n'
        + "".join(f"[{number}]\n" for number in range(499))
        + '{"id": 1}\n' * 500
    )
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
    path.write_text(
        "id,Text,Ups,Date\n"
        + "".join(f"{row},good,4.5 stars,yesterday\n" for row in range(700))
    )
    read, shown = reading(path)
    assert len(list(read.posts())) == 700
    read.end()
    ups, date, *sums = shown.getvalue().splitlines()
    assert re.search(rf"{path}:2: score: .*column ups", ups)
    assert re.search(
        rf"{path}:2: created_utc: .*yesterday.*--date-format.*column date", date
    )
    assert sums == ["… and 699 more: column ups", "… and 699 more: column date"]
    assert read.skipped == 0


def test_notes_missing_id_columns_once(tmp_path: Path) -> None:
    """The note appears only if the command shows ids and the user chose no id column."""
    path = tmp_path / "posts.csv"
    path.write_text("ticket,channel,text\nT1,mail,x\nT2,web,y\n")
    for id_column, shows_ids, noted in [
        (None, True, True),
        (None, False, False),
        ("ticket", True, False),
    ]:
        shown = io.StringIO()
        read = FileReading(
            str(path),
            Console(file=shown, width=200),
            columns=Columns.of(id_column),
            shows_ids=shows_ids,
        )
        assert len(list(read.posts())) == 2
        assert shown.getvalue().count("\n") == noted
        assert not noted or re.search(rf"{path}.*--id-column", shown.getvalue())


#: A table as pandas and other programs write it into one object of JSON.
FRAME = {"id": ["a", "b"], "text": ["good", "x"]}
ROWS = [{"id": "a", "text": "good"}, {"id": "b", "text": "x"}]
WHOLE_OBJECTS = {
    "columns": {name: dict(enumerate(values)) for name, values in FRAME.items()},
    "lists": FRAME,
    "split": {
        "columns": ["id", "text"],
        "index": [0, 1],
        "data": [["a", "good"], ["b", "x"]],
    },
    "table": {"schema": {"fields": []}, "data": ROWS},
    "index": dict(enumerate(ROWS)),
    "data": {"data": ROWS},
    "posts": {"count": 2, "posts": ROWS},
    "long columns": {
        "id": dict(enumerate(range(20_000))),
        "text": dict(enumerate(["good"] * 20_000)),
    },
    "long data": {"data": ROWS * 10_000},
}


@pytest.mark.parametrize("name", WHOLE_OBJECTS)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_table_in_one_object_is_refused_with_the_way_out(
    tmp_path: Path, name: str, indent: int | None
) -> None:
    """It is not one post without text."""
    (tmp_path / "posts.json").write_text(json.dumps(WHOLE_OBJECTS[name], indent=indent))
    with pytest.raises(InputError, match=r"posts\.json is .*JSON.*(jq|orient)"):
        list(FileSource(str(tmp_path / "posts.json")).items())


@pytest.mark.parametrize(
    "record",
    [
        {"all_awardings": [{"x": 1}], "title": "x"},
        {"data": {"0": "a"}, "text": "x"},
        {"posts": [1], "body": "x"},
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_record_with_lists_and_objects_is_a_post(
    tmp_path: Path, record: dict[str, object], count: int
) -> None:
    assert len([*posts(tmp_path, jsonl(*[record] * count))]) == count


@pytest.mark.parametrize(
    "data",
    [
        "text,topic,Team,When,Shop\nIt broke,3,sales,01.02.2026,Berlin",
        jsonl(
            {
                "text": "It broke",
                "topic": "3",
                "team": "sales",
                "When": "01.02.2026",
                "shop": "Berlin",
            }
        ),
    ],
    ids=["csv", "lines"],
)
def test_label_date_and_subreddit_are_read_from_the_chosen_columns(
    tmp_path: Path, data: str
) -> None:
    path = tmp_path / "posts"
    path.write_text(data)
    columns = Columns.of(
        date_format="%d.%m.%Y", label="team", date="when", subreddit="shop"
    )
    (post,) = FileSource(str(path), columns=columns).items()
    assert isinstance(post, Post)
    february = datetime(2026, 2, 1, tzinfo=UTC).timestamp()
    assert (post.topic, post.created_utc, post.subreddit) == (
        "sales",
        february,
        "Berlin",
    )
    chosen = Filters(frozenset({"berlin"}), since=february, until=february + 1)
    assert len(list(FileSource(str(path), chosen, columns=columns).items())) == 1
    others = Filters(frozenset({"paris"}))
    (skipped,) = FileSource(str(path), others, columns=columns).items()
    assert skipped is LeftOut.BY_FILTERS


@pytest.mark.parametrize("option", ["label", "date", "subreddit"])
def test_names_the_missing_column_and_its_option(tmp_path: Path, option: str) -> None:
    path = tmp_path / "posts.csv"
    path.write_text("text,team\nIt broke,sales")
    columns = Columns.of(**{option: "branch"})
    with pytest.raises(InputError, match=rf"no column branch \(--{option}-column\)"):
        list(FileSource(str(path), columns=columns).items())


def test_a_chosen_label_of_an_export_is_the_topic(tmp_path: Path) -> None:
    path = tmp_path / "export.csv"
    path.write_text(
        "id,title,label,scores,fingerprint,classified_at,corrected\n"
        'a,It broke,praise,"{""praise"": 0.9}",f,2026-02-01T00:00:00Z,complaint'
    )
    (post,) = FileSource(str(path), columns=Columns.of(label="corrected")).items()
    assert isinstance(post, Post)
    assert post.topic == "complaint"


@pytest.mark.parametrize(
    ("fields", "column"),
    [
        ({"label": ["a"]}, "label"),
        ({"label": {"a": 1}}, "label"),
        ({"label": 5}, "label"),
        ({"label": []}, "label"),
        ({"scores": [1]}, "scores"),
        ({"scores": [[["a"], 1]]}, "scores"),
        ({"scores": 5}, "scores"),
        ({"scores": None}, "scores"),
        ({"scores": "[1]"}, "scores"),
        ({"scores": {"b": 1}}, "scores"),
        ({"scores": {"a": "1"}}, "scores"),
    ],
)
def test_an_invalid_label_of_an_export_is_named(
    tmp_path: Path, fields: dict[str, Any], column: str
) -> None:
    row = {
        "id": "1",
        "title": "x",
        "label": "a",
        "scores": {"a": 1},
        "fingerprint": "f",
        "classified_at": "2026-02-01T00:00:00Z",
    }
    path = tmp_path / "export.jsonl"
    path.write_text(jsonl(row | fields, row | {"id": "2"}))
    problem, example = FileSource(str(path)).items(labelled=True)
    assert isinstance(problem, BadRecord)
    assert problem.reason.startswith(f"{column}: expected")
    assert isinstance(example, Labelled)
    assert example.post.id == "2"
