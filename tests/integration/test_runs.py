"""Runs: ids belong to their run, and the progress of a run is counted exactly once."""

from collections.abc import Sequence
from typing import Any

import pytest

from feedmill.outcomes.dead_letters import DeadLetterStream
from feedmill.producers.push import Pusher
from feedmill.shared import runs
from feedmill.shared.broker import make_app
from feedmill.shared.errors import UserError
from feedmill.shared.keys import COUNTERS, RESULTS_STREAM, RUN, RUNS
from feedmill.shared.messages import (
    MAX_RUN,
    ClassifyOptions,
    DeadLetter,
    Post,
    fingerprint,
    parse_run,
    run_of,
)
from feedmill.shared.model_routing import RequestedModel, request_model
from feedmill.shared.purge import Counts, clear, purge, purge_run, read_list
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from tests.support import (
    RedisServer,
    find,
    has_results,
    latest,
    make_classification,
    sent_count,
    sent_marks,
)


@pytest.fixture
def store(server: RedisServer, settings: Settings) -> ResultsStore:
    return ResultsStore(server.client, settings)


def post(post_id: str, run: str | None = None, title: str = "a title") -> Post:
    return Post(id=post_id, title=title, run=run)


def result(of: Post, at: float = 1.0) -> Result:
    classification = make_classification(
        of.id, fingerprint=fingerprint(of, "recipe"), classified_at=at
    )
    return Result(of, classification)


def test_sending_keeps_the_descriptions_of_labels(
    server: RedisServer, settings: Settings
) -> None:
    described = {"Garten": ("plants and flowers",), "Sport": ("teams", "matches")}
    options = ClassifyOptions(labels=described)
    app = make_app(settings, current=False)
    for run, sent in (("described", options), ("plain", ClassifyOptions())):
        pusher = Pusher(app, server.client, settings, sent, run=run)
        pusher.push([post("1", run)])
    assert runs.kept_labels(server.client, "described") == described
    assert runs.kept_labels(server.client, "plain") is None
    progress = runs.progress(server.client, "described")
    assert progress is not None
    assert (progress.sent, progress.columns) == (1, ())


def test_labels_are_added_to_what_is_known_of_a_run(server: RedisServer) -> None:
    runs.keep_columns(server.client, "earlier", ["Nr"], 60)
    server.client.hset(f"{RUN}earlier", "sent", 5)
    runs.keep_labels(server.client, "earlier", {"Garten": ("plants",)}, 60)
    progress = runs.progress(server.client, "earlier")
    assert progress is not None
    assert (progress.sent, progress.columns) == (5, ("Nr",))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', '"' + 70_000 * "a" + '"'])
def test_invalid_labels_of_a_run_count_as_absent(
    server: RedisServer, text: str
) -> None:
    server.client.hset(f"{RUN}odd", "labels", text)
    assert runs.kept_labels(server.client, "odd") is None


def letter(of: Post) -> DeadLetter:
    return DeadLetter(
        id=of.id, reason="no", post=of.model_dump_json(exclude_defaults=True), options="{}",
        message="m", worker="w",
        failed_at=1.0, run=of.run,
    )  # fmt: skip


def push(
    server: RedisServer,
    settings: Settings,
    posts: Sequence[Post],
    run: str | None,
    **options: Any,
) -> Pusher:
    pusher = Pusher(
        make_app(settings),
        server.client,
        settings,
        ClassifyOptions(),
        run=run,
        **options,
    )
    pusher.push(posts)
    return pusher


def counts(server: RedisServer, run: str) -> tuple[int, int, int]:
    found = runs.progress(server.client, run)
    assert found
    return found.sent, found.stored, found.failed


def test_progress_counts_each_post_once(
    server: RedisServer, settings: Settings, store: ResultsStore
) -> None:
    posts = [post(str(number), "monday") for number in range(5)]
    push(server, settings, posts, "monday")
    push(server, settings, posts, "monday", again=True)
    results = [result(each) for each in posts[:3]]
    for _ in range(2):  # a redelivery
        store.write(results, [letter(posts[3])])
    assert counts(server, "monday") == (5, 3, 1)
    assert int(server.client.hget(COUNTERS, "stored") or 0) == 3
    found = runs.progress(server.client, "monday")
    assert found
    assert (found.settled, found.pending) == (4, 1)
    assert found.began <= found.latest
    assert 0 <= found.used <= found.latest - found.began + 0.001


def test_rates_leave_out_pauses(
    server: RedisServer, settings: Settings, store: ResultsStore
) -> None:
    push(server, settings, [post("0", "a"), post("1", "a"), post("2", "a")], "a")

    def write(number: int, ago_ms: int) -> runs.Progress:
        """Store a result `ago_ms` milliseconds after the run's latest activity."""
        latest = int(server.client.hget(RUN + "a", "latest") or 0)
        server.client.hset(RUN + "a", "latest", latest - ago_ms)
        store.write([result(post(str(number), "a"))])
        found = runs.progress(server.client, "a")
        assert found
        return found

    assert write(0, 3_600_000).used == 0
    found = write(1, 10_000)
    assert 10 <= found.used < 70
    assert found.rate == 2 / found.used
    assert found.seconds_left == found.used / 2
    assert not runs.is_waiting(found, found.latest + 1)
    assert runs.is_waiting(found, found.latest + 61)


def test_a_retried_dead_letter_is_no_longer_a_failure(
    server: RedisServer, store: ResultsStore
) -> None:
    store.write([], [letter(post("0", "a"))])
    (entry,) = DeadLetterStream(server.client).newest(9)
    for _ in range(2):
        DeadLetterStream(server.client).remove_retried(entry)
    assert counts(server, "a") == (0, 0, 0)
    assert list(DeadLetterStream(server.client).all()) == []


def test_lists_a_bounded_number_of_runs_that_expire(
    server: RedisServer, settings: Settings
) -> None:
    server.client.zadd(
        RUNS, {f"earlier {number}": number for number in range(runs.MAX_RUNS)}
    )
    push(server, settings, [post("0")], "run 4")
    assert server.client.zcard(RUNS) == runs.MAX_RUNS
    assert server.client.zscore(RUNS, "earlier 0") is None
    assert 0 < server.client.ttl(RUN + "run 4") <= settings.sent_ttl
    assert 0 < server.client.ttl(RUNS) <= settings.sent_ttl
    assert all(find(str(key)) for key in server.client.scan_iter())


def test_a_purge_finds_a_post_in_every_run(
    server: RedisServer, settings: Settings, store: ResultsStore
) -> None:
    for run in ("a", "b"):
        push(server, settings, [post("0"), post("1")], run)
        store.write(
            [result(post("0", run)), result(post("1", run))], [letter(post("0", run))]
        )
    found = purge(server.client, settings, ["0"])
    assert found == Counts(sent=1, results=2, entries=2, dead_letters=2, messages=2)
    assert not has_results(server.client, "0")
    assert not sent_marks(server.client, "0")
    assert {found.post.id for found in latest(store, 9)} == {"1"}


def test_clearing_removes_a_message_that_a_purge_changes_meanwhile(
    server: RedisServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings.model_copy(update={"posts_per_message": 2})
    push(server, settings, [post(f"t3_{number}") for number in range(60)], None)
    others = iter(["t3_58"])

    def read(*given: Any) -> list[bytes]:
        found = read_list(*given)
        purge(server.client, settings, others)
        return found

    monkeypatch.setattr("feedmill.shared.purge.read_list", read)
    assert clear(server.client, settings)["messages"] == 30
    assert not server.client.llen(settings.queue)


@pytest.mark.parametrize(
    "name", ["", "  ", "a\nb", "\x1b[31m", "x" * (MAX_RUN + 1), "a\u202eb"]
)
def test_refuses_names_that_cannot_be_shown(name: str) -> None:
    with pytest.raises(UserError):
        parse_run(name)
    assert run_of({"run": name}) is None


def test_clearing_forgets_posts_sent_before_a_deployment(
    server: RedisServer, settings: Settings
) -> None:
    posts = [post("0", "a"), post("1", "a")]
    push(server, settings, posts, "a")
    request_model(server.client, settings.queue, RequestedModel("/models/a", "00", 1.0))
    assert clear(server.client, settings) == Counts(messages=1, posts=2)
    assert counts(server, "a") == (0, 0, 0)
    request_model(server.client, settings.queue, None)
    assert push(server, settings, posts, "a").sent == 2


def test_purging_a_run_keeps_the_posts_of_other_runs(
    server: RedisServer, settings: Settings, store: ResultsStore
) -> None:
    for run in ("a", "b"):
        of_run = [post(str(number), run) for number in range(40)]
        push(server, settings, of_run, run)
        store.write(
            [result(each) for each in of_run[:30]],
            [letter(each) for each in of_run[30:33]],
        )
    store.write([result(post("0"))])
    found = purge_run(server.client, settings, "a")
    assert found == Counts(
        results=30, dead_letters=3, messages=2, waiting=40, outside=0
    )
    assert {each.post.run for each in latest(store, 99)} == {"b", None}
    assert len(store.get("0")) == 2
    assert len(store.get("1")) == 1
    dead = DeadLetterStream(server.client)
    assert len(list(dead.newest(99))) == len(list(dead.newest(99, "b"))) == 3
    assert [each.run for each in runs.recent(server.client, 9)] == ["b"]
    assert purge_run(server.client, settings, "a") == Counts()
    assert (
        push(
            server, settings, [post(str(number), "b") for number in range(40)], "b"
        ).sent
        == 0
    )
    assert counts(server, "b") == (40, 30, 3)
    assert (
        push(
            server, settings, [post(str(number), "a") for number in range(40)], "a"
        ).sent
        == 40
    )


def test_a_purged_run_can_be_sent_again(
    server: RedisServer, settings: Settings, store: ResultsStore
) -> None:
    posts = [post("0", "a"), post("t3_x", "a")]
    push(server, settings, posts, "a")
    store.write([result(each) for each in posts])
    clear(server.client, settings)
    push(server, settings, posts, "a")
    purge_run(server.client, settings, "a")
    assert not any(store.get(each.id) for each in posts)
    assert sent_count(server.client) == 0
    assert push(server, settings, posts, "a").sent == 2


def test_purging_a_run_counts_results_outside_of_the_stream(
    server: RedisServer, settings: Settings, store: ResultsStore
) -> None:
    store.write([result(post(str(number), "a")) for number in range(3)])
    server.client.xtrim(RESULTS_STREAM, maxlen=1, approximate=False)
    found = purge_run(server.client, settings, "a")
    assert (found["results"], found["outside"]) == (1, 2)


def test_purging_a_run_leaves_messages_of_several_runs(
    server: RedisServer, settings: Settings
) -> None:
    push(server, settings, [post("0", "a"), post("1", "b")], None)
    assert purge_run(server.client, settings, "a")["messages"] == 0
    assert server.client.llen(settings.queue) == 1
