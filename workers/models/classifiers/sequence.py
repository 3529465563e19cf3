"""Classification with a fine-tuned model: the model brings its own labels, and a post is one row.

`activation_for` picks the activation from the model's configuration, as transformers' text-classification pipeline does
(pipelines/text_classification.py): none for regression, sigmoid for multi-label or one-label models, otherwise softmax.
"""

from collections.abc import Sequence

import torch

from shared.messages import digest
from shared.settings import Settings
from workers.models.classifiers import LabelSet, Row, Scores
from workers.models.classifiers.fixed_labels import FixedLabels, check_labels
from workers.models.device import Device
from workers.models.engines.factory import create_engine
from workers.models.engines.network import LOGITS, read_config
from workers.models.engines.outputs import TensorOutputs, device_errors
from workers.models.weights import Weights


class SequenceClassifier(FixedLabels):
    """Classify with a fine-tuned model.

    Raises ModelError if the folder holds none, SettingsError if `labels` differ from the model's or `template` is set.
    """

    kind = "sequence"

    def __init__(self, weights: Weights, device: Device, settings: Settings) -> None:
        self.weights = weights
        self.device = device
        self._engine, self._tokenizer = create_engine(weights, device, settings, LOGITS, settings.max_tokens)
        self.packed = self._engine.packed
        config = read_config(weights, settings.trust_remote_code)
        names = tuple(str(config.id2label.get(place, "")) for place in range(config.num_labels))
        check_labels(names, "id2label in config.json", weights, settings)
        self._meaning = activation_for(config.problem_type, len(names))
        recipe = digest(self.kind, weights.sha256, str(self._tokenizer.max_tokens), self._meaning, *names)
        softmax = self._meaning == "softmax"
        self._serve(LabelSet(names, not softmax, recipe), softmax)

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        return [[Row(tokens, label_set)] for tokens in self._tokenizer.encode(texts)]

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> TensorOutputs:
        """Return scores: [rows, labels] in float32."""
        with device_errors():
            began = self._engine.begin()
            logits = self._engine.forward([row.tokens for row in rows])
            if self._meaning == "softmax":
                logits = logits.softmax(-1)
            elif self._meaning == "sigmoid":
                logits = logits.sigmoid()
            return TensorOutputs(logits, began)

    def finish(self, rows: Sequence[Row], outputs: TensorOutputs) -> list[tuple[Row, Scores]]:
        labels = self._label_set.labels
        return [
            (row, dict(zip(labels, scores, strict=True))) for row, scores in zip(rows, outputs.scores(), strict=True)
        ]


def activation_for(problem: str | None, labels: int) -> str:
    """Return the activation for a model's logits: raw, sigmoid or softmax. problem: the model's `problem_type`."""
    if problem == "regression":
        return "raw"
    return "sigmoid" if problem == "multi_label_classification" or labels == 1 else "softmax"
