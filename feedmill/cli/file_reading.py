"""Read the posts of a file; print and count its bad records."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape

from producers.exported import Labelled
from producers.files import Source
from producers.records import FIELD_ALIASES, NO_FILTERS, BadRecord, Filters, Item, LeftOut
from shared.errors import InputError, printable
from shared.messages import Post

#: Bad records to print; the rest are only counted.
BAD_RECORDS_SHOWN = 20
#: Maximum records read for one batch: filters may drop nearly all posts of a large dump.
TRIP_RECORDS = 100_000


class FileReading:
    """Read one file's posts and count its records.

    If reading fails, the posts read before the error are still yielded, and `end` raises the error.

    filters: posts to keep. start: number of records to skip at the beginning. id_column: name of the column with
    the posts' ids. shows_ids: print a note if the file has no id column, for commands that find posts by id. keep:
    columns that the posts carry in `extra`.
    """

    def __init__(
        self,
        file: str,
        notes: Console,
        filters: Filters = NO_FILTERS,
        start: int = 0,
        id_column: str | None = None,
        shows_ids: bool = False,
        keep: Sequence[str] = (),
    ) -> None:
        self._notes = notes
        self._shows_ids = shows_ids
        self._broken: InputError | None = None
        #: The file, with its size and the bytes read so far.
        self.source = Source(file, filters, start, id_column, keep)
        #: Records read (with the skipped ones at the start), dropped by the filters, and removed from Reddit.
        self.records, self.left_out, self.removed = start, 0, 0
        #: Bad records, and how many of them were skipped.
        self.wrong = self.skipped = 0
        #: True once the whole file was read without an error.
        self.complete = False

    def posts(self) -> Iterator[Post]:
        """Yield the valid posts."""
        return (post for post in self._each(self.source.items()) if isinstance(post, Post))

    def labelled(self) -> Iterator[Post | Labelled]:
        """Yield the valid posts. Posts of an export come as Labelled, with their classification."""
        return (found for found in self._each(self.source.labelled()) if found)

    def trips(self, posts: int) -> Iterator[list[Post]]:
        """Yield batches of at most `posts` valid posts. When a batch is yielded, `records` includes its records."""
        trip: list[Post] = []
        begun = self.records
        for post in self._each(self.source.items()):
            if isinstance(post, Post):
                trip.append(post)
            if len(trip) == posts or self.records - begun == TRIP_RECORDS:
                yield trip
                trip, begun = [], self.records
        yield trip

    def end(self) -> None:
        """Print how many bad records were not shown. Raises InputError if the file could not be read to its end."""
        if self.wrong > BAD_RECORDS_SHOWN:
            self._notes.print(f"… and {self.wrong - BAD_RECORDS_SHOWN:,} more bad records")
        if self._broken:
            raise self._broken

    @property
    def has_content(self) -> bool:
        """Return True if any record was read, or if there was no error."""
        return bool(self.records) or self._broken is None

    def _each(self, items: Iterator[Item | Labelled]) -> Iterator[Post | Labelled | None]:
        """Yield each record's post, or None for a record without one."""
        try:
            for item in items:
                if self._shows_ids and self.source.columns_to_choose is not None:
                    self._shows_ids = False
                    self._note_missing_ids(self.source.columns_to_choose)
                if isinstance(item, BadRecord):
                    self._report_bad(item)
                    if not item.skipped:  # the record's post is the next item
                        continue
                self.records += 1
                self.left_out += item is LeftOut.BY_FILTERS
                self.removed += item is LeftOut.REMOVED
                yield item if isinstance(item, Post | Labelled) else None
            self.complete = True
        except InputError as error:
            self._broken = error

    def _note_missing_ids(self, columns: list[str]) -> None:
        note = f"{self.source.name}: no id column ({', '.join(FIELD_ALIASES['id'])}), so ids are derived from the text"
        if columns:
            note += f"; set --id-column to one of: {printable(', '.join(columns)):.200}"
        self._notes.print(escape(note))

    def _report_bad(self, bad: BadRecord) -> None:
        self.wrong += 1
        self.skipped += bad.skipped
        if self.wrong <= BAD_RECORDS_SHOWN:
            what = escape(printable(f"{bad.where}: {bad.reason}"))
            self._notes.print(f"{what} [dim]({'skipped' if bad.skipped else 'kept without this field'})[/]")
