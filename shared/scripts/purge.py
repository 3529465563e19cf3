"""Scripts for purging posts: set tombstones, delete stream entries, and replace values that have not changed."""

import json
from collections.abc import Collection, Mapping, Sequence

from redis import Redis

from feedmill.shared.keys import PURGES, RESULTS_STREAM, tombstone_key
from feedmill.shared.scripts import READS, SHRINKS, Script, as_text

#: Number of purges that the log keeps, each of up to 1,000 posts. A reader that missed some checks all of its posts.
MAX_PURGES = 4000
#: Adds a purge to the log, with the milliseconds since 1970 up to which results are gone. The clock may have been set
#: back, so this is at least the time of the newest result.
LOG_PURGE = f"""
local function log_purge(log, results, field, value, ttl)
  local time = redis.call('TIME')
  local newest = redis.call('XREVRANGE', results, '+', '-', 'COUNT', 1)[1]
  local till = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  till = math.max(till, newest and tonumber(string.match(newest[1], '^%d+')) or 0)
  redis.call('XADD', log, 'MAXLEN', {MAX_PURGES}, '*', field, value, 'until', string.format('%d', till))
  redis.call('EXPIRE', log, ttl)
end
"""
#:   KEYS[1]  feedmill:purges, stream    KEYS[2]  feedmill:results, stream
#:   KEYS[3+] feedmill:gone:<id>, string, of each post
#:   ARGV[1]  time, in seconds since 1970    ARGV[2]  ttl, seconds    ARGV[3]  the ids, as JSON
_SET_TOMBSTONES: Script[None] = Script(
    "purge_set_tombstones",
    SHRINKS,
    LOG_PURGE
    + """
for i = 3, #KEYS do
  redis.call('SET', KEYS[i], ARGV[1], 'EX', ARGV[2])
end
log_purge(KEYS[1], KEYS[2], 'ids', ARGV[3], ARGV[2])
""",
)
#:   KEYS  feedmill:gone:<id>, string, of each post    ARGV  the expected time of each tombstone
#:
#: Returns 1 for each post that has no tombstone now, else 0.
_LIFT: Script[list[int]] = Script(
    "purge_lift",
    SHRINKS,
    """
local lifted = {}
for i, key in ipairs(KEYS) do
  local at = redis.call('GET', key)
  if at == ARGV[i] then redis.call('DEL', key) end
  lifted[i] = (not at or at == ARGV[i]) and 1 or 0
end
return lifted
""",
)
#: Reads ten entries at a time, because sizes vary widely.
#:
#:   KEYS[1]  feedmill:results or feedmill:dead, stream
#:   ARGV[1]  first id, in XRANGE syntax                 ARGV[2]  bytes of entries after which to stop
#:   ARGV[3+] ids of the posts
#:
#: Returns the first id for the next call ("" after the last entry), and the number of deleted entries.
_SWEEP: Script[tuple[str | bytes, int]] = Script(
    "purge_sweep",
    SHRINKS,
    """
local wanted, from, bytes, deleted = {}, ARGV[1], 0, 0
for i = 3, #ARGV do wanted[ARGV[i]] = true end
repeat
  local entries = redis.call('XRANGE', KEYS[1], from, '+', 'COUNT', 10)
  for _, entry in ipairs(entries) do
    local fields = entry[2]
    local id = fields[1] == 'id' and fields[2]
    for i = 2, #fields, 2 do bytes = bytes + #fields[i] end
    if id and wanted[id] then
      deleted = deleted + redis.call('XDEL', KEYS[1], entry[1])
    end
    from = '(' .. entry[1]
  end
  if #entries < 10 then from = '' end
until from == '' or bytes >= tonumber(ARGV[2])
return {from, deleted}
""",
)
#:   KEYS[1]  feedmill:results or feedmill:dead, stream
#:   ARGV[1], ARGV[2]  as in _SWEEP                       ARGV[3]  beginnings of ids, up to the last slash, as JSON
#:
#: Returns the first id for the next call ("" after the last entry), and the ids of the posts that begin like this.
_FIND_AUTHORS: Script[tuple[str | bytes, list[str | bytes]]] = Script(
    "purge_find_authors",
    READS,
    """
local wanted, from, bytes, found = {}, ARGV[1], 0, {}
for _, beginning in ipairs(cjson.decode(ARGV[3])) do wanted[beginning] = true end
repeat
  local entries = redis.call('XRANGE', KEYS[1], from, '+', 'COUNT', 10)
  for _, entry in ipairs(entries) do
    local fields = entry[2]
    local id = fields[1] == 'id' and fields[2] or ''
    for i = 2, #fields, 2 do bytes = bytes + #fields[i] end
    if wanted[string.match(id, '^.*/')] then found[#found + 1] = id end
    from = '(' .. entry[1]
  end
  if #entries < 10 then from = '' end
until from == '' or bytes >= tonumber(ARGV[2])
return {from, found}
""",
)
#:   KEYS[1] list or string    ARGV[1] the expected value    ARGV[2] the new value
_REPLACE_WAITING: Script[int] = Script(
    "purge_replace_waiting",
    SHRINKS,
    """
local at = redis.call('LPOS', KEYS[1], ARGV[1])
if not at then return 0 end
redis.call('LSET', KEYS[1], at, ARGV[2])
return 1
""",
)
_REPLACE_STRING: Script[int] = Script(
    "purge_replace_string",
    SHRINKS,
    """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'KEEPTTL')
return 1
""",
)
#:   KEYS[1] feedmill:reserved, hash    ARGV[1] the expected message    ARGV[2] the new message    ARGV[3] its tag
_REPLACE_HELD: Script[int] = Script(
    "purge_replace_held",
    SHRINKS,
    """
if redis.call('HGET', KEYS[1], ARGV[3]) ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], ARGV[3], ARGV[2])
return 1
""",
)


def lift(redis: Redis, times: Mapping[str, int]) -> list[int]:
    """Remove tombstones that are of these times; return 1 for each post that has none then, else 0."""
    return _LIFT(redis, [tombstone_key(post) for post in times], [str(at) for at in times.values()])


def set_tombstones(redis: Redis, posts: Sequence[str], at: int, ttl: int) -> None:
    """Set the tombstones of posts, and log the purge. at: seconds since 1970. ttl: seconds."""
    keys = [PURGES, RESULTS_STREAM, *map(tombstone_key, posts)]
    _SET_TOMBSTONES(redis, keys, [at, ttl, json.dumps(posts)])


def sweep(redis: Redis, stream: str, posts: Sequence[str], max_bytes: int) -> int:
    """Delete the posts' entries from a stream, and return the number of them. max_bytes: bytes read per call."""
    start, total = "-", 0
    while start:
        following, deleted = _SWEEP(redis, [stream], [start, max_bytes, *posts])
        start, total = as_text(following), total + deleted
    return total


def find_authors(redis: Redis, stream: str, authors: Collection[str], max_bytes: int) -> set[str]:
    """Return the ids of these authors' posts in a stream. authors: beginnings of ids, up to the last slash.

    max_bytes: bytes read per call.
    """
    start, found = "-", set[str]()
    beginnings = json.dumps(list(authors))
    while start:
        following, ids = _FIND_AUTHORS(redis, [stream], [start, max_bytes, beginnings])
        start = as_text(following)
        found.update(map(as_text, ids))
    return found


def replace_waiting(redis: Redis, queue_list: str, before: bytes, after: str) -> bool:
    """Replace a waiting message if it is still in the list."""
    return bool(_REPLACE_WAITING(redis, [queue_list], [before, after]))


def replace_held(redis: Redis, reserved: str, tag: bytes, before: bytes, after: str) -> bool:
    """Replace a message held by a worker if it is unchanged. reserved: the hash of reserved messages."""
    return bool(_REPLACE_HELD(redis, [reserved], [before, after, tag]))


def replace_string(redis: Redis, key: str | bytes, before: bytes, after: str) -> bool:
    """Replace a string if it is unchanged, and keep its TTL."""
    return bool(_REPLACE_STRING(redis, [key], [before, after]))
