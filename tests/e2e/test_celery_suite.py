"""Behaviour that Celery's own integration tests check, for micro-batched tasks. See docs/celery-suite.md.

The tasks (tests/fakes/suite_tasks.py) do arithmetic: a number is encoded as the id of a post. `add` classifies posts
and returns them with their numbers increased, so that tasks can be chained. The client is plain Celery and calls tasks
by name.
"""

import csv
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.canvas import Signature, StampingVisitor  # type: ignore[attr-defined]  # the stubs are older
from celery.exceptions import ChordError, TimeoutError  # noqa: A004 - Celery's TimeoutError
from celery.result import AsyncResult, GroupResult, ResultSet, result_from_tuple

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
    "chain of one": lambda: (chain(add(3, 4), app=app), 7),
    "chain of a chain of one": lambda: (chain(chain(add(41), app=app), app=app), 42),
    "chain of chains, one part replaced, before a group": lambda: (
        add(2, 2) | (plus(4) | task("replaced", top_k=8) | plus(16) | plus(32)) | together(*map(plus, (1, 2, 3))),
        [65, 66, 67],
    ),
    "groups in a chain in a group": lambda: (together(add(1, 2) | together(plus(1), plus(2))), [4, 5]),
    "a chain in a group gets arguments": lambda: (add(5, 6) | together(plus(1) | plus(2), plus(3)), [14, 14]),
    "group, task, group": lambda: (together(add(1), add(2)) | total() | together(plus(1), plus(2)), [6, 7]),
    "group of tasks and a chain with a group": lambda: (
        together(add(0), add(1), chain(add(4), together(add(2), add(3)), app=app)), [1, 2, [3, 4]]
    ),
    "task, group, chord": lambda: (add(0) | together(plus(), plus()) | total(0) | plus() | plus(), 6),
    "chords as groups, and tasks": lambda: (
        add(12, 2) | together(plus(2), plus(2)) | total() | plus(3) | together(plus(1), plus(1)) | total(),
        72,
    ),
    "chords with two tasks": lambda: (add(2) | together(plus(), plus()) | total() | plus() | plus(), 10),
    "explicit chords": lambda: (
        after([add(1), add(2)], total()) | together(plus(), plus()) | total() | together(plus(), plus(2)), [13, 14]
    ),
    "nine chords": lambda: (
        chain(add(1), *(part for _ in range(9) for part in (together(plus(), plus()), total(-3))), app=app),
        2 ** 9 + 1,
    ),
    "chord, two tasks, group": lambda: (
        add(0) | together(plus(), plus()) | total() | plus() | plus() | together(plus(1), plus(2)), [7, 8]
    ),
    "chord and group": lambda: (add(0) | together(plus(), plus()) | total() | together(plus(1), plus(2)), [5, 6]),
    "chord, task, group": lambda: (
        add(0) | together(plus(), plus()) | total() | plus() | together(plus(1), plus(2)), [6, 7]
    ),
    "chord, three tasks, group": lambda: (
        add(0) | together(plus(), plus()) | total() | plus() | plus() | plus() | together(plus(1), plus(2)), [8, 9]
    ),
    "nested chain, group alone": lambda: (chain(together(add(41), add(41)), app=app), [42, 42]),
    "nested chain, group in the middle": lambda: (
        chain(add(41), together(plus(), plus()), task("gather"), app=app), [43, 43]
    ),
    "nested chain, group last": lambda: (chain(add(41), together(plus(), plus()), app=app), [43, 43]),
    "groups after groups": lambda: (
        chain(together(add(1), add(2)), together(add(3), add(4)), together(add(5)), together(add(6)), add(7), app=app),
        8,
    ),
    "a chord with a group for its body, then groups": lambda: (
        chain(after(together(add(1), add(2)), together(add(3), add(4))), together(add(5)), add(6), app=app), 7
    ),
    "a chord with a group for its body, task, group, task": lambda: (
        chain(after(together(add(1), add(2)), together(add(3), add(4))), add(5), together(add(6)), add(7), app=app), 8
    ),
    "groups after groups, a group last": lambda: (
        chain(together(add(1), add(2)), together(add(3), add(4), add(5)), together(add(6)), app=app), 7
    ),
    "a group in the middle of a chain in a chord's body": lambda: (
        after(
            [add(0)],
            after([total(), total()], chain(total(), together(plus(8), plus(16)), total(), plus(32), app=app)),
        ),
        60,
    ),
    "a chain of a chord and a chain": lambda: (
        chain(together(add(1), add(2)) | together(add(3), add(4)), add(5) | add(6), app=app), 7
    ),
    # Groups.
    "group alone": lambda: (together(add(41), add(41)), [42, 42]),
    "group in a group": lambda: (together(together(add(41), add(41))), [42, 42]),
    "groups in groups": lambda: (
        together(add(1, 10), together(add(1, 100), together(add(1, 1000), add(1, 2000)))), [11, 101, 1001, 2001]
    ),
    "large group": lambda: (together(*(add(value) for value in range(100))), [value + 1 for value in range(100)]),
    "group of a chord": lambda: (together(after([add(41)], total())), [42]),
    "group of a chord of a chain": lambda: (together(after([chain(*(add(1),) * 12, app=app)], total())), [2]),
    "group of a chord of a group": lambda: (together(after([together(*((add(1),) * 12))], total())), [24]),
    "group of a chord of a chord": lambda: (together(after([after([add(1)] * 12, add(30))], total())), [31]),
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
    "group of a chord with a chain for its body": lambda: (together(after([add(41)], chain(total(), app=app))), [42]),
    # Chords.
    "chord in its order": lambda: (after([add(value) for value in range(12)], task("gather")), list(range(1, 13))),
    "chord of one": lambda: (after([add(1)], total()), 2),
    "chord of none": lambda: (after([], task("gather")), []),
    "chord of a group and a chain": lambda: (
        after([together(add(1), add(2)) | total() | together(plus(), plus())], total()), 12
    ),
    "group and chain": lambda: (add(2, 2) | together(plus(), plus(), plus()) | task("gather"), [5, 5, 5]),
    "nested groups and chains": lambda: (
        add(1) | together(plus() | together(plus(), plus(2)) | total(), plus(10)) | total(), 21
    ),
    "nested chords": lambda: (
        after([after([add(1), add(2)], total()), after([after([add(3)], total()), add(4)], total())], total()), 14
    ),
    "chord of a generator": lambda: (after((add(value) for value in range(5)), total()), 15),
    "parallel chords": lambda: (
        together(after([add(1)] * 3, total()), after([add(2)] * 3, total())) | task("gather"), [6, 9]
    ),
    "chords in chords with chains": lambda: (
        after(
            [add(1) | after([add(2), add(3)], total() | plus()), after([add(4) | plus(), add(5)], total())],
            total() | plus(),
        ),
        8 + 12 + 1,
    ),
    "chain, chord, chain, chord": lambda: (
        add(2, 2) | after([plus(), plus() | plus()], total() | plus() | after([plus(), plus()], total())), 26
    ),
    "chord in a chain, with arguments": lambda: (
        chain(add(1), after([plus(), plus()], total()), plus(), app=app), 7
    ),
    "chain in a chain, with arguments": lambda: (chain(add(1), chain(plus(), plus(), app=app), app=app), 4),
    "large header": lambda: (after([add(1) for _ in range(100)], total()), 200),
    "chain to a chord with a large header": lambda: (add(0) | together(*(plus() for _ in range(100))) | total(), 200),
    "chord of groups": lambda: (after([together(add(1), add(2)), add(3)], total()), 9),
    "chord of groups and chains with a group at the end": lambda: (
        after([together(add(1), add(2) | together(plus(), plus(2)))], total()), 11
    ),
    # Tasks that are replaced after their posts are classified.
    "replaced": lambda: (si("replaced", number(1), top_k=3), 4),
    "replaced twice": lambda: (si("replaced_twice", number(1), top_k=3) | plus(), 5),
    "replaced by a chain": lambda: (si("replaced_by_chain", number(42), top_k=1), 44),
    "first of a chain, replaced by a chain": lambda: (si("replaced_by_chain", number(42), top_k=1) | plus(), 45),
    "middle of a chain, replaced by a chain": lambda: (add(42) | task("replaced_by_chain", top_k=1) | plus(), 46),
    "last of a chain, replaced by a chain": lambda: (add(42) | task("replaced_by_chain", top_k=1), 45),
    "first of a group, replaced by a chain": lambda: (
        together(si("replaced_by_chain", number(42), top_k=1), add(42), add(42)), [44, 43, 43]
    ),
    "middle of a group, replaced by a chain": lambda: (
        together(add(42), si("replaced_by_chain", number(42), top_k=1), add(42)), [43, 44, 43]
    ),
    "last of a group, replaced by a chain": lambda: (
        together(add(42), add(42), si("replaced_by_chain", number(42), top_k=1)), [43, 43, 44]
    ),
    "replaced by a group, in its order": lambda: (
        together(si("replaced_by_group", number(1), top_k=1), add(3)), [[2, 3], 4]
    ),
    "a chord's header, replaced by a chain": lambda: (
        after([si("replaced_by_chain", number(42), top_k=1)], task("gather")), 44
    ),
    "first of a chord's header, replaced by a chain": lambda: (
        after([si("replaced_by_chain", number(42), top_k=1), add(1), add(2)], task("gather")), [44, 2, 3]
    ),
    "middle of a chord's header, replaced by a chain": lambda: (
        after([add(1), si("replaced_by_chain", number(42), top_k=1), add(2)], task("gather")), [2, 44, 3]
    ),
    "last of a chord's header, replaced by a chain": lambda: (
        after([add(1), add(2), si("replaced_by_chain", number(42), top_k=1)], task("gather")), [2, 3, 44]
    ),
    "a chord's body, replaced by a chain": lambda: (
        after([add(1), add(2)], total() | task("replaced_by_chain", top_k=1)), 7
    ),
    "first of a chord's body, replaced by a chain": lambda: (
        after([add(1)], si("replaced_by_chain", number(5), top_k=1) | plus() | plus()), 9
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


INNER: dict[str, Callable[[], Any]] = {
    "chain": lambda: chain(add(1), plus(), app=app),
    "group": lambda: together(add(1), add(2)),
    "chord": lambda: after([add(1), add(2)], total()),
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("outer", ["chain", "group", "chord"])
def test_a_nested_shape_through_json(outer: str, inner: str) -> None:
    made = INNER[inner]()
    shapes: dict[str, Callable[[], Any]] = {
        "chain": lambda: chain(made, total(), app=app),
        "group": lambda: together(made, add(0)),
        "chord": lambda: after([made, add(0)], total()),
    }
    canvas = shapes[outer]()
    rebuilt = Signature.from_dict(json.loads(json.dumps(canvas)), app=app)
    rebuilt = Signature.from_dict(json.loads(json.dumps(rebuilt)), app=app)
    value: Any = {"chain": 3, "group": [2, 3], "chord": 5}[inner]
    summed = 5 if inner == "group" else value
    expected = {"chain": summed, "group": [value, 1], "chord": summed + 1}[outer]
    found = numbers(rebuilt.apply_async().get(timeout=SECONDS))
    assert (sorted(map(str, found)) if isinstance(found, list) else found) == (
        sorted(map(str, _unrolled(expected))) if isinstance(expected, list) else expected
    )


def _unrolled(values: list[Any]) -> list[int]:
    """Flatten nested groups, as Celery does."""
    return [one for value in values for one in (value if isinstance(value, list) else [value])]


# Results.


def test_parents_and_children() -> None:
    """Each result of a chain links to its parent, and the tasks see the same root and parent ids."""
    sent: Any = chain(*(si("ids", number(value)) for value in range(6)), app=app).apply_async()
    found = [sent]
    while found[-1].parent:
        found.append(found[-1].parent)
    assert len(found) == 6
    root = found[-1]
    for node in found:
        assert node.get(timeout=SECONDS) == [root.id, node.parent.id if node.parent else None]
    assert [child.id for child in root.children] == [found[-2].id]


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


def test_a_groups_results() -> None:
    sent = together(*(add(value) for value in range(5))).apply_async()
    assert numbers(sent.join(timeout=SECONDS)) == [1, 2, 3, 4, 5]
    assert (sent.ready(), sent.successful(), sent.failed(), sent.waiting()) == (True, True, False, False)
    assert (sent.completed_count(), len(sent), sent[0].id) == (5, 5, sent.results[0].id)
    rebuilt = result_from_tuple(json.loads(json.dumps(sent.as_tuple())), app=app)
    assert rebuilt == sent
    assert numbers(rebuilt.get(timeout=SECONDS)) == [1, 2, 3, 4, 5]


def test_get_passes_a_groups_results_to_its_callback() -> None:
    sent = together(*(add(value) for value in range(5))).apply_async()
    seen: list[Any] = []
    sent.get(timeout=SECONDS, callback=lambda _, value: seen.append(numbers(value)))
    assert sorted(seen) == [1, 2, 3, 4, 5]


def test_a_saved_group() -> None:
    sent = together(add(1), add(2)).apply_async()
    sent.save()
    restored = GroupResult.restore(sent.id, app=app)
    assert numbers(restored.get(timeout=SECONDS)) == [2, 3]
    sent.delete()
    assert GroupResult.restore(sent.id, app=app) is None


def test_a_group_with_one_failure() -> None:
    sent = together(add(1), fail(), add(2)).apply_async()
    with pytest.raises(Exception, match="name at least one label"):
        sent.get(timeout=SECONDS)
    wait_until(sent.ready, "all are done")
    assert (sent.successful(), sent.failed(), sent.completed_count()) == (False, True, 2)
    first, error, last = sent.get(timeout=SECONDS, propagate=False)
    assert (numbers(first), type(error).__name__, numbers(last)) == (2, "RequestRefused", 3)


def test_an_empty_group() -> None:
    assert together().apply_async().get(timeout=SECONDS) == []


def test_a_group_with_arguments_for_all() -> None:
    both = together(task("add"), task("add"))
    assert numbers(both.apply_async((number(4),)).get(timeout=SECONDS)) == [5, 5]
    assert numbers(both.apply_async((number(4),), {"top_k": 5}).get(timeout=SECONDS)) == [9, 9]
    assert numbers(both.apply_async(kwargs={"posts": number(4)}).get(timeout=SECONDS)) == [5, 5]


def test_a_set_of_results() -> None:
    some = ResultSet([add(1).apply_async(), add(2).apply_async()], app=app)
    assert numbers(some.get(timeout=SECONDS)) == [2, 3]
    some = ResultSet([], app=app)
    some.add(add(1).apply_async())
    some.add(add(2).apply_async())
    assert numbers(some.get(timeout=SECONDS)) == [2, 3]
    some.add(fail().apply_async())
    with pytest.raises(Exception, match="name at least one label"):
        some.get(timeout=SECONDS)


def test_a_result_in_full() -> None:
    sent = si("add", number(1), top_k=2).apply_async(task_id="in-full")
    again: AsyncResult[Any] = AsyncResult("in-full", app=app)
    assert numbers(again.get(timeout=SECONDS)) == 3
    assert (sent.id, again.state, again.ready(), again.successful(), again.failed()) == (
        "in-full", "SUCCESS", True, True, False
    )  # fmt: skip
    assert again.date_done is not None
    assert again.traceback is None
    sent.forget()
    assert AsyncResult("in-full", app=app).state == "PENDING"


def test_a_failure_in_full() -> None:
    sent = fail().apply_async()
    error = sent.get(timeout=SECONDS, propagate=False)
    assert (type(error).__name__, sent.state) == ("RequestRefused", "FAILURE")
    assert str(error) == "labels: name at least one label, and at most 256"
    assert "RequestRefused: labels: name at least one label" in str(sent.traceback)
    with pytest.raises(Exception, match="name at least one label"):
        sent.maybe_throw()


def test_get_calls_its_callback_and_obeys_its_timeout() -> None:
    told: list[Any] = []
    add(1).apply_async().get(timeout=SECONDS, callback=lambda task_id, value: told.append((task_id, numbers(value))))
    assert [value for _, value in told] == [2]
    with pytest.raises(TimeoutError):
        AsyncResult("never-sent", app=app).get(timeout=0.1)
    late = add(1).apply_async(countdown=600)
    with pytest.raises(TimeoutError):
        late.get(timeout=0.1)
    late.revoke()


def test_an_ignored_result(redis: Any) -> None:
    alone = add(1).apply_async(ignore_result=True)
    settle()
    assert (alone.get(timeout=SECONDS), redis.exists(f"celery-task-meta-{alone.id}")) == (None, 0)


def test_no_subscription_is_left(redis: Any) -> None:
    """The client unsubscribes from a result that it has received or forgotten."""
    whole: Any = together(*(add(value) for value in range(3))).apply_async()
    summed: Any = after([add(1), add(2)], total()).apply_async()
    late = add(1).apply_async(countdown=600)
    ids = [*(each.id for each in whole.results), summed.id, late.id]
    whole.get(timeout=SECONDS)
    summed.get(timeout=SECONDS)
    late.revoke()
    late.forget()
    channels = {f"celery-task-meta-{task_id}" for task_id in ids}
    wait_until(lambda: not channels & set(redis.pubsub_channels()), "the client is subscribed to no result")


def test_many_threads_send() -> None:
    found: dict[int, Any] = {}

    def send(value: int) -> None:
        found[value] = numbers(add(value).apply_async().get(timeout=SECONDS))

    threads = [threading.Thread(target=send, args=(value,)) for value in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {value: value + 1 for value in range(16)}


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


def test_callbacks_of_a_group_and_of_its_parts(redis: Any) -> None:
    part = add(1)
    part.link(calls())
    together(*(part.clone() for _ in range(8))).apply_async().get(timeout=SECONDS)
    wait_until(lambda: redis.get("calls") == "8", "each was called")
    whole = together(add(1), add(2))
    whole.link(calls())
    whole.apply_async().get(timeout=SECONDS)
    wait_until(lambda: int(redis.get("calls")) == 9, "Celery attached the group's callback to its first part")
    settle()
    assert redis.get("calls") == "9"


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


@pytest.mark.parametrize("style", ["errback_old", "errback_new"])
@pytest.mark.parametrize("place", [0, 2])
def test_errbacks_of_a_group(redis: Any, style: str, place: int) -> None:
    parts = [add(1), add(2)]
    parts.insert(place, fail())
    whole = together(*parts)
    whole.link_error(task(style))
    with pytest.raises(Exception, match="name at least one label"):
        whole.apply_async().get(timeout=SECONDS)
    wait_until(lambda: redis.get("errbacks") == "1", "the errback was called")
    settle()
    assert redis.get("errbacks") == "1"


def test_errbacks_of_a_group_with_many_failures(redis: Any) -> None:
    whole = together(*(add(1) for _ in range(4)), *(fail() for _ in range(9)))
    whole.link_error(calls())
    with pytest.raises(Exception, match="name at least one label"):
        whole.apply_async().get(timeout=SECONDS)
    wait_until(lambda: redis.get("calls") == "9", "the errback was called for each failed part")
    settle()
    assert redis.get("calls") == "9"


def test_errbacks_of_the_parts(redis: Any) -> None:
    part = fail()
    part.link_error(calls())
    for canvas in (together(*(part.clone() for _ in range(5))), chain(add(1), part, plus(), app=app)):
        with pytest.raises(Exception, match="name at least one label"):
            canvas.apply_async().get(timeout=SECONDS)
    wait_until(lambda: redis.get("calls") == "6", "the errback was called for each failed part")


def test_an_errback_that_retries() -> None:
    """A micro-batched task as an errback runs and retries like any other task."""
    sent = fail().apply_async(link_error=si("retry_once", number(1)))
    with pytest.raises(Exception, match="name at least one label"):
        sent.get(timeout=SECONDS)
    settle()


def test_a_delayed_errback(redis: Any) -> None:
    sent = chain(fail(), plus(), app=app)
    sent.link_error(task("errback_old").set(countdown=0.1))
    with pytest.raises(Exception, match="name at least one label"):
        sent.apply_async().get(timeout=SECONDS)
    wait_until(lambda: redis.get("errbacks") == "1", "the errback was called")


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


@pytest.mark.parametrize("what", FAILING)
def test_a_chords_header_fails(what: str) -> None:
    chord_fails(FAILING[what]().apply_async())


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


def test_a_chord_in_a_chords_header_fails(redis: Any) -> None:
    """The outer chord's errback is called once, and its body never."""
    inner = after([add(1), fail()], total())
    outer = after([inner, add(2)], si("called", key="inner"))
    outer.link_error(calls())
    with pytest.raises(Exception, match="name at least one label"):
        outer.apply_async().get(timeout=SECONDS)
    wait_until(lambda: redis.get("calls") == "1", "the errback was called")
    settle()
    assert (redis.get("calls"), redis.get("inner")) == ("1", None)


def test_a_chain_in_a_chords_header_that_would_end_in_a_chord() -> None:
    """The chain's first task fails, so the inner chord never starts. The outer chord must fail, not wait for it."""
    inner = chain(fail(), together(add(2), add(3)), total(), app=app)
    with pytest.raises(Exception, match="name at least one label"):
        chain(together(add(1), inner), total(), app=app).apply_async().get(timeout=SECONDS)


def test_a_chord_with_many_failures(redis: Any) -> None:
    canvas = after([add(1), *(fail() for _ in range(7))], total())
    canvas.link_error(calls())
    chord_fails(canvas.apply_async())
    wait_until(lambda: redis.get("calls") == "1", "the body's errback was called")
    settle()
    assert redis.get("calls") == "1"


@pytest.mark.parametrize(("flag", "expected"), [(False, "1"), (True, "3")])
def test_a_chords_errback_for_its_header(redis: Any, flag: bool, expected: str) -> None:
    """With the sender's setting `task_allow_error_cb_on_chord_header`, each failing part calls the errback, too."""
    app.conf.task_allow_error_cb_on_chord_header = flag
    try:
        canvas = after([add(1), fail(), fail()], total())
        canvas.link_error(calls())
        chord_fails(canvas.apply_async())
    finally:
        app.conf.task_allow_error_cb_on_chord_header = False
    wait_until(lambda: redis.get("calls") == expected, "each was called")
    settle()
    assert redis.get("calls") == expected


def test_a_chord_that_fails_in_a_chain(redis: Any, worker: Feedmill) -> None:
    """Later tasks do not run, and the worker keeps serving."""
    sent: Any = chain(together(add(1), fail()), total(), calls(), app=app).apply_async()
    chord_fails(sent.parent)
    settle()
    assert redis.get("calls") is None
    assert worker.process.poll() is None


def test_a_chord_after_a_chain_that_fails(redis: Any) -> None:
    sent: Any = chain(fail(), together(add(1), add(2)), calls(), app=app).apply_async()
    with pytest.raises(Exception, match="name at least one label"):
        sent.get(timeout=SECONDS)
    settle()
    assert redis.get("calls") is None


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


@pytest.mark.parametrize("top_k", [2, 13])
def test_a_part_replaced_with_links(redis: Any, top_k: int) -> None:
    """The callback or errback of a replaced task runs, in a chain as in a group."""
    part = si("replaced_by_chain_with_links", number(1), top_k=top_k)
    part.link(calls())
    part.link_error(calls())
    for canvas in (chain(add(1), part.clone(), plus(), app=app), together(add(1), part.clone())):
        with suppress(Exception):
            canvas.apply_async().get(timeout=SECONDS)
    expected = ("2", "2", None) if top_k == 2 else ("2", None, "2")
    wait_until(lambda: (redis.get("calls"), redis.get("inner"), redis.get("errbacks")) == expected, "each was called")


def test_replaced_by_nothing() -> None:
    with pytest.raises(Exception, match="replace"):
        si("replaced_by_nothing", number(1)).apply_async().get(timeout=SECONDS)


# Stamps.


class Stamps(StampingVisitor):  # type: ignore[misc]  # not in the stubs
    def on_signature(self, sig: Any, **headers: Any) -> dict[str, Any]:  # noqa: ARG002
        return {"who": "T1", "stamped_headers": ["who"]}


STAMPED: dict[str, Callable[[], Any]] = {
    "alone": lambda: si("request", number(1)),
    "chain": lambda: chain(add(1), si("request", number(1)), app=app),
    "group": lambda: together(si("request", number(1)), si("request", number(2))),
    "chord": lambda: after([add(1), add(2)], si("request", number(1))),
}


@pytest.mark.parametrize("shape", STAMPED)
def test_stamps(shape: str) -> None:
    canvas = STAMPED[shape]()
    canvas.stamp(visitor=Stamps())
    found = canvas.apply_async().get(timeout=SECONDS)
    for seen in found if isinstance(found, list) else [found]:
        assert seen["stamps"]["who"] in ("T1", ["T1"])


def test_stamps_of_a_link() -> None:
    """A link is stamped both as a signature and as a dictionary."""
    known = si("request", number(1)).set(task_id="stamped-link")
    for form in (known, json.loads(json.dumps(known.set(task_id="stamped-link-2")))):
        first = add(1)
        first.link(form)
        first.stamp(visitor=Stamps())
        first.apply_async().get(timeout=SECONDS)
    known_by_id: AsyncResult[Any] = AsyncResult("stamped-link-2", app=app)
    seen = known_by_id.get(timeout=SECONDS)
    assert seen["stamps"]["who"] in ("T1", ["T1"])


def test_stamps_of_an_errback(redis: Any) -> None:
    sent = fail()
    sent.link_error(task("errback_old"))
    sent.stamp(visitor=Stamps())
    with pytest.raises(Exception, match="name at least one label"):
        sent.apply_async().get(timeout=SECONDS)
    wait_until(lambda: redis.get("errbacks") == "1", "the errback was called")


def test_stamps_stay_with_a_retry() -> None:
    sent = si("retry_once", number(1))
    sent.stamp(visitor=Stamps())
    seen = sent.apply_async().get(timeout=SECONDS)
    assert (seen["retries"], seen["stamps"]["who"] in ("T1", ["T1"])) == (1, True)


def test_stamps_keep_other_options() -> None:
    sent = si("request", number(1)).set(priority=3)
    sent.stamp(visitor=Stamps())
    seen = sent.apply_async(headers={"ticket": "T7"}, time_limit=70).get(timeout=SECONDS)
    assert (seen["priority"], seen["timelimit"], seen["ticket"]) == (3, [70, None], "T7")


# One task.


def test_request_attributes_of_a_task() -> None:
    sent = si("request", number(1))
    seen = sent.apply_async(priority=6, soft_time_limit=60, time_limit=90, headers={"ticket": "T1"})
    assert seen.get(timeout=SECONDS) == {
        "priority": 6, "timelimit": [90, 60], "ticket": "T1", "stamps": {}, "retries": 0
    }  # fmt: skip
    assert sent.apply_async().get(timeout=SECONDS)["timelimit"] == [None, None]


def test_sender_options_override_task_options() -> None:
    sent = si("limited", number(1)).apply_async(time_limit=50, soft_time_limit=40, app_id="1234")
    assert sent.get(timeout=SECONDS) == [50, 40, "1234"]


def test_a_retry_keeps_the_senders_options() -> None:
    seen = si("retry_once", number(1)).apply_async(priority=6, time_limit=90, headers={"ticket": "T1"}, expires=600)
    assert seen.get(timeout=SECONDS) == {
        "priority": 6, "timelimit": [90, None], "ticket": "T1", "stamps": {}, "retries": 1
    }  # fmt: skip


def test_priorities_in_a_chain() -> None:
    sent = chain(add(1), si("request", number(1)).set(priority=9), app=app).apply_async()
    assert sent.get(timeout=SECONDS)["priority"] == 9


def test_invalid_arguments() -> None:
    for args, kwargs, words in (
        ([number(1)], {"posts": number(1)}, "got multiple values for argument 'posts'"),
        ([number(1)], {"lables": "a"}, "lables: unknown argument; did you mean labels?"),
    ):
        sent = app.send_task("feedmill.classify", args, kwargs)
        with pytest.raises(Exception, match=re.escape(words)):
            sent.get(timeout=SECONDS)


def test_texts_of_all_kinds() -> None:
    title = "Grüße aus 東京 \U0001f600 \x1b[31m"
    (found,) = app.send_task("feedmill.classify", [[{"id": title, "title": title}]]).get(timeout=SECONDS)
    assert found["id"] == title


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


def test_a_task_that_sends_a_canvas() -> None:
    first, second = si("starts_chord").apply_async().get(timeout=SECONDS).split()
    assert numbers(AsyncResult(second, app=app).get(timeout=SECONDS)) == 6
    assert first != second


# The worker.


def test_inspect_commands_describe_the_worker() -> None:
    inspect: Any = app.control.inspect(timeout=30, limit=1)
    (name,) = inspect.ping()
    assert name.startswith("suite@")
    assert inspect.clock()[name]["clock"] > 0
    assert inspect.conf()[name]["task_default_queue"] == "feedmill"
    assert "software -> celery" in inspect.report()[name]["ok"]
    assert inspect.stats()[name]["pool"]["implementation"] == "workers.runtime.pool:DevicePool"


def test_many_rejected_commands(worker: Feedmill) -> None:
    for _ in range(12):
        app.control.broadcast("pool_grow", arguments={"n": 1})
    assert app.control.inspect(timeout=30, limit=1).ping()
    assert numbers(add(1).apply_async().get(timeout=SECONDS)) == 2
    assert worker.process.poll() is None


# The list of Celery's tests.

PAGE = ROOT / "docs" / "celery-suite.md"
HERE = Path(__file__).parent


def test_the_list_names_existing_tests() -> None:
    """celery_suite.csv names an existing test for each of Celery's tests; docs/celery-suite.md explains the others."""
    with (HERE / "celery_suite.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert f"reproduces {len(rows)} of the 246 tests" in PAGE.read_text()
    for row in rows:
        assert all(row.values()), row
        names = re.findall(r"(?<!:)\b(test_\w+)(?!\w|\.py)", row["here"])
        assert set(names) <= set(globals()), row
    listed = "\n".join(row["here"] for row in rows)
    for file_name, name in re.findall(r"(test_\w+\.py)::(test_\w+)", listed + PAGE.read_text()):
        (path,) = HERE.parent.rglob(file_name)
        assert f"def {name}(" in path.read_text(), name
    assert set(re.findall(r"“(.*?)”", listed + PAGE.read_text())) <= set(SHAPES)
