"""The torch engine in the padded layout on every device, as a plug-in:
FEEDMILL_ENGINE=benchmarks.padded_engine:…
"""

from collections.abc import Sequence

from feedmill.shared.settings import Settings
from feedmill.workers.models.device import Device
from feedmill.workers.models.engines.torch_engine import TorchEngine
from feedmill.workers.models.shapes import Shapes
from feedmill.workers.models.weights import Weights


class PaddedEngine(TorchEngine):
    """The torch engine as a GPU runs it."""

    def __init__(
        self,
        weights: Weights,
        device: Device,
        reads: Sequence[str],
        pad_id: int,
        settings: Settings,
    ) -> None:
        super().__init__(
            weights, device, reads, pad_id, settings.max_tokens, packed=False
        )

    def pad_to(self, shapes: Shapes) -> None:
        """Pad later micro-batches to these shapes."""
        self._shapes = shapes
