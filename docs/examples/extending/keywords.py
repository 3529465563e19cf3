"""A classifier that chooses the label with the most words in the post.

A label's description lists its words.

    PYTHONPATH=docs/examples/extending feedmill classify "Soup with beans" --classifier
    keywords:Keywords \
        --labels '{"food": "soup beans bread", "sports": "match goal"}'
"""

import re
import time
from collections.abc import Sequence

import torch

from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import DESCRIBED_TOPICS, Settings
from feedmill.workers.models.classifiers import LabelSet, LabelSets, Row, Scores
from feedmill.workers.models.device import Device
from feedmill.workers.models.engines import TensorOutputs, device_errors
from feedmill.workers.models.tokenizer import Tokens
from feedmill.workers.models.weights import Weights


class Keywords:
    """Classifier that counts words.

    A row's tokens are label indices, one for each word of the post that belongs to a label. If no
    word does, the only token is the index after the last label.
    """

    kind = "keywords"
    #: True: rows are not padded.
    packed = True

    def __init__(self, weights: Weights, device: Device, settings: Settings) -> None:
        self.weights, self.device = weights, device
        labels = settings.labels or DESCRIBED_TOPICS
        self._label_sets = LabelSets(self.kind, "version 1", labels, "{}", self._words)

    def label_set(self, options: ClassifyOptions) -> LabelSet:
        return self._label_sets.of(options)

    def _words(self, described: Sequence[Sequence[str]]) -> dict[str, int]:
        """Map each word to the index of its label."""
        return {
            word: index
            for index, texts in enumerate(described)
            for word in words(" ".join(texts))
        }

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        """Turn texts into rows. Runs on the tokenizer thread."""
        indices = label_set.prepared
        return [
            [
                Row(
                    Tokens(
                        [indices[word] for word in words(text) if word in indices]
                        or [len(label_set.labels)]
                    ),
                    label_set,
                )
            ]
            for text in texts
        ]

    def forward(self, rows: Sequence[Row]) -> TensorOutputs:
        """Count words: a tensor [rows, largest label set]. Runs on the device thread."""
        with device_errors():
            began = time.perf_counter()
            width = max(len(row.label_set.labels) for row in rows)
            counts = torch.zeros(len(rows), width + 1)
            for index, row in enumerate(rows):
                counts[index] += torch.bincount(
                    torch.tensor(row.tokens.ids), minlength=width + 1
                )
            return TensorOutputs(counts[:, :width], began)

    def finish(
        self, rows: Sequence[Row], outputs: TensorOutputs
    ) -> list[tuple[Row, Scores]]:
        """Return each label's share of the words found. Runs on the writer thread."""
        found = []
        for row, counts in zip(rows, outputs.wait(), strict=True):
            labels = row.label_set.labels
            shares = (counts[: len(labels)] + 1) / (
                counts[: len(labels)].sum() + len(labels)
            )
            found.append((row, dict(zip(labels, shares.tolist(), strict=True))))
        return found


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
