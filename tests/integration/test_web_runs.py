"""Tests of runs on the web server, with a real worker: a file in, its labels out."""

import csv
import html
import io
import json
import re
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openpyxl import Workbook
from starlette.testclient import TestClient

from feedmill.shared.settings import Settings
from feedmill.web.failures import Failure
from feedmill.web.pages.runs import MAX_QUEUED, Turns
from tests.support import RedisServer, wait_until
from tests.unit.test_web_frame import HOSTILE, client_of

LABELS = "sports: matches, athletes and results\nfood: cooking and restaurants\n"
ROWS: list[dict[str, Any]] = [
    {
        "Nr": "a1",
        "Kommentar": "The keeper saved two penalties in the final",
        "label": "x",
    },
    {"Nr": "a2", "Kommentar": "How long do dried beans keep?", "label": "=1+1"},
    {"Nr": "a3", "Kommentar": "", "label": HOSTILE},
]
FORM = {
    "id": "Nr",
    "body": "Kommentar",
    "labels": LABELS,
    "keep": ["Nr", "Kommentar", "label"],
}


@pytest.fixture(scope="module")
def client(served: RedisServer) -> Iterator[TestClient]:
    with client_of(Settings.model_validate({"redis_url": served.url})) as client:
        yield client


def as_csv() -> bytes:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(ROWS[0]))
    writer.writeheader()
    writer.writerows(ROWS)
    return file.getvalue().encode()


def as_jsonl() -> bytes:
    return "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def as_parquet() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), file)
    return file.getvalue()


def as_xlsx() -> bytes:
    book = Workbook()
    sheet = book.active
    assert sheet is not None
    sheet.append(list(ROWS[0]))
    for row in ROWS:
        sheet.append(list(row.values()))
        for cell in sheet[sheet.max_row]:
            cell.data_type = "s"
    file = io.BytesIO()
    book.save(file)
    return file.getvalue()


def start(client: TestClient, content: bytes, run: str, **more: Any) -> None:
    answer = client.post("/files/upload", params={"name": HOSTILE}, content=content)
    address = answer.json()["address"]
    assert "How long do dried beans keep?" in client.get(address).text
    answer = client.post(address, data=FORM | {"run": run} | more)
    assert answer.status_code == 303, re.findall(r'role="alert">(.*?)<', answer.text)
    wait_until(lambda: "rows read" in progress(client, run), "the file is read")
    wait_until(lambda: "· done" in progress(client, run), "the run is done")


def progress(client: TestClient, run: str) -> str:
    return html.unescape(client.get("/run-progress", params={"run": run}).text)


def download(client: TestClient, run: str, form: str) -> bytes:
    answer = client.get("/download", params={"run": run, "form": form})
    assert answer.status_code == 200
    assert answer.headers["content-disposition"].startswith("attachment")
    content: bytes = answer.content
    return content


@pytest.mark.parametrize("write", [as_csv, as_jsonl, as_parquet, as_xlsx])
def test_a_file_comes_back_with_labels_and_its_columns(
    client: TestClient, write: Any
) -> None:
    run = f"run of {write.__name__}"
    start(client, write(), run)
    assert "1 without text" in progress(client, run)
    table = csv.DictReader(io.StringIO(download(client, run, "csv").decode()))
    rows = sorted(table, key=lambda row: row["id"])
    assert [row["label"] for row in rows] == ["sports", "food"]
    assert [row["Nr"] for row in rows] == ["a1", "a2"]
    assert rows[1]["Kommentar"] == "How long do dried beans keep?"
    assert [row["file_label"] for row in rows] == ["x", "'=1+1"]
    lines = download(client, run, "jsonl").decode().splitlines()
    assert sorted(json.loads(line)["file_label"] for line in lines) == ["=1+1", "x"]
    assert pq.read_table(io.BytesIO(download(client, run, "parquet"))).num_rows == 2


def test_only_rows_that_are_new_are_sent(client: TestClient) -> None:
    start(client, as_csv(), "again and again")
    more = as_csv() + b"a4,A recipe for bread,y\r\n"
    start(client, more, "again and again")
    text = progress(client, "again and again")
    assert "1 sent" in text
    assert "2 sent before" in text
    assert "3 of 3 labelled" in text


def test_bad_rows_are_listed_and_good_ones_are_sent(client: TestClient) -> None:
    bad = as_jsonl() + b'{"Nr": "a9", "Kommentar": \n'
    start(client, bad, "<b>bad</b>")
    page = client.get("/run-progress", params={"run": "<b>bad</b>"}).text
    assert "1 malformed" in page
    assert ":4: not JSON" in page
    assert "<img" not in page
    assert "<b>bad" not in page
    for path in ("/runs", "/runs-list", "/", "/runs/%3Cb%3Ebad%3C%2Fb%3E"):
        assert "<b>bad" not in client.get(path).text


def test_a_missing_column_is_told_on_the_page_of_the_run(client: TestClient) -> None:
    answer = client.post("/files/upload", content=as_csv())
    address = answer.json()["address"]
    form = FORM | {"run": "wrong", "body": "missing"}
    client.post(address, data=form)
    wait_until(
        lambda: "no column missing" in progress(client, "wrong"), "the error is shown"
    )
    # The file is still there, to choose other columns.
    assert client.get(address).status_code == 200


def test_an_unknown_run_is_not_found(client: TestClient) -> None:
    for path in ("/runs/nothing", "/download?run=nothing", "/run-progress?run=nothing"):
        answer = client.get(path, headers={"accept": "text/html"})
        assert answer.status_code in {404, 422}
        assert "nothing" in answer.text


@pytest.mark.parametrize("run", ["..", ".", "a/b", "ü ?#&"])
def test_every_run_has_an_address(client: TestClient, run: str) -> None:
    start(client, as_csv(), run)
    page = html.unescape(client.get("/runs").text)
    rows = re.findall(r'<tr data-run="([^"]*)"><td><a href="([^"]*)"', page)
    assert dict(rows)[run]
    assert f"Run {run}" in html.unescape(client.get(dict(rows)[run]).text)


def test_requests_that_wait_leave_threads_for_others() -> None:
    """Each would hold one of the threads that answer all other requests."""
    turns = Turns(1)
    with ExitStack() as taken, ThreadPoolExecutor(MAX_QUEUED) as threads:
        taken.enter_context(turns.turn())
        waiting = [threads.submit(take, turns) for _ in range(MAX_QUEUED)]
        wait_until(lambda: not turns.has_room, "all places are taken")
        with pytest.raises(Failure, match="Try again"), turns.turn():
            pass
        taken.close()
        assert all(future.result(60) for future in waiting)
    assert take(turns)


def take(turns: Turns) -> bool:
    with turns.turn():
        return True


def test_errors_tell_nothing_of_the_server(client: TestClient) -> None:
    """Readers name the file that they were given."""
    book = io.BytesIO(as_xlsx())
    broken = io.BytesIO()
    with zipfile.ZipFile(book) as good, zipfile.ZipFile(broken, "w") as copy:
        for name in good.namelist():
            is_sheet = name.startswith("xl/worksheets/")
            copy.writestr(name, "<broken" if is_sheet else good.read(name))
    answer = client.post("/files/upload?name=a.xlsx", content=broken.getvalue())
    page = client.get(answer.json()["address"])
    assert page.status_code == 422
    assert "Cannot read a.xlsx" in page.text
    assert "feedmill-web-" not in page.text


def test_who_may_only_send_sees_no_runs(served: RedisServer) -> None:
    """The form offers names of runs."""
    tokens = "both:send+read:0123456789abcdef,sender:send:fedcba9876543210"
    fields = {"redis_url": served.url, "web_tokens": tokens}
    with client_of(Settings.model_validate(fields)) as client:
        both = {"authorization": "Bearer 0123456789abcdef"}
        sender = {"authorization": "Bearer fedcba9876543210"}
        post = {"texts": ["a post"], "run": "a private run"}
        assert client.post("/v1/runs", json=post, headers=both).status_code == 202
        answer = client.post("/files/upload", content=as_csv(), headers=sender)
        address = answer.json()["address"]
        assert "a private run" in client.get(address, headers=both).text
        assert "a private run" not in client.get(address, headers=sender).text
