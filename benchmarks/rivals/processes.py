"""The processes of one rival, all of which are gone after `stop`: also those that its processes started."""

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from feedmill.processes import LIBC, Child

ROOT = Path(__file__).parents[2]
#: From <sys/prctl.h>: an orphan among this process' descendants becomes its child, so that it can be found.
PR_SET_CHILD_SUBREAPER = 36
#: Seconds that a process may take to end in order.
STOP_LIMIT = 20.0


class Processes:
    """Children of this process, which work in a folder that lives as long as the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children: list[Child] = []
        self._before: set[int] = set()

    def start(self, name: str, command: list[str], environment: Mapping[str, str], stdin: str | None = None) -> Child:
        """Start a process; its output goes to a log in the folder."""
        if not self._children:
            LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
            self._before = descendants(os.getpid())
            self.folder.mkdir(exist_ok=True)
        # Orphaned by kill -9 they get the chance to end their own children.
        child = Child(name, command, self.folder, {**os.environ, **environment}, signal.SIGTERM, stdin)
        self._children.insert(0, child)
        return child

    def start_module(self, module: str, *arguments: str, shadow: Path | None = None, **environment: str) -> Child:
        """Run a module of this project with this very Python; packages in `shadow` go before the installed ones."""
        path = os.pathsep.join(str(folder) for folder in (shadow, ROOT) if folder)
        command = [sys.executable, "-P", "-m", module, *arguments]
        return self.start(module.rpartition(".")[2], command, {**environment, "PYTHONPATH": path})

    def stop(self) -> None:
        """End them, the latest first: in order, and by force where that takes too long."""
        if not self._children:
            return
        try:
            for child in self._children:
                child.stop(STOP_LIMIT)
        finally:
            for child in self._children:
                child.kill()
            self._children.clear()
            end(descendants(os.getpid()) - self._before)


def descendants(ancestor: int) -> set[int]:
    """The process ids of all living descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            # The name, in parentheses, may hold anything; state and parent follow it.
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
    """Kill descendants of this process, and take note of their end."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    for process in processes:
        with suppress(ChildProcessError):  # its own parent has done so
            os.waitpid(process, 0)
