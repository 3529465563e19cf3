"""Read the posts of a file; print and count its bad records."""

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape

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

#: Skipped records to print; and those with the same reason. The rest are only counted.
BAD_RECORDS_SHOWN, SAME_REASON_SHOWN = 20, 3
#: Maximum records read for one batch: filters may drop nearly all posts of a large dump.
TRIP_RECORDS = 100_000
#: Posts whose ids are compared for repetitions, in about 60 MB.
MAX_COMPARED = 500_000


class FileReading:
    """Read one file's posts and count its records.

    If reading fails, the posts read before the error are still yielded, and `end` raises the error.

    filters: posts to keep. start: number of records to skip at the beginning. columns, encoding: see `Source`.
    shows_ids: print a note if the file has no id column, and count repeated ids, for commands that find posts by id.
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
        self._shows_ids = self._counts_ids = shows_ids
        #: Hashes of the posts' ids, and of each id with its text.
        self._seen: set[int] = set()
        self._text_only = text_only
        #: Number of posts kept without an invalid value, and the first such post, by column.
        self._kept: dict[str, tuple[int, BadRecord]] = {}
        #: Skipped records and those of them that were printed, by reason. Only the first reasons are counted.
        self._reasons: Counter[str] = Counter()
        self._shown: Counter[str] = Counter()
        self._broken: InputError | None = None
        #: The file, with its size and the bytes read so far.
        self.source = Source(file, filters, start, columns, encoding)
        #: Records read (with the skipped ones at the start), dropped by the filters, and removed from Reddit.
        self.records, self.left_out, self.removed = start, 0, 0
        #: Bad records; how many of them were skipped; and how many of those have no text, or a removed one.
        self.wrong = self.skipped = self.without_text = 0
        #: Those of `without_text` whose text was deleted or removed on Reddit.
        self.removed_texts = 0
        #: Posts with the id of an earlier one, but another text.
        self.repeated = 0
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
        """Print sums of what was not shown yet. Raises InputError if the file could not be read to its end."""
        for reason, count in (self._reasons - self._shown).items():
            self._notes.print(f"… and {count:,} more: {escape(printable(reason))} [dim](skipped)[/]")
        if others := self.skipped - self._reasons.total():
            self._notes.print(f"… and {others:,} more bad records")
        for column, (count, first) in self._kept.items():
            what = escape(printable(f"{first.where}: {first.reason}"))
            named = "" if first.reason.startswith((f"{column}:", f"{column} ")) else f"column {printable(column)}, "
            posts = "kept without this field" if count == 1 else f"{count:,} posts kept without this field"
            if not column:
                named, posts = "", f"{count:,} post{'' if count == 1 else 's'}"
            self._notes.print(f"{what} [dim]({escape(named)}{posts})[/]")
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
                if self._counts_ids and isinstance(item, Post):
                    self._count_id(item)
                yield item if isinstance(item, Post | Labelled) else None
            self.complete = True
        except InputError as error:
            self._broken = error

    def _count_id(self, post: Post) -> None:
        """Count a post if an earlier one with another text has its id."""
        identity, whole = hash(post.id), hash((post.id, post.text))
        if identity in self._seen:
            self.repeated += whole not in self._seen
        if len(self._seen) < 2 * MAX_COMPARED:
            self._seen.update((identity, whole))

    def _note_missing_ids(self, columns: Sequence[str]) -> None:
        note = f"{self.source.name}: no id column ({', '.join(FIELD_ALIASES['id'])}), so ids are derived from the text"
        if columns:
            note += f"; set --id-column to one of: {listed(columns)}"
        self._notes.print(escape(note))

    def _report_bad(self, bad: BadRecord) -> None:
        """Count a bad record, and print it unless many others were printed."""
        if not bad.skipped:
            if not self._text_only or bad.column in ("", self._id_column):
                self.wrong += bool(bad.column)
                count, first = self._kept.get(bad.column, (0, bad))
                self._kept[bad.column] = (count + 1, first)
            return
        self.wrong += 1
        self.skipped += 1
        self.without_text += bad.reason in (NO_TEXT, REMOVED)
        self.removed_texts += bad.reason == REMOVED
        if bad.reason in self._reasons or len(self._reasons) < BAD_RECORDS_SHOWN:
            self._reasons[bad.reason] += 1
            if self._shown[bad.reason] < SAME_REASON_SHOWN and self._shown.total() < BAD_RECORDS_SHOWN:
                self._shown[bad.reason] += 1
                self._notes.print(f"{escape(printable(f'{bad.where}: {bad.reason}'))} [dim](skipped)[/]")
