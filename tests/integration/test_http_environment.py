"""Live sources in users' environments: proxies, ~/.netrc, and encodings that servers name."""

from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from feedmill.producers.bluesky import BlueskySource
from feedmill.producers.live import http
from feedmill.producers.live.http import HttpClient
from feedmill.producers.live.source import (
    Clock,
    RequestBudget,
    RequestFailed,
    SourceFailed,
)
from feedmill.producers.reddit.client import RedditClient
from feedmill.shared.settings import Settings

CREDENTIALS = {
    "reddit_client_id": "id",
    "reddit_client_secret": "secret",
    "reddit_user_agent": "linux:test:1",
}
#: Environment variables that name a proxy.
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "WSS_PROXY", "SOCKS_PROXY")


class Server(ThreadingHTTPServer):
    """A server that answers every request alike, and records its authorizations."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.status = 200
        self.type = "application/json"
        self.body = b"{}"
        self.authorizations: list[str | None] = []


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:  # http.server's name
        self.server.authorizations.append(self.headers["Authorization"])
        self.send_response(self.server.status)
        self.send_header("Content-Type", self.server.type)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture
def client() -> Iterator[HttpClient]:
    made = HttpClient("the server", RequestBudget(Clock(), 10**6))
    yield made
    made.close()


@pytest.mark.parametrize(
    "charset", ["punycode", "idna", "hex", "undefined", "utf-7", "no-such"]
)
def test_json_is_read_whatever_encoding_the_server_names(
    server: Server, client: HttpClient, charset: str
) -> None:
    """Decoding some of them takes minutes."""
    server.type = f"application/json; charset={charset}"
    server.body = '{"é": 1}'.encode()
    assert client.json(client.request("GET", server.url)) == {"é": 1}
    server.body = b"a" * 3_000_000 + b"-" + b"abcdef9z" * 200_000
    with pytest.raises(RequestFailed):
        client.json(client.request("GET", server.url))


@pytest.mark.parametrize("status", [200, 302, 403, 404, 500])
@pytest.mark.parametrize("body", [b"[" * 200_000, b"\xff\xfe", b"[1]", b"null", b""])
def test_no_answer_of_reddit_ends_the_source(
    server: Server, status: int, body: bytes
) -> None:
    server.status = status
    server.body = body
    settings = Settings.model_validate(CREDENTIALS | {"reddit_url": server.url})
    reddit = RedditClient(settings, RequestBudget(Clock(), 10**6), {})
    reddit._token = "a token"
    with pytest.raises(RequestFailed):
        reddit.page(["cooking"])
    reddit.close()


@pytest.mark.parametrize("entry", ["default", "machine 127.0.0.1"])
def test_servers_get_no_password_of_netrc(
    server: Server,
    client: HttpClient,
    entry: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would replace a token, too."""
    netrc = tmp_path / "netrc"
    netrc.write_text(f"{entry} login me password mine\n")
    monkeypatch.setenv("NETRC", str(netrc))
    client.request("GET", server.url)
    client.request("GET", server.url, headers={"Authorization": "bearer token"})
    client.request("GET", server.url, auth=("id", "secret"))
    assert server.authorizations == [None, "bearer token", "Basic aWQ6c2VjcmV0"]


def ask(_: HttpClient) -> None:
    """Read Bluesky's stream."""
    settings = Settings.model_validate({"bluesky_url": "wss://127.0.0.1:9"})
    next(BlueskySource(settings, Clock()).events(None))


def request(client: HttpClient) -> None:
    client.request("GET", "https://127.0.0.1:9/x")


@pytest.mark.parametrize("use", [request, ask])
@pytest.mark.parametrize(
    "proxy",
    [
        "socks5h://me:SECRET@127.0.0.1:9",
        "ftp://me:SECRET@127.0.0.1:9",
        "http://me:SECRET@127.0.0.1:port",
        "http://me:SECRET@127.0.0.1:99999",
        "http://me:SECRET@[::1",
        "http://me:SEC/RET@127.0.0.1:9",
        "me:SECRET@127.0.0.1:9",
        "http://",
    ],
)
def test_a_proxy_that_cannot_be_used_is_reported_without_its_password(
    client: HttpClient,
    use: Callable[[HttpClient], None],
    proxy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "CONNECT_TIMEOUT_S", 1.0)
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    with pytest.raises(SourceFailed) as failure:
        use(client)
    assert "SEC" not in str(failure.value)


def test_a_missing_file_of_certificates_is_named(
    client: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/no/such/file")
    with pytest.raises(SourceFailed, match="/no/such/file"):
        request(client)
