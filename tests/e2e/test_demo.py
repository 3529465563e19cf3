"""`feedmill demo`: what it shows, and that nothing is left of it."""

import json
import signal
from pathlib import Path

import pytest

from tests.support import feedmill, processes_in, running, wait_until


def hostile(folder: Path) -> Path:
    """A folder whose packages and configuration must never be read."""
    for name in ("shared", "workers", "producers", "celery"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    (folder / "flowerconfig.py").write_text("raise RuntimeError('the wrong one')")
    return folder


def test_the_demo_from_a_folder_with_other_packages_of_our_names(tmp_path: Path) -> None:
    """Started as people do; nothing is left of it when it is asked to end."""
    folder = hostile(tmp_path)
    with running("demo", "--all", "--json", "--keep", cwd=folder, TMPDIR=str(folder), NEW_INTERPRETER="1") as demo:
        wait_until(lambda: demo.says("Ctrl-C stops everything"), "the demo stays up")
        # Itself, redis, worker, Flower.
        assert len(processes_in(folder)) == 4, processes_in(folder)
        assert demo.end(signal.SIGINT) == 0, demo.text()
    assert processes_in(folder) == []
    assert not list(folder.glob("feedmill-demo-*"))
    (told,) = (line for line in demo.text().splitlines() if line.startswith("{"))
    summary = json.loads(told)
    assert list(summary) == ["posts", "classified", "correct", "posts_per_s", "padding_efficiency", "seconds"]
    assert summary["posts"] == summary["classified"] == 160
    # Chance is 10; what the embedded model reaches on these posts is well above half.
    assert summary["correct"] >= 80
    assert 0.5 < summary["padding_efficiency"] <= 1
    assert f"{summary['correct']} of 160 labels are right" in demo.text()
    assert "Flower at http://127.0.0.1:" in demo.text()
    assert len([line for line in demo.text().splitlines() if line.startswith("│")]) == 160


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda how: how.name)
def test_nothing_outlives_a_demo_that_is_starting(tmp_path: Path, how: signal.Signals) -> None:
    with running("demo", "--keep", cwd=tmp_path, TMPDIR=str(tmp_path)) as demo:
        wait_until(lambda: " flower " in " ".join(processes_in(tmp_path)), "the last one is there")
        demo.end(how)
        wait_until(lambda: not processes_in(tmp_path), "every process has ended", 20)


def test_an_error_while_starting_leaves_nothing(tmp_path: Path) -> None:
    said = feedmill("demo", cwd=tmp_path, TMPDIR=str(tmp_path), FEEDMILL_MODEL="/no/such/model")
    assert said.returncode == 2
    assert "worker exited with status" in said.stderr
    assert "There is no model folder '/no/such/model'" in said.stderr
    assert "Traceback" not in said.stderr
    assert processes_in(tmp_path) == []
