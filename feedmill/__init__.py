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

docs/celery.md shows `classify_task` and tasks of your own.

`import feedmill` is cheap: it imports a name's module when the name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feedmill.api.classify import Classifier as Classifier
    from feedmill.api.classify import classify as classify
    from feedmill.api.request import Prediction as Prediction
    from feedmill.api.request import Predictions as Predictions
    from feedmill.api.submission import SubmittedRun as SubmittedRun
    from feedmill.api.submission import submit as submit
    from feedmill.reading import Missed as Missed
    from feedmill.reading import results as results
    from feedmill.shared.errors import MessageFailed as MessageFailed
    from feedmill.shared.errors import UserError as UserError
    from feedmill.shared.results import Result as Result
    from feedmill.workers.runtime.task import ClassifyTask as ClassifyTask
    from feedmill.workers.runtime.task import classify_task as classify_task

__version__ = "0.1.0"

#: Public names, each with the module that defines it.
_LAZY_NAMES = {
    "Classifier": "feedmill.api.classify",
    "ClassifyTask": "feedmill.workers.runtime.task",
    "MessageFailed": "feedmill.shared.errors",
    "Missed": "feedmill.reading",
    "Prediction": "feedmill.api.request",
    "Predictions": "feedmill.api.request",
    "Result": "feedmill.shared.results",
    "SubmittedRun": "feedmill.api.submission",
    "UserError": "feedmill.shared.errors",
    "classify": "feedmill.api.classify",
    "classify_task": "feedmill.workers.runtime.task",
    "results": "feedmill.reading",
    "submit": "feedmill.api.submission",
}
__all__ = ["__version__", *_LAZY_NAMES]  # noqa: PLE0604 - all of them are strings


def __getattr__(name: str) -> Any:
    """Import a public name's module on first use."""
    if name in _LAZY_NAMES:
        return getattr(import_module(_LAZY_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
