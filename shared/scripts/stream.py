"""Scripts for readers of the results stream: fetch entries, and count those that were trimmed unread.

XREAD alone cannot count them: Redis trims entries whether or not they were read, and XREAD then silently continues at
the oldest entry left. So each script fetches entries and, atomically, compares the reader's place with the store's
counters: entries written, trimmed and present. Entries that are neither present nor trimmed were purged. Redis 7 has
similar figures (`entries-added`, a group's `entries-read`), but Redis 6.2 does not, and they cannot distinguish purged
from trimmed entries.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from redis import Redis

from feedmill.shared.keys import COUNTERS, GROUPS, RESULTS_STREAM, STORED, tombstone_key
from feedmill.shared.result_records import score_key
from feedmill.shared.scripts import READS, SHRINKS, Script
from feedmill.shared.scripts.buckets import RECORDS, checksum


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
        """Return the place as text, an argument of the scripts."""
        return "" if self.position is None else " ".join(map(str, self))

    @classmethod
    def parse(cls, cursor: str, text: str) -> "Place":
        """Parse the cursor and the place in a script's reply."""
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


#: Reads the numbers of entries stored, trimmed, purged and present.
#:
#:   KEYS[1]  feedmill:results  stream    KEYS[2]  feedmill:counters  hash
_FIGURES = """
local stream, counts = KEYS[1], redis.call('HMGET', KEYS[2], 'stored', 'trimmed')
local stored, trimmed, length = tonumber(counts[1] or 0), tonumber(counts[2] or 0), redis.call('XLEN', stream)
local purged = stored - trimmed - length
local first = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
first = first and first[1] or ''
local function by_name(flat)
  local named = {}
  for i = 1, #flat, 2 do named[flat[i]] = flat[i + 1] end
  return named
end
"""
#: Finds the gap after `cursor`, given the `place` that the last call returned for it, or "". Defines `place_after`,
#: which returns the new place: an entry's id, and the numbers of entries written up to it, trimmed, and purged.
_GAP = """
local at, position, trimmed_then, purged_then = string.match(place, '^(%S+) (%d+) (%d+) (-?%d+)$')
if at ~= cursor then position = nil end
local gone, meanwhile = 0, 0
-- If no entry this old is left, entries after it may have been trimmed as well.
local behind = #redis.call('XRANGE', stream, '-', cursor, 'COUNT', 1) == 0
if behind and position then
  if trimmed > tonumber(trimmed_then) then
    gone = math.max(stored - position - length, 0)
    meanwhile = purged - purged_then
  end
elseif behind and length > 0 and trimmed > 0 and cursor ~= '0-0' then
  gone = -1
end
local function place_after(read, last, ended)
  if ended then
    position, purged_then = stored, purged
  elseif behind then
    position, purged_then = stored - length + read, purged
  elseif position then
    position = position + read
  end
  return position and string.format('%s %d %d %d', last, position, trimmed, purged_then) or ''
end
-- Return 1 if the entry at the cursor was read, and the stream's ids went back since then, else 0.
local function is_lost(cursor)
  local time, number = string.match(cursor, '^(%d+)%-(%d+)$')
  if not position or not time or number == '18446744073709551615' then return 0 end -- the latter is no entry
  local info = redis.pcall('XINFO', 'STREAM', stream)
  if info.err then return 0 end
  local last_time, last_number = string.match(by_name(info)['last-generated-id'], '^(%d+)%-(%d+)$')
  time, number, last_time, last_number = tonumber(time), tonumber(number), tonumber(last_time), tonumber(last_number)
  return (last_time < time or last_time == time and last_number < number) and 1 or 0
end
"""
#:   KEYS[1], KEYS[2]  see _FIGURES         KEYS[3]  feedmill:groups  hash
#:   ARGV[1]  maximum entries               ARGV[2]  the group, or ""           ARGV[3]  its member
#:   without a group: ARGV[4]  the cursor, or "$" for the end of the stream     ARGV[5]  its place, or ""
#:
#: A group's member first receives its pending entries: delivered to it, but not acknowledged. A group's place is stored
#: in KEYS[3]. Returns the fields of Fetched in order. A group's place is never ahead: Redis loses both together.
_FETCH_LUA = (
    _FIGURES
    + """
local group, count = ARGV[2], tonumber(ARGV[1])
local cursor, place, groups = ARGV[4], ARGV[5], {}
if group ~= '' then
  local own = redis.call('XREADGROUP', 'GROUP', group, ARGV[3], 'COUNT', count, 'STREAMS', stream, '0')
  if own and #own[1][2] > 0 then return {1, own[1][2], '', '', '', 0, 0, first, trimmed, purged, 0} end
  for _, info in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local each = by_name(info)
    groups[each['name']] = true
    if each['name'] == group then cursor = each['last-delivered-id'] end
  end
  place = redis.call('HGET', KEYS[3], group) or ''
elseif cursor == '$' then
  local newest = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  cursor = newest and newest[1] or '0-0'
  place = string.format('%s %d %d %d', cursor, stored, trimmed, purged)
end
"""
    + _GAP
    + """
local before, entries = cursor, {}
if group ~= '' then
  local new = redis.call('XREADGROUP', 'GROUP', group, ARGV[3], 'COUNT', count, 'STREAMS', stream, '>')
  entries = new and new[1][2] or {}
else
  entries = redis.call('XRANGE', stream, '(' .. cursor, '+', 'COUNT', count)
end
local lost = group == '' and #entries == 0 and is_lost(cursor) or 0
if #entries > 0 then cursor = entries[#entries][1] end
local now = place_after(#entries, cursor, #entries < count)
if group ~= '' and now ~= '' and now ~= place then
  if place == '' then
    for _, known in ipairs(redis.call('HKEYS', KEYS[3])) do
      if not groups[known] then redis.call('HDEL', KEYS[3], known) end
    end
  end
  redis.pcall('HSET', KEYS[3], group, now) -- pcall: reading must work even if a full Redis refuses the write
end
return {0, entries, before, cursor, now, gone, meanwhile, first, trimmed, purged, lost}
"""
)
_FETCH: Script[list[Any]] = Script("stream_fetch", READS, _FETCH_LUA)
_FETCH_GROUP: Script[list[Any]] = Script("stream_fetch_group", SHRINKS, _FETCH_LUA)
#:   KEYS[1], KEYS[2]  see _FIGURES
#:   ARGV[1]  the group           ARGV[2]  the member that takes over
#:   ARGV[3]  milliseconds after which an entry is taken over
#:   ARGV[4]  id to start from    ARGV[5]  maximum entries
#:   ARGV[6]  milliseconds of inactivity after which a member is removed
#:
#: Returns the next id to start from; the ids of deleted entries; and the fields of StreamState.
_CLAIM: Script[list[Any]] = Script(
    "stream_claim",
    SHRINKS,
    _FIGURES
    + """
local group, member = ARGV[1], ARGV[2]
local claimed = redis.call('XAUTOCLAIM', stream, group, member, ARGV[3], ARGV[4], 'COUNT', ARGV[5], 'JUSTID')
for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
  local each = by_name(info)
  if each['name'] ~= member and each['pending'] == 0 and each['idle'] > tonumber(ARGV[6]) then
    redis.call('XGROUP', 'DELCONSUMER', stream, group, each['name'])
  end
end
return {claimed[1], claimed[3] or {}, first, trimmed, purged}
""",
)
#: A plain XRANGE returns nine small replies per entry, whose parsing takes the client as long as the rest of an export.
#: Joining the texts into one reply takes Redis three times as long as this script.
#:
#:   KEYS[1], KEYS[2]  see _FIGURES
#:   ARGV[1]  the cursor    ARGV[2]  its place, or ""    ARGV[3]  end of the range, in XRANGE syntax
#:   ARGV[4]  bytes of entries after which to stop
#:
#: Returns a flat list: 1 if no entries are left, else 0; the new cursor; its place; `gone`, `left` and `lost`; then the
#: texts.
_FETCH_ROWS: Script[list[Any]] = Script(
    "stream_fetch_rows",
    READS,
    _FIGURES
    + "local cursor, place = ARGV[1], ARGV[2]\n"
    + _GAP
    + """
local said, last, bytes, read, ended = {0, '', '', gone, -1, 0}, cursor, 0, 0, false
repeat
  local entries = redis.call('XRANGE', stream, '(' .. last, ARGV[3], 'COUNT', 50)
  for _, entry in ipairs(entries) do
    local n, each = #said, by_name(entry[2])
    local found, post = each['classification'] or '', each['post'] or ''
    last = entry[1]
    said[n + 1], said[n + 2], said[n + 3] = last, found, post
    bytes = bytes + #found + #post
  end
  read, ended = read + #entries, #entries < 50
until ended or bytes >= tonumber(ARGV[4])
if read == 0 then said[6] = is_lost(cursor) end
said[1], said[2], said[3] = ended and 1 or 0, last, place_after(read, last, ended and ARGV[3] == '+')
if position and ARGV[3] == '+' then said[5] = stored - position end
return said
""",
)
#:   KEYS[1]  feedmill:stored  string, and its buckets    ARGV[1]  prefix of the names of tombstones
#:   ARGV[2]  ids, as JSON    ARGV[3]  checksum of each id, and the key of its score
_CHECK: Script[str] = Script(
    "stream_check",
    READS,
    RECORDS
    + """
local ids, said = cjson.decode(ARGV[2]), {}
local purged = existing(ARGV[1], ids)
local count, half = buckets_of(KEYS[1])
for i, id in ipairs(ids) do
  local key = sub(ARGV[3], 20 * i - 19, 20 * i)
  local records = redis.call('GET', bucket_at(KEYS[1], key, 1, count, half)) or ''
  local at = find_record(records, sub(key, 1, 4), sub(key, 5))
  if purged and purged[i] then
    said[i] = 'false'
  elseif at then
    said[i] = sub(records, at + 27 + #id, at + length_at(records, at) - 5)
  else
    said[i] = 'null'
  end
end
return '[' .. table.concat(said, ',') .. ']'
""",
)


def fetch(redis: Redis, count: int, place: Place = END, group: str = "", member: str = "") -> Fetched:
    """Return up to `count` entries after a place; for a group's member, its pending entries, or else new ones."""
    arguments = [count, group, member, place.cursor, place.as_text()]
    call = _FETCH_GROUP if group else _FETCH
    answer = call(redis, [RESULTS_STREAM, COUNTERS, GROUPS], arguments)
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
    next_id, deleted, *state = _CLAIM(redis, [RESULTS_STREAM, COUNTERS], arguments)
    return next_id, deleted, StreamState(*state)


def fetch_rows(redis: Redis, place: Place, end: str, max_bytes: int) -> tuple[bool, Place, int, int, bool, list[str]]:
    """Return entries after a place until their texts reach `max_bytes`. end: end of the range, in XRANGE syntax.

    Returns whether no entries are left; the new place; the number of entries missing before the returned ones, and of
    entries after them, each -1 if unknown; `Fetched.lost`; and id, classification and post of each entry, in a flat
    list.
    """
    arguments = [place.cursor, place.as_text(), end, max_bytes]
    ended, cursor, text, gone, left, lost, *texts = _FETCH_ROWS(redis, [RESULTS_STREAM, COUNTERS], arguments)
    return bool(ended), Place.parse(cursor, text), gone, left, bool(lost), texts


def check_posts(redis: Redis, posts: Sequence[str]) -> str:
    """Return a JSON array with an item per post: false if it was purged, else its latest score, else null."""
    keys = b"".join([checksum(post_id) + score_key(post_id) for post_id in posts])
    arguments = [tombstone_key(""), json.dumps(posts), keys]
    return _CHECK(redis, [STORED], arguments)
