"""Feedmill's functions in Redis: a library of Lua, and typed functions of Python that call it.

Redis runs a function atomically and serves no other client meanwhile, so each one bounds its work
or relies on its caller to do so. Only users who may run FUNCTION LOAD, workers and operators,
bring code to Redis; producers and readers call it. Functions' names contain a digest of the code,
so that different versions can share a Redis, and Redis keeps functions in its files and on its
replicas.

All functions raise redis.exceptions.RedisError.
"""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from redis import Redis
from redis.client import NEVER_DECODE
from redis.exceptions import ResponseError

from feedmill.shared import keys

#: Files of the library, in order: later ones use what earlier ones define.
FILES = ("tables", "results", "queue", "purge", "stream", "leases", "delayed")
#: The code, after the names of keys (shared/keys.py). Redis Cluster is not supported, so callers
#: need not declare them.
_CODE = "".join(
    f"local {name} = '{key}'\n" for name, key in vars(keys).items() if name.isupper()
) + "".join(
    (Path(__file__).parent / f"{name}.lua").read_text("utf-8") for name in FILES
)
_LIBRARY = f"feedmill_{blake2b(_CODE.encode(), digest_size=6).hexdigest()}"
#: Part of Redis' error for a function that it does not know; and for a library that another client
#: has just loaded.
NOT_FOUND = "Function not found"
EXISTS = "already exists"


def command(name: str, *args: Any, keys: Sequence[str] = ()) -> tuple[Any, ...]:
    """Return the command that calls a function, for callers that send it themselves.

    keys: those that Redis is to know of, for CLIENT TRACKING.
    """
    function = f"{_LIBRARY}_{name}"
    return ("FCALL", function, len(keys), *keys, *args)


def call(
    redis: Any, name: str, *args: Any, keys: Sequence[str] = (), raw: bool = False
) -> Any:
    """Call a function and return its answer. keys: see `command`. raw: return strings as bytes."""
    called = command(name, *args, keys=keys)
    options = {NEVER_DECODE: True} if raw else {}
    try:
        return redis.execute_command(*called, **options)
    except ResponseError as error:
        if not is_missing(error):
            raise
    load_functions(redis)
    return redis.execute_command(*called, **options)


def is_missing(error: ResponseError) -> bool:
    """Return whether Redis does not know a function."""
    return NOT_FOUND in str(error)


def load_functions(redis: Redis) -> None:
    """Load the functions if Redis does not know them.

    Raises NoPermissionError if the user may not.
    """
    code = f"#!lua name={_LIBRARY}\nlocal NAME = '{_LIBRARY}_'\n{_CODE}"
    try:
        redis.execute_command("FUNCTION", "LOAD", code)  # type: ignore[no-untyped-call]
    except ResponseError as error:
        if EXISTS not in str(error):
            raise
