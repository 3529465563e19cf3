"""HTTP requests with timeouts, a size limit and a request budget. Failures become the exceptions in `listing.py`."""

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import requests
from requests.exceptions import ConnectionError as ConnectionFault
from requests.exceptions import ConnectTimeout, ProxyError, SSLError
from urllib3.exceptions import HTTPError, NewConnectionError

from feedmill.producers.live.budget import RequestBudget, number
from feedmill.producers.reddit.listing import RedditFault, RequestFailed, Unreachable

#: Maximum size of a response in bytes. A hundred posts of maximum length, escaped, are well below.
MAX_RESPONSE_BYTES = 64 * 2**20
#: Timeout for opening a connection, in seconds.
CONNECT_TIMEOUT_S = 5.0
#: Maximum duration of a whole response, as a multiple of the timeout, which limits each read.
RESPONSE_TIMEOUT_FACTOR = 4
#: Statuses of temporary server errors.
TEMPORARY_STATUSES = frozenset({408, 500, 502, 503, 504, 520, 521, 522, 523, 524, 525})


def fetch(
    session: requests.Session, budget: RequestBudget, timeout: float, method: str, url: str, **arguments: Any
) -> tuple[requests.Response, bytes]:
    """Send a request when the budget allows it; return the response and its body. Raises RedditFault and Stopped.

    timeout: seconds until the first byte, and between two reads. arguments: for requests.
    """
    budget.take()
    arguments |= {"timeout": (CONNECT_TIMEOUT_S, timeout), "stream": True}
    try:
        with session.request(method, url, **arguments) as response:
            budget.learn(response.headers)
            return response, _body(response, timeout)
    except requests.RequestException as error:
        raise _connection_fault(error) from error
    except HTTPError as error:  # while reading the body
        raise RequestFailed(f"the connection failed ({type(error).__name__})") from error


def _body(response: requests.Response, timeout: float) -> bytes:
    """Read the body. Raises RequestFailed if it is too large or too slow."""
    body = bytearray()
    deadline = time.monotonic() + RESPONSE_TIMEOUT_FACTOR * timeout
    # read1 returns what has arrived: read would wait for a full chunk, even at one byte at a time.
    while part := response.raw.read1(2**16, decode_content=True):
        body += part
        if len(body) > MAX_RESPONSE_BYTES:
            raise RequestFailed(f"the response is larger than {MAX_RESPONSE_BYTES >> 20} MiB")
        if time.monotonic() > deadline:
            raise RequestFailed(f"the response took longer than {RESPONSE_TIMEOUT_FACTOR * timeout:.0f} s")
    return bytes(body)


def _connection_fault(error: requests.RequestException) -> RedditFault:
    """Return Unreachable if no connection can be opened, otherwise RequestFailed."""
    causes = [error, *error.args, *(getattr(argument, "reason", None) for argument in error.args)]
    nowhere = ConnectTimeout | SSLError | ProxyError | NewConnectionError
    if isinstance(error, ConnectionFault) and any(isinstance(cause, nowhere) for cause in causes):
        return Unreachable(f"no connection ({type(error).__name__})")
    return RequestFailed(f"the connection failed ({type(error).__name__})")


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return Retry-After in seconds; it may also be a date, relative to the server's clock. None if invalid."""
    text = headers.get("retry-after", "")
    if (seconds := number(text)) is not None:
        return seconds
    try:
        then, now = (parsedate_to_datetime(value).timestamp() for value in (text, headers.get("date", "")))
    except (ValueError, OverflowError):
        return None
    return max(0.0, then - now)
