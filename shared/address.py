"""Parse and validate Redis addresses: one server's URL, or a list of Sentinel URLs.

Unsupported addresses raise an error here because kombu accepts them silently: it connects to `rediss://` without
verifying certificates, and picks one of several `redis://` URLs on its own.
"""

import re
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

#: Default port of each supported URL scheme.
PORTS = {"redis": 6379, "rediss": 6379, "sentinel": 26379}
#: Valkey's names for the schemes of the same protocol.
ALIASES = {"valkey://": "redis://", "valkeys://": "rediss://"}
HOST, DATABASE = re.compile(r"[^,\s]+"), re.compile(r"(/\d*)?")
MALFORMED = (
    "must look like redis://:password@host:6379/0, as rediss://… for TLS, or, for several servers, as "
    "sentinel://:password@host:26379/0;sentinel://… with the same user, password and database (the master's) for each "
    "Sentinel; without ?options, and with / # ? and ; in the password percent-encoded (docs/redis.md)"
)


@dataclass(frozen=True)
class Address:
    """A parsed Redis address. `hosts` are the server itself, or its Sentinels."""

    scheme: str
    hosts: tuple[tuple[str, int], ...]
    database: int
    user: str | None
    password: str | None = field(repr=False)


def normalize(url: str) -> str:
    """Return an address with Redis' name of its scheme, which kombu and Celery know, instead of Valkey's."""
    url = url.strip()
    return next((name + url.removeprefix(alias) for alias, name in ALIASES.items() if url.startswith(alias)), url)


def parse(url: str) -> Address:
    """Parse an address. Raises ValueError with the accepted form; the text never contains the password."""
    parts = [_split(each) for each in url.split(";")]
    first = parts[0]
    shared = {(part.scheme, part.username, part.password, part.path.strip("/") or "0") for part in parts}
    if (
        first.scheme not in PORTS
        or len(shared) > 1
        or (first.scheme != "sentinel" and len(parts) > 1)
        or any(
            not HOST.fullmatch(part.hostname or "")
            or part.port == 0
            or not DATABASE.fullmatch(part.path)
            or part.query
            or part.fragment
            for part in parts
        )
    ):
        raise ValueError(MALFORMED)
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
    except ValueError:  # the port is not a number; the original error would quote the password
        raise ValueError(MALFORMED) from None
    return parts
