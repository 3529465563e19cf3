"""Which queue is served with which model, and which one it is to be served with.

Three hashes. feedmill:models is what workers say of themselves, and whoever sends chooses by it. It outlives the
workers: a model of which none runs just now is known all the same, and what waits for it is seen. feedmill:wanted is
what `feedmill deploy` asks of the workers of a queue. Neither knows whether a worker runs, nor what one would make of a
message. feedmill:workers holds the workers that should answer, until they deregister.
"""

import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from redis import Redis
from redis.client import NEVER_DECODE

from shared.broker import queue_depth
from shared.errors import UserError, printable
from shared.keys import MODELS, WANTED, WORKERS
from shared.settings import DAY, DEFAULT_QUEUE, PREFIX, Settings

T = TypeVar("T")
#: Seconds between two words of a worker.
PERIOD = 60.0
#: Seconds for which a queue is known that nobody serves, and in which nothing waits.
KEPT = 30 * DAY
#: Queues that are known, at most: those that were heard of last.
MOST = 100
#: Seconds for which a worker that fell silent without deregistering is expected to answer.
EXPECTED_S = 3600


class Served(NamedTuple):
    """What serves a queue, or did."""

    model: str
    #: When a worker said so last, in seconds since 1970.
    seen: float


class Registration(NamedTuple):
    """A worker's latest registration."""

    #: In seconds since 1970, by Redis' clock.
    seen: float
    #: Where its PID is valid; empty where that is unknown.
    place: str = ""
    pid: int = 0


class Wanted(NamedTuple):
    """What the workers of a queue are asked to serve it with."""

    #: A folder of the workers' machines; None: what each worker's own settings name.
    model: str | None
    #: SHA-256 of the weights in it, in hex, as results bear it.
    weights: str | None
    #: When it was asked for, in seconds since 1970: tells one asking from another.
    at: float


class Stage(StrEnum):
    """How far a worker has come with what it was asked for."""

    LOADING = "loads"
    TRYING = "tries"
    SWITCHING = "switches"
    DONE = "done"
    FAILED = "failed"


class Report(NamedTuple):
    """What a worker says of the latest asking."""

    #: Of which: the `at` of Wanted.
    at: float
    stage: Stage
    said: str


def announce(redis: Redis, queue: str, model: str) -> str | None:
    """Say that a worker serves `queue` with `model`; forget queues that are stale.

    Returns the other model that a worker served it with in the last two periods; None where there was none. Raises
    redis.exceptions.RedisError.
    """
    now = time.time()
    found = known(redis)
    before = found.pop(queue, None)
    pipe: Any = redis.pipeline(transaction=False)
    pipe.hset(MODELS, queue, json.dumps({"model": model, "seen": round(now)}))
    for place, other in enumerate(sorted(found, key=lambda name: -found[name].seen), 2):
        if place > MOST or (now - found[other].seen > KEPT and not queue_depth(redis, other).waiting):
            pipe.hdel(MODELS, other)
    pipe.execute()
    return before.model if before and before.model != model and now - before.seen < 2 * PERIOD else None


def register(redis: Redis, node: str) -> None:
    """Note that this process, a worker, is alive; forget those that are expected no more.

    Those are: silent for EXPECTED_S, or ended without deregistering on this machine, as a killed process does. Times
    are Redis' own: hosts' clocks may differ. Raises redis.exceptions.RedisError.
    """
    now, found = _registered(redis)
    stale = [
        other for other, each in found.items() if other != node and (now - each.seen > EXPECTED_S or _is_gone(each))
    ]
    pipe: Any = redis.pipeline(transaction=False)
    pipe.hset(WORKERS, node, json.dumps({"seen": round(now), "place": _place(), "pid": os.getpid()}))
    pipe.expire(WORKERS, EXPECTED_S)
    if stale:
        pipe.hdel(WORKERS, *stale)
    pipe.execute()


def deregister(redis: Redis, node: str) -> None:
    """Note that a worker has ended in good order. Raises redis.exceptions.RedisError."""
    redis.hdel(WORKERS, node)


def expected(redis: Redis) -> dict[str, float]:
    """Return the workers that should answer, each with the seconds since it registered last.

    Those that registered within EXPECTED_S and have not deregistered. Raises redis.exceptions.RedisError.
    """
    now, found = _registered(redis)
    ages = {node: max(0.0, now - each.seen) for node, each in found.items()}
    return {node: age for node, age in ages.items() if age <= EXPECTED_S}


def _registered(redis: Redis) -> tuple[float, dict[str, Registration]]:
    """Return Redis' time, and what each worker registered last."""
    found = _fields(redis, WORKERS, _registration)
    seconds, microseconds = redis.time()
    return seconds + microseconds / 1e6, found


def _fields(redis: Redis, key: str, of: Callable[[Any], T]) -> dict[str, T]:
    """Return the fields of a hash, sorted; skip those that another application wrote, so that they stop no worker."""
    client: Any = redis
    found: dict[bytes, bytes] = client.execute_command("HGETALL", key, **{NEVER_DECODE: True})
    readable = {}
    for name, text in sorted(found.items()):
        with suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
            readable[name.decode()] = of(json.loads(text))
    return readable


def _time(value: Any) -> float:
    """Return seconds since 1970. Raises ValueError, TypeError, OverflowError."""
    if not isfinite(seconds := float(value)):
        raise ValueError
    return seconds


def _registration(value: Any) -> Registration:
    """Raises ValueError, KeyError, TypeError, OverflowError."""
    if isinstance(value, dict):
        return Registration(_time(value["seen"]), str(value["place"]), int(value["pid"]))
    return Registration(_time(value))  # an earlier version's


def _place() -> str:
    """Return what names this machine's processes: PIDs of one boot and one PID namespace mean the same processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _is_gone(registration: Registration) -> bool:
    """Return whether the process is known to have ended: it ran where this one does, and has no entry there now."""
    if not registration.place or registration.place != _place() or registration.pid <= 0:
        return False
    try:
        os.kill(registration.pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    return False


def _served(value: Any) -> Served:
    """Raises ValueError, KeyError, TypeError, OverflowError."""
    if not isinstance(value["model"], str):
        raise TypeError
    return Served(value["model"], _time(value["seen"]))


def known(redis: Redis) -> dict[str, Served]:
    """Return every queue that workers serve, or served, by name; skip unreadable fields.

    Raises redis.exceptions.RedisError.
    """
    return _fields(redis, MODELS, _served)


def queues(redis: Redis, settings: Settings) -> list[str]:
    """The names of all queues there are: the known ones, and this process's own. Raises as `known` does."""
    return sorted({settings.queue, *known(redis)})


def wanted(redis: Redis, queue: str) -> Wanted | None:
    """What a queue is to be served with; None where nobody asked. Raises UserError, redis.exceptions.RedisError."""
    text: Any = redis.hget(WANTED, queue)
    if text is None:
        return None
    try:
        found = json.loads(text)
        return Wanted(_text(found["model"]), _text(found["weights"]), float(found["at"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(
            f"What {WANTED} holds for queue {queue} names no model. Deploy one anew, or `feedmill deploy --own --queue "
            f"{queue}`."
        ) from None


def _text(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError
    return value


def want(redis: Redis, queue: str, asked: Wanted | None) -> None:
    """Ask this of the workers of a queue; None: nothing more. Raises UserError, and redis.exceptions.RedisError."""
    if asked is None:
        redis.hdel(WANTED, queue)
        return
    if not redis.hexists(WANTED, queue) and redis.hlen(WANTED) >= MOST:
        raise UserError(
            f"Models were deployed to {MOST} queues already, and no more are kept: `feedmill deploy --show`."
        )
    redis.hset(WANTED, queue, json.dumps(asked._asdict()))


def queue_of(redis: Redis, model: str) -> str:
    """The queue that is served with this model: its name as results bear it, or the name's last part.

    Raises UserError where there is none, or several, and redis.exceptions.RedisError.
    """
    served = known(redis)
    exact = [queue for queue, each in served.items() if each.model == model]
    found = exact or [queue for queue, each in served.items() if each.model.rstrip("/").rpartition("/")[2] == model]
    if not found:
        raise UserError(f"--model: no worker serves {model!r:.200}. {_those(served)}")
    if len(found) > 1:
        raise UserError(
            f"--model: {model!r:.200} may mean more than one queue; name it by --queue: {_listed(served, found)}."
        )
    return found[0]


def check_queue(redis: Redis, queue: str) -> None:
    """Raises UserError for a queue that no worker ever served, but the default one; else as `known` does."""
    served = known(redis)
    if queue != DEFAULT_QUEUE and queue not in served:
        raise UserError(
            f"--queue: no worker has served {queue!r} yet, so it may be misspelt; {PREFIX}QUEUE names one all the "
            f"same. {_those(served)}"
        )


def _those(served: dict[str, Served]) -> str:
    """What is known, for people."""
    if not served:
        return "None is known yet: a worker makes itself known once it has loaded its model."
    return f"There are: {_listed(served, served)}."


def _listed(served: dict[str, Served], queues: Iterable[str]) -> str:
    return ", ".join(f"{printable(served[queue].model)} (queue {printable(queue)})" for queue in queues)
