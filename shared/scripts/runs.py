"""Scripts for runs: the part of other scripts that counts progress (shared/runs.py), and deleting a run."""

from collections.abc import Sequence

from redis import Redis

from feedmill.shared.keys import (
    CLEARS,
    DEAD_LETTERS,
    MARKS,
    PURGES,
    RESULTS_STREAM,
    RUNS,
    STORED,
    run_key,
)
from feedmill.shared.scripts import SHRINKS, Script, as_text
from feedmill.shared.scripts.buckets import FORGET_MARKS, FORGET_RESULT
from feedmill.shared.scripts.purge import LOG_PURGE

#: Maximum milliseconds between two activities of a run that count as time in use. In longer pauses, the run waited for
#: a worker, or its sender for a person.
MAX_PAUSE_MS = 60_000
#: Adds `counts` (field -> number) to a run's counters and its time in use, once per call and not per post. `first` is
#: true when posts are sent: a run in which nothing is pending was not in use before.
#:
#: runs: feedmill:runs, zset    prefix: prefix of the names of runs' keys    ttl: seconds    limit: runs listed
COUNT_PROGRESS = f"""
local function count_progress(runs, prefix, run, counts, ttl, limit, first)
  local key, time = prefix .. run, redis.call('TIME')
  local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  local known = redis.call('HMGET', key, 'latest', 'sent', 'stored', 'failed')
  for i = 1, 4 do known[i] = tonumber(known[i] or 0) or 0 end
  local latest, sent, settled = known[1], known[2], known[3] + known[4]
  -- pcall: producers may write anything here, and results must be stored all the same.
  for field, count in pairs(counts) do redis.pcall('HINCRBY', key, field, count) end
  if latest == 0 then redis.call('HSETNX', key, 'began', now) end
  local pause = now - latest
  if pause > 0 and pause <= {MAX_PAUSE_MS} and not (first and settled >= sent) then
    redis.pcall('HINCRBY', key, 'used', pause)
  end
  redis.call('HSET', key, 'latest', now)
  redis.call('EXPIRE', key, ttl)
  redis.call('ZADD', runs, time[1], run)
  redis.call('EXPIRE', runs, ttl)
  redis.call('ZREMRANGEBYRANK', runs, 0, -1 - limit)
end
"""
#: Bytes of entries that one call of `_PURGE` reads. Takes a few milliseconds, during which Redis is blocked.
PURGE_BYTES = 2**18
#: Deletes the entries of one run, the results that they announce, and the run's marks of their ids.
#:
#:   KEYS[1]  feedmill:results or feedmill:dead, stream    KEYS[2], KEYS[3]  feedmill:sent-marks and
#:   feedmill:stored, strings, and their buckets
#:   ARGV[1]  first id, in XRANGE syntax    ARGV[2]  bytes of entries after which to stop    ARGV[3]  the run
#:
#: Returns the first id for the next call ("" after the last entry), and the number of deleted entries.
_PURGE: Script[tuple[str | bytes, int]] = Script(
    "runs_purge",
    SHRINKS,
    FORGET_MARKS
    + FORGET_RESULT
    + """
local from, bytes, deleted = ARGV[1], 0, 0
local function decoded(text)
  local valid, value = pcall(cjson.decode, text or '')
  return valid and type(value) == 'table' and value or {}
end
repeat
  local entries = redis.call('XRANGE', KEYS[1], from, '+', 'COUNT', 10)
  for _, entry in ipairs(entries) do
    local found = {}
    for i = 1, #entry[2], 2 do
      found[entry[2][i]] = entry[2][i + 1]
      bytes = bytes + #entry[2][i + 1]
    end
    local text = found.post or found.letter or ''
    if string.find(text, '"run"', 1, true) and decoded(text).run == ARGV[3] then
      deleted = deleted + redis.call('XDEL', KEYS[1], entry[1])
      local fingerprint = decoded(found.classification).fingerprint
      if found.id and fingerprint then forget_result(KEYS[3], found.id, fingerprint) end
      if found.id then forget_marks(KEYS[2], found.id, ARGV[3]) end
    end
    from = '(' .. entry[1]
  end
  if #entries < 10 then from = '' end
until from == '' or bytes >= tonumber(ARGV[2])
return {from, deleted}
""",
)
#: Deletes a run's counters, logs the purge, and makes the saved positions in files void: sending its file again would
#: skip its posts.
#:
#:   KEYS[1] feedmill:run:<name>, hash    KEYS[2] feedmill:runs, zset    KEYS[3] feedmill:clears, hash
#:   KEYS[4] feedmill:purges, stream      KEYS[5] feedmill:results, stream
#:   ARGV[1] the run                      ARGV[2] ttl of the log, seconds    ARGV[3+] queues
_FORGET: Script[None] = Script(
    "runs_forget",
    SHRINKS,
    LOG_PURGE
    + """
redis.call('UNLINK', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
for i = 3, #ARGV do redis.call('HINCRBY', KEYS[3], ARGV[i], 1) end
log_purge(KEYS[4], KEYS[5], 'run', ARGV[1], ARGV[2])
""",
)
#:   KEYS[1] feedmill:dead, stream    KEYS[2] feedmill:run:<name>, hash    ARGV[1] entry id of a dead letter
_REMOVE_RETRIED: Script[int] = Script(
    "runs_remove_retried",
    SHRINKS,
    """
local removed = redis.call('XDEL', KEYS[1], ARGV[1])
if removed == 1 and tonumber(redis.call('HGET', KEYS[2], 'failed') or 0) > 0 then
  redis.call('HINCRBY', KEYS[2], 'failed', -1)
end
return removed
""",
)


def remove_retried(redis: Redis, entry: str, run: str) -> None:
    """Remove a dead letter whose post was sent again, and subtract it from its run's failures."""
    _REMOVE_RETRIED(redis, [DEAD_LETTERS, run_key(run)], [entry])


def purge(redis: Redis, stream: str, run: str) -> int:
    """Delete a run's entries from the stream of results or dead letters, with their results and marks; return their
    number.
    """
    start, total = "-", 0
    while start:
        arguments = [start, PURGE_BYTES, run]
        following, deleted = _PURGE(redis, [stream, MARKS, STORED], arguments)
        start, total = as_text(following), total + deleted
    return total


def forget(redis: Redis, run: str, queues: Sequence[str], log_ttl: int) -> None:
    """Delete the counters of a run, log its purge, and make saved positions void for files sent to these queues.

    log_ttl: seconds.
    """
    _FORGET(redis, [run_key(run), RUNS, CLEARS, PURGES, RESULTS_STREAM], [run, log_ttl, *queues])
