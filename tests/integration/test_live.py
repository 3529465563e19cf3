"""The framework for live sources, with a scripted source and a real Redis."""

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from feedmill.outcomes.dead_letters import DeadLetterStream
from feedmill.producers import hacker_news
from feedmill.producers.bluesky import BlueskySource
from feedmill.producers.live import daemon as live_daemon
from feedmill.producers.live.daemon import LiveDaemon
from feedmill.producers.live.rechecks import PURGE_INTERVAL_S
from feedmill.producers.live.source import Event, Source, SourceFailed
from feedmill.producers.live.state import (
    EXPECTED_S,
    STATUS_TTL,
    Gap,
    Gaps,
    LiveState,
    Position,
    statuses,
)
from feedmill.producers.push import Pusher
from feedmill.shared.backoff import Backoff
from feedmill.shared.broker import connect, make_app
from feedmill.shared.keys import LIVE_STATUS, TOMBSTONE
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import Settings
from tests.fakes.clock import SimulatedClock
from tests.support import RedisServer, queued


class Script(Source):
    """A source that yields given events, one list per call of `events`.

    An exception in a list is raised.
    """

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
    return Event(
        cursor, 1_800_000_000.0 + cursor, post={"id": f"s-{cursor}", "body": text}
    )


@pytest.fixture
def clock() -> SimulatedClock:
    """Return a clock after the times of the events that `post` makes."""
    return SimulatedClock(1_800_001_000.0)


def make(source: Source, settings: Settings, clock: SimulatedClock) -> LiveDaemon:
    client = connect(settings)
    pusher = Pusher(
        make_app(settings), client, settings, ClassifyOptions(), wait=clock.wait
    )
    return LiveDaemon(source, client, pusher, settings, clock)


def run(daemon: LiveDaemon, clock: SimulatedClock, seconds: float) -> None:
    until = clock.monotonic() + seconds
    while clock.monotonic() < until:
        clock.wait(max(0.1, min(daemon.step(), until - clock.monotonic())))


def ids(redis: RedisServer) -> list[str]:
    return [post["id"] for post in queued(redis)]


def test_failure_sends_what_was_read_and_resumes_before_it(
    redis: RedisServer, settings: Settings, clock: SimulatedClock
) -> None:
    source = Script(
        [post(1), post(2), post(3), SourceFailed("cut")],
        [post(1), post(2), post(3), post(4)],
    )
    daemon = make(source, settings, clock)
    daemon.step()
    assert ids(redis) == ["s-1", "s-2", "s-3"]
    assert LiveState(redis.client, "scripted").position() == Position(
        3, 1_800_000_003.0
    )
    run(daemon, clock, 10.0)
    assert source.asked == [None, 1]
    assert ids(redis) == ["s-1", "s-2", "s-3", "s-4"]
    assert (daemon.faults, daemon.hindrance, daemon.gaps) == ({"source": 1}, "", 0)


def test_pauses_grow_and_honour_the_sources_wish(
    settings: Settings, clock: SimulatedClock
) -> None:
    source = Script(
        *[[SourceFailed("down")]] * 6, [SourceFailed("too many", retry_after=900.0)]
    )
    daemon = make(source, settings, clock)
    pauses = []
    for _ in range(7):
        pauses.append(daemon.step())
        assert "scripted" in daemon.hindrance
        clock.wait(pauses[-1] / 2)
        assert daemon.step() == pytest.approx(pauses[-1] / 2), (
            "no attempt before its time"
        )
        clock.wait(pauses[-1] / 2 + 0.001)
    assert pauses[0] <= 2 < pauses[4]
    assert pauses[-1] == 900.0
    assert source.asked == [None] * 7


def test_unreachable_redis_closes_the_source_and_loses_nothing(
    redis: RedisServer,
    settings: Settings,
    clock: SimulatedClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Script([post(1), None, post(2)], [post(1), post(2)])
    daemon = make(source, settings, clock)
    daemon.step()
    with monkeypatch.context() as patched:
        # a hash
        patched.setattr(
            daemon._state,
            "advance",
            lambda *_: redis.client.incr("feedmill:live:status"),
        )
        assert daemon.step() > 0
    assert (source.closed, daemon.faults) == (1, {"redis": 1})
    assert settings.redis_address in daemon.hindrance
    run(daemon, clock, 10.0)
    assert source.asked == [None, -1]
    assert ids(redis) == ["s-1", "s-2"]


def test_position_never_moves_back(
    redis: RedisServer, settings: Settings, clock: SimulatedClock
) -> None:
    daemon = make(Script([post(5), None, post(4), None]), settings, clock)
    run(daemon, clock, 3.0)
    assert ids(redis) == ["s-5", "s-4"], "an event out of order is sent"
    assert LiveState(redis.client, "scripted").position() == Position(
        5, 1_800_000_005.0
    )


def test_missing_event_at_the_position_is_a_gap(
    redis: RedisServer, settings: Settings, clock: SimulatedClock
) -> None:
    LiveState(redis.client, "scripted").advance(Position(10, 1_800_000_010.0))
    first = make(Script([post(15)]), settings, clock)
    first.step()
    assert first.gaps == 1
    # A crash before the position is stored: the same gap, which has grown meanwhile.
    LiveState(redis.client, "scripted").advance(Position(10, 1_800_000_010.0))
    make(Script([post(20)]), settings, clock).step()
    (gap,) = Gaps(redis.client).all()
    assert gap == Gap("scripted", "", 1_800_000_010.0, 1_800_000_020.0, clock.time())


def test_status_expires(
    redis: RedisServer, settings: Settings, clock: SimulatedClock
) -> None:
    daemon = make(Script([post(1)]), settings, clock)
    run(daemon, clock, 15.0)
    found = statuses(redis.client)["scripted"]
    assert found.running
    assert (found.report["sent"], found.report["read"]) == (1, 1)
    now = int(redis.client.time()[0])
    for age, expected, running in (
        (STATUS_TTL + 5, True, False),
        (EXPECTED_S + 5, False, False),
    ):
        redis.client.hset(
            LIVE_STATUS, "scripted", json.dumps(found.report | {"at": now - age})
        )
        known = statuses(redis.client)
        assert ("scripted" in known) == expected
        assert [status.running for status in known.values()] == [running] * expected


# Events of strangers.

#: An event of next year.
FUTURE = Event(10**9, 1_830_000_000.0, post={"id": "future", "body": "a text"})


def letters(redis: RedisServer) -> list[tuple[str, str | None]]:
    """Return the reason and payload of each dead letter."""
    found = list(DeadLetterStream(redis.client).all())
    return [(each.letter.reason, each.letter.payload) for each in found]


def test_event_from_the_future_is_sent_and_is_no_position(
    redis: RedisServer, settings: Settings, clock: SimulatedClock
) -> None:
    source = Script(
        [post(1), FUTURE, post(2), SourceFailed("cut")],
        [post(1), FUTURE, post(2), post(3)],
    )
    daemon = make(source, settings, clock)
    run(daemon, clock, 10.0)
    assert ids(redis) == ["s-1", "future", "s-2", "s-3"]
    assert LiveState(redis.client, "scripted").position() == Position(
        3, 1_800_000_003.0
    )
    assert (daemon.status()["ahead"], daemon.gaps) == (2, 0)


def test_position_ahead_of_the_clock_waits_and_stays(
    redis: RedisServer, settings: Settings
) -> None:
    state = LiveState(redis.client, "scripted")
    state.advance(Position(4, 1_800_000_004.0))
    daemon = make(source := Script([post(5)]), settings, SimulatedClock(0.0))
    assert daemon.step() > 0
    assert "clock" in daemon.hindrance
    assert (source.asked, state.position()) == ([], Position(4, 1_800_000_004.0))
    clock = SimulatedClock(1_800_001_000.0)
    run(make(Script([post(4), post(5)]), settings, clock), clock, 3.0)
    assert ids(redis) == ["s-4", "s-5"]


@pytest.mark.parametrize("pause", [[], [None]])
def test_post_written_again_after_its_deletion_stays(
    redis: RedisServer, settings: Settings, clock: SimulatedClock, pause: list[Any]
) -> None:
    again = Event(3, 1_800_000_003.0, post={"id": "s-1", "body": "another text"})
    events = [post(1), *pause, Event(2, 1_800_000_002.0, deleted="s-1"), *pause, again]
    run(make(Script(events), settings, clock), clock, 2 * PURGE_INTERVAL_S)
    assert [each["body"] for each in queued(redis)][-1] == "another text"
    assert not redis.client.exists(TOMBSTONE + "s-1")


@pytest.mark.parametrize(
    "event",
    [
        Event(2, float("inf")),
        Event(2, 1.0, deleted="\ud800"),
        Event(2, 1.0, deleted_author="x" * 5000),
        "not an event",
    ],
)
def test_event_that_fails_twice_is_a_dead_letter(
    redis: RedisServer, settings: Settings, clock: SimulatedClock, event: Any
) -> None:
    events = [post(1), event, post(3)]
    daemon = make(Script(events, events), settings, clock)
    run(daemon, clock, 10.0)
    assert ids(redis) == ["s-1", "s-3"]
    assert (daemon.status()["unreadable"], daemon.faults) == (1, {"source": 1})
    ((reason, _),) = letters(redis)
    assert "scripted" in reason


def test_event_that_cannot_be_sent_is_a_dead_letter_and_others_are_sent(
    redis: RedisServer,
    settings: Settings,
    clock: SimulatedClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = [post(number) for number in range(1, 6)]
    daemon = make(Script(events, events), settings, clock)
    push = daemon._pusher.push

    def refuse(posts: Any) -> None:
        posts = list(posts)
        if any(each.id == "s-3" for each in posts):
            raise RuntimeError("a bug that this post meets")
        push(posts)

    monkeypatch.setattr(daemon._pusher, "push", refuse)
    run(daemon, clock, 10.0)
    assert ids(redis) == ["s-1", "s-2", "s-4", "s-5"]
    assert daemon.faults == {"unexpected": 1}
    ((_, payload),) = letters(redis)
    assert payload
    assert json.loads(payload)["post"]["id"] == "s-3"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=())),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """Draw a variant of an event: any of its parts may be missing or anything else."""
    if draw(st.integers(0, 9)) == 0:
        return draw(JSON)
    if isinstance(value, dict):
        return {
            key: draw(changed(each))
            for key, each in value.items()
            if draw(st.integers(0, 19))
        }
    return value


def bluesky_event(number: int, operation: str = "create") -> dict[str, Any]:
    record = {
        "text": "a text",
        "langs": ["en"],
        "createdAt": "2026-11-01T10:00:00Z",
        "embed": {"external": {"uri": "u"}},
    }
    commit = {
        "operation": operation,
        "collection": "app.bsky.feed.post",
        "rkey": str(number),
        "record": record,
    }
    return {
        "time_us": 1_800_000_000_000_000 + number,
        "did": "did:plc:a",
        "kind": "commit",
        "commit": commit,
    }


DELETED_ACCOUNT = {
    "time_us": 1_800_000_000_000_002, "did": "did:plc:b", "kind": "account",
    "account": {"active": False, "status": "deleted"},
}  # fmt: skip
STORY = {
    "type": "story",
    "time": 1_800_000_000,
    "title": "a title",
    "text": "a text",
    "url": "u",
    "score": 3,
}


class Stranger(NamedTuple):
    """A source with hostile events, which resemble `alike`. before, after: good events around
    them, with their ids.
    """

    before: Any
    after: Any
    ids: list[str]
    alike: list[Any]


STRANGERS = {
    "bluesky": Stranger(
        json.dumps(bluesky_event(1)),
        json.dumps(bluesky_event(3)),
        [f"at://did:plc:a/app.bsky.feed.post/{number}" for number in (1, 3)],
        [bluesky_event(2), bluesky_event(2, "delete"), DELETED_ACCOUNT],
    ),
    "hacker_news": Stranger(
        (1, STORY),
        (3, STORY),
        ["hn-1", "hn-3"],
        [[2, STORY], [2, STORY | {"deleted": True}]],
    ),
}


class Repeated(Script):
    """A source that repeats events at each connection, and reads them as another source does."""

    def __init__(self, source: Source, events: list[Any]) -> None:
        super().__init__(*[events] * 50)
        self.overlap = source.overlap
        self.parse = source.parse  # type: ignore[method-assign]


@pytest.mark.parametrize("examples", [25, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", STRANGERS)
def test_no_event_stops_a_source(
    name: str,
    examples: int,
    redis: RedisServer,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(
        live_daemon,
        "SOURCE_BACKOFF",
        Backoff(first_s=0.0, max_s=0.0),
    )
    caplog.set_level(logging.CRITICAL, "feedmill.producers.live")
    stranger = STRANGERS[name]
    make_source = {"bluesky": BlueskySource, "hacker_news": hacker_news.HackerNews}[
        name
    ]

    @hypothesis_settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(
        st.lists(
            st.sampled_from(stranger.alike).flatmap(changed), min_size=1, max_size=3
        )
    )
    @example([["", None]])
    def send(hostile: list[Any]) -> None:
        redis.client.flushall()
        clock = SimulatedClock(1_800_001_000.0)
        raws = map(json.dumps, hostile) if name == "bluesky" else hostile
        daemon = make(
            Repeated(
                make_source(settings, clock), [stranger.before, *raws, stranger.after]
            ),
            settings,
            clock,
        )
        run(daemon, clock, 10.0)
        assert [each for each in ids(redis) if each in stranger.ids] == stranger.ids
        assert daemon.hindrance == ""

    send()


class Edited(Script):
    """A source whose posts are edited before their recheck."""

    recheck_delays = (60.0,)

    def look_up(self, ids: Sequence[str]) -> dict[str, Event]:
        return {
            post_id: post(int(post_id.removeprefix("s-")), "edited") for post_id in ids
        }


def test_rechecks_resend_an_edited_post_given_by_its_fields(
    redis: RedisServer, settings: Settings, clock: SimulatedClock
) -> None:
    run(make(Edited([post(5)]), settings, clock), clock, 200.0)
    assert ids(redis) == ["s-5", "s-5"]
