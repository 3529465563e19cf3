"""The pipeline of this process, for those who call the task instead of sending it.

Where no pool of Feedmill's has classified a message before its task runs, the task has it done here: by the same
pipeline, with one message in each caller's hands instead of a queue.
"""

import os
import threading
from typing import ClassVar

from shared.broker import connect
from shared.errors import DeviceFull, DeviceLost, ModelError
from shared.results import ResultsStore
from shared.settings import Settings
from workers import device
from workers.calibration import calibrate
from workers.classifiers.choose import load_classifier
from workers.message import Message
from workers.offline import Nowhere, lost
from workers.pipeline import Pipeline


class InProcess:
    """The pipeline of this process, for those who call the task instead of sending it.

    worker: the name that results bear; they are stored then, and else nowhere.
    """

    #: One model a process: the last that was asked for.
    _latest: ClassVar["InProcess | None"] = None
    _making = threading.Lock()

    @classmethod
    def classify(cls, message: Message, settings: Settings, worker: str | None) -> None:
        """Return when the message has its outcomes. Raises UserError; ModelError where the device fails for good."""
        found = cls._of(settings, worker)
        try:
            found._classify(message)
        finally:
            with cls._making:
                found._users -= 1
                found._end_unless_needed()

    @classmethod
    def _of(cls, settings: Settings, worker: str | None) -> "InProcess":
        """What was made before, where it is this process's and the same."""
        with cls._making:
            latest, wanted = cls._latest, (os.getpid(), settings, worker)
            if latest is None or latest._made_for != wanted:
                cls._latest = None  # what replaces it may fail
                if latest and latest._made_for[0] == os.getpid():
                    latest._end_unless_needed()
                cls._latest = latest = cls(settings, worker)
            latest._users += 1
            return latest

    def _end_unless_needed(self) -> None:
        """What was replaced ends with the last thread that uses it. Locked."""
        if self is not InProcess._latest and not self._users:
            self._pipeline.stop()

    def __init__(self, settings: Settings, worker: str | None) -> None:
        self._made_for = (os.getpid(), settings, worker)
        self._users = 0
        try:
            classifier = load_classifier(settings, device.choose(settings.device, settings.dtype, settings.engine))
            budget = calibrate(classifier, settings)
        except (DeviceFull, DeviceLost) as error:
            raise ModelError(f"The device failed: {error}") from None
        self._submitting = threading.Lock()
        self._pipeline = Pipeline(
            classifier,
            ResultsStore(connect(settings), settings) if worker else Nowhere(),
            settings,
            budget,
            worker or "here",
            on_recorded=lambda message: message.ticket.set(),
            on_failure=lambda: None,
        )
        self._pipeline.start()

    def _classify(self, message: Message) -> None:
        message.ticket = done = threading.Event()
        with self._submitting:
            self._pipeline.submit(message)
        while not done.wait(1):
            if self._pipeline.failure:
                raise lost(self._pipeline)
