"""Celery's Request for Feedmill's tasks: hides posts from events, `inspect` and the log, and measures the runtime.

Celery shows a message's arguments as described by its sender. Most senders include the start of the arguments, which is
a user's post, and `inspect reserved`, shown on Flower's worker page, does not even shorten them. The runtime that
Celery reports is the tracer's, which starts only when the device is done. A task selects this class by `Task.Request`.

Relies on these internals of Celery 5.7: Celery shows `_argsrepr`, `_kwargsrepr` and the headers of the same names, and
sends every event but task-received with `send_event` (celery/worker/request.py, celery/worker/strategy.py).
`Request.revoked` both checks for a revocation and announces it. Here `withdrawn` only checks, by the same rules, and
`announce_withdrawn` announces.
"""

import time
from datetime import UTC, datetime
from typing import Any

from celery.utils.functional import maybe_list
from celery.worker import state
from celery.worker.request import Request

from feedmill.shared.broker import format_argument, format_arguments
from feedmill.workers.runtime.task import ARGUMENT_NAMES


def withdrawn(request: Request) -> bool:
    """Return whether a request was revoked, by id or stamp, or has expired. Thread-safe, without side effects."""
    if request.id in state.revoked:
        return True
    expires = request.expires
    if expires and datetime.now(UTC if expires.tzinfo else None) > expires:
        return True
    revoked: Any = state.revoked_stamps  # compared, never hashed: a stamp can be any JSON value
    return any(
        stamp in revoked[header]
        for header in request.stamped_headers or ()
        if header in revoked
        for stamp in maybe_list(request.stamps[header]) or ()
    )


def announce_withdrawn(request: Request) -> None:
    """Announce a request that is not run: event, signal, state and acknowledgement. Consumer thread only."""
    if not request.revoked():  # Celery forgets revocations after three hours, but this one was checked before
        request._announce_revoked("revoked", False, None, False)  # type: ignore[attr-defined]  # not in the stub


class ClassifyRequest(Request):
    """A request of a micro-batched task."""

    #: Time at which the request's first row entered a forward pass, in monotonic seconds.
    _began: float | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._argsrepr = self.request_dict["argsrepr"] = _positional(self.args)
        named = format_arguments(self.kwargs) if isinstance(self.kwargs, dict) else f"<{type(self.kwargs).__name__}>"
        self._kwargsrepr = self.request_dict["kwargsrepr"] = named

    def info(self, safe: bool = False) -> Any:  # noqa: ARG002 - Celery passes False to include the arguments
        """Return the request's description, always without its arguments."""
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
    shown = [format_argument(name, value) for name, value in zip(ARGUMENT_NAMES, args, strict=False)]
    return f"({', '.join(shown)}{',' * (len(shown) == 1)})"
