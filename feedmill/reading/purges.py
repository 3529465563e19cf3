"""Read the log of purges, by which copies of results outside of Redis lose the purged posts, too.

shared/purge.py writes the log. Redis keeps a limited number of purges, so a reader can miss some.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from redis import Redis

from feedmill.shared.keys import PURGES
from feedmill.shared.purge import MAX_PURGES

#: Position before the first purge.
BEGINNING = "0-0"
#: Purges per read, each of up to 1,000 posts.
PURGES_PER_READ = 20


class Purge(NamedTuple):
    """A purge of these posts, or of a run: their results that were stored up to a time are gone.

    until: milliseconds since 1970, by Redis' clock, as in the ids of stream entries.
    """

    ids: Sequence[str]
    run: str | None
    until: int


class Purges(NamedTuple):
    """Consecutive purges, oldest first."""

    purges: list[Purge]
    #: Position after these purges.
    position: str
    #: True if earlier purges are no longer in the log. The reader must check all of its posts, then continue at
    #: `position`.
    missed: bool = False


def read_purges(redis: Redis, position: str) -> Purges:
    """Return the next purges after a position. Raises redis.exceptions.RedisError."""
    entries: Any = redis.xrange(PURGES, position, count=PURGES_PER_READ + 1)
    if position == BEGINNING:
        missed = len(entries) > PURGES_PER_READ and redis.xlen(PURGES) >= MAX_PURGES
    else:
        missed = not entries or entries.pop(0)[0] != position
    del entries[PURGES_PER_READ:]
    if missed:
        return Purges([], newest_purge(redis), missed=True)
    purges = [
        Purge(json.loads(fields.get("ids", "[]")), fields.get("run"), int(fields["until"])) for _, fields in entries
    ]
    return Purges(purges, entries[-1][0] if entries else position)


def newest_purge(redis: Redis) -> str:
    """Return the position after the newest purge. Raises redis.exceptions.RedisError."""
    newest: Any = redis.xrevrange(PURGES, count=1)
    return str(newest[0][0]) if newest else BEGINNING
