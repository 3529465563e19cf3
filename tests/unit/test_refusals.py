"""shared/redis_errors.py: classifying Redis errors, including wrapped ones."""

from collections.abc import Callable
from typing import Any

import pytest
from redis._parsers.base import BaseParser
from redis.exceptions import (
    ConnectionError as ConnectionFault,
)
from redis.exceptions import (
    InvalidResponse,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from feedmill.shared.redis_errors import (
    is_denied,
    is_full,
    is_permanent,
    is_replica,
    is_temporary,
    rejects_writes,
    user_message,
)
from feedmill.shared.settings import load
from tests.fakes.failing_redis import ANSWERS, GREETINGS, Answer


@pytest.mark.parametrize(
    ("recognizes", "fault"),
    [
        (
            is_full,
            OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
        ),
        (
            is_full,
            ResponseError(
                "@user_script:2: -OOM command not allowed when used memory > 'maxmemory'."
            ),
        ),
        (is_replica, ReadOnlyError("You can't write against a read only replica.")),
        (is_replica, ResponseError("Error: -READONLY You can't")),
        (rejects_writes, ResponseError("MISCONF Errors writing to the AOF file")),
        (
            rejects_writes,
            ResponseError("NOREPLICAS Not enough good replicas to write."),
        ),
    ],
)
def test_recognizes_why_writes_are_rejected(
    recognizes: Callable[[Exception], bool], fault: Exception
) -> None:
    assert recognizes(fault)
    assert rejects_writes(fault)
    assert not is_permanent(fault)


@pytest.mark.parametrize(
    "text",
    [
        (
            "The user executing the script can't access at least one of the keys mentioned in the "
            "command arguments"
        ),
        (
            "ACL failure in script: User bob has no permissions to run the 'lpush' command "
            "script: on "
            "@user_script:1."
        ),
    ],
    ids=["Redis 7", "Redis 8 and Valkey"],
)
def test_recognizes_denied_commands_of_scripts(text: str) -> None:
    assert is_permanent(ResponseError(text))


def test_examines_the_causes_of_an_error() -> None:
    outer = ValueError("wrapped")
    outer.__cause__ = NoPermissionError(
        "this user has no permissions to run the 'hdel' command"
    )
    assert is_denied(outer)


def error_of(answer: Answer) -> RedisError:
    """Return the error that redis-py raises for an answer."""
    text = answer.line.decode("latin-1")
    if text.startswith("-"):
        parser: Any = BaseParser
        fault: RedisError = parser.parse_error(text[1:])
        return fault
    return InvalidResponse("Protocol error")


@pytest.mark.parametrize(
    "answer", [*ANSWERS, *GREETINGS], ids=lambda answer: answer.line[:30]
)
def test_services_wait_only_for_what_ends_by_itself(answer: Answer) -> None:
    assert is_temporary(error_of(answer)) == answer.ends


def test_a_command_in_a_pipelines_error_does_not_classify_it() -> None:
    """The command contains what senders wrote."""
    text = (
        "Command # 1 (HSET key MISCONF maxmemory -READONLY WRONGTYPE) of pipeline caused "
        "error: an unknown one"
    )
    fault = ResponseError(text)
    assert not is_temporary(fault)
    assert not is_permanent(fault)
    assert "HSET" not in user_message(fault, load(redis_url="redis://host"))


@pytest.mark.parametrize(
    ("text", "is_about_tls"),
    [
        ("Error 111 connecting to host:6379. Connection refused.", False),
        ("Error -2 connecting to host:6379. Name or service not known.", False),
        ("Timeout connecting to server", False),
        ("Connection closed by server.", True),
        (
            "Error while reading from host:6379 : (104, 'Connection reset by peer')",
            True,
        ),
        ("Error 32 while writing to socket. Broken pipe.", True),
    ],
)
def test_advises_tls_only_if_the_server_ends_the_connection(
    text: str, is_about_tls: bool
) -> None:
    said = user_message(ConnectionFault(text), load(redis_url="redis://host"))
    assert ("rediss://" in said) == is_about_tls
    assert "host:6379/0" in said
