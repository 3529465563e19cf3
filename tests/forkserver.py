"""Start Python processes in a tenth of a second by forking a process that has imported everything.

    server = ForkServer()
    process = Forks(server.address).start([sys.executable, "-m", "feedmill", "worker"], cwd,
    environment, stdin, …)

Imports take a worker four seconds of CPU time and a command one second, and the tests start
hundreds of them. A forked process has its own memory, connections, signals, files and exit status.
It differs from a new interpreter in three ways: when modules are imported, its command line, and
that Feedmill's task is registered in every Celery application. A forked `feedmill up` or `demo`
forks its worker and Flower, too; so are the test processes of pytest-xdist.
tests/e2e/test_starting.py, test_demo.py and test_secrets.py start new interpreters, as users do.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from feedmill.shared.linux import die_with
from feedmill.stack.processes import Child, open_log

#: Maximum size of a request in bytes. Most of it is the environment.
MAX_REQUEST_BYTES = 1 << 20
#: Prefixes of variables that a forked process may change: those read at each start instead of by
#: an import, the tests' own, and those set by torch, transformers, scikit-learn, polars and
#: pytest. A change of any other variable, such as NEW_INTERPRETER, starts a new interpreter.
FORKABLE = (
    "FEEDMILL_", "COLUMNS", "HOME", "LINES", "NOTIFY_SOCKET", "OMP_NUM_THREADS", "OTEL_",
    "PYTHONPATH", "TERM", "TMPDIR",
    "CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "MASTER_ADDR", "RANK", "WORLD_SIZE",
    "FLOWER_", "HF_", "XDG_CONFIG_HOME",
    "BROKER", "FAKE_", "HACKER_NEWS_URL", "PATIENCE", "STANDIN_", "TRANSPORT",
    "KMP_", "PYTEST_", "RAYON_", "TENSORBOARD_", "TOKENIZERS_", "TORCHINDUCTOR_", "_RJEM_",
)  # fmt: skip
#: This process's environment, before any test changed it.
ENVIRONMENT = dict(os.environ)
#: Commands that start other Python processes.
STACKS = {"up", "demo"}
#: The environment variable with the fork server's address, set if several processes share the
#: tests.
FORK_SERVER = "PYTEST_FORK_SERVER"


class Forked:
    """A forked process, with the interface of subprocess.Popen."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid = int(self._connection.recv(32))
        self.returncode: int | None = None

    def __del__(self) -> None:
        self._connection.close()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._connection.settimeout(None if timeout is None else max(timeout, 1e-6))
            try:
                self.returncode = int(self._connection.recv(32))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("feedmill", timeout or 0) from None
            self._connection.close()
        return self.returncode

    def send_signal(self, which: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, which)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The process that has imported everything.

    It ends with this process, and other processes may use it.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")
        self.address = str(Path(self._folder.name) / "socket")
        parent = os.getpid()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self.address)
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forkserver", str(listener.fileno())],
                pass_fds=[listener.fileno()],
                cwd=Path(__file__).parent.parent,
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                preexec_fn=lambda: die_with(parent),  # noqa: PLW1509 - it takes no lock: two system calls
            )

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


class Forks:
    """A client of the fork server with which this socket is connected."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests

    @classmethod
    def at(cls, address: str) -> "Forks":
        requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        requests.connect(address)
        return cls(requests)

    @staticmethod
    def take(command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Return whether the command may be forked: it runs this Python, and no import depends on
        changed variables.
        """
        changed = {name for name, _ in ENVIRONMENT.items() ^ environment.items()}
        ours = Path(command[0]).parent == Path(sys.executable).parent
        return ours and all(name.startswith(FORKABLE) for name in changed)

    def start(
        self,
        command: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str],
        stdin: int,
        output: int,
        errors: int,
    ) -> Forked:
        """Run a console script, or Python with -m, -c or a file, optionally after -P.

        stdin, output, errors: open file descriptors.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            request = json.dumps([list(command), str(cwd), dict(environment)]).encode()
            socket.send_fds(
                self._requests, [request], [theirs.fileno(), stdin, output, errors]
            )
        return Forked(ours)

    def close(self) -> None:
        self._requests.close()


class ForkedChild(Child):
    """A child process of the stack, forked if possible."""

    def __init__(
        self,
        forks: Forks,
        name: str,
        command: list[str],
        folder: Path,
        environment: dict[str, str],
        *more: Any,
        **options: Any,
    ) -> None:
        if not Forks.take(command, environment):
            super().__init__(name, command, folder, environment, *more, **options)
            return
        self.name, self.log = name, folder / f"{name}.log"
        with open_log(self.log) as log, Path(os.devnull).open("rb") as null:
            self._log_start = log.tell()
            files = null.fileno(), log.fileno(), log.fileno()
            self.process = forks.start(command, folder, environment, *files)  # type: ignore[assignment]


def _listen(listener: socket.socket) -> list[str]:
    """Fork a process to serve each client.

    Return only in the processes that clients request, with their command.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap the serving processes
    while True:
        requests, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return _serve(requests)
        requests.close()


def _serve(requests: socket.socket) -> list[str]:
    """Fork a process for each request of a client.

    Return only in these processes, with their command.

    The fork itself takes 20 ms, because of the memory of the imported modules. The processes end
    with this one.
    """
    server = os.getpid()
    waited = selectors.DefaultSelector()
    waited.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in waited.select():
            if key.fileobj is requests:
                request, files, *_ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 4)
                if not request:
                    os._exit(0)
                if (pid := os.fork()) == 0:
                    die_with(server)
                    for other in waited.get_map().values():
                        if other.data:
                            os.close(other.fd)
                            other.data[1].close()
                    waited.close()
                    requests.close()
                    return _become(json.loads(request), files)
                client = socket.socket(fileno=files[0])
                client.send(str(pid).encode())
                waited.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, client))
                for file in files[1:]:
                    os.close(file)
            else:
                waited.unregister(key.fileobj)
                os.close(key.fd)
                pid, client = key.data
                _, status = os.waitpid(pid, 0)
                with (
                    client,
                    contextlib.suppress(OSError),
                ):  # the client has disconnected
                    client.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(
    request: tuple[list[str], str, dict[str, str]], files: Sequence[int]
) -> list[str]:
    """Take on the requested files, working directory and environment.

    Return the command, or that of a child of it.
    """
    command, cwd, environment = request
    for number, file in enumerate(files[1:]):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    tempfile.tempdir = None
    path = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in path if folder and folder not in sys.path]
    if threads := environment.get("OMP_NUM_THREADS"):
        _compute_on(int(threads))
    if any(
        name.startswith("HF_") for name, _ in ENVIRONMENT.items() ^ environment.items()
    ):
        _reload_hub()
    return _with_children(command) if STACKS & set(command) else command


def _with_children(command: list[str]) -> list[str]:
    """Fork a process that serves the stack of this one.

    Return the command, or in the stack's processes theirs.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        die_with(parent)
        ours.close()
        os.setsid()
        os.chdir("/")
        with Path(os.devnull).open("r+b") as null:
            for file in range(3):
                os.dup2(null.fileno(), file)
        return _serve(theirs)
    from feedmill.stack import embedded  # noqa: PLC0415 - not needed in the client

    theirs.close()
    embedded.Child = partial(ForkedChild, Forks(ours))  # type: ignore[assignment, attr-defined]
    return command


def _reload_hub() -> None:
    """Import huggingface_hub again, which reads its variables when it is imported."""
    for name in [
        name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"
    ]:
        del sys.modules[name]
    importlib.reload(sys.modules["feedmill.workers.models.hub"])


def _compute_on(threads: int) -> None:
    import torch  # noqa: PLC0415 - not needed in the client

    from feedmill.workers.models import device  # noqa: PLC0415

    torch.set_num_threads(threads)
    device.TORCH_THREADS = threads


#: Packages that commands import when they run, and those that only test processes need.
FURTHER = (
    "billiard.pool", "celery.fixups.django", "rich.markdown",
    "hypothesis", "jsonschema", "kubernetes_validate", "pandas", "polars", "praw",
    "sentence_transformers",
    "trustme", "websockets.sync.client",
)  # fmt: skip


def main() -> None:
    import transformers.models.bert.modeling_bert  # noqa: F401, PLC0415

    import feedmill.cli.main  # noqa: PLC0415
    import feedmill.exporting.postgres  # noqa: PLC0415
    import feedmill.monitoring.dashboard  # noqa: PLC0415
    import feedmill.web.server  # noqa: PLC0415
    import feedmill.workers.models.classifiers.similarity  # noqa: PLC0415
    import feedmill.workers.models.engines.network  # noqa: PLC0415
    import feedmill.workers.models.hub  # noqa: PLC0415
    import feedmill.workers.pipeline.offline  # noqa: PLC0415
    import feedmill.workers.run  # noqa: PLC0415
    import feedmill.workers.runtime.consumer  # noqa: PLC0415

    for package in FURTHER:
        importlib.import_module(package)
    feedmill.cli.main.application()  # imports the commands
    del sys.path[0]  # the working directory, added by `-m`
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]  # private
        finalizer.atexit = (
            False  # torch would destroy its operators when each process exits
        )
    gc.freeze()  # a collection in a forked process would copy the memory it touches
    run(_listen(socket.socket(fileno=int(sys.argv[1]))))


def run(command: Sequence[str]) -> NoReturn:
    """Run a command like the interpreter and exit, without destroying imported modules, which
    takes a second.
    """
    status: object = 0
    try:
        _interpret(command[1:] if command[0] == sys.executable else command)
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    if not isinstance(status, int):
        sys.stderr.write(f"{status}\n")
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # private
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _interpret(arguments: Sequence[str]) -> None:
    """Run a command line like the interpreter does."""
    safe = arguments[0] == "-P"
    what, *sys.argv = arguments[safe:]
    if not safe:
        sys.path.insert(
            0, str(Path.cwd()) if what in ("-m", "-c") else str(Path(what).parent)
        )
    if what == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.modules["__main__"] = main = ModuleType("__main__")
        code, sys.argv[0] = sys.argv[0], what
        exec(compile(code, "<string>", "exec"), main.__dict__)  # noqa: S102 - code of a test
    else:
        sys.argv.insert(0, what)
        runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] != "-u":
        main()
    # pytest-xdist starts a test process, or Jupyter a kernel.
    forks = Forks.at(os.environ[FORK_SERVER])
    sys.exit(
        forks.start(
            [sys.executable, *sys.argv[2:]], Path.cwd(), os.environ, 0, 1, 2
        ).wait()
    )
