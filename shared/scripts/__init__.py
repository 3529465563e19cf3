"""Every Lua script, as typed functions: only these modules know a script's keys, arguments and answer.

Redis runs a script atomically and answers no one else meanwhile, so each function bounds its work or leaves that to its
caller. At `maxmemory` Redis rejects a script at its first write that can use memory, but lets it continue after a write
that cannot. Scripts that must work then start with a deletion, even of nothing. This also makes them fail on keys of
the wrong type before they change anything.

All functions raise redis.exceptions.RedisError.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from redis import Redis
from redis.commands import core

Answer = TypeVar("Answer")


class Script(Generic[Answer]):
    """A Lua script with an answer of one type. It is sent as its SHA-1, and loaded where Redis does not know it."""

    def __init__(self, lua: str) -> None:
        self.lua = lua
        # In bytes, redis-py needs no client to encode it.
        self._script: Any = core.Script(None, lua.encode())  # type: ignore[arg-type]
        self.sha: str = self._script.sha

    def __call__(self, redis: Redis, keys: Sequence[str | bytes], args: Sequence[Any] = ()) -> Answer:
        answer: Answer = self._script(keys, args, redis)
        return answer


def as_text(value: str | bytes) -> str:
    """Decode a part of an answer, which is bytes for clients without `decode_responses`."""
    return value if isinstance(value, str) else value.decode()
