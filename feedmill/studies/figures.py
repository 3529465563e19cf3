"""Count the rows of a study by their own time: by label, subreddit, language and kind."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from feedmill.shared.messages import COMMENT_KIND
from feedmill.shared.none_of_these import NO_LABEL
from feedmill.studies.parts import part_files

#: Rows that are counted at once.
BATCH_ROWS = 50_000
#: Columns that are counted, if a study has them.
COUNTED = (
    "label",
    "subreddit",
    "language",
    "kind",
    "date",
)
#: The name of a missing value.
NOTHING = {
    "label": NO_LABEL,
    "subreddit": "",
    "language": "",
    "kind": "post",
}
#: Microseconds of a day.
DAY_US = 86_400_000_000


@dataclass
class Figures:
    """Numbers of rows. Days are those since 1970; None for rows without a time."""

    rows: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    subreddits: dict[str, Counter[str]] = field(default_factory=dict)
    languages: Counter[str] = field(default_factory=Counter)
    #: Numbers by day of each label, subreddit and language.
    label_days: Counter[tuple[int, str]] = field(default_factory=Counter)
    subreddit_days: Counter[tuple[int, str]] = field(default_factory=Counter)
    language_days: Counter[tuple[int, str]] = field(default_factory=Counter)
    undated: int = 0

    @property
    def comments(self) -> int:
        return self.kinds[COMMENT_KIND]

    def add(self, batch: pa.RecordBatch) -> None:
        """Count rows."""
        self.rows += batch.num_rows
        labels = _names(batch, "label")
        subreddits = _subreddits(batch)
        kinds = _names(batch, "kind")
        days = _days(batch)
        self.labels.update(labels)
        self.kinds.update(kinds)
        pairs = Counter(zip(subreddits, labels, strict=True))
        for pair, count in pairs.items():
            name, label = pair
            counts = self.subreddits.setdefault(name, Counter())
            counts[label] += count
        _add_days(
            self.label_days,
            days,
            labels,
        )
        _add_days(
            self.subreddit_days,
            days,
            subreddits,
        )
        self.undated += days.count(None)
        if "language" in batch.schema.names:
            languages = _names(batch, "language")
            self.languages.update(languages)
            _add_days(
                self.language_days,
                days,
                languages,
            )


def figures_of(out: Path) -> Figures:
    """Count the rows in a folder of parts. Subreddits that differ in case are one."""
    figures = Figures()
    for path, _ in part_files(out):
        with pq.ParquetFile(path) as file:
            names = set(file.schema_arrow.names)
            columns = [name for name in COUNTED if name in names]
            batches = file.iter_batches(
                BATCH_ROWS,
                columns=columns,
            )
            for batch in batches:
                figures.add(batch)
    return figures


def _names(batch: pa.RecordBatch, column: str) -> list[str]:
    nothing = NOTHING[column]
    names = pc.fill_null(batch[column], nothing)
    return list(names.to_pylist())


def _subreddits(batch: pa.RecordBatch) -> list[str]:
    names = pc.fill_null(batch["subreddit"], "")
    lower = pc.utf8_lower(names)
    return list(lower.to_pylist())


def _days(batch: pa.RecordBatch) -> list[int | None]:
    microseconds = batch["date"].cast(pa.int64())
    days = pc.divide(microseconds, DAY_US)
    return list(days.to_pylist())


def _add_days(
    counts: Counter[tuple[int, str]], days: list[int | None], names: list[str]
) -> None:
    pairs = Counter(zip(days, names, strict=True))
    for pair, count in pairs.items():
        day, name = pair
        if day is not None:
            counts[day, name] += count
