"""Test helpers: waiting for conditions, redis-servers, certificates, and `feedmill` processes."""

import atexit
import fcntl
import itertools
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zlib
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.message import Message
from fnmatch import fnmatchcase
from functools import cache
from hashlib import sha1
from importlib.metadata import distribution
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest
from celery import Celery
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from redis import Redis
from redis.client import NEVER_DECODE
from trustme import CA

from feedmill.outcomes.dead_letters import DeadLetterStream
from feedmill.outcomes.followers import newest
from feedmill.producers import push as producing
from feedmill.producers.push import (
    BUCKET_BYTES,
    DIGEST_BYTES,
    ID_BYTES,
    RUN_BYTES,
    Pusher,
)
from feedmill.shared.broker import TRANSPORT_KEYS, connect, make_app, queue_depth
from feedmill.shared.keys import MARKS, WORKERS
from feedmill.shared.messages import (
    Classification,
    ClassifyOptions,
    DeadLetter,
    Post,
    digest,
)
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.scripts import call
from feedmill.shared.settings import LOCK_FILE, STACK_FILE, Settings
from feedmill.stack.embedded import (
    embedded_server,
    installed_redis_server,
    server_version,
)
from feedmill.stack.processes import Child
from tests.fakes import constants
from tests.forkserver import FORK_SERVER, Forked, Forks, ForkServer

MARK_BYTES = ID_BYTES + RUN_BYTES + DIGEST_BYTES
#: Of each process' own: a worker of another test run, whose server had the same port before,
#: cannot log in.
PASSWORD = f"test-password-{secrets.token_hex(8)}"
ROOT = Path(__file__).parent.parent
#: Posts that the embedded model labels as sports and food.
POSTS: list[dict[str, Any]] = [
    {"id": "1", "title": "The keeper saved two penalties in the final"},
    {"id": "2", "title": "How long do dried beans keep?", "extra": {"row": 7}},
]
#: The installed command.
FEEDMILL = str(Path(sys.executable).parent / "feedmill")
Process = subprocess.Popen[bytes] | Forked
#: In the environment of a command that needs a new interpreter instead of being forked.
NEW_INTERPRETER = {"NEW_INTERPRETER": "1"}
#: The environment variable with the redis-server to test, one of those of this machine.
SERVER = "PYTEST_REDIS"


def reserve(
    redis: Redis,
    lists: Sequence[str],
    prefix: str,
    keys: Sequence[str] = (
        TRANSPORT_KEYS["reserved_key"],
        TRANSPORT_KEYS["reserved_index_key"],
    ),
    seconds: float = 60.0,
    limit: int = 64,
) -> int:
    """Reserve messages, as a worker does.

    Return their number. prefix: of their tags. keys: of messages and leases.
    """
    return (
        len(call(redis, "reserve", *keys, prefix, limit, 10**7, seconds, keys=lists))
        // 2
    )


#: Environment variable with the folder of recorded answers of Reddit.
CASSETTES = "PYTEST_CASSETTES"
#: Their folder beside the checkout.
CASSETTES_BESIDE = Path(__file__).parents[2] / "shared/data/praw_cassettes"


def recordings() -> Path | None:
    """Return the folder of recorded answers of Reddit, which are no part of the project; None
    without it.
    """
    folder = Path(os.environ.get(CASSETTES) or CASSETTES_BESIDE)
    return folder if folder.is_dir() else None


class Key(NamedTuple):
    """A row of docs/reference/keys.md."""

    pattern: str
    type: str
    content: str
    bound: str


def find(name: str) -> Key | None:
    """Return the first row of docs/reference/keys.md that matches a key."""
    page = (ROOT / "docs/reference/keys.md").read_text()
    rows = (
        Key(*row)
        for row in re.findall(
            r"^\| `(.+?)` \| (\w+) \| (.*) \| (.*) \|$", page, re.MULTILINE
        )
    )
    return next(
        (
            key
            for key in rows
            if fnmatchcase(name, key.pattern.encode().decode("unicode_escape"))
        ),
        None,
    )


@contextmanager
def announced(folder: Path, text: str) -> Iterator[Path]:
    """Simulate a running `feedmill up` in the folder: hold its lock and write `text` to
    its file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STACK_FILE).write_text(text)
    with (folder / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder / STACK_FILE


def latest(store: ResultsStore, count: int) -> list[Result]:
    """Return the newest results of the stream, oldest first."""
    return newest(store._redis, count)


def dead_letters(store: ResultsStore, count: int) -> list[DeadLetter]:
    """Return the newest dead letters, oldest first."""
    return [entry.letter for entry in DeadLetterStream(store._redis).newest(count)]


def sent_count(client: Redis) -> int:
    """Return the number of marks of sent posts."""
    return sum(map(len, _buckets(client).values())) // MARK_BYTES


def sent_marks(client: Redis, post_id: str) -> int:
    """Return the number of marks of a post that was sent."""
    digest_of_id = sha1(post_id.encode(), usedforsecurity=False).digest()
    marks = _buckets(client)[digest_of_id[:BUCKET_BYTES]]
    return sum(
        marks.startswith(digest_of_id[BUCKET_BYTES:][:ID_BYTES], at)
        for at in range(0, len(marks), MARK_BYTES)
    )


def _buckets(client: Any) -> defaultdict[bytes, bytes]:
    """Return the marks in each bucket, of all generations."""
    found: defaultdict[bytes, bytes] = defaultdict(bytes)
    for generation in client.zrange(MARKS, 0, -1):
        for bucket, marks in client.execute_command(
            "HGETALL", f"{MARKS}:{generation}", NEVER_DECODE=True
        ).items():
            found[bucket] += marks
    return found


def mark_sent(client: Redis, post_id: str) -> None:
    """Mark a post as sent."""
    producing.mark_sent(
        client, [producing.Mark.of(post_id, digest(post_id))], 3600, 10**9
    )


def has_results(client: Redis, post_id: str) -> bool:
    """Return whether anything is stored with a post's results."""
    return bool(call(client, "get", post_id, raw=True))


def age(client: Redis, table: str, seconds: float) -> None:
    """Let a table's records expire that many seconds earlier."""
    generations: Any = client.zrange(table, 0, -1)
    for generation in generations:
        client.zincrby(table, -seconds, generation)


def raw(client: Redis, key: str) -> bytes:
    """Return a string of Redis without decoding it."""
    found: bytes = client.execute_command("GET", key, **{NEVER_DECODE: True})  # type: ignore[no-untyped-call]
    return found


#: Ports of this test process: below those of `feedmill up`, and those that the system gives to any
#: program.
PORTS_EACH = 1_200
FIRST_PORT = 10_000 + PORTS_EACH * (
    int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8
)
_tried = itertools.count(os.getpid())


def free_port() -> int:
    """Return a free port that no other test process takes before it is used."""
    while True:
        port = FIRST_PORT + next(_tried) % PORTS_EACH
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


#: Factor of all limits of waiting, for emulated machines.
PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))


def wait_until(
    holds: Callable[[], object], description: str, seconds: float = 120.0
) -> None:
    """Wait until `holds()` is true. Fails with the description after `seconds`."""
    deadline = time.monotonic() + seconds * PATIENCE
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {description}")
        time.sleep(0.02)


def naming(*values: object) -> str:
    """Return a pattern for `pytest.raises(match=…)` that finds all values in a message, in any
    order.
    """
    return "(?s)^" + "".join(f"(?=.*{_whole(str(value))})" for value in values)


def _whole(text: str) -> str:
    """Return a pattern for the text that does not match parts of a longer number."""
    before, after = ("\\b" if edge.isdigit() else "" for edge in (text[:1], text[-1:]))
    return f"{before}{re.escape(text)}{after}"


@cache
def redis_servers() -> dict[str, str]:
    """Return the paths of this machine's redis-servers by source: "system", "valkey" and
    "embedded".

    "system" is a valkey-server if that is the only one installed. PYTEST_REDIS=SOURCE leaves only
    that one, and PYTEST_REDIS=first the first. `make test` uses one server, and `make test-redis`
    repeats on another what can differ.
    """
    found = {}
    if system := installed_redis_server():
        found["system"] = system
        if (valkey := installed_redis_server(["valkey-server"])) and valkey != system:
            found["valkey"] = valkey
    if embedded := embedded_server():
        found["embedded"] = embedded
    wanted = os.environ.get(SERVER, "")
    if wanted == "first":
        return dict(list(found.items())[:1])
    return {source: path for source, path in found.items() if wanted in ("", source)}


def installed_redis() -> str | None:
    """Return the path of the system's server. Unlike the embedded one, it has TLS."""
    return next(
        (path for source, path in redis_servers().items() if source != "embedded"), None
    )


def body_of(message: str | bytes) -> Any:
    """Decode the body of a message from a queue's list: arguments, keyword arguments and Celery's
    embedded options.
    """
    found = json.loads(message)
    body = b64decode(found["body"])
    return json.loads(
        zlib.decompress(body) if found["headers"].get("compression") else body
    )


class RedisServer:
    """A redis-server on loopback, by default without persistence. password: empty for none."""

    def __init__(
        self, path: str, folder: Path, configuration: str = "", password: str = PASSWORD
    ) -> None:
        self.port = free_port()
        self.version = server_version(path)[1]
        self.url = (
            f"redis://{f':{password}@' if password else ''}127.0.0.1:{self.port}/0"
        )
        self._path, self._folder = path, folder
        basic = (
            f'bind 127.0.0.1\nport {self.port}\nrequirepass "{password}"\nsave ""\ndir '
            f'"{folder}"\n'
        )
        self._configuration = basic + configuration
        self.client = Redis.from_url(self.url, decode_responses=True)
        self.start()

    def start(self) -> None:
        self.child = Child(
            "redis",
            [self._path, "-"],
            self._folder,
            dict(os.environ),
            stdin=self._configuration,
        )
        self.child.wait_until(self._answers)

    def _answers(self) -> bool:
        with suppress(Exception):
            return bool(self.client.ping())
        return False

    def stop(self) -> None:
        self.client.close()
        self.child.stop(10)

    def kill(self) -> None:
        """End the server with SIGKILL."""
        self.child.kill()


class Restartable(RedisServer):
    """A persistent redis-server without a password that can be killed and restarted."""

    def __init__(self, path: str, folder: Path, appendfsync: str = "always") -> None:
        self.folder = folder
        super().__init__(
            path, folder, f"appendonly yes\nappendfsync {appendfsync}\n", password=""
        )

    def signal(self, which: signal.Signals) -> None:
        os.kill(self.child.process.pid, which)


def queued(redis: RedisServer) -> list[dict[str, Any]]:
    """Return the posts in the queue in the order they were sent."""
    messages: Any = redis.client.lrange("feedmill", 0, -1)
    return [
        post for message in reversed(messages) for post in body_of(message)[1]["posts"]
    ]


class Authority:
    """A certificate authority.

    `file`: its certificate in PEM; `other`: the certificate of an unrelated authority.

    The key of each certificate has the same name with the suffix `.key`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._authority = folder, CA()
        self.file, self.other = (
            self._written("authority", self._authority),
            self._written("other", CA()),
        )

    def certificate(
        self, name: str, host: str = "127.0.0.1", days: int = 2
    ) -> tuple[Path, Path]:
        """Issue a certificate for a host and return the paths of certificate and key.

        days: the validity from now; -1 makes a certificate that expired yesterday.
        """
        issued = self._authority.issue_cert(
            host, common_name=name, not_after=datetime.now(UTC) + timedelta(days=days)
        )
        certificate, key = (self._folder / f"{name}.{kind}" for kind in ("pem", "key"))
        issued.private_key_pem.write_to_path(key)
        issued.cert_chain_pems[0].write_to_path(certificate)
        return certificate, key

    def _written(self, name: str, authority: CA) -> Path:
        certificate = self._folder / f"{name}.pem"
        authority.cert_pem.write_to_path(certificate)
        authority.private_key_pem.write_to_path(certificate.with_suffix(".key"))
        return certificate


def _environment(folder: Path, **environment: str) -> dict[str, str]:
    """Return this process' environment without Feedmill's settings, and with a token budget to
    skip calibration.
    """
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FEEDMILL_", "NOTIFY_", "OTEL_"))
    }
    ours = {
        "FEEDMILL_TOKEN_BUDGET": "2048",
        "FEEDMILL_CACHE_FOLDER": str(folder / "cache"),
    }
    if {
        constants.VARIABLE,
        "FEEDMILL_INCLUDE",
    } & environment.keys():  # modules of the tests
        ours["PYTHONPATH"] = str(ROOT)
    return clean | ours | environment


def _program(environment: dict[str, str]) -> list[str]:
    """Return the command `feedmill`, or the one that replaces constants first."""
    return (
        [sys.executable, "-m", constants.__name__]
        if constants.VARIABLE in environment
        else [FEEDMILL]
    )


class Feedmill:
    """A running command, most often `feedmill`, and its output."""

    def __init__(
        self,
        command: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str],
        output: Path,
    ) -> None:
        self.output = output
        with output.open("wb") as file:
            self.process = start(command, cwd, environment, file)

    def text(self) -> str:
        return self.output.read_text()

    def lives(self) -> bool:
        """Return True. Fails if the process has ended."""
        assert self.process.poll() is None, (
            f"exited with status {self.process.returncode}:\n{self.text()}"
        )
        return True

    def says(self, words: str, times: int = 1) -> bool:
        """Return whether the output contains the words so often.

        Fails if the process has ended without them.
        """
        return self.text().count(words) >= times or not self.lives()

    def end(self, how: signal.Signals = signal.SIGTERM, seconds: float = 120.0) -> int:
        """Send the signal, wait, and return the exit status."""
        self.process.send_signal(how)
        return self.process.wait(seconds)


@contextmanager
def running(*arguments: str, cwd: Path, **environment: str) -> Iterator[Feedmill]:
    """Run `feedmill` with these arguments until the block ends."""
    output = cwd / f"feedmill-{time.monotonic_ns()}.log"
    program = [*_program(environment), *arguments]
    with executing(program, cwd, _environment(cwd, **environment), output) as command:
        yield command


@contextmanager
def executing(
    command: Sequence[str], cwd: Path, environment: Mapping[str, str], output: Path
) -> Iterator[Feedmill]:
    """Run a command until the block ends."""
    running = Feedmill(command, cwd, environment, output)
    try:
        yield running
    except (AssertionError, subprocess.TimeoutExpired) as error:
        error.add_note(f"output of {' '.join(command)}:\n{running.text()[-8000:]}")
        raise
    finally:
        end(running.process)


def end(process: Process) -> None:
    """Kill a process.

    Under `make coverage`, terminate it first, so that it can write its coverage data.
    """
    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(120)
    if process.poll() is None:
        process.kill()
        process.wait()


def wait_for_replies(app: Celery, workers: int = 1) -> None:
    """Wait until workers answer remote commands: they subscribe to them just after they say that
    they are ready.
    """
    wait_until(
        lambda: len(app.control.ping(timeout=5, limit=workers) or ()) >= workers,
        "the workers answer",
    )


@contextmanager
def working(
    redis: RedisServer, cwd: Path, name: str = "worker", *flags: str, **given: str
) -> Iterator[Feedmill]:
    """Run a real worker, on the test's Redis unless another is given. Yields once it is ready."""
    with running(
        "worker",
        "--name",
        name,
        *flags,
        cwd=cwd,
        **{"FEEDMILL_REDIS_URL": redis.url} | given,
    ) as worker:
        wait_until(lambda: worker.says(" ready."), f"{name} is ready")
        wait_until_registered(redis)
        yield worker


def wait_until_registered(redis: RedisServer) -> None:
    """Wait until a worker is registered and listens to remote commands, just after it is ready.

    `feedmill status` and `health` wait longer for the answers of registered workers.
    """
    wait_until(
        lambda: redis.client.pubsub_numpat() >= 1 and redis.client.hlen(WORKERS) >= 1,
        "a worker is registered and listens to commands",
    )


@contextmanager
def standing_in(
    redis: RedisServer, cwd: Path, name: str = "standin", **environment: str
) -> Iterator[Feedmill]:
    """Run a worker with a stand-in for the model (tests/fakes/standin_worker.py)."""
    command = [sys.executable, "-m", "tests.fakes.standin_worker", name]
    given = {
        "FEEDMILL_REDIS_URL": redis.url,
        "FEEDMILL_TOKEN_BUDGET": "2048",
    } | environment
    with executing(command, ROOT, os.environ | given, cwd / f"{name}.log") as worker:
        yield worker


def application(redis: RedisServer, queue: str = "feedmill") -> Celery:
    """Return another application: plain Celery without Feedmill."""
    app = Celery("elsewhere", broker=redis.url, backend=redis.url, set_as_current=False)
    app.conf.task_default_queue = queue
    return app


def push(settings: Settings, posts: list[Post]) -> None:
    """Send posts to the queue."""
    Pusher(make_app(settings), connect(settings), settings, ClassifyOptions()).push(
        posts
    )


def wait_until_empty(redis: Redis) -> None:
    """Wait until no message waits or is held."""
    wait_until(
        lambda: not sum(queue_depth(redis, "feedmill")), "all messages are finished"
    )


def feedmill(
    *arguments: str, cwd: Path, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `feedmill` until it exits."""
    return run(
        [*_program(environment), *arguments],
        cwd,
        _environment(cwd, COLUMNS="200", **environment),
        stdin,
    )


def run(
    command: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    stdin: str = "",
    seconds: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Run a command until it exits, at most `seconds`."""
    pipes = [os.pipe() for _ in range(3)]
    (given, stdin_pipe), (stdout_pipe, output), (stderr_pipe, errors) = [
        (os.fdopen(reader), os.fdopen(writer, "w")) for reader, writer in pipes
    ]
    with given, output, errors:
        process = start(command, cwd, environment, output, errors, given)
    with stdin_pipe, stdout_pipe, stderr_pipe, ThreadPoolExecutor(3) as threads:
        writing = threads.submit(_write, stdin_pipe, stdin)
        reading = [threads.submit(each.read) for each in (stdout_pipe, stderr_pipe)]
        try:
            status = process.wait(seconds * PATIENCE)
        finally:
            process.kill()
        writing.result()
        return subprocess.CompletedProcess(
            command, status, *(each.result() for each in reading)
        )


def _write(pipe: IO[str], text: str) -> None:
    with suppress(BrokenPipeError), pipe:
        pipe.write(text)


def start(
    command: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    output: IO[Any],
    errors: IO[Any] | None = None,
    stdin: IO[Any] | None = None,
) -> Process:
    """Start a process, by the fork server if possible.

    errors: defaults to `output`; stdin: empty by default.
    """
    with ExitStack() as files:
        given = stdin or files.enter_context(Path(os.devnull).open("rb"))
        descriptors = [each.fileno() for each in (given, output, errors or output)]
        if Forks.take(command, environment):
            return forks().start(command, cwd, environment, *descriptors)
        return subprocess.Popen(
            command,
            stdin=given,
            stdout=output,
            stderr=errors or output,
            cwd=cwd,
            env=environment,
        )


@cache
def forks() -> Forks:
    """Connect to the run's fork server (tests/conftest.py), or start one for this process."""
    address = os.environ.get(FORK_SERVER)
    if not address:
        server = ForkServer()
        atexit.register(server.stop)
        address = os.environ[FORK_SERVER] = server.address
    forks = Forks.at(address)
    atexit.register(forks.close)
    return forks


def distributions_of(requirements: Sequence[str]) -> set[str]:
    """Return the names of the distributions, all of them installed here, that pip installs for
    these requirements.
    """
    found: set[tuple[str, str]] = set()
    unseen = [Requirement(each) for each in requirements]
    while unseen:
        one = unseen.pop()
        for extra in {"", *one.extras} - {
            extra for name, extra in found if name == canonicalize_name(one.name)
        }:
            found.add((canonicalize_name(one.name), extra))
            required = map(Requirement, distribution(one.name).requires or ())
            unseen += [
                each
                for each in required
                if each.marker is None or each.marker.evaluate({"extra": extra})
            ]
    return {name for name, _ in found}


def fetch(
    url: str, body: bytes | None = None, /, **headers: str
) -> tuple[int, str, Message]:
    """Return the status, text and headers of a response.

    With a body, send a POST request. Raises OSError.
    """
    request = urllib.request.Request(url, body, headers)  # noqa: S310 - on loopback
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers


def processes_in(folder: Path) -> list[str]:
    """Return the command lines of running processes whose working directory is in this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (entry / "cwd").readlink().is_relative_to(folder) and (
                line := (entry / "cmdline").read_bytes()
            ):
                found.append(line.replace(b"\0", b" ").decode())
    return found


def shapes(words: str) -> list[bytes]:
    """Return the byte strings by which to find the words: as plain text, and as Base64 at each of
    three alignments.
    """
    encoded = (
        b64encode(b"-" * shift + words.encode())[4 * bool(shift) : -4]
        for shift in range(3)
    )
    return [words.encode(), *encoded]


def make_classification(
    post_id: str, label: str | None = "food", **fields: Any
) -> Classification:
    """Return a classification with these fields, and plain values for the others."""
    plain: dict[str, Any] = {
        "scores": {label or "food": 0.9}, "model": "m", "revision": None, "weights": "00",
        "fingerprint": "f",
        "classified_at": 1.0, "worker": "w", "device": "cpu", "queued_seconds": None,
    }  # fmt: skip
    return Classification(id=post_id, label=label, **plain | fields)


def long_cases(*values: object) -> list[Any]:
    """Return these values of a parameter as cases of `make long` alone."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


def make_posts(count: int) -> list[Post]:
    """Return posts with distinct texts of different lengths."""
    return [
        Post(
            id=f"p{number}",
            title=f"Post number {number} about the weather",
            body="rain and wind " * (number % 12),
        )
        for number in range(count)
    ]


def as_jsonl(posts: list[Post]) -> str:
    return "".join(post.model_dump_json(exclude_defaults=True) + "\n" for post in posts)


def last_json(text: str) -> dict[str, Any]:
    """Parse the JSON object in the last line."""
    found: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    return found
