"""Read the posts of a file; print and count its bad records."""

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console

from feedmill.producers.exported import Labelled
from feedmill.producers.files import Source
from feedmill.producers.records import (
    DETECTED,
    FIELD_ALIASES,
    NO_FILTERS,
    NO_TEXT,
    REMOVED,
    BadRecord,
    Columns,
    Filters,
    Item,
    LeftOut,
    listed,
)
from feedmill.shared.errors import InputError, printable
from feedmill.shared.messages import Post

#: Reasons of bad records to print, each with its first record. Other records are only counted.
REASONS_SHOWN = 20
#: Maximum records read for one batch: filters may drop nearly all posts of a large dump.
TRIP_RECORDS = 100_000


class FileReading:
    """Read one file's posts and count its records.

    If reading fails, the posts read before the error are still yielded, and `end` raises the error.

    filters: posts to keep. start: number of records to skip at the beginning. columns, encoding: see `Source`.
    shows_ids: print a note if the file has no id column, for commands that find posts by id.
    text_only: do not report invalid optional fields, for commands that use only the text.
    """

    def __init__(
        self,
        file: str,
        notes: Console,
        filters: Filters = NO_FILTERS,
        start: int = 0,
        columns: Columns = DETECTED,
        encoding: str | None = None,
        shows_ids: bool = False,
        text_only: bool = False,
    ) -> None:
        self._notes = notes
        self._id_column = columns.id
        self._shows_ids = shows_ids
        self._text_only = text_only
        #: Number of bad records by reason, or by the column of an invalid value.
        self._bad: Counter[str] = Counter()
        self._broken: InputError | None = None
        #: The file, with its size and the bytes read so far.
        self.source = Source(file, filters, start, columns, encoding)
        #: Records read (with the skipped ones at the start), dropped by the filters, and removed from Reddit.
        self.records, self.left_out, self.removed = start, 0, 0
        #: Skipped records, and those of them that have no text, or a removed one.
        self.skipped = self.without_text = 0
        #: Those of `without_text` whose text was deleted or removed on Reddit.
        self.removed_texts = 0
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
        """Print sums of what was not shown. Raises InputError if the file could not be read to its end."""
        for what, count in self._bad.items():
            if count > 1:
                self._notes.print(printable(f"… and {count - 1:,} more: {what}"), markup=False)
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

    def _note_missing_ids(self, columns: Sequence[str]) -> None:
        note = f"{self.source.name}: no id column ({', '.join(FIELD_ALIASES['id'])}), so ids are derived from the text"
        if columns:
            note += f"; set --id-column to one of: {listed(columns)}"
        self._notes.print(note, markup=False)

    def _report_bad(self, bad: BadRecord) -> None:
        """Count a bad record, and print it if it is the first one with its reason."""
        if not bad.skipped and self._text_only and bad.column not in ("", self._id_column):
            return
        self.skipped += bad.skipped
        self.without_text += bad.skipped and bad.reason in (NO_TEXT, REMOVED)
        self.removed_texts += bad.skipped and bad.reason == REMOVED
        what = f"column {bad.column}" if bad.column and not bad.skipped else bad.reason
        if what not in self._bad and len(self._bad) >= REASONS_SHOWN:
            what = "bad records"
        elif what not in self._bad:
            outcome = "skipped" if bad.skipped else f"kept without {what}" if bad.column else "kept"
            self._notes.print(printable(f"{bad.where}: {bad.reason} ({outcome})"), markup=False)
        self._bad[what] += 1
