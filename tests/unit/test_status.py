"""feedmill/cli/status.py: lines about memory."""

from types import SimpleNamespace
from typing import Any

from feedmill.cli import status
from feedmill.cli.run_progress import line
from feedmill.monitoring.capacity import Memory, size
from feedmill.shared.results import Counters
from feedmill.shared.retention import Kept
from feedmill.shared.runs import Progress

MEMORY = Memory(412_000_000, 10**9, False, 198.0)
#: An estimate of 1,340 where 1,300 results were stored.
KEPT = Kept(33e6, 512_000_000, 1340, 127.4, 1.3e6, 900, 1439.2, 26_000.0, 500_000_000, 1306, 20.1)
NOTHING = Kept(0.0, 10**9, 0, 0.0, 0.0, 0, 0.0, 0.0, 500_000_000, 0, 0.0)


def lines(memory: Memory, kept: Kept, results: Counters) -> list[str]:
    seen: Any = SimpleNamespace(memory=memory, kept=kept, results=results)
    return status._memory(seen)


def test_memory_marks_estimates_and_shows_no_more_results_than_were_stored() -> None:
    assert lines(MEMORY, KEPT, Counters(stored=1300)) == [
        "412 MB of 1.0 GB",
        "results: about 33 MB of 512 MB · about 1,300 of 127 bytes",
        "their stream: 900 of 1,439 bytes",
        "sent records: about 26 KB of 500 MB · about 1,310 of 20 bytes",
    ]


def test_memory_of_an_empty_redis_has_no_zeros() -> None:
    assert lines(MEMORY._replace(posts_per_second=0.0), NOTHING, Counters()) == [
        "412 MB of 1.0 GB",
        "results: nothing stored, limit 1.0 GB",
        "sent records: nothing stored, limit 500 MB",
    ]


def test_warns_of_dropped_records() -> None:
    crowded = MEMORY._replace(needed=3e9, results_needed=15.7e9, results_kept_seconds=9 * 3600.0)
    said = " ".join(lines(crowded, KEPT, Counters(stored=1300, dropped=1_204_331)))
    assert "198.0 posts/s need 3.0 GB" in said
    assert "1,204,331 results dropped · results kept for about 9 h at this rate; about 15.7 GB would keep all" in said


def test_a_run_whose_last_posts_were_purged_has_ended() -> None:
    """Without messages, they never get a result."""
    found = Progress("monday", 600, 599, latest=1000.0)
    assert "599 of 600 done · waiting for 2 min" in line(found, 1120.0)
    for has_worker in (True, False):
        said = line(found, 1120.0, has_worker, has_messages=False)
        assert "599 of 600 done · 1 purged or cleared · ended 2 min ago" in said
    assert "ended" not in line(found, 1001.0, has_messages=False), "a sender marks posts before it sends them"


def test_sizes_have_a_unit_that_shows_them() -> None:
    assert [size(count) for count in (0, 999, 1000, 127_000, 33_000_000, 1.4e9)] == [
        "0 bytes", "999 bytes", "1 KB", "127 KB", "33 MB", "1.4 GB",
    ]  # fmt: skip
