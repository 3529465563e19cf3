"""Servers of live sources that dribble: every exchange ends, whatever they send."""

import gzip
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from socket import SO_RCVBUF, SOL_SOCKET, socket
from socketserver import BaseRequestHandler
from typing import Any

import pytest
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol

from feedmill.producers import jetstream
from feedmill.producers.bluesky import BlueskySource
from feedmill.producers.live import http
from feedmill.producers.live.exchange import Exchange
from feedmill.producers.live.http import HttpClient
from feedmill.producers.live.source import (
    Clock,
    RequestBudget,
    RequestFailed,
    SourceFailed,
)
from feedmill.producers.reddit import arctic_shift, client
from feedmill.producers.reddit.arctic_shift import ArcticShiftClient
from feedmill.producers.reddit.client import RedditClient
from feedmill.shared.settings import Settings
from tests.fakes.dribbling import ANSWERS, Dribbling, Endless
from tests.support import Authority

CREDENTIALS = {
    "reddit_client_id": "id",
    "reddit_client_secret": "secret",
    "reddit_user_agent": "linux:test:1",
}


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "READ_TIMEOUT_S", 0.3)
    monkeypatch.setattr(jetstream, "CONNECT_TIMEOUT_S", 1.0)
    monkeypatch.setattr(jetstream, "CLOSE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(jetstream, "IDLE_S", 0.1)
    monkeypatch.setattr(jetstream, "SILENCE_S", 1.0)
    monkeypatch.setattr(jetstream, "TAKES_NOTHING_S", 1.0)


@pytest.fixture
def plain() -> Iterator[HttpClient]:
    made = HttpClient("the server", RequestBudget(Clock(), 10**6))
    yield made
    made.close()


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_dribbling_server_holds_no_request(plain: HttpClient, answer: str) -> None:
    with Dribbling(answer) as server, pytest.raises(RequestFailed):
        plain.request("GET", f"{server.url}/x")
    assert server.connections == 1


@pytest.mark.parametrize(
    "answer", [name for name, (_, repeated) in ANSWERS.items() if repeated]
)
def test_a_flood_ends_within_the_time_and_the_size(
    plain: HttpClient, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_RESPONSE_BYTES", 2**22)
    with Dribbling(answer, pause=0) as server, suppress(RequestFailed):
        assert len(plain.request("GET", f"{server.url}/x").content) <= 2**22


def test_a_body_has_a_time_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that thought for long may still send a large body slowly."""
    now = [0.0]
    monkeypatch.setattr(
        "feedmill.producers.live.exchange.time.monotonic", lambda: now[0]
    )
    limits = Exchange()
    limits.begin(seconds=30.0, connect_timeout=5.0, read_timeout=15.0, max_bytes=100)
    now[0] = 29.0
    assert limits.read_timeout() == 1.0
    limits.begin_body(60.0)
    for now[0] in (30.0, 50.0, 74.0):
        assert limits.read_timeout() == 15.0
    now[0] = 88.0
    assert limits.read_timeout() == 1.0
    now[0] = 89.0
    with pytest.raises(TimeoutError):
        limits.read_timeout()
    assert limits.problem == "the response took longer than 60 s"


def test_a_packed_body_of_a_redirect_is_bounded_too(
    plain: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """requests reads it whole to find the next request."""
    monkeypatch.setattr(http, "MAX_RESPONSE_BYTES", 2**20)
    head = b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Encoding: gzip\r\n\r\n"
    packed = gzip.compress(bytes(2**24))
    with (
        Dribbling("nothing", before=head + packed) as server,
        pytest.raises(RequestFailed, match="larger than 1 MiB"),
    ):
        plain.request("GET", f"{server.url}/x")


@pytest.mark.parametrize("answer", ["header", "continue", "chunk extension", "body"])
def test_over_tls(
    plain: HttpClient, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    chain, key = authority.certificate("server", "localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)

    def wrap(connected: socket) -> Any:
        return context.wrap_socket(connected, server_side=True)

    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(authority.file))
    with Dribbling(answer, wrap=wrap) as server, pytest.raises(RequestFailed):
        plain.request("GET", f"{server.url}/x")


@pytest.mark.parametrize("answer", ["status", "headers", "continue"])
def test_through_a_dribbling_proxy(
    plain: HttpClient, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Dribbling(answer) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        with pytest.raises(SourceFailed):
            plain.request("GET", "https://example.invalid/x")
    assert proxy.connections == 1


def test_a_tls_handshake_without_an_answer(
    plain: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "CONNECT_TIMEOUT_S", 0.5)
    with Dribbling("status") as server, pytest.raises(SourceFailed):
        plain.request("GET", server.url.replace("http:", "https:"))


def test_addresses_that_do_not_answer_share_the_time(
    plain: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name may have any number of them: the time ends before they do."""
    count = 5000
    tried: list[str] = []

    def addresses(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        if host == "many.invalid":
            return [(2, 1, 6, "", ("127.0.0.1", port))] * count
        tried.append(host)
        return [(2, 1, 6, "", (host, port))]

    plain.session.trust_env = False  # no proxy
    monkeypatch.setattr(http, "CONNECT_TIMEOUT_S", 0.2)
    with socket() as full, ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):  # its queue is full: it drops further attempts
            waiting = stack.enter_context(socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        monkeypatch.setattr("socket.getaddrinfo", addresses)
        with pytest.raises(SourceFailed):
            plain.request("GET", f"http://many.invalid:{full.getsockname()[1]}/x")
    assert 1 < len(tried) < count


def reddit(url: str) -> Callable[[], object]:
    client.API_URL = client.TOKEN_URL = url
    made = RedditClient(
        Settings.model_validate(CREDENTIALS), RequestBudget(Clock(), 10**6), {}
    )
    return lambda: made.page(["cooking"])


def archive(url: str) -> Callable[[], object]:
    arctic_shift.URL = url
    made = ArcticShiftClient(Settings(), RequestBudget(Clock(), 10**6), {})
    return lambda: made.since("cooking", 0.0)


@pytest.mark.parametrize("source", [reddit, archive])
@pytest.mark.parametrize("answer", ["header", "continue", "chunk extension", "trailer"])
def test_every_source_over_http(
    source: Callable[[str], Callable[[], object]],
    answer: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module, name in (
        (client, "API_URL"),
        (client, "TOKEN_URL"),
        (arctic_shift, "URL"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # restored afterwards
    with Dribbling(answer) as server, pytest.raises(RequestFailed):
        source(server.url)()


# WebSocket.


def read(url: str) -> None:
    """Read Jetstream's events until it fails."""
    settings = Settings.model_validate({"bluesky_url": url})
    for _ in BlueskySource(settings, Clock()).events(None):
        pass


@pytest.mark.parametrize(
    "answer", ["nothing", "status", "header", "headers", "continue", "refused", "body"]
)
def test_a_dribbled_handshake_of_a_websocket(answer: str) -> None:
    with Dribbling(answer) as server, pytest.raises(SourceFailed):
        read(server.url.replace("http:", "ws:"))


@pytest.mark.parametrize("answer", ["status", "headers", "continue"])
def test_a_dribbling_proxy_of_a_websocket(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Dribbling(answer) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        with pytest.raises(SourceFailed):
            read("wss://example.invalid")
    assert proxy.connections == 1


class Frames(Endless):
    """A WebSocket server that sends the same bytes for ever and, after the handshake, reads
    nothing.
    """

    def __init__(self, first: bytes, repeated: bytes, pause: float) -> None:
        super().__init__(_Handler)
        self.first, self.repeated, self.pause = first, repeated, pause


class _Handler(BaseRequestHandler):
    server: Frames

    def handle(self) -> None:
        connection, server = self.request, self.server
        connection.setsockopt(SOL_SOCKET, SO_RCVBUF, 4096)
        protocol = ServerProtocol()
        protocol.receive_data(connection.recv(65536))
        (request,) = protocol.events_received()
        assert isinstance(request, Request)
        protocol.send_response(protocol.accept(request))
        connection.sendall(b"".join(protocol.data_to_send()) + server.first)
        while not server.ended.wait(server.pause):
            connection.sendall(server.repeated)


def frame(opcode: Opcode, data: bytes, *, is_last: bool = True) -> bytes:
    return Frame(opcode, data, fin=is_last).serialize(mask=False)


SILENT = {
    "nothing": (b"", b"", 0.05),
    "pings": (b"", frame(Opcode.PING, b"x"), 0.05),
    "pongs": (b"", frame(Opcode.PONG, b"x"), 0.05),
    "fragments": (
        frame(Opcode.TEXT, b"x", is_last=False),
        frame(Opcode.CONT, b"x", is_last=False),
        0.05,
    ),
    "a dribbled frame": (b"\x81\x7f\x00\x00\x00\x00\x00\x10\x00\x00", b"x", 0.05),
}


@pytest.mark.parametrize("what", SILENT)
def test_a_websocket_without_events_ends(what: str) -> None:
    first, repeated, pause = SILENT[what]
    with Frames(first, repeated, pause) as server, pytest.raises(SourceFailed):
        read(f"ws://127.0.0.1:{server.server_address[1]}")


def test_a_websocket_that_takes_no_answers_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The silence is long enough for the answers to fill the buffers: closing would wait for them
    for ever.
    """
    monkeypatch.setattr(jetstream, "SILENCE_S", 20.0)
    pings = frame(Opcode.PING, b"x" * 125) * 1000
    with Frames(b"", pings, pause=0.0) as server, pytest.raises(SourceFailed):
        read(f"ws://127.0.0.1:{server.server_address[1]}")
