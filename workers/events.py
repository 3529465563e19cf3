"""How a worker sends its task events: some at a time, over one client.

What it leans on in Celery 5.7 and kombu 5.7: `EventDispatcher.on_send_buffered` is told of each event that waits to be
sent; `Channel._create_client` makes the Redis client of each command (kombu/transport/redis.py).
"""

from typing import Any


class EventBatches:
    """Sends task events some at a time: Celery alone sends them at each turn of its loop, one or two at once."""

    #: Seconds that an event may wait for others; Flower shows whole seconds.
    DELAY = 0.1
    #: Events that are sent at once however few seconds they waited.
    LIMIT = 256

    def __init__(self, dispatcher: Any, hub: Any) -> None:
        self._dispatcher = dispatcher
        self._hub = hub
        self._due = False
        dispatcher.buffer_limit = self.LIMIT
        if hub is not None:
            dispatcher.on_send_buffered = self._buffered

    def _buffered(self) -> None:
        if not self._due:
            self._due = True
            self._hub.call_later(self.DELAY, self.flush)

    def flush(self) -> None:
        self._due = False
        if self._dispatcher.enabled:
            self._dispatcher.flush()


def keep_client(channel: Any) -> None:
    """One client for all of a channel's commands. kombu makes one for each, and 8% of a worker's time went there."""
    client, make_client = channel._create_client(), channel._create_client
    channel._create_client = lambda asynchronous=False: make_client(True) if asynchronous else client
