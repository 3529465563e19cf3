"""Count what the product asks of its readers: syntax nodes by room, and how dense the lines are.

    python -m tests.size [--write] [--worst 20]

The numbers stand in `.ci/size`; `tests/unit/test_size.py` compares. A syntax node is a node of
Python's `ast`, without load and store contexts: blank lines, comments, docstrings' length and
line breaks are free. `--write` records today's numbers. It refuses to record a higher density.
"""

import argparse
import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeGuard

ROOT = Path(__file__).parents[1]
SIZE_FILE = ROOT / ".ci" / "size"
PACKAGES = ("feedmill", "producers", "shared", "workers")
#: Share by which a room may grow before its number is raised.
SLACK = 0.05
#: A function of at least MIN_LINES lines is dense above this number of nodes a line.
DENSE_NODES = 12
MIN_LINES = 4
#: A line of this many columns is long.
LONG_COLUMNS = 100

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
CONTEXTS = (ast.Load, ast.Store, ast.Del)
#: Names that say what happened to a thing, not what it is.
PARTICIPLES = frozenset(
    [
        "asked", "found", "given", "held", "kept", "known", "left", "looked",
        "made", "refused", "said", "seen", "shown", "taken", "told", "wanted",
    ]
)  # fmt: skip
HEADER = """\
# What the product asks of its readers, counted by `python -m tests.size`.
# Rooms: syntax nodes, with five percent of slack; raise a number when a capability comes.
# Densities never rise.
"""
GOALS = {
    "nodes per line": 4.8,
    "dense functions": 0.0,
    "pairs": 1.0,
    "comprehensions": 20.0,
    "conditional expressions": 12.0,
    "walruses": 1.5,
    "long lines": 0.0,
    "participles": 1.0,
}


class Function(NamedTuple):
    """A function's size. nodes: in its body, without constants. lines: lines of code in it."""

    place: str
    nodes: int
    lines: int

    @property
    def density(self) -> float:
        """Syntax nodes per line of code."""
        return self.nodes / self.lines


def product_files() -> list[Path]:
    """Return the Python files of the product, each once: `feedmill/` links the other folders."""
    paths = [
        path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))
    ]
    return [path for path in paths if not is_linked(path)]


def is_linked(path: Path) -> bool:
    """Return whether a path leads through a symbolic link."""
    return any(part.is_symlink() for part in (path, *path.parents))


def count_nodes(tree: ast.AST) -> int:
    """Count the syntax nodes of a tree."""
    return sum(not isinstance(node, CONTEXTS) for node in ast.walk(tree))


def code_lines(lines: list[str]) -> int:
    """Count the lines that are neither blank nor comments."""
    stripped = [line.strip() for line in lines]
    return sum(bool(line) and not line.startswith("#") for line in stripped)


def functions_of(path: Path, tree: ast.AST, lines: list[str]) -> Iterator[Function]:
    """Yield the functions of a file that have a body besides their docstring."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = node.body
        if ast.get_docstring(node) is not None:
            body = body[1:]
        if not body:
            continue
        end = body[-1].end_lineno
        assert end is not None
        free = (*CONTEXTS, ast.Constant)
        nodes = 0
        for statement in body:
            nodes += sum(not isinstance(part, free) for part in ast.walk(statement))
        yield Function(
            place=f"{path.relative_to(ROOT)}:{node.lineno} {node.name}",
            nodes=nodes,
            lines=code_lines(lines[body[0].lineno - 1 : end]),
        )


def habits_of(tree: ast.AST) -> Iterator[str]:
    """Yield the name of each construct that makes a line hard to read."""
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            yield "comprehensions"
        elif isinstance(node, ast.IfExp):
            yield "conditional expressions"
        elif isinstance(node, ast.NamedExpr):
            yield "walruses"
        elif isinstance(node, ast.Assign):
            if isinstance(node.value, ast.Tuple) and isinstance(
                node.targets[0], ast.Tuple
            ):
                yield "pairs"
        elif is_stored_name(node) and node.id in PARTICIPLES:
            yield "participles"


def is_stored_name(node: ast.AST) -> TypeGuard[ast.Name]:
    """Return whether a node is a name to which a value is assigned."""
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


class Size(NamedTuple):
    """The product's size. rooms: room -> syntax nodes. densities: as in `.ci/size`."""

    nodes: int
    rooms: dict[str, int]
    densities: dict[str, float]
    functions: list[Function]


def measure(rooms: list[str]) -> Size:
    """Count the product. Raises ValueError if a file belongs to no room."""
    nodes_of: Counter[str] = Counter(dict.fromkeys(rooms, 0))
    habits: Counter[str] = Counter()
    functions: list[Function] = []
    all_lines = 0
    all_code_lines = 0
    long_lines = 0
    for path in product_files():
        text = path.read_text()
        lines = text.splitlines()
        tree = ast.parse(text)
        nodes_of[room_of(path, rooms)] += count_nodes(tree)
        habits.update(habits_of(tree))
        functions.extend(functions_of(path, tree, lines))
        all_lines += len(lines)
        all_code_lines += code_lines(lines)
        long_lines += sum(len(line) >= LONG_COLUMNS for line in lines)

    thousands = all_code_lines / 1000
    lines_in_functions = sum(function.lines for function in functions)
    nodes_in_functions = sum(function.nodes for function in functions)
    sizeable = [function for function in functions if function.lines >= MIN_LINES]
    dense = [function for function in sizeable if function.density > DENSE_NODES]
    densities = {
        "nodes per line": round(nodes_in_functions / lines_in_functions, 2),
        "dense functions": round(100 * len(dense) / len(sizeable), 1),
        "pairs": round(habits["pairs"] / thousands, 1),
        "comprehensions": round(habits["comprehensions"] / thousands, 1),
        "conditional expressions": round(
            habits["conditional expressions"] / thousands, 1
        ),
        "walruses": round(habits["walruses"] / thousands, 1),
        "long lines": round(100 * long_lines / all_lines, 1),
        "participles": round(habits["participles"] / thousands, 1),
    }
    sizeable.sort(key=lambda function: function.density, reverse=True)
    return Size(nodes_of.total(), dict(nodes_of), densities, sizeable)


def room_of(path: Path, rooms: list[str]) -> str:
    """Return the innermost room of a file. Raises ValueError if there is none."""
    name = str(path.relative_to(ROOT))
    holding = [room for room in rooms if name == room or name.startswith(f"{room}/")]
    if not holding:
        raise ValueError(
            f"{name} is in no room of {SIZE_FILE.relative_to(ROOT)}: add its folder"
        )
    return max(holding, key=len)


def recorded() -> tuple[dict[str, int], dict[str, float]]:
    """Return the recorded nodes of each room, and the densities."""
    numbers = tomllib.loads(SIZE_FILE.read_text())
    return numbers["rooms"], numbers["densities"]


def write(size: Size) -> None:
    """Record a size."""
    lines = [HEADER, "[rooms]"]
    lines += [f'"{room}" = {nodes}' for room, nodes in size.rooms.items()]
    lines += ["", "[densities]"]
    lines += [f'"{name}" = {value}' for name, value in size.densities.items()]
    SIZE_FILE.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Print the sizes; record them with --write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="record today's numbers")
    parser.add_argument(
        "--worst", type=int, default=0, help="list this many dense functions"
    )
    options = parser.parse_args()
    rooms, densities = recorded()
    size = measure(list(rooms))
    for room, nodes in size.rooms.items():
        print(f"{room:32}{nodes:>10,}{rooms[room]:>10,}")
    print(f"{'all':32}{size.nodes:>10,}{sum(rooms.values()):>10,}")
    for name, value in size.densities.items():
        print(f"{name:32}{value:>10}{densities[name]:>10}   goal {GOALS[name]:g}")
    for function in size.functions[: options.worst]:
        print(f"{function.density:6.1f}  {function.place}")
    if options.write:
        rising = [
            name for name, value in size.densities.items() if value > densities[name]
        ]
        if rising:
            raise SystemExit(
                f"These densities rose: {', '.join(rising)}. Unfold the new code."
            )
        write(size)


if __name__ == "__main__":
    main()
