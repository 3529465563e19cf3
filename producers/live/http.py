"""HTTP requests with timeouts, a size limit and a request budget. Needs requests, an optional package."""

import time
from typing import Any

import requests
from requests.exceptions import ConnectionError as ConnectionFault
from requests.exceptions import ConnectTimeout, ProxyError, SSLError
from urllib3.exceptions import HTTPError, NewConnectionError

from feedmill.producers.live.source import MAX_WAIT_S, RequestBudget, RequestFailed, SourceFailed, header_number

#: Maximum size of a response in bytes. A hundred posts of maximum length, escaped, are well below.
MAX_RESPONSE_BYTES = 64 * 2**20
#: Timeouts in seconds: for opening a connection, and for the first byte of a response and between two reads.
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5.0, 15.0
#: Maximum duration of a whole response, as a multiple of READ_TIMEOUT_S.
RESPONSE_TIMEOUT_FACTOR = 4
#: Statuses of temporary server errors.
TEMPORARY_STATUSES = frozenset({408, 500, 502, 503, 504, 520, 521, 522, 523, 524, 525})


class HttpClient:
    """A client for the server `name`. Raises SourceFailed if no request would succeed, RequestFailed if one failed.

    Waits for the budget, and raises Stopped then.
    """

    def __init__(self, name: str, budget: RequestBudget) -> None:
        self.name = name
        self.budget = budget
        self.session = requests.Session()

    def request(self, method: str, url: str, **arguments: Any) -> requests.Response:
        """Return the response, whatever its status, except 429 and those of temporary errors."""
        self.budget.take()
        arguments |= {"timeout": (CONNECT_TIMEOUT_S, READ_TIMEOUT_S), "stream": True, "allow_redirects": False}
        try:
            with self.session.request(method, url, **arguments) as response:
                self.budget.learn(response.headers)
                response._content = _body(response)
        except requests.RequestException as error:
            if _is_unreachable(error):
                raise SourceFailed(f"no connection to {self.name} ({type(error).__name__})") from error
            raise RequestFailed(f"the connection failed ({type(error).__name__})") from error
        except HTTPError as error:  # while reading the body
            raise RequestFailed(f"the connection failed ({type(error).__name__})") from error
        if response.status_code == 429:
            pause = min(header_number(response.headers, "retry-after") or 0.0, MAX_WAIT_S)
            raise SourceFailed("too many requests (429)", pause)
        if response.status_code in TEMPORARY_STATUSES:
            raise RequestFailed(f"{self.name} returned status {response.status_code}")
        return response

    def json(self, response: requests.Response) -> Any:
        """Return the response's JSON."""
        try:
            return response.json()
        except (ValueError, RecursionError):
            raise RequestFailed(f"{self.name} returned invalid JSON with status {response.status_code}") from None

    def close(self) -> None:
        self.session.close()


def _body(response: requests.Response) -> bytes:
    """Read the body. Raises RequestFailed if it is too large or too slow."""
    body = bytearray()
    deadline = time.monotonic() + RESPONSE_TIMEOUT_FACTOR * READ_TIMEOUT_S
    # read1 returns what has arrived: read would wait for a full chunk, even at one byte at a time.
    while part := response.raw.read1(2**16, decode_content=True):
        body += part
        if len(body) > MAX_RESPONSE_BYTES:
            raise RequestFailed(f"the response is larger than {MAX_RESPONSE_BYTES >> 20} MiB")
        if time.monotonic() > deadline:
            raise RequestFailed(f"the response took longer than {RESPONSE_TIMEOUT_FACTOR * READ_TIMEOUT_S:.0f} s")
    return bytes(body)


def _is_unreachable(error: requests.RequestException) -> bool:
    """Return whether no connection could be opened."""
    causes = [error, *error.args, *(getattr(argument, "reason", None) for argument in error.args)]
    nowhere = ConnectTimeout | SSLError | ProxyError | NewConnectionError
    return isinstance(error, ConnectionFault) and any(isinstance(cause, nowhere) for cause in causes)
