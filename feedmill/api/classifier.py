"""Models held in this process: `feedmill.Classifier`, and those that `feedmill.classify` keeps between calls."""

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack, overload

from feedmill.api.arguments import Frame, FrameT, Labels, OneItem, Options, Series, naming_arguments
from feedmill.api.items import columns_of
from feedmill.api.predictions import Prediction, Predictions
from feedmill.api.request import Request, read_options
from feedmill.local_model import explain_refusals, load_model
from feedmill.shared.errors import SettingsError, UserError, truncate
from feedmill.shared.messages import ClassifyOptions, Outcome, Post
from feedmill.shared.settings import Settings, load_arguments

if TYPE_CHECKING:
    from feedmill.workers.pipeline.offline import OfflinePipeline

#: Models that `feedmill.classify` keeps loaded. The least recently used one is released first.
MAX_KEPT_MODELS = 2
_NO_OPTIONS = ClassifyOptions()


def local_settings(model: str | Path | None, device: str | None, **others: Any) -> Settings:
    """Return the settings of a model in this process. Raises SettingsError, which names the argument."""
    if not isinstance(model, str | Path | None):
        raise SettingsError(f"model= must be a name or a folder, not {truncate(repr(model))}.")
    return load_arguments(model=None if model is None else str(model), device=device, **others)


class Classifier:
    """A model, loaded on a device of this process and ready to classify.

    `feedmill.classify` keeps its models by itself; use a Classifier to decide when a model is loaded and released.
    Several threads may use it at once.

    Args:
        model: A folder with a transformers or sentence-transformers model, `package:NAME`, or a name on the Hugging
            Face Hub. Default: FEEDMILL_MODEL, else the included all-MiniLM-L6-v2.
        labels: Labels of calls that name none; see `feedmill.classify`.
        device: `cpu`, `cuda`, `cuda:1` or `mps`. Default: FEEDMILL_DEVICE, else the fastest one of this machine.
        dtype: `float32`, `bfloat16`, `float16`, or `int8` with engine `onnx`. Default: half precision where the device
            supports it.
        engine: `torch` or `onnx`.
        revision: Branch, tag or commit of a model on the Hub.

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
        options = read_options(labels, None, False)
        with naming_arguments(model=model, device=device, dtype=dtype, engine=engine, revision=revision):
            self._open(local_settings(model, device, dtype=dtype, engine=engine, revision=revision), options)

    @classmethod
    def _with(cls, settings: Settings) -> Self:
        made = cls.__new__(cls)
        made._open(settings)
        return made

    def _open(self, settings: Settings, options: ClassifyOptions = _NO_OPTIONS) -> None:
        self._settings, self._default = settings, options
        self._lock = threading.Lock()
        self._calls, self._closed = 0, False
        loaded = load_model(settings)  # first: it explains missing packages, which the imports below do not
        import torch  # noqa: PLC0415 - takes seconds, and only workers have it

        from feedmill.workers.pipeline import offline  # noqa: PLC0415 - needs torch
        from feedmill.workers.pipeline.calibration import calibrate  # noqa: PLC0415 - needs torch

        threads = torch.get_num_threads()
        try:
            with explain_refusals(settings):
                budget = calibrate(loaded, settings)
                self._labels = loaded.label_set(options).labels
        finally:
            torch.set_num_threads(threads)  # calibration uses a lane's share of the cores
        self._model, self._device = loaded.weights.name, loaded.device.name
        self._pipeline: OfflinePipeline | None = offline.OfflinePipeline(loaded, settings, budget)
        # The threads keep the model alive, even when the last reference to this object is gone. At exit, a thread in
        # the middle of a forward pass would abort the process.
        weakref.finalize(self, self._pipeline.stop)

    @property
    def model(self) -> str:
        """The model's name."""
        return self._model

    @property
    def device(self) -> str:
        """The device's name: cpu, mps or cuda:0."""
        return self._device

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of calls that name none."""
        return self._labels

    @overload
    def classify(self, items: OneItem, labels: Labels | None = None, **options: Unpack[Options]) -> Prediction: ...
    @overload
    def classify(self, items: FrameT, labels: Labels | None = None, **options: Unpack[Options]) -> FrameT: ...
    @overload
    def classify(self, items: Series, labels: Labels | None = None, **options: Unpack[Options]) -> Any: ...
    @overload
    def classify(
        self, items: Iterable[Any], labels: Labels | None = None, **options: Unpack[Options]
    ) -> Predictions: ...
    def classify(
        self,
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
    ) -> "Prediction | Predictions | Any":
        """Classify items with this model. See `feedmill.classify` for the arguments and the result."""
        options = self._options(labels, template, multi_label)
        request = Request(items, options, columns_of(title, body, id), scores, prefix, progress)
        with self._in_use():
            return self._run(request)

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
        request = Request(items, self._options(labels, template, multi_label), columns_of(title, body, id))
        return self._stream(request)

    def _options(self, labels: Labels | None, template: str | None, multi_label: bool) -> ClassifyOptions:
        return read_options(self._default.labels if labels is None else labels, template, multi_label)

    def _stream(self, request: Request) -> Iterator[Prediction]:
        with self._in_use():
            yield from request.predictions(self._outcomes)

    def _run(self, request: Request) -> Any:
        """Run a request within `_in_use`."""
        return request.run(self._outcomes, self._labels)

    def _outcomes(self, posts: Iterable[Post], options: ClassifyOptions) -> Generator[tuple[Post, Outcome]]:
        if self._pipeline:
            with explain_refusals(self._settings):
                yield from self._pipeline.classify(posts, options)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Count a call, so that closing waits for it. Raises UserError if this classifier is closed."""
        with self._lock:
            if self._closed:
                raise UserError("This classifier is closed. Create another one.")
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
            self._release()

    def _release(self) -> None:
        """Release the model if this classifier is closed and idle."""
        with self._lock:
            if self._calls or not self._closed:
                return
            pipeline, self._pipeline = self._pipeline, None
        if pipeline:
            pipeline.stop()

    @property
    def _works(self) -> bool:
        return not (self._pipeline is None or self._closed or self._pipeline.failure)

    def close(self) -> None:
        """Release the model once the running calls have ended. Later calls raise UserError."""
        self._closed = True
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        return f"<feedmill.Classifier {self._model} on {self._device}{state}>"


class KeptClassifiers:
    """The models that `feedmill.classify` keeps, by process and settings."""

    _kept: ClassVar[OrderedDict[tuple[int, str], Classifier]] = OrderedDict()
    _lock = threading.Lock()

    @classmethod
    def run(cls, settings: Settings, request: Request) -> Any:
        """Run a request with the model for these settings, which is loaded if needed. Raises UserError."""
        with ExitStack() as use:
            with cls._lock:
                found = cls._get(settings)
                use.enter_context(found._in_use())
            return found._run(request)

    @classmethod
    def _get(cls, settings: Settings) -> Classifier:
        key = (os.getpid(), settings.model_dump_json())  # a forked process has none of the threads
        found = cls._kept.get(key)
        if found is None or not found._works:
            found = cls._kept[key] = Classifier._with(settings)
        cls._kept.move_to_end(key)
        while len(cls._kept) > MAX_KEPT_MODELS:
            (process, _), oldest = cls._kept.popitem(last=False)
            if process == os.getpid():
                oldest.close()
        return found
