"""Errors as HTTP answers: a status, and what went wrong as JSON."""

import logging
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import HTTPException, RequestValidationError
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from feedmill.shared.errors import (
    RedisUnavailable,
    RequestRefused,
    UserError,
    printable,
    sentence,
)

logger = logging.getLogger(__name__)

#: Seconds after which a caller may try again where the server cannot know better.
RETRY_AFTER_S = 5
#: Status, and text, of a request whose caller has left before the answer.
LEFT = 499
LEFT_MESSAGE = "The caller has left."
#: Most characters of an error's text.
MAX_MESSAGE = 2000


class Failure(HTTPException):
    """A request that fails with a status.

    An HTTPException, because FastAPI answers 400 to other exceptions while it reads a body.

    kind: a word for programs; message: what is wrong, where, and what to do.
    """

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(status, message)
        self.kind = kind
        self.message = message


def unauthorized() -> Failure:
    """Return the failure of a request without a valid token or session."""
    return Failure(
        401,
        "unauthorized",
        "Send a valid token: Authorization: Bearer TOKEN. FEEDMILL_WEB_TOKENS lists tokens.",
    )


def respond(status: int, kind: str, message: str) -> Response:
    """Return an error's answer."""
    headers: dict[str, str] = {}
    if status in {429, 503}:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="feedmill"'
    text = printable(message)[:MAX_MESSAGE]
    content = {"error": {"type": kind, "message": text}}
    return JSONResponse(content, status, headers)


async def on_failure(_: Request, failure: Any) -> Response:
    return respond(failure.status_code, failure.kind, failure.message)


async def on_user_error(_: Request, error: Any) -> Response:
    if isinstance(error, RedisUnavailable):
        return respond(503, "redis_unavailable", str(error))
    return respond(422, "refused", sentence(str(error)))


async def on_invalid(_: Request, error: Any) -> Response:
    first: Mapping[str, Any] = error.errors()[0]
    if first["type"] == "json_invalid":
        return respond(400, "invalid_json", f"The body is no JSON: {first['msg']}.")
    return respond(422, "invalid", describe_invalid(error))


def describe_invalid(error: Any) -> str:
    """Name the first field that is wrong. pydantic's own text quotes the whole input."""
    first: Mapping[str, Any] = error.errors()[0]
    places = [str(part) for part in first["loc"] if part != "body"]
    where = ".".join(places) or "the body"
    return f"{where}: {first['msg']}."


async def on_http(_: Request, error: Any) -> Response:
    kinds = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}
    kind = kinds.get(error.status_code, "refused")
    response = respond(error.status_code, kind, sentence(str(error.detail)))
    response.headers.update(error.headers or {})
    return response


async def on_left(_: Request, __: Any) -> Response:
    """Answer a caller that has left while it sent its body: nobody reads this, but the log."""
    return respond(LEFT, "left", LEFT_MESSAGE)


async def on_bug(_: Request, error: Any) -> Response:
    logger.error("a request failed", exc_info=error)
    return respond(
        500, "internal", "The server failed. Its log has the reason; report it."
    )


#: Handlers by type of exception, most special first.
HANDLERS: dict[Any, Any] = {
    Failure: on_failure,
    ClientDisconnect: on_left,
    UserError: on_user_error,
    RequestRefused: on_user_error,
    RequestValidationError: on_invalid,
    AnyHTTPException: on_http,
    Exception: on_bug,
}
