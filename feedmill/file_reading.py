"""A file's posts, while what is wrong with its other records is shown and counted."""

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape

from producers.exported import Labelled
from producers.files import Source
from producers.records import EVERYTHING, NAMES, BadRecord, Filters, Item, LeftOut
from shared.errors import InputError, printable
from shared.messages import Post

#: Bad records shown one by one; the rest are counted.
BAD_RECORDS_SHOWN = 20
#: Records that `trips` reads in one go, at most: few posts may be wanted of a dump of millions.
TRIP_RECORDS = 100_000


class Reading:
    """A file that breaks off costs none of the posts before: the error waits for `end`.

    filters: what is wanted of the file. start: records at its beginning that are passed over.
    id_column: the posts' id, by a name of its own. shows_ids: posts are looked for by them, so it is said where a
    file has none.
    """

    def __init__(
        self,
        file: str,
        notes: Console,
        filters: Filters = EVERYTHING,
        start: int = 0,
        id_column: str | None = None,
        shows_ids: bool = False,
    ) -> None:
        self._notes = notes
        self._shows_ids = shows_ids
        self._broken: InputError | None = None
        #: The file: its size, and how much of it was read.
        self.source = Source(file, filters, start, id_column)
        #: Records read, those passed over included; those left out by the filters, and since they are gone from Reddit.
        self.records, self.left_out, self.removed = start, 0, 0
        #: Records with something wrong, and those of them that were skipped.
        self.wrong = self.skipped = 0
        #: There is nothing more in it, and it did not break off.
        self.complete = False

    def posts(self) -> Iterator[Post]:
        """The good ones."""
        return (post for post in self._each(self.source.items()) if isinstance(post, Post))

    def labelled(self) -> Iterator[Post | Labelled]:
        """The good ones; of an export with what a model said of them."""
        return (found for found in self._each(self.source.labelled()) if found)

    def trips(self, posts: int) -> Iterator[list[Post]]:
        """The good ones, so many at a time, or fewer. Each time `records` says how far that is."""
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
        """Say how many records were wrong beyond those shown. Raises InputError where the file broke off."""
        if self.wrong > BAD_RECORDS_SHOWN:
            self._notes.print(f"… and {self.wrong - BAD_RECORDS_SHOWN:,} more records with something wrong")
        if self._broken:
            raise self._broken

    @property
    def told_all(self) -> bool:
        """Whether there is anything to say of it beyond its error."""
        return bool(self.records) or self._broken is None

    def _each(self, items: Iterator[Item | Labelled]) -> Iterator[Post | Labelled | None]:
        """What each record gives, or None."""
        try:
            for item in items:
                if self._shows_ids and self.source.columns_to_choose is not None:
                    self._shows_ids = False
                    self._tell_ids(self.source.columns_to_choose)
                if isinstance(item, BadRecord):
                    self._tell(item)
                    if not item.skipped:  # its post comes next
                        continue
                self.records += 1
                self.left_out += item is LeftOut.BY_FILTERS
                self.removed += item is LeftOut.REMOVED
                yield item if isinstance(item, Post | Labelled) else None
            self.complete = True
        except InputError as error:
            self._broken = error

    def _tell_ids(self, columns: list[str]) -> None:
        told = f"{self.source.name}: no column is an id ({', '.join(NAMES['id'])}), so ids are made of the text"
        if columns:
            told += f"; --id-column takes one of: {printable(', '.join(columns)):.200}"
        self._notes.print(escape(told))

    def _tell(self, bad: BadRecord) -> None:
        self.wrong += 1
        self.skipped += bad.skipped
        if self.wrong <= BAD_RECORDS_SHOWN:
            what = escape(printable(f"{bad.where}: {bad.reason}"))
            self._notes.print(f"{what} [dim]({'skipped' if bad.skipped else 'kept without it'})[/]")
