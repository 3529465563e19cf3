"""Hot swap: load the model wanted for a worker's queue and activate it while the previous one keeps running.

`feedmill deploy` stores a folder and the hash of its weights in Redis (model_routing.py) and tells the workers to
check. The command carries no data: workers read the deployment from Redis. They also check every minute and at each
connection, in case they missed the command. A worker loads the new model beside the active one, on a separate thread;
loading scores canary posts. The pipeline then switches between two micro-batches. After any failure, the active model
stays in place.

A deployment can only select a folder on this machine, below `models_folder` if that is set, with safetensors of that
hash. Code in the folder never runs. Independent of Celery.
"""

import gc
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from feedmill.shared.errors import ModelError, SettingsError, UserError, printable
from feedmill.shared.model_routing import DeploymentReport, RequestedModel, Stage, requested_model
from feedmill.shared.settings import PREFIX, Settings
from feedmill.workers.models import device as devices
from feedmill.workers.models.classifiers import Classifier
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.device import Device
from feedmill.workers.pipeline.calibration import calibrate, known_budget
from feedmill.workers.pipeline.message import traceback_of
from feedmill.workers.pipeline.pipeline import Pipeline

logger = logging.getLogger(__name__)

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


def load(settings: Settings, redis: Redis) -> tuple[Classifier, int, RequestedModel | None]:
    """Load the model deployed to the queue, else the one in the settings. Raises UserError, DeviceFull, DeviceLost.

    Return it with its token budget, and the deployment that requested it, if any.
    """
    selected = devices.select_device(settings.device, settings.dtype, settings.engine)
    if settings.engine == "onnx" and settings.device_memory < 1:
        raise SettingsError(
            f"{PREFIX}DEVICE_MEMORY: the memory of engine onnx cannot be limited. Start one worker per GPU, or set "
            f"{PREFIX}ENGINE=torch."
        )
    devices.limit_memory(selected.torch, settings.device_memory)
    devices.keep_freed_memory(selected.torch)
    began = time.monotonic()
    asked = None
    with suppress(RedisError):  # a later check finds it
        asked = requested_model(redis, settings.queue)
    classifier = load_wanted(asked, settings, selected)
    logger.info("device %s", classifier.device)
    budget = calibrate(classifier, settings)
    logger.info(
        "model %s (%s) loaded in %.1f s; token budget %d",
        classifier.weights.name,
        classifier.kind,
        time.monotonic() - began,
        budget,
    )
    return classifier, budget, asked


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
        self._active = self._tried = active
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
                self._tried, before = asked, self._pipeline.backlog.loaded.budget
                self._deploy(asked, before)
                freeze_heap(self._pipeline.classifier.device)  # by now, no reference to the dropped model is left
                # Restore what was lowered while two models shared the memory.
                known = known_budget(self._pipeline.classifier, self._settings)
                self._pipeline.backlog.loaded.budget = known or before

    def _read_wanted(self) -> RequestedModel | None:
        """Return the wanted model, or None if Redis is unreachable or there was no deployment."""
        try:
            return requested_model(self._redis, self._settings.queue)
        except RedisError as fault:
            logger.debug("cannot read which model is wanted (%s)", fault)
        except UserError as error:
            logger.error("%s", error)
        return None

    def _deploy(self, asked: RequestedModel, tokens: int) -> None:
        """Load a model and activate it. tokens: its token budget, unless one was configured or measured."""
        device, before = self._pipeline.classifier.device, self._pipeline.classifier.weights.name
        name = printable(asked.model or self._settings.model)
        began = time.monotonic()
        try:
            self._report(asked, Stage.LOADING, f"{name} beside {before}")
            device.take_share(device.lanes)
            classifier = load_wanted(asked, self._settings, device)
            if self._read_wanted() not in (asked, None):
                self._wake.set()
                raise UserError("another model was deployed meanwhile.")
            self._report(asked, Stage.SWITCHING, f"to {name}, once earlier messages are finished")
            replaced = threading.Event()
            # A measurement would block the device for ten seconds, and is left to the next start.
            self._pipeline.replace(classifier, known_budget(classifier, self._settings) or tokens, replaced.set)
            while not replaced.wait(1):
                if self._stopped or self._pipeline.failure:
                    return
        except UserError as error:
            self._report(asked, Stage.FAILED, f"{before} stays active: {error}", logging.ERROR)
        except BaseException as error:  # a model's files can raise anything; a Rust panic is not an Exception
            logger.error("cannot activate %s:\n%s", name, traceback_of(error))
            why = f"{type(error).__name__}: {printable(str(error)):.300}"
            self._report(asked, Stage.FAILED, f"{before} stays active: {why}")
        else:
            self._active = asked
            self._report(asked, Stage.DONE, f"{name} is active after {time.monotonic() - began:.1f} s")
            self._on_replaced()

    def _report(self, asked: RequestedModel, stage: Stage, said: str, level: int = logging.INFO) -> None:
        self.report = DeploymentReport(asked.at, stage, said)
        logger.log(level, "deploy: %s: %s", stage, said)


def freeze_heap(device: Device) -> None:
    """Free the old model and exempt live objects from garbage collection again (pool.py)."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    device.give_back()
