"""Celery's requests for Feedmill's tasks, and what the worker reads of the messages that they come from.

Celery shows a message's arguments as described by its sender. Most senders include the start of the arguments, which is
a user's post, and `inspect reserved`, shown on Flower's worker page, does not even shorten them. The runtime that
Celery reports is the tracer's, which starts only when the device is done. A task selects this class by `Task.Request`.

Relies on these internals of Celery 5.7 and kombu 5.7:

- Celery shows `_argsrepr`, `_kwargsrepr` and the headers of the same names, and sends every event but task-received
  with `send_event` (celery/worker/request.py, celery/worker/strategy.py).
- `Request.revoked` both checks for a revocation and announces it. Here `withdrawn` only checks, by the same rules, and
  `announce_withdrawn` announces.
- A message's `payload` decodes the body once and caches it.
- A message whose ETA cannot be converted to local time is deleted (celery/worker/strategy.py).
"""

import time
from datetime import UTC, datetime
from typing import Any

from celery.exceptions import InvalidTaskError
from celery.utils.functional import maybe_list
from celery.utils.time import maybe_iso8601, maybe_make_aware
from celery.worker import state
from celery.worker.request import Request

from feedmill.shared.broker import format_arguments
from feedmill.workers.runtime.task import arguments_by_name

#: Deliveries after which a message that Celery cannot finish is acknowledged.
MAX_DELIVERIES = 5
#: Types that Celery takes for granted where an error would end the worker, by header or field of protocol 1.
FIELD_TYPES: dict[str, Any] = {
    "id": str, "task": str, "shadow": str, "root_id": str, "parent_id": str, "group": str, "group_index": int,
    "retries": int, "timelimit": list | tuple, "stamped_headers": list | tuple, "stamps": dict,
}  # fmt: skip
#: Prefix of Feedmill's own keys. A link must not use such a key as a queue.
OWN_KEYS = "feedmill:"


def check(message: Any) -> None:
    """Raise an error for a message that Celery would delete, that would end the worker, or whose links would write to
    Feedmill's own keys.

    Other malformed messages raise errors later. Celery itself reports those that name no task or cannot be decoded.
    """
    try:
        body = message.payload
    except Exception:  # a serializer may raise anything
        return
    links = (body[2] or {}) if isinstance(body, list | tuple) and len(body) == 3 else body
    if "task" not in message.headers and not isinstance(links, dict):
        return
    fields = message.headers if "task" in message.headers else links
    for name, kind in FIELD_TYPES.items():
        if not isinstance(fields.get(name), kind | None):
            raise InvalidTaskError(f"{name} has the wrong type, {type(fields[name]).__name__}")
    if len(fields.get("timelimit") or (None, None)) != 2:
        raise InvalidTaskError("timelimit must have two values: hard and soft")
    if not all(isinstance(header, str) for header in fields.get("stamped_headers") or ()):
        raise InvalidTaskError("stamped_headers must contain only strings")
    if eta := fields.get("eta"):
        maybe_make_aware(maybe_iso8601(eta)).astimezone()  # type: ignore[arg-type]  # an odd value raises an error
    chord = links.get("chord")
    for name in ("callbacks", "errbacks", "chain"):
        for link in [*(links.get(name) or ()), *([chord] if chord else ())]:
            if any(str(value).startswith(OWN_KEYS) for value in (link.get("options") or {}).values()):
                raise InvalidTaskError(f"{name} uses the prefix {OWN_KEYS}, which is reserved for Feedmill's keys")


def read_arguments(message: Any) -> dict[str, Any]:
    """Return a message's arguments by name; positional arguments get the names of `feedmill.classify`'s parameters.

    Empty if the arguments cannot be read.
    """
    try:
        found = message.payload
        args, kwargs = (found["args"], found["kwargs"]) if isinstance(found, dict) else found[:2]
        return arguments_by_name(args, kwargs)
    except Exception:  # a serializer may raise anything
        return {}


def read_task_id(message: Any) -> str | None:
    """Return the task id that the message names, or None."""
    for found in (message.headers, message.properties):
        for name in ("id", "correlation_id"):
            if isinstance(found, dict) and isinstance(found.get(name), str):
                return str(found[name])[:128]
    return None


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
        shown = format_arguments(arguments_by_name(self.args, self.kwargs))
        self._argsrepr = self.request_dict["argsrepr"] = "()"
        self._kwargsrepr = self.request_dict["kwargsrepr"] = shown

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
