"""workers/pipeline/context.py on a simulated clock: steps that count as hung."""

from typing import Any

import pytest

from feedmill.workers.pipeline import pipeline
from feedmill.workers.pipeline.context import Watch
from tests.support import wait_until
from tests.unit.test_pipeline import Owner


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_counts_a_step_that_outlasts_its_limit() -> None:
    clock = Clock()
    watch = Watch(2.0, clock)
    with watch.step("a step", 5.0):
        for _ in range(6):
            assert watch.longer_than(100.0) == []
            clock.now += 1.0
            watch.tick()
        assert [step.what for step in watch.longer_than(100.0)] == ["a step"]


@pytest.mark.parametrize("ticked", [False, True])
def test_excludes_the_time_of_a_pause(ticked: bool) -> None:
    clock = Clock()
    watch = Watch(2.0, clock)
    with watch.step("a step", 5.0):
        clock.now += 3600.0
        if ticked:
            watch.tick()
        assert watch.longer_than(5.0) == []
    with watch.step("a step after the pause", 5.0):
        for _ in range(6):
            watch.tick()
            clock.now += 1.0
        assert len(watch.longer_than(5.0)) == 1, "a pause does not affect later steps"


def test_pause_during_a_forward_pass_keeps_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    class CountingWatch(Watch):
        ticks = 0

        def __init__(self, max_gap: float) -> None:
            super().__init__(max_gap, clock)

        def tick(self) -> None:
            super().tick()
            self.ticks += 1

    monkeypatch.setattr(pipeline, "Watch", CountingWatch)
    owner = Owner(forward_timeout=0.2)
    watch: Any = owner.pipeline._watch
    owner.classifier.gate.clear()
    message = owner.send("paused")
    wait_until(lambda: owner.pipeline._batch_loop._computing[0], "the forward pass began")
    clock.now += 3600.0
    ticks = watch.ticks
    wait_until(lambda: watch.ticks > ticks + 2 or owner.failures, "the watcher checked again")
    assert owner.pipeline.failure is None
    owner.classifier.gate.set()
    wait_until(lambda: message in owner.finished, "the message is finished")
    owner.pipeline.stop()
