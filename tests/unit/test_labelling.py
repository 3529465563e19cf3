"""`feedmill classify FILE --out OUT`, with a stand-in for the model."""

import csv
import gzip
import io
import json
import os
import re
import sys
from collections.abc import Generator, Iterable
from datetime import date, datetime
from decimal import Decimal
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feedmill.cli.offline import Labelling, OutFlags, Tally
from feedmill.cli.options import FileFlags
from feedmill.producers import files
from feedmill.shared.errors import InputError, UserError
from feedmill.shared.messages import Classification, Outcome, Post, PostError
from feedmill.tables import writing
from tests.support import make_classification

LABELS = ("good", "bad")
LONG_ID = "x" * 200


def classification(label: str, score: float) -> Classification:
    others = dict.fromkeys(LABELS, round(1 - score, 6))
    return make_classification(
        "1",
        label=label,
        scores=dict(sorted((others | {label: score}).items(), key=lambda item: -item[1])),
        weights="w",
        classified_at=0.0,
    )


def classify(posts: Iterable[Post]) -> Generator[tuple[Post, Outcome]]:
    """Classify ten posts at a time, like the pipeline, which reads ahead."""
    posts = iter(posts)
    while some := list(islice(posts, 10)):
        for post in some:
            if "poison" in post.text:
                yield post, PostError(id=post.id, error="scores that are not finite")
            else:
                label = "good" if "good" in post.text else "bad"
                yield post, classification(label, 0.52 if "unsure" in post.text else 0.9)


def label_file(path: Path | str, out: Path | str, limit: int | None = None, **flags: Any) -> Tally:
    options = {name: flags.pop(name) for name in ("scores", "prefix") if name in flags}
    labelling = Labelling(str(path), FileFlags(**flags), OutFlags(str(out), **options), limit)
    labelling.run(lambda: (LABELS, classify))
    return labelling.tally


def written(tmp_path: Path, data: str | bytes, out: str = "out.csv", **flags: Any) -> str:
    """Label a file with this content, and return the output."""
    path = tmp_path / "in"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    label_file(path, tmp_path / out, **flags)
    assert not list(tmp_path.glob(".*"))
    return (tmp_path / out).read_bytes().decode("utf-8", "surrogateescape")


@pytest.mark.parametrize(
    ("data", "labelled"),
    [
        ("id,title\n1,good,\n,,,\n", "id,title,label,label_score\n1,good,good,0.9\n,,,\n"),
        (
            "Nr;Text\r\n1;\"good; \"\"very\"\"\nso\"\r\n;\r\n\r\n3;x\r\n",
            'Nr;Text;label;label_score\r\n1;"good; ""very""\nso";good;0.9\r\n;;;\r\n3;x;bad;0.9\r\n',
        ),
        (",n,n,text\n0,1,x,good\n1\n", ",n,n,text,label,label_score\n0,1,x,good,good,0.9\n1,,,,,\n"),
        ("\ufeffTITLE\tBody\rgood\tx\r", "\ufeffTITLE\tBody\tlabel\tlabel_score\ngood\tx\tgood\t0.9\n"),
        ("text\n=1+1 good\n-1\n", "text,label,label_score\n=1+1 good,good,0.9\n-1,bad,0.9\n"),
        ('text\n"a\rb\r\nc good"\n', 'text,label,label_score\n"a\rb\r\nc good",good,0.9\n'),
        (
            "title,score,date\ngood,4.5 stars,3.4.2024\n",
            "title,score,date,label,label_score\ngood,4.5 stars,3.4.2024,good,0.9\n",
        ),
        ("id,title\nx,[removed]\ny,good\n", "id,title,label,label_score\nx,[removed],,\ny,good,good,0.9\n"),
        (
            f"id,title\n,good\n{LONG_ID},no\n",
            f"id,title,label,label_score\n,good,good,0.9\n{LONG_ID},no,bad,0.9\n",
        ),
    ],
    ids=["beyond the header", "excel", "pandas", "mark", "formula", "line ends", "reddit-like", "removed", "ids"],
)  # fmt: skip
def test_csv_keeps_rows_columns_and_dialect(tmp_path: Path, data: str, labelled: str) -> None:
    assert written(tmp_path, data) == labelled


def test_tsv_has_tabs(tmp_path: Path) -> None:
    data = 'id,text\n1,"good, very"\n2,"a\tb"\n'
    expected = 'id\ttext\tlabel\tlabel_score\n1\tgood, very\tgood\t0.9\n2\t"a\tb"\tbad\t0.9\n'
    assert written(tmp_path, data, "out.tsv") == expected
    assert written(tmp_path, '{"text": "good"}\n', "out.tsv") == "text\tlabel\tlabel_score\r\ngood\tgood\t0.9\r\n"


def test_output_is_in_the_order_of_the_input(tmp_path: Path) -> None:
    rows = [("good", "no", "", "poison", "x,y,z")[row % 5] for row in range(503)]
    data = "n,text\n" + "".join(f"{number},{text}\n" for number, text in enumerate(rows))
    found = list(csv.DictReader(io.StringIO(written(tmp_path, data))))
    expected = [(str(number), text) for number, text in enumerate(rows) if text != "x,y,z"]
    assert [(row["n"], row["text"]) for row in found] == expected
    assert [row["label"] for row in found] == [{"good": "good", "no": "bad"}.get(text, "") for _, text in expected]


def test_counts_rows_and_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "in.csv"
    path.write_text("id,text\n1,good\n2,unsure\n3,\n4,poison\n5,a,b\n6,no\n,\n")
    tally = label_file(path, tmp_path / "out.csv")
    counts = json.loads(tally.as_json())
    assert counts.pop("seconds") >= 0
    assert counts == {
        "rows": 7,
        "labels": {"bad": 2, "good": 1},
        "unlabelled": {"title or body must contain text": 2, "scores that are not finite": 1},
        "left_out": {"3 fields, but 2 columns; a quote may be missing": 1},
    }
    assert tally.has_failures
    shown = capsys.readouterr().err
    assert re.search(rf"^6 of 7 rows of {path} in .* s, written to {tmp_path}/out.csv$", shown, re.MULTILINE)
    assert re.search(r"^  bad +2 +33%$", shown, re.MULTILINE)
    assert re.search(r"^no label: 2 rows, first in line 4: .*text$", shown, re.MULTILINE)
    assert re.search(r"^left out: 1 row, first in line 6: 3 fields", shown, re.MULTILINE)


RECORDS = (
    '{"title": "good", "n": 1, "ok": true, "mixed": 1, "big": 99999999999999999999, "x": NaN}\n'
    '{"n": 2.5, "title": "=1+1", "mixed": "a", "deep": {"k": ["ä"]}}\n'
    '{"only": null, "n": null}\n'
)


def test_json_keys_become_columns(tmp_path: Path) -> None:
    header, *rows = csv.reader(io.StringIO(written(tmp_path, RECORDS)))
    assert header == ["title", "n", "ok", "mixed", "big", "x", "deep", "only", "label", "label_score"]
    assert rows == [
        ["good", "1", "true", "1", "99999999999999999999", "", "", "", "good", "0.9"],
        ["'=1+1", "2.5", "", "a", "", "", '{"k":["ä"]}', "", "bad", "0.9"],
        [""] * 10,
    ]


@pytest.mark.parametrize("data", [RECORDS, "[" + RECORDS.strip().replace("\n", ",\n") + "]"], ids=["lines", "array"])
@pytest.mark.parametrize("out", ["out.jsonl", "out.jsonl.gz", "out.jsonl.zst"])
def test_json_keeps_its_keys_and_values(tmp_path: Path, data: str, out: str) -> None:
    written(tmp_path, data, out)
    kind = {".gz": "gzip", ".zst": "zstd"}.get(Path(out).suffix)
    with pa.input_stream(str(tmp_path / out), compression=kind) as file:
        found = [json.loads(line) for line in file.read().splitlines()]
    given = [json.loads(line.replace("NaN", "null")) for line in RECORDS.splitlines()]
    new = [{"label": label, "label_score": label and 0.9} for label in ("good", "bad", None)]
    assert found == [record | extra for record, extra in zip(given, new, strict=True)]


def test_parquet_keeps_the_types_of_json(tmp_path: Path) -> None:
    written(tmp_path, RECORDS, "out.parquet", scores=True)
    table = pq.read_table(tmp_path / "out.parquet")
    types = ["string", "double", "bool", "string", "string", "string", "string", "string"]
    assert [str(field.type) for field in table.schema] == [*types, "string", "double", "double", "double"]
    assert table.column("n").to_pylist() == [1.0, 2.5, None]
    assert table.column("label").to_pylist() == ["good", "bad", None]
    assert table.column("score_bad").to_pylist() == [pytest.approx(0.1), 0.9, None]


@pytest.fixture
def typed(tmp_path: Path) -> Path:
    """A Parquet file of three row groups with types that JSON lacks, and a pandas index that is not a column."""
    frame = pd.DataFrame(
        {
            "text": ["good", None, "x"] * 3,
            "seen": pd.date_range("2026-01-01", periods=9, tz="Europe/Berlin"),
            "day": [date(2026, 1, 1)] * 9,
            "tags": [["a", "b"], None, []] * 3,
            "kind": pd.Categorical(["p", "q", "p"] * 3, categories=["p", "q", "unused"]),
            "price": [Decimal("1.50")] * 9,
            "nested": [{"n": 1, "at": datetime(2026, 1, 1)}] * 9,
            "raw": [b"\xff"] * 9,
            "short": np.arange(9, dtype="int8"),
        },
        index=pd.Index([f"row {n}" for n in range(9)], name="key"),
    )
    frame.to_parquet(tmp_path / "in.parquet", row_group_size=4)
    return tmp_path / "in.parquet"


@pytest.mark.parametrize("limit", [None, 5])
@pytest.mark.parametrize("group", [1, 20_000])
def test_parquet_copies_types_index_and_metadata(
    typed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None, group: int
) -> None:
    monkeypatch.setattr(writing, "GROUP_ROWS", group)
    monkeypatch.setattr(files, "PARQUET_ROWS", 2)
    label_file(typed, tmp_path / "out.parquet", limit, scores=True)
    given, copied = pq.read_table(typed).slice(0, limit), pq.read_table(tmp_path / "out.parquet")
    added = ["label", "label_score", "score_good", "score_bad"]
    assert copied.column_names == [*given.column_names, *added]
    assert copied.drop_columns(added).equals(given, check_metadata=True)
    labels = [{"good": "good", "x": "bad", None: None}[text] for text in given["text"].to_pylist()]
    assert copied["label"].to_pylist() == labels
    frame = copied.to_pandas()
    assert list(frame.index) == [f"row {n}" for n in range(limit or 9)]
    assert list(frame["kind"].cat.categories) == ["p", "q", "unused"]
    assert (pq.ParquetFile(tmp_path / "out.parquet").num_row_groups > 1) == (group == 1)


def test_damaged_parquet_keeps_the_rows_before_the_damage(
    typed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PARQUET_ROWS", 2)
    data, metadata = bytearray(typed.read_bytes()), pq.read_metadata(typed)
    column = metadata.row_group(1).column(0)
    start = min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)
    data[start : start + 40] = b"\xff" * 40
    typed.write_bytes(data)
    with pytest.raises(InputError, match="Cannot read "):
        label_file(typed, tmp_path / "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet")["label"].to_pylist() == ["good", None, "bad", "good"]


@pytest.mark.parametrize("name", ["label", "Label", " label_score", "score_bad"])
@pytest.mark.parametrize("form", ["csv", "json"])
def test_never_replaces_a_column(tmp_path: Path, name: str, form: str) -> None:
    data = f"text,{name}\ngood,mine\n" if form == "csv" else f'{{"text": "x"}}\n{{"text": "good", "{name}": "mine"}}\n'
    with pytest.raises(UserError, match=rf"{re.escape(str(tmp_path))}.*{name.strip()}.*--prefix"):
        written(tmp_path, data, scores=True)
    assert not (tmp_path / "out.csv").exists()
    header, *_, row = csv.reader(io.StringIO(written(tmp_path, data, scores=True, prefix="new_")))
    assert header == ["text", name, "new_label", "new_label_score", "new_score_good", "new_score_bad"]
    assert row[:3] == ["good", "mine", "good"]


def test_marks_bytes_that_are_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The row has no label, and the user is told at once, because most rows of the file may be affected."""
    data = "id,text\n1,good\n2,K\udce4se\n3,good\n".encode("utf-8", "surrogateescape")
    assert written(tmp_path, data).splitlines()[2] == "2,K\ufffdse,,"
    assert re.search(rf"^{tmp_path}/in:3: not UTF-8.*--encoding", capsys.readouterr().err, re.MULTILINE)
    assert json.loads(written(tmp_path, data, "out.jsonl").splitlines()[1])["text"] == "K\ufffdse"
    with pytest.raises(InputError, match="--encoding"):
        written(tmp_path, "text,Gr\udcf6ße\ngood,1\n".encode("utf-8", "surrogateescape"))
    assert written(tmp_path, "text,Größe\ngood,1\n".encode("cp1252"), encoding="cp1252").startswith("\ufefftext,Größe,")


@pytest.mark.parametrize("row", ["good {}\n", '{{"text": "good {}"}}\n'], ids=["csv", "json"])
def test_writes_the_rows_before_damage(tmp_path: Path, row: str) -> None:
    lines = "text\n" * row.startswith("good") + "".join(map(row.format, range(9000)))
    path = tmp_path / "in.gz"
    path.write_bytes(gzip.compress(lines.encode())[:-1000])
    with pytest.raises(InputError, match=f"Cannot read {path}: "):
        label_file(path, tmp_path / "out.csv")
    assert len((tmp_path / "out.csv").read_text().splitlines()) > 1000


def test_an_interrupt_leaves_the_output_unchanged(tmp_path: Path) -> None:
    path, out = tmp_path / "in.csv", tmp_path / "out.csv"
    path.write_text("text\n" + "good\n" * 25)
    out.write_text("before")

    def interrupted(posts: Iterable[Post]) -> Generator[tuple[Post, Outcome]]:
        yield from islice(classify(posts), 20)
        raise KeyboardInterrupt

    labelling = Labelling(str(path), FileFlags(), OutFlags(str(out)), None)
    with pytest.raises(KeyboardInterrupt):
        labelling.run(lambda: (LABELS, interrupted))
    assert out.read_text() == "before"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.csv", "out.csv"]


def test_a_closed_pipe_stops_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Threads of a running model would abort the process at its exit."""
    path, stopped = tmp_path / "in.jsonl", []
    path.write_text('{"text": "good"}\n' * 25)
    read, write = os.pipe()
    os.close(read)

    def watched(posts: Iterable[Post]) -> Generator[tuple[Post, Outcome]]:
        try:
            yield from classify(posts)
        finally:
            stopped.append(True)

    with os.fdopen(write, "wb", buffering=0) as pipe:
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=pipe))
        labelling = Labelling(str(path), FileFlags(), OutFlags("-"), None)
        try:
            labelling.run(lambda: ([], watched))
        except BrokenPipeError as error:
            assert stopped, error  # noqa: PT017 - while the traceback still refers to the generators
        else:
            pytest.fail("the pipe is open")


@pytest.mark.parametrize(
    ("out", "named"),
    [
        ("out", ".parquet"),
        ("out.xlsx", ".parquet"),
        ("no/out.csv", "Cannot write .*no/out.csv"),
        ("folder.csv", "folder.csv is a folder"),
        (f"{'x' * 300}.csv", "File name too long"),
        ("in.csv", "in.csv is .* the input"),
        ("link.csv", "link.csv is .* the input"),
    ],
)
def test_refuses_an_output_that_cannot_be_written(tmp_path: Path, out: str, named: str) -> None:
    path = tmp_path / "in.csv"
    path.write_text("text\ngood\n")
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "link.csv").symlink_to(path)
    with pytest.raises(UserError, match=named):
        label_file(path, tmp_path / out)
    assert path.read_text() == "text\ngood\n"


class Stdin:
    def __init__(self, data: bytes) -> None:
        self.buffer = io.BufferedReader(io.BytesIO(data))


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        ("text\ngood\n", "text,label,label_score\ngood,good,0.9\n"),
        ('[{"text": "good"}]', '{"text":"good","label":"good","label_score":0.9}\n'),
        ("a good line\n", '{"text":"a good line","label":"good","label_score":0.9}\n'),
    ],
)
def test_pipes_have_the_format_of_the_input(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], data: str, shown: str
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(data.encode()))
    label_file("-", "-")
    captured = capfdbinary.readouterr()
    assert captured.out.decode() == shown
    assert b"1 row of stdin" in captured.err
