"""Classification with a fine-tuned model: the model brings its own labels, and a post is one row.

`activation_for` picks the activation from the model's configuration, as transformers' text-classification pipeline does
(pipelines/text_classification.py): none for regression, sigmoid for multi-label or one-label models, otherwise softmax.
"""

from collections.abc import Sequence

import torch

from shared.errors import ModelError, RequestRefused, SettingsError
from shared.messages import ClassifyOptions, digest
from shared.settings import Settings
from workers.models.classifiers import Classifier, LabelSet, Row, Scores
from workers.models.device import Device
from workers.models.engines.factory import create_engine
from workers.models.engines.network import LOGITS, read_config
from workers.models.engines.outputs import TensorOutputs, device_errors
from workers.models.weights import Weights

#: Limits on a model's labels. Every result stores the scores of all labels, so these bound its size in Redis.
MAX_LABELS_OF_A_MODEL, MAX_LABEL_CHARACTERS = 1000, 200


class SequenceClassifier(Classifier):
    """Classify with a fine-tuned model.

    Raises ModelError if the folder holds none, SettingsError if `labels` differ from the model's or `template` is set.
    """

    kind = "sequence"

    def __init__(self, weights: Weights, device: Device, settings: Settings) -> None:
        self.weights = weights
        self.device = device
        self._engine, self._tokenizer = create_engine(weights, device, settings, LOGITS, settings.max_tokens)
        self.packed = self._engine.packed
        config = read_config(weights, settings.trust_remote_code)
        names = tuple(str(config.id2label.get(place, "")) for place in range(config.num_labels))
        if "" in names or len(set(names)) < len(names):
            raise ModelError(
                f"id2label in the config.json of {weights.name} must give each label a distinct name. "
                "Correct it, or use another model."
            )
        if len(names) > MAX_LABELS_OF_A_MODEL:
            raise ModelError(
                f"{weights.name} has {len(names):,} labels; the maximum is {MAX_LABELS_OF_A_MODEL:,}. "
                "Use a model with fewer labels."
            )
        if (longest := max(map(len, names), default=0)) > MAX_LABEL_CHARACTERS:
            raise ModelError(
                f"{weights.name} has a label of {longest:,} characters; the maximum is {MAX_LABEL_CHARACTERS}. "
                "Shorten it in the model's config.json."
            )
        others = settings.labels and set(settings.labels) != set(names)
        if others or settings.template:
            name = "FEEDMILL_LABELS" if others else "FEEDMILL_TEMPLATE"
            raise SettingsError(
                f"{name} is set, but {weights.name} has fixed labels and uses no template: unset {name}."
            )
        self._meaning = activation_for(config.problem_type, len(names))
        recipe = digest(self.kind, weights.sha256, str(self._tokenizer.max_tokens), self._meaning, *names)
        #: The model's labels; it serves no others. Classifiers without this attribute serve any labels.
        self.fixed_labels = names
        #: True if `multi_label` has no meaning. Classifiers without this attribute accept it.
        self.gives_one_label = self._meaning == "softmax"
        self._label_set = LabelSet(names, self._meaning != "softmax", recipe)

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

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        return [[Row(tokens, label_set)] for tokens in self._tokenizer.encode(texts)]

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> TensorOutputs:
        """Return scores: [rows, labels] in float32."""
        with device_errors():
            began = self._engine.begin()
            logits = self._engine.forward([row.tokens for row in rows])
            if self._meaning == "softmax":
                logits = logits.softmax(-1)
            elif self._meaning == "sigmoid":
                logits = logits.sigmoid()
            return TensorOutputs(logits, began)

    def finish(self, rows: Sequence[Row], outputs: TensorOutputs) -> list[tuple[Row, Scores]]:
        labels = self._label_set.labels
        return [
            (row, dict(zip(labels, scores, strict=True))) for row, scores in zip(rows, outputs.scores(), strict=True)
        ]


def activation_for(problem: str | None, labels: int) -> str:
    """Return the activation for a model's logits: raw, sigmoid or softmax. problem: the model's `problem_type`."""
    if problem == "regression":
        return "raw"
    return "sigmoid" if problem == "multi_label_classification" or labels == 1 else "softmax"
