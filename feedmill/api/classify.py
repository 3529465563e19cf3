"""Classify in this process: `feedmill.Classifier`, and `feedmill.classify`, which keeps its models between calls."""

import os
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

from narwhals.typing import IntoDataFrameT, IntoSeries

from feedmill.api.request import Labels, OneItem, Prediction, Predictions, Request, read_options
from feedmill.local_model import load_calibrated
from feedmill.shared.errors import UserError, explain_refusals
from feedmill.shared.messages import ClassifyOptions, Outcome, Post
from feedmill.shared.settings import load_arguments

if TYPE_CHECKING:
    from feedmill.workers.pipeline.offline import OfflinePipeline

#: Models that `feedmill.classify` keeps loaded. The least recently used one is released first.
MAX_KEPT_MODELS = 2


class Classifier:
    """A model, loaded on a device of this process and ready to classify.

    `feedmill.classify` keeps its models by itself; use a Classifier to decide when a model is loaded and released.
    Several threads may use it at once. It can be the class that Ray Data's `map_batches` is given (docs/clusters.md).
    It warns only once about rows of frames without a label.

    Args:
        model: A folder with a transformers or sentence-transformers model, or a name on the Hugging Face Hub.
            Default: FEEDMILL_MODEL, else the included all-MiniLM-L6-v2.
        labels: Labels of calls that name none; see `feedmill.classify`.
        device: `cpu`, `cuda`, `cuda:1` or `mps`. Default: FEEDMILL_DEVICE, else the fastest one of this machine.
        dtype: `float32`, `bfloat16`, `float16`, or `int8` with engine `onnx`. Default: half precision where the device
            supports it.
        engine: `torch` or `onnx`.
        revision: Branch, tag or commit of a model on the Hub.

    Attributes:
        model: The model's name.
        device: The device's name: cpu, mps or cuda:0.
        labels: The labels of calls that name none.

    Raises:
        feedmill.UserError: If torch is not installed, the model or the labels are invalid, or the device is missing.

    Example:
        with feedmill.Classifier(device="cpu", labels=["praise", "complaint"]) as classifier:
            found = classifier(["I love it", "It broke"])
            subjects = classifier(["I love it", "It broke"], labels=["feelings", "things"])
            for prediction in classifier.stream(open("comments.txt")):
                print(prediction.label)
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        labels: Labels | None = None,
        device: str | None = None,
        dtype: str | None = None,
        engine: str | None = None,
        revision: str | None = None,
    ) -> None:
        self._default = read_options(labels, None, False)
        model = None if model is None else str(model)
        self._settings = load_arguments(model=model, device=device, dtype=dtype, engine=engine, revision=revision)
        loaded, budget = load_calibrated(self._settings)  # first: it explains missing packages
        from feedmill.workers.pipeline import offline  # noqa: PLC0415 - needs torch, which only workers have

        with explain_refusals(self._settings.model):
            self.labels = loaded.label_set(self._default).labels
        self.model, self.device = loaded.weights.name, loaded.device.name
        #: True after a warning about rows without a label. Later calls with frames do not warn: a job has thousands.
        self._has_warned = False
        #: Ends its threads when the last call has ended that refers to it.
        self._pipeline: OfflinePipeline | None = offline.OfflinePipeline(loaded, self._settings, budget)

    @overload
    def classify(self, items: OneItem, labels: Labels | None = None, **options: Any) -> Prediction: ...
    @overload
    def classify(self, items: IntoDataFrameT, labels: Labels | None = None, **options: Any) -> IntoDataFrameT: ...
    @overload
    def classify(self, items: IntoSeries, labels: Labels | None = None, **options: Any) -> Any: ...
    @overload
    def classify(self, items: Iterable[Any], labels: Labels | None = None, **options: Any) -> Predictions: ...
    def classify(  # type: ignore[misc]  # the overloads leave the options to this signature
        self,
        items: Any,
        labels: Any = None,
        *,
        title: Any = None,
        body: Any = None,
        id: Any = None,  # noqa: A002 - the name of the field
        template: str | None = None,
        multi_label: bool = False,
        scores: bool = False,
        prefix: str = "",
        progress: bool = False,
    ) -> Any:
        """Classify items with this model. See `feedmill.classify` for the arguments and the result."""
        options = self._options(labels, template, multi_label)
        request = Request(items, options, (id, title, body), scores, prefix, progress)
        result = request.run(self._outcomes, self.labels)
        if request.table is None or not self._has_warned:
            self._has_warned |= request.failures.warn(request.unit)
        return result

    __call__ = classify

    def stream(
        self,
        items: Iterable[Any],
        labels: Labels | None = None,
        *,
        title: Any = None,
        body: Any = None,
        id: Any = None,  # noqa: A002 - the name of the field
        template: str | None = None,
        multi_label: bool = False,
    ) -> Iterator[Prediction]:
        """Yield a Prediction for each item, in order, as it is ready.

        Reads the items as they are needed, at most FEEDMILL_WINDOW_ROWS and a message ahead, so that any number of
        them fits in memory.
        """
        request = Request(items, self._options(labels, template, multi_label), (id, title, body))
        return request.predictions(self._outcomes)

    def _options(self, labels: Labels | None, template: str | None, multi_label: bool) -> ClassifyOptions:
        return read_options(self._default.labels if labels is None else labels, template, multi_label)

    def _outcomes(self, posts: Iterable[Post], options: ClassifyOptions) -> Generator[tuple[Post, Outcome]]:
        if self._pipeline is None:
            raise UserError("This classifier is closed. Create another one.")
        with explain_refusals(self._settings.model):
            yield from self._pipeline.classify(posts, options)

    @property
    def _works(self) -> bool:
        return self._pipeline is not None and self._pipeline.failure is None

    def close(self) -> None:
        """Release the model once the running calls have ended. Later calls raise UserError."""
        self._pipeline = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self._pipeline is None else ""
        return f"<feedmill.Classifier {self.model} on {self.device}{state}>"


#: The models that `feedmill.classify` keeps, by process and settings: a forked process has none of the threads.
_kept: OrderedDict[tuple[int, str], Classifier] = OrderedDict()
_lock = threading.Lock()


def _kept_classifier(model: str | None, device: str | None) -> Classifier:
    """Return the kept model of this name on this device; load it if needed. Raises UserError."""
    key = (os.getpid(), load_arguments(model=model, device=device).model_dump_json())
    with _lock:
        if key not in _kept or not _kept[key]._works:
            _kept[key] = Classifier(model, device=device)
        _kept.move_to_end(key)
        while len(_kept) > MAX_KEPT_MODELS:
            _kept.popitem(last=False)
        return _kept[key]


@overload
def classify(items: OneItem, labels: Labels | None = None, **options: Any) -> Prediction: ...
@overload
def classify(items: IntoDataFrameT, labels: Labels | None = None, **options: Any) -> IntoDataFrameT: ...
@overload
def classify(items: IntoSeries, labels: Labels | None = None, **options: Any) -> Any: ...
@overload
def classify(items: Iterable[Any], labels: Labels | None = None, **options: Any) -> Predictions: ...
def classify(
    items: Any, labels: Any = None, *, model: str | Path | None = None, device: str | None = None, **options: Any
) -> Any:
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
        model: A folder or a name on the Hugging Face Hub. Default: FEEDMILL_MODEL, else the included
            all-MiniLM-L6-v2. Two models are kept loaded; `feedmill.Classifier` holds others.
        device: `cpu`, `cuda`, `cuda:1` or `mps`. Default: FEEDMILL_DEVICE, else the fastest one of this machine.

    Returns:
        | items | result |
        |---|---|
        | a text, or a dictionary with title and body | a `feedmill.Prediction` |
        | a list, generator or other iterable of them | `feedmill.Predictions`, a list, in the same order |
        | a pandas or polars DataFrame, a pyarrow Table or RecordBatch | a new one (of a RecordBatch, a Table) with \
the columns `label`, `label_score` and `label_error`, in the same order and with the same index |
        | a dictionary of numpy arrays | the dictionary with these columns |
        | a Series | a DataFrame of its texts and these columns |

        An item that cannot be classified has the label None; `label_error` says why, and is "" for the others. A
        warning says how many there are.

    Raises:
        feedmill.UserError: For an invalid argument, a missing package, or a model that cannot be loaded.

    Example:
        >>> import feedmill
        >>> feedmill.classify(["I love it", "It broke after a day"], labels=["praise", "complaint"])
        2 predictions: praise 1, complaint 1
          praise     0.73  I love it
          complaint  0.89  It broke after a day
    """
    classifier = _kept_classifier(None if model is None else str(model), device)
    classifier._has_warned = False
    return classifier.classify(items, labels, **options)
