"""Calibration: find the best token budget for this device and model, once, and remember it.

The best budget depends on the device (a CPU is fastest while a batch fits its caches, a GPU once a
batch fills it), the model, the precision and the libraries. So the first start tries several
budgets on generated rows and writes the best to a file; `feedmill tune` does the same on a file's
posts. If any of these changes, the next start measures again.
"""

import json
import logging
import random
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import DeviceFull
from feedmill.shared.messages import ClassifyOptions, digest
from feedmill.shared.settings import CLASSIFIERS, Settings
from feedmill.workers.models.classifiers import Classifier, Row
from feedmill.workers.pipeline.window import Window

logger = logging.getLogger(__name__)

#: Returns a text for a random number generator.
Text = Callable[[random.Random], str]
#: Name of the file in the cache folder with the budget of each device, model and settings.
CALIBRATION_FILE = "calibration.json"
#: Budgets to try, smallest first, by device type.
CANDIDATES: dict[str, tuple[int, ...]] = {"cpu": (512, 1024, 2048, 4096, 8192)}
OTHER_CANDIDATES: tuple[int, ...] = (8192, 16_384, 32_768, 65_536, 131_072, 262_144)
#: Minimum seconds per trial of a budget, and rounds of trials. A budget's best round counts,
#: because other processes on a shared machine can only slow it down, even in CPU time: they share
#: its caches.
MIN_TRIAL_S = 0.5
ROUNDS = 2
#: Take the smallest budget that reaches this share of the best rate: smaller batches fill sooner
#: and pad less.
CLOSE_ENOUGH = 0.98
#: Stop trying larger budgets once one falls below this share of the best rate.
STOP_RATIO = 0.85
#: Lengths of the generated rows in tokens: log-normal, like those of posts.
MEDIAN_LENGTH = 32
SPREAD = 0.9
#: Maximum rows in the window from which the trial cuts its batches.
WINDOW_ROWS = 1024


def known_budget(classifier: Classifier, settings: Settings) -> int | None:
    """Return the configured budget in tokens, else the remembered one, else None."""
    if settings.token_budget:
        return settings.token_budget
    file = settings.cache_folder / CALIBRATION_FILE
    key = _key(classifier, settings)
    budget = _read_stored(file).get(key)
    if isinstance(budget, int) and budget > 0:
        return budget
    return None


def calibrate(classifier: Classifier, settings: Settings) -> int:
    """Return the configured budget, else the remembered one, else measure the best, which takes
    several seconds.
    """
    budget = known_budget(classifier, settings)
    if budget:
        return budget
    logger.info(
        "measuring the token budget for this device and model; later starts reuse the result"
    )
    rates = measure(classifier, settings)
    remember(classifier, settings, rates)
    return best(rates)


def generated(chance: random.Random) -> str:
    """Return a text of a post's length: its median is MEDIAN_LENGTH tokens."""
    length = MEDIAN_LENGTH * chance.lognormvariate(0, SPREAD)
    words = max(1, round(length))
    return "post " * words


def measure(
    classifier: Classifier, settings: Settings, text: Text = generated
) -> dict[int, float]:
    """Measure tokens per second by budget, with the cores of one lane. text: returns a text to
    classify.
    """
    threads = torch.get_num_threads()
    classifier.device.take_share(classifier.device.lanes)
    try:
        clock = _clock(classifier, settings)
        return sweep(classifier, settings.batch_rows, clock, text)
    finally:
        torch.set_num_threads(threads)


def computes_here(classifier: Classifier, settings: Settings) -> bool:
    """Return whether this process' CPU time is the time that the computing takes.

    The built-in engines compute on a CPU in the calling thread, and in others that work beside it.
    Elsewhere the device computes, and a plug-in may do so in a thread or process of its own: only
    the time that passes can be measured.
    """
    is_built_in = (
        settings.engine in ("torch", "onnx") and classifier.kind in CLASSIFIERS
    )
    return is_built_in and classifier.device.torch.type == "cpu"


def _clock(classifier: Classifier, settings: Settings) -> Callable[[], float]:
    """Return this thread's CPU time if it computes, so that a busy machine does not affect the
    best budget.
    """
    if computes_here(classifier, settings):
        return time.thread_time
    return time.perf_counter


def _key(classifier: Classifier, settings: Settings) -> str:
    """Return the key of the budget in the file: a digest of everything that it depends on."""
    device = classifier.device
    of_device = (
        device.hardware,
        str(device.lanes),
        str(device.dtype),
        settings.engine,
    )
    of_rows = (
        classifier.kind,
        classifier.weights.sha256,
        str(settings.max_tokens),
        str(settings.batch_rows),
    )
    return digest(*of_device, *of_rows, version("torch"), version("transformers"))


def remember(
    classifier: Classifier, settings: Settings, rates: dict[int, float]
) -> bool:
    """Write the best budget to the calibration file, for later starts with this device, model and
    settings.

    rates: tokens per second by budget. Logs a warning and returns False if the file cannot be
    written.
    """
    tokens = best(rates)
    file = settings.cache_folder / CALIBRATION_FILE
    by_budget = ", ".join(f"{rate:.0f} at {budget}" for budget, rate in rates.items())
    logger.info("token budget %d, the best of (tokens/s): %s", tokens, by_budget)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as temporary:
            budgets = _read_stored(file)
            budgets[_key(classifier, settings)] = tokens
            text = json.dumps(budgets, indent=1)
            temporary.write_text(f"{text}\n")
    except OSError as error:
        logger.warning(
            "cannot write %s (%s); the next start measures again", file, error
        )
        return False
    return True


def best(rates: Mapping[int, float]) -> int:
    """Return the smallest budget whose rate comes close to the best."""
    close_rate = CLOSE_ENOUGH * max(rates.values())
    return min(budget for budget, rate in rates.items() if rate >= close_rate)


def sweep(
    classifier: Classifier,
    row_limit: int,
    clock: Callable[[], float],
    text: Text = generated,
) -> dict[int, float]:
    """Measure tokens per second for each budget, smallest first, up to one that is slow or does
    not fit in memory.

    clock: returns seconds. A rate of 0 means that not even the smallest budget fits.
    """
    candidates = CANDIDATES.get(classifier.device.torch.type, OTHER_CANDIDATES)
    rates: dict[int, float] = {}
    for _ in range(ROUNDS):
        for budget in candidates:
            try:
                rate = _tokens_per_second(classifier, budget, row_limit, clock, text)
            except DeviceFull:
                rates.pop(budget, None)
                candidates = tuple(other for other in candidates if other < budget)
                break
            rates[budget] = max(rate, rates.get(budget, 0.0))
            if rate < STOP_RATIO * max(rates.values()):
                candidates = tuple(other for other in candidates if other <= budget)
                break
    if rates:
        return rates
    smallest = candidates[0] if candidates else 1
    return {smallest: 0.0}


def _tokens_per_second(
    classifier: Classifier,
    budget: int,
    row_limit: int,
    clock: Callable[[], float],
    text: Text,
) -> float:
    """Return real tokens per second (without padding) in batches cut from a window of rows,
    without preparing them.
    """
    chance = random.Random(budget)
    label_set = classifier.label_set(ClassifyOptions())
    window: Window[Row] = Window(time.monotonic, classifier.device.shapes)
    tokens = 0
    waiting_tokens = 0
    spent = 0.0
    while spent < MIN_TRIAL_S:
        while waiting_tokens < 4 * budget and len(window) < WINDOW_ROWS:
            texts = [text(chance)]
            for row in classifier.prepare(texts, label_set)[0]:
                window.add(row)
                waiting_tokens += row.length
        batch = window.take(budget, row_limit)
        batch_tokens = sum(row.length for row in batch)
        waiting_tokens -= batch_tokens
        start = clock()
        classifier.finish(batch, classifier.forward(batch))
        spent += clock() - start
        tokens += batch_tokens
    return tokens / spent


def _read_stored(file: Path) -> dict[str, Any]:
    try:
        budgets = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("cannot read %s (%s); starting a new file", file, error)
        return {}
    return budgets if isinstance(budgets, dict) else {}
