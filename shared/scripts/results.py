"""Scripts for the results store (shared/results.py): write a micro-batch, look up results, and store scores."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from redis import Redis

from shared.keys import (
    COUNTERS,
    DEAD_LETTERS,
    RESULTS_STREAM,
    RUNS,
    dead_letter_key,
    labels_key,
    result_key,
    run_key,
    tombstone_key,
)
from shared.scripts import Script
from shared.scripts.runs import COUNT_PROGRESS
from shared.settings import Settings

#: Field with the latest score, in the hash of a post's classifications. No fingerprint equals it: they are hex.
SCORE = "score"
#: Fields after which a post's expired classifications are deleted: an id can occur in any number of runs, and each new
#: result extends the lifetime of the whole hash.
PRUNE_FIELDS = 32

#:   KEYS[1]  feedmill:results      stream    KEYS[2]  feedmill:counters  hash
#:   KEYS[3]  feedmill:dead         stream    KEYS[4]  feedmill:labels:<hour>  hash
#:   KEYS[5]  feedmill:runs       zset
#:   KEYS[6+] feedmill:gone:<id> and feedmill:buried:<digest>, string, of each dead letter
#:   feedmill:result:<id>  hash, and feedmill:gone:<id>, string, of each result; feedmill:run:<name>  hash, of each run
#:   ARGV[1]  ttl of a result, seconds        ARGV[2]  length of the results stream
#:   ARGV[3]  length of the dead-letter stream  ARGV[4]  ttl of counts by label, seconds
#:   ARGV[5]  maximum labels counted per hour
#:   ARGV[6], ARGV[7]  prefixes of the names of each result's two keys
#:   ARGV[8]  id, fingerprint, label, run ("" for none) and whether the run is the id's scope, of each result, as one
#:   JSON text: redis-py is slow with many arguments
#:   ARGV[9], ARGV[10], ARGV[11]  prefix of the names of runs' keys, their ttl in seconds, and maximum runs listed
#:   ARGV[12], ARGV[13]  PRUNE_FIELDS, and SCORE
#:   ARGV[14+] classification and post of each result; then id, letter and run of each dead letter
_WRITE: Script[tuple[int, int]] = Script(
    COUNT_PROGRESS
    + """
local results, new, failed, gone, labels, runs = cjson.decode(ARGV[8]), 0, 0, 0, {}, {}
local function prune(key)
  local fields, oldest = redis.call('HGETALL', key), tonumber(redis.call('TIME')[1]) - tonumber(ARGV[1])
  for i = 1, #fields, 2 do
    local at = fields[i] ~= ARGV[13] and tonumber(string.match(fields[i + 1], '"classified_at":([%d.e+]+)'))
    if at and at < oldest then redis.call('HDEL', key, fields[i]) end
  end
end
local function count(run, what)
  if run ~= '' then
    local counts = runs[run] or {}
    runs[run], counts[what] = counts, (counts[what] or 0) + 1
  end
end
local length, dead = redis.call('XLEN', KEYS[1]), redis.call('XLEN', KEYS[3])
for i, result in ipairs(results) do
  local id, fingerprint, label, run, scoped = unpack(result)
  local key, classification, post = ARGV[6] .. id, ARGV[12 + 2 * i], ARGV[13 + 2 * i]
  if redis.call('EXISTS', ARGV[7] .. id) == 1 then
    gone = gone + 1
  else
    if redis.call('HSETNX', key, fingerprint, classification) == 1 then
      redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', 'id', id, 'classification', classification, 'post', post)
      new = new + 1
      labels[label] = (labels[label] or 0) + 1
      count(run, 'stored')
      -- One result in sixteen checks, by the first digit of its fingerprint.
      if scoped and string.byte(fingerprint) == 48 and redis.call('HLEN', key) > tonumber(ARGV[12]) then prune(key) end
    end
    redis.call('EXPIRE', key, ARGV[1])
  end
end
for label, count in pairs(labels) do
  if redis.call('HEXISTS', KEYS[4], label) == 1 or redis.call('HLEN', KEYS[4]) < tonumber(ARGV[5]) then
    redis.call('HINCRBY', KEYS[4], label, count)
  end
end
if new > 0 then redis.call('EXPIRE', KEYS[4], ARGV[4]) end
local counts = {stored = new, repeated = #results - new - gone}
local at = 14 + 2 * #results
for i = 6, #KEYS, 2 do
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
  count_progress(KEYS[5], ARGV[9], run, found, ARGV[10], ARGV[11])
end
counts.failed, counts.gone, counts.trimmed = failed, gone, length + new - redis.call('XLEN', KEYS[1])
counts.dead_trimmed = dead + failed - redis.call('XLEN', KEYS[3])
for name, count in pairs(counts) do
  if count > 0 then redis.call('HINCRBY', KEYS[2], name, count) end
end
return {new, counts.dead_trimmed}
"""
)
#:   KEYS[1]  feedmill:counters  hash     feedmill:result:<id>  hash of each post
#:   ARGV[1]  prefix of the latter's names
#:   ARGV[2]  id and fingerprint of each post, as one JSON text: redis-py is slow with many arguments
_FIND: Script[list[str | None]] = Script("""
local found, answered = {}, 0
for i, post in ipairs(cjson.decode(ARGV[2])) do
  found[i] = redis.call('HGET', ARGV[1] .. post[1], post[2])
  if found[i] then answered = answered + 1 end
end
if answered > 0 then redis.pcall('HINCRBY', KEYS[1], 'answered', answered) end -- pcall: a full Redis refuses it
return found
""")
#:   KEYS[1+] feedmill:result:<id>  hash      ARGV[1]  SCORE, the field    ARGV[2+] score and time of each, as JSON
_REFRESH: Script[int] = Script("""
local refreshed = 0
for i = 1, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 then
    redis.call('HSET', KEYS[i], ARGV[1], ARGV[i + 1])
    refreshed = refreshed + 1
  end
end
return refreshed
""")


def prepare_write(
    redis: Redis,
    settings: Settings,
    results: Sequence[tuple[str, str, str, str, bool, str, str]],
    letters: Sequence[tuple[str, str, str, str]],
    hour: int,
    max_labels: int,
    max_runs: int,
) -> tuple[Callable[[], tuple[int, int]], int]:
    """Return a function that writes a micro-batch and may be called repeatedly, and the number of bytes that it sends.

    The function sets each result if absent, and appends new ones to the stream. It skips posts with a tombstone: a
    worker may have held a post when it was purged. It writes a dead letter unless one with its digest is in the stream.
    It returns the numbers of new results and of trimmed dead letters.

    results: post id, fingerprint, label, run ("" for none), whether the run is the id's scope, classification and post
    of each, the latter two as JSON. letters: post id, digest, JSON and run of each. hour: hours since 1970, of the
    counts by label. max_labels: labels counted per hour. max_runs: runs listed.
    """
    keys = [RESULTS_STREAM, COUNTERS, DEAD_LETTERS, labels_key(hour), RUNS]
    arguments: list[Any] = [
        settings.results_ttl,
        settings.results_stream_length,
        settings.dead_letters_length,
        settings.label_counts_ttl,
        max_labels,
        result_key(""),
        tombstone_key(""),
        json.dumps([each[:5] for each in results]),
        run_key(""),
        settings.sent_ttl,
        max_runs,
        PRUNE_FIELDS,
        SCORE,
    ]
    for result in results:
        arguments += result[5:]
    for post_id, digest, letter, run in letters:
        keys += [tombstone_key(post_id), dead_letter_key(digest)]
        arguments += [post_id, letter, run]
    # Encoded once, for all repetitions, and to bytes: a Python string can take four bytes per character.
    arguments = [each.encode() if isinstance(each, str) else each for each in arguments]
    return partial(_WRITE, redis, keys, arguments), sum(len(each) for each in arguments if isinstance(each, bytes))


def find(redis: Redis, wanted: Sequence[tuple[str, str]]) -> list[str | None]:
    """Return the stored classification of each (post id, fingerprint), as JSON, or None."""
    return _FIND(redis, [COUNTERS], [result_key(""), json.dumps(wanted)]) if wanted else []


def refresh(redis: Redis, scores: Mapping[str, int], at: float) -> int:
    """Store the scores of posts that have results. Return the number of these posts. at: seconds since 1970."""
    keys = [result_key(post_id) for post_id in scores]
    return _REFRESH(redis, keys, [SCORE, *(json.dumps({"score": score, "at": at}) for score in scores.values())])
