"""From posts to messages in the queue: skip what was already sent, wait for room in it, publish, mark.

In that order: a crash between publishing and marking repeats a message, whose results the store then already
has; the other way round it would lose one.

What it leans on in Celery 5.7 beyond the public interface: `Celery._after_fork` forgets the application's pools of
connections and producers.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from celery import Celery
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

#: Posts that are looked up, published and marked together where a message holds fewer: a trip to Redis costs
#: more than a post. Bounds what a crash between publishing and marking repeats.
POSTS_A_TRIP = 32
#: Seconds between two looks at a full queue.
FULL_QUEUE_PAUSE = 0.5

#: What is known of each post: 0 nothing, 1 it was sent before, 2 it is gone.
#:
#:   KEYS[2i-1] feedmill:sent:<id>, hash    KEYS[2i] feedmill:gone:<id>, string    ARGV[i] a field of the hash
LOOK = """
local found = {}
for i = 1, #ARGV do
  if redis.call('EXISTS', KEYS[2 * i]) == 1 then
    found[i] = 2
  else
    found[i] = redis.call('HEXISTS', KEYS[2 * i - 1], ARGV[i])
  end
end
return found
"""
SENT, GONE = 1, 2
#: Notes that each post was sent; of one that was purged meanwhile, nothing.
#:
#:   KEYS as above    ARGV[1] now    ARGV[2] ttl, seconds    ARGV[2+i] a field of the hash
NOTE = """
for i = 1, #ARGV - 2 do
  if redis.call('EXISTS', KEYS[2 * i]) == 0 then
    redis.call('HSET', KEYS[2 * i - 1], ARGV[i + 2], ARGV[1])
    redis.call('EXPIRE', KEYS[2 * i - 1], ARGV[2])
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
        app: Celery,
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
        marked: list[Mark] = []
        unsent = self._unsent(posts, marked)
        while trip := list(islice(unsent, size * max(1, POSTS_A_TRIP // size))):
            while trip:
                fitting = trip[: size * self._wait_for_room()]
                del trip[: len(fitting)]
                messages = [fitting[start : start + size] for start in range(0, len(fitting), size)]
                self._publish([[post for _, post in message] for message in messages])
                # Counted first: what cannot be marked is in the queue all the same, and will be sent again.
                self.sent += len(fitting)
                self.messages += len(messages)
                marked += self._remember([mark for mark, _ in fitting])

    def _unsent(self, posts: Iterable[Post], marked: list[Mark]) -> Iterator[tuple[Mark, Post]]:
        """The posts that are to be sent, each with its mark. marked: where `push` puts those that were, by now."""
        stream = iter(posts)
        #: Found unsent since Redis was last asked, or not yet marked: Redis' answer does not know them.
        pending: set[Mark] = set()
        while chunk := list(islice(stream, max(self._settings.posts_per_message, POSTS_A_TRIP))):
            pending.difference_update(marked)
            marked.clear()
            marks = [Mark(post.id, digest(post.text, self._purpose)) for post in chunk]
            known = self._look(keys=_keys(marks), args=[mark.field for mark in marks])
            for mark, post, what in zip(marks, chunk, known, strict=True):
                if what == GONE:
                    self.gone += 1
                elif mark in pending or (what == SENT and not self._again):
                    self.skipped += 1
                else:
                    pending.add(mark)
                    yield mark, post

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
            self._send(messages)
        except OperationalError as fault:
            if not self._waits_for(fault):
                raise
            for message in messages:
                self.once_there_is_memory(partial(self._send, [message]))

    def _send(self, messages: Sequence[Sequence[Post]]) -> None:
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

    def _remember(self, marks: list[Mark]) -> list[Mark]:
        """Mark them as sent; returns them."""
        arguments = [int(time.time()), self._settings.sent_ttl, *(mark.field for mark in marks)]
        self.once_there_is_memory(partial(self._note, keys=_keys(marks), args=arguments))
        return marks


def _keys(marks: Iterable[Mark]) -> list[str]:
    """The keys of LOOK and NOTE."""
    return [key for mark in marks for key in (sent_key(mark.post_id), tombstone_key(mark.post_id))]
