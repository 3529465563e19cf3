"""The common parts of all pages: rendering, who may see them, forms, and errors that people can
read.

A page's module makes a router with `page_router()`, names who may see it with `person(scope)`, and
answers with `page(request, template, …)`. Forms send `application/x-www-form-urlencoded`; `Form`
is a dependency with their fields.
"""

import hashlib
import logging
import math
import mimetypes
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import parse_qsl, quote, urlencode

from fastapi import APIRouter, Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from jinja2 import Environment
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, RedirectResponse, Response

from feedmill.console import span
from feedmill.pages import make_environment
from feedmill.shared.errors import (
    RedisUnavailable,
    RequestRefused,
    UserError,
    printable,
    sentence,
)
from feedmill.web import failures
from feedmill.web.access import COOKIE, SESSION_TTL_S, Caller
from feedmill.web.failures import Failure
from feedmill.web.resources import caller_of, resources

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parents[1]
TEMPLATES = FOLDER / "templates"
STATIC = FOLDER / "static"
#: Characters of the digest in a static file's address.
DIGEST_CHARACTERS = 12
#: Seconds for which browsers keep a file whose address has the digest of its content.
STATIC_TTL_S = 31_536_000
#: The first and the last second that a date can have, since 1970.
MIN_TIME = -62_135_596_800.0
MAX_TIME = 253_402_300_799.0
#: Bytes and fields of a form.
MAX_FORM_BYTES = 2**20
MAX_FIELDS = 5000
FORM_TYPE = "application/x-www-form-urlencoded"
#: Beginnings of paths that answer programs: their errors are JSON.
PROGRAM_PATHS = ("/v1/", "/classify", "/predict", "/files/")


class Link(NamedTuple):
    """A page in the navigation. key: pressed after g, it opens the page."""

    path: str
    title: str
    key: str


LINKS = (
    Link("/", "Stream", "s"),
    Link("/review", "Review", "r"),
    Link("/teach", "Teach", "t"),
    Link("/runs", "Runs", "u"),
    Link("/system", "System", "y"),
)


# Rendering.


class StaticFile(NamedTuple):
    content: bytes
    media_type: str
    digest: str


@cache
def static_files() -> dict[str, StaticFile]:
    """Return the style sheet and the scripts by name."""
    files: dict[str, StaticFile] = {}
    for path in sorted(STATIC.iterdir()):
        content = path.read_bytes()
        media_type, _ = mimetypes.guess_type(path.name)
        digest = hashlib.sha256(content).hexdigest()
        files[path.name] = StaticFile(
            content=content,
            media_type=media_type or "application/octet-stream",
            digest=digest[:DIGEST_CHARACTERS],
        )
    return files


def static_address(name: str) -> str:
    """Return a static file's address, which changes with its content."""
    file = static_files()[name]
    return f"/static/{file.digest}/{name}"


def path_of(identity: str) -> str:
    """Return an id or a name as the rest of a path."""
    return quote(identity, safe="")


def post_address(post_id: str) -> str:
    """Return the address of a post's page. Browsers drop "." and ".." from paths."""
    if post_id in {".", ".."}:
        return f"/posts/?id={post_id}"
    return f"/posts/{path_of(post_id)}"


def run_address(run: str) -> str:
    """Return the address of a run's page. Browsers drop "." and ".." from paths."""
    if run in {".", ".."}:
        return f"/runs/?run={run}"
    return f"/runs/{path_of(run)}"


def time_text(seconds: float) -> str:
    """Return a time in UTC, in the years that a date can have."""
    if math.isnan(seconds):
        return "an unknown time"
    seconds = min(max(seconds, MIN_TIME), MAX_TIME)
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


@cache
def environment() -> Environment:
    """Return what renders the pages."""
    filters: dict[str, Callable[..., Any]] = {
        "path": path_of,
        "post_address": post_address,
        "run_address": run_address,
        "span": span,
        "when": time_text,
    }
    templates = make_environment(TEMPLATES, filters)
    templates.globals["static"] = static_address
    templates.globals["nav_links"] = LINKS
    return templates


def page(
    request: Request, template: str, status: int = 200, **values: Any
) -> HTMLResponse:
    """Return a template as a page, in the layout that names the person who is logged in."""
    caller: Caller | None = getattr(request.state, "person", None)
    has_session = caller is not None and not resources(request).access.is_open
    content = environment().get_template(template)
    text = content.render(
        path=request.url.path,
        person=caller,
        can_log_out=has_session,
        **values,
    )
    return HTMLResponse(text, status)


def see_other(path: str) -> Response:
    """Send a browser to another page after a form."""
    return RedirectResponse(path, status_code=303)


# Who may see a page.


class NotLoggedIn(Failure):
    """A page's request without a session."""

    def __init__(self) -> None:
        super().__init__(401, "unauthorized", "Log in to see this page.")


def person(scope: str) -> Callable[[Request], Caller]:
    """Return a dependency: the person who is logged in and may do what `scope` says.

    Without a session, the browser is sent to the login page.
    """

    def check(request: Request) -> Caller:
        try:
            caller = caller_of(request)
        except Failure:
            raise NotLoggedIn from None
        request.state.person = caller
        if not caller.may(scope):
            raise Failure(
                403, "forbidden", f"{caller.name} may not do this: it needs {scope!r}."
            )
        return caller

    return check


def local_path(text: str) -> str:
    """Return a path of this server that a request names; "/" for anything else."""
    is_path = text.startswith("/") and not text.startswith(("//", "/\\"))
    if not is_path or "\\" in text or printable(text) != text:
        return "/"
    return text


# Forms.


async def read_form(request: Request) -> dict[str, list[str]]:
    """Return a form's fields: all values by name. Raises Failure."""
    media_type = request.headers.get("content-type", "").partition(";")[0]
    if media_type.strip().lower() != FORM_TYPE:
        raise Failure(415, "unsupported", f"Send a form as {FORM_TYPE}.")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            raise Failure(413, "too_large", "The form is too large.")
    try:
        pairs = parse_qsl(
            body.decode("ascii"),
            keep_blank_values=True,
            max_num_fields=MAX_FIELDS,
            errors="strict",
        )
    except ValueError:
        raise Failure(400, "invalid", "The form cannot be read.") from None
    fields: dict[str, list[str]] = {}
    for name, value in pairs:
        fields.setdefault(name, []).append(value)
    return fields


Form = Annotated[Mapping[str, list[str]], Depends(read_form)]


def field_of(form: Mapping[str, list[str]], name: str) -> str:
    """Return a field's first value; "" without one."""
    values = form.get(name)
    if not values:
        return ""
    return values[0]


# Errors.


class PageRoute(APIRoute):
    """A route whose errors are pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Any]]:
        handle = super().get_route_handler()

        async def handle_page(request: Request) -> Any:
            try:
                return await handle(request)
            except Exception as error:
                return error_page(request, error)

        return handle_page


def error_page(request: Request, error: Exception) -> Response:
    """Return the page for an error; for one that is no user's, note it in the log."""
    if isinstance(error, NotLoggedIn):
        return _to_login(request)
    status, message = _described(error)
    return page(
        request,
        "error.html",
        status,
        code=status,
        message=printable(message)[: failures.MAX_MESSAGE],
    )


def _described(error: Exception) -> tuple[int, str]:
    """Return an error's status and its text."""
    if isinstance(error, Failure):
        return error.status_code, error.message
    if isinstance(error, RedisUnavailable):
        return 503, str(error)
    if isinstance(error, UserError | RequestRefused):
        return 422, sentence(str(error))
    if isinstance(error, RequestValidationError):
        return 422, failures.describe_invalid(error)
    if isinstance(error, ClientDisconnect):
        return failures.LEFT, failures.LEFT_MESSAGE
    if isinstance(error, HTTPException):
        return error.status_code, sentence(str(error.detail))
    logger.error("a page failed", exc_info=error)
    return 500, "The server failed. Its log has the reason; report it."


def _to_login(request: Request) -> Response:
    """Send a browser to the login page, and from there back to where it was."""
    target = "/"
    if request.method == "GET":
        target = request.url.path
        if request.url.query:
            target += f"?{request.url.query}"
    query = urlencode({"next": target})
    return see_other(f"/login?{query}")


async def on_http(request: Request, error: Any) -> Response:
    """Answer a request that no route takes: people with a page, programs with JSON."""
    accepts = request.headers.get("accept", "")
    is_program = request.url.path.startswith(PROGRAM_PATHS)
    if is_program or "text/html" not in accepts:
        return await failures.on_http(request, error)
    return error_page(request, error)


def page_router() -> APIRouter:
    """Return a router for pages, which are no part of the endpoint's description."""
    return APIRouter(route_class=PageRoute, include_in_schema=False)


# The login page, and static files.

router = page_router()


@router.get("/static/{digest}/{name}")
def send_static(digest: str, name: str) -> Response:
    file = static_files().get(name)
    if file is None:
        raise Failure(404, "not_found", "There is no such file.")
    headers = {"ETag": f'"{file.digest}"'}
    if digest == file.digest:
        headers["Cache-Control"] = f"public, max-age={STATIC_TTL_S}, immutable"
    return Response(
        file.content,
        media_type=file.media_type,
        headers=headers,
    )


@router.get("/login")
def show_login(request: Request, next: str = "/") -> Response:  # noqa: A002 - in the address
    access = resources(request).access
    if access.is_open:
        return see_other(local_path(next))
    return page(
        request,
        "login.html",
        next=local_path(next),
        problem="",
        name="",
        has_password=access.has_password,
    )


@router.post("/login")
def log_in(request: Request, form: Form) -> Response:
    access = resources(request).access
    name = field_of(form, "name").strip()
    target = local_path(field_of(form, "next"))
    address = ""
    if request.client is not None:
        address = request.client.host
    problem = ""
    cookie: str | None = None
    status = 401
    if access.count_login(address):
        cookie = access.log_in(name, field_of(form, "password"))
        problem = "The password is wrong, or the name is empty or too long."
    else:
        status = 429
        problem = "Too many attempts. Wait a minute, then try again."
    if cookie is None:
        return page(
            request,
            "login.html",
            status,
            next=target,
            problem=problem,
            name=name[:64],
            has_password=access.has_password,
        )
    response = see_other(target)
    response.set_cookie(
        COOKIE,
        cookie,
        max_age=SESSION_TTL_S,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


@router.post("/logout")
def log_out(request: Request) -> Response:
    cookies = request.headers.get("cookie", "")
    resources(request).access.log_out(cookies)
    response = see_other("/login")
    response.delete_cookie(
        COOKIE,
        httponly=True,
        samesite="strict",
    )
    return response
