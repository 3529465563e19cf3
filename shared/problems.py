"""Problems that grow in silence: Redis' settings, messages that nothing bounds, and a Flower that
hears no events. Each is one line with what to do, for `feedmill status`, `health` and metrics.
"""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from redis import Redis
from rich.filesize import decimal

from feedmill.shared.keys import FLOWERS
from feedmill.shared.settings import PREFIX, Settings

if TYPE_CHECKING:
    from feedmill.shared.metrics import RedisMemory

#: The `maxmemory-policy` that a queue needs.
NO_EVICTION = "noeviction"
#: Names of problems, as in the metric feedmill_problem.
EVICTION = "eviction"
BOUNDS = "bounds"
DELAYED = "delayed"
FLOWER = "flower"
BUSY = "busy"
NAMES = (EVICTION, BOUNDS, DELAYED, FLOWER, BUSY)
#: Seconds between two reports of a Flower; without a report, after which it is missed, and after
#: which it is forgotten.
REPORT_INTERVAL_S = 10.0
MISSED_S = 60.0
REPORT_TTL_S = 600
#: Seconds of silence after which a Flower is deaf, longer than a reconnect takes.
SILENCE_LIMIT_S = 15.0
#: Longest silence that is reported.
MAX_SILENCE_S = 1e9
#: Flowers that are read at most.
MAX_FLOWERS = 100


class Problem(NamedTuple):
    """A problem. name: one of NAMES. text: what it means, and what to do."""

    name: str
    text: str


class FlowerReport(NamedTuple):
    """The report of a Flower. age_s: seconds since then, by Redis' clock. silence_s: seconds for
    which Redis had not answered the connection that receives events.
    """

    age_s: float
    silence_s: float


def report_flower(redis: Redis, name: str, silence_s: float) -> None:
    """Record that a Flower runs, and remove reports that are too old.

    Raises redis.exceptions.RedisError.
    """
    now = _now(redis)
    stale = []
    max_age_s = REPORT_TTL_S * 10
    reports = flower_reports(redis, max_age_s)
    for other, report in reports.items():
        if report.age_s > REPORT_TTL_S:
            stale.append(other)
    silence_s = min(silence_s, MAX_SILENCE_S)
    pipe: Any = redis.pipeline(transaction=False)
    pipe.hset(FLOWERS, name, f"{now:.3f} {silence_s:.1f}")
    pipe.expire(FLOWERS, REPORT_TTL_S)
    if stale:
        pipe.hdel(FLOWERS, *stale)
    pipe.execute()


def remove_flower(redis: Redis, name: str) -> None:
    """Record that a Flower has ended. Raises redis.exceptions.RedisError."""
    redis.hdel(FLOWERS, name)


def flower_reports(
    redis: Redis, max_age_s: float = REPORT_TTL_S
) -> dict[str, FlowerReport]:
    """Return the latest report of each Flower, by its name. Others can write the key: what is not
    valid counts as absent.

    Raises redis.exceptions.RedisError.
    """
    untyped: Any = redis
    fields = untyped.hgetall(FLOWERS)
    if not fields:
        return {}
    now = _now(redis)
    reports = {}
    for name, text in list(fields.items())[:MAX_FLOWERS]:
        at_text, _, silence_text = text[:100].partition(" ")
        try:
            age_s = now - float(at_text)
            silence_s = float(silence_text)
        except ValueError:
            continue
        if math.isfinite(age_s) and math.isfinite(silence_s) and age_s <= max_age_s:
            reports[name] = FlowerReport(
                age_s=max(0.0, age_s),
                silence_s=max(0.0, silence_s),
            )
    return reports


def _now(redis: Redis) -> float:
    seconds, microseconds = redis.time()
    return float(seconds) + float(microseconds) / 1e6


def find_problems(
    redis: Redis, settings: Settings, memory: "RedisMemory", delayed: int
) -> list[Problem]:
    """Return the problems that Redis shows. delayed: number of messages that are due later.

    BUSY is never among them: a busy Redis answers nothing else. Raises
    redis.exceptions.RedisError.
    """
    problems = []
    if memory.policy != NO_EVICTION:
        policy = memory.policy
        text = (
            f"Redis may drop messages and leases without notice (maxmemory-policy {policy}): "
            f"set maxmemory-policy {NO_EVICTION}, also in its configuration file"
        )
        problem = Problem(
            name=EVICTION,
            text=text,
        )
        problems.append(problem)
    bound = settings.results_memory + settings.sent_memory
    if bound > memory.limit:
        problem = Problem(
            name=BOUNDS,
            text=_bounds_text(bound, memory),
        )
        problems.append(problem)
    if delayed >= settings.queue_limit:
        text = (
            f"{delayed:,} messages are due later, as many as may wait in a queue "
            f"({PREFIX}QUEUE_LIMIT): nothing but Redis' memory bounds them. Let their senders "
            "delay fewer, or raise the limit"
        )
        problem = Problem(
            name=DELAYED,
            text=text,
        )
        problems.append(problem)
    reports = flower_reports(redis)
    for text in _flower_problems(reports):
        problem = Problem(
            name=FLOWER,
            text=text,
        )
        problems.append(problem)
    return problems


def _bounds_text(bound: int, memory: "RedisMemory") -> str:
    may_take = f"results and sent records may take {decimal(bound)}"
    limit = decimal(memory.limit)
    if memory.is_machine:
        return (
            f"{may_take}, and Redis' machine has {limit}: Redis may be killed before the oldest "
            f"results are dropped. Lower {PREFIX}RESULTS_MEMORY (sent records take half of it), "
            "and set maxmemory, at which Redis refuses messages instead"
        )
    return (
        f"{may_take}, and Redis has {limit}: it refuses messages before the oldest results are "
        f"dropped. Raise maxmemory, or lower {PREFIX}RESULTS_MEMORY (sent records take half of "
        "it)"
    )


def _flower_problems(reports: Mapping[str, FlowerReport]) -> Iterator[str]:
    for name, report in sorted(reports.items()):
        if report.age_s > MISSED_S:
            yield (
                f"Flower at {name} last reported {report.age_s:.0f} s ago: it hangs, was killed "
                "or lost Redis. Restart it, or wait ten minutes if it ended"
            )
        elif report.silence_s > SILENCE_LIMIT_S:
            yield (
                f"Flower at {name} has heard nothing from Redis for {report.silence_s:.0f} s: its "
                "pages may be out of date. Check the network between them, or restart it"
            )
