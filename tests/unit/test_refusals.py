"""shared/redis_errors.py: classifying Redis errors, including wrapped ones."""

from collections.abc import Callable

import pytest
from redis.exceptions import NoPermissionError, OutOfMemoryError, ReadOnlyError, ResponseError

from feedmill.shared.redis_errors import is_denied, is_full, is_permanent, is_replica, rejects_writes


@pytest.mark.parametrize(
    ("recognizes", "fault"),
    [
        (is_full, OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")),
        (is_full, ResponseError("@user_script:2: -OOM command not allowed when used memory > 'maxmemory'.")),
        (is_replica, ReadOnlyError("You can't write against a read only replica.")),
        (is_replica, ResponseError("Error: -READONLY You can't")),
        (rejects_writes, ResponseError("MISCONF Errors writing to the AOF file")),
        (rejects_writes, ResponseError("NOREPLICAS Not enough good replicas to write.")),
    ],
)
def test_recognizes_why_writes_are_rejected(recognizes: Callable[[Exception], bool], fault: Exception) -> None:
    assert recognizes(fault)
    assert rejects_writes(fault)
    assert not is_permanent(fault)


@pytest.mark.parametrize(
    "text",
    [
        "The user executing the script can't access at least one of the keys mentioned in the command arguments",
        "ACL failure in script: User bob has no permissions to run the 'lpush' command script: on @user_script:1.",
    ],
    ids=["Redis 7", "Redis 8 and Valkey"],
)
def test_recognizes_denied_commands_of_scripts(text: str) -> None:
    assert is_permanent(ResponseError(text))


def test_examines_the_causes_of_an_error() -> None:
    outer = ValueError("wrapped")
    outer.__cause__ = NoPermissionError("this user has no permissions to run the 'hdel' command")
    assert is_denied(outer)
