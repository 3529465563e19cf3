"""HTTP requests with a total time, a size limit and a request budget.

Needs requests, an optional package.

Relies on requests keeping a body that was read in the response's `_content`.
"""

import json
from importlib.metadata import version
from typing import Any

import requests
from requests.exceptions import ConnectionError as ConnectionFault
from requests.exceptions import (
    ConnectTimeout,
    InvalidSchema,
    InvalidURL,
    ProxyError,
    SSLError,
)
from urllib3.exceptions import HTTPError, NewConnectionError

from feedmill.producers.live.exchange import Exchange, LimitedAdapter
from feedmill.producers.live.source import (
    MAX_WAIT_S,
    RequestBudget,
    RequestFailed,
    SourceFailed,
    retry_after_s,
)
from feedmill.shared.errors import clause

#: Maximum size of a response in bytes. A hundred posts of maximum length, escaped, are well below.
MAX_RESPONSE_BYTES = 64 * 2**20
#: Timeouts in seconds: for opening a connection, and for the first byte of a response and between
#: two reads.
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 15.0
#: Maximum durations, as multiples of a client's read timeout: from connecting to the end of the
#: response's headers, and of its body.
HEADERS_TIMEOUT_FACTOR = 2
RESPONSE_TIMEOUT_FACTOR = 4
#: Bytes that a response may have beside its body: headers, and what separates chunks.
MAX_OVERHEAD_BYTES = 2**20
#: Statuses of temporary server errors.
TEMPORARY_STATUSES = frozenset({408, 500, 502, 503, 504, 520, 521, 522, 523, 524, 525})

#: Reason of a failure that a proxy's URL causes. It is not shown: it may hold a password.
INVALID_PROXY = "correct the proxy's URL in the environment, such as HTTPS_PROXY"


class HttpClient:
    """A client for the server `name`.

    Raises SourceFailed if no request would succeed, RequestFailed if one failed.

    Waits for the budget, and raises Stopped then.

    max_bytes: maximum size of a response; MAX_RESPONSE_BYTES unless given. read_timeout_s: for the
    first byte of a response and between two reads; READ_TIMEOUT_S unless given. The maximum
    durations follow it.
    """

    #: Whether a Retry-After of a temporary error is passed on, as that of a 429 response is. Who
    #: repeats a request at once would wait for it.
    waits_after_errors = False

    def __init__(
        self,
        name: str,
        budget: RequestBudget,
        max_bytes: int | None = None,
        read_timeout_s: float | None = None,
    ) -> None:
        self.name = name
        self.budget = budget
        self._max_bytes = max_bytes
        self._read_timeout_s = read_timeout_s
        self._exchange = Exchange()
        self.session = _Session()
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, LimitedAdapter(self._exchange))

    def request(self, method: str, url: str, **arguments: Any) -> requests.Response:
        """Return the response, whatever its status, except 429 and those of temporary errors."""
        self.budget.take()
        read_timeout_s = self._read_timeout_s or READ_TIMEOUT_S
        arguments |= {
            "timeout": (CONNECT_TIMEOUT_S, read_timeout_s),
            "stream": True,
            "allow_redirects": False,
        }
        max_bytes = self._max_bytes or MAX_RESPONSE_BYTES
        self._exchange.begin(
            seconds=HEADERS_TIMEOUT_FACTOR * read_timeout_s,
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=read_timeout_s,
            max_bytes=max_bytes + MAX_OVERHEAD_BYTES,
        )
        try:
            with self.session.request(method, url, **arguments) as response:
                self.budget.learn(response.headers)
                response._content = self._body(response, max_bytes)
        except (OSError, HTTPError) as error:
            # requests' errors are OSErrors; urllib3's come while reading the body
            raise self._failure(error) from error
        self._check_status(response)
        return response

    def _failure(self, error: Exception) -> SourceFailed:
        """Return the failure of a request that ended with an error of the connection."""
        if self._exchange.problem:
            return RequestFailed(self._exchange.problem)
        if isinstance(error, requests.RequestException) and _is_unreachable(error):
            kind = type(error).__name__
            return SourceFailed(f"no connection to {self.name} ({kind})")
        reason = _reason(error)
        return RequestFailed(f"the connection failed ({reason})")

    def _check_status(self, response: requests.Response) -> None:
        """Raise SourceFailed if the server asks to wait, RequestFailed for a temporary error."""
        retry_after = retry_after_s(response.headers, self.budget.now())
        pause = min(retry_after, MAX_WAIT_S)
        if response.status_code == 429:
            raise SourceFailed("too many requests (429)", pause)
        if response.status_code in TEMPORARY_STATUSES:
            reason = f"{self.name} returned status {response.status_code}"
            raise RequestFailed(reason, pause if self.waits_after_errors else 0.0)

    def json(self, response: requests.Response) -> Any:
        """Return the response's JSON."""
        try:
            return parse_json(response.content)
        except ValueError:
            raise RequestFailed(
                f"{self.name} returned invalid JSON with status {response.status_code}"
            ) from None

    def close(self) -> None:
        self.session.close()

    def _body(self, response: requests.Response, max_bytes: int) -> bytes:
        """Read the body.

        Raises TimeoutError if it is too slow, and RequestFailed if it is too large.
        """
        read_timeout_s = self._read_timeout_s or READ_TIMEOUT_S
        self._exchange.begin_body(RESPONSE_TIMEOUT_FACTOR * read_timeout_s)
        body = bytearray()
        # read1 returns what has arrived: read would wait for a full chunk, even at one byte at a
        # time.
        while part := response.raw.read1(2**16, decode_content=True):
            body += part
            if len(body) > max_bytes:
                raise RequestFailed(
                    f"the response is larger than {max_bytes >> 20} MiB"
                )
        return bytes(body)


class _Session(requests.Session):
    """A session that follows no redirects and sends no credentials of ~/.netrc."""

    def prepare_request(self, request: requests.Request) -> requests.PreparedRequest:
        """Prepare a request without ~/.netrc.

        Its entry for a server, or its default entry, would replace a token, and tell the server a
        password that is not meant for it. `trust_env` concerns nothing else here.
        """
        self.trust_env = False
        try:
            return super().prepare_request(request)
        finally:
            self.trust_env = True

    def get_redirect_target(self, resp: requests.Response) -> None:
        """Return no target: requests would read a redirect's body without a limit to prepare the
        next request.
        """


def user_agent() -> str:
    """Return the user agent of requests to servers that have no rules for it."""
    number = version("feedmill")
    return f"feedmill/{number}"


def parse_json(body: bytes) -> Any:
    """Return the JSON of a response's body. Raises ValueError.

    The encoding is that of JSON's bytes. The one that a header names may be one whose decoding
    takes minutes, such as punycode, and a guess would try all of them.
    """
    try:
        return json.loads(body)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def _reason(error: Exception) -> str:
    """Return why a request failed.

    The text of most errors would show addresses. That of the first ones says what to correct.
    """
    is_missing_file = type(error) is OSError  # of certificates
    if is_missing_file or isinstance(error, InvalidSchema):
        return clause(error)
    if isinstance(error, InvalidURL):
        return INVALID_PROXY
    return type(error).__name__


def _is_unreachable(error: requests.RequestException) -> bool:
    """Return whether no connection could be opened."""
    if not isinstance(error, ConnectionFault):
        return False
    reasons = [getattr(argument, "reason", None) for argument in error.args]
    causes = [error, *error.args, *reasons]
    unreachable = ConnectTimeout | SSLError | ProxyError | NewConnectionError
    return any(isinstance(cause, unreachable) for cause in causes)
