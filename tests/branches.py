"""How many of the branches of `shared`, `producers` and `workers` a run of the tests took: `make coverage`.

What needs a GPU is left out, by the patterns in pyproject.toml. Ends with status 1 where a package has less than LEAST.
"""

import json
import sys
from collections import Counter
from pathlib import Path

from coverage import Coverage
from rich.console import Console
from rich.table import Table

#: Of a package's branches, the share that is taken.
LEAST = 0.95
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
    return int(any(taken[package] / there[package] < LEAST for package in there))


if __name__ == "__main__":
    sys.exit(main())
