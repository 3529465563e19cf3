"""Bluesky's posts from Jetstream, its public stream of events as JSON over WebSocket. Needs no key.

The stream is that of the path /subscribe (version 1), which old and new Jetstream servers have. A position is a time in
microseconds. A server keeps events for about a day and a half, and silently begins with its oldest one if the position
is older; the daemon notices that the event at the position is missing. Servers of version 2 may begin up to an hour
earlier than asked. Sources: bluesky-social/jetstream, section 5.1 of its design document, and its issue 343.
"""

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from feedmill.producers.live.source import Clock, Event, Source, SourceFailed, header_number
from feedmill.shared.errors import clause
from feedmill.shared.messages import in_utc
from feedmill.shared.settings import Settings

COLLECTION = "app.bsky.feed.post"
#: Seconds before the stored position from which the stream is read again: servers' clocks differ.
OVERLAP_S = 10
#: Maximum bytes of an event. Servers are asked to leave out larger ones; one that comes all the same is cut, so that it
#: cannot be read. The client closes the connection at a frame of more than MAX_FRAME_BYTES.
MAX_EVENT_BYTES, MAX_FRAME_BYTES = 2**20, 2**26
#: Timeouts in seconds: for a new connection, for its closing handshake, and until an empty answer to the daemon.
CONNECT_TIMEOUT_S, CLOSE_TIMEOUT_S, IDLE_S = 10.0, 1.0, 1.0
#: Seconds without any event after which the connection counts as dead. Bluesky has hundreds of events per second.
SILENCE_S = 60.0
#: Account states in which an author's posts must be deleted. Other inactive accounts may come back.
DELETED_STATES = frozenset({"deleted", "takendown"})
#: Labels by which authors mark their own posts as not safe for work.
NSFW_LABELS = frozenset({"porn", "sexual", "nudity", "graphic-media"})
#: Maximum characters of a link, as in shared/messages.py.
MAX_URL = 4096


class BlueskySource(Source):
    """New, edited and deleted posts of Bluesky. See `Source`."""

    name = "bluesky"
    overlap = OVERLAP_S * 1_000_000

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._url = f"{settings.bluesky_url}/subscribe"
        languages = (settings.bluesky_languages or "").lower()
        self._languages = frozenset(code.strip() for code in languages.split(",") if code.strip())
        self._min_characters = settings.bluesky_min_characters
        self._clock = clock

    def events(self, cursor: int | None) -> Iterator[str | bytes | None]:
        query: dict[str, str | int] = {"wantedCollections": COLLECTION, "maxMessageSizeBytes": MAX_EVENT_BYTES}
        if cursor is not None:
            query["cursor"] = max(0, cursor)
        try:
            with connect(
                f"{self._url}?{urlencode(query)}",
                open_timeout=CONNECT_TIMEOUT_S,
                close_timeout=CLOSE_TIMEOUT_S,
                max_size=MAX_FRAME_BYTES,
            ) as connection:
                yield from self._receive(connection)
        except InvalidStatus as fault:
            retry_after = header_number(fault.response.headers, "Retry-After") or 0.0
            raise SourceFailed(f"the server answered {fault.response.status_code}", retry_after) from fault
        except (OSError, EOFError, WebSocketException) as fault:
            raise SourceFailed(f"the connection failed ({clause(fault)})") from fault

    def _receive(self, connection: ClientConnection) -> Iterator[str | bytes | None]:
        heard = self._clock.monotonic()
        while True:
            try:
                text = connection.recv(IDLE_S)
            except TimeoutError:
                if self._clock.monotonic() - heard > SILENCE_S:
                    raise SourceFailed(f"no event for {SILENCE_S:.0f} s") from None
                yield None
                continue
            heard = self._clock.monotonic()
            yield text[:MAX_EVENT_BYTES]

    def parse(self, raw: str | bytes) -> Event:
        data = json.loads(raw)
        progress = Event(int(data["time_us"]), data["time_us"] / 1_000_000)
        author = f"at://{data['did']}/"
        if data["kind"] == "account":
            gone = not data["account"].get("active", True) and data["account"].get("status") in DELETED_STATES
            return progress._replace(deleted_author=f"{author}{COLLECTION}/" if gone else None)
        if data["kind"] != "commit" or data["commit"]["collection"] != COLLECTION:
            return progress
        commit = data["commit"]
        post_id = f"{author}{COLLECTION}/{commit['rkey']}"
        if commit["operation"] == "delete":
            return progress._replace(deleted=post_id)
        record = commit["record"]
        if not isinstance(record, dict) or not self._wants(record):
            return progress._replace(filtered=True)
        fields = {
            "id": post_id,
            "body": record["text"],
            "url": _link(record),
            "permalink": f"https://bsky.app/profile/{data['did']}/post/{commit['rkey']}",
            "created_utc": min(_seconds(record.get("createdAt")) or progress.at, progress.at),
            "edited_utc": progress.at if commit["operation"] == "update" else None,
            "nsfw": not NSFW_LABELS.isdisjoint(_labels(record)),
        }
        return progress._replace(post=fields)

    def _wants(self, record: Mapping[str, Any]) -> bool:
        """Apply the filters. Posts without text, which only show images or quote others, are left out.

        Anyone can write a record, so its fields may have any type.
        """
        text, languages = record.get("text"), record.get("langs")
        if not isinstance(text, str) or len(text.strip()) < self._min_characters:
            return False
        declared = {str(code).lower().partition("-")[0] for code in languages} if isinstance(languages, list) else set()
        return not self._languages or not self._languages.isdisjoint(declared)


def _link(record: Mapping[str, Any]) -> str | None:
    """Return the URL of the post's link card."""
    uri = _part(record, "embed", "external", "uri")
    return uri if isinstance(uri, str) and len(uri) <= MAX_URL else None


def _labels(record: Mapping[str, Any]) -> set[str]:
    """Return the labels that the author gave to the post."""
    values = _part(record, "labels", "values")
    return {str(_part(value, "val")) for value in values} if isinstance(values, list) else set()


def _part(value: Any, *names: str) -> Any:
    """Return a part of nested objects; None if there is none."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _seconds(text: object) -> float | None:
    """Parse the time that the author's application wrote, in seconds since 1970; None if it is invalid."""
    try:
        return max(0.0, in_utc(datetime.fromisoformat(str(text))))
    except (ValueError, OverflowError):
        return None
