"""Who may do what on the web server: tokens with scopes, and sessions of people who logged in.

Applications send a bearer token. People log in with the password and a name of their own, which is
stored beside their answers, and get a session's cookie. A server that is bound to the loopback
address, without a password and tokens, trusts everyone who can reach it.
"""

import hashlib
import hmac
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network
from secrets import token_urlsafe

from feedmill.shared.errors import SettingsError
from feedmill.shared.settings import PREFIX, Settings

#: The scopes of a token: read results and runs; send posts; answer and train; and everything,
#: deploying models and deleting posts too.
SCOPES = ("read", "send", "teach", "admin")
#: Name of the session's cookie.
COOKIE = "feedmill_session"
#: Seconds for which a session lasts.
SESSION_TTL_S = 7 * 86_400
MAX_SESSIONS = 1000
#: Attempts to log in per address within LOGIN_WINDOW_S, and over all addresses; addresses that are
#: remembered.
MAX_LOGINS = 10
MAX_ALL_LOGINS = 200
LOGIN_WINDOW_S = 60.0
MAX_ADDRESSES = 10_000
#: Name under which the attempts of all addresses are counted.
ALL_ADDRESSES = ""
#: Bits of an IPv6 address that name a customer of a provider, who has all addresses that begin
#: with them.
IPV6_PREFIX = 64
#: A token of the setting `web_tokens`: name, scopes, secret.
TOKEN = re.compile(r"([A-Za-z0-9_.-]{1,64}):([a-z+]{1,64}):([!-+\--~]{16,256})")
PERSON = re.compile(r"[^\x00-\x1f\x7f]{1,64}")


@dataclass(frozen=True)
class Caller:
    """A person or an application, and what it may do."""

    name: str
    scopes: frozenset[str]

    def may(self, scope: str) -> bool:
        return scope in self.scopes or "admin" in self.scopes


EVERYTHING = frozenset(SCOPES)


class Access:
    """The tokens, the password and the sessions of one server.

    Raises SettingsError for invalid tokens, or for an address that others can reach without a
    password.
    """

    def __init__(
        self,
        settings: Settings,
        address: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._callers: dict[bytes, Caller] = {}
        if settings.web_tokens is not None:
            self._callers = _parse_tokens(settings.web_tokens.get_secret_value())
        self._password: bytes | None = None
        if settings.web_password is not None:
            self._password = settings.web_password.get_secret_value().encode()
        #: Everyone who reaches the server may do everything.
        self.is_open = self._password is None and not self._callers
        if self.is_open and not is_loopback(address):
            raise SettingsError(
                f"{PREFIX}WEB_PASSWORD or {PREFIX}WEB_TOKENS must be set to listen on {address}: "
                "anyone who can reach this address could read and delete posts. Set one, or "
                "listen on 127.0.0.1."
            )
        #: Sessions by the digest of their cookie: who, and until when.
        self._sessions: OrderedDict[bytes, tuple[Caller, float]] = OrderedDict()
        #: Attempts to log in by address: since when, and how many.
        self._attempts: OrderedDict[str, tuple[float, int]] = OrderedDict()
        #: Held while sessions or attempts are changed: forms are answered on several threads.
        self._lock = threading.Lock()

    @property
    def has_password(self) -> bool:
        return self._password is not None

    def caller(self, authorization: str, cookies: str) -> Caller | None:
        """Return who sent these headers; None if nobody who may come in."""
        if self.is_open:
            return Caller("local", EVERYTHING)
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() == "bearer":
            return self._callers.get(_digest(token.strip()))
        return self._session(cookies)

    def _session(self, cookies: str) -> Caller | None:
        for cookie in session_cookies(cookies):
            identity = _digest(cookie)
            caller, ends_at = self._sessions.get(identity, (None, 0.0))
            if self._clock() < ends_at:
                return caller
            with self._lock:
                self._sessions.pop(identity, None)
        return None

    def log_in(self, person: str, password: str) -> str | None:
        """Return a new session's cookie; None for a wrong password or an invalid name."""
        if self._password is None or not PERSON.fullmatch(person):
            return None
        if not hmac.compare_digest(password.encode(), self._password):
            return None
        cookie = token_urlsafe(32)
        ends_at = self._clock() + SESSION_TTL_S
        with self._lock:
            self._sessions[_digest(cookie)] = (Caller(person, EVERYTHING), ends_at)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return cookie

    def log_out(self, cookies: str) -> None:
        """End the session of these cookies."""
        with self._lock:
            for cookie in session_cookies(cookies):
                self._sessions.pop(_digest(cookie), None)

    def count_login(self, address: str) -> bool:
        """Count an attempt to log in; return whether this address may still try, and all
        addresses together.
        """
        with self._lock:
            if self._count_attempt(network_of(address)) >= MAX_LOGINS:
                return False
            return self._count_attempt(ALL_ADDRESSES) < MAX_ALL_LOGINS

    def _count_attempt(self, name: str) -> int:
        """Count an attempt under a name. Return the number of those before it."""
        now = self._clock()
        since, count = self._attempts.pop(name, (now, 0))
        if now - since >= LOGIN_WINDOW_S:
            since = now
            count = 0
        self._attempts[name] = (since, count + 1)
        if len(self._attempts) > MAX_ADDRESSES:
            self._attempts.popitem(last=False)
        return count


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach a server at this address."""
    if address == "localhost":
        return True
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


def network_of(address: str) -> str:
    """Return the part of an address that one client has: IPv6 gives it all that begin alike."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if not isinstance(parsed, IPv6Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    network = ip_network((parsed.packed, IPV6_PREFIX), strict=False)
    return str(network.network_address)


def session_cookies(cookies: str) -> Iterator[str]:
    """Yield the session's cookies of a header.

    Browsers send those of other servers on the same host, too, whatever they contain, and several
    of one name where a neighbouring host has set one.
    """
    for pair in cookies.split(";"):
        name, _, value = pair.partition("=")
        if name.strip() == COOKIE:
            yield value.strip()


def _parse_tokens(text: str) -> dict[bytes, Caller]:
    """Return the callers by the digest of their token. The error quotes no secret."""
    callers: dict[bytes, Caller] = {}
    for position, part in enumerate(text.split(","), start=1):
        match = TOKEN.fullmatch(part.strip())
        scopes: frozenset[str] = frozenset()
        if match is not None:
            scopes = frozenset(match[2].split("+"))
        if match is None or not scopes <= EVERYTHING:
            raise SettingsError(
                f"{PREFIX}WEB_TOKENS: token {position} should be a name, scopes of "
                f"{', '.join(SCOPES)}, and a secret of at least 16 characters, such as "
                "archive:read+send:SECRET. Separate tokens by commas."
            )
        callers[_digest(match[3])] = Caller(match[1], scopes)
    return callers


def _digest(secret: str) -> bytes:
    """Return a digest. Looking it up takes no time that tells how much of a secret was right."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
