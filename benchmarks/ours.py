"""The benchmark's variants of Feedmill itself, and the offline ideal that all variants are
compared with.
"""

import asyncio
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from threading import Lock
from time import perf_counter, sleep
from typing import Any

from benchmarks.rivals import BenchmarkJob, NotInstalled
from benchmarks.rivals.by_http import ask_all
from benchmarks.rivals.processes import Processes
from benchmarks.running import free_port
from feedmill.monitoring.watch import worker_statistics
from feedmill.producers.push import Pusher
from feedmill.shared.broker import connect, make_app
from feedmill.shared.errors import StackError
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.purge import forget
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from feedmill.stack.embedded import WORKER_NODE, Stack
from feedmill.stack.processes import python_command
from feedmill.workers.models.classifiers import Classifier, LabelSet, Row
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.device import keep_freed_memory
from feedmill.workers.models.shapes import EXACT, Shapes

#: Token budgets that the ideal tries on a CPU and on other devices.
CPU_BUDGETS = (512, 1024, 2048, 3072, 4096, 8192)
GPU_BUDGETS = (16_384, 32_768, 65_536, 131_072, 262_144)
#: Seconds between checks of the number of results.
POLL_INTERVAL_S = 0.02
#: Seconds without a new result after which the run aborts.
STALL_TIMEOUT_S = 120.0


class Ideal:
    """Feedmill's model code without a queue: tokenize all posts, sort rows by length, cut batches
    by a token budget.

    This is an upper bound: a system that receives posts over time has to pad more, or wait. `tune`
    finds the best token budget and number of lanes.
    """

    def __init__(self, job: BenchmarkJob) -> None:
        self._job = job
        self._budgets = CPU_BUDGETS if job.device.torch.type == "cpu" else GPU_BUDGETS
        #: Token budget and number of lanes: defaults until `tune` sets the fastest pair.
        self.token_budget = self._budgets[len(self._budgets) // 2 - 1]
        self.lanes = job.device.lanes
        self._classifier: Classifier | None = None
        self._labels: list[str] = []

    def start(self) -> None:
        keep_freed_memory(self._job.device.torch)
        self._classifier = load_classifier(self._job.settings, self._job.device)

    def stop(self) -> None:
        self._classifier = None
        self._job.device.take_share(1)

    def run(self, posts: Sequence[Post]) -> None:
        self._run(posts, self.token_budget, self.lanes)

    def labels(self) -> list[str]:
        return self._labels

    def lengths(self, posts: Sequence[Post]) -> list[int]:
        """Return the number of tokens of each post."""
        rows, _ = self._prepare(posts)
        return [row.length for row in rows]

    def tune(self, sample: Sequence[Post]) -> None:
        """Set the fastest pair of token budget and number of lanes (one lane, or the device's
        number).

        Each pair is measured twice, because other processes may slow the machine down.
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
            raise StackError("The variant `ideal` was not started.")
        label_set: LabelSet = self._classifier.label_set(ClassifyOptions())
        rows = []
        for number, of_post in enumerate(
            self._classifier.prepare([post.text for post in posts], label_set)
        ):
            for row in of_post:
                row.owner = number
                rows.append(row)
        return rows, self._classifier

    def _run(self, posts: Sequence[Post], token_budget: int, lanes: int) -> None:
        rows, classifier = self._prepare(posts)
        batches = cut(
            sorted(rows, key=lambda row: row.length),
            token_budget,
            self._job.device.shapes,
        )
        best: dict[int, str] = {}
        lock = Lock()

        def finish(batch: Sequence[Row], outputs: Any) -> None:
            outputs.wait()
            with lock:  # several lanes may have computed rows of one post
                for row, scores in classifier.finish(batch, outputs):
                    best[row.owner] = max(scores, key=scores.__getitem__)

        def lane() -> None:
            self._job.device.take_share(lanes)
            # Each batch is finished one batch late, so that a GPU gets its next batch before this
            # thread waits.
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
    """Extract a worker's device, precision and model from its pool statistics."""
    where, _, how = str(pool["device"]).partition(" in ")
    return {
        "device": where,
        "dtype": how.partition(":")[0],
        "model": str(pool["model"]),
        "weights": pool["weights"],
    }


def cut(
    rows: Sequence[Row], token_budget: int, shapes: Shapes = EXACT
) -> Iterator[list[Row]]:
    """Cut sorted rows into batches, each with at most `token_budget` tokens including padding."""
    batch: list[Row] = []
    for row in rows:
        if batch and shapes.tokens(len(batch) + 1, row.length) > token_budget:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


class FeedmillVariant:
    """The complete system: producer, Redis, a worker process with events on, Flower listening, the
    results store.
    """

    def __init__(self, job: BenchmarkJob, posts_per_message: int) -> None:
        self._device = job.device
        self._settings: Settings = job.settings.model_copy(
            update={"posts_per_message": posts_per_message}
        )
        self._folder: Path = job.folder / f"feedmill_{posts_per_message}"
        self._stack: Stack | None = None
        self._posts: Sequence[Post] = ()
        #: Computing time of the device in the last `run`, in seconds; set by `labels`.
        self.device_seconds = 0.0
        #: Device, precision and model as reported by the worker; set by `labels`.
        self.ran: dict[str, str] = {}
        #: Share of real tokens among all computed tokens since the worker started; set by
        #: `labels`.
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
        Pusher(
            make_app(stack.settings),
            self._redis,
            stack.settings,
            ClassifyOptions(),
            again=True,
        ).push(posts)
        seen, since = 0, perf_counter()
        while (finished := self._finished() - before) < len(posts):
            if finished > seen:
                seen, since = finished, perf_counter()
            stack.check()
            if perf_counter() - since > STALL_TIMEOUT_S:
                raise StackError(
                    f"The worker stalled after {finished} of {len(posts)} results."
                )
            sleep(POLL_INTERVAL_S)

    def labels(self) -> list[str]:
        pool = worker_statistics(make_app(self._started().settings))[WORKER_NODE]
        self.ran = ran(pool)
        if (found := self.ran["dtype"]) != (
            wanted := str(self._device.dtype).removeprefix("torch.")
        ):
            raise StackError(
                f"The worker computed in {found}, but the other variants compute in {wanted}."
            )
        self.device_seconds = pool["device_seconds"] - self._device_seconds_before
        self._device_seconds_before = pool["device_seconds"]
        self.padding_efficiency = pool["padding_efficiency"]
        labels = [self._store.get(post.id)[-1].best_label for post in self._posts]
        # Otherwise, the next round would find these results instead of computing its own.
        for start in range(0, len(self._posts), 1000):
            forget(self._redis, [post.id for post in self._posts[start : start + 1000]])
        return labels

    def _finished(self) -> int:
        counters = self._store.counters()
        if counters.failed:
            raise StackError(
                f"{counters.failed} posts failed. See the worker's log in {self._folder}."
            )
        return counters.stored + counters.repeated

    def _started(self) -> Stack:
        if self._stack is None:
            raise StackError("The embedded stack was not started.")
        return self._stack


class FeedmillOverHttp(FeedmillVariant):
    """The same with `feedmill web` in front: posts are sent and answered over HTTP.

    posts_per_request: IN_FLIGHT such requests wait at a time.
    """

    def __init__(self, job: BenchmarkJob, posts_per_request: int) -> None:
        super().__init__(job, posts_per_message=1)
        if not find_spec("aiohttp"):
            raise NotInstalled("Left out: feedmill_http. Run `make rivals`.")
        self._size = posts_per_request
        self._folder = job.folder / f"feedmill_http_{posts_per_request}"
        self._processes = Processes(job.folder / f"web_{posts_per_request}")

    def start(self) -> None:
        super().start()
        port = free_port()
        self._url = f"http://127.0.0.1:{port}/v1/classify"
        settings = {
            "FEEDMILL_REDIS_URL": self._started().settings.broker_url,
            "FEEDMILL_WEB_RATE": "1000000",
        }
        command = [*python_command(), "web", "--port", str(port)]
        server = self._processes.start("web", command, settings)
        server.wait_until(lambda: is_listening(port))

    def stop(self) -> None:
        self._processes.stop()
        super().stop()

    def run(self, posts: Sequence[Post]) -> None:
        self._posts = posts
        bodies = []
        for start in range(0, len(posts), self._size):
            some = posts[start : start + self._size]
            fields = [post.model_dump(exclude_defaults=True) for post in some]
            bodies.append({"posts": fields, "timeout_s": STALL_TIMEOUT_S})
        answers = asyncio.run(ask_all(self._url, bodies))
        for answer in answers:
            for outcome in answer["results"]:
                if "error" in outcome:
                    raise StackError(f"A post failed: {outcome['error']}")


def is_listening(port: int) -> bool:
    """Return whether a server of this machine listens on a port."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False
