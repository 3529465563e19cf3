"""shared/redis_errors.py: classifying Redis errors, including wrapped ones."""

import pytest
from redis.exceptions import NoPermissionError, OutOfMemoryError, ReadOnlyError, ResponseError

from feedmill.shared.redis_errors import (
    is_denied,
    is_full,
    is_replica,
    permanent_reason,
    rejects_writes,
)


@pytest.mark.parametrize(
    "fault",
    [
        OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
        ResponseError("Error running script (call to f_1): @user_script:2: -OOM command not allowed when used memory"
                      " > 'maxmemory'."),
    ],
    ids=["Redis 7", "a script on Redis 6.2"],
)  # fmt: skip
def test_recognizes_a_full_redis(fault: Exception) -> None:
    assert is_full(fault)
    assert rejects_writes(fault)
    assert permanent_reason(fault) is None


@pytest.mark.parametrize(
    "fault",
    [ReadOnlyError("You can't write against a read only replica."), ResponseError("Error: -READONLY You can't")],
)
def test_recognizes_a_replica(fault: Exception) -> None:
    assert is_replica(fault)
    assert rejects_writes(fault)


def test_recognizes_a_redis_that_cannot_save() -> None:
    for message in ("MISCONF Errors writing to the AOF file", "NOREPLICAS Not enough good replicas to write."):
        assert rejects_writes(ResponseError(message))


@pytest.mark.parametrize(
    "text",
    [
        "The user executing the script can't access at least one of the keys mentioned in the command arguments",
        "ACL failure in script: No permissions to access a key script: b3afe1cd, on @user_script:1.",
        "ACL failure in script: User bob has no permissions to run the 'lpush' command script: on @user_script:1.",
    ],
    ids=["Redis 7", "Redis 8", "Valkey 9"],
)
def test_recognizes_denied_commands_of_scripts(text: str) -> None:
    assert "docs/redis.md" in str(permanent_reason(ResponseError(text)))


def test_examines_the_causes_of_an_error() -> None:
    outer = ValueError("wrapped")
    outer.__cause__ = NoPermissionError("this user has no permissions to run the 'hdel' command")
    assert is_denied(outer)
