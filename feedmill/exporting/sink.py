"""The destination of an export, as the export sees it.

A new kind of sink is one module with a `Destination`, and an entry in `DATABASES` of `request.py`.
tests/integration/test_sinks.py runs the same tests on every kind.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from feedmill.exporting.columns import ExportFilter
from feedmill.outcomes.rows import Place, RowReader

if TYPE_CHECKING:
    import pyarrow as pa


#: Seconds after which an export that follows the stream closes a part by default.
DEFAULT_PART_S = 600.0


class Sink(Protocol):
    """A file, folder or table that is being written.

    Methods raise UserError, OSError, and redis.exceptions.RedisError if they look for purged
    posts; DatabaseUnavailable if a later `resume` may succeed.
    """

    @property
    def schema(self) -> "pa.Schema":
        """Schema of the batches."""

    @property
    def can_resume(self) -> bool:
        """True if a later run continues this one."""

    @property
    def replaces_rows(self) -> bool:
        """True if a row replaces an earlier one of the same result."""

    @property
    def publish_interval_s(self) -> float:
        """Seconds after which rows that were added are published by default."""

    @property
    def resumed(self) -> bool:
        """True if this run continues an earlier one."""

    @property
    def place(self) -> Place:
        """Place in the stream up to which rows are written."""

    @property
    def begun(self) -> float:
        """Time since which rows wait to be published, in monotonic seconds."""

    @property
    def written(self) -> int:
        """Number of published rows, or of those that will be."""

    @property
    def removed(self) -> int:
        """Number of rows that were removed because their posts were purged."""

    @property
    def refused(self) -> int:
        """Number of rows that the sink refused and has not accepted since."""

    def add(self, batch: "pa.RecordBatch", place: Place) -> None:
        """Add rows. place: the reader's place after them."""

    def close(self, place: Place) -> None:
        """Publish the rows added so far, without those of purged posts."""

    def resume(self) -> Place:
        """Discard the rows that were not published, and return the place to read from.

        Reconnects if needed.
        """


class Destination(Protocol):
    """The place of an export, whether or not it exists."""

    def __str__(self) -> str:
        """Return the place for messages, without a password."""

    def opened(
        self,
        selection: ExportFilter,
        reader: RowReader,
        run_columns: Sequence[str],
        stop: Sequence[int],
    ) -> AbstractContextManager[Sink]:
        """Open and lock the sink until the block ends. An earlier export is continued if its
        options are the same, and its sink can be resumed.

        run_columns: columns that the posts of the selected run carry. stop: not empty once the
        export is to end. Raises UserError, OSError and redis.exceptions.RedisError.
        """

    def purge(self, reader: RowReader, runs: Collection[str] = ()) -> int:
        """Remove purged posts, and those of these purged runs, from a finished export; return the
        number of removed rows.

        Raises as `opened` does.
        """

    def records(self, reader: RowReader) -> Iterator[dict[str, Any]]:
        """Yield the rows of a finished export by column: at least `id`, and `run`, `subreddit` and
        `extra` if it has them.

        Raises as `opened` does.
        """
