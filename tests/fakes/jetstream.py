"""A fake Jetstream on loopback: the path /subscribe of a server of version 1, with posts that
tests write.

    with Jetstream() as jetstream:
        post_id = jetstream.post("a text")
        jetstream.delete(post_id)
        connect(f"{jetstream.url}/subscribe?wantedCollections=app.bsky.feed.post&cursor=0")

Events have strictly increasing times, unless the server's clock goes back by more than a second. A
connection first gets the stored events from its position on, in the order of their times; none if
the position is in the future of the server's clock. Then it gets new ones in the order of their
arrival. `forget` drops old events, as if the time for which the server keeps them had passed; a
connection that asks for them silently begins with the oldest one left. Faults strike at random or
as planned: a closed connection, with or without a refused handshake, a cut one, a truncated event,
repeated events. `down` refuses handshakes and closes the connections. Filters by account come in
the query, or with `requireHello` in a first message of the client. Sources:
bluesky-social/jetstream, section 5.1 of its design document, internal/subscribe, issue 343
(`early`).
"""

import json
import random
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from socket import SHUT_RDWR
from threading import Condition, Thread
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.sync.server import ServerConnection, serve

COLLECTION = "app.bsky.feed.post"
#: Faults of a connection; see `_disturb`.
FAULTS = ("handshake", "close", "cut", "truncate", "repeat")
#: Microseconds by which the clock may go back without the times of events doing so.
SMALL_STEP = 1_000_000
#: Events that a repetition sends again.
REPEATED = 20


class Jetstream:
    """The server. early: events before the requested position with which a connection begins."""

    def __init__(
        self, early: int = 0, seed: int = 0, clock: Callable[[], float] = time.time
    ) -> None:
        self._early, self._clock = early, clock
        self._random = random.Random(seed)
        self._changed = Condition()
        #: Time and text of the events, in the order of their arrival, and the number of older
        #: ones.
        self._events: list[tuple[int, str]] = []
        self._dropped = 0
        self._closing = False
        self._written = 0
        self._rate = 0.0
        self._among: tuple[str, ...] = FAULTS
        self._planned: dict[int, str] = {}
        #: Faults so far, by kind.
        self.fault_counts: Counter[str] = Counter()
        #: Statuses with which the next handshakes are refused.
        self.refusals: list[int] = []
        #: Headers of the refusals.
        self.refusal_headers: dict[str, str] = {}
        #: Whether the server refuses everything.
        self.down = False
        #: First messages of the clients that were asked for one.
        self.hellos: list[dict[str, Any]] = []
        #: Queries of all connections so far, and the number of events sent over them.
        self.queries: list[dict[str, str]] = []
        self.sent = 0
        self._server = serve(
            self._serve, "127.0.0.1", 0, process_request=self._refuse, close_timeout=0.2
        )
        self.url = f"ws://127.0.0.1:{self._server.socket.getsockname()[1]}"
        self._thread = Thread(target=self._server.serve_forever, name="jetstream")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._server.shutdown()
        self._thread.join()

    # Content.

    def post(self, text: str, author: str = "did:plc:alice", **record: Any) -> str:
        """Publish a post and return its id. record: further fields of its record."""
        self._written += 1
        post_id = f"at://{author}/{COLLECTION}/{self._written:013}"
        self._commit(
            "create",
            post_id,
            {"text": text, "createdAt": "2026-11-01T10:00:00.000Z", **record},
        )
        return post_id

    def edit(self, post_id: str, text: str) -> None:
        self._commit(
            "update", post_id, {"text": text, "createdAt": "2026-11-01T10:00:00.000Z"}
        )

    def delete(self, post_id: str) -> None:
        self._commit("delete", post_id, None)

    def account(self, author: str, status: str | None) -> None:
        """Report an account's state: deleted, takendown, suspended, deactivated; None if it is
        active.
        """
        state = {"active": status is None} | ({"status": status} if status else {})
        self.raw(
            {
                "did": author,
                "kind": "account",
                "account": {**state, "did": author, "seq": 1},
            }
        )

    def raw(self, event: dict[str, Any] | str) -> int:
        """Publish any event, or any text; return its time in microseconds."""
        with self._changed:
            last = self._events[-1][0] if self._events else 0
            at = round(self._clock() * 1_000_000)
            if last - SMALL_STEP < at <= last:
                at = last + 1
            text = (
                event
                if isinstance(event, str)
                else json.dumps({**event, "time_us": at})
            )
            self._events.append((at, text))
            self._changed.notify_all()
        return at

    def texts(self) -> list[str]:
        """Return the stored events as they are sent."""
        with self._changed:
            return [text for _, text in self._events]

    def forget(self, keep: int) -> None:
        """Keep only this many events."""
        with self._changed:
            dropped = max(0, len(self._events) - keep)
            del self._events[:dropped]
            self._dropped += dropped

    def _commit(
        self, operation: str, post_id: str, record: dict[str, Any] | None
    ) -> None:
        author, collection, rkey = post_id.removeprefix("at://").split("/")
        commit = {
            "rev": "3l",
            "operation": operation,
            "collection": collection,
            "rkey": rkey,
        }
        if record is not None:
            commit |= {"record": {"$type": COLLECTION, **record}, "cid": "bafy"}  # type: ignore[dict-item]
        self.raw({"did": author, "kind": "commit", "commit": commit})

    # Serving.

    def random_faults(self, rate: float, among: Sequence[str] = FAULTS) -> None:
        """Let each of these faults strike at this share of the events."""
        self._rate, self._among = rate, tuple(among)

    def faults_at(self, planned: Mapping[int, str]) -> None:
        """Let faults strike once this many events have been sent.

        A handshake is refused after a closed connection.
        """
        self._planned = {self.sent + count: fault for count, fault in planned.items()}

    def _fault(self) -> str | None:
        """Return the fault that strikes before the next event."""
        if self._planned and self.sent >= min(self._planned):
            return self._planned.pop(min(self._planned))
        return next(
            (fault for fault in self._among if self._random.random() < self._rate), None
        )

    def _refuse(self, connection: ServerConnection, _: Request) -> Response | None:
        if not self.down and not self.refusals:
            return None
        status = 503 if self.down else self.refusals.pop(0)
        response = connection.respond(status, "no")
        for name, value in self.refusal_headers.items():
            response.headers[name] = value
        return response

    def _serve(self, connection: ServerConnection) -> None:
        assert connection.request
        query = parse_qs(urlsplit(connection.request.path).query)
        accounts = frozenset(query.get("wantedDids", ()))
        if "requireHello" in query:
            try:
                hello = json.loads(connection.recv(10))
            except ConnectionClosed:
                return
            self.hellos.append(hello)
            accounts = frozenset(hello["payload"]["wantedDids"])
        cursor = int(query["cursor"][0]) if "cursor" in query else None
        with self._changed:
            arrived = self._dropped + len(self._events)
            backlog: list[tuple[int, str]] = []
            if cursor is not None and cursor <= self._clock() * 1_000_000:
                ordered = sorted(self._events)
                backlog = ordered[
                    max(0, bisect_left(ordered, (cursor, "")) - self._early) :
                ]
        self.queries.append({name: values[-1] for name, values in query.items()})
        with suppress(ConnectionClosed, OSError):
            if self._send_all(connection, backlog, accounts):
                self._follow(connection, arrived, accounts)

    def _follow(
        self, connection: ServerConnection, arrived: int, accounts: frozenset[str]
    ) -> None:
        """Send all events after the first `arrived`."""
        while events := self._after(arrived, connection):
            if not self._send_all(connection, events, accounts):
                return
            arrived += len(events)

    def _send_all(
        self,
        connection: ServerConnection,
        events: Sequence[tuple[int, str]],
        accounts: frozenset[str],
    ) -> bool:
        """Send events, of these accounts if any are given. Returns false if the connection has
        ended.
        """
        for _, text in events:
            if accounts and json.loads(text)["did"] not in accounts:
                continue
            if self.down:
                connection.close(1001, "going away")
                return False
            if self._disturb(connection, text):
                return False
            connection.send(text)
            self.sent += 1
        return True

    def _after(
        self, arrived: int, connection: ServerConnection
    ) -> list[tuple[int, str]]:
        """Return later events as soon as there are some; none if the connection is to be
        closed.
        """
        with self._changed:
            while not (found := self._events[max(0, arrived - self._dropped) :][:500]):
                self._changed.wait(0.1)
                if self.down:
                    connection.close(1001, "going away")
                if self._closing or connection.protocol.state is not State.OPEN:
                    return []
            return [] if self._closing else found

    def _disturb(self, connection: ServerConnection, text: str) -> bool:
        """Let a fault happen before this event. Returns true if the connection has ended."""
        if (fault := self._fault()) is None:
            return False
        self.fault_counts[fault] += 1
        if fault == "repeat":
            with self._changed:
                texts = [each for _, each in self._events]
            end = texts.index(text)
            for each in texts[max(0, end - REPEATED) : end]:
                connection.send(each)
        elif fault == "truncate":
            connection.send(text[: self._random.randrange(1, len(text) - 1)])
        elif fault == "cut":
            # The header of a frame of 1,000 bytes, and a part of it.
            connection.socket.sendall(b"\x81\x7e\x03\xe8" + text.encode()[:100])
            connection.socket.shutdown(SHUT_RDWR)
        else:
            self.refusals += [503] * (fault == "handshake")
            connection.close(1011, "server restart")
        return fault not in ("repeat", "truncate")
