"""Clocks that step at a live source, on this machine and in Redis: every post is sent once, or the
loss is said.
"""

import json
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from feedmill.cli.ingest import format_status
from feedmill.monitoring.watch import HealthPart, check_health
from feedmill.producers import hacker_news
from feedmill.producers.live.daemon import LiveDaemon
from feedmill.producers.live.rechecks import AUTHOR_KEPT_S, Purges
from feedmill.producers.live.source import Event, Source, SourceFailed
from feedmill.producers.live.state import Gaps, LiveState, statuses
from feedmill.shared.keys import LIVE_AUTHORS, LIVE_DELETED, LIVE_POSITION, LIVE_STATUS
from feedmill.shared.purge import purge
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from tests.fakes.clock import SimulatedClock
from tests.fakes.hacker_news import HackerNews
from tests.fakes.jetstream import Jetstream
from tests.integration.test_bluesky import Make, jetstream, make, run, start
from tests.integration.test_bluesky import ids as sent_ids
from tests.integration.test_live import ids
from tests.integration.test_live import make as make_daemon
from tests.integration.test_results import result
from tests.support import RedisServer, long_cases, queued

__all__ = ["jetstream", "make"]  # fixtures


class Station:
    """A server that numbers its events by its clock, one event a second. offset: of its clock from
    the right time.
    """

    def __init__(self, clock: SimulatedClock) -> None:
        self._clock = clock
        self.offset = 0.0
        self._produced = clock.time()
        #: Position, id and right time of each event, in the order of their arrival.
        self.events: list[tuple[int, str, float]] = []
        #: Exceptions that the next connections raise after so many events.
        self.faults: list[int] = []

    @property
    def now(self) -> float:
        return self._clock.time() + self.offset

    def produce(self) -> None:
        while self._produced + 1 <= self._clock.time():
            self._produced += 1
            cursor = round((self._produced + self.offset) * 1000)
            self.events.append((cursor, f"s-{len(self.events)}", self._produced))


class Radio(Source):
    """A source that reads a station. A position in the station's future gives new events only."""

    name = "scripted"
    overlap = 10_000

    def __init__(self, station: Station) -> None:
        self._station = station

    def events(self, cursor: int | None) -> Iterator[Any]:
        station = self._station
        station.produce()
        arrived = len(station.events)
        left = station.faults.pop(0) if station.faults else -1
        backlog = sorted(
            event
            for event in station.events
            if cursor is not None and event[0] >= cursor
        )
        yield from (
            backlog if cursor is not None and cursor <= station.now * 1000 else ()
        )
        while True:
            for event in station.events[arrived:]:
                if left == 0:
                    raise SourceFailed("cut")
                left -= 1
                arrived += 1
                yield event
            yield None
            station.produce()

    def parse(self, raw: tuple[int, str, float]) -> Event:
        cursor, post_id, _ = raw
        return Event(cursor, cursor / 1000, post={"id": post_id, "body": "a text"})


class TimedRadio(Radio):
    """The same, for a source that can tell the position of a time."""

    def position_at(self, at: float) -> int | None:
        return round(at * 1000)


def drive(daemon: LiveDaemon, clock: SimulatedClock, seconds: float) -> None:
    until = clock.monotonic() + seconds
    while clock.monotonic() < until:
        daemon.step()
        clock.wait(1.0)


@pytest.mark.parametrize("step", [-3600.0, 7200.0, *long_cases(-30.0, 300.0)])
@pytest.mark.parametrize("away", ["cut", "restarted", *long_cases("connected")])
@pytest.mark.parametrize("radio", [Radio, TimedRadio])
def test_a_clock_that_steps_loses_and_repeats_no_post(
    redis: RedisServer, settings: Settings, step: float, away: str, radio: type[Radio]
) -> None:
    """Without positions by time, events that a closed connection missed are a gap."""
    clock = SimulatedClock(1_800_000_000.0)
    station = Station(clock)
    daemon = make_daemon(radio(station), settings, clock)
    drive(daemon, clock, 60)
    if away == "cut":
        daemon.close()
    elif away == "restarted":
        daemon.close()
        daemon = make_daemon(radio(station), settings, clock)
    station.offset = step
    if away != "connected":
        clock.wait(15)
    drive(daemon, clock, 40)
    daemon.close()  # the position follows, so that a later connection misses nothing
    clock.wait(15)
    drive(daemon, clock, 30)
    station.offset = 0.0  # the clock is corrected
    drive(daemon, clock, 40)
    check(redis, station)
    if step < 0:
        assert daemon.status()["steps_back"] >= 1
        assert daemon.status()["earlier"] > 0
    if radio is TimedRadio or away == "connected" or step > 0:
        assert Gaps(redis.client).all() == []


def check(redis: RedisServer, station: Station) -> None:
    """Check that each event since the first connection was sent once, but for those in a gap."""
    sent = ids(redis)
    assert len(sent) == len(set(sent))
    gaps = Gaps(redis.client).all()
    lost = [at for _, post_id, at in station.events[:-3] if post_id not in sent]
    assert [
        at
        for at in lost
        if not any(gap.since - 1 <= at <= gap.until + 1 for gap in gaps)
    ] == []


@pytest.mark.parametrize("radio", [Radio, TimedRadio])
@pytest.mark.parametrize("seed", [0, *long_cases(1, 2, 3)])
def test_clocks_that_step_at_random_lose_nothing_in_silence(
    redis: RedisServer, settings: Settings, seed: int, radio: type[Radio]
) -> None:
    chance = random.Random(seed)
    clock = SimulatedClock(1_800_000_000.0)
    station = Station(clock)
    daemon = make_daemon(radio(station), settings, clock)
    drive(daemon, clock, 20)
    for _ in range(8):
        station.offset = chance.choice(
            [0.0, 0.0, -5.0, -900.0, -3600.0, -7200.0, 300.0, 7200.0]
        )
        what = chance.choice(["connected", "connected", "cut", "fault", "restarted"])
        if what == "fault":
            station.faults.append(chance.randrange(20))
        if what != "connected":
            daemon.close()
        if what == "restarted":
            daemon = make_daemon(radio(station), settings, clock)
        clock.wait(chance.choice([1.0, 10.0]))
        drive(daemon, clock, chance.choice([10.0, 30.0]))
    station.offset = 0.0
    drive(daemon, clock, 60)
    check(redis, station)


@pytest.mark.parametrize("radio", [Radio, TimedRadio])
def test_a_clock_that_steps_while_reading_lags_loses_nothing_in_silence(
    redis: RedisServer, settings: Settings, radio: type[Radio]
) -> None:
    """A connection ends in the middle of what an outage left to read: more was missed than has
    passed since.
    """
    clock = SimulatedClock(1_800_000_000.0)
    station = Station(clock)
    daemon = make_daemon(radio(station), settings, clock)
    drive(daemon, clock, 20)
    daemon.close()
    clock.wait(400)
    drive(daemon, clock, 1)
    assert 20 < len(ids(redis)) < 400
    daemon.close()
    station.offset = -3600.0
    drive(daemon, clock, 120)
    check(redis, station)


class Early(TimedRadio):
    """A source that begins an hour earlier than asked, as Jetstream's version 2 does."""

    def events(self, cursor: int | None) -> Iterator[Any]:
        yield from super().events(None if cursor is None else cursor - 3_600_000)


def test_a_server_that_repeats_an_hour_moves_no_position(
    redis: RedisServer, settings: Settings
) -> None:
    """Nothing in it is new: posts were sent, are older than the first start, or were purged."""
    clock = SimulatedClock(1_800_000_000.0)
    station = Station(clock)
    clock.wait(1000)
    station.produce()
    daemon = make_daemon(Early(station), settings, clock)
    drive(daemon, clock, 300)
    sent = ids(redis)
    purge(redis.client, settings, sent[:100])
    before = LiveState(redis.client, "scripted").position()
    assert before

    for is_restarted in (False, True):
        daemon.close()
        if is_restarted:
            daemon = make_daemon(Early(station), settings, clock)
        drive(daemon, clock, 60)
        after = LiveState(redis.client, "scripted").position()
        assert after
        assert after > before
        status = daemon.status()
        assert (status["steps_back"], status["clock"], Gaps(redis.client).all()) == (
            0,
            "",
            [],
        )
        assert status["earlier"] > 1000
    numbers = {int(post_id.removeprefix("s-")) for post_id in ids(redis)}
    assert min(numbers) >= 1000 - 10, (
        "nothing from before the first start, but for the overlap"
    )
    assert len(ids(redis)) == len(numbers), "nothing twice"
    assert numbers >= set(range(1100, len(station.events) - 3))


class Busy(TimedRadio):
    """A source that always has an event."""

    def __init__(self, station: Station, clock: SimulatedClock) -> None:
        super().__init__(station)
        self._clock = clock

    def events(self, cursor: int | None) -> Iterator[Any]:
        for event in super().events(cursor):
            if event is None:
                self._clock.wait(1.0)
            else:
                yield event


def test_a_busy_source_an_hour_back_loses_nothing(
    redis: RedisServer, settings: Settings
) -> None:
    """Its new events are told from repeated ones by their speed, also those from before the first
    start.
    """
    clock = SimulatedClock(1_800_000_000.0)
    station = Station(clock)
    daemon = make_daemon(Busy(station, clock), settings, clock)
    drive(daemon, clock, 60)
    daemon.close()
    station.offset = -3600.0
    clock.wait(15)
    drive(daemon, clock, 200)
    check(redis, station)
    assert daemon.status()["steps_back"] >= 1
    assert Gaps(redis.client).all() == []


def test_a_clock_that_went_back_is_said(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimulatedClock(1_800_000_000.0)
    station = Station(clock)
    daemon = make_daemon(Radio(station), settings, clock)
    drive(daemon, clock, 30)
    daemon.close()
    station.offset = -3600.0
    clock.wait(5)
    drive(daemon, clock, 60)
    assert re.search(
        r"scripted went back, as after a step of its clock by 3\d{3} s", caplog.text
    )
    assert "gap in scripted" in caplog.text
    assert "its clock went back by 3," in format_status(daemon.status())
    (live,) = check_health(settings, [HealthPart.LIVE])
    assert "its clock went back by 3," in live.said
    station.offset = 0.0
    drive(daemon, clock, 30)
    assert daemon.status()["clock"] == ""
    assert "clock went back: 1" in format_status(daemon.status())
    station.offset = 7200.0
    drive(daemon, clock, 30)
    assert "from the future" in format_status(daemon.status())


def test_own_clock_that_steps_back_and_forth_loses_nothing(
    redis: RedisServer, settings: Settings
) -> None:
    """On this machine. While it is behind the stored position, the daemon waits and says so."""
    clock = SimulatedClock(1_800_000_000.0)
    station = Station(clock)
    daemon = make_daemon(TimedRadio(station), settings, clock)
    drive(daemon, clock, 60)
    for step in (-7200.0, 7200.0, 86_400.0, -86_400.0):
        clock._start += step
        station._produced += step
        station.offset -= step
        drive(daemon, clock, 60)
        daemon.close()
        drive(daemon, clock, 30)
        is_behind = step == -7200.0
        assert ("ahead of this machine's clock" in daemon.hindrance) == is_behind
    drive(daemon, clock, 60)
    check(redis, station)


@pytest.mark.parametrize("away", ["cut", *long_cases("connected", "restarted")])
def test_clocks_of_both_that_step_back_lose_nothing(
    redis: RedisServer, settings: Settings, away: str
) -> None:
    """A server on the same machine.

    The position is ahead of both clocks; its time comes without a correction.
    """
    clock = SimulatedClock(1_800_000_000.0)
    station = Station(clock)
    daemon = make_daemon(TimedRadio(station), settings, clock)
    drive(daemon, clock, 60)
    if away != "connected":
        daemon.close()
    if away == "restarted":
        daemon = make_daemon(TimedRadio(station), settings, clock)
    clock._start -= 3600.0
    station._produced -= 3600.0
    clock.wait(10)
    drive(daemon, clock, 30)
    assert ("ahead of this machine's clock" in daemon.hindrance) == (
        away != "connected"
    )
    clock.wait(3100)
    drive(daemon, clock, 60)
    daemon.close()
    drive(daemon, clock, 700)
    sent = ids(redis)
    assert len(sent) == len(set(sent))
    assert {f"s-{number}" for number in range(len(station.events) - 3)} - set(
        sent
    ) == set()
    assert Gaps(redis.client).all() == []
    assert daemon.status()["steps_back"] >= 1


@pytest.mark.parametrize("away", ["restarted", *long_cases("connected", "cut")])
def test_numbers_that_go_back_lose_no_item(
    redis: RedisServer, settings: Settings, monkeypatch: pytest.MonkeyPatch, away: str
) -> None:
    """The source's positions are numbers, and its server was restored from an older copy."""
    clock = SimulatedClock(1_800_000_000.0)
    with HackerNews() as server:
        monkeypatch.setattr(hacker_news, "URL", server.url)

        def write(number: int, title: str) -> str:
            server.items[number] = {
                "type": "story",
                "title": title,
                "time": clock.time(),
                "by": "x",
            }
            return title

        write(1000, "an old story")
        daemon = make_daemon(hacker_news.HackerNews(settings, clock), settings, clock)
        drive(daemon, clock, 60)
        titles = [write(1001, "before"), write(1002, "before, too")]
        drive(daemon, clock, 60)
        if away != "connected":
            daemon.close()
        if away == "restarted":
            daemon = make_daemon(
                hacker_news.HackerNews(settings, clock), settings, clock
            )
        server.items.clear()
        titles += [write(number, f"after {number}") for number in range(900, 905)]
        drive(daemon, clock, 120)
        titles += [write(number, f"later {number}") for number in range(905, 910)]
        drive(daemon, clock, 120)
        daemon.close()
        titles.append(write(910, "the last"))
        drive(
            make_daemon(hacker_news.HackerNews(settings, clock), settings, clock),
            clock,
            120,
        )
    assert sorted(post["title"] for post in queued(redis)) == sorted(titles)
    assert daemon.status()["steps_back"] == 1


# Jetstream.


@pytest.mark.parametrize("away", ["connected", "cut", "restarted"])
def test_jetstream_an_hour_back_loses_and_repeats_no_post(
    redis: RedisServer, make: Make, away: str
) -> None:
    offset = [0.0]
    with Jetstream(clock=lambda: time.time() + offset[0]) as jetstream:
        daemon = make(jetstream.url)
        start(daemon, jetstream)
        sent = [jetstream.post(f"before {number}") for number in range(10)]
        run(daemon, lambda: daemon.status()["sent"] == 10, "the first posts are sent")
        if away != "connected":
            daemon.close()
        if away == "restarted":
            daemon = make(jetstream.url)
        already = daemon.status()["sent"]
        offset[0] = -3600.0
        sent += [jetstream.post(f"meanwhile {number}") for number in range(10)]
        if away != "connected":
            connected = len(jetstream.queries)
            run(
                daemon,
                lambda: len(jetstream.queries) > connected,
                ("the daemon is connected again"),
            )
        sent.append(jetstream.post("after"))
        run(
            daemon,
            lambda: daemon.status()["sent"] == already + 11,
            "all posts are sent",
        )
        daemon.close()
        again = make(jetstream.url)
        sent.append(jetstream.post("later"))
        run(again, lambda: again.status()["sent"] == 1, "a later daemon misses nothing")
        assert sorted(sent_ids(redis)) == sorted(sent)
        assert (daemon.status()["steps_back"], daemon.gaps, again.gaps) == (1, 0, 0)


# Redis, and what is stored with a time.


def test_a_killed_daemon_is_missed_though_redis_clock_went_back(
    redis: RedisServer,
) -> None:
    LiveState(redis.client, "scripted").store_status({"read": 1, "hindrance": ""})
    assert statuses(redis.client)["scripted"].running
    report = json.loads(str(redis.client.hget(LIVE_STATUS, "scripted")))
    redis.client.hset(
        LIVE_STATUS, "scripted", json.dumps(report | {"at": report["at"] + 3600})
    )
    assert not statuses(redis.client)["scripted"].running


@pytest.mark.parametrize(
    "value", ["nan", "1e300", *long_cases("", "x", "inf", "-1e300", "9" * 400)]
)
def test_odd_values_beside_a_position_count_as_unknown(
    redis: RedisServer, settings: Settings, value: str
) -> None:
    clock = SimulatedClock(1_800_000_000.0)
    station = Station(clock)
    daemon = make_daemon(TimedRadio(station), settings, clock)
    drive(daemon, clock, 60)
    daemon.close()
    redis.client.hset(
        LIVE_POSITION + "scripted", mapping={"stored_at": value, "began": value}
    )
    station.offset = -3600.0
    clock.wait(5)
    drive(daemon, clock, 60)
    check(redis, station)
    assert daemon.faults["unexpected"] == 0


def test_posts_of_a_deleted_account_are_searched_for_with_a_wrong_clock(
    redis: RedisServer, settings: Settings
) -> None:
    """The clock was two days back when the account was deleted."""
    clock = SimulatedClock()
    purges = Purges(redis.client, settings, "scripted", clock)
    post_id = "at://did:plc:a/app.bsky.feed.post/1"
    ResultsStore(redis.client, settings).write([result(post_id)])
    author = post_id.rpartition("/")[0] + "/"
    redis.client.zadd(
        LIVE_AUTHORS + "scripted", {author: clock.time() - 2 * AUTHOR_KEPT_S}
    )
    purges.run_if_due()
    assert purges.purged == 1
    assert not redis.client.exists(LIVE_AUTHORS + "scripted", LIVE_DELETED + "scripted")
