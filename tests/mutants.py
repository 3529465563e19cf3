"""Mutation test: count changes of the code that no test notices (`python -m tests.mutants --minutes 20 tests/unit`).

The given tests run once with coverage, which records the tests that execute each line. Then mutants of PLACES, drawn
by the seed, run one by one in a copy of the checkout, with at most TESTS of the tests of their line. The last line is
JSON: the numbers killed, survived, and not executed by any test.
"""

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from coverage import CoverageData

ROOT = Path(__file__).parent.parent
PLACES = ("shared", "producers", "workers/transport", "workers/pipeline", "workers/runtime")
#: Tests to run for a mutant, and seconds for all of them.
TESTS, LIMIT_S = 30, 120
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add,
}  # fmt: skip


def mutations(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Change one place of the tree at a time; yield the line and the description, and change it back."""
    node: Any
    for node in ast.walk(tree):
        for name in node._fields:
            old = getattr(node, name)
            new, what = changed(node, name, old)
            if what:
                setattr(node, name, new)
                yield getattr(node, "lineno", 0), what
                setattr(node, name, old)


def changed(node: Any, name: str, old: Any) -> tuple[Any, str]:
    """Return another value of a node's field and a description, which is empty if the field stays as it is."""
    first = old[0] if name == "ops" else old
    if name in ("op", "ops") and (other := SWAPS.get(type(first))):
        return [other(), *old[1:]] if name == "ops" else other(), f"{type(first).__name__} -> {other.__name__}"
    if name == "test":
        return ast.UnaryOp(ast.Not(), old), "not"
    if isinstance(node, ast.Constant) and name == "value" and type(old) in (int, bool):
        return (not old if isinstance(old, bool) else old + 1), f"another {old}"
    if isinstance(node, ast.Return) and old and not isinstance(old, ast.Constant):
        return ast.Constant(None), "return None"
    return old, ""


def covering(tests: list[str], folder: Path) -> CoverageData:
    """Run the tests once; return which of them executes each line."""
    settings = folder / "coverage.ini"
    settings.write_text(f"[run]\nsource = {','.join(PLACES[:2])},workers\ndynamic_context = test_function\n")
    data = folder / "data"
    command = f"coverage run --rcfile={settings} --data-file={data} -m pytest -q -p no:randomly".split()
    subprocess.run([sys.executable, "-m", *command, *tests], cwd=ROOT, check=False, stdout=sys.stderr)
    found = CoverageData(str(data))
    found.read()
    return found


def is_killed(copy: Path, tests: list[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:randomly", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, timeout=LIMIT_S, capture_output=True, check=False)
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def mutant(file: Path, number: int) -> tuple[int, str, str]:
    """Return the line, the description and the changed source of a file's mutation of this number."""
    tree = ast.parse(file.read_text())
    line, what = next(islice(mutations(tree), number, None))
    return line, what, ast.unparse(tree)


def tests_of(data: CoverageData, file: Path, line: int) -> list[str]:
    """Return pytest's names of tests that execute the line, or the start of its statement."""
    contexts = data.contexts_by_lineno(str(file))
    for near in range(line, max(line - 6, 0), -1):
        if names := {name for name in contexts.get(near, ()) if ".test_" in name}:
            return [f"{'/'.join(name.split('.')[:-1])}.py::{name.rpartition('.')[2]}" for name in sorted(names)[:TESTS]]
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tests", nargs="*", default=["tests/unit", "tests/integration"])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=41)
    parser.add_argument("--minutes", type=float, default=600)
    given = parser.parse_args()
    files = sorted(file for place in PLACES for file in (ROOT / place).rglob("*.py"))
    every = [(file, number) for file in files for number, _ in enumerate(mutations(ast.parse(file.read_text())))]
    fates: dict[str, list[str]] = {"killed": [], "survived": [], "not executed": []}
    with TemporaryDirectory(prefix="feedmill-mutants-") as folder:
        data, copy = covering(given.tests, Path(folder)), Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(".venv", ".git", "build", "__pycache__")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
        began = time.monotonic()
        for file, number in Random(given.seed).sample(every, min(given.count, len(every))):
            if time.monotonic() - began > 60 * given.minutes:
                break
            line, what, source = mutant(file, number)
            name = f"{file.relative_to(ROOT)}:{line}: {what}"
            fate = "not executed"
            if tests := tests_of(data, file, line):
                (copy / file.relative_to(ROOT)).write_text(source)
                fate = "killed" if is_killed(copy, tests) else "survived"
                (copy / file.relative_to(ROOT)).write_text(file.read_text())
            fates[fate].append(name)
            sys.stderr.write(f"{fate}: {name}\n")
    sys.stdout.write(json.dumps({fate: len(names) for fate, names in fates.items()}) + "\n")


if __name__ == "__main__":
    main()
