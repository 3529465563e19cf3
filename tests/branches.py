"""Report branch coverage of `shared`, `producers` and `workers` (`make coverage`).

Patterns in pyproject.toml exclude code that needs a GPU. Exits 1 if a package is below MIN_COVERAGE.
"""

import json
import sys
from collections import Counter
from pathlib import Path

from coverage import Coverage
from rich.console import Console
from rich.table import Table

#: Minimum share of a package's branches that tests must take.
MIN_COVERAGE = 0.95
FIGURES = Path("build/branches.json")


def main() -> int:
    measured = Coverage()
    measured.combine()
    measured.json_report(outfile=str(FIGURES))
    taken: Counter[str] = Counter()
    there: Counter[str] = Counter()
    left = Table("file", "not taken", "from line → to line")
    for path, found in json.loads(FIGURES.read_text())["files"].items():
        package, figures = path.partition("/")[0], found["summary"]
        taken[package] += figures["covered_branches"]
        there[package] += figures["num_branches"]
        if figures["missing_branches"]:
            ways = (f"{start} → {end if end > 0 else 'its end'}" for start, end in found["missing_branches"])
            left.add_row(path, str(figures["missing_branches"]), ", ".join(ways))
    console = Console(width=160, highlight=False)
    console.print(left)
    for package in there:
        share = taken[package] / there[package]
        console.print(f"{package}: {taken[package]} of {there[package]} branches are taken, {share:.1%}")
    return int(any(taken[package] / there[package] < MIN_COVERAGE for package in there))


if __name__ == "__main__":
    sys.exit(main())
