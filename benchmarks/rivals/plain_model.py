"""A typical classifier with transformers alone: posts in arrival order, padded to the longest of
the batch.

The rivals that need hand-written model code share this module. It does not use Feedmill's
classifiers.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from feedmill.shared.settings import DESCRIBED_TOPICS, Settings
from feedmill.workers.models import device
from feedmill.workers.models.classifiers.similarity import DEFAULT_TEMPLATE
from feedmill.workers.models.weights import locate

#: Factor that turns cosines into logits; the model was trained with it.
SCALE = 20.0

#: A rival's answer for one post: its label and the scores of all labels.
Answer = dict[str, Any]


def cores() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def label_names(settings: Settings) -> list[str]:
    """Return the labels in order."""
    return list(settings.labels or DESCRIBED_TOPICS)


def label_vectors(
    settings: Settings, embed: Callable[[list[str]], torch.Tensor]
) -> torch.Tensor:
    """Return unit vectors [labels, dimensions] in float32, each the mean of a label's description
    vectors.
    """
    template = settings.template or DEFAULT_TEMPLATE
    described = list((settings.labels or DESCRIBED_TOPICS).values())
    sentences = [template.replace("{}", text) for texts in described for text in texts]
    of_labels = torch.split(
        embed(sentences).float(), [len(texts) for texts in described]
    )
    return normalize(torch.stack([vectors.mean(0) for vectors in of_labels]), dim=-1)


def mean_pooled(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return unit vectors [rows, dimensions] in float32: the mean over each row's real tokens.

    hidden: [rows, longest, dimensions]; mask: [rows, longest], 1 for a real token.
    """
    real = mask.unsqueeze(-1).float()
    return normalize((hidden.float() * real).sum(1) / real.sum(1), dim=-1)


class PlainModel:
    """The configured model, loaded with AutoModel, on all cores or the GPU."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(cores())
        chosen = device.select_device(settings.device, settings.dtype)
        folder = locate(settings.model).folder
        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True
        )
        self._model: Any = AutoModel.from_pretrained(
            folder, dtype=chosen.dtype, local_files_only=True
        )
        self._model.to(chosen.torch).eval()
        self._device = chosen.torch
        self._max_tokens = settings.max_tokens
        self._labels = label_names(settings)
        self._label_vectors = label_vectors(settings, self._embed)

    @torch.inference_mode()
    def _embed(self, texts: Sequence[str]) -> torch.Tensor:
        inputs = self._tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=self._max_tokens,
            return_tensors="pt",
        ).to(self._device)
        return mean_pooled(
            self._model(**inputs).last_hidden_state, inputs["attention_mask"]
        )

    @torch.inference_mode()
    def classify(self, texts: Sequence[str]) -> list[Answer]:
        """Classify the texts in one forward pass; return one answer per text, in order."""
        scores = (SCALE * self._embed(texts) @ self._label_vectors.T).softmax(-1)
        return [
            {
                "label": self._labels[best],
                "scores": dict(zip(self._labels, row, strict=True)),
            }
            for best, row in zip(
                scores.argmax(-1).tolist(), scores.tolist(), strict=True
            )
        ]
