"""Export results to a table in PostgreSQL with psycopg (the extra `postgres`).

Imported only when one is the target.

One transaction copies a batch of rows to a temporary table, inserts them into the results table,
deletes purged posts, and stores the positions in the streams of results and of purges. So whatever
crashes, each result is in the table once. Rows that the database refuses are kept and offered
again (feedmill/exporting/refused_rows.py). Docs: docs/export.md.
"""

import json
import logging
import math
import re
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, LiteralString
from urllib.parse import urlsplit

import psycopg
import pyarrow as pa
from psycopg.conninfo import conninfo_to_dict
from psycopg.sql import SQL, Composable, Identifier
from psycopg.types.json import set_json_dumps

from feedmill.exporting.bounded_connection import ANSWER_TIMEOUT_S, BoundedConnection
from feedmill.exporting.columns import (
    FURTHER_COLUMNS,
    ExportFilter,
    check_same_options,
)
from feedmill.exporting.refused_rows import (
    OFFER_INTERVAL_S,
    OFFER_PAUSE_FACTOR,
    REFUSED,
    KeptRow,
    RefusedRow,
    RefusedRows,
)
from feedmill.exporting.table_rows import (
    EPOCH,
    KEY,
    NUL,
    REPLACEMENT,
    SCHEMA,
    TYPES,
    Row,
    key_of,
    rows_of,
)
from feedmill.outcomes.rows import Place, RowReader, id_before, parse_place
from feedmill.shared.errors import DatabaseUnavailable, UserError, printable
from feedmill.shared.purge import Purge, PurgePage, newest_purge, read_purges

logger = logging.getLogger(__name__)

#: Purges that are repeated after the next rows: the reader may have fetched these before the
#: purges.
REPEATED_PURGES = 1000
#: Rows whose posts are compared with the tombstones at once.
CHECKED_ROWS = 10_000
#: Columns by which rows of a person are found.
SEARCHED_COLUMNS = ("id", "run", "subreddit", "extra")
#: Table of the positions, one row per results table, in the same schema.
POSITIONS = "feedmill_exports"
OWN_TABLES = (POSITIONS, REFUSED)
#: Seconds between transactions when few results arrive.
TRANSACTION_S = 1.0
#: Key, among the options in the table of positions, of the columns of FURTHER_COLUMNS that exports
#: to a table write.
OWN_COLUMNS = "own_columns"
#: Column of the temporary table: a row's place in its batch.
PLACE = "feedmill place"
#: Options of the connection that the URL can override, in seconds and milliseconds. A sink whose
#: server vanishes without a word notices it within half a minute.
CONNECTION = {
    "application_name": "feedmill export",
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
#: Settings of the session. The first ones let the server notice within half a minute that the
#: sink's machine vanished, so that it releases the lock. The last one limits the wait for a lock
#: of the last sink, which may just have been killed.
SESSION = {
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "lock_timeout": "5s",
}
#: Setting that ends a statement whose sink no longer waits for it, unless the database has a limit
#: of its own.
STATEMENT_TIMEOUT = ("statement_timeout", f"{ANSWER_TIMEOUT_S:.0f}s")
#: Name of a table, optionally with its schema. PostgreSQL truncates longer names.
TABLE_NAME = re.compile(r'(?:([^."]+)\.)?([^."]+)')
MAX_NAME_BYTES = 63
#: Errors after which the same statement may succeed later, on a new connection if this one is
#: lost: an unreachable, restarting or full server, a lock that is held, a server that has become a
#: standby.
TRANSIENT = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.errors.ReadOnlySqlTransaction,
)
#: Classes of SQLSTATE by which the database refuses a row: data exceptions, violated constraints,
#: exceeded limits, and errors that a trigger raises. Some of them are OperationalErrors.
ROW_REFUSED = ("22", "23", "54", "P0")
REQUIRED = {"id", "scores", "fingerprint", "stored_at"}
#: Rows of one transaction of which, if all are refused, the table refuses the export; and refused
#: rows to name.
MIN_ALL_REFUSED = 100
MAX_REFUSED_NAMED = 20


def parse_address(url: str) -> dict[str, Any]:
    """Return psycopg's options for a URL, which may include a password.

    Raises UserError, which never quotes the URL: a malformed one can hold a password anywhere.
    """
    try:
        parts = urlsplit(url)
        options = conninfo_to_dict(url)
    except (ValueError, psycopg.ProgrammingError):
        options = None
    if (
        options is None
        or not re.fullmatch(r"[\d,]*", str(options.get("port", "")))
        or url.count("@") > 1
        or ("@" in url and "@" not in parts.netloc)
    ):
        raise UserError(
            "The address of the database must look like postgresql://user@host:5432/database. "
            "Percent-encode @ : / # and ? in a password, or give it in PGPASSWORD or ~/.pgpass."
        )
    return CONNECTION | options | {"client_encoding": "utf8"}


@contextmanager
def opened(
    url: str,
    table: str,
    selection: ExportFilter | None,
    reader: RowReader,
    stop: Sequence[int] = (),
) -> Iterator["Table"]:
    """Connect, lock the table and create it if needed.

    An earlier export to it is resumed if its options are the same.

    selection: None to only remove purged posts from an existing table, whatever its options. stop:
    signals received; the first one shortens the wait for a server that does not answer. Raises
    UserError, and DatabaseUnavailable if PostgreSQL is unreachable or another export holds the
    lock.
    """
    address = parse_address(url)
    target = Table(address, table, selection, reader, stop)
    try:
        yield target
    finally:
        target._connection.close()  # releases the table's lock


def purge(url: str, table: str, reader: RowReader) -> int:
    """Delete the posts and runs that were purged after they were exported.

    Returns the number of removed rows.
    """
    with opened(url, table, None, reader) as target:
        target.close(target.place)
        target.delete_purged()
    return target.removed


class TableDestination:
    """The place of a table in PostgreSQL."""

    def __init__(self, url: str, table: str) -> None:
        self._url = url
        self._table = table

    def __str__(self) -> str:
        return _format_name(self._table)

    def opened(
        self,
        selection: ExportFilter,
        reader: RowReader,
        _run_columns: Sequence[str] = (),
        stop: Sequence[int] = (),
    ) -> AbstractContextManager["Table"]:
        return opened(
            self._url,
            self._table,
            selection,
            reader,
            stop,
        )

    def purge(self, reader: RowReader, runs: Collection[str] = ()) -> int:  # noqa: ARG002
        """Remove purged posts. The log of purges names the runs, too."""
        return purge(self._url, self._table, reader)

    def records(self, reader: RowReader) -> Iterator[dict[str, Any]]:
        with opened(self._url, self._table, None, reader) as table:
            yield from table.records()


def _format_name(table: str) -> str:
    return f"table {printable(table)} in PostgreSQL"


class Table:
    """A table of results. See feedmill/exporting/files.py.

    The methods raise DatabaseUnavailable, after which `resume` reconnects; other UserErrors if
    PostgreSQL rejects a statement; and redis.exceptions.RedisError.
    """

    can_resume = True
    replaces_rows = True
    publish_interval_s = TRANSACTION_S
    schema = SCHEMA

    def __init__(
        self,
        address: dict[str, Any],
        table: str,
        selection: ExportFilter | None,
        reader: RowReader,
        stop: Sequence[int] = (),
    ) -> None:
        parts = TABLE_NAME.fullmatch(table)
        encoded_parts = table.encode(errors="replace").split(b".")
        longest = max(map(len, encoded_parts))
        if (
            parts is None
            or table != printable(table)
            or parts[2] in OWN_TABLES
            or longest > MAX_NAME_BYTES
        ):
            raise UserError(
                f"--table: {printable(table)!r:.80} cannot be the name of the table. Give NAME or "
                f"SCHEMA.NAME, of at most {MAX_NAME_BYTES} bytes each, and neither {POSITIONS} "
                f"nor {REFUSED}."
            )
        self._full_name = table
        self._schema = parts[1]
        self._name = parts[2]
        self._address = address
        self._stop = stop
        self._reader = reader
        self._redis = reader.redis
        #: Options of the export; None if only purged posts are removed.
        self._options: dict[str, Any] | None = None
        if selection is not None:
            self._options = selection._asdict()
        #: Rows written, and rows removed because their posts were purged.
        self.written = 0
        self.removed = 0
        #: Rows that the database refused, to this run or an earlier one, and has not accepted
        #: since.
        self.refused = 0
        #: Refused rows that this run has named in a warning.
        self._named = 0
        #: Whether this run has warned of rows that a trigger or a rule took.
        self._has_named_taken_rows = False
        #: Members of FURTHER_COLUMNS that exports to this table have written so far.
        self._own_columns: list[str] = []
        self._repeated = deque[Purge](maxlen=REPEATED_PURGES)
        #: Time at which refused rows are offered again (monotonic seconds), and whether all are,
        #: one after another.
        self._offer_at = -math.inf
        self._offers_all = True
        self._connect()

    def __str__(self) -> str:
        return _format_name(self._full_name)

    def _connect(self) -> None:
        """Connect, lock the table, and read the position from which to continue."""
        self.begun = time.monotonic()
        try:
            self._connection = BoundedConnection.connect(
                **self._address, autocommit=True
            )
        except psycopg.Error as error:
            raise DatabaseUnavailable(
                f"PostgreSQL is unavailable ({_reason(error)}). Check the address, and the "
                "password in PGPASSWORD or ~/.pgpass."
            ) from None
        self._connection.stop = self._stop
        try:
            with self._explaining():
                self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        connection = self._connection
        if connection.info.parameter_status("server_encoding") != "UTF8":
            raise UserError("The database is not encoded in UTF-8. Create one that is.")
        set_json_dumps(str.encode, connection)
        for setting in SESSION.items():
            connection.execute("SELECT set_config(%s, %s, false)", setting)
        connection.execute(
            (
                "SELECT set_config(name, %s, false) FROM pg_settings WHERE name = %s AND setting "
                "= '0'"
            ),
            STATEMENT_TIMEOUT[::-1],
        )
        schema = self._schema
        if schema is None:
            schema = self._value("SELECT current_schema()")
        if schema is None:
            raise UserError(
                "The database has no current schema. Give --table SCHEMA.NAME."
            )
        self._table = Identifier(schema, self._name)
        self._positions = Identifier(schema, POSITIONS)
        self._refused_rows = RefusedRows(schema, self._name)
        try:  # the lock is held until the connection ends
            self._value(
                "SELECT pg_advisory_lock(hashtextextended(%s, 0))",
                f"feedmill {schema}.{self._name}",
            )
        except psycopg.errors.LockNotAvailable:
            raise DatabaseUnavailable(
                f"Another export is writing to {self}. Wait for it, or stop it."
            ) from None
        connection.execute("SET lock_timeout TO DEFAULT")
        if self._options is not None:
            with connection.transaction():
                # Two first exports at once would both create the table of positions.
                self._value(
                    "SELECT pg_advisory_xact_lock(hashtextextended('feedmill', 0))"
                )
                self._create()
        #: False for a table that was exported to without a table of refused rows.
        self._keeps_refused = self._exists(self._refused_rows.table)
        if self._options is not None:
            with connection.cursor() as cursor:
                self.refused = self._refused_rows.count(cursor)
        types_in_table = self._types_in_table()
        self._check_columns(types_in_table)
        self._read_position()
        #: The columns that are written.
        self._columns = self._written_columns(types_in_table)
        #: Statements that insert new rows, and rows that were refused before.
        self._insertion = self._compose_insertion(is_offer=False)
        self._offer_insertion = self._compose_insertion(is_offer=True)
        place = SQL("{} integer PRIMARY KEY").format(Identifier(PLACE))
        columns = SQL(", ").join([*map(_definition, TYPES), place])
        create = SQL(
            "CREATE TEMPORARY TABLE feedmill_staging ({}) ON COMMIT DELETE ROWS"
        )
        connection.execute(create.format(columns))

    def _create(self) -> None:
        """Create the missing tables."""
        if not self._exists(self._refused_rows.table):
            self._connection.execute(self._refused_rows.definition())
        if not self._exists(self._positions):
            self._connection.execute(
                SQL(
                    "CREATE TABLE {} (table_name text PRIMARY KEY, options jsonb NOT NULL, place "
                    "jsonb NOT NULL, "
                    "purges text NOT NULL, updated_at timestamptz NOT NULL DEFAULT now())"
                ).format(self._positions)
            )
        if not self._exists(self._table):
            key = SQL("PRIMARY KEY ({})").format(_names(KEY))
            parts = SQL(", ").join([*map(_definition, TYPES), key])
            create = SQL("CREATE TABLE {} ({})")
            self._connection.execute(create.format(self._table, parts))
            # The position of a table that was dropped.
            self._connection.execute(
                SQL("DELETE FROM {} WHERE table_name = %s").format(self._positions),
                [self._name],
            )
            self._refused_rows.clear(self._connection)

    def _types_in_table(self) -> dict[str, str | None]:
        """Return the type of each column that the table has; None for a generated one."""
        name = self._table.as_string(self._connection)
        query = (
            "SELECT attname, format_type(atttypid, NULL), attgenerated <> '' FROM pg_attribute "
            "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"
        )
        types_in_table: dict[str, str | None] = {}
        rows = self._connection.execute(query, [name])
        for column, column_type, is_generated in rows:
            types_in_table[column] = None if is_generated else column_type
        return types_in_table

    def _check_columns(self, types_in_table: Mapping[str, str | None]) -> None:
        """Raise UserError if the export needs a column that the table lacks."""
        if not types_in_table or self._options is None:
            return
        required = [column for column in TYPES if column not in FURTHER_COLUMNS]
        lacking = [column for column in required if column not in types_in_table]
        if lacking:
            raise self._lacks(lacking)

    def _written_columns(self, types_in_table: Mapping[str, str | None]) -> list[str]:
        """Return the columns to write: all, but of those that tables of an earlier version lack
        only the export's own.
        """
        further = self._further_columns(types_in_table)
        unwritten = set(FURTHER_COLUMNS).difference(further)
        return [column for column in TYPES if column not in unwritten]

    def _further_columns(self, types_in_table: Mapping[str, str | None]) -> list[str]:
        """Return those of FURTHER_COLUMNS that the export writes, and store which they are.

        A column of another type, a generated one, and one with values that no export has written
        is the user's own.
        """
        further: list[str] = []
        for column in FURTHER_COLUMNS:
            if types_in_table.get(column) != TYPES[column]:
                continue
            if column not in self._own_columns:
                if self._options is None:
                    continue
                if self._has_values(column):
                    self._warn_of_column(column)
                    continue
            further.append(column)
        if self._options is not None and further != self._own_columns:
            update = SQL(
                "UPDATE {} SET options = options || %s::jsonb WHERE table_name = %s"
            )
            self._connection.execute(
                update.format(self._positions),
                [json.dumps({OWN_COLUMNS: further}), self._name],
            )
            self._own_columns = further
        return further

    def _has_values(self, column: str) -> bool:
        """Return whether any row of the table has a value in a column."""
        query = SQL("SELECT EXISTS (SELECT FROM {} WHERE {} IS NOT NULL)").format(
            self._table, Identifier(column)
        )
        cursor = self._connection.execute(query)
        row = cursor.fetchone()
        return row is not None and bool(row[0])

    def _warn_of_column(self, column: str) -> None:
        logger.warning(
            "%s has a column %s with values that no export has written: leaving it as it is. To "
            "export this column of the results, rename yours, and add an empty one",
            self,
            column,
        )

    def _lacks(self, columns: Sequence[str]) -> UserError:
        """Return the error of a table that an earlier version made, without these columns.

        The export does not add them itself: often, its user may only insert rows, and others rely
        on the table.
        """
        additions = []
        for column in columns:
            addition = SQL("ADD COLUMN {} {}").format(
                Identifier(column), SQL(TYPES[column])
            )
            additions.append(addition)
        statement = SQL("ALTER TABLE {} {}").format(
            self._table, SQL(", ").join(additions)
        )
        names = ", ".join(columns)
        command = printable(statement.as_string(self._connection))
        return UserError(
            f"{self} lacks columns of this version: {names}. Let its owner run `{command}`, and "
            "repeat the export, which loses nothing; or give another --table."
        )

    def _exists(self, table: Identifier) -> bool:
        name = table.as_string(self._connection)
        table_id = self._value("SELECT to_regclass(%s)", name)
        return table_id is not None

    def _read_position(self) -> None:
        select = SQL("SELECT options, place, purges FROM {} WHERE table_name = %s")
        query = select.format(self._positions)
        position = self._connection.execute(query, [self._name]).fetchone()
        #: True if this run continues an earlier one.
        self.resumed = position is not None
        self._own_columns = []
        if position is None:
            self._create_position()
            return

        options, place, purges = position
        try:
            #: Stream position up to which rows are in the table.
            self.place = parse_place(place)
            newest = parse_place({"cursor": purges})
            #: Position of the latest purge whose posts were removed.
            self._purge_position = newest.cursor
            if not isinstance(options, dict):
                raise ValueError("not the options of an export")
        except ValueError:
            raise UserError(
                f"The row of {self} in {POSITIONS} is damaged. Delete this row to export the "
                "whole stream again, which replaces the table's rows."
            ) from None
        own_columns = options.get(OWN_COLUMNS, [])
        if isinstance(own_columns, list):
            self._own_columns = own_columns
        check_same_options(str(self), options, self._options or {})

    def _create_position(self) -> None:
        """Store the position of a first export. Raises UserError if there is nothing to purge."""
        if self._options is None:
            raise UserError(
                f"{self} is not of an export: it has no row in {POSITIONS}. Give "
                "another --table."
            )
        since = self._options["since"] or 0.0
        self.place = Place(id_before(since))
        self._purge_position = newest_purge(self._redis)
        insert = SQL(
            "INSERT INTO {} (table_name, options, place, purges) VALUES (%s, %s, %s, %s)"
        )
        self._connection.execute(
            insert.format(self._positions),
            [
                self._name,
                json.dumps(self._options),
                self._place_as_json(self.place),
                self._purge_position,
            ],
        )

    @staticmethod
    def _place_as_json(place: Place) -> str:
        return json.dumps(place._asdict())

    def _value(self, query: LiteralString, *parameters: object) -> Any:
        """Return the first value of the first row; None without rows."""
        cursor = self._connection.execute(query, parameters)
        row = cursor.fetchone()
        if row is None:
            return None
        return row[0]

    def close(self, place: Place) -> None:
        """Delete the posts that were purged since, and store the place."""
        while self._write(None, place):
            pass

    def add(self, batch: pa.RecordBatch, place: Place) -> None:
        """Write rows and delete purged ones. place: the reader's place after the rows."""
        self._write(batch, place)

    def _write(self, batch: pa.RecordBatch | None, place: Place) -> bool:
        """Write rows and delete purged ones in one transaction; return whether there may be more
        purges.

        Purges are read after the rows, which may be of posts that were purged meanwhile. place:
        the reader's position after the rows.
        """
        self.begun = time.monotonic()
        self._offer_if_due()
        purges = read_purges(self._redis, self._purge_position)
        if purges.missed:
            no_purges = PurgePage([], self._purge_position)
            self._transact(batch, place, no_purges)
            self.delete_purged()
            batch = None

        is_moved = place != self.place or purges.position != self._purge_position
        if batch is not None or is_moved:
            self._transact(batch, place, purges)
        return bool(purges.purges)

    def _transact(
        self, batch: pa.RecordBatch | None, place: Place, purges: PurgePage
    ) -> None:
        rows: list[Row] = []
        if batch is not None:
            rows = rows_of(batch)
        refusals: list[RefusedRow] = []
        forgotten = 0
        refused = self.refused
        with self._transaction() as cursor:
            inserted = self._insert(cursor, rows, refusals)
            if not inserted and len(refusals) >= MIN_ALL_REFUSED:
                raise _refusal(refusals[0].reason)
            if refusals:
                forgotten = self._refused_rows.keep(cursor, refusals)
            if not inserted and forgotten:
                raise _refusal(refusals[0].reason)
            removed = self._remove(cursor, [*self._repeated, *purges.purges])
            self._move(cursor, place, purges.position)
            if refusals or removed:
                refused = self._refused_rows.count(cursor)

        self.refused = refused
        self.place = place
        self._purge_position = purges.position
        self.written += inserted
        taken = len(rows) - inserted - len(refusals)
        self._warn_of_taken_rows(taken)
        self.removed += removed
        if batch is not None:
            self._repeated.clear()
        self._repeated.extend(purges.purges)
        self._report_refused(refusals, forgotten)

    def _move(self, cursor: Any, place: Place, purged: str) -> None:
        """Store the position after a transaction.

        Raises UserError if another export moved it meanwhile.
        """
        update = SQL(
            "UPDATE {} SET place = %s, purges = %s, updated_at = now() "
            "WHERE table_name = %s AND place = %s AND purges = %s"
        )
        cursor.execute(
            update.format(self._positions),
            [
                self._place_as_json(place),
                purged,
                self._name,
                self._place_as_json(self.place),
                self._purge_position,
            ],
        )
        if cursor.rowcount == 0:
            raise UserError(
                f"Another export has written to {self}. Run only one, then run "
                "this command again."
            )

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        """Yield the cursor of a transaction."""
        with (
            self._explaining(),
            self._connection.transaction(),
            self._connection.cursor() as cursor,
        ):
            # Deferred constraints would refuse the whole transaction for a single row, when it is
            # committed.
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
            yield cursor

    def _report_refused(self, refusals: Sequence[RefusedRow], forgotten: int) -> None:
        unnamed = max(0, MAX_REFUSED_NAMED - self._named)
        for row, reason in refusals[:unnamed]:
            self._named += 1
            post_id, _ = key_of(row)
            logger.warning(
                (
                    "%s refused the result of post %s (%s); continuing without it, and keeping "
                    "it in %s"
                ),
                self,
                printable(post_id),
                reason,
                REFUSED,
            )
        if forgotten:
            logger.error(
                "forgot the %d oldest rows in %s that %s refused",
                forgotten,
                REFUSED,
                self,
            )

    def _warn_of_taken_rows(self, count: int) -> None:
        """Warn once of rows that the database accepted and did not insert.

        A trigger of partitions by inheritance puts them elsewhere, so this is no error.
        """
        if count <= 0 or self._has_named_taken_rows:
            return
        self._has_named_taken_rows = True
        logger.warning(
            "%s accepted %d rows and did not insert them: a trigger or a rule of the table takes "
            "them. If it stores them nowhere, drop it, and export again into another table",
            self,
            count,
        )

    def _insert(
        self,
        cursor: Any,
        rows: Sequence[Row],
        refusals: list[RefusedRow],
        *,
        is_offer: bool = False,
    ) -> int:
        """Insert rows; return how many were inserted.

        Rows that the database refuses are left out, in `refusals`.

        is_offer: the rows were refused before, and never replace later results. Raises
        psycopg.Error for other failures.
        """
        if not rows:
            return 0
        try:
            with self._connection.transaction():  # a savepoint
                self._copy(cursor, rows)
        except psycopg.Error as error:
            if not _refuses_row(error):
                raise
            reason = _reason(error)
        else:
            return self._insert_copied(
                cursor,
                rows,
                first=0,
                end=len(rows),
                refusals=refusals,
                is_offer=is_offer,
            )
        if len(rows) == 1:
            refusals.append(RefusedRow(rows[0], reason))
            return 0
        middle = len(rows) // 2
        first_half = rows[:middle]
        inserted = self._insert(cursor, first_half, refusals, is_offer=is_offer)
        cursor.execute("TRUNCATE pg_temp.feedmill_staging")
        second_half = rows[middle:]
        inserted += self._insert(cursor, second_half, refusals, is_offer=is_offer)
        return inserted

    def _copy(self, cursor: Any, rows: Sequence[Row]) -> None:
        """Copy rows to the temporary table."""
        statement = "COPY pg_temp.feedmill_staging FROM STDIN (FORMAT BINARY)"
        with cursor.copy(statement) as copy:
            copy.set_types([*TYPES.values(), "integer"])
            for index, row in enumerate(rows):
                copy.write_row([*row, index])

    def _insert_copied(
        self,
        cursor: Any,
        rows: Sequence[Row],
        *,
        first: int,
        end: int,
        refusals: list[RefusedRow],
        is_offer: bool,
    ) -> int:
        """Insert copied rows from `first` to before `end`.

        If some are refused, insert either half, to find them.
        """
        insertion = self._offer_insertion if is_offer else self._insertion
        try:
            with self._connection.transaction():  # a savepoint
                cursor.execute(insertion, [first, end])
                return int(cursor.rowcount)
        except psycopg.Error as error:
            if not _refuses_row(error) or _is_of_table(error):
                raise
            reason = _reason(error)
        if end - first == 1:
            refusals.append(RefusedRow(rows[first], reason))
            return 0
        inserted = 0
        middle = (first + end) // 2
        for start, stop in ((first, middle), (middle, end)):
            inserted += self._insert_copied(
                cursor,
                rows,
                first=start,
                end=stop,
                refusals=refusals,
                is_offer=is_offer,
            )
        return inserted

    def _compose_insertion(self, *, is_offer: bool) -> bytes:
        """Return the statement that inserts copied rows between two row numbers.

        Compose it once: that takes as long as inserting a row.
        """
        assignments: list[Composable] = []
        for column in self._columns:
            if column not in KEY:
                assignment = SQL("{0} = excluded.{0}").format(Identifier(column))
                assignments.append(assignment)
        insert = SQL(
            "INSERT INTO {} AS old ({}) SELECT {} FROM pg_temp.feedmill_staging WHERE {place} >= "
            "%s AND {place} < %s "
            "ON CONFLICT ({}) DO UPDATE SET {}"
        )
        statement = insert.format(
            self._table,
            _names(self._columns),
            _names(self._columns),
            _names(KEY),
            SQL(", ").join(assignments),
            place=Identifier(PLACE),
        )
        if is_offer:
            statement += SQL(" WHERE old.stored_at <= excluded.stored_at")
        return statement.as_bytes(self._connection)

    def _offer_if_due(self) -> None:
        """Offer refused rows again: all of them once, then some from time to time, or all while
        they are accepted.
        """
        if self._options is None:
            return
        while time.monotonic() >= self._offer_at and not self._stop:
            began = time.monotonic()
            accepted, is_last = self._offer()
            if is_last:
                self._offers_all = False
            if is_last or not (accepted or self._offers_all):
                now = time.monotonic()
                pause = OFFER_PAUSE_FACTOR * (now - began)
                self._offer_at = now + max(OFFER_INTERVAL_S, pause)

    def _offer(self) -> tuple[int, bool]:
        """Offer the next refused rows.

        Return how many were accepted, and whether these were the last ones.
        """
        refusals: list[RefusedRow] = []
        with self._transaction() as cursor:
            kept_rows = self._refused_rows.take(cursor)
            if not kept_rows:
                return 0, True
            gone = self._reader.gone(_post_id(kept.row) for kept in kept_rows)
            rows = [kept.row for kept in kept_rows if _post_id(kept.row) not in gone]
            try:
                with self._connection.transaction():
                    inserted = self._insert(
                        cursor,
                        rows,
                        refusals,
                        is_offer=True,
                    )
            except psycopg.Error as error:
                if not _refuses_row(error):
                    raise
                # a fault of the table: the next rows that are written report it
                return 0, False
            refused_keys = {key_of(refusal.row) for refusal in refusals}
            settled: list[KeptRow] = []
            accepted = 0
            for kept in kept_rows:
                if key_of(kept.row) in refused_keys:
                    continue
                settled.append(kept)
                if _post_id(kept.row) not in gone:
                    accepted += 1
            self._refused_rows.forget(cursor, settled)
            still_refused = self._refused_rows.count(cursor)

        self.refused = still_refused
        self.written += inserted
        if accepted:
            logger.info(
                "%s accepted %d rows that it had refused before", self, accepted
            )
        return accepted, False

    def _remove(self, cursor: Any, purges: Iterable[Purge]) -> int:
        removed = 0
        for ids, run, until in purges:
            posts: list[str] | str
            if run is None:
                condition = SQL("id = ANY(%s)")
                posts = [post_id.replace(NUL, REPLACEMENT) for post_id in ids]
            else:
                condition = SQL("run = %s")
                posts = run
            purged_at = EPOCH + timedelta(milliseconds=until)
            delete = SQL("DELETE FROM {} WHERE {} AND stored_at <= %s")
            statement = delete.format(self._table, condition)
            deletion = cursor.execute(statement, [posts, purged_at])
            removed += deletion.rowcount
            if self._keeps_refused:
                self._refused_rows.forget_purged(cursor, condition, posts, purged_at)
        return removed

    def delete_purged(self) -> None:
        """Compare all posts in the table with the tombstones in Redis, and delete the
        purged ones.
        """
        select = SQL("SELECT DISTINCT id FROM {} WHERE id > %s ORDER BY id LIMIT %s")
        query = select.format(self._table)
        delete = SQL("DELETE FROM {} WHERE id = ANY(%s)").format(self._table)
        last: str | None = ""
        while last is not None:
            with self._explaining():
                rows = self._connection.execute(query, [last, CHECKED_ROWS])
                ids = [post_id for (post_id,) in rows]
            gone = self._reader.gone(ids)
            if gone:
                with self._explaining():
                    deletion = self._connection.execute(delete, [[*gone]])
                    self.removed += deletion.rowcount
            last = ids[-1] if ids else None
        if self._keeps_refused:
            self._delete_purged_refusals()

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield what finds rows of a person: their ids, runs, subreddits and extra columns."""
        select = SQL("SELECT {} FROM {}")
        query = select.format(_names(SEARCHED_COLUMNS), self._table)
        with (
            self._explaining(),
            self._connection.transaction(),
            # on the server, because a table can have millions of rows
            self._connection.cursor(name="feedmill_search") as cursor,
        ):
            cursor.execute(query)
            for row in cursor:
                yield dict(zip(SEARCHED_COLUMNS, row, strict=True))

    def _delete_purged_refusals(self) -> None:
        """Delete the purged posts among the refused rows."""
        last: str | None = ""
        while last is not None:
            with self._explaining():
                ids = self._refused_rows.ids_after(self._connection, last, CHECKED_ROWS)
            gone = self._reader.gone(ids)
            if gone:
                with self._explaining():
                    self._refused_rows.forget_posts(self._connection, [*gone])
            last = ids[-1] if ids else None

    def resume(self) -> Place:
        """Reconnect if needed, and return the place to read from."""
        if self._connection.closed:
            self._connect()  # reads the position: the last transaction may have been committed
        return self.place

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Convert psycopg's errors.

        Its texts do not contain the password; details, which quote rows, are left out.
        """
        try:
            yield
        except psycopg.Error as error:
            if isinstance(error, TRANSIENT) and not _refuses_row(error):
                raise DatabaseUnavailable(
                    f"PostgreSQL is unavailable ({_reason(error)})."
                ) from None
            raise _refusal(_reason(error)) from None


def _refusal(reason: str) -> UserError:
    advice = (
        "See docs/export.md for the privileges and the columns that an export needs."
    )
    return UserError(f"PostgreSQL refuses the export ({reason}). {advice}")


def _names(columns: Collection[str]) -> Composable:
    """Return the columns' names, separated by commas."""
    names = map(Identifier, columns)
    return SQL(", ").join(names)


def _definition(column: str) -> Composable:
    """Return a column's name, type and constraint."""
    name = Identifier(column)
    kind = SQL(TYPES[column])
    definition = SQL("{} {}").format(name, kind)
    if column in REQUIRED:
        definition += SQL(" NOT NULL")
    return definition


def _post_id(row: Row) -> str:
    post_id, _ = key_of(row)
    return post_id


def _refuses_row(error: psycopg.Error) -> bool:
    return (error.sqlstate or "").startswith(ROW_REFUSED)


def _is_of_table(error: psycopg.Error) -> bool:
    """Return whether an error that refuses a row refuses every row: a column that is required and
    is not written.
    """
    column = error.diag.column_name
    return (
        isinstance(error, psycopg.errors.NotNullViolation)
        and column is not None
        and column not in TYPES
    )


def _reason(error: psycopg.Error) -> str:
    message = error.diag.message_primary or str(error)
    one_line = " ".join(message.split())
    return printable(one_line.removesuffix("."))
