"""Where Redis is, as people write it: one URL, or one for each Sentinel that knows where the master is.

What cannot be served is refused by name: kombu alone takes what it is given, and makes of `rediss://` a connection that
verifies nothing, and of several `redis://` a choice that nobody has made.
"""

import re
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

#: What each kind of address begins with, and the port that it means where it names none.
PORTS = {"redis": 6379, "rediss": 6379, "sentinel": 26379}
HOST, DATABASE = re.compile(r"[^,\s]+"), re.compile(r"(/\d*)?")
FORMS = "redis://:password@host:6379/0, as rediss://… for TLS, or as sentinel://:password@host:26379/0;sentinel://…"


@dataclass(frozen=True)
class Address:
    """A Redis: `hosts` are its own, or its Sentinels'."""

    scheme: str
    hosts: tuple[tuple[str, int], ...]
    database: int
    user: str | None
    password: str | None = field(repr=False)


def parse(url: str) -> Address:
    """Read an address. Raises ValueError with a sentence that says what to write, and quotes no password."""
    parts = [_split(each) for each in url.split(";")]
    first = parts[0]
    if first.scheme not in PORTS or any(part.scheme != first.scheme for part in parts):
        raise ValueError(_no_scheme(url))
    if not all(
        HOST.fullmatch(part.hostname or "") and part.port != 0 and DATABASE.fullmatch(part.path) for part in parts
    ):
        raise ValueError(_malformed())
    if any(part.query or part.fragment for part in parts):
        raise ValueError("takes no ?options: certificates and the like have settings of their own (docs/redis.md)")
    if first.scheme != "sentinel" and len(parts) > 1:
        raise ValueError(
            "names several Redis servers, and nothing would say which of them is the master: run Redis Sentinel beside "
            "them, and write sentinel://:password@host:26379/0;sentinel://… (a ; in a password is written %3B)"
        )
    shared = {(part.username, part.password, part.path.strip("/") or "0") for part in parts}
    if len(shared) > 1:
        raise ValueError("must give each of its Sentinels the same user, password and database: they are the master's")
    return Address(
        first.scheme,
        tuple((part.hostname or "", part.port or PORTS[part.scheme]) for part in parts),
        int(first.path.strip("/") or 0),
        unquote(first.username or "") or None,
        None if first.password is None else unquote(first.password),
    )


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url.strip())
        _ = parts.port
    except ValueError:  # the port is no number; the error would quote the password
        raise ValueError(_malformed()) from None
    return parts


def _malformed() -> str:
    return f"must look like {FORMS}; with / # ? and ; in the password percent-encoded"


def _no_scheme(url: str) -> str:
    named = re.match(r"[a-z][a-z0-9+]*://", url)
    if named is None or named[0].removesuffix("://") in PORTS:
        return _malformed()
    return (
        f"must look like {FORMS}. {named[0]} is none of these: queue, results and what was sent are all in one Redis, "
        "so that no other broker can take its place"
    )
