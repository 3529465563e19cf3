"""workers/runtime/pool.py: the prefetch limits. tests/e2e covers message handling with whole workers."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery
from celery.exceptions import WorkerShutdown
from redis.exceptions import RedisError

from feedmill.workers.runtime.consumer import Consumer
from feedmill.workers.runtime.in_flight import InFlight, PendingTask
from feedmill.workers.runtime.pool import FIRST_POST_BYTES, DevicePool


@pytest.fixture
def pool() -> DevicePool:
    """A pool before its first message, with room for 64 of 256 rows."""
    made = DevicePool.__new__(DevicePool)
    made._post_bytes = FIRST_POST_BYTES
    made.pipeline = SimpleNamespace(  # type: ignore[assignment]
        max_waiting=lambda: 256, waiting=lambda: 192, rows_per_post=lambda: 1
    )
    return made


def test_new_connection_first_rewrites_results(pool: DevicePool) -> None:
    request = SimpleNamespace(eventer=None)
    pool._in_flight = InFlight(Celery(), (None, None))  # type: ignore[arg-type]
    pool._in_flight._held = {PendingTask(request)}
    pool._store = SimpleNamespace(catch_up=Mock(side_effect=RedisError("unreachable")))  # type: ignore[assignment]
    with pytest.raises(RedisError, match="unreachable"):
        pool.adopt("its events")
    assert request.eventer == "its events"


def test_acknowledges_without_waiting_for_the_event_loop() -> None:
    """A closing worker's event loop no longer runs, and an idle one sleeps."""
    consumer: Any = Consumer.__new__(Consumer)
    consumer.hub, acknowledge = Mock(), Mock()
    consumer.call_soon_ack(acknowledge, "logger", ())
    acknowledge.assert_called_once_with("logger", ())
    consumer.hub.call_soon.assert_not_called()


def test_an_error_of_one_callback_leaves_later_ones_scheduled() -> None:
    in_flight, later = InFlight(Celery(), (None, None)), Mock()  # type: ignore[arg-type]
    in_flight.hub = Mock()
    in_flight._deliver(Mock(side_effect=WorkerShutdown(1)))
    in_flight._deliver(later)
    in_flight.hub.call_soon.assert_called_once_with(in_flight.run_deliveries)
    with pytest.raises(WorkerShutdown):
        in_flight.run_deliveries()
    assert in_flight.hub.call_soon.call_count == 2
    in_flight.run_deliveries()
    later.assert_called_once_with()
    in_flight._deliver(later)
    assert in_flight.hub.call_soon.call_count == 3
