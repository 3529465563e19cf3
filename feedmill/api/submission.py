"""Classify items through a running queue: send them as one run, and collect the outcomes.

Each message's Celery result has one outcome per post, in order, failures included. The results store cannot replace it:
it does not know failures, and an id may have results of other labels. Celery keeps a result for an hour
(CELERY_RESULT_TTL_S); a message whose result expired uncollected is sent again, and the worker answers it from the
results store without computing.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import count, islice
from secrets import token_hex
from typing import Any, NamedTuple

from redis import Redis
from tqdm import tqdm

from feedmill.api.request import Failures, Item, Labels, Prediction, Predictions, Request, read_options, warn
from feedmill.producers.push import Pusher
from feedmill.producers.records import id_of_text, normalize_keys, parse_post
from feedmill.shared import runs
from feedmill.shared.broker import connect, make_app
from feedmill.shared.errors import RequestRefused, UserError, sentence
from feedmill.shared.messages import MAX_ID, Post, parse_run
from feedmill.shared.model_routing import check_options, check_queue, missing_worker
from feedmill.shared.redis_errors import user_errors
from feedmill.shared.settings import Settings, load_arguments

#: Results fetched from Redis at once. One of 32 posts and 16 labels has about 25 KB.
RESULTS_AT_ONCE = 64
#: Seconds between two looks at the results: at first, and at most.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
#: Seconds for which all posts must be settled without a result of their message, before the message is sent again.
EXPIRED_AFTER_S = 10.0
#: Reason for posts that were deleted with `feedmill purge`.
PURGED = "purged: the post was deleted, and is not sent again"


class SubmittedProgress(NamedTuple):
    """Progress of a submitted run: items sent, items with an outcome, and those of them without a label."""

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

    def __init__(self, name: str, request: Request, settings: Settings, redis: Redis) -> None:
        self.name = name
        self._request, self._settings, self._redis = request, settings, redis
        self._backend: Any = make_app(settings, current=False).backend
        self._lock = threading.Lock()
        self._items: list[Item] = []
        #: Place of each post's item, by the post's id.
        self._places: dict[str, int] = {}
        #: Messages without an outcome: task id -> posts.
        self._pending: dict[str, Sequence[Post]] = {}
        self._found: dict[int, Prediction] = {}
        self._failed = 0
        #: Time at which all posts were first seen settled although results are missing; None if they are not.
        self._settled_at: float | None = None
        #: The worker's reason to refuse the options.
        self._refused = ""

    # Sending.

    def _send(self, posts: Iterable[Post] | None = None) -> None:
        """Send posts: those of the request, unless others are given."""
        pusher = Pusher(
            make_app(self._settings, current=False), self._redis, self._settings, self._request.options, again=True,
            run=self.name, on_published=self._pending.__setitem__,
        )  # fmt: skip
        with user_errors(self._settings):
            pusher.push(self._posts() if posts is None else posts)
        published = {self._places[post.id] for posts in self._pending.values() for post in posts}
        for place in range(len(self._items)):
            if place not in self._found and place not in published:
                self._settle(place, {"error": PURGED})

    def _posts(self) -> Iterator[Post]:
        for place, item in enumerate(self._request.items):
            self._items.append(item)
            if isinstance(item.post, str):
                self._settle(place, {"error": item.post})
                continue
            post = _complete(item, item.post, self._unique_id(item, item.post, place))
            self._places[post.id] = place
            yield post

    def _unique_id(self, item: Item, post: Post, place: int) -> str:
        """Return the item's id, or one derived from its text. A number is appended to an id that occurred before."""
        own = (item.id or "").strip()[:MAX_ID] or id_of_text(post.title, post.body)
        if own not in self._places:
            return own
        numbered = (f"{own[: MAX_ID - len(f'~{number}')]}~{number}" for number in count(place))
        return next(each for each in numbered if each not in self._places)

    def _settle(self, place: int, outcome: Mapping[str, Any]) -> None:
        self._found[place] = self._items[place].prediction(outcome)
        self._failed += "error" in outcome

    # Collecting.

    def progress(self) -> SubmittedProgress:
        """Return how many items were sent, are done, and failed. Raises feedmill.UserError if Redis is unreachable."""
        self._collect()
        return SubmittedProgress(len(self._items), len(self._found), self._failed)

    def wait(self, timeout: float | None = None, *, progress: bool = False) -> "SubmittedRun":
        """Wait until every item has an outcome, and return this run.

        Args:
            timeout: Seconds to wait. Default: as long as it takes, also while no worker runs.
            progress: Show a progress bar, in a terminal or a notebook.

        Raises:
            TimeoutError: If the time is over. The workers continue; call `wait` again.
            feedmill.UserError: If Redis is unreachable, or the worker refuses the labels.
        """
        deadline, pause = None if timeout is None else time.monotonic() + timeout, FIRST_PAUSE_S
        with tqdm(desc=self.name, total=len(self._items), disable=not progress) as bar:
            while not (found := self.progress()).finished:
                bar.update(found.done - bar.n)
                left = pause if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"{found.done:,} of {found.sent:,} items of run {self.name!r} in queue {self._settings.queue} "
                        f"are done after {timeout:g} s. Call wait again, or check with `feedmill status` that a worker "
                        "serves this queue."
                    )
                time.sleep(min(pause, left))
                pause = min(2 * pause, MAX_PAUSE_S)
            bar.update(found.done - bar.n)
        return self

    def results(self, timeout: float | None = None) -> Predictions:
        """Wait, and return the predictions in the order of the items. Warns about those without a label.

        Raises like `wait`.
        """
        self.wait(timeout)
        failures = Failures()
        predictions = (self._found[place] for place in range(len(self._items)))
        found = Predictions(failures.watch(predictions), tuple(self._request.options.labels or ()))
        failures.warn(self._request.unit)
        return found

    def to_frame(self, *, scores: bool = False, timeout: float | None = None) -> Any:
        """Wait, and return a DataFrame. Raises like `wait`.

        For a DataFrame or a Series, the result is the one of `feedmill.classify`. For other items, it is a DataFrame of
        texts and labels.
        """
        found = self.results(timeout)
        if self._request.table is None:
            return found.to_frame(scores=scores)
        return self._request.table.labelled(found, found.score_labels if scores else (), self._request.prefix)

    def __repr__(self) -> str:
        return f"<feedmill.SubmittedRun {self.name!r}: {len(self._found):,} of {len(self._items):,} done>"

    def _collect(self) -> None:
        """Fetch the results that are there."""
        with self._lock, user_errors(self._settings):
            collected = False
            while ready := self._ready():
                collected = True
                for task_id, state in ready.items():
                    posts, outcomes = self._pending.pop(task_id), state["result"]
                    if isinstance(outcomes, RequestRefused):
                        self._refused = sentence(str(outcomes))
                    if isinstance(outcomes, Exception):
                        outcomes = [{"error": str(outcomes)}] * len(posts)
                    for post, outcome in zip(posts, outcomes, strict=True):
                        self._settle(self._places[post.id], outcome)
                    self._backend.forget(task_id)
            if not collected and self._pending and self._is_expired():
                self._send_again()
        if self._refused:
            raise UserError(f"The worker refuses the request: {self._refused} Correct the option, and submit again.")

    def _ready(self) -> dict[str, Mapping[str, Any]]:
        """Return some of the results that are there."""
        # Older messages are done first, but messages can overtake each other.
        outstanding = iter(list(self._pending))
        while wanted := list(islice(outstanding, RESULTS_AT_ONCE)):
            if found := dict(self._backend.get_many(wanted, interval=0, max_iterations=1)):
                return found
        return {}

    def _is_expired(self) -> bool:
        """Return whether all posts have been settled for a while, although results are missing."""
        found = runs.progress(self._redis, self.name)
        if found is None or found.pending:
            self._settled_at = None
            return False
        now = time.monotonic()
        if self._settled_at is None:
            self._settled_at = now
        return now - self._settled_at >= EXPIRED_AFTER_S

    def _send_again(self) -> None:
        """Send the messages without a result again. The worker answers from the store what it has classified."""
        posts = [post for posts in self._pending.values() for post in posts]
        self._pending.clear()
        self._settled_at = None
        self._send(posts)


def _complete(item: Item, post: Post, own_id: str) -> Post:
    """Return the item's post with its id and the other valid fields of its dictionary, which are read as in files."""
    if item.given:
        fields = normalize_keys({str(key): value for key, value in item.given.items()})
        fields |= {"id": own_id, "title": post.title, "body": post.body}  # their keys may have other names
        found = next((each for each in parse_post(fields, "") if isinstance(each, Post)), post)
    else:
        found = post
    return found.model_copy(update={"id": own_id, "title": post.title, "body": post.body})


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
    prefix: str = "",
    queue: str | None = None,
    redis_url: str | None = None,
) -> SubmittedRun:
    """Send texts, dictionaries or a DataFrame to the queue, for running workers to classify.

    Returns once all items are in the queue. Waits while the queue is full.

    Args:
        items: What to classify; see `feedmill.classify`.
        labels: Names or descriptions of the labels. Default: those of the worker.
        run: Name of the run, at most 100 characters. Ids are unique within their run: items that were classified under
            the same name before are not computed again. Default: a new name with the time.
        title, body, template, multi_label, prefix: See `feedmill.classify`.
        id: Key or column with an id. Default: `id` or `post_id`. An item without one gets an id derived from its
            text. A repeated id gets the position appended.
        queue: Name of a queue that a worker has served. Default: FEEDMILL_QUEUE, which may name a new queue, else
            `feedmill`.
        redis_url: URL of Redis. Default: FEEDMILL_REDIS_URL, else the running `feedmill up`, else localhost.

    Returns:
        A handle with `progress()`, `wait()`, `results()` and `to_frame()`.

    Raises:
        feedmill.UserError: For an invalid argument, a queue that no worker has served, or if Redis is unreachable.
            Items sent before are in the queue.

    Example:
        run = feedmill.submit(frame, labels=["praise", "complaint"], run="monday")
        labelled = run.wait(timeout=600, progress=True).to_frame()
    """
    options = read_options(labels, template, multi_label)
    name = f"python {datetime.now():%Y-%m-%d %H:%M:%S} {token_hex(2)}" if run is None else parse_run(run)
    settings = load_arguments(redis_url=redis_url, queue=queue)
    if settings.celery_results != "redis":
        raise UserError("submit reads results from Redis: set FEEDMILL_CELERY_RESULTS=redis, also for the workers.")
    request = Request(items, options, (id, title, body), prefix=prefix)
    if request.table is not None:
        request.table.check_new((), prefix)
    redis = connect(settings)
    with user_errors(settings):
        if queue is not None:
            check_queue(redis, queue)
        check_options(redis, settings.queue, options)
        if said := missing_worker(redis, settings):
            warn(sentence(said[0].upper() + said[1:]))
    submitted = SubmittedRun(name, request, settings, redis)
    submitted._send()
    return submitted
