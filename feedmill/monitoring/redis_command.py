"""Send one command to Redis, for `feedmill redis`: with the password of the settings, which no
command line shows.

The embedded stack has no redis-cli, which moreover takes a URL only in its command line.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from redis import Redis
from redis.exceptions import ResponseError

from feedmill.shared.errors import (
    UserError,
    clause,
    json_line,
    printable,
    printable_lines,
)
from feedmill.shared.redis_errors import is_denied, is_temporary

#: Characters of a command's name in errors.
MAX_NAME = 80
#: Text for "no value", as in redis-cli.
NIL = "(nil)"
#: Commands whose replies follow each other for ever, or change the connection.
ENDLESS = frozenset(
    {"MONITOR", "PSUBSCRIBE", "PSYNC", "SSUBSCRIBE", "SUBSCRIBE", "SYNC"}
)
#: Version of Redis' protocol: the first in which replies have maps, and not lists of names and
#: values.
PROTOCOL = 3


def reply_to(redis: Redis, command: Sequence[str]) -> Any:
    """Send the command and return its reply.

    Raises UserError if it is wrong, and redis.exceptions.RedisError.
    """
    name = printable(command[0])[:MAX_NAME]
    if not name.strip():  # Redis does not reply to it
        raise UserError("The command is empty. Name one, such as PING.")
    if command[0].upper() in ENDLESS:
        raise UserError(
            f"{name} has more than one reply. Use redis-cli, with the password in REDISCLI_AUTH."
        )
    pool = redis.connection_pool
    pool.connection_kwargs["protocol"] = PROTOCOL
    # A connection, because a client of redis-py changes replies by the command's name.
    with closing(redis):
        connection: Any = pool.get_connection()
        try:
            # as the shell passed them, which may be bytes that are not UTF-8
            connection.send_command(*(os.fsencode(word) for word in command))
            # Undecoded: values may be any bytes.
            return connection.read_response(disable_decoding=True)
        except ResponseError as error:
            # the state of Redis, or the user: not this command's
            if is_temporary(error) or is_denied(error):
                raise
            raise UserError(
                f"Redis refuses {name}: {clause(error)}. Correct the command."
            ) from None
        finally:
            connection.disconnect()


def lines_of(reply: Any) -> Iterator[str]:
    """Yield a reply as lines: a text as it is, each element of a list, and other values as
    JSON.
    """
    if not isinstance(reply, list | set):
        yield _line(reply)
        return
    for element in reply:
        yield _line(element)


def _line(value: Any) -> str:
    if value is None:
        return NIL
    plain = _plain(value)
    if isinstance(plain, str):
        lines = plain.replace("\r\n", "\n").removesuffix("\n")
        return printable_lines(lines)
    return json_line(plain)


def _plain(value: Any) -> Any:
    """Return a value of a reply as a value of JSON."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, dict):
        fields: dict[str, Any] = {}
        for name, content in value.items():
            plain_name = str(_plain(name))
            fields[plain_name] = _plain(content)
        return fields
    if isinstance(value, list | set):
        return [_plain(element) for element in value]
    if value is None or isinstance(value, int | float):
        return value
    return str(value)
