"""A call of `feedmill.classify`: its arguments, checked, and the conversion of outcomes to what the call returns."""

import re
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain, islice
from pathlib import PurePath
from typing import Any

from feedmill.api.arguments import check_switch
from feedmill.api.frames import Table, table_of
from feedmill.api.items import Item, check_text, check_types, item_of, items_of, type_of
from feedmill.api.predictions import Prediction, Predictions
from feedmill.api.progress import progress_bar
from feedmill.producers.records import Columns
from feedmill.shared.errors import InputError, RequestRefused, UserError, printable, sentence, truncate
from feedmill.shared.messages import ClassifyOptions, Outcome, Post, PostError
from feedmill.tables.labels import check_new_columns, label_columns, with_outcomes

#: Classify posts: yields each post with its outcome, in order.
Engine = Callable[[Iterable[Post], ClassifyOptions], Generator[tuple[Post, Outcome]]]
#: Reasons named in the warning about items without a label.
MAX_REASONS = 3
#: A single text that looks like the name of a file, so that it is not classified as a text.
FILE_NAME = re.compile(r"\S+\.(jsonl|ndjson|json|csv|tsv|txt|parquet|xlsx?)(\.gz|\.zst)?", re.IGNORECASE)


def read_options(labels: Any, template: str | None, multi_label: bool) -> ClassifyOptions:
    """Return the options for labels given as Python objects. Raises UserError."""
    check_switch("multi_label", multi_label)
    if isinstance(labels, str):
        names = [part.strip() for part in labels.split(",") if part.strip()] or [labels]
        raise UserError(f"labels must be a list: write labels={truncate(repr(names), 200)}.")
    if hasattr(labels, "columns"):  # iterating it would yield the names of its columns
        raise UserError(
            f"labels must be a list or a dictionary of descriptions, not a {type_of(labels)}. Give the column with the "
            "labels, such as labels=frame['name']."
        )
    if hasattr(labels, "to_pylist"):  # an array of pyarrow, whose items are not Python objects
        labels = labels.to_pylist()
    if labels is not None and not isinstance(labels, Mapping):
        if not isinstance(labels, Iterable):
            raise UserError(f"labels must be a list or a dictionary of descriptions, not {type(labels).__name__}.")
        labels = sorted(labels, key=str) if isinstance(labels, set | frozenset) else list(labels)
    if isinstance(labels, Mapping):
        labels = dict(labels)
    try:
        options = ClassifyOptions.parse({"labels": labels, "template": template, "multi_label": multi_label})
    except RequestRefused as refused:
        raise UserError(sentence(str(refused))) from None
    if options.labels and len(options.labels) == 1 and not multi_label:
        (only,) = options.labels
        warn(f"The only label is {truncate(only)!r}, so every item gets it. Name at least two labels, or set "
             "multi_label=True to use the score alone.")  # fmt: skip
    return options


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
        check_switch("scores", scores)
        check_switch("progress", progress)
        self.options, self._scores, self._prefix, self._progress = options, scores, prefix, progress
        self.table: Table | None = None
        self.is_single = isinstance(items, str | Mapping | Post)
        if isinstance(items, PurePath) or (isinstance(items, str) and FILE_NAME.fullmatch(items)):
            raise InputError(
                f"{truncate(str(items))!r} is the name of a file, and only texts are classified. Read the file first, "
                "for example with pandas.read_csv, or run `feedmill classify` on it."
            )
        self.table = None if self.is_single else table_of(items)
        if self.table is None:
            self._check_frame_arguments()
        if self.is_single:
            check_text(items, columns)
            item = item_of(items, 0, columns)
            if item.post is None:
                raise InputError(f"Cannot classify the item: {item.reason}.")
            self.items: Iterator[Item] = iter((item,))
            self._total: int | None = 1
            return
        if self.table is not None:
            self.items = check_types(self.table.items(columns), "row")
            self._total = len(self.table)
        elif isinstance(items, bytes | bytearray) or not isinstance(items, Iterable):
            raise InputError(
                f"Cannot classify a value of type {type_of(items)}. Give a text, a dictionary with title and body, a "
                "list of either, or a DataFrame."
            )
        else:
            if hasattr(items, "to_pylist"):  # an array of pyarrow, whose items are not Python objects
                items = items.to_pylist()
            self.items = check_types(items_of(items, columns), "item")
            self._total = len(items) if isinstance(items, Sized) else None
        if self._total is not None:
            # Reports wrong items before the model is loaded.
            self.items = chain(list(islice(self.items, 1)), self.items)

    def _check_frame_arguments(self) -> None:
        """Raise UserError for arguments that have no effect on items other than a frame."""
        if self._scores:
            raise UserError(
                "scores= adds columns to a DataFrame, but the items are not one. Omit it: each Prediction has "
                "`scores`, and `to_frame(scores=True)` makes a DataFrame with them."
            )
        if self._prefix:
            raise UserError("prefix= names new columns of a DataFrame, but the items are not one. Omit it.")

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to classify, and no model is needed to say so."""
        return self._total == 0 and not (self._scores and self.options.labels is None)

    def run(self, engine: Engine, labels: Sequence[str]) -> Any:
        """Classify the items and return the frame, the predictions, or the single prediction.

        labels: labels of the model, for calls without any.
        """
        labels = tuple(self.options.labels or labels)
        scores = labels if self._scores else ()
        new = None if self.table is None else LabelColumns(self.table, scores, self._prefix)  # before the work
        failures = Failures()
        with progress_bar(self._progress, "classifying", self._total) as advance:
            found = failures.watch(self.predictions(engine), advance)
            result = Predictions(found, labels) if new is None else new.add(found)
        if self.is_single:
            (only,) = result
            if only.error is not None:
                raise UserError(f"Cannot classify the item: {clause_of(only.error)}.")
            return only
        failures.warn("row" if self.table is not None else "item")
        return result

    def predictions(self, engine: Engine) -> Iterator[Prediction]:
        """Yield a prediction for each item, in order. Reads the items as they are needed."""
        for item, outcome in with_outcomes(self.items, lambda posts: engine(posts, self.options)):
            yield failed_prediction(item) if outcome is None else _prediction(item, outcome)


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
        for prediction in found:
            if prediction.error is not None:
                self._failed += 1
                if len(self._reasons) < MAX_REASONS:
                    self._reasons.append((self._total, prediction.error))
            self._total += 1
            advance(self._total)
            yield prediction

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


def failed_prediction(item: Item, reason: str = "") -> Prediction:
    """Return the prediction for an item without a label. reason: default: the item's own."""
    text = item.post.text if item.post else ""
    return Prediction(None, None, text=text, id=item.id, error=reason or item.reason)


def _prediction(item: Item, outcome: Outcome) -> Prediction:
    text = item.post.text if item.post else ""
    if isinstance(outcome, PostError):
        return failed_prediction(item, outcome.error)
    return Prediction(outcome.label, outcome.scores[outcome.label], outcome.scores, text, item.id)
