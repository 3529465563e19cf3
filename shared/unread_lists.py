"""Find messages that no worker reads, because their sender's options name another list than the
workers read.

Celery's Redis transport builds a list's name from options of the *sender*: `global_keyprefix`
comes before the queue's name, `sep` and one of `priority_steps` behind it. Workers read each
queue's ten lists, of the steps 0 to 9, with Celery's default separator and no prefix. A sender
with other options gets no error: its messages wait for ever in a list beside them.
"""

import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from redis import Redis
from redis.client import NEVER_DECODE
from redis.exceptions import NoPermissionError

from feedmill.shared.broker import PRIORITY_MARK, queue_lists
from feedmill.shared.errors import printable

#: Keys that a search visits at most, and per call: a database may be shared with other
#: applications.
MAX_KEYS = 50_000
KEYS_PER_CALL = 1000
#: Lists that a search reports at most.
MAX_LISTS = 20
#: Characters of a prefix, and of a separator, that a sender may have set.
MAX_PREFIX = 64
MAX_SEPARATOR = 8


class UnreadList(NamedTuple):
    """A list that no worker reads: its key, its messages, its queue, and the sender's option that
    made it.
    """

    key: str
    messages: int
    queue: str
    option: str

    def __str__(self) -> str:
        return printable(
            f"{self.messages:,} messages in the list {self.key!r}, which no worker reads: their "
            f"sender sets {self.option} (docs/messages.md)"
        )


def find_unread_lists(redis: Redis, queues: Collection[str]) -> list[UnreadList]:
    """Return the lists beside those of these queues, most messages first.

    Visits at most MAX_KEYS keys. Returns none if the user may not search. Raises
    redis.exceptions.RedisError.
    """
    read = {name for queue in queues for name in queue_lists(queue)}
    unread: list[UnreadList] = []
    try:
        for raw_key in _similar_lists(redis, queues):
            key = raw_key.decode(errors="backslashreplace")
            option = None if key in read else _option_of(key, queues)
            if option is None:
                continue
            queue, option_text = option
            length: Any = redis.llen(raw_key)
            unread_list = UnreadList(
                key=key,
                messages=int(length),
                queue=queue,
                option=option_text,
            )
            unread.append(unread_list)
            if len(unread) == MAX_LISTS:
                break
    except NoPermissionError:
        return []
    return sorted(unread, key=lambda unread_list: -unread_list.messages)


def _similar_lists(redis: Any, queues: Collection[str]) -> Iterator[bytes]:
    """Yield the lists whose names contain a queue's name. The names need not be UTF-8."""
    yielded: set[bytes] = set()
    undecoded = {NEVER_DECODE: True}
    for queue in queues:
        escaped = re.sub(r"([*?\[\]\\^-])", r"\\\1", queue)
        cursor = 0
        for _ in range(MAX_KEYS // KEYS_PER_CALL):
            cursor, keys = redis.scan(
                cursor,
                match=f"*{escaped}*",
                count=KEYS_PER_CALL,
                _type="list",
                **undecoded,
            )
            for key in keys:
                if key not in yielded:
                    yielded.add(key)
                    yield key
            if not cursor:
                break


def _option_of(key: str, queues: Collection[str]) -> tuple[str, str] | None:
    """Return the queue that a list was meant for, and the sender's option; None for a list of
    another kind.
    """
    for queue in sorted(
        queues,
        key=len,
        reverse=True,
    ):
        match = re.fullmatch(
            rf"(?P<prefix>.{{0,{MAX_PREFIX}}}?){re.escape(queue)}"
            rf"(?:(?P<separator>[^0-9A-Za-z]{{1,{MAX_SEPARATOR}}})(?P<step>\d{{1,3}}))?",
            key,
            re.DOTALL,
        )
        if match is None:
            continue
        prefix = match["prefix"]
        separator = match["separator"]
        list_name = f"{queue}{separator}{match['step']}"
        options = []
        if prefix:
            options.append(f"global_keyprefix={prefix!r}")
        if separator == PRIORITY_MARK:
            if list_name not in queue_lists(queue):
                options.append(f"priority_steps with {match['step']}")
        elif separator:
            options.append(f"sep={separator!r}")
        if options:
            return queue, " and ".join(options)
    return None
