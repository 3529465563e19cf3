"""A call of `feedmill.classify`: its arguments, checked; its items as posts; and the predictions that it returns.

NaN, NaT, pandas.NA and None are missing text. An item that cannot be classified becomes an Item with the reason, and
does not affect the others. narwhals reads and extends the frames of pandas, polars, pyarrow, DuckDB and others.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any, NamedTuple, SupportsIndex, overload

import narwhals as nw
from tqdm import tqdm

from feedmill.producers import records
from feedmill.producers.records import DETECTED, Columns, check_columns, listed, normalize_key, parse_text, plain_id
from feedmill.shared.errors import InputError, RequestRefused, UserError, printable, sentence, truncate
from feedmill.shared.messages import ClassifyOptions, Outcome, Post, is_missing
from feedmill.tables import check_new_columns, label_columns, with_outcomes

#: Names of labels, or a dictionary from each name to its description or descriptions.
Labels = Iterable[str] | Mapping[str, Any]
#: A single item: a text, a dictionary with title and body, or a post.
OneItem = str | Mapping[str, Any] | Post
#: Classify posts: yields each post with its outcome, in order.
Engine = Callable[[Iterable[Post], ClassifyOptions], Generator[tuple[Post, Outcome]]]

#: Fields that are read of an item.
FIELDS = ("title", "body", "id")
#: The reason why an item without text has no label.
NO_TEXT = "no text"
#: Keys of a dictionary, and reasons, that a message names.
MAX_KEYS_NAMED, MAX_REASONS = 5, 3
#: Rows of a frame converted to Python objects at once.
ROWS_AT_ONCE = 10_000
#: Column with the reason why a row has no label; "" for the others, because Ray and pandas lose the type of a column
#: without values, and the Parquet files of a folder would differ.
ERROR_COLUMN = "label_error"
#: Types of columns that may hold text.
TEXT_TYPES = (nw.String, nw.Categorical, nw.Enum, nw.Object, nw.Unknown)

#: Characters of a text in a repr, and items in the repr of a list.
SHOWN_CHARACTERS, SHOWN_ITEMS = 60, 10
#: Characters of a label in the repr of a list, and labels counted in its first line.
SHOWN_LABEL, SHOWN_LABELS = 24, 6


@dataclass(frozen=True, slots=True)
class Prediction:
    """The label of one text.

    Attributes:
        label: The best label; None if the text could not be classified.
        score: The best label's score; None without a label. From 0 to 1; but with `multi_label=True`, a similarity
            model such as the included one gives cosines, from -1 to 1.
        scores: The score of every label, best first.
        text: The text that was classified: title and body, cleaned.
        id: The item's own id; None if it had none.
        error: Reason for a missing label; None if there is a label.
    """

    label: str | None
    score: float | None
    scores: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    id: str | None = None
    error: str | None = None

    def labels_above(self, threshold: float) -> list[str]:
        """Return the labels with at least this score, best first: the labels that apply, with `multi_label=True`.

        Models differ in their scores: choose the threshold by looking at the scores of some texts.
        """
        return [label for label, score in self.scores.items() if score >= threshold]

    def __repr__(self) -> str:
        if self.label is None or self.score is None:
            return f"Prediction(label=None, error={self.error!r})"
        text = truncate(self.text, SHOWN_CHARACTERS)
        return f"Prediction(label={self.label!r}, score={self.score:.3f}, text={text!r})"


class Predictions(list[Prediction]):
    """A list of predictions, in the order of the items. `to_frame()` makes a DataFrame of them.

    Attributes:
        labels: The labels of the call, in the order given; empty if unknown.
    """

    labels: tuple[str, ...] = ()

    def __init__(self, predictions: Iterable[Prediction] = (), labels: Sequence[str] = ()) -> None:
        super().__init__(predictions)
        self.labels = tuple(labels)

    def to_frame(self, *, scores: bool = False) -> Any:
        """Return a pandas DataFrame, or a polars one if only polars is installed.

        The columns are `id` (if any item has one), `text`, `label`, `label_score`, with `scores` a column
        `score_<label>` for each label in the order given, and `error` (if any item has one).

        Raises:
            feedmill.UserError: If neither package is installed.
        """
        columns: dict[str, list[Any]] = {}
        if any(each.id is not None for each in self):
            columns["id"] = [each.id for each in self]
        columns["text"] = [each.text for each in self]
        columns |= label_values(self, self.score_labels if scores else ())
        if any(each.error is not None for each in self):
            columns["error"] = [each.error for each in self]
        return make_frame(columns)

    @property
    def score_labels(self) -> Sequence[str]:
        """The labels of the call, or else those with scores."""
        return self.labels or sorted({label for each in self for label in each.scores})

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the attributes of each prediction as a dictionary, for `json.dumps`."""
        return [asdict(each) for each in self]

    def counts(self) -> dict[str | None, int]:
        """Return how many items have each label, the most frequent first; None counts items without a label."""
        return dict(Counter(each.label for each in self).most_common())

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> Prediction: ...
    @overload
    def __getitem__(self, index: slice, /) -> "Predictions": ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> "Prediction | Predictions":
        if isinstance(index, slice):
            return Predictions(super().__getitem__(index), self.labels)
        return super().__getitem__(index)

    def __repr__(self) -> str:
        lines = [self._summary(), *_lines(self[:SHOWN_ITEMS])]
        if len(self) > SHOWN_ITEMS:
            lines.append(f"… and {len(self) - SHOWN_ITEMS:,} more")
        return "\n".join(map(printable, lines))

    def _summary(self) -> str:
        """Return the number of predictions, and of each label."""
        counted = [f"{'no label' if label is None else label} {count:,}" for label, count in self.counts().items()]
        more = ", …" if len(counted) > SHOWN_LABELS else ""
        head = f"{len(self):,} prediction{'' if len(self) == 1 else 's'}"
        return f"{head}: {', '.join(counted[:SHOWN_LABELS])}{more}" if counted else head


def _cells(shown: Prediction) -> tuple[str, str, str]:
    """Return a prediction's label, score, and text or error."""
    text = truncate(" ".join(shown.text.split()), SHOWN_CHARACTERS) if shown.error is None else f"({shown.error})"
    return truncate(shown.label or "-", SHOWN_LABEL), "" if shown.score is None else f"{shown.score:.2f}", text


def _lines(shown: Iterable[Prediction]) -> list[str]:
    """Return a line for each prediction, in columns."""
    cells = [_cells(each) for each in shown]
    width = max((len(label) for label, _, _ in cells), default=0)
    return [f"  {label:<{width}} {score:>5}  {text}" for label, score, text in cells]


def label_values(found: Iterable[Prediction], labels: Sequence[str], prefix: str = "") -> dict[str, list[Any]]:
    """Return the columns of some predictions: the label, its score and the scores of `labels`."""
    names = label_columns(labels, prefix)
    rows = [(each.label, each.score, *map(each.scores.get, labels)) for each in found]
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)) if rows else {name: [] for name in names}


def make_frame(columns: Mapping[str, Sequence[Any]]) -> Any:
    """Return a frame of pandas, or of polars if only that is installed. Raises UserError if neither is."""
    for package in ("pandas", "polars"):
        with suppress(ImportError):
            return import_module(package).DataFrame(dict(columns))
    raise UserError("to_frame requires pandas or polars: run `pip install pandas`.")


class Item(NamedTuple):
    """An item to classify.

    post: the reason if it cannot be classified. id: the caller's, if any. given: the dictionary, if it was one.
    """

    post: Post | str
    id: str | None = None
    given: Mapping[Any, Any] | None = None

    def prediction(self, outcome: Mapping[str, Any]) -> Prediction:
        """Return the prediction for the item. outcome: its label and its scores, best first; or the error."""
        text = self.post.text if isinstance(self.post, Post) else ""
        if error := outcome.get("error"):
            return Prediction(None, None, text=text, id=self.id, error=error)
        label, scores = outcome["label"], outcome["scores"]
        return Prediction(label, scores[label], scores, text, self.id)


def item_of(value: object, position: int, columns: Columns) -> Item:
    """Return the item for a text, a dictionary or a post. Its post's id is the position."""
    if isinstance(value, Post):
        return Item(value, value.id)
    if isinstance(value, Mapping):
        given, by_name = value, {normalize_key(str(key)): field for key, field in value.items()}
        if problem := _missing_key(given, by_name, columns):
            return Item(problem)
    else:
        given, by_name, columns = None, {"body": value}, DETECTED
    record = {name: _plain(by_name[name]) for field in FIELDS for name in columns.names_of(field) if name in by_name}
    ids = (record.get(name) for name in columns.names_of("id"))
    own_id = next((str(plain_id(each)) for each in ids if not is_missing(each)), None)
    post = parse_text(record, str(position), columns)
    return Item(NO_TEXT if post == records.NO_TEXT else post, own_id, given)


def _missing_key(given: Mapping[Any, Any], by_name: Mapping[str, object], columns: Columns) -> str:
    """Return why a dictionary has no text, if a key is missing."""
    if missing := [name for name in columns.text.values() if name is not None and name not in by_name]:
        return f"no key {truncate(repr(missing[0]))}"
    if columns.texts_among(by_name):
        return ""
    keys = ", ".join(truncate(str(key), 40) for key in list(given)[:MAX_KEYS_NAMED])
    return f"no title or body among its keys ({keys}); name the key with title= or body="


class Table:
    """A frame of any package."""

    def __init__(self, frame: nw.DataFrame[Any]) -> None:
        self._frame = frame
        self._names = {normalize_key(str(name)): name for name in frame.columns}

    def __len__(self) -> int:
        return len(self._frame)

    def items(self, columns: Columns) -> Iterator[Item]:
        """Yield an item for each row. Raises InputError, before the first row, if no column has text."""
        if len(self._names) == 1 and not (columns.text or columns.texts_among(self._names)):
            columns = columns._replace(body=next(iter(self._names)))
        check_columns("The frame", self._frame.columns, columns, flag="{}=")
        for key in columns.texts_among(self._names):
            column = self._frame.get_column(self._names[key])
            if not isinstance(column.dtype, TEXT_TYPES) and column.null_count() < len(column):
                raise InputError(
                    f"The column {listed([self._names[key]])!r} has the type {column.dtype}, not text. Name the text "
                    "column with title= or body=, or convert the column to text first."
                )
        return self._items(columns)

    def _items(self, columns: Columns) -> Iterator[Item]:
        wanted = {name for field in FIELDS for name in columns.names_of(field)}
        read = {key: self._frame.get_column(name) for key, name in self._names.items() if key in wanted}
        for start in range(0, len(self), ROWS_AT_ONCE):
            part = [column[start : start + ROWS_AT_ONCE].to_list() for column in read.values()]
            for position, values in enumerate(zip(*part, strict=True), start):
                yield item_of(dict(zip(read, values, strict=True)), position, columns)

    def check_new(self, labels: Sequence[str], prefix: str) -> None:
        """Raise UserError if the frame has one of the columns that `labelled` adds."""
        new = [*label_columns(labels, prefix), prefix + ERROR_COLUMN]
        check_new_columns("The frame", self._frame.columns, new, "prefix=")

    def labelled(self, found: Iterable[Prediction], labels: Sequence[str], prefix: str) -> Any:
        """Return the frame with the label, its score, the scores of `labels` and the error; a missing label is None.

        The rows keep their order and their index. Raises UserError, before the first row, as `check_new` does.
        """
        self.check_new(labels, prefix)
        predictions, error = list(found), prefix + ERROR_COLUMN
        columns = label_values(predictions, labels, prefix) | {error: [each.error or "" for each in predictions]}
        types = {prefix + "label": nw.String, error: nw.String}
        new = [
            nw.new_series(name, values, types.get(name, nw.Float64), backend=self._frame.implementation)
            for name, values in columns.items()
        ]
        frame = self._frame.with_columns(*new).to_native()
        if attributes := getattr(self._frame.to_native(), "attrs", None):  # of pandas: narwhals does not copy them
            frame.attrs = attributes
        return frame


class Arrays(Table):
    """A batch of Ray Data: a dictionary of numpy arrays of equal length. Read with pandas, which Ray Data requires."""

    def __init__(self, arrays: Mapping[Any, Any]) -> None:
        self._arrays = arrays
        columns = {name: values if values.ndim == 1 else list(values) for name, values in arrays.items()}
        super().__init__(nw.from_native(import_module("pandas").DataFrame(columns), eager_only=True))

    def labelled(self, found: Iterable[Prediction], labels: Sequence[str], prefix: str) -> Any:
        """Return the dictionary with the new columns, as `Table.labelled` does. A missing score is NaN."""
        new = super().labelled(found, labels, prefix).drop(columns=list(self._arrays)).items()
        return dict(self._arrays) | {
            name: column.to_numpy() if column.dtype == float else column.to_numpy(object, na_value=None)
            for name, column in new
        }


def table_of(given: Any) -> Table | None:
    """Return a frame, a Series or arrays as a table, else None. Raises InputError for columns of one name."""
    if isinstance(given, Mapping):
        has_arrays = bool(given) and all(getattr(values, "ndim", 0) for values in given.values())
        return Arrays(given) if has_arrays else None
    allow_series = hasattr(given, "to_frame")
    try:
        frame: Any = nw.from_native(given, pass_through=True, allow_series=allow_series)
    except nw.exceptions.DuplicateError as error:
        raise InputError(f"The frame has several columns of one name ({error}). Rename all but one of them.") from None
    if isinstance(frame, nw.LazyFrame):
        frame = frame.collect()
    elif frame is given and hasattr(given, "schema") and hasattr(given, "__arrow_c_stream__"):  # batches of pyarrow
        frame = nw.from_arrow(given, backend="pyarrow")
    if isinstance(frame, nw.Series):
        frame = (frame if frame.name else frame.alias("text")).to_frame()
    return Table(frame) if isinstance(frame, nw.DataFrame) else None


def read_options(labels: Any, template: str | None, multi_label: bool) -> ClassifyOptions:
    """Return the options for labels given as Python objects. Raises UserError."""
    # Iterating a frame would yield the names of its columns.
    if isinstance(labels, str) or hasattr(labels, "columns") or not isinstance(labels, Iterable | None):
        raise UserError(
            "labels must be a list such as ['praise', 'complaint'], a column, or a dictionary of descriptions, not "
            f"{truncate(repr(labels))} ({type(labels).__name__})."
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
    """Return an array of pyarrow or numpy as a list of Python objects; other values unchanged."""
    convert = getattr(values, "to_pylist", None) or getattr(values, "tolist", None)
    return convert() if convert else values


class Request:
    """The items of one call, as posts. Raises UserError for arguments of which no item can be read.

    names: the caller's keys or columns of id, title and body, which pandas may name by numbers; None is the usual one.
    """

    def __init__(
        self,
        items: Any,
        options: ClassifyOptions,
        names: Sequence[object],
        scores: bool = False,
        prefix: str = "",
        progress: bool = False,
    ) -> None:
        self.options, self.prefix, self._scores, self._progress = options, prefix, scores, progress
        own_id, title, body = (None if name is None else str(name) for name in names)
        columns = Columns.of(own_id, title, body)
        self.table = table_of(items)
        #: The word for an item.
        self.unit = "item" if self.table is None else "row"
        self.is_single = self.table is None and isinstance(items, str | Mapping | Post)
        self.failures = Failures()
        if self.table is not None:
            self.items: Iterator[Item] = self.table.items(columns)
            self._total: int | None = len(self.table)
            return
        values = (items,) if self.is_single else _plain(items)
        if isinstance(values, bytes | bytearray) or not isinstance(values, Iterable):
            raise InputError(
                f"Cannot classify a value of type {type(items).__name__}. Give a text, a dictionary with title and "
                "body, a list of either, or a DataFrame; for a file, run `feedmill classify`."
            )
        self.items = (item_of(value, position, columns) for position, value in enumerate(values))
        self._total = len(values) if isinstance(values, Sized) else None

    def run(self, engine: Engine, labels: Sequence[str]) -> Any:
        """Classify the items and return the frame, the predictions, or the single prediction.

        labels: labels of the model, for calls without any.
        """
        labels = tuple(self.options.labels or labels)
        progress = tqdm(self.predictions(engine), desc="classifying", total=self._total, disable=not self._progress)
        found = self.failures.watch(progress)
        if self.table is not None:
            return self.table.labelled(found, labels if self._scores else (), self.prefix)
        result = Predictions(found, labels)
        if self.is_single:
            (only,) = result
            if only.error is not None:
                raise UserError(f"Cannot classify the item: {sentence(only.error)}")
            return only
        return result

    def predictions(self, engine: Engine) -> Iterator[Prediction]:
        """Yield a prediction for each item, in order. Reads the items as they are needed."""
        for item, outcome in with_outcomes(self.items, lambda posts: engine(posts, self.options)):
            yield item.prediction(vars(outcome) if outcome else {"error": item.post})


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

    def warn(self, unit: str) -> bool:
        """Warn if an item has no label, and return whether one has none. unit: the word for an item."""
        if self._failed:
            reasons = "; ".join(f"{unit} {at}: {reason.removesuffix('.')}" for at, reason in self._reasons)
            more = "; …" if self._failed > len(self._reasons) else ""
            warn(f"{self._failed:,} of {self._total:,} {unit}s have no label: {printable(reasons)}{more}.")
        return self._failed > 0


def warn(text: str) -> None:
    """Warn at the line outside of this package that made the call."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] == "feedmill":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)
