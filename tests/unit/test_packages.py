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


def test_finds_its_own_packages() -> None:
    assert shadowed_package() is None


@pytest.mark.parametrize("package", PACKAGES)
def test_python_names_the_file_that_hides_a_package(tmp_path: Path, package: str) -> None:
    (tmp_path / f"{package}.py").touch()
    name = "results" if package == "shared" else "classify"
    command = [sys.executable, "-c", SCRIPT.format(name=name)]
    environment = {"PYTHONPATH": f"{tmp_path}:{HOME}"}
    found = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, check=False)
    assert str(tmp_path / f"{package}.py") in found.stdout, found
    assert "Rename it" in found.stdout
