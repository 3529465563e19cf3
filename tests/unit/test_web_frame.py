"""Tests of what all pages share: logging in, who may see a page, static files and errors."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import Depends
from starlette.testclient import TestClient

from feedmill.shared.settings import Settings
from feedmill.web.access import COOKIE
from feedmill.web.pages import frame
from feedmill.web.server import make_server
from tests.support import RedisServer

FORM = {"content-type": frame.FORM_TYPE}
HTML = {"accept": "text/html"}
PASSWORD = "a good password"
HOSTILE = "<img src=x onerror=alert(1)>"


def client_of(settings: Settings, **more: Any) -> TestClient:
    """Return a client that follows no redirects."""
    app = make_server(settings.model_copy(update=more))
    return TestClient(
        app,
        base_url="http://127.0.0.1",
        follow_redirects=False,
        raise_server_exceptions=False,
    )


@pytest.fixture
def closed(redis: RedisServer) -> Iterator[TestClient]:
    """A server with a password."""
    fields = {"redis_url": redis.url, "web_password": PASSWORD}
    with client_of(Settings.model_validate(fields)) as client:
        yield client


@pytest.fixture
def opened(settings: Settings) -> Iterator[TestClient]:
    """A server that trusts everyone who reaches it."""
    with client_of(settings) as client:
        yield client


def log_in(client: TestClient, **fields: str) -> Any:
    form = {"name": "ann", "password": PASSWORD} | fields
    return client.post("/login", data=form)


def test_login_page_sends_back_to_where_a_browser_was(closed: TestClient) -> None:
    refused = closed.get("/runs?page=2", headers=HTML)
    assert refused.status_code == 303
    assert refused.headers["location"] == "/login?next=%2Fruns%3Fpage%3D2"
    assert 'value="/runs?page=2"' in closed.get(refused.headers["location"]).text
    answer = log_in(closed, next="/runs?page=2")
    assert answer.headers["location"] == "/runs?page=2"
    cookie = answer.headers["set-cookie"].lower()
    assert cookie.startswith(COOKIE)
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert closed.get("/", headers=HTML).status_code == 200


@pytest.mark.parametrize(
    "target",
    ["https://evil.example/", "//evil.example", "/\\evil.example", "/\t/e", "evil", ""],
)
def test_login_sends_to_no_other_site(closed: TestClient, target: str) -> None:
    page = closed.get("/login", params={"next": target})
    assert 'name="next" value="/"' in page.text
    assert log_in(closed, next=target).headers["location"] == "/"


def test_wrong_password_shows_the_page_again_and_attempts_are_bounded(
    closed: TestClient,
) -> None:
    answer = log_in(closed, password="wrong", name=HOSTILE)
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    assert "<img" not in answer.text
    statuses = [log_in(closed, password="wrong").status_code for _ in range(12)]
    assert statuses[-1] == 429
    assert log_in(closed).status_code == 429


def test_logging_out_ends_the_session(closed: TestClient) -> None:
    log_in(closed)
    cookie = closed.cookies[COOKIE]
    assert closed.post("/logout").headers["location"] == "/login"
    closed.cookies.set(COOKIE, cookie)
    assert closed.get("/", headers=HTML).status_code == 303


def test_another_site_cannot_log_in(closed: TestClient) -> None:
    answer = closed.post(
        "/login",
        data={"name": "ann", "password": PASSWORD},
        headers={"origin": "https://evil.example"},
    )
    assert answer.status_code == 403


def test_tokens_without_password_leave_the_pages_closed(redis: RedisServer) -> None:
    fields = {"redis_url": redis.url, "web_tokens": "a:read:0123456789abcdef"}
    with client_of(Settings.model_validate(fields)) as client:
        assert client.get("/", headers=HTML).status_code == 303
        assert "FEEDMILL_WEB_PASSWORD" in client.get("/login").text
        headers = {"authorization": "Bearer 0123456789abcdef"}
        assert client.get("/", headers=headers | HTML).status_code == 200


def test_static_files_are_cached_by_their_content(opened: TestClient) -> None:
    page = opened.get("/", headers=HTML).text
    addresses = re.findall(r'(?:href|src)="(/static/[^"]+)"', page)
    assert addresses
    for address in addresses:
        answer = opened.get(address)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
    other = opened.get("/static/000000000000/web.css")
    assert "immutable" not in other.headers["cache-control"]
    assert opened.get("/static/x/..%2Fserver.py").status_code == 404
    assert opened.get("/static/x/nothing.js").status_code == 404


def test_pages_have_no_inline_scripts_or_styles(opened: TestClient) -> None:
    for path in ("/", "/runs", "/system", "/login", "/nothing"):
        answer = opened.get(path, headers=HTML)
        assert not re.search(r"<script(?![^>]* src=)", answer.text), path
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=", answer.text), path
        policy = answer.headers["content-security-policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy


def test_errors_are_pages_for_people_and_json_for_programs(opened: TestClient) -> None:
    page = opened.get(f"/{HOSTILE}", headers=HTML)
    assert page.status_code == 404
    assert page.headers["content-type"].startswith("text/html")
    assert "<img" not in page.text
    for path in ("/v1/nothing", "/nothing"):
        answer = opened.get(path)
        assert answer.json()["error"]["type"] == "not_found"
    assert opened.get("/v1/nothing", headers=HTML).json()


def test_unexpected_errors_show_no_traceback(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    router = frame.page_router()

    @router.get("/fails", dependencies=[Depends(frame.person("read"))])
    def fail() -> None:
        raise RuntimeError("a secret")

    with client_of(settings) as client:
        inner: Any = client.app
        inner._app.include_router(router)
        answer = client.get("/fails", headers=HTML)
    assert answer.status_code == 500
    assert "a secret" not in answer.text
    assert "a secret" in caplog.text


def test_forms_are_bounded(closed: TestClient) -> None:
    large = closed.post("/login", content=b"a=" + b"x" * 2**21, headers=FORM)
    assert large.status_code == 413
    fields = "&".join(["a=b"] * 6000)
    assert closed.post("/login", content=fields, headers=FORM).status_code == 400
    assert closed.post("/login", json={"name": "a"}).status_code == 415
    broken = closed.post("/login", content=b"name=%ff\xff", headers=FORM)
    assert broken.status_code == 400
