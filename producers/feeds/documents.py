"""The entries of a feed's document, and the process that reads documents (parser.py).

Imports little, because the process starts again after a document that took too long.

Needs fastfeedparser, an optional package. It resolves no entities of a DOCTYPE, and loads nothing.
"""

import json
import re
import resource
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

from fastfeedparser import parse

from feedmill.producers.html_text import text_of

#: Memory that the process may use, in bytes.
MAX_MEMORY = 2 * 2**30
#: Bytes of a message's length between the two processes, and what the new process sends first.
LENGTH_BYTES = 4
READY = b"ready"
#: Maximum characters of a title and a body, as in shared/messages.py.
MAX_TITLE = 4_000
MAX_BODY = 100_000
#: Maximum entries of a feed. Of more, the newest by their dates are read.
MAX_ENTRIES = 5_000
#: Maximum characters of an id or an address, and of a date.
MAX_ADDRESS = 4_096
MAX_DATE = 64
#: Bytes at a document's end within which its last tag must be, and the last tags of feeds.
TAIL_BYTES = 4_096
LAST_TAG = re.compile(rb"</(?:\w+:)?(?:rss|feed|rdf)\s*>", re.IGNORECASE)
#: Bytes at a document's beginning in which its wishes for the interval are searched.
HEAD_BYTES = 2**16
TTL = re.compile(rb"<ttl>\s*(\d{1,6})\s*</ttl>")
PERIOD = re.compile(rb"<(?:\w+:)?updatePeriod>\s*(\w{1,10})\s*</")
FREQUENCY = re.compile(rb"<(?:\w+:)?updateFrequency>\s*(\d{1,4})\s*</")
PERIODS_S = {
    b"hourly": 3_600.0,
    b"daily": 86_400.0,
    b"weekly": 7 * 86_400.0,
    b"monthly": 30 * 86_400.0,
    b"yearly": 365 * 86_400.0,
}
#: Text that Reddit adds to each entry of its feeds.
SUBMITTED_BY = re.compile(r"\s*submitted by\s+/u/\S+(?:\s+to\s+r/\S+)?\s+\[link\].*$")


class Entry(NamedTuple):
    """An entry of a feed. Texts are plain; published and updated as ISO 8601, "" if unknown."""

    id: str
    title: str
    body: str
    link: str
    published: str
    updated: str


class Document(NamedTuple):
    """A feed's document.

    entries: in its order. interval: seconds between reads that it asks for; 0 if it does not.
    whole: false if its end is missing; then so is its last entry, which may be cut.
    """

    entries: list[Entry]
    interval: float
    whole: bool


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer documents with entries, as JSON, until there are no more."""
    answers.write(READY)
    answers.flush()
    while header := requests.read(LENGTH_BYTES):
        length = int.from_bytes(header, "big")
        body = requests.read(length)
        reply = read_document(body)
        text = json.dumps(reply).encode()
        answers.write(len(text).to_bytes(LENGTH_BYTES, "big") + text)
        answers.flush()


def read_document(body: bytes) -> dict[str, Any]:
    """Return a document's entries, or the problem with it."""
    try:
        document = _without_junk(body)
        feed = parse(
            document,
            include_tags=False,
            include_enclosures=False,
        )
    except MemoryError:
        raise
    except Exception:  # of any kind, because the document may be anything
        return {"problem": "the server returned something that is not a feed"}
    raw_entries = list(feed.entries)
    is_whole = _is_whole(body)
    if not is_whole:
        raw_entries = raw_entries[:-1]
    entries = [_entry(raw) for raw in raw_entries]
    if len(entries) > MAX_ENTRIES:
        # In either order: some feeds begin with the oldest entry.
        entries.sort(key=_date, reverse=True)
        entries = entries[:MAX_ENTRIES]
    return {
        "entries": entries,
        "interval": _interval(body[:HEAD_BYTES]),
        "whole": is_whole,
    }


def _without_junk(body: bytes) -> bytes:
    """Return a JSON Feed without the items that are no objects, and their values that are neither
    texts nor numbers, with which the parser would refuse the whole feed; XML as it is.
    """
    if body.lstrip()[:1] != b"{":
        return body
    feed = json.loads(body)
    items: list[dict[str, object]] = []
    for item in feed.get("items", ()):
        if isinstance(item, dict):
            values = {
                name: value
                for name, value in item.items()
                if isinstance(value, str) or name == "id"
            }
            values["id"] = str(item.get("id") or "")
            items.append(values)
    feed["items"] = items
    return json.dumps(feed).encode()


def _date(entry: Entry) -> str:
    return entry.published


def _entry(raw: Mapping[str, Any]) -> Entry:
    title = text_of(_text(raw, "title"))
    body = text_of(_body(raw))
    body = SUBMITTED_BY.sub("", body)
    return Entry(
        id=_text(raw, "id")[:MAX_ADDRESS],
        title=title[:MAX_TITLE],
        body=body[:MAX_BODY],
        link=_text(raw, "link")[:MAX_ADDRESS],
        published=_text(raw, "published")[:MAX_DATE],
        updated=_text(raw, "updated")[:MAX_DATE],
    )


def _body(raw: Mapping[str, Any]) -> str:
    """Return the longer of an entry's texts: some feeds have the first lines as description.

    Only an entry without any has that of its first medium, as videos have.
    """
    texts = [_text(raw, "description")]
    texts += [_text(part, "value") for part in raw.get("content", ())]
    text = max(texts, key=len)
    if text:
        return text
    media = [_text(part, "description") for part in raw.get("media_content", ())]
    return next(filter(None, media), "")


def _text(fields: Any, name: str) -> str:
    value = fields.get(name) if isinstance(fields, dict) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode().strip()
    return ""


def _is_whole(body: bytes) -> bool:
    """Return whether a document has its end. JSON without its end is not parsed."""
    if body.lstrip()[:1] == b"{":
        return True
    return LAST_TAG.search(body[-TAIL_BYTES:]) is not None


def _interval(head: bytes) -> float:
    """Return the seconds between reads that a feed asks for; 0 if it does not."""
    wishes = [0.0]
    ttl = TTL.search(head)
    if ttl:
        wishes.append(60.0 * int(ttl[1]))
    period = PERIOD.search(head)
    if period:
        frequency = FREQUENCY.search(head)
        times = max(1, int(frequency[1])) if frequency else 1
        wishes.append(PERIODS_S.get(period[1].lower(), 0.0) / times)
    return max(wishes)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    serve(sys.stdin.buffer, sys.stdout.buffer)
