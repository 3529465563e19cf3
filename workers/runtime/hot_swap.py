"""Hot swap: load the model wanted for a worker's queue and activate it while the previous one keeps running.

`feedmill deploy` stores a folder and the hash of its weights in Redis (model_routing.py) and tells the workers to
check. The command carries no data: workers read the deployment from Redis. They also check every minute and at each
connection, in case they missed the command. A worker loads the new model beside the active one, on a separate thread,
and tests it. The pipeline then switches between two micro-batches. After any failure, the active model stays in place.

A deployment can only select a folder on this machine, below `models_folder` if that is set, with safetensors of that
hash. Code in the folder never runs. Independent of Celery.
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
from typing import NamedTuple, TypeVar

from redis import Redis
from redis.exceptions import RedisError

from feedmill.shared.errors import DeviceFull, ModelError, SettingsError, UserError, printable
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.model_routing import DeploymentReport, RequestedModel, Stage, requested_model
from feedmill.shared.settings import PREFIX, Settings
from feedmill.workers.models import device as devices
from feedmill.workers.models.classifiers import Classifier, Row
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.device import Device
from feedmill.workers.pipeline.calibration import TokenBudget, calibrate, known_budget
from feedmill.workers.pipeline.message import traceback_of
from feedmill.workers.pipeline.pipeline import Pipeline

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: A post beyond every truncation length, for building the largest possible micro-batch.
LONG_POST = "post " * 10_000
#: Seconds that `stop` waits for the thread.
JOIN_TIMEOUT_S = 5.0


def load_wanted(asked: RequestedModel | None, settings: Settings, device: Device) -> Classifier:
    """Load the deployed model, or else the configured one. Return its classifier. Raises ModelError, SettingsError."""
    if asked is None or asked.model is None:
        return load_classifier(settings, device)
    folder = _folder(asked.model, settings)
    # Settings specific to the configured model do not apply to this one.
    others = {"model": str(folder), "revision": None, "classifier": "auto", "trust_remote_code": False}
    classifier = load_classifier(settings.model_copy(update=others), device)
    if classifier.weights.sha256 != asked.weights:
        raise ModelError(
            f"{folder} on {socket.gethostname()} has weights {classifier.weights.sha256[:12]}, but "
            f"{printable(str(asked.weights)[:12])} were deployed. Copy the deployed model to that folder and deploy it "
            "again."
        )
    return classifier


class LoadedModel(NamedTuple):
    """A model on its device. asked: the deployment that requested it; None for the model in the settings."""

    classifier: Classifier
    budget: TokenBudget
    asked: RequestedModel | None


def load(settings: Settings, redis: Redis) -> LoadedModel:
    """Load the model deployed to the queue, else the one in the settings. Raises UserError, DeviceFull, DeviceLost."""
    selected = devices.select_device(settings.device, settings.dtype, settings.engine)
    if settings.engine == "onnx" and settings.device_memory < 1:
        raise SettingsError(
            f"{PREFIX}DEVICE_MEMORY: the memory of engine onnx cannot be limited. Start one worker per GPU, or set "
            f"{PREFIX}ENGINE=torch."
        )
    devices.limit_memory(selected.torch, settings.device_memory)
    devices.keep_freed_memory(selected.torch)
    began = time.monotonic()
    asked = _wanted(settings, redis)
    classifier = load_wanted(asked, settings, selected)
    logger.info("device %s", classifier.device)
    budget = calibrate(classifier, settings)
    logger.info(
        "model %s (%s) loaded in %.1f s; token budget %d",
        classifier.weights.name,
        classifier.kind,
        time.monotonic() - began,
        budget.tokens,
    )
    return LoadedModel(classifier, budget, asked)


def _wanted(settings: Settings, redis: Redis) -> RequestedModel | None:
    """Return the queue's deployment, if any; None if Redis is unreachable, until a later check. Raises UserError."""
    try:
        return requested_model(redis, settings.queue)
    except RedisError:
        return None


def _folder(model: str, settings: Settings) -> Path:
    """Return the model's folder. Raises ModelError if it is missing or may not be loaded."""
    folder, host = Path(model), socket.gethostname()
    try:
        there = folder.is_absolute() and folder.is_dir()
        allowed = settings.models_folder is None or folder.resolve().is_relative_to(settings.models_folder.resolve())
    except (OSError, ValueError):  # an impossible path, or a folder without read permission
        there = allowed = False
    if there and not allowed:
        raise ModelError(
            f"{printable(model)} is outside {settings.models_folder}, the {PREFIX}MODELS_FOLDER of {host}. Move the "
            "model into that folder and deploy it from there."
        )
    if not there:
        raise ModelError(
            f"There is no folder {printable(model):.300} on {host}. Copy the model to that path and deploy it again."
        )
    return folder


class Deployer:
    """The thread that checks which model is wanted and activates it.

    active: the deployment that the worker loaded at startup, if any.
    on_replaced: called on this thread after another model is activated.
    """

    def __init__(
        self, pipeline: Pipeline, settings: Settings, redis: Redis, active: RequestedModel | None,
        on_replaced: Callable[[], None],
    ) -> None:  # fmt: skip
        self._pipeline, self._settings, self._redis = pipeline, settings, redis
        self._active = self._tried = self._latest = active
        self._on_replaced = on_replaced
        #: Status of the latest deployment; None if there was none.
        self.report = DeploymentReport(active.at, Stage.DONE, "loaded at startup") if active else None
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._loop, name="deployer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def request_check(self) -> None:
        """Schedule a check of the wanted model. Returns at once."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread, waiting at most JOIN_TIMEOUT_S for it. Drop a model that is still loading."""
        self._stopped = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)

    def _loop(self) -> None:
        while not self._stopped:
            self._wake.wait()
            self._wake.clear()
            asked = self._read_wanted()
            if asked and asked not in (self._active, self._tried) and not self._stopped:
                self._tried = asked
                self._pipeline.budget.share(self._pipeline.budget.tokens)
                self._deploy(asked)
                freeze_heap(self._pipeline.classifier.device)  # by now, no reference to the dropped model is left
                self._pipeline.budget.end_sharing()  # applies to the active model, old or new

    def _read_wanted(self) -> RequestedModel | None:
        """Return the wanted model. While Redis is unreachable, return the last known one."""
        try:
            self._latest = requested_model(self._redis, self._settings.queue)
        except RedisError as fault:
            logger.debug("cannot read which model is wanted (%s)", fault)
        except UserError as error:
            logger.error("%s", error)
        return self._latest

    def _deploy(self, asked: RequestedModel) -> None:
        device, before = self._pipeline.classifier.device, self._pipeline.classifier.weights.name
        name = printable(asked.model or self._settings.model)
        began = time.monotonic()
        try:
            self._report(asked, Stage.LOADING, f"{name} beside {before}")
            device.take_share(device.lanes)
            classifier = load_wanted(asked, self._settings, device)
            took = time.monotonic() - began
            self._report(asked, Stage.TRYING, f"{name}, loaded in {took:.1f} s on {classifier.device}")
            budget = self._fit(classifier)
            if self._read_wanted() != asked:
                self._wake.set()
                raise UserError("another model was deployed meanwhile.")
            self._report(asked, Stage.SWITCHING, f"to {name}, once earlier messages are finished")
            replaced: Future[None] = Future()
            self._pipeline.replace(classifier, budget, partial(replaced.set_result, None))
            del classifier
            self._wait(replaced)
        except UserError as error:
            self._report(asked, Stage.FAILED, f"{before} stays active: {error}", logging.ERROR)
        except _Stopping:
            return
        except BaseException as error:  # a model's files can raise anything; a Rust panic is not an Exception
            logger.error("cannot activate %s:\n%s", name, traceback_of(error))
            why = f"{type(error).__name__}: {printable(str(error)):.300}"
            self._report(asked, Stage.FAILED, f"{before} stays active: {why}")
        else:
            self._active = asked
            self._report(asked, Stage.DONE, f"{name} is active after {time.monotonic() - began:.1f} s")
            self._on_replaced()

    def _fit(self, classifier: Classifier) -> TokenBudget:
        """Run the largest micro-batch between those of the active model, and return the token budget.

        The budget is the configured or previously measured one, else the active model's: a measurement would
        block the device for ten seconds and is left to the next start. The returned budget is shared (see
        TokenBudget.share), and lowered until both models fit in memory. Raises ModelError.

        Loading has tested the scores.
        """
        name = classifier.weights.name
        budget = known_budget(classifier, self._settings) or TokenBudget(self._pipeline.budget.unshared)
        tokens = budget.tokens
        while True:
            rows = self._largest(classifier, tokens)
            try:
                self._compute(classifier, rows)
                break
            except DeviceFull:
                if len(rows) == 1:
                    raise ModelError(
                        f"{classifier.device.name} has too little memory for {name} beside the active model. "
                        "Restart the worker to load the new model only."
                    ) from None
                tokens = len(rows) * rows[0].length // 2
                logger.warning("micro-batches of %s hold at most %d tokens beside the active model", name, tokens)
        budget.share(tokens)
        return budget

    def _largest(self, classifier: Classifier, tokens: int) -> list[Row]:
        """Return the rows of the largest micro-batch that fits the budget `tokens`."""
        label_set = classifier.label_set(ClassifyOptions())
        length = classifier.prepare([LONG_POST], label_set)[0][0].length
        count = classifier.device.shapes.fit(length, tokens, self._settings.batch_rows)
        posts = classifier.prepare([LONG_POST] * math.ceil(count / label_set.rows), label_set)
        return [row for of_post in posts for row in of_post][:count]

    def _compute(self, classifier: Classifier, rows: Sequence[Row]) -> None:
        """Run a micro-batch on the device thread."""
        computed: Future[None] = Future()

        def compute() -> None:
            try:
                classifier.finish(rows, classifier.forward(rows))
                computed.set_result(None)
            except BaseException as error:  # raised again on the waiting thread
                computed.set_exception(error)

        what = f"the test of {classifier.weights.name}"
        self._pipeline.run_on_device_thread(compute, what, self._settings.forward_timeout)
        self._wait(computed)

    def _wait(self, future: Future[T]) -> T:
        while not wait([future], timeout=1).done:
            if self._stopped or self._pipeline.failure:
                raise _Stopping
        return future.result()

    def _report(self, asked: RequestedModel, stage: Stage, said: str, level: int = logging.INFO) -> None:
        self.report = DeploymentReport(asked.at, stage, said)
        logger.log(level, "deploy: %s: %s", stage, said)


class _Stopping(Exception):  # noqa: N818 - not an error
    """Signal to abandon a deployment, because the worker stops."""


def freeze_heap(device: Device) -> None:
    """Free the old model and exempt live objects from garbage collection.

    The libraries and the model stay in memory. Scanning them in every collection took an eighth of a worker's time.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    device.give_back()
