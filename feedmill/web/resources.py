"""Resources of the routes, and access to them.

Dependencies are coroutines although they wait for nothing: FastAPI calls others on a thread.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, cast

from fastapi import Request
from redis import Redis

from feedmill.shared.settings import Settings
from feedmill.web.access import Access, Caller
from feedmill.web.asking import Asker
from feedmill.web.failures import Failure, unauthorized
from feedmill.web.streams import Newness
from feedmill.web.webhooks import Webhooks


@dataclass
class Resources:
    """The settings, connections and threads of one server."""

    settings: Settings
    access: Access
    redis: Redis
    asker: Asker
    newness: Newness
    webhooks: Webhooks
    #: State of the pages, by the name of the page.
    pages: dict[str, Any] = field(default_factory=dict)
    #: Held while a page's state is made.
    pages_lock: Lock = field(default_factory=Lock)
    #: Functions to call on a thread when the server stops.
    endings: list[Callable[[], None]] = field(default_factory=list)


def resources(request: Request) -> Resources:
    return cast("Resources", request.app.state.resources)


async def depend_on_resources(request: Request) -> Resources:
    """The dependency of routes."""
    return resources(request)


def caller_of(request: Request) -> Caller:
    """Return who sent a request. Raises Failure."""
    headers = request.headers
    authorization = headers.get("authorization", "")
    cookies = headers.get("cookie", "")
    caller = resources(request).access.caller(authorization, cookies)
    if caller is None:
        raise unauthorized()
    request.state.caller = caller.name
    return caller


def may_still(request: Request) -> bool:
    """Return whether the caller of a long answer may still come in: people log out."""
    try:
        caller_of(request)
    except Failure:
        return False
    return True


def scope(name: str) -> Callable[[Request], Awaitable[Caller]]:
    """Return a dependency: the caller, who may do what `name` says. It raises Failure."""

    async def check(request: Request) -> Caller:
        caller = caller_of(request)
        if not caller.may(name):
            raise Failure(
                403, "forbidden", f"The token {caller.name!r} lacks the scope {name!r}."
            )
        return caller

    return check
