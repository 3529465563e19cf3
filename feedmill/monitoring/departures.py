"""Find out when the messages that wait in a queue now have left it."""

import time

from redis import Redis

from feedmill.shared.broker import SENT_AT, TRANSPORT_KEYS, queue_lists
from feedmill.shared.scripts import call

#: Most seconds by which another sender's clock may be ahead of ours.
MAX_CLOCK_DIFFERENCE_S = 60.0
#: Sorted sets with the tags of messages under lease, and of those that are due later.
INDEXES = (
    TRANSPORT_KEYS["reserved_index_key"],
    TRANSPORT_KEYS["delayed_index_key"],
)
#: Tags per answer of Redis.
TAGS_PER_CALL = 1000


class Departures:
    """The messages that are in a queue now, and have not left it.

    Other senders may fill the queue for ever, so it need not become empty. Workers take messages
    in the order in which they were sent: once the next message was sent later, the earlier ones
    are held by workers, due later, or gone.
    """

    def __init__(self, redis: Redis, queue: str) -> None:
        self._redis = redis
        self._lists = queue_lists(queue)
        self._sent_until = time.time() + MAX_CLOCK_DIFFERENCE_S
        #: Tags of the messages that were held or due later when the earlier ones had left their
        #: lists; None before that.
        self._held: set[str] | None = None

    def are_complete(self) -> bool:
        """Return whether all messages have left the queue: they were acknowledged or removed.

        Raises redis.exceptions.RedisError.
        """
        if self._is_waiting():
            self._held = None
            return False
        tags = self._tags()
        if self._held is None:
            self._held = tags
        self._held &= tags
        # A held message may have returned to its list meanwhile.
        return not self._held and not self._is_waiting()

    def _is_waiting(self) -> bool:
        """Return whether a list may have one of the messages."""
        pipe = self._redis.pipeline(transaction=False)
        for name in self._lists:
            pipe.llen(name)
        lengths = pipe.execute()
        filled = sum(length > 0 for length in lengths)
        if not filled:
            return False
        values = call(self._redis, "next_headers", SENT_AT, *self._lists)
        if len(values) < filled:  # a message without the time of sending
            return True
        oldest = min(map(float, values))
        return oldest <= self._sent_until

    def _tags(self) -> set[str]:
        """Return the tags of the queue's messages that are held or due later."""
        tags = set()
        for index in INDEXES:
            for tag, _ in self._redis.zscan_iter(index, count=TAGS_PER_CALL):
                _, _, name = tag.partition(" ")
                if name in self._lists:
                    tags.add(tag)
        return tags
