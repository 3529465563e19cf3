"""The columns of charts over time."""

import pytest

from feedmill.timeline import DAY_S, HOUR_S, MAX_COLUMNS, axis_between

BEGIN = 1_672_531_200  # 1 January 2023
LAST_TIME = 253_402_300_799.0


@pytest.mark.parametrize(
    ("seconds", "unit"),
    [
        (0, "hour"),
        (71 * HOUR_S, "hour"),
        (72 * HOUR_S, "day"),
        (71 * DAY_S, "day"),
        (73 * DAY_S, "month"),
        (71 * 30 * DAY_S, "month"),
        (73 * 31 * DAY_S, "year"),
        (1000 * 366 * DAY_S, "14 years"),
    ],
)
def test_the_shortest_unit_that_fits(seconds: float, unit: str) -> None:
    axis = axis_between(BEGIN, BEGIN + seconds)
    assert axis.unit == unit
    assert 1 <= len(axis.columns) <= MAX_COLUMNS
    assert 1 <= len(axis.marks) <= 4


@pytest.mark.parametrize("last", [0.0, 1.5, BEGIN, LAST_TIME])
def test_every_time_has_a_column(last: float) -> None:
    axis = axis_between(0.0, last)
    for seconds in (0.0, last / 3, last):
        place = axis.place(seconds)
        assert axis.columns[place].start <= seconds
        if place + 1 < len(axis.columns):
            assert seconds < axis.columns[place + 1].start


def test_months_and_years_are_those_of_the_calendar() -> None:
    axis = axis_between(BEGIN + 40 * DAY_S, BEGIN + 400 * DAY_S)
    assert [column.name for column in axis.columns][:3] == [
        "Feb 2023",
        "Mar 2023",
        "Apr 2023",
    ]
    years = axis_between(BEGIN - 3000 * DAY_S, BEGIN)
    assert years.columns[0].name == "2014"
    assert years.columns[-1].name == "2023"
