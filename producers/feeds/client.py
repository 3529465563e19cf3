"""Requests for feeds: conditional ones, redirects, and servers that may not be asked.

Addresses are those of the user's file. A server may redirect to others; those of private networks
are refused, except on the server that the file names for the same feed. Else a feed could have
this machine ask servers that only it can reach.

Needs requests, an optional package.
"""

import socket
from http.cookiejar import DefaultCookiePolicy
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import NamedTuple
from urllib.parse import urljoin

from requests import Response

from feedmill.producers.feeds.subscriptions import Server, server_of, split_http
from feedmill.producers.live.http import HttpClient, user_agent
from feedmill.producers.live.source import (
    Clock,
    RequestBudget,
    RequestFailed,
    SourceFailed,
)

#: Maximum size of a feed in bytes, once decompressed.
MAX_FEED_BYTES = 8 * 2**20
#: Maximum redirects for one feed, and characters of a stored header.
MAX_REDIRECTS = 5
MAX_HEADER = 1_024
#: Requests per minute to all servers together.
REQUESTS_PER_MINUTE = 600
PERMANENT = frozenset({301, 308})
TEMPORARY = frozenset({302, 303, 307})
FORMATS = (
    "application/atom+xml, application/rss+xml, application/feed+json, "
    "application/xml;q=0.9, */*;q=0.8"
)
#: IPv6 networks that carry IPv4 addresses in their last 32 bits: translated ones may be private.
TRANSLATED = ip_network("64:ff9b::/96")


class FeedGone(SourceFailed):
    """The server says that the feed was removed for good (410)."""


class Answer(NamedTuple):
    """A server's answer. body: None if nothing has changed. url: the address that answered;
    moved_to: the address to ask from now on, "" if it is the one that was asked. etag, modified:
    for the next request. max_age: seconds for which the answer is fresh.
    """

    body: bytes | None
    url: str
    moved_to: str
    etag: str
    modified: str
    max_age: float


class FeedClient(HttpClient):
    """A client for feeds. Not thread-safe.

    name: user agent.
    """

    waits_after_errors = True

    def __init__(self, clock: Clock, name: str | None) -> None:
        budget = RequestBudget(clock, REQUESTS_PER_MINUTE)
        super().__init__("the server", budget, MAX_FEED_BYTES)
        self.session.headers["User-Agent"] = name or user_agent()
        self.session.headers["Accept"] = FORMATS
        # Cookies would let servers follow a reader, and fill its memory.
        no_cookies = DefaultCookiePolicy(allowed_domains=[])
        self.session.cookies.set_policy(no_cookies)

    def get(
        self,
        url: str,
        etag: str = "",
        modified: str = "",
        own_url: str = "",
    ) -> Answer:
        """Return a feed, or that it has not changed. Raises SourceFailed.

        own_url: the feed's address in the user's file, `url` if empty. Its server may be a
        private one.
        """
        trusted = server_of(own_url or url)
        conditions: dict[str, str] = {}
        if etag:
            conditions["If-None-Match"] = etag
        if modified:
            conditions["If-Modified-Since"] = modified
        moved_to = ""
        is_permanent = True
        for _ in range(MAX_REDIRECTS + 1):
            response = self._get(url, conditions, trusted)
            status = response.status_code
            if status not in PERMANENT | TEMPORARY:
                return self._answer(response, url, moved_to)
            url = self._target(response, url)
            if status in TEMPORARY:
                is_permanent = False
            if is_permanent:
                moved_to = url
        raise RequestFailed(f"the server redirects more than {MAX_REDIRECTS} times")

    def _get(self, url: str, conditions: dict[str, str], trusted: Server) -> Response:
        server = server_of(url)
        self._exchange.is_allowed = None
        if server != trusted:
            self._exchange.is_allowed = is_public
            _check_host(server.host)
        return self.request("GET", url, headers=conditions)

    def _target(self, response: Response, url: str) -> str:
        location = response.headers.get("Location", "")
        try:
            target = urljoin(url, location)
            split_http(target)
        except ValueError:
            raise RequestFailed("the server redirects to an invalid address") from None
        return target

    def _answer(self, response: Response, url: str, moved_to: str) -> Answer:
        status = response.status_code
        if status == 410:
            raise FeedGone("the server says that the feed is gone (410)")
        if status not in (200, 304):
            reason = f"the server returned status {status}"
            raise RequestFailed(f"{reason}{_advice(status)}")
        body = response.content
        return Answer(
            body=None if status == 304 else body,
            url=url,
            moved_to=moved_to,
            etag=_header(response, "ETag"),
            modified=_header(response, "Last-Modified"),
            max_age=_max_age(response),
        )


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the Internet."""
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, IPv6Address):
        carried: IPv4Address | None = ip.ipv4_mapped or ip.sixtofour
        if ip in TRANSLATED:
            carried = IPv4Address(int(ip) & 0xFFFFFFFF)
        if carried is not None:
            ip = carried
    return ip.is_global and not ip.is_multicast


def _check_host(host: str) -> None:
    """Raise RequestFailed if a host has a private address.

    The connection checks its own address once more, unless a proxy connects.
    """
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return  # a proxy may know it
    for *_, address in addresses:
        if not is_public(str(address[0])):
            raise RequestFailed(
                f"it redirects to {host}, whose address {address[0]} is not public; to allow "
                "it, write the new address into the feeds file"
            )


def _advice(status: int) -> str:
    if status in (401, 403):
        return ": it wants a login, or refuses programs; FEEDMILL_FEEDS_USER_AGENT may help"
    if status == 404:
        return ": correct its address"
    return ""


def _header(response: Response, name: str) -> str:
    """Return a header to send back; "" if it cannot be sent."""
    value = response.headers.get(name, "")
    is_plain = value.isascii() and value.isprintable()
    if is_plain and len(value) <= MAX_HEADER:
        return value
    return ""


def shown(url: str) -> str:
    """Return an address without what may be secret: a password, and its query."""
    parts = split_http(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def _max_age(response: Response) -> float:
    """Return the seconds for which an answer is fresh; 0 if it does not say."""
    for directive in response.headers.get("Cache-Control", "").split(","):
        name, _, seconds = directive.strip().partition("=")
        if name.lower() == "max-age" and seconds.isascii() and seconds.isdigit():
            return float(seconds[:9])
    return 0.0
