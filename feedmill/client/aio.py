"""The asynchronous client of the HTTP endpoint: `feedmill.AsyncClient`."""

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from pydantic_core import from_json

from feedmill.client import wire
from feedmill.client.failures import (
    failure_of,
    no_answer,
    not_feedmill,
    pause_s,
    unreachable,
)
from feedmill.client.wire import (
    Call,
    FollowedResult,
    Item,
    Labels,
    ResultPage,
    SentRun,
)
from feedmill.outcomes.purge import Purged
from feedmill.outcomes.rows import Missed
from feedmill.shared.errors import UserError, explain_missing
from feedmill.shared.messages import Classification, PostError
from feedmill.shared.results import Result
from feedmill.shared.runs import Progress

T = TypeVar("T")

#: Where `feedmill web` listens by default.
DEFAULT_URL = "http://127.0.0.1:8600"
#: Names of this machine, which no proxy reaches.
LOOPBACK_HOSTS = {"127.0.0.1", "::1", "localhost"}
TOKEN = re.compile(r"[!-~]+")
#: Seconds to connect.
CONNECT_TIMEOUT_S = 10.0
#: Seconds without a byte of a stream, whose server shows every 15 that it lives.
STREAM_TIMEOUT_S = 60.0
#: Most bytes of an answer: a thousand posts with the scores of 256 labels take 20 MB.
MAX_ANSWER_BYTES = 256 * 2**20
#: Errors of an answer of another form.
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)


class AsyncClient:
    """A client of the HTTP endpoint of `feedmill web`, for asyncio.

        async with feedmill.AsyncClient("https://labels.example.org", token) as client:
            outcomes = await client.classify(["I love it", "It broke"], ["praise", "complaint"])

    Needs `pip install 'feedmill[client]'`. A client keeps its connections: use one for all calls
    of an event loop. Cancelling a call closes its connection, and the server then withdraws what
    no worker has started.

    Args:
        url: Address of the server.
        token: Token of the server's FEEDMILL_WEB_TOKENS, if it has any.
        timeout: Seconds to wait for labels, at most 600, where a call does not say.
        concurrency: Most requests of the client's calls at once.
        retries: Most repetitions of a request while the server is busy (429, 503, for the time
            that it asks for, up to a minute) or unreachable. Requests whose repetition would do
            something twice are never repeated.
        ca_file: PEM file of certificate authorities for https. Default: the machine's.
        transport: Transport of httpx2 in place of the network, for tests.

    Raises:
        feedmill.UserError: For an invalid argument, or if httpx2 is not installed.
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
        with explain_missing("The client of the HTTP endpoint", "client"):
            # Takes a tenth of a second, and is an extra.
            import httpx2  # noqa: PLC0415
        self._httpx = httpx2
        self.url = _check_url(url)
        self._timeout_s = timeout
        self._retries = retries
        if concurrency < 1:
            raise UserError(f"concurrency must be at least 1, not {concurrency}.")
        self._room = asyncio.Semaphore(concurrency)
        headers = {"Accept": "application/json"}
        if token is not None:
            if not TOKEN.fullmatch(token):
                raise UserError("token must be printable ASCII without spaces.")
            headers["Authorization"] = f"Bearer {token}"
        verify: Any = True
        if ca_file is not None:
            verify = ssl.create_default_context(cafile=str(ca_file))
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers=headers,
            verify=verify,
            transport=transport,
            trust_env=urlsplit(self.url).hostname not in LOOPBACK_HOSTS,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def classify(
        self,
        items: Iterable[Item],
        labels: Labels | None = None,
        *,
        template: str | None = None,
        multi_label: bool = False,
        none: float | bool | None = None,
        timeout: float | None = None,
    ) -> list[Classification | PostError]:
        """Classify texts or posts now; return one outcome per item, in order.

        More than a thousand items are sent in several requests. If one fails, the others are
        cancelled.

        Args:
            items: Texts, posts, or dictionaries with `title` and `body`, and maybe `id`,
                `subreddit`, `created_utc`, `url` and `extra`.
            labels: Names, or a dictionary from each name to its description. Default: those of the
                worker.
            template: Sentence with {} in place of the label.
            multi_label: Score each label by itself.
            none: Score below which a post has no label; True selects the model's default.
            timeout: Seconds to wait for the labels of each request.

        Raises:
            feedmill.RequestRefused: For options or items that the server or the model refuses.
            feedmill.MessageFailed: If no post of a request could be classified.
            feedmill.ServerError: Its subclasses in feedmill.shared.errors say why the server did
                not answer.
        """
        options = wire.options_of(labels, template, multi_label, none)
        timeout_s = self._timeout_s if timeout is None else timeout
        work = []
        for batch in wire.batches(items):
            call = wire.classify(batch, options, timeout_s)
            work.append(self._outcomes(call, len(batch)))
        parts = await _together(work)
        outcomes: list[Classification | PostError] = []
        for part in parts:
            outcomes += part
        return outcomes

    async def start_run(
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
        """Send texts or posts to the queue as a run, and return when they wait there.

        Args:
            items, labels, template, multi_label, none: As of `classify`.
            run: Name of the run. Default: a new one with the time.
            again: Also send posts that were sent before.
            webhook: Address that gets a signed notice when the run has finished.

        Raises:
            As `classify`. Items of earlier requests are in the queue.
        """
        options = wire.options_of(labels, template, multi_label, none)
        options |= wire.query_of(webhook=webhook)
        if again:
            options["again"] = True
        sent: SentRun | None = None
        for batch in wire.batches(items):
            name = run if sent is None else sent.run
            call = wire.start_run(batch, options | wire.query_of(run=name))
            sent = wire.add_sent(sent, await self._read(call, wire.read_sent))
        if sent is None:
            raise UserError("There are no items to send. Give at least one.")
        return sent

    async def run(self, name: str) -> Progress:
        """Return the progress of a run. Raises feedmill.ServerError."""
        call = Call("GET", wire.run_path(name))
        return await self._read(call, wire.read_progress)

    async def results_page(
        self,
        *,
        run: str | None = None,
        label: str | None = None,
        min_score: float | None = None,
        subreddit: str | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> ResultPage:
        """Return stored results, oldest first: at most `limit`, after the cursor `after`.

        Raises feedmill.ServerError.
        """
        query = wire.query_of(
            run=run,
            label=label,
            min_score=min_score,
            subreddit=subreddit,
            after=after,
            limit=limit,
        )
        call = Call("GET", "/v1/results", query=query)
        return await self._read(call, wire.read_page)

    async def results(
        self,
        *,
        run: str | None = None,
        label: str | None = None,
        min_score: float | None = None,
        subreddit: str | None = None,
        after: str | None = None,
    ) -> AsyncGenerator[Result | Missed]:
        """Yield all stored results, oldest first, and a Missed where some were trimmed.

        Raises feedmill.ServerError.
        """
        while True:
            page = await self.results_page(
                run=run,
                label=label,
                min_score=min_score,
                subreddit=subreddit,
                after=after,
                limit=1000,
            )
            if page.missed is not None:
                yield page.missed
            for result in page.results:
                yield result
            if page.ended or page.cursor == after:
                return
            after = page.cursor

    async def follow(
        self,
        *,
        run: str | None = None,
        label: str | None = None,
        min_score: float | None = None,
        subreddit: str | None = None,
        after: str | None = None,
    ) -> AsyncGenerator[FollowedResult]:
        """Yield results as they are stored, each with the cursor behind it, for ever.

        Begins after the cursor `after`, else with new results. After a lost connection it
        reconnects, and continues at the same place.

        Raises feedmill.ServerError, also if the server stays away.
        """
        query = wire.query_of(
            run=run,
            label=label,
            min_score=min_score,
            subreddit=subreddit,
        )
        failures = 0
        while True:
            failure: Exception = unreachable(self.url, EOFError("the stream ended"))
            try:
                async with aclosing(self._events(query, after)) as events:
                    async for event in events:
                        after = event.id or after
                        failures = 0
                        if event.data:
                            item = self._parse(_read_event, event)
                            yield FollowedResult(after or "", item)
            except self._httpx.TransportError as error:
                failure = unreachable(self.url, error)
            except UserError as error:
                failure = error
            pause = pause_s(failure, failures, self._retries)
            if pause is None:
                raise failure
            failures += 1
            await asyncio.sleep(pause)

    async def post(self, post_id: str) -> list[Result]:
        """Return the stored results of a post, oldest first.

        Raises feedmill.ServerError, NotFound if there are none.
        """

        call = Call("GET", wire.post_path(post_id))
        return await self._read(call, wire.read_results)

    async def delete_post(self, post_id: str) -> Purged:
        """Delete everything stored about a post, and block it from being sent again.

        Raises feedmill.ServerError.
        """
        call = Call("DELETE", wire.post_path(post_id))
        return await self._read(call, wire.read_purged)

    async def send_answers(self, answers: Mapping[str, str | None]) -> None:
        """Store people's answers: the right label of each post by its id, None if it fits none.

        Raises feedmill.ServerError.
        """
        await self._ask(wire.answers(answers))

    # Requests.

    async def _outcomes(
        self, call: Call, count: int
    ) -> list[Classification | PostError]:
        return await self._read(
            call, lambda content: wire.read_outcomes(content, count)
        )

    async def _read(self, call: Call, read: Callable[[Any], T]) -> T:
        """Return what `read` makes of the answer to a request."""
        content = await self._ask(call)
        return self._parse(read, content)

    def _parse(self, read: Callable[[Any], T], content: Any) -> T:
        try:
            return read(content)
        except UNREADABLE as error:
            raise not_feedmill(self.url, wire.reason_of(error)) from None

    async def _ask(self, call: Call) -> Any:
        """Return the content of the answer, after as many attempts as it may take."""
        failures = 0
        while True:
            try:
                async with self._room:
                    return await self._ask_once(call)
            except UserError as failure:
                pause = None
                if call.is_repeatable:
                    pause = pause_s(failure, failures, self._retries)
                if pause is None:
                    raise
            failures += 1
            await asyncio.sleep(pause)

    async def _ask_once(self, call: Call) -> Any:
        headers = {}
        if call.body is not None:
            headers["Content-Type"] = "application/json"
        timeout = self._httpx.Timeout(
            call.timeout_s, connect=CONNECT_TIMEOUT_S, pool=None
        )
        try:
            async with self._http.stream(
                call.method,
                call.path,
                content=call.body,
                params=call.query,
                headers=headers,
                timeout=timeout,
            ) as response:
                body = await self._body(response)
        except self._httpx.ConnectTimeout as error:
            raise unreachable(self.url, error) from None
        except self._httpx.TimeoutException:
            raise no_answer(self.url, call.timeout_s) from None
        except self._httpx.TransportError as error:
            raise unreachable(self.url, error) from None
        return self._content(response, body)

    async def _body(self, response: Any) -> bytes:
        parts = bytearray()
        async for part in response.aiter_bytes():
            parts += part
            if len(parts) > MAX_ANSWER_BYTES:
                raise not_feedmill(self.url, "it is too long")
        return bytes(parts)

    def _content(self, response: Any, body: bytes) -> Any:
        """Return the content of an answer, or raise the exception for it."""
        content: Any = None
        with suppress(ValueError):
            content = from_json(body)
        if not response.is_success:
            raise failure_of(response.status_code, response.headers, content)
        if content is None and body:
            raise not_feedmill(self.url, "it is no JSON")
        return content

    async def _events(
        self, query: Mapping[str, Any], after: str | None
    ) -> AsyncGenerator[Any]:
        """Yield the events of one connection to the stream."""
        headers = {"Accept": "text/event-stream"}
        if after is not None:
            headers["Last-Event-ID"] = after
        timeout = self._httpx.Timeout(
            STREAM_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=None
        )
        async with self._http.stream(
            "GET",
            "/v1/results/stream",
            params=query,
            headers=headers,
            timeout=timeout,
        ) as response:
            kind = response.headers.get("content-type", "")
            if not response.is_success or not kind.startswith("text/event-stream"):
                self._content(response, await self._body(response))
                raise not_feedmill(self.url, "it is no stream of events")
            async for event in self._httpx.EventSource(response):
                yield event


def _read_event(event: Any) -> Result | Missed:
    """Return the content of a server-sent event."""
    content = from_json(event.data)
    if event.event == "missed":
        return wire.read_missed(content)
    return wire.read_result(content)


async def _together(work: Sequence[Any]) -> list[Any]:
    """Return the values of coroutines, in order. If one fails, cancel the others."""
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _check_url(url: str) -> str:
    """Return an address without its final slash. Raises UserError, which quotes no password."""
    try:
        parts = urlsplit(url)
        has_extras = parts.query or parts.fragment or "@" in parts.netloc
        is_valid = (
            parts.scheme in ("http", "https") and parts.hostname and not has_extras
        )
        is_valid = bool(is_valid) and parts.port != 0
    except (ValueError, AttributeError):
        is_valid = False
    if not is_valid:
        raise UserError(
            "url must look like https://labels.example.org or http://127.0.0.1:8600, without a "
            "user, a password or a query. Pass the token as its own argument."
        )
    return url.rstrip("/")
