"""What metrics, `feedmill health` and `status --watch` read off a real Redis."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import RedisError as RedisFault
from rich.console import Console

from feedmill import status_commands, watch
from feedmill.watch import RATE_WINDOW_S, Lookout, Pace, Part, examine
from producers.push import Pusher
from producers.reddit.state import Gap, State
from shared.broker import make_app, queue_depth
from shared.keys import COUNTERS, DEAD_LETTERS
from shared.messages import ClassifyOptions
from shared.metrics import QUEUE_OLDEST, RedisFigures, connect_briefly, oldest_seconds
from shared.serving import announce, register
from shared.settings import Settings
from tests.support import RedisServer, make_posts

pytestmark = pytest.mark.each_redis

POOL: dict[str, Any] = {
    "device": "cpu in bfloat16: as set", "model": "a model", "queues": ["feedmill"], "posts": 100,
    "device_seconds": 3.0, "rows_waiting": 1021, "oldest_row_seconds": 1.5, "padding_efficiency": 0.9,
    "recent": {"posts_per_second": 12.5, "device_busy": 0.97},
}  # fmt: skip


def told(settings: Settings) -> dict[str, float]:
    """The figures, by name and labels."""
    return {" ".join((figure.name, *labels)): value for figure, value, labels in RedisFigures(settings).samples()}  # type: ignore[misc]


def send(app: Celery, count: int = 1, priority: int = 0, queue: str | None = None, **headers: Any) -> None:
    for _ in range(count):
        app.send_task("feedmill.classify", kwargs={"posts": []}, priority=priority, queue=queue, headers=headers)


@pytest.fixture
def app(settings: Settings) -> Iterator[Celery]:
    app = make_app(settings)
    yield app
    app.close()


def test_all_priorities_and_what_is_held(redis: RedisServer, settings: Settings, app: Celery) -> None:
    send(app, 2)
    send(app, 3, priority=9)
    redis.client.hset("feedmill:reserved", "tag", "a message that a worker has")
    redis.client.hset(COUNTERS, mapping={"stored": 5, "failed": 2})
    found = told(settings)
    assert found["feedmill_redis_up"] == 1
    assert found["feedmill_queue_messages feedmill waiting"] == 5
    assert found["feedmill_queue_messages feedmill held"] == 1
    assert found["feedmill_queue_limit_messages feedmill"] == settings.queue_limit
    assert (found["feedmill_results_stored_total"], found["feedmill_results_failed_total"]) == (5, 2)
    assert found["feedmill_results_answered_total"] == 0


def test_every_known_queue_is_told(redis: RedisServer, settings: Settings, app: Celery) -> None:
    announce(redis.client, "other", "a model")
    send(app, queue="other", sent_at=time.time() - 50)
    redis.client.hset("feedmill:reserved", "tag", "a message that a worker has")
    found = told(settings)
    waiting = [found[f"feedmill_queue_messages {name} waiting"] for name in ("feedmill", "other")]
    assert waiting == [0, 1]
    assert found["feedmill_queue_limit_messages other"] == settings.queue_limit
    assert found[f"{QUEUE_OLDEST.name} other"] >= 50
    assert f"{QUEUE_OLDEST.name} feedmill" not in found
    assert found["feedmill_queue_messages feedmill held"] == 1
    assert "feedmill_queue_messages other held" not in found, "of any queue: told once"


def test_the_age_is_that_of_the_message_that_was_sent_first(settings: Settings, app: Celery) -> None:
    redis, now = connect_briefly(settings), time.time()
    assert oldest_seconds(redis, settings.queue) is None
    assert QUEUE_OLDEST.name not in told(settings)
    send(app)
    assert oldest_seconds(redis, settings.queue) is None, "a message of somebody who does not say when"
    send(app, priority=3, sent_at=now - 100)
    send(app, priority=3, sent_at=now - 50)
    send(app, priority=9, sent_at=now - 1000)
    found = oldest_seconds(redis, settings.queue)
    assert found
    assert 1000 <= found < 1060
    assert found <= told(settings)[f"{QUEUE_OLDEST.name} feedmill"]


def test_a_clock_that_is_ahead(settings: Settings, app: Celery) -> None:
    send(app, sent_at=time.time() + 1000)
    assert oldest_seconds(connect_briefly(settings), settings.queue) == 0


def test_no_message_is_fetched_for_its_age(redis: RedisServer, settings: Settings) -> None:
    """However large a message is, and whatever its posts say."""
    posts = [post.model_copy(update={"body": '"sent_at": 1.0 ' * 2_000}) for post in make_posts(100)]
    plain = settings.model_copy(update={"compression": "none"})
    Pusher(make_app(plain), connect_briefly(plain), plain, ClassifyOptions()).push(posts)
    (message,) = redis.client.lrange(settings.queue, -1, -1)
    before = int(redis.client.info("stats")["total_net_output_bytes"])
    age = oldest_seconds(connect_briefly(settings), settings.queue)
    fetched = int(redis.client.info("stats")["total_net_output_bytes"]) - before
    assert age is not None
    assert age < 600
    assert fetched < 20_000 < len(message)


def test_what_is_no_message_of_kombus(redis: RedisServer, settings: Settings) -> None:
    redis.client.lpush(settings.queue, "\xff\xfe{", "", '{"headers": {"sent_at": "soon"}}')
    assert oldest_seconds(connect_briefly(settings), settings.queue) is None


def test_without_redis_that_is_all_there_is_to_tell() -> None:
    away = Settings.model_validate({"redis_url": "redis://:hunter2@127.0.0.1:1/0"})
    assert told(away) == {"feedmill_redis_up": 0}
    (sentence,) = RedisFigures(away).away()
    assert sentence.startswith("Redis at 127.0.0.1:1/0 is unreachable (")
    assert "hunter2" not in sentence


def test_a_redis_that_was_started_again_is_met_at_once(redis: RedisServer, settings: Settings) -> None:
    figures = RedisFigures(settings)
    assert figures.away() == []
    redis.client.client_kill_filter(_type="normal", skipme=True)
    assert figures.away() == []


# Health.


def findings(settings: Settings, *parts: Part) -> dict[Part, tuple[bool, str]]:
    return {finding.part: (finding.well, finding.said) for finding in examine(settings, parts or tuple(Part))}


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """What the workers answer."""
    workers = {"one@here": dict(POOL)}
    monkeypatch.setattr(watch, "worker_statistics", lambda *_: workers)
    return workers


@pytest.mark.usefixtures("workers")
def test_all_is_well(settings: Settings) -> None:
    found = findings(settings)
    assert list(found) == list(Part)
    assert all(well for well, _ in found.values())
    assert found[Part.WORKERS][1] == "one@here"
    assert found[Part.ROWS][1] == "oldest row has waited 1.5 s"
    assert found[Part.REDDIT][1] == "not in use; `feedmill ingest reddit` starts the daemon"


def test_no_worker(settings: Settings, workers: dict[str, Any]) -> None:
    workers.clear()
    found = findings(settings)
    assert found[Part.WORKERS] == (False, "none answers: start one with `feedmill worker`")
    assert found[Part.ROWS] == (True, "no rows are waiting in workers")


def test_a_worker_that_is_stuck(settings: Settings, workers: dict[str, Any]) -> None:
    workers["two@here"] = POOL | {"oldest_row_seconds": 301.0}
    assert findings(settings)[Part.ROWS] == (
        False,
        "rows waiting longer than FEEDMILL_FORWARD_TIMEOUT: two@here (301 s)",
    )


def test_rows_of_a_worker_that_does_not_answer_are_unknown(
    redis: RedisServer, settings: Settings, workers: dict[str, Any]
) -> None:
    register(redis.client, "two@here")
    assert findings(settings)[Part.ROWS] == (False, "unknown: no answer from two@here")
    workers.clear()
    assert findings(settings)[Part.ROWS] == (False, "unknown: no answer from two@here")


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(("waiting", "well"), [(3, True), (4, False)])
def test_a_queue_above_its_limit(settings: Settings, app: Celery, waiting: int, well: bool) -> None:
    send(app, waiting)
    found = findings(settings.model_copy(update={"queue_limit": 3}), Part.QUEUE)
    assert found == {Part.QUEUE: (well, f"{waiting} messages waiting, limit 3; 0 in flight")}


@pytest.mark.usefixtures("workers")
def test_each_queue_has_its_limit(redis: RedisServer, settings: Settings, app: Celery) -> None:
    announce(redis.client, "other", "a model")
    send(app, 3)
    send(app, 2, queue="other")
    for count, well in ((3, True), (4, False)):
        send(app, queue="other")
        assert findings(settings.model_copy(update={"queue_limit": 3}), Part.QUEUE)[Part.QUEUE] == (
            well,
            f"{3 + count} messages waiting (feedmill: 3, other: {count}), limit 3 per queue; 0 in flight",
        )


def test_the_daemon(settings: Settings) -> None:
    state = State(connect_briefly(settings))
    state.begin({"cooking": 1.0}, [])
    well, said = findings(settings, Part.REDDIT)[Part.REDDIT]
    assert not well
    assert "120 s: start it with `feedmill ingest reddit`" in said
    state.tell({"subreddits": 48, "hindrance": ""})
    assert findings(settings, Part.REDDIT)[Part.REDDIT] == (True, "the daemon reads 48 subreddits")
    state.tell({"subreddits": 48, "hindrance": "Reddit answered 500"})
    assert findings(settings, Part.REDDIT)[Part.REDDIT][0], "Reddit's own troubles are not ours"


def test_workers_are_asked_only_where_it_matters(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(watch, "worker_statistics")
    assert list(findings(settings, Part.REDIS, Part.QUEUE)) == [Part.REDIS, Part.QUEUE]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://127.0.0.1:1/0", "Redis at 127.0.0.1:1/0 is unreachable"),
        ("redis://:wrong@", "password"),
    ],
)
def test_without_redis_nothing_is_known(redis: RedisServer, url: str, words: str) -> None:
    url = f"{url}{redis.url.partition('@')[2]}" if url.endswith("@") else url
    found = findings(Settings.model_validate({"redis_url": url}), Part.QUEUE)
    assert list(found) == [Part.REDIS]
    assert not found[Part.REDIS][0]
    assert words in found[Part.REDIS][1]


# Watching.


def test_a_pace_is_that_of_the_last_minute() -> None:
    pace = Pace()
    assert pace.look(100, now=1000.0) is None
    assert pace.look(120, now=1002.0) == 10
    assert pace.look(120, now=1000.0 + RATE_WINDOW_S) == pytest.approx(20 / RATE_WINDOW_S)
    assert pace.look(180, now=1002.0 + RATE_WINDOW_S) == pytest.approx(60 / RATE_WINDOW_S)
    assert pace.look(5, now=1004.0 + RATE_WINDOW_S) is None, "a new worker of that name"
    assert pace.look(7, now=1006.0 + RATE_WINDOW_S) == 1


def test_looks_and_what_came_in_between(
    redis: RedisServer, settings: Settings, app: Celery, workers: dict[str, Any]
) -> None:
    lookout = Lookout(settings)
    first = lookout.look()
    assert (first.results, first.posts, first.busy) == (None, {}, {})
    send(app, sent_at=time.time() - 90)
    redis.client.hset(COUNTERS, "stored", 50)
    State(redis.client).begin({}, [Gap("cooking", 1.0, 2.0, 3.0)])
    workers["one@here"] = POOL | {"posts": 140, "device_seconds": 3.5}
    workers["two@here"] = POOL
    second = lookout.look()
    assert second.results
    assert second.posts["one@here"] == pytest.approx(second.results * 40 / 50)
    assert second.busy["one@here"] == pytest.approx(second.results * 0.5 / 50)
    assert "two@here" not in second.posts
    assert (second.status.gaps, second.status.queue.waiting) == (1, 1)
    assert second.status.oldest_seconds
    del workers["one@here"]
    assert list(lookout.look().posts) == ["two@here"]
    workers["one@here"] = POOL
    assert "one@here" not in lookout.look().busy, "it is another one now"


def screen(seen: Any, settings: Settings) -> str:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(status_commands._screen(seen, settings))
    return captured.get()


def test_the_screen(redis: RedisServer, settings: Settings, workers: dict[str, Any]) -> None:
    for number in range(20):
        workers[f"feedmill-{number}@a-machine-with-quite-a-long-name.example.org"] = POOL
    redis.client.hset(COUNTERS, mapping={"stored": 12_345_678, "dead_trimmed": 12_345, "answered": 90, "repeated": 9})
    redis.client.xadd(DEAD_LETTERS, {"letter": "{}"})
    State(redis.client).begin({}, [Gap("cooking", 1.0, 2.0, 3.0)])
    State(redis.client).tell({
        "subreddits": 48, "topics": 16, "sent": 1_234_567, "paused": True, "held": 5_000, "failing": ["x"], "gaps": 3,
        "hindrance": "Reddit answered 500", "purged": 12, "requests": 34_567, "budget": 861.0,
    })  # fmt: skip
    shown = screen(Lookout(settings).look(), settings)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 14 + len(workers)
    for words in ("0 messages waiting", "12,345,678 stored · 99 duplicates",
                  "1, 12,345 older ones trimmed · `feedmill dead list`", "1 · `feedmill ingest gaps`",
                  "PAUSED", "1,021", "0.97", "12.5"):  # fmt: skip
        assert words in shown
    workers.clear()
    assert "no worker answers: start one with `feedmill worker`" in screen(Lookout(settings).look(), settings)


@pytest.mark.usefixtures("workers")
def test_a_look_and_the_screen_have_the_same_words(redis: RedisServer, settings: Settings, app: Celery) -> None:
    send(app, 2, sent_at=time.time() - 3000)
    redis.client.hset(COUNTERS, mapping={"stored": 22, "answered": 22})
    seen = Lookout(settings).look()
    for shown in (screen(seen, settings), status_commands._summary(seen.status)):
        lines = {name: told for name, _, told in (line.partition("  ") for line in shown.splitlines())}
        assert lines["queue"].strip() == "2 messages waiting · 0 held by workers · oldest sent 50 min ago"
        assert lines["results"].strip().removeprefix("… a minute · ") == "22 stored · 22 duplicates"
        assert lines["dead letters"].strip() == "0"


@pytest.mark.usefixtures("workers")
def test_several_queues_are_shown_each_with_its_model(redis: RedisServer, settings: Settings, app: Celery) -> None:
    announce(redis.client, "other", "a model \x1b")
    send(app, queue="other", sent_at=time.time() - 90)
    send(app, 2, sent_at=time.time())
    seen = Lookout(settings).look()
    assert seen.status.queue.waiting == 3
    assert seen.status.oldest_seconds
    assert seen.status.oldest_seconds >= 90
    assert json.loads(json.dumps(seen.status.as_json()))["queues"]["other"]["waiting"] == 1
    for shown in (screen(seen, settings), status_commands._summary(seen.status)):
        assert "feedmill: 2 waiting for no model yet\n" in re.sub(" +\n", "\n", shown)
        assert "other: 1 waiting for a model \\x1b (no worker)" in shown


def test_no_queue_is_without_a_worker_while_workers_cannot_be_asked(
    redis: RedisServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(redis.client, "other", "a model")
    monkeypatch.setattr(watch, "_ask", lambda *_: None)
    seen = Lookout(settings).look()
    for shown in (screen(seen, settings), status_commands._summary(seen.status)):
        assert "other: 0 waiting for a model" in shown
        assert "(no worker)" not in shown


def test_redis_may_go_and_come_while_somebody_watches(
    settings: Settings, workers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[RedisFault | None] = [None, ConnectionFault("gone"), None]
    depth = queue_depth

    def flaky(*arguments: Any) -> Any:
        if fault := answers.pop(0):
            raise fault
        return depth(*arguments)

    monkeypatch.setattr(watch, "queue_depth", flaky)
    monkeypatch.setattr(status_commands, "REFRESH_INTERVAL_S", 0.0)
    looks = status_commands._snapshots(settings)
    assert list(next(looks).status.workers) == list(workers)  # type: ignore[union-attr]
    away = next(looks)
    assert away == f"Redis at {settings.redis_address} is unreachable (gone)"
    assert "is unreachable (gone)" in screen(away, settings)
    assert json.dumps(next(looks).status.as_json())  # type: ignore[union-attr]
