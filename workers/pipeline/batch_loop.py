"""The batch loop: take the next micro-batch, run the forward pass, hand over the outputs.

The loop runs on the device threads, called lanes, which must never wait: all other work runs on other threads. A GPU
has one lane and gets its next micro-batch while the previous one still runs; if that one hangs, so does its scoring. A
CPU has one lane per core, at most four. The lanes' forward passes run in parallel, and a micro-batch that finds all
other lanes idle gets all cores. A micro-batch that fails is split in half, repeatedly, until the failing post is found.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from feedmill.shared.errors import DeviceFull, DeviceLost, printable
from feedmill.workers.models.classifiers import Outputs, Row
from feedmill.workers.models.device import Device
from feedmill.workers.pipeline.backlog import Backlog, Batch, Loaded
from feedmill.workers.pipeline.context import Context
from feedmill.workers.pipeline.message import traceback_of

logger = logging.getLogger(__name__)

#: Rows with their outputs, or with the error that they raised.
Part: TypeAlias = tuple[Sequence[Row], Outputs | Exception]


class Computed(NamedTuple):
    """Part of a micro-batch, and the `share` of the device that computed it."""

    loaded: Loaded
    rows: Sequence[Row]
    outputs: Outputs | Exception
    share: float


class BatchLoop:
    """Compute micro-batches, in one loop per lane of the device. hand_over: called with each part; may block."""

    def __init__(
        self, backlog: Backlog, device: Device, context: Context, hand_over: Callable[[Computed], None]
    ) -> None:
        self._backlog = backlog
        self._device = device
        self._context = context
        self._hand_over = hand_over
        #: By lane: the outputs of its latest forward pass, and the pass's posts.
        self._latest: list[Outputs | None] = [None] * device.lanes
        self._noted: list[list[tuple[str | None, int]]] = [[] for _ in range(device.lanes)]

    def loop(self, lane: int) -> None:
        """Compute the lane's micro-batches until the backlog closes."""
        while batch := self._backlog.next_batch(lane):
            self._device.take_share(batch.passes)
            parts = self._isolated(batch, lane) if batch.isolated else self._forward(batch.loaded, batch.rows, lane)
            for rows, outputs in parts:
                self._hand_over(Computed(batch.loaded, rows, outputs, 1 / batch.passes))
            self._backlog.done()
            del batch  # drop the reference before waiting, so that a replaced model can be freed

    def _forward(self, loaded: Loaded, rows: Sequence[Row], lane: int) -> list[Part]:
        """Return the rows' outputs. If the pass raises, split the rows until only failing rows have an error."""
        try:
            return [(rows, self._compute(loaded, rows, lane))]
        except DeviceLost:
            raise
        except DeviceFull as error:
            # A new error: the frames of the caught one keep the tensors of the failed pass in memory.
            fault: Exception = DeviceFull(str(error))
        except Exception as error:
            fault = error
        full = isinstance(fault, DeviceFull)
        if full and len(rows) == 1:
            # The post is not at fault: any other row would fail as well.
            raise DeviceLost(
                "the device has too little memory for a single row: free memory on the device, or use a smaller model"
            ) from fault
        if len(rows) == 1:
            logger.error("cannot classify post %s:\n%s", printable(rows[0].owner.post.id), traceback_of(fault))
            return [(rows, fault)]
        middle = len(rows) // 2
        halves = self._forward(loaded, rows[:middle], lane) + self._forward(loaded, rows[middle:], lane)
        if full:  # but both halves fit
            loaded.budget.lower(len(rows) * max(row.length for row in rows) // 2)
        return halves

    def _compute(self, loaded: Loaded, rows: Sequence[Row], lane: int) -> Outputs:
        self._note(rows, lane)
        self._latest[lane] = None
        with self._context.watch.step("a forward pass"):
            outputs = self._latest[lane] = loaded.classifier.forward(rows)
        return outputs

    def _note(self, rows: Sequence[Row], lane: int) -> None:
        """Record the posts in flight, so that a crash can be attributed to them."""
        if self._context.poison:
            latest = self._latest[lane]
            running = self._noted[lane] if latest and not latest.ready() else []
            self._noted[lane] = [(row.owner.message.task_id, row.owner.index) for row in rows if row.owner]
            self._context.poison.note(lane, (*running, *self._noted[lane]))

    def _isolated(self, batch: Batch, lane: int) -> list[Part]:
        """Run `_forward` on suspected poison posts while nothing else is on the device."""
        if latest := self._latest[lane]:
            self._wait_for(latest)
        # Check that the device works at all, before a failure counts against the posts.
        self._wait_for(self._compute(batch.loaded, batch.loaded.proof, lane))
        parts = self._forward(batch.loaded, batch.rows, lane)
        for _, outputs in parts:
            if not isinstance(outputs, Exception):
                self._wait_for(outputs)
        self._note((), lane)  # finished posts must not be blamed for a crash while this thread waits for the writer
        return parts

    def _wait_for(self, outputs: Outputs) -> None:
        with self._context.watch.step("a forward pass"):
            while not outputs.ready() and not self._context.stopping.wait(0.001):
                pass
