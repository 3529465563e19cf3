"""`feedmill classify FILE --out OUT`: copy a file with a label for each row."""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, BinaryIO

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from feedmill.labelling.columns import Columns, Survey, check_header, check_new_columns, new_columns
from feedmill.labelling.rows import UNCERTAIN_MARGIN, Classify, Reasons, Tally, is_wrong_encoding, labelled
from feedmill.labelling.writers import CsvLayout, format_of, writer_of
from feedmill.producers.files import Row, Source, is_file
from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import InputError, UserError, printable

#: Labels and reasons in the summary; the rest are only counted.
MAX_LABELS_SHOWN, MAX_REASONS_SHOWN = 20, 10
STANDARD = "-"

OutOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Write every row with its label to this .csv, .tsv, .jsonl or .parquet file; - prints it."
    ),
]
ScoresOption = Annotated[bool, typer.Option("--scores", help="With --out: add a column with each label's score.")]
PrefixOption = Annotated[
    str, typer.Option(help="With --out: text before the names of the new columns (default: none).")
]


@dataclass(frozen=True)
class OutFlags:
    """Flags of `feedmill classify` about the output file."""

    out: OutOption = None
    scores: ScoresOption = False
    prefix: PrefixOption = ""

    def check(self) -> None:
        """Raise UserError for a flag that has no effect without `--out`."""
        for flag in ("scores", "prefix"):
            if getattr(self, flag) and self.out is None:
                raise UserError(f"--{flag} applies to the file that --out names. Give --out, or omit --{flag}.")


#: Loads the model and returns its labels, and the function that classifies posts with it.
Load = Callable[[], tuple[Sequence[str], Classify]]


class Labelling:
    """One run of `feedmill classify FILE --out OUT`.

    If reading fails, the rows read before the error are still written, and `run` raises the error at the end.

    open_source: opens the input, given its path. path: path of the input; - is standard input. limit: maximum rows.
    alone: each label is scored by itself. Raises UserError if the output cannot be written.
    """

    def __init__(
        self, open_source: Callable[[str], Source], path: str, flags: OutFlags, limit: int | None, alone: bool
    ) -> None:
        self._open_source, self._path, self._flags, self._limit = open_source, path, flags, limit
        self._out = flags.out or STANDARD
        #: None is the input's format.
        self._form = None if self._out == STANDARD else format_of(self._out)
        if self._form is not None:
            _check_out(Path(self._out), path)
        self._notes = Console(stderr=True, soft_wrap=True, highlight=False)
        self._began = time.monotonic()
        self._broken: InputError | None = None
        self.tally = Tally(alone)

    def run(self, load: Load) -> None:
        """Classify the rows and write the output. Raises UserError and OSError."""
        with self._regular_file() as path:
            source = self._open(path)
            rows = source.rows()
            # Read a row before loading the model, which takes seconds.
            first = next(rows, None)
            if first is None:
                raise InputError(f"{source.name} contains no posts. Give another file.")
            if source.header_warning:
                self._notes.print(escape(source.header_warning))
            survey = None
            copied = path if source.is_parquet and self._form == "parquet" else None
            if source.table is None and is_file(path) and copied is None:
                with self._status(f"reading {source.name}"):
                    survey = Survey(islice(self._readable(self._open(path).rows()), self._limit))
            self._write(source, islice(self._readable(chain([first], rows)), self._limit), survey, copied, load)
        self._notes.print(escape(self._summary(source)))
        if self._broken:
            raise self._broken

    def _readable(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Yield the rows up to an error, which is kept."""
        try:
            yield from rows
        except InputError as error:
            self._broken = error

    @contextmanager
    def _regular_file(self) -> Iterator[str]:
        """Yield the input's path; a copy of a pipe that must be read twice, because its keys become columns."""
        if is_file(self._path) or self._form not in ("csv", "parquet"):
            yield self._path
            return
        with tempfile.NamedTemporaryFile(dir=Path(self._out).parent, prefix=".feedmill-") as copy:
            if self._path == STANDARD:
                shutil.copyfileobj(sys.stdin.buffer, copy)
            else:
                with Path(self._path).open("rb") as pipe:
                    shutil.copyfileobj(pipe, copy)
            copy.flush()
            yield copy.name

    def _open(self, path: str) -> Source:
        source = self._open_source(path)
        source.is_stdin = self._path == STANDARD
        source.name = "stdin" if source.is_stdin else printable(self._path)
        return source

    def _format(self, source: Source) -> str:
        return self._form or ("jsonl" if source.table is None else "csv")

    def _write(
        self, source: Source, rows: Iterator[Row], survey: Survey | None, copied: str | None, load: Load
    ) -> None:
        """Classify and write the rows. copied: path of a Parquet file whose columns are copied."""
        first = next(rows)
        rows = chain([first], rows)
        kinds = None
        if source.table is not None:
            given = source.table.header
            check_header(source, given)
        elif survey is not None:
            given, kinds = survey.keys, survey.kinds
        else:
            given = list(first.values or ())
        check_new_columns(source, given, new_columns((), self._flags.prefix))
        with self._status("loading the model"):
            labels, classify = load()
        labels = labels if self._flags.scores else ()
        columns = Columns(given, kinds, new_columns(labels, self._flags.prefix), labels)
        check_new_columns(source, given, columns.new)
        total = survey.rows if survey else source.parquet_rows
        if total is not None and self._limit is not None:
            total = min(total, self._limit)
        bar = _LabellingBar(source, self.tally, self._notes, total)
        found_rows = labelled(bar.count(rows), classify)
        # Closed after any error: threads of a running model would abort the process at its exit.
        with self._output() as file, self._explaining_interrupts(), bar, closing(found_rows):
            writer = writer_of(self._format(source), file, columns, self._layout(source), copied)
            for row, found in found_rows:
                if is_wrong_encoding(found) and found not in self.tally.unlabelled.counts:
                    self._notes.print(escape(f"{source.name}:{row.place}: {found}"))
                self.tally.add(row, found)
                if row.values is not None:
                    writer.add(row.values, columns.found(found))
                    if self._out == STANDARD:
                        file.flush()
            writer.end()

    @contextmanager
    def _output(self) -> Iterator[BinaryIO]:
        """Yield the output file. It gets its name once it is complete. Raises UserError if it cannot be written."""
        if self._out == STANDARD:
            yield sys.stdout.buffer
            return
        out = Path(self._out)
        try:
            with replacing(out) as temporary, temporary.open("wb") as file:
                yield file
                file.flush()
        except OSError as error:
            if error.filename is None and error.errno is None:
                raise
            raise UserError(f"Cannot write {printable(self._out)}: {error.strerror}.") from None

    def _status(self, what: str) -> AbstractContextManager[object]:
        """Show on a terminal what the command does inside the block."""
        return self._notes.status(escape(what)) if self._notes.is_terminal else nullcontext()

    @contextmanager
    def _explaining_interrupts(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            kept = "" if self._out == STANDARD else f"; {printable(self._out)} was not written"
            self._notes.print(escape(f"interrupted after {self.tally.rows:,} rows{kept}"))
            raise SystemExit(130) from None  # not KeyboardInterrupt, which main.py explains

    def _layout(self, source: Source) -> CsvLayout:
        """Return the input's delimiter, line ends and mark, so that programs that read the input read the output."""
        is_tsv = Path(self._out).suffix.lower() == ".tsv"
        if source.table is None:
            return CsvLayout("\t" if is_tsv else ",")
        delimiter, first = ("\t", "") if is_tsv else (source.table.delimiter, source.table.delimiter_line)
        # A file in another encoding comes from Excel, which reads UTF-8 only with a mark.
        has_mark = source.has_mark or source.is_transcoded
        return CsvLayout(delimiter, source.table.line_end, has_mark, first)

    def _summary(self, source: Source) -> str:
        """Return the summary: rows per label, and rows without one by reason."""
        tally, seconds = self.tally, time.monotonic() - self._began
        where = "" if self._out == STANDARD else f", written to {printable(self._out)}"
        rows = f"{tally.written:,} of {_rows(tally.rows)}" if tally.left_out.counts else _rows(tally.rows)
        lines = [f"{rows} of {source.name} in {_duration(seconds)}{where}"]
        labels = tally.labels.most_common(MAX_LABELS_SHOWN)
        width = max((len(printable(label)) for label, _ in labels), default=0)
        for label, count in labels:
            lines.append(f"  {printable(label):<{width}}  {count:>9,}  {count / tally.written:>4.0%}")
        if more := tally.labels.keys() - {label for label, _ in labels}:
            lines.append(f"  and {len(more):,} more labels, {_rows(sum(tally.labels[label] for label in more))}")
        if tally.uncertain:
            lines.append(
                f"uncertain: {_rows(tally.uncertain)}, whose two best labels are less than {UNCERTAIN_MARGIN} apart"
            )
        lines += _reasons("no label", tally.unlabelled, source.unit)
        lines += _reasons("left out", tally.left_out, source.unit)
        return "\n".join(lines)

    def as_json(self) -> str:
        """Return the summary as JSON."""
        return json.dumps(self.tally.summary() | {"seconds": round(time.monotonic() - self._began, 3)})


def _check_out(out: Path, path: str) -> None:
    """Raise UserError if the output cannot be written, or is the input."""
    if out.is_dir():
        raise UserError(f"{out} is a folder. Give --out a file in it, such as {out / 'labelled.csv'}.")
    if not out.parent.is_dir():
        raise UserError(f"The folder {out.parent} does not exist. Create it, or give another --out.")
    if not os.access(out.parent, os.W_OK):
        raise UserError(f"Cannot write to the folder {out.parent}. Give another --out.")
    if out.exists() and is_file(path) and out.samefile(path):
        raise UserError(f"{out} is the input file. Give another --out.")


def _reasons(what: str, reasons: Reasons, unit: str) -> list[str]:
    """Return a line per reason. unit: the word for a place in the file."""
    lines = [
        f"{what}: {_rows(count)}, first in {unit} {reasons.first[reason]}: {printable(reason)}"
        for reason, count in reasons.counts.most_common(MAX_REASONS_SHOWN)
    ]
    if (
        others := reasons.counts.total() - sum(count for _, count in reasons.counts.most_common(MAX_REASONS_SHOWN))
    ) > 0:
        lines.append(f"{what}: {_rows(others)} for other reasons")
    return lines


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


class _LabellingBar(Progress):
    """Progress of classifying. total: number of rows; None estimates it from the bytes read so far."""

    def __init__(self, source: Source, tally: Tally, notes: Console, total: int | None) -> None:
        self._source, self._tally, self._total = source, tally, total
        self._read = 0
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
        ends = (TextColumn("{task.percentage:.0f}%"), TimeRemainingColumn())
        super().__init__(*columns, *ends, console=notes, transient=True, disable=not notes.is_terminal)
        self.add_task("classifying", total=None)

    def count(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield the rows, counting them."""
        for row in rows:
            self._read += 1
            yield row

    def get_renderables(self) -> Iterable[RenderableType]:
        """Update the task before each redraw; rich calls this several times a second."""
        total, done, size = self._total, self._source.done, self._source.size
        if total is None and size and done and self._read:
            total = max(self._read, round(self._read * size / done))
        for task in self.tasks:
            rate = f", {self._tally.rows / task.elapsed:,.0f}/s" if task.elapsed and self._tally.rows else ""
            self.update(
                task.id, total=total, completed=self._tally.rows, description=f"{_rows(self._tally.rows)}{rate}"
            )
        return super().get_renderables()
