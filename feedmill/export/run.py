"""Run an export: read the stream, write rows to the target, reconnect, report progress and missed results."""

import logging
import time
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError
from rich.console import Console

from feedmill.console import LiveBar, counted
from feedmill.export.columns import ExportFilter
from feedmill.reading.rows import Place, ResultRow, RowReader
from feedmill.shared.errors import DatabaseUnavailable, UserError, clause
from feedmill.shared.redis_errors import is_temporary
from feedmill.shared.settings import PREFIX

if TYPE_CHECKING:
    from feedmill.export.files import File, Folder
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
            if chunk.missed:
                self._report_missed(chunk.missed.count)
            self._pending += rows
            if len(self._pending) >= self._target.batch_rows:
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
        from feedmill.export.batches import batch_of  # noqa: PLC0415 - pyarrow, which takes time to import

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
        """Return whether no result has the selected label. An earlier OUT then stays as it is."""
        selection = self._selection
        is_searched = selection.label is not None and selection.until is None and not self._target.resumed
        return is_searched and not self._rows

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
