"""workers/models/shapes.py: few shapes for a day's traffic, at a bounded cost in padding."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.traffic import day
from feedmill.workers.models.shapes import EXACT, FEW, Shapes

counts = st.integers(1, 20_000)


@given(counts)
def test_padding_is_bounded(count: int) -> None:
    assert FEW.length(count) - count < max(8, count / 8)
    assert FEW.rows(count) <= max(1, count * 3 / 2)
    assert FEW.length(count) % 8 == 0


def test_there_are_few_lengths_and_numbers_of_rows() -> None:
    assert [FEW.rows(count) for count in range(1, 13)] == [
        1,
        2,
        3,
        4,
        6,
        6,
        8,
        8,
        12,
        12,
        12,
        12,
    ]
    assert len({FEW.rows(count) for count in range(1, 257)}) == 16
    assert len({FEW.length(count) for count in range(1, 257)}) == 32
    assert len({FEW.length(count) for count in range(1, 1025)}) == 64
    assert {FEW.length(most) for most in (128, 256, 512, 1024)} == {
        128,
        256,
        512,
        1024,
    }, "no row exceeds its model"


@given(
    st.integers(1, 2000),
    st.integers(1, 100_000),
    st.integers(1, 1000),
    st.sampled_from([EXACT, FEW]),
)
def test_rows_that_fit_stay_within_both_limits(
    longest: int, budget: int, limit: int, shapes: Shapes
) -> None:
    rows = shapes.fit(longest, budget, limit)
    assert shapes.rows(rows) == rows
    assert 1 <= rows <= limit
    assert rows == 1 or shapes.tokens(rows, longest) <= budget
    more = next(
        count for count in range(rows + 1, 2 * rows + 2) if shapes.rows(count) == count
    )
    assert more > limit or shapes.tokens(more, longest) > budget


def test_a_day_has_few_shapes_and_little_padding_for_them() -> None:
    """Load from a trickle to more than the device computes."""
    exact, few = (
        day(shapes, 1500, token_budget=4096, rows_per_s=2000, window_rows=1024)
        for shapes in (EXACT, FEW)
    )
    assert len(few.shapes) <= 16 * 32
    assert len(few.shapes) < len(exact.shapes) / 2
    assert 1 - few.padded / few.computed <= 0.03, (
        "share of computed tokens that the buckets add"
    )
    assert few.tokens / few.computed >= 0.95 * exact.tokens / exact.computed
