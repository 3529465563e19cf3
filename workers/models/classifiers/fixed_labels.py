"""Models with labels of their own, which no message can change: fine-tuned classifiers, and heads on embeddings.

`sequence`: a fine-tuned model, with the activation that transformers' text-classification pipeline would choose
(pipelines/text_classification.py): none for regression, sigmoid for multi-label or one-label models, otherwise softmax.

`head`: a sentence-transformers model with a linear layer, which `feedmill train --head` fits and stores as HEAD_FILE in
the model's folder, together with the labels. A post's scores are softmax(weight · embedding + bias); the embedding is
the model's own, as a unit vector.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save

from feedmill.shared.errors import ModelError, RequestRefused, SettingsError
from feedmill.shared.messages import ClassifyOptions, digest
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers import LabelSet, ModelClassifier, Row
from feedmill.workers.models.classifiers.similarity import Similarity
from feedmill.workers.models.device import Device
from feedmill.workers.models.engines.packing import LOGITS
from feedmill.workers.models.weights import HEAD_FILE, Weights, loading, read_config

#: Limits on a model's labels. Every result stores the scores of all labels, so these bound its size in Redis.
MAX_LABELS, MAX_LABEL_CHARACTERS = 1000, 200
#: Key of the labels, a JSON list, in the metadata of HEAD_FILE.
LABELS_KEY = "labels"


class FixedLabels(ModelClassifier):
    """A classifier whose model brings its labels. Subclasses call `_serve` once in their constructor."""

    def _serve(self, label_set: LabelSet, gives_one_label: bool) -> None:
        """Serve these labels. gives_one_label: the scores of a post's labels sum to 1."""
        #: The model's labels; it serves no others. Classifiers without this attribute serve any labels.
        self.fixed_labels = label_set.labels
        #: True if `multi_label` has no meaning. Classifiers without this attribute accept it.
        self.gives_one_label = gives_one_label
        self._label_set = label_set

    def label_set(self, options: ClassifyOptions) -> LabelSet:
        """Return the model's labels. Raises RequestRefused for other labels, a template, or unsupported multi_label."""
        others = options.labels and set(options.labels) != set(self._label_set.labels)
        for option, given in (("labels", others), ("template", options.template)):
            if given:
                known = ", ".join(self._label_set.labels[:20])
                raise RequestRefused(f"{option}: the worker's model has the fixed labels {known}; omit {option}")
        if options.multi_label and self.gives_one_label:
            raise RequestRefused("multi_label: the worker's model gives each post exactly one label; omit multi_label")
        return self._label_set


def check_labels(names: Sequence[str], file: str, weights: Weights, settings: Settings) -> None:
    """Check a model's labels. file: the file that names them.

    Raises ModelError for unusable labels, SettingsError if `labels` differ from the model's or `template` is set.
    """
    longest = max(map(len, names), default=0)
    if "" in names or len(set(names)) < len(names) or len(names) > MAX_LABELS or longest > MAX_LABEL_CHARACTERS:
        raise ModelError(
            f"{file} of {weights.name} names {len(names):,} labels, {len(set(names)):,} of them different, the longest "
            f"with {longest:,} characters. Up to {MAX_LABELS:,} different names of 1 to {MAX_LABEL_CHARACTERS} "
            "characters are supported. Correct it, or use another model."
        )
    others = settings.labels and set(settings.labels) != set(names)
    if others or settings.template:
        name = "FEEDMILL_LABELS" if others else "FEEDMILL_TEMPLATE"
        raise SettingsError(f"{name} is set, but {weights.name} has fixed labels and uses no template: unset {name}.")


class SequenceClassifier(FixedLabels):
    """Classify with a fine-tuned model.

    Raises ModelError if the folder holds none, SettingsError if `labels` differ from the model's or `template` is set.
    """

    kind = "sequence"

    def __init__(self, weights: Weights, device: Device, settings: Settings) -> None:
        super().__init__(weights, device, settings, LOGITS, settings.max_tokens)
        config = read_config(weights)
        names = tuple(str(config.id2label.get(place, "")) for place in range(config.num_labels))
        check_labels(names, "id2label in config.json", weights, settings)
        self._meaning = activation_for(config.problem_type, len(names))
        recipe = digest(self.kind, weights.sha256, str(self._tokenizer.max_tokens), self._meaning, *names)
        softmax = self._meaning == "softmax"
        self._serve(LabelSet(names, not softmax, recipe), softmax)

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        return [[Row(tokens, label_set)] for tokens in self._tokenizer.encode(texts)]

    def _outputs(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return scores: [rows, labels] in float32."""
        logits = self._engine.forward([row.tokens for row in rows])
        if self._meaning == "softmax":
            return logits.softmax(-1)
        return logits.sigmoid() if self._meaning == "sigmoid" else logits


def activation_for(problem: str | None, labels: int) -> str:
    """Return the activation for a model's logits: raw, sigmoid or softmax. problem: the model's `problem_type`."""
    if problem == "regression":
        return "raw"
    return "sigmoid" if problem == "multi_label_classification" or labels == 1 else "softmax"


class Head(FixedLabels, Similarity):
    """Classify with a head on embeddings.

    Raises ModelError if the folder holds none, SettingsError if `labels` differ from the model's or `template` is set.
    """

    kind = "head"

    def __init__(self, weights: Weights, device: Device, settings: Settings) -> None:
        labels, weight, bias = read_head(weights)
        check_labels(labels, f"{LABELS_KEY!r} in the metadata of {HEAD_FILE}", weights, settings)
        super().__init__(weights, device, settings)
        self._weight, self._bias = weight.to(self._home), bias.to(self._home)
        # The digest of the weights includes HEAD_FILE.
        recipe = digest(self.kind, weights.sha256, str(self._tokenizer.max_tokens), self._layout.digest, *labels)
        self._serve(LabelSet(labels, False, recipe), gives_one_label=True)

    def _scores(self, embeddings: torch.Tensor, label_set: LabelSet) -> torch.Tensor:  # noqa: ARG002 - has only one
        return torch.addmm(self._bias, embeddings, self._weight.T).softmax(-1)


def read_head(weights: Weights) -> tuple[tuple[str, ...], torch.Tensor, torch.Tensor]:
    """Return a head's labels, weight [labels, dimensions] and bias [labels]. Raises ModelError."""
    path = weights.folder / HEAD_FILE
    with loading(f"the head {path}", "Train it again with `feedmill train --head`."):
        with safe_open(path, "pt") as file:
            labels = tuple(str(label) for label in json.loads((file.metadata() or {})[LABELS_KEY]))
            weight, bias = file.get_tensor("weight").float(), file.get_tensor("bias").float()
        if weight.dim() != 2 or weight.shape[0] != len(labels) or bias.shape != (len(labels),):
            raise ValueError(f"{len(labels)} labels, but weights of {[*weight.shape]} and biases of {[*bias.shape]}")
    return labels, weight, bias


def write_head(path: Path, labels: tuple[str, ...], weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Write a head for `read_head`. Raises OSError."""
    tensors = {"weight": weight.float().contiguous(), "bias": bias.float().contiguous()}
    # Not by `save_file`, whose files only their owner can read: other users serve models.
    path.write_bytes(save(tensors, {"format": "pt", LABELS_KEY: json.dumps(labels, ensure_ascii=False)}))
