"""How many tokens a micro-batch holds: measured once for this device and model, and remembered.

The best budget is the device's own: a CPU is fastest while a batch stays in its caches, a GPU once a batch fills it,
and both depend on model, precision and libraries. So the first start tries budgets on made-up rows and writes the
best to a file; it is measured again when any of those changes. The setting `token_budget` overrides it.
"""

import fcntl
import json
import logging
import random
import threading
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shared.errors import DeviceFull
from shared.messages import ClassifyOptions, digest
from shared.settings import Settings
from workers.classifiers import Classifier, Row
from workers.window import Window

logger = logging.getLogger(__name__)

#: In the cache folder: what was measured, by what it was measured on.
FILE = "calibration.json"
#: Budgets that are tried, smallest first, by the kind of device.
CANDIDATES: dict[str, tuple[int, ...]] = {"cpu": (512, 1024, 2048, 4096, 8192)}
OTHER_CANDIDATES: tuple[int, ...] = (8192, 16_384, 32_768, 65_536, 131_072, 262_144)
#: Each is tried for at least this many seconds, in each of so many rounds; its best round counts, since others
#: of a shared machine's processes can only slow it down.
SECONDS, ROUNDS = 0.5, 2
#: The smallest budget that comes this close to the fastest is taken: it waits less, and pads less.
CLOSE_ENOUGH = 0.98
#: Larger budgets are not tried once one is this much slower than the best before it.
FALLEN = 0.85
#: Lengths of the made-up rows, in tokens: log-normal like those of posts.
MEDIAN_LENGTH, SPREAD = 32, 0.9
#: Rows that they are cut from, at most.
WINDOW_ROWS = 1024


class TokenBudget:
    """Tokens of one micro-batch, at most: its longest row times its rows.

    file, key: where a budget that was lowered is remembered; None remembers nothing. While the budget is shared, which
    means that another model is loaded beside this one, lowering it is temporary.
    """

    def __init__(self, tokens: int, file: Path | None = None, key: str = "") -> None:
        self.tokens = tokens
        #: The budget without the other model; None while there is none.
        self._alone: int | None = None
        self._file = file
        self._key = key
        self._lock = threading.Lock()

    @property
    def shared(self) -> bool:
        return self._alone is not None

    @property
    def alone(self) -> int:
        """The budget without another model on the device."""
        return self.tokens if self._alone is None else self._alone

    def share(self, tokens: int) -> None:
        """Hold micro-batches to `tokens`, and lower this temporarily, until `end_sharing`."""
        with self._lock:
            self._alone, self.tokens = self.alone, tokens

    def end_sharing(self) -> None:
        """Return to the budget without another model, whose memory is free again."""
        with self._lock:
            self._alone, self.tokens = None, self.alone

    def lower(self, tokens: int, shared: bool = False) -> None:
        """Hold at most `tokens` from now on: the device had no memory for twice as many.

        shared: the budget was shared when the memory ran out. If it no longer is, nothing changes.
        """
        with self._lock:
            if shared and not self.shared:
                return
            self.tokens = max(1, min(tokens, self.tokens))
            where = "beside a second model" if shared else "now"
            logger.warning("device out of memory: micro-batches hold at most %d tokens %s", self.tokens, where)
            if shared:
                return
            if self._alone is not None:
                self._alone = max(1, min(tokens, self._alone))
            if self._file is not None:
                entry = _entry(self._file, self._key)
                lowered = {"token_budget": self.alone, "lowered": "the device was out of memory"}
                _write(self._file, self._key, entry | lowered)


def known_budget(classifier: Classifier, settings: Settings) -> TokenBudget | None:
    """The budget that is set, else the remembered one."""
    if settings.token_budget:
        return TokenBudget(settings.token_budget)
    file, key = _place(classifier, settings)
    known = _entry(file, key).get("token_budget")
    if isinstance(known, int) and known > 0:
        return TokenBudget(known, file, key)
    return None


def calibrate(classifier: Classifier, settings: Settings) -> TokenBudget:
    """The budget that is set, else the remembered one, else the best of a sweep, which takes some seconds."""
    if known := known_budget(classifier, settings):
        return known
    logger.info("measuring the token budget, once for this device and model …")
    classifier.device.take_share(classifier.device.lanes)
    rates = sweep(classifier, settings.batch_rows)
    remember(classifier, settings, rates)
    return TokenBudget(best(rates), *_place(classifier, settings))


def _place(classifier: Classifier, settings: Settings) -> tuple[Path, str]:
    """Where the budget of this device, model and settings is remembered: the file, and the key in it."""
    return settings.cache_folder / FILE, digest(*identity(classifier, settings).values())


def identity(classifier: Classifier, settings: Settings) -> dict[str, str]:
    """What the best budget depends on; the digest of the values is the key that it is remembered under."""
    return {
        "device": classifier.device.hardware,
        "lanes": str(classifier.device.lanes),
        "dtype": str(classifier.device.dtype),
        "engine": settings.engine,
        "compiled": str(settings.compile),
        "classifier": classifier.kind,
        "max_tokens": str(settings.max_tokens),
        "batch_rows": str(settings.batch_rows),
        "model": classifier.weights.sha256,
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def remember(classifier: Classifier, settings: Settings, rates: dict[int, float]) -> bool:
    """Let workers of this device, model and settings start with the best budget, whatever they had before.

    rates: tokens per second by budget. False where the file cannot be written, which the log then tells.
    """
    tokens, identified = best(rates), identity(classifier, settings)
    by_budget = ", ".join(f"{rate:.0f} at {budget}" for budget, rate in rates.items())
    logger.info("token budget %d, the best of (tokens/s): %s", tokens, by_budget)
    measured = {"token_budget": tokens, "tokens_per_second": {str(b): round(rate) for b, rate in rates.items()}}
    entry = identified | measured | {"measured": datetime.now(UTC).isoformat(timespec="seconds")}
    return _write(settings.cache_folder / FILE, digest(*identified.values()), entry)


def best(rates: dict[int, float]) -> int:
    """The smallest budget that comes close to the fastest."""
    return min(budget for budget, rate in rates.items() if rate >= CLOSE_ENOUGH * max(rates.values()))


def sweep(classifier: Classifier, row_limit: int) -> dict[int, float]:
    """Tokens per second by budget, as far as the device's memory and patience go."""
    candidates = CANDIDATES.get(classifier.device.torch.type, OTHER_CANDIDATES)
    rates: dict[int, float] = {}
    for _ in range(ROUNDS):
        for budget in candidates:
            try:
                rate = _tokens_per_second(classifier, budget, row_limit)
            except DeviceFull:
                rates.pop(budget, None)
                candidates = tuple(other for other in candidates if other < budget)
                break
            rates[budget] = max(rate, rates.get(budget, 0.0))
            if rate < FALLEN * max(rates.values()):
                candidates = tuple(other for other in candidates if other <= budget)
                break
    return rates or {candidates[0] if candidates else 1: 0.0}


def _tokens_per_second(classifier: Classifier, budget: int, row_limit: int) -> float:
    """Real tokens per second in batches cut from a window of made-up rows."""
    lengths = random.Random(budget)
    label_set = classifier.label_set(ClassifyOptions())
    window: Window[Row] = Window(time.monotonic)
    tokens = waiting = 0
    spent = 0.0
    while spent < SECONDS:
        while waiting < 4 * budget and len(window) < WINDOW_ROWS:
            text = "post " * max(1, round(lengths.lognormvariate(0, SPREAD) * MEDIAN_LENGTH))
            for row in classifier.prepare([text], label_set)[0]:
                window.add(row)
                waiting += row.length
        batch = window.take(budget, row_limit)
        waiting -= sum(row.length for row in batch)
        began = time.perf_counter()
        classifier.finish(batch, classifier.forward(batch))
        spent += time.perf_counter() - began
        tokens += sum(row.length for row in batch)
    return tokens / spent


def _remembered(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read (%s); it is made anew", file, error)
        return {}
    return found if isinstance(found, dict) else {}


def _entry(file: Path, key: str) -> dict[str, Any]:
    found = _remembered(file).get(key)
    return found if isinstance(found, dict) else {}


def _write(file: Path, key: str, entry: dict[str, Any]) -> bool:
    """Written beside it and renamed: a reader sees the old file or the new one. One writer at a time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            fresh = file.with_suffix(".new")
            fresh.write_text(json.dumps(_remembered(file) | {key: entry}, indent=1) + "\n")
            fresh.replace(file)
    except OSError as error:
        logger.warning("%s cannot be written (%s); the next start measures again", file, error)
        return False
    return True
