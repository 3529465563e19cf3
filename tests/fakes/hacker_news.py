"""A fake Hacker News on loopback: the paths maxitem, updates and item of its API."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Self


class HackerNews(ThreadingHTTPServer):
    """The server. items: by number; changed: numbers of recently changed items."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Items)
        self.items: dict[int, dict[str, Any] | None] = {}
        self.changed: list[int] = []
        #: Paths that were asked for, and statuses of the next answers.
        self.asked: list[str] = []
        self.faults: list[int] = []
        self._thread = Thread(target=self.serve_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v0"

    def answer(self, path: str) -> object:
        if path == "/v0/maxitem.json":
            return max(self.items)
        if path == "/v0/updates.json":
            return {"items": self.changed, "profiles": []}
        return self.items.get(int(path.removeprefix("/v0/item/").removesuffix(".json")))


class Items(BaseHTTPRequestHandler):
    server: HackerNews

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        status = self.server.faults.pop(0) if self.server.faults else 200
        body = json.dumps(self.server.answer(self.path)).encode() if status == 200 else b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
