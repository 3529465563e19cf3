"""feedmill/stack/filling.py: how many workers a GPU gets, from measured figures."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedmill.stack.filling import (
    BUSY,
    FIRST_WORKERS,
    MAX_WORKERS,
    MESSAGE_US,
    PAUSE_S,
    STEADY_S,
    Filling,
    Measurement,
    Observation,
    Plan,
    is_host_bound,
    plan,
)

GIGABYTE = 10**9
#: MiniLM and a large model on a GPU of 80 GB.
SMALL = Measurement(60.0, 6.0, 2 * GIGABYTE, 80 * GIGABYTE)
LARGE = Measurement(60.0, 900.0, 4 * GIGABYTE, 80 * GIGABYTE)

figures = st.floats(0, 1e9, allow_nan=False)
measurements = st.builds(Measurement, figures, figures, figures, figures)


@given(measurements, st.integers(0, 1000))
def test_plans_within_limits_for_any_figures(
    measurement: Measurement, cores: int
) -> None:
    found = plan(measurement, cores)
    assert 1 <= found.first <= found.most <= MAX_WORKERS
    assert found.most <= max(1, cores)


def test_a_device_that_one_host_fills_begins_with_one_worker() -> None:
    assert plan(LARGE, cores=16).first == 1


def test_a_device_that_waits_for_its_host_begins_with_several() -> None:
    assert plan(SMALL, cores=16).first == FIRST_WORKERS
    twice = Measurement(100.0, (100.0 + MESSAGE_US) / 2, 0, 0)
    assert plan(twice, cores=16).first == 2


def test_plans_within_the_usable_memory() -> None:
    large = SMALL._replace(memory_bytes=10 * GIGABYTE)
    limited = plan(large, cores=64, usable_memory=0.4)
    assert (limited.most, limited.limit) == (2, "memory")


@pytest.mark.parametrize(
    ("measurement", "cores", "most", "limit"),
    [
        (SMALL, 8, 7, "cores"),
        (SMALL, 1, 1, "cores"),
        (SMALL._replace(memory_bytes=10 * GIGABYTE), 64, 4, "memory"),
        (SMALL._replace(memory_bytes=70 * GIGABYTE), 64, 1, "memory"),
        (SMALL._replace(total_memory_bytes=0), 64, MAX_WORKERS, "at most"),
    ],
)
def test_names_the_limit(
    measurement: Measurement, cores: int, most: int, limit: str
) -> None:
    found = plan(measurement, cores)
    assert (found.most, found.limit) == (most, limit)


def machine(
    host_us: float, device_us: float, cores: float
) -> Callable[[int], Observation]:
    """Return what so many workers do with a full queue: each is limited by its host, all by the
    device and the cores.
    """

    def observe(workers: int) -> Observation:
        host_rate = min(workers, cores) * 1e6 / host_us
        device_rate = 1e6 / device_us
        rate = min(host_rate, device_rate)
        return Observation(rate, rate / device_rate, True)

    return observe


def settled(filling: Filling, observe: Callable[[int], Observation]) -> int:
    """Return the number of workers after many steady intervals."""
    now = 0.0
    for _ in range(20):
        now += STEADY_S
        workers = filling.workers
        filling.observe(observe(workers), now)
    return filling.workers


@given(st.floats(1, 1000), st.floats(0.5, 1000), st.floats(1, 32), st.integers(1, 16))
def test_fills_the_device_or_reaches_a_limit(
    host_us: float, device_us: float, cores: float, most: int
) -> None:
    observe = machine(host_us, device_us, cores)
    filling = Filling(Plan(1, most, "cores", host_us, device_us), 0.0)
    workers = settled(filling, observe)
    is_busy = observe(workers).device_busy >= BUSY
    lacks_cores = workers >= cores
    assert is_busy or lacks_cores or workers == most
    # The first step beyond the cores shows a gain, up to twice as many; the next one shows none.
    assert workers <= 4 * math.ceil(cores)


def steady(first: int = 1, most: int = 16) -> Filling:
    return Filling(Plan(first, most, "cores", 100.0, 1.0), 0.0)


@pytest.mark.parametrize(
    "observation",
    [
        Observation(100.0, 0.1, messages_wait=False),
        Observation(100.0, BUSY, messages_wait=True),
        Observation(0.0, 0.0, messages_wait=False),
    ],
)
def test_adds_none_to_a_busy_device_or_an_empty_queue(observation: Observation) -> None:
    filling = steady()
    for second in range(0, 1000, 10):
        assert filling.observe(observation, float(second)) == 1


def test_waits_for_steady_rates_after_each_change() -> None:
    filling = steady()
    assert filling.observe(Observation(100.0, 0.1, True), STEADY_S - 0.1) == 1
    assert filling.observe(Observation(100.0, 0.1, True), STEADY_S) == 2
    assert filling.observe(Observation(200.0, 0.2, True), STEADY_S + 1) == 2


def test_stops_for_a_while_where_a_worker_brings_nothing() -> None:
    filling = steady()
    idle = Observation(100.0, 0.5, True)
    assert filling.observe(idle, STEADY_S) == 2
    assert filling.observe(idle, 2 * STEADY_S) == 2
    assert filling.observe(idle, PAUSE_S) == 2
    assert filling.observe(idle, 2 * STEADY_S + PAUSE_S) == 4


def test_a_device_without_a_pass_so_far_gets_twice_as_many() -> None:
    filling = steady(first=3, most=5)
    assert filling.observe(Observation(0.0, 0.0, True), STEADY_S) == 5


def test_a_host_is_the_limit_while_messages_wait_for_an_idle_device() -> None:
    assert is_host_bound(0.5, messages_wait=True)
    assert not is_host_bound(0.97, messages_wait=True)
    assert not is_host_bound(0.1, messages_wait=False)
