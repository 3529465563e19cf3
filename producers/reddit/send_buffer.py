"""The send buffer: posts read from Reddit and not yet in the queue.

Posts are sent oldest first and recorded as known only after they are in the queue. The buffer is in memory: a process
that is killed reads its posts again.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from feedmill.producers.live.clock import Clock
from feedmill.producers.push import Pusher
from feedmill.producers.reddit.listing import ListingItem
from feedmill.producers.reddit.state import State
from feedmill.shared.settings import Settings

logger = logging.getLogger(__name__)

#: Maximum posts sent and recorded in one step.
MAX_POSTS_PER_STEP = 256


@dataclass
class PostBatch:
    """Posts to send, oldest first. `begin` runs before the first is sent, `end` after the last.

    fresh: fullnames of posts that were not known before. walked: true for posts of a walk, recorded as known once sent.
    """

    items: Sequence[ListingItem]
    fresh: frozenset[str]
    walked: bool
    begin: Callable[[], None]
    end: Callable[[], None]
    #: Number of posts sent; None before `begin` has run.
    done: int | None = None

    @property
    def left(self) -> int:
        return len(self.items) - (self.done or 0)


class SendBuffer:
    """A first-in-first-out buffer of batches."""

    def __init__(self, pusher: Pusher, state: State, settings: Settings, clock: Clock) -> None:
        self._pusher = pusher
        self._state = state
        self._posts_per_message = settings.posts_per_message
        self._clock = clock
        self._batches: deque[PostBatch] = deque()
        #: Posts that could not be classified, since the start.
        self.refused = 0

    @property
    def held(self) -> int:
        """Number of posts in the buffer."""
        return sum(batch.left for batch in self._batches)

    def hold(self, batch: PostBatch) -> None:
        """Append a batch."""
        self._batches.append(batch)

    def send(self) -> bool:
        """Send as many posts as the queue has room for. Returns true if the buffer was not empty (Redis was accessed).

        Raises redis.exceptions.RedisError and kombu.exceptions.OperationalError. Unsent posts stay in the buffer.
        """
        asked = bool(self._batches)
        while self._batches and (room := self._pusher.gate.room()):
            self._send(self._batches[0], room * self._posts_per_message)
        return asked

    def _send(self, batch: PostBatch, room: int) -> None:
        if batch.done is None:
            batch.begin()
            batch.done = 0
        part = batch.items[batch.done : batch.done + min(room, MAX_POSTS_PER_STEP)]
        wanted = [item for item in part if item.post and not item.gone]
        for item in part:
            if not item.post and not item.gone:
                self.refused += 1
                logger.warning("skipped post %s in r/%s: %s", item.fullname, item.subreddit, item.problem)
        self._pusher.push(item.post for item in wanted if item.post)
        # Posts that were removed before they could be read may be approved later.
        fresh = [
            item
            for item in part
            if item.fullname in batch.fresh and (item.gone == "removed" or (item.post and not item.gone))
        ]
        self._state.commit(part if batch.walked else (), fresh, self._clock.time())
        batch.done += len(part)
        if batch.done == len(batch.items):
            batch.end()
            self._batches.popleft()
