"""Classification with a head on frozen embeddings: a sentence-transformers model, and a linear layer for its labels.

`feedmill train --head` fits the layer and stores it as HEAD_FILE in the model's folder, together with the labels. A
post's scores are softmax(weight · embedding + bias); the embedding is the model's own, as a unit vector.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from shared.errors import ModelError, clause
from shared.messages import digest
from shared.settings import Settings
from workers.models.classifiers import LabelSet
from workers.models.classifiers.fixed_labels import FixedLabels, check_labels
from workers.models.classifiers.similarity import Similarity
from workers.models.device import Device
from workers.models.weights import HEAD_FILE, Weights

#: Key of the labels, a JSON list, in the metadata of HEAD_FILE.
LABELS_KEY = "labels"


class Head(FixedLabels, Similarity):
    """Classify with a head on embeddings.

    Raises ModelError if the folder holds none, SettingsError if `labels` differ from the model's or `template` is set.
    """

    kind = "head"

    def __init__(self, weights: Weights, device: Device, settings: Settings) -> None:
        labels, weight, bias = read_head(weights)
        check_labels(labels, f"{LABELS_KEY!r} in the metadata of {HEAD_FILE}", weights, settings)
        super().__init__(weights, device, settings)
        self._weight, self._bias = weight.to(self._engine.home), bias.to(self._engine.home)
        # The digest of the weights includes HEAD_FILE.
        recipe = digest(self.kind, weights.sha256, str(self._tokenizer.max_tokens), self._layout.digest, *labels)
        self._serve(LabelSet(labels, False, recipe), gives_one_label=True)

    def _scores(self, embeddings: torch.Tensor, label_set: LabelSet) -> torch.Tensor:  # noqa: ARG002 - has only one
        if embeddings.shape[1] != self._weight.shape[1]:
            raise ModelError(
                f"{HEAD_FILE} of {self.weights.name} is for embeddings of {self._weight.shape[1]} dimensions, but the "
                f"model's have {embeddings.shape[1]}. Train the head again."
            )
        return torch.addmm(self._bias, embeddings, self._weight.T).softmax(-1)


def read_head(weights: Weights) -> tuple[tuple[str, ...], torch.Tensor, torch.Tensor]:
    """Return a head's labels, weight [labels, dimensions] and bias [labels]. Raises ModelError."""
    path = weights.folder / HEAD_FILE
    try:
        with safe_open(path, "pt") as file:
            labels = tuple(str(label) for label in json.loads((file.metadata() or {})[LABELS_KEY]))
            weight, bias = file.get_tensor("weight").float(), file.get_tensor("bias").float()
        if weight.dim() != 2 or weight.shape[0] != len(labels) or bias.shape != (len(labels),):
            raise ValueError(f"{len(labels)} labels, but weights of {[*weight.shape]} and biases of {[*bias.shape]}")
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"Cannot read the head {path}: {clause(error)}. Train it again with `feedmill train --head`."
        ) from error
    return labels, weight, bias


def write_head(path: Path, labels: tuple[str, ...], weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Write a head for `read_head`. Raises OSError."""
    tensors = {"weight": weight.float().contiguous(), "bias": bias.float().contiguous()}
    # Not by `save_file`, whose files only their owner can read: other users serve models.
    path.write_bytes(save(tensors, {"format": "pt", LABELS_KEY: json.dumps(labels, ensure_ascii=False)}))
