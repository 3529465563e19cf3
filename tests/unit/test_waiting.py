"""How many rows a worker lets wait: enough to sort, few enough that a slow device does not keep a fast one waiting.

Simulated devices and a simulated clock; the pool's room, the backlog, the window and the statistics are real.
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.gpu import SIMULATED
from benchmarks.traffic import lengths
from feedmill.shared.settings import Settings
from feedmill.workers.app import MAX_MESSAGES, make_worker_app
from feedmill.workers.models.classifiers import Row
from feedmill.workers.models.device import Device
from feedmill.workers.models.tokenizer import Tokens
from feedmill.workers.pipeline.calibration import TokenBudget
from feedmill.workers.pipeline.context import Owner
from feedmill.workers.pipeline.message import State
from feedmill.workers.pipeline.offline import NullStore
from feedmill.workers.pipeline.pipeline import Pipeline
from feedmill.workers.runtime.pool import DevicePool
from tests.unit.test_pipeline import LABELS, StandIn

#: Posts per message.
POSTS = 32
#: Token ids. Rows of equal length share a slice.
IDS = [[0] * length for length in range(257)]


class Outcome(NamedTuple):
    """finished: seconds at which each device was done. efficiency: share of real tokens until the queue was empty."""

    finished: list[float]
    efficiency: list[float]


class SimulatedWorker:
    """A worker whose device computes as many padded tokens per second as `rows_per_s` rows of `mean` tokens have."""

    def __init__(self, kind: str, rows_per_s: float, token_budget: int, mean: float, **settings: Any) -> None:
        classifier = StandIn()
        classifier.device = Device(torch.device(kind), torch.float16, "for a test")
        # Not started: this object does the work of its threads.
        self.pipeline = Pipeline(classifier, NullStore(), Settings(**settings), TokenBudget(token_budget), "w", Owner())
        self.tokens_per_s = rows_per_s * mean
        self.now = 0.0
        #: Number of messages with waiting rows.
        self.messages = 0

    def fetch(self, queue: deque[Sequence[int]]) -> None:
        """Take as many messages as the pool has room for and Celery allows."""
        room, _ = DevicePool.room(SimpleNamespace(pipeline=self.pipeline, _post_bytes=1.0))  # type: ignore[arg-type]
        while room > 0 and queue and self.messages < MAX_MESSAGES:
            given = queue.popleft()
            message = SimpleNamespace(state=State.STARTED, waiting=len(given))
            rows = [Row(Tokens(IDS[length]), LABELS, SimpleNamespace(message=message)) for length in given]
            self.pipeline._backlog.add(self.pipeline._backlog.latest, rows, 0)
            room -= len(rows)
            self.messages += 1

    def compute(self) -> bool:
        """Compute one micro-batch. Return False if no row waits."""
        if not self.pipeline.waiting():
            return False
        batch = self.pipeline._backlog.next_batch(0)
        assert batch
        shapes = self.pipeline.classifier.device.shapes
        seconds = shapes.tokens(len(batch.rows), batch.rows[-1].length) / self.tokens_per_s
        self.pipeline.statistics.count(batch.rows, seconds, 1.0)
        self.pipeline._backlog.done()
        for row in batch.rows:
            row.owner.message.waiting -= 1
            self.messages -= not row.owner.message.waiting
        self.now += seconds
        return True


def run(given: Sequence[int], kind: str, devices: dict[float, int], **settings: Any) -> Outcome:
    """Classify rows of these lengths. devices: token budget by rows per second."""
    mean = sum(given) / len(given)
    workers = [SimulatedWorker(kind, speed, budget, mean, **settings) for speed, budget in devices.items()]
    queue: deque[Sequence[int]] = deque(given[at : at + POSTS] for at in range(0, len(given), POSTS))
    busy = list(workers)
    efficiency: list[float] = []
    while busy:
        worker = min(busy, key=lambda each: each.now)
        worker.fetch(queue)
        if not queue and not efficiency:
            totals = [each.pipeline.statistics.totals for each in workers]
            efficiency = [total.tokens / max(1, total.padded_tokens) for total in totals]
        if not worker.compute():
            busy.remove(worker)
    return Outcome([worker.now for worker in workers], efficiency)


@pytest.mark.parametrize(("window_rows", "messages"), [(64, 64), (8192, 1024)])
def test_bounds_messages_of_few_posts(window_rows: int, messages: int) -> None:
    conf = make_worker_app(Settings(window_rows=window_rows)).conf
    assert (conf.worker_prefetch_multiplier, conf.worker_eta_task_limit) == (messages, 20 * messages)


def some(count: int) -> list[int]:
    return list(islice(lengths(Random(5)), count))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("rows_per_s", SIMULATED)
def test_enough_rows_wait_to_pad_little(kind: str, rows_per_s: int) -> None:
    count = 20_000 if rows_per_s < 1000 else 60_000
    (efficiency,) = run(some(count), kind, {rows_per_s: SIMULATED[rows_per_s]}).efficiency
    assert efficiency >= 0.94


@pytest.mark.parametrize("rows_per_s", [500, 5000])
def test_slow_and_fast_devices_finish_together(rows_per_s: int) -> None:
    """A device and one that is five times slower share a queue of thirty seconds."""
    devices = {float(rows_per_s): SIMULATED[rows_per_s], rows_per_s / 5: 2048}
    finished = run(some(int(30 * sum(devices))), "cuda", devices).finished
    assert max(finished) - min(finished) <= 0.1 * max(finished)
