"""producers/push.py on a real Redis: what is sent, what is skipped, and waiting for a full
queue.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import INVALID_SPAN_CONTEXT
from redis.connection import AbstractConnection
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import OutOfMemoryError

from feedmill.producers import push
from feedmill.producers.push import Pusher
from feedmill.shared import broker, tracing
from feedmill.shared.broker import connect, make_app, queue_depth
from feedmill.shared.keys import REQUESTED_MODELS, TOMBSTONE
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.model_routing import RequestedModel, request_model
from feedmill.shared.purge import forget
from feedmill.shared.scripts import load_functions
from feedmill.shared.settings import Settings
from tests.support import RedisServer, find, make_posts, queued, sent_count, sent_marks

pytestmark = pytest.mark.each_redis


def pusher(settings: Settings, again: bool = False, **options: Any) -> Pusher:
    return Pusher(
        make_app(settings),
        connect(settings),
        settings,
        ClassifyOptions.parse(options),
        again,
    )


def ids(redis: RedisServer) -> list[str]:
    """Return the ids of the posts in the queue."""
    return [post["id"] for post in queued(redis)]


def messages(redis: RedisServer) -> list[dict[str, Any]]:
    return [json.loads(raw) for raw in redis.client.lrange("feedmill", 0, -1)]


def test_skips_a_duplicate_of_a_message_just_sent(settings: Settings) -> None:
    """Redis does not know the posts of a message that is still being filled; the pusher must
    remember them.
    """
    small = settings.model_copy(update={"posts_per_message": 4})
    pusher(small).push(make_posts(1))
    pushing = pusher(small)
    known, *new = make_posts(8)
    pushing.push([known, *new[:3], new[3], new[0], new[3], new[4]])
    assert (pushing.sent, pushing.skipped) == (5, 3)


@pytest.mark.parametrize("what", ["text", "labels", "again"])
def test_sends_again_after_changed_text_or_labels_or_with_again(
    settings: Settings, what: str
) -> None:
    post = Post(id="1", title="one")
    pusher(settings).push([post])
    second = pusher(
        settings,
        again=what == "again",
        **({"labels": "a,b"} if what == "labels" else {}),
    )
    second.push([Post(id="1", title="two") if what == "text" else post])
    assert second.sent == 1


def test_each_queue_has_its_own_gate_and_marks(
    settings: Settings, redis: RedisServer
) -> None:
    other = settings.model_copy(update={"queue": "feedmill-other", "queue_limit": 3})
    for each, sent in ((settings, 40), (other, 40), (settings, 0), (other, 0)):
        pushing = pusher(each)
        pushing.push(make_posts(40))
        assert pushing.sent == sent
    assert [
        queue_depth(redis.client, name).waiting
        for name in ("feedmill", "feedmill-other")
    ] == [2, 2]
    assert pusher(other).room() == 1
    assert all(find(str(key)) for key in redis.client.scan_iter()), (
        "all keys are in docs/reference/keys.md"
    )


def test_a_newly_deployed_model_gets_posts_that_were_sent_before(
    settings: Settings, redis: RedisServer
) -> None:
    pushing = pusher(settings)
    for weights, sent in (
        (None, 40),
        (None, 40),
        ("00", 80),
        ("00", 80),
        ("11", 120),
        (None, 120),
        ("00", 120),
    ):
        asked = RequestedModel("/models/a", weights, 1.0) if weights else None
        request_model(redis.client, settings.queue, asked)
        pushing.push(make_posts(40))
        assert pushing.sent == sent
    redis.client.hset(REQUESTED_MODELS, settings.queue, "invalid")
    pushing.push(make_posts(40))
    assert pushing.sent == 120


@pytest.mark.parametrize(
    ("priority", "name"),
    [(0, "feedmill"), (4, "feedmill\x06\x163"), (9, "feedmill\x06\x169")],
)
def test_each_priority_has_its_own_list(
    settings: Settings, redis: RedisServer, priority: int, name: str
) -> None:
    pusher(settings.model_copy(update={"priority": priority})).push(make_posts(1))
    assert redis.client.llen(name) == 1
    (message,) = map(json.loads, redis.client.lrange(name, 0, -1))
    assert message["properties"]["priority"] == priority


def test_message_headers_follow_the_protocol_and_hide_posts(
    settings: Settings, redis: RedisServer
) -> None:
    pusher(settings, labels="a,b").push([Post(id="1", title="secret words")])
    (message,) = messages(redis)
    headers = message["headers"]
    assert headers["task"] == "feedmill.classify"
    assert headers["ignore_result"] is True
    assert headers["sent_at"] > 1e9
    assert "secret" not in json.dumps(headers)
    assert message["content-type"] == "application/json"


def gate(
    redis: RedisServer, settings: Settings, **limits: int
) -> tuple[Pusher, Callable[[int], int]]:
    """Return a pusher, and a function that sets the number of waiting messages and returns the
    pusher's room.
    """
    made = pusher(settings.model_copy(update=limits))

    def room(waiting: int) -> int:
        redis.client.delete("feedmill")
        if waiting:
            redis.client.lpush("feedmill", *["message"] * waiting)
        return made.room()

    return made, room


def test_gate_closes_at_the_limit_and_reopens_below_resume(
    settings: Settings, redis: RedisServer
) -> None:
    made, room = gate(redis, settings, queue_limit=10)
    assert not made.is_closed
    assert [room(0), room(9)] == [10, 1]
    for waiting in (10, 9, 11, 5):
        assert (room(waiting), made.is_closed) == (0, True)
    assert (room(4), made.is_closed) == (6, False)
    assert (room(9), made.is_closed) == (
        1,
        False,
    )  # while filling, the lower mark has no effect
    _, room = gate(redis, settings, queue_limit=1)
    assert [room(1), room(0)] == [0, 1]


def test_gate_counts_every_priority(settings: Settings, redis: RedisServer) -> None:
    made, room = gate(redis, settings, queue_limit=4)
    redis.client.lpush(f"feedmill{broker.PRIORITY_MARK}9", "message")
    assert [room(0), room(3)] == [3, 0]
    assert made.is_closed


class Ended(Exception):  # noqa: N818 - named after what happened
    """Raised by a test's `wait`."""


def test_an_interrupted_wait_keeps_what_was_sent(
    settings: Settings, redis: RedisServer
) -> None:
    """Posts pushed before the interruption are queued; pushing again sends the remaining posts."""
    small = settings.model_copy(update={"queue_limit": 4, "posts_per_message": 10})
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        assert pushing.waiting
        assert pushing.is_closed
        if len(waits) == 2:
            raise Ended
        redis.client.rpop("feedmill")  # not yet below the lower mark

    pushing = Pusher(
        make_app(small), connect(small), small, ClassifyOptions(), wait=wait
    )
    with pytest.raises(Ended):
        pushing.push(make_posts(60))
    assert waits == [push.FULL_QUEUE_POLL_S] * 2
    assert (pushing.sent, pushing.waiting) == (40, "")
    redis.client.delete("feedmill")
    pushing.push(make_posts(60))
    assert (pushing.sent, pushing.skipped) == (60, 40)
    assert sorted(ids(redis)) == sorted(f"p{number}" for number in range(40, 60))


def test_purged_posts_are_never_sent(settings: Settings, redis: RedisServer) -> None:
    for post_id in ("p1", "p3"):
        redis.client.set(TOMBSTONE + post_id, 1)
    for again in (False, True):
        pushing = pusher(settings, again)
        pushing.push(make_posts(5))
        assert (pushing.gone, pushing.first_gone, pushing.skipped) == (2, "p1", 0)
        forget(redis.client, [f"p{number}" for number in range(5)])
    assert ids(redis) == ["p0", "p2", "p4"] * 2
    redis.client.delete(TOMBSTONE + "p1")
    pushing.push(make_posts(5)[1:2])
    assert pushing.sent == 4


def test_a_post_purged_while_being_sent_is_not_marked(
    settings: Settings, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = broker.publish

    def purged_meanwhile(*arguments: Any) -> None:
        publish(*arguments)
        redis.client.set(TOMBSTONE + "p1", 1)

    monkeypatch.setattr(broker, "publish", purged_meanwhile)
    pusher(settings).push(make_posts(3))
    assert [sent_marks(redis.client, f"p{number}") for number in range(3)] == [1, 0, 1]


def consistent(pushing: Pusher, redis: RedisServer) -> None:
    """Assert that every marked or counted post is in the queue."""
    there = ids(redis)
    assert sent_count(redis.client) == sum(
        sent_marks(redis.client, post_id) for post_id in set(there)
    )
    assert pushing.sent <= len(there)
    assert pushing.messages <= len(messages(redis))


def raising(
    step: str,
    pushing: Pusher,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
    fault: BaseException,
) -> None:
    """Make call number `at` of the step raise the fault.

    Steps in the past tense raise it after their work.
    """
    where: tuple[Any, str] = {
        "look": (push, "lookup"),
        "room": (pushing, "room"),
        "publish": (broker, "publish"),
        "published": (broker, "publish"),
        "remember": (push, "mark_sent"),
        "remembered": (push, "mark_sent"),
    }[step]
    work = getattr(*where)
    calls: list[int] = []

    def broken(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        after = step in ("published", "remembered")
        if len(calls) == at and not after:
            raise fault
        answer = work(*arguments, **named)
        if len(calls) == at:
            raise fault
        return answer

    monkeypatch.setattr(*where, broken)


@pytest.mark.parametrize("fault", [ConnectionFault("cut"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize(
    "step", ["look", "room", "publish", "published", "remember", "remembered"]
)
def test_push_can_be_repeated_after_any_failure(
    settings: Settings,
    redis: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    at: int,
    fault: BaseException,
) -> None:
    small = settings.model_copy(update={"posts_per_message": 10, "queue_limit": 1000})
    monkeypatch.setattr(push, "POSTS_PER_ROUND_TRIP", 20)
    posts = make_posts(75)
    pushing = pusher(small)
    with monkeypatch.context() as patched:
        raising(step, pushing, patched, at, fault)
        with pytest.raises(type(fault)):
            pushing.push(posts)
    consistent(pushing, redis)
    assert pushing.sent < len(posts)
    pushing.push(posts)
    consistent(pushing, redis)
    there = ids(redis)
    assert set(there) == {post.id for post in posts}
    # Posts that were published but not marked are repeated, at most one round trip of them.
    assert len(there) - len(posts) == (20 if step in ("published", "remember") else 0)
    pushing.push(posts)
    assert len(ids(redis)) == len(there)


def test_push_can_be_repeated_after_its_source_failed(
    settings: Settings, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Complete round trips read before the failure are sent."""
    monkeypatch.setattr(push, "POSTS_PER_ROUND_TRIP", 32)
    posts = make_posts(50)

    def source() -> Iterator[Post]:
        yield from posts[:40]
        raise Ended

    pushing = pusher(settings)
    with pytest.raises(Ended):
        pushing.push(source())
    assert pushing.sent == 32
    pushing.push(posts)
    assert (pushing.sent, pushing.skipped) == (50, 32)
    assert sorted(ids(redis)) == sorted(post.id for post in posts)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.long)])
def test_push_can_be_repeated_after_a_signal_at_any_line(
    settings: Settings, redis: RedisServer, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Signal handlers may raise between any two lines: raise at each `step`-th line in turn."""
    small = settings.model_copy(update={"posts_per_message": 2, "queue_limit": 1})
    monkeypatch.setattr(push, "POSTS_PER_ROUND_TRIP", 2)
    posts = make_posts(3)
    files = (push.__file__, broker.__file__)
    app, client = make_app(small), connect(small)
    worked: list[str] = []

    def work(_: float) -> None:
        """Take a message off the queue, as a worker does."""
        worked.append(str(redis.client.rpop("feedmill")))

    def interrupted_at(line: int) -> bool:
        """Interrupt at this line; return False if the code has fewer lines."""
        redis.client.flushall()
        worked.clear()
        pushing = Pusher(app, client, small, ClassifyOptions(), wait=work)
        passed = 0

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal passed
            if frame.f_code.co_filename not in files:
                return None
            if event == "line":
                passed += 1
                if passed == line:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            pushing.push(posts)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        redis.client.rpush("feedmill", *worked) if worked else None
        consistent(pushing, redis)
        worked.clear()
        pushing.push(posts)
        redis.client.rpush("feedmill", *worked) if worked else None
        consistent(pushing, redis)
        assert set(ids(redis)) == {post.id for post in posts}, f"after line {line}"
        assert all(sent_marks(redis.client, post.id) for post in posts)
        return passed >= line

    line = 1
    while interrupted_at(line):
        line += step
    assert line > 100


def test_push_fails_at_the_memory_limit_and_can_be_repeated(
    settings: Settings, redis: RedisServer
) -> None:
    bodies = [random.Random(number).randbytes(15_000).hex() for number in range(200)]
    posts = [
        Post(id=str(number), title="t", body=body) for number, body in enumerate(bodies)
    ]
    pushing = pusher(settings)
    pushing.push(posts[:10])
    redis.client.config_set("maxmemory", "3mb")
    try:
        with pytest.raises(OutOfMemoryError, match="maxmemory"):
            pushing.push(posts)
    finally:
        redis.client.config_set("maxmemory", "0")
    pushing.push(posts)
    assert set(ids(redis)) == {post.id for post in posts}


def test_waits_for_redis_memory_if_configured(
    settings: Settings,
    redis: RedisServer,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Redis rejects first a message, then the marks of sent posts; all posts end up queued and
    marked.
    """
    waits: list[str] = []

    def full() -> None:
        redis.client.config_set("maxmemory", 1)

    def wait(_: float) -> None:
        waits.append(pushing.waiting)
        redis.client.config_set("maxmemory", 0)

    pushing = Pusher(
        make_app(settings),
        connect(settings),
        settings,
        ClassifyOptions(),
        wait=wait,
        wait_for_memory=True,
    )
    request.addfinalizer(lambda: redis.client.config_set("maxmemory", 0))
    load_functions(redis.client)  # a full Redis takes no functions
    full()
    pushing.push(make_posts(40))
    assert "Redis is at its memory limit: waiting for room." in caplog.text
    assert "raise its maxmemory" in caplog.text
    mark = push.mark_sent

    def marked(*arguments: Any) -> None:
        if len(waits) == 1:
            full()
        mark(*arguments)

    monkeypatch.setattr(push, "mark_sent", marked)
    pushing.push(make_posts(80))
    assert len(waits) == 2
    assert all("memory" in reason for reason in waits)
    assert (pushing.sent, pushing.skipped, pushing.waiting) == (80, 40, "")
    assert set(ids(redis)) == {post.id for post in make_posts(80)}
    again = pusher(settings)
    again.push(make_posts(80))
    assert again.skipped == 80
    assert "memory" in caplog.text


def test_waits_for_memory_for_the_functions(
    settings: Settings, redis: RedisServer, request: pytest.FixtureRequest
) -> None:
    """A Redis that is full and has no functions yet refuses to load them until it has room."""
    waits: list[str] = []

    def wait(_: float) -> None:
        waits.append(pushing.waiting)
        redis.client.config_set("maxmemory", 0)

    pushing = Pusher(
        make_app(settings),
        connect(settings),
        settings,
        ClassifyOptions(),
        wait=wait,
        wait_for_memory=True,
    )
    request.addfinalizer(lambda: redis.client.config_set("maxmemory", 0))
    redis.client.function_flush()
    redis.client.config_set("maxmemory", 1)
    pushing.push(make_posts(3))
    assert waits == ["Redis is at its memory limit"]
    assert set(ids(redis)) == {post.id for post in make_posts(3)}


@pytest.mark.parametrize("cuts", [1, 10])
def test_resends_a_batch_after_a_lost_connection(
    settings: Settings, redis: RedisServer, monkeypatch: pytest.MonkeyPatch, cuts: int
) -> None:
    tries: list[int] = []
    send = AbstractConnection.send_packed_command

    def cut(self: Any, command: Sequence[bytes], *args: Any, **kwargs: Any) -> None:
        if b"$5\r\nLPUSH\r\n" in b"".join(command) and len(tries) < cuts:
            tries.append(1)
            self.disconnect()
            raise ConnectionFault("cut")
        send(self, command, *args, **kwargs)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(AbstractConnection, "send_packed_command", cut)
    with pytest.raises(ConnectionFault) if cuts > 3 else nullcontext():
        pusher(settings).push(make_posts(1))
    assert len(tries) == min(cuts, 4)
    assert len(ids(redis)) == (cuts == 1)


def test_publishes_no_messages_and_never_loses_one(
    redis: RedisServer, settings: Settings
) -> None:
    """One task id too few would lose a message; too many are a mistake as well."""
    first, second = make_posts(2)
    with make_app(settings) as app:
        broker.publish(app, [], ClassifyOptions())
        for replies in ([], ["a"], ["a", "b", "c"]):
            with pytest.raises(ValueError, match="zip"):
                broker.publish(
                    app, [[first], [second]], ClassifyOptions(), replies=replies
                )
        assert messages(redis) == []
        broker.publish(app, [[first], [second]], ClassifyOptions(), replies=["a", "b"])
    assert {message["headers"]["id"] for message in messages(redis)} == {"a", "b"}


class FailingTracer:
    """A tracer that fails at one call: start_span, get_span_context or end."""

    def __init__(self, failing: str) -> None:
        self._failing = failing

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*_: object, **__: object) -> Any:
            if name == self._failing:
                raise RuntimeError(f"no {name}")
            return self if name == "start_span" else INVALID_SPAN_CONTEXT

        return call


@pytest.mark.parametrize("failing", ["start_span", "get_span_context", "end"])
def test_a_failing_tracer_neither_stops_posts_nor_sends_them_twice(
    failing: str,
    settings: Settings,
    redis: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exporting = SimpleNamespace(tracer=FailingTracer(failing))
    monkeypatch.setattr(tracing, "_exporting", exporting)
    monkeypatch.setattr(tracing, "_is_decided", True)
    posts = make_posts(3)
    pushing = pusher(settings)
    pushing.push(posts)
    pushing.push(posts)
    assert (pushing.sent, pushing.skipped) == (3, 3)
    assert len(ids(redis)) == 3


def test_a_failing_processor_neither_stops_posts_nor_sends_them_twice(
    settings: Settings, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            raise RuntimeError(f"cannot take {span.name}")

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Failing())
    exporting = SimpleNamespace(tracer=provider.get_tracer("tests"))
    monkeypatch.setattr(tracing, "_exporting", exporting)
    monkeypatch.setattr(tracing, "_is_decided", True)
    posts = make_posts(3)
    pushing = pusher(settings)
    pushing.push(posts)
    pushing.push(posts)
    assert (pushing.sent, pushing.skipped) == (3, 3)
    assert len(ids(redis)) == 3
