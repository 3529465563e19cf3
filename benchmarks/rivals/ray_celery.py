"""Take tasks from a Celery queue with Ray Serve's task consumer, in micro-batches within a token budget.

    RIVAL_REDIS_URL=redis://… python -m benchmarks.rivals.ray_celery

As Ray's guide to asynchronous inference shows: a deployment with `@task_consumer` runs Celery's worker in threads, one
task each. Task handlers cannot be coroutines, so that batching is another deployment's, which they call.
`batch_size_fn` limits a batch to the cost of its padded rows instead of a number of posts.
"""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.schema import CeleryAdapterConfig, TaskProcessorConfig
from ray.serve.task_consumer import task_consumer, task_handler

from benchmarks.rivals.by_http import IN_FLIGHT
from benchmarks.rivals.celery_app import QUEUE_DATABASE, REDIS_URL, RESULTS_DATABASE, TASK
from benchmarks.rivals.plain_model import Answer, PlainModel, cores
from benchmarks.rivals.ray_serve import BATCH_WAIT_S, MAX_ONGOING, OBJECT_STORE_BYTES
from shared.settings import Settings, load
from workers.models import device

#: Name of the queue that `send_task` uses by default.
QUEUE = "celery"
#: Characters per batch, padded: about 2,048 tokens, Feedmill's budget for this CPU. And characters per post, at which
#: the model's limit of 256 tokens truncates most texts.
BATCH_CHARACTERS, POST_CHARACTERS = 8192, 1024


def padded_characters(texts: Sequence[str]) -> int:
    """Return the cost of a padded batch."""
    return len(texts) * min(POST_CHARACTERS, max(map(len, texts), default=0))


class Model:
    """The model in a single replica."""

    def __init__(self, settings: Settings) -> None:
        self._model = PlainModel(settings)

    @serve.batch(max_batch_size=BATCH_CHARACTERS, batch_wait_timeout_s=BATCH_WAIT_S, batch_size_fn=padded_characters)
    async def classify(self, texts: list[str]) -> list[Answer]:
        return await asyncio.to_thread(self._model.classify, texts)


def consumer_class(url: str) -> Any:
    """Return the class that consumes the queue of a Redis."""

    @task_consumer(
        task_processor_config=TaskProcessorConfig(
            queue_name=QUEUE,
            adapter_config=CeleryAdapterConfig(
                broker_url=f"{url}/{QUEUE_DATABASE}", backend_url=f"{url}/{RESULTS_DATABASE}"
            ),
        )
    )
    class Consumer:
        def __init__(self, model: Any) -> None:
            self._model = model

        @task_handler(name=TASK)
        def classify(self, text: str) -> Any:
            return self._model.classify.remote(text).result()

    return Consumer


def main() -> None:
    settings, url = load(), os.environ[REDIS_URL]
    gpus = int(device.select_device(settings.device, settings.dtype).torch.type == "cuda")
    # SIGTERM acts like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        ray.init(
            num_cpus=cores(),
            num_gpus=gpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(Path.cwd() / "ray"),
        )
        model = serve.deployment(
            max_ongoing_requests=MAX_ONGOING, ray_actor_options={"num_cpus": cores(), "num_gpus": gpus}
        )(Model)
        # The consumer runs as many threads as it may have ongoing requests.
        consumer = serve.deployment(max_ongoing_requests=IN_FLIGHT, ray_actor_options={"num_cpus": 0})(
            consumer_class(url)
        )
        serve.run(consumer.bind(model.bind(settings)), route_prefix=None)
        signal.pause()
    except KeyboardInterrupt:
        serve.shutdown()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
