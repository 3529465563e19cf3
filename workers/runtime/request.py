"""Celery's requests for Feedmill's tasks, and what the worker reads of the messages that they come
from.

Celery shows a message's arguments as described by its sender. Most senders include the start of
the arguments, which is a user's post, and `inspect reserved`, shown on Flower's worker page, does
not even shorten them. The runtime that Celery reports is the tracer's, which starts only when the
device is done. A task selects this class by `Task.Request`.

Relies on these internals of Celery 5.7 and kombu 5.7:

- Celery shows `_argsrepr`, `_kwargsrepr` and the headers of the same names, and sends every event
  but task-received with `send_event` (celery/worker/request.py, celery/worker/strategy.py).
- `Request.revoked` both checks for a revocation and announces it with `_announce_revoked`. Here
  `withdrawn` only checks, by the same rules, and `announce_withdrawn` announces.
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

from feedmill.shared.broker import OWN_KEYS, format_arguments
from feedmill.workers.runtime.task import arguments_by_name

#: Deliveries after which a message that Celery cannot finish is acknowledged.
MAX_DELIVERIES = 5
#: Types that Celery takes for granted where an error would end the worker, by header or field of
#: protocol 1.
FIELD_TYPES: dict[str, Any] = {
    "id": str, "task": str, "shadow": str, "root_id": str, "parent_id": str, "group": str,
    "group_index": int,
    "retries": int, "timelimit": list | tuple, "stamped_headers": list | tuple, "stamps": dict,
}  # fmt: skip
#: Seconds after its expiry at which a message that waits for its ETA returns: Celery ends it only
#: once it has expired.
EXPIRY_MARGIN_S = 0.01


def check(message: Any) -> None:
    """Raise an error for a message that Celery would delete, that would end the worker, or whose
    links would write to Feedmill's own keys.

    Other malformed messages raise errors later. Celery itself reports those that name no task or
    cannot be decoded.
    """
    try:
        body = message.payload
    except Exception:  # a serializer may raise anything
        return
    links = body
    if isinstance(body, list | tuple) and len(body) == 3:
        links = body[2] or {}
    if "task" in message.headers:
        fields = message.headers
    elif isinstance(links, dict):
        fields = links
    else:
        return
    _check_fields(fields)
    check_links(links)


def _check_fields(fields: dict[str, Any]) -> None:
    """Raise InvalidTaskError for fields of wrong types; other errors for an ETA that cannot be
    read.
    """
    for name, kind in FIELD_TYPES.items():
        value = fields.get(name)
        if not isinstance(value, kind | None):
            wrong = type(value).__name__
            raise InvalidTaskError(f"{name} has the wrong type, {wrong}")
    time_limits = fields.get("timelimit") or (None, None)
    if len(time_limits) != 2:
        raise InvalidTaskError("timelimit must have two values: hard and soft")
    for header in fields.get("stamped_headers") or ():
        if not isinstance(header, str):
            raise InvalidTaskError("stamped_headers must contain only strings")
    eta = fields.get("eta")
    if eta:
        # An odd value raises an error.
        due_at: Any = maybe_make_aware(maybe_iso8601(eta))  # type: ignore[arg-type]
        due_at.astimezone()


def check_links(links: dict[str, Any]) -> None:
    """Raise InvalidTaskError for links that would write to Feedmill's own keys; other errors for
    malformed ones.
    """
    for name in ("callbacks", "errbacks", "chain", "chord"):
        value = links.get(name)
        if not value:
            continue
        signatures = [value] if name == "chord" else value
        for link in signatures:
            if not is_signature(link):
                raise InvalidTaskError(f"{name} must contain only signatures of tasks")
            if uses_own_keys(link):
                raise InvalidTaskError(
                    f"{name} uses the prefix {OWN_KEYS}, which is reserved for Feedmill's keys"
                )


def is_signature(link: object) -> bool:
    """Return whether Celery can read a link of a message."""
    if not isinstance(link, dict):
        return False
    if not isinstance(link.get("task"), str):
        return False
    if not isinstance(link.get("options"), dict | None):
        return False
    return isinstance(link.get("kwargs"), dict | None)


def uses_own_keys(link: object) -> bool:
    """Return whether a link would be sent to one of Feedmill's own keys, or a link at any depth in
    it.

    The worker that fails a chord sends the errbacks of its body, for example.
    """
    unseen = [link]
    while unseen:
        value = unseen.pop()
        if isinstance(value, list | tuple):
            unseen.extend(value)
        elif isinstance(value, dict):
            unseen.extend(value.values())
            options = value.get("options")
            if "task" not in value or not isinstance(options, dict):
                continue
            if any(is_own_key(name) for name in options.values()):
                return True
    return False


def is_own_key(name: object) -> bool:
    """Return whether a queue's name is that of one of Feedmill's own keys."""
    if isinstance(name, dict | list | tuple):
        return False
    text = str(name)
    return text.startswith(OWN_KEYS)


def due_in(message: Any) -> float:
    """Return the seconds until a checked message's ETA; 0.0 or less if it has none or is due."""
    eta = _read_eta(message)
    if not eta:
        return 0.0
    # A text, after `check`.
    due_at: Any = maybe_make_aware(maybe_iso8601(eta))  # type: ignore[arg-type]
    timestamp = float(due_at.timestamp())
    return timestamp - time.time()


def ends_wait_in(message: Any) -> float:
    """Return the seconds after which a message that is due later returns: when it is due, or has
    expired before.

    A stock worker ends an expired message when it is due, which can be years later.
    """
    due = due_in(message)
    expires_at = _read_expiry(message)
    if expires_at is None:
        return due
    to_expiry = max(0.0, expires_at - time.time())
    return min(due, to_expiry + EXPIRY_MARGIN_S)


def take_eta(message: Any) -> Any:
    """Remove the ETA of a message that is due, and return it; None without one.

    Celery starts a message with an ETA by a timer, however long ago it was due, and kombu's event
    loop fires ten timers a turn: two thousand messages that are due together would take minutes.
    """
    eta = _read_eta(message)
    for fields in _field_places(message):
        if fields.get("eta"):
            fields["eta"] = None
    return eta


def _read_eta(message: Any) -> Any:
    return _read_field(message, "eta")


def _read_field(message: Any, name: str) -> Any:
    """Return the first value of a field that is not empty; None without one."""
    for fields in _field_places(message):
        value = fields.get(name)
        if value:
            return value
    return None


def _field_places(message: Any) -> list[dict[str, Any]]:
    """Return where a message has its fields: the headers of protocol 2, the body of protocol 1, or
    both.
    """
    try:
        body = message.payload
    except Exception:  # a serializer may raise anything; Celery refuses the message
        return []
    places = [message.headers, body]
    return [place for place in places if isinstance(place, dict)]


def read_name(message: Any) -> Any:
    """Return the task's name that the message gives; None without one."""
    return _read_field(message, "task")


def is_withdrawn(message: Any) -> bool:
    """Return whether a message was revoked by its id, or has expired: Celery ends it when it is
    received.
    """
    task_id = read_task_id(message)
    if task_id in state.revoked:
        return True
    expires_at = _read_expiry(message)
    if expires_at is None:
        return False
    return expires_at < time.time()


def _read_expiry(message: Any) -> float | None:
    """Return the time at which a message expires; 0 if Celery will refuse the value, None without
    one.
    """
    expires = _read_field(message, "expires")
    if not expires:
        return None
    try:
        # An odd value raises an error.
        expiry: Any = maybe_iso8601(expires)
        expires_at: Any = maybe_make_aware(expiry)
        return float(expires_at.timestamp())
    except (AttributeError, ValueError, TypeError, OverflowError):
        return 0.0


def read_arguments(message: Any) -> dict[str, Any]:
    """Return a message's arguments by name; positional arguments get the names of
    `feedmill.classify`'s parameters.

    Empty if the arguments cannot be read.
    """
    try:
        body = message.payload
    except Exception:  # a serializer may raise anything
        return {}
    return arguments_in(body)


def arguments_in(body: Any) -> dict[str, Any]:
    """Return the arguments in a message's body by name; none if they cannot be read."""
    try:
        if isinstance(body, dict):
            args = body["args"]
            kwargs = body["kwargs"]
        else:
            args, kwargs = body[:2]
        return arguments_by_name(args, kwargs)
    except Exception:  # a sender may have written anything
        return {}


def read_task_id(message: Any, unread: bool = False) -> str | None:
    """Return the task id that the message names, or None.

    In protocol 1 the body names it, and clients such as gocelery set a correlation id of their own
    beside it.

    unread: do not decode the body.
    """
    places = [message.headers, message.properties]
    body = None if unread else _body_of_protocol_1(message)
    if body is not None:
        places.insert(0, body)
    for place in places:
        if not isinstance(place, dict):
            continue
        for name in ("id", "correlation_id"):
            task_id = place.get(name)
            if isinstance(task_id, str):
                return str(task_id)[:128]
    return None


def _body_of_protocol_1(message: Any) -> dict[str, Any] | None:
    """Return the body if Celery reads the task's fields from it; None for protocol 2 and
    undecodable bodies.
    """
    try:
        body = message.payload
    except Exception:  # a serializer may raise anything
        return None
    headers = message.headers
    names_task = isinstance(headers, dict) and "task" in headers
    if isinstance(body, dict) and ("args" in body or not names_task):
        return body
    return None


def withdrawn(request: Request) -> bool:
    """Return whether a request was revoked, by id or stamp, or has expired.

    Thread-safe, without side effects.
    """
    if request.id in state.revoked:
        return True
    expires = request.expires
    if expires:
        time_zone = UTC if expires.tzinfo else None
        if datetime.now(time_zone) > expires:
            return True
    # compared, never hashed: a stamp can be any JSON value
    revoked: Any = state.revoked_stamps
    for header in request.stamped_headers or ():
        if header not in revoked:
            continue
        stamps = maybe_list(request.stamps[header])
        for stamp in stamps or ():
            if stamp in revoked[header]:
                return True
    return False


def announce_withdrawn(request: Request) -> None:
    """Announce a request that is not run: event, signal, state and acknowledgement.

    Consumer thread only.
    """
    # Celery forgets revocations after three hours, but this one was checked before
    if not request.revoked():
        # Not in the stub.
        request._announce_revoked("revoked", False, None, False)  # type: ignore[attr-defined]


class ClassifyRequest(Request):
    """A request of a micro-batched task."""

    #: Time at which the request's first row entered a forward pass, in monotonic seconds.
    _began: float | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        arguments = arguments_by_name(self.args, self.kwargs)
        description = format_arguments(arguments)
        self._argsrepr = "()"
        self._kwargsrepr = description
        self.request_dict["argsrepr"] = "()"
        self.request_dict["kwargsrepr"] = description

    # Celery passes False to include the arguments.
    def info(self, safe: bool = False) -> Any:  # noqa: ARG002
        """Return the request's description, always without its arguments."""
        return super().info(safe=True)

    def on_accepted(self, pid: Any, time_accepted: float) -> None:
        self._began = time_accepted
        super().on_accepted(pid, time_accepted)

    def send_event(self, type: str, **fields: Any) -> None:  # noqa: A002 - Celery's name for it
        is_ending = type in ("task-succeeded", "task-failed")
        if is_ending and self._began is not None:
            runtime = time.monotonic() - self._began
            fields["runtime"] = runtime
        super().send_event(type, **fields)
