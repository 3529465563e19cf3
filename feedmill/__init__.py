"""The public Python API, the `feedmill` command, the embedded stack and the demo.

Classify in this process; this needs `pip install 'feedmill[worker]'`:

    >>> import feedmill
    >>> feedmill.classify(["I love it", "It broke after a day"], labels=["praise", "complaint"])
    2 predictions: praise 1, complaint 1
      praise     0.73  I love it
      complaint  0.89  It broke after a day

| name | what it is |
|---|---|
| `classify` | a function that classifies texts, dictionaries, or a DataFrame in this process |
| `Classifier` | a loaded model, for callers that decide when it is loaded and released |
| `Prediction`, `Predictions` | the label of one text, and a list of them |
| `study` | a function that labels whole dumps into a folder, with plots and a data set card |
| `StudyResult` | what `study` returns: numbers of rows, and what could not be read |
| `tune` | a function that measures batch sizes, data types and each step to the queue |
| `submit` | a function that sends texts, dictionaries or a DataFrame through a running queue |
| `SubmittedRun` | what `submit` returns: progress and results of the sent items |
| `results` | a function that reads classification results from Redis |
| `Result` | a post and its classification, as `results` yields it |
| `Missed` | results that were trimmed from the stream before `results` read them |
| `dead_letters` | a function that returns the dead letters in Redis, to list, retry or drop them |
| `DeadLetters`, `DeadLetterEntry` | what `dead_letters` returns, and one dead letter with its id |
| `purge` | a function that deletes what is stored about posts or a run, or empties a queue |
| `Purged` | what `purge` returns: numbers of removed items, and ids that matched nothing |
| `forget` | a function that deletes every known copy of posts, and logs the deletion |
| `Forgotten` | what `forget` returns: deleted posts, and what was not found or not changed |
| `export` | a function that writes results to files, or to a table in PostgreSQL |
| `ExportCounts` | what `export` returns: numbers of rows written, removed, refused and missed |
| `train` | a function that fine-tunes a model, or fits a head on embeddings |
| `evaluate` | a function that measures models on posts with known labels |
| `Post`, `ClassifyOptions` | a post, and the options of a message, checked as a worker does |
| `Classification`, `PostError` | the outcome of a post: its label and scores, or why it has none |
| `parse_outcomes` | a function that returns the outcomes in a Celery result, with types |
| `Client`, `AsyncClient` | clients of the HTTP endpoint of `feedmill web` (docs/client.md) |
| `ServerError` | the base class of their errors |
| `classify_task` | the Celery task `feedmill.classify`: a worker classifies posts |
| `ClassifyTask` | the base class of Celery tasks whose posts are classified in micro-batches |
| `MessageFailed` | the error of a message whose posts failed (with `strict=True`: any of them) |
| `RequestRefused` | the error of a message whose options or list of posts are invalid |
| `PostRefused` | the error of an invalid post, from `Post.parse` |
| `UserError` | the base class of errors that the caller can fix, with a message that says how |

docs/celery.md shows `classify_task` and tasks of your own.

`import feedmill` is cheap: it imports a name's module when the name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feedmill.api.classify import Classifier as Classifier
    from feedmill.api.classify import classify as classify
    from feedmill.api.evaluate import evaluate as evaluate
    from feedmill.api.export import export as export
    from feedmill.api.request import Prediction as Prediction
    from feedmill.api.request import Predictions as Predictions
    from feedmill.api.study import study as study
    from feedmill.api.submission import SubmittedRun as SubmittedRun
    from feedmill.api.submission import submit as submit
    from feedmill.api.train import train as train
    from feedmill.api.tune import tune as tune
    from feedmill.client.aio import AsyncClient as AsyncClient
    from feedmill.client.sync import Client as Client
    from feedmill.exporting.run import ExportCounts as ExportCounts
    from feedmill.forgetting.forget import Forgotten as Forgotten
    from feedmill.forgetting.forget import forget as forget
    from feedmill.outcomes.dead_letters import DeadLetterEntry as DeadLetterEntry
    from feedmill.outcomes.dead_letters import DeadLetters as DeadLetters
    from feedmill.outcomes.dead_letters import dead_letters as dead_letters
    from feedmill.outcomes.purge import Purged as Purged
    from feedmill.outcomes.purge import purge as purge
    from feedmill.outcomes.results import results as results
    from feedmill.outcomes.rows import Missed as Missed
    from feedmill.shared.errors import MessageFailed as MessageFailed
    from feedmill.shared.errors import PostRefused as PostRefused
    from feedmill.shared.errors import RequestRefused as RequestRefused
    from feedmill.shared.errors import ServerError as ServerError
    from feedmill.shared.errors import UserError as UserError
    from feedmill.shared.messages import Classification as Classification
    from feedmill.shared.messages import ClassifyOptions as ClassifyOptions
    from feedmill.shared.messages import Post as Post
    from feedmill.shared.messages import PostError as PostError
    from feedmill.shared.messages import parse_outcomes as parse_outcomes
    from feedmill.shared.results import Result as Result
    from feedmill.studies.result import StudyResult as StudyResult
    from feedmill.workers.runtime.task import ClassifyTask as ClassifyTask
    from feedmill.workers.runtime.task import classify_task as classify_task

__version__ = "0.2.0"

#: Public names, each with the module that defines it.
_LAZY_NAMES = {
    "AsyncClient": "feedmill.client.aio",
    "Classification": "feedmill.shared.messages",
    "Classifier": "feedmill.api.classify",
    "ClassifyOptions": "feedmill.shared.messages",
    "ClassifyTask": "feedmill.workers.runtime.task",
    "Client": "feedmill.client.sync",
    "DeadLetterEntry": "feedmill.outcomes.dead_letters",
    "DeadLetters": "feedmill.outcomes.dead_letters",
    "ExportCounts": "feedmill.exporting.run",
    "Forgotten": "feedmill.forgetting.forget",
    "MessageFailed": "feedmill.shared.errors",
    "Missed": "feedmill.outcomes.rows",
    "Post": "feedmill.shared.messages",
    "PostError": "feedmill.shared.messages",
    "PostRefused": "feedmill.shared.errors",
    "Prediction": "feedmill.api.request",
    "Predictions": "feedmill.api.request",
    "Purged": "feedmill.outcomes.purge",
    "RequestRefused": "feedmill.shared.errors",
    "Result": "feedmill.shared.results",
    "ServerError": "feedmill.shared.errors",
    "StudyResult": "feedmill.studies.result",
    "SubmittedRun": "feedmill.api.submission",
    "UserError": "feedmill.shared.errors",
    "classify": "feedmill.api.classify",
    "classify_task": "feedmill.workers.runtime.task",
    "dead_letters": "feedmill.outcomes.dead_letters",
    "evaluate": "feedmill.api.evaluate",
    "export": "feedmill.api.export",
    "forget": "feedmill.forgetting.forget",
    "parse_outcomes": "feedmill.shared.messages",
    "purge": "feedmill.outcomes.purge",
    "results": "feedmill.outcomes.results",
    "study": "feedmill.api.study",
    "submit": "feedmill.api.submission",
    "train": "feedmill.api.train",
    "tune": "feedmill.api.tune",
}
__all__ = ["__version__", *_LAZY_NAMES]  # noqa: PLE0604 - all of them are strings


def __getattr__(name: str) -> Any:
    """Import a public name's module on first use."""
    if name in _LAZY_NAMES:
        return getattr(import_module(_LAZY_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
