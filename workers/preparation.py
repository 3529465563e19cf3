"""From message to rows: each post is read, looked up in the results, and turned into token rows that wait.

The tokenizer thread's part of the pipeline. What needs no forward pass has its outcome here: what cannot be read, what
is stored already, what killed too many workers. Knows nothing of the device, and of Redis only what is in the store.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from redis.exceptions import RedisError as RedisFault

from shared.errors import RequestRefused, printable
from shared.messages import Post, PostError, fingerprint
from shared.results import Result
from workers.backlog import Backlog, Loaded
from workers.classifiers import Classifier, LabelSet, Row
from workers.message import Message, PostAtWork, traced
from workers.recording import Store
from workers.statistics import Statistics
from workers.suspects import DEADLY, Suspects
from workers.watch import Watch

logger = logging.getLogger(__name__)

#: Rows of one message, at most: they are prepared and held together.
MAX_ROWS_PER_MESSAGE = 32_000


class Preparation:
    """Takes messages in, in the order in which they come.

    hand_over: is given each message that needs no forward pass. stopping: ends the thread, whatever it holds. timeout:
    seconds after which the classifier counts as hanging.
    """

    def __init__(
        self,
        backlog: Backlog,
        store: Store,
        suspects: Suspects | None,
        statistics: Statistics,
        hand_over: Callable[[Message], None],
        stopping: threading.Event,
        watch: Watch,
        timeout: float,
    ) -> None:
        self._backlog = backlog
        self._store = store
        self._suspects = suspects
        self._statistics = statistics
        self._hand_over = hand_over
        self._stopping = stopping
        self._watch = watch
        self._timeout = timeout
        #: Messages, and between them the models that those behind are for; None ends the thread.
        self._arrived: queue.SimpleQueue[Message | Loaded | None] = queue.SimpleQueue()
        #: Posts that came, and those of them that are done with here: two counts, since each is written by a thread of
        #: its own.
        self._posts_in = self._posts_prepared = 0

    # For other threads.

    def submit(self, message: Message) -> None:
        self._posts_in += len(message.raw_posts)
        self._arrived.put(message)

    def load(self, loaded: Loaded) -> None:
        """Have all that is submitted from now on wait for another model."""
        self._arrived.put(loaded)

    def end(self) -> None:
        """Wake the thread, that it may end."""
        self._arrived.put(None)

    def posts_waiting(self) -> int:
        """Posts that came and are not rows yet."""
        prepared = self._posts_prepared  # first: what comes meanwhile may be prepared at once, and no count is negative
        return self._posts_in - prepared

    # Its thread.

    def loop(self) -> None:
        while (arrived := self._arrived.get()) is not None and not self._stopping.is_set():
            if isinstance(arrived, Message):
                self._take_in(arrived)
            else:
                self._backlog.load(arrived)

    def _take_in(self, message: Message) -> None:
        """Prepare a message for the latest model, and let its rows wait for that one."""
        loaded = self._backlog.latest
        prepared: list[tuple[PostAtWork, list[Row]]] = []
        try:
            prepared = self._prepare(message, loaded.classifier)
        except RequestRefused as refused:
            message.refused = refused
        except Exception as error:
            logger.exception("a message of %d posts cannot be prepared", len(message.raw_posts))
            message.refused = RequestRefused(f"its posts cannot be prepared: {error!r:.200}")
            message.tracebacks = dict.fromkeys(range(len(message.raw_posts)), traced(error))
        innocent = [row for work, rows in prepared if work.index not in message.deaths for row in rows]
        self._backlog.add(loaded, innocent, message.priority)
        for work, rows in prepared:
            if work.index in message.deaths:
                self._backlog.add_suspect(loaded, rows)
        if not prepared:
            self._hand_over(message)
        self._posts_prepared += len(message.raw_posts)

    def _prepare(self, message: Message, classifier: Classifier) -> list[tuple[PostAtWork, list[Row]]]:
        """The posts that are to be computed, with their rows; the others are settled."""
        posts = message.read()
        with self._watch.step("the preparation of labels", self._timeout):
            label_set = classifier.label_set(message.options)
        if (rows_in_all := len(posts) * label_set.rows) > MAX_ROWS_PER_MESSAGE:
            raise RequestRefused(
                f"posts: {len(posts)} of {label_set.rows} rows each are {rows_in_all:,} rows; at most "
                f"{MAX_ROWS_PER_MESSAGE:,} in one message"
            )
        at_work = []
        for index, post in enumerate(posts):
            if isinstance(post, Post):
                at_work.append(PostAtWork(post, message, index, fingerprint(post, label_set.recipe)))
            else:
                message.settle(index, post)
        at_work = self._unanswered(at_work)
        if message.redelivered and self._suspects:
            at_work = self._not_deadly(at_work, message, self._suspects)
        prepared = list(zip(at_work, self._rows(at_work, label_set, classifier), strict=True))
        for work, rows in prepared:
            for row in rows:
                row.owner = work
        return [(work, rows) for work, rows in prepared if rows]

    def _unanswered(self, at_work: list[PostAtWork]) -> list[PostAtWork]:
        """Those of the posts whose classification is not stored; the others are settled with it."""
        try:
            found = self._store.find([(work.post.id, work.fingerprint) for work in at_work])
        except RedisFault as fault:
            logger.debug("the store cannot say what is there (%s): it is computed", fault)
            return at_work
        for work, classification in zip(at_work, found, strict=True):
            if classification is not None:
                work.message.settle(work.index, classification)
                self._statistics.totals.answered += 1
        pairs = zip(at_work, found, strict=True)
        self._store.keep([Result(work.post, stored) for work, stored in pairs if stored is not None])
        return [work for work, classification in zip(at_work, found, strict=True) if classification is None]

    def _not_deadly(self, at_work: list[PostAtWork], message: Message, suspects: Suspects) -> list[PostAtWork]:
        """Those of a message that came again which may be computed, if apart; the others are settled."""
        message.deaths = suspects.deaths(message.task_id)
        allowed = []
        for work in at_work:
            if (deaths := message.deaths.get(work.index, 0)) < DEADLY:
                allowed.append(work)
            else:
                reason = f"{deaths} workers vanished in forward passes that it was in; in the last two it was alone"
                message.settle(work.index, PostError(id=work.post.id, error=reason))
        if found := [work.post.id for work in allowed if work.index in message.deaths]:
            named = ", ".join(map(printable, found[:10]))
            logger.warning("computed apart, since a worker vanished in their forward pass: %s", named)
        return allowed

    def _rows(self, at_work: Sequence[PostAtWork], label_set: LabelSet, classifier: Classifier) -> list[list[Row]]:
        """Each post's rows; none of one that cannot be prepared, which is settled with the reason."""
        if not at_work:
            return []
        try:
            with self._watch.step("the preparation of posts", self._timeout):
                return classifier.prepare([work.post.text for work in at_work], label_set)
        except BaseException as error:  # a panic of the tokenizer, in Rust, is no Exception
            if len(at_work) > 1:
                return [rows for work in at_work for rows in self._rows([work], label_set, classifier)]
            logger.error("post %s cannot be prepared:\n%s", printable(at_work[0].post.id), traced(error))
            reason = f"it cannot be prepared: {type(error).__name__}: {error}"
            at_work[0].message.tracebacks[at_work[0].index] = traced(error)
            at_work[0].message.settle(at_work[0].index, PostError(id=at_work[0].post.id, error=reason))
            return [[]]
