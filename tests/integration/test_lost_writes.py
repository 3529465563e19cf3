"""Workers store results again after Redis crashes and loses its latest writes."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from feedmill.shared.broker import connect
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers import Row
from tests.support import Restartable, has_results, wait_until
from tests.unit.test_pipeline import Owner, StandIn


class TurnByTurn(StandIn):
    """A stand-in model. Each forward pass waits until the test releases `turns`."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = threading.Semaphore(0)

    def forward(self, rows: Sequence[Row]) -> Any:
        self.turns.acquire()
        return super().forward(rows)


class Losing(Restartable):
    """A Redis that can lose all writes since `mark`."""

    def mark(self) -> None:
        self.client.set("mark", 1)
        self._size = self._log().stat().st_size

    def lose(self) -> None:
        """Kill Redis, truncate its append-only file at `mark`, and start it again."""
        self.kill()
        os.truncate(self._log(), self._size)
        # Not asked of Redis: the worker rewrites its results as soon as it answers.
        assert b"feedmill:stored" not in self._log().read_bytes()
        self.start()

    def _log(self) -> Path:
        (log,) = [
            *self.folder.glob("appendonlydir/*.incr.aof"),
            *self.folder.glob("appendonly.aof"),
        ]
        return log


@pytest.fixture
def redis(redis_path: str, tmp_path: Path) -> Iterator[Losing]:
    server = Losing(redis_path, tmp_path)
    yield server
    server.stop()


@pytest.fixture
def store(redis: Losing) -> ResultsStore:
    settings = Settings.model_validate({"redis_url": redis.url})
    return ResultsStore(connect(settings), settings)


@pytest.fixture
def owner(store: ResultsStore) -> Iterator[Owner]:
    made = Owner(TurnByTurn(), store=store, batch_rows=1)
    yield made
    made.classifier.turns.release(100)  # type: ignore[attr-defined]
    made.pipeline.stop()


def stored(redis: Losing, *ids: str) -> Callable[[], bool]:
    """Return a predicate for `wait_until`: each of these posts has a result."""
    return lambda: all(has_results(redis.client, each) for each in ids)


def give(owner: Owner, turns: int) -> None:
    owner.classifier.turns.release(turns)  # type: ignore[attr-defined]


def test_lost_results_are_rewritten_before_acknowledgement(
    owner: Owner, redis: Losing
) -> None:
    there: list[bool] = []
    owner.finishing = lambda _: there.append(stored(redis, "0", "1")())
    redis.mark()
    message = owner.send("first", "second")
    give(owner, 1)
    wait_until(
        lambda: stored(redis, "0")() or stored(redis, "1")(), "one result is stored"
    )
    redis.lose()
    give(owner, 1)
    wait_until(lambda: message in owner.finished, "the message is finished")
    assert there == [True]


def test_lost_results_of_acknowledged_messages_are_rewritten(
    owner: Owner, redis: Losing
) -> None:
    redis.mark()
    message = owner.send("only", "")
    give(owner, 1)
    wait_until(lambda: message in owner.finished, "the message is finished")
    redis.lose()
    wait_until(stored(redis, "0"), "the result is stored again")
    wait_until(
        lambda: redis.client.xlen("feedmill:dead"), "the dead letter is stored again"
    )
    assert (
        redis.client.xlen("feedmill:results") == redis.client.xlen("feedmill:dead") == 1
    )


def test_lost_results_that_answered_a_message_are_rewritten(
    owner: Owner, redis: Losing, store: ResultsStore
) -> None:
    """The worker that computed the results is gone, so the worker that answered from them must
    rewrite them.
    """
    redis.mark()
    other = Owner(
        StandIn(), store=ResultsStore(connect(store._settings), store._settings)
    )
    other.results("the same")
    other.pipeline.stop()
    answered = owner.send("the same", "another")
    wait_until(
        lambda: owner.pipeline.statistics.totals.answered == 1,
        ("one post is answered from the store"),
    )
    redis.lose()
    give(owner, 1)
    wait_until(lambda: answered in owner.finished, "the message is finished")
    assert stored(redis, "0", "1")()
    assert owner.classifier.batches == [1]


def test_results_lost_after_their_lookup_are_rewritten(
    owner: Owner, redis: Losing, store: ResultsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis.mark()
    other = Owner(
        StandIn(), store=ResultsStore(connect(store._settings), store._settings)
    )
    other.results("the same")
    other.pipeline.stop()

    def find_and_lose(wanted: Sequence[tuple[str, str]]) -> Any:
        found = find(wanted)
        redis.lose()
        return found

    find = store.find
    monkeypatch.setattr(store, "find", find_and_lose)
    answered = owner.send("the same", "another")
    give(owner, 1)
    wait_until(lambda: answered in owner.finished, "the message is finished")
    assert stored(redis, "0", "1")()
    assert redis.client.xlen("feedmill:dead") == 0


def test_a_reset_connection_rewrites_nothing(
    owner: Owner, redis: Losing, store: ResultsStore
) -> None:
    give(owner, 4)
    owner.results("one", "two", "three")
    before = store.counters().repeated
    redis.client.client_kill_filter(_type="normal", skipme=True)
    owner.results("four")
    counters = store.counters()
    assert (counters.stored, counters.repeated) == (
        redis.client.xlen("feedmill:results"),
        before,
    )
