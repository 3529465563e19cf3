"""Starts stand-in workers, and starts again those that end, as `feedmill up` or a service manager does.

    python -m tests.fakes.launcher FOLDER WORKERS

Its workers never outlive it: whatever ends it, the kernel kills them, as it does those of `feedmill up`.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from feedmill.stack.processes import Child
from feedmill.stack.signals import exit_on_signals
from tests.fakes.standin_worker import CLOCK, FULL, HANG

#: Seconds that a worker may take to stop gracefully.
PATIENCE = 40.0


def main(folder: Path, workers: int) -> None:
    # Ignore signals until the worker handles them: by default they would kill it.
    for number in (HANG, FULL, CLOCK):
        signal.signal(number, signal.SIG_IGN)

    def start(name: str) -> Child:
        return Child(name, [sys.executable, "-m", "tests.fakes.standin_worker", name], folder, dict(os.environ))

    with exit_on_signals():
        children = [start(f"worker-{number}") for number in range(workers)]
        try:
            while True:
                for number, child in enumerate(children):
                    if child.process.poll() is not None:
                        children[number] = start(child.name)
                time.sleep(0.05)
        finally:
            for child in children:
                child.process.terminate()
            for child in children:
                with suppress(subprocess.TimeoutExpired):  # a second SIGTERM would end it at once
                    child.process.wait(PATIENCE)
                child.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
