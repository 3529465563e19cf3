"""No room outgrows its budget of lines."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUDGETS = dict(line.split() for line in (ROOT / ".ci/lines").read_text().splitlines() if not line.startswith("#"))


def lines_of(room: str) -> int:
    """Count the lines of a room's Python and Lua files: a folder, or a file."""
    place = ROOT / room
    files = [path for path in place.rglob("*") if path.suffix in (".py", ".lua")] if place.is_dir() else [place]
    return sum(path.read_bytes().count(b"\n") for path in files)


@pytest.mark.parametrize("room", BUDGETS)
def test_rooms_stay_within_their_lines(room: str) -> None:
    assert lines_of(room) <= int(BUDGETS[room]), "remove lines, or raise the budget in a commit of its own"


def test_every_product_file_has_a_budget() -> None:
    packages = {path for name in ("feedmill", "producers", "shared", "workers") for path in (ROOT / name).rglob("*.py")}
    rooms = [ROOT / room for room in BUDGETS]
    assert {path for path in packages if not any(path == room or room in path.parents for room in rooms)} == set()
