"""Every function of Lua in Redis, as typed functions that hide the function's keys, arguments and reply.

Redis runs a function atomically and serves no other client meanwhile, so each one bounds its work or relies on its
caller to do so. Only users who may run FUNCTION LOAD, workers and operators, bring code to Redis; producers and readers
call it. A function's name ends with a digest of its code, so that different versions can share a Redis, and Redis keeps
functions in its files and on its replicas.

All functions raise redis.exceptions.RedisError.
"""

from collections.abc import Sequence
from hashlib import blake2b
from importlib import import_module
from typing import Any, Final, Generic, TypeVar

from redis import Redis
from redis.client import NEVER_DECODE
from redis.exceptions import ResponseError

Answer = TypeVar("Answer")

#: What a function may do. READS: only read; works on a full Redis and on replicas. SHRINKS: write, also at
#: `maxmemory`, because it frees memory or needs little. WRITES: write, unless Redis is full.
READS: Final = "no-writes"
SHRINKS: Final = "allow-oom"
WRITES: Final = ""

#: Modules with functions.
MODULES = ("leases", "poison", "purge", "queue", "results", "retention", "runs", "stream")
#: Part of Redis' error for a function that it does not know; and for a library that exists, because another client has
#: just loaded it.
NOT_FOUND, EXISTS = "Function not found", "already exists"
#: All functions of the imported modules.
_SCRIPTS: "list[Script[Any]]" = []


class Script(Generic[Answer]):
    """A function of Lua, and the type of its reply. Redis gets its code if it does not know it.

    lua: the function's body, with KEYS and ARGV. may: READS, SHRINKS or WRITES.
    """

    def __init__(self, name: str, may: str, lua: str) -> None:
        digest = blake2b(f"{may} {lua}".encode(), digest_size=6).hexdigest()
        #: Name of the function and of its library.
        self.name = f"feedmill_{name}_{digest}"
        flags = f"'{may}'" if may else ""
        self.library = f"""#!lua name={self.name}
redis.register_function{{function_name='{self.name}', flags={{{flags}}}, callback=function(KEYS, ARGV)
{lua}
end}}
"""
        _SCRIPTS.append(self)

    def command(self, keys: Sequence[str | bytes], args: Sequence[Any] = ()) -> tuple[Any, ...]:
        """Return the command that calls the function, for callers that send it themselves."""
        return ("FCALL", self.name, len(keys), *keys, *args)

    def __call__(self, redis: Redis, keys: Sequence[str | bytes], args: Sequence[Any] = ()) -> Answer:
        answer: Answer = self._call(redis, keys, args)
        return answer

    def raw(self, redis: Redis, keys: Sequence[str | bytes], args: Sequence[Any] = ()) -> Any:
        """Return a reply that contains binary data, without decoding it."""
        return self._call(redis, keys, args, **{NEVER_DECODE: True})

    def _call(self, redis: Any, keys: Sequence[str | bytes], args: Sequence[Any], **options: Any) -> Any:
        command = self.command(keys, args)
        try:
            return redis.execute_command(*command, **options)
        except ResponseError as error:
            if not is_missing(error):
                raise
        load_functions(redis)
        return redis.execute_command(*command, **options)


def is_missing(error: ResponseError) -> bool:
    """Return whether Redis does not know a function."""
    return NOT_FOUND in str(error)


def load_functions(redis: Redis) -> None:
    """Load all functions that Redis does not know. Raises NoPermissionError if the user may not."""
    for module in MODULES:
        import_module(f"feedmill.shared.scripts.{module}")
    for script in _SCRIPTS:
        try:
            redis.execute_command("FUNCTION", "LOAD", script.library)  # type: ignore[no-untyped-call]
        except ResponseError as error:
            if EXISTS not in str(error):
                raise


def as_text(value: str | bytes) -> str:
    """Decode a part of a reply: bytes, if the client does not set `decode_responses`."""
    return value if isinstance(value, str) else value.decode()
