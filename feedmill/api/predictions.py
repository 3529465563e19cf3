"""The value objects that `feedmill.classify` returns for texts and dictionaries."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any, SupportsIndex, overload

from feedmill.shared.errors import UserError, printable, truncate
from feedmill.tables import label_columns

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
