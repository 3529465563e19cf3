"""Functions on leases: reserve and return messages, and renew leases."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from redis import Redis

from feedmill.shared.scripts import call, command


class Taken(NamedTuple):
    """A reserved message, the position of its list in the reservation, and its tag."""

    list_number: int
    tag: str
    message: bytes


class Reservation(NamedTuple):
    """A request for messages of several lists, in order of delivery."""

    reserved: str
    reserved_index: str
    #: Prefix of the messages' tags.
    prefix: str
    lists: Sequence[str]
    #: Seconds of a lease.
    lease_s: float
    limit: int
    #: Bytes of messages after which the reservation ends.
    max_bytes: int

    def _arguments(self) -> list[Any]:
        limits = self.limit, self.max_bytes, self.lease_s
        return [self.reserved, self.reserved_index, self.prefix, *limits, *self.lists]

    def command(self) -> tuple[Any, ...]:
        """Return the command, to be sent with others."""
        return command("reserve", *self._arguments())

    def taken(self, answer: tuple[Sequence[int], Sequence[bytes]]) -> list[Taken]:
        """Parse the command's answer."""
        runs, messages = answer
        numbers = [number for number, times in zip(runs[::2], runs[1::2], strict=True) for _ in range(times)]
        return [
            Taken(number, f"{self.prefix}-{place:04d} {self.lists[number]}", message)
            for place, (number, message) in enumerate(zip(numbers, messages, strict=True), 1)
        ]

    def reserve(self, redis: Redis) -> list[Taken]:
        return self.taken(call(redis, "reserve", *self._arguments()))


class LeaseScripts:
    """Scripts on messages under leases."""

    def __init__(self, redis: Redis, reserved: str, index: str) -> None:
        self._redis, self._reserved, self._index = redis, reserved, index

    def renew(
        self, tags: Sequence[str], lease_s: float, contact: float, max_silence_s: float, limit: int, max_bytes: int
    ) -> tuple[float, list[str], bool]:
        """Renew the leases of these tags for `lease_s` seconds. Then find up to `limit` expired leases, latest first.

        Stops when the messages of the expired leases reach `max_bytes`. Finds none if the last `contact`, by Redis'
        clock, was more than `max_silence_s` ago: Redis was unreachable, and living workers could not renew their
        leases. Returns Redis' time, the tags of expired leases, and whether more may have expired.
        """
        now, expired, more = self._call("renew", lease_s, limit, contact, max_silence_s, max_bytes, *tags)
        return float(now), [tag if isinstance(tag, str) else tag.decode() for tag in expired], bool(more)

    def restore(self, messages: Sequence[tuple[str, str | bytes]], until: float | None, command: str) -> None:
        """Return messages, by tag, to their lists. RPUSH makes a message the next to be delivered, LPUSH the last.

        Skips messages that are no longer held, or whose lease ends after `until`.
        """
        parts = (part for each in messages for part in each)
        self._call("restore", command, "+inf" if until is None else until, *parts)

    def _call(self, name: str, *args: Any) -> Any:
        return call(self._redis, name, self._reserved, self._index, *args)
