"""Change and read the state of a delivered message: claimed, postponed, isolated. All functions take a kombu message.

A message that kombu's own transport delivered has no lease. It counts as held, and can always be claimed.
"""

from typing import Any

from workers.transport.decoding import needs_isolation
from workers.transport.leases import Leases


def _leases(message: Any) -> Leases | None:
    return getattr(message.channel, "leases", None)


def claim(message: Any) -> bool:
    """Hold a delivered message until it is acknowledged, rejected or unclaimed, even if its connection ends.

    Returns False if the message needs isolation and another message is claimed; the caller tries again later.
    """
    leases, tag = _leases(message), message.delivery_tag
    if leases is None or tag not in leases.held:
        return True
    suspicious = needs_isolation(message.delivery_info) and not leases.is_isolated(tag)
    if suspicious and leases.are_claimed():
        leases.waiting_for_isolation.add(tag)
        return False
    leases.waiting_for_isolation.discard(tag)
    leases.claim(tag)
    if suspicious:
        leases.record_isolation(tag)
    return True


def unclaim(message: Any) -> None:
    """Drop a claim: the message returns to its queue when its connection ends."""
    if leases := _leases(message):
        leases.unclaim(message.delivery_tag)


def postpone(message: Any) -> None:
    """Record that a delivered message is postponed: it waits for its ETA or a rate limit."""
    if leases := _leases(message):
        leases.postpone(message.delivery_tag)


def is_held(message: Any) -> bool:
    """Return whether a message is still held: neither acknowledged nor returned."""
    leases = _leases(message)
    return leases is None or message.delivery_tag in leases.held


def end_isolation(message: Any) -> None:
    """Record that a message delivered in isolation proved harmless; do nothing for others. Raises redis-py's errors."""
    if leases := _leases(message):
        leases.end_isolation(message.delivery_tag)


def queued_size(message: Any) -> int:
    """Return the bytes of a held message in its list; 0 if unknown."""
    leases = _leases(message)
    found = leases and leases.held.get(message.delivery_tag)
    return found.queued if found else 0
