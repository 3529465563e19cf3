"""The web server's front gate: every request and answer passes it.

It refuses requests with a foreign Host (DNS rebinding) and requests that another site makes a
browser send, bounds bodies in bytes, values and seconds, before anything reads them, adds headers
that keep browsers from running or showing anything foreign, and logs each request under an id.
"""

import asyncio
import logging
import math
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders

from feedmill.shared.errors import printable
from feedmill.web.access import network_of
from feedmill.web.failures import Failure, respond, unauthorized

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

#: Bytes of a request's body, and of a file that a page sends.
MAX_BODY_BYTES = 32 * 2**20
MAX_FILE_BYTES = 512 * 2**20
#: Bytes of the body of a request without a valid token or session: enough to log in.
MAX_UNKNOWN_BYTES = 64 * 1024
#: Bytes of all bodies that are being read, without files, which are not kept in memory.
MAX_ALL_BYTES = 256 * 2**20
#: Bytes of a body that are read although the answer is an error already: a client that still sends
#: would miss the answer.
MAX_UNREAD_BYTES = MAX_BODY_BYTES
#: Occurrences of `{`, `[` and `,` in a body. They bound the number of objects: 32 MiB of `[],`
#: take seconds to parse, during which nobody is served, and half a gigabyte of memory.
MAX_SEPARATORS = 2**20
#: Seconds for a whole body, and for a file.
BODY_TIMEOUT_S = 30.0
FILE_TIMEOUT_S = 1800.0
#: Seconds that a client may leave an answer unread.
SEND_TIMEOUT_S = 60.0
#: Start of the paths to which pages send files.
FILE_PATHS = "/files/"
#: Path of the form to log in.
LOGIN_PATH = "/login"
#: Addresses whose rates are remembered.
MAX_ADDRESSES = 10_000
PORT = re.compile(r":[0-9]{1,5}")
REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
#: `Sec-Fetch-Site` of requests that this server's pages, or the person at the browser, cause.
OWN_SITES = frozenset({"same-origin", "none"})
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """An ASGI application around another one.

    hosts: names under which the server may be reached, without a port, besides the loopback names.
    rate: requests per second of one address. knows: whether the headers Authorization and Cookie
    are those of a caller who may come in.
    """

    def __init__(
        self,
        app: Any,
        hosts: tuple[str, ...] = (),
        rate: float = math.inf,
        knows: Callable[[str, str], bool] = lambda _authorization, _cookies: True,
    ) -> None:
        self._app = app
        self._rates = Rates(rate)
        self._knows = knows
        self._bodies = Bodies()
        self._hosts = frozenset({*LOOPBACK_NAMES, *(host.lower() for host in hosts)})

    async def __call__(
        self, scope: MutableMapping[str, Any], receive: Receive, send: Send
    ) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=dict(scope))
        request_id = headers.get("x-request-id", "")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        exchange = _Exchange(scope, receive, send, request_id, self._bodies)
        exchange.is_known = self._knows(
            headers.get("authorization", ""), headers.get("cookie", "")
        )
        began = time.monotonic()
        try:
            refusal = self._refusal(scope, headers)
            if refusal is not None:
                await refusal(scope, receive, exchange.send)
                return
            length = headers.get("content-length", "0")
            exchange.check_length(length)
            await self._app(scope, exchange.receive, exchange.send)
        except Failure as failure:
            # Raised while the body was read, past the handlers inside.
            response = respond(failure.status_code, failure.kind, failure.message)
            response.headers["Connection"] = "close"
            if exchange.status == 0:
                await response(scope, receive, exchange.send)
        finally:
            exchange.release()
            milliseconds = (time.monotonic() - began) * 1000
            caller = scope["state"].get("caller", "-")
            logger.info(
                "%s %s %s %s %.1f ms %s",
                request_id,
                printable(str(caller)),
                scope["method"],
                printable(scope["path"][:200]),
                milliseconds,
                exchange.status or "no answer",
            )

    def _refusal(self, scope: MutableMapping[str, Any], headers: Headers) -> Any:
        """Return the answer to a request that another site may have caused, or one of too many;
        None for others.
        """
        address, _ = scope.get("client") or ("", 0)
        if not self._rates.admits(network_of(address)):
            return respond(429, "too_many", "Too many requests. Send fewer a second.")
        hosts = headers.getlist("host")
        host = hosts[0].lower() if hosts else ""
        name = _without_port(host)
        if name not in self._hosts or len(hosts) > 1:
            return respond(
                400,
                "unknown_host",
                f"This server is not known as {name!r}. Name it in FEEDMILL_WEB_HOSTS.",
            )
        if _is_foreign(scope["method"], headers, host):
            return respond(403, "foreign_site", "Another site sent this request.")
        return None


class Rates:
    """A limit of requests for each address: a bucket that fills with `rate` tokens a second,
    and holds twice as many.
    """

    def __init__(
        self, rate: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = rate
        self._clock = clock
        #: By address: the tokens that it had, and when.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def admits(self, address: str) -> bool:
        """Take a token of an address; return False if it has none."""
        if math.isinf(self._rate):
            return True
        now = self._clock()
        size = max(1.0, 2 * self._rate)
        tokens, since = self._buckets.pop(address, (size, now))
        tokens += self._rate * (now - since)
        tokens = min(size, tokens)
        is_admitted = tokens >= 1
        if is_admitted:
            tokens -= 1
        self._buckets[address] = (tokens, now)
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        return is_admitted


class Bodies:
    """The bytes of all bodies in memory."""

    def __init__(self) -> None:
        self._total = 0

    def add(self, size: int) -> None:
        """Count bytes. Raises Failure if there are too many."""
        if self._total + size > MAX_ALL_BYTES:
            raise Failure(503, "busy", "Too much is being sent. Try again.")
        self._total += size

    def release(self, size: int) -> None:
        self._total -= size


class _Exchange:
    """A request and its answer, with their limits."""

    def __init__(
        self,
        scope: MutableMapping[str, Any],
        receive: Receive,
        send: Send,
        request_id: str,
        bodies: Bodies,
    ) -> None:
        self._receive = receive
        self._send = send
        self._request_id = request_id
        self._bodies = bodies
        self._path = scope["path"]
        self._is_file = scope["path"].startswith(FILE_PATHS)
        self._has_body = scope["method"] not in SAFE_METHODS
        self._bytes = 0
        #: The bytes of these that are counted among all bodies.
        self._counted_bytes = 0
        self._separators = 0
        self._announced_bytes = 0
        self._has_ended = False
        self._max_bytes = MAX_BODY_BYTES
        timeout_s = BODY_TIMEOUT_S
        if self._is_file:
            self._max_bytes = MAX_FILE_BYTES
            timeout_s = FILE_TIMEOUT_S
        #: Whether the caller may come in.
        self.is_known = True
        self._deadline = time.monotonic() + timeout_s
        #: Status of the answer; 0 before it begins.
        self.status = 0

    def check_length(self, length: str) -> None:
        """Raise Failure for a body that is announced as too large."""
        if length.isdigit():
            self._announced_bytes = int(length)
            self._check(self._announced_bytes)

    def _check(self, size: int) -> None:
        is_strange = not self.is_known and size > MAX_UNKNOWN_BYTES
        if is_strange and self._path != LOGIN_PATH:
            raise unauthorized()
        if is_strange or size > self._max_bytes:
            raise Failure(
                413,
                "too_large",
                f"The body has more than {self._max_bytes:,} bytes. Send several requests.",
            )

    def _count(self, part: bytes) -> None:
        """Count a part of the body. Raises Failure for one that is too large."""
        size = len(part)
        self._bytes += size
        self._check(self._bytes)
        if self._is_file:
            return
        self._bodies.add(size)
        self._counted_bytes += size
        self._separators += part.count(b",") + part.count(b"[") + part.count(b"{")
        if self._separators > MAX_SEPARATORS:
            raise Failure(
                413,
                "too_large",
                f"The body has more than {MAX_SEPARATORS:,} values. Send several requests.",
            )

    def release(self) -> None:
        """Note that the body is no longer in memory."""
        self._bodies.release(self._counted_bytes)
        self._counted_bytes = 0

    async def receive(self) -> Message:
        if self._has_ended:
            return await self._receive()  # waits for the client to leave
        seconds = self._deadline - time.monotonic()
        try:
            message = await asyncio.wait_for(self._receive(), max(0.0, seconds))
        except TimeoutError:
            raise Failure(408, "too_slow", "The body took too long.") from None
        if message["type"] == "http.request":
            # Before the count, which may refuse the last part: nothing more comes then.
            self._has_ended = not message.get("more_body", False)
            self._count(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._finish_body()
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self._request_id
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("Cache-Control", "no-store")
        try:
            await asyncio.wait_for(self._send(message), SEND_TIMEOUT_S)
        except TimeoutError:
            raise ConnectionResetError("the client does not read its answer") from None

    async def _finish_body(self) -> None:
        """Read the rest of a body that no route has read, within limits."""
        unread_bytes = 0
        is_short = self._announced_bytes <= MAX_UNREAD_BYTES
        while self._has_body and is_short and not self._has_ended:
            seconds = self._deadline - time.monotonic()
            try:
                message = await asyncio.wait_for(self._receive(), max(0.0, seconds))
            except TimeoutError:
                return
            unread_bytes += len(message.get("body", b""))
            is_short = unread_bytes <= MAX_UNREAD_BYTES
            self._has_ended = not message.get("more_body", False)


def _without_port(host: str) -> str:
    """Return a Host header's name."""
    if host.startswith("["):
        end = host.find("]") + 1
        name = host[:end]
        rest = host[end:]
    else:
        name, colon, port = host.partition(":")
        rest = colon + port
    is_port = rest == "" or PORT.fullmatch(rest) is not None
    return name if is_port else host


def _is_foreign(method: str, headers: Headers, host: str) -> bool:
    """Return whether another site made a browser send a request, other than a link that a person
    followed.
    """
    is_own = headers.get("sec-fetch-site", "same-origin") in OWN_SITES
    if method in SAFE_METHODS:
        is_link = (
            headers.get("sec-fetch-mode") == "navigate"
            and headers.get("sec-fetch-dest") == "document"
        )
        return not is_own and not is_link
    origin = headers.get("origin")
    return not is_own or (origin is not None and _netloc(origin) != host)


def _netloc(origin: str) -> str:
    """Return the host and port of an Origin header; "" if it has none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
