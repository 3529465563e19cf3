"""Send a worker's task events in batches, over one Redis client.

Relies on Celery 5.7 and kombu 5.7: `EventDispatcher` calls `on_send_buffered` for each event that waits to be sent, and
`Channel._create_client` creates the Redis client of each command (kombu/transport/redis.py).
"""

from typing import Any


class EventBatches:
    """Send task events in batches. Celery alone sends one or two at each iteration of its event loop."""

    #: Maximum seconds that an event waits for other events. Flower shows whole seconds.
    FLUSH_DELAY_S = 0.1
    #: Number of waiting events that triggers an immediate send.
    BATCH_LIMIT = 256

    def __init__(self, dispatcher: Any, hub: Any) -> None:
        self._dispatcher = dispatcher
        self._hub = hub
        self._due = False
        dispatcher.buffer_limit = self.BATCH_LIMIT
        if hub is not None:
            dispatcher.on_send_buffered = self._buffered

    def _buffered(self) -> None:
        if not self._due:
            self._due = True
            self._hub.call_later(self.FLUSH_DELAY_S, self.flush)

    def flush(self) -> None:
        """Send all waiting events."""
        self._due = False
        if self._dispatcher.enabled:
            self._dispatcher.flush()


def keep_client(channel: Any) -> None:
    """Use one client for all commands of a channel. kombu creates one per command, which took 8% of a worker's time."""
    client, make_client = channel._create_client(), channel._create_client
    channel._create_client = lambda asynchronous=False: make_client(True) if asynchronous else client
