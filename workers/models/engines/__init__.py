"""Engines run padded or packed micro-batches, with torch or ONNX Runtime, and return outputs."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from feedmill.shared.errors import DeviceFull, DeviceLost
from feedmill.workers.models.device import Device
from feedmill.workers.models.tokenizer import Tokens

#: Out-of-memory messages of torch, its CPU allocator, cuBLAS and ONNX Runtime.
NO_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "Failed to allocate memory")

#: Decimals of scores. A float32 has seven digits; as a Python float it would be written with up to seventeen.
SCORE_DECIMALS = 7


class Engine(Protocol):
    """A model on its device, and the outputs to return for each row."""

    device: Device
    #: True if the engine computes nothing for padding.
    packed: bool
    #: Device of the tensors that `forward` returns.
    home: torch.device

    def forward(self, rows: Sequence[Tokens]) -> torch.Tensor:
        """Run the model; return each row's outputs, [rows, …] in float32, on `home`. Device errors propagate."""


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from the host, without waiting for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def begin(home: torch.device) -> Any:
    """Mark the start of a micro-batch for TensorOutputs. home: the device of the outputs."""
    if home.type != "cuda":
        return time.perf_counter()
    began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    began.record(torch.cuda.current_stream(home))
    return began


class TensorOutputs:
    """One micro-batch's outputs, copied from the device to the host in a single asynchronous transfer."""

    def __init__(self, tensor: torch.Tensor, began: Any) -> None:
        self._began = began
        self._done: Any = None
        if tensor.is_cuda:
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(tensor.device))
        else:
            self._tensor = tensor.cpu()
            self._seconds = time.perf_counter() - began

    def wait(self) -> torch.Tensor:
        """Wait for the outputs and return them on the host. Raises DeviceLost."""
        if self._done is not None:
            with device_errors():
                self._done.synchronize()
        return self._tensor

    @property
    def seconds(self) -> float:
        """Seconds of device time. Valid after `wait`."""
        return self._seconds if self._done is None else float(self._began.elapsed_time(self._done)) / 1000


def rounded(scores: torch.Tensor) -> Any:
    """Return scores as Python floats, rounded to SCORE_DECIMALS, in lists of the tensor's shape."""
    return scores.double().round(decimals=SCORE_DECIMALS).tolist()


@contextmanager
def device_errors() -> Iterator[None]:
    """Raise DeviceFull for out-of-memory errors and DeviceLost for a broken device context."""
    try:
        yield
    except RuntimeError as error:  # the base class: torch does not always raise the specific subclass
        text = str(error)
        if isinstance(error, torch.OutOfMemoryError) or any(words in text for words in NO_MEMORY):
            raise DeviceFull(text) from None
        if isinstance(error, torch.AcceleratorError) or text.startswith("CUDA error") or "CUDA failure" in text:
            raise DeviceLost(text) from error  # every later call on this device fails too
        raise
