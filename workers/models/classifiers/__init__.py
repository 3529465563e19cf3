"""Classifiers: prepare texts, run the forward pass, turn outputs into scores.

CLASSIFIERS (shared/settings.py) names those that implement the protocol below; `registry.py` picks
one by the model's files.

`prepare` turns texts into token rows (tokenizer thread), `forward` runs one micro-batch of rows
from any posts and label sets (device thread), and `finish` turns the outputs into scores (writer
thread). A classifier does not depend on messages, Celery or Redis.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from feedmill.shared.errors import PostRefused, RequestRefused
from feedmill.shared.messages import MIN_LABELS_SCORE, ClassifyOptions, digest
from feedmill.shared.none_of_these import DEFAULT_NONE_ALONE
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
#: Maximum label sets cached per worker. A message waits while a label set that is not cached is
#: prepared.
MAX_LABEL_SETS = 64


@dataclass(eq=False, slots=True)
class LabelSet:
    """Labels and their template, prepared once and shared by every row that uses them."""

    labels: tuple[str, ...]
    multi_label: bool
    #: Digest of everything that determines the scores, except the post: see
    #: `feedmill.shared.messages.fingerprint`.
    recipe: str
    #: Rows per post.
    rows: int = 1
    #: Labels in the form that the classifier needs; opaque to everything else.
    prepared: Any = field(default=None, repr=False)
    #: The classifier's device-side data. The first batch fills it, on the device thread.
    on_device: Any = field(default=None, repr=False)
    #: Score below which a post has no label; None if each post has one.
    none: float | None = None
    #: The everyday subjects that labels compete with, if `none` is set (none_of_these.py), and
    #: those of them that are apart from the labels, which the first batch fills.
    subjects: "LabelSet | None" = field(default=None, repr=False)
    subjects_on_device: Any = field(default=None, repr=False)

    #: Least score of the labels that apply to a post with `multi_label`, unless `none` is set;
    #: None if no score tells.
    min_labels_score: float | None = MIN_LABELS_SCORE
    #: The languages that the model was made for; empty if they do not matter. Posts in others have
    #: no label.
    languages: frozenset[str] = frozenset()

    #: The same labels with other thresholds (`with_threshold`), and with languages
    #: (`with_languages`).
    by_threshold: "dict[float, LabelSet]" = field(default_factory=dict, repr=False)
    by_languages: "dict[frozenset[str], LabelSet]" = field(
        default_factory=dict, repr=False
    )

    @property
    def independent(self) -> bool:
        """True if each label is scored by itself, so that a post's scores do not sum to 1.

        Scores that only compare labels cannot tell that a post fits none.
        """
        if self.multi_label:
            return True
        if self.subjects is not None:
            return False
        return len(self.labels) == 1 or self.none is not None

    @property
    def labels_threshold(self) -> float | None:
        """Return the score from which a label applies; None if only the best one does."""
        if not self.multi_label:
            return None
        if self.none is not None:
            return self.none
        return self.min_labels_score

    def with_languages(self, languages: frozenset[str]) -> "LabelSet":
        """Return these labels for posts in some languages, cached."""
        label_set = self.by_languages.get(languages)
        if label_set is None:
            label_set = copy(self)
            label_set.languages = languages
            codes = ",".join(sorted(languages))
            label_set.recipe = digest(self.recipe, "languages", codes)
            label_set.by_threshold = {}
            label_set.by_languages = {}
            self.by_languages[languages] = label_set
        return label_set

    def with_threshold(self, none: float) -> "LabelSet":
        """Return these labels with a threshold for the same scores, cached."""
        label_set = self.by_threshold.get(none)
        if label_set is None:
            if len(self.by_threshold) >= MAX_LABEL_SETS:
                self.by_threshold.clear()
            label_set = copy(self)
            label_set.none = none
            label_set.recipe = digest(self.recipe, "none", str(none))
            label_set.by_threshold = {}
            label_set.by_languages = {}
            self.by_threshold[none] = label_set
        return label_set


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


def threshold_of(options: ClassifyOptions, default: float) -> float | None:
    """Return the score below which a post has no label; None if each post has one.

    default: the threshold of a message that names none.
    """
    if options.none is None or options.none is False:
        return None
    if options.none is True:
        return default
    return options.none


class NoneMethod(NamedTuple):
    """A classifier's own method of telling posts without a label."""

    #: Digest of everything that determines its scores, part of the recipe of label sets.
    digest: str
    #: The default threshold, and that of messages with `multi_label`.
    default: float
    multi_label_default: float


#: The method of classifiers that score each label by itself, as with `multi_label`.
BY_ITSELF = NoneMethod("by itself", DEFAULT_NONE_ALONE, DEFAULT_NONE_ALONE)


class LabelSets:
    """A cache of prepared label sets, one per combination of labels, template, `multi_label` and
    `none`.

    kind: the classifier's name. model: digest of the model and its limits. Both are part of every
    label set's recipe. row_each: one row per label and post, instead of one row per post.
    none_method: the method that tells posts without a label.
    """

    def __init__(
        self,
        kind: str,
        model: str,
        labels: LabelDescriptions,
        template: str,
        prepare: Callable[[Sequence[Sequence[str]]], Any],
        row_each: bool = False,
        none_method: NoneMethod = BY_ITSELF,
    ) -> None:
        self._kind = kind
        self._model = model
        self._labels = labels
        self._template = template
        self._prepare = prepare
        self._row_each = row_each
        self._none_method = none_method
        self._cached = lru_cache(MAX_LABEL_SETS)(self._make)

    def of(self, options: ClassifyOptions) -> LabelSet:
        """Return the label set for these options, preparing it if needed.

        Calls `prepare` with each label's sentences. Exceptions of `prepare` propagate.
        """
        labels: LabelDescriptions = options.labels or self._labels
        template = options.template or self._template
        label_items = list(labels.items())
        parts = [label_items, template, options.multi_label]
        threshold = self._threshold(options)
        if threshold is not None:
            parts += [threshold, self._none_method.digest]
        return self._cached(json.dumps(parts))

    def _threshold(self, options: ClassifyOptions) -> float | None:
        if options.multi_label:
            return threshold_of(options, self._none_method.multi_label_default)
        return threshold_of(options, self._none_method.default)

    def _make(self, key: str) -> LabelSet:
        labels, template, multi_label, *none = json.loads(key)
        names = []
        sentences = []
        for name, described in labels:
            names.append(name)
            sentences.append([template.replace("{}", text) for text in described])
        try:
            prepared = self._prepare(sentences)
        except PostRefused as refused:
            raise RequestRefused(f"labels: {refused}") from None
        return LabelSet(
            labels=tuple(names),
            multi_label=multi_label,
            recipe=digest(self._kind, self._model, key),
            rows=len(labels) if self._row_each else 1,
            prepared=prepared,
            none=none[0] if none else None,
            min_labels_score=self._none_method.multi_label_default,
        )


def single_texts(described: Sequence[Sequence[str]], kind: str) -> list[str]:
    """Return each label's only text. kind: the classifier's name.

    Raises RequestRefused if a label has several.
    """
    for texts in described:
        if len(texts) > 1:
            raise RequestRefused(
                f"labels: a label has {len(texts)} descriptions, but the worker's {kind} model "
                "takes one per label"
            )
    return [text for (text,) in described]


class Outputs(Protocol):
    """Result of a forward pass, possibly still being copied from the device."""

    @property
    def seconds(self) -> float:
        """Seconds of device time. Valid once the device has finished."""


class Classifier(Protocol):
    """The interface between the pipeline and a classifier."""

    #: One of CLASSIFIERS (shared/settings.py), or the name of a plug-in.
    kind: str
    weights: Weights
    device: Device
    #: True if the engine computes nothing for padding.
    packed: bool

    def label_set(self, options: ClassifyOptions) -> LabelSet:
        """Return the message's label set, cached.

        Raises RequestRefused if the model cannot serve it.
        """

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        """Return the rows of each text."""

    def forward(self, rows: Sequence[Row]) -> Outputs:
        """Run one micro-batch, returning as soon as the device has accepted it.

        Device thread only.

        Raises DeviceFull, DeviceLost, or the error of a row that the model cannot compute.
        """

    def finish(self, rows: Sequence[Row], outputs: Any) -> list[tuple[Row, Scores]]:
        """Wait for the device; return the scores of every post whose last row is in `rows`, with
        that row.

        Raises DeviceLost.
        """


def label_set_of(
    classifier: Classifier,
    options: ClassifyOptions,
    default: bool | float | None = None,
    languages: frozenset[str] = frozenset(),
) -> LabelSet:
    """Return a message's label set, with the threshold that `none` selects, and the languages of
    its posts.

    Classifiers without a method of their own, such as fine-tuned models and plug-ins, keep their
    scores, which are compared with the threshold.

    default: the worker's `none`, for messages that say nothing. languages: see `LabelSet`. Raises
    RequestRefused.
    """
    label_set = _label_set_with_none(classifier, options, default)
    if languages:
        return label_set.with_languages(languages)
    return label_set


def _label_set_with_none(
    classifier: Classifier, options: ClassifyOptions, default: bool | float | None
) -> LabelSet:
    if options.none is None and default is not None:
        options = options.model_copy(update={"none": default})
    label_set = classifier.label_set(options)
    if label_set.none is not None:
        return label_set
    threshold = threshold_of(options, DEFAULT_NONE_ALONE)
    if threshold is None:
        return label_set
    return label_set.with_threshold(threshold)


class ModelClassifier(Classifier):
    """A classifier with an engine. Subclasses set `_label_sets`, and compute `_outputs`."""

    _label_sets: LabelSets
    #: Device of the outputs.
    _home: torch.device

    def __init__(
        self,
        weights: Weights,
        device: Device,
        settings: Settings,
        reads: Sequence[str] | Path,
        max_tokens: int,
    ) -> None:
        """Load the engine and the tokenizer: see `create_engine`."""
        self.weights = weights
        self._engine, self._tokenizer = create_engine(
            weights, device, settings, reads, max_tokens
        )
        self.device = self._engine.device
        self.packed = self._engine.packed
        self._home = self._engine.home

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

    def finish(
        self, rows: Sequence[Row], outputs: TensorOutputs
    ) -> list[tuple[Row, Scores]]:
        """Return scores.

        This implementation takes outputs for scores, beyond a row's own labels without meaning.
        """
        scores_by_row = rounded(outputs.wait())
        answers = []
        for row, row_scores in zip(rows, scores_by_row, strict=True):
            scores = dict(zip(row.label_set.labels, row_scores, strict=False))
            answers.append((row, scores))
        return answers
