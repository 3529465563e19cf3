"""Preparation: read each post of a message, look up its stored result, and turn it into token rows.

This is the tokenizer thread's part of the pipeline. Posts that need no forward pass get their outcome here: malformed
posts, posts with a stored result, and poison posts. It does not depend on the device, and uses Redis only
through the results store.
"""

import logging
import queue
from collections.abc import Callable, Sequence

from redis.exceptions import RedisError

from shared.errors import RequestRefused, printable
from shared.messages import Post, PostError, fingerprint
from shared.results import Result
from workers.models.classifiers import Classifier, LabelSet, Row
from workers.pipeline.backlog import Backlog, Loaded
from workers.pipeline.context import Context
from workers.pipeline.message import Message, PendingPost, traceback_of
from workers.pipeline.poison import MAX_DEATHS, PoisonTracker

logger = logging.getLogger(__name__)

#: Maximum rows of one message, because all of its rows are prepared and held in memory together.
MAX_ROWS_PER_MESSAGE = 32_000


class Preparation:
    """Prepare messages in order of arrival. hand_over: called with each message that needs no forward pass."""

    def __init__(self, backlog: Backlog, context: Context, hand_over: Callable[[Message], None]) -> None:
        self._backlog = backlog
        self._context = context
        self._hand_over = hand_over
        #: Messages, and models that apply to all later messages; None ends the thread.
        self._arrived: queue.SimpleQueue[Message | Loaded | None] = queue.SimpleQueue()
        #: Number of posts submitted, and of posts prepared. Separate counters, because each has its own writing thread.
        self._posts_in = self._posts_prepared = 0

    # Called by other threads.

    def submit(self, message: Message) -> None:
        """Queue a message."""
        self._posts_in += len(message.raw_posts)
        self._arrived.put(message)

    def load(self, loaded: Loaded) -> None:
        """Use another model for messages submitted from now on."""
        self._arrived.put(loaded)

    def end(self) -> None:
        """Wake the thread so that it can end."""
        self._arrived.put(None)

    def posts_waiting(self) -> int:
        """Return the number of posts that are submitted and not yet rows."""
        prepared = self._posts_prepared  # read first: otherwise the difference could be negative
        return self._posts_in - prepared

    # Called on the tokenizer thread.

    def loop(self) -> None:
        """Prepare messages until `end`."""
        while (arrived := self._arrived.get()) is not None and not self._context.stopping.is_set():
            if isinstance(arrived, Message):
                self._take_in(arrived)
            else:
                self._backlog.load(arrived)

    def _take_in(self, message: Message) -> None:
        """Prepare a message for the latest model and add its rows to the backlog."""
        loaded = self._backlog.latest
        prepared: list[tuple[PendingPost, list[Row]]] = []
        try:
            prepared = self._prepare(message, loaded.classifier)
        except RequestRefused as refused:
            message.refused = refused
        except Exception as error:
            count = len(message.raw_posts)
            logger.exception("cannot prepare message %s: its %d posts become dead letters", message.task_id, count)
            message.refused = RequestRefused(f"the posts cannot be prepared: {error!r:.200}")
            message.tracebacks = dict.fromkeys(range(len(message.raw_posts)), traceback_of(error))
        unsuspected = [row for work, rows in prepared if work.index not in message.deaths for row in rows]
        self._backlog.add(loaded, unsuspected, message.priority)
        for work, rows in prepared:
            if work.index in message.deaths:
                self._backlog.add_isolated(loaded, rows)
        if not prepared:
            self._hand_over(message)
        self._posts_prepared += len(message.raw_posts)

    def _prepare(self, message: Message, classifier: Classifier) -> list[tuple[PendingPost, list[Row]]]:
        """Return the posts to compute with their rows, and set the outcomes of all other posts."""
        posts = message.read()
        with self._context.watch.step("the preparation of labels", self._context.timeout):
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
        pending = self._without_results(pending)
        if message.redelivered and self._context.poison:
            pending = self._without_poison(pending, message, self._context.poison)
        prepared = list(zip(pending, self._rows(pending, label_set, classifier), strict=True))
        for work, rows in prepared:
            for row in rows:
                row.owner = work
        return [(work, rows) for work, rows in prepared if rows]

    def _without_results(self, pending: list[PendingPost]) -> list[PendingPost]:
        """Return the posts without a stored classification, and set the outcomes of all other posts."""
        try:
            found = self._context.store.find([(work.post.id, work.fingerprint) for work in pending])
        except RedisError as fault:
            logger.debug("cannot look up stored results (%s); computing all posts", fault)
            return pending
        for work, classification in zip(pending, found, strict=True):
            if classification is not None:
                work.message.set_outcome(work.index, classification)
                self._context.statistics.totals.answered += 1
        pairs = zip(pending, found, strict=True)
        self._context.store.keep([Result(work.post, stored) for work, stored in pairs if stored is not None])
        return [work for work, classification in zip(pending, found, strict=True) if classification is None]

    def _without_poison(self, pending: list[PendingPost], message: Message, poison: PoisonTracker) -> list[PendingPost]:
        """Return the posts of a redelivered message that may still be computed, and fail the poison posts."""
        message.deaths = poison.deaths(message.task_id)
        allowed = []
        for work in pending:
            if (deaths := message.deaths.get(work.index, 0)) < MAX_DEATHS:
                allowed.append(work)
            else:
                reason = (
                    f"{deaths} workers died in a forward pass with this post, the last two while it ran in isolation"
                )
                message.set_outcome(work.index, PostError(id=work.post.id, error=reason))
        if found := [work.post.id for work in allowed if work.index in message.deaths]:
            named = ", ".join(map(printable, found[:10]))
            logger.warning("computing posts in isolation, because a worker died in their forward pass: %s", named)
        return allowed

    def _rows(self, pending: Sequence[PendingPost], label_set: LabelSet, classifier: Classifier) -> list[list[Row]]:
        """Return the rows of each post. A post that cannot be prepared gets no rows, and the reason as its outcome."""
        if not pending:
            return []
        try:
            with self._context.watch.step("the preparation of posts", self._context.timeout):
                return classifier.prepare([work.post.text for work in pending], label_set)
        except BaseException as error:  # a Rust panic in the tokenizer is not an Exception
            if len(pending) > 1:
                return [rows for work in pending for rows in self._rows([work], label_set, classifier)]
            logger.error("cannot prepare post %s:\n%s", printable(pending[0].post.id), traceback_of(error))
            reason = f"the post cannot be prepared: {type(error).__name__}: {error}"
            pending[0].message.tracebacks[pending[0].index] = traceback_of(error)
            pending[0].message.set_outcome(pending[0].index, PostError(id=pending[0].post.id, error=reason))
            return [[]]
