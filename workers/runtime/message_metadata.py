"""Read a message's untrusted metadata, including messages that match no task.

Relies on kombu 5.7: `payload` decodes the body once and caches it, and `delivery_tag` comes from the transport.
"""

from typing import Any

from shared.broker import PRIORITY_MARK
from workers.runtime.task import arguments_by_name
from workers.transport.decoding import delivery_counter


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
