"""A call of `feedmill.classify`: its arguments, checked; its items as posts; and the predictions
that it returns.

NaN, NaT, pandas.NA and None are missing text. An item that cannot be classified becomes an Item
with the reason, and does not affect the others. narwhals reads and extends the frames of pandas,
polars, pyarrow, DuckDB and others.
"""

import sys
import warnings
from collections import Counter
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from itertools import islice
from typing import Any, NamedTuple, SupportsIndex, overload

import narwhals as nw
from tqdm import tqdm

from feedmill.producers import records
from feedmill.producers.records import (
    DETECTED,
    Columns,
    check_columns,
    listed,
    normalize_key,
    parse_text,
    plain_id,
)
from feedmill.shared.errors import (
    InputError,
    RequestRefused,
    UserError,
    printable,
    sentence,
    truncate,
)
from feedmill.shared.messages import (
    ClassifyOptions,
    Outcome,
    Post,
    applying_labels,
    is_missing,
    labels_above,
)
from feedmill.shared.none_of_these import precise_threshold
from feedmill.tables import LabelColumns, check_new_columns, with_outcomes

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
MAX_KEYS_NAMED = 5
MAX_REASONS = 3
#: Rows of a frame converted to Python objects at once.
ROWS_AT_ONCE = 10_000
#: Column with the reason why a row has no label; "" for the others, because Ray and pandas lose
#: the type of a column without values, and the Parquet files of a folder would differ.
ERROR_COLUMN = "label_error"
#: Types of columns that may hold text.
TEXT_TYPES = (nw.String, nw.Categorical, nw.Enum, nw.Object, nw.Unknown)

#: Characters of a text in a repr, and items in the repr of a list.
SHOWN_CHARACTERS = 60
SHOWN_ITEMS = 10
#: Rows of the table in a notebook: as many as pandas shows of a frame.
SHOWN_ROWS = 60
#: Characters of a label in the repr of a list, and labels counted in its first line.
SHOWN_LABEL = 24
SHOWN_LABELS = 6


@dataclass(frozen=True, slots=True)
class Prediction:
    """The label of one text.

    Attributes:
        label: The best label; None if the text could not be classified, if it fits no label,
            which the argument `none` allows, or if it is in none of the `languages`.
        score: The best label's score, also if it does not fit; None if the text could not be
            classified. From 0 to 1; but with `multi_label=True`, a similarity model such as the
            included one gives cosines, from -1 to 1.
        scores: The score of every label, best first.
        text: The text that was classified: title and body, cleaned.
        id: The item's own id; None if it had none.
        error: Reason why the text could not be classified; None if it was.
        best_label: The label with the highest score; None if the text could not be classified.
        language: The text's language, an ISO 639 code such as en; None if it is uncertain, or
            without `languages`.
        labels_threshold: With `multi_label`, the score from which a label applies; else None.
        labels: The labels that apply, best first: with `multi_label`, any number of them.
    """

    label: str | None
    score: float | None
    scores: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    id: str | None = None
    error: str | None = None
    language: str | None = None
    labels_threshold: float | None = None

    @property
    def labels(self) -> list[str]:
        """The labels that apply, best first."""
        return applying_labels(self.label, self.scores, self.labels_threshold)

    @property
    def best_label(self) -> str | None:
        """The label with the highest score, also if it does not fit."""
        if self.label is not None:
            return self.label
        return next(iter(self.scores), None)

    def labels_above(self, threshold: float) -> list[str]:
        """Return the labels with at least this score, best first, for another threshold than that
        of `labels`.

        Models differ in their scores: choose the threshold by looking at the scores of some texts.
        """
        return labels_above(self.scores, threshold)

    def __repr__(self) -> str:
        if self.score is None:
            return f"Prediction(label=None, error={self.error!r})"
        text = truncate(self.text, SHOWN_CHARACTERS)
        label = f"label={self.label!r}"
        if self.label is None:
            label += f", best_label={self.best_label!r}"
        fields = (
            label,
            f"score={self.score:.3f}",
            f"text={text!r}",
        )
        listed_fields = ", ".join(fields)
        return f"Prediction({listed_fields})"


class Predictions(list[Prediction]):
    """A list of predictions, in the order of the items.

    `to_frame()` makes a DataFrame of them, which notebooks show.

    Attributes:
        labels: The labels of the call, in the order given; empty if unknown.
    """

    labels: tuple[str, ...] = ()
    #: The options of the call, which decide on the columns of a frame.
    _options: ClassifyOptions = ClassifyOptions()

    def __init__(
        self,
        predictions: Iterable[Prediction] = (),
        labels: Sequence[str] = (),
        options: ClassifyOptions | None = None,
    ) -> None:
        super().__init__(predictions)
        self.labels = tuple(labels)
        if options is not None:
            self._options = options

    def to_frame(self, *, scores: bool = False) -> Any:
        """Return a pandas DataFrame, or a polars one if only polars is installed.

        The columns are `id` (if any item has one), `text`, `label`, `label_score`, `best_label`
        (of a call with `none` or `precision`), `labels` (of a call with `multi_label`: the list of
        all labels that apply, best first), `language` (if any item has one), with `scores` a
        column `score_<label>` for each label in the order given, and `error` (if any item has
        one).

        Raises:
            feedmill.UserError: If neither package is installed.
        """
        ids = [prediction.id for prediction in self]
        texts = [prediction.text for prediction in self]
        errors = [prediction.error for prediction in self]
        score_labels: Sequence[str] = ()
        if scores:
            score_labels = self.score_labels
        columns: dict[str, list[Any]] = {}
        if any(item_id is not None for item_id in ids):
            columns["id"] = ids
        columns["text"] = texts
        label_columns = LabelColumns(score_labels=score_labels)
        label_columns = label_columns.of(self._options, self._has_languages)
        columns.update(label_values(self, label_columns))
        if any(error is not None for error in errors):
            columns["error"] = errors
        return make_frame(columns)

    @property
    def _has_languages(self) -> bool:
        """True if any item has a language."""
        return any(prediction.language is not None for prediction in self)

    @property
    def score_labels(self) -> Sequence[str]:
        """The labels of the call, or else those with scores."""
        if self.labels:
            return self.labels
        labels: set[str] = set()
        for prediction in self:
            labels.update(prediction.scores)
        return sorted(labels)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the attributes of each prediction as a dictionary, for `json.dumps`.

        `best_label`, `labels` and `language` are there if `to_frame` has such a column.
        """
        columns = LabelColumns().of(self._options, self._has_languages)
        further = (columns.best_label, columns.labels, columns.language)
        dictionaries: list[dict[str, Any]] = []
        for prediction in self:
            dictionary = asdict(prediction)
            del dictionary["language"]
            del dictionary["labels_threshold"]
            values = columns.values(prediction)
            for name, value in zip(columns.names, values, strict=True):
                if name in further:
                    dictionary[name] = value
            dictionaries.append(dictionary)
        return dictionaries

    def counts(self) -> dict[str | None, int]:
        """Return how many items have each label, the most frequent first; None counts items
        without a label.
        """
        counts = Counter(prediction.label for prediction in self)
        return dict(counts.most_common())

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> Prediction: ...
    @overload
    def __getitem__(self, index: slice, /) -> "Predictions": ...
    def __getitem__(
        self, index: SupportsIndex | slice, /
    ) -> "Prediction | Predictions":
        if isinstance(index, slice):
            part = super().__getitem__(index)
            return Predictions(part, self.labels, self._options)
        return super().__getitem__(index)

    def __repr__(self) -> str:
        shown = self[:SHOWN_ITEMS]
        summary = self._summary()
        lines = [summary, *_format_lines(shown)]
        others = len(self) - len(shown)
        if others:
            lines.append(f"… and {others:,} more")
        return "\n".join(map(printable, lines))

    def _repr_html_(self) -> str | None:
        """Return the table that notebooks show: that of `to_frame()` for the first SHOWN_ROWS
        items.

        Return None, so that notebooks show the text, if neither pandas nor polars is installed, or
        if the options of pandas turn its tables off.
        """
        shown = self[:SHOWN_ROWS]
        try:
            frame = shown.to_frame()
        except UserError:
            return None
        table: str | None = frame._repr_html_()
        if table is None:
            return None
        others = len(self) - len(shown)
        if others:
            table += f"<p>… and {others:,} more</p>"
        return table

    def _summary(self) -> str:
        """Return the number of predictions, and of each label."""
        total = len(self)
        unit = "prediction" if total == 1 else "predictions"
        summary = f"{total:,} {unit}"
        counts = self.counts()
        if not counts:
            return summary
        parts = []
        first_counts = islice(counts.items(), SHOWN_LABELS)
        for label, count in first_counts:
            name = label
            if label is None:
                name = "no label"
            parts.append(f"{name} {count:,}")
        if len(counts) > SHOWN_LABELS:
            parts.append("…")
        listed_counts = ", ".join(parts)
        return f"{summary}: {listed_counts}"


def _cells(prediction: Prediction) -> tuple[str, str, str]:
    """Return a prediction's label, score, and text or error."""
    label = prediction.label or "-"
    label = truncate(label, SHOWN_LABEL)
    score = ""
    if prediction.score is not None:
        score = f"{prediction.score:.2f}"
    if prediction.error is not None:
        return label, score, f"({prediction.error})"
    words = prediction.text.split()
    line = " ".join(words)
    text = truncate(line, SHOWN_CHARACTERS)
    return label, score, text


def _format_lines(predictions: Iterable[Prediction]) -> list[str]:
    """Return a line for each prediction, in columns."""
    rows = [_cells(prediction) for prediction in predictions]
    widths = [len(label) for label, _, _ in rows]
    width = max(widths, default=0)
    lines = []
    for label, score, text in rows:
        cells = f"{label:<{width}} {score:>5}  {text}"
        lines.append(f"  {cells}")
    return lines


def label_values(
    found: Iterable[Prediction], columns: LabelColumns
) -> dict[str, list[Any]]:
    """Return the columns of the label of some predictions, by name."""
    by_name: dict[str, list[Any]] = {name: [] for name in columns.names}
    for prediction in found:
        values = columns.values(prediction)
        for name, value in zip(columns.names, values, strict=True):
            by_name[name].append(value)
    return by_name


def make_frame(columns: Mapping[str, Sequence[Any]]) -> Any:
    """Return a frame of pandas, or of polars if only that is installed.

    Raises UserError if neither is.
    """
    for name in ("pandas", "polars"):
        try:
            package = import_module(name)
        except ImportError:
            continue
        series = dict(columns)
        return package.DataFrame(series)
    raise UserError("to_frame requires pandas or polars: run `pip install pandas`.")


class Item(NamedTuple):
    """An item to classify.

    post: the reason if it cannot be classified. id: the caller's, if any. given: the dictionary,
    if it was one.
    """

    post: Post | str
    id: str | None = None
    given: Mapping[Any, Any] | None = None

    def prediction(self, outcome: Mapping[str, Any]) -> Prediction:
        """Return the prediction for the item. outcome: its label and its scores, best first; or
        the error.
        """
        text = ""
        if isinstance(self.post, Post):
            text = self.post.text
        error = outcome.get("error")
        if error:
            return Prediction(
                label=None,
                score=None,
                text=text,
                id=self.id,
                error=error,
            )
        scores = outcome["scores"]
        best = next(iter(scores))
        return Prediction(
            label=outcome["label"],
            score=scores[best],
            scores=scores,
            text=text,
            id=self.id,
            language=outcome.get("language"),
            labels_threshold=outcome.get("labels_threshold"),
        )


def item_of(value: object, position: int, columns: Columns) -> Item:
    """Return the item for a text, a dictionary or a post. Its post's id is the position."""
    if isinstance(value, Post):
        return Item(value, value.id)
    dictionary: Mapping[Any, Any] | None = None
    by_name: dict[str, Any] = {}
    if isinstance(value, Mapping):
        dictionary = value
        for key, field_value in dictionary.items():
            name = normalize_key(str(key))
            by_name[name] = field_value
        problem = _missing_key(dictionary, by_name, columns)
        if problem:
            return Item(problem, _own_id(by_name, columns))
    else:
        by_name["body"] = value
        columns = DETECTED
    record = {}
    for name in _names_read(columns):
        if name in by_name:
            field_value = by_name[name]
            record[name] = _plain(field_value)
    post_id = str(position)
    post = parse_text(record, post_id, columns)
    if post == records.NO_TEXT:
        post = NO_TEXT
    return Item(
        post=post,
        id=_own_id(record, columns),
        given=dictionary,
    )


def _names_read(columns: Columns) -> list[str]:
    """Return the names of all keys that are read of an item."""
    names: list[str] = []
    for field_name in FIELDS:
        names += columns.names_of(field_name)
    return names


def _own_id(record: Mapping[str, object], columns: Columns) -> str | None:
    """Return the caller's id of an item; None if it has none."""
    for name in columns.names_of("id"):
        raw_id = record.get(name)
        if not is_missing(raw_id):
            return str(plain_id(raw_id))
    return None


def _missing_key(
    dictionary: Mapping[Any, Any], by_name: Mapping[str, object], columns: Columns
) -> str:
    """Return why a dictionary has no text, if a key is missing."""
    for name in columns.text.values():
        if name is not None and name not in by_name:
            key = truncate(repr(name))
            return f"no key {key}"
    if columns.texts_among(by_name):
        return ""
    first_keys = islice(dictionary, MAX_KEYS_NAMED)
    texts = [truncate(str(key), 40) for key in first_keys]
    keys = ", ".join(texts)
    return (
        f"no title or body among its keys ({keys}); name the key with title= or body="
    )


class FrameTable:
    """A frame of any package."""

    def __init__(self, frame: nw.DataFrame[Any]) -> None:
        self._frame = frame
        #: Normalized name -> the frame's name of a column.
        self._names: dict[str, str] = {}
        for name in frame.columns:
            self._names[normalize_key(str(name))] = name

    def __len__(self) -> int:
        return len(self._frame)

    def items(self, columns: Columns) -> Iterator[Item]:
        """Yield an item for each row.

        Raises InputError, before the first row, if no column has text.
        """
        names = self._names
        has_text = columns.text or columns.texts_among(names)
        if len(names) == 1 and not has_text:
            (only_key,) = names
            columns = columns._replace(body=only_key)
        check_columns(
            "The frame",
            self._frame.columns,
            columns,
            flag="{}=",
        )
        for key in columns.texts_among(names):
            self._check_type(names[key])
        return self._items(columns)

    def _check_type(self, name: str) -> None:
        """Raise InputError for a column of texts that has values of another type."""
        column = self._frame.get_column(name)
        has_values = column.null_count() < len(column)
        if isinstance(column.dtype, TEXT_TYPES) or not has_values:
            return
        quoted = listed([name])
        raise InputError(
            f"The column {quoted!r} has the type {column.dtype}, not text. Name the text column "
            "with title= or body=, or convert the column to text first."
        )

    def _items(self, columns: Columns) -> Iterator[Item]:
        names_read = _names_read(columns)
        keys = [key for key in self._names if key in names_read]
        series: list[nw.Series[Any]] = []
        for key in keys:
            name = self._names[key]
            column = self._frame.get_column(name)
            series.append(column)
        starts = range(0, len(self), ROWS_AT_ONCE)
        for start in starts:
            end = start + ROWS_AT_ONCE
            part = [column[start:end].to_list() for column in series]
            rows = zip(*part, strict=True)
            for position, values in enumerate(rows, start):
                record = dict(zip(keys, values, strict=True))
                yield item_of(record, position, columns)

    def check_new(self, columns: LabelColumns) -> None:
        """Raise UserError if the frame has one of the columns that `labelled` adds."""
        new_columns = [*columns.names, columns.prefix + ERROR_COLUMN]
        check_new_columns("The frame", self._frame.columns, new_columns, "prefix=")

    def labelled(self, found: Iterable[Prediction], label_columns: LabelColumns) -> Any:
        """Return the frame with the columns of the label and the error; a missing label is None.

        The rows keep their order and their index. Raises UserError, before the first row, as
        `check_new` does.
        """
        self.check_new(label_columns)
        predictions = list(found)
        columns = label_values(predictions, label_columns)
        error_column = label_columns.prefix + ERROR_COLUMN
        types: dict[str, Any] = {
            label_columns.label: nw.String,
            label_columns.best_label: nw.String,
            label_columns.labels: _list_type(self._frame.implementation),
            label_columns.language: nw.String,
            error_column: nw.String,
        }
        columns[error_column] = [prediction.error or "" for prediction in predictions]
        backend = self._frame.implementation
        new_series = []
        for name, values in columns.items():
            column_type = types.get(name, nw.Float64)
            series = nw.new_series(
                name,
                values,
                column_type,
                backend=backend,
            )
            new_series.append(series)
        labelled_frame = self._frame.with_columns(*new_series)
        frame = labelled_frame.to_native()
        native_frame = self._frame.to_native()
        # of pandas: narwhals does not copy them
        attributes = getattr(native_frame, "attrs", None)
        if attributes:
            frame.attrs = attributes
        return frame


def _list_type(backend: nw.Implementation) -> Any:
    """Return the type of a column of lists of text: pandas holds lists as objects."""
    if backend.is_pandas_like():
        return nw.Object
    return nw.List(nw.String)


class Arrays(FrameTable):
    """A batch of Ray Data: a dictionary of numpy arrays of equal length.

    Read with pandas, which Ray Data requires.
    """

    def __init__(self, arrays: Mapping[Any, Any]) -> None:
        self._arrays = arrays
        pandas = import_module("pandas")
        columns: dict[Any, Any] = {}
        for name, values in arrays.items():
            columns[name] = values
            if values.ndim != 1:
                columns[name] = list(values)
        pandas_frame = pandas.DataFrame(columns)
        frame = nw.from_native(pandas_frame, eager_only=True)
        super().__init__(frame)

    def labelled(self, found: Iterable[Prediction], label_columns: LabelColumns) -> Any:
        """Return the dictionary with the new columns, as `FrameTable.labelled` does.

        A missing score is NaN.
        """
        frame = super().labelled(found, label_columns)
        new_columns = frame.drop(columns=list(self._arrays))
        arrays = dict(self._arrays)
        for name, column in new_columns.items():
            if column.dtype == float:
                arrays[name] = column.to_numpy()
            else:
                arrays[name] = column.to_numpy(object, na_value=None)
        return arrays


def _are_arrow_batches(items: Any) -> bool:
    return hasattr(items, "schema") and hasattr(items, "__arrow_c_stream__")


def table_of(items: Any) -> FrameTable | None:
    """Return a frame, a Series or arrays as a table, else None.

    Raises InputError for columns of one name.
    """
    if isinstance(items, Mapping):
        dimensions = [getattr(values, "ndim", 0) for values in items.values()]
        if not dimensions or not all(dimensions):
            return None
        return Arrays(items)
    allow_series = hasattr(items, "to_frame")
    try:
        frame: Any = nw.from_native(
            items,
            pass_through=True,
            allow_series=allow_series,
        )
    except nw.exceptions.DuplicateError as error:
        raise InputError(
            f"The frame has several columns of one name ({error}). Rename all but one of them."
        ) from None
    if isinstance(frame, nw.LazyFrame):
        frame = frame.collect()
    elif frame is items and _are_arrow_batches(items):
        frame = nw.from_arrow(items, backend="pyarrow")
    if isinstance(frame, nw.Series):
        series = frame
        if not series.name:
            series = series.alias("text")
        frame = series.to_frame()
    if not isinstance(frame, nw.DataFrame):
        return None
    return FrameTable(frame)


def read_options(
    labels: Any,
    template: str | None,
    multi_label: bool,
    none: float | bool | None = None,
) -> ClassifyOptions:
    """Return the options for labels given as Python objects. Raises UserError."""
    # Iterating a frame would yield the names of its columns.
    is_text_or_frame = isinstance(labels, str) or hasattr(labels, "columns")
    if is_text_or_frame or not isinstance(labels, Iterable | None):
        quoted = truncate(repr(labels))
        kind = type(labels).__name__
        raise UserError(
            "labels must be a list such as ['praise', 'complaint'], a column, or a dictionary of "
            f"descriptions, not {quoted} ({kind})."
        )
    if isinstance(labels, Mapping):
        labels = dict(labels)
    elif labels is not None:
        if isinstance(labels, set | frozenset):
            labels = sorted(labels, key=str)
        else:
            labels = list(_plain(labels))
    fields = {
        "labels": labels,
        "template": template,
        "multi_label": multi_label,
        "none": none,
    }
    try:
        options = ClassifyOptions.parse(fields)
    except RequestRefused as error:
        reason = sentence(str(error))
        raise UserError(reason) from None
    all_get_it = not multi_label and options.none in (None, False)
    if options.labels and len(options.labels) == 1 and all_get_it:
        (only,) = options.labels
        name = truncate(only)
        warn(
            f"The only label is {name!r}, so every item gets it. Name at least two "
            "labels, or set multi_label=True to use the score alone."
        )
    return options


def none_for_precision(precision: Any, none: object, multi_label: bool) -> float:
    """Return the `none` of a call with a precision: 0, since the precision chooses the threshold
    later.

    Raises UserError for other values than numbers above 0 and up to 1, if both are given, and with
    `multi_label`, whose scores are no probabilities of being right.
    """
    if multi_label:
        raise UserError(
            "precision cannot be combined with multi_label, whose scores are no probabilities of "
            "being right. Give a threshold, such as none=0.5."
        )
    if none is not None:
        raise UserError("none and precision both choose a threshold. Give one of them.")
    is_number = isinstance(precision, int | float) and not isinstance(precision, bool)
    if not is_number or not 0 < precision <= 1:
        quoted = truncate(repr(precision))
        raise UserError(
            f"precision must be a number above 0 and up to 1, such as 0.9, not {quoted}."
        )
    return 0.0


def _plain(values: Any) -> Any:
    """Return an array of pyarrow or numpy as a list of Python objects; other values unchanged."""
    for name in ("to_pylist", "tolist"):
        convert = getattr(values, name, None)
        if convert:
            return convert()
    return values


def _column_name(name: object) -> str | None:
    if name is None:
        return None
    return str(name)


class Request:
    """The items of one call, as posts.

    Raises UserError for arguments of which no item can be read.

    names: the caller's keys or columns of id, title and body, which pandas may name by numbers;
    None is the usual one. has_languages: only items in some languages get a label.
    """

    def __init__(
        self,
        items: Any,
        options: ClassifyOptions,
        names: Sequence[object],
        scores: bool = False,
        prefix: str = "",
        progress: bool = False,
        precision: float | None = None,
        has_languages: bool = False,
    ) -> None:
        self.options = options
        self._has_languages = has_languages
        self.prefix = prefix
        self._scores = scores
        self._progress = progress
        self._precision = precision
        own_id, title, body = map(_column_name, names)
        columns = Columns.of(own_id, title, body)
        self.table = table_of(items)
        #: The word for an item.
        self.unit = "item"
        #: Whether the items are a single one, not in a list.
        self.is_single = False
        self.failures = Failures()
        self._total: int | None = None
        if self.table is not None:
            self.unit = "row"
            self.items: Iterator[Item] = self.table.items(columns)
            self._total = len(self.table)
            return
        self.is_single = isinstance(items, str | Mapping | Post)
        values: Any = (items,)
        if not self.is_single:
            values = _plain(items)
        if isinstance(values, bytes | bytearray) or not isinstance(values, Iterable):
            kind = type(items).__name__
            raise InputError(
                f"Cannot classify a value of type {kind}. Give a text, a dictionary with title "
                "and body, a list of either, or a DataFrame; for a file, run `feedmill classify`."
            )
        numbered = enumerate(values)
        self.items = (item_of(value, index, columns) for index, value in numbered)
        if isinstance(values, Sized):
            self._total = len(values)

    def run(self, engine: Engine, labels: Sequence[str]) -> Any:
        """Classify the items and return the frame, the predictions, or the single prediction.

        labels: labels of the model, for calls without any.
        """
        own_labels = self.options.labels or labels
        labels = tuple(own_labels)
        progress = tqdm(
            self.predictions(engine),
            desc="classifying",
            total=self._total,
            disable=not self._progress,
        )
        predictions = self.failures.count_each(progress)
        if self._precision is not None:
            predictions = precise(predictions, self._precision)
        if self.table is not None:
            columns = self.columns(labels)
            return self.table.labelled(predictions, columns)
        result = Predictions(predictions, labels, self.options)
        if self.is_single:
            (only,) = result
            if only.error is not None:
                reason = sentence(only.error)
                raise UserError(f"Cannot classify the item: {reason}")
            return only
        return result

    def columns(self, labels: Sequence[str] = ()) -> LabelColumns:
        """Return the columns that a frame gets. labels: those of the call."""
        score_labels = labels if self._scores else ()
        columns = LabelColumns(self.prefix, score_labels)
        return columns.of(self.options, self._has_languages)

    def predictions(self, engine: Engine) -> Iterator[Prediction]:
        """Yield a prediction for each item, in order. Reads the items as they are needed."""

        def classify(posts: Iterable[Post]) -> Generator[tuple[Post, Outcome]]:
            return engine(posts, self.options)

        for item, outcome in with_outcomes(self.items, classify):
            fields = {"error": item.post}
            if outcome is not None:
                fields = vars(outcome)
            yield item.prediction(fields)


def precise(unfiltered: Iterable[Prediction], precision: float) -> Iterator[Prediction]:
    """Yield the predictions, without the labels that are too uncertain for an expected precision.

    Reads all predictions first. Their scores must be probabilities of being right.
    """
    predictions = list(unfiltered)
    scores = [
        prediction.score for prediction in predictions if prediction.score is not None
    ]
    threshold = precise_threshold(scores, precision)
    for prediction in predictions:
        if prediction.score is not None and prediction.score < threshold:
            yield replace(prediction, label=None)
        else:
            yield prediction


class Failures:
    """The items without a label: how many, and the first reasons."""

    def __init__(self) -> None:
        self._total = 0
        self._failed = 0
        #: Places of the first items without a label, and the reasons.
        self._reasons: list[tuple[int, str]] = []

    def count_each(self, predictions: Iterable[Prediction]) -> Iterator[Prediction]:
        """Yield the predictions and count them."""
        for prediction in predictions:
            if prediction.error is not None:
                self._failed += 1
                if len(self._reasons) < MAX_REASONS:
                    reason = (self._total, prediction.error)
                    self._reasons.append(reason)
            self._total += 1
            yield prediction

    def warn(self, unit: str) -> bool:
        """Warn if an item has no label, and return whether one has none. unit: the word for an
        item.
        """
        if self._failed == 0:
            return False
        clauses: list[str] = []
        for index, reason in self._reasons:
            clause = reason.removesuffix(".")
            clauses.append(f"{unit} {index}: {clause}")
        if self._failed > len(clauses):
            clauses.append("…")
        reasons = printable("; ".join(clauses))
        count = f"{self._failed:,} of {self._total:,} {unit}s"
        warn(f"{count} have no label: {reasons}.")
        return True


def warn(text: str) -> None:
    """Warn at the line outside of this package that made the call."""
    level = 1
    frame = sys._getframe()
    while frame.f_back:
        module = frame.f_globals.get("__name__", "")
        package, _, _ = module.partition(".")
        if package != "feedmill":
            break
        level += 1
        frame = frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)
