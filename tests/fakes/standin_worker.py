"""A Feedmill worker with a stand-in for the model: ready in two seconds, with a configurable
speed.

    python -m tests.fakes.standin_worker NAME

Only the classifier is replaced. torch and transformers, which take most of a worker's start-up
time, are not imported. STANDIN_ROW_SECONDS is the time per row; deployed models take none.
With STANDIN_DEVICE, a file, all workers share one device: passes queue for it, and its name is
that of the first GPU. STANDIN_POST_SECONDS is the CPU time that preparing a post takes.
STANDIN_LEASE_S is the length of leases. Results have the scores of the sixteen default topics with
STANDIN_TOPICS, and else of two labels. Titles and the signals below inject faults.
"""

import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from feedmill.shared.settings import TOPICS
from feedmill.workers.models.shapes import EXACT

#: Texts in a post's title that make the forward pass raise, or kill the process.
RAISES, KILLS = "(this one raises)", "(this one kills)"
#: Text in a post's title that kills the process earlier, during preparation.
KILLS_EARLY = "(this one kills early)"
#: Signals: hang in the next forward pass; run out of memory in the next one of several rows; jump
#: the clock by JUMP.
HANG, FULL, CLOCK = signal.SIGRTMIN + 1, signal.SIGRTMIN + 2, signal.SIGRTMIN + 3
#: Token ids. Each row uses a slice, of its length.
TOKENS = [0] * 256
#: Scores of every post.
SCORES = {"good": 0.75, "bad": 0.25}
if os.environ.get("STANDIN_TOPICS"):
    SCORES = {
        label: 2 * (number + 1) / (len(TOPICS) * (len(TOPICS) + 1))
        for number, label in enumerate(TOPICS)
    }
#: Seconds by which the clock jumps, alternately forwards and backwards.
JUMP = 3600.0


class Device:
    """A stand-in for a GPU: one forward pass at a time."""

    name = hardware = "cuda:0" if os.environ.get("STANDIN_DEVICE") else "stand-in"
    lanes = 1
    shapes = EXACT
    torch = SimpleNamespace(type="stand-in")

    def take_share(self, passes: int) -> None: ...

    def give_back(self) -> None: ...

    def __str__(self) -> str:
        return self.name


@contextmanager
def on_device() -> Iterator[None]:
    """Have the device of all workers for this block, if they share one."""
    path = os.environ.get("STANDIN_DEVICE")
    if not path:
        yield
        return
    # released when it closes, also if the process is killed
    with Path(path).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def spend(seconds: float) -> None:
    """Take CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Done:
    """Outputs that are available at once."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class StandIn:
    """A classifier without a model: one row per post, one token per four characters, the same
    scores for every post.
    """

    kind = "stand-in"
    packed = False
    device = Device()
    #: Faults requested by signals. They apply to every model of the process.
    hangs = full = ahead = False

    def __init__(self, model: str = "stand-in", sha256: str = "00") -> None:
        from feedmill.workers.models.classifiers import LabelSet  # noqa: PLC0415 - after torch was replaced
        from feedmill.workers.models.weights import Weights  # noqa: PLC0415

        self._row_seconds = (
            0.0
            if model != "stand-in"
            else float(os.environ.get("STANDIN_ROW_SECONDS", "0"))
        )
        self._labels = LabelSet(tuple(SCORES), False, model)
        self.weights = Weights(model, None, None, sha256)  # type: ignore[arg-type]

    def label_set(self, _: Any) -> Any:
        return self._labels

    def prepare(self, texts: Sequence[str], label_set: Any) -> list[list[Any]]:
        from feedmill.workers.models.classifiers import Row  # noqa: PLC0415
        from feedmill.workers.models.tokenizer import Tokens  # noqa: PLC0415

        if any(KILLS_EARLY in text for text in texts):
            os.kill(os.getpid(), signal.SIGKILL)
        spend(len(texts) * float(os.environ.get("STANDIN_POST_SECONDS", "0")))
        return [
            [Row(Tokens(TOKENS[: 1 + len(text) // 4]), label_set)] for text in texts
        ]

    def forward(self, rows: Sequence[Any]) -> Done:
        from feedmill.shared.errors import DeviceFull  # noqa: PLC0415

        # rows of a rehearsal have no owner
        titles = [row.owner.post.title for row in rows if row.owner]
        if self.hangs:
            Event().wait()
        if self.full and len(rows) > 1:
            StandIn.full = False
            raise DeviceFull("simulated lack of memory")
        if any(KILLS in title for title in titles):
            os.kill(os.getpid(), signal.SIGKILL)
        if any(RAISES in title for title in titles):
            raise ValueError("simulated failure")
        with on_device():
            time.sleep(len(rows) * self._row_seconds)
        return Done(len(rows) * self._row_seconds)

    def finish(
        self, rows: Sequence[Any], _: Done
    ) -> list[tuple[Any, dict[str, float]]]:
        return [(row, dict(SCORES)) for row in rows]


def listen() -> None:
    clock = time.time
    signal.signal(HANG, lambda *_: setattr(StandIn, "hangs", True))
    signal.signal(FULL, lambda *_: setattr(StandIn, "full", True))
    signal.signal(CLOCK, lambda *_: setattr(StandIn, "ahead", not StandIn.ahead))
    time.time = lambda: clock() + JUMP * StandIn.ahead


def load(settings: Any, _: Any, accept: Any = None) -> StandIn:
    """Return a stand-in. If the model is a folder with weights, report its name and digest."""
    if not Path(settings.model, "model.safetensors").is_file():
        return StandIn()
    from feedmill.workers.models.weights import locate  # noqa: PLC0415 - after torch was replaced

    weights = locate(settings.model)
    if accept is not None:
        accept(weights)
    return StandIn(settings.model, weights.sha256)


def replace_libraries() -> None:
    """Replace what takes most of the time to import."""
    for absent in (
        "torch",
        "transformers",
        "feedmill.workers.models.hub",
        "feedmill.workers.models.engines.torch_engine",
        "feedmill.workers.models.classifiers.registry",
    ):
        sys.modules.setdefault(absent, MagicMock())


def import_worker() -> None:
    """Import a worker without what takes most of the time."""
    replace_libraries()
    import feedmill.workers.run  # noqa: F401, PLC0415


def main(name: str) -> int:
    import_worker()
    listen()
    from feedmill.shared import settings  # noqa: PLC0415
    from feedmill.workers.models import device  # noqa: PLC0415
    from feedmill.workers.run import run_worker  # noqa: PLC0415
    from feedmill.workers.runtime import hot_swap  # noqa: PLC0415
    from feedmill.workers.transport.redis_transport import Channel  # noqa: PLC0415

    Channel.visibility_timeout = int(
        os.environ.get("STANDIN_LEASE_S", Channel.visibility_timeout)
    )
    hot_swap.load_classifier = load  # type: ignore[assignment, attr-defined]
    device.select_device = lambda *_: StandIn.device  # type: ignore[assignment]
    return run_worker(settings.load(), name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[-1]))
