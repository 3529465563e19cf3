"""Process Feedmill's outcomes with your own tasks on your own worker. Needs `celery[redis]`.

    export FEEDMILL_REDIS_URL=redis://:password@127.0.0.1:6379/0
    celery -A own_tasks worker --pool solo &
    python own_tasks.py

Feedmill's worker publishes these tasks and knows only their signatures, so each signature names
its queue.
"""

import os
from collections import Counter
from typing import Any

from celery import Celery, chord, group
from celery.canvas import Signature
from celery.result import AsyncResult

URL = os.environ["FEEDMILL_REDIS_URL"]
Outcomes = list[dict[str, Any]]

app = Celery("own_tasks", broker=URL, backend=URL, set_as_current=False)
app.conf.task_default_queue = "own"


def classify(posts: list[dict[str, Any]], **options: Any) -> Signature:
    """Return a signature of Feedmill's task, to send or to use in a canvas."""
    arguments = {"version": 1, "posts": posts, **options}
    return app.signature("feedmill.classify", kwargs=arguments, queue="feedmill")


def own(task: Any) -> Signature:
    """Return a signature of one of the tasks below.

    The task receives the previous task's result as its argument.
    """
    return app.signature(task.name, queue="own")


@app.task(name="own.labels")
def labels(outcomes: Outcomes) -> dict[str, str | None]:
    """Return each post's label. Runs in a chain, after a message."""
    return {outcome["id"]: outcome.get("label") for outcome in outcomes}


@app.task(name="own.count")
def count(messages: list[Outcomes]) -> dict[str, int]:
    """Count the posts of each label.

    Runs as the callback of a chord, once all of the chord's messages are finished.
    """
    return Counter(
        outcome.get("label", "none") for outcomes in messages for outcome in outcomes
    )


@app.task(name="own.failed")
def failed(message_id: str) -> str:
    """Return a failed message's error."""
    error = AsyncResult(message_id, app=app).result
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    MESSAGES = [
        [
            {"id": "b1", "title": "The keeper saved two penalties"},
            {"id": "b2", "title": "A draw in the last minute"},
        ],
        [{"id": "b3", "title": "How long do dried beans keep?"}],
    ]
    print(
        "group:",
        [
            len(outcomes)
            for outcomes in group(map(classify, MESSAGES))().get(timeout=60)
        ],
    )
    print("chain:", (classify(MESSAGES[0]) | own(labels))().get(timeout=60))
    print("chord:", chord(map(classify, MESSAGES), own(count))().get(timeout=60))
