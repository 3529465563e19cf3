"""Two hosts as two Docker networks: Redis and a producer on one, a worker on the other, a slow link between."""

import json
import statistics
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared.keys import DEAD_LETTERS, RESULTS_STREAM
from tests.containers import slow_link
from tests.containers.engine import DEBIAN, PRODUCER, WORKER, ContainersError, Engine, tell, until

#: The link: delay in milliseconds and share of lost packets, both in each direction.
DELAY_MS, LOSS = 50, 0.01
#: Seconds for a worker to be ready, and for all posts to be stored.
READY_S, STORED_S = 180.0, 600.0
#: Code that prints the milliseconds which a TCP connection takes to be made: one round trip.
MEASURE = (
    "import socket, sys, time\nfor _ in range(9):\n  began = time.monotonic()\n"
    "  socket.create_connection((sys.argv[1], 6379), 20).close()\n  print(1000 * (time.monotonic() - began))"
)
#: Code that prints whether the worker is ready.
IS_READY = "from urllib.request import urlopen; urlopen('http://127.0.0.1:9110/readyz', timeout=5)"


class TwoHosts:
    """The networks `near` and `far`, each with a host, and a router with a leg in both."""

    def __init__(self, engine: Engine) -> None:
        self._docker, self._engine = engine.docker, engine
        for network in ("near", "far"):
            self._docker("network", "create", network)
        script = f"{Path(slow_link.__file__)}:/slow_link.py:ro"
        # Without reverse path filters: a packet from the TUN device has the address of another host.
        self._docker(
            "run", "--detach", "--name", "router", "--network", "near", "--cap-add", "NET_ADMIN", "--volume", script,
            "--device", "/dev/net/tun", "--sysctl", "net.ipv4.ip_forward=1",
            "--sysctl", "net.ipv4.conf.all.rp_filter=0", "--sysctl", "net.ipv4.conf.default.rp_filter=0",
            DEBIAN, "sleep", "infinity",
        )  # fmt: skip
        self._docker("network", "connect", "far", "router")
        self._docker(
            "run", "--detach", "--name", "near", "--network", "near", DEBIAN,
            "redis-server", "--save", "", "--protected-mode", "no", "--maxmemory-policy", "noeviction",
        )  # fmt: skip
        self._docker("run", "--detach", "--name", "far", "--network", "far", DEBIAN, "sleep", "infinity")
        for host, other in (("near", "far"), ("far", "near")):
            subnet = self._docker("network", "inspect", "--format", "{{(index .IPAM.Config 0).Subnet}}", other)
            self._docker(
                "run", "--rm", "--network", f"container:{host}", "--cap-add", "NET_ADMIN", DEBIAN,
                "ip", "route", "add", subnet, "via", self._address("router", host),
            )  # fmt: skip
        self._redis = self._address("near", "near")

    def _address(self, container: str, network: str) -> str:
        template = '{{(index .NetworkSettings.Networks "' + network + '").IPAddress}}'
        return self._engine.inspect(container, template)

    def round_trip_ms(self) -> float:
        times = self._docker("exec", "far", "python3", "-c", MEASURE, self._redis).split()
        return round(statistics.median(map(float, times)), 1)

    def slow_down(self) -> None:
        command = ("python3", "/slow_link.py", str(DELAY_MS), str(LOSS))
        self._docker("exec", "--detach", "router", *command)
        until(lambda: self.round_trip_ms() >= 2 * DELAY_MS, "the link is slow", 20)

    def _options(self, host: str) -> list[str]:
        return [
            "--network", f"container:{host}", "--env", f"FEEDMILL_REDIS_URL=redis://{self._redis}:6379/0",
            "--read-only", "--tmpfs", "/tmp",  # noqa: S108 - in the container
            "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
        ]  # fmt: skip

    def start_worker(self) -> None:
        self._docker("run", "--detach", "--name", "worker", *self._options("far"), WORKER)
        until(lambda: self._docker("exec", "worker", "python", "-c", IS_READY) == "", "the worker is ready", READY_S)

    def stop_worker(self) -> int:
        """Stop the worker and return its exit status."""
        self._docker("stop", "--time", "45", "worker")
        return int(self._engine.inspect("worker", "{{.State.ExitCode}}"))

    def enqueue(self, host: str, posts: Iterable[dict[str, str]], log: Path) -> None:
        file = log.with_suffix(".jsonl")
        file.write_text("".join(json.dumps(post) + "\n" for post in posts))
        command = ["docker", "run", "--rm", "--interactive", *self._options(host), PRODUCER, "enqueue", "-"]
        status = self._engine.start(*command, stdin=file, log=log).wait()
        if status:
            raise ContainersError(f"enqueue on {host} exited with {status}: {log.read_text()}")

    def _redis_cli(self, *arguments: str) -> str:
        return self._docker("exec", "near", "redis-cli", *arguments)

    def classify(self, host: str, posts: list[dict[str, str]], log: Path) -> float:
        """Send the posts from the host, wait until all are stored, and return the posts per second.

        The rate is that between the first and the last result.
        """
        before = self._stored()
        self.enqueue(host, posts, log)
        until(lambda: self._stored() == before + len(posts), f"{len(posts)} posts are stored", STORED_S)
        entries = self._redis_cli("xrevrange", RESULTS_STREAM, "+", "-", "count", str(len(posts))).splitlines()
        moments = [int(line.split("-")[0]) for line in entries if _is_entry_id(line)]
        return round((len(posts) - 1) * 1000 / (max(moments) - min(moments)), 1)

    def _stored(self) -> int:
        return int(self._redis_cli("xlen", RESULTS_STREAM))

    def dead_letters(self) -> int:
        return int(self._redis_cli("xlen", DEAD_LETTERS))


def _is_entry_id(line: str) -> bool:
    milliseconds, _, sequence = line.strip().partition("-")
    return milliseconds.isdigit() and sequence.isdigit() and len(milliseconds) == 13


def run_two_hosts(engine: Engine, posts: list[dict[str, str]]) -> dict[str, Any]:
    """Classify a third of the posts each over a fast link, over the slow link, and sent over the slow link, too."""
    hosts = TwoHosts(engine)
    third = len(posts) // 3
    found: dict[str, Any] = {"delay_ms": DELAY_MS, "loss": LOSS}
    tell("two hosts: a worker on another network, over a fast link")
    hosts.start_worker()
    found["fast_round_trip_ms"] = hosts.round_trip_ms()
    found["fast_posts_per_second"] = hosts.classify("near", posts[:third], engine.folder / "near.log")
    hosts.slow_down()
    found["slow_round_trip_ms"] = hosts.round_trip_ms()
    tell(f"two hosts: {DELAY_MS} ms and {LOSS:.0%} loss in each direction")
    found["slow_posts_per_second"] = hosts.classify("near", posts[third : 2 * third], engine.folder / "slow.log")
    tell("two hosts: the producer on the worker's network, too")
    found["sent_over_it_posts_per_second"] = hosts.classify("far", posts[2 * third :], engine.folder / "far.log")
    found["worker_exit_status"] = hosts.stop_worker()
    found["stored"], found["dead_letters"] = hosts._stored(), hosts.dead_letters()
    return found


def worker_log(engine: Engine) -> str:
    with suppress(ContainersError, subprocess.SubprocessError):
        return engine.docker("logs", "--tail", "30", "worker")
    return ""
