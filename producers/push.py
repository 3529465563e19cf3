"""From posts to messages in the queue: skip what was already sent, wait for room in it, publish, mark.

In that order: a crash between publishing and marking repeats a message, whose results the store then already
has; the other way round it would lose one.

What it leans on in Celery 5.7 beyond the public interface: `Celery._after_fork` forgets the application's pools of
connections and producers.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from kombu import pools
from kombu.exceptions import OperationalError
from redis import Redis
from redis.exceptions import RedisError as RedisFault

from shared import broker
from shared.errors import QueueFull, SettingsError
from shared.keys import sent_key, tombstone_key
from shared.messages import ClassifyOptions, Post, digest
from shared.refusals import is_full
from shared.settings import DEFAULT_QUEUE, PREFIX, Settings

logger = logging.getLogger(__name__)

#: Posts that are looked up, published and marked together, as far as messages are smaller: a trip to Redis costs more
#: than a post. Bounds what a crash between publishing and marking repeats, and for how long Redis serves nobody else.
POSTS_A_TRIP = 256
#: Seconds after which what a slow source has given so far is sent, if it fills messages.
TRIP_SECONDS = 0.25
#: Seconds between two looks at a full queue.
FULL_QUEUE_PAUSE = 0.5

#: What is known of each post: 0 nothing, 1 it was sent before, 2 it is gone.
#:
#:   feedmill:sent:<id>, hash    feedmill:gone:<id>, string    ARGV[1], ARGV[2] what their names begin with
#:   ARGV[3] id and field of the hash of each post, in JSON: redis-py takes longer over many arguments than Redis does
LOOK = """
local found = {}
for i, mark in ipairs(cjson.decode(ARGV[3])) do
  if redis.call('EXISTS', ARGV[2] .. mark[1]) == 1 then
    found[i] = 2
  else
    found[i] = redis.call('HEXISTS', ARGV[1] .. mark[1], mark[2])
  end
end
return found
"""
SENT, GONE = 1, 2
#: Notes that each post was sent; of one that was purged meanwhile, nothing.
#:
#:   ARGV[1] to ARGV[3] as above    ARGV[4] now    ARGV[5] ttl, seconds
NOTE = """
for _, mark in ipairs(cjson.decode(ARGV[3])) do
  if redis.call('EXISTS', ARGV[2] .. mark[1]) == 0 then
    redis.call('HSET', ARGV[1] .. mark[1], mark[2], ARGV[4])
    redis.call('EXPIRE', ARGV[1] .. mark[1], ARGV[5])
  end
end
"""


class Mark(NamedTuple):
    """What a post with its text, options and queue is remembered by as sent: its id, and a digest of the rest."""

    post_id: str
    field: str


def purpose(settings: Settings, options: ClassifyOptions) -> str:
    """What posts are sent for, as a text: another queue has another model, and there nothing was sent before."""
    said = options.model_dump_json()
    return said if settings.queue == DEFAULT_QUEUE else f"{settings.queue} {said}"


class QueueGate:
    """How many messages may be sent now: none from `queue_limit` messages on, until fewer than `queue_resume` wait.

    Bounds what waits in Redis' memory, but for what producers that look at the same moment send. With one threshold
    for both, a producer would be let in for a message or two at a time, with a look at the queue for each.

    queue_resume is half of queue_limit where it is not set. Raises SettingsError where it is more.
    """

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._redis = redis
        self._queue = settings.queue
        self._limit = settings.queue_limit
        self._resume = max(1, self._limit // 2) if settings.queue_resume is None else settings.queue_resume
        if self._resume > self._limit:
            raise SettingsError(
                f"{PREFIX}QUEUE_RESUME: {self._resume} messages are more than {PREFIX}QUEUE_LIMIT, {self._limit}; "
                "a producer that pauses at the limit goes on below it. Lower the one, or raise the other."
            )
        #: The queue was full, and is not yet below `queue_resume`.
        self.closed = False

    def room(self) -> int:
        """How many messages may be sent now; 0 while the gate is closed. Raises redis.exceptions.RedisError."""
        waiting = broker.queue_depth(self._redis, self._queue).waiting
        self.closed = waiting >= (self._resume if self.closed else self._limit)
        return 0 if self.closed else self._limit - waiting


class Pusher:
    """Publishes posts, and counts them: `sent` in so many `messages`, `skipped` since they were sent before, `gone`.

    options: how the posts are to be classified; a post is sent again with other options, or with another text.
    again: send also what was sent before. What is gone, since it was purged (shared/purge.py), is never sent.
    wait: how to wait so many seconds for room in the queue; what it raises ends `push`.
    refuse: do not wait, but raise QueueFull. wait_for_memory: wait also while Redis is at its memory limit.

    Between two calls of `push` nothing is remembered but the counts: what was sent, Redis knows. After an exception,
    whichever it is and wherever it comes from, a signal's handler included, the same posts may be pushed again. One
    thing no caller can mend: a handler that raises while kombu has just locked one of its pools leaves the lock closed,
    and about one interrupted `push` in ten thousand hangs there. A handler that notes the signal, for `wait` to raise,
    never does that.
    """

    def __init__(
        self,
        app: broker.Application,
        redis: Redis,
        settings: Settings,
        options: ClassifyOptions,
        again: bool = False,
        wait: Callable[[float], None] = time.sleep,
        refuse: bool = False,
        wait_for_memory: bool = False,
    ) -> None:
        self._app = app
        self._redis = redis
        self._settings = settings
        self._options = options
        self._purpose = purpose(settings, options)
        self._again = again
        self._wait = wait
        self._refuse = refuse
        self._wait_for_memory = wait_for_memory
        # Scripts: as many small commands in a pipeline cost redis-py two thirds of the time that publishing takes.
        self._look: Any = redis.register_script(LOOK)
        self._note: Any = redis.register_script(NOTE)
        self.gate = QueueGate(redis, settings)
        self.sent = self.skipped = self.gone = self.messages = 0
        #: What `push` waits for, for people; "" while it does not.
        self.waiting = ""

    def push(self, posts: Iterable[Post]) -> None:
        """Publish posts, as many in a message as the settings say.

        Raises redis.exceptions.RedisError, kombu.exceptions.OperationalError and QueueFull. What was counted as sent
        then is in the queue; the rest is sent when the same posts are pushed again.
        """
        try:
            self._push(posts)
        except (RedisFault, OperationalError):
            raise  # redis-py and kombu have seen to their connections
        except BaseException:
            self._drop_connections()
            raise

    def once_there_is_memory(self, write: Callable[[], object]) -> None:
        """Write to Redis; where it has no memory wait until it has, if that is wanted."""
        try:
            while True:
                try:
                    write()
                    return
                except (RedisFault, OperationalError) as fault:
                    if not self._waits_for(fault):
                        raise
                    self._pause("Redis is at its memory limit")
        finally:
            self.waiting = ""

    def _push(self, posts: Iterable[Post]) -> None:
        size = self._settings.posts_per_message
        unsent: list[tuple[Mark, Post]] = []
        for trip in _trips(posts, size):
            unsent += self._unsent(trip, {mark for mark, _ in unsent})
            whole = len(unsent) - len(unsent) % size
            self._send(unsent[:whole])
            del unsent[:whole]
        self._send(unsent)

    def _unsent(self, posts: Sequence[Post], waiting: set[Mark]) -> Iterator[tuple[Mark, Post]]:
        """Those of the posts that are to be sent, each with its mark; those that wait already are not."""
        marks = [Mark(post.id, digest(post.text, self._purpose)) for post in posts]
        for mark, post, what in zip(marks, posts, self._look(args=_named(marks)), strict=True):
            if what == GONE:
                self.gone += 1
            elif mark in waiting or (what == SENT and not self._again):
                self.skipped += 1
            else:
                waiting.add(mark)
                yield mark, post

    def _send(self, unsent: Sequence[tuple[Mark, Post]]) -> None:
        size = self._settings.posts_per_message
        while unsent:
            fitting = unsent[: size * self._wait_for_room()]
            unsent = unsent[len(fitting) :]
            messages = [fitting[start : start + size] for start in range(0, len(fitting), size)]
            self._publish([[post for _, post in message] for message in messages])
            # Counted first: what cannot be marked is in the queue all the same, and will be sent again.
            self.sent += len(fitting)
            self.messages += len(messages)
            self._remember([mark for mark, _ in fitting])

    def _wait_for_room(self) -> int:
        """How many messages the queue has room for, once it has."""
        try:
            while not (room := self.gate.room()):
                if self._refuse:
                    raise QueueFull(self._settings.queue_limit, self.sent)
                self._pause("the queue is full")
        finally:
            self.waiting = ""
        return room

    def _publish(self, messages: Sequence[Sequence[Post]]) -> None:
        """Publish them all; one at a time where memory was short, since some of those sent together may be there."""
        try:
            self._hand_over(messages)
        except OperationalError as fault:
            if not self._waits_for(fault):
                raise
            for message in messages:
                self.once_there_is_memory(partial(self._hand_over, [message]))

    def _hand_over(self, messages: Sequence[Sequence[Post]]) -> None:
        broker.publish(self._app, messages, self._options, self._settings.priority)

    def _waits_for(self, fault: Exception) -> bool:
        return self._wait_for_memory and is_full(fault)

    def _pause(self, why: str) -> None:
        if self.waiting != why:
            logger.warning("%s: waiting for room", why)
        self.waiting = why
        self._wait(FULL_QUEUE_PAUSE)

    def _drop_connections(self) -> None:
        """Connect anew from here on.

        An exception that a signal's handler raised between a command and its answer leaves the answer unread, and the
        next command would take it for its own. Raised within kombu, it leaves a producer that publishes no more, or a
        pool with a lock that nobody opens again. The process's other Celery applications with this broker share them.
        """
        self._redis.connection_pool.disconnect(inuse_connections=False)
        app: Any = self._app
        for pool in (app.producer_pool, app.pool):
            with suppress(Exception):  # of connections that are half open
                pool.force_close_all()
        pools.producers.clear()
        pools.connections.clear()
        app._after_fork()  # it forgets its own two, and makes them again when it is asked to send

    def _remember(self, marks: Sequence[Mark]) -> None:
        """Mark them as sent."""
        arguments = [*_named(marks), int(time.time()), self._settings.sent_ttl]
        self.once_there_is_memory(partial(self._note, args=arguments))


def _trips(posts: Iterable[Post], size: int) -> Iterator[list[Post]]:
    """The posts in parts that are sent together: of many, or of those that a slow source has given by now.

    size: posts in a message; all parts but the last are so many, or times as many.
    """
    trip: list[Post] = []
    limit = size * max(1, POSTS_A_TRIP // size)
    began = time.monotonic()
    for post in posts:
        trip.append(post)
        if len(trip) == limit or (len(trip) % size == 0 and time.monotonic() - began > TRIP_SECONDS):
            yield trip
            trip = []
            began = time.monotonic()
    if trip:
        yield trip


def _named(marks: Sequence[Mark]) -> list[Any]:
    """The first arguments of LOOK and NOTE."""
    return [sent_key(""), tombstone_key(""), json.dumps(marks)]
