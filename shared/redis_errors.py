"""Classify Redis errors as transient or permanent, and explain them to users. Imports no Celery."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from redis.exceptions import AuthenticationError, InvalidResponse, ResponseError
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import TimeoutError as TimeoutFault

from feedmill.shared.errors import RedisUnavailable, clause
from feedmill.shared.settings import PREFIX, Settings

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


def is_permanent(fault: BaseException) -> bool:
    """Return whether Redis will never accept the command."""
    return is_denied(fault) or is_wrong_type(fault)


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


#: What tells a refusal, and what users read of it: what Redis does, and how to fix it. The first one applies.
REFUSALS: tuple[tuple[Callable[[BaseException], bool], str], ...] = (
    (
        is_wrong_type,
        f"holds another application's data under one of Feedmill's keys ({{said}}). Set another database in {PREFIX}"
        "REDIS_URL, for example redis://host:6379/1.",
    ),
    (is_full, "has reached its memory limit and rejects writes. Raise its `maxmemory`."),
    (is_denied, "does not let user {user} do this ({said}). See docs/redis.md for the permissions of each user."),
    (is_replica, f"is a read-only replica. Set {PREFIX}REDIS_URL to its master, or to the Sentinels."),
    (cannot_save, "cannot save its data and rejects writes ({said}). Check its disk and its replicas."),
    (
        _matches("^MasterNotFoundError"),  # its own text would show redis-py's client objects
        "cannot be found: no reachable Sentinel knows this master, or they require a password. Check "
        f"{PREFIX}REDIS_MASTER and {PREFIX}REDIS_SENTINEL_PASSWORD.",
    ),
    (
        _matches("^AuthenticationError"),
        f"requires a password, or rejects the one in {PREFIX}REDIS_URL. Set it to {{scheme}}://:password@host:6379/0.",
    ),
)
#: What users read of other failures to connect, by the scheme of the address.
UNREACHABLE = {
    "redis": "is unreachable ({said}). Start the embedded stack with `feedmill up`, or set "
    f"{PREFIX}REDIS_URL, which must begin with rediss:// for TLS.",
    "rediss": "is unreachable over TLS ({said}). Check that the port in "
    f"{PREFIX}REDIS_URL is its TLS port, and that its certificate is valid for the host and signed by an authority in "
    f"{PREFIX}REDIS_CA_FILE. If it requires certificates, set {PREFIX}REDIS_CERTIFICATE_FILE and _KEY_FILE.",
}


def user_message(fault: BaseException, settings: Settings) -> str | None:
    """Return a message for users: what failed and how to fix it. None if the error is unknown."""
    found = settings.redis
    reason = next((text for applies, text in REFUSALS if applies(fault)), None)
    if reason is None and not isinstance(fault, ResponseError):
        reason = UNREACHABLE.get(found.scheme, UNREACHABLE["redis"])
    said = {"said": clause(fault), "user": found.user or "default", "scheme": found.scheme}
    return reason and f"Redis at {settings.redis_address} {reason.format(**said)}"


@contextmanager
def user_errors(settings: Settings) -> Iterator[None]:
    """Convert errors from an unreachable, untrusted or refusing Redis to RedisUnavailable, with a message for users."""
    try:
        yield
    except (
        ConnectionFault, TimeoutFault, ResponseError, InvalidResponse,
        getattr(sys.modules.get("kombu.exceptions"), "OperationalError", ConnectionFault),
    ) as fault:  # fmt: skip
        if message := user_message(fault, settings):
            raise RedisUnavailable(message) from None
        raise
