"""Load a model into this process, and explain its failures to users. Imports torch only when a model is loaded."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from feedmill.shared.errors import DeviceFull, DeviceLost, RequestRefused, UserError, clause, explain_missing, sentence
from feedmill.shared.settings import Settings

if TYPE_CHECKING:
    from feedmill.workers.models.classifiers import Classifier


def load_model(settings: Settings) -> "Classifier":
    """Load the model in the settings onto its device, ready to classify.

    Raises UserError if a package, the model or the device is missing.
    """
    with explain_missing("Classifying in this process", "worker"), warnings.catch_warnings():
        # tqdm, which transformers imports, asks for ipywidgets in every notebook.
        warnings.filterwarnings("ignore", "IProgress not found")
        # Imported late: needs torch, which only workers have.
        from feedmill.workers.models import device  # noqa: PLC0415
        from feedmill.workers.models.classifiers.registry import load_classifier  # noqa: PLC0415
    return load_classifier(settings, device.select_device(settings.device, settings.dtype, settings.engine))


def load_calibrated(settings: Settings) -> "tuple[Classifier, int]":
    """Load the model in the settings, and return it with its token budget. Raises UserError as `load_model` does."""
    loaded = load_model(settings)  # first: it explains missing packages, which the imports below do not
    import torch  # noqa: PLC0415

    from feedmill.workers.pipeline.calibration import calibrate  # noqa: PLC0415

    threads = torch.get_num_threads()
    try:
        with explain_refusals(settings):
            return loaded, calibrate(loaded, settings)
    finally:
        torch.set_num_threads(threads)  # calibration uses a lane's share of the cores


@contextmanager
def explain_refusals(settings: Settings) -> Iterator[None]:
    """Convert the model's refusals and device failures inside the block into UserError."""
    try:
        yield
    except RequestRefused as refused:
        raise UserError(
            f"{settings.model} cannot serve this request: {sentence(str(refused))} Correct the option, or use another "
            "model."
        ) from None
    except (DeviceFull, DeviceLost) as error:
        raise UserError(
            f"The device failed: {clause(error)}. Try again; if the device is out of memory, lower "
            "FEEDMILL_TOKEN_BUDGET."
        ) from None
