"""A worker of Feedmill's own on a stand-in for a model: ready in two seconds, and as fast as it is told to be.

    python -m tests.fakes.standin_worker NAME

Everything is the worker's but the classifier: torch and transformers, which take most of a worker's start, are never
imported, unless they are there already. What becomes of a forward pass is said by the titles of its posts, by signals,
and by STANDIN_ROW_SECONDS, the time that a row takes; with a model that was deployed it takes none. Signals other than
these do what they do to any worker.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import MagicMock

#: Post titles that contain this raise in the forward pass, or kill the process there.
RAISES, KILLS = "(this one raises)", "(this one kills)"
#: Post titles that contain this kill the process earlier, during preparation.
KILLS_EARLY = "(this one kills early)"
#: The next forward pass hangs; the next of several rows finds no memory; this process's clock jumps by JUMP.
HANG, FULL, CLOCK = signal.SIGRTMIN + 1, signal.SIGRTMIN + 2, signal.SIGRTMIN + 3
#: Source text of tokens.
TOKENS = [0] * 256
#: Seconds by which the clock jumps, alternately forwards and backwards.
JUMP = 3600.0


class Device:
    """A stand-in for a GPU: one forward pass at a time."""

    name = hardware = "stand-in"
    lanes = 1

    def take_share(self, passes: int) -> None: ...

    def give_back(self) -> None: ...

    def __str__(self) -> str:
        return self.name


class Done:
    """Outputs that are available at once."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def ready(self) -> bool:
        return True


class StandIn:
    """One row per post, with one token per four characters; every post gets the first of two labels."""

    kind = "stand-in"
    packed = False
    device = Device()
    #: The process' settings, whatever model it has.
    hangs = full = ahead = False

    def __init__(self, model: str = "stand-in", sha256: str = "00") -> None:
        from workers.models.classifiers import LabelSet  # noqa: PLC0415 - when what it imports has its stand-ins
        from workers.models.weights import Weights  # noqa: PLC0415

        self._row_seconds = 0.0 if model != "stand-in" else float(os.environ.get("STANDIN_ROW_SECONDS", "0"))
        self._labels = LabelSet(("good", "bad"), False, model)
        self.weights = Weights(model, None, None, sha256)  # type: ignore[arg-type]

    def warm_up(self) -> None: ...

    def label_set(self, _: Any) -> Any:
        return self._labels

    def prepare(self, texts: Sequence[str], label_set: Any) -> list[list[Any]]:
        from workers.models.classifiers import Row  # noqa: PLC0415
        from workers.models.tokenizer import Tokens  # noqa: PLC0415

        if any(KILLS_EARLY in text for text in texts):
            os.kill(os.getpid(), signal.SIGKILL)
        return [[Row(Tokens(TOKENS[: 1 + len(text) // 4]), label_set)] for text in texts]

    def forward(self, rows: Sequence[Any]) -> Done:
        from shared.errors import DeviceFull  # noqa: PLC0415

        titles = [row.owner.post.title for row in rows if row.owner]
        if self.hangs:
            Event().wait()
        if self.full and len(rows) > 1:
            StandIn.full = False
            raise DeviceFull("the stand-in was told to be full")
        if any(KILLS in title for title in titles):
            os.kill(os.getpid(), signal.SIGKILL)
        if any(RAISES in title for title in titles):
            raise ValueError("the stand-in was told to raise")
        time.sleep(len(rows) * self._row_seconds)
        return Done(len(rows) * self._row_seconds)

    def finish(self, rows: Sequence[Any], _: Done) -> list[tuple[Any, dict[str, float]]]:
        return [(row, {"good": 0.75, "bad": 0.25}) for row in rows]


def listen() -> None:
    clock = time.time
    signal.signal(HANG, lambda *_: setattr(StandIn, "hangs", True))
    signal.signal(FULL, lambda *_: setattr(StandIn, "full", True))
    signal.signal(CLOCK, lambda *_: setattr(StandIn, "ahead", not StandIn.ahead))
    time.time = lambda: clock() + JUMP * StandIn.ahead


def load(settings: Any, _: Any) -> StandIn:
    """Make the stand-in for a folder's model report that model's name and hash."""
    weights = Path(settings.model) / "model.safetensors"
    return StandIn(settings.model, sha256(weights.read_bytes()).hexdigest()) if weights.is_file() else StandIn()


def main(name: str) -> int:
    for absent in ("torch", "transformers", "workers.models.hub", "workers.models.classifiers.registry"):
        sys.modules.setdefault(absent, MagicMock())
    listen()
    from shared import settings  # noqa: PLC0415
    from workers.models import device  # noqa: PLC0415
    from workers.run import run_worker  # noqa: PLC0415
    from workers.runtime import hot_swap  # noqa: PLC0415

    hot_swap.load_classifier = load  # type: ignore[assignment, attr-defined]
    device.select_device = lambda *_: StandIn.device  # type: ignore[assignment]
    return run_worker(settings.load(), name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[-1]))
