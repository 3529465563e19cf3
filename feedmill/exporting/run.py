"""Export results: read the stream from where the last run stopped, and write to a sink."""

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from redis.exceptions import RedisError

from feedmill.exporting.columns import BATCH_ROWS, ExportFilter, newest_entries
from feedmill.exporting.request import ExportRequest
from feedmill.exporting.sink import Sink
from feedmill.outcomes.copies import note_copy
from feedmill.outcomes.rows import (
    Chunk,
    Place,
    ResultRow,
    RowReader,
    check_run,
    unknown_run,
)
from feedmill.shared.backoff import Backoff
from feedmill.shared.broker import connect, wait_while_starting
from feedmill.shared.errors import DatabaseUnavailable, UserError, clause
from feedmill.shared.redis_errors import is_temporary, trouble
from feedmill.shared.runs import progress
from feedmill.shared.settings import PREFIX, Settings

#: Seconds that an export that follows waits for a new entry before it checks for a signal.
ENTRY_WAIT_S = 1.0
#: The error of an export to files, which would contain rows twice if it read the stream again.
LOST = (
    "Redis lost its latest results, and its clock went back. Continuing this export would leave "
    "out or repeat rows. Export to a new OUT."
)
#: Pauses before each attempt to reconnect, until Redis and the database answer.
RECONNECTIONS = Backoff(first_s=0.1, max_s=1.0)

logger = logging.getLogger(__name__)


class ExportCounts(NamedTuple):
    """The outcome of an export.

    Attributes:
        rows: Number of rows written.
        removed: Number of rows of purged posts that were removed.
        refused: Number of rows that the database refused; it keeps them for the next run.
        missed: Number of results that were trimmed from the stream before they were exported, at
            most; None if unknown.
        complete: False if the export was stopped before the end of the stream.
        resumed: True if it continued an earlier run.
        can_resume: True if the next run continues this one. A single file starts over.
    """

    rows: int
    removed: int
    refused: int
    missed: int | None
    complete: bool
    resumed: bool
    can_resume: bool


class ExportObserver:
    """Receives the events of an export. This one logs them."""

    def unknown_run(self, message: str) -> None:
        """The selected run does not exist yet; an export that follows waits for it."""
        logger.warning("%s", message)

    def resumed(self) -> None:
        """The export continues an earlier one."""
        logger.info("resuming where the last run stopped")

    def missed(self, message: str) -> None:
        """Results were trimmed before they were exported."""
        logger.warning("%s", message)

    def watching(self, _run: "ExportRun") -> AbstractContextManager[object]:
        """Return a block that lasts while rows are exported, such as a progress bar."""
        return nullcontext()


class Export:
    """An export whose destination and Redis were checked, ready to run.

    Methods raise UserError, OSError and redis.exceptions.RedisError.
    """

    def __init__(
        self,
        request: ExportRequest,
        settings: Settings,
        observer: ExportObserver | None = None,
    ) -> None:
        """Check the request, connect to Redis, and wait while Redis starts if the export follows
        the stream.
        """
        self._request = request
        self._observer = observer or ExportObserver()
        self.destination = request.open_destination()
        self._settings = settings
        self._redis = connect(settings)
        self._run_columns: Sequence[str] = ()
        selection = request.selection
        with request.explained():
            if request.follow:
                wait_while_starting(self._redis, settings)
            self._reader = RowReader(self._redis, selection.until)
            if request.purge:
                return
            if selection.run is not None:
                self._run_columns = self._columns_of(selection.run)
            self._redis.ping()  # before any file is created

    def _columns_of(self, run: str) -> Sequence[str]:
        """Return the columns that the posts of a run carry.

        Raises UserError if there is no such run, unless following.
        """
        if not self._request.follow:
            check_run(self._redis, run)
        counts = progress(self._redis, run)
        if counts is None:
            message = unknown_run(self._redis, run)
            self._observer.unknown_run(message)
            return ()
        return counts.columns

    def run(self, stop: Sequence[int] = ()) -> ExportCounts:
        """Export to the end of the stream, or if the export follows, until `stop` is not empty."""
        request = self._request
        with request.explained():
            opened_sink = self.destination.opened(
                request.selection,
                self._reader,
                self._run_columns,
                stop,
            )
            with opened_sink as sink:
                # before the first row is published
                note_copy(self._settings, request.copy)
                export = ExportRun(
                    self._reader,
                    sink,
                    request.selection,
                    stop,
                    follow=request.follow,
                    close_after=request.part_seconds or sink.publish_interval_s,
                    observer=self._observer,
                )
                export.all()
        return export.counts()

    def purge(self) -> int:
        """Remove posts that were purged after the export; return the number of removed rows."""
        with self._request.explained():
            return self.destination.purge(self._reader)

    def close(self) -> None:
        """Close the connection to Redis."""
        self._redis.close()


class ExportRun:
    """One run of an export, from where the last run stopped.

    stop: signals received; the first one ends the run. close_after: seconds after which written
    rows are published.
    """

    def __init__(
        self,
        reader: RowReader,
        sink: Sink,
        selection: ExportFilter,
        stop: Sequence[int],
        *,
        follow: bool,
        close_after: float,
        observer: ExportObserver | None = None,
    ) -> None:
        self._reader = reader
        self._sink = sink
        self._selection = selection
        self._stop = stop
        self._observer = observer or ExportObserver()
        self._follow = follow
        self._close_after = close_after
        self._place = sink.place
        #: Rows that are not in a batch yet.
        self._pending: list[ResultRow] = []
        #: Entries of the posts' newest results, if only these are exported.
        self._newest: set[str] | None = None
        #: Attempts to reconnect since Redis and the database last answered.
        self._failures = 0
        #: Trimmed results; None if their number is unknown.
        self._missed: int | None = 0
        self._complete = False
        #: Number of rows exported.
        self.rows = 0
        #: Number of rows read.
        self.read = 0
        #: Number of rows to read, if known.
        self.total: int | None = None

    def all(self) -> None:
        """Export to the end of the stream, or if following, until a signal.

        While following, reconnect.

        Raises UserError, redis.exceptions.RedisError and OSError.
        """
        if self._sink.resumed:
            self._observer.resumed()
        with self._observer.watching(self):
            if self._selection.latest:
                chunks = self._reader.chunks(self._place)
                self._newest = newest_entries(chunks, self._selection)
            while not self._stop and not self._complete:
                try:
                    self._read_once()
                except (RedisError, DatabaseUnavailable) as fault:
                    self._handle_fault(fault)
            if self._complete and self._selects_nothing():
                raise UserError(
                    f"No result has the label {self._selection.label!r:.80}. Give its "
                    "exact spelling."
                )
            self._publish_last()
        if self._follow:
            self._complete = True

    def _read_once(self) -> None:
        """Export what the stream holds now, and if following, wait for more."""
        if self._failures:
            self._pending.clear()
            self._place = self._sink.resume()
        self._read_to_end()
        if self._follow and not self._stop:
            self._reader.wait(self._place, ENTRY_WAIT_S)

    def _publish_last(self) -> None:
        """Publish the last rows, unless the file is incomplete, or the sink does not answer."""
        is_publishable = self._complete or self._sink.can_resume
        if self._failures or not is_publishable:
            return
        try:
            self._publish()
        except DatabaseUnavailable as fault:
            self._handle_fault(fault)

    def _read_to_end(self) -> None:
        """Export the entries that the stream holds now, or stop after a chunk when a signal
        arrives.
        """
        for chunk in self._reader.chunks(self._place):
            if chunk.lost:
                self._start_over()
                return
            self._add(chunk)
            if self._is_due():
                self._publish()
            if self._failures:
                logger.warning("connected again; continuing at the same position")
            self._failures = 0
            if self._stop and not chunk.ended:
                return
        self._complete = not self._follow

    def _add(self, chunk: Chunk) -> None:
        """Add the selected rows of a chunk, and count them."""
        self._place = chunk.place
        missed = chunk.missed
        if missed:
            self._report_missed(missed.count)

        rows = self._selection.of(chunk.rows)
        newest = self._newest
        if newest is not None:
            rows = [row for row in rows if row.entry in newest]
        self._pending.extend(rows)
        if len(self._pending) >= BATCH_ROWS:
            self._flush()

        self.rows += len(rows)
        self.read += len(chunk.rows)
        if chunk.left is None:
            self.total = None
        else:
            self.total = self.read + chunk.left

    def _flush(self) -> None:
        """Pass the pending rows to the sink."""
        # pyarrow, which takes time to import
        from feedmill.exporting.files import batch_of  # noqa: PLC0415

        if self._pending:
            batch = batch_of(self._pending, self._sink.schema)
            self._sink.add(batch, self._place)
            self._pending.clear()

    def _publish(self) -> None:
        self._flush()
        self._sink.close(self._place)

    def _is_due(self) -> bool:
        """Return whether to publish the rows that were added."""
        sink = self._sink
        if not sink.can_resume:
            return False
        # A database that is full accepts connections, but no rows.
        if self._failures > 0 and sink.replaces_rows:
            return True
        age = time.monotonic() - sink.begun
        return age >= self._close_after

    def _handle_fault(self, fault: RedisError | DatabaseUnavailable) -> None:
        """Give up after a signal, or else pause before the next attempt to connect.

        Raises the fault if another attempt cannot help.
        """
        if self._stop and isinstance(fault, DatabaseUnavailable):
            self._give_up(fault)
            return
        self._check_retryable(fault)
        if not self._failures:
            logger.warning("%s; retrying until it answers", _fault_text(fault))
        time.sleep(RECONNECTIONS.pause_s(self._failures))
        self._failures += 1

    def _give_up(self, fault: DatabaseUnavailable) -> None:
        """End the export without the database's answer, for which the signal ended the wait.

        The position in the table tells the next run what was written.
        """
        logger.warning("%s; stopping without an answer", clause(fault))
        self._failures += 1
        self._complete = False

    def _check_retryable(self, fault: RedisError | DatabaseUnavailable) -> None:
        """Raise the fault if another attempt cannot help, or if the export does not follow."""
        if not self._follow:
            raise fault
        if isinstance(fault, RedisError) and not is_temporary(fault):
            raise fault

    def _start_over(self) -> None:
        """Go back to the beginning of the stream for a table, which replaces rows.

        Raises UserError for files.
        """
        if not self._sink.replaces_rows:
            raise UserError(LOST)
        logger.warning(
            "Redis lost its latest results, and its clock went back: reading all results again"
        )
        self._place = Place("0-0")

    def _selects_nothing(self) -> bool:
        """Return whether no result, of any time, has the selected label.

        An earlier file then stays as it is.
        """
        selection = self._selection
        if selection.label is None or selection.until is not None:
            return False
        if self._sink.resumed or self.rows:
            return False
        chunks = self._reader.chunks(Place("0-0"))
        has_match = any(selection.of(chunk.rows) for chunk in chunks)
        return not has_match

    def _report_missed(self, count: int | None) -> None:
        """Count results that were trimmed before this export read them, at most `count`."""
        if count is None or self._missed is None:
            self._missed = None
        else:
            self._missed += count
        if count is None:
            how_many = "an unknown number of results"
        elif count == 1:
            how_many = "up to 1 result"
        else:
            how_many = f"up to {count:,} results"
        self._observer.missed(
            f"missed {how_many}: trimmed from the stream before they were exported. Export more "
            f"often, or raise {PREFIX}RESULTS_STREAM_LENGTH."
        )

    def counts(self) -> ExportCounts:
        """Return what was exported."""
        sink = self._sink
        # an interrupted single file is discarded
        is_written = self._complete or sink.can_resume
        return ExportCounts(
            rows=sink.written if is_written else 0,
            removed=sink.removed,
            refused=sink.refused,
            missed=self._missed,
            complete=self._complete,
            resumed=sink.resumed,
            can_resume=sink.can_resume,
        )


def _fault_text(fault: RedisError | DatabaseUnavailable) -> str:
    """Format what does not answer, and why."""
    if isinstance(fault, DatabaseUnavailable):
        return clause(fault)
    reason = clause(fault)
    return f"Redis {trouble(fault)} ({reason})"
