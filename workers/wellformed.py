"""What Celery takes for granted of a message, asked before Celery meets it.

A task's name that is a list, a time limit of one number, arguments that are no mapping: each comes to light deep inside
the worker, some of them on threads where nobody can refuse the message any more.
"""

from typing import Any

from celery.exceptions import InvalidTaskError
from celery.utils.time import maybe_iso8601, maybe_make_aware

#: By header of protocol 2, and by field of protocol 1's body; what is not here may be anything.
TYPES: dict[str, type | tuple[type, ...]] = {
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
#: Links that a message may have of each kind, at most: each is a message that its worker sends, on the thread that
#: stores results.
MAX_LINKS = 1000
#: Where Feedmill's own keys begin: a link may not make a queue of one.
OWN_KEYS = "feedmill:"
#: What nothing but null may stand for.
NEEDED = ("id", "task", "args", "kwargs")


def check(message: Any) -> None:
    """Raises InvalidTaskError where a message of kombu's names a task that Celery cannot run with it.

    Of one that names no task, or cannot be decoded, Celery says so itself.
    """
    try:
        body = message.payload
    except Exception:  # whatever a serializer has
        return
    if isinstance(body, dict):  # protocol 1, or its body under headers of protocol 2
        fields, links = {"args": (), "kwargs": {}} | body | message.headers, body
    elif isinstance(body, list | tuple) and len(body) == 3 and isinstance(body[2], dict | None):
        fields, links = message.headers | {"args": body[0], "kwargs": body[1]}, body[2] or {}
    elif "task" in message.headers:
        raise InvalidTaskError("its body should hold arguments, keyword arguments and an object of what to do then")
    else:
        return
    for name, kind in TYPES.items() if "task" in fields else ():
        value = fields.get(name)
        if not isinstance(value, kind) and (value is not None or name in NEEDED):
            wanted = kind[0] if isinstance(kind, tuple) else kind
            raise InvalidTaskError(f"{name} should be a {wanted.__name__}, not a {type(value).__name__}")
    if len(fields.get("timelimit") or (None, None)) != 2:
        raise InvalidTaskError("timelimit should hold two numbers: hard and soft")
    if not all(isinstance(header, str) for header in fields.get("stamped_headers") or ()):
        raise InvalidTaskError("stamped_headers should hold names of stamps")
    for name in ("eta", "expires"):
        if (time := fields.get(name)) is not None:
            _check_time(name, time)
    if "task" in fields:
        _check_links(links)


def _check_links(embed: dict[str, Any]) -> None:
    """Raise InvalidTaskError where what Celery sends when the message has ended is no list of tasks, or too long."""
    for name in ("callbacks", "errbacks", "chain", "chord"):
        value = embed.get(name)
        links = [value] if isinstance(value, dict) and name == "chord" else value or []
        if not isinstance(links, list | tuple) or not all(isinstance(link, dict) for link in links):
            raise InvalidTaskError(f"{name} should hold tasks")
        if len(links) > MAX_LINKS:
            raise InvalidTaskError(f"{name} holds {len(links)} tasks; at most {MAX_LINKS} are sent")
        for options in (link.get("options") for link in links):
            named = options.values() if isinstance(options, dict) else ()
            if any(isinstance(value, str) and value.startswith(OWN_KEYS) for value in named):
                raise InvalidTaskError(f"{name} names a queue that begins with {OWN_KEYS}, where Feedmill has its keys")


def _check_time(name: str, value: Any) -> None:
    """Raise InvalidTaskError where Celery cannot read a time, or cannot convert it."""
    try:
        time = maybe_iso8601(value)
    except (AttributeError, ValueError, TypeError):
        time = None
    if time is None:
        raise InvalidTaskError(f"{name} should be a time in ISO 8601, not {value!r:.100}")
    if name == "eta":  # expires is only compared
        try:
            maybe_make_aware(time).astimezone()
        except (OverflowError, ValueError) as error:
            raise InvalidTaskError(f"{name} is out of range: it cannot be converted to local time") from error
