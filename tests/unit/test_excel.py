"""Excel: workbooks in and out, the line sep=; and hostile workbooks."""

import json
import sys
import warnings
import zipfile
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openpyxl.chart import BarChart

from feedmill.producers import excel as excel_in
from feedmill.producers.files import FileSource
from feedmill.producers.records import BadRecord
from feedmill.shared.errors import InputError, UserError
from feedmill.shared.messages import Post
from feedmill.tables import require_format
from feedmill.tables.writing import writer_to
from tests.unit.test_labelling import label_file


def workbook(path: Path, *rows: list[Any]) -> Path:
    made = openpyxl.Workbook()
    sheet = made.active
    assert sheet is not None
    for row in rows:
        sheet.append(row)
    made.create_sheet("another").append(["not", "read"])
    made.save(path)
    return path


def write(path: Path, columns: dict[str, pa.Array]) -> None:
    batch = pa.RecordBatch.from_pydict(columns)
    with path.open("wb") as file:
        writer = writer_to(file, "xlsx", batch.schema)
        writer.write(batch)
        writer.close()


def cells_of(path: Path) -> list[list[Any]]:
    sheet = openpyxl.load_workbook(path).worksheets[0]
    return [[(cell.data_type, cell.value) for cell in row] for row in sheet.iter_rows()]


def test_reads_the_posts_of_the_first_sheet(tmp_path: Path) -> None:
    rows: list[list[Any]] = [
        ["id", "Title", "body", "score", "date", None],
        [1.0, "a title", "two\nlines", 7.0, datetime(2026, 11, 28, 9, 30)],
        [],
        ["two", "=1+1", None, None, "2026-11-28"],
        ["three", None, None],
    ]
    source = FileSource(str(workbook(tmp_path / "posts.xlsx", *rows)))
    items = list(source.items())
    posts = [item for item in items if isinstance(item, Post)]
    assert [(post.id, post.title, post.body, post.score) for post in posts] == [
        ("1", "a title", "two\nlines", 7)
    ]
    assert posts[0].created_utc == datetime(2026, 11, 28, 9, 30, tzinfo=UTC).timestamp()
    # openpyxl stores a formula, without the value that Excel would have stored.
    bad = [
        (item.where.rpartition(":")[2], item.reason)
        for item in items
        if isinstance(item, BadRecord)
    ]
    assert bad == [
        ("4", "title or body must contain text"),
        ("5", ("title or body must contain text")),
    ]
    assert source.unit == "row"


@pytest.mark.parametrize("delimiter", [";", ",", "\t", "|"])
@pytest.mark.parametrize(
    "start", ["sep={}\r\n", "\ufeffsep={}\n", "SEP={}\n", '"sep={}"\r\n']
)
def test_reads_the_delimiter_that_excel_is_told(
    tmp_path: Path, delimiter: str, start: str
) -> None:
    path = tmp_path / "posts.csv"
    row = delimiter.join(["1", '"a, title; with | all\tof them"'])
    path.write_bytes(
        f"{start.format(delimiter)}id{delimiter}title\r\n{row}\r\n".encode()
    )
    (post,) = FileSource(str(path)).items()
    assert isinstance(post, Post)
    assert (post.id, post.title) == ("1", "a, title; with | all\tof them")


def test_texts_of_senders_are_never_formulas(tmp_path: Path) -> None:
    texts = [
        "=HYPERLINK(1)",
        "+1",
        "-1",
        "@a",
        "\t=1",
        "plain",
        "'=1",
        "#REF!",
        "2026-01-01",
        "bell\x07",
        None,
    ]
    path = tmp_path / "out.xlsx"
    write(path, {"=title": pa.array(texts, pa.string())})
    cells = [cell for (cell,) in cells_of(path)]
    assert cells[0] == ("s", "=title")
    expected = [text.replace("\x07", "\ufffd") for text in texts if text]
    assert [value for _, value in cells[1:]] == expected
    assert {kind for kind, value in cells if value is not None} == {"s"}


def test_writes_numbers_truth_values_and_times(tmp_path: Path) -> None:
    path = tmp_path / "out.xlsx"
    time = datetime(2026, 11, 28, 9, 30, tzinfo=UTC)
    columns = {
        "whole": pa.array([7, 2**60], pa.int64()),
        "score": pa.array([0.5, float("nan")], pa.float64()),
        "nsfw": pa.array([True, None], pa.bool_()),
        "date": pa.array([time, None], pa.timestamp("ms", tz="UTC")),
    }
    write(path, columns)
    assert [[value for _, value in row] for row in cells_of(path)] == [
        list(columns), [7, 0.5, True, time.replace(tzinfo=None)], [str(2**60), None, None, None],
    ]  # fmt: skip


def test_times_before_the_first_year_in_utc_are_texts(tmp_path: Path) -> None:
    path = tmp_path / "out.xlsx"
    # 1900-01-01T00:30+01:00 and 01:30+01:00, in seconds since 1970
    first_hour = -2_208_990_600
    seconds = [first_hour, first_hour + 3_600]
    dates = pa.array(seconds, pa.timestamp("s", tz="+01:00"))
    write(path, {"date": dates})
    _, [early], [late] = cells_of(path)
    assert early[0] == "s"
    assert "1900-01-01" in early[1]
    assert late == ("d", datetime(1900, 1, 1, 0, 30))


def test_long_texts_are_cut_and_it_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "out.xlsx"
    write(path, {"body": pa.array(["x" * 40_000])})
    assert len(cells_of(path)[1][0][1]) == 32_767
    assert "cut 1 texts" in caplog.text


def test_a_sheet_that_is_full_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from feedmill.tables import excel  # noqa: PLC0415 - the module under test

    monkeypatch.setattr(excel, "MAX_ROWS", 3)
    batch = pa.RecordBatch.from_pydict({"a": [1, 2, 3]})
    writer = writer_to(BytesIO(), "xlsx", batch.schema)
    with pytest.raises(UserError, match=r"at most 3 rows.*\.csv"):
        writer.write(batch)
    writer.abandon()


def bomb(path: Path, name: str, size: int) -> None:
    """Write a workbook with a file that unpacks to this size."""
    workbook(path, ["id", "title"], [1, "x"])
    with (
        zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive,
        archive.open(name, "w") as member,
    ):
        for _ in range(size >> 20):
            member.write(bytes(2**20))


@pytest.mark.parametrize(
    ("name", "limit", "value"),
    [
        ("xl/worksheets/sheet9.xml", "MAX_UNPACKED", 2**22),
        ("xl/sharedStrings.xml", "MAX_IN_MEMORY", 2**22),
        ("xl/more.xml", "MAX_FILES", 3),
    ],
)
def test_refuses_archives_that_unpack_to_too_much(
    tmp_path: Path, name: str, limit: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(excel_in, limit, value)
    path = tmp_path / "posts.xlsx"
    bomb(path, name, 2**23)
    assert path.stat().st_size < 2**20
    with pytest.raises(
        InputError, match="too large to be read as Excel: 8 MiB unpacked"
    ):
        list(FileSource(str(path)).items())


@pytest.mark.parametrize(
    "content", ["<c><v>" + "x" * 2**12, '<c r="' + "x" * 2**12, "x" * 2**12 + "<c/>"]
)
def test_refuses_a_text_that_takes_all_memory(
    tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a gigabyte in one cell packs to half a megabyte."""
    monkeypatch.setattr(excel_in, "MAX_TEXT", 2**11)
    monkeypatch.setattr(excel_in, "SEARCHED_BYTES", 2**9)
    path = workbook(tmp_path / "posts.xlsx", ["id", "title"], [1, "x"])
    damaged(path, "xl/worksheets/sheet1.xml", content.encode())
    with pytest.raises(InputError, match="in a cell"):
        list(FileSource(str(path)).items())


def test_refuses_too_many_columns(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"more than 2,000 columns in row 2"):
        list(
            FileSource(
                str(workbook(tmp_path / "posts.xlsx", ["id", "title"], ["x"] * 2_001))
            ).items()
        )


def damaged(path: Path, member: str, content: bytes) -> Path:
    """Replace a file of a workbook."""
    good = workbook(path.with_name("good.xlsx"), ["id", "title"], [1, "x"])
    with zipfile.ZipFile(good) as archive, zipfile.ZipFile(path, "w") as copy:
        for name in archive.namelist():
            copy.writestr(name, content if name == member else archive.read(name))
    return path


ENTITIES = b"""<?xml version="1.0"?><!DOCTYPE a [<!ENTITY a "aaaaaaaaaa">
<!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">
<!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;">]><sst><si><t>&c;</t></si></sst>"""


@pytest.mark.parametrize(
    "member", ["xl/workbook.xml", "xl/worksheets/sheet1.xml", "[Content_Types].xml"]
)
@pytest.mark.parametrize("content", [b"", b"not XML", b"<a>", b"<a/>", ENTITIES])
def test_damaged_workbooks_are_errors_without_a_traceback(
    tmp_path: Path, member: str, content: bytes
) -> None:
    path = damaged(tmp_path / "posts.xlsx", member, content)
    with pytest.raises(InputError) as refused:
        list(FileSource(str(path)).items())
    assert "posts.xlsx" in str(refused.value)


def test_refuses_rows_that_no_sheet_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows before the one that a file numbers 10^11 are read as empty ones, which
    takes days.
    """
    monkeypatch.setattr(excel_in, "MAX_ROWS", 1000)
    made = workbook(tmp_path / "made.xlsx", ["text"], ["a post"])
    path = tmp_path / "posts.xlsx"
    with zipfile.ZipFile(made) as source, zipfile.ZipFile(path, "w") as target:
        for member in source.namelist():
            target.writestr(
                member,
                source.read(member).replace(b'<row r="2"', b'<row r="99999999999"'),
            )
    with pytest.raises(InputError, match="posts.xlsx has rows beyond 1,000"):
        list(FileSource(str(path)).items())


def test_an_archive_that_is_no_workbook_is_named(tmp_path: Path) -> None:
    path = tmp_path / "posts.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("posts.csv", "id,title\n1,x\n")
    with pytest.raises(InputError, match="is an archive. Unpack it"):
        list(FileSource(str(path)).items())


def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = workbook(tmp_path / "posts.xlsx", ["id", "title"], [1, "x"])
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(UserError, match=r"openpyxl.*feedmill\[excel\]"):
        list(FileSource(str(path)).items())
    with pytest.raises(UserError, match=r"openpyxl.*feedmill\[excel\]"):
        require_format("xlsx")


def sheets(path: Path, *named: tuple[str, str, list[list[Any]]]) -> Path:
    """Write a workbook with sheets: each with its name, its state and its rows."""
    made = openpyxl.Workbook()
    made.remove(made.worksheets[0])
    for title, state, rows in named:
        if state == "chart":
            made.create_chartsheet(title).add_chart(BarChart())
            continue
        sheet = made.create_sheet(title)
        sheet.sheet_state = state
        for row in rows:
            sheet.append(row)
    made.save(path)
    return path


POSTS = ("posts", "visible", [["id", "text"], ["1", "good"]])
OTHER = [["junk", "x"], ["1", "2"]]


@pytest.mark.parametrize(
    "before",
    [
        ("a", "chart", []),
        ("a", "hidden", OTHER),
        ("a", "veryHidden", OTHER),
        ("a", "visible", []),
        ("a", "visible", [[]]),
    ],
)
def test_reads_the_first_sheet_that_is_shown_and_has_cells(
    tmp_path: Path, before: Any
) -> None:
    path = sheets(tmp_path / "in.xlsx", before, POSTS, ("later", "visible", OTHER))
    assert [
        post.body for post in FileSource(str(path)).items() if isinstance(post, Post)
    ] == ["good"]
    label_file(path, tmp_path / "out.csv")
    assert (
        tmp_path / "out.csv"
    ).read_text() == "\ufeffid,text,label,label_score\n1,good,good,0.9\n"


@pytest.mark.parametrize("state", ["chart", "hidden", "visible"])
def test_a_workbook_without_a_sheet_to_read_is_named(
    tmp_path: Path, state: str
) -> None:
    empty: tuple[str, str, list[list[Any]]] = ("b", "visible", [])
    path = sheets(
        tmp_path / "in.xlsx", ("a", state, OTHER if state == "hidden" else []), empty
    )
    with pytest.raises(InputError, match=r"in\.xlsx has no visible sheet with cells"):
        list(FileSource(str(path)).items())


@pytest.mark.parametrize("error", ["#N/A", "#REF!", "#DIV/0!", "#VALUE!", "#NAME?"])
def test_errors_in_cells_are_missing_values_that_a_copy_keeps(
    tmp_path: Path, error: str
) -> None:
    path = tmp_path / "in.xlsx"
    made = openpyxl.Workbook()
    sheet: Any = made.active
    for row in [
        ["id", "title", "body", "score"],
        ["1", error, "good", error],
        ["2", error, error, "3"],
        ["3", "N/A", None],
    ]:
        sheet.append(row)
    for row in sheet.iter_rows():
        for cell in row:
            cell.data_type = "e" if cell.value == error else cell.data_type
    made.save(path)
    items = list(FileSource(str(path)).items())
    posts = [item for item in items if isinstance(item, Post)]
    assert [(post.title, post.body, post.score) for post in posts] == [
        ("", "good", None),
        ("N/A", "", None),
    ]
    assert [item.where[-2:] for item in items if isinstance(item, BadRecord)] == [":3"]
    tally = label_file(path, tmp_path / "out.jsonl")
    assert tally.labels.total() == 2
    rows = [
        json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()
    ]
    assert [row["title"] for row in rows] == [error, error, "N/A"]
    assert [row["label"] for row in rows] == ["good", None, "bad"]


def test_times_that_cannot_be_are_missing_values_without_a_warning(
    tmp_path: Path,
) -> None:
    made = openpyxl.Workbook()
    sheet: Any = made.active
    for row in [["id", "text", "date"], ["1", "good", 1e9], ["2", "x", 1e308]]:
        sheet.append(row)
    sheet["C2"].number_format = sheet["C3"].number_format = "yyyy-mm-dd"
    made.save(tmp_path / "in.xlsx")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posts = [
            item
            for item in FileSource(str(tmp_path / "in.xlsx")).items()
            if isinstance(item, Post)
        ]
    assert [(post.body, post.created_utc) for post in posts] == [
        ("good", None),
        ("x", None),
    ]


def test_workbooks_with_a_password_and_other_spreadsheets_are_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "in.xlsx"
    path.write_bytes(
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
        + bytes(504)
        + "EncryptedPackage".encode("utf-16-le")
    )
    with pytest.raises(
        InputError, match=r"in\.xlsx is an old Excel file.*password.*CSV"
    ):
        list(FileSource(str(path)).items())
    for member in ("xl/workbook.bin", "content.xml", "word/document.xml"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(member, "x")
        with pytest.raises(
            InputError, match=r"in\.xlsx is an archive.*another spreadsheet.*CSV"
        ):
            list(FileSource(str(path)).items())


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet", "xlsx"])
def test_a_cut_text_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str
) -> None:
    """The first row of Parquet is written twice: the first time to find out whether it can be."""
    path = tmp_path / f"in.{form}"
    texts = ["good" + "x" * 40_000, "short"]
    if form == "parquet":
        pq.write_table(pa.table({"text": texts}), path)
    elif form == "xlsx":
        workbook(path, ["text"], ["good"], ["short"])
    elif form == "csv":
        path.write_text("text\n" + "\n".join(texts))
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    label_file(path, tmp_path / "out.xlsx")
    cut = [record for record in caplog.records if "cut" in record.getMessage()]
    assert len(cut) == (0 if form == "xlsx" else 1)
    assert all("cut 1 texts" in record.getMessage() for record in cut)
