"""A call of `feedmill.classify`: its arguments, checked, and the conversion of outcomes to what the call returns."""

import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

from tqdm import tqdm

from feedmill.api.frames import table_of
from feedmill.api.items import Item, item_of
from feedmill.api.predictions import Prediction, Predictions
from feedmill.producers.records import Columns
from feedmill.shared.errors import InputError, RequestRefused, UserError, printable, sentence, truncate
from feedmill.shared.messages import ClassifyOptions, Outcome, Post
from feedmill.tables.labels import with_outcomes

#: Classify posts: yields each post with its outcome, in order.
Engine = Callable[[Iterable[Post], ClassifyOptions], Generator[tuple[Post, Outcome]]]
#: Reasons named in the warning about items without a label.
MAX_REASONS = 3


def read_options(labels: Any, template: str | None, multi_label: bool) -> ClassifyOptions:
    """Return the options for labels given as Python objects. Raises UserError."""
    # Iterating a frame would yield the names of its columns.
    if isinstance(labels, str) or hasattr(labels, "columns") or not isinstance(labels, Iterable | None):
        raise UserError(
            "labels must be a list such as ['praise', 'complaint'], a column, or a dictionary of descriptions, not "
            f"{truncate(repr(labels))} ({_type_of(labels)})."
        )
    if isinstance(labels, Mapping):
        labels = dict(labels)
    elif labels is not None:
        labels = sorted(labels, key=str) if isinstance(labels, set | frozenset) else list(_plain(labels))
    try:
        options = ClassifyOptions.parse({"labels": labels, "template": template, "multi_label": multi_label})
    except RequestRefused as refused:
        raise UserError(sentence(str(refused))) from None
    if options.labels and len(options.labels) == 1 and not multi_label:
        (only,) = options.labels
        warn(f"The only label is {truncate(only)!r}, so every item gets it. Name at least two labels, or set "
             "multi_label=True to use the score alone.")  # fmt: skip
    return options


def _plain(values: Any) -> Any:
    """Return the values of a pyarrow array, whose items are not Python objects, as a list; other values unchanged."""
    return values.to_pylist() if hasattr(values, "to_pylist") else values


def _type_of(value: object) -> str:
    """Return the name of a value's type, with the package of a type that is not built in."""
    package, name = type(value).__module__.partition(".")[0], type(value).__name__
    return name if package == "builtins" else f"{package}.{name}"


class Request:
    """The items of one call, as posts. Raises UserError for arguments of which no item can be read."""

    def __init__(
        self,
        items: Any,
        options: ClassifyOptions,
        columns: Columns,
        scores: bool = False,
        prefix: str = "",
        progress: bool = False,
    ) -> None:
        self.options, self.prefix, self._scores, self._progress = options, prefix, scores, progress
        self.is_single = isinstance(items, str | Mapping | Post)
        self.table = None if self.is_single else table_of(items)
        if self.table is not None:
            self.items: Iterator[Item] = self.table.items(columns)
            self._total: int | None = len(self.table)
            return
        values = (items,) if self.is_single else _plain(items)
        if isinstance(values, bytes | bytearray) or not isinstance(values, Iterable):
            raise InputError(
                f"Cannot classify a value of type {_type_of(items)}. Give a text, a dictionary with title and body, a "
                "list of either, or a DataFrame; for a file, run `feedmill classify`."
            )
        self.items = (item_of(value, position, columns) for position, value in enumerate(values))
        self._total = len(values) if isinstance(values, Sized) else None

    def run(self, engine: Engine, labels: Sequence[str]) -> Any:
        """Classify the items and return the frame, the predictions, or the single prediction.

        labels: labels of the model, for calls without any.
        """
        labels, failures = tuple(self.options.labels or labels), Failures()
        found = tqdm(self.predictions(engine), desc="classifying", total=self._total, disable=not self._progress)
        if self.table is not None:
            result = self.table.labelled(failures.watch(found), labels if self._scores else (), self.prefix)
        else:
            result = Predictions(failures.watch(found), labels)
        if self.is_single:
            (only,) = result
            if only.error is not None:
                raise UserError(f"Cannot classify the item: {clause_of(only.error)}.")
            return only
        failures.warn(self.unit)
        return result

    @property
    def unit(self) -> str:
        """The word for an item."""
        return "item" if self.table is None else "row"

    def predictions(self, engine: Engine) -> Iterator[Prediction]:
        """Yield a prediction for each item, in order. Reads the items as they are needed."""
        for item, outcome in with_outcomes(self.items, lambda posts: engine(posts, self.options)):
            yield prediction(item, vars(outcome) if outcome else {"error": item.reason})


class Failures:
    """The items without a label: how many, and the first reasons."""

    def __init__(self) -> None:
        self._total = self._failed = 0
        self._reasons: list[tuple[int, str]] = []

    def watch(self, found: Iterable[Prediction]) -> Iterator[Prediction]:
        """Yield the predictions and count them."""
        for each in found:
            if each.error is not None:
                self._failed += 1
                if len(self._reasons) < MAX_REASONS:
                    self._reasons.append((self._total, each.error))
            self._total += 1
            yield each

    def warn(self, unit: str) -> None:
        if self._failed:
            reasons = "; ".join(f"{unit} {at}: {clause_of(reason)}" for at, reason in self._reasons)
            more = "; …" if self._failed > len(self._reasons) else ""
            warn(f"{self._failed:,} of {self._total:,} {unit}s have no label: {printable(reasons)}{more}.")


def warn(text: str) -> None:
    """Warn at the line outside of this package that made the call."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] == "feedmill":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)


def clause_of(reason: str) -> str:
    return reason.removesuffix(".")


def prediction(item: Item, outcome: Mapping[str, Any]) -> Prediction:
    """Return the prediction for an item. outcome: its label and its scores, best first; or the error."""
    text = item.post.text if item.post else ""
    if error := outcome.get("error"):
        return Prediction(None, None, text=text, id=item.id, error=error)
    label, scores = outcome["label"], outcome["scores"]
    return Prediction(label, scores[label], scores, text, item.id)
