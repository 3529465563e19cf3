"""Classify in the calling process, for callers that run the task instead of sending it.

A task that runs outside Feedmill's pool has no outcomes yet. This module computes them with the worker's own pipeline;
each calling thread submits one message and waits for it.
"""

import os
import threading

from feedmill.shared.broker import connect
from feedmill.shared.errors import DeviceFull, DeviceLost, ModelError, clause
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.device import select_device
from feedmill.workers.pipeline.calibration import calibrate
from feedmill.workers.pipeline.message import Message
from feedmill.workers.pipeline.offline import OfflinePipeline

_lock = threading.Lock()
#: The latest pipeline, and the process, settings and worker that it was made for. A replaced one ends with its last
#: call.
_latest: tuple[tuple[int, Settings, str | None], OfflinePipeline] | None = None


def classify(message: Message, settings: Settings, worker: str | None) -> None:
    """Block until the message has its outcomes. Raises UserError, or ModelError if the device fails permanently.

    worker: name recorded in stored results; None stores no results.
    """
    global _latest  # noqa: PLW0603 - one model per process
    made_for = os.getpid(), settings, worker
    with _lock:
        if _latest is None or _latest[0] != made_for:
            _latest = None  # frees the old model first, unless another thread uses it
            _latest = made_for, _make(settings, worker)
        pipeline = _latest[1]
    pipeline.run(message)


def _make(settings: Settings, worker: str | None) -> OfflinePipeline:
    try:
        classifier = load_classifier(settings, select_device(settings.device, settings.dtype, settings.engine))
        budget = calibrate(classifier, settings)
    except (DeviceFull, DeviceLost) as error:
        raise ModelError(
            f"The device failed: {clause(error)}. Try again; if the device is out of memory, lower "
            "FEEDMILL_TOKEN_BUDGET."
        ) from None
    if worker is None:
        return OfflinePipeline(classifier, settings, budget)
    return OfflinePipeline(classifier, settings, budget, ResultsStore(connect(settings), settings), worker)
