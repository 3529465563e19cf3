"""`feedmill demo`: its output, and cleaning up after itself."""

import html
import re
import signal
import sys
from pathlib import Path

import pytest

from feedmill.stack.demo import sample_posts
from tests.support import _environment, feedmill, processes_in, run, running, wait_until


def hostile(folder: Path) -> Path:
    """Return the folder, filled with packages and configuration that must never be loaded."""
    for name in ("shared", "workers", "producers", "celery"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(
            "raise RuntimeError('the wrong one')"
        )
    (folder / "flowerconfig.py").write_text("raise RuntimeError('the wrong one')")
    return folder


def test_demo_ignores_packages_named_like_ours(tmp_path: Path) -> None:
    """The working folder contains such packages. The demo works nevertheless, and cleans up."""
    folder = hostile(tmp_path)
    said = feedmill(
        "demo", "--all", cwd=folder, TMPDIR=str(folder), NEW_INTERPRETER="1"
    )
    assert said.returncode == 0, said.stderr
    assert processes_in(folder) == []
    assert not list(folder.glob("feedmill-demo-*"))
    right = re.search(r"^(\d+) of 160 right", said.stdout, re.MULTILINE)
    assert right
    # Random labels would be right for 10 posts; the embedded model's are right for well over half.
    assert int(right[1]) >= 80
    assert len(re.findall("^[✓✗]  [a-z]", said.stdout, re.MULTILINE)) == 160
    assert said.stdout.count("written for: ") == 160 - int(right[1])
    # Whole titles, although they wrap.
    shown = " ".join(said.stdout.split())
    assert all(
        " ".join(html.unescape(post.title).split()) in shown for post in sample_posts()
    )
    assert "feedmill classify " in said.stdout


@pytest.mark.parametrize(
    "how", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda how: how.name
)
def test_interrupted_startup_leaves_no_process(
    tmp_path: Path, how: signal.Signals
) -> None:
    # Only processes that are not forked receive the kernel's signal for orphans.
    real = {"NEW_INTERPRETER": "1"} if how == signal.SIGKILL else {}
    with running("demo", cwd=tmp_path, TMPDIR=str(tmp_path), **real) as demo:
        wait_until(
            lambda: list(tmp_path.glob("feedmill-demo-*/flower.log")),
            "the last process has started",
        )
        demo.end(how)
        wait_until(lambda: not processes_in(tmp_path), "every process has ended")
        if how != signal.SIGKILL:
            assert not list(tmp_path.glob("feedmill-demo-*"))


#: Runs the demo, and sends the signal to this process at the first of each event that names the
#: demo's folder.
INTERRUPTED = """
import os, sys
number, moments = int(sys.argv[1]), sys.argv[2].split()
def interrupt(event, arguments):
    if moments and event == moments[0] and "feedmill-demo-" in str(arguments):
        moments.pop(0)
        os.kill(os.getpid(), number)
from feedmill.cli.main import run
sys.addaudithook(interrupt)
sys.argv[1:] = ["demo"]
sys.exit(run())
"""


@pytest.mark.parametrize(
    "how", [signal.SIGTERM, signal.SIGINT], ids=lambda how: how.name
)
@pytest.mark.parametrize(
    "moments",
    [
        "open",
        "subprocess.Popen",
        "subprocess.Popen shutil.rmtree",
        "subprocess.Popen os.rmdir",
    ],
)
def test_interrupted_demo_leaves_no_folder(
    tmp_path: Path, how: signal.Signals, moments: str
) -> None:
    """Whenever the signals come: while the demo starts, and while it deletes its folder, which has
    passwords.
    """
    command = [sys.executable, "-c", INTERRUPTED, str(how.value), moments]
    environment = _environment(tmp_path, TMPDIR=str(tmp_path))
    said = run(command, tmp_path, environment)
    assert said.returncode == 128 + how, said.stderr
    assert not list(tmp_path.glob("feedmill-demo-*"))
    assert processes_in(tmp_path) == []


def test_failed_startup_leaves_no_process(tmp_path: Path) -> None:
    said = feedmill(
        "demo", cwd=tmp_path, TMPDIR=str(tmp_path), FEEDMILL_MODEL="/no/such/model"
    )
    assert said.returncode == 2
    assert "worker" in said.stderr
    assert "'/no/such/model'" in said.stderr
    assert "Traceback" not in said.stderr
    assert processes_in(tmp_path) == []
