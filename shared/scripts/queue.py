"""Scripts for the queue: look up and mark sent posts, and read headers of the next messages.

With pipelines of many small commands instead, redis-py would take two thirds of the publishing time.
"""

import json
from collections.abc import Sequence

from redis import Redis

from shared.keys import CLEARS, RUNS, run_key, sent_key, tombstone_key
from shared.scripts import Script
from shared.scripts.runs import COUNT_PROGRESS

#: Status of a post in `lookup`; 0 if it is unknown.
SENT, PURGED = 1, 2
#: Marks of one id after which expired ones are deleted: an id can occur in any number of runs, and each new mark
#: extends the lifetime of all.
PRUNE_MARKS = 32

#:   Keys: feedmill:sent:<id> (hash), feedmill:gone:<id> (string). ARGV[1], ARGV[2]: the prefixes of their names.
#:   ARGV[3]: a JSON list of [id, hash field] per post, because redis-py is slow with many arguments.
_LOOKUP: Script[list[int]] = Script("""
local found = {}
for i, mark in ipairs(cjson.decode(ARGV[3])) do
  if redis.call('EXISTS', ARGV[2] .. mark[1]) == 1 then
    found[i] = 2
  else
    found[i] = redis.call('HEXISTS', ARGV[1] .. mark[1], mark[2])
  end
end
return found
""")
#:   KEYS[1]: feedmill:runs, zset. ARGV[1] to ARGV[3]: see _LOOKUP. ARGV[4]: current time. ARGV[5]: TTL in seconds.
#:   ARGV[6]: the posts' run, "" for none. ARGV[7]: prefix of the names of runs' keys. ARGV[8]: maximum runs listed.
#:   ARGV[9]: PRUNE_MARKS.
_MARK: Script[None] = Script(
    COUNT_PROGRESS
    + """
local new = 0
for _, mark in ipairs(cjson.decode(ARGV[3])) do
  local key = ARGV[1] .. mark[1]
  if redis.call('EXISTS', ARGV[2] .. mark[1]) == 0 then
    new = new + redis.call('HSET', key, mark[2], ARGV[4])
    redis.call('EXPIRE', key, ARGV[5])
    -- One mark in sixteen checks, by the first digit of its digest.
    if ARGV[6] ~= '' and string.byte(mark[2]) == 48 and redis.call('HLEN', key) > tonumber(ARGV[9]) then
      local marks, oldest = redis.call('HGETALL', key), tonumber(ARGV[4]) - tonumber(ARGV[5])
      for i = 1, #marks, 2 do
        if tonumber(marks[i + 1]) < oldest then redis.call('HDEL', key, marks[i]) end
      end
    end
  end
end
if new > 0 and ARGV[6] ~= '' then
  count_progress(KEYS[1], ARGV[7], ARGV[6], {sent = new}, ARGV[5], ARGV[8], true)
end
"""
)
#:   KEYS[1]: list of the queue. KEYS[2]: feedmill:clears, hash.
#:   ARGV[1]: the message. ARGV[2]: a JSON list of [id, hash fields, run] per post.
#:   ARGV[3], ARGV[4]: prefixes of the names of sent marks' and of runs' keys. ARGV[5]: the queue.
_REMOVE: Script[int] = Script("""
if redis.call('LREM', KEYS[1], -1, ARGV[1]) == 0 then return 0 end
redis.call('HINCRBY', KEYS[2], ARGV[5], 1)
for _, mark in ipairs(cjson.decode(ARGV[2])) do
  local removed, run = 0, ARGV[4] .. mark[3]
  for _, field in ipairs(mark[2]) do
    if removed == 0 then removed = redis.call('HDEL', ARGV[3] .. mark[1], field) end
  end
  if removed == 1 and mark[3] ~= '' and tonumber(redis.call('HGET', run, 'sent') or 0) > 0 then
    redis.call('HINCRBY', run, 'sent', -1)
  end
end
return 1
""")
#: Reads only the last 32 KiB of a message, because whole messages can be megabytes long: kombu writes headers after the
#: body. Post text cannot match, because its quotes are escaped.
#:
#:   KEYS  the lists of one queue      ARGV[1]  the header's name
_OLDEST: Script[list[str]] = Script("""
local found = {}
for i = 1, #KEYS do
  local message = redis.call('LINDEX', KEYS[i], -1)
  if message then
    found[#found + 1] = string.match(string.sub(message, -32768), '"' .. ARGV[1] .. '": *(%d+%.?%d*)')
  end
end
return found
""")


def lookup(redis: Redis, marks: Sequence[tuple[str, str]]) -> list[int]:
    """Return the status of each post: 0, SENT or PURGED. marks: post id and hash field of each."""
    return _LOOKUP(redis, [], [sent_key(""), tombstone_key(""), json.dumps(marks)])


def mark(redis: Redis, marks: Sequence[tuple[str, str]], at: int, ttl: int, run: str = "", max_runs: int = 0) -> None:
    """Mark posts as sent, except posts that were purged meanwhile, and count new marks in the progress of their run.

    at: seconds since 1970. ttl: seconds. run: the posts' run; "" for none. max_runs: runs listed.
    """
    arguments = [sent_key(""), tombstone_key(""), json.dumps(marks), at, ttl, run, run_key(""), max_runs, PRUNE_MARKS]
    _MARK(redis, [RUNS], arguments)


def remove_waiting(
    redis: Redis, queue: str, queue_list: str, message: bytes, marks: Sequence[tuple[Sequence[tuple[str, str]], str]]
) -> bool:
    """Remove a waiting message with a mark of each post; return False if it is not in the list any more.

    queue_list: the list of the queue that holds the message. marks: for each post, its possible marks, of which the
    first that exists is removed, and its run ("" for none), from which it is subtracted.
    """
    named = json.dumps([[found[0][0], [field for _, field in found], run] for found, run in marks])
    return bool(_REMOVE(redis, [queue_list, CLEARS], [message, named, sent_key(""), run_key(""), queue]))


def next_header_values(redis: Redis, lists: Sequence[str], header: str) -> list[float]:
    """Return a header's numeric value in the next message of each list that has one."""
    return [float(value) for value in _OLDEST(redis, lists, [header])]
