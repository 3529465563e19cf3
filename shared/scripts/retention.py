"""Scripts that bound the memory of results and of sent records: measure their buckets, and drop the oldest records.

Each call takes Redis about a millisecond.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from redis import Redis

from feedmill.shared.keys import CONTEXTS, COUNTERS, MARKS, STORED
from feedmill.shared.scripts import READS, SHRINKS, Script
from feedmill.shared.scripts.buckets import BUCKETS, MARK_RECORDS, RECORDS

#: Buckets and contexts per call of the functions that delete them.
BUCKETS_PER_CALL, CONTEXTS_PER_CALL = 100, 1000

#:   KEYS[1]  feedmill:stored or feedmill:sent-marks, string, and its buckets
#:   ARGV[1]  maximum buckets to read    ARGV[2]  offset of the first one, 0 to 1    ARGV[3]  1 to return their records
#:
#: Returns the number of buckets, how many of them were looked at, how many of these exist and their bytes of memory,
#: and their records.
_SAMPLE: Script[Any] = Script(
    "retention_sample",
    READS,
    BUCKETS
    + """
local count = size_of(KEYS[1])
local looked, existing, bytes, found = math.min(count, tonumber(ARGV[1])), 0, 0, {}
for i = 0, looked - 1 do
  local key = KEYS[1] .. ':' .. math.floor((i + ARGV[2]) * count / looked)
  local usage = redis.call('MEMORY', 'USAGE', key)
  if usage then
    existing, bytes = existing + 1, bytes + usage
    if ARGV[3] == '1' then found[existing] = redis.call('GET', key) end
  end
end
return {count, looked, existing, bytes, found}
""",
)
#: Drops the records of some buckets that expire before a time, and of those that expire at that time a share, the first
#: of each bucket. Rounding differs by bucket, so that small shares are met on average.
#:
#:   KEYS[1]  feedmill:stored or feedmill:sent-marks, string, and its buckets    KEYS[2]  feedmill:counters  hash
#:   ARGV[1]  number of the first bucket    ARGV[2]  maximum buckets    ARGV[3]  the time    ARGV[4]  the share
#:   ARGV[5]  field of the counter          ARGV[6]  the current time    ARGV[7]  for marks: the hour that is time 0
#:
#: Returns the number of buckets that are left, and of removed records. The counter leaves out expired ones.
_DROP_OLDEST = """
local count, start = size_of(KEYS[1]), tonumber(ARGV[1])
local cut, share, now, dropped = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[6]), 0
local removed = 0
local last = math.min(count, start + ARGV[2]) - 1
for number = start, last do
  local key = KEYS[1] .. ':' .. number
  local records = whole(redis.call('GET', key))
  local at, old, equal = 1, 0, 0
  while at <= #records do
    local size = size_at(records, at)
    local time = time_at(records, at, size)
    if time < cut then old = old + 1 elseif time == cut then equal = equal + 1 end
    at = at + size
  end
  equal = math.floor(equal * share + number * 0.6180339887 % 1)
  if old + equal > 0 then
    -- Runs of records are kept together.
    local kept, start = {}, 1
    at = 1
    while at <= #records and old + equal > 0 do
      local size = size_at(records, at)
      local time = time_at(records, at, size)
      if time < cut or (time == cut and equal > 0) then
        if time == cut then equal = equal - 1 else old = old - 1 end
        if at > start then kept[#kept + 1] = sub(records, start, at - 1) end
        start = at + size
        removed = removed + 1
        if time > now and counts(records, at) then dropped = dropped + 1 end
      end
      at = at + size
    end
    kept[#kept + 1] = sub(records, start)
    shrink_bucket(key, table.concat(kept))
  end
end
if dropped > 0 then redis.call('HINCRBY', KEYS[2], ARGV[5], dropped) end
return {math.max(0, count - 1 - last), removed}
"""
_DROP_RESULTS: Script[tuple[int, int]] = Script(
    "retention_drop_results",
    SHRINKS,
    RECORDS
    + """
local size_at = length_at
local function whole(records) return records or '' end
local function time_at(records, at, size) return read('>I4', records, at + size - 4) end
local function counts(records, at) return kind_at(records, at) ~= SCORE end
"""
    + _DROP_OLDEST,
)
_DROP_MARKS: Script[tuple[int, int]] = Script(
    "retention_drop_marks",
    SHRINKS,
    MARK_RECORDS
    + """
local function time_at(records, at) return (read('>H', records, at + IDENTITY) - ARGV[7]) % 65536 end
local function size_at() return SIZE end
local function counts() return true end
local whole = whole_marks
"""
    + _DROP_OLDEST,
)
#:   KEYS[1]  feedmill:contexts  zset, and the keys that it lists
#:   ARGV[1]  the time               ARGV[2]  maximum contexts
#:
#: Returns the number of deleted contexts.
_DROP_CONTEXTS: Script[int] = Script(
    "retention_drop_contexts",
    SHRINKS,
    """
local found = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '(' .. ARGV[1], 'LIMIT', 0, ARGV[2])
for _, key in ipairs(found) do
  redis.call('UNLINK', key)
  redis.call('ZREM', KEYS[1], key)
end
return #found
""",
)


class Sample(NamedTuple):
    """Some buckets of a table."""

    #: Number of the table's buckets, and of those looked at. Buckets without records do not exist.
    buckets: int
    looked: int
    existing: int
    #: Bytes of memory of the existing ones (MEMORY USAGE).
    memory: int
    #: Their records, if requested.
    records: Sequence[bytes]


def sample(redis: Redis, table: str, count: int, offset: float, records: bool) -> Sample:
    """Look at up to `count` buckets at equal distances. offset: position of the first one, 0 to 1."""
    return Sample(*_SAMPLE.raw(redis, [table], [count, offset, int(records)]))


def drop_results(redis: Redis, start: int, before: int, share: float, now: int) -> tuple[int, int]:
    """Drop results of BUCKETS_PER_CALL buckets from the bucket `start`: those that expire before the time `before`, and
    a share of those that expire at that time.

    before, now: seconds since 1970. Returns the numbers of buckets left and of
    removed records.
    """
    arguments = [start, BUCKETS_PER_CALL, before, share, "dropped", now]
    left, removed = _DROP_RESULTS(redis, [STORED, COUNTERS], arguments)
    return left, removed


def drop_marks(redis: Redis, start: int, before: int, share: float, now: int, origin: int) -> tuple[int, int]:
    """Drop sent records like `drop_results`. before, now: hours after the hour `origin`, modulo 2**16."""
    arguments = [start, BUCKETS_PER_CALL, before, share, "sent_dropped", now, origin]
    left, removed = _DROP_MARKS(redis, [MARKS, COUNTERS], arguments)
    return left, removed


def drop_contexts(redis: Redis, before: int) -> None:
    """Delete the contexts whose results have all expired, or been dropped, before a time, in seconds since 1970."""
    while _DROP_CONTEXTS(redis, [CONTEXTS], [before, CONTEXTS_PER_CALL]) == CONTEXTS_PER_CALL:
        pass
