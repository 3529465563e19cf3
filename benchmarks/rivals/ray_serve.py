"""The model behind Ray Serve with its dynamic batching, as its guide shows it.

python -m benchmarks.rivals.ray_serve PORT
"""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import ray
from ray import serve
from starlette.requests import Request

from benchmarks.rivals import BATCH_SIZE
from benchmarks.rivals.plain_model import Answer, PlainModel, cores
from shared.settings import Settings, load
from workers import device

#: Seconds that a batch waits to be filled: its default, which it never needs while clients keep it full.
BATCH_WAIT = 0.01
#: Requests that may wait in the one replica; its default of 5 would keep every batch at 5.
MAX_ONGOING = 1024
#: Bytes. Requests are small, and the default takes a third of the memory.
OBJECT_STORE = 256 << 20


class Classifier:
    """One replica with the model."""

    def __init__(self, settings: Settings) -> None:
        self._model = PlainModel(settings)

    @serve.batch(max_batch_size=BATCH_SIZE, batch_wait_timeout_s=BATCH_WAIT)
    async def classify(self, texts: list[str]) -> list[Answer]:
        # In a thread: the event loop goes on reading requests, so that the next batch is full by then.
        return await asyncio.to_thread(self._model.classify, texts)

    async def __call__(self, request: Request) -> Any:
        return await self.classify((await request.json())["text"])


def main() -> None:
    settings = load()
    gpus = int(device.choose(settings.device, settings.dtype).torch.type == "cuda")
    # SIGTERM leaves by the same way as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        # Its sockets and logs in the working directory, which is gone after the run, rather than in /tmp/ray.
        ray.init(
            num_cpus=cores(),
            num_gpus=gpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE,
            _temp_dir=str(Path.cwd() / "ray"),
        )
        serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
        replica = serve.deployment(
            num_replicas=1,
            max_ongoing_requests=MAX_ONGOING,
            ray_actor_options={"num_cpus": cores(), "num_gpus": gpus},
            logging_config={"enable_access_log": False},
        )(Classifier)
        serve.run(replica.bind(settings), route_prefix="/predict")
        signal.pause()
    except KeyboardInterrupt:
        serve.shutdown()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
