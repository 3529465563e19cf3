"""Zero-shot classification by embedding: the best label is the one whose sentences are nearest to
the post.

One sentence-transformers model embeds posts and label sentences ("This post is about food.");
nearness is the cosine of the embeddings. A label's vector is the mean of its descriptions' unit
vectors. In single-label mode with several labels, softmax(20 · cosine) turns cosines into
probabilities: all-MiniLM-L6-v2 was trained with that distribution and scale (its model card,
"Fine-tuning"). With `multi_label`, or with one label, each score is the cosine itself. With
`none`, everyday subjects join the softmax (none_of_these.py), unless `multi_label` is set.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch.nn.functional import normalize

from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.none_of_these import DEFAULT_NONE, DEFAULT_NONE_COSINE
from feedmill.shared.settings import DESCRIBED_TOPICS, Settings
from feedmill.workers.models.classifiers import (
    LabelSet,
    LabelSets,
    ModelClassifier,
    NoneMethod,
    Row,
)
from feedmill.workers.models.classifiers.layout import read_layout
from feedmill.workers.models.classifiers.none_of_these import (
    apart,
    fitting_scores,
    method,
    read_subjects,
)
from feedmill.workers.models.device import Device
from feedmill.workers.models.engines import to_device
from feedmill.workers.models.tokenizer import Tokens
from feedmill.workers.models.weights import Weights

#: Cosine multiplier, from the model's training.
COSINE_SCALE = 20.0
#: Default template.
DEFAULT_TEMPLATE = "This post is about {}."
#: Maximum label sentences per forward pass, so that a large label set needs no more memory than a
#: micro-batch.
SENTENCE_BATCH_SIZE = 32


class Similarity(ModelClassifier):
    """Classify with a sentence-transformers model. Raises ModelError if the folder holds none."""

    kind = "similarity"

    def __init__(self, weights: Weights, device: Device, settings: Settings) -> None:
        self._layout = read_layout(weights, settings)
        self._texts = self._layout.texts
        max_tokens = settings.max_tokens
        if self._texts.max_tokens is not None:
            max_tokens = min(max_tokens, self._texts.max_tokens)
        reads = self._layout.static or self._layout.pooling
        super().__init__(weights, device, settings, reads, max_tokens)
        self._steps = [step.to(self._home) for step in self._layout.steps]
        self._label_sets = LabelSets(
            self.kind,
            f"{weights.sha256} {self._tokenizer.max_tokens} {self._layout.digest}",
            settings.labels or DESCRIBED_TOPICS,
            settings.template or DEFAULT_TEMPLATE,
            self._tokenize_sentences,
            none_method=NoneMethod(method(), DEFAULT_NONE, DEFAULT_NONE_COSINE),
        )

    def label_set(self, options: ClassifyOptions) -> LabelSet:
        label_set = super().label_set(options)
        has_rivals = label_set.none is not None and not label_set.multi_label
        if has_rivals and label_set.subjects is None:
            self._add_subjects(label_set, options.template)
        return label_set

    def _add_subjects(self, label_set: LabelSet, template: str | None) -> None:
        """Add the everyday subjects, which rival the labels, to a label set that is cached."""
        subject_options = ClassifyOptions(labels=read_subjects(), template=template)
        label_set.subjects = super().label_set(subject_options)

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        post_tokens = self._tokenize(texts, self._texts.post_prompt)
        return [[Row(tokens, label_set)] for tokens in post_tokens]

    def _tokenize_sentences(
        self, sentences: Sequence[Sequence[str]]
    ) -> list[list[Tokens]]:
        """Return the rows of each label's sentences."""
        prompt = self._texts.label_prompt
        return [self._tokenize(described, prompt) for described in sentences]

    def _tokenize(self, texts: Sequence[str], prompt: str) -> list[Tokens]:
        prompted = [prompt + text for text in texts]
        if self._texts.lower_case:
            prompted = [text.lower() for text in prompted]
        rows: list[Tokens] = self._tokenizer.encode(prompted)
        return rows

    def _outputs(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return scores in float32: [rows, labels of the largest label set], zero-padded for
        smaller label sets.
        """
        embeddings = self.embed([row.tokens for row in rows])
        by_label_set: dict[LabelSet, list[int]] = {}
        for index, row in enumerate(rows):
            indices = by_label_set.setdefault(row.label_set, [])
            indices.append(index)
        if len(by_label_set) == 1:
            return self._scores(embeddings, rows[0].label_set)
        most_labels = max(len(label_set.labels) for label_set in by_label_set)
        scores = embeddings.new_zeros(len(rows), most_labels)
        for label_set, indices in by_label_set.items():
            members = to_device(torch.tensor(indices), embeddings.device)
            labels = len(label_set.labels)
            scores[members, :labels] = self._scores(embeddings[members], label_set)
        return scores

    def _scores(self, embeddings: torch.Tensor, label_set: LabelSet) -> torch.Tensor:
        """Return the scores of rows that share one label set: [rows, labels]."""
        vectors = self.label_vectors(label_set)
        cosines = embeddings @ vectors.T
        if label_set.independent:
            return cosines
        logits = COSINE_SCALE * cosines
        if label_set.subjects is None:
            return logits.softmax(-1)
        subject_cosines = embeddings @ self._subject_vectors(label_set).T
        return fitting_scores(logits, COSINE_SCALE * subject_cosines)

    def _subject_vectors(self, label_set: LabelSet) -> torch.Tensor:
        """Return the unit vectors of the subjects that are apart from the labels: [subjects,
        dimensions].
        """
        if label_set.subjects_on_device is None and label_set.subjects is not None:
            label_set.subjects_on_device = apart(
                self.label_vectors(label_set),
                self.label_vectors(label_set.subjects),
            )
        subject_vectors: torch.Tensor = label_set.subjects_on_device
        return subject_vectors

    def label_vectors(self, label_set: LabelSet) -> torch.Tensor:
        """Return each label's unit vector, embedded at the first call: [labels, dimensions].

        Device thread only.
        """
        if label_set.on_device is None:
            sentences: list[list[Tokens]] = label_set.prepared  # by label
            counts = [len(described) for described in sentences]
            rows = list(chain.from_iterable(sentences))
            pieces = []
            for start in range(0, len(rows), SENTENCE_BATCH_SIZE):
                end = start + SENTENCE_BATCH_SIZE
                pieces.append(self.embed(rows[start:end]))
            by_label = torch.split(torch.cat(pieces), counts)
            means = torch.stack([vectors.mean(0) for vectors in by_label])
            label_set.on_device = normalize(means, dim=-1)
        label_vectors: torch.Tensor = label_set.on_device
        return label_vectors

    def embed(self, rows: Sequence[Tokens]) -> torch.Tensor:
        """Embed rows as unit vectors: [rows, dimensions] in float32."""
        vectors = self._engine.forward(rows)
        for step in self._steps:
            vectors = step(vectors)
        leading = vectors[:, : self._layout.truncate_dim]
        return normalize(leading, dim=-1)
