"""The results store: exactly once by fingerprint, and a stream that readers can follow.

A micro-batch is written by one script: each classification is set if absent, and only what was new is
appended to the stream. A message that is delivered twice, or by two workers at once, therefore leaves one
result and one stream entry. The store knows nothing of models or of Celery.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from redis import Redis

from shared.keys import COUNTERS, DEAD_LETTERS, RESULTS_STREAM, result_key
from shared.messages import Classification, DeadLetter, Post
from shared.settings import Settings

#: Writes one micro-batch.
#:
#:   KEYS[1]  feedmill:results      stream    KEYS[2]  feedmill:counters  hash
#:   KEYS[3]  feedmill:dead         stream    KEYS[4+] feedmill:result:<id>  hash, one for each result
#:   ARGV[1]  ttl of a result, seconds        ARGV[2]  length of the stream of results
#:   ARGV[3]  length of that of dead letters  ARGV[4+] fingerprint, classification, post of each result
#:   after them, each dead letter
#:
#: Returns how many of the results were new.
WRITE = """
local new = 0
for i = 4, #KEYS do
  local at = 4 + (i - 4) * 3
  if redis.call('HSETNX', KEYS[i], ARGV[at], ARGV[at + 1]) == 1 then
    redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', 'classification', ARGV[at + 1], 'post', ARGV[at + 2])
    new = new + 1
  end
  redis.call('EXPIRE', KEYS[i], ARGV[1])
end
local dead = 4 + (#KEYS - 3) * 3
for i = dead, #ARGV do
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[3], '*', 'letter', ARGV[i])
end
local counts = {stored = new, repeated = #KEYS - 3 - new, failed = #ARGV - dead + 1}
for name, count in pairs(counts) do
  if count > 0 then redis.call('HINCRBY', KEYS[2], name, count) end
end
return new
"""


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


class ResultsStore:
    """Reads and writes the results in Redis. Thread-safe, as redis-py's client is."""

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._redis = redis
        self._settings = settings
        self._write: Any = redis.register_script(WRITE)

    def write(self, results: Sequence[Result], dead: Sequence[DeadLetter] = ()) -> int:
        """Store a micro-batch, and the posts that failed; returns how many results were new.

        Raises redis.exceptions.RedisError. Writing the same results again is then harmless; dead letters and counts
        can come twice.
        """
        if not results and not dead:
            return 0
        if len(dead) > DEAD_AT_ONCE:
            self.write([], dead[DEAD_AT_ONCE:])
            dead = dead[:DEAD_AT_ONCE]
        settings = self._settings
        keys = [RESULTS_STREAM, COUNTERS, DEAD_LETTERS, *(result_key(post.id) for post, _ in results)]
        arguments: list[Any] = [settings.results_ttl, settings.results_stream_length, settings.dead_letters_length]
        for post, classification in results:
            arguments += [classification.fingerprint, classification.model_dump_json(), self._clipped(post)]
        arguments += [letter.model_dump_json() for letter in dead]
        return int(self._write(keys=keys, args=arguments))

    def _clipped(self, post: Post) -> str:
        """The post as its stream entry carries it."""
        body = post.body[: self._settings.stream_body]
        # model_copy does not validate: a body clipped to nothing is fine here.
        return post.model_copy(update={"body": body}).model_dump_json(exclude_defaults=True)

    def get(self, post_id: str) -> list[Classification]:
        """Every living classification of a post, oldest first; one for each text, model and label set."""
        found: Any = self._redis.hvals(result_key(post_id))
        return sorted((Classification.model_validate_json(value) for value in found), key=lambda c: c.classified_at)

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
        """Posts stored, repeated and failed since the store was made."""
        found: Any = self._redis.hgetall(COUNTERS)
        return Counters(**{name: int(found.get(name, 0)) for name in Counters._fields})


def _entry(fields: dict[str, str]) -> Result:
    """A stream entry. The post was valid when it was written, and may have been clipped since."""
    post = Post.model_construct(**json.loads(fields["post"]))
    return Result(post, Classification.model_validate_json(fields["classification"]))
