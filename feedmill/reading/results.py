"""Open a reader of the results stream, and yield its items; reconnect after a lost connection.

Independent of the command line and of Celery's tasks.
"""

import logging
import os
import re
import socket
import time
from collections.abc import Iterator

from redis import Redis
from redis.exceptions import RedisError

from feedmill.reading.groups import CLAIM_AFTER_S, GroupReader
from feedmill.reading.stream import NO_FILTER, Follower, Missed, Read, ResultFilter, normalize
from feedmill.shared.errors import UserError, clause, printable
from feedmill.shared.redis_errors import is_temporary, rejects_writes
from feedmill.shared.results import Result

logger = logging.getLogger(__name__)

Reader = Follower | GroupReader

#: Maximum seconds that a reader waits for an entry before it returns to its caller.
WAIT_S = 1.0
#: Delays before reconnecting, in seconds. The last one repeats.
RECONNECT_DELAYS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
#: Valid names of groups and members.
READER_NAME = re.compile(r"[A-Za-z0-9_.:@-]{1,64}")
#: Seconds since 1970: the end of the year 9999.
MAX_UNIX_TIME = 253_402_300_800


def open_reader(
    redis: Redis,
    group: str | None = None,
    consumer: str | None = None,
    wanted: ResultFilter = NO_FILTER,
    since: float | None = None,
    history: int = 0,
    claim_after: float = CLAIM_AFTER_S,
) -> Reader:
    """Create a follower, or a member of a group. Raises UserError for invalid values.

    consumer: the member's name; default: host name and process id.
    """
    if wanted.subreddit is not None and not normalize(wanted.subreddit):
        raise UserError(f"{printable(wanted.subreddit)!r:.80} is not a subreddit's name; write python, or r/python.")
    if since is not None and not 0 <= since < MAX_UNIX_TIME:
        raise UserError(f"since must be a time before the year 10000, not {since!r}.")
    if group is None:
        if consumer is not None:
            raise UserError("consumer requires a group. Name the group as well, or leave out the consumer.")
        return Follower(redis, wanted, since, history)
    if not 0 < claim_after < MAX_UNIX_TIME:
        raise UserError(f"claim_after must be a positive number of seconds, not {claim_after!r}.")
    if consumer is None:
        consumer = re.sub(r"[^A-Za-z0-9_.-]", "-", f"{socket.gethostname():.48}-{os.getpid()}")
    for what, name in (("group", group), ("consumer", consumer)):
        if not READER_NAME.fullmatch(name):
            raise UserError(
                f"'{printable(name):.80}' is not a valid {what} name. Use 1 to 64 letters, digits, or any of - _ . : @"
            )
    return GroupReader(redis, group, consumer, wanted, since, claim_after)


def batches(reader: Reader, follow: bool = True, wait: float = WAIT_S) -> Iterator[list[Read]]:
    """Yield batches of items as they arrive; an empty list at least every `wait` seconds.

    Retries for as long as Redis is unreachable, or rejects the writes of a group. Without `follow`, stops at the end of
    the stream. The caller acknowledges. Raises redis.exceptions.RedisError if the first attempt fails, or if Redis will
    never accept a command.
    """
    answered, failures = False, 0
    while True:
        try:
            batch = reader.read()
            if batch is None and follow:
                reader.wait(wait)
        except RedisError as fault:
            if not answered or not is_temporary(fault):
                raise
            if not failures:
                what = "rejects writes" if rejects_writes(fault) else "is unreachable"
                logger.warning("Redis %s (%s); retrying until it answers", what, clause(fault))
            time.sleep(RECONNECT_DELAYS_S[min(failures, len(RECONNECT_DELAYS_S) - 1)])
            failures += 1
            continue
        if failures:
            logger.warning("Redis answers again; continuing at the same position")
        answered, failures = True, 0
        if batch is None and not follow:
            return
        yield batch or []


def items(reader: Reader, follow: bool = True) -> Iterator[Result | Missed]:
    """Yield single items, each acknowledged when the next one is requested. Otherwise like `batches`."""
    for batch in batches(reader, follow):
        for item, ids in batch:
            yield item
            reader.acknowledge(ids)
            if reader.stale and isinstance(item, Result):
                break  # the rest is still pending, or was taken over; the next `read` decides
