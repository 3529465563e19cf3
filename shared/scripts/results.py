"""Scripts for the results store (shared/results.py): write a micro-batch, look up results, and store scores."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from redis import Redis

from feedmill.shared.keys import (
    CONTEXTS,
    COUNTERS,
    DEAD_LETTERS,
    RESULTS_STREAM,
    RUNS,
    STORED,
    STREAM_SIZES,
    context_key,
    dead_letter_key,
    labels_key,
    run_key,
    tombstone_key,
)
from feedmill.shared.result_records import fingerprint_key
from feedmill.shared.scripts import READS, SHRINKS, WRITES, Script
from feedmill.shared.scripts.buckets import ARGUMENTS, RECORDS, SPLIT_BYTES, checksum
from feedmill.shared.scripts.runs import COUNT_PROGRESS
from feedmill.shared.settings import DAY_S, Settings

#: Seconds for which hourly counts by label are kept: the longest period of `feedmill report`.
LABEL_COUNTS_TTL_S = 30 * DAY_S
#: Seconds per hour.
HOUR_S = 3600
#: Share of `results_memory` that the results stream may take.
STREAM_SHARE = 0.45
#: Bytes of a stream entry beside the texts that were added; 30 to 180 were measured, most with a node per entry.
ENTRY_BYTES = 180
#: Recorded sizes of a full stream: it is trimmed by one of these parts. And parts that one call trims at most.
SIZES, TRIMMED_PARTS = 64, 4

#: Defines `bound_stream`, which trims the stream's oldest entries if it takes more than `limit` bytes.
#:
#: sizes: a list of "ID BYTES", oldest first: the bytes of all entries ever added, up to the entry ID. Its first item is
#: of the newest recorded entry that is gone, so the stream takes `total`, the bytes added so far, less these. Purged
#: entries count until they are older than that. A write never trims the newest part. before: entries of the stream
#: before the last `bytes` were added.
BOUND_STREAM = f"""
local function is_older(id, other)
  local time, number = string.match(id, '(%d+)-(%d+)')
  local other_time, other_number = string.match(other, '(%d+)-(%d+)')
  if time ~= other_time then return tonumber(time) < tonumber(other_time) end
  return tonumber(number) < tonumber(other_number)
end
local function bound_stream(stream, sizes, total, bytes, before, limit)
  local function size(index)
    local item = redis.call('LINDEX', sizes, index)
    if item then return string.match(item, '(%S+) (%d+)') end
  end
  if before == 0 or not size(0) then
    redis.call('DEL', sizes)
    redis.call('RPUSH', sizes, string.format('0-0 %.0f', total - bytes))
  end
  local _, newest = size(-1)
  if bytes > 0 and total - newest >= limit / {SIZES} then
    local id = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1][1]
    redis.call('RPUSH', sizes, string.format('%s %.0f', id, total))
  end
  for _ = 1, {TRIMMED_PARTS} do
    local _, gone = size(0)
    local id = size(1)
    if total - gone <= limit then break end
    if not size(2) then
      if bytes == 0 then -- the bound was lowered below the newest part
        redis.call('XTRIM', stream, 'MAXLEN', '=', math.floor(redis.call('XLEN', stream) * limit / (total - gone)))
        redis.call('DEL', sizes)
        redis.call('RPUSH', sizes, string.format('0-0 %.0f', total - limit))
      end
      break
    end
    redis.call('XTRIM', stream, 'MINID', id)
    redis.call('XDEL', stream, id)
    redis.call('LTRIM', sizes, 1, -1)
  end
  local first = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  while first and redis.call('LLEN', sizes) > 1 and is_older(size(1), first[1]) do redis.call('LTRIM', sizes, 1, -1) end
end
"""
#:   KEYS[1]  feedmill:results      stream    KEYS[2]  feedmill:counters  hash
#:   KEYS[3]  feedmill:dead         stream    KEYS[4]  prefix of feedmill:labels:<hour>, hash
#:   KEYS[5]  feedmill:runs       zset        KEYS[6]  feedmill:stored  string, and its buckets
#:   KEYS[7]  feedmill:contexts  zset         KEYS[8]  feedmill:stream-sizes  list
#:   KEYS[9+] feedmill:gone:<id> and feedmill:buried:<digest>, string, of each dead letter
#:   feedmill:gone:<id> and feedmill:context:<digest>, string, of each result; feedmill:run:<name>, hash, of each run
#:   ARGV[1]  ttl of a result, seconds        ARGV[2]  length of the results stream
#:   ARGV[3]  length of the dead-letter stream  ARGV[4]  ttl of counts by label, seconds
#:   ARGV[5]  maximum labels counted per hour
#:   ARGV[6]  prefix of the names of tombstones
#:   ARGV[7]  ids, labels and runs ("" for none) of the results, as JSON: redis-py is slow with many arguments
#:   ARGV[8], ARGV[9], ARGV[10]  prefix of the names of runs' keys, their ttl in seconds, and maximum runs listed
#:   ARGV[11] records of the results, whose expiry is set here    ARGV[12] contexts by key, as a JSON object
#:   ARGV[13] number of results between two checks of their memory    ARGV[14] bytes that the stream may take
#:   ARGV[15+] classification and post of each result; then id, letter and run of each dead letter
#:
#: Returns the numbers of new results and of trimmed dead letters, and 1 if a check of the memory is due, else 0.
_WRITE: Script[tuple[int, int, int]] = Script(
    "results_write",
    WRITES,
    RECORDS
    + COUNT_PROGRESS
    + BOUND_STREAM
    + f"""
local results, new, failed, gone, bytes, labels, runs = cjson.decode(ARGV[7]), 0, 0, 0, 0, {{}}, {{}}
local blob, now, at = ARGV[11], tonumber(redis.call('TIME')[1]), 1
local expiry = struct.pack('>I4', now + ARGV[1])
local function count(run, what)
  if run ~= '' then
    local counts = runs[run] or {{}}
    runs[run], counts[what] = counts, (counts[what] or 0) + 1
  end
end
local length, dead = redis.call('XLEN', KEYS[1]), redis.call('XLEN', KEYS[3])
local ids, labelled, run_of, total = results[1], results[2], results[3], #results[1]
-- added: a bucket's old and new records. written: the records' checksums and keys.
local names, records, keys, buckets, added, written = {{}}, {{}}, {{}}, {{}}, {{}}, {{}}
local size, _
if total > 0 then
  local count, half = buckets_of(KEYS[6])
  for i = 1, total do
    names[i] = bucket_at(KEYS[6], blob, at, count, half)
    _, size, _, keys[i] = read('>c4I4I1c16', blob, at)
    records[i], at = sub(blob, at, at + size - 5) .. expiry, at + size
  end
  for i, held in ipairs(values_of('MGET', names)) do buckets[names[i]] = held or '' end
end
local purged = existing(ARGV[6], ids)
for i, record in ipairs(records) do
  if purged and purged[i] then
    gone = gone + 1
  else
    local name, key, checksum = names[i], keys[i], sub(record, 1, 4)
    local held, identity = buckets[name], checksum .. key
    local known = written[identity] or find_record(held, checksum, key)
    if known and known ~= true and expires_at(held, known) <= now then
      buckets[name], known = without_record(held, known), nil
    end
    if not known then
      local label, text, post = labelled[i], ARGV[13 + 2 * i], ARGV[14 + 2 * i]
      if i < total then
        redis.call('XADD', KEYS[1], '*', 'id', ids[i], 'classification', text, 'post', post)
      else
        redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', 'id', ids[i], 'classification', text, 'post', post)
      end
      new, bytes = new + 1, bytes + {ENTRY_BYTES} + #ids[i] + #text + #post
      labels[label] = (labels[label] or 0) + 1
      count(run_of[i], 'stored')
      local bucket = added[name] or {{''}}
      added[name], bucket[#bucket + 1], written[identity] = bucket, record, true
    end
  end
end
-- A key lives until `grain` seconds after the expiry of its last record, so that most writes need not extend its life.
local grain = math.max(1, math.floor(ARGV[1] / 64))
local ttl, period = ARGV[1] + grain, math.floor((now + ARGV[1]) / grain)
for name, bucket in pairs(added) do
  local held, start = buckets[name], 1
  local latest = held == '' and 0 or read('>I4', held, #held - 3)
  while start <= #held and expires_at(held, start) <= now do start = start + length_at(held, start) end
  bucket[1] = start > 1 and sub(held, start) or held
  if math.floor(latest / grain) == period then
    redis.call('SET', name, table.concat(bucket), 'KEEPTTL')
  else
    redis.call('SET', name, table.concat(bucket), 'EX', ttl)
  end
end
for key, context in pairs(cjson.decode(ARGV[12])) do
  redis.call('SET', key, context, 'EX', ARGV[1] + 3600)
  redis.call('ZADD', KEYS[7], 'GT', now + ARGV[1], key)
end
if total > 0 then redis.call('EXPIRE', KEYS[7], ARGV[1] + 3600) end
if new > 0 then
  split_buckets(KEYS[6], new, {SPLIT_BYTES}, nil, ttl)
end
if new > 0 then
  local hour = KEYS[4] .. math.floor(now / {HOUR_S})
  local counted, sums, room = {{}}, {{}}, ARGV[5] - redis.call('HLEN', hour)
  for label in pairs(labels) do counted[#counted + 1] = label end
  for i, sum in ipairs(values_of('HMGET', counted, hour)) do
    if not sum then room = room - 1 end
    if sum or room >= 0 then
      sums[#sums + 1] = counted[i]
      sums[#sums + 1] = (sum or 0) + labels[counted[i]]
    end
  end
  for start = 1, #sums, {ARGUMENTS} do
    redis.call('HSET', hour, unpack(sums, start, math.min(start + {ARGUMENTS - 1}, #sums)))
  end
  redis.call('EXPIRE', hour, ARGV[4])
end
local counts = {{stored = new, repeated = total - new - gone}}
local at, due = 15 + 2 * total, 0
for i = 9, #KEYS, 2 do
  local entry = redis.call('GET', KEYS[i + 1])
  if redis.call('EXISTS', KEYS[i]) == 1 then
    gone = gone + 1
  elseif not entry or #redis.call('XRANGE', KEYS[3], entry, entry) == 0 then
    entry = redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[3], '*', 'id', ARGV[at], 'letter', ARGV[at + 1])
    redis.call('SET', KEYS[i + 1], entry, 'EX', ARGV[1])
    failed = failed + 1
    count(ARGV[at + 2], 'failed')
  end
  at = at + 3
end
for run, found in pairs(runs) do
  count_progress(KEYS[5], ARGV[8], run, found, ARGV[9], ARGV[10])
end
if new > 0 then
  local written = redis.call('HINCRBY', KEYS[2], 'stream_bytes', bytes)
  bound_stream(KEYS[1], KEYS[8], written, bytes, length, tonumber(ARGV[14]))
end
counts.failed, counts.gone, counts.trimmed = failed, gone, length + new - redis.call('XLEN', KEYS[1])
counts.dead_trimmed = dead + failed - redis.call('XLEN', KEYS[3])
for name, count in pairs(counts) do
  if count > 0 then
    local sum = redis.call('HINCRBY', KEYS[2], name, count)
    if name == 'stored' and math.floor(sum / ARGV[13]) > math.floor((sum - count) / ARGV[13]) then due = 1 end
  end
end
return {{new, counts.dead_trimmed, due}}
""",
)
#:   KEYS[1]  feedmill:results  stream    KEYS[2]  feedmill:counters  hash    KEYS[3]  feedmill:stream-sizes  list
#:   ARGV[1]  bytes that the stream may take
#:
#: Returns the number of trimmed entries, which readers notice by their count (shared/scripts/stream.py).
_TRIM: Script[int] = Script(
    "results_trim",
    SHRINKS,
    BOUND_STREAM
    + """
local length, total = redis.call('XLEN', KEYS[1]), tonumber(redis.call('HGET', KEYS[2], 'stream_bytes') or 0)
bound_stream(KEYS[1], KEYS[3], total, 0, length, tonumber(ARGV[1]))
local trimmed = length - redis.call('XLEN', KEYS[1])
if trimmed > 0 then redis.call('HINCRBY', KEYS[2], 'trimmed', trimmed) end
return trimmed
""",
)
#:   KEYS[1]  feedmill:counters  hash     KEYS[2]  feedmill:stored  string, and its buckets
#:   ARGV[1]  checksum of the id and key of the fingerprint of each post
#:
#: Returns 1 or 0 for each post, as text; and the records of those with 1.
_FIND: Script[Any] = Script(
    "results_find",
    SHRINKS,
    RECORDS
    + """
local keys, now = ARGV[1], tonumber(redis.call('TIME')[1])
local known, names, found = {}, {}, {}
local count, half = buckets_of(KEYS[2])
for i = 1, #keys / 20 do names[i] = bucket_at(KEYS[2], keys, 20 * i - 19, count, half) end
for i, held in ipairs(values_of('MGET', names)) do
  local at = held and find_record(held, sub(keys, 20 * i - 19, 20 * i - 16), sub(keys, 20 * i - 15, 20 * i))
  if at and expires_at(held, at) > now then
    known[i], found[#found + 1] = 1, sub(held, at, at + length_at(held, at) - 1)
  else
    known[i] = 0
  end
end
-- pcall: a full Redis refuses it.
if #found > 0 then redis.pcall('HINCRBY', KEYS[1], 'answered', #found) end
return {table.concat(known), table.concat(found)}
""",
)
#:   KEYS[1]  feedmill:stored  string, and its buckets    ARGV[1]  the id
#:
#: Returns the records of an id that have not expired.
_GET: Script[bytes] = Script(
    "results_get",
    READS,
    RECORDS
    + """
local _, records = bucket_of(KEYS[1], ARGV[1])
local results, score = records_of(records, ARGV[1])
local found, now = {}, tonumber(redis.call('TIME')[1])
if score then results[#results + 1] = score end
for _, at in ipairs(results) do
  if expires_at(records, at) > now then found[#found + 1] = sub(records, at, at + length_at(records, at) - 1) end
end
return table.concat(found)
""",
)
#:   KEYS[1]  feedmill:stored  string, and its buckets    ARGV  the id and the score's record of each
_REFRESH: Script[int] = Script(
    "results_refresh",
    WRITES,
    RECORDS
    + """
local refreshed = 0
for i = 1, #ARGV, 2 do
  local key, records = bucket_of(KEYS[1], ARGV[i])
  local results, score = records_of(records, ARGV[i])
  if #results > 0 then
    local expires = 0
    for _, at in ipairs(results) do expires = math.max(expires, expires_at(records, at)) end
    if score then records = without_record(records, score) end
    local record = sub(ARGV[i + 1], 1, -5) .. struct.pack('>I4', expires)
    redis.call('SET', key, records .. record, 'KEEPTTL')
    refreshed = refreshed + 1
  end
end
return refreshed
""",
)
#:   KEYS[1]  feedmill:stored  string, and its buckets    ARGV[1]  ids, as JSON
_FORGET: Script[int] = Script(
    "results_forget",
    SHRINKS,
    RECORDS
    + """
local forgotten = 0
for _, id in ipairs(cjson.decode(ARGV[1])) do
  local key, records = bucket_of(KEYS[1], id)
  local results, score = records_of(records, id)
  if #results > 0 or score then
    local kept, at = {}, 1
    while at <= #records do
      local size = length_at(records, at)
      if id_at(records, at) ~= id then kept[#kept + 1] = sub(records, at, at + size - 1) end
      at = at + size
    end
    shrink_bucket(key, table.concat(kept))
    forgotten = forgotten + 1
  end
end
return forgotten
""",
)


class NewResults(NamedTuple):
    """Results to write, by column."""

    ids: list[str]
    labels: list[str]
    #: "" for none.
    runs: list[str]
    #: See shared/result_records.py.
    records: list[bytes]
    #: For the stream: each classification and its post, as JSON.
    entries: list[bytes]


def prepare_write(
    redis: Redis,
    settings: Settings,
    results: NewResults,
    contexts: Mapping[str, str],
    letters: Sequence[tuple[str, str, str, str]],
    max_labels: int,
    max_runs: int,
    check_interval: int,
) -> tuple[Callable[[], tuple[int, int, int]], int]:
    """Return a function that writes a micro-batch and may be called repeatedly, and the number of bytes that it sends.

    The function sets each result if absent, and appends new ones to the stream. It skips posts with a tombstone: a
    worker may have held a post when it was purged. It writes a dead letter unless one with its digest is in the stream.
    It returns the numbers of new results and of trimmed dead letters, and 1 if `check_interval` results were stored
    since it last returned 1, by whichever worker.

    contexts: the results' contexts, by key, as JSON. letters: post id, digest, JSON and run of each. max_labels:
    labels counted per hour. max_runs: runs listed.
    """
    keys = [RESULTS_STREAM, COUNTERS, DEAD_LETTERS, labels_key(""), RUNS, STORED, CONTEXTS, STREAM_SIZES]
    arguments: list[Any] = [
        settings.results_ttl,
        settings.results_stream_length,
        settings.dead_letters_length,
        LABEL_COUNTS_TTL_S,
        max_labels,
        tombstone_key(""),
        json.dumps(results[:3]),
        run_key(""),
        settings.sent_ttl,
        max_runs,
        b"".join(results.records),
        json.dumps({context_key(key): context for key, context in contexts.items()}),
        check_interval,
        stream_limit(settings),
    ]
    # Encoded once, for all repetitions, and to bytes: a Python string can take four bytes per character.
    arguments = [each.encode() if isinstance(each, str) else each for each in arguments]
    arguments += results.entries
    size = sum(map(len, results.entries)) + sum(map(len, results.records))
    for post_id, digest, letter, run in letters:
        keys += [tombstone_key(post_id), dead_letter_key(digest)]
        arguments += [post_id.encode(), letter.encode(), run.encode()]
        size += len(letter)
    return partial(_WRITE, redis, keys, arguments), size


def stream_limit(settings: Settings) -> int:
    """Return the bytes that the results stream may take."""
    return int(STREAM_SHARE * settings.results_memory)


def trim(redis: Redis, settings: Settings) -> None:
    """Trim the stream to its limit, which the next write does as well, unless Redis is full."""
    while _TRIM(redis, [RESULTS_STREAM, COUNTERS, STREAM_SIZES], [stream_limit(settings)]):
        pass


class Found(NamedTuple):
    """Stored results, in the order of the posts that have one."""

    #: Numbers of these posts, from 0.
    numbers: list[int]
    records: bytes


def find(redis: Redis, wanted: Sequence[tuple[str, str]]) -> Found:
    """Return the stored result of each (post id, fingerprint)."""
    keys = b"".join([checksum(post_id) + fingerprint_key(fingerprint) for post_id, fingerprint in wanted])
    known, records = _FIND.raw(redis, [COUNTERS, STORED], [keys])
    numbers = [number for number, digit in enumerate(known) if digit == ord("1")]
    return Found(numbers, records)


def get(redis: Redis, post_id: str) -> bytes:
    """Return the records of a post."""
    records: bytes = _GET.raw(redis, [STORED], [post_id])
    return records


def refresh(redis: Redis, scores: Sequence[tuple[str, bytes]]) -> int:
    """Store the scores of posts that have results. Return the number of these posts.

    scores: post id and the score's record, of each.
    """
    return _REFRESH(redis, [STORED], [part for score in scores for part in score])


def forget(redis: Redis, ids: Sequence[str]) -> int:
    """Delete all results of these posts. Return the number of posts that had any."""
    return _FORGET(redis, [STORED], [json.dumps(ids)])
