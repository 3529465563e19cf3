"""workers/pipeline/statistics.py: recent rates, and histograms."""

import math
from typing import NamedTuple

import pytest

from feedmill.workers.models.shapes import FEW
from feedmill.workers.pipeline.statistics import Speed, Statistics, Totals, rates


def test_rates_between_two_totals() -> None:
    earlier = Totals(
        posts=10, batches=1, rows=10, tokens=100, padded_tokens=200, device_seconds=1.0
    )
    later = Totals(
        posts=70,
        messages=4,
        queued_seconds=6.0,
        batches=3,
        rows=70,
        tokens=1000,
        padded_tokens=1200,
        device_seconds=10.0,
    )
    found = rates(earlier, later, seconds=10.0)
    assert (found.posts_per_second, found.rows_per_batch, found.tokens_per_batch) == (
        6.0,
        30.0,
        450.0,
    )
    assert (found.padding_efficiency, found.device_busy, found.queue_wait) == (
        0.9,
        0.9,
        1.5,
    )
    assert all(
        figure in str(found)
        for figure in ("6.0 posts/s", "30.0 rows", "450 tokens", "0.900", "0.90")
    )


def test_recent_rates_are_of_the_last_ten_seconds() -> None:
    """They agree with the progress of a run: not those of an interval before it began."""
    statistics = Statistics(now=0.0)
    assert statistics.recent(now=0.0).posts_per_second == 0.0
    statistics.totals.posts = 12
    assert statistics.recent(now=4.0).posts_per_second == 3.0
    for now in range(5, 125):
        statistics.totals.posts += 20 * (now > 62)
        statistics.mark(float(now))
        found = statistics.recent(now + 0.5)
        if now == 64:
            assert found.posts == 40
        if now > 72:
            assert (found.posts, found.seconds) == (200, 10.5)
    for now in range(125, 136):
        statistics.mark(float(now))
    assert statistics.recent(136.0).posts == 0


def test_counts_all_padding_of_the_device() -> None:
    statistics = Statistics(0.0, FEW)
    statistics.count([Row(9)] * 5, seconds=1.0, share=1.0)
    assert (statistics.totals.tokens, statistics.totals.padded_tokens) == (45, 6 * 16)


class Row(NamedTuple):
    length: int


def test_speed_weighs_recent_passes_most() -> None:
    speed = Speed()
    assert speed.rows_per_second is None
    speed.add(5, 0.0)  # as measured by a coarse clock
    assert speed.rows_per_second == math.inf
    for _ in range(50):
        speed.add(100, 1.0)
    assert speed.rows_per_second == pytest.approx(100, rel=0.01)
    for _ in range(50):
        speed.add(10, 1.0)
    assert speed.rows_per_second == pytest.approx(10, rel=0.1)
