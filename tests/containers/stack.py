"""The images, and the stack of docker/compose.yaml, on this machine's Docker engine."""

import json
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from feedmill.shared.keys import DEAD_LETTERS, RESULTS_STREAM

ROOT = Path(__file__).parent.parent.parent
PRODUCER, WORKER, DEBIAN = "feedmill-producer", "feedmill-worker:cpu", "feedmill-debian"
#: Seconds: for one command, for the build of an image, between two checks.
COMMAND_S, BUILD_S, POLL_S = 120.0, 1800.0, 1.0
LOG_LINES = 20
PROJECT = "feedmill-containers"
COMPOSE = (
    ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
)
#: The GPU's and Reddit's services need what test machines lack.
SERVICES = ("redis", "worker-cpu", "metrics", "flower", "prometheus")
#: Seconds for all containers to be healthy; for Prometheus to scrape a change (every 15 s, with
#: names every 30 s).
HEALTHY_S, SCRAPED_S = 180.0, 120.0
#: Code that queries Prometheus from a container on its network.
QUERY = (
    "import json, sys; from urllib.parse import quote; from urllib.request import urlopen; "
    "print(json.dumps([json.load(urlopen('http://prometheus:9090/api/v1/query?query=' + "
    "quote(each), timeout=10))"
    "['data']['result'] for each in sys.argv[1:]]))"
)


class ContainersError(Exception):
    """A phase failed, or this machine cannot run containers."""


def tell(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def until(holds: Callable[[], object], description: str, seconds: float) -> None:
    """Wait until `holds()` is true. A failing command counts as false. Raises ContainersError."""
    deadline = time.monotonic() + seconds
    reason = ""
    while True:
        try:
            if holds():
                return
        except ContainersError as error:
            reason = f" ({error})"
        if time.monotonic() > deadline:
            raise ContainersError(f"not within {seconds:.0f} s: {description}{reason}")
        time.sleep(POLL_S)


def run(*command: str, seconds: float = COMMAND_S) -> str:
    """Run a command and return its output without the last newline. Raises ContainersError."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise ContainersError(
            f"`{shlex.join(command)}` did not end within {seconds:.0f} s"
        ) from None
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-LOG_LINES:])
        raise ContainersError(
            f"`{shlex.join(command)}` exited with status {done.returncode}: {said}"
        )
    return done.stdout.strip()


def start(
    *command: str, log: Path, stdin: Path = Path("/dev/null")
) -> "subprocess.Popen[str]":
    """Start a command in the background."""
    with stdin.open() as given, log.open("w") as said:
        return subprocess.Popen(
            command, stdin=given, stdout=said, stderr=subprocess.STDOUT, text=True
        )


def inspect(container: str, template: str) -> str:
    return run("docker", "inspect", "--format", template, container)


def build_images(base: str | None) -> dict[str, float]:
    """Build the images and return the seconds of each.

    base: the image to build on instead of python:slim; with it, build one of Redis and Prometheus,
    too.
    """
    images = {
        PRODUCER: ("docker/producer.Dockerfile", "."),
        WORKER: ("docker/worker.Dockerfile", "."),
    }
    if base:
        images[DEBIAN] = ("tests/containers/debian.Dockerfile", "tests/containers")
    return {
        name: _build(name, base, file, folder)
        for name, (file, folder) in images.items()
    }


def _build(name: str, base: str | None, file: str, folder: str) -> float:
    began = time.monotonic()
    tell(f"building {name}")
    argument = ("--build-arg", f"PYTHON={base}") if base else ()
    command = [
        "docker",
        "build",
        "--network",
        "host",
        *argument,
        "--tag",
        name,
        "--file",
        str(ROOT / file),
    ]
    run(*command, str(ROOT / folder), seconds=BUILD_S)
    return round(time.monotonic() - began, 1)


class Stack:
    """The stack's containers, by service.

    folder: for its environment file; debian: use Redis and Prometheus from Debian's packages.
    """

    def __init__(self, folder: Path, debian: bool) -> None:
        example = (ROOT / "docker" / ".env.example").read_text()
        environment = folder / "environment"
        environment.write_text(
            re.sub(
                r"(?m)^(\w+_PASSWORD)=$",
                lambda found: found[0] + secrets.token_hex(24),
                example,
            )
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
        self.compose(
            "up",
            "--detach",
            "--no-build",
            "--no-recreate",
            "--scale",
            f"worker-cpu={workers}",
            *SERVICES,
        )

    def ids(self, *services: str) -> list[str]:
        """Return the containers' ids, oldest first. Without services: all of them."""
        found: list[str] = []
        for service in services or SERVICES:
            labels = {"project": PROJECT, "service": service, "oneoff": "False"}
            filters = [
                word
                for name in labels
                for word in (
                    "--filter",
                    f"label=com.docker.compose.{name}={labels[name]}",
                )
            ]
            found += reversed(
                run("docker", "ps", "--all", "--quiet", "--no-trunc", *filters).split()
            )
        return found

    def enqueue(
        self, posts: Iterable[dict[str, str]], log: Path
    ) -> "subprocess.Popen[str]":
        """Send the posts as the documented command does, in the background."""
        file = log.with_suffix(".jsonl")
        file.write_text("".join(json.dumps(post) + "\n" for post in posts))
        command = [
            *self._command,
            "run",
            "--rm",
            "--no-deps",
            "-T",
            "feedmill",
            "enqueue",
            "-",
        ]
        return start(*command, stdin=file, log=log)

    def feedmill(self, *arguments: str) -> str:
        """Run a `feedmill` command in a container of its own."""
        return self.compose("run", "--rm", "--no-deps", "-T", "feedmill", *arguments)

    def result_ids(self) -> list[str]:
        """Return the ids of all results' posts."""
        lines = self.feedmill("results", "--json", "--limit", "1000000").splitlines()
        return [json.loads(line)["id"] for line in lines]

    def lengths(self) -> tuple[int, int]:
        """Return the numbers of stored results and dead letters. Raises ContainersError."""
        (redis,) = self.ids("redis")
        script = (
            "REDISCLI_AUTH=$REDIS_PASSWORD; export REDISCLI_AUTH; for key in "
            f"{RESULTS_STREAM} {DEAD_LETTERS}; do "
        )
        lines = run(
            "docker", "exec", redis, "sh", "-c", script + "redis-cli xlen $key; done"
        ).split()
        with suppress(ValueError):
            stored, dead = map(int, lines)
            return stored, dead
        raise ContainersError(f"Redis answered {lines}")

    def wait_until_healthy(self) -> None:
        def healthy() -> bool:
            states = run(
                "docker", "inspect", "--format", "{{.State.Health.Status}}", *self.ids()
            ).split()
            if set(states) != {"healthy"}:
                raise ContainersError(" ".join(states))
            return True

        until(healthy, "all containers are healthy", HEALTHY_S)

    def wait_until_reported(self, **wanted: float) -> None:
        """Wait until Prometheus gives these values for QUERIES."""
        (metrics,) = self.ids("metrics")
        queries = [QUERIES[name] for name in wanted]

        def reported() -> bool:
            results = json.loads(
                run("docker", "exec", metrics, "python", "-c", QUERY, *queries)
            )
            found = dict(zip(wanted, map(_value, results), strict=True))
            if found != wanted:
                raise ContainersError(f"found {found}")
            return True

        until(reported, f"Prometheus reports {wanted}", SCRAPED_S)

    def exit_statuses(self) -> dict[str, list[int]]:
        """Return the exit statuses of stopped containers by service."""
        return {
            name: [int(inspect(each, "{{.State.ExitCode}}")) for each in self.ids(name)]
            for name in SERVICES
        }

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
