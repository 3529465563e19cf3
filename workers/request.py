"""What a message of ours tells of itself while a worker holds it: to events and Flower, `inspect`, and the log.

Celery shows a message's arguments as its sender described them: most senders let Celery write down their beginning,
which is somebody's post. `inspect reserved`, which Flower's worker page shows, does not even shorten them. And the
runtime it tells is the tracer's, which here begins when the device is done. `Task.Request` is Celery's way to give a
task a Request of its own.

What it leans on in Celery 5.7, beyond that: `_argsrepr`, `_kwargsrepr` and the two headers of these names are what is
shown; every event but task-received goes through `send_event` (celery/worker/request.py, celery/worker/strategy.py).
`Request.revoked` asks whether a request is revoked and tells everybody in one breath; `withdrawn` only asks, by the
same rules, and `tell_withdrawn` tells.
"""

import time
from datetime import UTC, datetime
from typing import Any

from celery.utils.functional import maybe_list
from celery.worker import state
from celery.worker.request import Request

from shared.broker import shown_argument, shown_arguments
from workers.task import POSITIONS


def withdrawn(request: Request) -> bool:
    """Whether it was revoked, by its id or by a stamp, or has expired. For any thread: tells nobody."""
    if request.id in state.revoked:
        return True
    expires = request.expires
    if expires and datetime.now(UTC if expires.tzinfo else None) > expires:
        return True
    revoked: Any = state.revoked_stamps  # compared, never hashed: a sender's stamp may be any JSON
    return any(
        stamp in revoked[header]
        for header in request.stamped_headers or ()
        if header in revoked
        for stamp in maybe_list(request.stamps[header]) or ()
    )


def tell_withdrawn(request: Request) -> None:
    """Event, signal, state and acknowledgement of a request that is not run. For the consumer's thread."""
    if not request.revoked():  # what was revoked is kept for three hours; it was, when its turn came
        request._announce_revoked("revoked", False, None, False)  # type: ignore[attr-defined]  # not in the stub


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
    shown = [shown_argument(name, value) for name, value in zip(POSITIONS, args, strict=False)]
    return f"({', '.join(shown)}{',' * (len(shown) == 1)})"
