"""A worker's figures for its supervisor: what a post costs, and how busy the device is.

`feedmill worker --devices auto` reads them to decide how many workers a GPU gets. They travel as
notes on the notification socket (sd_notify(3)), whose readers ignore names that begin with X_.
"""

import json
import math
import os
from typing import Any, NamedTuple

from feedmill.shared.linux import notify

#: Environment variable with which a supervisor asks its workers for these notes.
VARIABLE = "WORKER_LOAD_NOTES"
#: Beginning of a note.
PREFIX = "X_FEEDMILL_LOAD="
#: Seconds between two notes of a worker.
INTERVAL_S = 2.0


class WorkerLoad(NamedTuple):
    """A worker's cost of a post, measured at its start, and its rates in the last seconds."""

    #: Microseconds of CPU time per post to tokenize it, start its pass and read its outputs; and
    #: of device time.
    host_us: float
    device_us: float
    #: Bytes of the GPU's memory that the worker takes, and that the GPU has; 0 if unknown.
    memory_bytes: float
    total_memory_bytes: float
    #: Recent posts per second, and the share of the time that this worker keeps the device busy.
    posts_per_s: float
    device_busy: float

    def as_note(self) -> str:
        """Return the note that carries these figures."""
        numbers = list(self)
        figures = json.dumps(numbers)
        return f"{PREFIX}{figures}"


def is_requested() -> bool:
    """Return whether the supervisor of this process reads notes."""
    value = os.environ.get(VARIABLE)
    return value == "1"


def send(load: WorkerLoad) -> None:
    """Send the figures to the supervisor. They are lost if it does not read them."""
    note = load.as_note()
    notify(note, waits=False)


def read_note(note: str) -> WorkerLoad | None:
    """Return the figures in a note; None if it carries none, or invalid ones."""
    if not note.startswith(PREFIX):
        return None
    try:
        text = note.removeprefix(PREFIX)
        figures: Any = json.loads(text)
        numbers = map(float, figures)
        load = WorkerLoad(*numbers)
    except (ValueError, TypeError):
        return None
    are_valid = all(math.isfinite(figure) and figure >= 0 for figure in load)
    if not are_valid:
        return None
    return load
