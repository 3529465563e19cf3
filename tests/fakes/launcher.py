"""Start stand-in workers and restart those that exit, as `feedmill up` or a service manager does.

    python -m tests.fakes.launcher FOLDER WORKERS

The workers never outlive the launcher: when it ends, the kernel kills them, as it does those of `feedmill up`.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from feedmill.stack.processes import Child
from feedmill.stack.signals import note_signals
from tests.fakes.standin_worker import CLOCK, FULL, HANG

#: Seconds that a worker may take to stop gracefully.
PATIENCE = 40.0


def main(folder: Path, workers: int) -> None:
    # Workers inherit this. Otherwise, a signal sent before a worker has installed its handlers would kill it.
    for number in (HANG, FULL, CLOCK):
        signal.signal(number, signal.SIG_IGN)

    def start(name: str) -> Child:
        return Child(name, [sys.executable, "-m", "tests.fakes.standin_worker", name], folder, dict(os.environ))

    with note_signals() as received:
        children = [start(f"worker-{number}") for number in range(workers)]
        try:
            while not received:
                for number, child in enumerate(children):
                    if child.process.poll() is not None:
                        children[number] = start(child.name)
                time.sleep(0.05)
        finally:
            for child in children:  # SIGTERM only once: a second one would make the worker exit without draining
                child.process.terminate()
            for child in children:
                with suppress(subprocess.TimeoutExpired):
                    child.process.wait(PATIENCE)
                child.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
