"""The dead letters that are kept, to look at and to remove; shared/results.py writes them.

Beside their stream lies what a queue held that is no message at all: shared/leases.py set it aside, as bytes, in a
list. Each goes by a name of its own, the id of its entry, `1795255200000-0`, or a digest of its bytes,
`raw-1f2e3d4c5b6a7988`; a letter goes by its post's id as well.
"""

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any, NamedTuple, cast

from redis import Redis
from redis.client import NEVER_DECODE

from shared.keys import DEAD_LETTERS, UNDECODABLE, buried_key
from shared.messages import DeadLetter
from shared.results import PAGE, identity, newest_first

#: How an element's name begins.
RAW = "raw-"


class Entry(NamedTuple):
    """A dead letter in its stream."""

    name: str
    letter: DeadLetter

    @property
    def post_id(self) -> str | None:
        return None if self.letter.id is None else self.letter.id.strip()


class Element(NamedTuple):
    """What a queue held that is no message."""

    name: str
    content: bytes
    post_id: None = None


class DeadLetters:
    """What is there of dead letters. Each method raises redis.exceptions.RedisError."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def count(self) -> int:
        """How many there are, elements included."""
        letters: Any = self._redis.xlen(DEAD_LETTERS)
        elements: Any = self._redis.llen(UNDECODABLE)
        return int(letters + elements)

    def newest(self, count: int) -> Iterator[Entry | Element]:
        """Yield the newest `count` letters, oldest of them first; before them the newest `count` elements."""
        if count > 0:
            yield from self._elements(count)
            yield from self.letters(count)

    def letters(self, count: int) -> Iterator[Entry]:
        """Yield the newest `count` letters, oldest of them first.

        The first pass keeps ids alone; the second pass reads forward. A page of letters is in memory at a time.
        """
        names = [name for name, _ in newest_first(self._redis, DEAD_LETTERS, count)]
        if names:
            yield from self._between(names[-1], names[0])

    def all(self) -> Iterator[Entry | Element]:
        """All that are there now, elements first, oldest first; no letter that comes meanwhile."""
        newest: Any = self._redis.xrevrange(DEAD_LETTERS, count=1)
        yield from self._elements()
        if newest:
            yield from self._between("-", newest[0][0])

    def find(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the names of all entries that go by each of these names; their content is not kept."""
        found: dict[str, dict[str, None]] = {name: {} for name in names}
        for each in self.all():
            for name in {each.name, each.post_id} & found.keys():
                found[str(name)][each.name] = None
        return {name: list(several) for name, several in found.items()}

    def get(self, name: str) -> Entry | Element | None:
        """Return the entry of this name; None if it is gone."""
        if name.startswith(RAW):
            return next((each for each in self._elements() if each.name == name), None)
        return next(self._between(name, name), None)

    def expect_again(self, letter: DeadLetter) -> None:
        """It is about to be sent once more: should that fail, it is another letter, though this one is there still."""
        self._redis.delete(buried_key(identity(letter)))

    def remove(self, each: Entry | Element) -> None:
        """Remove it for good; elements of the same bytes all together."""
        if isinstance(each, Entry):
            self._redis.xdel(DEAD_LETTERS, each.name)
        else:
            self._redis.lrem(UNDECODABLE, 0, each.content)  # type: ignore[arg-type]  # the stub wants text

    def _between(self, start: str, end: str) -> Iterator[Entry]:
        """Yield the letters from one id to another, oldest first."""
        while letters := self._redis.xrange(DEAD_LETTERS, start, end, count=PAGE):
            for each in cast(list[Any], letters):
                yield _entry(*each)
                start = f"({each[0]}"

    def _elements(self, count: int = 0) -> list[Element]:
        """The newest `count`, or all, oldest of them first. They need not be UTF-8."""
        client: Any = self._redis
        found: list[bytes] = client.execute_command("LRANGE", UNDECODABLE, 0, count - 1, **{NEVER_DECODE: True})
        return [Element(f"{RAW}{blake2b(content, digest_size=8).hexdigest()}", content) for content in reversed(found)]


def _entry(name: str, fields: dict[str, str]) -> Entry:
    return Entry(name, DeadLetter.model_validate_json(fields["letter"]))
