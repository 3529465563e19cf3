"""The rows of a study as Parquet, partitioned by the month in which the posts were created:
OUT/data/month=2023-11/part-….parquet. Readers of data sets take the folder `data` as a whole.
"""

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from feedmill.exporting.files import batch_of, schema_of
from feedmill.outcomes.rows import ResultRow
from feedmill.shared.atomic_files import replacing, sync
from feedmill.shared.messages import Classification, ClassifyOptions, Post
from feedmill.studies.state import StudyState
from feedmill.tables.writing import ParquetWriter

#: Columns of every study, with the names and types of an export's; those of some studies only
#: follow.
COLUMNS = (
    "id",
    "kind",
    "title",
    "body",
    "subreddit",
    "score",
    "url",
    "date",
    "permalink",
    "edited",
    "nsfw",
    "label",
    "label_score",
    "scores",
    "fingerprint",
)
#: Folder of the parts in that of the study.
DATA_FOLDER = "data"
#: Month of posts without a time.
NO_MONTH = "unknown"
#: A part: the number of its dump, and its first and last record there.
PART_NAME = re.compile(r"part-(\d{4,})-(\d{10,})-(\d{10,})\.parquet")


class Row(NamedTuple):
    """A post with its classification."""

    post: Post
    classification: Classification

    @property
    def month(self) -> str:
        created = self.post.created_utc
        if created is None:
            return NO_MONTH
        date = datetime.fromtimestamp(created, UTC)
        return date.strftime("%Y-%m")


def columns_of(options: ClassifyOptions, has_languages: bool) -> tuple[str, ...]:
    """Return the columns of a study."""
    columns = list(COLUMNS)
    may_lack_label = options.none is not None and options.none is not False
    if may_lack_label or has_languages:
        columns.append("best_label")
    if options.multi_label:
        columns.append("labels")
    if has_languages:
        columns.append("language")
    return tuple(columns)


class Parts:
    """The parts in a folder. columns: those of `columns_of`."""

    def __init__(self, out: Path, columns: Sequence[str]) -> None:
        self._out = out
        self._folder = out / DATA_FOLDER
        self._schema = schema_of(columns, parquet=True)

    def write(self, rows: Sequence[Row], dump: int, first: int, last: int) -> None:
        """Write a part for each month of the rows, durably. Raises OSError.

        dump: number of the dump. first, last: the numbers of its records that the rows come from.
        """
        by_month: dict[str, list[Row]] = {}
        for row in rows:
            rows_of_month = by_month.setdefault(row.month, [])
            rows_of_month.append(row)
        for month, rows_of_month in by_month.items():
            folder = self._folder / f"month={month}"
            folder.mkdir(parents=True, exist_ok=True)
            name = f"part-{dump:04}-{first:010}-{last:010}.parquet"
            path = folder / name
            self._write(path, rows_of_month)
        for folder in (self._folder, self._out):  # their folders may be new
            sync(folder)

    def _write(self, path: Path, rows: Sequence[Row]) -> None:
        result_rows = [_result_row(row) for row in rows]
        batch = batch_of(result_rows, self._schema)
        with replacing(path, durable=True) as temporary, temporary.open("wb") as file:
            writer = ParquetWriter(file, self._schema)
            try:
                writer.write(batch)
                writer.close()
            except BaseException:
                writer.abandon()
                raise

    def remove_unsaved(self, state: StudyState) -> None:
        """Delete the parts behind a state's position, and what was being written."""
        for temporary in self._folder.glob("month=*/.*.tmp"):
            temporary.unlink()
        for path, match in part_files(self._out):
            dump = int(match[1])
            last = int(match[3])
            saved_records = 0
            if dump < len(state.dumps):
                saved_records = state.dumps[dump].records
            if last > saved_records:
                path.unlink()


def part_files(out: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    """Yield the parts of a study in the order of their names, each with its PART_NAME match.

    out: the folder of the study.
    """
    folder = out / DATA_FOLDER
    for path in sorted(folder.glob("month=*/part-*.parquet")):
        match = PART_NAME.fullmatch(path.name)
        if match:
            yield path, match


def _result_row(row: Row) -> ResultRow:
    """Return a row in the form of an export's."""
    classification: dict[str, Any] = row.classification.model_dump()
    post = row.post.model_dump(exclude_defaults=True)
    return ResultRow(
        entry="",
        found=classification,
        post=post,
    )
