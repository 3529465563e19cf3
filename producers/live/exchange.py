"""One request and its response over HTTP, within a total time and size.

A timeout of requests is for each read. A server that sends a byte now and then, in the headers, in
the extension of a chunk, or as one `100 Continue` after another, keeps every read from timing out,
for ever. So each read from the socket gets the time that is left. This is below http.client:
whatever it reads, it reads from here.

Relies on these internals of urllib3 2: a pool makes its connections of `ConnectionCls`;
`_new_conn` of a connection connects to the name in `_dns_host`, and `response_class` reads its
answers.
"""

import http.client
import io
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from requests.adapters import HTTPAdapter
from urllib3.connectionpool import HTTPConnectionPool
from urllib3.exceptions import HTTPError
from urllib3.poolmanager import pool_classes_by_scheme

#: urllib3's classes of connection pools, by scheme.
PoolClasses = Mapping[str, type[HTTPConnectionPool]]


class Exchange:
    """The limits of the current exchange.

    An exchange has two parts, each with a deadline of its own: all until the end of the response's
    headers, and the body. connect_timeout, read_timeout: seconds for one attempt to connect, and
    for one read.
    """

    def __init__(self) -> None:
        self._connect_timeout = 0.0
        self._read_timeout = 0.0
        #: Duration of the current part in seconds, and its end (monotonic seconds).
        self._seconds = 0.0
        self._deadline = 0.0
        self._max_bytes = 0
        self._bytes_left = 0
        #: The limit that ended the exchange, for messages; "" if none did.
        self.problem = ""
        #: Whether an address may be connected to; None if all may. A proxy's address always may.
        self.is_allowed: Callable[[str], bool] | None = None

    def begin(
        self,
        seconds: float,
        connect_timeout: float,
        read_timeout: float,
        max_bytes: int,
    ) -> None:
        """Start an exchange. seconds: maximum until the end of the headers."""
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        self._max_bytes = max_bytes
        self._bytes_left = max_bytes
        self.problem = ""
        self._start_part(seconds)

    def begin_body(self, seconds: float) -> None:
        """Start the body. seconds: its maximum duration."""
        self._start_part(seconds)

    def connect_timeout(self) -> float:
        """Return the seconds for an attempt to connect. Raises TimeoutError if no time is left."""
        return min(self._connect_timeout, self.seconds_left())

    def read_timeout(self) -> float:
        """Return the seconds for a read. Raises TimeoutError if no time is left."""
        return min(self._read_timeout, self.seconds_left())

    def seconds_left(self) -> float:
        """Return the seconds until the deadline. Raises TimeoutError if none are left."""
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            self.problem = f"the response took longer than {self._seconds:.0f} s"
            raise TimeoutError(self.problem)
        return seconds

    def check_address(self, address: str) -> None:
        """Raise OSError if an address may not be connected to."""
        if self.is_allowed is None or self.is_allowed(address):
            return
        self.problem = f"the address {address} is not public"
        raise OSError(self.problem)

    def count(self, size: int) -> None:
        """Count bytes that were read. Raises OSError if they are too many."""
        self._bytes_left -= size
        if self._bytes_left < 0:
            mebibytes = self._max_bytes >> 20
            self.problem = f"the response is larger than {mebibytes} MiB"
            raise OSError(self.problem)

    def _start_part(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds


class _Reader(io.RawIOBase):
    """A socket's bytes, each read within the limits of the exchange."""

    def __init__(self, connected: socket.socket, exchange: Exchange) -> None:
        self._socket = connected
        # Keeps the socket open until it is closed, as http.client expects.
        self._file: Any = connected.makefile("rb", buffering=0)
        self._exchange = exchange

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        timeout = self._exchange.read_timeout()
        self._socket.settimeout(timeout)
        size: int = self._file.readinto(buffer)
        self._exchange.count(size)
        return size

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class _Socket:
    """The part of a socket that http.client's response uses."""

    def __init__(self, connected: socket.socket, exchange: Exchange) -> None:
        self._socket = connected
        self._exchange = exchange

    def makefile(self, mode: str) -> io.BufferedReader:  # noqa: ARG002 - http.client asks for "rb"
        reader = _Reader(self._socket, self._exchange)
        return io.BufferedReader(reader)


class LimitedAdapter(HTTPAdapter):
    """An adapter of requests that keeps within the limits of an exchange.

    Through a SOCKS proxy, the handshake with the proxy has PySocks' timeouts instead.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        super().__init__()

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        super().init_poolmanager(*arguments, **options)
        self._limit(self.poolmanager)

    def proxy_manager_for(self, proxy: str, **options: Any) -> Any:
        is_new = proxy not in self.proxy_manager
        manager: Any = super().proxy_manager_for(proxy, **options)
        if is_new:
            self._limit(manager)
        return manager

    def _limit(self, manager: Any) -> None:
        """Replace the classes of a manager's pools."""
        classes: PoolClasses = manager.pool_classes_by_scheme
        connects_directly = classes is pool_classes_by_scheme
        manager.pool_classes_by_scheme = {
            scheme: _limited_pool(pool, self._exchange, connects_directly)
            for scheme, pool in classes.items()
        }


def _limited_pool(
    pool: type[HTTPConnectionPool], exchange: Exchange, connects_directly: bool
) -> type[HTTPConnectionPool]:
    """Return a class of pools whose connections keep within the limits. connects_directly: not
    through SOCKS.
    """

    class LimitedResponse(http.client.HTTPResponse):
        def __init__(self, sock: Any, *arguments: Any, **options: Any) -> None:
            limited: Any = _Socket(sock, exchange)
            super().__init__(limited, *arguments, **options)

    base: Any = pool.ConnectionCls
    members: dict[str, Any] = {"response_class": LimitedResponse}
    if connects_directly:

        def connect(connection: Any) -> socket.socket:
            return _connect(connection, exchange, base._new_conn)

        members["_new_conn"] = connect
    connection_class = type("LimitedConnection", (base,), members)
    return type("LimitedPool", (pool,), {"ConnectionCls": connection_class})


def _connect(connection: Any, exchange: Exchange, connect: Any) -> socket.socket:
    """Connect to one of a server's addresses: urllib3 would give each of them the full timeout.

    connect: urllib3's own way, which tries all addresses of the connection's name.
    """
    name = connection._dns_host
    connection.timeout = exchange.connect_timeout()
    try:
        infos = socket.getaddrinfo(name, connection.port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise OSError("the name is not one of a server") from None
    except OSError:
        if exchange.is_allowed is not None:
            # urllib3 would resolve the name again, perhaps to another address.
            raise
        return connect(connection)  # type: ignore[no-any-return]  # says why
    addresses: list[str] = []
    for *_, socket_address in infos:
        address = str(socket_address[0])
        addresses.append(address)
    try:
        return _connect_to_one(connection, exchange, connect, addresses)
    finally:
        connection._dns_host = name


def _connect_to_one(
    connection: Any, exchange: Exchange, connect: Any, addresses: Sequence[str]
) -> socket.socket:
    """Connect to the first address that answers. Raises the last address' error."""
    is_direct = connection.proxy is None
    failure: Exception = OSError("the name has no address")
    for address in addresses:
        if is_direct:
            exchange.check_address(address)
        connection._dns_host = address
        connection.timeout = exchange.connect_timeout()
        try:
            return connect(connection)  # type: ignore[no-any-return]
        except HTTPError as error:
            failure = error
    raise failure
