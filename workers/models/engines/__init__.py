"""Engines run padded or packed micro-batches: with torch or ONNX Runtime."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from workers.models.device import Device
from workers.models.tokenizer import Tokens


class Engine(Protocol):
    """A model on its device, and the outputs to return for each row."""

    device: Device
    #: True if the engine computes nothing for padding.
    packed: bool
    #: Device of the tensors that `forward` returns.
    home: torch.device

    def begin(self) -> Any:
        """Mark the start of a micro-batch; pass the mark to TensorOutputs."""

    def forward(self, rows: Sequence[Tokens]) -> torch.Tensor:
        """Run the model; return each row's outputs, [rows, …] in float32, on `home`. Device errors propagate."""

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor from the host to `home`."""
