"""Errors of the HTTP endpoint as exceptions, and when to repeat a request."""

import math
import time
from email.utils import parsedate_to_datetime
from typing import Any

from feedmill.shared.backoff import Backoff
from feedmill.shared.errors import (
    AccessRefused,
    FeedmillError,
    MessageFailed,
    NoAnswerInTime,
    NotFound,
    RequestRefused,
    ServerBusy,
    ServerError,
    ServerUnreachable,
    clause,
    printable,
    truncate,
)

#: Pauses between attempts where the server does not say when to try again.
RETRIES = Backoff(
    first_s=0.5,
    max_s=8.0,
    jitter=True,
)
#: Most seconds that a client waits because the server asks for it.
MAX_RETRY_AFTER_S = 60.0
#: Most characters of the server's message.
MAX_MESSAGE = 2000
#: Errors by status. Others are about the request below 500, and about the server from there on.
BY_STATUS: dict[int, type[ServerError]] = {
    401: AccessRefused,
    403: AccessRefused,
    404: NotFound,
    429: ServerBusy,
    503: ServerBusy,
    504: NoAnswerInTime,
}
#: The server's words for a message that was classified, and failed.
FAILED_KINDS = {"failed", MessageFailed.__name__}


def failure_of(status: int, headers: Any, content: Any) -> FeedmillError:
    """Return the exception for an answer that is an error.

    headers: a mapping from names in lower case. content: the parsed body; None if it is no JSON.
    """
    error = content.get("error") if isinstance(content, dict) else None
    fields: dict[str, Any] = error if isinstance(error, dict) else {}
    kind = truncate(printable(str(fields.get("type", ""))))
    default = f"The server answered with the status {status}."
    message = truncate(printable(str(fields.get("message") or default)), MAX_MESSAGE)
    request_id = truncate(printable(headers.get("x-request-id", "")))
    if 400 <= status < 500 and status not in BY_STATUS:
        refusal = MessageFailed if kind in FAILED_KINDS else RequestRefused
        failure: FeedmillError = refusal(message)
        failure.add_note(
            f"The request's id in the server's log: {request_id or 'unknown'}"
        )
        return failure
    create = BY_STATUS.get(status, ServerError)
    return create(
        message,
        status=status,
        kind=kind,
        request_id=request_id,
        retry_after=retry_after_s(headers.get("retry-after", "")),
    )


def unreachable(url: str, error: Exception) -> ServerUnreachable:
    """Return the exception for a connection that failed."""
    reason = clause(error) or type(error).__name__
    return ServerUnreachable(
        f"Cannot reach the server at {url}: {printable(reason)}. Start `feedmill web`, or correct "
        "the address."
    )


def no_answer(url: str, timeout_s: float) -> NoAnswerInTime:
    """Return the exception for a server that does not answer, not even that it has no labels."""
    return NoAnswerInTime(
        f"The server at {url} did not answer within {timeout_s:g} s. Try again, or raise the "
        "timeout."
    )


def not_feedmill(url: str, reason: str) -> ServerError:
    """Return the exception for an answer that cannot be read."""
    return ServerError(
        f"The answer of {url} is not one of Feedmill: {reason}. Correct the address, or update "
        "Feedmill on this side."
    )


def retry_after_s(value: str) -> float | None:
    """Return the seconds that the header Retry-After asks for: a number, or a date."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return None
    if not math.isfinite(seconds):
        return None
    return max(0.0, seconds)


def pause_s(failure: Exception, failures: int, limit: int) -> float | None:
    """Return the seconds after which to repeat a request; None if it is not to be repeated.

    failures: attempts that failed before. limit: most repetitions.
    """
    if failures >= limit or not isinstance(failure, ServerBusy | ServerUnreachable):
        return None
    pause = RETRIES.pause_s(failures)
    if failure.retry_after is None:
        return pause
    if failure.retry_after > MAX_RETRY_AFTER_S:
        return None
    return max(pause, failure.retry_after)
