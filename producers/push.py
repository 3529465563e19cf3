"""From posts to messages in the queue: skip what was already sent, wait while the queue is full, publish, mark.

In that order: a crash between publishing and marking repeats a message, whose results the store then already
has; the other way round it would lose one.
"""

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from celery import Celery
from redis import Redis

from shared import broker
from shared.keys import sent_key
from shared.messages import ClassifyOptions, Post, digest
from shared.settings import Settings

#: Posts that are looked up, published and marked together where a message holds fewer: a trip to Redis costs
#: more than a post. Bounds what a crash between publishing and marking repeats.
POSTS_A_TRIP = 32
#: Seconds between two looks at a full queue.
FULL_QUEUE_PAUSE = 0.5

#: Whether each post was sent before.   KEYS feedmill:sent:<id>, hashes   ARGV a field of each
LOOK = """
local found = {}
for i = 1, #KEYS do found[i] = redis.call('HEXISTS', KEYS[i], ARGV[i]) end
return found
"""
#: Notes that each post was sent.   KEYS as above   ARGV[1] now   ARGV[2] ttl, seconds   ARGV[3+] a field of each
NOTE = """
for i = 1, #KEYS do
  redis.call('HSET', KEYS[i], ARGV[i + 2], ARGV[1])
  redis.call('EXPIRE', KEYS[i], ARGV[2])
end
"""

#: (key, field) under which a post with its text and options is remembered as sent.
Mark = tuple[str, str]


class Pusher:
    """Publishes posts, and counts them: `sent` in so many `messages`, and `skipped` since they were sent before.

    options: how the posts are to be classified; a post is sent again with other options, or with another text.
    again: send also what was sent before.
    """

    def __init__(
        self, app: Celery, redis: Redis, settings: Settings, options: ClassifyOptions, again: bool = False
    ) -> None:
        self._app = app
        self._redis = redis
        self._settings = settings
        self._options = options
        self._again = again
        # Scripts: as many small commands in a pipeline cost redis-py two thirds of the time that publishing takes.
        self._look: Any = redis.register_script(LOOK)
        self._note: Any = redis.register_script(NOTE)
        #: Found unsent since Redis was last asked, or not yet published: Redis' answer does not know them.
        self._pending: set[Mark] = set()
        #: Those of them that are published and marked by now.
        self._remembered: list[Mark] = []
        self.sent = self.skipped = self.messages = 0
        #: The queue is full, and `push` waits.
        self.waiting = False

    def push(self, posts: Iterable[Post]) -> None:
        """Publish posts, as many in a message as the settings say.

        Raises redis.exceptions.RedisError and kombu.exceptions.OperationalError. What was counted as sent then is
        in the queue; the rest is sent when the same posts are pushed again.
        """
        size = self._settings.posts_per_message
        unsent = self._unsent(posts)
        while trip := list(islice(unsent, size * max(1, POSTS_A_TRIP // size))):
            while trip:
                fitting = trip[: size * self._wait_for_room()]
                del trip[: len(fitting)]
                messages = [fitting[start : start + size] for start in range(0, len(fitting), size)]
                try:
                    broker.publish(self._app, [[post for _, post in message] for message in messages], self._options)
                except BaseException:
                    self._pending.difference_update(mark for mark, _ in fitting + trip)  # they may be pushed again
                    raise
                self._remember([mark for mark, _ in fitting])
                self.sent += len(fitting)
                self.messages += len(messages)

    def _unsent(self, posts: Iterable[Post]) -> Iterator[tuple[Mark, Post]]:
        """The posts that are to be sent, each with its mark."""
        stream = iter(posts)
        while chunk := list(islice(stream, max(self._settings.posts_per_message, POSTS_A_TRIP))):
            self._pending.difference_update(self._remembered)
            self._remembered.clear()
            marks = [self._mark(post) for post in chunk]
            keys, fields = zip(*marks, strict=True)
            for mark, post, sent_before in zip(marks, chunk, self._look(keys=keys, args=fields), strict=True):
                if mark in self._pending or (sent_before and not self._again):
                    self.skipped += 1
                else:
                    self._pending.add(mark)
                    yield mark, post

    def _mark(self, post: Post) -> Mark:
        return sent_key(post.id), digest(post.text, self._options.model_dump_json())

    def _wait_for_room(self) -> int:
        """How many messages the queue has room for, once it has. Backpressure: what waits lies in Redis' memory."""
        limit = self._settings.queue_limit
        while (waiting := broker.queue_depth(self._redis, self._settings.queue).waiting) >= limit:
            self.waiting = True
            time.sleep(FULL_QUEUE_PAUSE)
        self.waiting = False
        return limit - waiting

    def _remember(self, marks: list[Mark]) -> None:
        keys, fields = zip(*marks, strict=True)
        self._note(keys=keys, args=[int(time.time()), self._settings.sent_ttl, *fields])
        self._remembered += marks
