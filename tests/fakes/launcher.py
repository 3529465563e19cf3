"""Start stand-in workers and restart those that exit, as `feedmill up` or a service manager does.

    python -m tests.fakes.launcher FOLDER WORKERS

It imports their code once and forks them: a fork takes no time, an import most of a second. The
workers never outlive the launcher: when it ends, the kernel kills them, as it does those of
`feedmill up`.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from feedmill.shared.linux import die_with
from feedmill.stack.processes import EXIT_SIGNALS, note_signals
from tests import forkserver
from tests.fakes import standin_worker
from tests.fakes.standin_worker import CLOCK, FULL, HANG

#: Seconds that the workers may take to stop gracefully.
PATIENCE = 40.0


def start(name: str, folder: Path, launcher: int) -> int:
    """Fork a worker and return its process id."""
    if not (pid := os.fork()):
        run(name, folder, launcher)
    return pid


def run(name: str, folder: Path, launcher: int) -> NoReturn:
    """Run a worker in this process. Its output goes to a file, and its name to /proc/PID/comm."""
    die_with(launcher)
    for number in EXIT_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    with (folder / f"{name}.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    Path("/proc/self/comm").write_text(name)
    forkserver.run([sys.executable, "-m", standin_worker.__name__, name])


def main(folder: Path, workers: int) -> None:
    # Workers inherit this. Otherwise, a signal sent before a worker has installed its handlers
    # would kill it.
    for number in (HANG, FULL, CLOCK):
        signal.signal(number, signal.SIG_IGN)
    standin_worker.import_worker()
    launcher = os.getpid()
    with note_signals() as received:
        running = {
            start(name, folder, launcher): name
            for name in (f"worker-{number}" for number in range(workers))
        }
        while not received:
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                name = running.pop(pid)
                running[start(name, folder, launcher)] = name
            time.sleep(0.05)
        # SIGTERM only once: a second one would make the worker exit without draining
        for pid in running:
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE
        while running and time.monotonic() < deadline:
            running.pop(os.waitpid(-1, os.WNOHANG)[0], None)
            time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
