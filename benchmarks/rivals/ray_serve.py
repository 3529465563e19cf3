"""Serve the model with Ray Serve and its dynamic batching, as Ray's guide shows.

python -m benchmarks.rivals.ray_serve PORT
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import serve
from starlette.requests import Request

from benchmarks.rivals import BATCH_SIZE
from benchmarks.rivals.plain_model import Answer, PlainModel, cores
from feedmill.shared.settings import Settings, load
from feedmill.workers.models import device

#: Seconds to wait for a batch to fill: Ray's default, without effect while the clients keep
#: batches full.
BATCH_WAIT_S = 0.01
#: Maximum number of requests in the replica. The default of 5 would limit every batch to 5.
MAX_ONGOING = 1024
#: Size of Ray's object store in bytes. Requests are small; the default is a third of the machine's
#: memory.
OBJECT_STORE_BYTES = 256 << 20


class RayClassifier:
    """The model in a single replica."""

    def __init__(self, settings: Settings) -> None:
        self._model = PlainModel(settings)

    @serve.batch(max_batch_size=BATCH_SIZE, batch_wait_timeout_s=BATCH_WAIT_S)
    async def classify(self, texts: list[str]) -> list[Answer]:
        # In a thread, so that the event loop keeps reading requests and fills the next batch
        # meanwhile.
        return await asyncio.to_thread(self._model.classify, texts)

    async def __call__(self, request: Request) -> Any:
        return await self.classify((await request.json())["text"])


def start(port: int, settings: Settings) -> Any:
    """Start Ray and its HTTP proxy on this port. Return the deployment of the model."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # usage reports are on by default
    gpus = int(
        device.select_device(settings.device, settings.dtype).torch.type == "cuda"
    )
    # Keeps sockets and logs in the working directory, which is deleted after the run, instead of
    # /tmp/ray.
    ray.init(
        num_cpus=cores(),
        num_gpus=gpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=str(Path.cwd() / "ray"),
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    return serve.deployment(
        num_replicas=1,
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options={"num_cpus": cores(), "num_gpus": gpus},
        logging_config={"enable_access_log": False},
    )(RayClassifier).bind(settings)


def run_until_sigterm(deploy: Callable[[], None]) -> None:
    """Call `deploy`, and shut Ray down on SIGTERM."""
    # SIGTERM acts like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        deploy()
        signal.pause()
    except KeyboardInterrupt:
        serve.shutdown()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    run_until_sigterm(
        lambda: serve.run(start(int(sys.argv[1]), load()), route_prefix="/predict")
    )
