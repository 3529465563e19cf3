"""Classify Redis errors as transient or permanent. Independent of Celery."""

import re
from collections.abc import Callable, Iterator

from redis.exceptions import AuthenticationError, InvalidResponse
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import TimeoutError as TimeoutFault

from feedmill.shared.errors import clause

#: Text of Redis' error when a key has the wrong type. In a script's error it is surrounded by other text.
WRONG_TYPE = "WRONGTYPE"


def exception_chain(fault: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes: redis-py and kombu wrap TLS errors in their own."""
    seen: set[int] = set()
    while fault is not None and id(fault) not in seen:  # causes can form a cycle
        seen.add(id(fault))
        yield fault
        fault = fault.__cause__ or fault.__context__


def _matches(pattern: str) -> Callable[[BaseException], bool]:
    """Return a function that searches the types and texts of an error and its causes, as a script embeds others."""

    def check(fault: BaseException) -> bool:
        return any(re.search(pattern, f"{type(cause).__name__}: {cause}") for cause in exception_chain(fault))

    return check


#: Return whether Redis has reached its memory limit.
is_full = _matches("maxmemory")
#: Return whether Redis is a read-only replica.
is_replica = _matches("^ReadOnlyError|-READONLY")
#: Return whether Redis rejects writes because it cannot save them or has too few replicas.
cannot_save = _matches("MISCONF|NOREPLICAS")
#: Return whether Redis denied the command to its user. The texts are those of scripts in Redis 7, Redis 8 and Valkey.
is_denied = _matches("^NoPermissionError|user executing the script can't|ACL failure in script")
#: Return whether a key has another type than the command expects, because another application uses it.
is_wrong_type = _matches(WRONG_TYPE)


def permanent_reason(fault: BaseException) -> str | None:
    """Return the reason why Redis will never accept the command, and the remedy; None if the error may be transient."""
    if is_denied(fault):
        return f"the Redis user lacks a permission ({clause(fault)}). See docs/redis.md for each user's permissions."
    if is_wrong_type(fault):
        return f"another application uses one of Feedmill's keys ({clause(fault)}). Use a separate Redis database."
    return None


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
