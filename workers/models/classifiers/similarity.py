"""Zero-shot classification by embedding: the best label is the one whose sentences are nearest to the post.

One sentence-transformers model embeds posts and label sentences ("This post is about food."); nearness is the cosine of
the embeddings. A label's vector is the mean of its descriptions' unit vectors. In single-label mode with several
labels, softmax(20 · cosine) turns cosines into probabilities: all-MiniLM-L6-v2 was trained with that distribution and
scale (its model card, "Fine-tuning"). With `multi_label`, or with one label, each score is the cosine itself.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch.nn.functional import normalize

from feedmill.shared.settings import DESCRIBED_TOPICS, Settings
from feedmill.workers.models.classifiers import LabelSet, LabelSets, ModelClassifier, Row
from feedmill.workers.models.classifiers.layout import read_layout
from feedmill.workers.models.device import Device
from feedmill.workers.models.engines import to_device
from feedmill.workers.models.tokenizer import Tokens
from feedmill.workers.models.weights import Weights

#: Cosine multiplier, from the model's training.
COSINE_SCALE = 20.0
#: Default template.
DEFAULT_TEMPLATE = "This post is about {}."
#: Maximum label sentences per forward pass, so that a large label set needs no more memory than a micro-batch.
SENTENCE_BATCH_SIZE = 32


class Similarity(ModelClassifier):
    """Classify with a sentence-transformers model. Raises ModelError if the folder holds none."""

    kind = "similarity"

    def __init__(self, weights: Weights, device: Device, settings: Settings) -> None:
        self._layout = read_layout(weights, settings)
        self._texts = self._layout.texts
        max_tokens = min(settings.max_tokens, self._texts.max_tokens or settings.max_tokens)
        super().__init__(weights, device, settings, self._layout.static or self._layout.pooling, max_tokens)
        self._dense = [layer.to(self._home) for layer in self._layout.dense]
        self._label_sets = LabelSets(
            self.kind,
            f"{weights.sha256} {self._tokenizer.max_tokens} {self._layout.digest}",
            settings.labels or DESCRIBED_TOPICS,
            settings.template or DEFAULT_TEMPLATE,
            lambda sentences: [self._tokenize(described, self._texts.label_prompt) for described in sentences],
        )

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        return [[Row(tokens, label_set)] for tokens in self._tokenize(texts, self._texts.post_prompt)]

    def _tokenize(self, texts: Sequence[str], prompt: str) -> list[Tokens]:
        read = [prompt + text for text in texts]
        rows: list[Tokens] = self._tokenizer.encode([text.lower() for text in read] if self._texts.lower_case else read)
        return rows

    def _outputs(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return scores in float32: [rows, labels of the largest label set], zero-padded for smaller label sets."""
        embeddings = self.embed([row.tokens for row in rows])
        by_label_set: dict[LabelSet, list[int]] = {}
        for index, row in enumerate(rows):
            by_label_set.setdefault(row.label_set, []).append(index)
        if len(by_label_set) == 1:
            return self._scores(embeddings, rows[0].label_set)
        scores = embeddings.new_zeros(len(rows), max(len(label_set.labels) for label_set in by_label_set))
        for label_set, indices in by_label_set.items():
            members = to_device(torch.tensor(indices), embeddings.device)
            scores[members, : len(label_set.labels)] = self._scores(embeddings[members], label_set)
        return scores

    def _scores(self, embeddings: torch.Tensor, label_set: LabelSet) -> torch.Tensor:
        """Return the scores of rows that share one label set: [rows, labels]."""
        cosines = embeddings @ self.label_vectors(label_set).T
        return cosines if label_set.independent else (COSINE_SCALE * cosines).softmax(-1)

    def label_vectors(self, label_set: LabelSet) -> torch.Tensor:
        """Return each label's unit vector, embedded at the first call: [labels, dimensions]. Device thread only."""
        if label_set.on_device is None:
            sentences: list[list[Tokens]] = label_set.prepared  # by label
            rows = list(chain.from_iterable(sentences))
            pieces = [
                self.embed(rows[at : at + SENTENCE_BATCH_SIZE]) for at in range(0, len(rows), SENTENCE_BATCH_SIZE)
            ]
            per_label = torch.split(torch.cat(pieces), [len(described) for described in sentences])
            label_set.on_device = normalize(torch.stack([vectors.mean(0) for vectors in per_label]), dim=-1)
        vectors: torch.Tensor = label_set.on_device
        return vectors

    def embed(self, rows: Sequence[Tokens]) -> torch.Tensor:
        """Embed rows as unit vectors: [rows, dimensions] in float32."""
        vectors = self._engine.forward(rows)
        for layer in self._dense:
            vectors = layer(vectors)
        return normalize(vectors[:, : self._layout.truncate_dim], dim=-1)
