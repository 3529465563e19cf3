"""Classifiers: prepare texts, run the forward pass, turn outputs into scores.

`fixed_labels.py`, `gliclass.py`, `pairs.py` and `similarity.py` implement the protocol below; `registry.py` picks
one by the model's files.

`prepare` turns texts into token rows (tokenizer thread), `forward` runs one micro-batch of rows from any posts and
label sets (device thread), and `finish` turns the outputs into scores (writer thread). A classifier does not
depend on messages, Celery or Redis.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch

from feedmill.shared.errors import RequestRefused
from feedmill.shared.messages import ClassifyOptions, digest
from feedmill.shared.settings import Settings
from feedmill.workers.models.device import Device
from feedmill.workers.models.engines import TensorOutputs, begin, device_errors, rounded
from feedmill.workers.models.engines.torch_engine import create_engine
from feedmill.workers.models.tokenizer import Tokens
from feedmill.workers.models.weights import Weights

#: Label -> score, in the label set's order.
Scores = dict[str, float]
#: Label -> the texts that replace it in the template.
LabelDescriptions = Mapping[str, Sequence[str]]
#: Maximum label sets cached per worker. A message waits while a label set that is not cached is prepared.
MAX_LABEL_SETS = 64


@dataclass(eq=False, slots=True)
class LabelSet:
    """Labels and their template, prepared once and shared by every row that uses them."""

    labels: tuple[str, ...]
    multi_label: bool
    #: Digest of everything that determines the scores, except the post: see `feedmill.shared.messages.fingerprint`.
    recipe: str
    #: Rows per post.
    rows: int = 1
    #: Labels in the form that the classifier needs; opaque to everything else.
    prepared: Any = field(default=None, repr=False)
    #: The classifier's device-side data. The first batch fills it, on the device thread.
    on_device: Any = field(default=None, repr=False)

    @property
    def independent(self) -> bool:
        """True if each label is scored by itself, so that a post's scores do not sum to 1."""
        return self.multi_label or len(self.labels) == 1


@dataclass(eq=False, slots=True)
class Row:
    """One row of a forward pass."""

    tokens: Tokens
    label_set: LabelSet
    #: The caller's reference to the row's post; classifiers ignore it.
    owner: Any = None

    @property
    def length(self) -> int:
        return len(self.tokens.ids)


class LabelSets:
    """A cache of prepared label sets, one per combination of labels, template and `multi_label`.

    kind: the classifier's name. model: digest of the model and its limits. Both are part of every label set's recipe.
    row_each: one row per label and post, instead of one row per post.
    """

    def __init__(
        self,
        kind: str,
        model: str,
        labels: LabelDescriptions,
        template: str,
        prepare: Callable[[Sequence[Sequence[str]]], Any],
        row_each: bool = False,
    ) -> None:
        self._kind, self._model = kind, model
        self._labels, self._template = labels, template
        self._prepare = prepare
        self._row_each = row_each
        self._cached = lru_cache(MAX_LABEL_SETS)(self._make)

    def of(self, options: ClassifyOptions) -> LabelSet:
        """Return the label set for these options, preparing it if needed.

        Calls `prepare` with each label's sentences. Exceptions of `prepare` propagate.
        """
        labels: LabelDescriptions = options.labels or self._labels
        template = options.template or self._template
        return self._cached(json.dumps([list(labels.items()), template, options.multi_label]))

    def _make(self, key: str) -> LabelSet:
        labels, template, multi_label = json.loads(key)
        prepared = self._prepare([[template.replace("{}", text) for text in described] for _, described in labels])
        recipe = digest(self._kind, self._model, key)
        rows = len(labels) if self._row_each else 1
        return LabelSet(tuple(name for name, _ in labels), multi_label, recipe, rows, prepared)


def single_texts(described: Sequence[Sequence[str]], kind: str) -> list[str]:
    """Return each label's only text. kind: the classifier's name. Raises RequestRefused if a label has several."""
    if several := [texts for texts in described if len(texts) > 1]:
        raise RequestRefused(
            f"labels: a label has {len(several[0])} descriptions, but the worker's {kind} model takes one per label"
        )
    return [text for (text,) in described]


class Outputs(Protocol):
    """Result of a forward pass, possibly still being copied from the device."""

    @property
    def seconds(self) -> float:
        """Seconds of device time. Valid once the device has finished."""


class Classifier(Protocol):
    """The interface between the pipeline and a classifier."""

    #: head, nli, rerank, sequence, similarity, or the name of a plug-in.
    kind: str
    weights: Weights
    device: Device
    #: True if the engine computes nothing for padding.
    packed: bool

    def label_set(self, options: ClassifyOptions) -> LabelSet:
        """Return the message's label set, cached. Raises RequestRefused if the model cannot serve it."""

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        """Return the rows of each text."""

    def forward(self, rows: Sequence[Row]) -> Outputs:
        """Run one micro-batch, returning as soon as the device has accepted it. Device thread only.

        Raises DeviceFull, DeviceLost, or the error of a row that the model cannot compute.
        """

    def finish(self, rows: Sequence[Row], outputs: Any) -> list[tuple[Row, Scores]]:
        """Wait for the device; return the scores of every post whose last row is in `rows`, with that row.

        Raises DeviceLost.
        """


class ModelClassifier(Classifier):
    """A classifier with an engine. Subclasses set `_label_sets`, and compute `_outputs`."""

    _label_sets: LabelSets
    #: Device of the outputs.
    _home: torch.device

    def __init__(
        self, weights: Weights, device: Device, settings: Settings, reads: Sequence[str] | Path, max_tokens: int
    ) -> None:
        """Load the engine and the tokenizer: see `create_engine`."""
        self.weights, self.device = weights, device
        self._engine, self._tokenizer = create_engine(weights, device, settings, reads, max_tokens)
        self.packed, self._home = self._engine.packed, self._engine.home

    def label_set(self, options: ClassifyOptions) -> LabelSet:
        return self._label_sets.of(options)

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> TensorOutputs:
        with device_errors():
            began = begin(self._home)
            return TensorOutputs(self._outputs(rows), began)

    def _outputs(self, rows: Sequence[Row]) -> torch.Tensor:
        """Run the engine; return what `finish` needs of each row: [rows, …] in float32."""
        raise NotImplementedError

    def finish(self, rows: Sequence[Row], outputs: TensorOutputs) -> list[tuple[Row, Scores]]:
        """Return scores. This implementation takes outputs for scores, beyond a row's own labels without meaning."""
        return [
            (row, dict(zip(row.label_set.labels, scores, strict=False)))
            for row, scores in zip(rows, rounded(outputs.wait()), strict=True)
        ]
