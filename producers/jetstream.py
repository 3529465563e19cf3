"""Connections to Jetstream, Bluesky's stream of events as JSON over WebSocket, with failover.

The stream is that of the path /subscribe (version 1), which old and new Jetstream servers have. A
position is a time in microseconds, at which the server saw the event. Servers see an event at
slightly different times, so a position holds at each of them with an overlap. A server keeps
events for about a day and a half, and silently begins with its oldest one if the position is
older. Servers of version 2 may begin up to an hour earlier than asked. Sources:
bluesky-social/jetstream, section 5.1 of its design document, internal/subscribe, issue 343.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from socket import IPPROTO_TCP, TCP_USER_TIMEOUT
from typing import Any
from urllib.parse import urlencode, urlsplit

from websockets.exceptions import InvalidProxy, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from feedmill.producers.live.source import Clock, SourceFailed, header_number
from feedmill.shared.errors import clause

#: Maximum bytes of an event. Servers are asked to leave out larger ones; one that comes all the
#: same is cut, so that it cannot be read. The client closes the connection at a frame of more than
#: MAX_FRAME_BYTES.
MAX_EVENT_BYTES = 2**20
MAX_FRAME_BYTES = 2**26
#: Timeouts in seconds: for a new connection, for its closing handshake, and until an empty answer
#: to the daemon.
CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 1.0
IDLE_S = 1.0
#: Seconds after which the connection ends if the server takes nothing: websockets answers pings
#: without a limit.
TAKES_NOTHING_S = 30.0
#: Seconds without any event after which the connection counts as dead. Bluesky has hundreds of
#: events per second.
SILENCE_S = 60.0
#: Errors of connecting and reading. A proxy in the environment raises ImportError if it is a SOCKS
#: proxy and python-socks is missing, and ValueError if its port is malformed.
CONNECTION_ERRORS = (OSError, EOFError, WebSocketException, ImportError, ValueError)


class Jetstream:
    """Read the stream of one of several servers.

    After each failure, the next connection is to the next server, without those that asked to wait
    if others did not.

    urls: of the servers, without a path. accounts: whose events to read; all of them if empty.
    switches: how often another server was chosen.
    """

    def __init__(
        self,
        urls: Sequence[str],
        collection: str,
        accounts: Sequence[str],
        clock: Clock,
    ) -> None:
        self._urls = urls
        self._filters: dict[str, Any] = {
            "wantedCollections": [collection],
            "maxMessageSizeBytes": MAX_EVENT_BYTES,
        }
        #: Whether the filters are sent as a message: thousands of accounts are too long for a URL.
        self._needs_message = bool(accounts)
        #: A few accounts may write nothing for days; pings find a dead connection.
        self._max_silence_s = SILENCE_S
        if accounts:
            self._max_silence_s = math.inf
            self._filters["wantedDids"] = list(accounts)
        self._clock = clock
        self._server = 0
        #: Times from which the servers may be asked (monotonic seconds).
        self._allowed_at = [-math.inf] * len(urls)
        self.switches = 0

    @property
    def server(self) -> str:
        """The host and port of the server of this or the next connection, without a password."""
        _, _, address = urlsplit(self._urls[self._server]).netloc.rpartition("@")
        return address

    def events(self, cursor: int | None) -> Iterator[str | bytes | None]:
        """Yield events from this position on, and None after each second without one.

        Raises SourceFailed.
        """
        try:
            yield from self._read(cursor)
        except SourceFailed as failure:
            failed = self.server
            wait_s = self._move_on(failure.retry_after)
            if failed == self.server:
                raise SourceFailed(f"{failed}: {failure}", wait_s) from failure
            reason = f"{failed}: {failure}; the next server is {self.server}"
            raise SourceFailed(reason, wait_s) from failure

    def _move_on(self, wait_s: float) -> float:
        """Choose the next server. Return the seconds until it may be asked.

        wait_s: for which the present one must not be asked.
        """
        now = self._clock.monotonic()
        self._allowed_at[self._server] = now + wait_s
        count = len(self._urls)
        chosen = self._server
        shortest_s = math.inf
        for step in range(1, count + 1):
            server = (self._server + step) % count
            server_wait_s = max(0.0, self._allowed_at[server] - now)
            if server_wait_s < shortest_s:
                chosen = server
                shortest_s = server_wait_s
        if chosen != self._server:
            self.switches += 1
        self._server = chosen
        return shortest_s

    def _read(self, cursor: int | None) -> Iterator[str | bytes | None]:
        url = self._url(cursor)
        try:
            with connect(
                url,
                open_timeout=CONNECT_TIMEOUT_S,
                close_timeout=CLOSE_TIMEOUT_S,
                max_size=MAX_FRAME_BYTES,
            ) as connection:
                socket = connection.socket
                # Of the socket below TLS in TLS, through a proxy.
                connected = getattr(socket, "ssl_socket", socket)
                timeout_ms = round(TAKES_NOTHING_S * 1000)
                connected.setsockopt(
                    IPPROTO_TCP,
                    TCP_USER_TIMEOUT,
                    timeout_ms,
                )
                if self._needs_message:
                    message = _options_update(self._filters)
                    connection.send(message)
                yield from self._receive(connection)
        except InvalidStatus as fault:
            response = fault.response
            retry_after = header_number(response.headers, "Retry-After")
            reason = f"the server answered {response.status_code}"
            raise SourceFailed(reason, retry_after or 0.0) from fault
        except InvalidProxy as fault:  # its text shows the proxy's password
            reason = f"the proxy in the environment cannot be used ({fault.msg})"
            raise SourceFailed(reason) from fault
        except CONNECTION_ERRORS as fault:
            reason = clause(fault)
            raise SourceFailed(f"the connection failed ({reason})") from fault

    def _url(self, cursor: int | None) -> str:
        query: dict[str, Any] = {**self._filters}
        if self._needs_message:
            query = {"requireHello": "true"}
        if cursor is not None:
            query["cursor"] = max(0, cursor)
        parameters = urlencode(query, doseq=True)
        return f"{self._urls[self._server]}/subscribe?{parameters}"

    def _receive(self, connection: ClientConnection) -> Iterator[str | bytes | None]:
        """Yield events, and None after each second without one."""
        clock = self._clock
        last_event = clock.monotonic()
        while True:
            try:
                text = connection.recv(IDLE_S)
            except TimeoutError:
                silence_s = clock.monotonic() - last_event
                if silence_s > self._max_silence_s:
                    raise SourceFailed(f"no event for {SILENCE_S:.0f} s") from None
                yield None
                continue
            last_event = clock.monotonic()
            # A larger event is cut, and malformed on purpose. Of a text, this counts characters,
            # each of which has at least one byte.
            yield text[:MAX_EVENT_BYTES]


def _options_update(filters: Mapping[str, Any]) -> str:
    """Return the message that replaces a connection's filters."""
    message = {"type": "options_update", "payload": filters}
    return json.dumps(message)
