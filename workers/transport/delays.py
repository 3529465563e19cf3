"""Messages that are due later, because their sender set an ETA or a countdown, or their task
retries.

    `delayed`          hash: tag -> the message as it was in its list
    `delayed_index`    sorted set: tag -> when it is due, by Redis' clock

Celery keeps such messages in the worker's memory until they are due. A thousand of one megabyte
would take gigabytes, and at Celery's limit the worker takes no other message. Here, the worker
puts them back into Redis, in one function that also ends the lease. The lease thread of any worker
returns due messages to the end of their list from which they are delivered next. A worker whose
clock is behind Redis' delays a message once more.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from threading import Event, Lock
from time import monotonic
from typing import Any, NamedTuple

from redis import Redis

from feedmill.shared import encoding, scripts
from feedmill.shared.backoff import Backoff
from feedmill.shared.encoding import UnreadableError

#: Limits of a call: messages moved, and bytes after which it stops. Each call blocks Redis for a
#: few milliseconds.
DUE_PER_CALL = 1000
DUE_BYTES = 2**20
#: Seconds between two looks for due messages, at least. A thousand workers may wait for the same
#: message.
MIN_PAUSE_S = 0.01
#: Messages that `inspect scheduled` lists at most, and their bytes, since the event loop waits for
#: it.
MAX_SHOWN, SHOWN_BYTES = 100, 2**20
#: Messages in which `inspect query_task` searches, and their bytes.
MAX_SEARCHED, SEARCHED_BYTES = 1000, 2**22


class Delay(NamedTuple):
    """A message to delay. due_at: by the monotonic clock."""

    tag: str
    due_at: float


class NextDue(NamedTuple):
    """A delayed message, decoded, and when it is due, in ISO 8601 (UTC)."""

    eta: str
    message: dict[str, Any]


class Delays:
    """The delayed messages of one Redis, and those that this process is about to delay.

    Thread-safe.

    reserved, reserved_index, delayed, delayed_index: names of the keys. interval_s: seconds
    between two looks if no message is due earlier.
    """

    def __init__(
        self,
        client: Redis,
        keys: Sequence[str],
        interval_s: float,
    ) -> None:
        self._client = client
        self._keys = tuple(keys)
        self._interval_s = interval_s
        self._lock = Lock()
        #: Messages whose delay has not been sent yet.
        self.pending: deque[Delay] = deque()
        #: Time of the next look, by the monotonic clock.
        self._look_at = 0.0
        #: Seconds to the next look at least; doubled while other workers are faster.
        self._pauses = Backoff(first_s=MIN_PAUSE_S, max_s=interval_s)
        #: Looks in a row that found no due message.
        self._empty_looks = 0
        self._earlier = Event()

    def add(self, tag: str, seconds: float) -> None:
        """Delay a message. The next `take` sends it."""
        due_at = monotonic() + seconds
        delay = Delay(tag, due_at)
        self.pending.append(delay)
        with self._lock:
            if due_at < self._look_at:
                self._look_at = due_at
                self._earlier.set()

    def take(self) -> list[Delay]:
        """Return the pending delays, to be sent in a `command`.

        Give them back with `restore` if that fails.
        """
        delays: list[Delay] = []
        while self.pending:
            delays.append(self.pending.popleft())
        return delays

    def restore(self, delays: Sequence[Delay]) -> None:
        """Send these delays again. Repeating one has no effect."""
        self.pending.extend(delays)

    def command(self, delays: Sequence[Delay]) -> tuple[object, ...]:
        """Return the command that delays messages."""
        arguments = self._arguments(delays)
        return scripts.command("delay", *arguments)

    def flush(self) -> None:
        """Send pending delays now. Raises redis-py's errors."""
        delays = self.take()
        if not delays:
            return
        try:
            arguments = self._arguments(delays)
            scripts.call(self._client, "delay", *arguments)
        except BaseException:
            self.restore(delays)
            raise

    def _arguments(self, delays: Sequence[Delay]) -> list[object]:
        arguments: list[object] = list(self._keys)
        now = monotonic()
        for delay in delays:
            seconds = max(0.0, delay.due_at - now)
            arguments.append(delay.tag)
            arguments.append(f"{seconds:.6f}")
        return arguments

    # On the lease thread.

    def seconds_to_look(self) -> float:
        """Return the seconds until the next look for due messages."""
        with self._lock:
            seconds = self._look_at - monotonic()
        return max(0.0, seconds)

    def wait(self, seconds: float) -> None:
        """Wait, or until a message is delayed that is due earlier than the next look."""
        self._earlier.wait(seconds)
        self._earlier.clear()

    def return_due(self) -> bool:
        """Return due messages to their lists, if it is time to look. Return whether more are due.

        Raises redis-py's errors.
        """
        if self.seconds_to_look() > 0:
            return False
        _, _, delayed, index = self._keys
        moved, next_due = scripts.call(
            self._client,
            "return_due",
            delayed,
            index,
            DUE_PER_CALL,
            DUE_BYTES,
        )
        seconds_to_next = self._interval_s
        if next_due:
            seconds_to_next = float(next_due)
        more_are_due = bool(moved) and seconds_to_next == 0.0
        with self._lock:
            pause_s = self._note_look(moved)
            seconds = max(pause_s, seconds_to_next)
            seconds = min(self._interval_s, seconds)
            if more_are_due:
                seconds = 0.0
            self._look_at = monotonic() + seconds
        return more_are_due

    def next_due(
        self, limit: int = MAX_SHOWN, room: int = SHOWN_BYTES
    ) -> list[NextDue]:
        """Return the messages that are due next: at most `limit`, of at most `room` bytes
        together.

        Raises redis-py's errors.
        """
        messages: list[NextDue] = []
        for due_at, message in self._read(limit, room):
            with suppress(UnreadableError, OverflowError):
                content = encoding.open_message(message)
                eta = datetime.fromtimestamp(due_at, UTC)
                next_due = NextDue(eta.isoformat(), content)
                messages.append(next_due)
        return messages

    def _read(self, limit: int, room: int) -> Iterator[tuple[float, bytes]]:
        """Yield when a message is due, and the message, in this order."""
        _, _, delayed, index = self._keys
        for start in range(0, limit, MAX_SHOWN):
            end = start + MAX_SHOWN - 1
            entries: Any = self._client.zrange(
                index,
                start,
                end,
                withscores=True,
            )
            with self._client.pipeline(transaction=False) as pipe:
                for tag, _ in entries:
                    pipe.hstrlen(delayed, tag)
                sizes = pipe.execute()
            for (tag, due_at), size in zip(entries, sizes, strict=True):
                room -= size
                if room < 0:
                    return
                message: Any = self._client.hget(delayed, tag)
                yield due_at, message or b""
            if len(entries) < MAX_SHOWN:
                return

    def _note_look(self, moved: int) -> float:
        """Note whether a look found messages, and return the shortest pause before the next one.

        Workers that find nothing leave the next to others.
        """
        if moved:
            self._empty_looks = 0
        else:
            self._empty_looks += 1
        return self._pauses.pause_s(self._empty_looks)
