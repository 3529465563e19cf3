"""Rooms stay within their syntax nodes, and lines do not become denser."""

import ast
from pathlib import Path

import pytest

from tests.size import (
    ROOT,
    SLACK,
    Size,
    functions_of,
    habits_of,
    measure,
    recorded,
    room_of,
)

ROOMS, DENSITIES = recorded()


@pytest.fixture(scope="module")
def size() -> Size:
    return measure(list(ROOMS))


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_stay_within_their_nodes(room: str, size: Size) -> None:
    assert size.rooms[room] <= ROOMS[room] * (1 + SLACK), (
        f"{room} has {size.rooms[room]:,} syntax nodes; raise its number in .ci/size"
    )


@pytest.mark.parametrize("name", DENSITIES)
def test_densities_never_rise(name: str, size: Size) -> None:
    assert size.densities[name] <= DENSITIES[name], "unfold the new code"


def test_a_file_without_a_room_is_named() -> None:
    with pytest.raises(ValueError, match=r"elsewhere/a\.py"):
        room_of(ROOT / "elsewhere" / "a.py", list(ROOMS))


def test_counts_what_makes_lines_hard_to_read() -> None:
    text = """
def dense(values):
    '''A docstring is free.'''
    found, kept = 1, 2

    # Comments and blank lines are free.
    return [value for value in values if (n := found)] if values else n
"""
    tree = ast.parse(text)
    assert sorted(habits_of(tree)) == [
        "comprehensions",
        "conditional expressions",
        "pairs",
        "participles",
        "participles",
        "walruses",
    ]
    (function,) = functions_of(ROOT / "dense.py", tree, text.splitlines())
    assert function.lines == 2
    assert function.place.endswith("dense.py:2 dense")
    assert Path(function.place.split(":")[0]) == Path("dense.py")
