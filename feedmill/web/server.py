"""Run the web server: routes, limits and resources put together."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

import feedmill
from feedmill.shared import tracing
from feedmill.shared.broker import connect
from feedmill.shared.errors import UserError
from feedmill.shared.linux import notify
from feedmill.shared.settings import Settings
from feedmill.web import answers, compatible, endpoint
from feedmill.web.access import Access
from feedmill.web.asking import Asker
from feedmill.web.failures import HANDLERS
from feedmill.web.guard import Guard
from feedmill.web.pages import frame, review, runs, stream, system, teach
from feedmill.web.resources import Resources
from feedmill.web.streams import Newness
from feedmill.web.webhooks import Webhooks

logger = logging.getLogger(__name__)

#: Connections at once; beyond them, requests get 503.
MAX_CONNECTIONS = 2000
#: Seconds for the line and the headers of a request, and their most bytes. uvicorn has neither
#: limit.
HEADERS_TIMEOUT_S = 10.0
MAX_HEADER_BYTES = 64 * 1024
#: Bytes that the encoding "chunked" may add to each byte of a body: five for chunks of one byte.
CHUNK_OVERHEAD = 8
#: Bytes and seconds for the rest of a body behind its answer, which nobody reads.
MAX_UNREAD_BYTES = 2**20
UNREAD_TIMEOUT_S = 10.0
#: Seconds that an idle connection is kept, and that open requests have when the server stops.
KEEP_ALIVE_S = 15
GRACE_S = 5
#: Routers of the pages.
PAGES = (
    frame.router,
    stream.router,
    stream.scripts,
    review.router,
    review.scripts,
    teach.router,
    teach.scripts,
    runs.router,
    runs.scripts,
    system.router,
)
DESCRIPTION = """
Classify posts through the queue, read results, and delete posts.
Send `Authorization: Bearer TOKEN`.
"""


class Protocol(HttpToolsProtocol):  # type: ignore[misc]  # uvicorn may be absent
    """uvicorn's protocol, with limits on what no application reads: headers, trailers, and bodies
    after an answer.

    Relies on its `connection_made`, `data_received`, `connection_lost`, and the callbacks of its
    parser, which begin with `on_`.
    """

    #: Bytes of headers, or of what is between the parts of a body.
    _header_bytes = 0
    _unread_bytes = 0
    _is_in_body = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect(HEADERS_TIMEOUT_S)

    def data_received(self, data: bytes) -> None:
        is_between = self.cycle is None or self.cycle.response_complete
        if is_between and self._timer is None:
            seconds = UNREAD_TIMEOUT_S if self._is_in_body else HEADERS_TIMEOUT_S
            self._expect(seconds)
        if is_between and self._is_in_body:
            self._unread_bytes += len(data)
        self._header_bytes += len(data)
        super().data_received(data)
        has_too_many = self._header_bytes > MAX_HEADER_BYTES
        if has_too_many or self._unread_bytes > MAX_UNREAD_BYTES:
            self.transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_body:
            # A trailer: nobody needs it, and uvicorn would keep it.
            self.transport.abort()
            return
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._forget_timer()
        self._header_bytes = 0
        self._is_in_body = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        read_bytes = len(body) * (1 + CHUNK_OVERHEAD)
        self._header_bytes = max(0, self._header_bytes - read_bytes)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._header_bytes = 0
        self._unread_bytes = 0
        self._is_in_body = False
        self._forget_timer()
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_timer()
        super().connection_lost(exc)

    def _expect(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        self._timer = None
        self.transport.abort()

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def make_server(settings: Settings, address: str = "127.0.0.1") -> Any:
    """Return the ASGI application. It connects when it starts.

    Raises SettingsError if others could reach the address without a password or a token.
    """
    access = Access(settings, address)

    tracing.exporting(tracing.WEB_SERVICE)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        redis = connect(settings)
        asker = Asker(settings)
        newness = Newness(redis)
        asker.start()
        newness.start()
        webhooks = Webhooks(redis, settings)
        webhooks.start()
        shared = Resources(
            settings=settings,
            access=access,
            redis=redis,
            asker=asker,
            newness=newness,
            webhooks=webhooks,
        )
        app.state.resources = shared
        notify("READY=1")
        try:
            yield
        finally:
            for end in shared.endings:
                await asyncio.to_thread(end)
            await asyncio.to_thread(newness.stop)
            await asyncio.to_thread(asker.stop)
            await asyncio.to_thread(webhooks.stop)
            # uvicorn ends the process with the signal it received, which skips `atexit` handlers.
            await asyncio.to_thread(tracing.stop)
            redis.close()

    app = FastAPI(
        title="Feedmill",
        version=feedmill.__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        # Their pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        openapi_url="/v1/openapi.json",
        exception_handlers=HANDLERS | {HTTPException: frame.on_http},
    )
    app.include_router(endpoint.router)
    app.include_router(compatible.router)
    app.include_router(answers.router)
    for router in PAGES:
        app.include_router(router)

    @app.get("/health", include_in_schema=False)
    async def health() -> Response:
        return Response("ok\n", media_type="text/plain")

    names = settings.web_hosts.split(",")
    hosts = [name.strip() for name in names if name.strip()]

    def knows(authorization: str, cookies: str) -> bool:
        return access.caller(authorization, cookies) is not None

    return Guard(app, (address, *hosts), settings.web_rate, knows)


def make_uvicorn(settings: Settings, address: str = "127.0.0.1") -> uvicorn.Server:
    """Return the server, with limits on connections. Raises SettingsError."""
    config = uvicorn.Config(
        make_server(settings, address),
        http=Protocol,
        ws="none",
        loop="uvloop",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
        access_log=False,
        log_config=None,
        server_header=False,
        # Who sends X-Forwarded-For could choose the address that is limited. A proxy has a name.
        proxy_headers=bool(settings.web_hosts),
    )
    return uvicorn.Server(config)


def serve(settings: Settings, address: str, port: int) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises UserError if it cannot listen."""
    server = make_uvicorn(settings, address)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        # uvicorn listens only after it has said that it is ready.
        listener.listen(MAX_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise UserError(
            f"The web server cannot listen on {address}:{port}: {error.strerror}. Choose another "
            "--port or --address."
        ) from None
    port = listener.getsockname()[1]
    host = f"[{address}]" if ":" in address else address
    logger.info("web server at http://%s:%s", host, port)
    server.run(sockets=[listener])
