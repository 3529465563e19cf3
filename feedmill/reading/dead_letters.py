"""Read and remove dead letters. shared/results.py writes them.

There are two kinds: dead letters, which are entries of a Redis stream, and undecodable messages, which
workers/transport/leases.py moves to a list as raw bytes. A dead letter's name is its stream id, `1795255200000-0`; an
undecodable message's name is a digest of its bytes, `raw-1f2e3d4c5b6a7988`. Dead letters can also be found by post id.
"""

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple, cast

from redis import Redis
from redis.client import NEVER_DECODE

from feedmill.shared.keys import DEAD_LETTERS, UNDECODABLE, dead_letter_key
from feedmill.shared.messages import DeadLetter
from feedmill.shared.results import PAGE_SIZE, dead_letter_digest, newest_first
from feedmill.shared.scripts import call

#: Prefix of the names of undecodable messages.
RAW_ID_PREFIX = "raw-"


class DeadLetterEntry(NamedTuple):
    """A dead letter and the id of its stream entry."""

    name: str
    letter: DeadLetter

    @property
    def post_id(self) -> str | None:
        return None if self.letter.id is None else self.letter.id.strip()


class UndecodableMessage(NamedTuple):
    """An undecodable message: bytes from a queue that are not a Celery message."""

    name: str
    content: bytes
    post_id: None = None


class DeadLetters:
    """Access to the dead letters in Redis. Each method raises redis.exceptions.RedisError."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def count(self) -> int:
        """Return the number of dead letters plus the number of undecodable messages."""
        letters: Any = self._redis.xlen(DEAD_LETTERS)
        elements: Any = self._redis.llen(UNDECODABLE)
        return int(letters + elements)

    def newest(self, count: int, run: str | None = None) -> Iterator[DeadLetterEntry | UndecodableMessage]:
        """Yield the newest `count` undecodable messages, then the newest `count` dead letters, each oldest first.

        run: only dead letters of this run. The first pass collects only stream ids; the second reads the entries in
        order, one page in memory at a time.
        """
        if run is None:
            yield from self._elements(count)
            names = [name for name, _ in newest_first(self._redis, DEAD_LETTERS, count)]
            if names:
                yield from self._between(names[-1], names[0])
            return
        entries = (_entry(*entry) for entry in newest_first(self._redis, DEAD_LETTERS))
        names = [entry.name for entry in islice((entry for entry in entries if entry.letter.run == run), count)]
        for name in reversed(names):
            yield from self._between(name, name)

    def all(self) -> Iterator[DeadLetterEntry | UndecodableMessage]:
        """Yield all undecodable messages, then all dead letters, oldest first; skip letters added meanwhile."""
        newest: Any = self._redis.xrevrange(DEAD_LETTERS, count=1)
        yield from self._elements()
        if newest:
            yield from self._between("-", newest[0][0])

    def find(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the names of all entries that match each given name or post id. Does not keep their content."""
        found: dict[str, dict[str, None]] = {name: {} for name in names}
        for each in self.all():
            for name in {each.name, each.post_id} & found.keys():
                found[str(name)][each.name] = None
        return {name: list(several) for name, several in found.items()}

    def get(self, name: str) -> DeadLetterEntry | UndecodableMessage | None:
        """Return the entry with this name, or None if it no longer exists."""
        if name.startswith(RAW_ID_PREFIX):
            return next((each for each in self._elements() if each.name == name), None)
        return next(self._between(name, name), None)

    def expect_again(self, letter: DeadLetter) -> None:
        """Allow a new dead letter for the same post. Call before a retry: otherwise a second failure writes none."""
        self._redis.delete(dead_letter_key(dead_letter_digest(letter)))

    def remove_retried(self, each: DeadLetterEntry | UndecodableMessage) -> None:
        """Delete an entry whose post was sent again, and subtract it from the failures of its run."""
        if isinstance(each, DeadLetterEntry) and each.letter.run is not None:
            call(self._redis, "remove_retried", each.name, each.letter.run)
        else:
            self.remove(each)

    def remove(self, each: DeadLetterEntry | UndecodableMessage) -> None:
        """Delete an entry. Undecodable messages with identical bytes are all deleted."""
        if isinstance(each, DeadLetterEntry):
            self._redis.xdel(DEAD_LETTERS, each.name)
        else:
            self._redis.lrem(UNDECODABLE, 0, each.content)  # type: ignore[arg-type]  # the stub wants text

    def _between(self, start: str, end: str) -> Iterator[DeadLetterEntry]:
        """Yield the letters between two stream ids, oldest first."""
        while letters := self._redis.xrange(DEAD_LETTERS, start, end, count=PAGE_SIZE):
            for each in cast(list[Any], letters):
                yield _entry(*each)
                start = f"({each[0]}"

    def _elements(self, count: int = 0) -> list[UndecodableMessage]:
        """Return the newest `count` undecodable messages, oldest first; 0 returns all. The bytes need not be UTF-8."""
        client: Any = self._redis
        found: list[bytes] = client.execute_command("LRANGE", UNDECODABLE, 0, count - 1, **{NEVER_DECODE: True})
        return [
            UndecodableMessage(f"{RAW_ID_PREFIX}{blake2b(content, digest_size=8).hexdigest()}", content)
            for content in reversed(found)
        ]


def _entry(name: str, fields: dict[str, str]) -> DeadLetterEntry:
    return DeadLetterEntry(name, DeadLetter.model_validate_json(fields["letter"]))
