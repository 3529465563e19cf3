"""The results store: exactly once by fingerprint, and a stream that readers can follow.

A micro-batch is written by one script: each classification is set if absent, and only what was new is
appended to the stream. A message that is delivered twice, or by two workers at once, therefore leaves one
result and one stream entry. The store knows nothing of models or of Celery.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from redis import Redis

from shared.keys import COUNTERS, DEAD_LETTERS, RESULTS_STREAM, result_key, tombstone_key
from shared.messages import Classification, DeadLetter, Post
from shared.settings import Settings

#: Writes one micro-batch. Of a post that has a tombstone nothing is kept: a worker may have had it when it was purged.
#:
#:   KEYS[1]  feedmill:results      stream    KEYS[2]  feedmill:counters  hash
#:   KEYS[3]  feedmill:dead         stream
#:   KEYS[4+] feedmill:result:<id>  hash, and feedmill:gone:<id>, string, of each result
#:   after them, feedmill:gone:<id> of each dead letter
#:   ARGV[1]  ttl of a result, seconds        ARGV[2]  length of the stream of results
#:   ARGV[3]  length of that of dead letters  ARGV[4]  how many results there are
#:   ARGV[5+] id, fingerprint, classification, post of each result
#:   after them, id and letter of each dead letter
#:
#: Returns how many of the results were new.
WRITE = """
local results, new, failed, gone = tonumber(ARGV[4]), 0, 0, 0
for i = 1, results do
  local key, tombstone, at = KEYS[2 + 2 * i], KEYS[3 + 2 * i], 1 + 4 * i
  if redis.call('EXISTS', tombstone) == 1 then
    gone = gone + 1
  else
    if redis.call('HSETNX', key, ARGV[at + 1], ARGV[at + 2]) == 1 then
      redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*',
        'id', ARGV[at], 'classification', ARGV[at + 2], 'post', ARGV[at + 3])
      new = new + 1
    end
    redis.call('EXPIRE', key, ARGV[1])
  end
end
local counts = {stored = new, repeated = results - new - gone}
local at = 5 + 4 * results
for i = 4 + 2 * results, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 then
    gone = gone + 1
  else
    redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[3], '*', 'id', ARGV[at], 'letter', ARGV[at + 1])
    failed = failed + 1
  end
  at = at + 2
end
counts.failed, counts.gone = failed, gone
for name, count in pairs(counts) do
  if count > 0 then redis.call('HINCRBY', KEYS[2], name, count) end
end
return new
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


class Score(NamedTuple):
    """A post's score where it was posted, as it was seen `at`, in seconds since 1970."""

    score: int
    at: float


class ResultsStore:
    """Reads and writes the results in Redis. Thread-safe, as redis-py's client is."""

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._redis = redis
        self._settings = settings
        self._write: Any = redis.register_script(WRITE)
        self._refresh: Any = redis.register_script(REFRESH)

    def write(self, results: Sequence[Result], dead: Sequence[DeadLetter] = ()) -> int:
        """Store a micro-batch, and the posts that failed; returns how many results were new.

        Nothing is stored of posts that were purged (shared/purge.py). Raises redis.exceptions.RedisError. Writing the
        same results again is then harmless; dead letters and counts can come twice.
        """
        if not results and not dead:
            return 0
        if len(dead) > DEAD_AT_ONCE:
            self.write([], dead[DEAD_AT_ONCE:])
            dead = dead[:DEAD_AT_ONCE]
        settings = self._settings
        keys = [RESULTS_STREAM, COUNTERS, DEAD_LETTERS]
        arguments: list[Any] = [
            settings.results_ttl,
            settings.results_stream_length,
            settings.dead_letters_length,
            len(results),
        ]
        for post, classification in results:
            keys += [result_key(post.id), tombstone_key(post.id)]
            arguments += [post.id, classification.fingerprint, classification.model_dump_json(), self._clipped(post)]
        for letter in dead:
            # "" is no post's id: whoever sent a post without one cannot have it purged.
            post_id = (letter.id or "").strip()
            keys.append(tombstone_key(post_id))
            arguments += [post_id, letter.model_dump_json()]
        return int(self._write(keys=keys, args=arguments))

    def _clipped(self, post: Post) -> str:
        """The post as its stream entry carries it."""
        body = post.body[: self._settings.stream_body]
        # model_copy does not validate: a body clipped to nothing is fine here.
        return post.model_copy(update={"body": body}).model_dump_json(exclude_defaults=True)

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
        return [_entry(fields) for _, fields in self._newest(RESULTS_STREAM, count)]

    def follow(self, history: int = 0, block_ms: int = 1000) -> Iterator[Result | None]:
        """The newest `history` entries, then those that come, each once.

        Yields None whenever none came for `block_ms` milliseconds, so that the caller can stop.
        """
        # One entry more than asked for nothing: its id says where the stream ends now.
        newest = self._newest(RESULTS_STREAM, max(history, 1))
        cursor = newest[-1][0] if newest else "0"
        for _, fields in newest[:history]:
            yield _entry(fields)
        while True:
            answer: Any = self._redis.xread({RESULTS_STREAM: cursor}, count=500, block=block_ms)
            if not answer:
                yield None
            for _, entries in answer or ():
                for entry_id, fields in entries:
                    yield _entry(fields)
                    cursor = entry_id

    def _newest(self, stream: str, count: int) -> list[tuple[str, dict[str, str]]]:
        """(id, fields) of a stream's newest entries, oldest of them first."""
        if count <= 0:
            return []
        entries: Any = self._redis.xrevrange(stream, count=count)
        return list(reversed(entries))

    def dead_letters(self, count: int) -> list[DeadLetter]:
        """The newest `count` dead letters, oldest of them first."""
        return [DeadLetter.model_validate_json(fields["letter"]) for _, fields in self._newest(DEAD_LETTERS, count)]

    def counters(self) -> Counters:
        """How many posts were stored, came again, failed, or were gone, since the store was made."""
        found: Any = self._redis.hgetall(COUNTERS)
        return Counters(**{name: int(found.get(name, 0)) for name in Counters._fields})


def _entry(fields: dict[str, str]) -> Result:
    """A stream entry. The post was valid when it was written, and may have been clipped since."""
    post = Post.model_construct(**json.loads(fields["post"]))
    return Result(post, Classification.model_validate_json(fields["classification"]))
