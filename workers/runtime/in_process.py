"""Classify in the calling process, for callers that run the task instead of sending it.

A task that runs outside Feedmill's pool has no outcomes yet. This module computes them with the worker's own pipeline;
each calling thread submits one message and waits for it.
"""

import os
import threading
from typing import ClassVar

from feedmill.shared.broker import connect
from feedmill.shared.errors import DeviceFull, DeviceLost, ModelError, clause
from feedmill.shared.metrics import connect_for_monitoring
from feedmill.shared.results import ResultsStore
from feedmill.shared.retention import MemoryBounds
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.device import select_device
from feedmill.workers.pipeline.calibration import calibrate
from feedmill.workers.pipeline.message import Message
from feedmill.workers.pipeline.offline import OfflinePipeline


class InProcessPipeline:
    """The pipeline of this process.

    worker: name recorded in stored results; None stores no results.
    """

    #: One model per process: the latest requested.
    _latest: ClassVar["InProcessPipeline | None"] = None
    _lock = threading.Lock()

    @classmethod
    def classify(cls, message: Message, settings: Settings, worker: str | None) -> None:
        """Block until the message has its outcomes. Raises UserError, or ModelError if the device fails permanently."""
        pipeline = cls._acquire(settings, worker)
        try:
            pipeline._pipeline.run(message)
        finally:
            with cls._lock:
                pipeline._users -= 1
                pipeline._stop_if_unused()

    @classmethod
    def _acquire(cls, settings: Settings, worker: str | None) -> "InProcessPipeline":
        """Return this process's pipeline, after replacing it if the settings have changed."""
        with cls._lock:
            latest, wanted = cls._latest, (os.getpid(), settings, worker)
            if latest is None or latest._made_for != wanted:
                cls._latest = None  # creating the replacement may fail
                if latest and latest._made_for[0] == os.getpid():
                    latest._stop_if_unused()
                cls._latest = latest = cls(settings, worker)
            latest._users += 1
            return latest

    def _stop_if_unused(self) -> None:
        """Stop a replaced pipeline once its last user is done. Called with the lock held."""
        if self is not InProcessPipeline._latest and not self._users:
            self._pipeline.stop()
            if self._bounds:
                self._bounds.stop()

    def __init__(self, settings: Settings, worker: str | None) -> None:
        self._made_for = (os.getpid(), settings, worker)
        self._users = 0
        try:
            chosen = select_device(settings.device, settings.dtype, settings.engine)
            classifier = load_classifier(settings, chosen)
            budget = calibrate(classifier, settings)
        except (DeviceFull, DeviceLost) as error:
            raise ModelError(
                f"The device failed: {clause(error)}. Try again; if the device is out of memory, lower "
                "FEEDMILL_TOKEN_BUDGET."
            ) from None
        self._bounds = MemoryBounds(connect_for_monitoring(settings), settings) if worker else None
        store = None
        if self._bounds:
            self._bounds.start()
            store = ResultsStore(connect(settings), settings, self._bounds.check_soon)
        self._pipeline = OfflinePipeline(classifier, settings, budget, store, worker or "here")
