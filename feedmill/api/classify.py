"""Classify in this process: `feedmill.Classifier`, and `feedmill.classify`, which keeps its models
between calls.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

from narwhals.typing import IntoDataFrameT, IntoSeries

from feedmill.api.request import (
    Labels,
    OneItem,
    Prediction,
    Predictions,
    Request,
    none_for_precision,
    read_options,
)
from feedmill.local_model import load_models
from feedmill.shared.errors import UserError, explain_refusals
from feedmill.shared.messages import ClassifyOptions, Outcome, Post
from feedmill.shared.settings import load_arguments

if TYPE_CHECKING:
    from feedmill.workers.pipeline.offline import OfflinePipeline

#: Models that `feedmill.classify` keeps loaded. The least recently used one is released first.
MAX_KEPT_MODELS = 2


class Classifier:
    """A model, loaded on a device of this process and ready to classify.

    `feedmill.classify` keeps its models by itself; use a Classifier to decide when a model is
    loaded and released. Several threads may use it at once. It can be the class that Ray Data's
    `map_batches` is given (docs/clusters.md). It warns only once about rows of frames without a
    label.

    Args:
        model: A folder with a transformers or sentence-transformers model, or a name on the
            Hugging Face Hub. Default: FEEDMILL_MODEL, else the included all-MiniLM-L6-v2.
        labels: Labels of calls that name none; see `feedmill.classify`.
        device: `cpu`, `cuda`, `cuda:1` or `mps`; `cuda:0+1` for a model that does not fit one GPU.
            Default: FEEDMILL_DEVICE, else the fastest one of this machine.
        devices: Several devices, each with a copy of the model, which share the items: `all`, GPUs
            such as `0,2`, or `cpu:2` for two halves of the cores. Default: FEEDMILL_DEVICES, else
            the one in `device`.
        dtype: `float32`, `bfloat16`, `float16`, or `int8` with engine `onnx`. Default: half
            precision where the device supports it.
        engine: `torch`, `onnx` or `tensorrt`.
        revision: Branch, tag or commit of a model on the Hub.
        languages: Languages that the model was made for, such as "en,de": items in others get no
            label, and each prediction has its `language`. Needs `pip install
            'feedmill[languages]'`. Default: FEEDMILL_LANGUAGES, else any language.

    Attributes:
        model: The model's name.
        device: The device's name: cpu, mps or cuda:0; of several, separated by commas.
        labels: The labels of calls that name none.

    Raises:
        feedmill.UserError: If torch is not installed, the model or the labels are invalid, or the
            device is missing.

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
        devices: str | None = None,
        dtype: str | None = None,
        engine: str | None = None,
        revision: str | None = None,
        languages: str | None = None,
    ) -> None:
        self._default = read_options(labels, None, False)
        self._settings = load_arguments(
            model=None if model is None else str(model),
            device=device,
            devices=devices,
            dtype=dtype,
            engine=engine,
            revision=revision,
            languages=languages,
        )
        models = load_models(self._settings)  # first: it explains missing packages
        # Needs torch, which only workers have.
        from feedmill.workers.pipeline import offline  # noqa: PLC0415

        classifier = models[0].classifier
        with explain_refusals(self._settings.model):
            label_set = classifier.label_set(self._default)
        self.labels = label_set.labels
        self.model = classifier.weights.name
        self.device = ",".join(loaded.classifier.device.name for loaded in models)
        #: True after a warning about items without a label.
        self._has_warned = False
        #: Ends its threads when the last call has ended that refers to it.
        self._pipeline: OfflinePipeline | None = offline.OfflinePipeline(
            models, self._settings
        )

    @overload
    def classify(
        self, items: OneItem, labels: Labels | None = None, **options: Any
    ) -> Prediction: ...
    @overload
    def classify(
        self, items: IntoDataFrameT, labels: Labels | None = None, **options: Any
    ) -> IntoDataFrameT: ...
    @overload
    def classify(
        self, items: IntoSeries, labels: Labels | None = None, **options: Any
    ) -> Any: ...
    @overload
    def classify(
        self, items: Iterable[Any], labels: Labels | None = None, **options: Any
    ) -> Predictions: ...
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
        none: float | bool | None = None,
        precision: float | None = None,
        scores: bool = False,
        prefix: str = "",
        progress: bool = False,
    ) -> Any:
        """Classify items with this model.

        See `feedmill.classify` for the arguments and the result.
        """
        if precision is not None:
            none = none_for_precision(precision, none, multi_label)
        options = self._options(labels, template, multi_label, none)
        request = Request(
            items,
            options,
            names=(id, title, body),
            precision=precision,
            scores=scores,
            prefix=prefix,
            progress=progress,
            has_languages=self._settings.languages is not None,
        )
        result = request.run(self._outcomes, self.labels)
        self._warn_of_failures(request)
        return result

    def _warn_of_failures(self, request: Request) -> None:
        """Warn of items without a label; of rows of frames only once, because a job may classify
        thousands of frames.
        """
        if request.table is not None and self._has_warned:
            return
        if request.failures.warn(request.unit):
            self._has_warned = True

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
        none: float | bool | None = None,
    ) -> Iterator[Prediction]:
        """Yield a Prediction for each item, in order, as it is ready.

        Reads the items as they are needed, at most FEEDMILL_WINDOW_ROWS and a message ahead, so
        that any number of them fits in memory.
        """
        options = self._options(labels, template, multi_label, none)
        request = Request(items, options, names=(id, title, body))
        return request.predictions(self._outcomes)

    def _options(
        self,
        labels: Labels | None,
        template: str | None,
        multi_label: bool,
        none: float | bool | None,
    ) -> ClassifyOptions:
        if labels is None:
            labels = self._default.labels
        return read_options(labels, template, multi_label, none)

    def _outcomes(
        self, posts: Iterable[Post], options: ClassifyOptions
    ) -> Generator[tuple[Post, Outcome]]:
        if self._pipeline is None:
            raise UserError("This classifier is closed. Create another one.")
        with explain_refusals(self._settings.model):
            yield from self._pipeline.classify(posts, options)

    @property
    def _works(self) -> bool:
        if self._pipeline is None:
            return False
        return self._pipeline.failure is None

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


#: The models that `feedmill.classify` keeps, by process and settings: a forked process has none of
#: the threads.
_kept: OrderedDict[tuple[int, str], Classifier] = OrderedDict()
_lock = threading.Lock()


def _kept_classifier(
    model: str | None, device: str | None, languages: str | None
) -> Classifier:
    """Return the kept model of this name on this device, for these languages; load it if needed.

    Raises UserError.
    """
    settings = load_arguments(model=model, device=device, languages=languages)
    key = (os.getpid(), settings.model_dump_json())
    with _lock:
        classifier = _kept.get(key)
        if classifier is None or not classifier._works:
            classifier = Classifier(model, device=device, languages=languages)
            _kept[key] = classifier
        _kept.move_to_end(key)
        while len(_kept) > MAX_KEPT_MODELS:
            _kept.popitem(last=False)
        return classifier


@overload
def classify(
    items: OneItem, labels: Labels | None = None, **options: Any
) -> Prediction: ...
@overload
def classify(
    items: IntoDataFrameT, labels: Labels | None = None, **options: Any
) -> IntoDataFrameT: ...
@overload
def classify(
    items: IntoSeries, labels: Labels | None = None, **options: Any
) -> Any: ...
@overload
def classify(
    items: Iterable[Any], labels: Labels | None = None, **options: Any
) -> Predictions: ...
def classify(
    items: Any,
    labels: Any = None,
    *,
    model: str | Path | None = None,
    device: str | None = None,
    languages: str | None = None,
    **options: Any,
) -> Any:
    """Classify texts, dictionaries or a DataFrame in this process, without Redis or a worker.

    Needs `pip install 'feedmill[worker]'`. The first call loads the model, which takes some
    seconds; later calls with the same model and device reuse it. Several threads may call it at
    once.

    Args:
        items: What to classify. A missing value (None, NaN) is an item without text.
        labels: Names of the labels, or a dictionary from each name to a description or a list of
            descriptions. Default: FEEDMILL_LABELS, else sixteen topics; or the model's own labels,
                if it was trained with some.
        title: Key or column with the title. Default: `title`, `headline` or `subject`.
        body: Key or column with the text. Default: `body`, `selftext`, `text`, `description` or
            `content`. With `title` or `body`, only the columns named by them are read.
        id: Key or column with an id, which is copied to the prediction. Default: `id` or
            `post_id`.
        template: Sentence with `{}` in place of the label, such as "This post is about {}."
        multi_label: Score each label by itself, so that several or none may apply.
        none: Give no label to items that fit none of them: those whose best label has a lower
            score than this, from 0 to 1. True is the model's default, 0.36 for the included one,
            whose scores then say how likely a label is right; False gives each item a label.
            Default: FEEDMILL_NONE, else False.
        precision: Instead of `none`, the share of the given labels that shall be right, such as
            0.9: the scores of all items together choose the threshold. An expectation, not a
            promise, and only for models whose scores are calibrated, such as the included one.
        scores: Add a column `score_<label>` for each label to a DataFrame.
        prefix: Text before the name of each new column of a DataFrame.
        progress: Show a progress bar, in a terminal or a notebook.
        model: A folder or a name on the Hugging Face Hub. Default: FEEDMILL_MODEL, else the
            included all-MiniLM-L6-v2. Two models are kept loaded; `feedmill.Classifier` holds
            others.
        device: `cpu`, `cuda`, `cuda:1` or `mps`. Default: FEEDMILL_DEVICE, else the fastest one of
            this machine.
        languages: Languages that the model was made for, such as "en,de". Items in others, as
            detected from their texts, get no label; items whose language is uncertain are
            labelled as usual. A DataFrame gets the columns `language` and `best_label`. Needs `pip
            install 'feedmill[languages]'`. Default: FEEDMILL_LANGUAGES, else any language.

    Returns:
        | items | result |
        |---|---|
        | a text, or a dictionary with title and body | a `feedmill.Prediction` |
        | a list, generator or other iterable of them | `feedmill.Predictions`, in the same order |
        | a pandas or polars DataFrame, a pyarrow Table or RecordBatch | a new one (of a \
RecordBatch, a Table) with the columns `label`, `label_score` and `label_error`, in the same \
order and with the same index |
        | a dictionary of numpy arrays | the dictionary with these columns |
        | a Series | a DataFrame of its texts and these columns |

        An item that cannot be classified has the label None; `label_error` says why, and is "" for
        the others. A warning says how many there are.

    Raises:
        feedmill.UserError: For an invalid argument, a missing package, or a model that cannot be
            loaded.

    Example:
        >>> import feedmill
        >>> labels = ["praise", "complaint"]
        >>> feedmill.classify(["I love it", "It broke after a day"], labels=labels)
        2 predictions: praise 1, complaint 1
          praise     0.73  I love it
          complaint  0.89  It broke after a day
    """
    name = None if model is None else str(model)
    classifier = _kept_classifier(name, device, languages)
    classifier._has_warned = False
    return classifier.classify(items, labels, **options)
