"""workers/models/engines: how outputs come from a GPU, with a stand-in for torch.cuda that
records what runs on which stream.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from feedmill.shared.errors import DeviceLost
from feedmill.workers.models.engines import (
    MAX_FREE_BUFFERS,
    Buffers,
    GpuOutputs,
    TensorOutputs,
    begin,
)


class Event:
    def __init__(
        self, cuda: "Cuda", enable_timing: bool = False, blocking: bool = False
    ):
        self._cuda = cuda
        self.timed = enable_timing
        self.blocking = blocking
        self.at: int | None = None

    def record(self, stream: Any) -> None:
        self.at = len(self._cuda.log)
        self._cuda.log.append((stream, self))

    def synchronize(self) -> None:
        if self._cuda.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self._cuda.log.append(("host waits", self))

    def elapsed_time(self, end: "Event") -> float:
        assert self.timed
        assert end.timed
        return 2.0


class Stream:
    def __init__(self, cuda: "Cuda", name: str) -> None:
        self._cuda = cuda
        self.name = name

    def wait_event(self, event: Event) -> None:
        self._cuda.log.append((self, "waits", event))


class Cuda:
    """The parts of torch.cuda that GpuOutputs uses."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.is_lost = False
        self.compute = Stream(self, "compute")
        self.current = self.compute

    def Event(self, **options: Any) -> Event:  # noqa: N802 - torch's name
        return Event(self, **options)

    def current_stream(self, _: Any) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.current = stream
        yield
        self.current = self.compute


class Streams:
    """Streams as of a GPU, with memory that is not pinned."""

    def __init__(self) -> None:
        self.cuda = Cuda()
        self.device = "cuda:0"
        self.outputs = Stream(self.cuda, "outputs")
        self.buffers = Buffers(pinned=False)


class GpuTensor:
    """A tensor that is on no GPU, but records for which stream its memory is kept."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self.kept_for: list[Any] = []
        self.shape = values.shape
        self.dtype = values.dtype

    def numel(self) -> int:
        return self._values.numel()

    def element_size(self) -> int:
        return self._values.element_size()

    def record_stream(self, stream: Any) -> None:
        self.kept_for.append(stream)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own = [arg._values if isinstance(arg, GpuTensor) else arg for arg in args]
        return function(*own, **(kwargs or {}))


@pytest.fixture
def streams() -> Any:
    return Streams()


def outputs_of(streams: Any, values: torch.Tensor) -> tuple[GpuOutputs, Any]:
    tensor: Any = GpuTensor(values)
    began = streams.cuda.Event(enable_timing=True)
    began.record(streams.cuda.compute)
    return GpuOutputs(tensor, began, streams), tensor


def test_copies_after_the_pass_on_a_stream_of_its_own(streams: Any) -> None:
    outputs, tensor = outputs_of(streams, torch.rand(3, 4))
    _, (stream, computed), (waiting, _, awaited), (copying, copied) = streams.cuda.log
    assert stream is streams.cuda.compute
    assert waiting is copying is streams.outputs
    assert awaited is computed
    assert tensor.kept_for == [streams.outputs]
    outputs.wait()
    assert streams.cuda.log[-1] == ("host waits", copied)
    assert copied.blocking, "the host sleeps while it waits"
    assert outputs.seconds == 0.002


def test_outputs_survive_the_reuse_of_their_buffer(streams: Any) -> None:
    batches = [torch.rand(rows, 4) for rows in (3, 100, 1, 2000)]
    pending = [outputs_of(streams, batch)[0] for batch in batches]
    found = [outputs.wait() for outputs in pending]
    outputs_of(streams, torch.rand(2000, 4))
    outputs_of(streams, torch.rand(3, 4))
    for batch, outputs, again in zip(batches, found, pending, strict=True):
        assert torch.equal(batch, outputs)
        assert torch.equal(again.wait(), batch), "waiting again is allowed"


def test_one_after_the_other_uses_one_buffer(streams: Any) -> None:
    for rows in (3, 5, 7):
        outputs, _ = outputs_of(streams, torch.rand(rows, 4))
        outputs.wait()
    assert len(streams.buffers._free) == 1


def test_a_batch_that_is_waiting_keeps_its_buffer(streams: Any) -> None:
    first, _ = outputs_of(streams, torch.zeros(3, 4))
    second, _ = outputs_of(streams, torch.ones(3, 4))
    assert torch.equal(first.wait(), torch.zeros(3, 4))
    assert torch.equal(second.wait(), torch.ones(3, 4))


def test_keeps_a_bounded_number_of_buffers() -> None:
    buffers = Buffers(pinned=False)
    taken = [buffers.take(8) for _ in range(3 * MAX_FREE_BUFFERS)]
    for buffer in taken:
        buffers.give_back(buffer)
    assert len(buffers._free) == MAX_FREE_BUFFERS


def test_a_lost_device_is_reported(streams: Any) -> None:
    outputs, _ = outputs_of(streams, torch.rand(3, 4))
    streams.cuda.is_lost = True
    with pytest.raises(DeviceLost):
        outputs.wait()


def test_a_cpu_needs_no_copy() -> None:
    began = begin(torch.device("cpu"))
    tensor = torch.rand(2, 3)
    outputs = TensorOutputs(tensor, began)
    assert torch.equal(outputs.wait(), tensor)
    assert outputs.seconds >= 0
