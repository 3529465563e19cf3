"""shared/errors.py: reasons, and missing packages."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from redis.exceptions import ResponseError

from feedmill.shared.errors import UserError, clause, explain_missing


def test_errors_of_pipelines_are_shown_without_the_command() -> None:
    """It may contain posts."""
    error = ResponseError(
        'Command # 4 (LPUSH feedmill {"body": "(a \n post) of pipeline"}) of pipeline caused error: No.'
    )
    assert clause(error) == "No"


def test_missing_packages_are_explained_in_every_thread() -> None:
    def load() -> None:
        with explain_missing("A test", "worker"):
            raise ModuleNotFoundError(name="torch")

    with ThreadPoolExecutor(1) as pool, pytest.raises(UserError, match="A test requires the package torch"):
        pool.submit(load).result()


def test_notebooks_show_the_sentence_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    make: Any = InteractiveShell
    shell = make()
    shell.user_ns["error"] = UserError("There is no such column.")
    shell.run_cell("raise error")
    assert capsys.readouterr().out.strip() == "UserError: There is no such column."
