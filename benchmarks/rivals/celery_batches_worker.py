"""The worker that one writes with celery-batches: up to 32 posts a call, in the order in which they came.

    RIVAL_REDIS_URL=redis://… PYTHONPATH=.venv/celery-batches:. python -m benchmarks.rivals.celery_batches_worker

celery-batches 0.11 demands Celery below 5.7, which `make rivals` puts beside it. Nothing that is imported here may
need the Celery that Feedmill needs.
"""

from typing import Any

from celery_batches import Batches

from benchmarks.rivals import BATCH_SIZE
from benchmarks.rivals.celery_app import TASK, work, worker_app
from benchmarks.rivals.plain_model import PlainModel
from shared.settings import load

#: Seconds after which an under-full batch is run: the last one of a backlog.
FLUSH_INTERVAL = 0.1
#: Messages fetched ahead: its documentation asks for more than a batch.
PREFETCH = 4 * BATCH_SIZE


def main() -> None:
    app = worker_app(PREFETCH)
    model = PlainModel(load())
    model.classify(["A first post."])

    @app.task(name=TASK, base=Batches, flush_every=BATCH_SIZE, flush_interval=FLUSH_INTERVAL)
    def classify(requests: list[Any]) -> None:
        answers = model.classify([request.args[0] for request in requests])
        for request, answer in zip(requests, answers, strict=True):
            # As its documentation says: nobody else stores the results of a batch.
            app.backend.mark_as_done(request.id, answer, request=request)

    work(app)


if __name__ == "__main__":
    main()
