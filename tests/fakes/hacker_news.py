"""A fake Hacker News on loopback: the paths maxitem, updates and item of its API."""

import json
from typing import Any

from feedmill.testing.loopback import Handler, Loopback


class HackerNews(Loopback):
    """The server. items: by number; changed: numbers of recently changed items."""

    def __init__(self) -> None:
        super().__init__(Items)
        self.url += "/v0"
        self.items: dict[int, dict[str, Any] | None] = {}
        self.changed: list[int] = []
        #: Paths that were asked for, and statuses of the next answers.
        self.asked: list[str] = []
        self.faults: list[int] = []

    def answer(self, path: str) -> object:
        if path == "/v0/maxitem.json":
            return max(self.items)
        if path == "/v0/updates.json":
            return {"items": self.changed, "profiles": []}
        return self.items.get(int(path.removeprefix("/v0/item/").removesuffix(".json")))


class Items(Handler):
    server: HackerNews

    def respond(self) -> None:
        self.server.asked.append(self.path)
        status = self.server.faults.pop(0) if self.server.faults else 200
        body = (
            json.dumps(self.server.answer(self.path)).encode() if status == 200 else b""
        )
        self.send(status, {}, len(body))
        self.wfile.write(body)
