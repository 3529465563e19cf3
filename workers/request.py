"""What a message of ours tells of itself while a worker holds it: to events and Flower, `inspect`, and the log.

Celery shows a message's arguments as its sender described them: most senders let Celery write down their beginning,
which is somebody's post. `inspect reserved`, which Flower's worker page shows, does not even shorten them. And the
runtime it tells is the tracer's, which here begins when the device is done. `Task.Request` is Celery's way to give a
task a Request of its own.

What it leans on in Celery 5.7, beyond that: `_argsrepr`, `_kwargsrepr` and the two headers of these names are what is
shown; every event but task-received goes through `send_event` (celery/worker/request.py, celery/worker/strategy.py).
"""

import time
from inspect import signature
from typing import Any

from celery.worker.request import Request

from shared.broker import shown_argument, shown_arguments
from workers.app import classify

#: The names of positional arguments.
NAMES = tuple(signature(classify).parameters)


class ClassifyRequest(Request):
    """A request of `feedmill.classify`, whoever sent it."""

    #: When its first row entered a forward pass, by the monotonic clock.
    _began: float | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._argsrepr = self.request_dict["argsrepr"] = _positional(self.args)
        self._kwargsrepr = self.request_dict["kwargsrepr"] = (
            shown_arguments(self.kwargs) if isinstance(self.kwargs, dict) else f"<{type(self.kwargs).__name__}>"
        )

    def info(self, safe: bool = False) -> Any:  # noqa: ARG002 - Celery asks for the arguments themselves where it is not
        return super().info(safe=True)

    def on_accepted(self, pid: Any, time_accepted: float) -> None:
        self._began = time_accepted
        super().on_accepted(pid, time_accepted)

    def send_event(self, type: str, **fields: Any) -> None:  # noqa: A002 - Celery's name for it
        if type in ("task-succeeded", "task-failed") and self._began is not None:
            fields["runtime"] = time.monotonic() - self._began
        super().send_event(type, **fields)


def _positional(args: Any) -> str:
    if not isinstance(args, list | tuple):
        return f"<{type(args).__name__}>"
    shown = [shown_argument(name, value) for name, value in zip(NAMES, args, strict=False)]
    return f"({', '.join(shown)}{',' * (len(shown) == 1)})"
