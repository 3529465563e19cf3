"""Load a model into this process. Imports torch only when a model is loaded."""

from typing import TYPE_CHECKING

from feedmill.shared.errors import explain_missing, explain_refusals
from feedmill.shared.settings import Settings

if TYPE_CHECKING:
    from feedmill.workers.models.classifiers import Classifier


def load_model(settings: Settings) -> "Classifier":
    """Load the model in the settings onto its device, ready to classify.

    Raises UserError if a package, the model or the device is missing.
    """
    with explain_missing("Classifying in this process", "worker"):
        # Imported late: needs torch, which only workers have.
        from feedmill.workers.models import device  # noqa: PLC0415
        from feedmill.workers.models.classifiers.registry import load_classifier  # noqa: PLC0415

        return load_classifier(settings, device.select_device(settings.device, settings.dtype, settings.engine))


def load_calibrated(settings: Settings) -> "tuple[Classifier, int]":
    """Load the model in the settings, and return it with its token budget. Raises UserError as `load_model` does."""
    loaded = load_model(settings)  # first: it explains missing packages, which the imports below do not
    from feedmill.workers.pipeline.calibration import calibrate  # noqa: PLC0415

    with explain_refusals(settings.model):
        return loaded, calibrate(loaded, settings)
