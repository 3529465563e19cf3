"""Read the posts' ids of an exported file, and copy the file without some rows."""

import csv
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from itertools import compress, islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic_core import from_json

from feedmill.export.columns import are_of_export
from feedmill.producers.exported import unescape_formula
from feedmill.shared.errors import UserError, printable
from feedmill.tables.writing import ParquetWriter

#: Rows per batch when a Parquet file is read.
BATCH_ROWS = 5000
#: Maximum characters of a cell. No exported one is longer; the csv module's default of 131,072 is too low.
MAX_CELL = 2_000_000


class PostKey(NamedTuple):
    """A post of an export, as `--latest` and `--purge` tell them apart.

    run: the run within which the id is unique; None if there is none, or the file has no column `run`.
    """

    id: str
    run: str | None = None


def format_of_file(path: Path) -> str:
    """Detect the format of an exported file. Raises UserError if it is not an export."""
    try:
        with path.open("rb") as binary:
            is_parquet = binary.read(4) == b"PAR1"
        if is_parquet:
            form, columns = "parquet", pq.read_schema(path).names
        else:
            with _text(path, path.suffix) as file:
                line = file.readline(MAX_CELL)
            is_json = line.startswith("{")
            form, columns = ("jsonl", [*from_json(line)]) if is_json else ("csv", line.strip().split(","))
        if are_of_export(columns):
            return form
    except (ValueError, OSError):  # pyarrow's errors are ValueErrors, too
        pass
    raise UserError(
        f"{printable(str(path))} is not an export of results: it has other columns. Give the OUT of an earlier export."
    )


def post_keys(path: Path, form: str) -> Iterator[PostKey]:
    """Yield the posts' ids and runs in file order."""
    if form == "parquet":
        with pq.ParquetFile(path) as file:
            columns = [column for column in ("id", "run") if column in file.schema_arrow.names]
            for batch in file.iter_batches(BATCH_ROWS, columns=columns):
                yield from (
                    PostKey(*row) for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
                )
        return
    with _text(path, path.suffix) as file:
        if form == "jsonl":
            for line in file:
                row = from_json(line)
                yield PostKey(row["id"], row.get("run"))
            return
        rows = _rows(file)
        header = next(rows)
        indices = [header.index(column) for column in ("id", "run") if column in header]
        for cells in rows:
            yield PostKey(*(unescape_formula(cells[index]) or None for index in indices))  # type: ignore[arg-type]


def _text(path: Path, suffix: str, opened: Callable[..., Any] = pa.input_stream) -> TextIO:
    """Open a text file. suffix: ".gz" or ".zst" if it is compressed."""
    compression = {".gz": "gzip", ".zst": "zstd"}.get(suffix.lower())
    return TextIOWrapper(opened(str(path), compression=compression), encoding="utf-8", newline="")


def _rows(file: TextIO) -> Iterator[list[str]]:
    csv.field_size_limit(MAX_CELL)
    return csv.reader(file, strict=True)


def copy_rows(path: Path, target: Path, form: str, mask: Iterator[bool]) -> None:
    """Copy the rows of a file for which the mask is true."""
    if form == "parquet":
        with pq.ParquetFile(path) as source, target.open("wb") as copy:
            writer = ParquetWriter(copy, source.schema_arrow)
            for batch in source.iter_batches(BATCH_ROWS):
                writer.write(batch.filter(pa.array(islice(mask, batch.num_rows), pa.bool_())))
            writer.close()
        return
    with _text(path, path.suffix) as file, _text(target, path.suffix, pa.output_stream) as text:
        if form == "jsonl":
            text.writelines(compress(file, mask))
        else:
            rows, lines = _rows(file), csv.writer(text)
            lines.writerow(next(rows))
            lines.writerows(compress(rows, mask))
