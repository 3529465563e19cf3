"""torch's engine with a log line for each slow forward pass on a CPU.

PYTHONPATH=docs/examples/extending feedmill worker --engine logged:LoggedEngine
"""

import logging
import time
from collections.abc import Sequence

import torch

from feedmill.shared.settings import Settings
from feedmill.workers.models.device import Device
from feedmill.workers.models.engines.torch_engine import TorchEngine
from feedmill.workers.models.tokenizer import Tokens
from feedmill.workers.models.weights import Weights

logger = logging.getLogger(__name__)

#: Duration above which a forward pass is logged, in seconds.
SLOW_PASS_S = 1.0


class LoggedEngine(TorchEngine):
    """torch's engine with logging.

    `reads` names the model outputs that the classifier needs; see network.py.
    """

    def __init__(
        self,
        weights: Weights,
        device: Device,
        reads: Sequence[str],
        pad_id: int,
        settings: Settings,
    ) -> None:
        super().__init__(weights, device, reads, pad_id, settings.max_tokens)

    def forward(self, rows: Sequence[Tokens]) -> torch.Tensor:
        began = time.perf_counter()
        found = super().forward(rows)
        if (seconds := time.perf_counter() - began) > SLOW_PASS_S:
            longest = max(len(row.ids) for row in rows)
            logger.warning(
                "%d rows of up to %d tokens took %.1f s", len(rows), longest, seconds
            )
        return found
