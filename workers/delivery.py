"""What a message tells of itself, as kombu delivers it: for those that no task can take, too. Nothing of it is trusted.

What it leans on in kombu 5.7: `payload` decodes the body once, and keeps it; `delivery_tag` is what the transport gave.
"""

from typing import Any

from shared.broker import PRIORITY_MARK
from shared.leases import count_in
from workers.task import named


def arguments_of(message: Any) -> dict[str, Any]:
    """A message's arguments by name, as those of `feedmill.classify`; none where they cannot be read."""
    try:
        found = message.payload
        args, kwargs = (found["args"], found["kwargs"]) if isinstance(found, dict) else found[:2]
        return named(args, kwargs)
    except Exception:  # whatever its serializer raises
        return {}


def id_of(message: Any) -> str | None:
    """The task's, as far as the message says it."""
    for found in (message.headers, message.properties):
        for name in ("id", "correlation_id"):
            if isinstance(found, dict) and isinstance(found.get(name), str):
                return str(found[name])[:128]
    return None


def times_delivered(message: Any) -> int:
    """How many times a message of kombu's was delivered, this one included (shared/leases.py counts)."""
    return 1 + count_in(message.delivery_info, "delivery_count")


def times_fatal(message: Any) -> int:
    """Return how many workers vanished while they handled this message and nothing else (shared/leases.py)."""
    return count_in(message.delivery_info, "alone_lapse_count")


def came_from(message: Any) -> str | None:
    """The queue that a message of kombu's was taken out of: its reservation says so (shared/leases.py), no sender."""
    return str(message.delivery_tag).partition(" ")[2].partition(PRIORITY_MARK)[0] or None
