"""What was read and is on its way into the queue.

The oldest post goes first, and is written down as known only when it is in the queue. While the queue is full, what
comes is held here, in memory: a process that is killed reads it again.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from producers.push import Pusher
from producers.reddit.clock import Clock
from producers.reddit.state import State
from producers.reddit.things import Item
from shared.settings import Settings

logger = logging.getLogger(__name__)

#: Posts that are sent and then written down as known together.
PART = 256


@dataclass
class Batch:
    """Posts that were read and are to be sent, the oldest first; `begin` before the first, `end` after the last.

    fresh: those that were not known before. walked: they are of a walk, and known once they are sent.
    """

    items: Sequence[Item]
    fresh: frozenset[str]
    walked: bool
    begin: Callable[[], None]
    end: Callable[[], None]
    #: How many are sent; None before the beginning.
    done: int | None = None

    @property
    def left(self) -> int:
        return len(self.items) - (self.done or 0)


class Outbox:
    """Batches that wait to be sent, in the order in which they came."""

    def __init__(self, pusher: Pusher, state: State, settings: Settings, clock: Clock) -> None:
        self._pusher = pusher
        self._state = state
        self._posts_per_message = settings.posts_per_message
        self._clock = clock
        self._batches: deque[Batch] = deque()
        #: Posts that cannot be classified, since the start.
        self.refused = 0

    @property
    def held(self) -> int:
        """Posts that were read and are not in the queue yet."""
        return sum(batch.left for batch in self._batches)

    def hold(self, batch: Batch) -> None:
        """Send it after those that came before."""
        self._batches.append(batch)

    def send(self) -> bool:
        """Send what is held, as far as the queue has room; whether there was anything to ask Redis about.

        Raises redis.exceptions.RedisError and kombu.exceptions.OperationalError; what was not sent then stays held.
        """
        asked = bool(self._batches)
        while self._batches and (room := self._pusher.gate.room()):
            self._send(self._batches[0], room * self._posts_per_message)
        return asked

    def _send(self, batch: Batch, room: int) -> None:
        if batch.done is None:
            batch.begin()
            batch.done = 0
        part = batch.items[batch.done : batch.done + min(room, PART)]
        wanted = [item for item in part if item.post and not item.gone]
        for item in part:
            if not item.post and not item.gone:
                self.refused += 1
                logger.warning("%s of r/%s is refused: %s", item.fullname, item.subreddit, item.problem)
        self._pusher.push(item.post for item in wanted if item.post)
        fresh = [item.fullname for item in wanted if item.fullname in batch.fresh]
        self._state.commit(part if batch.walked else (), fresh, self._clock.time())
        batch.done += len(part)
        if batch.done == len(batch.items):
            batch.end()
            self._batches.popleft()
