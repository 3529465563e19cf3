"""The framework for live sources, with a scripted source and a real Redis."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from producers.live import state as live_state
from producers.live.daemon import LiveDaemon
from producers.live.source import Event, SourceFailed
from producers.live.state import EXPECTED_S, STATUS_TTL, LiveState, Position, all_gaps, statuses
from producers.push import Pusher
from shared.broker import connect, make_app
from shared.keys import LIVE_STATUS
from shared.messages import ClassifyOptions
from shared.settings import Settings
from tests.fakes.clock import SimulatedClock
from tests.support import RedisServer, body_of


class Script:
    """A source that yields given events, one list per call of `events`. An exception in a list is raised."""

    name = "scripted"
    overlap = 2

    def __init__(self, *calls: list[Any]) -> None:
        self._calls = list(calls)
        #: Positions from which reading began.
        self.asked: list[int | None] = []
        self.closed = 0

    def events(self, cursor: int | None) -> Iterator[Event | None]:
        self.asked.append(cursor)
        try:
            for each in self._calls.pop(0) if self._calls else []:
                if isinstance(each, Exception):
                    raise each
                yield each
            while True:
                yield None
        finally:
            self.closed += 1


def post(cursor: int, text: str = "a text") -> Event:
    return Event(cursor, 1_800_000_000.0 + cursor, post={"id": f"s-{cursor}", "body": text})


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


def make(source: Script, settings: Settings, clock: SimulatedClock) -> LiveDaemon:
    client = connect(settings)
    pusher = Pusher(make_app(settings), client, settings, ClassifyOptions(), wait=clock.wait)
    return LiveDaemon(source, client, pusher, settings, clock)


def run(daemon: LiveDaemon, clock: SimulatedClock, seconds: float) -> None:
    until = clock.monotonic() + seconds
    while clock.monotonic() < until:
        clock.wait(max(0.1, min(daemon.step(), until - clock.monotonic())))


def ids(redis: RedisServer) -> list[str]:
    messages: list[Any] = redis.client.lrange("feedmill", 0, -1)
    return [post["id"] for message in reversed(messages) for post in body_of(message)[1]["posts"]]


def test_failure_sends_what_was_read_and_resumes_before_it(
    redis: RedisServer, settings: Settings, clock: SimulatedClock
) -> None:
    source = Script([post(1), post(2), post(3), SourceFailed("cut")], [post(1), post(2), post(3), post(4)])
    daemon = make(source, settings, clock)
    daemon.step()
    assert ids(redis) == ["s-1", "s-2", "s-3"]
    assert LiveState(redis.client, "scripted").position() == Position(3, 1_800_000_003.0)
    run(daemon, clock, 10.0)
    assert source.asked == [None, 1]
    assert ids(redis) == ["s-1", "s-2", "s-3", "s-4"]
    assert (daemon.faults, daemon.hindrance, daemon.gaps) == ({"source": 1}, "", 0)


def test_pauses_grow_and_honour_the_sources_wish(settings: Settings, clock: SimulatedClock) -> None:
    source = Script(*[[SourceFailed("down")]] * 6, [SourceFailed("too many", retry_after=900.0)])
    daemon = make(source, settings, clock)
    pauses = []
    for _ in range(7):
        pauses.append(daemon.step())
        assert "scripted" in daemon.hindrance
        clock.wait(pauses[-1] / 2)
        assert daemon.step() == pytest.approx(pauses[-1] / 2), "no attempt before its time"
        clock.wait(pauses[-1] / 2 + 0.001)
    assert pauses[0] <= 2 < pauses[4]
    assert pauses[-1] == 900.0
    assert source.asked == [None] * 7


def test_unexpected_errors_do_not_end_the_daemon(redis: RedisServer, settings: Settings, clock: SimulatedClock) -> None:
    daemon = make(Script([RuntimeError("a bug")], [post(1)]), settings, clock)
    run(daemon, clock, 10.0)
    assert (ids(redis), daemon.faults) == (["s-1"], {"unexpected": 1})


def test_end_of_the_events_is_a_failure(settings: Settings, clock: SimulatedClock) -> None:
    source = Script([])
    source.events = lambda _: iter(())  # type: ignore[method-assign, assignment]
    daemon = make(source, settings, clock)
    assert daemon.step() > 0
    assert daemon.faults == {"source": 1}


def test_unreachable_redis_closes_the_source_and_loses_nothing(
    redis: RedisServer, settings: Settings, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Script([post(1), None, post(2)], [post(1), post(2)])
    daemon = make(source, settings, clock)
    daemon.step()
    with monkeypatch.context() as patched:
        patched.setattr(daemon._state, "advance", lambda _: redis.client.incr("feedmill:live:status"))  # a hash
        assert daemon.step() > 0
    assert (source.closed, daemon.faults) == (1, {"redis": 1})
    assert settings.redis_address in daemon.hindrance
    run(daemon, clock, 10.0)
    assert source.asked == [None, -1]
    assert ids(redis) == ["s-1", "s-2"]


def test_position_never_moves_back(redis: RedisServer, settings: Settings, clock: SimulatedClock) -> None:
    daemon = make(Script([post(5), None, post(4), None]), settings, clock)
    run(daemon, clock, 3.0)
    assert ids(redis) == ["s-5", "s-4"], "an event out of order is sent"
    assert LiveState(redis.client, "scripted").position() == Position(5, 1_800_000_005.0)


def test_missing_event_at_the_position_is_a_gap(redis: RedisServer, settings: Settings, clock: SimulatedClock) -> None:
    LiveState(redis.client, "scripted").advance(Position(10, 1_800_000_010.0))
    first = make(Script([post(15)]), settings, clock)
    first.step()
    assert first.gaps == 1
    # A crash before the position is stored: the same gap, which has grown meanwhile.
    LiveState(redis.client, "scripted").advance(Position(10, 1_800_000_010.0))
    make(Script([post(20)]), settings, clock).step()
    (gap,) = all_gaps(redis.client)
    assert gap == ("scripted", 1_800_000_010.0, 1_800_000_020.0, clock.time())


def test_only_the_newest_gaps_are_kept(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_state, "MAX_GAPS", 3)
    state = LiveState(redis.client, "scripted")
    for number in (9, 10, 11, 100):
        state.record_gap(Position(number, float(number)), number + 1.0, 200.0)
    assert [gap.since for gap in state.gaps()] == [10.0, 11.0, 100.0]
    state.forget_gaps()
    assert state.gaps() == []


def test_status_expires(redis: RedisServer, settings: Settings, clock: SimulatedClock) -> None:
    daemon = make(Script([post(1)]), settings, clock)
    run(daemon, clock, 15.0)
    found = statuses(redis.client)["scripted"]
    assert found.running
    assert (found.report["sent"], found.report["read"]) == (1, 1)
    now = int(redis.client.time()[0])
    for age, expected, running in ((STATUS_TTL + 5, True, False), (EXPECTED_S + 5, False, False)):
        redis.client.hset(LIVE_STATUS, "scripted", json.dumps(found.report | {"at": now - age}))
        known = statuses(redis.client)
        assert ("scripted" in known) == expected
        assert [status.running for status in known.values()] == [running] * expected
