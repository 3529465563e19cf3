"""A connection to PostgreSQL whose operations end, whatever the server does.

psycopg waits for a server that accepts a statement and never answers: stopped, swapped out, or
behind a proxy that lost it. TCP's timeouts do not notice, because the server's kernel acknowledges
every packet.
"""

import time
from collections.abc import Generator, Sequence
from typing import Any

import psycopg

#: Seconds within which an operation must end. Deleting a run from a table of a hundred million
#: rows takes minutes.
ANSWER_TIMEOUT_S = 600.0
#: Seconds that an operation may still take after a signal to stop.
STOP_TIMEOUT_S = 5.0


class BoundedConnection(psycopg.Connection[Any]):
    """A connection that is closed, and raises OperationalError, if an operation takes too long.

    An operation is a statement, or a part of a COPY.
    """

    #: Signals received: once there is one, an operation may take STOP_TIMEOUT_S.
    stop: Sequence[int] = ()

    def wait(
        self, gen: Generator[Any, Any, Any], *arguments: Any, **options: Any
    ) -> Any:
        operation = self._bound(gen)
        return super().wait(operation, *arguments, **options)

    def _bound(self, operation: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Pass the events of psycopg's generator on. psycopg resumes it ten times a second even
        without any.
        """
        began = time.monotonic()
        stopped_at: float | None = None
        ready: Any = None
        while True:
            try:
                event = operation.send(ready)
            except StopIteration as end:
                return end.value
            ready = yield event
            now = time.monotonic()
            if self.stop and stopped_at is None:
                stopped_at = now

            age = now - began
            is_late = age > ANSWER_TIMEOUT_S
            if stopped_at is not None and now - stopped_at > STOP_TIMEOUT_S:
                is_late = True
            if is_late:
                # A later answer would be taken for that of another statement.
                self.pgconn.finish()
                raise psycopg.OperationalError(f"no answer within {age:.0f} s")
