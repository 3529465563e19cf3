"""Puts the model that is wanted for a worker's queue to work, while the one before goes on.

`feedmill deploy` notes a folder and the hash of its weights in Redis (shared/serving.py), and has the workers look.
What is wanted is read there alone: a worker that the command did not reach looks each minute, and at each connection.
The new model is loaded beside the one at work, on a thread of this file's, and tried; then the pipeline goes over to it
between two micro-batches. Whatever fails on the way leaves the one at work where it is.

Nothing of what is wanted is trusted further than that: it is a folder of this machine, below `models_folder` where that
is set, of safetensors with that hash, and no code that it brings along is run. Knows nothing of Celery.
"""

import gc
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import TypeVar

from redis import Redis
from redis.exceptions import RedisError as RedisFault

from shared.errors import DeviceFull, ModelError, UserError, printable
from shared.messages import ClassifyOptions
from shared.serving import Report, Stage, Wanted, wanted
from shared.settings import PREFIX, Settings
from workers.calibration import TokenBudget, known_budget
from workers.classifiers import Classifier, Row, Scores
from workers.classifiers.choose import load_classifier
from workers.device import Device
from workers.message import traced
from workers.pipeline import Pipeline
from workers.window import Window

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Short and long, plain and odd: each must get a score for each label before a model is put to work.
CANARY = (
    "A first post.",
    "The keeper saved two penalties\n\nand nobody in the stadium could believe it",
    "¿Qué? 🙂 <b>&amp;</b> https://example.org/?a=b " + "x" * 200,
    "no",
)
#: A post as long as any that is read: of these the largest micro-batch is made.
LONGEST = "post " * 10_000
#: Seconds that a worker which ends waits for this thread.
PATIENCE = 5.0


def load_wanted(asked: Wanted | None, settings: Settings, device: Device) -> Classifier:
    """The classifier of the model that is wanted, loaded; of the settings', where none is.

    Raises ModelError or SettingsError.
    """
    if asked is None or asked.model is None:
        return load_classifier(settings, device)
    folder = _folder(asked.model, settings)
    # What the settings say of their own model says nothing of this one.
    others = {"model": str(folder), "revision": None, "classifier": "auto", "trust_remote_code": False}
    classifier = load_classifier(settings.model_copy(update=others), device)
    if classifier.weights.sha256 != asked.weights:
        raise ModelError(
            f"{folder} on {socket.gethostname()} holds other weights ({classifier.weights.sha256[:12]}) than were "
            f"deployed ({printable(str(asked.weights)[:12])}). Copy that model there, and deploy it again."
        )
    return classifier


def _folder(model: str, settings: Settings) -> Path:
    """The folder that is meant, where it is here and may be loaded."""
    folder, host = Path(model), socket.gethostname()
    try:
        there = folder.is_absolute() and folder.is_dir()
        allowed = settings.models_folder is None or folder.resolve().is_relative_to(settings.models_folder.resolve())
    except (OSError, ValueError):  # a name that none can have, or a folder that this user may not look into
        there = allowed = False
    if there and not allowed:
        raise ModelError(
            f"{printable(model)} is not below {settings.models_folder}, where {PREFIX}MODELS_FOLDER of {host} has the "
            "models that may be deployed."
        )
    if not there:
        raise ModelError(
            f"There is no folder {printable(model):.300} on {host}. Copy the model there, under that name, and deploy "
            "it again."
        )
    return folder


class Deployer:
    """The thread that looks what is wanted, and puts it to work.

    at_work: what was wanted when the worker started. on_replaced: told, on this thread, when another model is at work.
    """

    def __init__(
        self, pipeline: Pipeline, settings: Settings, redis: Redis, at_work: Wanted | None,
        on_replaced: Callable[[], None],
    ) -> None:  # fmt: skip
        self._pipeline = pipeline
        self._settings = settings
        self._redis = redis
        self._at_work = self._tried = self._latest = at_work
        self._on_replaced = on_replaced
        #: How the latest asking goes; None where nobody has asked.
        self.report = at_work and Report(at_work.at, Stage.DONE, "loaded at its start")
        self._told = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._loop, name="deployer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def look(self) -> None:
        """Look soon what is wanted; returns at once."""
        self._told.set()

    def stop(self) -> None:
        """End the thread, unless it is in the midst of loading; whatever that was is dropped."""
        self._ending = True
        self._told.set()
        if self._thread.is_alive():
            self._thread.join(PATIENCE)

    def _loop(self) -> None:
        while not self._ending:
            self._told.wait()
            self._told.clear()
            asked = self._asked()
            if asked and asked not in (self._at_work, self._tried) and not self._ending:
                self._tried = asked
                self._pipeline.budget.share(self._pipeline.budget.tokens)
                self._put_to_work(asked)
                settle(self._pipeline.classifier.device)  # nothing above refers any more to what was dropped
                self._pipeline.budget.end_sharing()  # of whichever model stayed

    def _asked(self) -> Wanted | None:
        """What is wanted now; where that cannot be told, what was before: the next look will tell."""
        try:
            self._latest = wanted(self._redis, self._settings.queue)
        except RedisFault as fault:
            logger.debug("what is wanted cannot be told (%s)", fault)
        except UserError as error:
            logger.error("%s", error)
        return self._latest

    def _put_to_work(self, asked: Wanted) -> None:
        device, before = self._pipeline.classifier.device, self._pipeline.classifier.weights.name
        name = printable(asked.model or self._settings.model)
        began = time.monotonic()
        try:
            self._tell(asked, Stage.LOADING, f"{name} beside {before}")
            device.take_share(device.lanes)
            classifier = load_wanted(asked, self._settings, device)
            self._tell(asked, Stage.TRYING, f"{name}, loaded in {time.monotonic() - began:.1f} s")
            budget = self._try(classifier)
            if self._asked() != asked:
                self._told.set()
                raise UserError("something else is wanted by now.")
            self._tell(asked, Stage.SWITCHING, f"to {name} when what was fetched before is done")
            replaced: Future[None] = Future()
            self._pipeline.replace(classifier, budget, partial(replaced.set_result, None))
            del classifier
            self._wait(replaced)
        except UserError as error:
            self._tell(asked, Stage.FAILED, f"{before} stays at work: {error}", logging.ERROR)
        except _Ending:
            return
        except BaseException as error:  # whatever a model's files bring about; a panic, in Rust, is no Exception
            logger.error("%s cannot be put to work:\n%s", name, traced(error))
            self._tell(
                asked, Stage.FAILED, f"{before} stays at work: {type(error).__name__}: {printable(str(error)):.300}"
            )
        else:
            self._at_work = asked
            self._tell(asked, Stage.DONE, f"{name} is at work, {time.monotonic() - began:.1f} s after it was told")
            self._on_replaced()

    def _try(self, classifier: Classifier) -> TokenBudget:
        """See that it computes, on the device thread, between the micro-batches of the one at work.

        Return the budget that is set, or was measured before; else that of the one at work: measuring would keep the
        device for ten seconds, and is left to the next start. The budget is shared, and as small as both models leave
        room for. Raises ModelError.
        """
        name, label_set = classifier.weights.name, classifier.label_set(ClassifyOptions())
        budget = known_budget(classifier, self._settings) or TokenBudget(self._pipeline.budget.alone)
        tokens = budget.tokens
        while True:
            rows = self._largest(classifier, tokens)
            try:
                self._compute(classifier, rows)
            except DeviceFull:
                if len(rows) == 1:
                    raise ModelError(
                        f"{classifier.device.name} has no memory for {name} beside the one at work."
                    ) from None
                tokens = len(rows) * rows[0].length // 2
                logger.warning("micro-batches of %s hold at most %d tokens beside the one at work", name, tokens)
            else:
                break
        window: Window[Row] = Window(time.monotonic)
        for rows in classifier.prepare(CANARY, label_set):
            for row in rows:
                window.add(row)
        while rows := window.take(tokens, self._settings.batch_rows):
            for _, scores in self._compute(classifier, rows):
                if set(scores) != set(label_set.labels) or not all(map(math.isfinite, scores.values())):
                    raise ModelError(f"{name} gives scores that are none, of {len(scores)} labels: {scores!r:.200}")
        budget.share(tokens)
        return budget

    def _largest(self, classifier: Classifier, tokens: int) -> list[Row]:
        """A micro-batch as large as any that may come."""
        label_set = classifier.label_set(ClassifyOptions())
        length = classifier.prepare([LONGEST], label_set)[0][0].length
        count = max(1, min(self._settings.batch_rows, tokens // length))
        posts = classifier.prepare([LONGEST] * math.ceil(count / label_set.rows), label_set)
        return [row for of_post in posts for row in of_post][:count]

    def _compute(self, classifier: Classifier, rows: Sequence[Row]) -> list[tuple[Row, Scores]]:
        """The scores of the posts whose last rows these are."""
        computed: Future[list[tuple[Row, Scores]]] = Future()

        def compute() -> None:
            try:
                computed.set_result(classifier.finish(rows, classifier.forward(rows)))
            except BaseException as error:  # it is for who waits
                computed.set_exception(error)

        what = f"the trial of {classifier.weights.name}"
        self._pipeline.run_on_device_thread(compute, what, self._settings.forward_timeout)
        return self._wait(computed)

    def _wait(self, future: Future[T]) -> T:
        while not wait([future], timeout=1).done:
            if self._ending or self._pipeline.failure:
                raise _Ending
        return future.result()

    def _tell(self, asked: Wanted, stage: Stage, said: str, level: int = logging.INFO) -> None:
        self.report = Report(asked.at, stage, said)
        logger.log(level, "deploy: %s: %s", stage, said)


class _Ending(Exception):  # noqa: N818 - nothing is wrong
    """The worker ends, and so does what it was about to load."""


def settle(device: Device) -> None:
    """Give back what a model left that is no longer there, and have what is there left alone by the search for garbage.

    The libraries and the model are here to stay: looking through them for garbage, again and again, took an eighth of a
    worker's time.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    device.give_back()
