"""`feedmill classify FILE --out OUT`, with a stand-in for the model."""

import csv
import gc
import gzip
import io
import json
import os
import re
import sys
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, nullcontext
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

from feedmill.cli import offline
from feedmill.cli.offline import OutFlags
from feedmill.cli.options import FileFlags
from feedmill.offline.labelling import LabelledFile, Labelling
from feedmill.offline.observer import LabellingObserver
from feedmill.offline.tally import Tally
from feedmill.producers import parquet
from feedmill.producers.files import FileSource
from feedmill.producers.records import DETECTED
from feedmill.shared.errors import InputError, UserError
from feedmill.shared.messages import Classification, Outcome, Post, PostError
from feedmill.tables import check_file, check_output, writing
from tests.support import feedmill, long_cases, make_classification, naming

LABELS = ("good", "bad")
LONG_ID = "x" * 200


def classification(label: str, score: float) -> Classification:
    others = dict.fromkeys(LABELS, round(1 - score, 6))
    return make_classification(
        "1",
        label=label,
        scores=dict(
            sorted((others | {label: score}).items(), key=lambda item: -item[1])
        ),
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
                yield (
                    post,
                    classification(label, 0.52 if "unsure" in post.text else 0.9),
                )


def label_file(
    path: Path | str, out: Path | str, limit: int | None = None, **flags: Any
) -> Tally:
    options = {
        name: flags.pop(name) for name in ("scores", "prefix", "excel") if name in flags
    }
    return offline.label_file(
        str(path),
        FileFlags(**flags),
        OutFlags(str(out), **options),
        limit,
        lambda: (LABELS, classify),
    )


def written(
    tmp_path: Path, data: str | bytes, out: str = "out.csv", **flags: Any
) -> str:
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
            ('Nr;Text;label;label_score\r\n1;"good; '
            '""very""\nso";good;0.9\r\n;;;\r\n3;x;bad;0.9\r\n'),
        ),
        (",n,n,text\n0,1,x,good\n1\n",
        ",n,n,text,label,label_score\n0,1,x,good,good,0.9\n1,,,,,\n"),
        ("\ufeffTITLE\tBody\rgood\tx\r",
        "\ufeffTITLE\tBody\tlabel\tlabel_score\ngood\tx\tgood\t0.9\n"),
        ("text\n=1+1 good\n-1\n", "text,label,label_score\n=1+1 good,good,0.9\n-1,bad,0.9\n"),
        ('text\n"a\rb\r\nc good"\n', 'text,label,label_score\n"a\rb\r\nc good",good,0.9\n'),
        (
            "title,score,date\ngood,4.5 stars,3.4.2024\n",
            "title,score,date,label,label_score\ngood,4.5 stars,3.4.2024,good,0.9\n",
        ),
        ("id,title\nx,[removed]\ny,good\n",
        "id,title,label,label_score\nx,[removed],,\ny,good,good,0.9\n"),
        (
            f"id,title\n,good\n{LONG_ID},no\n",
            f"id,title,label,label_score\n,good,good,0.9\n{LONG_ID},no,bad,0.9\n",
        ),
    ],
    ids=["beyond the header", "excel", "pandas", "mark", "formula", "line ends", "reddit-like",
    "removed", "ids"],
)  # fmt: skip
def test_csv_keeps_rows_columns_and_dialect(
    tmp_path: Path, data: str, labelled: str
) -> None:
    assert written(tmp_path, data) == labelled


def test_tsv_has_tabs(tmp_path: Path) -> None:
    data = 'id,text\n1,"good, very"\n2,"a\tb"\n'
    expected = (
        'id\ttext\tlabel\tlabel_score\n1\tgood, very\tgood\t0.9\n2\t"a\tb"\tbad\t0.9\n'
    )
    assert written(tmp_path, data, "out.tsv") == expected
    assert (
        written(tmp_path, '{"text": "good"}\n', "out.tsv")
        == "text\tlabel\tlabel_score\r\ngood\tgood\t0.9\r\n"
    )


def test_output_is_in_the_order_of_the_input(tmp_path: Path) -> None:
    rows = [("good", "no", "", "poison", "x,y,z")[row % 5] for row in range(503)]
    data = "n,text\n" + "".join(
        f"{number},{text}\n" for number, text in enumerate(rows)
    )
    found = list(csv.DictReader(io.StringIO(written(tmp_path, data))))
    expected = [
        (str(number), text) for number, text in enumerate(rows) if text != "x,y,z"
    ]
    assert [(row["n"], row["text"]) for row in found] == expected
    assert [row["label"] for row in found] == [
        {"good": "good", "no": "bad"}.get(text, "") for _, text in expected
    ]


def test_counts_rows_and_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.csv"
    path.write_text("id,text\n1,good\n2,unsure\n3,\n4,poison\n5,a,b\n6,no\n,\n")
    tally = label_file(path, tmp_path / "out.csv")
    counts = json.loads(json.dumps(tally.counts()))
    assert counts.pop("seconds") >= 0
    assert counts == {
        "rows": 7,
        "labels": {"bad": 2, "good": 1},
        "unlabelled": {
            "title or body must contain text": 2,
            "scores that are not finite": 1,
        },
        "left_out": {"3 fields, but 2 columns; a quote may be missing": 1},
    }
    assert tally.has_failures
    shown = capsys.readouterr().err
    assert re.search(
        rf"^6 of 7 rows of {path} in .* s, written to {tmp_path}/out.csv$",
        shown,
        re.MULTILINE,
    )
    assert re.search(r"^  bad +2 +33%$", shown, re.MULTILINE)
    assert re.search(
        r"^no label: 2 rows, first in line 4: .*text$", shown, re.MULTILINE
    )
    assert re.search(
        r"^left out: 1 row, first in line 6: 3 fields", shown, re.MULTILINE
    )


RECORDS = (
    '{"title": "good", "n": 1, "ok": true, "mixed": 1, "big": 99999999999999999999, "x": NaN}\n'
    '{"n": 2.5, "title": "=1+1", "mixed": "a", "deep": {"k": ["ä"]}}\n'
    '{"only": null, "n": null}\n'
)


def test_json_keys_become_columns(tmp_path: Path) -> None:
    header, *rows = csv.reader(io.StringIO(written(tmp_path, RECORDS)))
    assert header == [
        "title",
        "n",
        "ok",
        "mixed",
        "big",
        "x",
        "deep",
        "only",
        "label",
        "label_score",
    ]
    assert rows == [
        ["good", "1", "true", "1", "99999999999999999999", "", "", "", "good", "0.9"],
        ["'=1+1", "2.5", "", "a", "", "", '{"k":["ä"]}', "", "bad", "0.9"],
        [""] * 10,
    ]


@pytest.mark.parametrize(
    "data",
    [RECORDS, "[" + RECORDS.strip().replace("\n", ",\n") + "]"],
    ids=["lines", "array"],
)
@pytest.mark.parametrize("out", ["out.jsonl", "out.jsonl.gz", "out.jsonl.zst"])
def test_json_keeps_its_keys_and_values(tmp_path: Path, data: str, out: str) -> None:
    written(tmp_path, data, out)
    kind = {".gz": "gzip", ".zst": "zstd"}.get(Path(out).suffix)
    with pa.input_stream(str(tmp_path / out), compression=kind) as file:
        found = [json.loads(line) for line in file.read().splitlines()]
    given = [json.loads(line.replace("NaN", "null")) for line in RECORDS.splitlines()]
    new = [
        {"label": label, "label_score": label and 0.9}
        for label in ("good", "bad", None)
    ]
    assert found == [record | extra for record, extra in zip(given, new, strict=True)]


def test_parquet_keeps_the_types_of_json(tmp_path: Path) -> None:
    written(tmp_path, RECORDS, "out.parquet", scores=True)
    table = pq.read_table(tmp_path / "out.parquet")
    types = [
        "string",
        "double",
        "bool",
        "string",
        "string",
        "string",
        "string",
        "string",
    ]
    assert [str(field.type) for field in table.schema] == [
        *types,
        "string",
        "double",
        "double",
        "double",
    ]
    assert table.column("n").to_pylist() == [1.0, 2.5, None]
    assert table.column("label").to_pylist() == ["good", "bad", None]
    assert table.column("score_bad").to_pylist() == [pytest.approx(0.1), 0.9, None]


@pytest.fixture
def typed(tmp_path: Path) -> Path:
    """A Parquet file of three row groups with types that JSON lacks, and a pandas index that is
    not a column.
    """
    frame = pd.DataFrame(
        {
            "text": ["good", None, "x"] * 3,
            "seen": pd.date_range("2026-01-01", periods=9, tz="Europe/Berlin"),
            "day": [date(2026, 1, 1)] * 9,
            "tags": [["a", "b"], None, []] * 3,
            "kind": pd.Categorical(
                ["p", "q", "p"] * 3, categories=["p", "q", "unused"]
            ),
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
    typed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: int | None,
    group: int,
) -> None:
    monkeypatch.setattr(writing, "GROUP_ROWS", group)
    monkeypatch.setattr(parquet, "MAX_ROWS", 2)
    label_file(typed, tmp_path / "out.parquet", limit, scores=True)
    given, copied = (
        pq.read_table(typed).slice(0, limit),
        pq.read_table(tmp_path / "out.parquet"),
    )
    added = ["label", "label_score", "score_good", "score_bad"]
    assert copied.column_names == [*given.column_names, *added]
    assert copied.drop_columns(added).equals(given, check_metadata=True)
    labels = [
        {"good": "good", "x": "bad", None: None}[text]
        for text in given["text"].to_pylist()
    ]
    assert copied["label"].to_pylist() == labels
    frame = copied.to_pandas()
    assert list(frame.index) == [f"row {n}" for n in range(limit or 9)]
    assert list(frame["kind"].cat.categories) == ["p", "q", "unused"]
    assert (pq.ParquetFile(tmp_path / "out.parquet").num_row_groups > 1) == (group == 1)


def test_damaged_parquet_keeps_the_rows_before_the_damage(
    typed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "MAX_ROWS", 2)
    data, metadata = bytearray(typed.read_bytes()), pq.read_metadata(typed)
    column = metadata.row_group(1).column(0)
    start = min(
        column.data_page_offset,
        column.dictionary_page_offset or column.data_page_offset,
    )
    data[start : start + 40] = b"\xff" * 40
    typed.write_bytes(data)
    with pytest.raises(InputError, match="Cannot read "):
        label_file(typed, tmp_path / "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet")["label"].to_pylist() == [
        "good",
        None,
        "bad",
        "good",
    ]


@pytest.mark.parametrize("name", ["label", "Label", " label_score", "score_bad"])
@pytest.mark.parametrize("form", ["csv", "json"])
def test_never_replaces_a_column(tmp_path: Path, name: str, form: str) -> None:
    data = (
        f"text,{name}\ngood,mine\n"
        if form == "csv"
        else (f'{{"text": "x"}}\n{{"text": "good", "{name}": "mine"}}\n')
    )
    with pytest.raises(
        UserError, match=rf"{re.escape(str(tmp_path))}.*{name.strip()}.*--prefix"
    ):
        written(tmp_path, data, scores=True)
    assert not (tmp_path / "out.csv").exists()
    header, *_, row = csv.reader(
        io.StringIO(written(tmp_path, data, scores=True, prefix="new_"))
    )
    assert header == [
        "text",
        name,
        "new_label",
        "new_label_score",
        "new_score_good",
        "new_score_bad",
    ]
    assert row[:3] == ["good", "mine", "good"]


def test_marks_bytes_that_are_not_utf8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The row has no label, and the user is told at once, because most rows of the file may be
    affected.
    """
    data = "id,text\n1,good\n2,K\udce4se\n3,good\n".encode("utf-8", "surrogateescape")
    assert written(tmp_path, data).splitlines()[2] == "2,K\ufffdse,,"
    assert re.search(
        rf"^{tmp_path}/in:3: not UTF-8.*--encoding",
        capsys.readouterr().err,
        re.MULTILINE,
    )
    assert (
        json.loads(written(tmp_path, data, "out.jsonl").splitlines()[1])["text"]
        == "K\ufffdse"
    )
    with pytest.raises(InputError, match="--encoding"):
        written(
            tmp_path, "text,Gr\udcf6ße\ngood,1\n".encode("utf-8", "surrogateescape")
        )
    assert written(
        tmp_path, "text,Größe\ngood,1\n".encode("cp1252"), encoding="cp1252"
    ).startswith("\ufefftext,Größe,")


@pytest.mark.parametrize(
    "row", ["good {}\n", '{{"text": "good {}"}}\n'], ids=["csv", "json"]
)
def test_writes_the_rows_before_damage(tmp_path: Path, row: str) -> None:
    lines = "text\n" * row.startswith("good") + "".join(map(row.format, range(9000)))
    path = tmp_path / "in.gz"
    path.write_bytes(gzip.compress(lines.encode())[:-1000])
    with pytest.raises(InputError, match=f"Cannot read {path}: "):
        label_file(path, tmp_path / "out.csv")
    assert len((tmp_path / "out.csv").read_text().splitlines()) > 1000


def interrupted(posts: Iterable[Post]) -> Generator[tuple[Post, Outcome]]:
    yield from islice(classify(posts), 20)
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "name",
    ["out.csv", "out.parquet", *long_cases("out.jsonl", "out.csv.gz", "out.jsonl.zst")],
)
@pytest.mark.parametrize(
    "data", ["text\n" + "good\n" * 25, '{"text": "good"}\n' * 25], ids=["csv", "json"]
)
def test_an_interrupt_leaves_the_output_unchanged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    data: str,
) -> None:
    """And it says so, what was done, and what repeats it; nothing is reported when the writer is
    deleted.
    """
    dropped: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    path, out = tmp_path / "in", tmp_path / name
    path.write_text(data)
    for before in (None, b"before"):
        if before is not None:
            out.write_bytes(before)
        with pytest.raises(KeyboardInterrupt):
            offline.label_file(
                str(path),
                FileFlags(),
                OutFlags(str(out)),
                None,
                lambda: (LABELS, interrupted),
            )
        gc.collect()
        assert dropped == []
        assert (out.read_bytes() if out.exists() else None) == before
        assert not list(tmp_path.glob(".*"))
        words = naming(
            "20 rows",
            out,
            "was not written" if before is None else "is unchanged",
            "same command",
        )
        assert re.search(words, capsys.readouterr().err)


def test_an_interrupt_of_a_pipe_says_how_many_rows_were_written(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(b"text\n" + b"good\n" * 25))
    with pytest.raises(KeyboardInterrupt):
        offline.label_file(
            "-", FileFlags(), OutFlags("-"), None, lambda: (LABELS, interrupted)
        )
    captured = capfdbinary.readouterr()
    assert captured.out.count(b"\n") == 21
    assert b"20 rows written to standard output" in captured.err


def test_a_replaced_output_keeps_its_mode_and_its_link(tmp_path: Path) -> None:
    path, out, link = tmp_path / "in.csv", tmp_path / "out.csv", tmp_path / "link.csv"
    path.write_text("text\ngood\n")
    out.write_text("before")
    out.chmod(0o600)
    link.symlink_to(out)
    label_file(path, link)
    assert link.is_symlink()
    assert out.read_text() == "text,label,label_score\ngood,good,0.9\n"
    assert out.stat().st_mode & 0o777 == 0o600


def test_a_closed_pipe_stops_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
        try:
            offline.label_file(
                str(path), FileFlags(), OutFlags("-"), None, lambda: ([], watched)
            )
        except BrokenPipeError as error:
            assert stopped, error  # noqa: PT017 - while the traceback still refers to the generators
        else:
            pytest.fail("the pipe is open")


@pytest.mark.parametrize(
    ("out", "named"),
    [
        ("out", ".parquet"),
        ("out.xls", ".xlsx"),
        ("no/out.csv", "Cannot write .*no/out.csv"),
        ("folder.csv", "folder.csv is a folder"),
        (f"{'x' * 300}.csv", "File name too long"),
        ("in.csv", "in.csv is .* the input"),
        ("link.csv", "link.csv is .* the input"),
        ("hard.csv", "hard.csv is .* the input"),
        ("dangling.csv", "Cannot write .*dangling.csv.*no folder .*/no. Create it"),
        ("in.csv/out.csv", "Cannot write .*out.csv"),
        ("loop.csv", "Cannot write .*loop.csv.*link to itself"),
    ],
)
def test_refuses_an_output_that_cannot_be_written(
    tmp_path: Path, out: str, named: str
) -> None:
    path = tmp_path / "in.csv"
    path.write_text("text\ngood\n")
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "link.csv").symlink_to(path)
    (tmp_path / "hard.csv").hardlink_to(path)
    (tmp_path / "dangling.csv").symlink_to(tmp_path / "no" / "out.csv")
    (tmp_path / "loop.csv").symlink_to("loop.csv")
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
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
    data: str,
    shown: str,
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(data.encode()))
    label_file("-", "-")
    captured = capfdbinary.readouterr()
    assert captured.out.decode() == shown
    assert b"1 row of stdin" in captured.err


@pytest.mark.parametrize(
    ("data", "failed"),
    [('{"id": 1}\n' * 2, True), (('{"id": 1}\n{"text": "good"}\n'), False)],
)
def test_a_file_in_which_no_row_has_text_fails(
    tmp_path: Path, data: str, failed: bool
) -> None:
    (tmp_path / "in.jsonl").write_text(data)
    assert (
        label_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl").has_failures == failed
    )


@pytest.mark.parametrize("ending", ["csv", "xlsx", "jsonl", "parquet"])
def test_labels_the_rows_of_a_workbook(tmp_path: Path, ending: str) -> None:
    pd.DataFrame({"no": [1, 2], "text": ["good", "=bad"]}).to_excel(
        tmp_path / "in.xlsx", index=False
    )
    sheet = tmp_path / "in.csv"
    sheet.write_text("no,text\n1,good\n2,=bad\n")
    label_file(
        sheet, tmp_path / "in.xlsx"
    )  # openpyxl itself would take the text for a formula
    out = tmp_path / f"out.{ending}"
    tally = label_file(tmp_path / "in.xlsx", out, prefix="new_")
    assert tally.labels == {"good": 1, "bad": 1}
    text = {"csv": "'=bad"}.get(ending, "=bad")
    readers: dict[str, Any] = {
        "csv": pd.read_csv,
        "xlsx": pd.read_excel,
        "parquet": pd.read_parquet,
    }
    frame = pd.read_json(out, lines=True) if ending == "jsonl" else readers[ending](out)
    assert list(frame["text"]) == ["good", text]
    assert list(frame["new_label"]) == ["good", "bad"]
    assert list(frame["new_label_score"]) == [0.9, 0.9]


def test_marks_csv_for_excel_on_request(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "good ä"}\n')
    label_file(path, tmp_path / "out.csv", excel=True)
    assert (tmp_path / "out.csv").read_bytes().startswith("\ufeff".encode())
    with pytest.raises(UserError, match="--excel"):
        label_file(path, tmp_path / "out.jsonl", excel=True)


class Events(LabellingObserver):
    """Notes the events of a labelling."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def note(self, message: str) -> None:
        self.seen.append(message)

    def working(self, what: str) -> AbstractContextManager[object]:
        self.seen.append(what)
        return nullcontext()

    def finished(self, labelling: Labelling) -> None:
        self.seen.append(f"finished {labelling.tally.rows}")


def test_labels_to_a_stream_without_printing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.csv"
    path.write_bytes(b"text\ngood\n\xff\xfe\nno\n")
    for observer in (Events(), None):
        stream = io.BytesIO()
        labelling = Labelling(
            str(path), LabelledFile(stream=stream), columns=DETECTED, observer=observer
        )
        labelling.run(lambda: (LABELS, classify))
        assert stream.getvalue().startswith(b"text,label,label_score\ngood,good,0.9\n")
        assert labelling.tally.labels == {"good": 1, "bad": 1}
        if observer:
            first, note, last = observer.seen
            assert (first, last) == ("loading the model", "finished 3")
            assert f"{path}:3:" in note
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("stream", [None, io.BytesIO()])
def test_needs_one_output(tmp_path: Path, stream: io.BytesIO | None) -> None:
    path = None if stream is None else tmp_path / "out.csv"
    with pytest.raises(ValueError, match="either a path or a stream"):
        LabelledFile(path=path, stream=stream)


def test_refuses_a_folder_in_which_no_file_may_be_made_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that may be written needs such a folder, too: it is replaced when the new one is
    complete.
    """
    (tmp_path / "closed").mkdir()
    out = tmp_path / "closed" / "out.csv"
    out.write_text("before")
    real = os.access
    closed = str(tmp_path / "closed")  # root may write anywhere
    monkeypatch.setattr(
        os, "access", lambda path, mode: str(path) != closed and real(path, mode)
    )
    (tmp_path / "link.csv").symlink_to(out)
    for name in (out, tmp_path / "link.csv"):
        with pytest.raises(UserError, match="may not create files in .*closed"):
            check_output(name)
    check_output(tmp_path / "open.csv")


def test_standard_input_is_an_input_that_must_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.csv"
    path.write_text("text\ngood\n")
    with path.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        for check in (check_output, check_file):
            with pytest.raises(UserError, match="in.csv is .* the input"):
                check(path, source="-")
            check(tmp_path / "out.csv", source="-")
    check_output(path, source="-")  # standard input is closed


def test_a_page_never_replaces_the_posts(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("id,text,topic\n1,good,a\n2,bad,b\n")
    before = path.read_text()
    for command in (
        ("tune", "in.csv", "--page"),
        ("train", "--from", "in.csv", "--out", "model", "--page"),
    ):
        refusal = feedmill(*command, "in.csv", cwd=tmp_path)
        assert refusal.returncode == 2
        assert "in.csv is also the input file" in " ".join(refusal.stderr.split())
        assert path.read_text() == before


@pytest.mark.parametrize(
    "name", ["out.csv", "out.parquet", *long_cases("out.tsv", "out.xlsx")]
)
@pytest.mark.parametrize(
    "more",
    ['{"id": 3, "text": "good", "new": 1}\n', '{"id": "three", "text": "good"}\n'],
    ids=["key", "type"],
)
def test_a_file_that_changes_between_its_two_readings_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, more: str
) -> None:
    """JSON is read twice: first for its keys.

    A record with another key lost it, and one with another type failed.
    """
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": 1, "text": "good"}\n' * 5000)
    read_keys = writing.schema_of

    def schema_of(*arguments: Any) -> Any:
        schema = read_keys(*arguments)
        with path.open("a") as file:
            file.write(more)
        return schema

    monkeypatch.setattr(writing, "schema_of", schema_of)
    if name == "out.parquet" or "new" in more:
        with pytest.raises(
            InputError,
            match=r"in\.jsonl changed while it was read.*Run the command again",
        ):
            label_file(path, tmp_path / name)
    else:  # text holds any type
        assert label_file(path, tmp_path / name).rows == 5001


def test_a_file_that_vanishes_between_its_two_readings_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": 1, "text": "good"}\n')
    rows = FileSource.rows

    def vanishing(source: FileSource) -> Any:
        for row in rows(source):
            path.unlink(missing_ok=True)
            yield row

    monkeypatch.setattr(FileSource, "rows", vanishing)
    (tmp_path / "out.csv").write_text("before")
    with pytest.raises(InputError, match="in.jsonl: No such file"):
        label_file(path, tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == "before"
