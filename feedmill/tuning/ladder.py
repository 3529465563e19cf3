"""The ladder: one step after another from the transformers pipeline to the queue, on the same
posts and labels.

Each rung has the same weights, precision and threads. A rung is measured on as many of the posts
as fit in RUNG_S seconds. Its labels are compared with those of the rung `feedmill, offline`: a
faster way with other labels is no gain.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console

from feedmill.shared.errors import StackError
from feedmill.shared.messages import Classification, ClassifyOptions, Post
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from feedmill.tuning.plain import PlainModel, UnsupportedKindError, plain_model
from feedmill.tuning.trials import Unmeasured
from feedmill.workers.models.classifiers import Classifier
from feedmill.workers.pipeline import offline
from feedmill.workers.pipeline.backlog import Loaded

#: Seconds that a rung takes about, and the fewest posts of a rung.
RUNG_S = 15.0
MIN_POSTS = 16
#: Posts on which batch sizes are tried, and the sizes in rows.
PILOT_POSTS = 8
BATCH_SIZES = (8, 16, 32, 64)
#: Seconds between two looks at the number of results.
POLL_INTERVAL_S = 0.02
#: Seconds without a new result after which the queue is given up.
STALL_S = 120.0
#: The rung whose labels the others are compared with.
OFFLINE = "feedmill, offline"
QUEUE = "feedmill, through the queue"

Labels = list[str | None]


@dataclass(frozen=True)
class Rung:
    """The measurement of one way to classify."""

    name: str
    posts: int
    seconds: float
    labels: Labels

    @property
    def posts_per_s(self) -> float:
        return self.posts / self.seconds

    def same_labels(self, reference: "Rung") -> float:
        """Return the share of this rung's posts that have the reference's label."""
        same = 0
        for label, other in zip(self.labels, reference.labels, strict=False):
            if label == other:
                same += 1
        compared_posts = min(self.posts, reference.posts)
        return same / compared_posts


@dataclass(frozen=True)
class Ladder:
    """The rungs in order, slowest idea first, and those that were not measured."""

    rungs: Sequence[Rung]
    unmeasured: Sequence[Unmeasured]

    @property
    def reference(self) -> Rung:
        return next(rung for rung in self.rungs if rung.name == OFFLINE)

    def gain(self, rung: Rung) -> float | None:
        """Return how many times as fast a rung is as the one before it; None for the first."""
        index = list(self.rungs).index(rung)
        if index == 0:
            return None
        before = self.rungs[index - 1]
        return rung.posts_per_s / before.posts_per_s


class Way(Protocol):
    """A way to classify posts, ready to run."""

    name: str

    def run(self, posts: Sequence[Post]) -> Labels:
        """Return the best label of each post, None for one without."""


class PipelineWay:
    """transformers' pipeline for the model's kind."""

    def __init__(self, model: PlainModel, batch_size: int) -> None:
        self._pipeline = model.pipeline()
        self._model = model
        self._batch_size = batch_size
        self.name = "pipeline, row by row"
        if batch_size > 1:
            self.name = f"pipeline, batches of {batch_size}"

    def run(self, posts: Sequence[Post]) -> Labels:
        texts = [post.text for post in posts]
        return self._model.pipeline_labels(
            self._pipeline,
            texts,
            self._batch_size,
        )


class DirectWay:
    """A forward pass of one's own over padded batches, in arrival order or sorted by length."""

    def __init__(
        self, model: PlainModel, batch_size: int, is_sorted: bool = False
    ) -> None:
        self._model = model
        self._batch_size = batch_size
        self._is_sorted = is_sorted
        arrangement = f"batches of {batch_size}"
        if batch_size == 1:
            arrangement = "row by row"
        elif is_sorted:
            arrangement = "sorted by length"
        self.name = f"direct pass, {arrangement}"

    def run(self, posts: Sequence[Post]) -> Labels:
        texts = [post.text for post in posts]
        rows = self._model.rows(texts)
        count = len(rows)
        order = list(range(count))
        if self._is_sorted:
            order.sort(key=lambda index: len(rows[index].ids))
        output_of: dict[int, torch.Tensor] = {}
        for start in range(0, count, self._batch_size):
            indexes = order[start : start + self._batch_size]
            batch = [rows[index] for index in indexes]
            outputs = self._model.outputs(batch)
            output_of.update(zip(indexes, outputs, strict=True))
        in_order = [output_of[index] for index in range(count)]
        return self._model.labels(torch.stack(in_order))


class OfflineWay:
    """A worker's pipeline without the queue, as in `feedmill classify FILE`."""

    name = OFFLINE

    def __init__(self, classifier: Classifier, settings: Settings, budget: int) -> None:
        self._classifier = classifier
        self._settings = settings
        self._budget = budget

    def run(self, posts: Sequence[Post]) -> Labels:
        model = Loaded(self._classifier, self._budget)
        labels: Labels = []
        for _, outcome in offline.classify(posts, [model], self._settings):
            label = None
            if isinstance(outcome, Classification):
                label = outcome.label
            labels.append(label)
        return labels


class QueueWay:
    """The whole system: Redis, a worker and Flower, started for this measurement."""

    name = QUEUE

    def __init__(self, stack: Any) -> None:
        self._stack = stack
        self._runs = 0

    def run(self, posts: Sequence[Post]) -> Labels:
        # Imported late: Celery, which the other rungs do not need.
        from feedmill.outcomes.followers import newest  # noqa: PLC0415
        from feedmill.producers.push import Pusher  # noqa: PLC0415
        from feedmill.shared.broker import connect, make_app  # noqa: PLC0415

        settings = self._stack.settings
        redis = connect(settings)
        store = ResultsStore(redis, settings)
        self._runs += 1
        # Ids of their own, since posts that were sent before are skipped.
        renamed = []
        for post in posts:
            changes = {"id": f"{self._runs}-{post.id}"}
            renamed.append(post.model_copy(update=changes))
        count = len(renamed)
        done_before = store.counters().settled
        app = make_app(settings)
        pusher = Pusher(
            app,
            redis,
            settings,
            ClassifyOptions(),
        )
        pusher.push(renamed)
        self._wait_for(store, done_before + count)
        labels = {}
        for result in newest(redis, count):
            labels[result.post.id] = result.classification.label
        return [labels.get(post.id) for post in renamed]

    def _wait_for(self, store: ResultsStore, count: int) -> None:
        """Wait until the store has handled as many posts.

        Raises StackError if nothing happens for STALL_S.
        """
        done = 0
        changed_at = time.monotonic()
        while done < count:
            self._stack.check()
            time.sleep(POLL_INTERVAL_S)
            now_done = store.counters().settled
            if now_done != done:
                done = now_done
                changed_at = time.monotonic()
            if time.monotonic() - changed_at > STALL_S:
                raise StackError(
                    f"The worker stored no result for {STALL_S:.0f} seconds. Its log "
                    "shows the reason."
                )


def climb(
    classifier: Classifier,
    settings: Settings,
    budget: int,
    posts: Sequence[Post],
    notes: Console,
    say: Callable[[str], None],
) -> Ladder:
    """Measure each rung. say: called with each rung's name before it is measured."""
    rungs: list[Rung] = []
    unmeasured: list[Unmeasured] = []
    numbered = []
    for number, post in enumerate(posts):
        changes = {"id": str(number)}
        numbered.append(post.model_copy(update=changes))

    def measure(way: Way) -> None:
        say(way.name)
        rungs.append(measured(way, numbered))

    try:
        for way in _plain_ways(classifier, settings, numbered, say):
            measure(way)
            del way
    except UnsupportedKindError as error:
        unmeasured.append(Unmeasured("pipeline and direct pass", str(error)))
    gc.collect()  # the plain model, before the next one takes its memory
    measure(OfflineWay(classifier, settings, budget))
    try:
        _through_the_queue(settings, notes, measure)
    except StackError as error:
        unmeasured.append(Unmeasured(QUEUE, str(error)))
    return Ladder(rungs, unmeasured)


def _plain_ways(
    classifier: Classifier,
    settings: Settings,
    posts: Sequence[Post],
    say: Callable[[str], None],
) -> Iterator[Way]:
    """Yield the ways without Feedmill, in the order of the ladder. Raises UnsupportedKindError."""
    say("loading the model with transformers")
    classifier.device.take_share(1)
    model = plain_model(classifier, settings)
    pilot = posts[:PILOT_POSTS]
    if model.has_pipeline:
        yield PipelineWay(model, 1)
        say("trying batch sizes of the pipeline")
        yield fastest(
            [PipelineWay(model, size) for size in BATCH_SIZES],
            pilot,
        )
    else:
        yield DirectWay(model, 1)
    say("trying batch sizes of the direct pass")
    yield fastest(
        [DirectWay(model, size) for size in BATCH_SIZES],
        pilot,
    )
    yield fastest(
        [DirectWay(model, size, is_sorted=True) for size in BATCH_SIZES],
        pilot,
    )


def _through_the_queue(
    settings: Settings, notes: Console, measure: Callable[[Way], None]
) -> None:
    """Start Redis, a worker and Flower, measure, and stop them. Raises StackError."""
    # Celery, which the other rungs do not need.
    from feedmill.stack.embedded import Stack, start  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="feedmill-tune-") as folder:
        stack = Stack(settings, Path(folder), durable=False)
        try:
            start(stack, notes)
            measure(QueueWay(stack))
        finally:
            stack.stop()


def measured(way: Way, posts: Sequence[Post]) -> Rung:
    """Measure a way on as many posts as fit in RUNG_S seconds, at least MIN_POSTS, after a
    warm-up.
    """
    pilot = posts[:PILOT_POSTS]
    pilot_seconds = seconds_of(way, pilot)
    seconds_per_post = pilot_seconds / len(pilot)
    count = round(RUNG_S / seconds_per_post)
    measured_posts = posts[: max(MIN_POSTS, count)]
    began = time.perf_counter()
    labels = way.run(measured_posts)
    seconds = time.perf_counter() - began
    return Rung(
        name=way.name,
        posts=len(measured_posts),
        seconds=seconds,
        labels=labels,
    )


def fastest(ways: Sequence[Way], posts: Sequence[Post]) -> Way:
    """Return the fastest of several ways on a few posts."""
    return min(ways, key=lambda way: seconds_of(way, posts))


def seconds_of(way: Way, posts: Sequence[Post]) -> float:
    began = time.perf_counter()
    way.run(posts)
    return time.perf_counter() - began
