"""`feedmill` as a process in a tenth of a second: forked from one that has imported everything.

    server = ForkServer()
    process = server.start(["worker"], cwd, environment, stdin, output, errors)

A worker imports torch and transformers for four seconds of CPU time, a command Celery and pydantic for one, and the
tests start hundreds. A forked one is a process of its own in all that they ask of it: its memory, its connections, its
signals, its files, its end. What it does not show is what is imported when: tests/e2e/test_starting.py and
test_demo.py start it as people do.
"""

import atexit
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

#: Longest request, in bytes: the environment is most of it.
REQUEST = 1 << 20
#: Variables that are read at each start and not by an import, and those that imports of torch, scikit-learn and pytest
#: set, in the tests' own process too. Who changes others is given a new interpreter.
HARMLESS = ("FEEDMILL_", "COLUMNS", "HOME", "KMP_", "TORCHINDUCTOR_", "PYTEST_")
#: This process's own, before any test changed it for a while.
ENVIRONMENT = dict(os.environ)


class Forked:
    """A process, as subprocess.Popen has it."""

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
    """The process that has imported everything; it ends with this one."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forkserver", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parent.parent,
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
            )

    @staticmethod
    def takes(environment: Mapping[str, str]) -> bool:
        """Whether a process with this environment may be forked: imports would not have seen another one."""
        changed = {name for name, _ in ENVIRONMENT.items() ^ environment.items()}
        return all(name.startswith(HARMLESS) for name in changed)

    def start(
        self, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], stdin: int, output: int, errors: int
    ) -> Forked:
        """Run `feedmill` with these arguments; the last three are open files."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            request = json.dumps([list(arguments), str(cwd), dict(environment)]).encode()
            socket.send_fds(self._requests, [request], [theirs.fileno(), stdin, output, errors])
        return Forked(ours)

    def stop(self) -> None:
        self._requests.close()
        self._process.wait()


def _serve(requests: socket.socket) -> None:
    """Fork for each request, until there are no more; returns in the process that is to run `feedmill`."""
    while True:
        request, files, *_ = socket.recv_fds(requests, REQUEST, 4)
        if not request:
            os._exit(0)
        if os.fork() == 0:  # who waits for it, and tells how it ended
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            if (pid := os.fork()) == 0:
                return _become(json.loads(request), files)
            with socket.socket(fileno=files[0]) as told:
                for file in files[1:]:
                    os.close(file)
                told.send(str(pid).encode())
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(OSError):  # nobody asks any more
                    told.send(str(os.waitstatus_to_exitcode(status)).encode())
            os._exit(0)
        for file in files:
            os.close(file)


def _become(request: tuple[list[str], str, dict[str, str]], files: Sequence[int]) -> None:
    """Be what was asked for, but for the imports."""
    arguments, cwd, environment = request
    for number, file in enumerate(files[1:]):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    sys.argv = ["feedmill", *arguments]


def main() -> None:
    import transformers.models.bert.modeling_bert  # noqa: F401, PLC0415 - see the module's first lines

    import feedmill.cli  # noqa: F401, PLC0415
    import workers.run  # noqa: F401, PLC0415
    from feedmill.__main__ import main as run  # noqa: PLC0415

    gc.freeze()  # what a collection touches, a forked process would have to copy
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those who wait need nobody to wait for them
    _serve(socket.socket(fileno=int(sys.argv[1])))
    _end(run)


def _end(run: Callable[[], None]) -> NoReturn:
    """As the interpreter ends, but for taking apart all that was imported: that alone would be a second."""
    status: object = 0
    try:
        run()
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    if not isinstance(status, int):
        sys.stderr.write(f"{status}\n")
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # the interpreter's own
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
