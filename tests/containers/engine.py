"""Run commands of this machine's Docker engine, and build the images."""

import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PRODUCER, WORKER, DEBIAN = "feedmill-producer", "feedmill-worker:cpu", "feedmill-debian"
#: Seconds: for one command, for the build of an image, between two checks.
COMMAND_S, BUILD_S, POLL_S = 120.0, 1800.0, 1.0
LOG_LINES = 20


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
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise ContainersError(f"`{shlex.join(command)}` did not end within {seconds:.0f} s") from None
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-LOG_LINES:])
        raise ContainersError(f"`{shlex.join(command)}` exited with status {done.returncode}: {said}")
    return done.stdout.strip()


def start(*command: str, log: Path, stdin: Path = Path("/dev/null")) -> "subprocess.Popen[str]":
    """Start a command in the background."""
    with stdin.open() as given, log.open("w") as said:
        return subprocess.Popen(command, stdin=given, stdout=said, stderr=subprocess.STDOUT, text=True)


def inspect(container: str, template: str) -> str:
    return run("docker", "inspect", "--format", template, container)


def build_images(base: str | None) -> dict[str, float]:
    """Build the images and return the seconds of each.

    base: the image to build on instead of python:slim; with it, build one of Redis and Prometheus, too.
    """
    images = {PRODUCER: ("docker/producer.Dockerfile", "."), WORKER: ("docker/worker.Dockerfile", ".")}
    if base:
        images[DEBIAN] = ("tests/containers/debian.Dockerfile", "tests/containers")
    return {name: _build(name, base, file, folder) for name, (file, folder) in images.items()}


def _build(name: str, base: str | None, file: str, folder: str) -> float:
    began = time.monotonic()
    tell(f"building {name}")
    argument = ("--build-arg", f"PYTHON={base}") if base else ()
    command = ["docker", "build", "--network", "host", *argument, "--tag", name, "--file", str(ROOT / file)]
    run(*command, str(ROOT / folder), seconds=BUILD_S)
    return round(time.monotonic() - began, 1)
