"""Registry of queues and workers: the model that serves each queue, the model requested for it,
and live workers.

The registry consists of three hashes. feedmill:models contains the workers' announcements. They
outlive the workers, so that messages waiting for a stopped model stay visible. feedmill:wanted
contains the requests of `feedmill deploy` to a queue's workers. Neither shows whether a worker
runs. feedmill:workers contains the workers that should answer, until they deregister.
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
from feedmill.shared.settings import (
    DAY_S,
    DEFAULT_QUEUE,
    PREFIX,
    Settings,
    is_folder_locked,
)

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
#: Seconds for which a worker is expected to answer after it stopped registering without
#: deregistering.
EXPECTED_S = 600


@dataclass(frozen=True)
class ServedModel:
    """The latest announcement for a queue."""

    model: str
    #: Time of the announcement, in seconds since 1970.
    seen: FiniteFloat
    #: Labels of a model that serves no others, at most MAX_LABELS + 1 of them; empty if messages
    #: choose their labels.
    labels: tuple[str, ...] = ()
    #: True if the model gives each post exactly one label, so that `multi_label` has no meaning.
    one_label: bool = False

    @property
    def is_recent(self) -> bool:
        """Return whether a worker announced the model lately."""
        age = time.time() - self.seen
        return age < RECENT_INTERVALS * ANNOUNCE_INTERVAL_S


@dataclass(frozen=True)
class RequestedModel:
    """The model requested for a queue by `feedmill deploy`."""

    #: Folder of the model on the workers' machines; None for the model in each worker's settings.
    model: str | None
    #: Digest of every file that loading the model reads, in hex, as in results.
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
    redis: Redis,
    queue: str,
    model: str,
    labels: Sequence[str] | None = None,
    one_label: bool = False,
) -> str | None:
    """Announce that a worker serves `queue` with `model`, and remove stale queues.

    labels: the model's own labels, if it serves no others. one_label: whether it gives each post
    exactly one label. Returns the different model that another worker announced for the queue
    within the last two periods, else None. Raises redis.exceptions.RedisError.
    """
    now = time.time()
    others = known_queues(redis)
    before = others.pop(queue, None)
    announcement: dict[str, Any] = {
        "model": model,
        "seen": round(now),
    }
    if labels:
        announcement["labels"] = list(labels[: MAX_LABELS + 1])
    if one_label:
        announcement["one_label"] = True
    pipe: Any = redis.pipeline(transaction=False)
    pipe.hset(MODELS, queue, json.dumps(announcement))

    newest_first = sorted(others, key=lambda name: -others[name].seen)
    for rank, other in enumerate(newest_first, start=2):
        age = now - others[other].seen
        is_stale = rank > MAX_QUEUES
        if age > QUEUE_TTL_S and not is_stale:
            is_stale = queue_depth(redis, other).waiting == 0
        if is_stale:
            pipe.hdel(MODELS, other)
    pipe.execute()

    if before is None or before.model == model:
        return None
    age = now - before.seen
    if age >= 2 * ANNOUNCE_INTERVAL_S:
        return None
    return before.model


def register(redis: Redis, node: str) -> tuple[float, float]:
    """Record that this worker is alive, and remove registrations of workers that were silent for
    EXPECTED_S.

    Returns the times of the latest registration by this name, 0 without one, and of this one, by
    Redis' clock, because hosts' clocks differ. Raises redis.exceptions.RedisError.
    """
    now, times = _read_registrations(redis)
    before = times.pop(node, 0.0)
    pipe: Any = redis.pipeline(transaction=False)
    pipe.hset(WORKERS, node, now)
    pipe.expire(WORKERS, EXPECTED_S)
    stale: list[str] = []
    for other, at in times.items():
        silence = now - at
        if silence > EXPECTED_S:
            stale.append(other)
    if stale:
        pipe.hdel(WORKERS, *stale)
    pipe.execute()
    return before, now


def deregister(redis: Redis, node: str) -> None:
    """Remove the registration of a worker that shuts down. Raises redis.exceptions.RedisError."""
    redis.hdel(WORKERS, node)


def expected_workers(redis: Redis) -> dict[str, float]:
    """Return the workers that should answer, each with the seconds since its last registration.

    Includes workers that registered within EXPECTED_S and have not deregistered. Raises
    redis.exceptions.RedisError.
    """
    now, times = _read_registrations(redis)
    ages: dict[str, float] = {}
    for node, at in times.items():
        age = max(0.0, now - at)
        if age <= EXPECTED_S:
            ages[node] = age
    return ages


def _read_registrations(redis: Redis) -> tuple[float, dict[str, float]]:
    """Return Redis' time, and the time of each worker's latest registration by that clock."""
    times: dict[str, float] = _fields(redis, WORKERS, FiniteFloat)
    seconds, microseconds = redis.time()
    now = seconds + microseconds / 1e6
    return now, times


def _fields(redis: Redis, key: str, kind: Any) -> dict[str, Any]:
    """Return the parsed fields of a hash, sorted.

    Skips invalid fields, so that they cannot stop a worker.
    """
    client: Any = redis
    undecoded = {NEVER_DECODE: True}
    texts: dict[bytes, bytes] = client.execute_command("HGETALL", key, **undecoded)
    adapter = TypeAdapter(kind)
    fields = {}
    for raw_name, text in sorted(texts.items()):
        with suppress(ValueError):
            name = raw_name.decode()
            fields[name] = adapter.validate_json(text)
    return fields


def known_queues(redis: Redis) -> dict[str, ServedModel]:
    """Return the latest announcement of each known queue.

    Skips invalid fields. Raises redis.exceptions.RedisError.
    """
    return _fields(redis, MODELS, ServedModel)


def queues(redis: Redis, settings: Settings) -> list[str]:
    """Return the names of all known queues and of this process' own queue, sorted.

    Raises as `known_queues` does.
    """
    names = {settings.queue, *known_queues(redis)}
    return sorted(names)


def requested_model(redis: Redis, queue: str) -> RequestedModel | None:
    """Return the request for a queue, or None.

    Raises UserError if it is invalid, and redis.exceptions.RedisError.
    """
    text: Any = redis.hget(REQUESTED_MODELS, queue)
    if text is None:
        return None
    try:
        return TypeAdapter(RequestedModel).validate_json(text)
    except ValidationError:
        raise UserError(
            f"The model requested for queue {queue} in {REQUESTED_MODELS} is invalid. Deploy a "
            f"model again, or run `feedmill deploy --reset --queue {queue}`."
        ) from None


def readable_request(redis: Redis, queue: str) -> RequestedModel | None:
    """Return the request for a queue; None if there is none or if it is invalid.

    Raises redis.exceptions.RedisError.
    """
    try:
        return requested_model(redis, queue)
    except UserError:
        return None


def has_request(redis: Redis, queue: str) -> bool:
    """Return whether there is a request for a queue, also if it is invalid.

    Raises redis.exceptions.RedisError.
    """
    return bool(redis.hexists(REQUESTED_MODELS, queue))


def requested_folders(redis: Redis) -> set[str]:
    """Return the folders of the models requested for any queue. Skips invalid requests.

    Raises redis.exceptions.RedisError.
    """
    requests = _fields(redis, REQUESTED_MODELS, RequestedModel)
    return {request.model for request in requests.values() if request.model}


def deployed_weights(redis: Redis, queue: str) -> str:
    """Return the digest of the model deployed to a queue; "" if none is.

    Raises redis.exceptions.RedisError.
    """
    # An invalid entry stops the commands that use it, but no producer.
    deployed = readable_request(redis, queue)
    if deployed is None:
        return ""
    return deployed.weights or ""


def request_model(redis: Redis, queue: str, asked: RequestedModel | None) -> None:
    """Set the model requested for a queue; None removes it.

    If MAX_QUEUES queues have a request, those for the workers' own models are removed first.

    Raises UserError, redis.exceptions.RedisError.
    """
    if asked is None:
        redis.hdel(REQUESTED_MODELS, queue)
        return
    if not has_request(redis, queue) and _is_full(redis):
        _remove_resets(redis)
    if not has_request(redis, queue) and _is_full(redis):
        raise UserError(
            f"Models are deployed to {MAX_QUEUES} queues, the maximum. List them with `feedmill "
            "deploy`, and remove one with `feedmill deploy --reset`."
        )
    redis.hset(REQUESTED_MODELS, queue, json.dumps(asdict(asked)))


def _is_full(redis: Redis) -> bool:
    count: Any = redis.hlen(REQUESTED_MODELS)
    return bool(count >= MAX_QUEUES)


def _remove_resets(redis: Redis) -> None:
    """Remove the requests for the workers' own models, which workers also load without one."""
    requests = _fields(redis, REQUESTED_MODELS, RequestedModel)
    for queue, request in requests.items():
        if request.model is None:
            redis.hdel(REQUESTED_MODELS, queue)


def check_queue(redis: Redis, queue: str) -> None:
    """Raise UserError for an unknown queue other than the default one.

    Raises redis.exceptions.RedisError.
    """
    served = known_queues(redis)
    if queue == DEFAULT_QUEUE or queue in served:
        return
    names = [
        f"{printable(name)} (model {printable(model.model)})"
        for name, model in served.items()
    ]
    listed = (
        ", ".join(names) or "none; workers announce theirs after loading their model"
    )
    raise UserError(
        f"--queue: no worker has served {queue!r} yet, so the name may be misspelt. Set "
        f"{PREFIX}QUEUE to use it anyway. Known queues: {listed}."
    )


def has_worker(redis: Redis, queue: str) -> bool:
    """Return whether a worker of the queue seems to be alive.

    Raises redis.exceptions.RedisError.
    """
    served = known_queues(redis).get(queue)
    if served is None or not served.is_recent:
        return False
    return len(expected_workers(redis)) > 0


def missing_worker(redis: Redis, settings: Settings) -> str:
    """Return a clause if no worker serves the settings' queue, else "".

    Raises redis.exceptions.RedisError.
    """
    if has_worker(redis, settings.queue):
        return ""
    is_up = settings.redis_url is None and is_folder_locked(settings.data_folder)
    if is_up:
        names = known_queues(redis)
        has_any_worker = any(has_worker(redis, name) for name in names)
        if not has_any_worker:
            return "`feedmill up` is starting its worker: what is sent waits until it is ready"
    return (
        f"no worker serves queue {settings.queue}: what is sent waits until `feedmill worker` "
        "or `feedmill up` runs"
    )


def check_options(redis: Redis, queue: str, options: ClassifyOptions) -> None:
    """Raise UserError if the queue's model would refuse the options: it has its own labels, or
    gives only one.

    Otherwise each post would become a dead letter. Does nothing if no worker announced a model
    lately. Raises redis.exceptions.RedisError.
    """
    served = known_queues(redis).get(queue)
    if served is None or not served.labels or not served.is_recent:
        return
    if options.labels is not None and set(options.labels) != set(served.labels):
        flag = "--labels"
    elif options.template is not None:
        flag = "--template"
    elif options.multi_label and served.one_label:
        flag = "--multi-label"
    else:
        return
    quoted_labels = map(printable, served.labels[:MAX_QUOTED_LABELS])
    labels = ", ".join(quoted_labels)
    if len(served.labels) > MAX_QUOTED_LABELS:
        labels += ", …"
    model = printable(served.model)
    trait = "has labels of its own"
    if served.one_label:
        trait = "gives each post one of its labels"
    raise UserError(
        f"Queue {queue} is served by {model}, which {trait} ({labels}) and would refuse every "
        f"post. Leave out {flag}, or send to another queue with --queue."
    )
