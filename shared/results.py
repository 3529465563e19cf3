"""The results store: each result exactly once by fingerprint, and a stream for readers.

One script writes a micro-batch. It sets each classification if absent, and appends only new ones to the stream. So a
message that is delivered twice, or to two workers at once, leaves one result and one stream entry. A post has at most
one dead letter per request while the first one exists. Independent of models and Celery.
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, cast

from redis import Redis

from shared.keys import COUNTERS, DEAD_LETTERS, RESULTS_STREAM, dead_letter_key, labels_key, result_key, tombstone_key
from shared.messages import Classification, DeadLetter, Post, digest
from shared.replay import Replay
from shared.settings import DEFAULT_QUEUE, PREFIX, Settings

logger = logging.getLogger(__name__)

#: Writes one micro-batch. Skips posts with a tombstone: a worker may have held a post when it was purged.
#:
#:   KEYS[1]  feedmill:results      stream    KEYS[2]  feedmill:counters  hash
#:   KEYS[3]  feedmill:dead         stream    KEYS[4]  feedmill:labels:<hour>  hash
#:   KEYS[5+] feedmill:gone:<id> and feedmill:buried:<digest>, string, of each dead letter
#:   feedmill:result:<id>  hash, and feedmill:gone:<id>, string, of each result
#:   ARGV[1]  ttl of a result, seconds        ARGV[2]  length of the results stream
#:   ARGV[3]  length of the dead-letter stream  ARGV[4]  ttl of counts by label, seconds
#:   ARGV[5]  maximum labels counted per hour
#:   ARGV[6], ARGV[7]  prefixes of the names of each result's two keys
#:   ARGV[8]  id, fingerprint and label of each result, as one JSON text: redis-py is slow with many arguments
#:   ARGV[9+] classification and post of each result; then id and letter of each dead letter
#:
#: Returns the number of new results, and the number of trimmed dead letters.
WRITE = """
local results, new, failed, gone, labels = cjson.decode(ARGV[8]), 0, 0, 0, {}
local length, dead = redis.call('XLEN', KEYS[1]), redis.call('XLEN', KEYS[3])
for i, result in ipairs(results) do
  local id, fingerprint, label = unpack(result)
  local key, classification, post = ARGV[6] .. id, ARGV[7 + 2 * i], ARGV[8 + 2 * i]
  if redis.call('EXISTS', ARGV[7] .. id) == 1 then
    gone = gone + 1
  else
    if redis.call('HSETNX', key, fingerprint, classification) == 1 then
      redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', 'id', id, 'classification', classification, 'post', post)
      new = new + 1
      labels[label] = (labels[label] or 0) + 1
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
local at = 9 + 2 * #results
for i = 5, #KEYS, 2 do
  local entry = redis.call('GET', KEYS[i + 1])
  if redis.call('EXISTS', KEYS[i]) == 1 then
    gone = gone + 1
  elseif not entry or #redis.call('XRANGE', KEYS[3], entry, entry) == 0 then
    entry = redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[3], '*', 'id', ARGV[at], 'letter', ARGV[at + 1])
    redis.call('SET', KEYS[i + 1], entry, 'EX', ARGV[1])
    failed = failed + 1
  end
  at = at + 2
end
counts.failed, counts.gone, counts.trimmed = failed, gone, length + new - redis.call('XLEN', KEYS[1])
counts.dead_trimmed = dead + failed - redis.call('XLEN', KEYS[3])
for name, count in pairs(counts) do
  if count > 0 then redis.call('HINCRBY', KEYS[2], name, count) end
end
return {new, counts.dead_trimmed}
"""

#: Looks up stored results.
#:
#:   KEYS[1]  feedmill:counters  hash     feedmill:result:<id>  hash of each post
#:   ARGV[1]  prefix of the latter's names
#:   ARGV[2]  id and fingerprint of each post, as one JSON text: redis-py is slow with many arguments
#:
#: Returns the classification of each post, or false.
FIND = """
local found, answered = {}, 0
for i, post in ipairs(cjson.decode(ARGV[2])) do
  found[i] = redis.call('HGET', ARGV[1] .. post[1], post[2])
  if found[i] then answered = answered + 1 end
end
if answered > 0 then redis.pcall('HINCRBY', KEYS[1], 'answered', answered) end -- pcall: a full Redis refuses it
return found
"""

#: Stores the scores of posts that have results.
#:
#:   KEYS[1+] feedmill:result:<id>  hash      ARGV[1]  SCORE, the field    ARGV[2+] score and time of each, as JSON
#:
#: Returns the number of posts that have results.
REFRESH = """
local refreshed = 0
for i = 1, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 then
    redis.call('HSET', KEYS[i], ARGV[1], ARGV[i + 1])
    refreshed = refreshed + 1
  end
end
return refreshed
"""

#: Seconds per hour.
HOUR_S = 3600
#: Maximum labels counted per hour, because applications can send any number of labels. Further ones are not counted.
MAX_LABELS_PER_HOUR = 1000
#: Field with the latest score, in the hash of a post's classifications. Fingerprints are hex, so none equals it.
SCORE = "score"
#: Scores per script call. Redis is blocked during a call.
SCORES_PER_CALL = 100
#: Dead letters per script call. Redis is blocked during a call.
DEAD_LETTERS_PER_CALL = 50


class Result(NamedTuple):
    """A post and its classification. Stream entries contain only the start of the post's body."""

    post: Post
    classification: Classification


class Counters(NamedTuple):
    """Numbers of posts since the store was created."""

    stored: int = 0
    #: Classified although the result was already stored, for example after a redelivery.
    repeated: int = 0
    failed: int = 0
    #: Classified or failed after they were purged. Nothing was stored.
    gone: int = 0
    #: Answered with the stored result.
    answered: int = 0
    #: Results trimmed from the stream. Readers that missed them are notified (feedmill/reading/results.py).
    trimmed: int = 0
    #: Dead letters trimmed from their stream, and lost.
    dead_trimmed: int = 0


#: Entries per page. One dead letter can be half a megabyte.
PAGE_SIZE = 20


class Score(NamedTuple):
    """A post's score on its site at the time `at`, in seconds since 1970."""

    score: int
    at: float


class ResultsStore:
    """The store of results and dead letters in Redis. Thread-safe.

    With a client of `shared.broker.connect`, writes of the last seconds are repeated when Redis may have lost them
    (shared/replay.py).
    """

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._redis = redis
        self._settings = settings
        self._write: Any = redis.register_script(WRITE)
        self._refresh: Any = redis.register_script(REFRESH)
        self._find: Any = redis.register_script(FIND)
        self._replay = Replay(redis)

    def find(self, wanted: Sequence[tuple[str, str]]) -> list[Classification | None]:
        """Return the stored result of each (post id, fingerprint), or None. Raises redis.exceptions.RedisError."""
        found = self._find(keys=[COUNTERS], args=[result_key(""), json.dumps(wanted)]) if wanted else []
        return [None if each is None else Classification.model_validate_json(each) for each in found]

    def write(self, results: Sequence[Result], dead: Sequence[DeadLetter] = ()) -> int:
        """Store a micro-batch's results and dead letters. Return the number of new results.

        Skips purged posts (shared/purge.py). Idempotent, except that counters can increase twice. Raises
        redis.exceptions.RedisError.
        """
        if not results and not dead:
            return 0
        new, trimmed = self._replay.write(*self._write_call(results, dead[:DEAD_LETTERS_PER_CALL]))
        for start in range(DEAD_LETTERS_PER_CALL, len(dead), DEAD_LETTERS_PER_CALL):
            trimmed += self._replay.write(*self._write_call([], dead[start : start + DEAD_LETTERS_PER_CALL]))[1]
        if trimmed:
            logger.warning(
                "trimmed the %d oldest dead letters: their stream is full. Retry or drop dead letters (`feedmill dead "
                "list`), or raise %sDEAD_LETTERS_LENGTH",
                trimmed,
                PREFIX,
            )
        return int(new)

    def keep(self, found: Sequence[Result]) -> None:
        """Keep stored results that answered a message, to repeat their writes if Redis loses them."""
        if found:
            self._replay.keep(*self._write_call(found, ()))

    def catch_up(self) -> None:
        """Repeat writes that Redis may have lost. Raises redis.exceptions.RedisError."""
        self._replay.check()

    def _write_call(self, results: Sequence[Result], dead: Sequence[DeadLetter]) -> tuple[Callable[[], Any], int]:
        """Return the script call, and the number of bytes that it sends."""
        settings = self._settings
        keys = [RESULTS_STREAM, COUNTERS, DEAD_LETTERS, labels_key(int(time.time() // HOUR_S))]
        arguments: list[Any] = [
            settings.results_ttl,
            settings.results_stream_length,
            settings.dead_letters_length,
            settings.label_counts_ttl,
            MAX_LABELS_PER_HOUR,
            result_key(""),
            tombstone_key(""),
            json.dumps([(post.id, found.fingerprint, found.label) for post, found in results]),
        ]
        for post, found in results:
            arguments += [found.model_dump_json(), self._clipped(post)]
        for letter in dead:
            # Posts sent without an id get "", which is not a valid id and cannot be purged.
            post_id = (letter.id or "").strip()
            keys += [tombstone_key(post_id), dead_letter_key(dead_letter_digest(letter))]
            arguments += [post_id, letter.model_dump_json()]
        # Encoded only once, to bytes: a Python string can take four bytes per character.
        arguments = [each.encode() if isinstance(each, str) else each for each in arguments]
        return partial(self._write, keys=keys, args=arguments), sum(len(each) for each in arguments[7:])

    def _clipped(self, post: Post) -> str:
        """Return a post as JSON for its stream entry, with its body truncated."""
        if len(post.body) > self._settings.stream_body:
            # model_copy skips validation, so a post whose body is truncated to nothing is valid.
            post = post.model_copy(update={"body": post.body[: self._settings.stream_body]})
        return post.model_dump_json(exclude_defaults=True)

    def get(self, post_id: str) -> list[Classification]:
        """Return a post's classifications that have not expired, oldest first: one per text, model and label set."""
        found: Any = self._redis.hgetall(result_key(post_id))
        found.pop(SCORE, None)
        classifications = map(Classification.model_validate_json, found.values())
        return sorted(classifications, key=lambda classification: classification.classified_at)

    def refresh_scores(self, scores: Mapping[str, int], at: float) -> int:
        """Store the scores that posts had at the time `at`, in seconds since 1970. Return how many have results.

        Skips posts without results, and does not extend the lifetime of results. Idempotent. Raises
        redis.exceptions.RedisError.
        """
        refreshed = 0
        remaining = iter(scores.items())
        while batch := list(islice(remaining, SCORES_PER_CALL)):
            keys = [result_key(post_id) for post_id, _ in batch]
            noted = [json.dumps({"score": score, "at": at}) for _, score in batch]
            refreshed += int(self._refresh(keys=keys, args=[SCORE, *noted]))
        return refreshed

    def score(self, post_id: str) -> Score | None:
        """Return the latest score of a post with results; None if `refresh_scores` never stored one."""
        found: Any = self._redis.hget(result_key(post_id), SCORE)
        return None if found is None else Score(**json.loads(found))

    def latest(self, count: int) -> list[Result]:
        """Return the newest `count` results of the stream, oldest first."""
        return [read_entry(fields) for _, fields in self._newest(RESULTS_STREAM, count)]

    def _newest(self, stream: str, count: int) -> list[tuple[str, dict[str, str]]]:
        """Return (id, fields) of a stream's newest entries, oldest first."""
        return list(newest_first(self._redis, stream, count))[::-1]

    def dead_letters(self, count: int) -> list[DeadLetter]:
        """Return the newest `count` dead letters, oldest first."""
        return [DeadLetter.model_validate_json(fields["letter"]) for _, fields in self._newest(DEAD_LETTERS, count)]

    def labels(self, hours: int) -> dict[int, dict[str, int]]:
        """Return the number of new results by label, for each of the last hours with any: hours since 1970 -> label."""
        now = int(time.time() // HOUR_S)
        wanted = range(now - hours + 1, now + 1)
        pipe: Any = self._redis.pipeline(transaction=False)
        for hour in wanted:
            pipe.hgetall(labels_key(hour))
        found = zip(wanted, pipe.execute(), strict=True)
        return {hour: {label: int(count) for label, count in counts.items()} for hour, counts in found if counts}

    def counters(self) -> Counters:
        """Return the counters since the store was created."""
        found: Any = self._redis.hgetall(COUNTERS)
        return Counters(**{name: int(found.get(name, 0)) for name in Counters._fields})


def newest_first(
    redis: Redis, stream: str, count: int | None = None, since: str = "-"
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (id, fields) of a stream's entries, newest first, holding PAGE_SIZE of them in memory.

    count: maximum number of entries; None for all. since: the oldest entry id to yield. Raises
    redis.exceptions.RedisError.
    """
    until, left = "+", sys.maxsize if count is None else count
    while left > 0 and (entries := cast(list[Any], redis.xrevrange(stream, until, since, count=min(PAGE_SIZE, left)))):
        yield from entries
        until, left = f"({entries[-1][0]}", left - len(entries)


def dead_letter_digest(letter: DeadLetter) -> str:
    """Return a digest of the post, its options and its queue, so that repeated failures of one request are equal."""
    if letter.post is None:  # no readable post: compare the message instead
        return digest(letter.id, letter.payload, letter.message)
    elsewhere = (letter.queue,) if letter.queue not in (None, DEFAULT_QUEUE) else ()
    return digest(letter.id, letter.post, letter.options, *elsewhere)


def read_entry(fields: dict[str, str]) -> Result:
    """Parse a stream entry. The post is not validated again, because its body may be truncated."""
    post = Post.model_construct(**json.loads(fields["post"]))
    return Result(post, Classification.model_validate_json(fields["classification"]))
