"""The workflow that drafts a release runs `make release` and depends on no action of others."""

import re
import subprocess
from typing import Any

import yaml  # type: ignore[import-untyped]

import feedmill
from tests.support import ROOT

WORKFLOW: dict[Any, Any] = yaml.safe_load(
    (ROOT / ".github" / "workflows" / "release.yml").read_text()
)
STEPS: list[dict[str, str]] = WORKFLOW["jobs"]["release"]["steps"]


def test_runs_make_release_without_actions_of_others() -> None:
    assert not [step for step in STEPS if "uses" in step]
    commands = "\n".join(step["run"] for step in STEPS)
    assert "make release" in commands
    assert re.search(r"^release:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    # Values of the event reach the shell as variables, never as text of a command.
    assert "${{" not in commands
    done = subprocess.run(["bash", "-n"], input=commands, text=True, check=False)  # noqa: S607
    assert done.returncode == 0


def test_rights_are_those_of_a_release() -> None:
    assert WORKFLOW["permissions"] == {}
    assert WORKFLOW["jobs"]["release"]["permissions"] == {"contents": "write"}


def test_a_tag_is_compared_with_the_version() -> None:
    (step,) = [step for step in STEPS if "__version__" in step["run"]]
    version = feedmill.__version__
    done = subprocess.run(
        ["bash", "-c", step["run"]],  # noqa: S607
        cwd=ROOT,
        env={"TAG": f"v{version}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0
