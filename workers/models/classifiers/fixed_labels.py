"""Models with labels of their own, which no message can change: the common part of `sequence.py` and `head.py`."""

from collections.abc import Sequence

from shared.errors import ModelError, RequestRefused, SettingsError
from shared.messages import ClassifyOptions
from shared.settings import Settings
from workers.models.classifiers import Classifier, LabelSet
from workers.models.weights import Weights

#: Limits on a model's labels. Every result stores the scores of all labels, so these bound its size in Redis.
MAX_LABELS_OF_A_MODEL, MAX_LABEL_CHARACTERS = 1000, 200


class FixedLabels(Classifier):
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
    if "" in names or len(set(names)) < len(names):
        raise ModelError(
            f"{file} of {weights.name} must give each label a distinct name. Correct it, or use another model."
        )
    if len(names) > MAX_LABELS_OF_A_MODEL:
        raise ModelError(
            f"{weights.name} has {len(names):,} labels; the maximum is {MAX_LABELS_OF_A_MODEL:,}. "
            "Use a model with fewer labels."
        )
    if (longest := max(map(len, names), default=0)) > MAX_LABEL_CHARACTERS:
        raise ModelError(
            f"{weights.name} has a label of {longest:,} characters; the maximum is {MAX_LABEL_CHARACTERS}. "
            f"Shorten it in {file}."
        )
    others = settings.labels and set(settings.labels) != set(names)
    if others or settings.template:
        name = "FEEDMILL_LABELS" if others else "FEEDMILL_TEMPLATE"
        raise SettingsError(f"{name} is set, but {weights.name} has fixed labels and uses no template: unset {name}.")
