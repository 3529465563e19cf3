"""feedmill/cli/status.py and monitoring/watch.py: lines about memory and runs, and answers of
workers.
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from feedmill.cli import status
from feedmill.cli.status import progress_line as line
from feedmill.monitoring.watch import worker_statistics
from feedmill.shared.broker import DEVICE_POOL
from feedmill.shared.metrics import RedisMemory
from feedmill.shared.results import Counters
from feedmill.shared.runs import Progress
from feedmill.shared.settings import Settings

MEMORY = RedisMemory(
    412_000_000, 10**9, False, 33_000_000, 1300, 1_300_000, 26_000, 1306
)


def test_memory_shows_numbers_of_results_and_sent_records_and_those_dropped() -> None:
    results = Counters(stored=1300, sent_dropped=1_204_331)
    seen: Any = SimpleNamespace(
        memory=MEMORY, results=results, memory_use="412 MB of 1.0 GB"
    )
    assert status._memory(seen, Settings()) == [
        "412 MB of 1.0 GB",
        "results: about 33.0 MB of 1.0 GB · 1,300 stored",
        "sent records: about 26.0 kB of 500.0 MB · about 1,306 stored · 1,204,331 dropped",
    ]


def test_a_run_whose_last_posts_were_purged_has_ended() -> None:
    """Without messages, they never get a result."""
    found = Progress("monday", 600, 599, latest=1000.0)
    assert "599 of 600 done · waiting for 2 min" in line(found, 1120.0)
    for has_worker in (True, False):
        said = line(found, 1120.0, has_worker, has_messages=False)
        assert "599 of 600 done · 1 purged or cleared · ended 2 min ago" in said
    assert "ended" not in line(found, 1001.0, has_messages=False), (
        "a sender marks posts before it sends them"
    )


@pytest.mark.parametrize(
    "answer",
    [
        {"error": "no statistics"},
        "none",
        None,
        {"pool": "solo"},
        {"pool": {}},
        {"pool": None},
    ],
    ids=range(6),
)
def test_ignores_answers_of_other_applications(answer: object) -> None:
    pool = {"implementation": DEVICE_POOL}
    answers = [{"theirs@here": answer}, {"ours@here": {"pool": pool}}]
    app = MagicMock()
    app.control.mailbox.return_value.call.return_value = answers
    assert worker_statistics(app) == {"ours@here": pool | {"rate_limits": {}}}
