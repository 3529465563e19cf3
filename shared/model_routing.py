"""Registry of queues and workers: the model that serves each queue, the model requested for it, and live workers.

The registry consists of three hashes. feedmill:models contains the workers' announcements. They outlive the workers, so
that messages waiting for a stopped model stay visible. feedmill:wanted contains the requests of `feedmill deploy` to a
queue's workers. Neither shows whether a worker runs. feedmill:workers contains the workers that should answer, until
they deregister.
"""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from pydantic import FiniteFloat, TypeAdapter, ValidationError
from redis import Redis
from redis.client import NEVER_DECODE

from feedmill.shared.broker import queue_depth
from feedmill.shared.errors import UserError, printable
from feedmill.shared.keys import MODELS, REQUESTED_MODELS, WORKERS
from feedmill.shared.messages import MAX_LABELS, ClassifyOptions
from feedmill.shared.settings import DAY_S, DEFAULT_QUEUE, PREFIX, Settings, is_folder_locked

#: Seconds between two announcements of a worker.
ANNOUNCE_INTERVAL_S = 60.0
#: Intervals after which an announcement says nothing about live workers any more.
RECENT_INTERVALS = 3
#: Own labels of a model that an error quotes.
MAX_QUOTED_LABELS = 10
#: Seconds for which a queue stays known without workers and without waiting messages.
QUEUE_TTL_S = 30 * DAY_S
#: Maximum number of known queues. The most recently announced ones are kept.
MAX_QUEUES = 100
#: Seconds for which a worker is expected to answer after it stopped registering without deregistering.
EXPECTED_S = 600


@dataclass(frozen=True)
class ServedModel:
    """The latest announcement for a queue."""

    model: str
    #: Time of the announcement, in seconds since 1970.
    seen: FiniteFloat
    #: Labels of a model that serves no others, at most MAX_LABELS + 1 of them; empty if messages choose their labels.
    labels: tuple[str, ...] = ()
    #: True if the model gives each post exactly one label, so that `multi_label` has no meaning.
    one_label: bool = False

    @property
    def is_recent(self) -> bool:
        """Return whether a worker announced the model lately."""
        return time.time() - self.seen < RECENT_INTERVALS * ANNOUNCE_INTERVAL_S


@dataclass(frozen=True)
class RequestedModel:
    """The model requested for a queue by `feedmill deploy`."""

    #: Folder of the model on the workers' machines; None for the model in each worker's settings.
    model: str | None
    #: SHA-256 of the model's weights, in hex, as in results.
    weights: str | None
    #: Time of the request, in seconds since 1970. Identifies the request.
    at: float


class Stage(StrEnum):
    """Progress of a worker with a requested model."""

    LOADING = "loads"
    SWITCHING = "switches"
    DONE = "done"
    FAILED = "failed"


class DeploymentReport(NamedTuple):
    """A worker's status report on the latest request."""

    #: The request's time, `RequestedModel.at`.
    at: float
    stage: Stage
    said: str


def announce(
    redis: Redis, queue: str, model: str, labels: Sequence[str] | None = None, one_label: bool = False
) -> str | None:
    """Announce that a worker serves `queue` with `model`, and remove stale queues.

    labels: the model's own labels, if it serves no others. one_label: whether it gives each post exactly one label.
    Returns the different model that another worker announced for the queue within the last two periods, else None.
    Raises redis.exceptions.RedisError.
    """
    now = time.time()
    found = known_queues(redis)
    before = found.pop(queue, None)
    pipe: Any = redis.pipeline(transaction=False)
    own: dict[str, Any] = {"labels": list(labels[: MAX_LABELS + 1])} if labels else {}
    own |= {"one_label": True} if one_label else {}
    pipe.hset(MODELS, queue, json.dumps({"model": model, "seen": round(now)} | own))
    for rank, other in enumerate(sorted(found, key=lambda name: -found[name].seen), 2):
        if rank > MAX_QUEUES or (now - found[other].seen > QUEUE_TTL_S and not queue_depth(redis, other).waiting):
            pipe.hdel(MODELS, other)
    pipe.execute()
    return before.model if before and before.model != model and now - before.seen < 2 * ANNOUNCE_INTERVAL_S else None


def register(redis: Redis, node: str) -> tuple[float, float]:
    """Record that this worker is alive, and remove registrations of workers that were silent for EXPECTED_S.

    Returns the times of the latest registration by this name, 0 without one, and of this one, by Redis' clock, because
    hosts' clocks differ. Raises redis.exceptions.RedisError.
    """
    now, found = _registered(redis)
    pipe: Any = redis.pipeline(transaction=False)
    pipe.hset(WORKERS, node, now)
    pipe.expire(WORKERS, EXPECTED_S)
    if stale := [other for other, seen in found.items() if other != node and now - seen > EXPECTED_S]:
        pipe.hdel(WORKERS, *stale)
    pipe.execute()
    return found.get(node, 0.0), now


def deregister(redis: Redis, node: str) -> None:
    """Remove the registration of a worker that shuts down. Raises redis.exceptions.RedisError."""
    redis.hdel(WORKERS, node)


def expected_workers(redis: Redis) -> dict[str, float]:
    """Return the workers that should answer, each with the seconds since its last registration.

    Includes workers that registered within EXPECTED_S and have not deregistered. Raises redis.exceptions.RedisError.
    """
    now, found = _registered(redis)
    ages = {node: max(0.0, now - seen) for node, seen in found.items()}
    return {node: age for node, age in ages.items() if age <= EXPECTED_S}


def _registered(redis: Redis) -> tuple[float, dict[str, float]]:
    """Return Redis' time, and the time of each worker's latest registration by that clock."""
    found: dict[str, float] = _fields(redis, WORKERS, FiniteFloat)
    seconds, microseconds = redis.time()
    return seconds + microseconds / 1e6, found


def _fields(redis: Redis, key: str, kind: Any) -> dict[str, Any]:
    """Return the parsed fields of a hash, sorted. Skips invalid fields, so that they cannot stop a worker."""
    client: Any = redis
    found: dict[bytes, bytes] = client.execute_command("HGETALL", key, **{NEVER_DECODE: True})
    readable = {}
    for name, text in sorted(found.items()):
        with suppress(ValueError):
            readable[name.decode()] = TypeAdapter(kind).validate_json(text)
    return readable


def known_queues(redis: Redis) -> dict[str, ServedModel]:
    """Return the latest announcement of each known queue. Skips invalid fields. Raises redis.exceptions.RedisError."""
    return _fields(redis, MODELS, ServedModel)


def queues(redis: Redis, settings: Settings) -> list[str]:
    """Return the names of all known queues and of this process' own queue, sorted. Raises as `known_queues` does."""
    return sorted({settings.queue, *known_queues(redis)})


def requested_model(redis: Redis, queue: str) -> RequestedModel | None:
    """Return the request for a queue, or None. Raises UserError if it is invalid, and redis.exceptions.RedisError."""
    text: Any = redis.hget(REQUESTED_MODELS, queue)
    if text is None:
        return None
    try:
        return TypeAdapter(RequestedModel).validate_json(text)
    except ValidationError:
        raise UserError(
            f"The model requested for queue {queue} in {REQUESTED_MODELS} is invalid. Deploy a model again, or run "
            f"`feedmill deploy --reset --queue {queue}`."
        ) from None


def deployed_weights(redis: Redis, queue: str) -> str:
    """Return the SHA-256 of the weights deployed to a queue; "" if none are. Raises redis.exceptions.RedisError."""
    try:
        deployed = requested_model(redis, queue)
    except UserError:  # an invalid entry stops the commands that use it, but no producer
        return ""
    return (deployed and deployed.weights) or ""


def request_model(redis: Redis, queue: str, asked: RequestedModel | None) -> None:
    """Set the model requested for a queue; None removes it. Raises UserError, redis.exceptions.RedisError."""
    if asked is None:
        redis.hdel(REQUESTED_MODELS, queue)
        return
    if not redis.hexists(REQUESTED_MODELS, queue) and redis.hlen(REQUESTED_MODELS) >= MAX_QUEUES:
        raise UserError(
            f"Models are deployed to {MAX_QUEUES} queues, the maximum. List them with `feedmill deploy`, and "
            "remove one with `feedmill deploy --reset`."
        )
    redis.hset(REQUESTED_MODELS, queue, json.dumps(asdict(asked)))


def check_queue(redis: Redis, queue: str) -> None:
    """Raise UserError for an unknown queue other than the default one. Raises redis.exceptions.RedisError."""
    served = known_queues(redis)
    if queue != DEFAULT_QUEUE and queue not in served:
        known = ", ".join(f"{printable(name)} (model {printable(found.model)})" for name, found in served.items())
        raise UserError(
            f"--queue: no worker has served {queue!r} yet, so the name may be misspelt. Set {PREFIX}QUEUE to use it "
            f"anyway. Known queues: {known or 'none; workers announce theirs after loading their model'}."
        )


def has_worker(redis: Redis, queue: str) -> bool:
    """Return whether a worker of the queue seems to be alive. Raises redis.exceptions.RedisError."""
    served = known_queues(redis).get(queue)
    return served is not None and served.is_recent and bool(expected_workers(redis))


def missing_worker(redis: Redis, settings: Settings) -> str:
    """Return a clause if no worker serves the settings' queue, else "". Raises redis.exceptions.RedisError."""
    if has_worker(redis, settings.queue):
        return ""
    is_up = settings.redis_url is None and is_folder_locked(settings.data_folder)
    if is_up and not any(has_worker(redis, queue) for queue in known_queues(redis)):
        return "`feedmill up` is starting its worker: what is sent waits until it is ready"
    return f"no worker serves queue {settings.queue}: what is sent waits until `feedmill worker` or `feedmill up` runs"


def check_options(redis: Redis, queue: str, options: ClassifyOptions) -> None:
    """Raise UserError if the queue's model would refuse the options: it has its own labels, or gives only one.

    Otherwise each post would become a dead letter. Does nothing if no worker announced a model lately. Raises
    redis.exceptions.RedisError.
    """
    served = known_queues(redis).get(queue)
    if served is None or not served.labels or not served.is_recent:
        return
    others = options.labels is not None and set(options.labels) != set(served.labels)
    wrong = {
        "--labels": others,
        "--template": options.template is not None,
        "--multi-label": options.multi_label and served.one_label,
    }
    if flag := next((name for name, is_wrong in wrong.items() if is_wrong), None):
        named = ", ".join(map(printable, served.labels[:MAX_QUOTED_LABELS]))
        more = ", …" if len(served.labels) > MAX_QUOTED_LABELS else ""
        how = "gives each post one of its labels" if served.one_label else "has labels of its own"
        raise UserError(
            f"Queue {queue} is served by {printable(served.model)}, which {how} ({named}{more}) and would refuse every "
            f"post. Leave out {flag}, or send to another queue with --queue."
        )
