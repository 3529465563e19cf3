"""A Mastodon server on loopback: the timelines and the look-up of statuses."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from feedmill.testing.loopback import Handler, Loopback


class Mastodon(Loopback):
    """The server. statuses: by number. token: None if it wants none."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(Answers)
        self._clock = clock
        self.statuses: dict[int, dict[str, Any]] = {}
        self.token: str | None = None
        #: Paths that were asked for, statuses of the next answers, and a body in place of one.
        self.asked: list[str] = []
        self.faults: list[int] = []
        self.body: bytes | None = None

    def post(self, text: str, late_s: float = 0.0, **fields: Any) -> int:
        """Publish a status, and return its number. late_s: seconds since it was written."""
        written = self._clock() - late_s
        number = round(written * 1000) << 16
        while number in self.statuses:
            number += 1
        self.statuses[number] = {
            "id": str(number),
            "created_at": datetime.fromtimestamp(written, UTC).isoformat(),
            "edited_at": None,
            "content": f"<p>{text}</p>",
            "spoiler_text": "",
            "sensitive": False,
            "visibility": "public",
            "url": f"https://mastodon.example/@a/{number}",
            "favourites_count": 0,
            "reblog": None,
            "account": {"noindex": False},
            "tags": [],
        } | fields
        return number

    def answer(self, path: str, query: dict[str, list[str]]) -> object:
        if path == "/api/v1/statuses":
            numbers = [int(number) for number in query["id[]"]]
            return [self.statuses[each] for each in numbers if each in self.statuses]
        numbers = sorted(self.statuses)
        if path.startswith("/api/v1/timelines/tag/"):
            tag = unquote(path.rpartition("/")[2])
            numbers = [
                each for each in numbers if {"name": tag} in self.statuses[each]["tags"]
            ]
        limit = int(query["limit"][0])
        if "min_id" in query:
            after = [each for each in numbers if each > int(query["min_id"][0])]
            numbers = after[:limit]
        else:
            numbers = numbers[-limit:]
        return [self.statuses[each] for each in reversed(numbers)]


class Answers(Handler):
    server: Mastodon

    def respond(self) -> None:
        server = self.server
        parts = urlsplit(self.path)
        server.asked.append(parts.path)
        status = server.faults.pop(0) if server.faults else 200
        wanted = f"Bearer {server.token}"
        if server.token is not None and self.headers.get("Authorization") != wanted:
            status = 401
        body = b""
        if status == 200:
            answer = server.answer(parts.path, parse_qs(parts.query))
            body = server.body or json.dumps(answer).encode()
        self.send(status, {}, len(body))
        self.wfile.write(body)
