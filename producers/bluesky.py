"""Bluesky's posts from Jetstream, its public stream of events as JSON over WebSocket.

Needs no key.

The stream is that of the path /subscribe (version 1), which old and new Jetstream servers have. A
position is a time in microseconds. A server keeps events for about a day and a half, and silently
begins with its oldest one if the position is older; the daemon notices that the event at the
position is missing. Servers of version 2 may begin up to an hour earlier than asked. Sources:
bluesky-social/jetstream, section 5.1 of its design document, and its issue 343.
"""

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from socket import IPPROTO_TCP, TCP_USER_TIMEOUT
from typing import Any
from urllib.parse import urlencode

from websockets.exceptions import InvalidProxy, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from feedmill.producers.live.source import (
    Clock,
    Event,
    Source,
    SourceFailed,
    header_number,
)
from feedmill.shared.errors import clause
from feedmill.shared.language import is_foreign, parse_languages
from feedmill.shared.messages import in_utc
from feedmill.shared.settings import Settings

COLLECTION = "app.bsky.feed.post"
#: Seconds before the stored position from which the stream is read again: servers' clocks differ.
OVERLAP_S = 10
#: Maximum bytes of an event. Servers are asked to leave out larger ones; one that comes all the
#: same is cut, so that it cannot be read. The client closes the connection at a frame of more than
#: MAX_FRAME_BYTES.
MAX_EVENT_BYTES = 2**20
MAX_FRAME_BYTES = 2**26
#: Timeouts in seconds: for a new connection, for its closing handshake, and until an empty answer
#: to the daemon.
CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 1.0
IDLE_S = 1.0
#: Seconds after which the connection ends if the server takes nothing: websockets answers pings
#: without a limit.
TAKES_NOTHING_S = 30.0
#: Seconds without any event after which the connection counts as dead. Bluesky has hundreds of
#: events per second.
SILENCE_S = 60.0
#: Account states in which an author's posts must be deleted. Other inactive accounts may come
#: back.
DELETED_STATES = frozenset({"deleted", "takendown"})
#: Labels by which authors mark their own posts as not safe for work.
NSFW_LABELS = frozenset({"porn", "sexual", "nudity", "graphic-media"})
#: Errors of connecting and reading. A proxy in the environment raises ImportError if it is a SOCKS
#: proxy and python-socks is missing, and ValueError if its port is malformed.
CONNECTION_ERRORS = (OSError, EOFError, WebSocketException, ImportError, ValueError)
#: Maximum characters of a link, as in shared/messages.py.
MAX_URL = 4096


def _parse_codes(languages: str) -> frozenset[str]:
    """Return the codes in the setting `bluesky_languages`."""
    codes = [code.strip() for code in languages.lower().split(",")]
    return frozenset(filter(None, codes))


class BlueskySource(Source):
    """New, edited and deleted posts of Bluesky. See `Source`."""

    name = "bluesky"
    overlap = OVERLAP_S * 1_000_000

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._url = f"{settings.bluesky_url}/subscribe"
        #: Languages that authors must declare; empty for any, and for none.
        self._languages = _parse_codes(settings.bluesky_languages or "")
        self._min_characters = settings.bluesky_min_characters
        #: Languages that must be detected in texts; empty for any.
        self._accepted_languages = frozenset[str]()
        if settings.languages is not None:
            self._accepted_languages = parse_languages(settings.languages)
        self._clock = clock

    def position_at(self, at: float) -> int | None:
        microseconds = round(at * 1_000_000)
        return max(0, microseconds)

    def events(self, cursor: int | None) -> Iterator[str | bytes | None]:
        query: dict[str, str | int] = {
            "wantedCollections": COLLECTION,
            "maxMessageSizeBytes": MAX_EVENT_BYTES,
        }
        if cursor is not None:
            query["cursor"] = max(0, cursor)
        parameters = urlencode(query)
        try:
            with connect(
                f"{self._url}?{parameters}",
                open_timeout=CONNECT_TIMEOUT_S,
                close_timeout=CLOSE_TIMEOUT_S,
                max_size=MAX_FRAME_BYTES,
            ) as connection:
                socket = connection.socket
                # Of the socket below TLS in TLS, through a proxy.
                connected = getattr(socket, "ssl_socket", socket)
                timeout_ms = round(TAKES_NOTHING_S * 1000)
                connected.setsockopt(
                    IPPROTO_TCP,
                    TCP_USER_TIMEOUT,
                    timeout_ms,
                )
                yield from self._receive(connection)
        except InvalidStatus as fault:
            response = fault.response
            retry_after = header_number(response.headers, "Retry-After")
            reason = f"the server answered {response.status_code}"
            raise SourceFailed(reason, retry_after or 0.0) from fault
        except InvalidProxy as fault:  # its text shows the proxy's password
            reason = f"the proxy in the environment cannot be used ({fault.msg})"
            raise SourceFailed(reason) from fault
        except CONNECTION_ERRORS as fault:
            reason = clause(fault)
            raise SourceFailed(f"the connection failed ({reason})") from fault

    def _receive(self, connection: ClientConnection) -> Iterator[str | bytes | None]:
        clock = self._clock
        last_event = clock.monotonic()
        while True:
            try:
                text = connection.recv(IDLE_S)
            except TimeoutError:
                silence_s = clock.monotonic() - last_event
                if silence_s > SILENCE_S:
                    raise SourceFailed(f"no event for {SILENCE_S:.0f} s") from None
                yield None
                continue
            last_event = clock.monotonic()
            yield text[:MAX_EVENT_BYTES]

    def parse(self, raw: str | bytes) -> Event:
        data = json.loads(raw)
        time_us = data["time_us"]
        kind = data["kind"]
        progress = Event(
            cursor=int(time_us),
            at=time_us / 1_000_000,
        )
        user = data["did"]
        author = f"at://{user}/{COLLECTION}/"
        if kind == "account":
            account = data["account"]
            is_active = account.get("active", True)
            if not is_active and account.get("status") in DELETED_STATES:
                return progress._replace(deleted_author=author)
            return progress
        if kind != "commit":
            return progress
        commit = data["commit"]
        if commit["collection"] != COLLECTION:
            return progress
        operation = commit["operation"]
        record_key = commit["rkey"]
        post_id = f"{author}{record_key}"
        if operation == "delete":
            return progress._replace(deleted=post_id)
        record = commit["record"]
        if not isinstance(record, dict) or not self._wants(record):
            return progress._replace(filtered=True)
        written = record.get("createdAt")
        created = _seconds(written) or progress.at
        edited = None
        if operation == "update":
            edited = progress.at
        labels = _labels(record)
        fields = {
            "id": post_id,
            "body": record["text"],
            "url": _link(record),
            "permalink": f"https://bsky.app/profile/{user}/post/{record_key}",
            "created_utc": min(created, progress.at),
            "edited_utc": edited,
            "nsfw": not NSFW_LABELS.isdisjoint(labels),
        }
        return progress._replace(post=fields)

    def _wants(self, record: Mapping[str, Any]) -> bool:
        """Apply the filters.

        Posts without text, which only show images or quote others, are left out.

        Anyone can write a record, so its fields may have any type.
        """
        text = record.get("text")
        if not isinstance(text, str):
            return False
        count = len(text.strip())
        if count < self._min_characters:
            return False
        if self._languages and not self._declares_language(record):
            return False
        if not self._accepted_languages:
            return True
        return not is_foreign(text, self._accepted_languages)

    def _declares_language(self, record: Mapping[str, Any]) -> bool:
        codes = record.get("langs")
        if not isinstance(codes, list):
            return False
        languages: set[str] = set()
        for code in codes:
            language, _, _ = str(code).partition("-")
            languages.add(language.lower())
        return not self._languages.isdisjoint(languages)


def _link(record: Mapping[str, Any]) -> str | None:
    """Return the URL of the post's link card."""
    uri = _part(record, "embed", "external", "uri")
    if isinstance(uri, str) and len(uri) <= MAX_URL:
        return uri
    return None


def _labels(record: Mapping[str, Any]) -> set[str]:
    """Return the labels that the author gave to the post."""
    values = _part(record, "labels", "values")
    if isinstance(values, list):
        return {str(_part(value, "val")) for value in values}
    return set()


def _part(value: Any, *names: str) -> Any:
    """Return a part of nested objects; None if there is none."""
    for name in names:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


def _seconds(text: object) -> float | None:
    """Parse the time that the author's application wrote, in seconds since 1970; None if it is
    invalid.
    """
    try:
        created = datetime.fromisoformat(str(text))
        seconds = in_utc(created)
    except (ValueError, OverflowError):
        return None
    return max(0.0, seconds)
