"""The base of HTTP servers on this machine that stand in for others."""

from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Self


class Loopback(ThreadingHTTPServer):
    """A server that answers on a thread until its block ends. port: 0 for a free one.

    Raises OSError.
    """

    def __init__(self, handler: type[BaseHTTPRequestHandler], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Self:
        Thread(
            target=self.serve_forever,
            kwargs={"poll_interval": 0.01},
            daemon=True,
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """Answers requests of any method in `respond`."""

    def do_GET(self) -> None:
        self.respond()

    do_HEAD = do_POST = do_GET  # noqa: N815 - the base class's names

    def respond(self) -> None:
        raise NotImplementedError

    def log_message(self, *_: Any) -> None:
        """Do not log requests."""

    def send(self, status: int, headers: Mapping[str, str], length: int) -> None:
        """Send the status and the headers of an answer whose body has this many bytes."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
