"""Zero-shot classification by entailment: does the post (premise) entail the hypothesis "This example is food."?

Works with any sequence classifier trained on natural language inference. Scores equal those of transformers' zero-shot
pipeline (pipelines/zero_shot_classification.py):

- single-label, several labels: softmax of the entailment logits over the labels;
- `multi_label`, or only one label: softmax of contradiction and entailment, separately for each label.
"""

import logging

import torch

from shared.settings import Settings
from workers.models.classifiers.pairs import PairClassifier
from workers.models.device import Device
from workers.models.engines.network import read_config
from workers.models.weights import Weights

logger = logging.getLogger(__name__)


class Entailment(PairClassifier):
    """Classify with a natural-language-inference model. Raises ModelError if the folder does not hold one."""

    kind = "nli"
    #: Contradiction and entailment.
    width = 2
    #: As in transformers' pipeline.
    default_template = "This example is {}."

    def __init__(self, weights: Weights, device: Device, settings: Settings) -> None:
        super().__init__(weights, device, settings, settings.max_tokens)
        label2id = read_config(weights, settings.trust_remote_code).label2id
        self._entailment = entailment_class(label2id)
        if self._entailment is None:
            self._entailment = len(label2id) - 1
            logger.warning(
                "no label of %s starts with 'entail': using the model's last label as entailment; check id2label in "
                "config.json",
                weights.name,
            )
        self._contradiction = len(label2id) - 1 if self._entailment == 0 else 0
        self._serve(settings, self._entailment, self._contradiction)

    def _wanted(self, logits: torch.Tensor) -> torch.Tensor:
        # Slices, since indexing with a list would first copy the list to the device.
        return torch.stack((logits[:, self._contradiction], logits[:, self._entailment]), dim=1)

    def _scores(self, logits: torch.Tensor, independent: bool) -> torch.Tensor:
        return logits.softmax(1)[:, 1] if independent else logits[:, 1].softmax(0)


def entailment_class(label2id: dict[str, int]) -> int | None:
    """Return the index of the first class whose name starts with "entail", as transformers' pipeline does, or None."""
    return next((number for label, number in label2id.items() if label.lower().startswith("entail")), None)
