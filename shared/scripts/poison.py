"""Functions for poison tracking (workers/pipeline/poison.py): record the posts of a forward pass, and count deaths."""

from typing import Any

from redis import Redis

from feedmill.shared.scripts import call, command


def note(name: str, record: str, ttl: int) -> tuple[Any, ...]:
    """Return the command that records the posts of a pass. name: worker and lane. record: JSON."""
    return command("note", name, record, ttl)


def count(redis: Redis, message: str, worker: str, ttl: int) -> dict[int, int]:
    """Count the records of a message that other workers left when they died, and remove those records.

    Returns the number of deaths by post index. message: digest of the message's id. worker: prefix of the names of this
    worker's own records.
    """
    found = call(redis, "count_deaths", message, worker, ttl)
    return {int(index): int(deaths) for index, deaths in zip(found[::2], found[1::2], strict=True)}
