"""Load a worker's device, model and token budget, before it takes any message."""

import logging
import time
from typing import NamedTuple

from redis import Redis
from redis.exceptions import RedisError

from shared.errors import SettingsError
from shared.model_routing import RequestedModel, requested_model
from shared.settings import PREFIX, Settings
from workers.models import device
from workers.models.classifiers import Classifier
from workers.pipeline.calibration import TokenBudget, calibrate
from workers.runtime.hot_swap import load_wanted

logger = logging.getLogger(__name__)


class LoadedModel(NamedTuple):
    """A model on its device. asked: the deployment that requested it; None for the model in the settings."""

    classifier: Classifier
    budget: TokenBudget
    asked: RequestedModel | None


def load(settings: Settings, redis: Redis) -> LoadedModel:
    """Load the model deployed to the queue, else the one in the settings. Raises UserError, DeviceFull, DeviceLost."""
    selected = device.select_device(settings.device, settings.dtype, settings.engine)
    if settings.engine == "onnx" and settings.device_memory < 1:
        raise SettingsError(
            f"{PREFIX}DEVICE_MEMORY: the memory of engine onnx cannot be limited. Start one worker per GPU, or set "
            f"{PREFIX}ENGINE=torch."
        )
    device.limit_memory(selected.torch, settings.device_memory)
    device.keep_freed_memory(selected.torch)
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
