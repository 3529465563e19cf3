"""A file's posts, while what is wrong with its other records is shown and counted."""

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape

from producers.files import BadRecord, read
from shared.errors import InputError
from shared.messages import Post

#: Bad records shown one by one; the rest are counted.
BAD_RECORDS_SHOWN = 20


class Reading:
    """A file that breaks off costs none of the posts before: the error waits for `end`."""

    def __init__(self, file: str, notes: Console) -> None:
        self._file, self._notes = file, notes
        self._broken: InputError | None = None
        #: Records read, those with something wrong, and those of them that were skipped.
        self.records = self.wrong = self.skipped = 0

    def posts(self) -> Iterator[Post]:
        """The good ones."""
        try:
            for item in read(self._file):
                self.records += 1
                if isinstance(item, Post):
                    yield item
                else:
                    self._tell(item)
        except InputError as error:
            self._broken = error

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

    def _tell(self, bad: BadRecord) -> None:
        self.wrong += 1
        self.skipped += bad.skipped
        if self.wrong <= BAD_RECORDS_SHOWN:
            what = escape(f"{bad.where}: {bad.reason}")
            self._notes.print(f"{what} [dim]({'skipped' if bad.skipped else 'kept without it'})[/]")
