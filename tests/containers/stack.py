"""The stack of docker/compose.yaml on this machine's Docker engine."""

import json
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from feedmill.shared.keys import DEAD_LETTERS, RESULTS_STREAM
from tests.containers.engine import ROOT, ContainersError, inspect, run, start, until

PROJECT = "feedmill-containers"
COMPOSE = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
#: The GPU's and Reddit's services need what test machines lack.
SERVICES = ("redis", "worker-cpu", "metrics", "flower", "prometheus")
#: Seconds for all containers to be healthy; for Prometheus to scrape a change (every 15 s, with names every 30 s).
HEALTHY_S, SCRAPED_S = 180.0, 120.0
#: Code that queries Prometheus from a container on its network.
QUERY = (
    "import json, sys; from urllib.parse import quote; from urllib.request import urlopen; "
    "print(json.dumps([json.load(urlopen('http://prometheus:9090/api/v1/query?query=' + quote(each), timeout=10))"
    "['data']['result'] for each in sys.argv[1:]]))"
)


class Stack:
    """The stack's containers, by service.

    folder: for its environment file; debian: use Redis and Prometheus from Debian's packages.
    """

    def __init__(self, folder: Path, debian: bool) -> None:
        example = (ROOT / "docker" / ".env.example").read_text()
        environment = folder / "environment"
        environment.write_text(
            re.sub(r"(?m)^(\w+_PASSWORD)=$", lambda found: found[0] + secrets.token_hex(24), example)
        )
        self._command = [
            *COMPOSE, "--project-name", PROJECT, "--env-file", str(environment),
            "--project-directory", str(ROOT / "docker"),
            "--file", str(ROOT / "docker" / "compose.yaml"),
            *(("--file", str(Path(__file__).parent / "compose.debian.yaml")) if debian else ()),
            "--profile", "cpu",
        ]  # fmt: skip

    def compose(self, *arguments: str, seconds: float = 300.0) -> str:
        return run(*self._command, *arguments, seconds=seconds)

    def scale(self, workers: int) -> None:
        """Start or stop workers, and whatever else is not running."""
        self.compose("up", "--detach", "--no-build", "--no-recreate", "--scale", f"worker-cpu={workers}", *SERVICES)

    def ids(self, *services: str) -> list[str]:
        """Return the containers' ids, oldest first. Without services: all of them."""
        found: list[str] = []
        for service in services or SERVICES:
            labels = {"project": PROJECT, "service": service, "oneoff": "False"}
            filters = [
                word for name in labels for word in ("--filter", f"label=com.docker.compose.{name}={labels[name]}")
            ]
            found += reversed(run("docker", "ps", "--all", "--quiet", "--no-trunc", *filters).split())
        return found

    def enqueue(self, posts: Iterable[dict[str, str]], log: Path) -> "subprocess.Popen[str]":
        """Send the posts as the documented command does, in the background."""
        file = log.with_suffix(".jsonl")
        file.write_text("".join(json.dumps(post) + "\n" for post in posts))
        command = [*self._command, "run", "--rm", "--no-deps", "-T", "feedmill", "enqueue", "-"]
        return start(*command, stdin=file, log=log)

    def feedmill(self, *arguments: str) -> str:
        """Run a `feedmill` command in a container of its own."""
        return self.compose("run", "--rm", "--no-deps", "-T", "feedmill", *arguments)

    def exported_ids(self) -> list[str]:
        """Export all results and return the ids of their posts."""
        script = "feedmill export /tmp/results.jsonl --columns id >/dev/null && cat /tmp/results.jsonl"
        lines = self.compose("run", "--rm", "--no-deps", "-T", "--entrypoint", "sh", "feedmill", "-c", script)
        return [json.loads(line)["id"] for line in lines.splitlines()]

    def lengths(self) -> tuple[int, int]:
        """Return the numbers of stored results and dead letters. Raises ContainersError."""
        (redis,) = self.ids("redis")
        script = f"REDISCLI_AUTH=$REDIS_PASSWORD; export REDISCLI_AUTH; for key in {RESULTS_STREAM} {DEAD_LETTERS}; do "
        lines = run("docker", "exec", redis, "sh", "-c", script + "redis-cli xlen $key; done").split()
        with suppress(ValueError):
            stored, dead = map(int, lines)
            return stored, dead
        raise ContainersError(f"Redis answered {lines}")

    def wait_until_healthy(self) -> None:
        def healthy() -> bool:
            states = run("docker", "inspect", "--format", "{{.State.Health.Status}}", *self.ids()).split()
            if set(states) != {"healthy"}:
                raise ContainersError(" ".join(states))
            return True

        until(healthy, "all containers are healthy", HEALTHY_S)

    def wait_until_reported(self, **wanted: float) -> None:
        """Wait until Prometheus gives these values for QUERIES."""
        (metrics,) = self.ids("metrics")
        queries = [QUERIES[name] for name in wanted]

        def reported() -> bool:
            results = json.loads(run("docker", "exec", metrics, "python", "-c", QUERY, *queries))
            found = dict(zip(wanted, map(_value, results), strict=True))
            if found != wanted:
                raise ContainersError(f"found {found}")
            return True

        until(reported, f"Prometheus reports {wanted}", SCRAPED_S)

    def exit_statuses(self) -> dict[str, list[int]]:
        """Return the exit statuses of stopped containers by service."""
        return {name: [int(inspect(each, "{{.State.ExitCode}}")) for each in self.ids(name)] for name in SERVICES}

    def logs(self) -> str:
        with suppress(ContainersError):
            return self.compose("logs", "--no-color", "--tail", "30")
        return ""


#: PromQL by the name that the phases use.
QUERIES = {
    "workers_up": 'sum(up{job="feedmill-worker"})',
    "workers_without_redis": 'count(feedmill_redis_up{job="feedmill-worker"} == 0) or vector(0)',
    "metrics_up": 'sum(up{job="feedmill-metrics"})',
    "redis_up": 'max(feedmill_redis_up{job="feedmill-metrics"})',
    "stored": "max(feedmill_results_stored_total)",
    "dead_letters": "max(feedmill_results_failed_total)",
    "queue": 'sum(feedmill_queue_messages{job="feedmill-metrics"})',
}


def _value(result: list[dict[str, Any]]) -> float | None:
    return float(result[0]["value"][1]) if result else None
