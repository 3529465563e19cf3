"""Start and stop the processes of a rival, including all of their descendants."""

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from feedmill.shared.linux import LIBC
from feedmill.stack.processes import Child

ROOT = Path(__file__).parents[2]
#: Option from <sys/prctl.h>: orphaned descendants become children of this process, which can then
#: find them.
PR_SET_CHILD_SUBREAPER = 36
#: Seconds that a process may take to stop after SIGTERM.
STOP_TIMEOUT_S = 20.0


class Processes:
    """Child processes with a common working directory that exists as long as the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children: list[Child] = []
        self._before: set[int] = set()

    def start(
        self,
        name: str,
        command: list[str],
        environment: Mapping[str, str],
        stdin: str | None = None,
    ) -> Child:
        """Start a process that logs to a file in the folder."""
        if not self._children:
            LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
            self._before = descendants(os.getpid())
            self.folder.mkdir(exist_ok=True)
        # If this process is killed, the children get SIGTERM, so that they can stop their own
        # children.
        child = Child(
            name,
            command,
            self.folder,
            {**os.environ, **environment},
            signal.SIGTERM,
            stdin,
        )
        self._children.insert(0, child)
        return child

    def start_module(
        self,
        module: str,
        *arguments: str,
        shadow: Path | None = None,
        **environment: str,
    ) -> Child:
        """Run a module of this project with this interpreter; packages in `shadow` take
        precedence.
        """
        path = os.pathsep.join(str(folder) for folder in (shadow, ROOT) if folder)
        command = [sys.executable, "-P", "-m", module, *arguments]
        return self.start(
            module.rpartition(".")[2], command, {**environment, "PYTHONPATH": path}
        )

    def stop(self) -> None:
        """Stop the processes, latest first; kill those that take longer than STOP_TIMEOUT_S."""
        if not self._children:
            return
        try:
            for child in self._children:
                child.stop(STOP_TIMEOUT_S)
        finally:
            for child in self._children:
                child.kill()
            self._children.clear()
            end(descendants(os.getpid()) - self._before)


def descendants(ancestor: int) -> set[int]:
    """Return the process ids of all running descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has just exited
            # The name in parentheses may contain any character; state and parent follow it.
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    found: set[int] = set()
    waiting = [ancestor]
    while waiting:
        new = children.get(waiting.pop(), [])
        found.update(new)
        waiting += new
    return found


def end(processes: set[int]) -> None:
    """Kill descendants of this process and reap them."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    for process in processes:
        with suppress(ChildProcessError):  # the process's own parent has reaped it
            os.waitpid(process, 0)
