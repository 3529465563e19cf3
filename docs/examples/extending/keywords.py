"""A classifier: the label of whose words a post has most. Each label is described by its words.

    PYTHONPATH=docs/examples/extending feedmill classify "Soup with beans" --classifier keywords:Keywords \
        --labels '{"food": "soup beans bread", "sports": "match goal"}'
"""

import re
import time
from collections.abc import Sequence

import torch

from shared.messages import ClassifyOptions
from shared.settings import Settings
from shared.topics import DESCRIBED_TOPICS
from workers.classifiers import LabelSet, LabelSets, Row, Scores
from workers.device import Device
from workers.engines.outputs import TensorOutputs, device_errors
from workers.tokenizer import Tokens
from workers.weights import Weights


class Keywords:
    """Counts words. A row's tokens are the places of the labels whose words stand in the post, one for each."""

    kind = "keywords"
    #: Nothing is computed for padding: there is none.
    packed = True

    def __init__(self, weights: Weights, device: Device, settings: Settings) -> None:
        self.weights, self.device = weights, device
        labels = settings.labels or DESCRIBED_TOPICS
        self._label_sets = LabelSets(self.kind, "version 1", labels, "{}", self._words)

    def warm_up(self) -> None:
        """There is nothing to warm up."""

    def label_set(self, options: ClassifyOptions) -> LabelSet:
        return self._label_sets.of(options)

    def _words(self, described: Sequence[Sequence[str]]) -> dict[str, int]:
        """The place of the label that each word stands for."""
        return {word: place for place, texts in enumerate(described) for word in words(" ".join(texts))}

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        """On the tokenizer thread: all that can be done before the device has its turn."""
        places = label_set.prepared
        return [
            [
                Row(
                    Tokens([places[word] for word in words(text) if word in places] or [len(label_set.labels)]),
                    label_set,
                )
            ]
            for text in texts
        ]

    def forward(self, rows: Sequence[Row]) -> TensorOutputs:
        """On the device thread: counts [rows, most labels of any row]."""
        with device_errors():
            began = time.perf_counter()
            width = max(len(row.label_set.labels) for row in rows)
            counts = torch.zeros(len(rows), width + 1)
            for place, row in enumerate(rows):
                counts[place] += torch.bincount(torch.tensor(row.tokens.ids), minlength=width + 1)
            return TensorOutputs(counts[:, :width], began)

    def finish(self, rows: Sequence[Row], outputs: TensorOutputs) -> list[tuple[Row, Scores]]:
        """On the writer thread: each label's share of the words that were found."""
        found = []
        for row, counts in zip(rows, outputs.wait(), strict=True):
            labels = row.label_set.labels
            shares = (counts[: len(labels)] + 1) / (counts[: len(labels)].sum() + len(labels))
            found.append((row, dict(zip(labels, shares.tolist(), strict=True))))
        return found


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
