"""The results store: exactly once by fingerprint, and a stream that readers can follow.

A micro-batch is written by one script: each classification is set if absent, and only what was new is
appended to the stream. A message that is delivered twice, or by two workers at once, therefore leaves one
result and one stream entry. Nor is a post a dead letter twice, for as long as the first is there. The store knows
nothing of models or of Celery.
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

from shared.keys import COUNTERS, DEAD_LETTERS, RESULTS_STREAM, buried_key, labels_key, result_key, tombstone_key
from shared.messages import Classification, DeadLetter, Post, digest
from shared.replay import Replay
from shared.settings import DEFAULT_QUEUE, PREFIX, Settings

logger = logging.getLogger(__name__)

#: Writes one micro-batch. Of a post that has a tombstone nothing is kept: a worker may have had it when it was purged.
#:
#:   KEYS[1]  feedmill:results      stream    KEYS[2]  feedmill:counters  hash
#:   KEYS[3]  feedmill:dead         stream    KEYS[4]  feedmill:labels:<hour>  hash
#:   KEYS[5+] feedmill:gone:<id> and feedmill:buried:<digest>, string, of each dead letter
#:   feedmill:result:<id>  hash, and feedmill:gone:<id>, string, of each result
#:   ARGV[1]  ttl of a result, seconds        ARGV[2]  length of the stream of results
#:   ARGV[3]  length of that of dead letters  ARGV[4]  ttl of counts by label, seconds
#:   ARGV[5]  labels that are counted in an hour, at most
#:   ARGV[6], ARGV[7]  what the names of each result's two keys begin with
#:   ARGV[8]  id, fingerprint and label of each result, in JSON: redis-py takes longer over many arguments than Redis
#:   ARGV[9+] classification and post of each result; after them, id and letter of each dead letter
#:
#: Returns how many of the results were new, and how many dead letters were trimmed.
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

#: Finds results that are there.
#:
#:   KEYS[1]  feedmill:counters  hash     feedmill:result:<id>  hash of each post
#:   ARGV[1]  what the latter's names begin with    ARGV[2]  id and fingerprint of each, in JSON: redis-py takes longer
#:   over many arguments than Redis does
#:
#: Returns the classification of each, or false.
FIND = """
local found, answered = {}, 0
for i, post in ipairs(cjson.decode(ARGV[2])) do
  found[i] = redis.call('HGET', ARGV[1] .. post[1], post[2])
  if found[i] then answered = answered + 1 end
end
if answered > 0 then redis.pcall('HINCRBY', KEYS[1], 'answered', answered) end -- refused by a Redis that is full
return found
"""

#: Notes the scores of posts that have results.
#:
#:   KEYS[1+] feedmill:result:<id>  hash      ARGV[1]  SCORE, the field    ARGV[2+] score and when, JSON, of each
#:
#: Returns how many of the posts have results.
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

#: Seconds.
HOUR = 3600
#: Labels that are counted in one hour, at most: applications may send any; those beyond are not counted.
LABELS_COUNTED = 1000
#: Field of a post's hash, beside its classifications, that holds its latest score. No fingerprint is spelt so.
SCORE = "score"
#: Scores noted by one call of the script: no other command is served meanwhile.
SCORES_AT_ONCE = 100
#: Dead letters written by one call of the script: no other command is served meanwhile.
DEAD_AT_ONCE = 50


class Result(NamedTuple):
    """A post and what it was found to be. In the stream the post's body is clipped."""

    post: Post
    classification: Classification


class Counters(NamedTuple):
    """Posts since the store was made."""

    stored: int = 0
    #: Classified again although the result was there: after a redelivery, say.
    repeated: int = 0
    failed: int = 0
    #: Classified, or failed, after they were purged: nothing of them was kept.
    gone: int = 0
    #: Asked for again, and answered with the result that was there.
    answered: int = 0
    #: Trimmed from the stream; whoever had not read them by then is told (shared/readers.py).
    trimmed: int = 0
    #: Dead letters trimmed from theirs: nothing is left of them.
    dead_trimmed: int = 0


#: Entries that are fetched together: a dead letter may have half a megabyte.
PAGE = 20


class Score(NamedTuple):
    """A post's score where it was posted, as it was seen `at`, in seconds since 1970."""

    score: int
    at: float


class ResultsStore:
    """Reads and writes the results in Redis. Thread-safe, as redis-py's client is.

    Over a client of `shared.broker.connect`, what was written in the last seconds is written again over each new
    connection: a Redis that was killed may have lost it (shared/replay.py).
    """

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._redis = redis
        self._settings = settings
        self._write: Any = redis.register_script(WRITE)
        self._refresh: Any = redis.register_script(REFRESH)
        self._find: Any = redis.register_script(FIND)
        self._replay = Replay(redis)

    def find(self, wanted: Sequence[tuple[str, str]]) -> list[Classification | None]:
        """What is stored under each (post id, fingerprint), in one trip. Raises redis.exceptions.RedisError."""
        found = self._find(keys=[COUNTERS], args=[result_key(""), json.dumps(wanted)]) if wanted else []
        return [None if each is None else Classification.model_validate_json(each) for each in found]

    def write(self, results: Sequence[Result], dead: Sequence[DeadLetter] = ()) -> int:
        """Store a micro-batch, and the posts that failed; returns how many results were new.

        Nothing is stored of posts that were purged (shared/purge.py). Raises redis.exceptions.RedisError. Writing the
        same again is then harmless; counts can come twice.
        """
        if not results and not dead:
            return 0
        new, trimmed = self._replay.write(*self._writing(results, dead[:DEAD_AT_ONCE]))
        for start in range(DEAD_AT_ONCE, len(dead), DEAD_AT_ONCE):
            trimmed += self._replay.write(*self._writing([], dead[start : start + DEAD_AT_ONCE]))[1]
        if trimmed:
            logger.warning(
                "there is no room for more dead letters: the oldest %d are gone. See to the others (`feedmill dead "
                "list`), or raise %sDEAD_LETTERS_LENGTH",
                trimmed,
                PREFIX,
            )
        return int(new)

    def keep(self, found: Sequence[Result]) -> None:
        """Write these again, too, should Redis lose them: stored results that answer a message."""
        if found:
            self._replay.keep(*self._writing(found, ()))

    def catch_up(self) -> None:
        """Write again what Redis may have lost meanwhile. Raises redis.exceptions.RedisError."""
        self._replay.check()

    def _writing(self, results: Sequence[Result], dead: Sequence[DeadLetter]) -> tuple[Callable[[], Any], int]:
        """Return the call of the script, and how many bytes it sends."""
        settings = self._settings
        keys = [RESULTS_STREAM, COUNTERS, DEAD_LETTERS, labels_key(int(time.time() // HOUR))]
        arguments: list[Any] = [
            settings.results_ttl,
            settings.results_stream_length,
            settings.dead_letters_length,
            settings.label_counts_ttl,
            LABELS_COUNTED,
            result_key(""),
            tombstone_key(""),
            json.dumps([(post.id, found.fingerprint, found.label) for post, found in results]),
        ]
        for post, found in results:
            arguments += [found.model_dump_json(), self._clipped(post)]
        for letter in dead:
            # "" is no post's id: whoever sent a post without one cannot have it purged.
            post_id = (letter.id or "").strip()
            keys += [tombstone_key(post_id), buried_key(identity(letter))]
            arguments += [post_id, letter.model_dump_json()]
        # Encoded once: a string in Python takes up to four bytes for each character.
        arguments = [each.encode() if isinstance(each, str) else each for each in arguments]
        return partial(self._write, keys=keys, args=arguments), sum(len(each) for each in arguments[7:])

    def _clipped(self, post: Post) -> str:
        """The post as its stream entry carries it."""
        if len(post.body) > self._settings.stream_body:
            # model_copy does not validate: a body clipped to nothing is fine here.
            post = post.model_copy(update={"body": post.body[: self._settings.stream_body]})
        return post.model_dump_json(exclude_defaults=True)

    def get(self, post_id: str) -> list[Classification]:
        """Every living classification of a post, oldest first; one for each text, model and label set."""
        found: Any = self._redis.hgetall(result_key(post_id))
        found.pop(SCORE, None)
        classifications = map(Classification.model_validate_json, found.values())
        return sorted(classifications, key=lambda classification: classification.classified_at)

    def refresh_scores(self, scores: Mapping[str, int], at: float) -> int:
        """Note the scores that posts had at a time, in seconds since 1970; returns how many of the posts have results.

        The others' are dropped, and no result lives longer for it. Raises redis.exceptions.RedisError; noting the same
        scores again is harmless.
        """
        refreshed = 0
        remaining = iter(scores.items())
        while some := list(islice(remaining, SCORES_AT_ONCE)):
            keys = [result_key(post_id) for post_id, _ in some]
            noted = [json.dumps({"score": score, "at": at}) for _, score in some]
            refreshed += int(self._refresh(keys=keys, args=[SCORE, *noted]))
        return refreshed

    def score(self, post_id: str) -> Score | None:
        """The latest score of a post that has results; None where `refresh_scores` never noted one."""
        found: Any = self._redis.hget(result_key(post_id), SCORE)
        return None if found is None else Score(**json.loads(found))

    def latest(self, count: int) -> list[Result]:
        """The newest `count` entries of the stream, oldest of them first."""
        return [read_entry(fields) for _, fields in self._newest(RESULTS_STREAM, count)]

    def _newest(self, stream: str, count: int) -> list[tuple[str, dict[str, str]]]:
        """(id, fields) of a stream's newest entries, oldest of them first."""
        return list(newest_first(self._redis, stream, count))[::-1]

    def dead_letters(self, count: int) -> list[DeadLetter]:
        """The newest `count` dead letters, oldest of them first."""
        return [DeadLetter.model_validate_json(fields["letter"]) for _, fields in self._newest(DEAD_LETTERS, count)]

    def labels(self, hours: int) -> dict[int, dict[str, int]]:
        """New results by label in each of the last `hours` hours that had any: hour since 1970 -> label -> count."""
        now = int(time.time() // HOUR)
        wanted = range(now - hours + 1, now + 1)
        pipe: Any = self._redis.pipeline(transaction=False)
        for hour in wanted:
            pipe.hgetall(labels_key(hour))
        found = zip(wanted, pipe.execute(), strict=True)
        return {hour: {label: int(count) for label, count in counts.items()} for hour, counts in found if counts}

    def entries(self, since: float = 0.0, until: float | None = None, count: int = 500) -> Iterator[tuple[str, Result]]:
        """(entry id, result) of the stream, oldest first, of those written from `since` on and before `until`.

        Times are seconds since 1970, by Redis' clock. `count` are fetched together: memory stays bounded.
        """
        start, end = f"{int(since * 1000)}", "+" if until is None else f"({int(until * 1000)}"
        while entries := cast(list[Any], self._redis.xrange(RESULTS_STREAM, start, end, count=count)):
            for entry_id, fields in entries:
                yield entry_id, read_entry(fields)
            start = f"({entries[-1][0]}"

    def counters(self) -> Counters:
        """How many posts were stored, came again, failed, or were gone, since the store was made."""
        found: Any = self._redis.hgetall(COUNTERS)
        return Counters(**{name: int(found.get(name, 0)) for name in Counters._fields})


def newest_first(
    redis: Redis, stream: str, count: int | None = None, since: str = "-"
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (id, fields) of a stream's entries, newest first; PAGE are in memory at a time.

    count: how many; None: all. since: the id of the oldest. Raises redis.exceptions.RedisError.
    """
    until, left = "+", sys.maxsize if count is None else count
    while left > 0 and (entries := cast(list[Any], redis.xrevrange(stream, until, since, count=min(PAGE, left)))):
        yield from entries
        until, left = f"({entries[-1][0]}", left - len(entries)


def identity(letter: DeadLetter) -> str:
    """Of what was sent, and to which queue: the same, whoever failed at it, how, when and in which message."""
    if letter.post is None:  # then it is the message that tells one from another
        return digest(letter.id, letter.payload, letter.message)
    elsewhere = (letter.queue,) if letter.queue not in (None, DEFAULT_QUEUE) else ()
    return digest(letter.id, letter.post, letter.options, *elsewhere)


def read_entry(fields: dict[str, str]) -> Result:
    """A stream entry. The post was valid when it was written, and may have been clipped since."""
    post = Post.model_construct(**json.loads(fields["post"]))
    return Result(post, Classification.model_validate_json(fields["classification"]))
