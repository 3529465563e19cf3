"""Preparation: read each post of a message, look up its stored result, and turn it into token
rows.

This is the tokenizer thread's part of the pipeline. Posts that need no forward pass get their
outcome here: malformed posts, posts with a stored result, and poison posts. It does not depend on
the device, and uses Redis only through the results store.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from redis.exceptions import RedisError

from feedmill.shared.errors import PostRefused, RequestRefused, printable
from feedmill.shared.language import language_of
from feedmill.shared.messages import Post, PostError, fingerprint
from feedmill.shared.results import Result
from feedmill.workers.models.classifiers import (
    Classifier,
    LabelSet,
    Row,
    label_set_of,
)
from feedmill.workers.pipeline.backlog import Backlog, Loaded
from feedmill.workers.pipeline.context import Context, WorkQueue
from feedmill.workers.pipeline.message import (
    MAX_DEATHS,
    Message,
    PendingPost,
    State,
    traceback_of,
)
from feedmill.workers.pipeline.recording import Recording
from feedmill.workers.pipeline.statistics import Speed

logger = logging.getLogger(__name__)

#: Maximum rows of one message, because all of its rows are prepared and held in memory together.
MAX_ROWS_PER_MESSAGE = 32_000
#: Posts of several messages at which no more messages are prepared together: when no row waits, so
#: that the device gets rows soon, and while rows wait. Each group costs a look-up and switches
#: between threads.
POSTS_TOGETHER = 64
POSTS_TOGETHER_AHEAD = 256
#: Seconds between two checks whether a group of isolated posts is computed.
POLL_INTERVAL_S = 0.001

#: A post with its rows.
Prepared: TypeAlias = tuple[PendingPost, list[Row]]


class PendingMessage(NamedTuple):
    """A message whose posts were read: those without an outcome, and their label set."""

    message: Message
    label_set: LabelSet
    posts: list[PendingPost]


class Preparation:
    """Prepare messages in order of arrival."""

    def __init__(
        self, backlog: Backlog, context: Context, recording: Recording
    ) -> None:
        self._backlog = backlog
        self._context = context
        self._recording = recording
        #: Messages, and switches to models for all later messages.
        self._arrived: WorkQueue[Message] = WorkQueue(
            self._take_in, _posts_of, self._posts_together
        )
        #: Number of posts submitted, and of posts prepared. Separate counters, because each has
        #: its own writing thread.
        self._posts_in = 0
        self._posts_prepared = 0

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
        # Read first: otherwise the difference could be negative.
        prepared = self._posts_prepared
        return self._posts_in - prepared

    # Called on the tokenizer thread.

    def _posts_together(self) -> int:
        if len(self._backlog):
            return POSTS_TOGETHER_AHEAD
        return POSTS_TOGETHER

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
        observer = self._context.observer
        observer.preparing(messages)
        prepared: list[Prepared] = []
        try:
            prepared = self._prepare(messages, self._backlog.loaded.classifier)
        except Exception as error:
            if len(messages) > 1:  # find the message that is the cause
                for message in messages:
                    self._take_in([message])
                return
            self._refuse(messages[0], error)
        observer.prepared(messages)
        for (priority, deaths), group in groupby(prepared, _way):
            if deaths is None:
                self._backlog.add(_rows_of(group), priority)
            else:
                self._compute_alone(list(group), deaths)
        computed = {id(work.message) for work, _ in prepared}
        for message in messages:
            if id(message) not in computed:
                self._recording.hand_over(message)
            self._posts_prepared += len(message.raw_posts)

    def _compute_alone(
        self, prepared: Sequence[Prepared], deaths: Mapping[int, int]
    ) -> None:
        """Compute a message that is handled in isolation: each suspected post by itself, and the
        others in groups.

        The owner knows which group is on the device. The device has no rows of other messages,
        which the worker does not start meanwhile (workers/transport/leases.py).
        """
        groups: list[list[Prepared]] = []
        others: list[Prepared] = []
        for post in prepared:
            work, _ = post
            if work.index in deaths:
                groups.append([post])
            else:
                others.append(post)
        for begin in range(0, len(others), POSTS_TOGETHER):
            end = begin + POSTS_TOGETHER
            groups.append(others[begin:end])

        first, _ = prepared[0]
        for group in groups:
            self._compute_group(first.message, group)

    def _compute_group(self, message: Message, group: Sequence[Prepared]) -> None:
        posts = [work.index for work, _ in group]

        def computed() -> bool:
            if message.state is State.ENDED:
                return True
            outcomes = [message.outcomes[post] for post in posts]
            return None not in outcomes

        self._context.owner.computing(message, posts)
        self._backlog.add(_rows_of(group), message.priority)
        self._wait(computed)
        # no post is to blame for a crash while results wait for Redis
        self._context.owner.computing(message, ())
        stored = threading.Event()
        self._recording.run(stored.set)
        self._wait(stored.is_set)

    def _wait(self, holds: Callable[[], bool]) -> None:
        while not holds() and not self._context.stopping.wait(POLL_INTERVAL_S):
            pass

    def _refuse(self, message: Message, error: Exception) -> None:
        """Refuse a message whose preparation failed unexpectedly."""
        count = len(message.raw_posts)
        logger.error(
            "cannot prepare message %s: its %d posts become dead letters",
            message.task_id,
            count,
            exc_info=error,
            extra=message.log_fields(),
        )
        message.refused = RequestRefused(
            f"the posts cannot be prepared: {error!r:.200}"
        )
        posts = range(count)
        message.tracebacks = dict.fromkeys(posts, traceback_of(error))

    def _prepare(
        self, messages: Sequence[Message], classifier: Classifier
    ) -> list[Prepared]:
        """Return the posts to compute with their rows, and set the outcomes of all other posts.

        May be repeated after an error: until the stored results are found, it changes nothing but
        refusals.
        """
        pending = []
        for message in messages:
            try:
                pending.append(self._read(message, classifier))
            except RequestRefused as refusal:
                message.refused = refusal
        pending = self._answer_stored(pending)
        pending = [_without_poison(message) for message in pending]

        prepared: list[Prepared] = []
        for label_set, group in groupby(pending, attrgetter("label_set")):
            posts = _posts_in(group)
            prepared += self._rows(posts, label_set, classifier)
        for work, rows in prepared:
            for row in rows:
                row.owner = work
        return [(work, rows) for work, rows in prepared if rows]

    def _read(self, message: Message, classifier: Classifier) -> PendingMessage:
        """Read a message, and set the outcomes of malformed posts. Raises RequestRefused."""
        posts = message.read()
        with self._context.watch.step("the preparation of labels"):
            context = self._context
            label_set = label_set_of(
                classifier,
                message.options,
                context.none,
                context.languages,
            )
        rows_in_all = len(posts) * label_set.rows
        if rows_in_all > MAX_ROWS_PER_MESSAGE:
            raise RequestRefused(
                f"posts: {len(posts)} posts with {label_set.rows} rows each make {rows_in_all:,} "
                f"rows; a message may have {MAX_ROWS_PER_MESSAGE:,}, so send fewer posts in a "
                "message"
            )
        pending = []
        for index, post in enumerate(posts):
            if not isinstance(post, Post):
                message.set_outcome(index, post)
                continue
            work = PendingPost(
                post=post,
                message=message,
                index=index,
                fingerprint=fingerprint(post, label_set.recipe),
            )
            pending.append(work)
        return PendingMessage(
            message=message,
            label_set=label_set,
            posts=pending,
        )

    def _answer_stored(self, pending: list[PendingMessage]) -> list[PendingMessage]:
        """Set stored classifications as the outcomes of their posts, and return the messages with
        the other posts.
        """
        all_posts = _posts_in(pending)
        keys = [(work.post.id, work.fingerprint) for work in all_posts]
        try:
            classifications = self._context.store.find(keys)
        except RedisError as fault:
            logger.debug(
                "cannot look up stored results (%s); computing all posts", fault
            )
            return pending
        stored = []
        for work, classification in zip(all_posts, classifications, strict=True):
            if classification is not None:
                work.message.set_outcome(work.index, classification)
                stored.append(Result(work.post, classification))
        if not stored:
            return pending
        self._context.statistics.totals.answered += len(stored)
        self._context.store.keep(stored)

        unanswered = []
        for message in pending:
            outcomes = message.message.outcomes
            posts = [work for work in message.posts if outcomes[work.index] is None]
            unanswered.append(message._replace(posts=posts))
        return unanswered

    def _rows(
        self,
        pending: Sequence[PendingPost],
        label_set: LabelSet,
        classifier: Classifier,
    ) -> list[Prepared]:
        """Return each post with its rows.

        A post that cannot be prepared gets none, and the reason as its outcome.
        """
        if not pending:
            return []
        try:
            with self._context.watch.step("the preparation of posts"):
                texts = [work.post.text for work in pending]
                rows = classifier.prepare(texts, label_set)
                if label_set.languages:
                    for work in pending:
                        work.language = language_of(work.post.text)
                return list(zip(pending, rows, strict=True))
        # A Rust panic in the tokenizer is not an Exception.
        except BaseException as error:
            if len(pending) == 1:
                work = pending[0]
                _refuse_post(work, error)
                return [(work, [])]
            prepared: list[Prepared] = []
            for work in pending:
                prepared += self._rows([work], label_set, classifier)
            return prepared


def _refuse_post(work: PendingPost, error: BaseException) -> None:
    """Set the outcome of a post that cannot be prepared."""
    if isinstance(error, PostRefused):
        reason = str(error)
    else:
        traceback = traceback_of(error)
        logger.error(
            "cannot prepare post %s:\n%s",
            printable(work.post.id),
            traceback,
            extra=work.message.log_fields(),
        )
        reason = f"the post cannot be prepared: {type(error).__name__}: {error}"
        work.message.tracebacks[work.index] = traceback
    outcome = PostError(id=work.post.id, error=reason)
    work.message.set_outcome(work.index, outcome)


def _posts_of(message: Message) -> int:
    return max(1, len(message.raw_posts))


def _way(prepared: Prepared) -> tuple[int, Mapping[int, int] | None]:
    """Return what decides how a post is computed: its priority, and its message's deaths in
    isolation.
    """
    work, _ = prepared
    return work.message.priority, work.message.deaths


def _rows_of(prepared: Iterable[Prepared]) -> list[Row]:
    rows: list[Row] = []
    for _, rows_of_post in prepared:
        rows += rows_of_post
    return rows


def _posts_in(messages: Iterable[PendingMessage]) -> list[PendingPost]:
    posts: list[PendingPost] = []
    for message in messages:
        posts += message.posts
    return posts


def _without_poison(pending: PendingMessage) -> PendingMessage:
    """Return a message with the posts that may still be computed.

    Fail the poison posts of a message that is handled in isolation.
    """
    message = pending.message
    deaths = message.deaths
    if not deaths:
        return pending
    reason = (
        f"{MAX_DEATHS} workers died in a forward pass with this post, while no other message "
        "was on the device"
    )
    allowed = []
    suspects = []
    for work in pending.posts:
        post_id = work.post.id
        post_deaths = deaths.get(work.index, 0)
        if post_deaths >= MAX_DEATHS:
            message.set_outcome(work.index, PostError(id=post_id, error=reason))
            continue
        allowed.append(work)
        if work.index in deaths:
            suspects.append(post_id)
    if suspects:
        ids = ", ".join(map(printable, suspects[:10]))
        logger.warning(
            "computing posts in isolation, because a worker died in their forward pass: %s",
            ids,
        )
    return pending._replace(posts=allowed)
