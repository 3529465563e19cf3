"""Failures of Reddit, of Redis and of the daemon itself lose no post."""

from contextlib import suppress
from threading import Event

import pytest

from feedmill.producers.live import http
from feedmill.producers.live.rechecks import Rechecks
from feedmill.producers.live.source import RequestFailed, with_retries
from feedmill.producers.live.state import statuses
from feedmill.testing.fake_reddit import Reddit as LoopbackReddit
from feedmill.testing.loopback import Handler, Loopback
from tests.fakes import constants
from tests.fakes.clock import SimulatedClock
from tests.integration.reddit.house import HOUR, MINUTE, TOPICS, House
from tests.support import long_cases


@pytest.mark.parametrize(
    "fault",
    [
        "too_many_bare", "server_error_503", "html_403", "token_expired", "cut_body",
        "empty_listing", "sticky_head",
        *long_cases(
            "html", "redirect_nowhere", "remaining_nan", "no_data", "truncated_json", "slow_body",
        ),
    ],
)  # fmt: skip
def test_reddit_faults_lose_no_post(house: House, fault: str) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    house.loopback.faults.next(fault, times=2, where="/r/", seconds=3)
    expected = house.publish("cooking", 3) + house.publish(
        "tennis", 120
    )  # more than a page
    house.run(daemon, 20 * MINUTE)
    assert house.loopback.ledger.faults[fault] == 2
    assert set(house.ids()) >= set(expected)
    assert len(house.ids()) == len(set(house.ids()))
    assert daemon.status()["failing"] == []
    assert daemon.hindrance == ""


def test_a_failing_subreddit_does_not_stop_the_others(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    house.loopback.faults.always("server_error_500", where="cooking")
    kept = house.publish("cooking", 2)
    others = house.publish("baking", 2) + house.publish("tennis", 2)
    house.run(daemon, 5 * MINUTE)
    assert set(others) <= set(house.ids())
    assert daemon.status()["failing"] == ["cooking"]
    house.loopback.faults.clear()
    house.run(daemon, 20 * MINUTE)
    assert set(kept) <= set(house.ids())
    assert daemon.status()["failing"] == []


def test_counts_failures_of_pages_that_were_read_again(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    house.loopback.faults.next("server_error_503", where="after=")
    house.publish("cooking", 250)
    house.run(daemon, 5 * MINUTE)
    assert daemon.status()["faults"] == {"RequestFailed": 1}


def test_waits_as_long_as_a_429_demands(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    house.loopback.faults.next("too_many", seconds=300)
    begun = house.loopback.ledger.total
    house.run(daemon, 400)
    times = [request.at for request in list(house.loopback.ledger.requests)[begun:]]
    assert times[1] - times[0] >= 300
    assert times[1] - times[0] < 320


def test_a_429_delays_a_single_pass_by_an_hour_at_most(house: House) -> None:
    house.loopback.faults.next("too_many", seconds=1e300)
    assert with_retries(lambda: house.reddit().page(["cooking"]), house.clock).items
    assert house.clock.waits == [3600.0]


def test_stays_within_reddits_rate_limit(house: House, clock: SimulatedClock) -> None:
    with LoopbackReddit(clock=clock.time, window=600, budget=25) as strict:
        for names in TOPICS.values():
            for name in names:
                strict.add_subreddit(name)
                strict.publish(name, title="one")
        house.read_from(constants.reddit(strict.url))
        daemon = house.daemon(reddit_poll_interval=5.0)
        house.run(daemon, HOUR)
        assert strict.ledger.over_budget == 0
        assert strict.ledger.total > 6 * 15


def test_backs_off_while_reddit_is_unreachable(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    # the discard port, where nothing listens
    house.read_from(constants.reddit("http://127.0.0.1:9"))
    daemon = house.daemon()
    house.run(daemon, HOUR)
    assert daemon.hindrance
    assert (
        5
        <= len(
            [
                record
                for record in caplog.records
                if daemon.hindrance in record.getMessage()
            ]
        )
        <= 30
    )


def test_keeps_reporting_while_waiting_for_reddit(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    house.loopback.faults.always("too_many", seconds=1800)
    house.run(daemon, 20 * MINUTE)
    # The status has the time of Redis' clock, which is not simulated.
    assert statuses(house.redis.client)["reddit"].report["hindrance"]


def test_cuts_off_a_response_that_never_ends(house: House) -> None:
    """Occasional single bytes keep each read from timing out."""
    asked: list[str] = []

    class Dripping(Handler):
        def respond(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while True:
                    self.wfile.write(b" ")
                    Event().wait(0.05)

    house.patch.setattr(http, "READ_TIMEOUT_S", 0.5)
    with Loopback(Dripping) as server:
        house.read_from(constants.reddit(server.url))
        with pytest.raises(RequestFailed):
            house.reddit().page(["cooking"])
    assert len(asked) == 1


@pytest.mark.each_redis
def test_loses_nothing_while_redis_rejects_writes(house: House) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    expected = house.publish("cooking", 3)
    house.redis.client.config_set("maxmemory", 1)
    try:
        house.run(daemon, 5 * MINUTE)
        assert "Redis" in daemon.hindrance
    finally:
        house.redis.client.config_set("maxmemory", 0)
    house.run(daemon, 5 * MINUTE)
    assert set(expected) <= set(house.ids())
    assert daemon.hindrance == ""


def test_a_bug_in_one_job_does_not_stop_the_others(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = house.daemon()
    house.run(daemon, 2 * MINUTE)
    expected = house.publish("cooking")
    with monkeypatch.context() as patched:
        patched.setattr(Rechecks, "run", lambda *_: 1 / 0)
        house.run(daemon, 5 * MINUTE)
    assert set(expected) <= set(house.ids())
    assert daemon.status()["faults"]["unexpected"] > 1
