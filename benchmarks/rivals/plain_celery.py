"""A typical worker with plain Celery: one post per task, the model loaded at the start of the
worker.

    RIVAL_REDIS_URL=redis://… python -m benchmarks.rivals.plain_celery solo|prefork

`solo` is one process, whose forward pass uses all cores. `prefork`, Celery's default, is one
process per core; each loads the model and uses a single core. How well a forward pass of one row
uses several cores decides which is faster. Both use Feedmill's classifier, so that no slower
pipeline around the model counts against them.
"""

import sys
from typing import Any

import torch
from celery.signals import worker_process_init

from benchmarks.rivals.celery_app import TASK, work, worker_app
from benchmarks.rivals.plain_model import Answer, cores
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import load
from feedmill.workers.models import device
from feedmill.workers.models.classifiers.registry import load_classifier

#: Prefetched messages per process.
PREFETCH = 64


class OneByOne:
    """The model with one forward pass per post."""

    def load(self, **_: Any) -> None:
        settings = load()
        self._classifier = load_classifier(
            settings, device.select_device(settings.device, settings.dtype)
        )
        self._label_set = self._classifier.label_set(ClassifyOptions())

    def load_on_one_core(self, **_: Any) -> None:
        torch.set_num_threads(1)
        self.load()

    def classify(self, text: str) -> Answer:
        (rows,) = self._classifier.prepare([text], self._label_set)
        ((_, scores),) = self._classifier.finish(rows, self._classifier.forward(rows))
        return {"label": max(scores, key=scores.__getitem__), "scores": scores}


def main() -> None:
    app = worker_app(PREFETCH)
    model = OneByOne()

    @app.task(name=TASK)
    def classify(text: str) -> Answer:
        return model.classify(text)

    if sys.argv[1] == "prefork":
        worker_process_init.connect(model.load_on_one_core, weak=False)
        work(app, "prefork", cores())
    else:
        model.load()
        work(app)


if __name__ == "__main__":
    main()
