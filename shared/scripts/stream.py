"""Functions for readers of the results stream: fetch entries, and count those that were trimmed unread.

XREAD alone cannot count them: Redis trims entries whether or not they were read, and XREAD then silently continues at
the oldest entry left. So each function fetches entries and, atomically, compares the reader's place with the store's
counters: entries written, trimmed and present. Entries that are neither present nor trimmed were purged. Redis' own
figures (`entries-added`, a group's `entries-read`) cannot distinguish purged from trimmed entries.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

from redis import Redis

from feedmill.shared.keys import COUNTERS, GROUPS, RESULTS_STREAM, STORED, tombstone_key
from feedmill.shared.scripts import call


class Place(NamedTuple):
    """A reader's place in the stream, with the counts needed to detect entries that were trimmed unread."""

    #: Id of the last entry that was read.
    cursor: str
    #: Number of entries written up to the cursor since the store was created; None if unknown.
    position: int | None = None
    #: Number of entries trimmed before the last read; and purged before the position was last known exactly.
    trimmed: int = 0
    purged: int = 0

    def as_text(self) -> str:
        """Return the place as text, an argument of the functions."""
        return "" if self.position is None else " ".join(map(str, self))

    @classmethod
    def parse(cls, cursor: str, text: str) -> "Place":
        """Parse the cursor and the place in a function's reply."""
        return cls(cursor, *map(int, text.split()[1:]))


#: The end of the stream.
END = Place("$")


class StreamState(NamedTuple):
    """Id of the stream's first entry, "" if it is empty, and the numbers of entries ever trimmed and purged."""

    first: str
    trimmed: int
    purged: int


class Fetched(NamedTuple):
    """Consecutive entries, and the gap before them."""

    #: True if the entries were delivered to this member before. `before`, `place` and the gap are empty then.
    pending: bool
    #: Id and fields of each entry. Fields are alternating names and values; None for a deleted entry.
    entries: list[tuple[str, list[str] | None]]
    #: Id of the last entry read before this call.
    before: str
    place: Place
    #: Number of missing entries, -1 if unknown; and of entries purged since `position` was last known, in the gap or
    #: elsewhere.
    gone: int
    purged_meanwhile: int
    stream: StreamState
    #: True if the stream has lost the entry at the cursor, and new ones have smaller ids: Redis lost its last writes,
    #: and its clock went back.
    lost: bool = False


def fetch(redis: Redis, count: int, place: Place = END, group: str = "", member: str = "") -> Fetched:
    """Return up to `count` entries after a place; for a group's member, its pending entries, or else new ones."""
    arguments = [count, group, member, place.cursor, place.as_text()]
    answer = call(redis, "fetch_group" if group else "fetch", [RESULTS_STREAM, COUNTERS, GROUPS], arguments)
    pending, entries, before, cursor, text, gone, meanwhile, *state, lost = answer
    new = Place.parse(cursor, text)
    return Fetched(bool(pending), entries, before, new, gone, meanwhile, StreamState(*state), bool(lost))


def claim(
    redis: Redis, group: str, member: str, idle_ms: int, start: str, count: int, member_ttl_ms: int
) -> tuple[str, list[str], StreamState]:
    """Take over up to `count` entries that another member received and has not acknowledged for `idle_ms`.

    Also removes members that have no pending entries and were inactive for `member_ttl_ms`. Returns the id to start
    from next time ("0-0" at the end), and the ids of entries that were deleted. Redis 6.2 does not report deleted
    entries, but takes them over.
    """
    arguments = [group, member, idle_ms, start, count, member_ttl_ms]
    next_id, deleted, *state = call(redis, "claim", [RESULTS_STREAM, COUNTERS], arguments)
    return next_id, deleted, StreamState(*state)


def fetch_rows(redis: Redis, place: Place, end: str, max_bytes: int) -> tuple[bool, Place, int, int, bool, list[str]]:
    """Return entries after a place until their texts reach `max_bytes`. end: end of the range, in XRANGE syntax.

    Returns whether no entries are left; the new place; the number of entries missing before the returned ones, and of
    entries after them, each -1 if unknown; `Fetched.lost`; and id, classification and post of each entry, in a flat
    list.
    """
    arguments = [place.cursor, place.as_text(), end, max_bytes]
    ended, cursor, text, gone, left, lost, *texts = call(redis, "fetch_rows", [RESULTS_STREAM, COUNTERS], arguments)
    return bool(ended), Place.parse(cursor, text), gone, left, bool(lost), texts


def check_posts(redis: Redis, posts: Sequence[str]) -> str:
    """Return a JSON array with an item per post: false if it was purged, else its latest score, else null."""
    return str(call(redis, "check_posts", [STORED], [tombstone_key(""), json.dumps(posts)]))
