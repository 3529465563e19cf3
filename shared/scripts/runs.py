"""Scripts for the progress of runs (shared/runs.py), and the part of other scripts that counts it."""

from redis import Redis

from shared.keys import DEAD_LETTERS, run_key
from shared.scripts import Script

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
  local latest, sent, settled = known[1], tonumber(known[2] or 0), tonumber(known[3] or 0) + tonumber(known[4] or 0)
  for field, count in pairs(counts) do redis.call('HINCRBY', key, field, count) end
  if not latest then redis.call('HSETNX', key, 'began', now) end
  local pause = now - tonumber(latest or 0)
  if pause > 0 and pause <= {MAX_PAUSE_MS} and not (first and settled >= sent) then
    redis.call('HINCRBY', key, 'used', pause)
  end
  redis.call('HSET', key, 'latest', now)
  redis.call('EXPIRE', key, ttl)
  redis.call('ZADD', runs, time[1], run)
  redis.call('EXPIRE', runs, ttl)
  redis.call('ZREMRANGEBYRANK', runs, 0, -1 - limit)
end
"""
#:   KEYS[1] feedmill:dead, stream    KEYS[2] feedmill:run:<name>, hash    ARGV[1] entry id of a dead letter
_REMOVE_RETRIED: Script[int] = Script("""
local removed = redis.call('XDEL', KEYS[1], ARGV[1])
if removed == 1 and tonumber(redis.call('HGET', KEYS[2], 'failed') or 0) > 0 then
  redis.call('HINCRBY', KEYS[2], 'failed', -1)
end
return removed
""")


def remove_retried(redis: Redis, entry: str, run: str) -> None:
    """Remove a dead letter whose post was sent again, and subtract it from its run's failures."""
    _REMOVE_RETRIED(redis, [DEAD_LETTERS, run_key(run)], [entry])
