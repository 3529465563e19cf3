"""feedmill.Client and feedmill.AsyncClient against a small server: requests, retries, errors."""

import asyncio
import json
import os
import signal
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx2
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

import feedmill
from feedmill import AsyncClient, Classification, Client, Post, PostError, Result
from feedmill.client import failures
from feedmill.shared.backoff import Backoff
from feedmill.shared.errors import (
    AccessRefused,
    InputError,
    MessageFailed,
    NoAnswerInTime,
    NotFound,
    RequestRefused,
    ServerBusy,
    ServerError,
    ServerUnreachable,
    UserError,
)
from tests.support import free_port, make_classification, wait_until

Answer = Callable[[Any], Awaitable[Any]]


def labelled(post_id: str, **fields: Any) -> dict[str, Any]:
    return make_classification(post_id, **fields).model_dump() | {"new_field": 1}


def error(status: int, kind: str = "refused", **headers: str) -> JSONResponse:
    content = {"error": {"type": kind, "message": f"{kind}: do this"}}
    return JSONResponse(content, status, {"X-Request-Id": "r-1", **headers})


class Server:
    """A server whose answers a test sets. It labels each text with itself."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.bodies: list[Any] = []
        #: Answers before the usual ones.
        self.first: list[Any] = []
        self.at_once = self.most_at_once = 0
        #: Requests that wait for ever, and those of them that their caller left.
        self.hangs = self.hangs_in_stream = False
        self.waiting = self.left = 0
        routes = [
            Route("/v1/results/stream", self._stream),
            Route("/{path:path}", self._answer, methods=["GET", "POST", "DELETE"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes),
            port=free_port(),
            ws="none",
            log_level="critical",
        )
        self._server = uvicorn.Server(config)
        self.url = f"http://127.0.0.1:{config.port}"
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        wait_until(lambda: self._server.started, "the server listens")
        #: Events of each connection to the stream.
        self.streams: list[str] = []

    def stop(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join()

    async def _answer(self, request: Any) -> Any:
        self.requests.append(request)
        body = await request.body()
        content: Any = json.loads(body) if body else None
        self.bodies.append(content)
        if self.first:
            return self.first.pop(0)
        if self.hangs:
            return await self._hang(request)
        if request.url.path != "/v1/classify":
            return error(404, "not_found")
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        texts = content.get("texts") or [
            post.get("title") or post["body"] for post in content["posts"]
        ]
        return JSONResponse({"results": [labelled(text) for text in texts]})

    async def _hang(self, request: Any) -> Any:
        self.waiting += 1
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.left += 1
        return JSONResponse({})

    async def _stream(self, request: Any) -> Any:
        self.requests.append(request)
        if self.hangs_in_stream:
            return await self._hang(request)
        if self.first:
            return self.first.pop(0)
        if not self.streams:
            return error(401)
        text = self.streams.pop(0)
        return StreamingResponse(iter([text]), media_type="text/event-stream")


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = Backoff(first_s=0.001, max_s=0.001)
    monkeypatch.setattr(failures, "RETRIES", pauses)


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest, server: Server) -> Callable[..., Any]:
    """Call a method of a client: both clients have the same."""

    def ask(method: str, *args: Any, client: Any = None, **kwargs: Any) -> Any:
        options = {"token": "a-secret-token"} | (client or {})
        if request.param == "sync":
            with Client(server.url, **options) as synchronous:
                answer = getattr(synchronous, method)(*args, **kwargs)
                return list(answer) if hasattr(answer, "send") else answer

        async def run() -> Any:
            async with AsyncClient(server.url, **options) as asynchronous:
                answer = getattr(asynchronous, method)(*args, **kwargs)
                if hasattr(answer, "asend"):
                    return [item async for item in answer]
                return await answer

        return asyncio.run(run())

    return ask


def test_classifies_with_the_projects_types(server: Server, ask: Any) -> None:
    fails = {"id": "2", "error": {"type": "PostRefused", "message": "no text"}}
    results = [
        labelled("1"),
        fails,
        {"id": None, "error": "bad"},
        labelled("3", label=None),
    ]
    server.first = [JSONResponse({"results": results})]
    labels = {"food": "cooking"}
    found, *failed, unfit = ask(
        "classify", list("abcd"), labels, none=True, multi_label=True, timeout=7
    )
    assert isinstance(found, Classification)
    assert (found.id, found.label, unfit.label) == ("1", "food", None)
    assert failed == [
        PostError(id="2", error="no text"),
        PostError(id=None, error="bad"),
    ]
    assert server.bodies == [
        {
            "texts": list("abcd"),
            "labels": labels,
            "none": "on",
            "multi_label": True,
            "timeout_s": 7,
        }
    ]
    (request,) = server.requests
    assert request.headers["authorization"] == "Bearer a-secret-token"


def test_sends_posts_of_each_kind(server: Server, ask: Any) -> None:
    items = [
        Post(id="1", title="one", created_utc=5.0),
        {"title": "two", "id": 2},
        "three",
    ]
    outcomes = ask("classify", items, ["a", "b"], none=False)
    assert [outcome.id for outcome in outcomes] == ["one", "two", "three"]
    (body,) = server.bodies
    assert body["posts"] == [
        {"id": "1", "title": "one", "created_utc": 5.0},
        {"title": "two", "id": 2},
        {"body": "three"},
    ]
    assert body["none"] == "off"


@pytest.mark.parametrize("count", [0, 1, 1000, 1001, 5500])
def test_long_lists_are_split_and_keep_their_order(
    server: Server, ask: Any, count: int
) -> None:
    texts = [f"text {number}" for number in range(count)]
    outcomes = ask("classify", iter(texts), client={"concurrency": 2})
    assert [outcome.id for outcome in outcomes] == texts
    assert all(len(body["texts"]) <= 1000 for body in server.bodies)
    assert server.most_at_once <= 2


def test_one_failing_request_fails_the_call(server: Server, ask: Any) -> None:
    server.first = [error(422)]
    with pytest.raises(RequestRefused):
        ask("classify", ["text"] * 5000)


ERRORS: dict[Any, type[Exception]] = {
    (400, "invalid_json"): RequestRefused,
    (401, "unauthorized"): AccessRefused,
    (403, "forbidden"): AccessRefused,
    (404, "not_found"): NotFound,
    (409, "conflict"): RequestRefused,
    (413, "too_large"): RequestRefused,
    (422, "refused"): RequestRefused,
    (422, "failed"): MessageFailed,
    (429, "too_many"): ServerBusy,
    (500, "internal"): ServerError,
    (502, "bad_gateway"): ServerError,
    (503, "busy"): ServerBusy,
    (504, "timeout"): NoAnswerInTime,
}


@pytest.mark.parametrize(("answer", "expected"), ERRORS.items(), ids=str)
def test_errors_are_the_projects(
    server: Server, ask: Any, answer: tuple[int, str], expected: type[Exception]
) -> None:
    status, kind = answer
    server.first = [error(status, kind)] * 5
    with pytest.raises(expected, match=f"{kind}: do this") as raised:
        ask("classify", ["text"])
    assert type(raised.value) is expected
    notes = getattr(raised.value, "__notes__", [])
    details = [getattr(raised.value, "request_id", ""), *notes]
    assert "r-1" in " ".join(details)


@pytest.mark.parametrize("status", [429, 503])
def test_busy_servers_are_asked_again(server: Server, ask: Any, status: int) -> None:
    server.first = [error(status, **{"Retry-After": "0"}), error(status)]
    assert ask("classify", ["text"])[0].label == "food"
    assert len(server.requests) == 3


def test_retries_are_bounded(server: Server, ask: Any) -> None:
    server.first = [error(503) for _ in range(9)]
    with pytest.raises(ServerBusy):
        ask("classify", ["text"], client={"retries": 2})
    assert len(server.requests) == 3


def test_does_not_wait_as_long_as_the_server_likes(server: Server, ask: Any) -> None:
    server.first = [error(503, **{"Retry-After": "86400"})]
    with pytest.raises(ServerBusy) as raised:
        ask("classify", ["text"])
    assert raised.value.retry_after == 86400
    assert len(server.requests) == 1


UNREPEATABLE = {
    "a run without a name": ("start_run", (["text"],), {}),
    "a run that sends again": ("start_run", (["text"],), {"run": "r", "again": True}),
    "answers": ("send_answers", ({"1": "food"},), {}),
}


@pytest.mark.parametrize("name", UNREPEATABLE)
def test_what_would_happen_twice_is_asked_once(
    server: Server, ask: Any, name: str
) -> None:
    method, args, kwargs = UNREPEATABLE[name]
    server.first = [error(503), error(503)]
    with pytest.raises(ServerBusy):
        ask(method, *args, **kwargs)
    assert len(server.requests) == 1


def test_a_named_run_is_repeated_and_split(server: Server, ask: Any) -> None:
    refused = [{"id": "x", "error": "no text"}]
    sent = {
        "run": "monday",
        "sent": 1000,
        "skipped": 1,
        "purged": 0,
        "refused": refused,
    }
    server.first = [
        error(503),
        JSONResponse(sent, 202),
        JSONResponse({"run": "monday", "posts": 5}, 202),
    ]
    run = ask("start_run", ["text"] * 1005, ["a"], run="monday")
    assert run == ("monday", 1005, 1, 0, (PostError(id="x", error="no text"),))
    assert [body["run"] for body in server.bodies] == ["monday"] * 3


def test_a_run_keeps_the_name_that_the_server_gave(server: Server, ask: Any) -> None:
    server.first = [
        JSONResponse({"run": "web 1", "sent": n}, 202) for n in (1000, 1000, 1)
    ]
    assert ask("start_run", ["text"] * 2001).sent == 2001
    assert [body.get("run") for body in server.bodies] == [None, "web 1", "web 1"]


def test_reads_runs_results_and_posts(server: Server, ask: Any) -> None:
    post = {"id": "a/b", "title": "T", "unknown": 1}
    stored = labelled("a/b") | {"post": post}
    dropped = labelled("a/b") | {"post": None}
    missed = {"count": 3, "since": 1.0, "until": 2.0}
    pages = [
        {"results": [stored], "cursor": "1-1", "ended": False, "missed": missed},
        {"results": [dropped], "cursor": "2-1", "ended": True, "missed": None},
    ]
    progress = {
        "run": "r s",
        "sent": 4,
        "stored": 3,
        "failed": 0,
        "rate": 1.5,
        "pending": 1,
    }
    server.first = [
        JSONResponse(progress),
        *map(JSONResponse, pages),
        JSONResponse({"results": [stored, dropped]}),
        JSONResponse({"counts": {"posts": 1, "results": 2}}),
    ]
    assert ask("run", "r s").pending == 1
    gap, first, second = ask("results", run="r s", min_score=0.5)
    assert gap == feedmill.Missed(3, 1.0, 2.0)
    assert (first.post.title, second.post.title, second.post.id) == ("T", "", "a/b")
    assert len(ask("post", "a/b")) == 2
    assert ask("delete_post", "a/b").counts == {"posts": 1, "results": 2}
    paths = [request.scope["raw_path"].decode() for request in server.requests]
    assert paths == [
        "/v1/runs/r%20s", "/v1/results", "/v1/results", "/v1/posts/a%2Fb", "/v1/posts/a%2Fb"
    ]  # fmt: skip
    queries = [dict(request.query_params) for request in server.requests[1:3]]
    assert queries == [
        {"run": "r s", "min_score": "0.5", "limit": "1000"},
        {"run": "r s", "min_score": "0.5", "limit": "1000", "after": "1-1"},
    ]


def event(cursor: str, content: object, kind: str = "message") -> str:
    return f"id: {cursor}\nevent: {kind}\ndata: {json.dumps(content)}\n\n"


def test_follows_and_continues_where_it_was(server: Server, ask: Any) -> None:
    first = labelled("1") | {"post": {"id": "1", "title": "one"}}
    second = labelled("2") | {"post": {"id": "2", "title": "two"}}
    missed = {"count": None, "since": 1.0, "until": 2.0}
    server.streams = [
        f"retry: 2000\n\n: alive\n\n{event('1-1', first)}",
        event("2-1", missed, "missed") + event("2-2", second) + "id: 3-1\ndata: {",
    ]
    with pytest.raises(AccessRefused):
        ask("follow", run="r", after="0-9", client={"retries": 1})
    asked = [request.headers.get("last-event-id") for request in server.requests]
    assert asked == ["0-9", "1-1", "2-2"], "the last event is cut off"


def test_following_yields_results_with_their_cursors(server: Server) -> None:
    content = labelled("1") | {"post": {"id": "1", "title": "one"}}
    missed = {"count": 2, "since": 1.0, "until": 2.0}
    server.streams = [event("1-1", missed, "missed"), event("1-2", content)]
    with Client(server.url) as client:
        following = client.follow()
        gap, result = next(following), next(following)
        following.close()
    assert gap == ("1-1", feedmill.Missed(2, 1.0, 2.0))
    assert isinstance(result.item, Result)
    assert (result.cursor, result.item.post.title) == ("1-2", "one")


def test_following_is_not_for_ever_without_a_server(server: Server, ask: Any) -> None:
    server.first = [error(503) for _ in range(3)]
    with pytest.raises(ServerBusy):
        ask("follow", client={"retries": 2})
    server.first = [error(401)]
    with pytest.raises(AccessRefused):
        ask("follow")


@pytest.mark.parametrize(
    "content",
    ["text", "[]", "{}", '{"results": 5}', '{"results": [{}]}', '{"results": []}', ""],
)
def test_foreign_answers_are_errors(server: Server, ask: Any, content: str) -> None:
    server.first = [StreamingResponse(iter([content]), media_type="application/json")]
    with pytest.raises(ServerError, match="not one of Feedmill"):
        ask("classify", ["text"])


def test_an_error_page_of_a_proxy_is_an_error(server: Server, ask: Any) -> None:
    server.first = [StreamingResponse(iter(["<h1>\x1b[31m"]), 502)]
    with pytest.raises(ServerError, match="502"):
        ask("classify", ["text"])


def test_a_cancelled_call_closes_its_connections(server: Server) -> None:
    async def run() -> None:
        server.hangs = True
        async with AsyncClient(server.url) as client:
            call = asyncio.create_task(client.classify(["text"] * 3000))
            while server.waiting < 3:
                await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            wait_until(lambda: server.left == 3, "the connections are closed")

    asyncio.run(run())


def test_an_interrupted_call_closes_its_connections(server: Server) -> None:
    server.hangs = True

    def interrupt() -> None:
        wait_until(lambda: server.waiting == 3, "the server has the requests")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with Client(server.url) as client, pytest.raises(KeyboardInterrupt):
        client.classify(["text"] * 3000)
    wait_until(lambda: server.left == 3, "the connections are closed")


def test_following_can_be_interrupted(server: Server) -> None:
    server.hangs_in_stream = True

    def interrupt() -> None:
        wait_until(lambda: server.waiting == 1, "the server has the request")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with Client(server.url) as client:
        with pytest.raises(KeyboardInterrupt):
            next(client.follow())
        assert client.classify(["text"])[0].id == "text", "the client still works"
    wait_until(lambda: server.left == 1, "the connection is closed")


def test_generators_run_in_the_callers_thread(server: Server) -> None:
    threads = set()

    def texts() -> Iterator[str]:
        for number in range(3):
            threads.add(threading.current_thread())
            yield str(number)

    with Client(server.url) as client:
        assert len(client.classify(texts())) == 3
    assert threads == {threading.current_thread()}


def test_a_forked_process_has_connections_of_its_own(server: Server) -> None:
    with Client(server.url) as client:
        client.classify(["before"])
        read, write = os.pipe()
        # A child that only calls and exits, as a preforking server's.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            (outcome,) = client.classify(["in the child"])
            os.write(write, str(outcome.id).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        with os.fdopen(read) as pipe:
            assert pipe.read() == "in the child"
        assert client.classify(["after"])[0].id == "after"


def test_fork_while_another_thread_uses_the_client(server: Server) -> None:
    with Client(server.url) as client:
        read, write = os.pipe()
        # As another thread would, which the child lacks.
        lock = client._lock
        lock.acquire()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            # Ends a child that waits for the lock.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            (outcome,) = client.classify(["in the child"])
            os.write(write, str(outcome.id).encode())
            os._exit(0)
        lock.release()
        os.waitpid(child, 0)
        os.close(write)
        with os.fdopen(read) as pipe:
            assert pipe.read() == "in the child"


def test_answers_come_from_a_transport_in_tests() -> None:
    """As docs/client.md says."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        texts = json.loads(request.content)["texts"]
        return httpx2.Response(
            200, json={"results": [labelled(text) for text in texts]}
        )

    transport = httpx2.MockTransport(answer)
    with Client("https://labels.example.org", transport=transport) as client:
        assert client.classify(["text"])[0].id == "text"


def test_threads_share_a_client(server: Server) -> None:
    answers: dict[int, list[str]] = {}

    def classify(number: int) -> None:
        texts = [f"{number} {place}" for place in range(3)]
        answers[number] = [outcome.id or "" for outcome in client.classify(texts)]

    with Client(server.url) as client:
        threads = [threading.Thread(target=classify, args=(n,)) for n in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {n: [f"{n} {place}" for place in range(3)] for n in range(20)}


def test_unreachable_servers_are_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with Client(url, retries=1) as client, pytest.raises(ServerUnreachable, match=url):
        client.classify(["text"])


def test_silent_servers_have_a_time_limit(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feedmill.client.wire.TIMEOUT_MARGIN_S", 0.0)
    server.hangs = True
    with Client(server.url) as client, pytest.raises(NoAnswerInTime):
        client.classify(["text"], timeout=0.1)
    wait_until(lambda: server.requests, "the server has read the request")
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "url",
    [
        "",
        "labels.example.org",
        "ftp://a",
        "http://",
        "http://u:secret@a",
        "http://a?b=secret",
        5,
    ],
)
def test_refuses_addresses_without_quoting_passwords(url: Any) -> None:
    with pytest.raises(UserError, match="url") as raised:
        AsyncClient(url)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "items", ["text", b"text", {"title": "t"}, Post(id="1", title="t"), 5]
)
def test_one_item_is_no_list(server: Server, ask: Any, items: Any) -> None:
    with pytest.raises(InputError):
        ask("classify", items)
    assert not server.requests


def test_refuses_labels_that_are_none(ask: Any) -> None:
    with pytest.raises(UserError, match="labels"):
        ask("classify", ["text"], 5)


@pytest.mark.parametrize("items", [[5], [{"title": object()}], ["\ud800"]])
def test_refuses_items_that_are_no_json(server: Server, ask: Any, items: Any) -> None:
    with pytest.raises(InputError):
        ask("classify", items)
    assert not server.requests


@pytest.mark.parametrize("timeout", [0, -1, 601, float("nan"), "5"])
def test_refuses_timeouts_that_the_server_refuses(ask: Any, timeout: float) -> None:
    with pytest.raises(UserError, match="timeout"):
        ask("classify", ["text"], timeout=timeout)


def test_secrets_stay_in_the_client(server: Server) -> None:
    with Client(server.url, "a-secret-token") as client:
        assert "secret" not in repr(client)
    for token in ("two words", "line\nbreak", ""):
        with pytest.raises(UserError, match="token") as raised:
            Client(server.url, token)
        assert "words" not in str(raised.value)


def test_a_closed_client_says_so(server: Server) -> None:
    with Client(server.url) as client:
        client.classify(["text"])
    client.close()
    with pytest.raises(UserError, match="closed"):
        client.classify(["text"])


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, Any]:
        return {
            name: method.__doc__
            for name, method in vars(kind).items()
            if not name.startswith("_") and name != "close"
        }

    assert methods(Client) == methods(AsyncClient)


def test_says_which_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "httpx2", None)
    with pytest.raises(UserError, match=r"feedmill\[client\]"):
        Client("http://127.0.0.1:1")
