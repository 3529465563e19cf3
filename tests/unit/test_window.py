"""workers/pipeline/window.py: each row is taken once, no row starves, the token budget holds, and
padding is low.
"""

import random
from dataclasses import dataclass
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feedmill.workers.models.shapes import EXACT, FEW, Shapes
from feedmill.workers.pipeline.window import Window
from tests.fakes.clock import SimulatedClock


@dataclass(eq=False)
class Row:
    length: int


lengths = st.lists(st.integers(1, 300), max_size=80)
budgets = st.integers(1, 2000)
limits = st.integers(1, 40)


def filled(lengths: list[int]) -> tuple[Window[Row], list[Row]]:
    window: Window[Row] = Window(SimulatedClock().monotonic)
    rows = [Row(length) for length in lengths]
    for row in rows:
        window.add(row)
    return window, rows


@given(lengths, budgets, limits)
def test_takes_every_row_once(lengths: list[int], budget: int, limit: int) -> None:
    window, rows = filled(lengths)
    taken: list[Row] = []
    while batch := window.take(budget, limit):
        taken += batch
    assert sorted(map(id, taken)) == sorted(map(id, rows))
    assert len(window) == 0


@pytest.mark.parametrize("shapes", [EXACT, FEW])
@given(lengths, budgets, limits)
def test_keeps_the_budget_with_all_padding(
    shapes: Shapes, lengths: list[int], budget: int, limit: int
) -> None:
    window: Window[Row] = Window(SimulatedClock().monotonic, shapes)
    for length in lengths:
        window.add(Row(length))
    while batch := window.take(budget, limit):
        tokens, longest = shapes.tokens(len(batch), batch[-1].length), batch[-1].length
        assert len(batch) <= limit
        assert len(batch) == 1 or tokens <= max(budget, shapes.length(longest))


@given(lengths, budgets, limits)
def test_batch_has_neighbouring_lengths(
    lengths: list[int], budget: int, limit: int
) -> None:
    window, rows = filled(lengths)
    batch = window.take(budget, limit)
    if batch:
        low, high = batch[0].length, batch[-1].length
        between = [row for row in rows if low < row.length < high]
        assert all(row in batch for row in between)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32), bodies=st.floats(0.0, 0.5), spread=st.floats(0.3, 0.6)
)
def test_full_window_of_typical_lengths_pads_little(
    seed: int, bodies: float, spread: float
) -> None:
    """Titles are log-normal with a median of 16 tokens.

    A share `bodies` of the posts has a body, median 98 tokens.
    """
    source = random.Random(seed)
    window: Window[Row] = Window(SimulatedClock().monotonic)

    def length() -> int:
        title = min(64, max(4, round(source.lognormvariate(2.77, spread))))
        body = round(source.lognormvariate(4.6, 1.0)) if source.random() < bodies else 0
        return min(256, title + body)

    tokens = padded = 0
    # With half as many rows, efficiency drops below the limit if long posts are rare (0.924 if one
    # post in 200 has a body).
    for _ in range(1024):
        window.add(Row(length()))
    for _ in range(200):
        batch = window.take(1024, 256)
        tokens += sum(row.length for row in batch)
        padded += len(batch) * batch[-1].length
        for _ in batch:
            window.add(Row(length()))
    assert tokens / padded >= 0.94


@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.sampled_from([0, 3, 6, 9])),
        min_size=1,
        max_size=60,
    ),
    budgets,
    limits,
)
def test_next_batch_has_the_oldest_most_urgent_row(
    arriving: list[tuple[int, int]], budget: int, limit: int
) -> None:
    clock = SimulatedClock()
    window: Window[Row] = Window(clock.monotonic)
    waiting = []
    coming = iter(arriving)

    def arrive(rows: int) -> None:
        for length, priority in islice(coming, rows):
            clock.wait(1)
            waiting.append((priority, clock.monotonic(), Row(length)))
            window.add(waiting[-1][2], priority)

    arrive(len(arriving) // 2 + 1)
    while waiting:
        assert window.oldest_age() == clock.monotonic() - min(
            arrived for _, arrived, _ in waiting
        )
        batch = window.take(budget, limit)
        assert min(waiting, key=lambda each: each[:2])[2] in batch
        waiting[:] = [each for each in waiting if each[2] not in batch]
        arrive(2)
    assert len(window) == 0


def test_other_rows_fill_batches_of_urgent_ones() -> None:
    window: Window[Row] = Window(SimulatedClock().monotonic)
    for _ in range(10):
        window.add(Row(10), priority=9)
        window.add(Row(12), priority=9)
    urgent = [Row(11) for _ in range(6)]
    for row in urgent:
        window.add(row)
    assert [row in urgent for row in window.take(44, 100)] == [True] * 4
    second = window.take(44, 100)
    assert [row.length for row in second] == [
        10,
        10,
        11,
        11,
    ]  # no row longer than the urgent ones
    assert [row.length for row in window.take(44, 100)] == [10] * 4
    assert len(window) == 14
