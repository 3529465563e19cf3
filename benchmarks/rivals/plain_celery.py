"""The worker that one writes with plain Celery: one post a task, the model loaded when the worker starts.

    RIVAL_REDIS_URL=redis://… python -m benchmarks.rivals.plain_celery

It classifies its one post with Feedmill's own classifier, which takes less time for one row than a pipeline does.
"""

from typing import Any

from benchmarks.rivals.celery_app import TASK, work, worker_app
from shared.messages import ClassifyOptions
from shared.settings import load
from workers import device
from workers.classifiers.similarity import Similarity
from workers.weights import locate

#: Messages that the worker fetches ahead.
PREFETCH = 64


def main() -> None:
    app = worker_app(PREFETCH)
    settings = load()
    classifier = Similarity(locate(settings.model), device.choose(settings.device, settings.dtype), settings)
    classifier.warm_up()
    label_set = classifier.label_set(ClassifyOptions())

    @app.task(name=TASK)
    def classify(text: str) -> dict[str, Any]:
        (rows,) = classifier.prepare([text], label_set)
        ((_, scores),) = classifier.finish(rows, classifier.forward(rows))
        return {"label": max(scores, key=scores.__getitem__), "scores": scores}

    work(app)


if __name__ == "__main__":
    main()
