"""Read and remove dead letters, the entries of a Redis stream that shared/results.py writes."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from redis import Redis

from feedmill.shared.keys import DEAD_LETTERS, dead_letter_key
from feedmill.shared.messages import DeadLetter
from feedmill.shared.results import PAGE_SIZE, dead_letter_digest, newest_first
from feedmill.shared.scripts import call


class DeadLetterEntry(NamedTuple):
    """A dead letter and the id of its stream entry, such as `1795255200000-0`."""

    name: str
    letter: DeadLetter

    @property
    def post_id(self) -> str | None:
        return None if self.letter.id is None else self.letter.id.strip()


class DeadLetters:
    """Access to the dead letters in Redis. Each method raises redis.exceptions.RedisError."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def newest(self, count: int, run: str | None = None) -> Iterator[DeadLetterEntry]:
        """Yield the newest `count` dead letters, of the run if given, oldest first, one page in memory at a time."""
        entries = (_entry(*entry) for entry in newest_first(self._redis, DEAD_LETTERS))
        names = list(islice((name for name, letter in entries if run in (None, letter.run)), count))
        return (entry for name in reversed(names) if (entry := self.get(name)))

    def all(self) -> Iterator[DeadLetterEntry]:
        """Yield all dead letters, oldest first; skip letters added meanwhile."""
        newest: Any = self._redis.xrevrange(DEAD_LETTERS, count=1)
        if newest:
            yield from self._between("-", newest[0][0])

    def find(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the names of all entries that match each given name or post id. Does not keep their content."""
        found: dict[str, list[str]] = {name: [] for name in names}
        for entry in self.all():
            for name in {entry.name, entry.post_id} & found.keys():
                found[str(name)].append(entry.name)
        return found

    def get(self, name: str) -> DeadLetterEntry | None:
        """Return the entry with this name, or None if it no longer exists."""
        return next(self._between(name, name), None)

    def expect_again(self, letter: DeadLetter) -> None:
        """Allow a new dead letter for the same post. Call before a retry: otherwise a second failure writes none."""
        self._redis.delete(dead_letter_key(dead_letter_digest(letter)))

    def remove_retried(self, entry: DeadLetterEntry) -> None:
        """Delete an entry whose post was sent again, and subtract it from the failures of its run."""
        if entry.letter.run is None:
            self.remove(entry)
        else:
            call(self._redis, "remove_retried", entry.name, entry.letter.run)

    def remove(self, entry: DeadLetterEntry) -> None:
        self._redis.xdel(DEAD_LETTERS, entry.name)

    def _between(self, start: str, end: str) -> Iterator[DeadLetterEntry]:
        """Yield the letters between two stream ids, oldest first."""
        client: Any = self._redis
        while letters := client.xrange(DEAD_LETTERS, start, end, count=PAGE_SIZE):
            yield from (_entry(*letter) for letter in letters)
            start = f"({letters[-1][0]}"


def _entry(name: str, fields: dict[str, str]) -> DeadLetterEntry:
    return DeadLetterEntry(name, DeadLetter.model_validate_json(fields["letter"]))
