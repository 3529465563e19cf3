"""Engines run padded or packed micro-batches, with torch or ONNX Runtime, and return outputs."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Protocol

import torch

from feedmill.shared.errors import DeviceFull, DeviceLost
from feedmill.workers.models.device import Device
from feedmill.workers.models.tokenizer import Tokens

#: Out-of-memory messages of torch, its CPU allocator, cuBLAS and ONNX Runtime.
NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Failed to allocate memory",
)

#: Minimum bytes of a buffer for outputs, so that most micro-batches fit, and maximum number of
#: free ones to keep.
MIN_BUFFER_BYTES = 2**16
MAX_FREE_BUFFERS = 32

#: True to sleep while waiting for a GPU. An event that is not blocking spins, and takes a core
#: from the other workers; benchmarks/gpu_worker.py measures both.
BLOCKING_WAITS = True
#: Decimals of scores. A float32 has seven digits; as a Python float it would be written with up to
#: seventeen.
SCORE_DECIMALS = 7


class Engine(Protocol):
    """A model on its device, and the outputs to return for each row."""

    device: Device
    #: True if the engine computes nothing for padding.
    packed: bool
    #: Device of the tensors that `forward` returns.
    home: torch.device

    def forward(self, rows: Sequence[Tokens]) -> torch.Tensor:
        """Run the model; return each row's outputs, [rows, …] in float32, on `home`.

        Device errors propagate.
        """


class Streams:
    """A GPU's streams for copies, and the host's memory for them.

    Copies do not wait for the passes that are queued, nor passes for copies. cuda: the module
    torch.cuda.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self.cuda = cuda
        self.device = device
        self.inputs = cuda.Stream(device)
        self.outputs = cuda.Stream(device)
        self.buffers = Buffers(pinned=True)

    def copy_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the GPU; the current stream waits for the copy, and the host does not.

        record_stream keeps the copy's memory until the pass that reads it has ended: it belongs
        to the stream of inputs.
        """
        current = self.cuda.current_stream(self.device)
        pinned = tensor.pin_memory()
        with self.cuda.stream(self.inputs):
            copy = pinned.to(self.device, non_blocking=True)
        current.wait_stream(self.inputs)
        copy.record_stream(current)
        return copy


class Buffers:
    """The host's memory for outputs, used again and again: as many buffers as micro-batches wait
    for the writer thread.

    Threads may share it. pinned: a GPU can copy into it asynchronously.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[torch.Tensor] = []

    def take(self, size: int) -> torch.Tensor:
        """Return a buffer of at least `size` bytes."""
        with suppress(IndexError):
            buffer = self._free.pop()
            if len(buffer) >= size:
                return buffer
            # a larger one replaces it
        twice = 2 * size
        capacity = max(MIN_BUFFER_BYTES, twice)
        return torch.empty(
            capacity,
            dtype=torch.uint8,
            pin_memory=self._pinned,
        )

    def give_back(self, buffer: torch.Tensor) -> None:
        """Make a buffer available again."""
        free_count = len(self._free)
        if free_count < MAX_FREE_BUFFERS:
            self._free.append(buffer)


@cache
def streams_of(device: torch.device) -> Streams:
    """Return the streams of a GPU in this process."""
    return Streams(device)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from the host, without waiting for the device."""
    if device.type == "cuda":
        streams = streams_of(device)
        return streams.copy_in(tensor)
    return tensor.to(device)


def begin(home: torch.device) -> Any:
    """Mark the start of a micro-batch for TensorOutputs. home: the device of the outputs."""
    if home.type != "cuda":
        return time.perf_counter()
    began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    began.record(torch.cuda.current_stream(home))
    return began


class GpuOutputs:
    """A micro-batch's outputs on their way from a GPU to the host. began: the event of `begin`."""

    def __init__(self, tensor: torch.Tensor, began: Any, streams: Streams) -> None:
        self._began = began
        self._buffers = streams.buffers
        cuda = streams.cuda
        self._computed = cuda.Event(enable_timing=True)
        self._computed.record(cuda.current_stream(streams.device))
        size = tensor.numel() * tensor.element_size()
        buffer = self._buffers.take(size)
        self._buffer: torch.Tensor | None = buffer
        places = buffer[:size]
        numbers = places.view(tensor.dtype)
        self._tensor = numbers.view(tensor.shape)
        with cuda.stream(streams.outputs):
            streams.outputs.wait_event(self._computed)
            self._tensor.copy_(tensor, non_blocking=True)
        tensor.record_stream(streams.outputs)
        self._copied = cuda.Event(blocking=BLOCKING_WAITS)
        self._copied.record(streams.outputs)

    def wait(self) -> torch.Tensor:
        """Wait for the outputs and return them, in memory of their own. Raises DeviceLost."""
        if self._buffer is not None:
            with device_errors():
                self._copied.synchronize()
            self._tensor = self._tensor.clone()
            self._buffers.give_back(self._buffer)
            self._buffer = None
        return self._tensor

    @property
    def seconds(self) -> float:
        """Seconds of device time. Valid after `wait`."""
        elapsed = self._began.elapsed_time(self._computed)
        milliseconds = float(elapsed)
        return milliseconds / 1000


class TensorOutputs:
    """One micro-batch's outputs, copied from the device to the host in a single asynchronous
    transfer.
    """

    def __init__(self, tensor: torch.Tensor, began: Any) -> None:
        self._gpu: GpuOutputs | None = None
        if tensor.is_cuda:
            streams = streams_of(tensor.device)
            self._gpu = GpuOutputs(tensor, began, streams)
        else:
            self._tensor = tensor.cpu()
            self._seconds: float = time.perf_counter() - began

    def wait(self) -> torch.Tensor:
        """Wait for the outputs and return them on the host. Raises DeviceLost."""
        if self._gpu is not None:
            return self._gpu.wait()
        return self._tensor

    @property
    def seconds(self) -> float:
        """Seconds of device time. Valid after `wait`."""
        if self._gpu is not None:
            return self._gpu.seconds
        return self._seconds


def rounded(scores: torch.Tensor) -> Any:
    """Return scores as Python floats, rounded to SCORE_DECIMALS, in lists of the tensor's
    shape.
    """
    rounded_scores = scores.double().round(decimals=SCORE_DECIMALS)
    return rounded_scores.tolist()


@contextmanager
def device_errors() -> Iterator[None]:
    """Raise DeviceFull for out-of-memory errors and DeviceLost for a broken device context."""
    try:
        yield
    except RuntimeError as error:
        # the base class: torch does not always raise the specific subclass
        text = str(error)
        says_full = any(words in text for words in NO_MEMORY)
        if says_full or isinstance(error, torch.OutOfMemoryError):
            raise DeviceFull(text) from None
        says_lost = text.startswith("CUDA error") or "CUDA failure" in text
        if says_lost or isinstance(error, torch.AcceleratorError):
            raise DeviceLost(
                text
            ) from error  # every later call on this device fails too
        raise
