"""The torch engine in the padded layout on every device, as a plug-in: FEEDMILL_ENGINE=benchmarks.padded_engine:…"""

from collections.abc import Sequence

from shared.settings import Settings
from workers.models.device import Device
from workers.models.engines.torch_engine import TorchEngine
from workers.models.shapes import Shapes
from workers.models.weights import Weights


class PaddedEngine(TorchEngine):
    """The torch engine as a GPU runs it."""

    def __init__(self, weights: Weights, device: Device, reads: Sequence[str], pad_id: int, settings: Settings) -> None:
        super().__init__(weights, device, reads, pad_id, settings.max_tokens, packed=False)

    def pad_to(self, shapes: Shapes) -> None:
        """Pad later micro-batches to these shapes."""
        self._shapes = shapes
