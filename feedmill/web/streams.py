"""Server-sent events: results as they are stored, to any number of readers.

Each reader has its own place in the results stream, so that it misses nothing and can continue
where it stopped. One thread waits for new entries on behalf of all of them.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import Query
from pydantic_core import to_json
from redis import Redis
from redis.exceptions import RedisError

from feedmill.outcomes.rows import (
    ENTRY_ID,
    Chunk,
    Missed,
    Place,
    ResultRow,
    RowReader,
)
from feedmill.shared.backoff import Backoff
from feedmill.shared.keys import RESULTS_STREAM
from feedmill.shared.redis_errors import trouble
from feedmill.web.failures import Failure

logger = logging.getLogger(__name__)

#: Most readers at once. Each holds a connection to a client.
MAX_READERS = 100
#: Seconds without an event after which a comment shows that the connection lives.
HEARTBEAT_S = 15.0
#: Least seconds between two looks for new entries.
MIN_INTERVAL_S = 0.2
#: Seconds that the waiting thread blocks, which bounds the time to stop.
WAIT_S = 1.0
RECONNECTIONS = Backoff(first_s=0.5, max_s=5.0)
#: A place in an address. It becomes a line of the stream, so that nothing may follow it.
Cursor = Annotated[str, Query(pattern=f"^{ENTRY_ID.pattern}$", max_length=39)]


class Newness:
    """Tells readers on the event loop that the results stream has grown.

    Its thread runs only while there are readers.
    """

    def __init__(self, redis: Redis) -> None:
        self._reader = RowReader(redis)
        self._readers = 0
        self._is_stopping = False
        self._has_readers = threading.Event()
        self._grown = asyncio.Event()
        self._thread = threading.Thread(
            target=self._watch,
            name="newness",
            daemon=True,
        )

    def start(self) -> None:
        """Start the thread. Call it on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and the streams of all readers."""
        self._is_stopping = True
        self._has_readers.set()
        # Called on another thread than the event loop's, to which the event belongs.
        self._loop.call_soon_threadsafe(self._wake)
        self._thread.join(2 * WAIT_S)

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    @property
    def has_room(self) -> bool:
        return self._readers < MAX_READERS

    def check_room(self) -> None:
        """Raise Failure if there are too many readers. Call it before an answer begins."""
        if not self.has_room:
            raise Failure(503, "busy", "Too many readers follow the results.")

    def enter(self) -> None:
        """Note a reader."""
        self._readers += 1
        self._has_readers.set()

    def leave(self) -> None:
        self._readers -= 1
        if self._readers == 0:
            self._has_readers.clear()

    @property
    def next(self) -> asyncio.Event:
        """The event that is set when the stream has grown. Take it before looking for entries."""
        return self._grown

    def _wake(self) -> None:
        """Wake all that wait now."""
        grown = self._grown
        self._grown = asyncio.Event()
        grown.set()

    def _watch(self) -> None:
        place = Place("0-0")
        failures = 0
        while not self._is_stopping:
            self._has_readers.wait()
            try:
                place = self._wait_after(place)
                failures = 0
            except RedisError as fault:
                if failures == 0:
                    logger.warning("results: Redis %s. Retrying.", trouble(fault))
                time.sleep(RECONNECTIONS.pause_s(failures))
                failures += 1

    def _wait_after(self, place: Place) -> Place:
        """Return the stream's end, and wake the readers if it is another place; else wait a
        little.
        """
        end = end_of(self._reader.redis)
        if end == place:
            self._reader.wait(place, WAIT_S)
            return place
        self._loop.call_soon_threadsafe(self._wake)
        time.sleep(MIN_INTERVAL_S)
        return end


def end_of(redis: Redis) -> Place:
    """Return the place after the newest entry."""
    newest: Any = redis.xrevrange(RESULTS_STREAM, count=1)
    if not newest:
        return Place("0-0")
    entry_id, _ = newest[0]
    return Place(str(entry_id))


def event(identity: str, content: object, kind: str = "") -> bytes:
    """Return a server-sent event."""
    lines = [b"id: " + identity.encode()]
    if kind:
        lines.append(b"event: " + kind.encode())
    lines.append(b"data: " + to_json(content, inf_nan_mode="null"))
    return b"\n".join(lines) + b"\n\n"


async def events(
    redis: Redis,
    newness: Newness,
    place: Place,
    describe: Callable[[ResultRow], object | None],
    may_follow: Callable[[], bool] = lambda: True,
    most: int | None = None,
) -> AsyncIterator[bytes]:
    """Yield results after a place as events, as long as the reader may follow them.

    describe: returns an event's content; None for rows that the reader does not want. The id of an
    event is the place after it. most: results to send of those that come at once, the newest; an
    event `skipped` has the number of the others.
    """
    reader = RowReader(redis)
    if not newness.has_room:  # others came since `check_room`
        return
    newness.enter()
    try:
        # Without a place, a reader that loses its connection before the first result would begin
        # with new ones.
        yield b"retry: 2000\nid: " + place.cursor.encode() + b"\n\n"
        while not newness.is_stopping and may_follow():
            grown = newness.next
            try:
                chunk = await asyncio.to_thread(reader.fetch, place)
            except RedisError as fault:
                yield b": " + trouble(fault).encode() + b"\n\n"
                await asyncio.sleep(RECONNECTIONS.max_s)
                continue
            for line in _lines(chunk, describe, most):
                yield line
            has_moved = chunk.place.cursor != place.cursor
            place = chunk.place
            if has_moved:
                continue
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await grown.wait()
            except TimeoutError:
                yield b": alive\n\n"
    finally:
        newness.leave()


def _lines(
    chunk: Chunk,
    describe: Callable[[ResultRow], object | None],
    most: int | None,
) -> list[bytes]:
    lines: list[bytes] = []
    for row in chunk.rows:
        content = describe(row)
        if content is not None:
            lines.append(event(row.entry, content))
    others = 0 if most is None else max(0, len(lines) - most)
    if others:
        lines[:others] = [event(chunk.place.cursor, {"count": others}, "skipped")]
    if chunk.missed is not None:
        lines.insert(0, event(chunk.place.cursor, as_fields(chunk.missed), "missed"))
    return lines


def as_fields(missed: Missed) -> dict[str, object]:
    return {"count": missed.count, "since": missed.since, "until": missed.until}
