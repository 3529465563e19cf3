"""Scripts for the queue: look up and mark sent posts, and read headers of the next messages.

With pipelines of many small commands instead, redis-py would take two thirds of the publishing time.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

from redis import Redis

from feedmill.shared.keys import CLEARS, MARKS, RUNS, STORED, run_key, tombstone_key
from feedmill.shared.scripts import READS, SHRINKS, WRITES, Script, as_text
from feedmill.shared.scripts.buckets import (
    DIGEST_DIGITS,
    FORGET_MARKS,
    ID_BYTES,
    MARK_RECORDS,
    MAX_BUCKET_MARKS,
    MAX_TTL_HOURS,
    RECORDS,
    RUN_BYTES,
    SPLIT_MARKS,
    checksum,
)
from feedmill.shared.scripts.runs import COUNT_PROGRESS

#: Status of a post in `lookup`; 0 if it is unknown.
SENT, PURGED = 1, 2
HOUR_S = 3600
#: Ids per call of `known`. Redis is blocked during a call.
IDS_PER_CALL = 500


class Mark(NamedTuple):
    """Identity of a sent post: its id, and a digest of its text, its run and where it was sent, in hex."""

    post_id: str
    field: str
    #: The part of the mark that Redis stores.
    identity: bytes

    @classmethod
    def of(cls, post_id: str, field: str, run: str = "") -> "Mark":
        """Return a mark. run: the post's run; "" for none."""
        start = checksum(post_id) + checksum(run)[:RUN_BYTES]
        return cls(post_id, field, start + bytes.fromhex(field[:DIGEST_DIGITS]))


#:   KEYS[1]: feedmill:sent-marks, string, and its buckets. Others: feedmill:gone:<id>, string. ARGV[1]: the prefix of
#:   their names. ARGV[2]: a JSON list of the posts' ids. ARGV[3]: the marks' identities, because redis-py is slow with
#:   many arguments.
#:
#: Returns a digit per post.
_LOOKUP: Script[str | bytes] = Script(
    "queue_lookup",
    READS,
    MARK_RECORDS
    + """
local ids, identities, hour = cjson.decode(ARGV[2]), ARGV[3], current_hour()
local count, half = buckets_of(KEYS[1])
local names, found = {}, {}
for i = 1, #ids do names[i] = bucket_at(KEYS[1], identities, 1 + (i - 1) * IDENTITY, count, half) end
local buckets, purged = values_of('MGET', names), existing(ARGV[1], ids)
for i, records in ipairs(buckets) do
  local at = find_mark(whole_marks(records), sub(identities, 1 + (i - 1) * IDENTITY, i * IDENTITY))
  if purged and purged[i] then
    found[i] = 2
  elseif at and not expired(records, at, hour) then
    found[i] = 1
  else
    found[i] = 0
  end
end
return table.concat(found)
""",
)
#:   KEYS[1]: feedmill:sent-marks, string, and its buckets. KEYS[2]: feedmill:runs, zset. ARGV[1]: a JSON list of the
#:   posts' ids. ARGV[2]: the marks' identities. ARGV[3]: TTL, seconds. ARGV[4]: prefix of
#:   the names of tombstones. ARGV[5]: the posts' run, "" for none. ARGV[6]: prefix of the names of runs' keys. ARGV[7]:
#:   maximum runs listed.
_MARK: Script[None] = Script(
    "queue_mark",
    WRITES,
    MARK_RECORDS
    + COUNT_PROGRESS
    + f"""
local ids, identities, hour = cjson.decode(ARGV[1]), ARGV[2], current_hour()
local expires = struct.pack('>H', (hour + math.min(math.ceil(ARGV[3] / 3600), {MAX_TTL_HOURS})) % 65536)
local count, half = buckets_of(KEYS[1])
local purged, names, buckets, latests, new = existing(ARGV[4], ids), {{}}, {{}}, {{}}, 0
-- A key lives an hour longer than its last mark, so that most writes need not extend its life.
local ttl = ARGV[3] + 3600
for i = 1, #ids do names[i] = bucket_at(KEYS[1], identities, 1 + (i - 1) * IDENTITY, count, half) end
for i, records in ipairs(values_of('MGET', names)) do
  buckets[names[i]] = whole_marks(records)
  latests[names[i]] = sub(buckets[names[i]], -2)
end
for i, name in ipairs(names) do
  if not (purged and purged[i]) then
    local identity, records = sub(identities, 1 + (i - 1) * IDENTITY, i * IDENTITY), buckets[name]
    local at = find_mark(records, identity)
    if not at or expired(records, at, hour) then new = new + 1 end
    buckets[name] = (at and without_mark(records, at) or records) .. identity .. expires
  end
end
for name, records in pairs(buckets) do
  local start = math.max(1, #records - {MAX_BUCKET_MARKS} * SIZE + 1)
  while start < #records and expired(records, start, hour) do start = start + SIZE end
  if start > 1 then records = sub(records, start) end
  local latest = latests[name]
  if records == '' then
    -- All posts were purged.
  elseif latest == expires then
    redis.call('SET', name, records, 'KEEPTTL')
  else
    redis.call('SET', name, records, 'EX', ttl)
  end
end
if new > 0 then split_buckets(KEYS[1], #ids, {SPLIT_MARKS} * SIZE, SIZE, ttl) end
if new > 0 and ARGV[5] ~= '' then
  count_progress(KEYS[2], ARGV[6], ARGV[5], {{sent = new}}, ARGV[3], ARGV[7], true)
end
""",
)
#:   KEYS[1]: list of the queue. KEYS[2]: feedmill:clears, hash. KEYS[3]: feedmill:sent-marks, string, and its buckets.
#:   ARGV[1]: the message. ARGV[2]: a JSON list of [id, hash fields, run] per post.
#:   ARGV[3]: prefix of the names of runs' keys. ARGV[4]: the queue.
_REMOVE: Script[int] = Script(
    "queue_remove",
    SHRINKS,
    MARK_RECORDS
    + """
if redis.call('LREM', KEYS[1], -1, ARGV[1]) == 0 then return 0 end
redis.call('HINCRBY', KEYS[2], ARGV[4], 1)
for _, mark in ipairs(cjson.decode(ARGV[2])) do
  local removed, run = 0, ARGV[3] .. mark[3]
  local key, records, checksum = bucket_of(KEYS[3], mark[1])
  for _, field in ipairs(mark[2]) do
    local at = removed == 0 and find_mark(records, checksum .. run_checksum(mark[3]) .. digest_of(field))
    if at then
      shrink_bucket(key, without_mark(records, at))
      removed = 1
    end
  end
  if removed == 1 and mark[3] ~= '' and tonumber(redis.call('HGET', run, 'sent') or 0) > 0 then
    redis.call('HINCRBY', run, 'sent', -1)
  end
end
return 1
""",
)
#:   KEYS[1]: feedmill:sent-marks, string, and its buckets. ARGV[1]: a JSON list of ids.
_FORGET: Script[int] = Script(
    "queue_forget",
    SHRINKS,
    FORGET_MARKS
    + """
local forgotten = 0
for _, id in ipairs(cjson.decode(ARGV[1])) do
  if forget_marks(KEYS[1], id) then forgotten = forgotten + 1 end
end
return forgotten
""",
)
#:   KEYS[1], KEYS[2]: feedmill:sent-marks and feedmill:stored, strings, and their buckets. ARGV[1]: a JSON list of ids.
#:   ARGV[2]: the ids' checksums.
#:
#: Returns a digit per id.
_KNOWN: Script[str | bytes] = Script(
    "queue_known",
    READS,
    MARK_RECORDS
    + RECORDS
    + f"""
local ids, said = cjson.decode(ARGV[1]), {{}}
for i, id in ipairs(ids) do
  local checksum = sub(ARGV[2], 1 + (i - 1) * {ID_BYTES}, i * {ID_BYTES})
  local marks = redis.call('GET', bucket_at(KEYS[1], checksum, 1, buckets_of(KEYS[1])))
  local known = marks and find_mark(marks, checksum)
  if not known then
    local records = redis.call('GET', bucket_at(KEYS[2], checksum, 1, buckets_of(KEYS[2])))
    known = records and find(records, checksum, 1, true) and #records_of(records, id) > 0
  end
  said[i] = known and 1 or 0
end
return table.concat(said)
""",
)
#: Reads only the last 32 KiB of a message, because whole messages can be megabytes long: kombu writes headers after the
#: body. Post text cannot match, because its quotes are escaped.
#:
#:   KEYS  the lists of one queue      ARGV[1]  the header's name
_OLDEST: Script[list[str]] = Script(
    "queue_oldest",
    READS,
    """
local found = {}
for i = 1, #KEYS do
  local message = redis.call('LINDEX', KEYS[i], -1)
  if message then
    found[#found + 1] = string.match(string.sub(message, -32768), '"' .. ARGV[1] .. '": *(%d+%.?%d*)')
  end
end
return found
""",
)


def lookup(redis: Redis, marks: Sequence[Mark]) -> list[int]:
    """Return the status of each post: 0, SENT or PURGED."""
    if not marks:
        return []
    found = _LOOKUP(redis, [MARKS], [tombstone_key(""), *_packed(marks)])
    return list(map(int, as_text(found)))


def mark(redis: Redis, marks: Sequence[Mark], ttl: int, run: str = "", max_runs: int = 0) -> None:
    """Mark posts as sent, except posts that were purged meanwhile, and count new marks in the progress of their run.

    ttl: seconds, met to the hour by Redis' clock. run: the posts' run; "" for none. max_runs: runs listed.
    """
    if marks:
        arguments = [*_packed(marks), ttl, tombstone_key(""), run, run_key(""), max_runs]
        _MARK(redis, [MARKS, RUNS], arguments)


def _packed(marks: Sequence[Mark]) -> tuple[str, bytes]:
    """Return the ids as JSON, and the identities of the marks."""
    return json.dumps([mark.post_id for mark in marks]), b"".join([mark.identity for mark in marks])


def forget(redis: Redis, ids: Sequence[str]) -> int:
    """Delete all marks of these posts. Return the number of posts that had any."""
    return _FORGET(redis, [MARKS], [json.dumps(ids)])


def known(redis: Redis, ids: Sequence[str]) -> list[str]:
    """Return the ids of posts that were sent or have results."""
    found: list[str] = []
    for start in range(0, len(ids), IDS_PER_CALL):
        batch = ids[start : start + IDS_PER_CALL]
        arguments = [json.dumps(batch), b"".join(map(checksum, batch))]
        said = as_text(_KNOWN(redis, [MARKS, STORED], arguments))
        found += [post_id for post_id, digit in zip(batch, said, strict=True) if digit == "1"]
    return found


def remove_waiting(
    redis: Redis, queue: str, queue_list: str, message: bytes, marks: Sequence[tuple[Sequence[Mark], str]]
) -> bool:
    """Remove a waiting message with a mark of each post; return False if it is not in the list any more.

    queue_list: the list of the queue that holds the message. marks: for each post, its possible marks, of which the
    first that exists is removed, and its run ("" for none), from which it is subtracted.
    """
    named = json.dumps([[found[0].post_id, [mark.field for mark in found], run] for found, run in marks])
    arguments = [message, named, run_key(""), queue]
    return bool(_REMOVE(redis, [queue_list, CLEARS, MARKS], arguments))


def next_header_values(redis: Redis, lists: Sequence[str], header: str) -> list[float]:
    """Return a header's numeric value in the next message of each list that has one."""
    return [float(value) for value in _OLDEST(redis, lists, [header])]
