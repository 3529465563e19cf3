"""A broker and a result backend of Celery in this process' memory, for tests of applications.

kombu's memory transport keeps its queues for the whole process. Here, each `Memory` has its own,
so that no message of one test reaches the next one.

Relies on these internals of Celery 5.7 and kombu 5.7:

- `AMQP.Connection` creates every connection of an application. An application's `_pool` and the
  `_producer_pool` of its AMQP keep the ones in use, and its `_backend_cache` the result backend.
- The memory transport's `Channel.queues` and `Channel.events`, and `Transport.global_state`, are
  class attributes.
- `KeyValueStoreBackend` counts a chord's messages by `incr` if `implements_incr`; results are
  awaited by `wait_for`, which `_ensure_not_eager` precedes.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition
from typing import Any

import kombu
from celery import Celery
from celery.backends.base import DisabledBackend, KeyValueStoreBackend
from celery.exceptions import TimeoutError as NoResult
from celery.states import READY_STATES
from kombu.transport import memory, virtual

#: Seconds between two looks at an empty queue.
POLL_INTERVAL_S = 0.005


class Results:
    """The store of result backends, shared by the sender's and the worker's."""

    def __init__(self) -> None:
        self.values: dict[bytes, Any] = {}
        self.changed = Condition()


class MemoryBackend(KeyValueStoreBackend):
    """A result backend that keeps results in memory, and wakes the callers that wait for them."""

    thread_safe = True
    implements_incr = True
    supports_autoexpire = True

    def __init__(self, results: Results, app: Celery) -> None:
        self._results = results
        super().__init__(app=app)

    def get(self, key: Any) -> Any:
        return self._results.values.get(self.key_t(key))

    def mget(self, keys: Sequence[Any]) -> list[Any]:
        return [self.get(key) for key in keys]

    def set(self, key: Any, value: Any) -> None:
        with self._results.changed:
            self._results.values[self.key_t(key)] = value
            self._results.changed.notify_all()

    def delete(self, key: Any) -> None:
        self._results.values.pop(self.key_t(key), None)

    def incr(self, key: Any) -> int:
        with self._results.changed:
            count = int(self.get(key) or 0) + 1
            self._results.values[self.key_t(key)] = count
        return count

    def expire(self, key: Any, value: Any) -> None: ...

    def wait_for(
        self,
        task_id: str,
        timeout: float | None = None,
        interval: float = 0.5,
        no_ack: bool = True,  # noqa: ARG002 - of Celery's interface
        on_interval: Callable[[], object] | None = None,
    ) -> Any:
        """Return a result as soon as it is stored. Raises celery.exceptions.TimeoutError."""
        self._ensure_not_eager()  # type: ignore[attr-defined]  # not in the stub
        deadline = None
        if timeout is not None:
            deadline = time.monotonic() + timeout
        with self._results.changed:
            while True:
                meta: Any = self.get_task_meta(task_id)
                if meta["status"] in READY_STATES:
                    return meta
                if on_interval is not None:
                    on_interval()
                pause = interval
                if deadline is not None:
                    pause = min(interval, deadline - time.monotonic())
                if pause <= 0:
                    raise NoResult("The operation timed out.")
                self._results.changed.wait(pause)


class Memory:
    """A broker and results for the applications that `serve` connects to it."""

    def __init__(self) -> None:
        channel_names: dict[str, Any] = {"queues": {}, "events": defaultdict(set)}
        channel = type("Channel", (_Channel,), channel_names)
        transport_names = {"Channel": channel, "global_state": virtual.BrokerState()}
        self._transport = type("Transport", (memory.Transport,), transport_names)
        self._results = Results()

    def connection(self, *_: Any, **__: Any) -> kombu.Connection:
        """Return a connection to the broker, whatever address an application names."""
        return kombu.Connection(
            transport=self._transport,
            transport_options={"polling_interval": POLL_INTERVAL_S},
        )

    @contextmanager
    def serve(self, app: Celery) -> Iterator[None]:
        """Connect an application to this broker and, if it has a result backend, to these
        results.
        """
        celery: Any = app
        amqp = celery.amqp
        names = {"_pool": celery._pool, "_backend_cache": celery._backend_cache}
        producer_pool = amqp._producer_pool
        # Of another `serve` around this one.
        connection = vars(amqp).get("Connection")
        if not isinstance(celery.backend, DisabledBackend):
            celery._backend_cache = MemoryBackend(self._results, app)
        celery._pool = None
        amqp._producer_pool = None
        amqp.Connection = self.connection
        try:
            yield
        finally:
            del amqp.Connection
            if connection is not None:
                amqp.Connection = connection
            amqp._producer_pool = producer_pool
            for name, value in names.items():
                setattr(celery, name, value)


class _Channel(memory.Channel):
    """A channel that leaves its queues to the other channels when it is closed."""

    def close(self) -> None:
        virtual.Channel.close(self)
