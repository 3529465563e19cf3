"""Ids of stream entries: `<milliseconds since 1970>-<sequence number>`, by Redis' clock."""

#: Largest sequence number.
MAX_SEQUENCE = 2**64 - 1


def id_before(since: float) -> str:
    """Return the largest id before a time in seconds since 1970, so that reading after it starts at that time."""
    milliseconds = int(since * 1000)
    return f"{milliseconds - 1}-{MAX_SEQUENCE}" if milliseconds > 0 else "0-0"


def seconds_of(entry_id: str) -> float:
    """Return the time at which an entry was written, in seconds since 1970."""
    return int(entry_id.partition("-")[0]) / 1000
