"""The front door: the `feedmill` command, the embedded stack, the demo and its posts; what an application imports.

`results` reads the stream of results (docs/results.md). `classify` is the Celery task: in an application of one's own,
`classify.delay(posts=[…])` sends posts to a worker, and `classify(posts=[…])` classifies them here, in this process;
`ClassifyTask` is the base of tasks of one's own, and `MessageFailed` their error (docs/celery.md). Importing this
package imports nothing else: what they need comes with their first use.
"""

from collections.abc import Generator
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared.errors import MessageFailed as MessageFailed
    from shared.readers import Missed as Missed
    from shared.readers import Reader
    from shared.results import Result as Result
    from shared.settings import Settings
    from workers.task import ClassifyTask as ClassifyTask
    from workers.task import classify as classify

__version__ = "0.1.0"
__all__ = ["ClassifyTask", "MessageFailed", "Missed", "Result", "__version__", "classify", "results"]


def results(
    redis_url: str | None = None,
    *,
    group: str | None = None,
    consumer: str | None = None,
    follow: bool = True,
    label: str | None = None,
    min_score: float | None = None,
    subreddit: str | None = None,
    since: float | None = None,
    claim_after: float = 60.0,
) -> "Generator[Result | Missed]":
    """Results as they come; and Missed, wherever some were trimmed from the stream before they could be read.

    redis_url: as in the environment (FEEDMILL_REDIS_URL), which counts where it is not given.
    group: share the results with the other readers of this group, and go on where it stopped. Each result is given at
        least once: it is acknowledged when the next one is asked for.
    consumer: this reader's name in the group, unlike all others'; unset, made of host and process.
    follow: wait for results to come; otherwise end where none is left.
    label, min_score, subreddit: leave out the others. The score is that of the best label.
    since: seconds since 1970 from which to read, 0 for all that is there. Unset: from now on; with `follow=False`, all
        that is there. With a group it counts where the group is new, and unset is from now on.
    claim_after: seconds after which what another reader of the group has not acknowledged is given to this one.

    Connects when the first result is asked for, and again, at the same place, whenever the connection is lost. Raises
    shared.errors.UserError with a sentence: at once for what cannot be asked for, and later for a Redis that does not
    answer at the start, or refuses.
    """
    from shared.broker import connect  # noqa: PLC0415
    from shared.readers import Wanted, open_reader  # noqa: PLC0415
    from shared.settings import load  # noqa: PLC0415

    settings = load(redis_url=redis_url)
    if since is None and not follow and group is None:
        since = 0.0
    redis = connect(settings)
    wanted = Wanted(label, min_score, subreddit)
    reader = open_reader(redis, group, consumer, wanted, since, claim_after=claim_after)
    return _items(reader, follow, settings, redis)


def _items(reader: "Reader", follow: bool, settings: "Settings", redis: Any) -> "Generator[Result | Missed]":
    from shared.readers import items, told_plainly  # noqa: PLC0415

    try:
        with told_plainly(settings):
            yield from items(reader, follow)
    finally:
        redis.close()


#: What else is public, and where it lies.
_ELSEWHERE = {
    "ClassifyTask": "workers.task",
    "MessageFailed": "shared.errors",
    "Missed": "shared.readers",
    "Result": "shared.results",
    "classify": "workers.task",
}


def __getattr__(name: str) -> Any:
    """The task, its base and its error, and what `results` yields, without importing them beforehand."""
    if name in _ELSEWHERE:
        return getattr(import_module(_ELSEWHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
