"""The public Python API, the `feedmill` command, the embedded stack and the demo.

Classify in this process; this needs `pip install 'feedmill[worker]'`:

    >>> import feedmill
    >>> feedmill.classify(["I love it", "It broke after a day"], labels=["praise", "complaint"])
    2 predictions: praise 1, complaint 1
      praise     0.73  I love it
      complaint  0.89  It broke after a day

| name | what it is |
|---|---|
| `classify` | a function that classifies texts, dictionaries, or a pandas or polars DataFrame in this process |
| `Classifier` | a loaded model, for callers that decide when it is loaded and released |
| `Prediction`, `Predictions` | the label of one text, and a list of them |
| `submit` | a function that sends texts, dictionaries or a DataFrame through a running queue |
| `SubmittedRun` | what `submit` returns: progress and results of the sent items |
| `results` | a function that reads classification results from Redis |
| `Result` | a post and its classification, as `results` yields it |
| `Missed` | results that were trimmed from the stream before they were read, as `results` yields it |
| `classify_task` | the Celery task `feedmill.classify`: sends posts to a worker and returns their outcomes |
| `ClassifyTask` | the base class for your own Celery tasks whose posts are classified in micro-batches |
| `MessageFailed` | the error of a message whose posts all failed, or any of them with `strict=True` |
| `UserError` | the base class of errors that the caller can fix, with a message that says how |

Send posts to a worker through Celery and wait for the outcomes:

    try:
        (outcome,) = feedmill.classify_task.delay(posts=[{"id": "a1", "title": "Two penalties saved"}]).get(timeout=60)
    except feedmill.MessageFailed as error:
        print(error)
    else:
        print(outcome["label"])

Define a task that retries failed messages; `feedmill worker --include mytasks` loads it:

    from celery import shared_task
    from feedmill import ClassifyTask, MessageFailed

    @shared_task(bind=True, base=ClassifyTask, autoretry_for=(MessageFailed,), max_retries=3)
    def careful(self, /, *args, **kwargs):
        return self.outcomes()

`import feedmill` is cheap: it imports a name's module when the name is first used.
"""

from collections.abc import Generator
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feedmill.api.classifier import Classifier as Classifier
    from feedmill.api.classify import classify as classify
    from feedmill.api.predictions import Prediction as Prediction
    from feedmill.api.predictions import Predictions as Predictions
    from feedmill.api.submission import SubmittedRun as SubmittedRun
    from feedmill.api.submission import submit as submit
    from feedmill.reading.results import Reader
    from feedmill.reading.stream import Missed as Missed
    from shared.errors import MessageFailed as MessageFailed
    from shared.errors import UserError as UserError
    from shared.results import Result as Result
    from shared.settings import Settings
    from workers.runtime.task import ClassifyTask as ClassifyTask
    from workers.runtime.task import classify_task as classify_task

__version__ = "0.1.0"
__all__ = [
    "Classifier",
    "ClassifyTask",
    "MessageFailed",
    "Missed",
    "Prediction",
    "Predictions",
    "Result",
    "SubmittedRun",
    "UserError",
    "__version__",
    "classify",
    "classify_task",
    "results",
    "submit",
]


def results(
    redis_url: str | None = None,
    *,
    group: str | None = None,
    consumer: str | None = None,
    follow: bool = True,
    label: str | None = None,
    min_score: float | None = None,
    subreddit: str | None = None,
    run: str | None = None,
    since: float | None = None,
    claim_after: float = 60.0,
) -> "Generator[Result | Missed]":
    """Yield classification results from Redis as they arrive.

    The generator connects when the first item is requested. After a lost connection it reconnects and continues at the
    same place.

    Args:
        redis_url: URL of Redis, such as `redis://:password@host:6379/0`. Default: FEEDMILL_REDIS_URL, else the running
            `feedmill up`, else localhost.
        group: Name of a consumer group. The readers of a group share its results, and the group continues where it
            stopped. Each result is delivered at least once; requesting the next item acknowledges it.
        consumer: Name of this reader, unique in the group. Default: host name and process ID.
        follow: Wait for new results. With False, stop when no result is left.
        label: Yield only results with this best label, spelled exactly.
        min_score: Yield only results whose best label has at least this score.
        subreddit: Yield only posts of this subreddit, in upper or lower case, with or without `r/`.
        run: Yield only posts of this run.
        since: Start at this time, in seconds since 1970; 0 starts at the oldest result in the stream. Default: now,
            or 0 with `follow=False` and no group. An existing group ignores it.
        claim_after: Seconds after which this reader takes over results that another reader of the group received and
            has not acknowledged. Must exceed the time that one result takes to process.

    Yields:
        A Result for each classification: `result.post` and `result.classification`. A Missed where results were
        trimmed from the stream before this reader reached them.

    Raises:
        feedmill.UserError: At the call, for an invalid argument or setting. At the first item, if Redis cannot be
            reached or refuses the connection. Later, only if Redis refuses a command.

    Example:
        import feedmill

        for item in feedmill.results(group="archive", since=0, follow=False):
            if isinstance(item, feedmill.Missed):
                print("missed", item.count or "some", "results")
            else:
                found = item.classification
                print(item.post.id, found.label, found.scores[found.label])
    """
    from feedmill.reading.results import open_reader  # noqa: PLC0415 - `import feedmill` is cheap
    from feedmill.reading.stream import ResultFilter  # noqa: PLC0415
    from shared.broker import connect  # noqa: PLC0415
    from shared.settings import load  # noqa: PLC0415

    settings = load(redis_url=redis_url)
    if since is None and not follow and group is None:
        since = 0.0
    redis = connect(settings)
    filters = ResultFilter(label, min_score, subreddit, run)
    reader = open_reader(redis, group, consumer, filters, since, claim_after=claim_after)
    return _items(reader, follow, settings, redis)


def _items(reader: "Reader", follow: bool, settings: "Settings", redis: Any) -> "Generator[Result | Missed]":
    """Yield the reader's items, and close the connection when the generator ends."""
    from feedmill.reading.results import items  # noqa: PLC0415
    from shared.broker import user_errors  # noqa: PLC0415

    try:
        with user_errors(settings):
            yield from items(reader, follow)
    finally:
        redis.close()


#: Public names of other packages, each with its module.
_LAZY_NAMES = {
    "Classifier": "feedmill.api.classifier",
    "ClassifyTask": "workers.runtime.task",
    "MessageFailed": "shared.errors",
    "Missed": "feedmill.reading.stream",
    "Prediction": "feedmill.api.predictions",
    "Predictions": "feedmill.api.predictions",
    "Result": "shared.results",
    "SubmittedRun": "feedmill.api.submission",
    "UserError": "shared.errors",
    "classify": "feedmill.api.classify",
    "classify_task": "workers.runtime.task",
    "submit": "feedmill.api.submission",
}


def __getattr__(name: str) -> Any:
    """Import a public name of another package on first use."""
    if name in _LAZY_NAMES:
        return getattr(import_module(_LAZY_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
