"""Hot swap: load the model wanted for a worker's queue and activate it while the previous one
keeps running.

`feedmill deploy` stores a folder and the hash of its weights in Redis (model_routing.py) and tells
the workers to check. The command carries no data: workers read the deployment from Redis. They
also check every minute and at each connection, in case they missed the command. A worker loads the
new model beside the active one, on a separate thread; loading scores canary posts. The pipeline
then switches between two micro-batches. After any failure, the active model stays in place.

A deployment can only select a folder on this machine, below `models_folder` if that is set, with
safetensors of that hash. Code in the folder never runs. Independent of Celery.
"""

import gc
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from redis import Redis
from redis.exceptions import RedisError

from feedmill.shared.errors import ModelError, SettingsError, UserError, printable
from feedmill.shared.model_routing import (
    DeploymentReport,
    RequestedModel,
    Stage,
    requested_model,
)
from feedmill.shared.settings import PREFIX, Settings
from feedmill.workers.models import device as devices
from feedmill.workers.models.classifiers import Classifier
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.device import GRAPH_DTYPES, Device
from feedmill.workers.models.weights import Weights, digest_of_0_1
from feedmill.workers.pipeline.calibration import calibrate, known_budget
from feedmill.workers.pipeline.message import traceback_of
from feedmill.workers.pipeline.pipeline import Pipeline

logger = logging.getLogger(__name__)

#: Seconds that `stop` waits for the thread.
JOIN_TIMEOUT_S = 5.0


def load_wanted(
    deployment: RequestedModel | None, settings: Settings, device: Device
) -> Classifier:
    """Load the deployed model, or else the configured one.

    Return its classifier. Raises ModelError, SettingsError.
    """
    if deployment is None or deployment.model is None:
        return load_classifier(settings, device)
    folder = _folder(deployment.model, settings)
    # Settings specific to the configured model do not apply to this one.
    others = {
        "model": str(folder),
        "revision": None,
        "classifier": "auto",
        "trust_remote_code": False,
    }

    def accept(weights: Weights) -> None:
        if deployment.weights == weights.sha256:
            return
        # 0.1 deployed the model.
        if deployment.weights == digest_of_0_1(weights):
            return
        host = socket.gethostname()
        digest = weights.sha256[:12]
        deployed_digest = printable(str(deployment.weights)[:12])
        raise ModelError(
            f"{folder} on {host} has the digest {digest}, but {deployed_digest} was deployed. "
            "Copy the deployed model to that folder and deploy it again."
        )

    model_settings = settings.model_copy(update=others)
    return load_classifier(model_settings, device, accept)


class LoadedClassifier(NamedTuple):
    """A classifier, its token budget, and the deployment that requested it, if any."""

    classifier: Classifier
    budget: int
    deployment: RequestedModel | None


def load(settings: Settings, redis: Redis) -> LoadedClassifier:
    """Load the model deployed to the queue, else the one in the settings.

    Raises UserError, DeviceFull, DeviceLost.
    """
    device = devices.select_device(settings.device, settings.dtype, settings.engine)
    if settings.engine in GRAPH_DTYPES and settings.device_memory < 1:
        raise SettingsError(
            f"{PREFIX}DEVICE_MEMORY: the memory of engine {settings.engine} cannot be limited. "
            f"Start one worker per GPU, or set {PREFIX}ENGINE=torch."
        )
    devices.limit_memory(device.torch, settings.device_memory)
    devices.keep_freed_memory(device.torch)
    began = time.monotonic()
    deployment = None
    with suppress(RedisError):  # a later check finds it
        deployment = requested_model(redis, settings.queue)
    classifier = load_wanted(deployment, settings, device)
    logger.info("device %s", classifier.device)
    budget = calibrate(classifier, settings)
    logger.info(
        "model %s (%s) loaded in %.1f s; token budget %d",
        classifier.weights.name,
        classifier.kind,
        time.monotonic() - began,
        budget,
    )
    return LoadedClassifier(classifier=classifier, budget=budget, deployment=deployment)


def _folder(model: str, settings: Settings) -> Path:
    """Return the model's folder. Raises ModelError if it is missing or may not be loaded."""
    folder = Path(model)
    host = socket.gethostname()
    name = printable(model)
    try:
        exists = folder.is_absolute() and folder.is_dir()
        is_allowed = True
        if settings.models_folder is not None:
            models_folder = settings.models_folder.resolve()
            is_allowed = folder.resolve().is_relative_to(models_folder)
    except (OSError, ValueError):
        # an impossible path, or a folder without read permission
        exists = False
    if not exists:
        raise ModelError(
            f"There is no folder {name:.300} on {host}. Copy the model to that path "
            "and deploy it again."
        )
    if not is_allowed:
        raise ModelError(
            f"{name} is outside {settings.models_folder}, the {PREFIX}MODELS_FOLDER "
            f"of {host}. Move the model into that folder and deploy it from there."
        )
    return folder


class Deployer:
    """The thread that checks which model is wanted and activates it.

    active: the deployment that the worker loaded at startup, if any.
    on_replaced: called on this thread after another model is activated.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        settings: Settings,
        redis: Redis,
        active: RequestedModel | None,
        on_replaced: Callable[[], None],
    ) -> None:
        self._pipeline = pipeline
        self._settings = settings
        self._redis = redis
        self._active = active
        self._tried = active
        self._on_replaced = on_replaced
        #: Status of the latest deployment; None if there was none.
        self.report: DeploymentReport | None = None
        if active:
            self.report = DeploymentReport(active.at, Stage.DONE, "loaded at startup")
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
        """End the thread, waiting at most JOIN_TIMEOUT_S for it.

        Drop a model that is still loading.
        """
        self._stopped = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)

    def _loop(self) -> None:
        while not self._stopped:
            self._wake.wait()
            self._wake.clear()
            deployment = self._read_wanted()
            if not deployment or deployment in (self._active, self._tried):
                continue
            if self._stopped:
                return
            self._tried = deployment
            tokens_before = self._pipeline.backlog.loaded.budget
            self._deploy(deployment, tokens_before)
            # by now, no reference to the dropped model is left: none in a variable here, either
            freeze_heap(self._pipeline.classifier.device)
            # Restore what was lowered while two models shared the memory.
            tokens = known_budget(self._pipeline.classifier, self._settings)
            self._pipeline.backlog.loaded.budget = tokens or tokens_before

    def _read_wanted(self) -> RequestedModel | None:
        """Return the wanted model; None if Redis is unreachable, the deployment is invalid, or
        there is none and the worker's own model is active.
        """
        try:
            requested = requested_model(self._redis, self._settings.queue)
            if requested is None:
                return self._own_model()
            return requested
        except RedisError as fault:
            logger.debug("cannot read which model is wanted (%s)", fault)
        except UserError as error:
            logger.error("%s", error)
        return None

    def _own_model(self) -> RequestedModel | None:
        """Return a request for the worker's own model; None if that is active.

        `feedmill deploy --reset` removes the deployment once all workers that answered have
        switched; this worker may have been silent at that time.
        """
        if self._active is None or self._active.model is None:
            return None
        return RequestedModel(None, None, self._active.at)

    def _deploy(self, deployment: RequestedModel, tokens: int) -> None:
        """Load a model and activate it. tokens: its token budget, unless one was configured or
        measured.
        """
        device = self._pipeline.classifier.device
        before = self._pipeline.classifier.weights.name
        name = printable(deployment.model or self._settings.model)
        began = time.monotonic()
        try:
            self._report(deployment, Stage.LOADING, f"{name} beside {before}")
            device.take_share(device.lanes)
            classifier = load_wanted(deployment, self._settings, device)
            if self._read_wanted() not in (deployment, None):
                self._wake.set()
                raise UserError("another model was deployed meanwhile.")
            self._report(
                deployment,
                Stage.SWITCHING,
                f"to {name}, once earlier messages are finished",
            )
            replaced = threading.Event()
            # A measurement would block the device for ten seconds, and is left to the next start.
            budget = known_budget(classifier, self._settings)
            self._pipeline.replace(classifier, budget or tokens, replaced.set)
            while not replaced.wait(1):
                if self._stopped or self._pipeline.failure:
                    return
        except UserError as error:
            self._report(
                deployment,
                Stage.FAILED,
                f"{before} stays active: {error}",
                logging.ERROR,
            )
        except BaseException as error:
            # a model's files can raise anything; a Rust panic is not an Exception
            logger.error("cannot activate %s:\n%s", name, traceback_of(error))
            kind = type(error).__name__
            text = printable(str(error))
            self._report(
                deployment,
                Stage.FAILED,
                f"{before} stays active: {kind}: {text:.300}",
            )
        else:
            self._active = deployment
            seconds = time.monotonic() - began
            self._report(
                deployment,
                Stage.DONE,
                f"{name} is active after {seconds:.1f} s",
            )
            self._on_replaced()

    def _report(
        self,
        deployment: RequestedModel,
        stage: Stage,
        text: str,
        level: int = logging.INFO,
    ) -> None:
        self.report = DeploymentReport(deployment.at, stage, text)
        logger.log(level, "deploy: %s: %s", stage, text)


def freeze_heap(device: Device) -> None:
    """Free the old model and exempt live objects from garbage collection again (pool.py)."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    device.give_back()
