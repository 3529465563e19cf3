"""producers/files.py: every format, every odd line, and nothing good lost."""

import gzip
import io
import json
import random
import sys
from pathlib import Path

import pytest

from producers.files import MAX_RECORD, BadRecord, read
from shared.errors import InputError
from shared.messages import Post


def posts(tmp_path: Path, data: str | bytes, name: str = "file") -> list[Post]:
    found, bad = both(tmp_path, data, name)
    assert not bad
    return found


def both(tmp_path: Path, data: str | bytes, name: str = "file") -> tuple[list[Post], list[BadRecord]]:
    path = tmp_path / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    items = list(read(str(path)))
    return [i for i in items if isinstance(i, Post)], [i for i in items if isinstance(i, BadRecord)]


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
@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress], ids=["plain", "gzip"])
def test_formats(tmp_path: Path, data: str, pack: object) -> None:
    packed = pack(data.encode())  # type: ignore[operator]
    assert [(post.id, post.title) for post in posts(tmp_path, packed)] == [("1", "one"), ("2", "zwei – два")]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(b'{"id": 1, "title": "x"}'))))
    assert [item.id for item in read("-") if isinstance(item, Post)] == ["1"]


@pytest.mark.parametrize(
    ("record", "field", "value"),
    [
        ({"selftext": "x"}, "body", "x"),
        ({"text": "x"}, "body", "x"),
        ({"description": "x"}, "body", "x"),
        ({"Body": "x"}, "body", "x"),
        ({"headline": "x"}, "title", "x"),
        ({"title": "x", "label": "food"}, "topic", "food"),
        ({"title": "x", "ups": 3}, "score", 3),
        ({"title": "x", "score": "7"}, "score", 7),
        ({"title": "x", "permalink": "/r/x"}, "url", "/r/x"),
        ({"title": "x", "name": "t3_abc"}, "id", "t3_abc"),
        ({"title": "x", "url": "https://www.reddit.com/r/x/comments/1abc2/title/"}, "id", "1abc2"),
        ({"title": "x", "created": 1700000000}, "created_utc", 1700000000.0),
        ({"title": "x", "created_utc": "1700000000.5"}, "created_utc", 1700000000.5),
        ({"title": "x", "timestamp": 1700000000000}, "created_utc", 1700000000.0),
        ({"title": "x", "date": "2023-11-14"}, "created_utc", 1699920000.0),
        ({"title": "x", "date": "2023-11-14 22:13:20"}, "created_utc", 1700000000.0),
        ({"title": "x", "date": "2023-11-14T23:13:20+01:00"}, "created_utc", 1700000000.0),
        ({"title": "x", "date": "11/14/2023, 22:13:20"}, "created_utc", 1700000000.0),
        ({"title": "x", "date": ""}, "created_utc", None),
        ({"title": "x", "date": None, "subreddit": ""}, "subreddit", None),
    ],
)
def test_the_names_that_people_have(tmp_path: Path, record: dict[str, object], field: str, value: object) -> None:
    (post,) = posts(tmp_path, json.dumps(record))
    assert getattr(post, field) == value


def test_without_an_id_the_same_text_gets_the_same_id(tmp_path: Path) -> None:
    first, other, again = posts(tmp_path, 'title\n"one, two"\nthree\n"one, two"\n')
    assert first.id == again.id != other.id
    assert first.id.startswith("text-")


def test_csv_with_quotes_and_lines(tmp_path: Path) -> None:
    (post,) = posts(tmp_path, 'Topic,Title,Body,Subreddit,Score,URL,Date\nmusic,"A, ""b""","two\nlines",m,5,,\n')
    assert (post.topic, post.title, post.body, post.score) == ("music", 'A, "b"', "two\nlines", 5)


def test_bad_lines_are_named_and_good_ones_kept(tmp_path: Path) -> None:
    data = '{"id": 1, "title": "x"}\nnope\n\n[1]\n{"id": 2}\n"text"\n{"id": 3, "body": "y"}\n'
    good, bad = both(tmp_path, data, "posts.jsonl")
    assert [post.id for post in good] == ["1", "3"]
    assert [record.where.rsplit("/", 1)[1] for record in bad] == [f"posts.jsonl:{line}" for line in (2, 4, 5, 6)]
    assert bad[0].reason == "not JSON: Expecting value at column 1"
    assert "expected an object" in bad[1].reason
    assert bad[2].reason == "neither title nor body holds any text"
    assert all(record.skipped for record in bad)


def test_a_post_is_not_lost_for_its_score_or_date(tmp_path: Path) -> None:
    good, bad = both(tmp_path, '{"id": 1, "title": "x", "score": "•", "date": "Tuesday", "extra": [1]}\n')
    assert [(post.id, post.score, post.created_utc, post.extra) for post in good] == [("1", None, None, None)]
    assert sorted(record.reason.split(":")[0] for record in bad) == ["created_utc", "extra", "score"]
    assert not any(record.skipped for record in bad)


def test_a_broken_array_says_where_it_breaks(tmp_path: Path) -> None:
    good, bad = both(tmp_path, '[{"id": 1, "title": "x"},\n 5,\n {"id": 2 "title": "y"}]')
    assert [post.id for post in good] == ["1"]
    assert [record.where.rsplit(":", 1)[1] for record in bad] == ["2 (element 2)", "3 (element 3)"]
    assert "the rest of the array cannot be read" in bad[1].reason
    assert bad[1].reason.endswith("at the element's character 10")


def test_a_large_array_is_read_piece_by_piece(tmp_path: Path) -> None:
    many = [{"id": str(n), "title": "x", "body": "long " * (n % 3000)} for n in range(300)]
    assert [post.id for post in posts(tmp_path, json.dumps(many))] == [str(n) for n in range(300)]


def test_csv_rows_that_do_not_fit(tmp_path: Path) -> None:
    good, bad = both(tmp_path, "id,title\n1,x\n2,y,z\n3\n4,w\n")
    assert [post.id for post in good] == ["1", "4"]
    assert [(record.where.rsplit(":", 1)[1], record.reason.split(";")[0]) for record in bad] == [
        ("3", "3 fields under 2 columns"),
        ("4", "neither title nor body holds any text"),
    ]


def test_endless_lines_are_bounded(tmp_path: Path) -> None:
    long = json.dumps({"id": 1, "title": "x" * (MAX_RECORD + 10)})
    good, bad = both(tmp_path, f'{long}\n{{"id": 2, "title": "y"}}\n{long}')
    assert [post.id for post in good] == ["2"]
    assert [record.where.rsplit(":", 1)[1] for record in bad] == ["1", "3"]


def test_deep_nesting_is_a_bad_line(tmp_path: Path) -> None:
    good, bad = both(tmp_path, '{"id": ' + "[" * 100_000 + '\n{"id": 2, "title": "y"}\n')
    assert [post.id for post in good] == ["2"]
    assert len(bad) == 1


def test_bytes_that_are_no_utf8_do_not_lose_the_post(tmp_path: Path) -> None:
    (post,) = posts(tmp_path, b'{"id": 1, "title": "caf\xe9"}')
    assert post.title == "caf�"


def test_a_quotation_mark_that_is_never_closed_is_told(tmp_path: Path) -> None:
    good, bad = both(tmp_path, 'id,title\n1,x\n2,"y\n3,z\n')
    assert [post.id for post in good] == ["1"]
    assert [record.where.rsplit(":", 1)[1] for record in bad] == ["3"]
    assert "never closed" in bad[0].reason


def test_a_damaged_first_line_does_not_cost_the_others(tmp_path: Path) -> None:
    good, bad = both(tmp_path, '"id": 1, "title": "x"}\n{"id": 2, "title": "y"}\n')
    assert [post.id for post in good] == ["2"]
    assert len(bad) == 1


def test_lists_within_the_list_are_named(tmp_path: Path) -> None:
    good, bad = both(tmp_path, '\n[[{"id": 1, "title": "x"}],\n{"id": 2, "title": "y"}]')
    assert [post.id for post in good] == ["2"]
    assert [record.where.rsplit(":", 1)[1] for record in bad] == ["2 (element 1)"]


def test_numbers_that_are_no_times(tmp_path: Path) -> None:
    good, bad = both(tmp_path, f'{{"id": 1, "title": "x", "created_utc": 1{"0" * 400}}}\n{{"id": 2, "title": "y"}}')
    assert [(post.id, post.created_utc) for post in good] == [("1", None), ("2", None)]
    assert [record.skipped for record in bad] == [False]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"foo,bar\n1,2\n", "Its columns: foo, bar"),
        (b"foo,b\x1b[31mar\n1,2\n", r"Its columns: foo, b\\x1b\[31mar"),
        (random.Random(1).randbytes(9000), "holds no text in UTF-8"),
        ("id,title\n1,x\n".encode("utf-16"), "holds no text in UTF-8"),
        (b"\x1f\x8b123", "cannot be read to its end"),
        (gzip.compress(b'{"id": 1, "title": "x"}\n' * 1000)[:-20], "cannot be read to its end"),
    ],
)
def test_files_that_are_no_posts(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(InputError, match=words):
        both(tmp_path, data)


def test_a_missing_file() -> None:
    with pytest.raises(InputError, match="There is no file /no/such/file"):
        list(read("/no/such/file"))
