"""Every Lua script, as typed functions that hide the script's keys, arguments and reply.

Redis runs a script atomically and serves no other client meanwhile, so each function bounds its work or relies on its
caller to do so. At `maxmemory`, Redis rejects a script whose first write can use memory, but runs all writes after one
that cannot. Scripts that must work at `maxmemory` therefore start with a deletion, if necessary of a missing field.
This also makes them fail on keys of the wrong type before they change anything.

All functions raise redis.exceptions.RedisError.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from redis import Redis
from redis.client import NEVER_DECODE
from redis.commands import core
from redis.exceptions import NoScriptError

Answer = TypeVar("Answer")


class Script(Generic[Answer]):
    """A Lua script, and the type of its reply. Sends only the SHA-1, and the source if Redis does not know it."""

    def __init__(self, lua: str) -> None:
        self.lua = lua
        # As bytes, because redis-py would need a client to encode text.
        self._script: Any = core.Script(None, lua.encode())  # type: ignore[arg-type]
        self.sha: str = self._script.sha

    def __call__(self, redis: Redis, keys: Sequence[str | bytes], args: Sequence[Any] = ()) -> Answer:
        answer: Answer = self._script(keys, args, redis)
        return answer

    def raw(self, redis: Redis, keys: Sequence[str | bytes], args: Sequence[Any] = ()) -> Any:
        """Return a reply that contains binary data, without decoding it."""
        untyped: Any = redis
        command = ("EVALSHA", self.sha, len(keys), *keys, *args)
        try:
            return untyped.execute_command(*command, **{NEVER_DECODE: True})
        except NoScriptError:
            redis.script_load(self.lua)
            return untyped.execute_command(*command, **{NEVER_DECODE: True})


def as_text(value: str | bytes) -> str:
    """Decode a part of a reply: bytes, if the client does not set `decode_responses`."""
    return value if isinstance(value, str) else value.decode()
