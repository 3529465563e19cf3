"""Export results to a table in PostgreSQL with psycopg (the extra `postgres`). Imported only when one is the target.

One transaction copies a batch of rows to a temporary table, inserts them into the results table, deletes purged posts,
and stores the positions in the streams of results and of purges. So whatever crashes, each result is in the table once.
Docs: docs/export.md.
"""

import json
import logging
import re
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString
from urllib.parse import urlsplit

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg.conninfo import conninfo_to_dict
from psycopg.sql import SQL, Composable, Identifier
from psycopg.types.json import set_json_dumps

from feedmill.export.columns import COLUMNS, ExportFilter, check_options
from feedmill.export.files import STORED_AT, TIME, schema_of
from feedmill.reading import Place, RowReader, id_before
from feedmill.shared.errors import DatabaseUnavailable, UserError, printable
from feedmill.shared.purge import Purge, Purges, newest_purge, read_purges
from feedmill.tables.writing import JSON

logger = logging.getLogger(__name__)

#: Purges that are repeated after the next rows: the reader may have fetched these before the purges.
REPEATED_PURGES = 1000
#: Rows whose posts are compared with the tombstones at once.
CHECKED_ROWS = 10_000
#: Table of the positions, one row per results table, in the same schema.
POSITIONS = "feedmill_exports"
#: Options of the connection that the URL can override, in seconds and milliseconds. A sink whose server vanishes
#: without a word notices it within half a minute.
CONNECTION = {
    "application_name": "feedmill export",
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
#: Settings of the session. The first ones let the server notice within half a minute that the sink's machine vanished,
#: so that it releases the lock. The last one limits the wait for a lock of the last sink, which may just have been
#: killed.
SESSION = {
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "lock_timeout": "5s",
}
#: Name of a table, optionally with its schema. PostgreSQL truncates longer names.
TABLE_NAME = re.compile(r'(?:([^."]+)\.)?([^."]+)')
MAX_NAME_BYTES = 63
#: Errors after which the same statement may succeed later, on a new connection if this one is lost: an unreachable,
#: restarting or full server, a lock that is held, a server that has become a standby.
TRANSIENT = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.errors.ReadOnlySqlTransaction)
#: Classes of SQLSTATE by which the database refuses a row: data exceptions, violated constraints, exceeded limits, and
#: errors that a trigger raises. Some of them are OperationalErrors.
ROW_REFUSED = ("22", "23", "54", "P0")
#: The columns of a table: those of every export, and the time at which the result was stored in Redis.
SCHEMA = schema_of(COLUMNS).append(STORED_AT)
KEY = ("id", "fingerprint")
REQUIRED = {"id", "label", "scores", "fingerprint", "stored_at"}
ARROW_TYPES: dict[pa.DataType, LiteralString] = {
    pa.string(): "text", pa.int64(): "bigint", pa.float64(): "float8", pa.bool_(): "boolean", TIME: "timestamptz",
    JSON: "jsonb",
}  # fmt: skip
#: Column -> type.
TYPES = {field.name: ARROW_TYPES[field.type] for field in SCHEMA}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: What PostgreSQL cannot store in text, and what it stores instead; and NUL in JSON, after any escaped backslashes.
NUL, REPLACEMENT = "\0", "\ufffd"
NUL_IN_JSON = re.compile(r"((?<!\\)(?:\\\\)*)\\u0000")
#: Rows of one transaction of which, if all are refused, the table refuses the export; and refused rows to name.
MIN_ALL_REFUSED, MAX_REFUSED_NAMED = 100, 20


def parse_address(url: str) -> dict[str, Any]:
    """Return psycopg's options for a URL, which may include a password.

    Raises UserError, which never quotes the URL: a malformed one can hold a password anywhere.
    """
    try:
        parts = urlsplit(url)
        given = conninfo_to_dict(url)
    except (ValueError, psycopg.ProgrammingError):
        given = None
    is_port = given is not None and re.fullmatch(r"[\d,]*", str(given.get("port", "")))
    if given is None or not is_port or url.count("@") > 1 or ("@" in url and "@" not in parts.netloc):
        raise UserError(
            "The address of the database must look like postgresql://user@host:5432/database. Percent-encode "
            "@ : / # and ? in a password, or give it in PGPASSWORD or ~/.pgpass."
        )
    return CONNECTION | given | {"client_encoding": "utf8"}


@contextmanager
def opened(url: str, table: str, selection: ExportFilter | None, reader: RowReader) -> Iterator["Table"]:
    """Connect, lock the table and create it if needed. An earlier export to it is resumed if its options are the same.

    selection: None to only remove purged posts from an existing table, whatever its options. Raises UserError, and
    DatabaseUnavailable if PostgreSQL is unreachable or another export holds the lock.
    """
    target = Table(parse_address(url), table, selection, reader)
    try:
        yield target
    finally:
        target._connection.close()  # releases the table's lock


def purge(url: str, table: str, reader: RowReader) -> int:
    """Delete the posts and runs that were purged after they were exported. Returns the number of removed rows."""
    with opened(url, table, None, reader) as target:
        target.close(target.place)
        target.check_posts()
    return target.removed


class Table:
    """A table of results. See feedmill/export/files.py.

    The methods raise DatabaseUnavailable, after which `resume` reconnects; other UserErrors if PostgreSQL rejects a
    statement; and redis.exceptions.RedisError.
    """

    can_resume = replaces_rows = True
    schema = SCHEMA

    def __init__(self, address: dict[str, Any], table: str, selection: ExportFilter | None, reader: RowReader) -> None:
        parts = TABLE_NAME.fullmatch(table)
        longest = max(map(len, table.encode(errors="replace").split(b".")))
        if parts is None or table != printable(table) or parts[2] == POSITIONS or longest > MAX_NAME_BYTES:
            raise UserError(
                f"--table: {printable(table)!r:.80} cannot be the name of the table. Give NAME or SCHEMA.NAME, of at "
                f"most {MAX_NAME_BYTES} bytes each, and not {POSITIONS}."
            )
        self._given, self._schema, self._name = table, parts[1], parts[2]
        self._address = address
        self._reader, self._redis = reader, reader.redis
        self._options = None if selection is None else selection._asdict()
        #: Rows written, rows removed because their posts were purged, and rows that the database refused.
        self.written = self.removed = self.refused = 0
        self._repeated = deque[Purge](maxlen=REPEATED_PURGES)
        self._connect()

    def __str__(self) -> str:
        return f"table {printable(self._given)} in PostgreSQL"

    def _connect(self) -> None:
        """Connect, lock the table, and read the position from which to continue."""
        self.begun = time.monotonic()
        try:
            self._connection = psycopg.connect(**self._address, autocommit=True)
        except psycopg.Error as error:
            raise DatabaseUnavailable(
                f"PostgreSQL is unavailable ({_reason(error)}). Check the address, and the password in PGPASSWORD or "
                "~/.pgpass."
            ) from None
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
        schema = self._schema or self._value("SELECT current_schema()")
        if schema is None:
            raise UserError("The database has no current schema. Give --table SCHEMA.NAME.")
        self._table, self._positions = Identifier(schema, self._name), Identifier(schema, POSITIONS)
        try:  # the lock is held until the connection ends
            self._value("SELECT pg_advisory_lock(hashtextextended(%s, 0))", f"feedmill {schema}.{self._name}")
        except psycopg.errors.LockNotAvailable:
            raise DatabaseUnavailable(f"Another export is writing to {self}. Wait for it, or stop it.") from None
        connection.execute("SET lock_timeout TO DEFAULT")
        if self._options is not None:
            with connection.transaction():
                # Two first exports at once would both create the table of positions.
                self._value("SELECT pg_advisory_xact_lock(hashtextextended('feedmill', 0))")
                self._create()
        columns = SQL(", ").join(map(_definition, TYPES))
        connection.execute(SQL("CREATE TEMPORARY TABLE feedmill_staging ({}) ON COMMIT DELETE ROWS").format(columns))
        self._read_position()

    def _create(self) -> None:
        """Create the missing tables."""
        positions, name = (each.as_string(self._connection) for each in (self._positions, self._table))
        if self._value("SELECT to_regclass(%s)", positions) is None:
            self._connection.execute(
                SQL(
                    "CREATE TABLE {} (table_name text PRIMARY KEY, options jsonb NOT NULL, place jsonb NOT NULL, "
                    "purges text NOT NULL, updated_at timestamptz NOT NULL DEFAULT now())"
                ).format(self._positions)
            )
        if self._value("SELECT to_regclass(%s)", name) is None:
            parts = [*map(_definition, TYPES), SQL("PRIMARY KEY ({})").format(_names(KEY))]
            self._connection.execute(SQL("CREATE TABLE {} ({})").format(self._table, SQL(", ").join(parts)))
            # The position of a table that was dropped.
            self._connection.execute(SQL("DELETE FROM {} WHERE table_name = %s").format(self._positions), [self._name])

    def _read_position(self) -> None:
        found = self._connection.execute(
            SQL("SELECT options, place, purges FROM {} WHERE table_name = %s").format(self._positions), [self._name]
        ).fetchone()
        #: True if this run continues an earlier one.
        self.resumed = found is not None
        if found is None:
            if self._options is None:
                raise UserError(f"{self} is not of an export: it has no row in {POSITIONS}. Give another --table.")
            self.place, self._purged = Place(id_before(self._options["since"] or 0.0)), newest_purge(self._redis)
            self._connection.execute(
                SQL("INSERT INTO {} (table_name, options, place, purges) VALUES (%s, %s, %s, %s)").format(
                    self._positions
                ),
                [self._name, json.dumps(self._options), self._stored(self.place), self._purged],
            )
            return
        check_options(str(self), found[0], self._options or {})
        #: Stream position up to which rows are in the table.
        self.place, self._purged = Place(**found[1]), found[2]

    @staticmethod
    def _stored(place: Place) -> str:
        return json.dumps(place._asdict())

    def _value(self, query: LiteralString, *parameters: object) -> Any:
        row = self._connection.execute(query, parameters).fetchone()
        return row and row[0]

    def close(self, place: Place) -> None:
        """Delete the posts that were purged since, and store the place."""
        while self.add(None, place):
            pass

    def add(self, batch: pa.RecordBatch | None, place: Place) -> bool:
        """Write rows and delete purged ones in one transaction; return whether there may be more purges.

        Purges are read after the rows, which may be of posts that were purged meanwhile. place: the reader's position
        after the rows.
        """
        self.begun = time.monotonic()
        purges = read_purges(self._redis, self._purged)
        if purges.missed:
            self._transact(batch, place, Purges([], self._purged))
            self.check_posts()
            batch = None
        if batch is not None or purges.position != self._purged or place != self.place:
            self._transact(batch, place, purges)
        return bool(purges.purges)

    def _transact(self, batch: pa.RecordBatch | None, place: Place, purges: Purges) -> None:
        refused: list[tuple[str, str]] = []
        inserted = 0
        with self._explaining(), self._connection.transaction(), self._connection.cursor() as cursor:
            if batch is not None:
                inserted = self._insert(cursor, _latest(batch), refused)
                if not inserted and len(refused) >= MIN_ALL_REFUSED:
                    raise _refusal(refused[0][1])
            removed = self._remove(cursor, [*self._repeated, *purges.purges])
            cursor.execute(
                SQL(
                    "UPDATE {} SET place = %s, purges = %s, updated_at = now() "
                    "WHERE table_name = %s AND place = %s AND purges = %s"
                ).format(self._positions),
                [self._stored(place), purges.position, self._name, self._stored(self.place), self._purged],
            )
            if cursor.rowcount == 0:
                raise UserError(f"Another export has written to {self}. Run only one, then run this command again.")
        self.place, self._purged = place, purges.position
        self.written, self.removed = self.written + inserted, self.removed + removed
        if batch is not None:
            self._repeated.clear()
        self._repeated.extend(purges.purges)
        for post_id, reason in refused[: max(0, MAX_REFUSED_NAMED - self.refused)]:
            logger.warning("%s refused the result of post %s (%s); continuing without it", self, post_id, reason)
        self.refused += len(refused)

    def _insert(self, cursor: Any, batch: pa.RecordBatch, refused: list[tuple[str, str]]) -> int:
        """Insert rows; return how many were inserted. Rows that the database refuses are left out, in `refused`.

        Raises psycopg.Error for other failures.
        """
        try:
            with self._connection.transaction():  # a savepoint
                return self._insert_all(cursor, batch)
        except psycopg.Error as error:
            if not _refuses_row(error):
                raise
            if batch.num_rows == 1:
                refused.append((printable(batch["id"][0].as_py()), _reason(error)))
                return 0
            half = batch.num_rows // 2
            inserted = self._insert(cursor, batch.slice(0, half), refused)
            cursor.execute("TRUNCATE pg_temp.feedmill_staging")
            return inserted + self._insert(cursor, batch.slice(half), refused)

    def _insert_all(self, cursor: Any, batch: pa.RecordBatch) -> int:
        with cursor.copy("COPY pg_temp.feedmill_staging FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types(list(TYPES.values()))
            for row in zip(*map(_values, batch.columns), strict=True):
                copy.write_row(row)
        others = SQL(", ").join(SQL("{0} = excluded.{0}").format(Identifier(name)) for name in TYPES if name not in KEY)
        cursor.execute(
            SQL("INSERT INTO {} ({}) SELECT {} FROM pg_temp.feedmill_staging ON CONFLICT ({}) DO UPDATE SET {}").format(
                self._table, _names(TYPES), _names(TYPES), _names(KEY), others
            )
        )
        return int(cursor.rowcount)

    def _remove(self, cursor: Any, purges: Iterable[Purge]) -> int:
        removed = 0
        for ids, run, until in purges:
            which = SQL("id = ANY(%s)") if run is None else SQL("run = %s")
            statement = SQL("DELETE FROM {} WHERE {} AND stored_at <= %s").format(self._table, which)
            posts = [post_id.replace(NUL, REPLACEMENT) for post_id in ids] if run is None else run
            removed += cursor.execute(statement, [posts, EPOCH + timedelta(milliseconds=until)]).rowcount
        return removed

    def check_posts(self) -> None:
        """Compare all posts in the table with the tombstones in Redis, and delete the purged ones."""
        last = ""
        query = SQL("SELECT DISTINCT id FROM {} WHERE id > %s ORDER BY id LIMIT %s").format(self._table)
        while True:
            with self._explaining():
                ids = [each for (each,) in self._connection.execute(query, [last, CHECKED_ROWS])]
            if not ids:
                return
            if gone := self._reader.gone(ids):
                delete = SQL("DELETE FROM {} WHERE id = ANY(%s)").format(self._table)
                with self._explaining():
                    self.removed += self._connection.execute(delete, [[*gone]]).rowcount
            last = ids[-1]

    def resume(self) -> Place:
        """Reconnect if needed, and return the place to read from."""
        if self._connection.closed:
            self._connect()  # reads the position: the last transaction may have been committed
        return self.place

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Convert psycopg's errors. Its texts do not contain the password; details, which quote rows, are left out."""
        try:
            yield
        except psycopg.Error as error:
            if isinstance(error, TRANSIENT) and not _refuses_row(error):
                raise DatabaseUnavailable(f"PostgreSQL is unavailable ({_reason(error)}).") from None
            raise _refusal(_reason(error)) from None


def _refusal(reason: str) -> UserError:
    advice = "See docs/export.md for the privileges and the columns that an export needs."
    return UserError(f"PostgreSQL refuses the export ({reason}). {advice}")


def _names(columns: Collection[str]) -> Composable:
    """Return the columns' names, separated by commas."""
    return SQL(", ").join(map(Identifier, columns))


def _definition(column: str) -> Composable:
    required = SQL(" NOT NULL") if column in REQUIRED else SQL("")
    return SQL("{} {}{}").format(Identifier(column), SQL(TYPES[column]), required)


def _latest(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Leave out all but the last row of each result, because an INSERT cannot update a row twice.

    The stream has a result twice if it was classified again, or if Redis lost its data and the worker repeated its last
    writes.
    """
    keys = zip(*(batch[column].to_pylist() for column in KEY), strict=True)
    indices = {key: index for index, key in enumerate(keys)}
    return batch if len(indices) == batch.num_rows else batch.take(pa.array(indices.values()))


def _values(column: pa.Array) -> list[Any]:
    """Return a column's values as psycopg expects them, without NUL in texts."""
    if column.type == TIME:
        times = column.cast(pa.int64()).to_pylist()
        return [None if time is None else EPOCH + timedelta(microseconds=time) for time in times]
    if column.type == JSON:
        return [text and NUL_IN_JSON.sub(r"\1\\ufffd", text) for text in column.storage.to_pylist()]
    if column.type == pa.string():
        column = pc.replace_substring(column, NUL, REPLACEMENT)
    return list(column.to_pylist())


def _refuses_row(error: psycopg.Error) -> bool:
    return (error.sqlstate or "").startswith(ROW_REFUSED)


def _reason(error: psycopg.Error) -> str:
    return printable(" ".join((error.diag.message_primary or str(error)).split()).removesuffix("."))
