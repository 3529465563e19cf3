"""A server of feeds on loopback: RSS, Atom and JSON Feed, with entries that tests write, and
faults.

    with Feeds() as server:
        feed = server.add("blog", form="atom")
        feed.publish("a title", "a text")
        get(f"{server.url}/blog")
"""

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import format_datetime
from hashlib import sha1
from html import escape
from typing import Any

from feedmill.testing.loopback import Handler, Loopback

#: Random faults of an answer; see `Answers.respond`.
FAULTS = (
    "error",
    "wait",
    "html",
    "cut",
    "cut_chunks",
    "redirect",
    "unchanged",
    "no_end",
    "slow",
    "too_many",
)


class Feed:
    """A feed: its newest `capacity` entries.

    form: rss, atom or json. ids: own; links (RSS without guid); none (no links either). order:
    newest, oldest or random. dates: true, none, future or odd. has_validators: whether it sends
    ETag and Last-Modified, and answers 304.
    """

    def __init__(
        self,
        name: str,
        clock: Callable[[], float],
        form: str = "rss",
        capacity: int = 100,
        ids: str = "own",
        order: str = "newest",
        dates: str = "true",
        has_validators: bool = True,
        head: str = "",
    ) -> None:
        self.name = name
        self._clock = clock
        self.form = form
        self.capacity = capacity
        self.ids = ids
        self.order = order
        self.dates = dates
        self.has_validators = has_validators
        self.head = head
        #: Further headers of its answers.
        self.headers: dict[str, str] = {}
        self.entries: list[dict[str, Any]] = []
        #: Replaces the document.
        self.body: bytes | None = None
        self.published = 0

    def publish(self, title: str, body: str = "", **fields: Any) -> dict[str, Any]:
        """Add an entry, and return its fields, which may be changed."""
        self.published += 1
        link = f"https://example.org/{self.name}/{self.published}"
        entry: dict[str, Any] = {
            "id": f"tag:example.org,2026:{self.name}:{self.published}",
            "link": link,
            "title": title,
            "body": body,
            "date": self._clock(),
        } | fields
        if self.ids != "own":
            entry["id"] = ""
        if self.ids == "none":
            entry["link"] = ""
        if self.dates == "none":
            entry["date"] = None
        elif self.dates == "future":
            entry["date"] += 400 * 86_400
        self.entries.append(entry)
        del self.entries[: -self.capacity]
        return entry

    def document(self) -> bytes:
        if self.body is not None:
            return self.body
        entries = self.entries[::-1]
        if self.order == "oldest":
            entries = self.entries[:]
        elif self.order == "random":
            random.Random(len(entries)).shuffle(entries)
        render = {"rss": self._rss, "atom": self._atom, "json": self._json}[self.form]
        return render(entries).encode()

    def _rss(self, entries: Sequence[dict[str, Any]]) -> str:
        items = ""
        for entry in entries:
            items += f"<item><title>{escape(entry['title'])}</title>"
            items += f"<description>{escape(entry['body'])}</description>"
            if entry["id"]:
                items += f'<guid isPermaLink="false">{escape(entry["id"])}</guid>'
            if entry["link"]:
                items += f"<link>{escape(entry['link'])}</link>"
            if entry["date"] is not None:
                date = datetime.fromtimestamp(entry["date"], UTC)
                text = format_datetime(date) if self.dates != "odd" else "Caturday"
                items += f"<pubDate>{text}</pubDate>"
            items += "</item>"
        return (
            '<?xml version="1.0" encoding="UTF-8"?><rss version="2.0" '
            'xmlns:sy="http://purl.org/rss/1.0/modules/syndication/"><channel><title>A feed'
            f"</title>{self.head}{items}</channel></rss>"
        )

    def _atom(self, entries: Sequence[dict[str, Any]]) -> str:
        items = ""
        for entry in entries:
            items += f"<entry><title>{escape(entry['title'])}</title>"
            items += f'<content type="html">{escape(entry["body"])}</content>'
            items += f"<id>{escape(entry['id'])}</id>"
            if entry["link"]:
                items += f'<link href="{escape(entry["link"])}"/>'
            if entry["date"] is not None:
                date = datetime.fromtimestamp(entry["date"], UTC)
                items += f"<published>{date.isoformat()}</published>"
            items += "</entry>"
        return (
            '<feed xmlns="http://www.w3.org/2005/Atom"><title>A feed</title>'
            f"{self.head}{items}</feed>"
        )

    def _json(self, entries: Sequence[dict[str, Any]]) -> str:
        items = []
        for entry in entries:
            item = {
                "id": entry["id"],
                "url": entry["link"],
                "title": entry["title"],
                "content_html": entry["body"],
            }
            if entry["date"] is not None:
                date = datetime.fromtimestamp(entry["date"], UTC)
                item["date_published"] = date.isoformat()
            items.append(item)
        feed = {
            "version": "https://jsonfeed.org/version/1.1",
            "title": "A feed",
            "items": items,
        }
        return json.dumps(feed)


class Feeds(Loopback):
    """The server. Paths are names of feeds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__(Answers)
        self.clock = clock
        self.feeds: dict[str, Feed] = {}
        #: Path -> status and headers of its answer, such as a redirect.
        self.replies: dict[str, tuple[int, dict[str, str]]] = {}
        #: Paths that were asked for, with the headers of the requests.
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.fault_counts: Counter[str] = Counter()
        self._random = random.Random(1)
        self._rate = 0.0

    def add(self, name: str, **options: Any) -> Feed:
        feed = Feed(name, self.clock, **options)
        self.feeds[name] = feed
        return feed

    def random_faults(self, rate: float) -> None:
        """Let this share of the answers have a fault."""
        self._rate = rate

    def fault(self) -> str:
        if self._random.random() >= self._rate:
            return ""
        fault = self._random.choice(FAULTS)
        self.fault_counts[fault] += 1
        return fault


class Answers(Handler):
    server: Feeds

    def respond(self) -> None:
        with suppress(OSError):
            self._respond()

    def _respond(self) -> None:
        server = self.server
        path = self.path.removeprefix("/").partition("?")[0]
        server.asked.append((path, dict(self.headers.items())))
        if path in server.replies:
            status, headers = server.replies[path]
            self.send(status, headers, 0)
            return
        feed = server.feeds.get(path)
        if feed is None:
            self.send(404, {}, 0)
            return
        fault = server.fault()
        if fault:
            self._disturb(fault, feed)
            return
        body = feed.document()
        headers = dict(feed.headers)
        if feed.has_validators:
            etag = f'"{sha1(body, usedforsecurity=False).hexdigest()}"'
            headers["ETag"] = etag
            if self.headers.get("If-None-Match") == etag:
                self.send(304, headers, 0)
                return
        self._send(body, headers)

    def _send(self, body: bytes, headers: dict[str, str]) -> None:
        self.send(200, headers, len(body))
        self.wfile.write(body)

    def _disturb(self, fault: str, feed: Feed) -> None:
        body = feed.document()
        if fault == "error":
            self.send(500, {}, 0)
        elif fault == "wait":
            self.send(503, {"Retry-After": "600"}, 0)
        elif fault == "too_many":
            date = datetime.fromtimestamp(self.server.clock() + 400, UTC)
            self.send(429, {"Retry-After": format_datetime(date, usegmt=True)}, 0)
        elif fault == "html":
            self._send(b"<!DOCTYPE html><html><body>Please log in</body></html>", {})
        elif fault == "cut":
            self.send(200, {"ETag": '"cut"'}, len(body) + 1000)
            self.wfile.write(body[: len(body) // 2])
        elif fault == "cut_chunks":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"100\r\n" + body[:100])
        elif fault == "redirect":
            self.send(302, {"Location": f"/{feed.name}?again"}, 0)
        elif fault == "unchanged":
            self.send(304, {}, 0)
        elif fault == "no_end":
            self._send(body[: len(body) * 2 // 3], {"ETag": '"no end"'})
        elif fault == "slow":
            self.send(200, {}, len(body))
            for start in range(0, len(body), 2**14):
                time.sleep(0.01)
                self.wfile.write(body[start : start + 2**14])
