"""Classify on a Ray cluster: each actor has the model on a GPU or on a node's CPUs, and this
process reads the dumps and writes the rows.

Ray starts an actor again that died, and repeats its batches.
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from feedmill.offline.model import OfflineModel, load_offline
from feedmill.shared.errors import UserError, clause
from feedmill.shared.messages import ClassifyOptions, Outcome, Post
from feedmill.shared.settings import Settings

#: Posts of a batch: many, because an actor sorts them by length; and batches per actor, so that
#: the next one waits there when one is done.
BATCH_POSTS = 2_000
BATCHES_PER_ACTOR = 2
#: Seconds to wait for a batch before signals are handled.
WAIT_S = 1.0
#: Resources of an actor in the cluster.
CPUS_PER_ACTOR = 1
GPUS_PER_ACTOR = 1
#: Starts of an actor, and repetitions of a batch, without a limit: Ray's number for it.
ANY_NUMBER = -1


class Described(NamedTuple):
    """An actor's model."""

    labels: Sequence[str]
    recipe: str
    name: str
    revision: str | None
    weights: str


class ClassifyActor:
    """A model in a process of Ray."""

    def __init__(
        self, settings: Settings, options: ClassifyOptions, is_default: bool
    ) -> None:
        self._model = load_offline(settings, options, is_default)

    def describe(self) -> Described:
        model = self._model
        return Described(
            labels=model.labels,
            recipe=model.recipe,
            name=model.name,
            revision=model.revision,
            weights=model.weights,
        )

    def classify(self, posts: list[Post]) -> list[Outcome]:
        """Return the outcome of each post, in order."""
        return [outcome for _, outcome in self._model.classify(posts)]


class _Batch(NamedTuple):
    """Posts that an actor classifies. answer: Ray's reference to the outcomes."""

    posts: list[Post]
    actor: int
    answer: Any


@contextmanager
def ray_model(
    settings: Settings,
    options: ClassifyOptions,
    is_default: bool,
    count: int | None,
) -> Iterator[OfflineModel]:
    """Yield a model that classifies on a cluster: that at RAY_ADDRESS, or this machine.

    count: actors; None is one per GPU of the cluster, or one per node without GPUs. Raises
    UserError, also if the cluster has no place for so many.
    """
    try:
        import ray  # noqa: PLC0415 - few machines have it
    except ImportError:
        raise UserError(
            "--on ray needs Ray. Install it: pip install ray, in the version of the cluster."
        ) from None
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    try:
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        actor_count = count_actors(count, resources, len(ray.nodes()))
        options_of_actor: dict[str, Any] = {
            "max_restarts": ANY_NUMBER,
            "max_task_retries": ANY_NUMBER,
            "num_cpus": CPUS_PER_ACTOR,
        }
        if gpus:
            options_of_actor["num_gpus"] = GPUS_PER_ACTOR
        remote_class = ray.remote(**options_of_actor)(ClassifyActor)
        actors = [
            remote_class.remote(settings, options, is_default)
            for _ in range(actor_count)
        ]
        described = _describe(ray, actors[0])

        def classify(posts: Iterable[Post]) -> Generator[tuple[Post, Outcome]]:
            return _outcomes(ray, actors, posts)

        yield OfflineModel(classify=classify, **described._asdict())
    finally:
        ray.shutdown()


def count_actors(count: int | None, resources: Mapping[str, float], nodes: int) -> int:
    """Return the number of actors.

    count: see `ray_model`. resources: those of the cluster, in Ray's names. Raises
    UserError for more than have a place: Ray would wait for one without end.
    """
    cpus = int(resources.get("CPU", 0))
    gpus = int(resources.get("GPU", 0))
    places = cpus // CPUS_PER_ACTOR
    described = f"{cpus} CPUs"
    if gpus:
        places = min(places, gpus // GPUS_PER_ACTOR)
        described = f"{gpus} GPUs and {cpus} CPUs"
    if count is None:
        count = max(1, min(gpus or nodes, places))
    if count > places:
        raise UserError(
            f"The Ray cluster has no place for {count} actors: it has {described}, and each actor "
            "takes one. Give fewer --actors, or start more nodes first."
        )
    return count


def _describe(ray: Any, actor: Any) -> Described:
    """Return an actor's model once it is loaded. Raises UserError."""
    try:
        described: Described = ray.get(actor.describe.remote())
    except ray.exceptions.RayError as error:
        raise UserError(
            f"The model cannot be loaded on the Ray cluster: {clause(error)}. Install Feedmill "
            "with the extra worker on every node, and give a model that all nodes see."
        ) from None
    return described


def _outcomes(
    ray: Any, actors: Sequence[Any], posts: Iterable[Post]
) -> Generator[tuple[Post, Outcome]]:
    """Yield each post with its outcome, in order."""
    remaining = iter(posts)
    batches: deque[_Batch] = deque()
    waiting = [0] * len(actors)
    while True:
        while min(waiting) < BATCHES_PER_ACTOR:
            posts_of_batch = list(islice(remaining, BATCH_POSTS))
            if not posts_of_batch:
                break
            actor = waiting.index(min(waiting))
            waiting[actor] += 1
            answer = actors[actor].classify.remote(posts_of_batch)
            batch = _Batch(
                posts_of_batch,
                actor,
                answer,
            )
            batches.append(batch)
        if not batches:
            return
        batch = batches.popleft()
        yield from zip(batch.posts, _answer(ray, batch), strict=True)
        waiting[batch.actor] -= 1


def _answer(ray: Any, batch: _Batch) -> list[Outcome]:
    """Wait for a batch's outcomes. Raises UserError if the cluster lost them for good."""
    ready: list[Any] = []
    while not ready:
        ready, _ = ray.wait([batch.answer], timeout=WAIT_S)
    try:
        outcomes: list[Outcome] = ray.get(batch.answer)
    except ray.exceptions.RayError as error:
        raise UserError(
            f"The Ray cluster could not classify a batch: {clause(error)}. Run the same command "
            "again to continue."
        ) from None
    return outcomes
