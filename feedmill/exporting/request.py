"""A request for an export: where to, in which form, and what.

The command and `feedmill.export` make the same requests. Errors name a flag or an argument, as the
caller does.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from feedmill.exporting.columns import ExportFilter
from feedmill.exporting.sink import Destination
from feedmill.outcomes.copies import Copy, without_password
from feedmill.shared.atomic_files import is_special
from feedmill.shared.errors import (
    UserError,
    explain_missing,
    explain_unwritable,
    printable,
)
from feedmill.tables import format_of

#: Formats of files.
Form = Literal["csv", "jsonl", "parquet"]
#: The default table in a database.
DEFAULT_TABLE = "feedmill_results"


def _open_postgres(address: str, table: str) -> Destination:
    with explain_missing("PostgreSQL", "postgres"):
        from feedmill.exporting import postgres  # noqa: PLC0415 - psycopg
    return postgres.TableDestination(address, table)


class Database(NamedTuple):
    """A kind of database that exports write to."""

    #: Beginnings of its addresses, the usual one first.
    schemes: tuple[str, ...]
    #: Rest of an example of an address.
    example: str
    #: Returns the destination for an address and the name of a table. Raises UserError if a
    #: package is missing.
    open: Callable[[str, str], Destination]

    @property
    def example_address(self) -> str:
        return self.schemes[0] + self.example


#: All kinds of databases, the usual one first.
DATABASES = (
    Database(
        schemes=("postgresql://", "postgres://"),
        example="user@host/database",
        open=_open_postgres,
    ),
)


def argument_name(name: str) -> str:
    """Return the name of an argument as Python's callers write it."""
    return name


def _with_article(name: str) -> str:
    article = "an" if name[0] in "AEIOUaeiou" else "a"
    return f"{article} {name}"


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """A request for an export.

    destination: path of a file or folder, or address of a database. form: None follows from the
    file's name. columns: names separated by commas; None are all. table: name in the database.
    follow: continue with new results. part_seconds: seconds after which a part is closed.
    """

    destination: str
    form: str | None = None
    columns: str | None = None
    selection: ExportFilter = field(default_factory=ExportFilter)
    table: str | None = None
    follow: bool = False
    part_seconds: float | None = None
    #: True to remove purged posts from an earlier export, and export nothing.
    purge: bool = False

    @property
    def database(self) -> Database | None:
        """The kind of database to export to; None for a file or folder."""
        for database in DATABASES:
            if self.destination.startswith(database.schemes):
                return database
        return None

    @property
    def is_table(self) -> bool:
        return self.database is not None

    @property
    def _looks_like_address(self) -> bool:
        """True for a path that probably is a misspelt address of a database."""
        if "://" in self.destination:
            return True
        for database in DATABASES:
            starts = tuple(scheme.removesuffix("//") for scheme in database.schemes)
            if self.destination.startswith(starts):
                return True
        return False

    @property
    def path(self) -> Path:
        """The file or folder."""
        return Path(self.destination)

    @property
    def is_folder(self) -> bool:
        # Path.is_dir raises for a name that is too long.
        return os.path.isdir(self.path)  # noqa: PTH112

    @property
    def name_form(self) -> str | None:
        """The format that the file's name tells."""
        if self.is_table:
            return None
        return format_of(self.path.name)

    @property
    def file_form(self) -> str | None:
        """The format of the file or of a folder's parts."""
        return self.form or self.name_form

    @property
    def in_parts(self) -> bool:
        """True for an export to a folder."""
        if self.follow or self.is_folder:
            return True
        if self.name_form is not None:
            return False
        return self.file_form == "parquet"

    def check(self, name_of: Callable[[str], str] = argument_name) -> None:
        """Raise UserError if parts of the request exclude each other.

        name_of: returns the name that the caller knows an argument by.
        """
        problem = self._destination_problem(name_of)
        if not problem:
            problem = self._option_problem(name_of)
        if problem:
            raise UserError(printable(problem))

    def _destination_problem(self, name_of: Callable[[str], str]) -> str:
        """Return why the destination cannot be written; "" if it can."""
        out = name_of("destination")
        if not self.is_table and self._looks_like_address:
            # Not quoted: it may contain a password.
            schemes = " or ".join(database.schemes[0] for database in DATABASES)
            return f"{out} must be a path, or begin with {schemes}."
        if not self.is_table and is_special(self.path):
            return (
                f"{self.path} is a pipe or a device. Give {_with_article(out)} that is a file or "
                "a folder."
            )
        if self.destination == "-":
            return f"{out} must be a file or folder. `feedmill results --json` prints results."
        return ""

    def _option_problem(self, name_of: Callable[[str], str]) -> str:
        """Return which options do not suit the destination; "" if all do."""
        out = name_of("destination")
        form = name_of("form")
        follow = name_of("follow")
        latest = name_of("latest")
        part_seconds = name_of("part_seconds")
        if self.is_table and self._has_file_options:
            return (
                f"A table has all columns and results. Leave out {form}, {name_of('columns')}, "
                f"{latest} and {part_seconds}."
            )
        if self.table is not None and not self.is_table:
            example = DATABASES[0].example_address
            return (
                f"{name_of('table')} needs a database: {_with_article(out)} such as "
                f"{example}."
            )
        is_finished_folder = self.purge and self.is_folder
        needs_form = not self.is_table and not is_finished_folder
        if needs_form and self.file_form not in get_args(Form):
            return (
                f"Cannot tell the format of {self.path}. Give {form}, or {_with_article(out)} "
                "that ends in .parquet, .csv or .jsonl."
            )
        if self.follow and self.name_form is not None and not self.is_folder:
            return (
                f"{follow} needs a folder, to which it adds files until it is stopped, such as "
                f"{form} {self.file_form} {self.path.with_suffix('')}/"
            )
        if self.selection.latest and self.in_parts:
            return (
                f"{latest} needs a single file, because finished parts cannot be changed. Give "
                f"{_with_article(out)} that ends in .parquet, .csv or .jsonl, without {follow}."
            )
        if self.part_seconds is not None and self.part_seconds <= 0:
            return f"{part_seconds} must be above 0."
        return ""

    @property
    def _has_file_options(self) -> bool:
        """True if an option is given that only files have."""
        if self.form is not None or self.columns is not None:
            return True
        if self.part_seconds is not None:
            return True
        return self.selection.latest

    def open_destination(self) -> Destination:
        """Return the destination. Raises UserError if a package is missing, or for an invalid
        name or address.
        """
        with explain_missing("An export", "tables"):
            from feedmill.exporting import files  # noqa: PLC0415 - pyarrow
        database = self.database
        if database is not None:
            table = self.table or DEFAULT_TABLE
            return database.open(self.destination, table)
        form = self.file_form or ""  # that of a finished folder is in its state
        if self.in_parts:
            return files.FolderDestination(self.path, form, self.columns)
        return files.FileDestination(self.path, form, self.columns)

    @property
    def copy(self) -> Copy:
        """The destination, for those who look for copies of posts later."""
        if self.is_table:
            place = without_password(self.destination)
        else:
            place = str(self.path.expanduser().absolute())
        return Copy(
            kind="export",
            place=place,
            form=self.file_form,
            table=self.table,
        )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Convert an OSError inside the block to UserError."""
        # an address may contain a password
        path = Path("the table") if self.is_table else self.path
        with explain_unwritable(path):
            yield
