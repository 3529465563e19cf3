"""Preparation: read each post of a message, look up its stored result, and turn it into token rows.

This is the tokenizer thread's part of the pipeline. Posts that need no forward pass get their outcome here: malformed
posts, posts with a stored result, and poison posts. It does not depend on the device, and uses Redis only
through the results store.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple, TypeAlias

from redis.exceptions import RedisError

from feedmill.shared.errors import RequestRefused, printable
from feedmill.shared.messages import Post, PostError, fingerprint
from feedmill.shared.results import Result
from feedmill.workers.models.classifiers import Classifier, LabelSet, Row
from feedmill.workers.pipeline.backlog import Backlog, Loaded
from feedmill.workers.pipeline.context import Context, WorkQueue
from feedmill.workers.pipeline.message import MAX_DEATHS, Message, PendingPost, State, traceback_of
from feedmill.workers.pipeline.recording import Recording
from feedmill.workers.pipeline.statistics import Speed

logger = logging.getLogger(__name__)

#: Maximum rows of one message, because all of its rows are prepared and held in memory together.
MAX_ROWS_PER_MESSAGE = 32_000
#: Posts of several messages at which no more messages are prepared together.
POSTS_TOGETHER = 64
#: Seconds between two checks whether a group of isolated posts is computed.
POLL_INTERVAL_S = 0.001

#: A post with its rows.
Prepared: TypeAlias = tuple[PendingPost, list[Row]]


class Readable(NamedTuple):
    """A message whose posts were read: those without an outcome, and their label set."""

    message: Message
    label_set: LabelSet
    pending: list[PendingPost]


class Preparation:
    """Prepare messages in order of arrival."""

    def __init__(self, backlog: Backlog, context: Context, recording: Recording) -> None:
        self._backlog = backlog
        self._context = context
        self._recording = recording
        #: Messages, and switches to models for all later messages.
        self._arrived: WorkQueue[Message] = WorkQueue(self._take_in, _posts_of, POSTS_TOGETHER)
        #: Number of posts submitted, and of posts prepared. Separate counters, because each has its own writing thread.
        self._posts_in = self._posts_prepared = 0

    # Called by other threads.

    def submit(self, message: Message) -> None:
        """Queue a message."""
        self._posts_in += len(message.raw_posts)
        self._arrived.put(message)

    def load(self, loaded: Loaded) -> None:
        """Use another model for messages submitted from now on."""
        self._arrived.put(partial(self._switch, loaded))

    def end(self) -> None:
        """Wake the thread so that it can end."""
        self._arrived.put(lambda: None)

    def posts_waiting(self) -> int:
        """Return the number of posts that are submitted and not yet rows."""
        prepared = self._posts_prepared  # read first: otherwise the difference could be negative
        return self._posts_in - prepared

    # Called on the tokenizer thread.

    def loop(self) -> None:
        """Prepare messages until `end`."""
        while not self._context.stopping.is_set():
            self._arrived.work()

    def _switch(self, loaded: Loaded) -> None:
        """Use another model once the device has computed all rows of the previous one."""

        def switched() -> None:
            self._context.statistics.speed = Speed()
            loaded.on_active()

        self._wait(self._backlog.is_idle)
        self._backlog.loaded = loaded
        self._recording.run(switched)  # after the results that were handed over so far

    def _take_in(self, messages: Sequence[Message]) -> None:
        """Prepare messages and add their rows to the backlog."""
        prepared: list[Prepared] = []
        try:
            prepared = self._prepare(messages, self._backlog.loaded.classifier)
        except Exception as error:
            if len(messages) > 1:  # find the message that is the cause
                for message in messages:
                    self._take_in([message])
                return
            self._refuse(messages[0], error)
        for (priority, deaths), group in groupby(prepared, _way):
            if deaths is None:
                self._backlog.add([row for _, rows in group for row in rows], priority)
            else:
                self._compute_alone(list(group), deaths)
        computed = {id(work.message) for work, _ in prepared}
        for message in messages:
            if id(message) not in computed:
                self._recording.hand_over(message)
            self._posts_prepared += len(message.raw_posts)

    def _compute_alone(self, prepared: Sequence[Prepared], deaths: Mapping[int, int]) -> None:
        """Compute a message that is handled in isolation: each suspected post by itself, and the others in groups.

        The owner knows which group is on the device. The device has no rows of other messages, which the worker does
        not start meanwhile (workers/transport/leases.py).
        """
        others = [each for each in prepared if each[0].index not in deaths]
        groups = [[each] for each in prepared if each[0].index in deaths]
        groups += [others[at : at + POSTS_TOGETHER] for at in range(0, len(others), POSTS_TOGETHER)]
        for group in groups:
            self._compute_group(prepared[0][0].message, group)

    def _compute_group(self, message: Message, group: Sequence[Prepared]) -> None:
        posts, stored = [work.index for work, _ in group], threading.Event()
        self._context.owner.computing(message, posts)
        self._backlog.add([row for _, rows in group for row in rows], message.priority)
        self._wait(lambda: message.state is State.ENDED or None not in [message.outcomes[post] for post in posts])
        self._context.owner.computing(message, ())  # no post is to blame for a crash while results wait for Redis
        self._recording.run(stored.set)
        self._wait(stored.is_set)

    def _wait(self, holds: Callable[[], bool]) -> None:
        while not holds() and not self._context.stopping.wait(POLL_INTERVAL_S):
            pass

    def _refuse(self, message: Message, error: Exception) -> None:
        """Refuse a message whose preparation failed unexpectedly."""
        count = len(message.raw_posts)
        logger.error(
            "cannot prepare message %s: its %d posts become dead letters", message.task_id, count, exc_info=error
        )
        message.refused = RequestRefused(f"the posts cannot be prepared: {error!r:.200}")
        message.tracebacks = dict.fromkeys(range(count), traceback_of(error))

    def _prepare(self, messages: Sequence[Message], classifier: Classifier) -> list[Prepared]:
        """Return the posts to compute with their rows, and set the outcomes of all other posts.

        May be repeated after an error: until the stored results are found, it changes nothing but refusals.
        """
        readable = []
        for message in messages:
            try:
                readable.append(self._read(message, classifier))
            except RequestRefused as refused:
                message.refused = refused
        readable = self._without_results(readable)
        readable = [each._replace(pending=_without_poison(each)) if each.message.deaths else each for each in readable]
        prepared = [
            pair
            for label_set, group in groupby(readable, lambda each: each.label_set)
            for pair in self._rows([work for each in group for work in each.pending], label_set, classifier)
        ]
        for work, rows in prepared:
            for row in rows:
                row.owner = work
        return [(work, rows) for work, rows in prepared if rows]

    def _read(self, message: Message, classifier: Classifier) -> Readable:
        """Read a message, and set the outcomes of malformed posts. Raises RequestRefused."""
        posts = message.read()
        with self._context.watch.step("the preparation of labels"):
            label_set = classifier.label_set(message.options)
        if (rows_in_all := len(posts) * label_set.rows) > MAX_ROWS_PER_MESSAGE:
            raise RequestRefused(
                f"posts: {len(posts)} posts with {label_set.rows} rows each make {rows_in_all:,} rows; a message may "
                f"have {MAX_ROWS_PER_MESSAGE:,}, so send fewer posts in a message"
            )
        pending = []
        for index, post in enumerate(posts):
            if isinstance(post, Post):
                pending.append(PendingPost(post, message, index, fingerprint(post, label_set.recipe)))
            else:
                message.set_outcome(index, post)
        return Readable(message, label_set, pending)

    def _without_results(self, readable: list[Readable]) -> list[Readable]:
        """Return the messages without the posts that have a stored classification, which becomes their outcome."""
        pending = [work for each in readable for work in each.pending]
        try:
            found = self._context.store.find([(work.post.id, work.fingerprint) for work in pending])
        except RedisError as fault:
            logger.debug("cannot look up stored results (%s); computing all posts", fault)
            return readable
        stored = []
        for work, classification in zip(pending, found, strict=True):
            if classification is not None:
                work.message.set_outcome(work.index, classification)
                stored.append(Result(work.post, classification))
        if not stored:
            return readable
        self._context.statistics.totals.answered += len(stored)
        self._context.store.keep(stored)
        return [
            each._replace(pending=[work for work in each.pending if each.message.outcomes[work.index] is None])
            for each in readable
        ]

    def _rows(self, pending: Sequence[PendingPost], label_set: LabelSet, classifier: Classifier) -> list[Prepared]:
        """Return each post with its rows. A post that cannot be prepared gets none, and the reason as its outcome."""
        if not pending:
            return []
        try:
            with self._context.watch.step("the preparation of posts"):
                rows = classifier.prepare([work.post.text for work in pending], label_set)
                return list(zip(pending, rows, strict=True))
        except BaseException as error:  # a Rust panic in the tokenizer is not an Exception
            if len(pending) > 1:
                return [pair for work in pending for pair in self._rows([work], label_set, classifier)]
            logger.error("cannot prepare post %s:\n%s", printable(pending[0].post.id), traceback_of(error))
            reason = f"the post cannot be prepared: {type(error).__name__}: {error}"
            pending[0].message.tracebacks[pending[0].index] = traceback_of(error)
            pending[0].message.set_outcome(pending[0].index, PostError(id=pending[0].post.id, error=reason))
            return [(pending[0], [])]


def _posts_of(message: Message) -> int:
    return max(1, len(message.raw_posts))


def _way(prepared: Prepared) -> tuple[int, Mapping[int, int] | None]:
    """Return what decides how a post is computed: its priority, and its message's deaths in isolation."""
    return prepared[0].message.priority, prepared[0].message.deaths


def _without_poison(readable: Readable) -> list[PendingPost]:
    """Return the posts of an isolated message that may still be computed, and fail the poison posts."""
    message, _, pending = readable
    deaths = message.deaths or {}
    poison = [work for work in pending if deaths.get(work.index, 0) >= MAX_DEATHS]
    reason = f"{MAX_DEATHS} workers died in a forward pass with this post, while no other message was on the device"
    for work in poison:
        message.set_outcome(work.index, PostError(id=work.post.id, error=reason))
    allowed = [work for work in pending if work not in poison]
    if suspects := [work.post.id for work in allowed if work.index in deaths]:
        named = ", ".join(map(printable, suspects[:10]))
        logger.warning("computing posts in isolation, because a worker died in their forward pass: %s", named)
    return allowed
