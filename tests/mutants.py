"""Count changes of the code that no test notices: `make coverage`, then
`python -m tests.mutants [--count 300]`.

A mutant is one changed operator, condition, number or returned value in PLACES, drawn by the seed.
Each runs in a copy of the checkout, in a process forked from this one, which has imported the
libraries but nothing of Feedmill. At most TESTS tests run, those with the fewest lines first, of
those that executed the changed line in `make coverage`. Tests that fail without a change are left
out. The last line is JSON: the numbers killed, survived, and executed by no test.
"""

import argparse
import ast
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from coverage import CoverageData

PLACES = (
    "shared",
    "producers",
    "workers/transport",
    "workers/pipeline",
    "workers/runtime",
)
#: Tests that may run for a mutant, and seconds for all of them, and for the tests of all mutants
#: without a change.
TESTS, LIMIT_S, LIMIT_OF_ALL_S = 12, 240, 3600
LIBRARIES = (
    "celery.bin.worker",
    "fastapi",
    "pandas",
    "polars",
    "praw",
    "pyarrow",
    "transformers",
)
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add,
}  # fmt: skip


def mutations(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Change one place of the tree at a time; yield the line and the description, and change it
    back.
    """
    node: Any
    for node in ast.walk(tree):
        for name in node._fields:
            old = getattr(node, name)
            new, what = _changed(node, name, old)
            if what:
                setattr(node, name, new)
                yield getattr(node, "lineno", 0), what
                setattr(node, name, old)


def _changed(node: Any, name: str, old: Any) -> tuple[Any, str]:
    """Return another value of a node's field and a description, which is empty if the field stays
    as it is.
    """
    first = old[0] if name == "ops" else old
    if name in ("op", "ops") and (other := SWAPS.get(type(first))):
        return [other(), *old[1:]] if name == "ops" else other(), (
            f"{type(first).__name__} -> {other.__name__}"
        )
    if name == "test":
        return ast.UnaryOp(ast.Not(), old), "not"
    if isinstance(node, ast.Constant) and name == "value" and type(old) in (int, bool):
        return (not old if isinstance(old, bool) else old + 1), f"another {old}"
    if isinstance(node, ast.Return) and old and not isinstance(old, ast.Constant):
        return ast.Constant(None), "return None"
    return old, ""


def mutant(file: Path, number: int) -> tuple[int, str, str]:
    """Return the line, the description and the changed source of a file's mutation of this
    number.
    """
    tree = ast.parse(file.read_text())
    changes = mutations(tree)
    line, what = next(islice(changes, number, None))
    return line, what, ast.unparse(tree)


class Covered:
    """The tests that execute a line."""

    def __init__(self, file: str) -> None:
        data = CoverageData(file)
        data.read()
        #: Path of a file, relative to the checkout -> number of a line -> tests.
        self.lines = {
            os.path.relpath(os.path.realpath(each)): data.contexts_by_lineno(each)
            for each in data.measured_files()
        }
        self.sizes = Counter(
            test
            for lines in self.lines.values()
            for tests in lines.values()
            for test in tests
        )

    def tests(self, file: str, line: int) -> list[str]:
        """Return pytest's names of tests that execute the line, or the start of its statement."""
        lines = self.lines.get(file, {})
        for near in range(line, max(line - 6, 0), -1):
            if names := {
                name
                for name in lines.get(near, ())
                if name.startswith(("tests.unit", "tests.integration"))
            }:
                best = sorted(
                    names,
                    key=lambda name: ("integration" in name, self.sizes[name], name),
                )
                return [
                    f"{'/'.join(name.split('.')[:-1])}.py::{name.rpartition('.')[2]}"
                    for name in best[:TESTS]
                ]
        return []


def run(tests: Sequence[str], output: Path, limit_s: float, *options: str) -> bool:
    """Run tests in a forked process. Return whether all passed in time."""
    child = os.fork()
    if not child:
        os.setsid()
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        plugins = ["-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:xdist"]
        code = 1
        try:
            code = pytest.main(
                [
                    "-q",
                    "--timeout=60",
                    "--assert=plain",
                    "-rfE",
                    "--tb=line",
                    *plugins,
                    *options,
                    *tests,
                ]
            )
        finally:
            os._exit(code)
    ended, status, end = 0, 1, time.monotonic() + limit_s
    while not ended and time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    return bool(ended) and status == 0


def failing(tests: Sequence[str], output: Path) -> set[str]:
    """Return the tests that fail without a change."""
    run(tests, output, LIMIT_OF_ALL_S)
    lines = output.read_text(errors="replace").splitlines()
    assert " passed" in lines[-1], lines
    return {
        line.split()[1].partition("[")[0]
        for line in lines
        if line.startswith(("FAILED ", "ERROR "))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=41)
    parser.add_argument(
        "--coverage", default="build/coverage", help="data of `make coverage`"
    )
    given = parser.parse_args()
    covered = Covered(given.coverage)
    files = sorted(file for place in PLACES for file in Path(place).rglob("*.py"))
    every = [
        (file, number)
        for file in files
        for number, _ in enumerate(mutations(ast.parse(file.read_text())))
    ]
    drawn = [
        (file, *mutant(file, number))
        for file, number in Random(given.seed).sample(every, given.count)
    ]
    fates: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="feedmill-mutants-") as folder:
        copy, output = Path(folder) / "checkout", Path(folder) / "output"
        shutil.copytree(
            ".",
            copy,
            symlinks=True,
            ignore=shutil.ignore_patterns(".venv", ".git", "build", "__pycache__"),
        )
        os.chdir(copy)
        sys.path[0] = os.environ["PYTHONPATH"] = str(copy)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        for library in LIBRARIES:
            import_module(library)
        wrong = failing(
            sorted(
                {
                    test
                    for file, line, *_ in drawn
                    for test in covered.tests(str(file), line)
                }
            ),
            output,
        )
        sys.stderr.write(f"{len(every)} places; left out: {sorted(wrong)}\n")
        for file, line, what, source in drawn:
            tests = [
                test for test in covered.tests(str(file), line) if test not in wrong
            ]
            fate = "not executed"
            if tests:
                original = file.read_text()
                file.write_text(source)
                fate = "survived" if run(tests, output, LIMIT_S, "-x") else "killed"
                file.write_text(original)
            fates[fate] += 1
            sys.stderr.write(f"{fate}: {file}:{line}: {what}\n")
    sys.stdout.write(json.dumps(fates) + "\n")


if __name__ == "__main__":
    main()
