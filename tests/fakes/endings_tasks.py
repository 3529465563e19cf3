"""Tasks for tests/e2e/test_endings.py, beside those of the differential test.

Both workers load this module.

On the stock worker, the module also replaces the model by the stand-in that Feedmill's worker has.
On both, it lowers the limits of messages to LIMITS.
"""

import os
import time
from collections.abc import Sequence
from typing import Any

from celery import shared_task

from feedmill.shared.broker import connect
from feedmill.shared.settings import load
from feedmill.workers.runtime.task import ClassifyTask
from tests.fakes import constants, differential_tasks, standin_worker

#: Environment variable that is set for the stock worker.
STOCK = "FAKE_STOCK_WORKER"
#: Limits of both workers, for messages that exceed them.
LIMITS = {
    "feedmill.shared.encoding.MAX_MESSAGE": 200_000,
    "feedmill.shared.encoding.MAX_SEPARATORS": 20_000,
}
#: Beginning of the titles of posts whose forward pass lasts until their message's result is
#: stored.
SLOW = "slow "


@shared_task(bind=True, base=ClassifyTask, name="differential.slow")
def slow(self: ClassifyTask, *_: Any, **__: Any) -> object:
    """Exceed a time limit: on a stock worker in the body, on Feedmill's in the forward pass."""
    outcomes = self.outcomes()
    time.sleep(600)
    return outcomes


@shared_task(bind=True, base=ClassifyTask, name="differential.exits")
def exits(self: ClassifyTask, *_: Any, **__: Any) -> object:
    self.outcomes()
    raise SystemExit(3)


def _use_stand_in() -> None:
    standin_worker.replace_libraries()
    from feedmill.workers.pipeline import offline  # noqa: PLC0415 - after torch was replaced

    module: Any = offline
    module.load_classifier = standin_worker.load
    module.select_devices = lambda *_: [standin_worker.StandIn.device]


def _lengthen_passes() -> None:
    """Let a forward pass last until the results of all its slow messages are stored."""
    from feedmill.workers.pipeline.backlog import BatchLoop  # noqa: PLC0415 - after torch was replaced

    forward = BatchLoop._forward

    def forward_until_stored(self: BatchLoop, loaded: Any, rows: Sequence[Any]) -> Any:
        slow_ids = {
            row.owner.message.task_id
            for row in rows
            if row.owner.post.title.startswith(SLOW)
        }
        keys = [f"celery-task-meta-{task_id}" for task_id in slow_ids]
        redis: Any = connect(load()) if keys else None
        while keys and redis.exists(*keys) < len(keys):
            time.sleep(0.02)
        return forward(self, loaded, rows)

    BatchLoop._forward = forward_until_stored  # type: ignore[method-assign]


__all__ = ["differential_tasks"]

# Not in the tests' own process, whose other tests would have these limits, too.
if os.environ.get("FEEDMILL_INCLUDE") == __name__:
    constants.replace(LIMITS)
    if STOCK in os.environ:
        _use_stand_in()
    else:
        _lengthen_passes()
