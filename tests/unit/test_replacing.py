"""Replacement of the pipeline's model: the model that prepared a row also computes it."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from feedmill.shared.messages import ClassifyOptions, PostError
from feedmill.workers.models.classifiers import LabelSet, Row, Scores
from feedmill.workers.models.weights import Weights
from feedmill.workers.pipeline.message import Message
from tests.support import wait_until
from tests.unit.test_pipeline import Done, Owner, StandIn, TwoCores


class Model(StandIn):
    """A named stand-in with its own recipe and label set. Rejects rows of other models."""

    def __init__(self, name: str, rows: int = 1) -> None:
        super().__init__()
        self.weights = Weights(name, None, None, name)  # type: ignore[arg-type]
        self.labels = LabelSet((f"{name} yes", f"{name} no"), False, name, rows)

    def label_set(self, options: ClassifyOptions) -> LabelSet:  # noqa: ARG002
        return self.labels

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        assert label_set is self.labels
        return super().prepare(texts, label_set)

    def forward(self, rows: Sequence[Row]) -> Any:
        assert all(row.label_set is self.labels for row in rows)
        self.gate.wait()
        self.batches.append(len(rows))
        return Done([0.75] * len(rows))

    def finish(self, rows: Sequence[Row], outputs: Any) -> list[tuple[Row, Scores]]:
        assert all(row.label_set is self.labels for row in rows)
        return [
            (row, dict.fromkeys(self.labels.labels, output))
            for row, output in zip(rows, outputs.values, strict=True)
        ]


class TwoLanes(Model):
    """A named stand-in on two cores, so with two lanes."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.device = TwoCores().device


@contextmanager
def owning(model: StandIn, **settings: Any) -> Iterator[Owner]:
    owner = Owner(model, **settings)
    try:
        yield owner
    finally:
        owner.classifier.gate.set()
        owner.pipeline.stop()


def models_of(message: Message) -> set[str]:
    return {
        outcome.model
        for outcome in message.outcomes
        if outcome and not isinstance(outcome, PostError)
    }


def replace(
    owner: Owner, model: StandIn, then: Callable[[], None] = lambda: None
) -> threading.Event:
    """Replace the model and return an event that is set when the old model is released."""
    replaced = threading.Event()

    def on_replaced() -> None:
        then()
        replaced.set()

    owner.pipeline.replace(model, 2048, on_replaced)
    return replaced


@pytest.mark.parametrize("kind", [Model, TwoLanes])
def test_each_model_computes_the_messages_of_its_time(
    kind: Callable[[str], Model],
) -> None:
    old, new = kind("old"), kind("new")
    with owning(old, batch_rows=4) as owner:
        old.gate.clear()
        before = [owner.send(*["some words"] * 3) for _ in range(10)]
        stored_by_then: list[int] = []
        replaced = replace(
            owner, new, lambda: stored_by_then.append(len(owner.store.written))
        )
        after = [owner.send(*["some words"] * 3) for _ in range(10)]
        wait_until(lambda: owner.waiting() >= 20, "rows of the old model wait")
        assert not new.batches
        assert owner.pipeline.classifier is old
        old.gate.set()
        wait_until(lambda: len(owner.finished) == 20, "all are finished")
        assert [models_of(message) for message in (*before, *after)] == [
            {"old"}
        ] * 10 + [{"new"}] * 10
        assert len(owner.store.written) == 60
        assert sum(old.batches) == sum(new.batches) == 30
        assert replaced.is_set()
        assert stored_by_then == [30], "all results of the old model"
        assert owner.pipeline.classifier is new
        assert owner.failures == 0


def test_pending_replacements_apply_in_order() -> None:
    old = Model("old")
    with owning(old) as owner:
        old.gate.clear()
        messages = [owner.send("one two")]
        events = []
        for name in ("second", "third"):
            events.append(replace(owner, Model(name)))
            messages.append(owner.send("one two"))
        old.gate.set()
        wait_until(
            lambda: (
                len(owner.finished) == 3 and all(event.is_set() for event in events)
            ),
            "all is done",
        )
        assert [models_of(message) for message in messages] == [
            {"old"},
            {"second"},
            {"third"},
        ]


def test_releases_the_old_model_while_idle() -> None:
    """Every lane must release the old model, because memory may not suffice for two models."""
    owner = Owner(TwoLanes("old"), batch_rows=1)
    try:
        owner.results(*["two words"] * 20)
        gone = weakref.ref(owner.classifier)
        owner.classifier = TwoLanes("new")
        assert replace(owner, owner.classifier).wait(120)

        def is_gone() -> bool:
            gc.collect()
            return gone() is None

        wait_until(is_gone, "the old model is collected")
    finally:
        owner.pipeline.stop()


def test_isolated_message_is_computed_by_its_own_model() -> None:
    old, new = Model("old"), Model("new")
    with owning(old) as owner:
        old.gate.clear()
        owner.send("it keeps the device busy")
        wait_until(lambda: owner.started, "the device is busy")
        sent = [
            Message({"posts": [{"id": "s", "title": "two words"}]}, None, deaths={0: 1})
            for _ in range(2)
        ]
        owner.pipeline.submit(sent[0])
        replaced = replace(owner, new)
        owner.pipeline.submit(sent[1])
        old.gate.set()
        wait_until(lambda: len(owner.finished) == 3, "all are finished")
        assert [models_of(message) for message in sent] == [{"old"}, {"new"}]
        assert replaced.is_set()
        assert old.batches == [1, 1]
        assert new.batches == [1]
