"""Edges of workers/runtime/ that whole workers (tests/e2e) do not reach."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery
from celery.exceptions import WorkerShutdown
from redis.exceptions import RedisError

from feedmill.workers.runtime.consumer import Consumer
from feedmill.workers.runtime.in_flight import InFlight, PendingTask
from feedmill.workers.runtime.pool import DevicePool
from feedmill.workers.runtime.task import ClassifyTask


def test_new_connection_first_rewrites_results() -> None:
    request, pool = SimpleNamespace(eventer=None), DevicePool.__new__(DevicePool)
    pool.in_flight = InFlight(Celery(), (None, None))  # type: ignore[arg-type]
    pool.in_flight._held = {PendingTask(request)}
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


@pytest.mark.parametrize("field", ["time_limits", "delivery_info", "args"])
def test_a_request_that_cannot_start_is_not_in_flight(field: str) -> None:
    """The consumer disposes of its message, so a drain must not wait for it."""
    in_flight = InFlight(Celery(), (None, None))  # type: ignore[arg-type]
    request: Any = SimpleNamespace(
        id="task",
        task=ClassifyTask(),
        expires=None,
        stamped_headers=None,
        time_limits=(None, None),
        delivery_info={"priority": 0},
        args=[],
        kwargs={},
        request_dict={},
        message=Mock(),
    )
    delattr(request, field)
    with pytest.raises(AttributeError, match=field):
        in_flight.run(request)
    assert len(in_flight) == 0
