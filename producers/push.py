"""Publish posts to the queue: skip posts already sent, wait for room, publish, mark as sent.

Marking comes last: a crash before it repeats a message, whose results the store already has.
Marking first could lose the message.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha1
from typing import NamedTuple, TypeVar

from celery import uuid
from redis import Redis
from redis.exceptions import RedisError

from feedmill.shared import broker, runs
from feedmill.shared.messages import ClassifyOptions, Post, digest, scope_of
from feedmill.shared.model_routing import deployed_weights
from feedmill.shared.redis_errors import is_full
from feedmill.shared.scripts import call
from feedmill.shared.settings import DEFAULT_QUEUE, PREFIX, Settings

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

#: Advice on room in a full Redis. Nothing else may happen for hours, if no worker runs.
MEMORY_ADVICE = (
    f"Start workers, raise its maxmemory, or lower {PREFIX}RESULTS_MEMORY or "
    f"{PREFIX}SENT_MEMORY"
)
#: Posts looked up, published and marked per round trip, since a round trip costs more than a post.
#: Limits how many posts a crash before marking repeats, and how long a script blocks Redis. A
#: larger message is sent by itself.
POSTS_PER_ROUND_TRIP = 256
#: Seconds until a slow source's posts are sent without waiting for a full round trip, once they
#: fill messages.
MAX_COLLECT_S = 0.25
#: Seconds between checks of a full queue.
FULL_QUEUE_POLL_S = 0.5
#: Status of a post in `lookup`; 0 if it is unknown.
SENT = 1
PURGED = 2
#: Bytes of an id's digest: its bucket (shared/scripts/tables.lua), and the start of its marks.
BUCKET_BYTES = 2
ID_BYTES = 4
#: Bytes of the other parts of a mark: digests of the run and of what was sent. The probability
#: that a new post is taken for sent is 2**-48 (4e-15) for each mark of its id, and 2**-112 for
#: each mark of another id.
RUN_BYTES = 2
DIGEST_BYTES = 6
#: Ids per call of `known`. Redis is blocked during a call.
IDS_PER_CALL = 500


def _digest(text: str, size: int) -> bytes:
    sha = sha1(text.encode(), usedforsecurity=False)
    return sha.digest()[:size]


class Mark(NamedTuple):
    """Record of a sent post: digests of its id, of its run, and of its text and where it
    was sent.
    """

    post_id: str
    #: Its bucket, and what Redis stores there.
    content: bytes

    @classmethod
    def of(cls, post_id: str, field: str, run: str = "") -> "Mark":
        """Return a mark. field: digest of what was sent, in hex. run: the post's run; ""
        for none.
        """
        id_part = _digest(post_id, BUCKET_BYTES + ID_BYTES)
        run_part = _digest(run, RUN_BYTES)
        digits = field[: 2 * DIGEST_BYTES]
        field_part = bytes.fromhex(digits)
        content = id_part + run_part + field_part
        return cls(post_id, content)


def lookup(redis: Redis, marks: Sequence[Mark]) -> list[int]:
    """Return the status of each post: 0, SENT or PURGED."""
    if not marks:
        return []
    ids, contents = _pack(marks)
    digits = call(redis, "lookup", ids, contents)
    return [int(digit) for digit in digits]


def mark_sent(
    redis: Redis, marks: Sequence[Mark], ttl: int, memory: int, run: str = ""
) -> None:
    """Mark posts as sent, except posts that were purged meanwhile, and count new marks in the
    progress of their run.

    ttl: seconds for which a mark is kept; at most an eighth longer. memory: bytes of all marks.
    run: the posts' run; "" for none.
    """
    if not marks:
        return
    ids, contents = _pack(marks)
    call(
        redis,
        "mark",
        ids,
        contents,
        ttl,
        memory,
        run,
    )


def _pack(marks: Sequence[Mark]) -> tuple[str, bytes]:
    """Return the ids as JSON, and what Redis stores."""
    ids = [mark.post_id for mark in marks]
    contents = [mark.content for mark in marks]
    return json.dumps(ids), b"".join(contents)


def known_ids(redis: Redis, ids: Sequence[str]) -> set[str]:
    """Return the ids of posts that were sent or have results."""
    matches: set[str] = set()
    for start in range(0, len(ids), IDS_PER_CALL):
        end = start + IDS_PER_CALL
        batch = ids[start:end]
        digits = call(redis, "known", json.dumps(batch))
        for post_id, digit in zip(batch, digits, strict=True):
            if digit == "1":
                matches.add(post_id)
    return matches


def send_scope(queue: str, options: ClassifyOptions, weights: str) -> str:
    """Return the key under which sent posts and file positions are recorded.

    Contains the queue, the options and the weights deployed to the queue, "" for none: a post that
    was sent to one queue or model can still be sent to another.
    """
    parts: list[str] = []
    if queue != DEFAULT_QUEUE:
        parts.append(queue)
    parts.append(weights)
    # 0.1 had no option `none`: what it sent must not be sent again.
    absent = {"none"} if options.none is None else set()
    parts.append(options.model_dump_json(exclude=absent))
    return " ".join(part for part in parts if part)


def mark_of(post: Post, purpose: str) -> Mark:
    """Return the mark of a post. purpose: see `send_scope`."""
    scope = scope_of(post)
    field = digest(post.text, purpose, *scope)
    run = post.run or ""
    return Mark.of(post.id, field, run)


@dataclass(eq=False, repr=False)
class Pusher:
    """Publish posts, counting posts `sent`, `skipped` (sent before) and `gone` (purged), and
    `messages`.

    options: classification options. Posts with new options or texts, or for a newly deployed
    model, are sent again. again: also send posts that were sent before. Purged posts
    (shared/purge.py) are never sent. wait: sleeps while the queue is full; exceptions it raises
    end `push`. wait_for_memory: also wait while Redis is at its memory limit.
    on_published: called with the task id and the posts of each published message, whose Celery
    results are then kept. run: name of the run that the posts belong to; replaces the posts' own.
    None keeps theirs and counts no progress.

    Between calls of `push` only the counts are kept in memory; Redis stores what was sent. After
    any exception, even one raised by a signal handler, the same posts can be pushed again.
    """

    app: broker.Application
    redis: Redis
    settings: Settings
    options: ClassifyOptions
    again: bool = False
    wait: Callable[[float], None] = time.sleep
    wait_for_memory: bool = False
    run: str | None = None
    on_published: Callable[[str, Sequence[Post]], None] | None = None

    #: True from the moment the queue is full until it is half empty.
    is_closed = False
    sent = skipped = gone = messages = 0
    #: Id of the first purged post; and the reason why `push` is waiting, for display. "" if there
    #: is none.
    first_gone = waiting = ""
    #: See `send_scope`.
    _purpose = ""

    def room(self) -> int:
        """Look at the queue, open or close it for this producer, and return how many messages may
        be sent now.

        Raises redis.exceptions.RedisError.

        That is 0 from the moment that `queue_limit` messages wait until half of them do, which
        bounds the queue's memory in Redis. Producers that check at the same moment can exceed the
        limit slightly. With a single threshold, a producer would check the queue for every message
        or two.
        """
        limit = self.settings.queue_limit
        depth = broker.queue_depth(self.redis, self.settings.queue)
        waiting = depth.waiting
        threshold = limit
        if self.is_closed:
            threshold = max(1, limit // 2)
        self.is_closed = waiting >= threshold
        if self.is_closed:
            return 0
        return limit - waiting

    def push(self, posts: Iterable[Post]) -> None:
        """Publish posts, packed into messages as configured.

        Raises redis.exceptions.RedisError. Posts counted as sent are in the queue by then; pushing
        the same posts again sends the rest.
        """
        try:
            self._push(posts)
        except BaseException:
            # A signal handler's exception can leave a reply unread, which the next command would
            # take for its own.
            for redis in (self.redis, self.app.redis):
                redis.connection_pool.disconnect(inuse_connections=False)
            raise

    def retry_until_memory(self, write: Callable[[], Answer]) -> Answer:
        """Write to Redis, and return its answer.

        If Redis is out of memory and `wait_for_memory` is set, retry until it succeeds.
        """
        try:
            while True:
                try:
                    return write()
                except RedisError as fault:
                    if not (self.wait_for_memory and is_full(fault)):
                        raise
                    self._pause("Redis is at its memory limit", f". {MEMORY_ADVICE}")
        finally:
            self.waiting = ""

    def _keep_labels(self, run: str) -> None:
        """Record the labels' descriptions, which messages carry and results do not."""
        labels = self.options.labels
        if labels is None:
            return
        keep_labels = partial(
            runs.keep_labels,
            self.redis,
            run,
            labels,
            self.settings.sent_ttl,
        )
        self.retry_until_memory(keep_labels)

    def _push(self, posts: Iterable[Post]) -> None:
        size = self.settings.posts_per_message
        queue = self.settings.queue
        weights = deployed_weights(self.redis, queue)
        self._purpose = send_scope(queue, self.options, weights)
        unsent: list[tuple[Mark, Post]] = []
        if self.run is not None:
            posts = _of_run(posts, self.run)
            self._keep_labels(self.run)
        for trip in _round_trips(posts, size):
            unsent += self._count_unsent(trip, unsent)
            remainder = len(unsent) % size
            whole = len(unsent) - remainder
            self._send(unsent[:whole])
            del unsent[:whole]
        self._send(unsent)

    def _count_unsent(
        self, posts: Sequence[Post], collected: Sequence[tuple[Mark, Post]]
    ) -> list[tuple[Mark, Post]]:
        """Return the posts that must be sent, with their marks, and count the others.

        collected: posts that wait to be sent, and must not be sent twice.
        """
        unsent: list[tuple[Mark, Post]] = []
        waiting = {mark for mark, _ in collected}
        marks = [mark_of(post, self._purpose) for post in posts]
        # Looking up writes, too, if Redis must load the functions first.
        look_up = partial(lookup, self.redis, marks)
        statuses = self.retry_until_memory(look_up)
        for mark, post, status in zip(
            marks,
            posts,
            statuses,
            strict=True,
        ):
            is_sent = status == SENT and not self.again
            if status == PURGED:
                self.gone += 1
                if not self.first_gone:
                    self.first_gone = post.id
            elif is_sent or mark in waiting:
                self.skipped += 1
            else:
                waiting.add(mark)
                unsent.append((mark, post))
        return unsent

    def _send(self, unsent: Sequence[tuple[Mark, Post]]) -> None:
        size = self.settings.posts_per_message
        while unsent:
            room = self._wait_for_room()
            batch = unsent[: size * room]
            unsent = unsent[len(batch) :]
            posts = [post for _, post in batch]
            messages = [
                posts[start : start + size] for start in range(0, len(posts), size)
            ]
            publish = partial(self._publish, messages)
            self.retry_until_memory(publish)
            # Count before marking: posts that cannot be marked are in the queue and will be sent
            # again.
            self.sent += len(posts)
            self.messages += len(messages)
            marks = [mark for mark, _ in batch]
            mark_batch = partial(
                mark_sent,
                self.redis,
                marks,
                self.settings.sent_ttl,
                self.settings.sent_memory,
                self.run or "",
            )
            self.retry_until_memory(mark_batch)

    def _wait_for_room(self) -> int:
        """Wait until the queue has room, and return for how many messages."""
        try:
            room = self.room()
            while room == 0:
                self._pause("the queue is full")
                room = self.room()
        finally:
            self.waiting = ""
        return room

    def _publish(self, messages: Sequence[Sequence[Post]]) -> None:
        send = partial(
            broker.publish,
            self.app,
            messages,
            self.options,
            self.settings.priority,
        )
        if self.on_published is None:
            send()
            return
        task_ids = [uuid() for _ in messages]
        send(task_ids)
        for task_id, posts in zip(task_ids, messages, strict=True):
            self.on_published(task_id, posts)

    def _pause(self, why: str, advice: str = "") -> None:
        if self.waiting != why:
            logger.warning("%s: waiting for room%s", why, advice)
        self.waiting = why
        self.wait(FULL_QUEUE_POLL_S)


def _of_run(posts: Iterable[Post], run: str) -> Iterator[Post]:
    """Yield the posts as posts of this run."""
    for post in posts:
        yield post.model_copy(update={"run": run})


def _round_trips(posts: Iterable[Post], size: int) -> Iterator[list[Post]]:
    """Group posts into batches, one per round trip; smaller ones if the source is slow.

    size: posts per message. The length of every batch but the last is a multiple of it.
    """
    trip: list[Post] = []
    messages = max(1, POSTS_PER_ROUND_TRIP // size)
    limit = size * messages
    began = time.monotonic()
    for post in posts:
        trip.append(post)
        length = len(trip)
        is_complete = length == limit
        if not is_complete and length % size == 0:
            collected_s = time.monotonic() - began
            is_complete = collected_s > MAX_COLLECT_S
        if is_complete:
            yield trip
            trip = []
            began = time.monotonic()
    if trip:
        yield trip
