"""Scripts for the queue: look up and mark sent posts, and read headers of the next messages.

With pipelines of many small commands instead, redis-py would take two thirds of the publishing time.
"""

import json
import time
from collections.abc import Sequence
from typing import NamedTuple

from redis import Redis

from shared.keys import CLEARS, MARKS, RUNS, STORED, earlier_mark_key, earlier_result_key, run_key, tombstone_key
from shared.scripts import READS, SHRINKS, WRITES, Script, as_text
from shared.scripts.buckets import ID_BYTES, checksum
from shared.scripts.marks import (
    DIGEST_DIGITS,
    FORGET_MARKS,
    MARK_RECORDS,
    MAX_BUCKET_MARKS,
    MAX_TTL_HOURS,
    RUN_BYTES,
    SPLIT_MARKS,
)
from shared.scripts.records import RECORDS
from shared.scripts.runs import COUNT_PROGRESS

#: Status of a post in `lookup`; 0 if it is unknown.
SENT, PURGED = 1, 2
#: The id has marks of an earlier version, which are looked up separately.
_EARLIER = 3
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


#:   KEYS[1]: feedmill:sent-marks, string, and its buckets. Others: feedmill:sent:<id> (hash), feedmill:gone:<id>
#:   (string). ARGV[1], ARGV[2]: the prefixes of the others' names. ARGV[3]: a JSON list of the posts' ids. ARGV[4]: the
#:   marks' identities, because redis-py is slow with many arguments. ARGV[5]: the current hour.
#:
#: Returns a digit per post.
_LOOKUP: Script[str | bytes] = Script(
    "queue_lookup",
    READS,
    MARK_RECORDS
    + """
local ids, identities, hour = cjson.decode(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local count, half = buckets_of(KEYS[1])
local names, found, unknown = {}, {}, {}
for i = 1, #ids do names[i] = bucket_at(KEYS[1], identities, 1 + (i - 1) * IDENTITY, count, half) end
local buckets, purged = values_of('MGET', names), existing(ARGV[2], ids)
for i, records in ipairs(buckets) do
  local at = records and find_mark(records, sub(identities, 1 + (i - 1) * IDENTITY, i * IDENTITY))
  if purged and purged[i] then
    found[i] = 2
  elseif at and not expired(records, at, hour) then
    found[i] = 1
  else
    found[i] = 0
    unknown[#unknown + 1] = ids[i]
  end
end
local earlier, at = existing_earlier(ARGV[1], unknown), 0
if earlier then
  for i, status in ipairs(found) do
    if status == 0 then
      at = at + 1
      if earlier[at] then found[i] = 3 end
    end
  end
end
return table.concat(found)
""",
)
#:   KEYS[1+]: feedmill:sent:<id>, hash, of each post. ARGV: a field of each.
_LOOKUP_EARLIER: Script[list[int]] = Script(
    "queue_lookup_earlier",
    READS,
    """
local found = {}
for i, key in ipairs(KEYS) do found[i] = redis.call('HEXISTS', key, ARGV[i]) end
return found
""",
)
#:   KEYS[1]: feedmill:sent-marks, string, and its buckets. KEYS[2]: feedmill:runs, zset. ARGV[1]: a JSON list of the
#:   posts' ids. ARGV[2]: the marks' identities. ARGV[3]: current hour. ARGV[4]: hour of expiry. ARGV[5]: TTL, seconds.
#:   ARGV[6]: prefix of the names of tombstones. ARGV[7]: the posts' run, "" for none. ARGV[8]: prefix of the names of
#:   runs' keys. ARGV[9]: maximum runs listed.
_MARK: Script[None] = Script(
    "queue_mark",
    WRITES,
    MARK_RECORDS
    + COUNT_PROGRESS
    + f"""
local ids, identities, hour, expires = cjson.decode(ARGV[1]), ARGV[2], tonumber(ARGV[3]), struct.pack('>H', ARGV[4])
local count, half = buckets_of(KEYS[1])
local purged, names, buckets, latests, new = existing(ARGV[6], ids), {{}}, {{}}, {{}}, 0
-- A key lives an hour longer than its last mark, so that most writes need not extend its life.
local ttl = ARGV[5] + 3600
for i = 1, #ids do names[i] = bucket_at(KEYS[1], identities, 1 + (i - 1) * IDENTITY, count, half) end
for i, records in ipairs(values_of('MGET', names)) do
  buckets[names[i]], latests[names[i]] = records or '', records and sub(records, -2)
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
if new > 0 and ARGV[7] ~= '' then
  count_progress(KEYS[2], ARGV[8], ARGV[7], {{sent = new}}, ARGV[5], ARGV[9], true)
end
""",
)
#:   KEYS[1]: list of the queue. KEYS[2]: feedmill:clears, hash. KEYS[3]: feedmill:sent-marks, string, and its buckets.
#:   ARGV[1]: the message. ARGV[2]: a JSON list of [id, hash fields, run] per post.
#:   ARGV[3], ARGV[4]: prefixes of the names of earlier versions' marks and of runs' keys. ARGV[5]: the queue.
_REMOVE: Script[int] = Script(
    "queue_remove",
    SHRINKS,
    MARK_RECORDS
    + """
if redis.call('LREM', KEYS[1], -1, ARGV[1]) == 0 then return 0 end
redis.call('HINCRBY', KEYS[2], ARGV[5], 1)
for _, mark in ipairs(cjson.decode(ARGV[2])) do
  local removed, run = 0, ARGV[4] .. mark[3]
  local key, records, checksum = bucket_of(KEYS[3], mark[1])
  for _, field in ipairs(mark[2]) do
    local at = removed == 0 and find_mark(records, checksum .. run_checksum(mark[3]) .. digest_of(field))
    if at then
      shrink_bucket(key, without_mark(records, at))
      removed = 1
    elseif removed == 0 then
      removed = redis.call('HDEL', ARGV[3] .. mark[1], field)
    end
  end
  if removed == 1 and mark[3] ~= '' and tonumber(redis.call('HGET', run, 'sent') or 0) > 0 then
    redis.call('HINCRBY', run, 'sent', -1)
  end
end
return 1
""",
)
#:   KEYS[1]: feedmill:sent-marks, string, and its buckets. ARGV[1]: see `forget_marks`. ARGV[2]: a JSON list of ids.
_FORGET: Script[int] = Script(
    "queue_forget",
    SHRINKS,
    FORGET_MARKS
    + """
local forgotten = 0
for _, id in ipairs(cjson.decode(ARGV[2])) do
  if forget_marks(KEYS[1], ARGV[1], id) then forgotten = forgotten + 1 end
end
return forgotten
""",
)
#:   KEYS[1], KEYS[2]: feedmill:sent-marks and feedmill:stored, strings, and their buckets. ARGV[1]: a JSON list of ids.
#:   ARGV[2]: the ids' checksums. ARGV[3], ARGV[4]: prefixes of the names of an earlier version's marks and results.
#:
#: Returns a digit per id.
_KNOWN: Script[str | bytes] = Script(
    "queue_known",
    READS,
    MARK_RECORDS
    + RECORDS
    + f"""
local ids, said = cjson.decode(ARGV[1]), {{}}
local sent, classified = existing(ARGV[3], ids), existing(ARGV[4], ids)
for i, id in ipairs(ids) do
  local checksum = sub(ARGV[2], 1 + (i - 1) * {ID_BYTES}, i * {ID_BYTES})
  local marks = redis.call('GET', bucket_at(KEYS[1], checksum, 1, buckets_of(KEYS[1])))
  local known = sent and sent[i] or classified and classified[i] or marks and find_mark(marks, checksum)
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
    ids, identities = _packed(marks)
    hour = int(time.time()) // HOUR_S
    found = _LOOKUP(redis, [MARKS], [earlier_mark_key(""), tombstone_key(""), ids, identities, hour])
    statuses = list(map(int, as_text(found)))
    if _EARLIER in statuses:
        unsure = [at for at, status in enumerate(statuses) if status == _EARLIER]
        keys = [earlier_mark_key(marks[at].post_id) for at in unsure]
        sent = _LOOKUP_EARLIER(redis, keys, [marks[at].field for at in unsure])
        for at, status in zip(unsure, sent, strict=True):
            statuses[at] = status
    return statuses


def mark(redis: Redis, marks: Sequence[Mark], at: int, ttl: int, run: str = "", max_runs: int = 0) -> None:
    """Mark posts as sent, except posts that were purged meanwhile, and count new marks in the progress of their run.

    at: seconds since 1970. ttl: seconds, met to the hour. run: the posts'
    run; "" for none. max_runs: runs listed.
    """
    if not marks:
        return
    ids, identities = _packed(marks)
    expires = (at // HOUR_S + min(-(-ttl // HOUR_S), MAX_TTL_HOURS)) % 2**16
    arguments = [ids, identities, at // HOUR_S, expires, ttl, tombstone_key(""), run, run_key(""), max_runs]
    _MARK(redis, [MARKS, RUNS], arguments)


def _packed(marks: Sequence[Mark]) -> tuple[str, bytes]:
    """Return the ids as JSON, and the identities of the marks."""
    return json.dumps([mark.post_id for mark in marks]), b"".join([mark.identity for mark in marks])


def forget(redis: Redis, ids: Sequence[str]) -> int:
    """Delete all marks of these posts. Return the number of posts that had any."""
    return _FORGET(redis, [MARKS], [earlier_mark_key(""), json.dumps(ids)])


def known(redis: Redis, ids: Sequence[str]) -> list[str]:
    """Return the ids of posts that were sent or have results."""
    found: list[str] = []
    for start in range(0, len(ids), IDS_PER_CALL):
        batch = ids[start : start + IDS_PER_CALL]
        arguments = [json.dumps(batch), b"".join(map(checksum, batch)), earlier_mark_key(""), earlier_result_key("")]
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
    arguments = [message, named, earlier_mark_key(""), run_key(""), queue]
    return bool(_REMOVE(redis, [queue_list, CLEARS, MARKS], arguments))


def next_header_values(redis: Redis, lists: Sequence[str], header: str) -> list[float]:
    """Return a header's numeric value in the next message of each list that has one."""
    return [float(value) for value in _OLDEST(redis, lists, [header])]
