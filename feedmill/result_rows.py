"""The stream of results as raw rows, for those that read a hundred thousand: each is fetched, and checked against what
was purged, with some five hundred others in two trips, and no model is built of it.

Knows nothing of files.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

from pydantic_core import from_json
from redis import Redis

from shared.keys import COUNTERS, RESULTS_STREAM, result_key, tombstone_key
from shared.results import SCORE

#: Fetches the next entries. XRANGE alone answers with nine small replies an entry, which take the client as long as all
#: else that an export does; texts that are joined here take Redis three times as long as this.
#:
#:   KEYS[1]  feedmill:results  stream               KEYS[2]  feedmill:counters  hash
#:   ARGV[1]  id of the entry that was read last     ARGV[2]  where to end, as XRANGE takes it
#:   ARGV[3]  bytes of entries after which to end
#:
#: Returns whether nothing is left; whether all entries up to ARGV[1] are gone; how many entries were ever written, how
#: many trimmed, how many there are; then id, classification and post of each entry.
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
#: Says of posts whether they were purged, and which scores they have been seen with.
#:
#:   KEYS[1+] feedmill:gone:<id>, string, and feedmill:result:<id>, hash, of each      ARGV[1]  SCORE, the field
#:
#: Returns a JSON array: of each false where it was purged, its score as it was noted, or null.
CHECK = """
local said = {}
for i = 1, #KEYS, 2 do
  said[#said + 1] = redis.call('EXISTS', KEYS[i]) == 1 and 'false' or redis.call('HGET', KEYS[i + 1], ARGV[1]) or 'null'
end
return '[' .. table.concat(said, ',') .. ']'
"""
#: Which of some posts were purged.
#:
#:   KEYS[1+] feedmill:gone:<id>, string, of each
#:
#: Returns their places among the keys, from 1.
GONE = """
local gone = {}
for i = 1, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 then gone[#gone + 1] = i end
end
return gone
"""

#: Bytes of entries that one call fetches, about: a millisecond or two, in which Redis serves nobody else.
FETCH_BYTES = 2**19
#: Posts that are checked by one call.
CHECKED_AT_ONCE = 1000
#: The greatest second half of an entry's id, whose first are milliseconds since 1970.
LAST_OF_MILLISECOND = 2**64 - 1


class Place(NamedTuple):
    """Where a reader of the stream stands, and what tells later whether anything was trimmed before it was read."""

    #: Id of the entry that was read last.
    cursor: str
    #: How many entries were written up to it, since the store was made; None where that is not known.
    position: int | None = None
    #: How many were trimmed by then, and how many purged.
    trimmed: int = 0
    purged: int = 0


class Row(NamedTuple):
    """A result, with the fields of Classification and Post (shared/messages.py) as they are stored.

    The post's body is clipped, and fields that have their defaults are absent; its score is the latest that is known.
    """

    entry: str
    found: dict[str, Any]
    post: dict[str, Any]


class Chunk(NamedTuple):
    """Some rows, in their order. missed: results that were trimmed before them; None: an unknown number."""

    rows: list[Row]
    #: Where the reader stands after them; rows of purged posts are behind it as well.
    place: Place
    ended: bool
    missed: int | None = 0
    #: How many entries there are after them, about; None where that is not known.
    left: int | None = None


def just_before(since: float) -> str:
    """The id that entries of a time, in seconds since 1970, come after."""
    milliseconds = int(since * 1000)
    return f"{milliseconds - 1}-{LAST_OF_MILLISECOND}" if milliseconds > 0 else "0-0"


def seconds_of(entry: str) -> float:
    """When an entry was written, in seconds since 1970, by Redis' clock."""
    return int(entry.partition("-")[0]) / 1000


class RowReader:
    """Every method raises redis.exceptions.RedisError."""

    def __init__(self, redis: Redis, until: float | None = None) -> None:
        """until: entries from then on, in seconds since 1970, are not read."""
        self._redis = redis
        self._end = "+" if until is None else f"({int(until * 1000)}-0"
        self._fetch: Any = redis.register_script(FETCH)
        self._check: Any = redis.register_script(CHECK)
        self._gone: Any = redis.register_script(GONE)

    def fetch(self, place: Place) -> Chunk:
        """The next rows after a place, of posts that are not purged."""
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
        """All that is there after a place. The next ones are fetched while the caller is busy with some."""
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
        """Return as soon as there is an entry after a place, at the latest after `seconds`."""
        self._redis.xread({RESULTS_STREAM: place.cursor}, count=1, block=max(int(seconds * 1000), 1))

    def _checked(self, rows: Sequence[Row]) -> list[Row]:
        checked: list[Row] = []
        for start in range(0, len(rows), CHECKED_AT_ONCE):
            some = rows[start : start + CHECKED_AT_ONCE]
            keys = [key(row.post["id"]) for row in some for key in (tombstone_key, result_key)]
            for row, note in zip(some, from_json(self._check(keys=keys, args=[SCORE])), strict=True):
                if note is not False:
                    if note is not None:
                        row.post["score"] = note["score"]
                    checked.append(row)
        return checked

    def gone(self, ids: Iterable[str]) -> set[str]:
        """Those of some posts that were purged."""
        found: set[str] = set()
        remaining = iter(ids)
        while some := list(islice(remaining, CHECKED_AT_ONCE)):
            found.update(some[place - 1] for place in self._gone(keys=[tombstone_key(each) for each in some]))
        return found


def _read(texts: list[str]) -> list[Row]:
    """Rows of (id, classification, post, id, …): read as one text of JSON, which is faster than two of each."""
    ids = texts[::3]
    del texts[::3]
    read = iter(from_json(f"[{','.join(texts)}]"))
    return [Row(entry_id, found, post) for entry_id, found, post in zip(ids, read, read, strict=True)]
