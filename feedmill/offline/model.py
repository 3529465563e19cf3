"""A model that is loaded in this process, for whole files of posts."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from feedmill.local_model import load_models
from feedmill.shared.language import languages_of
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import Settings
from feedmill.tables import Classify


class OfflineModel(NamedTuple):
    """A loaded model with the options of a call.

    name, revision, weights: as in `Classification`. recipe: digest of everything that determines
    the scores, except the post; see `feedmill.shared.messages.fingerprint`.
    """

    labels: Sequence[str]
    classify: Classify
    recipe: str
    name: str
    revision: str | None
    weights: str


def load_offline(
    settings: Settings, options: ClassifyOptions, is_default: bool = False
) -> OfflineModel:
    """Load the model in the settings onto each of its devices.

    is_default: the user did not choose `none`, which applies to their own labels, not to those of
    a model. Raises UserError.
    """
    models = load_models(settings)
    # Needs torch, which only workers have.
    from feedmill.workers.models.classifiers import label_set_of  # noqa: PLC0415
    from feedmill.workers.pipeline import offline  # noqa: PLC0415

    classifier = models[0].classifier
    if is_default and hasattr(classifier, "fixed_labels"):
        options = options.model_copy(update={"none": None})
    label_set = label_set_of(
        classifier,
        options,
        settings.none,
        languages_of(settings),
    )
    classify = partial(
        offline.classify,
        models=models,
        settings=settings,
        options=options,
    )
    weights = classifier.weights
    return OfflineModel(
        labels=label_set.labels,
        classify=classify,
        recipe=label_set.recipe,
        name=weights.name,
        revision=weights.revision,
        weights=weights.sha256,
    )
