"""Which posts were in a forward pass when their worker vanished, and how often that happened to each.

A post that kills its worker comes back to the queue, and kills the next one. So a worker notes which posts are in a
pass before it begins, one command a pass. When a message is delivered again, what a vanished worker noted of it counts
against its posts: they are *suspects*, and the pipeline computes each of them alone. Other posts of the message, and
messages that merely waited in that worker, are none.

The notes outlive the worker. A post that ended takes no harm from a note that is left: it is never delivered again.
"""

import json
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Generic
from uuid import uuid4

from redis import Redis
from redis.exceptions import RedisError as RedisFault

from shared.keys import PASSES, suspect_key
from shared.messages import digest
from workers.window import R, Window

#: In as many passes of vanished workers a post is not computed any more: in all but the first it was alone.
DEADLY = 3
#: Seconds for which a note, and what it counted for, is kept: messages that come back do so within seconds.
KEPT = 86_400

#: Counts what vanished workers noted of one message, once, and tells how often each of its posts was in their passes.
#:
#:   KEYS[1]  feedmill:passes        hash: worker and lane -> {"at": seconds, "posts": {message: [index, …]}}, JSON
#:   KEYS[2]  feedmill:suspect:<id>  hash: index of a post -> times
#:   ARGV[1]  digest of the message's id    ARGV[2]  what the notes of this worker begin with    ARGV[3]  KEPT
COUNT = """
local now = tonumber(redis.call('TIME')[1])
local notes = redis.call('HGETALL', KEYS[1])
for i = 1, #notes, 2 do
  local name, note = notes[i], cjson.decode(notes[i + 1])
  local mine = note.posts[ARGV[1]]
  if now - note.at > tonumber(ARGV[3]) then
    redis.call('HDEL', KEYS[1], name)
  elseif mine and string.sub(name, 1, #ARGV[2]) ~= ARGV[2] then
    for _, index in ipairs(mine) do redis.call('HINCRBY', KEYS[2], index, 1) end
    redis.call('EXPIRE', KEYS[2], ARGV[3])
    note.posts[ARGV[1]] = nil
    if next(note.posts) then
      redis.call('HSET', KEYS[1], name, cjson.encode(note))
    else
      redis.call('HDEL', KEYS[1], name)
    end
  end
end
return redis.call('HGETALL', KEYS[2])
"""


#: Notes what is in a pass; one command less to wait for than two, and to build than a pipeline.
#:
#:   KEYS[1]  as above    ARGV[1]  worker and lane    ARGV[2]  the note    ARGV[3]  KEPT
NOTE = """
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
"""


class Suspects:
    """What one worker notes of its passes, and what it learns of those that vanished. Thread-safe."""

    def __init__(self, redis: Redis) -> None:
        """redis: a client that gives up soon: the device waits for it. A pass goes without a note rather than late."""
        self._redis = redis
        self._count: Any = redis.register_script(COUNT)
        self._note: Any = redis.register_script(NOTE)
        self._worker = uuid4().hex

    def note(self, lane: int, posts: Iterable[tuple[str | None, int]]) -> None:
        """Note which posts, (message id, index) each, are in the pass that this lane begins now."""
        noted: dict[str | None, list[int]] = {}
        for message, index in dict.fromkeys(posts):
            noted.setdefault(message, []).append(index)
        note = json.dumps({"at": int(time.time()), "posts": {digest(name): each for name, each in noted.items()}})
        with suppress(RedisFault):
            self._note(keys=[PASSES], args=[f"{self._worker}/{lane}", note, KEPT])

    def deaths(self, message: str | None) -> dict[int, int]:
        """Of a message that is delivered again: by index, in how many passes of vanished workers its posts were.

        Empty where Redis is away: what is noted stays noted, and counts at the next time.
        """
        with suppress(RedisFault):
            found = self._count(keys=[PASSES, suspect_key(digest(message))], args=[digest(message), self._worker, KEPT])
            return {int(index): int(times) for index, times in zip(found[::2], found[1::2], strict=True)}
        return {}

    def clear(self, message: str | None) -> None:
        """Forget what was counted for a message that has ended."""
        with suppress(RedisFault):
            self._redis.delete(suspect_key(digest(message)))

    def release(self, lanes: int) -> None:
        """This worker ends in good order: what it gives back was not the death of it."""
        with suppress(RedisFault):
            self._redis.hdel(PASSES, *(f"{self._worker}/{lane}" for lane in range(lanes)))


class Quarantine(Generic[R]):
    """The rows of suspects that wait for the device, apart from all others. Only its length is thread-safe."""

    def __init__(self) -> None:
        #: The rows of each post.
        self._posts: deque[Sequence[R]] = deque()
        #: Those of the post that is computed now.
        self._alone: Window[R] = Window(time.monotonic)
        #: A count of its own, as in Window.
        self._rows = 0

    def __len__(self) -> int:
        """Return the number of rows. Needs no lock."""
        return self._rows

    def add(self, rows: Sequence[R]) -> None:
        """Let the rows of one post wait."""
        self._posts.append(rows)
        self._rows += len(rows)

    def take(self, token_budget: int, row_limit: int) -> list[R]:
        """Rows of one suspect, at most so much of them; see Window.take."""
        if not self._alone:
            for row in self._posts.popleft():
                self._alone.add(row)
        taken = self._alone.take(token_budget, row_limit)
        self._rows -= len(taken)
        return taken
