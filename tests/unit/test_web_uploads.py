"""Tests of files that people send to the web server, and of what a form says about them."""

import stat
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from feedmill.producers.records import Columns
from feedmill.shared.settings import Settings
from feedmill.web.pages import uploads
from feedmill.web.pages.runs import desk_of
from feedmill.web.pages.sending import kept_columns
from feedmill.web.pages.uploads import Uploads
from tests.unit.test_web_frame import HOSTILE, HTML, client_of

CSV = "Nr;Kommentar;label\n1;The final;x\n2;Dried beans;y\n"


@pytest.fixture
def client(settings: Settings) -> Iterator[TestClient]:
    with client_of(settings) as client:
        yield client


@pytest.fixture
def files(client: TestClient) -> Uploads:
    inner: Any = client.app
    return desk_of(inner._app.state.resources).uploads


def send(client: TestClient, content: str | bytes, name: str = "posts.csv") -> Any:
    return client.post("/files/upload", params={"name": name}, content=content)


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "..\\..\\x.csv",
        "a\0b",
        "\x1b[31m",
        "",
        HOSTILE,
    ],
)
def test_a_file_name_is_only_shown(
    client: TestClient, files: Uploads, name: str
) -> None:
    answer = send(client, CSV, name)
    assert answer.status_code == 200
    paths = list(files.folder.iterdir())
    assert len(paths) == 1
    assert paths[0].name == answer.json()["id"]
    page = client.get(answer.json()["address"]).text
    assert "<img" not in page
    assert "\x1b" not in page
    assert "/etc" not in page
    assert str(files.folder) not in page


def test_files_are_private(client: TestClient, files: Uploads) -> None:
    send(client, CSV)
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700


def test_files_are_deleted_when_the_server_stops(settings: Settings) -> None:
    with client_of(settings) as client:
        inner: Any = client.app
        folder = desk_of(inner._app.state.resources).uploads.folder
        send(client, CSV)
    assert not folder.exists()


def test_oldest_files_give_way(
    client: TestClient, files: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "MAX_FILES", 2)
    addresses = [send(client, CSV).json()["address"] for _ in range(3)]
    assert client.get(addresses[0], headers=HTML).status_code == 404
    assert client.get(addresses[2]).status_code == 200
    monkeypatch.setattr(uploads, "MAX_TOTAL_BYTES", 2 * len(CSV))
    send(client, CSV)
    assert len(list(files.folder.iterdir())) == 2
    answer = send(client, CSV * 3)
    assert answer.status_code == 503
    assert not list(files.folder.iterdir())


def test_old_files_are_deleted(
    client: TestClient, files: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = send(client, CSV).json()["address"]
    monkeypatch.setattr(uploads, "TTL_S", -1.0)
    assert client.get(address, headers=HTML).status_code == 404
    assert not list(files.folder.iterdir())


def test_empty_and_foreign_files_are_refused(
    client: TestClient, files: Uploads
) -> None:
    assert send(client, b"").status_code == 422
    foreign = client.post(
        "/files/upload", content=CSV, headers={"origin": "https://evil.example"}
    )
    assert foreign.status_code == 403
    assert not list(files.folder.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        b"\xd0\xcf\x11\xe0 old",
        b"PAR1 damaged",
        b"PK\x03\x04 damaged",
        b"\xff\xfe",
        b"\0",
    ],
)
def test_an_unreadable_file_is_explained(client: TestClient, content: bytes) -> None:
    address = send(client, content).json()["address"]
    answer = client.get(address)
    assert answer.status_code in {200, 422}
    assert "The server failed" not in answer.text


def test_preview_shows_rows_and_columns_that_are_found(client: TestClient) -> None:
    jsonl = '{"id": 1, "title": "<b>A</b>"}\nnot json\n{"text": "B", "more": [1]}\n'
    page = client.get(send(client, jsonl, "p.jsonl").json()["address"]).text
    assert "<th>more</th>" in page
    assert "&lt;b&gt;A&lt;/b&gt;" in page
    assert "title (by its name)" in page
    assert "not JSON" in page
    other = client.get(send(client, CSV).json()["address"]).text
    assert "<td>Dried beans</td>" in other


def test_preview_reads_another_encoding(client: TestClient) -> None:
    address = send(client, "id,title\n1,Käse\n".encode("cp1252")).json()["address"]
    assert "not UTF-8" in client.get(address).text
    assert "Käse" in client.get(f"{address}?encoding=cp1252").text
    assert client.get(f"{address}?encoding=nothing").status_code == 422


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"run": ""}, "not the name of a run"),
        ({"labels": "a\na"}, "named twice"),
        ({"labels": "a\nb", "template": "no place"}, "must contain"),
        ({"none": "2"}, "none"),
        ({"none": "x"}, "neither on, off nor"),
        ({"encoding": "nothing"}, "encoding"),
    ],
)
def test_a_mistake_in_the_form_keeps_what_was_filled_in(
    client: TestClient, fields: dict[str, str], problem: str
) -> None:
    address = send(client, CSV).json()["address"]
    form = {"body": "Kommentar", "run": "monday", "template": HOSTILE + "{}"} | fields
    answer = client.post(address, data=form)
    assert answer.status_code == 422
    assert problem in answer.text
    assert "<img" not in answer.text


def test_columns_that_an_export_has_itself_get_another_name() -> None:
    names = ["id", "Text", "label", "file_label", "model", "Title", ""]
    kept = kept_columns(names, names, Columns.of(body="Text"))
    assert dict(kept) == {
        "text": "Text",
        "label": "file_file_label",
        "file_label": "file_label",
        "model": "file_model",
        "title": "file_Title",
    }


def test_exports_keep_their_own_columns() -> None:
    names = ["id", "label", "scores", "fingerprint", "classified_at", "more"]
    assert kept_columns(names, names, Columns()) == ()
