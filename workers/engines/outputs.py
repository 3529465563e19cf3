"""What a micro-batch leaves on its device, and what a device says when it fails."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shared.errors import DeviceFull, DeviceLost

#: What torch, its CPU allocator, cuBLAS and ONNX Runtime say when there is no memory.
NO_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "Failed to allocate memory")


class TensorOutputs:
    """Outputs of one micro-batch on their way from the device to the host: one copy, which nobody waits for yet."""

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

    def ready(self) -> bool:
        """Whether the device is done."""
        return self._done is None or bool(self._done.query())

    def wait(self) -> torch.Tensor:
        """The outputs, on the host. Raises DeviceLost."""
        if self._done is not None:
            with device_errors():
                self._done.synchronize()
        return self._tensor

    @property
    def seconds(self) -> float:
        """For how long the device was at it; to be asked after `wait`."""
        return self._seconds if self._done is None else float(self._began.elapsed_time(self._done)) / 1000


@contextmanager
def device_errors() -> Iterator[None]:
    """Turns what torch raises for a device without memory, or with a broken context, into our own errors."""
    try:
        yield
    except RuntimeError as error:  # torch's classes for both are its children, but not all is raised as one of them
        text = str(error)
        if isinstance(error, torch.OutOfMemoryError) or any(words in text for words in NO_MEMORY):
            raise DeviceFull(text) from None
        if isinstance(error, torch.AcceleratorError) or text.startswith("CUDA error") or "CUDA failure" in text:
            raise DeviceLost(text) from error  # after this every further call fails as well
        raise
