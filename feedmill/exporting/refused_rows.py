"""Rows that a table refused, kept beside it until it accepts them.

A row may be refused for itself, or because of a fault of the table, such as a partition that its
owner forgot. Nothing tells these apart for certain. So refused rows are kept in a table, in the
transaction that steps over them, and offered again: to each later export, and every
OFFER_INTERVAL_S seconds while one follows the stream.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from psycopg.sql import SQL, Composable, Composed, Identifier

from feedmill.exporting.table_rows import Row, as_json, from_json, key_of, value_of
from feedmill.shared.errors import UserError, printable

#: Table of the refused rows of all results tables in its schema.
REFUSED = "feedmill_refused"
#: Maximum rows kept per results table; the oldest are forgotten first. The results stream holds
#: about as many.
MAX_REFUSED_ROWS = 100_000
#: Rows offered per transaction. If all are refused, each takes a few milliseconds.
OFFERED_ROWS = 500
#: Seconds between offers while rows are refused again; and minimum multiple of the time that an
#: offer took.
OFFER_INTERVAL_S = 60.0
OFFER_PAUSE_FACTOR = 10.0


class RefusedRow(NamedTuple):
    """A row that PostgreSQL refused, and why."""

    row: Row
    reason: str


class KeptRow(NamedTuple):
    """A refused row. number: its place in the order of refusal."""

    number: int
    row: Row


class RefusedRows:
    """The refused rows of one results table.

    Methods run in the cursor's transaction. Each raises psycopg.Error.
    """

    def __init__(self, schema: str, table_name: str) -> None:
        self._table_name = table_name
        self.table = Identifier(schema, REFUSED)
        #: Number of the row that was offered last, in this round.
        self._offered = 0

    def definition(self) -> Composed:
        """Return the statement that creates the table."""
        return SQL(
            "CREATE TABLE {} (table_name text, id text, fingerprint text, run text, stored_at "
            "timestamptz NOT NULL, "
            "reason text NOT NULL, result text NOT NULL, refused_at timestamptz NOT NULL DEFAULT "
            "now(), "
            "number bigint GENERATED ALWAYS AS IDENTITY, PRIMARY KEY (table_name, id, "
            "fingerprint))"
        ).format(self.table)

    def clear(self, cursor: Any) -> None:
        """Forget all rows."""
        cursor.execute(
            SQL("DELETE FROM {} WHERE table_name = %s").format(self.table),
            [self._table_name],
        )

    def keep(self, cursor: Any, refusals: Sequence[RefusedRow]) -> int:
        """Keep rows.

        A later one of the same result replaces an earlier one. Return how many were forgotten.
        """
        statement = SQL(
            "INSERT INTO {} (table_name, id, fingerprint, run, stored_at, reason, result) VALUES "
            "(%s, %s, %s, %s, %s, %s, %s) ON CONFLICT (table_name, id, fingerprint) DO UPDATE "
            "SET run = excluded.run, stored_at = excluded.stored_at, reason = excluded.reason, "
            "result = excluded.result, refused_at = excluded.refused_at"
        ).format(self.table)
        values = []
        for row, reason in refusals:
            run = value_of(row, "run")
            stored_at = value_of(row, "stored_at")
            values.append(
                (self._table_name, *key_of(row), run, stored_at, reason, as_json(row))
            )
        cursor.executemany(statement, values)
        statement = SQL(
            "DELETE FROM {0} WHERE table_name = %s AND number <= "
            "(SELECT number FROM {0} WHERE table_name = %s ORDER BY number DESC OFFSET %s LIMIT 1)"
        ).format(self.table)
        cursor.execute(
            statement, [self._table_name, self._table_name, MAX_REFUSED_ROWS]
        )
        return int(cursor.rowcount)

    def count(self, cursor: Any) -> int:
        """Return how many rows are kept."""
        statement = SQL("SELECT count(*) FROM {} WHERE table_name = %s").format(
            self.table
        )
        (rows,) = cursor.execute(statement, [self._table_name]).fetchone()
        return int(rows)

    def take(self, cursor: Any) -> list[KeptRow]:
        """Take the next rows to offer from the round; none at its end.

        Raises UserError for a damaged row.
        """
        statement = SQL(
            "SELECT number, result FROM {} WHERE table_name = %s AND number > %s "
            "ORDER BY number LIMIT %s"
        ).format(self.table)
        rows = cursor.execute(
            statement, [self._table_name, self._offered, OFFERED_ROWS]
        ).fetchall()
        kept_rows: list[KeptRow] = []
        for number, text in rows:
            try:
                row = from_json(text)
            except ValueError as error:
                raise UserError(
                    f"The row with the number {number} in {REFUSED} is damaged "
                    f"({printable(str(error)):.80}). Delete this row to export without it."
                ) from None
            kept_rows.append(KeptRow(number, row))
        self._offered = 0
        if kept_rows:
            self._offered = kept_rows[-1].number
        return kept_rows

    def forget(self, cursor: Any, kept: Iterable[KeptRow]) -> None:
        """Forget rows that were accepted, or whose posts were purged."""
        numbers = [row.number for row in kept]
        statement = SQL(
            "DELETE FROM {} WHERE table_name = %s AND number = ANY(%s)"
        ).format(self.table)
        cursor.execute(statement, [self._table_name, numbers])

    def forget_posts(self, cursor: Any, ids: Sequence[str]) -> None:
        """Forget the rows of purged posts."""
        statement = SQL("DELETE FROM {} WHERE table_name = %s AND id = ANY(%s)").format(
            self.table
        )
        cursor.execute(statement, [self._table_name, ids])

    def forget_purged(
        self, cursor: Any, which: Composable, posts: Any, until: datetime
    ) -> None:
        """Forget the rows of a purge.

        which: its condition on `posts`. until: time of the latest result that is gone.
        """
        statement = SQL(
            "DELETE FROM {} WHERE table_name = %s AND {} AND stored_at <= %s"
        ).format(self.table, which)
        cursor.execute(statement, [self._table_name, posts, until])

    def ids_after(self, cursor: Any, after: str, count: int) -> list[str]:
        """Return the ids of posts with refused rows, in order.

        after: the id before the first one; "" for none. count: the maximum number of ids.
        """
        statement = SQL(
            "SELECT DISTINCT id FROM {} WHERE table_name = %s AND id > %s ORDER BY id LIMIT %s"
        )
        rows = cursor.execute(
            statement.format(self.table), [self._table_name, after, count]
        ).fetchall()
        return [post_id for (post_id,) in rows]
