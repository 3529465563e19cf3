"""A server on loopback that answers a byte at a time, for ever."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, repeat
from socket import SHUT_RDWR, socket
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Event, Thread
from typing import Any, Self

#: Starts of answers, and what follows them for ever.
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
ANSWERS: dict[str, tuple[bytes, bytes]] = {
    "nothing": (b"", b""),
    "status": (b"HTTP/1.1 200 ", b"O"),
    "header": (OK + b"X-Odd: ", b"x"),
    "headers": (OK, b"X: 1\r\n"),
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "continue with headers": (b"", b"HTTP/1.1 100 Continue\r\nX: 1\r\n\r\n"),
    "early hints": (b"", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"),
    "chunk size": (CHUNKED, b"0"),
    "chunk extension": (CHUNKED + b"1;", b"x"),
    "chunks": (CHUNKED, b"1\r\nx\r\n"),
    "trailer": (CHUNKED + b"1\r\nx\r\n0\r\nX-Odd: ", b"x"),
    "trailers": (CHUNKED + b"1\r\nx\r\n0\r\n", b"X: 1\r\n"),
    "body": (OK + b"Content-Length: 1000000\r\n\r\n", b" "),
    "body until the end": (OK + b"\r\n", b" "),
    "redirected body": (b"HTTP/1.1 302 Found\r\nLocation: /x\r\n\r\n", b" "),
    "refused": (b"HTTP/1.1 503 No\r\nContent-Length: 1000000\r\n\r\n", b" "),
}


class Endless(ThreadingTCPServer):
    """A server on a free port whose answers end when it is left. Handlers watch `ended`."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, handler: type[BaseRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.ended = Event()
        self.port = int(self.server_address[1])

    def __enter__(self) -> Self:
        Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: Any) -> None:
        """Keep the test's output clean."""


class Dribbling(Endless):
    """The server. answer: a name in ANSWERS. pause: seconds between bytes; 0 sends as fast as the
    client reads.

    wrap: returns the TLS socket of a connection. before: an answer that is sent at once, such as a
    proxy's.
    """

    def __init__(
        self,
        answer: str,
        pause: float = 0.05,
        wrap: Callable[[socket], Any] | None = None,
        before: bytes = b"",
    ) -> None:
        super().__init__(_Handler)
        self.start, self.repeated = ANSWERS[answer]
        self.pause, self.wrap, self.before = pause, wrap, before
        #: Connections so far.
        self.connections = 0
        self.url = f"http{'s' if wrap else ''}://localhost:{self.port}"


class _Handler(BaseRequestHandler):
    server: Dribbling

    def handle(self) -> None:
        server = self.server
        server.connections += 1
        connection = server.wrap(self.request) if server.wrap else self.request
        with suppress(OSError), connection:
            connection.recv(65536)
            connection.sendall(server.before)
            for part in self._parts():
                if server.ended.wait(server.pause):
                    break
                connection.sendall(part)
            server.ended.wait()
            connection.shutdown(SHUT_RDWR)

    def _parts(self) -> Iterator[bytes]:
        """Yield single bytes after a pause each, or many at once."""
        server = self.server
        if not server.repeated:
            return iter(())
        if not server.pause:
            return chain([server.start], repeat(server.repeated * 1000))
        return chain(
            [server.start],
            (bytes([byte]) for part in repeat(server.repeated) for byte in part),
        )
