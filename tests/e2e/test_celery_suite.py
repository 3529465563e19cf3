"""Behaviour that Celery's own integration tests check, for micro-batched tasks.

The tasks (tests/fakes/suite_tasks.py) do arithmetic: a number is encoded as the id of a post. `add` classifies posts
and returns them with their numbers increased, so that tasks can be chained. The client is plain Celery and calls tasks
by name.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.canvas import Signature, StampingVisitor  # type: ignore[attr-defined]  # the stubs are older
from celery.exceptions import ChordError

from tests.support import Feedmill, RedisServer, running, wait_for_replies, wait_until

# Celery itself causes these warnings: about a default that may change, and about a Redis command.
pytestmark = [
    pytest.mark.filterwarnings("ignore:task_allow_error_cb_on_chord_header:PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),
]

ROOT = Path(__file__).parent.parent.parent
SECONDS = 60

app = Celery("client", set_as_current=False)
app.conf.task_default_queue = "feedmill"
app.conf.result_extended = True


@pytest.fixture(scope="module", autouse=True)
def worker(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Feedmill]:
    redis_server.client.flushall()
    app.conf.update(broker_url=redis_server.url, result_backend=redis_server.url)
    environment = {"FEEDMILL_REDIS_URL": redis_server.url, "PYTHONPATH": str(ROOT)}
    folder = tmp_path_factory.mktemp("worker")
    with running("worker", "--name", "suite", "--include", "tests.fakes.suite_tasks", cwd=folder, **environment) as it:
        wait_until(lambda: it.says(" ready."), "the worker is ready")
        wait_for_replies(app)
        yield it
        assert it.end() == 0, it.text()
    app.close()


@pytest.fixture
def redis(redis_server: RedisServer) -> Any:
    redis_server.client.delete("errbacks", "calls", "inner")
    return redis_server.client


def number(value: int) -> list[dict[str, Any]]:
    return [{"id": str(value), "title": f"number {value}"}]


def task(name: str, *args: Any, **kwargs: Any) -> Signature:
    return app.signature(f"suite.{name}", args=args, kwargs=kwargs)


def si(name: str, *args: Any, **kwargs: Any) -> Signature:
    return app.signature(f"suite.{name}", args=args, kwargs=kwargs, immutable=True)


def add(value: int, more: int = 1) -> Signature:
    """Return a signature that adds `more` to `value` and ignores the previous result."""
    return si("add", number(value), top_k=more)


def plus(more: int = 1) -> Signature:
    return task("add", top_k=more)


def fail() -> Signature:
    """Return a signature that always fails, because its labels are empty."""
    return si("add", number(1), labels="")


def total(more: int = 0) -> Signature:
    return task("total", more=more)


def calls(key: str = "calls") -> Signature:
    return si("called", key=key)


def together(*parts: Signature, **options: Any) -> Any:
    return group(parts, app=app, **options)


def after(header: list[Signature] | Any, body: Any) -> Any:
    return chord(header, body, app=app)


def numbers(found: Any) -> Any:
    """Decode posts into numbers."""
    if isinstance(found, dict):
        return int(found["id"])
    read = [numbers(each) for each in found]
    return read[0] if found and isinstance(found[0], dict) and len(found) == 1 else read


def settle() -> None:
    """Wait until the worker is done with everything sent so far, by sending two messages one after the other."""
    for _ in range(2):
        assert numbers(add(1).apply_async().get(timeout=SECONDS)) == 2


Shape = Callable[[], tuple[Any, Any]]
SHAPES: dict[str, Shape] = {
    # Chains.
    "simple chain": lambda: (add(4, 4) | plus(8) | plus(16), 32),
    "chain of chains, one part replaced, before a group": lambda: (
        add(2, 2) | (plus(4) | task("replaced", top_k=8) | plus(16) | plus(32)) | together(*map(plus, (1, 2, 3))),
        [65, 66, 67],
    ),
    "groups in a chain in a group": lambda: (together(add(1, 2) | together(plus(1), plus(2))), [4, 5]),
    "explicit chords": lambda: (
        after([add(1), add(2)], total()) | together(plus(), plus()) | total() | together(plus(), plus(2)), [13, 14]
    ),
    "a chord with a group for its body, then groups": lambda: (
        chain(after(together(add(1), add(2)), together(add(3), add(4))), together(add(5)), add(6), app=app), 7
    ),
    # Groups.
    "large group": lambda: (together(*(add(value) for value in range(100))), [value + 1 for value in range(100)]),
    "group of a chord of all kinds": lambda: (
        together(
            after(
                [
                    add(41), chain(*(add(41),) * 5, app=app), together(*((add(41),) * 5)), after([add(1)] * 5, add(30))
                ],
                total(),
            )
        ),
        [42 * 7 + 31],
    ),
    # Chords.
    "chord in its order": lambda: (after([add(value) for value in range(12)], task("gather")), list(range(1, 13))),
    "chord of none": lambda: (after([], task("gather")), []),
    "nested groups and chains": lambda: (
        add(1) | together(plus() | together(plus(), plus(2)) | total(), plus(10)) | total(), 21
    ),
    "chords in chords with chains": lambda: (
        after(
            [add(1) | after([add(2), add(3)], total() | plus()), after([add(4) | plus(), add(5)], total())],
            total() | plus(),
        ),
        8 + 12 + 1,
    ),
    "chain to a chord with a large header": lambda: (add(0) | together(*(plus() for _ in range(100))) | total(), 200),
    # Tasks that are replaced after their posts are classified.
    "replaced twice": lambda: (si("replaced_twice", number(1), top_k=3) | plus(), 5),
    "first of a chain, replaced by a chain": lambda: (si("replaced_by_chain", number(42), top_k=1) | plus(), 45),
    "middle of a group, replaced by a chain": lambda: (
        together(add(42), si("replaced_by_chain", number(42), top_k=1), add(42)), [43, 44, 43]
    ),
    "replaced by a group, in its order": lambda: (
        together(si("replaced_by_group", number(1), top_k=1), add(3)), [[2, 3], 4]
    ),
    "middle of a chord's body, replaced by a chain": lambda: (
        after([add(1)], total() | task("replaced_by_chain", top_k=1) | plus()), 5
    ),
    "a chord in a chord, replaced": lambda: (
        after([si("replaced", number(1), top_k=1), after([si("replaced", number(2), top_k=1)], total())], total()), 5
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_shape(shape: str) -> None:
    canvas, expected = SHAPES[shape]()
    assert numbers(canvas.apply_async().get(timeout=SECONDS)) == expected


@pytest.mark.parametrize("shape", ["simple chain", "nested groups and chains", "chords in chords with chains"])
def test_a_shape_through_json(shape: str) -> None:
    canvas, expected = SHAPES[shape]()
    rebuilt: Any = Signature.from_dict(json.loads(json.dumps(canvas)), app=app)
    assert numbers(rebuilt.apply_async().get(timeout=SECONDS)) == expected


# Results.


def test_parents_in_a_group_and_a_chord() -> None:
    sent: Any = chain(si("ids", number(1)), together(si("ids", number(2)), si("ids", number(3))), app=app).apply_async()
    root = sent.parent.id
    assert sent.get(timeout=SECONDS) == [[root, root], [root, root]]
    header = [si("ids", number(value)) for value in range(3)]
    sent = chain(si("ids", number(1)), after(header, si("ids", number(3))), app=app).apply_async()
    body_root, body_parent = sent.get(timeout=SECONDS)
    parts = sent.parent.results
    root = sent.parent.parent.id
    assert [each.get(timeout=SECONDS) for each in parts] == [[root, root]] * 3
    assert (body_root, body_parent in [each.id for each in parts]) == (root, True)


def test_a_group_with_one_failure() -> None:
    sent = together(add(1), fail(), add(2)).apply_async()
    with pytest.raises(Exception, match="name at least one label"):
        sent.get(timeout=SECONDS)
    wait_until(sent.ready, "all are done")
    assert (sent.successful(), sent.failed(), sent.completed_count()) == (False, True, 2)
    first, error, last = sent.get(timeout=SECONDS, propagate=False)
    assert (numbers(first), type(error).__name__, numbers(last)) == (2, "RequestRefused", 3)


def test_a_failure_in_full() -> None:
    sent = fail().apply_async()
    error = sent.get(timeout=SECONDS, propagate=False)
    assert (type(error).__name__, sent.state) == ("RequestRefused", "FAILURE")
    assert str(error) == "labels: name at least one label, and at most 256"
    assert "RequestRefused: labels: name at least one label" in str(sent.traceback)
    with pytest.raises(Exception, match="name at least one label"):
        sent.maybe_throw()


def test_an_ignored_result(redis: Any) -> None:
    alone = add(1).apply_async(ignore_result=True)
    settle()
    assert (alone.get(timeout=SECONDS), redis.exists(f"celery-task-meta-{alone.id}")) == (None, 0)


# Callbacks.


def test_callbacks_of_a_chain_and_of_its_parts(redis: Any) -> None:
    whole = add(1) | plus() | plus()
    whole.link(calls())
    assert numbers(whole.apply_async().get(timeout=SECONDS)) == 4
    part = add(1)
    part.link(calls())
    chain(part, part.clone(), part.clone(), app=app).apply_async().get(timeout=SECONDS)
    wait_until(lambda: redis.get("calls") == "4", "each was called")
    settle()
    assert redis.get("calls") == "4"


@pytest.mark.parametrize("style", ["errback_old", "errback_new"])
def test_errbacks_of_a_chain(redis: Any, style: str) -> None:
    """The chain's errback runs once, for the failing task, and not again for the later task."""
    sent = chain(add(1), fail(), plus(), app=app)
    sent.link_error(task(style))
    result: Any = sent.apply_async()
    with pytest.raises(Exception, match="name at least one label"):
        result.get(timeout=SECONDS)
    with pytest.raises(Exception, match="name at least one label"):
        result.parent.get(timeout=SECONDS)
    wait_until(lambda: redis.get("errbacks") == "1", "the errback was called")
    settle()
    assert redis.get("errbacks") == "1"


def test_an_errback_that_retries() -> None:
    """A micro-batched task as an errback runs and retries like any other task."""
    sent = fail().apply_async(link_error=si("retry_once", number(1)))
    with pytest.raises(Exception, match="name at least one label"):
        sent.get(timeout=SECONDS)
    settle()


# Chords that fail.

FAILING: dict[str, Callable[[], Any]] = {
    "a task": lambda: after([add(1), fail()], total()),
    "a chain": lambda: after([chain(add(1), fail(), plus(), app=app)], total()),
    "a chain's end": lambda: after([chain(add(1), fail(), app=app)], total()),
    "a group": lambda: after([together(add(1), fail())], total()),
}


def chord_fails(sent: Any) -> None:
    """Assert that the chord's body failed with a ChordError that names the reason."""
    error = sent.get(timeout=SECONDS, propagate=False)
    assert isinstance(error, ChordError), repr(error)
    assert "RequestRefused('labels: name at least one label, and at most 256')" in str(error)


@pytest.mark.parametrize("style", ["errback_old", "errback_new"])
@pytest.mark.parametrize("what", FAILING)
def test_errbacks_of_a_chord_whose_header_fails(redis: Any, what: str, style: str) -> None:
    canvas = FAILING[what]()
    canvas.link_error(task(style))
    chord_fails(canvas.apply_async())
    wait_until(lambda: redis.get("errbacks") == "1", "the errback was called")
    settle()
    assert redis.get("errbacks") == "1"


@pytest.mark.parametrize("style", ["errback_old", "errback_new"])
@pytest.mark.parametrize("body", ["alone", "first", "last"])
def test_errbacks_of_a_chord_whose_body_fails(redis: Any, body: str, style: str) -> None:
    bodies: dict[str, Callable[[], Any]] = {
        "alone": fail,
        "first": lambda: chain(fail(), plus(), app=app),
        "last": lambda: chain(total(), fail(), app=app),
    }
    canvas = after([add(1), add(2)], bodies[body]())
    canvas.link_error(task(style))
    error = canvas.apply_async().get(timeout=SECONDS, propagate=False)
    assert type(error).__name__ == "RequestRefused"
    wait_until(lambda: redis.get("errbacks") == "1", "the errback was called")


def test_a_chord_that_fails_in_a_chain(redis: Any, worker: Feedmill) -> None:
    """Later tasks do not run, and the worker keeps serving."""
    sent: Any = chain(together(add(1), fail()), total(), calls(), app=app).apply_async()
    chord_fails(sent.parent)
    settle()
    assert redis.get("calls") is None
    assert worker.process.poll() is None


def test_a_task_adds_to_its_chord() -> None:
    canvas = after([si("adds_to_chord", number(4), top_k=2)], task("gather"))
    assert sorted(numbers(canvas.apply_async().get(timeout=SECONDS))) == [6, 8]


def test_finished_chords_leave_no_keys(redis: Any) -> None:
    """A finished chord leaves no counter or list without an expiry in Redis."""
    after([add(1), add(2)], total()).apply_async().get(timeout=SECONDS)
    settle()
    left = [key for key in redis.scan_iter("chord-*") if redis.ttl(key) < 0]
    assert left == []


# Replaced.


def test_replaced_with_callbacks(redis: Any) -> None:
    """Callbacks of the replacing chain and of the replaced task both run."""
    sent = si("replaced_by_chain_with_links", number(1), top_k=2).apply_async(link=calls())
    assert numbers(sent.get(timeout=SECONDS)) == 5
    wait_until(lambda: (redis.get("inner"), redis.get("calls")) == ("1", "1"), "both were called")
    settle()
    assert (redis.get("inner"), redis.get("calls"), redis.get("errbacks")) == ("1", "1", None)


def test_replaced_with_errbacks(redis: Any) -> None:
    sent = si("replaced_by_chain_with_links", number(1), top_k=13).apply_async(link_error=calls())
    with pytest.raises(Exception, match="name at least one label"):
        sent.get(timeout=SECONDS)
    wait_until(lambda: (redis.get("errbacks"), redis.get("calls")) == ("1", "1"), "both were called")
    settle()
    assert (redis.get("errbacks"), redis.get("calls"), redis.get("inner")) == ("1", "1", None)


# Stamps.


class Stamps(StampingVisitor):  # type: ignore[misc]  # not in the stubs
    def on_signature(self, sig: Any, **headers: Any) -> dict[str, Any]:  # noqa: ARG002
        return {"who": "T1", "stamped_headers": ["who"]}


def test_stamps_stay_with_a_retry() -> None:
    sent = si("retry_once", number(1))
    sent.stamp(visitor=Stamps())
    seen = sent.apply_async().get(timeout=SECONDS)
    assert (seen["retries"], seen["stamps"]["who"] in ("T1", ["T1"])) == (1, True)


# One task.


def test_request_attributes_of_a_task() -> None:
    sent = si("request", number(1))
    seen = sent.apply_async(priority=6, soft_time_limit=60, time_limit=90, headers={"ticket": "T1"})
    assert seen.get(timeout=SECONDS) == {
        "priority": 6, "timelimit": [90, 60], "ticket": "T1", "stamps": {}, "retries": 0
    }  # fmt: skip
    assert sent.apply_async().get(timeout=SECONDS)["timelimit"] == [None, None]


def test_a_retry_keeps_the_senders_options() -> None:
    seen = si("retry_once", number(1)).apply_async(priority=6, time_limit=90, headers={"ticket": "T1"}, expires=600)
    assert seen.get(timeout=SECONDS) == {
        "priority": 6, "timelimit": [90, None], "ticket": "T1", "stamps": {}, "retries": 1
    }  # fmt: skip


@pytest.mark.parametrize("name", ["fails_oddly", "retries_oddly"])
def test_an_exception_that_cannot_be_recreated(name: str) -> None:
    sent = si(name, number(1)).apply_async()
    error = sent.get(timeout=SECONDS, propagate=False)
    assert sent.state == "FAILURE"
    assert isinstance(error, Exception)
    assert "Odd" in str(sent.traceback)
    settle()


def test_task_handlers_are_called(redis: Any) -> None:
    sent = si("hooked", number(1)).apply_async()
    assert sent.get(timeout=SECONDS) == 1
    wait_until(lambda: redis.llen(f"hooks:{sent.id}") == 5, "all were called")
    told = redis.lrange(f"hooks:{sent.id}", 0, -1)
    assert told == ["before_start", "on_retry", "before_start", "on_success", "after_return SUCCESS"]


# The worker.


def test_many_rejected_commands(worker: Feedmill) -> None:
    for _ in range(12):
        app.control.broadcast("pool_grow", arguments={"n": 1})
    assert app.control.inspect(timeout=30, limit=1).ping()
    assert numbers(add(1).apply_async().get(timeout=SECONDS)) == 2
    assert worker.process.poll() is None


# The list of Celery's tests.
