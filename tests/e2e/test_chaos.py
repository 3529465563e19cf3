"""A short run of tests/chaos.py: under faults, every post ends exactly once, and only poison
becomes dead letters.
"""

from pathlib import Path
from typing import Any

from tests import chaos
from tests.fakes.standin_worker import KILLS

FAULTS = (
    "--kill-every 3 --redis-restarts 1 --cuts 2 --oom 2 --clock-jumps 1 --rolling 1 --poison "
    "1% --killing 5%"
)


def test_every_post_ends_once_under_faults(tmp_path: Path) -> None:
    run = chaos.Chaos(
        chaos.parse(
            f"--posts 2000 --workers 2 --row-ms 2 --limit 120 {FAULTS}".split()
        ),
        tmp_path,
    )
    found: dict[str, Any] = run.run()
    assert found["finished"]
    ended = {name: found[name] for name in ("sent", "stored", "dead_lettered")}
    assert ended == {"sent": 2000, "stored": 1980, "dead_lettered": 20}
    wrong = {
        name: found[name]
        for name in ("lost", "duplicated", "innocent_dead_letters", "poison_stored")
    }
    assert not any(wrong.values()), wrong
    assert found["faults"].keys() >= {
        "kill",
        "redis_restart",
        "cut",
        "oom",
        "clock_jump",
        "rolling_restart",
    }
    for number, how in run.poison.items():
        assert ("3 " if how == KILLS else "simulated failure") in run.ledger.reasons[
            number
        ]


def test_power_cuts_lose_only_waiting_posts(tmp_path: Path) -> None:
    cuts = "--power-cuts 3 --appendfsync everysec --row-ms 5 --batch-rows 8"
    found = chaos.Chaos(
        chaos.parse(f"--posts 1500 --workers 2 --limit 120 --seed 3 {cuts}".split()),
        tmp_path,
    ).run()
    assert found["finished"]
    assert found["faults"] == {"power_cut": 3}
    assert found["lost"] == found["duplicated"] == found["innocent_dead_letters"] == 0
    assert found["stored"] + found["lost_waiting"] == found["sent"]
