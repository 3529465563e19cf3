"""A user's module with the name of one of our packages: the error names its file."""

import subprocess
import sys
from pathlib import Path

import pytest

from feedmill.packages import HOME, PACKAGES, shadowed_package

SCRIPT = """
import feedmill
try:
    feedmill.{name}
except ImportError as error:
    print(error)
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": f"{folder}:{HOME}"}
    command = (sys.executable, *command)
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, check=False)


def test_finds_its_own_packages() -> None:
    assert shadowed_package() is None


@pytest.mark.parametrize("package", PACKAGES)
def test_python_names_the_file_that_hides_a_package(tmp_path: Path, package: str) -> None:
    (tmp_path / f"{package}.py").touch()
    name = "results" if package == "shared" else "classify"
    found = run(tmp_path, "-c", SCRIPT.format(name=name))
    assert str(tmp_path / f"{package}.py") in found.stdout, found
    assert "Rename it" in found.stdout


def test_the_command_names_the_folder_that_hides_a_package(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "__init__.py").touch()
    found = run(tmp_path, "-m", "feedmill", "--version")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith(f"feedmill: {tmp_path / 'workers'} hides the package 'workers'")
    assert found.stderr.count("\n") == 1
