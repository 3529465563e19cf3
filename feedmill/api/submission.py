"""Classify items through a running queue: send them as one run, and collect the outcomes.

Each message's Celery result has one outcome per post, in order, failures included. The results
store cannot replace it: it does not know failures, and an id may have results of other labels.
Celery keeps a result for an hour (CELERY_RESULT_TTL_S); a message whose result expired uncollected
is sent again, and the worker answers it from the results store without computing.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from secrets import token_hex
from typing import Any, NamedTuple

from redis import Redis
from tqdm import tqdm

from feedmill.api.request import (
    Failures,
    Item,
    Labels,
    Prediction,
    Predictions,
    Request,
    read_options,
    warn,
)
from feedmill.producers.push import Pusher
from feedmill.producers.records import id_of_text, normalize_keys, parse_post
from feedmill.shared import runs
from feedmill.shared.backoff import Backoff
from feedmill.shared.batches import batched
from feedmill.shared.broker import connect, make_app, queue_depth
from feedmill.shared.errors import RequestRefused, UserError, sentence
from feedmill.shared.messages import MAX_ID, Post, parse_run
from feedmill.shared.model_routing import check_options, check_queue, missing_worker
from feedmill.shared.redis_errors import user_errors
from feedmill.shared.settings import Settings, load_arguments

#: Results fetched from Redis at once. One of 32 posts and 16 labels has about 25 KB.
RESULTS_AT_ONCE = 64
#: Pauses between two looks at the results.
LOOKS = Backoff(first_s=0.05, max_s=1.0)
#: Seconds for which all posts must be settled without a result of their message, before the
#: message is sent again; and for which the run must be unknown, or the queue empty, before posts
#: count as purged.
EXPIRED_AFTER_S = 10.0
#: Reason for posts that were deleted with `feedmill purge`.
PURGED = "purged: the post was deleted, and is not sent again"
#: Reason for posts that were deleted with `feedmill purge --run` or `--queue`.
LEFT_QUEUE = (
    "left the queue without a result: purged with its run or its queue; submit it again"
)


class SubmittedProgress(NamedTuple):
    """Progress of a submitted run: items sent, items with an outcome, and those of them without a
    label.
    """

    sent: int
    done: int
    failed: int

    @property
    def finished(self) -> bool:
        return self.done >= self.sent


class SubmittedRun:
    """Items that were sent to the queue. Created by `feedmill.submit`.

    Attributes:
        name: Name of the run, for `feedmill.results(run=…)` and the commands.
    """

    def __init__(
        self, name: str, request: Request, settings: Settings, redis: Redis
    ) -> None:
        self.name = name
        self._request = request
        self._settings = settings
        self._redis = redis
        app = make_app(settings)
        self._backend: Any = app.backend
        self._lock = threading.Lock()
        self._items: list[Item] = []
        #: Place of each post's item, by the post's id.
        self._places: dict[str, int] = {}
        #: Messages without an outcome: task id -> posts.
        self._pending: dict[str, Sequence[Post]] = {}
        #: Predictions by the places of their items.
        self._predictions: dict[int, Prediction] = {}
        self._failed = 0
        #: Time at which results were first missing although no post is pending, or the run is
        #: unknown; None if posts are pending.
        self._missing_since: float | None = None
        #: The worker's reason to refuse the options.
        self._refused = ""

    # Sending.

    def _send(self, posts: Iterable[Post] | None = None) -> None:
        """Send posts: those of the request, unless others are given."""
        app = make_app(self._settings)
        pusher = Pusher(
            app,
            self._redis,
            self._settings,
            self._request.options,
            again=True,
            run=self.name,
            on_published=self._pending.__setitem__,
        )
        if posts is None:
            posts = self._posts()
        with user_errors(self._settings):
            pusher.push(posts)
        settled_or_sent = set(self._predictions)
        for post in self._pending_posts():
            index = self._places[post.id]
            settled_or_sent.add(index)
        count = len(self._items)
        for index in range(count):
            if index not in settled_or_sent:
                self._settle(index, {"error": PURGED})

    def _pending_posts(self) -> list[Post]:
        messages = self._pending.values()
        return list(chain.from_iterable(messages))

    def _posts(self) -> Iterator[Post]:
        for index, item in enumerate(self._request.items):
            self._items.append(item)
            post = item.post
            if isinstance(post, str):
                self._settle(index, {"error": post})
                continue
            unique_id = self._unique_id(item, post, index)
            post = complete(item, post, unique_id)
            self._places[post.id] = index
            yield post

    def _unique_id(self, item: Item, post: Post, place: int) -> str:
        """Return the item's id. A number is appended to an id that occurred before."""
        own_id = id_of(item, post)
        unique_id = own_id
        number = place
        while unique_id in self._places:
            ending = f"~{number}"
            room = MAX_ID - len(ending)
            unique_id = own_id[:room] + ending
            number += 1
        return unique_id

    def _settle(self, place: int, outcome: Mapping[str, Any]) -> None:
        item = self._items[place]
        self._predictions[place] = item.prediction(outcome)
        if "error" in outcome:
            self._failed += 1

    # Collecting.

    def progress(self) -> SubmittedProgress:
        """Return how many items were sent, are done, and failed.

        Raises feedmill.UserError if Redis is unreachable.
        """
        self._collect()
        return SubmittedProgress(
            sent=len(self._items),
            done=len(self._predictions),
            failed=self._failed,
        )

    def wait(
        self, timeout: float | None = None, *, progress: bool = False
    ) -> "SubmittedRun":
        """Wait until every item has an outcome, and return this run.

        Args:
            timeout: Seconds to wait. Default: as long as it takes, also while no worker runs.
            progress: Show a progress bar, in a terminal or a notebook.

        Raises:
            TimeoutError: If the time is over. The workers continue; call `wait` again.
            feedmill.UserError: If Redis is unreachable, or the worker refuses the labels.
        """
        began = time.monotonic()
        looks = 0
        count = len(self._items)
        with tqdm(
            desc=self.name,
            total=count,
            disable=not progress,
        ) as bar:
            while True:
                current = self.progress()
                newly_done = current.done - bar.n
                bar.update(newly_done)
                if current.finished:
                    return self
                pause = LOOKS.pause_s(looks)
                looks += 1
                if timeout is not None:
                    waited = time.monotonic() - began
                    remaining = timeout - waited
                    if remaining <= 0:
                        raise TimeoutError(
                            f"{current.done:,} of {current.sent:,} items of run {self.name!r} in "
                            f"queue {self._settings.queue} are done after {timeout:g} s. Call "
                            "wait again, or check with `feedmill status` that a worker serves "
                            "this queue."
                        )
                    pause = min(pause, remaining)
                time.sleep(pause)

    def results(self, timeout: float | None = None) -> Predictions:
        """Wait, and return the predictions in the order of the items.

        Warns about those without a label.

        Raises like `wait`.
        """
        self.wait(timeout)
        request = self._request
        failures = Failures()
        indexes = range(len(self._items))
        in_order = [self._predictions[index] for index in indexes]
        labels = request.options.labels or ()
        predictions = Predictions(
            failures.count_each(in_order),
            tuple(labels),
            request.options,
        )
        failures.warn(request.unit)
        return predictions

    def to_frame(self, *, scores: bool = False, timeout: float | None = None) -> Any:
        """Wait, and return a DataFrame. Raises like `wait`.

        For a DataFrame or a Series, the result is the one of `feedmill.classify`. For other items,
        it is a DataFrame of texts and labels.
        """
        predictions = self.results(timeout)
        request = self._request
        if request.table is None:
            return predictions.to_frame(scores=scores)
        labels: Sequence[str] = ()
        if scores:
            labels = predictions.score_labels
        columns = request.columns()._replace(score_labels=labels)
        return request.table.labelled(predictions, columns)

    def __repr__(self) -> str:
        done = len(self._predictions)
        sent = len(self._items)
        return f"<feedmill.SubmittedRun {self.name!r}: {done:,} of {sent:,} done>"

    def _collect(self) -> None:
        """Fetch the results that are there."""
        with self._lock, user_errors(self._settings):
            has_collected = False
            while ready := self._ready():
                has_collected = True
                for task_id, state in ready.items():
                    result = state["result"]
                    self._take(task_id, result)
            if not has_collected and self._pending:
                self._handle_missing_results()
        if self._refused:
            raise UserError(
                f"The worker refuses the request: {self._refused} Correct the option, "
                "and submit again."
            )

    def _take(self, task_id: str, result: Any) -> None:
        """Settle the posts of a message with its result: an outcome for each, or an error."""
        posts = self._pending.pop(task_id)
        if isinstance(result, RequestRefused):
            self._refused = sentence(str(result))
        if isinstance(result, Exception):
            error = {"error": str(result)}
            result = [error] * len(posts)
        for post, outcome in zip(posts, result, strict=True):
            index = self._places[post.id]
            self._settle(index, outcome)
        self._backend.forget(task_id)

    def _ready(self) -> dict[str, Mapping[str, Any]]:
        """Return some of the results that are there."""
        # Older messages are done first, but messages can overtake each other.
        outstanding = list(self._pending)
        for task_ids in batched(outstanding, RESULTS_AT_ONCE):
            results = self._backend.get_many(
                task_ids,
                interval=0,
                max_iterations=1,
            )
            states = dict(results)
            if states:
                return states
        return {}

    def _handle_missing_results(self) -> None:
        """Send messages again whose results have expired, and settle those that were purged.

        Does nothing while workers may settle posts of the run, and for EXPIRED_AFTER_S after that.
        """
        # Depth first: a message's results are counted before it leaves the queue.
        depth = queue_depth(self._redis, self._settings.queue)
        progress = runs.progress(self._redis, self.name)
        # A worker that finishes a message after the purge creates a record without sent posts.
        is_known = progress is not None and progress.sent > 0
        is_pending = progress is not None and progress.pending > 0
        if is_known and is_pending and any(depth):
            self._missing_since = None
            return
        now = time.monotonic()
        if self._missing_since is None:
            self._missing_since = now
        duration = now - self._missing_since
        if duration < EXPIRED_AFTER_S:
            return
        if is_known and not is_pending:
            self._send_again()
        else:
            self._settle_purged()

    def _settle_purged(self) -> None:
        """Settle the posts of messages that were purged with their run or their queue."""
        for post in self._pending_posts():
            index = self._places[post.id]
            self._settle(index, {"error": LEFT_QUEUE})
        self._pending.clear()

    def _send_again(self) -> None:
        """Send the messages without a result again.

        The worker answers from the store what it has classified.
        """
        posts = self._pending_posts()
        self._pending.clear()
        self._missing_since = None
        self._send(posts)


def id_of(item: Item, post: Post) -> str:
    """Return the item's own id, or one derived from its text."""
    own_id = item.id or ""
    own_id = own_id.strip()[:MAX_ID]
    return own_id or id_of_text(post.title, post.body)


def complete(item: Item, post: Post, own_id: str) -> Post:
    """Return the item's post with its id and the other valid fields of its dictionary, which are
    read as in files.
    """
    own_fields = {
        "id": own_id,
        "title": post.title,
        "body": post.body,
    }
    if item.given:
        text_keys = {str(key): value for key, value in item.given.items()}
        # The keys of its own fields may have other names.
        given_fields = normalize_keys(text_keys)
        fields = given_fields | own_fields
        for parsed_post in parse_post(fields, ""):
            if isinstance(parsed_post, Post):
                post = parsed_post
                break
    return post.model_copy(update=own_fields)


def submit(
    items: Any,
    labels: Labels | None = None,
    *,
    run: str | None = None,
    title: Any = None,
    body: Any = None,
    id: Any = None,  # noqa: A002 - the name of the field
    template: str | None = None,
    multi_label: bool = False,
    none: float | bool | None = None,
    prefix: str = "",
    queue: str | None = None,
    redis_url: str | None = None,
) -> SubmittedRun:
    """Send texts, dictionaries or a DataFrame to the queue, for running workers to classify.

    Returns once all items are in the queue. Waits while the queue is full.

    Args:
        items: What to classify; see `feedmill.classify`.
        labels: Names or descriptions of the labels. Default: those of the worker.
        run: Name of the run, at most 100 characters. Ids are unique within their run: items that
            were classified under the same name before are not computed again. Default: a new name
                with the time.
        title, body, template, multi_label, none, prefix: See `feedmill.classify`.
        id: Key or column with an id. Default: `id` or `post_id`. An item without one gets an id
            derived from its text. A repeated id gets the position appended.
        queue: Name of a queue that a worker has served. Default: FEEDMILL_QUEUE, which may name a
            new queue, else `feedmill`.
        redis_url: URL of Redis. Default: FEEDMILL_REDIS_URL, else the running `feedmill up`, else
            localhost.

    Returns:
        A handle with `progress()`, `wait()`, `results()` and `to_frame()`.

    Raises:
        feedmill.UserError: For an invalid argument, a queue that no worker has served, or if Redis
            is unreachable. Items sent before are in the queue.

    Example:
        run = feedmill.submit(frame, labels=["praise", "complaint"], run="monday")
        labelled = run.wait(timeout=600, progress=True).to_frame()
    """
    options = read_options(labels, template, multi_label, none)
    if run is None:
        now = datetime.now()
        ending = token_hex(2)
        name = f"python {now:%Y-%m-%d %H:%M:%S} {ending}"
    else:
        name = parse_run(run)
    settings = load_arguments(redis_url=redis_url, queue=queue)
    if settings.celery_results != "redis":
        raise UserError(
            "submit reads results from Redis: set FEEDMILL_CELERY_RESULTS=redis, also "
            "for the workers."
        )
    names = (id, title, body)
    request = Request(
        items,
        options,
        names,
        prefix=prefix,
        has_languages=settings.languages is not None,
    )
    if request.table is not None:
        request.table.check_new(request.columns())
    redis = connect(settings)
    with user_errors(settings):
        if queue is not None:
            check_queue(redis, queue)
        check_options(redis, settings.queue, options)
        problem = missing_worker(redis, settings)
        if problem:
            initial = problem[0].upper()
            warning = sentence(initial + problem[1:])
            warn(warning)
    submitted = SubmittedRun(
        name,
        request,
        settings,
        redis,
    )
    submitted._send()
    return submitted
