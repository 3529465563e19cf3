"""Rivals over HTTP: a model server with dynamic batching, and enough concurrent clients to keep
its batches full.
"""

import asyncio
import json
import os
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.rivals import BenchmarkJob, NotInstalled
from benchmarks.rivals.processes import Processes
from benchmarks.running import free_port
from feedmill.shared.messages import Post
from feedmill.shared.settings import DESCRIBED_TOPICS
from feedmill.workers.models.weights import locate

#: Concurrent requests: three batches, one on the device while the next two fill.
IN_FLIGHT = 96
#: Timeout of a request in seconds.
REQUEST_TIMEOUT_S = 120.0


class OverHttp:
    """A server that runs `module` on a free port and returns the label and scores of a post's
    text.
    """

    def __init__(self, module: str, job: BenchmarkJob, name: str) -> None:
        self._module = module
        self._processes = Processes(job.folder / name)
        self._labels: list[str] = []

    def start(self) -> None:
        port = free_port()
        self._url = f"http://127.0.0.1:{port}/predict"
        server = self._processes.start_module(self._module, str(port))
        server.wait_until(self._answers)

    def _answers(self) -> bool:
        request = urllib.request.Request(  # noqa: S310 - our own address
            self._url,
            b'{"text": "A first post."}',
            {"Content-Type": "application/json"},
        )
        with (
            suppress(OSError),
            urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer,  # noqa: S310 - as above
        ):
            return bool(answer.status == 200)
        return False

    def run(self, posts: Sequence[Post]) -> None:
        bodies = [{"text": post.text} for post in posts]
        answers = asyncio.run(ask_all(self._url, bodies))
        self._labels = [answer["label"] for answer in answers]

    def labels(self) -> list[str]:
        return self._labels

    def stop(self) -> None:
        self._processes.stop()


async def ask_all(
    url: str,
    bodies: Sequence[object],
    read: Callable[[Any], Any] = lambda answer: answer,
) -> list[Any]:
    """Post all bodies, IN_FLIGHT at a time; return what `read` makes of the answers, in order."""
    import aiohttp  # noqa: PLC0415 - installed only with the rivals

    answers: list[Any] = [None] * len(bodies)
    waiting = iter(enumerate(bodies))

    async def client() -> None:
        for index, body in waiting:
            async with session.post(url, json=body) as answer:
                answer.raise_for_status()
                answers[index] = read(await answer.json())

    connections = aiohttp.TCPConnector(limit=IN_FLIGHT)
    limit = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(connector=connections, timeout=limit) as session,
        asyncio.TaskGroup() as clients,
    ):
        for _ in range(IN_FLIGHT):
            clients.create_task(client())
    return answers


class Infinity:
    """Infinity's server, which has an environment of its own: it needs another transformers.

    It embeds texts. The client compares them with the labels' embeddings, as Feedmill's worker
    does.
    """

    def __init__(self, job: BenchmarkJob) -> None:
        self._program = os.environ.get("INFINITY", "")
        if not (self._program and find_spec("aiohttp")):
            raise NotInstalled(
                "Left out: infinity. Install infinity-emb[server,torch] into an environment of "
                "its own, set INFINITY to its infinity_emb, and run `make rivals`."
            )
        self._processes = Processes(job.folder / "infinity")
        self._model: Path = locate(job.settings.model).folder
        dtype = str(job.device.dtype).removeprefix("torch.")
        self._dtype = dtype if dtype in {"float16", "float32"} else "auto"
        self._labels: list[str] = []

    def start(self) -> None:
        port = free_port()
        self._url = f"http://127.0.0.1:{port}/embeddings"
        command = [
            self._program,
            "v2",
            *("--model-id", str(self._model)),
            *("--port", str(port)),
            *("--engine", "torch"),
            *("--dtype", self._dtype),
            "--no-bettertransformer",
            "--no-model-warmup",
        ]
        offline = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
        server = self._processes.start("infinity", command, offline)
        server.wait_until(self._answers)
        import numpy as np  # noqa: PLC0415 - installed only with the rivals

        vectors = []
        for texts in DESCRIBED_TOPICS.values():
            embedded = asyncio.run(
                ask_all(self._url, [_to_embed(list(texts))], _vectors)
            )
            vector = np.mean(embedded[0], axis=0)
            vectors.append(vector / np.linalg.norm(vector))
        self._label_vectors = np.array(vectors)

    def _answers(self) -> bool:
        body = json.dumps(_to_embed(["A first post."])).encode()
        request = urllib.request.Request(  # noqa: S310 - our own address
            self._url, body, {"Content-Type": "application/json"}
        )
        with (
            suppress(OSError),
            urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer,  # noqa: S310 - as above
        ):
            return bool(answer.status == 200)
        return False

    def run(self, posts: Sequence[Post]) -> None:
        names = list(DESCRIBED_TOPICS)
        bodies = [_to_embed([post.text]) for post in posts]
        vectors = asyncio.run(ask_all(self._url, bodies, _vectors))
        self._labels = []
        for (vector,) in vectors:
            place = int((self._label_vectors @ vector).argmax())
            self._labels.append(names[place])

    def labels(self) -> list[str]:
        return self._labels

    def stop(self) -> None:
        self._processes.stop()


def _to_embed(texts: list[str]) -> dict[str, Any]:
    return {"model": "model", "input": texts}


def _vectors(answer: Any) -> Any:
    return [item["embedding"] for item in answer["data"]]


def ray_serve(job: BenchmarkJob) -> OverHttp:
    """Ray Serve. Raises NotInstalled."""
    return _server("ray_serve", "ray", "benchmarks.rivals.ray_serve", job)


def litserve(job: BenchmarkJob) -> OverHttp:
    """LitServe. Raises NotInstalled."""
    return _server("litserve", "litserve", "benchmarks.rivals.lit_serve", job)


def _server(name: str, library: str, module: str, job: BenchmarkJob) -> OverHttp:
    if not (find_spec(library) and find_spec("aiohttp")):
        raise NotInstalled(f"Left out: {name}. Install it with `make rivals`.")
    return OverHttp(module, job, name)
