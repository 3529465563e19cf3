"""Load a model into this process. Imports torch only when a model is loaded."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from feedmill.shared.errors import explain_missing
from feedmill.shared.settings import Settings, load

if TYPE_CHECKING:
    from feedmill.workers.models.classifiers import Classifier
    from feedmill.workers.pipeline.backlog import Loaded


def load_model(settings: Settings) -> "Classifier":
    """Load the model in the settings onto its device, ready to classify.

    Raises UserError if a package, the model or the device is missing.
    """
    with explain_missing("Classifying in this process", "worker"):
        # Imported late: needs torch, which only workers have.
        from feedmill.workers.models import device  # noqa: PLC0415
        from feedmill.workers.models.classifiers.registry import load_classifier  # noqa: PLC0415

        return load_classifier(
            settings,
            device.select_device(settings.device, settings.dtype, settings.engine),
        )


def load_models(settings: Settings) -> "list[Loaded]":
    """Load the model in the settings onto each of its devices, with the token budget there.

    Raises UserError as `load_model` does.
    """
    with explain_missing("Classifying in this process", "worker"):
        # Needs torch, which only workers have.
        from feedmill.workers.pipeline import offline  # noqa: PLC0415

        return offline.load_models(settings)


def candidates(
    settings: Settings, models: Sequence[str], dtypes: Sequence[str]
) -> list[Settings]:
    """Return the settings of each model in each data type.

    Raises SettingsError for an unknown data type.
    """
    # Repeated ones count once.
    checked = [load(dtype=dtype).dtype for dtype in dict.fromkeys(dtypes)]
    return [
        settings.model_copy(update={"model": model, "dtype": dtype})
        for model in models
        for dtype in checked
    ]
