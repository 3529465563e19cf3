"""The pre-commit hooks run the same commands as `make lint`, in the same order."""

import re
from pathlib import Path

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parent.parent.parent


def test_pre_commit_runs_what_make_lint_runs() -> None:
    _, _, rest = (ROOT / "Makefile").read_text().partition("\nlint: ")
    make_commands = re.findall(r"^\t\$\(BIN\)/(.*)$", rest.partition("\n\n")[0], re.MULTILINE)
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["entry"].removeprefix(".venv/bin/") for hook in repository["hooks"]] == make_commands
    assert all(hook["language"] == "system" and not hook["pass_filenames"] for hook in repository["hooks"])
