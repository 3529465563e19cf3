"""Incoming messages: validate what Celery takes for granted, and read the metadata of messages that match no task.

A list as the task's name, a time limit with one number, or arguments that are not a mapping would fail deep inside the
worker, sometimes on threads that can no longer reject the message. Relies on kombu 5.7: `payload` decodes the body once
and caches it, and `delivery_tag` comes from the transport.
"""

from typing import Any

from celery.exceptions import InvalidTaskError
from celery.utils.time import maybe_iso8601, maybe_make_aware

from feedmill.shared.broker import PRIORITY_MARK
from feedmill.workers.runtime.task import arguments_by_name
from feedmill.workers.transport.decoding import delivery_counter

#: Deliveries after which a message becomes a dead letter, if its worker vanished each time. From the third delivery on,
#: the message is delivered in isolation. Crashes during a forward pass are detected earlier (poison.py).
MAX_DELIVERIES = 5
#: Required types, by header of task protocol 2 and by field of protocol 1's body. Other fields may have any type.
FIELD_TYPES: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "task": str,
    "shadow": str,
    "root_id": str,
    "parent_id": str,
    "group": str,
    "group_index": int,
    "retries": int,
    "timelimit": (list, tuple),
    "stamped_headers": (list, tuple),
    "stamps": dict,
    "args": (list, tuple),
    "kwargs": dict,
}
#: Maximum links of each kind per message. The worker sends each link as a message, on the writer thread.
MAX_LINKS = 1000
#: Prefix of Feedmill's own keys. A link must not use such a key as a queue.
OWN_KEYS = "feedmill:"
#: Fields that must not be null.
REQUIRED_FIELDS = ("id", "task", "args", "kwargs")


def check(message: Any) -> None:
    """Raise InvalidTaskError if Celery could not run the task that a kombu message names.

    Celery itself reports messages that name no task or cannot be decoded.
    """
    try:
        body = message.payload
    except Exception:  # a serializer may raise anything
        return
    if isinstance(body, dict):  # protocol 1, or its body under headers of protocol 2
        fields, links = {"args": (), "kwargs": {}} | body | message.headers, body
    elif isinstance(body, list | tuple) and len(body) == 3 and isinstance(body[2], dict | None):
        fields, links = message.headers | {"args": body[0], "kwargs": body[1]}, body[2] or {}
    elif "task" in message.headers:
        raise InvalidTaskError("the body must be a list of args, kwargs and an object with links")
    else:
        return
    for name, kind in FIELD_TYPES.items() if "task" in fields else ():
        value = fields.get(name)
        if not isinstance(value, kind) and (value is not None or name in REQUIRED_FIELDS):
            wanted = kind[0] if isinstance(kind, tuple) else kind
            raise InvalidTaskError(f"{name} must be a {wanted.__name__}, not a {type(value).__name__}")
    if len(fields.get("timelimit") or (None, None)) != 2:
        raise InvalidTaskError("timelimit must have two values: hard and soft")
    if not all(isinstance(header, str) for header in fields.get("stamped_headers") or ()):
        raise InvalidTaskError("stamped_headers must contain only strings")
    for name in ("eta", "expires"):
        if (time := fields.get(name)) is not None:
            _check_time(name, time)
    if "task" in fields:
        _check_links(links)


def _check_links(embed: dict[str, Any]) -> None:
    """Raise InvalidTaskError unless each kind of link is a list of tasks of limited length, outside Feedmill's keys."""
    for name in ("callbacks", "errbacks", "chain", "chord"):
        value = embed.get(name)
        links = [value] if isinstance(value, dict) and name == "chord" else value or []
        if not isinstance(links, list | tuple) or not all(isinstance(link, dict) for link in links):
            raise InvalidTaskError(f"{name} must contain only tasks")
        if len(links) > MAX_LINKS:
            raise InvalidTaskError(f"{name} has {len(links)} tasks; the maximum is {MAX_LINKS}")
        for options in (link.get("options") for link in links):
            named = options.values() if isinstance(options, dict) else ()
            if any(isinstance(value, str) and value.startswith(OWN_KEYS) for value in named):
                raise InvalidTaskError(f"{name} uses the prefix {OWN_KEYS}, which is reserved for Feedmill's keys")


def _check_time(name: str, value: Any) -> None:
    """Raise InvalidTaskError if Celery cannot parse or convert a time."""
    try:
        time = maybe_iso8601(value)
    except (AttributeError, ValueError, TypeError):
        time = None
    if time is None:
        raise InvalidTaskError(f"{name} must be a time in ISO 8601, not {value!r:.100}")
    if name == "eta":  # expires is only compared
        try:
            maybe_make_aware(time).astimezone()
        except (OverflowError, ValueError) as error:
            raise InvalidTaskError(f"{name} is out of range: it cannot be converted to local time") from error


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


def delivery_count(message: Any) -> int:
    """Return how often a kombu message was delivered, including this one, as counted by the transport (decoding.py)."""
    return 1 + delivery_counter(message.delivery_info, "delivery_count")


def isolated_death_count(message: Any) -> int:
    """Return how many workers died while they handled this message in isolation, as counted by the transport."""
    return delivery_counter(message.delivery_info, "alone_lapse_count")


def source_queue(message: Any) -> str | None:
    """Return the queue that a message came from, or None. Read from the transport's tag, not from the sender's data."""
    return str(message.delivery_tag).partition(" ")[2].partition(PRIORITY_MARK)[0] or None
