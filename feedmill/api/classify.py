"""The function `feedmill.classify`: classify in this process, with a model that is kept for the next call."""

from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, Unpack, overload

from feedmill.api.arguments import (
    Frame,
    FrameT,
    Labels,
    ModelOptions,
    OneItem,
    Series,
    naming_arguments,
)
from feedmill.api.classifier import KeptClassifiers, local_settings
from feedmill.api.items import columns_of
from feedmill.api.predictions import Prediction, Predictions
from feedmill.api.request import Request, read_options
from feedmill.shared.messages import ClassifyOptions, Outcome, Post


@overload
def classify(items: OneItem, labels: Labels | None = None, **options: Unpack[ModelOptions]) -> Prediction: ...
@overload
def classify(items: FrameT, labels: Labels | None = None, **options: Unpack[ModelOptions]) -> FrameT: ...
@overload
def classify(items: Series, labels: Labels | None = None, **options: Unpack[ModelOptions]) -> Any: ...
@overload
def classify(items: Iterable[Any], labels: Labels | None = None, **options: Unpack[ModelOptions]) -> Predictions: ...
def classify(
    items: "OneItem | Frame | Series | Iterable[Any]",
    labels: Labels | None = None,
    *,
    title: Any = None,
    body: Any = None,
    id: Any = None,  # noqa: A002 - the name of the field
    template: str | None = None,
    multi_label: bool = False,
    scores: bool = False,
    prefix: str = "",
    progress: bool = False,
    model: str | Path | None = None,
    device: str | None = None,
) -> "Prediction | Predictions | Any":
    """Classify texts, dictionaries or a DataFrame in this process, without Redis or a worker.

    Needs `pip install 'feedmill[worker]'`. The first call loads the model, which takes some seconds; later calls with
    the same model and device reuse it. Several threads may call it at once.

    Args:
        items: What to classify. A missing value (None, NaN) is an item without text.
        labels: Names of the labels, or a dictionary from each name to a description or a list of descriptions.
            Default: FEEDMILL_LABELS, else sixteen topics; or the model's own labels, if it was trained with some.
        title: Key or column with the title. Default: `title`, `headline` or `subject`.
        body: Key or column with the text. Default: `body`, `selftext`, `text`, `description` or `content`. With
            `title` or `body`, only the columns named by them are read.
        id: Key or column with an id, which is copied to the prediction. Default: `id` or `post_id`.
        template: Sentence with `{}` in place of the label, such as "This post is about {}."
        multi_label: Score each label by itself, so that several or none may apply.
        scores: Add a column `score_<label>` for each label to a DataFrame.
        prefix: Text before the name of each new column of a DataFrame.
        progress: Show a progress bar, in a terminal or a notebook.
        model: A folder, `package:NAME` or a name on the Hugging Face Hub. Default: FEEDMILL_MODEL, else the included
            all-MiniLM-L6-v2. Two models are kept loaded; `feedmill.Classifier` holds others.
        device: `cpu`, `cuda`, `cuda:1` or `mps`. Default: FEEDMILL_DEVICE, else the fastest one of this machine.

    Returns:
        | items | result |
        |---|---|
        | a text, or a dictionary with title and body | a `feedmill.Prediction` |
        | a list, generator or other iterable of them | `feedmill.Predictions`, a list, in the same order |
        | a pandas or polars DataFrame | a new one with the columns `label` and `label_score`, in the same order and \
with the same index |
        | a Series | a DataFrame of its texts, `label` and `label_score` |

        An item that cannot be classified has the label None. A warning says how many there are, and why.

    Raises:
        feedmill.UserError: For an invalid argument, a missing package, or a model that cannot be loaded.

    Example:
        >>> import feedmill
        >>> feedmill.classify(["I love it", "It broke after a day"], labels=["praise", "complaint"])
        2 predictions: praise 1, complaint 1
          praise     0.73  I love it
          complaint  0.89  It broke after a day
    """
    options = read_options(labels, template, multi_label)
    settings = local_settings(model, device)
    request = Request(items, options, columns_of(title, body, id), scores, prefix, progress)
    if request.is_empty:
        return request.run(_no_outcomes, ())
    with naming_arguments(model=model, device=device):
        return KeptClassifiers.run(settings, request)


def _no_outcomes(posts: Iterable[Post], options: ClassifyOptions) -> Generator[tuple[Post, Outcome]]:  # noqa: ARG001
    """Classify no posts."""
    yield from ()
