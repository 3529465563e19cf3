"""A typical worker with celery-batches: up to 32 posts per call, in arrival order.

    RIVAL_REDIS_URL=redis://… PYTHONPATH=.venv/celery-batches:. python -m
    benchmarks.rivals.celery_batches_worker

celery-batches 0.11 requires a Celery below 5.7; `make rivals` installs both in a separate folder.
No module imported here may require Feedmill's Celery version.
"""

from typing import Any

from celery_batches import Batches

from benchmarks.rivals import BATCH_SIZE
from benchmarks.rivals.celery_app import TASK, work, worker_app
from benchmarks.rivals.plain_model import PlainModel
from feedmill.shared.settings import load

#: Seconds after which an incomplete batch runs, such as the last one of a backlog.
FLUSH_INTERVAL_S = 0.1
#: Prefetched messages; the documentation of celery-batches recommends more than a batch.
PREFETCH = 4 * BATCH_SIZE


def main() -> None:
    app = worker_app(PREFETCH)
    model = PlainModel(load())
    model.classify(["A first post."])

    @app.task(
        name=TASK, base=Batches, flush_every=BATCH_SIZE, flush_interval=FLUSH_INTERVAL_S
    )
    def classify(requests: list[Any]) -> None:
        answers = model.classify([request.args[0] for request in requests])
        for request, answer in zip(requests, answers, strict=True):
            # celery-batches does not store the results itself; its documentation shows this call.
            app.backend.mark_as_done(request.id, answer, request=request)

    work(app)


if __name__ == "__main__":
    main()
