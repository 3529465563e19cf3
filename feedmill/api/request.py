"""A call of `feedmill.classify`: its arguments, checked, and the conversion of outcomes to what the call returns."""

import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from feedmill.api.frames import Table, table_of
from feedmill.api.items import Item, item_of, type_of
from feedmill.api.predictions import Prediction, Predictions
from feedmill.producers.records import Columns
from feedmill.shared.errors import InputError, RequestRefused, UserError, printable, sentence, truncate
from feedmill.shared.messages import ClassifyOptions, Outcome, Post, PostError
from feedmill.tables.labels import check_new_columns, label_columns, with_outcomes

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
            f"{truncate(repr(labels))} ({type_of(labels)})."
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
                f"Cannot classify a value of type {type_of(items)}. Give a text, a dictionary with title and body, a "
                "list of either, or a DataFrame; for a file, run `feedmill classify`."
            )
        self.items = (item_of(value, position, columns) for position, value in enumerate(values))
        self._total = len(values) if isinstance(values, Sized) else None

    def run(self, engine: Engine, labels: Sequence[str]) -> Any:
        """Classify the items and return the frame, the predictions, or the single prediction.

        labels: labels of the model, for calls without any.
        """
        labels = tuple(self.options.labels or labels)
        scores = labels if self._scores else ()
        new = None if self.table is None else LabelColumns(self.table, scores, self.prefix)  # before the work
        failures = Failures()
        with progress_bar(self._progress, "classifying", self._total) as advance:
            found = failures.watch(self.predictions(engine), advance)
            result = Predictions(found, labels) if new is None else new.add(found)
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
            if outcome is None or isinstance(outcome, PostError):
                yield failed_prediction(item, outcome.error if outcome else "")
            else:
                yield prediction(item, outcome.label, outcome.scores)


class LabelColumns:
    """The columns that are added to a frame. scores: labels with a column of their own. prefix: of the names."""

    def __init__(self, table: Table, scores: Sequence[str], prefix: str) -> None:
        """Raise UserError if the frame has one of the columns."""
        self._table, self._scores, self._names = table, scores, label_columns(scores, prefix)
        check_new_columns("The frame", table.names, self._names, "prefix=")

    def add(self, found: Iterable[Prediction]) -> Any:
        """Return the frame with the columns. Holds one text and a few numbers for each row."""
        rows = [(each.label, each.score, *map(each.scores.get, self._scores)) for each in found]
        columns = zip(*rows, strict=True) if rows else [()] * len(self._names)
        return self._table.with_columns(dict(zip(self._names, map(list, columns), strict=True)))


class Failures:
    """The items without a label: how many, and the first reasons."""

    def __init__(self) -> None:
        self._total = self._failed = 0
        self._reasons: list[tuple[int, str]] = []

    def watch(self, found: Iterable[Prediction], advance: Callable[[int], None]) -> Iterator[Prediction]:
        """Yield the predictions and count them."""
        for each in found:
            if each.error is not None:
                self._failed += 1
                if len(self._reasons) < MAX_REASONS:
                    self._reasons.append((self._total, each.error))
            self._total += 1
            advance(self._total)
            yield each

    def warn(self, unit: str) -> None:
        if self._failed:
            reasons = "; ".join(f"{unit} {at}: {clause_of(reason)}" for at, reason in self._reasons)
            more = "; …" if self._failed > len(self._reasons) else ""
            warn(f"{self._failed:,} of {self._total:,} {unit}s have no label: {printable(reasons)}{more}.")


@contextmanager
def progress_bar(shown: bool, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a bar on standard error until the block ends, and yield a function that moves it to a number of items.

    total: number of items; None if unknown.
    """
    with tqdm(desc=what, total=total, disable=not shown) as bar:
        yield lambda done: bar.update(done - bar.n) and None


def warn(text: str) -> None:
    """Warn at the line outside of this package that made the call."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] == "feedmill":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)


def clause_of(reason: str) -> str:
    return reason.removesuffix(".")


def prediction(item: Item, label: str, scores: Mapping[str, float]) -> Prediction:
    """Return the prediction for an item with a label. scores: best first."""
    return Prediction(label, scores[label], scores, item.post.text if item.post else "", item.id)


def failed_prediction(item: Item, reason: str = "") -> Prediction:
    """Return the prediction for an item without a label. reason: default: the item's own."""
    text = item.post.text if item.post else ""
    return Prediction(None, None, text=text, id=item.id, error=reason or item.reason)
