"""Run an export: read the stream, write rows to the target, reconnect, report progress and missed results."""

import json
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from redis.exceptions import RedisError
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from feedmill.export import writer
from feedmill.export.single_file import File, ParquetFile
from feedmill.export.writer import ExportFilter, Folder, Target
from feedmill.reading.entry_ids import seconds_of
from feedmill.reading.labels import unknown_label
from feedmill.reading.rows import Chunk, RowReader
from feedmill.stack.signals import EXIT_SIGNALS, handle_signals, not_ignored
from shared.errors import DatabaseUnavailable, UserError, clause
from shared.redis_errors import is_temporary
from shared.scripts.stream import Place
from shared.settings import PREFIX

if TYPE_CHECKING:
    from feedmill.export.postgres import Table

logger = logging.getLogger(__name__)

#: Seconds that `--follow` waits for a new entry before it checks for a signal.
ENTRY_WAIT_S = 1.0
#: The error of an export to files, which would contain rows twice if it read the stream again.
LOST = (
    "Redis lost its latest results, and its clock went back. Continuing this export would leave out or repeat rows. "
    "Export to a new OUT."
)
#: Seconds before each attempt to reconnect; the last value repeats until Redis and the database answer.
RECONNECT_DELAYS_S = (0.1, 0.25, 0.5, 1.0)


class StopRequest:
    """Flag that the first signal sets to stop the export."""

    is_set = False
    #: Number of the signal.
    number = 0


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Record the first SIGTERM, SIGHUP or Ctrl-C inside the block, so that the export can finish its current file.

    A second signal has its usual effect.
    """
    request = StopRequest()
    before = {number: signal.getsignal(number) for number in not_ignored(*EXIT_SIGNALS)}

    def note(number: int, _: object) -> None:
        request.is_set, request.number = True, number
        signal.signal(number, before[signal.Signals(number)])  # a second signal ends the export at once

    with handle_signals(note, *before):
        yield request


class ExportRun:
    """One run of an export, from where the last run stopped."""

    def __init__(
        self,
        reader: RowReader,
        target: "Target | Table",
        filters: ExportFilter,
        stop: StopRequest,
        notes: Console,
        follow: bool,
        part_seconds: float,
    ) -> None:
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
        with _Bar(self._notes) as bar:
            if isinstance(target, File | ParquetFile) or (isinstance(target, Folder) and not self._follow):
                self._read_to_end(target, bar)
            else:
                self._follow_stream(target, bar)

    def _read_to_end(self, target: Target, bar: "_Bar") -> None:
        """Export every entry that the stream holds now, or stop after a chunk when a signal arrives."""
        place = target.place
        for chunk in self._reader.chunks(place):
            if chunk.lost:
                raise UserError(LOST)
            place = chunk.place
            self._add(chunk, bar)
            if self._stop.is_set and not chunk.ended:
                target.stop(place)
                return
        if not (target.written or target.resumed):
            self._check_label()
        target.close(place)
        self._complete = True

    def _check_label(self) -> None:
        """Raise UserError if no result has the wanted label. An earlier OUT then stays as it is."""
        wanted = self._filters
        if wanted.label is None or wanted.until is not None:
            return
        if problem := unknown_label(self._reader, wanted.label, wanted.run):
            raise UserError(problem)

    def _follow_stream(self, target: "Folder | Table", bar: "_Bar") -> None:
        """Export entries until a signal, or to the end. While following, reconnect after a lost connection.

        Rows of a table that was not written yet, or of an open part, are then read again.
        """
        place, failures, swept_at = target.place, 0, time.monotonic()
        while not (self._stop.is_set or self._complete):
            try:
                if failures:
                    place = target.resume()
                chunk = self._reader.fetch(place)
                if chunk.lost:
                    place = self._start_over(target)
                    continue
                place = chunk.place
                self._add(chunk, bar)
                # A database that is full accepts connections, but no rows.
                is_unproven = failures > 0 and not isinstance(target, Folder)
                if is_unproven or time.monotonic() - target.begun >= self._part_seconds:
                    target.close(place)
                if isinstance(target, Folder) and time.monotonic() - swept_at >= writer.SWEEP_INTERVAL_S:
                    target.sweep()
                    swept_at = time.monotonic()
                if failures:
                    logger.warning("connected again; continuing at the same position")
                failures = 0
                if chunk.ended and self._follow:
                    self._reader.wait(place, ENTRY_WAIT_S)
                self._complete = chunk.ended and not self._follow
            except (RedisError, DatabaseUnavailable) as fault:
                if not self._follow or (isinstance(fault, RedisError) and not is_temporary(fault)):
                    raise
                if not failures:
                    is_database = isinstance(fault, DatabaseUnavailable)
                    where = clause(fault) if is_database else f"Redis is unreachable ({clause(fault)})"
                    logger.warning("%s; retrying until it answers", where)
                time.sleep(RECONNECT_DELAYS_S[min(failures, len(RECONNECT_DELAYS_S) - 1)])
                failures += 1
        if not failures:
            target.close(place)
        self._complete |= self._follow

    def _start_over(self, target: "Folder | Table") -> Place:
        """Return the beginning of the stream for a table, which replaces rows. Raises UserError for a folder."""
        if isinstance(target, Folder):
            raise UserError(LOST)
        logger.warning("Redis lost its latest results, and its clock went back: reading all results again")
        return Place("0-0")

    def _add(self, chunk: Chunk, bar: "_Bar") -> None:
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

    def report(self, out: str | None, as_json: bool) -> int:
        """Print a summary; return the exit status. out: what was exported to; None for standard output."""
        target = self._target
        rows = target.written - (self._before if isinstance(target, Folder) else 0)
        refused = 0 if isinstance(target, Folder | File | ParquetFile) else target.refused
        if as_json:
            summary = {"rows": rows, "removed": target.removed, "complete": self._complete}
            summary |= {"refused": refused} if refused else {}
            typer.echo(json.dumps(summary | {"missed": self._missed if self._any_missed else 0}))
        else:
            again = "resume" if target.can_resume and out else "start over"
            parts = [f"{format_rows(rows)} written" + (f" to {out}" if out else "")]
            if target.removed:
                parts.append(f"{format_rows(target.removed)} of purged posts removed")
            if refused:
                parts.append(f"{format_rows(refused)} refused by the database")
            if not self._complete:
                parts.append(f"stopped before the end; run the same command to {again}")
            typer.echo(", ".join(parts), err=out is None)
        if not self._complete and self._stop.number:
            return 128 + self._stop.number
        nothing = not rows and not target.resumed and not self._follow
        return 1 if nothing or refused or self._any_missed or not self._complete else 0


def format_rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"


class _Bar(Progress):
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
