"""Requests that `feedmill web` refuses before a route sees them: foreign hosts and sites, and too
much or too slow requests, on a real socket.
"""

import json
import logging
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from feedmill.shared.errors import SettingsError
from feedmill.shared.settings import Settings
from feedmill.web import guard, server
from feedmill.web.access import MAX_ALL_LOGINS, MAX_LOGINS, Access
from feedmill.web.failures import Failure
from feedmill.web.guard import Rates
from tests.e2e.test_web_endpoint import serving
from tests.fakes.clock import SimulatedClock
from tests.support import RedisServer, fetch, free_port, wait_until
from tests.unit.test_web_frame import FORM, client_of

BODY = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def web(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("web")
    with serving(redis_server, folder, FEEDMILL_WEB_HOSTS="mill.example.org") as url:
        yield url


def kind_of(answer: tuple[int, str, object]) -> tuple[int, str]:
    status, text, _ = answer
    return status, json.loads(text)["error"]["type"]


@pytest.mark.parametrize(
    "host",
    ["evil.example", "mill.example.org.evil", "", "127.0.0.2", "localhost:x@evil", "["],
)
def test_an_unknown_host_is_refused(web: str, host: str) -> None:
    """A page of another site whose name was made to lead here (DNS rebinding)."""
    answer = fetch(f"{web}/v1/runs", Host=host)
    assert kind_of(answer) == (400, "unknown_host")


@pytest.mark.parametrize(
    "host", ["localhost:1", "mill.example.org", "MILL.example.org:443"]
)
def test_a_known_host_is_served(web: str, host: str) -> None:
    assert fetch(f"{web}/v1/runs", Host=host)[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "http://["},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_what_another_site_makes_a_browser_send_is_refused(
    web: str, headers: dict[str, str]
) -> None:
    answer = fetch(f"{web}/v1/runs", b'{"texts": ["a"]}', **BODY, **headers)
    assert kind_of(answer) == (403, "foreign_site")


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"},
        {"Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"},
        {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
    ],
)
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_site_cannot_make_a_browser_load_anything(
    web: str, site: str, headers: dict[str, str]
) -> None:
    """Such as a hundred exports, as images of its page."""
    answer = fetch(f"{web}/v1/runs", **{"Sec-Fetch-Site": site}, **headers)
    assert kind_of(answer) == (403, "foreign_site")
    link = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert fetch(f"{web}/v1/runs", **{"Sec-Fetch-Site": site}, **link)[0] == 200


def test_a_request_of_its_own_pages_is_served(web: str) -> None:
    own = {"Origin": web, "Sec-Fetch-Site": "same-origin"}
    assert fetch(f"{web}/v1/runs", b'{"texts": ["own"]}', **BODY, **own)[0] == 202


def test_answers_tell_browsers_to_run_and_show_nothing_foreign(web: str) -> None:
    for path in ("/v1/runs", "/v1/nothing", "/health"):
        _, _, headers = fetch(f"{web}{path}", **{"X-Request-Id": "mine-1"})
        assert "script-src 'self'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["X-Request-Id"] == "mine-1"
        assert "server" not in headers


def said(url: str, request: bytes) -> bytes:
    """Send bytes, and return all that comes until the server closes."""
    host, _, port = url.removeprefix("http://").partition(":")
    answer = b""
    connection = socket.create_connection((host, int(port)), timeout=60)
    with connection, suppress(ConnectionError):
        connection.sendall(request)
        while part := connection.recv(65536):
            answer += part
    return answer


START = b"POST /v1/classify HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_a_body_that_is_announced_too_large_is_refused_at_once(web: str) -> None:
    length = str(guard.MAX_BODY_BYTES + 1).encode()
    answer = said(web, START + b"Content-Length: " + length + b"\r\n\r\n")
    assert b" 413 " in answer.splitlines()[0]


def test_a_body_that_grows_too_large_is_refused(web: str) -> None:
    """The body has no announced length."""
    part = b"x" * 2**20
    chunk = f"{len(part):x}\r\n".encode() + part + b"\r\n"
    chunks = chunk * (guard.MAX_BODY_BYTES // len(part) + 1)
    # The server waits for the rest of a body, and for the next request.
    start = START + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = said(web, start + chunks + b"0\r\n\r\n")
    assert b" 413 " in answer.splitlines()[0]


def test_headers_that_never_end_are_cut_off(web: str) -> None:
    line = b"X-More: " + b"y" * 1000 + b"\r\n"
    endless = START + line * (2 * server.MAX_HEADER_BYTES // len(line))
    assert said(web, endless) == b""


def test_a_request_for_two_hosts_is_refused(web: str) -> None:
    """A proxy may have checked the other one."""
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: a\r\nConnection: close\r\n\r\n"
    assert b" 400 " in said(web, request).splitlines()[0]


def test_trailers_are_cut_off(web: str) -> None:
    """Headers behind a body, of which uvicorn keeps all."""
    form = FORM["content-type"].encode()
    start = b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Type: " + form
    start += b"\r\nTransfer-Encoding: chunked\r\n\r\n3\r\na=b\r\n0\r\n"
    many = b"X-More: y\r\n" * 10_000
    long = b"X-More: " + b"y" * (4 * server.MAX_HEADER_BYTES)
    for trailers in (many, long):
        assert said(web, start + trailers) == b""


def test_a_body_in_small_chunks_is_read(web: str) -> None:
    body = b'{"texts": ["' + b"small chunks " * 10_000 + b'"]}'
    parts = body.split(b" ")
    chunks = b"".join(b"%x\r\n%s \r\n" % (len(part) + 1, part) for part in parts)
    start = START.replace(b"/v1/classify", b"/v1/runs")
    start += b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = said(web, start + chunks + b"0\r\n\r\n")
    assert b" 202 " in answer.splitlines()[0]


def test_a_client_that_still_sends_gets_the_error(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """The answer arrives although the body is not read: a reset connection would lose it."""
    body = b"x" * (8 * 2**20)
    with serving(redis_server, tmp_path, FEEDMILL_WEB_TOKENS=TOKENS) as url:
        answer = fetch(f"{url}/files/upload", body, Authorization="Bearer wrong")
    assert kind_of(answer) == (401, "unauthorized")


TOKENS = "sender:send:0123456789abcdef"


def test_nobody_reads_a_large_body_of_a_stranger(settings: Settings) -> None:
    """JSON is parsed before a route sees who has sent it."""
    fields = {"web_tokens": TOKENS, "web_password": "a long password"}
    checked = Settings.model_validate(settings.model_dump() | fields)
    body = b'{"texts": [' + b"[]," * guard.MAX_UNKNOWN_BYTES + b"[]]}"
    with client_of(checked) as client:
        for token in ("", "Bearer wrong"):
            answer = client.post(
                "/v1/classify", content=body, headers=BODY | {"Authorization": token}
            )
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "unauthorized"
        known = {"Authorization": "Bearer 0123456789abcdef"}
        answer = client.post("/v1/classify", content=body, headers=BODY | known)
        assert answer.status_code == 422
        answer = client.post("/login", content=b"name=" + body, headers=FORM)
        assert answer.status_code == 413


def test_a_body_of_too_many_values_is_refused(web: str) -> None:
    """Before anything parses it."""
    for part in (b"[],", b"{},", b"1,"):
        body = b'{"texts": [' + part * guard.MAX_SEPARATORS + b"1]}"
        answer = fetch(f"{web}/v1/classify", body, **BODY)
        assert kind_of(answer) == (413, "too_large")


def test_all_bodies_together_are_bounded() -> None:
    bodies = guard.Bodies()
    bodies.add(guard.MAX_ALL_BYTES)
    with pytest.raises(Failure, match="Try again"):
        bodies.add(1)
    bodies.release(guard.MAX_ALL_BYTES)
    bodies.add(1)


@contextmanager
def serving_here(settings: Settings) -> Iterator[str]:
    """Serve on a thread of this process."""
    made = server.make_uvicorn(settings)
    listener = socket.create_server(("127.0.0.1", free_port()))
    _, port = listener.getsockname()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(made.run, [listener])
        try:
            wait_until(lambda: made.started or running.done(), "it has started")
            yield f"http://127.0.0.1:{port}"
        finally:
            made.should_exit = True
            running.result(60)


def test_slow_headers_and_slow_bodies_are_cut_off(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(server, "HEADERS_TIMEOUT_S", 0.5)
        with serving_here(settings) as url:
            assert said(url, b"POST /v1/classify HTTP/1.1\r\nHost: loc") == b""
    # A busy machine can read a request's headers late.
    monkeypatch.setattr(guard, "BODY_TIMEOUT_S", 0.5)
    start = START + b"Connection: close\r\n"
    with serving_here(settings) as url:
        answer = said(url, start + b"Content-Length: 100\r\n\r\n{")
        assert b" 408 " in answer.splitlines()[0]


def test_callers_that_leave_while_they_send_are_no_bugs(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Each would write a traceback to the log."""
    caplog.set_level(logging.INFO)
    form = FORM["content-type"].encode()
    with serving_here(settings) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        for path in (b"/login", b"/files/upload", b"/v1/runs"):
            start = b"POST " + path + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(start + form + b"\r\nContent-Length: 9\r\n\r\n{")
        lines = [f"POST {path}" for path in ("/login", "/files/upload", "/v1/runs")]
        wait_until(lambda: all(line in caplog.text for line in lines), "all have left")
    assert "Traceback" not in caplog.text


def test_a_rate_is_an_average() -> None:
    clock = SimulatedClock()
    rates = Rates(rate=2.0, clock=clock.monotonic)
    assert [rates.admits("a") for _ in range(5)] == [True] * 4 + [False]
    assert rates.admits("b")
    clock.wait(1)
    assert [rates.admits("a") for _ in range(3)] == [True, True, False]


def test_too_many_requests_are_refused(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    # Many at once: a busy machine answers few in a second.
    with (
        serving(redis_server, tmp_path, FEEDMILL_WEB_RATE="1") as url,
        ThreadPoolExecutor(8) as threads,
    ):
        answers = list(threads.map(fetch, [f"{url}/v1/runs"] * 40))
    refused = [answer for answer in answers if answer[0] == 429]
    assert refused
    assert kind_of(refused[0]) == (429, "too_many")
    assert int(refused[0][2]["Retry-After"]) > 0


def access(address: str = "127.0.0.1", **given: str) -> Access:
    return Access(Settings.model_validate(given), address, SimulatedClock().monotonic)


def test_without_secrets_only_this_machine_may_come_in() -> None:
    for address in ("127.0.0.1", "::1", "localhost", "127.9.9.9"):
        assert access(address).is_open
    for address in ("0.0.0.0", "::", "10.0.0.1", "example.org"):  # noqa: S104
        with pytest.raises(SettingsError, match="FEEDMILL_WEB_PASSWORD"):
            access(address)
        assert not access(address, web_password="a long password").is_open


@pytest.mark.parametrize(
    "tokens",
    [
        "x",
        "a:read:short",
        "a:rule:0123456789abcdef",
        "a:read:0123456789abcdef,",
        ":read:0123456789abcdef",
    ],
)
def test_invalid_tokens_are_named_without_their_secret(tokens: str) -> None:
    with pytest.raises(SettingsError, match="FEEDMILL_WEB_TOKENS") as caught:
        access(web_tokens=tokens)
    assert "0123456789abcdef" not in str(caught.value)


def test_a_session_ends() -> None:
    clock = SimulatedClock()
    settings = Settings.model_validate({"web_password": "a long password"})
    made = Access(settings, "0.0.0.0", clock.monotonic)  # noqa: S104
    assert made.log_in("Ann", "wrong password") is None
    assert made.log_in("", "a long password") is None
    cookie = made.log_in("Ann", "a long password")
    assert cookie
    header = f"other=1; feedmill_session={cookie}"
    caller = made.caller("", header)
    assert caller is not None
    assert (caller.name, caller.may("admin")) == ("Ann", True)
    assert made.caller("", "feedmill_session=forged") is None
    assert made.caller("Bearer", header) is None
    made.log_out(header)
    assert made.caller("", header) is None

    cookie = made.log_in("Ann", "a long password")
    clock.wait(8 * 86_400)
    assert made.caller("", f"feedmill_session={cookie}") is None


def test_guessing_a_password_is_slow() -> None:
    made = access(web_password="a long password")
    attempts = [made.count_login("10.0.0.1") for _ in range(11)]
    assert attempts == [True] * 10 + [False]
    assert made.count_login("10.0.0.2")


def test_guesses_from_many_addresses_are_bounded() -> None:
    """A provider gives each customer 2**64 addresses of IPv6."""
    made = access(web_password="a long password")
    attempts = [made.count_login(f"2001:db8::{part:x}") for part in range(11)]
    assert attempts == [True] * 10 + [False]
    assert made.count_login("2001:db8:0:1::1")
    assert not access_after(made, MAX_ALL_LOGINS).count_login("10.0.0.1")


def access_after(made: Access, count: int) -> Access:
    for number in range(count):
        made.count_login(f"10.1.{number // 256}.{number % 256}")
    return made


def test_guesses_at_once_are_counted() -> None:
    """Forms are answered on several threads."""
    made = access(web_password="a long password")
    with ThreadPoolExecutor(16) as threads:
        attempts = list(threads.map(made.count_login, ["10.0.0.1"] * 2000))
    assert sum(attempts) == MAX_LOGINS


@pytest.mark.parametrize("hosts", ["", "mill.example.org"])
def test_only_a_proxy_says_which_address_a_request_has(
    redis_server: RedisServer, tmp_path: Path, hosts: str
) -> None:
    """Others could give each guess an address of its own."""
    secrets = {"FEEDMILL_WEB_PASSWORD": "a long password", "FEEDMILL_WEB_HOSTS": hosts}
    form = b"name=a&password=wrong"
    with serving(redis_server, tmp_path, **secrets) as url:
        statuses = []
        for number in range(12):
            forwarded = {"X-Forwarded-For": f"10.0.0.{number}", **FORM}
            statuses.append(fetch(f"{url}/login", form, **forwarded)[0])
    assert (429 in statuses) is (not hosts)


@pytest.mark.parametrize(
    "other", ['a={"b": "c"}', 'a="', "a=b c", "é", "feedmill_session=forged", "=;;"]
)
def test_cookies_of_neighbours_end_no_session(other: str) -> None:
    """Other servers of this host set cookies that a browser sends here, too."""
    made = access(web_password="a long password")
    cookie = made.log_in("Ann", "a long password")
    own = f"feedmill_session={cookie}"
    for header in (f"{other}; {own}", f"{own}; {other}"):
        assert made.caller("", header) is not None
    made.log_out(f"{other}; {own}")
    assert made.caller("", own) is None
