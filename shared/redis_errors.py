"""Classify Redis errors as transient or permanent. Independent of Celery."""

from collections.abc import Iterator

from redis.exceptions import AuthenticationError, InvalidResponse, NoPermissionError, ReadOnlyError
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import TimeoutError as TimeoutFault

from feedmill.shared.errors import clause

#: Texts of the error when a script runs a command that the Redis user may not: Redis 7, then Redis 8 and Valkey.
#: redis-py has no type for it.
DENIED_SCRIPT = ("user executing the script can't", "ACL failure in script")
#: Text of Redis' error when a key has the wrong type. In a script's error it is surrounded by other text.
WRONG_TYPE = "WRONGTYPE"


def permanent_reason(fault: BaseException) -> str | None:
    """Return the reason why Redis will never accept the command, and the remedy; None if the error may be transient."""
    if is_denied(fault):
        return f"the Redis user lacks a permission ({clause(fault)}). See docs/redis.md for each user's permissions."
    if is_wrong_type(fault):
        return f"another application uses one of Feedmill's keys ({clause(fault)}). Use a separate Redis database."
    return None


def is_full(fault: BaseException) -> bool:
    """Return whether Redis has reached its memory limit."""
    return any("maxmemory" in str(cause) for cause in exception_chain(fault))


def rejects_writes(fault: BaseException) -> bool:
    """Return whether Redis answers but rejects all writes: it is full, a replica, or unable to save."""
    return is_full(fault) or is_replica(fault) or cannot_save(fault)


def is_temporary(fault: BaseException) -> bool:
    """Return whether Redis may accept the same command later: it is unreachable, or rejects writes for now.

    Another program may answer on the port of a Redis that is being restarted.
    """
    if isinstance(fault, AuthenticationError):
        return False
    return isinstance(fault, ConnectionFault | TimeoutFault | InvalidResponse) or rejects_writes(fault)


def cannot_save(fault: BaseException) -> bool:
    """Return whether Redis rejects writes because it cannot save them or has too few replicas."""
    return any(word in str(cause) for cause in exception_chain(fault) for word in ("MISCONF", "NOREPLICAS"))


def is_replica(fault: BaseException) -> bool:
    """Return whether Redis is a read-only replica. A script's error embeds READONLY in other text."""
    return any(isinstance(cause, ReadOnlyError) or "-READONLY" in str(cause) for cause in exception_chain(fault))


def is_denied(fault: BaseException) -> bool:
    """Return whether Redis denied the command to its user."""
    return any(
        isinstance(cause, NoPermissionError) or any(text in str(cause) for text in DENIED_SCRIPT)
        for cause in exception_chain(fault)
    )


def is_wrong_type(fault: BaseException) -> bool:
    """Return whether a key has another type than the command expects, because another application uses it."""
    return any(WRONG_TYPE in str(cause) for cause in exception_chain(fault))


def exception_chain(fault: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes: redis-py and kombu wrap TLS errors in their own."""
    seen: set[int] = set()
    while fault is not None and id(fault) not in seen:  # causes can form a cycle
        seen.add(id(fault))
        yield fault
        fault = fault.__cause__ or fault.__context__
