"""What Celery takes for granted of a message, asked before Celery meets it.

A task's name that is a list, a time limit of one number, arguments that are no mapping: each comes to light deep inside
the worker, some of them on threads where nobody can refuse the message any more.
"""

from typing import Any

from celery.exceptions import InvalidTaskError

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
        fields = {"args": (), "kwargs": {}} | body | message.headers
    elif isinstance(body, list | tuple) and len(body) == 3 and isinstance(body[2], dict | None):
        fields = message.headers | {"args": body[0], "kwargs": body[1]}
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
