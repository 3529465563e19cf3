"""Redis' refusals, and which of them no waiting mends. Knows nothing of Celery."""

from collections.abc import Iterator

from redis.exceptions import NoPermissionError, ReadOnlyError

from shared.errors import clause

#: What Redis says, in an error of no kind of its own, of a script that does what its user may not.
DENIED_SCRIPT = "user executing the script can't"
#: And of a key that holds something else than the command is for; within a script in the midst of other words.
WRONG_TYPE = "WRONGTYPE"


def hopeless(fault: BaseException) -> str | None:
    """What somebody has to mend before Redis takes it, for people; None where waiting may do."""
    if is_denied(fault):
        return f"its user may not do this ({clause(fault)}). docs/redis.md tells which user may do what."
    if any(WRONG_TYPE in str(cause) for cause in causes_of(fault)):
        return f"a key is there already, and is not Feedmill's ({clause(fault)}). Give Feedmill a database of its own."
    return None


def is_full(fault: BaseException) -> bool:
    """Whether Redis said that it has reached its memory limit."""
    return any("maxmemory" in str(cause) for cause in causes_of(fault))


def takes_no_writes(fault: BaseException) -> bool:
    """Return whether Redis answers, but refuses every write: full, a replica, or unable to save."""
    return is_full(fault) or is_replica(fault) or cannot_save(fault)


def cannot_save(fault: BaseException) -> bool:
    """Return whether Redis said that it cannot save what is written, or has too few replicas that could."""
    return any(word in str(cause) for cause in causes_of(fault) for word in ("MISCONF", "NOREPLICAS"))


def is_replica(fault: BaseException) -> bool:
    """Return whether Redis said that it is a replica; Redis 6.2 says so of a script in the midst of other words."""
    return any(isinstance(cause, ReadOnlyError) or "-READONLY" in str(cause) for cause in causes_of(fault))


def is_denied(fault: BaseException) -> bool:
    """Whether Redis said that its user may not do this."""
    return any(isinstance(cause, NoPermissionError) or DENIED_SCRIPT in str(cause) for cause in causes_of(fault))


def causes_of(fault: BaseException | None) -> Iterator[BaseException]:
    """The error itself, and what it came of: redis-py and kombu make errors of their own of TLS's."""
    seen: set[int] = set()
    while fault is not None and id(fault) not in seen:  # an error can be made its own cause
        seen.add(id(fault))
        yield fault
        fault = fault.__cause__ or fault.__context__
