"""Classify Redis errors as transient or permanent, and explain them to users.

Imports no Celery.
"""

import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import InvalidResponse, ResponseError
from redis.exceptions import TimeoutError as TimeoutFault

from feedmill.shared.errors import RedisUnavailable, clause
from feedmill.shared.settings import PREFIX, Settings

logger = logging.getLogger(__name__)

#: Text of Redis' error when a key has the wrong type. In a script's error it is surrounded by
#: other text.
WRONG_TYPE = "WRONGTYPE"


def exception_chain(fault: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes: redis-py and kombu wrap TLS errors in their own."""
    yielded: set[int] = set()
    while fault is not None:
        identity = id(fault)
        if identity in yielded:  # causes can form a cycle
            return
        yielded.add(identity)
        yield fault
        fault = fault.__cause__ or fault.__context__


def _matches(pattern: str) -> Callable[[BaseException], bool]:
    """Return a function that searches the types and texts of an error and its causes, as a script
    embeds others.

    A pipeline's error quotes its command, whose arguments contain what senders wrote. They are not
    searched.
    """

    def check(fault: BaseException) -> bool:
        for cause in exception_chain(fault):
            name = type(cause).__name__
            text = clause(cause)
            if re.search(pattern, f"{name}: {text}"):
                return True
        return False

    return check


#: Return whether Redis has reached its memory limit.
is_full = _matches("maxmemory")
#: Return whether Redis is a read-only replica, or became one while the command waited.
is_replica = _matches("^ReadOnlyError|-READONLY|^ResponseError: UNBLOCKED")
#: Return whether Redis rejects writes because it cannot save them or has too few replicas.
cannot_save = _matches("MISCONF|NOREPLICAS")
#: Return whether Redis denied the command to its user. The texts are those of scripts in Redis 7,
#: Redis 8 and Valkey.
is_denied = _matches(
    "^NoPermissionError|user executing the script can't|ACL failure in script"
)
#: Return whether a key has another type than the command expects, because another application uses
#: it.
is_wrong_type = _matches(WRONG_TYPE)
#: Return whether Redis answers nothing but this error until a slow script ends.
is_busy = _matches("^ResponseError: (BUSY|UNKILLABLE) ")
#: Return whether Redis has just started and reads its data.
is_loading = _matches("^BusyLoadingError")
#: Return whether Redis has as many connections as its `maxclients` allows.
has_no_connection_left = _matches("max number of clients")
#: Return whether what listens on the port answers in another protocol.
is_foreign = _matches("^InvalidResponse")
#: Return whether the connection ended after it was accepted.
is_cut = _matches("Connection closed by server|Connection reset|Broken pipe")


class Refusal(NamedTuple):
    """An error that Redis answers."""

    applies: Callable[[BaseException], bool]
    #: The failure and its mend, for users. Continues "Redis at HOST".
    text: str
    #: Whether Redis may accept the same command later, without anyone's help.
    is_temporary: bool = False


#: The first one that applies explains an error.
REFUSALS = (
    Refusal(
        is_wrong_type,
        f"holds another application's data under one of Feedmill's keys ({{said}}). Set another "
        f"database in {PREFIX}"
        "REDIS_URL, for example redis://host:6379/1.",
    ),
    Refusal(
        is_full,
        "has reached its memory limit and rejects writes. Raise its `maxmemory`.",
        is_temporary=True,
    ),
    Refusal(
        is_denied,
        (
            "does not let user {user} do this ({said}). See docs/redis.md for the "
            "permissions of each user."
        ),
    ),
    Refusal(
        is_replica,
        f"is a read-only replica. Set {PREFIX}REDIS_URL to its master, or to the Sentinels.",
        is_temporary=True,
    ),
    Refusal(
        _matches("MISCONF"),
        (
            "cannot write its data to disk and rejects writes (MISCONF). Free space on its disk; "
            "its log gives the reason."
        ),
        is_temporary=True,
    ),
    Refusal(
        _matches("NOREPLICAS"),
        "rejects writes while fewer replicas than its `min-replicas-to-write` are connected "
        "(NOREPLICAS). Start its replicas, or lower that setting.",
        is_temporary=True,
    ),
    Refusal(
        is_busy,
        "is busy with a slow script and answers nothing else (BUSY). Try again when it has "
        "ended, or end it with `feedmill redis SCRIPT KILL` or `feedmill redis FUNCTION KILL`.",
        is_temporary=True,
    ),
    Refusal(
        is_loading,
        (
            "has just started and is still loading its data (LOADING). Try again when it has "
            "finished."
        ),
        is_temporary=True,
    ),
    Refusal(
        has_no_connection_left,
        "accepts no more connections, because it has reached its `maxclients`. Stop idle "
        "clients, or raise `maxclients` and the limit of open files of its process.",
        is_temporary=True,
    ),
    Refusal(
        _matches("^MasterDownError"),
        "is a replica that has lost its master (MASTERDOWN). Start the master, or set "
        f"{PREFIX}REDIS_URL to the Redis that is the master now.",
        is_temporary=True,
    ),
    Refusal(
        _matches("killed by user|^ResponseError: Script killed"),
        "ended the function that this command needs, because its administrator ran SCRIPT KILL "
        "or FUNCTION KILL. Try again.",
        is_temporary=True,
    ),
    Refusal(
        _matches(
            "^(ClusterDownError|MovedError|AskError|TryAgainError|ClusterCrossSlotError)"
        ),
        f"belongs to a Redis Cluster, which Feedmill does not support ({{said}}). Set "
        f"{PREFIX}REDIS_URL to a Redis that is no cluster.",
    ),
    Refusal(
        _matches("^ResponseError: DENIED"),
        "accepts connections only from its own machine, because it is in protected mode without "
        "a password (DENIED). Set a password with `requirepass` on the server, and put it into "
        f"{PREFIX}REDIS_URL.",
    ),
    Refusal(
        # Its own text would show redis-py's client objects.
        _matches("^MasterNotFoundError"),
        "cannot be found: no reachable Sentinel knows this master, or they require a password. "
        f"Check {PREFIX}REDIS_MASTER and {PREFIX}REDIS_SENTINEL_PASSWORD.",
    ),
    Refusal(
        _matches("without any password configured|no password is set"),
        (
            f"has no password, but {PREFIX}REDIS_URL contains one. Remove it from the address, or "
            "correct the address."
        ),
    ),
    Refusal(
        _matches("^AuthenticationError|^ResponseError: NOAUTH|unauthenticated"),
        (
            f"requires a password, or rejects the one in {PREFIX}REDIS_URL. Set it to "
            f"{{scheme}}://:password@host:6379/0."
        ),
    ),
    Refusal(
        _matches("DB index"),
        f"has no database with this number ({{said}}). Give a lower number at the end of "
        f"{PREFIX}REDIS_URL, or raise `databases` in its configuration.",
    ),
    Refusal(
        _matches("unknown (sub)?command"),
        "does not know a command that Feedmill needs ({said}): it is older than Redis 7.0 or "
        "Valkey 8, or a Sentinel "
        f"or another service. Set {PREFIX}REDIS_URL to a server that docs/redis.md lists.",
    ),
)
#: Message for users about an error that is not in REFUSALS, a bug of Feedmill or of a service that
#: resembles Redis.
UNKNOWN_REFUSAL = (
    "refuses a command ({said}). Check that it is Redis 7.0 or Valkey 8 or newer; if it is, "
    "report this error with the "
    f"output of {PREFIX}LOG_LEVEL=debug."
)
#: Messages for users if the connection fails: without TLS if nothing answers, if it is ended, and
#: if the answer is in another protocol; and with TLS.
UNREACHABLE = (
    f"is unreachable ({{said}}). Start the embedded stack with `feedmill up`, or set "
    f"{PREFIX}REDIS_URL to a Redis that runs."
)
CUT = (
    f"ends the connection ({{said}}). Its log gives the reason; if it requires TLS, "
    f"{PREFIX}REDIS_URL must begin with rediss://."
)
FOREIGN = (
    f"answers in another protocol than Redis' ({{said}}). Check host and port in "
    f"{PREFIX}REDIS_URL, which must begin with rediss:// if the server requires TLS."
)
UNREACHABLE_BY_TLS = (
    "is unreachable over TLS ({said}). Check that the port in "
    f"{PREFIX}REDIS_URL is its TLS port, and that its certificate is valid for the host and "
    "signed by an authority in "
    f"{PREFIX}REDIS_CA_FILE. If it requires certificates, set {PREFIX}REDIS_CERTIFICATE_FILE and "
    "_KEY_FILE."
)


def _refusal(fault: BaseException) -> Refusal | None:
    for refusal in REFUSALS:
        if refusal.applies(fault):
            return refusal
    return None


def is_permanent(fault: BaseException) -> bool:
    """Return whether Redis will never accept the command."""
    return is_denied(fault) or is_wrong_type(fault)


def rejects_writes(fault: BaseException) -> bool:
    """Return whether Redis answers but rejects all writes: it is full, a replica, or unable to
    save.
    """
    return is_full(fault) or is_replica(fault) or cannot_save(fault)


def is_temporary(fault: BaseException) -> bool:
    """Return whether Redis may accept the same command later: it is unreachable, or refuses
    commands for now.

    Another program may answer on the port of a Redis that is being restarted.
    """
    refusal = _refusal(fault)
    if refusal is not None:
        return refusal.is_temporary
    return isinstance(fault, ConnectionFault | TimeoutFault | InvalidResponse)


def is_starting(fault: BaseException) -> bool:
    """Return whether Redis answers that it cannot serve anyone yet: a service may wait even for
    its first command.
    """
    return is_busy(fault) or is_loading(fault) or has_no_connection_left(fault)


def trouble(fault: BaseException) -> str:
    """Return what Redis does, in two words for a log line."""
    if rejects_writes(fault):
        return "rejects writes"
    if isinstance(fault, ResponseError) or is_starting(fault):
        return "refuses commands"
    return "is unreachable"


def user_message(fault: BaseException, settings: Settings) -> str:
    """Return a message for users: what failed and how to fix it."""
    address = settings.redis
    refusal = _refusal(fault)
    if refusal is not None:
        reason = refusal.text
    elif isinstance(fault, ResponseError):
        reason = UNKNOWN_REFUSAL
    elif address.scheme == "rediss":
        reason = UNREACHABLE_BY_TLS
    elif is_foreign(fault):
        reason = FOREIGN
    elif is_cut(fault):
        reason = CUT
    else:
        reason = UNREACHABLE
    user = address.user or "default"
    explained = reason.format(
        said=clause(fault),
        user=user,
        scheme=address.scheme,
    )
    return f"Redis at {settings.redis_address} {explained}"


@contextmanager
def user_errors(settings: Settings) -> Iterator[None]:
    """Convert errors from an unreachable, untrusted or refusing Redis to RedisUnavailable, with a
    message for users.
    """
    try:
        yield
    except (
        ConnectionFault,
        TimeoutFault,
        ResponseError,
        InvalidResponse,
        _kombu_fault(),
    ) as fault:
        logger.debug("Redis failed", exc_info=True)
        raise RedisUnavailable(user_message(fault, settings)) from None


def _kombu_fault() -> type[Exception]:
    """Return kombu's error of a connection, if kombu has been imported: this module does not."""
    kombu_exceptions = sys.modules.get("kombu.exceptions")
    fault: type[Exception] = getattr(
        kombu_exceptions, "OperationalError", ConnectionFault
    )
    return fault
