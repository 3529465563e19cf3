"""Models with labels of their own, which no message can change: fine-tuned classifiers, and heads
on embeddings.

`sequence`: a fine-tuned model, with the activation that transformers' text-classification pipeline
would choose (pipelines/text_classification.py): none for regression, sigmoid for multi-label or
one-label models, otherwise softmax. If it learnt from posts that fit none of the labels, its last
output is a none-class, which joins the softmax where `none` is asked for.

`head`: a sentence-transformers model with a linear layer, which `feedmill train --head` fits and
stores as HEAD_FILE in the model's folder, together with the labels. A post's scores are
softmax(weight · embedding + bias); the embedding is the model's own, as a unit vector. If the
head learnt from posts that fit none of the labels, it has a none-class, too: rivals of the
labels, which join the softmax where `none` is asked for. The default of `none` then stands for
the threshold that the training chose.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save

from feedmill.shared.errors import ModelError, RequestRefused, SettingsError
from feedmill.shared.messages import ClassifyOptions, digest
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers import (
    LabelSet,
    ModelClassifier,
    Row,
    threshold_of,
)
from feedmill.workers.models.classifiers.similarity import Similarity
from feedmill.workers.models.device import Device
from feedmill.workers.models.engines import to_device
from feedmill.workers.models.engines.packing import LOGITS
from feedmill.workers.models.files import HEAD_FILE, loading
from feedmill.workers.models.tensors import TensorFile
from feedmill.workers.models.weights import Weights, read_config

#: Limits on a model's labels. Every result stores the scores of all labels, so these bound its
#: size in Redis.
MAX_LABELS = 1000
MAX_LABEL_CHARACTERS = 200
#: Key of the labels, a JSON list, in the metadata of HEAD_FILE.
LABELS_KEY = "labels"
#: Key of the none-class's figures, a JSON object, there.
NONE_KEY = "none"
#: Key of the same figures in the configuration of a fine-tuned model whose last output is the
#: none-class.
NONE_CONFIG_KEY = "feedmill_none"


class NoneClass(NamedTuple):
    """The none-class of a head: rivals of the labels, which posts that fit no label resemble.

    weight: [rivals, dimensions]. bias: [rivals]. threshold: the score of the best label from which
    a post has it. precision and coverage: the share of right labels, and of posts with a label,
    that the training expects of the threshold; None if it had too few posts to tell. sharpness:
    factor of the logits of labels and rivals where they are compared with each other.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    threshold: float
    precision: float | None
    coverage: float | None
    sharpness: float = 1.0

    @property
    def promise(self) -> dict[str, float | None]:
        """The threshold, and what to expect of it."""
        return {
            "threshold": self.threshold,
            "precision": self.precision,
            "coverage": self.coverage,
        }


class FixedLabels(ModelClassifier):
    """A classifier whose model brings its labels.

    Subclasses call `_set_labels` once in their constructor.
    """

    def _set_labels(
        self,
        label_set: LabelSet,
        gives_one_label: bool,
        threshold: float | None = None,
    ) -> None:
        """Set the labels that the model serves.

        gives_one_label: the scores of a post's labels sum to 1. threshold: that of the model's
        none-class; None if it has none.
        """
        #: The model's labels; it serves no others. Classifiers without this attribute serve any
        #: labels.
        self.fixed_labels = label_set.labels
        #: True if `multi_label` has no meaning. Classifiers without this attribute accept it.
        self.gives_one_label = gives_one_label
        self._label_set = label_set
        self._threshold = threshold

    def label_set(self, options: ClassifyOptions) -> LabelSet:
        """Return the model's labels.

        Raises RequestRefused for other labels, a template, or unsupported multi_label.
        """
        own_labels = self._label_set.labels
        option = None
        if options.labels and set(options.labels) != set(own_labels):
            option = "labels"
        elif options.template:
            option = "template"
        if option is not None:
            names = ", ".join(own_labels[:20])
            raise RequestRefused(
                f"{option}: the worker's model has the fixed labels {names}; omit {option}"
            )
        if options.multi_label and self.gives_one_label:
            raise RequestRefused(
                "multi_label: the worker's model gives each post exactly one "
                "label; omit multi_label"
            )
        if self._threshold is None:
            return self._label_set
        threshold = threshold_of(options, self._threshold)
        if threshold is None:
            return self._label_set
        return self._label_set.with_threshold(threshold)


def check_labels(
    names: Sequence[str], file: str, weights: Weights, settings: Settings
) -> None:
    """Check a model's labels. file: the file that names them.

    Raises ModelError for unusable labels, SettingsError if `labels` differ from the model's or
    `template` is set.
    """
    different = set(names)
    longest = max(map(len, names), default=0)
    if (
        "" in different
        or len(different) < len(names)
        or len(names) > MAX_LABELS
        or longest > MAX_LABEL_CHARACTERS
    ):
        raise ModelError(
            f"{file} of {weights.name} names {len(names):,} labels, {len(different):,} of them "
            f"different, the longest with {longest:,} characters. Up to {MAX_LABELS:,} different "
            f"names of 1 to {MAX_LABEL_CHARACTERS} characters are supported. Correct it, or use "
            "another model."
        )
    name = None
    if settings.labels and set(settings.labels) != different:
        name = "FEEDMILL_LABELS"
    elif settings.template:
        name = "FEEDMILL_TEMPLATE"
    if name is not None:
        raise SettingsError(
            f"{name} is set, but {weights.name} has fixed labels and uses no "
            f"template: unset {name}."
        )


class SequenceClassifier(FixedLabels):
    """Classify with a fine-tuned model.

    The last output of a model that learnt from posts that fit none of the labels is its
    none-class.

    Raises ModelError if the folder holds none, SettingsError if `labels` differ from the model's
    or `template` is set.
    """

    kind = "sequence"

    def __init__(self, weights: Weights, device: Device, settings: Settings) -> None:
        super().__init__(weights, device, settings, LOGITS, settings.max_tokens)
        config = read_config(weights)
        names = []
        for number in range(config.num_labels):
            name = config.id2label.get(number, "")
            names.append(str(name))
        self._activation = activation_for(config.problem_type, len(names))
        threshold = read_threshold(weights, self._activation)
        if threshold is not None:
            names.pop()  # the none-class
        check_labels(names, "id2label in config.json", weights, settings)
        recipe = digest(
            self.kind,
            weights.sha256,
            str(self._tokenizer.max_tokens),
            self._activation,
            *names,
        )
        gives_one_label = self._activation == "softmax"
        label_set = LabelSet(
            labels=tuple(names),
            multi_label=not gives_one_label,
            recipe=recipe,
        )
        if self._activation == "raw":
            label_set.min_labels_score = None
        self._set_labels(label_set, gives_one_label, threshold)

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        encoded = self._tokenizer.encode(texts)
        return [[Row(tokens, label_set)] for tokens in encoded]

    def _outputs(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return scores: [rows, labels] in float32."""
        logits = self._engine.forward([row.tokens for row in rows])
        if self._threshold is not None:
            return _without_none(logits, rows)
        if self._activation == "softmax":
            return logits.softmax(-1)
        if self._activation == "sigmoid":
            return logits.sigmoid()
        return logits


def _without_none(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Return the scores of the labels, beside the none-class for rows whose posts may have no
    label: [rows, labels].

    logits: of the labels and, last, of the none-class.
    """
    asks_none = [row.label_set.none is not None for row in rows]
    mask = torch.tensor(asks_none)
    mask = to_device(mask, logits.device)
    mask = mask[:, None]  # [rows, 1]
    all_scores = logits.softmax(-1)
    among_all = all_scores[:, :-1]
    label_logits = logits[:, :-1]
    among_labels = label_logits.softmax(-1)
    return torch.where(mask, among_all, among_labels)


def read_threshold(weights: Weights, activation: str) -> float | None:
    """Return the threshold of a fine-tuned model's none-class; None if it has none.

    Raises ModelError.
    """
    figures = getattr(read_config(weights), NONE_CONFIG_KEY, None)
    if figures is None:
        return None
    advice = "Train it again with `feedmill train`."
    with loading(f"{NONE_CONFIG_KEY} in config.json of {weights.name}", advice):
        threshold = float(figures["threshold"])
        _check_threshold(threshold)
        if activation != "softmax":
            raise ValueError("a none-class needs labels of which one is right")
    return threshold


def activation_for(problem: str | None, labels: int) -> str:
    """Return the activation for a model's logits: raw, sigmoid or softmax. problem: the model's
    `problem_type`.
    """
    if problem == "regression":
        return "raw"
    if problem == "multi_label_classification" or labels == 1:
        return "sigmoid"
    return "softmax"


class Head(FixedLabels, Similarity):
    """Classify with a head on embeddings.

    Raises ModelError if the folder holds none, SettingsError if `labels` differ from the model's
    or `template` is set.
    """

    kind = "head"

    def __init__(self, weights: Weights, device: Device, settings: Settings) -> None:
        labels, weight, bias = read_head(weights)
        check_labels(
            labels, f"{LABELS_KEY!r} in the metadata of {HEAD_FILE}", weights, settings
        )
        super().__init__(weights, device, settings)
        self._weight = weight.to(self._home)
        self._bias = bias.to(self._home)
        none_class = read_none_class(weights)
        self._none_class = none_class
        if none_class is not None:
            rivals = (none_class.weight.to(self._home), none_class.bias.to(self._home))
            self._rival_weight, self._rival_bias = rivals
        # The digest of the weights includes HEAD_FILE.
        recipe = digest(
            self.kind,
            weights.sha256,
            str(self._tokenizer.max_tokens),
            self._layout.digest,
            *labels,
        )
        label_set = LabelSet(labels, multi_label=False, recipe=recipe)
        threshold = None if none_class is None else none_class.threshold
        self._set_labels(label_set, gives_one_label=True, threshold=threshold)

    def _scores(self, embeddings: torch.Tensor, label_set: LabelSet) -> torch.Tensor:
        logits = torch.addmm(self._bias, embeddings, self._weight.T)
        if label_set.none is None or self._none_class is None:
            return logits.softmax(-1)
        rivals = torch.addmm(self._rival_bias, embeddings, self._rival_weight.T)
        all_logits = torch.cat([logits, rivals], dim=1)
        all_logits *= self._none_class.sharpness
        shares = all_logits.softmax(-1)
        labels = logits.shape[1]
        return shares[:, :labels]


def read_head(weights: Weights) -> tuple[tuple[str, ...], torch.Tensor, torch.Tensor]:
    """Return a head's labels, weight [labels, dimensions] and bias [labels]. Raises ModelError."""
    path = weights.folder / HEAD_FILE
    with loading(f"the head {path}", "Train it again with `feedmill train --head`."):
        file = TensorFile(path)
        names = json.loads(file.metadata[LABELS_KEY])
        labels = tuple(str(name) for name in names)
        weight = file.read("weight").float()
        bias = file.read("bias").float()
        if (
            weight.dim() != 2
            or weight.shape[0] != len(labels)
            or bias.shape != (len(labels),)
        ):
            raise ValueError(
                f"{len(labels)} labels, but weights of {[*weight.shape]} and biases "
                f"of {[*bias.shape]}"
            )
    return labels, weight, bias


def read_none_class(weights: Weights) -> NoneClass | None:
    """Return a head's none-class; None if it has none. Raises ModelError."""
    path = weights.folder / HEAD_FILE
    with loading(f"the head {path}", "Train it again with `feedmill train --head`."):
        file = TensorFile(path)
        if NONE_KEY not in file.metadata:
            return None
        figures = json.loads(file.metadata[NONE_KEY])
        none_class = NoneClass(
            weight=file.read("none_weight").float(),
            bias=file.read("none_bias").float(),
            threshold=float(figures["threshold"]),
            precision=_figure(figures["precision"]),
            coverage=_figure(figures["coverage"]),
            sharpness=float(figures.get("sharpness", 1.0)),
        )
        _check_none_class(none_class, file.read("weight").shape[1])
    return none_class


def _figure(value: float | None) -> float | None:
    return None if value is None else float(value)


def _check_threshold(threshold: float) -> None:
    """Raise ValueError for a threshold that is no probability."""
    if not 0 <= threshold <= 1:
        raise ValueError(
            f"the threshold of the none-class is {threshold}, not from 0 to 1"
        )


def _check_none_class(none_class: NoneClass, dimensions: int) -> None:
    """Raise ValueError if a none-class does not fit a head of `dimensions`."""
    bias_shape = [*none_class.bias.shape]
    if len(bias_shape) != 1:
        raise ValueError(f"the bias of the none-class is {bias_shape}, not [rivals]")
    expected = [*bias_shape, dimensions]
    weight_shape = [*none_class.weight.shape]
    if weight_shape != expected:
        raise ValueError(
            f"weights of the none-class are {weight_shape}, not {expected}"
        )
    _check_threshold(none_class.threshold)
    sharpness = none_class.sharpness
    if not 0 < sharpness < math.inf:
        raise ValueError(
            f"the sharpness of the none-class is {sharpness}, not a positive finite number"
        )


def write_head(
    path: Path,
    labels: tuple[str, ...],
    weight: torch.Tensor,
    bias: torch.Tensor,
    none_class: NoneClass | None = None,
) -> None:
    """Write a head for `read_head` and `read_none_class`. Raises OSError."""
    tensors = {
        "weight": weight.float().contiguous(),
        "bias": bias.float().contiguous(),
    }
    metadata = {
        "format": "pt",
        LABELS_KEY: json.dumps(labels, ensure_ascii=False),
    }
    if none_class is not None:
        tensors["none_weight"] = none_class.weight.float().contiguous()
        tensors["none_bias"] = none_class.bias.float().contiguous()
        figures = none_class.promise | {"sharpness": none_class.sharpness}
        metadata[NONE_KEY] = json.dumps(figures)
    # Not by `save_file`, whose files only their owner can read: other users serve models.
    path.write_bytes(save(tensors, metadata))
