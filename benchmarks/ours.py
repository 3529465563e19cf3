"""Feedmill itself as two of the benchmark's variants, and the ideal that both it and its rivals are held against."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from threading import Lock
from time import perf_counter, sleep
from typing import Any

from benchmarks.rivals import Job
from feedmill.stack import WORKER_NODE, Stack
from feedmill.watch import worker_statistics
from producers.push import Pusher
from shared.broker import connect, make_app
from shared.errors import StackError
from shared.keys import result_key
from shared.messages import ClassifyOptions, Post
from shared.results import ResultsStore
from shared.settings import Settings
from workers.classifiers import Classifier, LabelSet, Row
from workers.classifiers.choose import load_classifier

#: Token budgets that the ideal tries, on a CPU and on any other device.
CPU_BUDGETS = (512, 1024, 2048, 3072, 4096, 8192)
GPU_BUDGETS = (16_384, 32_768, 65_536, 131_072, 262_144)
#: Seconds between two looks at the number of results.
PAUSE = 0.02
#: Seconds without any new result after which a run is given up.
STALLED = 120.0


class Ideal:
    """Feedmill's own model code without a queue: the whole backlog tokenized, sorted by length, cut by a token budget.

    Whatever takes posts as they come pads more, or waits. `tune` finds its best token budget and number of lanes.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._budgets = CPU_BUDGETS if job.device.torch.type == "cpu" else GPU_BUDGETS
        #: The fastest pair, as far as `tune` has been asked; the middle of what it would try before.
        self.token_budget = self._budgets[len(self._budgets) // 2 - 1]
        self.lanes = job.device.lanes
        self._classifier: Classifier | None = None
        self._labels: list[str] = []

    def start(self) -> None:
        self._classifier = load_classifier(self._job.settings, self._job.device)

    def stop(self) -> None:
        self._classifier = None
        self._job.device.take_share(1)

    def run(self, posts: Sequence[Post]) -> None:
        self._run(posts, self.token_budget, self.lanes)

    def labels(self) -> list[str]:
        return self._labels

    def lengths(self, posts: Sequence[Post]) -> list[int]:
        """Tokens of each post, as the model reads it."""
        rows, _ = self._prepare(posts)
        return [row.length for row in rows]

    def tune(self, sample: Sequence[Post]) -> None:
        """Keep the fastest token budget, and cores that share a batch or have one each.

        Each pair is tried twice, since machines are shared.
        """
        pairs = list(product(self._budgets, sorted({1, self._job.device.lanes})))
        seconds: dict[tuple[int, int], float] = {}
        for pair in pairs + pairs:
            began = perf_counter()
            self._run(sample, *pair)
            seconds[pair] = min(perf_counter() - began, seconds.get(pair, float("inf")))
        self.token_budget, self.lanes = min(seconds, key=seconds.__getitem__)

    def _prepare(self, posts: Sequence[Post]) -> tuple[list[Row], Classifier]:
        if self._classifier is None:
            raise StackError("the ideal was not started.")
        label_set: LabelSet = self._classifier.label_set(ClassifyOptions())
        rows = []
        for number, of_post in enumerate(self._classifier.prepare([post.text for post in posts], label_set)):
            for row in of_post:
                row.owner = number
                rows.append(row)
        return rows, self._classifier

    def _run(self, posts: Sequence[Post], token_budget: int, lanes: int) -> None:
        rows, classifier = self._prepare(posts)
        batches = cut(sorted(rows, key=lambda row: row.length), token_budget)
        best: dict[int, str] = {}
        lock = Lock()

        def finish(batch: Sequence[Row], outputs: Any) -> None:
            outputs.wait()
            with lock:  # a post's rows may have been computed by several lanes
                for row, scores in classifier.finish(batch, outputs):
                    best[row.owner] = max(scores, key=scores.__getitem__)

        def lane() -> None:
            self._job.device.take_share(lanes)
            # Finished one batch late: a GPU is then given the next one before anyone waits for the last.
            late: tuple[Sequence[Row], Any] | None = None
            while True:
                with lock:
                    batch = next(batches, None)
                if batch is None:
                    break
                outputs = classifier.forward(batch)
                if late:
                    finish(*late)
                late = batch, outputs
            if late:
                finish(*late)

        with ThreadPoolExecutor(lanes) as pool:
            for done in [pool.submit(lane) for _ in range(lanes)]:
                done.result()
        self._labels = [best[number] for number in range(len(posts))]


def ran(pool: dict[str, Any]) -> dict[str, str]:
    """Device, precision and model of a worker, from what it reports of its pool."""
    where, _, how = str(pool["device"]).partition(" in ")
    return {"device": where, "dtype": how.partition(":")[0], "model": str(pool["model"]), "weights": pool["weights"]}


def cut(rows: Sequence[Row], token_budget: int) -> Iterator[list[Row]]:
    """Cut sorted rows into batches whose longest row times their rows is at most the budget."""
    batch: list[Row] = []
    for row in rows:
        if batch and (len(batch) + 1) * row.length > token_budget:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


class Feedmill:
    """The real system: producer, Redis, a worker process with events on, Flower listening, the results store."""

    def __init__(self, job: Job, posts_per_message: int) -> None:
        self._device = job.device
        self._settings: Settings = job.settings.model_copy(update={"posts_per_message": posts_per_message})
        self._folder: Path = job.folder / f"feedmill_{posts_per_message}"
        self._stack: Stack | None = None
        self._posts: Sequence[Post] = ()
        #: Seconds that the device computed during the last `run`; known once `labels` was called.
        self.device_seconds = 0.0
        #: Device, precision and model, as the worker reports them; known once `labels` was called.
        self.ran: dict[str, str] = {}
        #: Share of the computed tokens that were real ones, since the worker started.
        self.padding_efficiency = 0.0
        self._device_seconds_before = 0.0

    def start(self) -> None:
        self._stack = Stack(self._settings, self._folder, durable=False)
        for _ in self._stack.start():
            pass
        self._redis = connect(self._stack.settings)
        self._store = ResultsStore(self._redis, self._stack.settings)
        self._device_seconds_before = 0.0

    def stop(self) -> None:
        if self._stack:
            self._stack.stop()
            self._stack = None

    def run(self, posts: Sequence[Post]) -> None:
        stack = self._started()
        self._posts = posts
        before = self._finished()
        Pusher(make_app(stack.settings), self._redis, stack.settings, ClassifyOptions(), again=True).push(posts)
        seen, since = 0, perf_counter()
        while (finished := self._finished() - before) < len(posts):
            if finished > seen:
                seen, since = finished, perf_counter()
            stack.check()
            if perf_counter() - since > STALLED:
                raise StackError(f"the worker stopped at {finished} of {len(posts)} results.")
            sleep(PAUSE)

    def labels(self) -> list[str]:
        pool = worker_statistics(make_app(self._started().settings))[WORKER_NODE]
        self.ran = ran(pool)
        if (found := self.ran["dtype"]) != (wanted := str(self._device.dtype).removeprefix("torch.")):
            raise StackError(f"the worker computed in {found}, and the benchmark's other variants in {wanted}.")
        self.device_seconds = pool["device_seconds"] - self._device_seconds_before
        self._device_seconds_before = pool["device_seconds"]
        self.padding_efficiency = pool["padding_efficiency"]
        labels = [self._store.get(post.id)[-1].label for post in self._posts]
        # Else the next round would be answered from the store.
        for start in range(0, len(self._posts), 1000):
            self._redis.unlink(*(result_key(post.id) for post in self._posts[start : start + 1000]))
        return labels

    def _finished(self) -> int:
        counters = self._store.counters()
        if counters.failed:
            raise StackError(f"{counters.failed} posts failed; see the worker's log in {self._folder}.")
        return counters.stored + counters.repeated

    def _started(self) -> Stack:
        if self._stack is None:
            raise StackError("the stack was not started.")
        return self._stack
