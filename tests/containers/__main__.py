"""Build the images and run docker/compose.yaml under faults (`make containers`).

Needs root, Docker and its compose plugin. Phases:

1. Build both images and start the stack: two workers, `feedmill metrics`, Flower, Prometheus.
2. Six times, send posts and, while they wait: kill a worker, cut one off from Redis' network,
   pause one, kill Redis, scale to three workers and back to two, stop everything and start it
   again. After each, all posts must be stored, no dead letter written, all containers and
   `feedmill health` healthy, and Prometheus' figures right. What ends on SIGTERM must exit with
   status 0.

The last line is JSON. Exits 1 if a phase fails. Afterwards, no container, volume or network is
left.

Without a registry, import a base image and name it with --debian, which takes Redis and Prometheus
from Debian, too:

    debootstrap --include=ca-certificates,python3,python3-venv,python3-pip,python-is-python3
    bookworm root
    tar -C root -c . | docker import - feedmill-python
    python -m tests.containers --debian feedmill-python
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.containers import stack as docker
from tests.containers.stack import (
    HEALTHY_S,
    PROJECT,
    ContainersError,
    Stack,
    inspect,
    tell,
    until,
)

#: Posts of all phases.
POSTS = 3000
#: The largest worker image for CPUs, in bytes.
MAX_WORKER_BYTES = 900 * 10**6
#: Seconds for the posts of a phase to be stored.
STORED_S = 300.0
#: Seconds that a worker is cut off or paused: longer than its leases.
AWAY_S = 12.0
WORKERS = 2


class Run:
    """The phases with faults."""

    def __init__(self, folder: Path, stack: Stack) -> None:
        self._folder, self._stack = folder, stack
        self._sent = 0
        self.phases: dict[str, dict[str, Any]] = {}
        self.exit_statuses: list[dict[str, list[int]]] = []

    def go(self) -> dict[str, Any]:
        self._stack.scale(WORKERS)
        self._stack.wait_until_healthy()
        self._check_privileges()
        faults = [
            self._kill_a_worker, self._cut_a_worker_off, self._pause_a_worker, self._kill_redis,
            self._scale, self._stop
        ]  # fmt: skip
        for fault in faults:
            self._phase(fault.__name__.strip("_"), fault, POSTS // len(faults))
        ids = self._stack.result_ids()
        self._require(
            sorted(ids) == [post["id"] for post in _posts(0, self._sent)],
            "one result of each post",
        )
        self._end()
        self._stack.compose("down", "--volumes")
        volumes, networks = (
            docker.run(
                "docker", "volume", "ls", "--quiet", "--filter", f"name={PROJECT}"
            ),
            docker.run(
                "docker", "network", "ls", "--quiet", "--filter", f"name={PROJECT}"
            ),
        )
        self._require(
            not volumes + networks,
            (f"no volume or network left by `down --volumes`: {volumes} {networks}"),
        )
        return {
            "sent": self._sent,
            "stored": len(set(ids)),
            "dead_letters": 0,
            "phases": self.phases,
            "exit_statuses": self.exit_statuses,
            "volumes_left": len(volumes.split()),
        }

    def _require(self, holds: object, description: str) -> None:
        if not holds:
            raise ContainersError(f"not true: {description}")

    def _check_privileges(self) -> None:
        template = (
            "{{.Config.User}} {{.HostConfig.ReadonlyRootfs}} {{.HostConfig.CapDrop}}"
        )
        for each in self._stack.ids("worker-cpu", "metrics", "flower"):
            self._require(
                inspect(each, template) == "10001 true [ALL]",
                ("unprivileged, read-only containers"),
            )

    # Phases.

    def _phase(self, name: str, fault: Callable[[], None], posts: int) -> None:
        """Send posts, inject the fault while they wait, and check that all is well afterwards."""
        tell(f"{name.replace('_', ' ')}: sending {posts} posts")
        began = time.monotonic()
        log = self._folder / f"{name}.log"
        process = self._stack.enqueue(_posts(self._sent, posts), log)
        if process.wait(STORED_S):
            raise ContainersError(
                f"enqueue exited with status {process.returncode}: {log.read_text()[-2000:]}"
            )
        self._sent += posts
        waiting = self._sent - self._stack.lengths()[0]
        self._require(waiting > 0, "posts wait when the fault begins")
        fault()
        until(
            lambda: self._stack.lengths()[0] == self._sent,
            f"{self._sent} posts are stored",
            STORED_S,
        )
        self._check()
        seconds = round(time.monotonic() - began, 1)
        self.phases[name] = {"waiting": waiting, "seconds": seconds}
        tell(
            f"{name.replace('_', ' ')}: {waiting} posts waited; all stored and healthy after "
            f"{seconds:.0f} s"
        )

    def _check(self) -> None:
        """Check health, outcomes and metrics."""
        self._stack.wait_until_healthy()
        self._require(
            self._stack.lengths() == (self._sent, 0), "stored = sent, no dead letters"
        )
        until(
            lambda: self._stack.feedmill("health"),
            "`feedmill health` exits with 0",
            HEALTHY_S,
        )
        self._stack.wait_until_reported(
            workers_up=WORKERS,
            workers_without_redis=0,
            metrics_up=1,
            redis_up=1,
            stored=self._sent,
            dead_letters=0,
            queue=0,
        )

    def _worker(self) -> str:
        return self._stack.ids("worker-cpu")[0]

    def _kill(self, container: str) -> None:
        """Kill the container's process, as a crash does.

        `docker kill` would keep it from being restarted.
        """
        pid, restarts = map(
            int, inspect(container, "{{.State.Pid}} {{.RestartCount}}").split()
        )
        os.kill(pid, signal.SIGKILL)
        until(
            lambda: int(inspect(container, "{{.RestartCount}}")) == restarts + 1,
            "it is restarted",
            HEALTHY_S,
        )

    def _kill_a_worker(self) -> None:
        self._kill(self._worker())

    def _kill_redis(self) -> None:
        self._kill(self._stack.ids("redis")[0])

    def _cut_a_worker_off(self) -> None:
        worker, network = self._worker(), f"{PROJECT}_queue"
        docker.run("docker", "network", "disconnect", network, worker)
        try:
            time.sleep(AWAY_S)
            self._stack.wait_until_reported(workers_up=WORKERS, workers_without_redis=1)
            self._require(
                inspect(worker, "{{.State.Health.Status}}") == "healthy",
                "healthy without Redis",
            )
        finally:
            docker.run(
                "docker", "network", "connect", "--alias", "worker-cpu", network, worker
            )

    def _pause_a_worker(self) -> None:
        worker = self._worker()
        docker.run("docker", "pause", worker)
        try:
            time.sleep(AWAY_S)
            self._stack.wait_until_reported(workers_up=WORKERS - 1)
        finally:
            docker.run("docker", "unpause", worker)

    def _scale(self) -> None:
        self._stack.scale(WORKERS + 1)
        self._stack.wait_until_healthy()
        self._stack.wait_until_reported(workers_up=WORKERS + 1)
        newest = self._stack.ids("worker-cpu")[-1]
        posts = 100
        log = self._folder / "scaled.log"
        process = self._stack.enqueue(_posts(self._sent, posts), log)
        self._require(process.wait(STORED_S) == 0, f"enqueue exits with 0: {log}")
        self._sent += posts
        status = docker.start("docker", "wait", newest, log=self._folder / "wait.log")
        self._stack.scale(WORKERS)
        status.wait(HEALTHY_S)
        self.exit_statuses.append(
            {"worker-cpu": [int((self._folder / "wait.log").read_text())]}
        )
        self._check_exit_statuses()

    def _stop(self) -> None:
        self._end()
        self._stack.scale(WORKERS)
        self._stack.wait_until_healthy()

    def _end(self) -> None:
        self._stack.compose("stop")
        self.exit_statuses.append(self._stack.exit_statuses())
        self._check_exit_statuses()

    def _check_exit_statuses(self) -> None:
        found = self.exit_statuses[-1]
        self._require(
            not any(status for statuses in found.values() for status in statuses),
            f"all exit with status 0: {found}",
        )


def _posts(first: int, count: int) -> list[dict[str, str]]:
    """Return posts numbered from `first`.

    Their hundred words keep a worker on few cores busy for a while.
    """
    return [
        {
            "id": f"c{number:06}",
            "title": f"Rain on the coast ({number})",
            "body": "wind and a long way home " * 20,
        }
        for number in range(first, first + count)
    ]


def run(base: str | None, folder: Path, found: dict[str, Any]) -> None:
    """Run everything and add the figures to `found`. Raises ContainersError."""
    found["engine"] = docker.run("docker", "version", "--format", "{{.Server.Version}}")
    found["build_s"] = docker.build_images(base)
    sizes = {
        name: int(inspect(name, "{{.Size}}"))
        for name in (docker.PRODUCER, docker.WORKER)
    }
    found["image_mb"] = {name: round(size / 1e6) for name, size in sizes.items()}
    tell(f"images in MB: {found['image_mb']}")
    if sizes[docker.WORKER] > MAX_WORKER_BYTES:
        raise ContainersError(
            f"the worker's image has {sizes[docker.WORKER]} bytes, more than {MAX_WORKER_BYTES}"
        )
    stack = Stack(folder, base is not None)
    try:
        found |= Run(folder, stack).go()
    except BaseException:
        tell(f"the stack's last lines:\n{stack.logs()}")
        raise
    finally:
        stack.compose("down", "--volumes")


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.containers", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--debian",
        metavar="IMAGE",
        help=("Debian image with Python to build on, without a registry"),
    )
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _exit)
    found: dict[str, Any] = {}
    began = time.monotonic()
    with TemporaryDirectory(prefix="feedmill-") as folder:
        try:
            run(given.debian, Path(folder), found)
        except ContainersError as error:
            found["failed"] = str(error)
    found["seconds"] = round(time.monotonic() - began)
    sys.stdout.write(json.dumps(found) + "\n")
    return 1 if "failed" in found else 0


if __name__ == "__main__":
    sys.exit(main())
