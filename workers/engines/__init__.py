"""How a micro-batch runs: with torch, or with ONNX Runtime."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from workers.device import Device
from workers.tokenizer import Tokens


class Engine(Protocol):
    """A model on its device, with what is read off it for each row."""

    device: Device
    #: Whether nothing is computed for padding.
    packed: bool
    #: Where `forward` leaves its tensors.
    home: torch.device

    def begin(self) -> Any:
        """Mark the begin of a micro-batch, for its Outputs."""

    def forward(self, rows: Sequence[Tokens]) -> torch.Tensor:
        """What is read off each row: [rows, …] in float32, at `home`. Raises what the device does."""

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host's, at `home`."""
