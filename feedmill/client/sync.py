"""The client of the HTTP endpoint for callers without an event loop: `feedmill.Client`."""

import asyncio
import os
import threading
import weakref
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
)
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from feedmill.client import wire
from feedmill.client.aio import DEFAULT_URL, AsyncClient
from feedmill.client.wire import FollowedResult, Item, Labels, ResultPage, SentRun
from feedmill.outcomes.purge import Purged
from feedmill.outcomes.rows import Missed
from feedmill.shared.errors import UserError
from feedmill.shared.messages import Classification, PostError
from feedmill.shared.results import Result
from feedmill.shared.runs import Progress

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])
#: Most seconds that an interrupted call waits for its connection to be closed.
CLOSING_S = 5.0
#: All clients of this process, whose locks a forked one renews.
_CLIENTS: "weakref.WeakSet[Client]" = weakref.WeakSet()
#: Marks the end of an iteration.
_END: Any = object()


def _like(method: Callable[..., Any]) -> Callable[[Method], Method]:
    """Give a method the documentation of the asynchronous one."""

    def document(own: Method) -> Method:
        own.__doc__ = method.__doc__
        return own

    return document


class Client:
    """A client of the HTTP endpoint of `feedmill web`.

        with feedmill.Client("https://labels.example.org", token) as client:
            outcomes = client.classify(["I love it", "It broke"], ["praise", "complaint"])

    Needs `pip install 'feedmill[client]'`. A client keeps its connections, and several threads may
    use it at once; a forked process opens its own. An interrupted call (Ctrl-C) closes its
    connection, and the server then withdraws what no worker has started.

    Its arguments are those of `feedmill.AsyncClient`, whose methods it runs in a thread.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        token: str | None = None,
        *,
        timeout: float = 30.0,
        concurrency: int = 4,
        retries: int = 4,
        ca_file: str | Path | None = None,
        transport: Any = None,
    ) -> None:
        self._make = partial(
            AsyncClient,
            url,
            token,
            timeout=timeout,
            concurrency=concurrency,
            retries=retries,
            ca_file=ca_file,
            transport=transport,
        )
        self._lock = threading.Lock()
        _CLIENTS.add(self)
        self._is_closed = False
        self._runner = self._start()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._runner.client.url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, and end the thread."""
        self._is_closed = True
        self._runner.stop()

    @_like(AsyncClient.classify)
    def classify(
        self,
        items: Iterable[Item],
        labels: Labels | None = None,
        *,
        template: str | None = None,
        multi_label: bool = False,
        none: float | bool | None = None,
        timeout: float | None = None,
    ) -> list[Classification | PostError]:
        return self._run(
            self._client_of_process().classify(
                # In this thread: it may be a generator.
                wire.listed(items),
                labels,
                template=template,
                multi_label=multi_label,
                none=none,
                timeout=timeout,
            )
        )

    @_like(AsyncClient.start_run)
    def start_run(
        self,
        items: Iterable[Item],
        labels: Labels | None = None,
        *,
        run: str | None = None,
        again: bool = False,
        webhook: str | None = None,
        template: str | None = None,
        multi_label: bool = False,
        none: float | bool | None = None,
    ) -> SentRun:
        return self._run(
            self._client_of_process().start_run(
                # In this thread: it may be a generator.
                wire.listed(items),
                labels,
                run=run,
                again=again,
                webhook=webhook,
                template=template,
                multi_label=multi_label,
                none=none,
            )
        )

    @_like(AsyncClient.run)
    def run(self, name: str) -> Progress:
        return self._run(self._client_of_process().run(name))

    @_like(AsyncClient.results_page)
    def results_page(
        self,
        *,
        run: str | None = None,
        label: str | None = None,
        min_score: float | None = None,
        subreddit: str | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> ResultPage:
        return self._run(
            self._client_of_process().results_page(
                run=run,
                label=label,
                min_score=min_score,
                subreddit=subreddit,
                after=after,
                limit=limit,
            )
        )

    @_like(AsyncClient.results)
    def results(
        self,
        *,
        run: str | None = None,
        label: str | None = None,
        min_score: float | None = None,
        subreddit: str | None = None,
        after: str | None = None,
    ) -> Generator[Result | Missed]:
        return self._iterate(
            self._client_of_process().results(
                run=run,
                label=label,
                min_score=min_score,
                subreddit=subreddit,
                after=after,
            )
        )

    @_like(AsyncClient.follow)
    def follow(
        self,
        *,
        run: str | None = None,
        label: str | None = None,
        min_score: float | None = None,
        subreddit: str | None = None,
        after: str | None = None,
    ) -> Generator[FollowedResult]:
        return self._iterate(
            self._client_of_process().follow(
                run=run,
                label=label,
                min_score=min_score,
                subreddit=subreddit,
                after=after,
            )
        )

    @_like(AsyncClient.post)
    def post(self, post_id: str) -> list[Result]:
        return self._run(self._client_of_process().post(post_id))

    @_like(AsyncClient.delete_post)
    def delete_post(self, post_id: str) -> Purged:
        return self._run(self._client_of_process().delete_post(post_id))

    @_like(AsyncClient.send_answers)
    def send_answers(self, answers: Mapping[str, str | None]) -> None:
        self._run(self._client_of_process().send_answers(answers))

    # The thread.

    def _start(self) -> "_Runner":
        runner = _Runner(self._make())
        # At the end of the process, its thread ends with it.
        weakref.finalize(self, runner.stop).atexit = False
        return runner

    def _client_of_process(self) -> AsyncClient:
        """Return the client of this process: a forked one has no thread, and shares no
        connection.
        """
        with self._lock:
            if self._is_closed:
                raise UserError("The client is closed. Make another one.")
            if self._runner.process != os.getpid():
                self._runner = self._start()
            return self._runner.client

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def _iterate(self, items: AsyncGenerator[T]) -> Generator[T]:
        async def step() -> Any:
            return await anext(items, _END)

        try:
            while True:
                item = self._run(step())
                if item is _END:
                    return
                yield item
        finally:
            if not self._is_closed:
                self._run(items.aclose())


def _renew_locks() -> None:
    """Renew the clients' locks after a fork: a thread that the child lacks may hold them."""
    for client in list(_CLIENTS):
        client._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


class _Runner:
    """An asynchronous client, and the event loop in a thread that runs its calls."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.process = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_run_loop,
            args=(self.loop,),
            name="feedmill client",
            daemon=True,
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the value of a coroutine, which is cancelled if this thread is interrupted."""
        ended = threading.Event()

        async def run() -> T:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(run(), self.loop)
        try:
            return future.result()
        finally:
            if future.cancel():
                # Its connection is closed then.
                ended.wait(CLOSING_S)

    def stop(self) -> None:
        """Close the connections, and end the thread. A forked process has neither."""
        if self.process != os.getpid() or self.loop.is_closed():
            return

        async def close() -> None:
            await self.client.close()
            self.loop.stop()

        asyncio.run_coroutine_threadsafe(close(), self.loop)
        # Garbage may be collected on that thread.
        if self._thread is not threading.current_thread():
            self._thread.join()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
