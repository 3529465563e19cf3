"""Rivals over HTTP: a model server with dynamic batching, and enough concurrent clients to keep its batches full."""

import asyncio
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec

from benchmarks.rivals import BenchmarkJob, NotInstalled
from benchmarks.rivals.processes import Processes
from benchmarks.running import free_port
from feedmill.shared.messages import Post

#: Concurrent requests: three batches, one on the device while the next two fill.
IN_FLIGHT = 96
#: Timeout of a request in seconds.
REQUEST_TIMEOUT_S = 120.0


class OverHttp:
    """A server that runs `module` on a free port and returns the label and scores of a post's text."""

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
        request = urllib.request.Request(self._url, b'{"text": "A first post."}', {"Content-Type": "application/json"})  # noqa: S310
        with suppress(OSError), urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:  # noqa: S310 - our own address
            return bool(answer.status == 200)
        return False

    def run(self, posts: Sequence[Post]) -> None:
        self._labels = asyncio.run(self._ask([post.text for post in posts]))

    async def _ask(self, texts: Sequence[str]) -> list[str]:
        import aiohttp  # noqa: PLC0415 - installed only with the rivals

        labels = [""] * len(texts)
        waiting = iter(enumerate(texts))

        async def client() -> None:
            for index, text in waiting:
                async with session.post(self._url, json={"text": text}) as answer:
                    answer.raise_for_status()
                    labels[index] = (await answer.json())["label"]

        connections = aiohttp.TCPConnector(limit=IN_FLIGHT)
        limit = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        async with aiohttp.ClientSession(connector=connections, timeout=limit) as session:  # noqa: SIM117 - too long for one line
            async with asyncio.TaskGroup() as clients:
                for _ in range(IN_FLIGHT):
                    clients.create_task(client())
        return labels

    def labels(self) -> list[str]:
        return self._labels

    def stop(self) -> None:
        self._processes.stop()


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
