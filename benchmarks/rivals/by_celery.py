"""Rivals on Celery.

Each uses a private redis-server for its queue and results; a task classifies one post.

Plain `send_task` publishes one post per message. Results are stored in a separate Redis database,
so that DBSIZE counts them. DBSIZE is cheaper than Celery's `get`, which subscribes to each result.
"""

import json
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from celery import Celery
from redis import Redis
from redis.exceptions import RedisError

from benchmarks.rivals import BenchmarkJob, NotInstalled
from benchmarks.rivals.celery_app import (
    QUEUE_DATABASE,
    REDIS_URL,
    RESULTS_DATABASE,
    TASK,
)
from benchmarks.rivals.processes import Processes
from benchmarks.running import free_port
from feedmill.shared.errors import StackError
from feedmill.shared.messages import Post
from feedmill.stack.embedded import find_redis_server
from feedmill.stack.processes import Child

#: Folder in which `make rivals` installs celery-batches and the Celery version it requires.
CELERY_BATCHES = Path(sys.prefix) / "celery-batches"
#: Seconds between checks of the number of results; the same as for Feedmill.
POLL_INTERVAL_S = 0.02
#: Seconds without a new result after which the run aborts.
STALL_TIMEOUT_S = 120.0


class OnCelery:
    """A worker process with a private Redis. shadow: a folder of packages that take precedence in
    the worker.
    """

    def __init__(
        self, module: str, folder: Path, *arguments: str, shadow: Path | None = None
    ) -> None:
        self._module = module
        self._arguments = arguments
        self._shadow = shadow
        self._processes = Processes(folder)
        self._ids: list[str] = []

    def start(self) -> None:
        port, password = free_port(), secrets.token_urlsafe(24)
        url = f"redis://:{password}@127.0.0.1:{port}"
        configuration = (
            f"bind 127.0.0.1\nport {port}\nrequirepass {password}\nsave "
            '""\nappendonly no\n'
        )
        server = self._processes.start(
            "redis", [find_redis_server(), "-"], {}, stdin=configuration
        )
        self._results = Redis.from_url(
            f"{url}/{RESULTS_DATABASE}", decode_responses=True
        )
        server.wait_until(self._redis_answers)
        # Without a result backend, publishing subscribes to nothing; the worker stores its results
        # nevertheless.
        self._app = Celery(broker=f"{url}/{QUEUE_DATABASE}")
        self._worker: Child = self._processes.start_module(
            self._module, *self._arguments, shadow=self._shadow, **{REDIS_URL: url}
        )
        inspect = self._app.control.inspect(timeout=1, limit=1)
        self._worker.wait_until(lambda: bool(inspect.ping()))

    def _redis_answers(self) -> bool:
        with suppress(RedisError):
            return bool(self._results.ping())
        return False

    def run(self, posts: Sequence[Post]) -> None:
        before: Any = self._results.dbsize()
        self._ids = [self._app.send_task(TASK, args=(post.text,)).id for post in posts]
        seen, since = 0, time.monotonic()
        while (stored := int(self._results.dbsize()) - before) < len(posts):
            if stored > seen:
                seen, since = stored, time.monotonic()
            if (
                self._worker.process.poll() is not None
                or time.monotonic() - since > STALL_TIMEOUT_S
            ):
                raise StackError(
                    f"The worker stopped after {stored} of {len(posts)} results. "
                    f"{self._worker.log_tail()}"
                )
            time.sleep(POLL_INTERVAL_S)

    def labels(self) -> list[str]:
        found: Any = self._results.mget(
            [f"celery-task-meta-{task}" for task in self._ids]
        )
        return [json.loads(value)["result"]["label"] for value in found]

    def stop(self) -> None:
        self._processes.stop()


def plain_celery(job: BenchmarkJob) -> OnCelery:
    """Plain Celery with one post per task, in one process that uses all cores."""
    return OnCelery(
        "benchmarks.rivals.plain_celery", job.folder / "plain_celery", "solo"
    )


def plain_celery_prefork(job: BenchmarkJob) -> OnCelery:
    """Plain Celery with one post per task and its default pool: one process with a model
    per core.
    """
    return OnCelery(
        "benchmarks.rivals.plain_celery", job.folder / "plain_celery_prefork", "prefork"
    )


def celery_batches(job: BenchmarkJob) -> OnCelery:
    """The library celery-batches. Raises NotInstalled."""
    if not (CELERY_BATCHES / "celery_batches").is_dir():
        raise NotInstalled(
            "Left out: celery_batches. `make rivals` installs celery-batches with the Celery "
            "version it requires."
        )
    return OnCelery(
        "benchmarks.rivals.celery_batches_worker",
        job.folder / "celery_batches",
        shadow=CELERY_BATCHES,
    )


def ray_consumer(job: BenchmarkJob) -> OnCelery:
    """Ray Serve's task consumer. Raises NotInstalled."""
    if not find_spec("ray"):
        raise NotInstalled("Left out: ray_consumer. Install it with `make rivals`.")
    return OnCelery(
        "benchmarks.rivals.ray_consumer", job.folder / "ray_consumer", str(free_port())
    )
