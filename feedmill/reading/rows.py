"""Read the results stream as raw rows, for readers of a hundred thousand results and more.

Two Redis calls fetch about five hundred rows and check them for purged posts. Rows stay plain dicts; no pydantic model
is built.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

from pydantic_core import from_json
from redis import Redis

from shared.keys import COUNTERS, RESULTS_STREAM, result_key, tombstone_key
from shared.results import SCORE

#: Lua: fetch the next entries. A plain XRANGE returns nine small replies per entry, whose parsing takes the client as
#: long as the rest of an export. Joining the texts into one reply takes Redis three times as long as this script.
#:
#:   KEYS[1]  feedmill:results  stream               KEYS[2]  feedmill:counters  hash
#:   ARGV[1]  id of the last entry read              ARGV[2]  end of the range, in XRANGE syntax
#:   ARGV[3]  stop after this many bytes of entries
#:
#: Returns a flat list: 1 if no entries are left, else 0; 1 if all entries up to ARGV[1] are gone, else 0; numbers of
#: entries ever written, trimmed, and present; then id, classification and post of each entry.
FETCH = """
local stream, last, bytes, ended = KEYS[1], ARGV[1], 0, 0
local behind = #redis.call('XRANGE', stream, '-', last, 'COUNT', 1) == 0 and 1 or 0
local counts = redis.call('HMGET', KEYS[2], 'stored', 'trimmed')
local said = {ended, behind, tonumber(counts[1] or 0), tonumber(counts[2] or 0), redis.call('XLEN', stream)}
repeat
  local entries = redis.call('XRANGE', stream, '(' .. last, ARGV[2], 'COUNT', 50)
  for _, entry in ipairs(entries) do
    local fields, each = entry[2], {}
    for i = 1, #fields, 2 do each[fields[i]] = fields[i + 1] end
    last = entry[1]
    local n = #said
    said[n + 1], said[n + 2], said[n + 3] = last, each['classification'], each['post']
    bytes = bytes + #each['classification'] + #each['post']
  end
  if #entries < 50 then said[1] = 1 end
until said[1] == 1 or bytes >= tonumber(ARGV[3])
return said
"""
#: Lua: look up purge tombstones and the latest scores of posts.
#:
#:   KEYS[1+] for each post feedmill:gone:<id> (string) and feedmill:result:<id> (hash)
#:   ARGV[1]  SCORE, the field of the result's hash
#:
#: Returns a JSON array with one item per post: false if it was purged, else its latest score, else null.
CHECK = """
local said = {}
for i = 1, #KEYS, 2 do
  said[#said + 1] = redis.call('EXISTS', KEYS[i]) == 1 and 'false' or redis.call('HGET', KEYS[i + 1], ARGV[1]) or 'null'
end
return '[' .. table.concat(said, ',') .. ']'
"""
#: Lua: find purged posts.
#:
#:   KEYS[1+] feedmill:gone:<id>, string, one per post
#:
#: Returns the positions of the purged posts among the keys, from 1.
GONE = """
local gone = {}
for i = 1, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 then gone[#gone + 1] = i end
end
return gone
"""

#: Approximate bytes of entries per fetch. A fetch blocks Redis for one or two milliseconds.
FETCH_BYTES = 2**19
#: Posts per call of CHECK and GONE.
POSTS_PER_CHECK = 1000
#: Greatest sequence number of an entry id (milliseconds since 1970, dash, sequence number).
MAX_SEQUENCE = 2**64 - 1


class Place(NamedTuple):
    """A reader's position in the stream, with the counts needed to detect entries that were trimmed unread."""

    #: Id of the last entry read.
    cursor: str
    #: Number of entries written up to the cursor since the store was created; None if unknown.
    position: int | None = None
    #: Numbers of entries trimmed and purged at the time of the last read.
    trimmed: int = 0
    purged: int = 0


class ResultRow(NamedTuple):
    """A result as stored: the fields of Classification and Post (shared/messages.py) as dicts.

    The post's body is truncated, fields with default values are absent, and the Reddit score is the latest one known.
    """

    entry: str
    found: dict[str, Any]
    post: dict[str, Any]


class Chunk(NamedTuple):
    """Consecutive rows in stream order."""

    rows: list[ResultRow]
    #: Position after the rows, including the rows of purged posts, which are left out.
    place: Place
    ended: bool
    #: Number of results that were trimmed before they could be read; None if unknown.
    missed: int | None = 0
    #: Approximate number of entries after the rows; None if unknown.
    left: int | None = None


def id_before(since: float) -> str:
    """Return the greatest entry id before `since` (seconds since 1970)."""
    milliseconds = int(since * 1000)
    return f"{milliseconds - 1}-{MAX_SEQUENCE}" if milliseconds > 0 else "0-0"


def seconds_of(entry: str) -> float:
    """Return the time at which an entry was written, in seconds since 1970, by Redis' clock."""
    return int(entry.partition("-")[0]) / 1000


class RowReader:
    """A reader of the results stream. Every method raises redis.exceptions.RedisError."""

    def __init__(self, redis: Redis, until: float | None = None) -> None:
        """Prepare the scripts. until: stop before entries written at or after this time (seconds since 1970)."""
        self._redis = redis
        self._end = "+" if until is None else f"({int(until * 1000)}-0"
        self._fetch: Any = redis.register_script(FETCH)
        self._check: Any = redis.register_script(CHECK)
        self._gone: Any = redis.register_script(GONE)

    def fetch(self, place: Place) -> Chunk:
        """Return the next rows after `place`, without those of purged posts."""
        ended, behind, stored, trimmed, length, *texts = self._fetch(
            keys=[RESULTS_STREAM, COUNTERS], args=[place.cursor, self._end, FETCH_BYTES]
        )
        rows = _read(texts)
        purged = stored - trimmed - length
        position, missed = place.position, 0
        if behind and position is not None and trimmed > place.trimmed:
            missed = max(stored - position - length, 0)
        unknown = behind and length and position is None and trimmed > 0 and place.cursor != "0-0"
        if ended and self._end == "+":
            position = stored
        elif behind:
            position = stored - length + len(rows)
        elif position is not None:
            position += len(rows)
        now = Place(rows[-1].entry if rows else place.cursor, position, trimmed, purged)
        left = None if position is None or self._end != "+" else stored - position
        return Chunk(self._checked(rows), now, bool(ended), None if unknown else missed, left)

    def chunks(self, place: Place) -> Iterator[Chunk]:
        """Yield all rows present after `place`, fetching the next chunk while the caller works on the current one."""
        with ThreadPoolExecutor(1, "fetch") as ahead:
            coming = ahead.submit(self.fetch, place)
            while True:
                chunk = coming.result()
                if not chunk.ended:
                    coming = ahead.submit(self.fetch, chunk.place)
                yield chunk
                if chunk.ended:
                    return

    def wait(self, place: Place, seconds: float) -> None:
        """Block until there is an entry after `place`, or until `seconds` have passed."""
        self._redis.xread({RESULTS_STREAM: place.cursor}, count=1, block=max(int(seconds * 1000), 1))

    def _checked(self, rows: Sequence[ResultRow]) -> list[ResultRow]:
        """Drop the rows of purged posts and update the others' scores."""
        checked: list[ResultRow] = []
        for start in range(0, len(rows), POSTS_PER_CHECK):
            some = rows[start : start + POSTS_PER_CHECK]
            keys = [key(row.post["id"]) for row in some for key in (tombstone_key, result_key)]
            for row, note in zip(some, from_json(self._check(keys=keys, args=[SCORE])), strict=True):
                if note is not False:
                    if note is not None:
                        row.post["score"] = note["score"]
                    checked.append(row)
        return checked

    def gone(self, ids: Iterable[str]) -> set[str]:
        """Return the ids of the posts that were purged."""
        found: set[str] = set()
        remaining = iter(ids)
        while some := list(islice(remaining, POSTS_PER_CHECK)):
            found.update(some[place - 1] for place in self._gone(keys=[tombstone_key(each) for each in some]))
        return found


def _read(texts: list[str]) -> list[ResultRow]:
    """Parse (id, classification, post, id, …) into rows. Parsing one joined JSON array is faster than two per row."""
    ids = texts[::3]
    del texts[::3]
    read = iter(from_json(f"[{','.join(texts)}]"))
    return [ResultRow(entry_id, found, post) for entry_id, found, post in zip(ids, read, read, strict=True)]
