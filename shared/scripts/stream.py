"""Read the results stream, and count entries that were trimmed unread.

XREAD alone cannot count them: Redis trims entries whether or not they were read, and XREAD then silently continues at
the oldest entry left. So each entry carries its number, and a reader compares the next one with that of its place.
Entries missing in between were trimmed if none is left up to the reader's cursor, else purged.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from redis import Redis
from redis.exceptions import ResponseError

from feedmill.shared.keys import COUNTERS, GROUPS, RESULTS_STREAM
from feedmill.shared.scripts import call

#: An entry's id and fields; None for a deleted entry.
Entry = tuple[str, dict[str, str] | None]


class Place(NamedTuple):
    """A reader's place in the stream."""

    #: Id of the last entry that was read.
    cursor: str
    #: Its number; None if unknown.
    number: int | None = None


def entries_stored(redis: Redis) -> int:
    """Return how many entries were ever added: the number of the newest one, unless it was purged."""
    stored: Any = redis.hget(COUNTERS, "stored")
    return int(stored or 0)


def end_of(redis: Redis) -> Place:
    """Return the end of the stream."""
    newest: Any = redis.xrevrange(RESULTS_STREAM, count=1)
    return Place(newest[0][0] if newest else "0-0", entries_stored(redis))


def number_of(fields: Mapping[str, str] | None) -> int | None:
    """Return an entry's number; None if it has none."""
    number = (fields or {}).get("number", "")
    return int(number) if number.isdecimal() else None


def trimmed_between(redis: Redis, place: Place, number: int | None) -> tuple[int | None, int | None]:
    """Return how many entries between a place and the next entry were trimmed: 0, 0 if none were.

    number: the next entry's. Each count is None if unknown; the first one also if some may have been purged, and the
    second one is then an upper bound.
    """
    missing = None if number is None or place.number is None else number - place.number - 1
    if missing is None and place.cursor == "0-0":  # from the beginning, nothing can have been missed
        return 0, 0
    if missing is not None and missing <= 0:
        return 0, 0
    stored, trimmed = (int(count or 0) for count in redis.hmget(COUNTERS, "stored", "trimmed"))
    if not trimmed or redis.xrange(RESULTS_STREAM, max=place.cursor, count=1):
        return 0, 0
    was_purged = stored - trimmed > redis.xlen(RESULTS_STREAM)
    return None if was_purged else missing, missing


def is_lost(redis: Redis, place: Place) -> bool:
    """Return whether Redis has lost the entry at a place that has been read, and the stream's ids went back."""
    if place.number is None:
        return False
    try:
        info: Any = redis.xinfo_stream(RESULTS_STREAM)
    except ResponseError:  # there is no stream
        return False
    return order(info["last-generated-id"]) < order(place.cursor)


def fetch_group(redis: Redis, count: int, group: str, member: str) -> tuple[list[Entry], Place | None]:
    """Return a member's pending entries or else, if it has none, up to `count` new ones and the group's place before.

    The place is None for pending entries.
    """
    pending, entries, cursor, number = call(redis, "fetch_group", count, group, member)
    found = [(entry_id, flat and dict(zip(flat[::2], flat[1::2], strict=True))) for entry_id, flat in entries]
    return found, None if pending else Place(cursor, int(number) if number else None)


def create_group(redis: Redis, group: str, place: Place) -> None:
    """Create a group that reads the entries after a place, and forget deleted groups.

    Raises ResponseError (BUSYGROUP) if there is one of this name.
    """
    redis.xgroup_create(RESULTS_STREAM, group, id=place.cursor, mkstream=True)
    groups: Any = redis.xinfo_groups(RESULTS_STREAM)
    known: Any = redis.hkeys(GROUPS)
    if stale := set(known) - {info["name"] for info in groups}:
        redis.hdel(GROUPS, *stale)
    if place.number is not None:
        redis.hset(GROUPS, group, f"{place.cursor} {place.number}")


def claim(
    redis: Redis, group: str, member: str, idle_ms: int, start: str, count: int, member_ttl_ms: int
) -> tuple[str, list[str]]:
    """Take over up to `count` entries that another member received and has not acknowledged for `idle_ms`.

    Also removes members that have no pending entries and were inactive for `member_ttl_ms`. Returns the id to start
    from next time ("0-0" at the end), and the ids of entries that were deleted.
    """
    next_id, deleted = call(redis, "claim", group, member, idle_ms, start, count, member_ttl_ms)
    return next_id, deleted


def trimmed_of(redis: Redis, ids: Sequence[str]) -> tuple[list[str], bool]:
    """Return those of deleted entries that were trimmed, not purged; and whether that is certain.

    Trimming removes the oldest entries, so missing ones after the stream's first one were purged.
    """
    oldest: Any = redis.xrange(RESULTS_STREAM, count=1)
    stored, trimmed = (int(count or 0) for count in redis.hmget(COUNTERS, "stored", "trimmed"))
    lost = [entry_id for entry_id in ids if trimmed and oldest and order(entry_id) < order(oldest[0][0])]
    return lost, stored - trimmed <= redis.xlen(RESULTS_STREAM)


def fetch_rows(redis: Redis, cursor: str, end: str, max_bytes: int) -> tuple[bool, int | None, int | None, list[str]]:
    """Return entries after a cursor until their texts reach `max_bytes`. end: end of the range, in XRANGE syntax.

    Returns whether no entries are left; the numbers of the first and of the last entry; and id, classification and post
    of each entry, in a flat list.
    """
    ended, first, last, *texts = call(redis, "fetch_rows", cursor, end, max_bytes)
    return bool(ended), first or None, last or None, texts


def check_posts(redis: Redis, posts: Sequence[str]) -> str:
    """Return a JSON array with an item per post: false if it was purged, else its latest score, else null."""
    return str(call(redis, "check_posts", json.dumps(posts)))


def order(entry_id: str) -> tuple[int, ...]:
    """Return the sort key of an entry's id."""
    return tuple(map(int, entry_id.split("-")))
