"""The value objects that `feedmill.classify` returns for texts and dictionaries."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsIndex, overload

from feedmill.api.frames import make_frame
from shared.errors import printable, truncate

#: Characters of a text in a repr, and items in the repr of a list.
SHOWN_CHARACTERS, SHOWN_ITEMS = 60, 10
#: Characters of a label in the repr of a list, and labels counted in its first line.
SHOWN_LABEL, SHOWN_LABELS = 24, 6
#: Column of a label's score.
SCORE_COLUMN = "score_{}"


@dataclass(frozen=True, slots=True)
class Prediction:
    """The label of one text.

    Attributes:
        label: The best label; None if the text could not be classified.
        score: The best label's score, from 0 to 1 for most models; None without a label.
        scores: The score of every label, best first.
        text: The text that was classified: title and body, cleaned.
        id: The item's own id; None if it had none.
        error: Reason for a missing label; None if there is a label.

    Example:
        >>> feedmill.classify("It broke after a day", labels=["praise", "complaint"]).label
        'complaint'
    """

    label: str | None
    score: float | None
    scores: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    id: str | None = None
    error: str | None = None

    def __repr__(self) -> str:
        if self.label is None or self.score is None:
            return f"Prediction(label=None, error={self.error!r})"
        text = truncate(self.text, SHOWN_CHARACTERS)
        return f"Prediction(label={self.label!r}, score={self.score:.3f}, text={text!r})"


class Predictions(list[Prediction]):
    """A list of predictions, in the order of the items. `to_frame()` makes a DataFrame of them."""

    def to_frame(self, *, scores: bool = False) -> Any:
        """Return a pandas DataFrame, or a polars one if only polars is installed.

        The columns are `id` (if any item has one), `text`, `label`, `label_score`, with `scores` a column
        `score_<label>` for each label, and `error` (if any item has one).

        Raises:
            feedmill.UserError: If neither package is installed.
        """
        columns: dict[str, list[Any]] = {}
        if any(each.id is not None for each in self):
            columns["id"] = [each.id for each in self]
        columns["text"] = [each.text for each in self]
        columns["label"] = [each.label for each in self]
        columns["label_score"] = [each.score for each in self]
        if scores:
            labels = sorted({label for each in self for label in each.scores})
            columns |= {SCORE_COLUMN.format(label): [each.scores.get(label) for each in self] for label in labels}
        if any(each.error is not None for each in self):
            columns["error"] = [each.error for each in self]
        return make_frame(columns)

    def counts(self) -> dict[str | None, int]:
        """Return how many items have each label, the most frequent first; None counts items without a label."""
        return dict(Counter(each.label for each in self).most_common())

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> Prediction: ...
    @overload
    def __getitem__(self, index: slice, /) -> "Predictions": ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> "Prediction | Predictions":
        if isinstance(index, slice):
            return Predictions(super().__getitem__(index))
        return super().__getitem__(index)

    def __repr__(self) -> str:
        counted = [f"{'no label' if label is None else label} {count:,}" for label, count in self.counts().items()]
        more = ", …" if len(counted) > SHOWN_LABELS else ""
        head = f"{len(self):,} prediction{'' if len(self) == 1 else 's'}"
        lines = [f"{head}: {', '.join(counted[:SHOWN_LABELS])}{more}" if counted else head]
        lines += _lines(self[:SHOWN_ITEMS])
        if len(self) > SHOWN_ITEMS:
            lines.append(f"… and {len(self) - SHOWN_ITEMS:,} more")
        return "\n".join(map(printable, lines))


def _lines(shown: Iterable[Prediction]) -> list[str]:
    """Return a line for each prediction, in columns."""
    labels = [truncate(each.label or "-", SHOWN_LABEL) for each in shown]
    width = max(map(len, labels), default=0)
    return [
        f"  {label:<{width}} {'' if each.score is None else f'{each.score:.2f}':>5}  "
        + (truncate(" ".join(each.text.split()), SHOWN_CHARACTERS) if each.error is None else f"({each.error})")
        for label, each in zip(labels, shown, strict=True)
    ]
