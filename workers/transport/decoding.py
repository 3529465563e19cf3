"""Decode messages from a queue, and count their deliveries in their `delivery_info`."""

import json
from collections.abc import Mapping
from typing import Any

from kombu.utils.json import loads

from feedmill.shared.encoding import MAX_MESSAGE, MAX_SEPARATORS, is_too_large

#: Expired leases after which a message is delivered in isolation. One proves nothing: a vanished worker held many
#: messages.
EXPIRIES_BEFORE_ISOLATION = 2
#: Optional parts of a message, and the types that kombu and Celery assume without checking.
MESSAGE_PART_TYPES = {"headers": dict, "content-type": str, "content-encoding": str}


class UndecodableError(ValueError):
    """A message in a queue cannot be decoded. The text gives the reason."""


def decoded(message: bytes) -> dict[str, Any]:
    """Parse a message. Raises UndecodableError. Uses kombu's slow parser only for messages with kombu's JSON types."""
    if is_too_large(message):
        raise UndecodableError(f"{len(message):,} bytes: more than {MAX_MESSAGE:,}, or {MAX_SEPARATORS:,} values")
    try:
        text = message.decode()
        found = loads(text) if '"__type__"' in text else json.loads(text)
        body, delivery = found["body"], found["properties"]["delivery_info"]
        parts = {name: found.get(name) for name in MESSAGE_PART_TYPES}
    except Exception as error:  # kombu's JSON types raise more types of errors than JSON does
        raise UndecodableError(f"malformed message ({type(error).__name__})") from error
    if not isinstance(body, str) or not isinstance(delivery, dict):
        raise UndecodableError("body must be a string, and delivery_info an object")
    if wrong := [name for name, part in parts.items() if not isinstance(part, MESSAGE_PART_TYPES[name] | None)]:
        raise UndecodableError(
            f"{wrong[0]} must be {MESSAGE_PART_TYPES[wrong[0]].__name__}, not {type(parts[wrong[0]]).__name__}"
        )
    delivery.pop("consumer_tag", None)  # a sender's tag of a no-ack consumer would disable acknowledgement
    return found  # type: ignore[no-any-return]  # the sender controls its content


def needs_isolation(delivery_info: Mapping[str, Any]) -> bool:
    """Return whether a message must be delivered in isolation: workers that held it vanished repeatedly."""
    return delivery_counter(delivery_info, "lapse_count") >= EXPIRIES_BEFORE_ISOLATION


def count_delivery(message: bytes, *, lapse: bool = False) -> bytes | str:
    """Mark a message as redelivered and increment its counters. Undecodable messages are returned unchanged.

    lapse: its lease expired because its process vanished or stalled.
    """
    try:
        if is_too_large(message):
            return message
        found = json.loads(message)
        info = found["properties"]["delivery_info"]
        info["redelivered"] = True
        if isinstance(found.get("headers"), dict):
            found["headers"]["redelivered"] = True
        alone = info.pop("alone", None) is True
        counts = {"delivery_count": True, "lapse_count": lapse, "alone_lapse_count": lapse and alone}
        info |= {name: delivery_counter(info, name) + 1 for name, applies in counts.items() if applies}
        return json.dumps(found)
    except Exception:  # malformed input can raise any error; raising would block the return of all other messages
        return message


def delivery_counter(delivery_info: Mapping[str, Any], name: str) -> int:
    """Return a counter written by `count_delivery`; 0 if the sender put an invalid value there."""
    found = delivery_info.get(name)
    return found if type(found) is int and 0 < found < 2**31 else 0
