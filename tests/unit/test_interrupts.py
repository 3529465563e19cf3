"""Ctrl-C ends a command with status 130 and without a traceback, wherever it comes and whoever
drops it.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support import ROOT

#: Code of a command that replaces the real one. It prints "ready" where Ctrl-C shall come.
COMMAND = """
import sys, time
from feedmill import __main__
from feedmill.cli import main as commands
from feedmill.shared.errors import UserError

def wait():
    print("ready", flush=True)
    while True:
        time.sleep(0.01)

class Finalized:
    def __del__(self):
        wait()

def work(*_):
    {work}
    wait_quietly()

def wait_quietly():
    while True:
        time.sleep(0.01)

commands.{replaced} = work
sys.argv = ["feedmill", "status"]
__main__.main()
"""

WORK = {
    "at once": ("run", "wait()"),
    "in a finalizer": ("run", "Finalized()"),
    "dropped by a library": (
        "run",
        """
    try:
        wait()
    except BaseException:
        pass
""",
    ),
    "converted to another error": (
        "run",
        """
    try:
        wait()
    except BaseException:
        raise RuntimeError("cannot import") from None
""",
    ),
    "converted to a user's error": (
        "application",
        """
    try:
        wait()
    except BaseException:
        raise UserError("requires the package None") from None
""",
    ),
    "again while the first is handled": (
        "run",
        """
    try:
        wait()
    finally:
        wait()
""",
    ),
}


@contextmanager
def started(how: str) -> Iterator[subprocess.Popen[str]]:
    replaced, work = WORK[how]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(work=work, replaced=replaced)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("how", WORK)
def test_an_interrupt_ends_the_command(how: str) -> None:
    with started(how) as process:
        assert process.stdout
        for _ in range(WORK[how][1].count("wait()") or 1):
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (130, "")


def test_an_ignored_interrupt_stays_ignored() -> None:
    """As under nohup, and in the background of a script."""
    code = COMMAND.format(
        work='print("ready", flush=True); sys.exit(input())', replaced="run"
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate("worked on\n", timeout=120)
    assert (process.returncode, errors) == (1, "worked on\n")
