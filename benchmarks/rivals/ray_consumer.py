"""Take tasks from a Celery queue with Ray Serve's task consumer (alpha), as Ray's guide shows, and
batch them.

RIVAL_REDIS_URL=redis://… python -m benchmarks.rivals.ray_consumer PORT

The handler of a task cannot be a coroutine, so it calls the deployment with the batches. Ray's
Celery worker runs as many handlers at a time as `max_ongoing_requests` allows.
"""

import os
import sys
from typing import Any

from ray import serve
from ray.serve.schema import CeleryAdapterConfig, TaskProcessorConfig
from ray.serve.task_consumer import task_consumer, task_handler

from benchmarks.rivals.celery_app import (
    QUEUE_DATABASE,
    REDIS_URL,
    RESULTS_DATABASE,
    TASK,
)
from benchmarks.rivals.ray_serve import run_until_sigterm, start
from feedmill.shared.settings import load

#: Tasks at a time: three batches, as the clients of the HTTP variants keep in flight.
IN_FLIGHT = 96


def deploy() -> None:
    url = os.environ[REDIS_URL]
    adapter = CeleryAdapterConfig(
        broker_url=f"{url}/{QUEUE_DATABASE}", backend_url=f"{url}/{RESULTS_DATABASE}"
    )

    @serve.deployment(
        num_replicas=1,
        max_ongoing_requests=IN_FLIGHT,
        ray_actor_options={"num_cpus": 0},
    )
    @task_consumer(
        task_processor_config=TaskProcessorConfig(
            queue_name="celery", adapter_config=adapter
        )
    )
    class Consumer:
        def __init__(self, model: Any) -> None:
            self._model = model

        @task_handler(name=TASK)
        def classify(self, text: str) -> Any:
            return self._model.classify.remote(text).result()

    consumer: Any = Consumer  # a deployment
    serve.run(consumer.bind(start(int(sys.argv[1]), load())), route_prefix=None)


if __name__ == "__main__":
    run_until_sigterm(deploy)
