"""Docstrings open with a verb or a noun, so that readers know at once what they describe."""

import ast
import re
from pathlib import Path

import pytest

from tests.support import ROOT

FOLDERS = ("shared", "producers", "workers", "feedmill", "benchmarks", "tests")
#: Words with which only a part of a sentence begins.
FRAGMENT = re.compile(r"(What|Whose|Those|Of|Which|Whether|That|How)\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def fragments(file: Path) -> list[str]:
    """Return the first lines of a file's docstrings that open with a fragment."""
    lines = []
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if not isinstance(node, DOCUMENTED):
            continue
        docstring = ast.get_docstring(node) or ""
        if FRAGMENT.match(docstring):
            lines.append(docstring.splitlines()[0])
    return lines


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_open_with_a_verb_or_a_noun(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    for file in files:
        assert fragments(file) == [], file


def test_finds_a_fragment(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text('"""A module."""\n\ndef room():\n    """How much fits."""\n')
    assert fragments(file) == ["How much fits."]
