"""The `feedmill export` command: write results to Parquet, CSV or JSONL files."""

import gc
import json
import logging
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, cast, get_args

import typer
from redis import Redis
from redis.exceptions import AuthenticationError
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import TimeoutError as TimeoutFault
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from feedmill.cli.dates import parse_period
from feedmill.cli.options import JsonSummary, RedisUrl, RunFilter, settings_of
from feedmill.export import writer
from feedmill.export.text import COLUMNS
from feedmill.export.writer import ExportFilter, Folder, Target
from feedmill.reading.entry_ids import seconds_of
from feedmill.reading.labels import unknown_label
from feedmill.reading.rows import Chunk, RowReader
from feedmill.reading.runs import check_run, unknown_run
from feedmill.stack.signals import EXIT_SIGNALS, handle_signals, not_ignored
from shared.broker import connect, user_errors
from shared.errors import UserError, printable
from shared.messages import parse_run
from shared.runs import progress
from shared.settings import PREFIX

logger = logging.getLogger(__name__)

#: Seconds after which `--follow` closes a part by default.
DEFAULT_PART_S = 600.0
#: Seconds that `--follow` waits for a new entry before it checks for a signal.
ENTRY_WAIT_S = 1.0
#: Seconds before each attempt to reconnect; the last value repeats until Redis answers.
RECONNECT_DELAYS_S = (0.1, 0.25, 0.5, 1.0)

app = typer.Typer()


#: Export formats.
Form = Literal["parquet", "csv", "jsonl"]


@app.command("export")
def export_results(
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="Output file, such as labels.parquet; with --follow, a folder of parts by day."
        ),
    ],
    form: Annotated[
        Form | None, typer.Option("--format", help="File format (default: from the extension of OUT).")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Columns to write, in this order, such as id,label,title (default: all).")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="DATE", help="Export only results stored since DATE, such as 2026-01-31 or 2026-01-31T12:30 (UTC)."
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="DATE", help="Export only results stored before DATE (UTC).")
    ] = None,
    label: Annotated[str | None, typer.Option(help="Export only results with this best label.")] = None,
    run: RunFilter = None,
    latest: Annotated[
        bool, typer.Option("--latest", help="Keep only the newest result of each post; needs a single file.")
    ] = False,
    excel: Annotated[bool, typer.Option("--excel", help="Mark CSV as UTF-8, so that Excel reads it.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Keep exporting new results until Ctrl-C.")] = False,
    part_rows: Annotated[
        int | None, typer.Option(help=f"Approximate rows per part (default: {writer.PART_ROWS:,}).", min=1)
    ] = None,
    part_seconds: Annotated[
        float | None, typer.Option(help=f"Seconds after which --follow closes a part (default: {DEFAULT_PART_S:.0f}).")
    ] = None,
    purge: Annotated[
        bool, typer.Option("--purge", help="Export nothing; remove posts from OUT that were purged after the export.")
    ] = False,
    as_json: JsonSummary = False,
    redis_url: RedisUrl = None,
) -> None:
    """Write results to Parquet, CSV or JSONL files.

    A file gets its name once it is complete. An interrupted export resumes when the same command runs again; a single
    Parquet file starts over. Exits 1 if nothing was exported, results were missed or the export stopped early.
    """
    others = (form, columns, since, until, label, run, part_rows, part_seconds)
    run = None if run is None else parse_run(run)
    if purge and (follow or latest or any(other is not None for other in others)):
        raise UserError("--purge removes posts from OUT and exports nothing. Leave out the other export options.")
    if not purge and form is None:
        form = _form_of(out)
    if excel and (purge or form != "csv"):
        raise UserError("--excel is for new CSV files. Give an OUT that ends in .csv, or leave out --excel.")
    in_folder = follow or (form == "parquet" and not writer.names_file(out)) or out.is_dir()
    if follow and writer.names_file(out) and not out.is_dir():
        folder = printable(str(out.with_suffix("")))
        raise UserError(
            f"--follow needs a folder, to which it adds files until it is stopped; {printable(str(out))} names one "
            f"file. Give a folder and its format, such as --format {form} {folder}/."
        )
    if latest and in_folder:
        raise UserError(
            "--latest needs a single file, because finished parts cannot be changed. Give an OUT that ends in "
            ".parquet, .csv or .jsonl, without --follow."
        )
    if latest and label is not None:
        raise UserError(
            "--latest cannot be combined with --label, because a post's newest result may have another label. Leave "
            "out one of them."
        )
    if follow and until is not None:
        raise UserError("--follow cannot be combined with --until: following has no end. Leave out one of them.")
    if part_seconds is not None and not (follow and part_seconds > 0):
        raise UserError("--part-seconds requires --follow and a value above 0.")
    settings = settings_of(redis_url=redis_url)
    notes = Console(stderr=True, soft_wrap=True, highlight=False)
    with user_errors(settings), _explaining_write_errors():
        redis = connect(settings)
        if purge:
            removed = writer.purge(out, RowReader(redis))
            typer.echo(json.dumps({"removed": removed}) if as_json else f"{_rows(removed)} of purged posts removed")
            return
        filters = ExportFilter(*parse_period(since, until, earliest=0.0), label, latest, run)
        own = () if run is None else _own_columns(redis, run, follow, notes)
        chosen = (*COLUMNS, *own) if columns is None else _columns(columns, own)
        if latest and run is None and "run" not in chosen:
            raise UserError(
                "--latest needs the column run, because posts of different runs can have the same id. Add run to "
                "--columns, or select a run with --run."
            )
        writes = writer.format_of(form or "", chosen, excel)
        if part_rows is not None and not in_folder:
            raise UserError(
                "--part-rows requires an export in parts. Give a folder with --format parquet, or leave out "
                "--part-rows."
            )
        reader = RowReader(redis, filters.until)
        redis.ping()  # before any file is created
        with (
            _stop_on_signal() as stop,
            writer.opened(out, writes, filters, reader, follow, part_rows or writer.PART_ROWS) as target,
        ):
            # Exempt imported modules from garbage collection, which runs often while 100,000 rows are created.
            gc.freeze()
            this = _Run(redis, reader, target, filters, stop, notes, follow, part_seconds or DEFAULT_PART_S)
            this.all()
    raise typer.Exit(this.report(out, as_json))


def _own_columns(redis: Redis, run: str, follow: bool, notes: Console) -> Sequence[str]:
    """Return the columns that the posts of a run carry. Raises UserError if there is no such run, unless following."""
    if not follow:
        check_run(redis, run)
    known = progress(redis, run)
    if known is None:
        notes.print(unknown_run(redis, run), markup=False)
    return known.columns if known else ()


def _form_of(out: Path) -> Form:
    """Return the format for the ending of OUT. Raises UserError for any other ending."""
    for form in get_args(Form):
        if out.suffix.lower() == f".{form}":
            return cast(Form, form)
    raise UserError(f"Cannot tell the format of {out}. Give --format, or an OUT that ends in .parquet, .csv or .jsonl.")


def _columns(given: str, own: Sequence[str]) -> tuple[str, ...]:
    """Parse `--columns`, ignoring case and repetitions. Raises UserError for an unknown column or without `id`.

    own: the columns that the posts of the selected run carry.
    """
    known = {column.lower(): column for column in (*own, *COLUMNS)}
    names = [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        if name.lower() not in known:
            raise UserError(
                f"--columns: unknown column {name!r:.80}. Choose from {printable(', '.join((*COLUMNS, *own)))}. "
                "Your own columns need --run, and `feedmill enqueue --keep`."
            )
    columns = tuple(dict.fromkeys(known[name.lower()] for name in names))
    if "id" not in columns:
        raise UserError("--columns must include id, by which --purge finds purged posts. Add id to --columns.")
    if sum(column in COLUMNS for column in columns) < min(2, len(columns)):
        raise UserError("--columns selects only id and columns of your own. Add a column of the result, such as label.")
    return columns


class _StopRequest:
    """Flag that the first signal sets to stop the export."""

    is_set = False


@contextmanager
def _stop_on_signal() -> Iterator[_StopRequest]:
    """Record the first SIGTERM, SIGHUP or Ctrl-C inside the block, so that the export can finish its current file.

    A second signal has its usual effect.
    """
    request = _StopRequest()
    before = {number: signal.getsignal(number) for number in not_ignored(*EXIT_SIGNALS)}

    def note(number: int, _: object) -> None:
        request.is_set = True
        signal.signal(number, before[signal.Signals(number)])  # a second signal ends the export at once

    with handle_signals(note, *before):
        yield request


@contextmanager
def _explaining_write_errors() -> Iterator[None]:
    """Convert a failed write inside the block into UserError."""
    try:
        yield
    except (ConnectionFault, TimeoutFault):  # from Redis; some are OSErrors too
        raise
    except OSError as error:
        raise UserError(f"Cannot write the export: {error}. Correct the cause, then run the command again.") from None


class _Run:
    """One run of an export, from where the last run stopped."""

    def __init__(
        self,
        redis: Redis,
        reader: RowReader,
        target: Target,
        filters: ExportFilter,
        stop: _StopRequest,
        notes: Console,
        follow: bool,
        part_seconds: float,
    ) -> None:
        self._redis = redis
        self._reader, self._target, self._filters = reader, target, filters
        self._stop = stop
        self._notes = notes
        self._follow = follow
        self._part_seconds = part_seconds
        self._before = target.written
        self._missed: int | None = 0
        self._any_missed = False
        self._complete = False

    def all(self) -> None:
        """Export to the end of the stream, or with `--follow` until a signal.

        Raises redis.exceptions.RedisError and OSError.
        """
        target = self._target
        if target.resumed:
            where = f"after {self._before:,} rows, " if self._before else ""
            self._notes.print(f"resuming {where}where the last run stopped")
        if isinstance(target, Folder):
            target.sweep()
        with _ExportBar(self._notes) as bar:
            if self._follow and isinstance(target, Folder):
                self._follow_stream(target, bar)
            else:
                self._read_to_end(bar)

    def _read_to_end(self, bar: "_ExportBar") -> None:
        """Export every entry that the stream holds now, or stop after a chunk when a signal arrives."""
        place = self._target.place
        for chunk in self._reader.chunks(place):
            place = chunk.place
            self._add(chunk, bar)
            if self._stop.is_set and not chunk.ended:
                self._target.stop(place)
                return
        if not self._target.written and self._filters.label is not None:
            self._check_label(self._filters.label)
        self._target.close(place)
        self._complete = True

    def _check_label(self, label: str) -> None:
        """Raise UserError if no result has the label. An earlier OUT then stays as it is."""
        if problem := unknown_label(self._redis, label, self._filters.run):
            raise UserError(problem)

    def _follow_stream(self, target: Folder, bar: "_ExportBar") -> None:
        """Export entries until a signal. After a lost connection, read the rows of the open part again."""
        place, failures, swept_at = target.place, 0, time.monotonic()
        while not self._stop.is_set:
            try:
                chunk = self._reader.fetch(place)
                place = chunk.place
                self._add(chunk, bar)
                if time.monotonic() - target.begun >= self._part_seconds:
                    target.close(place)
                if time.monotonic() - swept_at >= writer.SWEEP_INTERVAL_S:
                    target.sweep()
                    swept_at = time.monotonic()
                if chunk.ended:
                    self._reader.wait(place, ENTRY_WAIT_S)
                failures = 0
            except (ConnectionFault, TimeoutFault) as fault:
                if isinstance(fault, AuthenticationError):
                    raise
                if not failures:
                    logger.warning("Redis is unreachable (%s); retrying until it answers", fault)
                target.abandon()
                place = target.place
                time.sleep(RECONNECT_DELAYS_S[min(failures, len(RECONNECT_DELAYS_S) - 1)])
                failures += 1
        target.close(place)
        self._complete = True

    def _add(self, chunk: Chunk, bar: "_ExportBar") -> None:
        if chunk.missed != 0:
            self._report_missed(chunk)
        rows = self._filters.of(chunk.rows)
        if rows:
            self._target.add(rows, chunk.place)
        bar.move(len(rows), chunk)

    def _report_missed(self, chunk: Chunk) -> None:
        """Count results that were trimmed before this export read them, and print a warning."""
        self._any_missed = True
        known = chunk.missed is not None and self._missed is not None
        self._missed = (self._missed or 0) + (chunk.missed or 0) if known else None
        how_many = "results were" if chunk.missed is None else f"up to {chunk.missed:,} results were"
        if chunk.missed == 1:
            how_many = "up to 1 result was"
        self._notes.print(
            f"{how_many} trimmed from the stream before this export read them. Export more often, or raise "
            f"{PREFIX}RESULTS_STREAM_LENGTH."
        )

    def report(self, out: Path, as_json: bool) -> int:
        """Print a summary; return the exit status."""
        target = self._target
        rows = target.written - (self._before if isinstance(target, Folder) else 0)
        if as_json:
            summary = {"rows": rows, "removed": target.removed, "complete": self._complete}
            typer.echo(json.dumps(summary | {"missed": self._missed if self._any_missed else 0}))
        else:
            again = "resume" if target.can_resume else "start over"
            kind = "the folder " if isinstance(target, Folder) else ""
            parts = [f"{_rows(rows)} written to {kind}{out}"]
            if target.removed:
                parts.append(f"{_rows(target.removed)} of purged posts removed")
            if not self._complete:
                parts.append(f"stopped before the end; run the same command to {again}")
            typer.echo(", ".join(parts))
        nothing = not rows and not target.resumed and not self._follow
        return 1 if nothing or self._any_missed or not self._complete else 0


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"


class _ExportBar(Progress):
    """Progress of an export; without a total where the stream's remaining length is unknown."""

    def __init__(self, notes: Console) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        super().__init__(*columns, console=notes, transient=True, disable=not notes.is_terminal)
        self._task = self.add_task("reading", total=None)
        self._rows = self._read = 0
        self._began = time.monotonic()

    def move(self, rows: int, chunk: Chunk) -> None:
        self._rows += rows
        self._read += len(chunk.rows)
        if self.disable:
            return
        rate = self._rows / max(time.monotonic() - self._began, 0.001)
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds_of(chunk.place.cursor)))
        total = None if chunk.left is None else self._read + chunk.left
        description = f"{self._rows:,} rows, {rate:,.0f}/s" + (f", at {when}" if chunk.rows else "")
        self.update(self._task, description=description, completed=self._read, total=total)
