"""The `feedmill export` command: write results to Parquet, CSV or JSONL files, or to a table in PostgreSQL."""

import gc
import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from redis import Redis
from redis.exceptions import RedisError
from rich.console import Console
from typer import Argument, Option

from feedmill.cli.options import JsonSummary, Period, RunName, excludes, needs, refuse, with_settings
from feedmill.console import LiveBar, counted, notes_console
from feedmill.export.columns import BATCH_ROWS, COLUMNS, ExportFilter, choose, newest_entries
from feedmill.reading import Place, ResultRow, RowReader, check_run, unknown_run
from feedmill.shared.broker import connect
from feedmill.shared.errors import DatabaseUnavailable, UserError, clause, explain_missing, explain_unwritable
from feedmill.shared.redis_errors import is_temporary
from feedmill.shared.runs import progress
from feedmill.shared.settings import PREFIX, Settings
from feedmill.stack.processes import note_signals
from feedmill.tables import format_of

if TYPE_CHECKING:
    from feedmill.export.files import File, Folder
    from feedmill.export.postgres import Table

#: Seconds after which `--follow` closes a part by default.
DEFAULT_PART_S = 600.0
#: Seconds between transactions when few results arrive.
TRANSACTION_S = 1.0
#: Beginnings of a database's address, and the default table in it.
DATABASE_SCHEMES = ("postgresql://", "postgres://")
DEFAULT_TABLE = "feedmill_results"
#: Export formats.
Form = Literal["csv", "jsonl", "parquet"]
#: Seconds that `--follow` waits for a new entry before it checks for a signal.
ENTRY_WAIT_S = 1.0
#: The error of an export to files, which would contain rows twice if it read the stream again.
LOST = (
    "Redis lost its latest results, and its clock went back. Continuing this export would leave out or repeat rows. "
    "Export to a new OUT."
)
#: Seconds before each attempt to reconnect; the last value repeats until Redis and the database answer.
RECONNECT_DELAYS_S = (0.1, 0.25, 0.5, 1.0)

logger = logging.getLogger(__name__)


@excludes("--purge", "--columns", "--since", "--until", "--label", "--run", "--part-seconds", "--follow", "--latest")
@excludes("--follow", "--until")
@excludes("--latest", "--label")
@needs("--part-seconds", "--follow")
@with_settings("redis_url")
def export(
    settings: Settings,
    destination: Annotated[
        str,
        Argument(
            metavar="OUT",
            help="Output file, such as labels.parquet or labels.csv.gz; with --follow, a folder of parts by day; or a "
            "database, such as postgresql://user@host/database.",
        ),
    ],
    period: Period,
    form: Annotated[Form | None, Option("--format", help="File format (default: from the extension of OUT).")] = None,
    columns: Annotated[
        str | None, Option(help="Columns to write, in this order, such as id,label,title (default: all).")
    ] = None,
    label: Annotated[str | None, Option(help="Export only results with this best label.")] = None,
    run: RunName = None,
    latest: Annotated[
        bool, Option("--latest", help="Keep only the newest result of each post; needs a single file.")
    ] = False,
    table: Annotated[
        str | None,
        Option(metavar="NAME", help=f"Table in the database, NAME or SCHEMA.NAME (default: {DEFAULT_TABLE})."),
    ] = None,
    follow: Annotated[bool, Option("--follow", help="Keep exporting new results until Ctrl-C.")] = False,
    part_seconds: Annotated[
        float | None, Option(help=f"Seconds after which --follow closes a part (default: {DEFAULT_PART_S:.0f}).")
    ] = None,
    purge: Annotated[
        bool, Option("--purge", help="Export nothing; remove posts from OUT that were purged after the export.")
    ] = False,
    as_json: JsonSummary = False,
) -> None:
    """A file gets its name once it is complete. An interrupted export to a folder or a table resumes when the same
    command runs again; a single file starts over. Exits 1 if nothing was exported or results were missed.
    """
    is_table = destination.startswith(DATABASE_SCHEMES)
    is_address = "://" in destination or destination.startswith(("postgresql:", "postgres:"))
    out = Path(destination)
    of_name = None if is_table else format_of(out.name)
    kind = form or of_name
    is_folder = os.path.isdir(out)  # noqa: PTH112 - Path.is_dir raises for a name that is too long
    in_parts = follow or is_folder or (kind == "parquet" and of_name is None)
    needs_form = not (is_table or (purge and is_folder))
    of_file = any(value is not None for value in (form, columns, part_seconds)) or latest
    refuse(
        # Not quoted: it may contain a password.
        (not is_table and is_address, "OUT must be a path, or begin with postgresql://."),
        (destination == "-", "OUT must be a file or folder. `feedmill results --json` prints results."),
        (is_table and of_file, "A table has all columns and results. Leave out --format, --columns, --latest and "
         "--part-seconds."),
        (table is not None and not is_table, "--table needs a database: an OUT such as postgresql://user@host/database."),
        (needs_form and kind not in get_args(Form), f"Cannot tell the format of {out}. Give --format, or an "
         "OUT that ends in .parquet, .csv or .jsonl."),
        (follow and of_name is not None and not is_folder, "--follow needs a folder, to which it adds files until "
         f"it is stopped, such as --format {kind} {out.with_suffix('')}/"),
        (latest and in_parts, "--latest needs a single file, because finished parts cannot be changed. Give an OUT "
         "that ends in .parquet, .csv or .jsonl, without --follow."),
        (part_seconds is not None and part_seconds <= 0, "--part-seconds must be above 0."),
    )  # fmt: skip
    since, until = (date and max(0.0, date) for date in (period.since, period.until))
    selection = ExportFilter(since, until, label, latest, run)
    sinks = _sinks(is_table)
    notes = notes_console()
    with explain_unwritable(Path("the table") if is_table else out):  # an address may contain a password
        redis = connect(settings)
        reader = RowReader(redis, selection.until)
        if purge:
            removed = sinks.purge(*((destination, table or DEFAULT_TABLE) if is_table else (out, kind)), reader)
            typer.echo(
                json.dumps({"removed": removed}) if as_json else f"{counted(removed, 'row')} of purged posts removed"
            )
            return
        own = () if selection.run is None else _own_columns(redis, selection.run, follow, notes)
        redis.ping()  # before any file is created
        with note_signals(once=True) as stop, ExitStack() as stack:
            target: File | Folder | Table
            if is_table:
                target = stack.enter_context(sinks.opened(destination, table or DEFAULT_TABLE, selection, reader))
            else:
                # A folder keeps its columns when its run gets further ones.
                stored = sinks.read_state(out).get("columns") if in_parts else None
                chosen = (stored or (*COLUMNS, *own)) if columns is None else choose(columns, own)
                schema = sinks.schema_of(chosen, kind == "parquet")
                target = stack.enter_context(sinks.opened(out, kind, schema, selection, reader, in_parts))
            # Exempt imported modules from garbage collection, which runs often while 100,000 rows are created.
            gc.freeze()
            close_after = TRANSACTION_S if is_table else part_seconds or DEFAULT_PART_S
            this = ExportRun(reader, target, selection, stop, notes, follow, close_after)
            this.all()
    where = str(target) if is_table else f"the folder {out}" if in_parts else str(out)
    typer.echo(json.dumps(this.summary()) if as_json else this.described(where))
    raise typer.Exit(this.status)


def _sinks(of_tables: bool) -> ModuleType:
    """Return the module of sinks, which needs an extra."""
    with explain_missing("An export", "tables"):
        from feedmill.export import files  # noqa: PLC0415 - pyarrow
    if not of_tables:
        return files
    with explain_missing("PostgreSQL", "postgres"):
        from feedmill.export import postgres  # noqa: PLC0415 - psycopg
    return postgres


def _own_columns(redis: Redis, run: str, follow: bool, notes: Console) -> Sequence[str]:
    """Return the columns that the posts of a run carry. Raises UserError if there is no such run, unless following."""
    if not follow:
        check_run(redis, run)
    found = progress(redis, run)
    if found is None:
        notes.print(unknown_run(redis, run), markup=False)
    return found.columns if found else ()


class ExportRun:
    """One run of an export, from where the last run stopped.

    stop: signals received; the first one ends the run. close_after: seconds after which written rows are published.
    """

    def __init__(
        self,
        reader: RowReader,
        target: "File | Folder | Table",
        selection: ExportFilter,
        stop: list[int],
        notes: Console,
        follow: bool,
        close_after: float,
    ) -> None:
        self._reader, self._target, self._selection = reader, target, selection
        self._stop, self._notes, self._follow, self._close_after = stop, notes, follow, close_after
        self._place = target.place
        #: Rows that are not in a batch yet.
        self._pending: list[ResultRow] = []
        #: Entries of the posts' newest results, with `--latest`.
        self._newest: set[str] | None = None
        #: Attempts to reconnect since Redis and the database last answered.
        self._failures = 0
        #: Trimmed results; None if their number is unknown.
        self._missed: int | None = 0
        self._complete = False
        #: Rows exported, rows read, and rows to read, if known.
        self._rows = self._read = 0
        self._total: int | None = None

    def _figures(self, seconds: float) -> tuple[str, float, float | None]:
        return f"{self._rows:,} rows, {self._rows / max(seconds, 0.001):,.0f}/s", self._read, self._total

    def all(self) -> None:
        """Export to the end of the stream, or with `--follow` until a signal. While following, reconnect.

        Raises UserError, redis.exceptions.RedisError and OSError.
        """
        if self._target.resumed:
            self._notes.print("resuming where the last run stopped")
        with LiveBar(self._notes, self._figures):
            if self._selection.latest:
                self._newest = newest_entries(self._reader.chunks(self._place), self._selection)
            while not (self._stop or self._complete):
                try:
                    if self._failures:
                        self._pending.clear()
                        self._place = self._target.resume()  # type: ignore[union-attr]  # a single file follows nothing
                    self._read_to_end()
                    if self._follow and not self._stop:
                        self._reader.wait(self._place, ENTRY_WAIT_S)
                except (RedisError, DatabaseUnavailable) as fault:
                    self._wait_after(fault)
            if self._complete and self._selects_nothing():
                raise UserError(f"No result has the label {self._selection.label!r:.80}. Give its exact spelling.")
            if not self._failures and (self._complete or self._target.can_resume):
                self._publish()
        self._complete |= self._follow

    def _read_to_end(self) -> None:
        """Export the entries that the stream holds now, or stop after a chunk when a signal arrives."""
        for chunk in self._reader.chunks(self._place):
            if chunk.lost:
                self._start_over()
                return
            self._place = chunk.place
            rows = self._selection.of(chunk.rows)
            if self._newest is not None:
                rows = [row for row in rows if row.entry in self._newest]
            if chunk.missed:
                self._report_missed(chunk.missed.count)
            self._pending += rows
            if len(self._pending) >= BATCH_ROWS:
                self._flush()
            self._rows += len(rows)
            self._read += len(chunk.rows)
            self._total = None if chunk.left is None else self._read + chunk.left
            if self._is_due():
                self._publish()
            if self._failures:
                logger.warning("connected again; continuing at the same position")
            self._failures = 0
            if self._stop and not chunk.ended:
                return
        self._complete = not self._follow

    def _flush(self) -> None:
        from feedmill.export.files import batch_of  # noqa: PLC0415 - pyarrow, which takes time to import

        if self._pending:
            self._target.add(batch_of(self._pending, self._target.schema), self._place)
            self._pending.clear()

    def _publish(self) -> None:
        self._flush()
        self._target.close(self._place)

    def _is_due(self) -> bool:
        """Return whether to publish the rows that were added."""
        # A database that is full accepts connections, but no rows.
        is_unproven = self._failures > 0 and self._target.replaces_rows
        return self._target.can_resume and (is_unproven or time.monotonic() - self._target.begun >= self._close_after)

    def _wait_after(self, fault: RedisError | DatabaseUnavailable) -> None:
        """Wait before the next attempt to reconnect. Raises the fault if waiting does not help."""
        if not self._follow or (isinstance(fault, RedisError) and not is_temporary(fault)):
            raise fault
        if not self._failures:
            is_database = isinstance(fault, DatabaseUnavailable)
            where = clause(fault) if is_database else f"Redis is unreachable ({clause(fault)})"
            logger.warning("%s; retrying until it answers", where)
        time.sleep(RECONNECT_DELAYS_S[min(self._failures, len(RECONNECT_DELAYS_S) - 1)])
        self._failures += 1

    def _start_over(self) -> None:
        """Go back to the beginning of the stream for a table, which replaces rows. Raises UserError for files."""
        if not self._target.replaces_rows:
            raise UserError(LOST)
        logger.warning("Redis lost its latest results, and its clock went back: reading all results again")
        self._place = Place("0-0")

    def _selects_nothing(self) -> bool:
        """Return whether no result, of any time, has the selected label. An earlier OUT then stays as it is."""
        selection = self._selection
        if selection.label is None or selection.until is not None or self._target.resumed or self._rows:
            return False
        return not any(selection.of(chunk.rows) for chunk in self._reader.chunks(Place("0-0")))

    def _report_missed(self, count: int | None) -> None:
        """Count results that were trimmed before this export read them, at most `count`, and print a warning."""
        self._missed = None if count is None or self._missed is None else self._missed + count
        how_many = "an unknown number of results" if count is None else f"up to {count:,} result{'s' * (count != 1)}"
        self._notes.print(
            f"missed {how_many}: trimmed from the stream before they were exported. Export more often, or raise "
            f"{PREFIX}RESULTS_STREAM_LENGTH."
        )

    def summary(self) -> dict[str, Any]:
        """Return the counts for JSON."""
        target = self._target
        counts = {"rows": target.written, "removed": target.removed, "complete": self._complete}
        counts |= {"refused": target.refused} if target.refused else {}
        return counts | {"missed": self._missed}

    def described(self, out: str) -> str:
        """Return the counts as a sentence. out: what was exported to."""
        target = self._target
        parts = [f"{counted(target.written, 'row')} written to {out}"]
        if target.removed:
            parts.append(f"{counted(target.removed, 'row')} of purged posts removed")
        if target.refused:
            parts.append(f"{counted(target.refused, 'row')} refused by the database")
        if not self._complete:
            again = "resume" if target.can_resume else "start over"
            parts.append(f"stopped before the end; run the same command to {again}")
        return ", ".join(parts)

    @property
    def status(self) -> int:
        """The exit status."""
        if not self._complete and self._stop:
            return 128 + self._stop[0]
        nothing = not (self._target.written or self._target.resumed or self._follow)
        return int(nothing or self._missed != 0 or not self._complete or self._target.refused > 0)
