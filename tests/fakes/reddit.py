"""A fake Reddit on loopback, with the part of Reddit's HTTP API that reads posts. Tests use it with real PRAW.

    with Reddit(clock=clock) as reddit:
        reddit.add_subreddit("python")
        fullname = reddit.publish("python", title="A title", body="A text.")
        client = praw.Reddit(client_id="id", client_secret="secret", user_agent="test:feedmill:1.0 (by /u/test)",
                             reddit_url=reddit.url, oauth_url=reddit.url,
                             check_for_updates=False, check_for_async=False)

It serves tokens, /r/<a+b>/<new|hot|top|rising>, /r/<name>/about and /api/info. It limits the request rate as Reddit
does, injects faults on demand (`reddit.faults`), and records all posts, requests and responses (`reddit.ledger`).

The command `python -m tests.fakes.reddit --posts FILE` publishes a file's posts, half of them while it runs.
"""

import gzip
import math
import re
import secrets
import socket
import sys
import time
from base64 import b64encode
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, RLock, Thread
from types import TracebackType
from typing import Any, NamedTuple, Self, cast, get_args
from urllib.parse import unquote

from tests.fakes.reddit_content import Content, Order, Post, Refused, post_thing, subreddit_thing
from tests.fakes.reddit_faults import INVALID_TOKEN, TOKEN_PATH, Answer, Asked, Faults, blocked, refuse

#: Items of one response: maximum, and default.
MOST, USUAL = 100, 25
#: Lifetime of a token in seconds, as in the recorded answer of 2026.
TOKEN_LIFETIME = 86400
#: Number of requests that the ledger keeps.
REQUESTS = 20_000
#: Statuses whose recorded answers have no x-ratelimit headers.
UNCOUNTED = (401, 403, 404)


class Request(NamedTuple):
    """A request and its answer. fault: "" if nothing went wrong."""

    path: str
    query: str
    #: Seconds since 1970.
    at: float
    status: int
    fault: str
    user_agent: str


class Published(NamedTuple):
    subreddit: str
    created_utc: float


class Ledger:
    """Published posts, requests and answers. Changes while the server runs: copy with list() before iterating."""

    def __init__(self) -> None:
        #: Posts by fullname, in the order of publication.
        self.published: dict[str, Published] = {}
        #: The newest requests.
        self.requests: deque[Request] = deque(maxlen=REQUESTS)
        #: Number of requests by status, including those for tokens.
        self.statuses: Counter[int] = Counter()
        #: Fullname -> number of intact answers that contained the post.
        self.served: Counter[str] = Counter()
        #: Number of faults by name.
        self.faults: Counter[str] = Counter()
        #: Number of requests beyond the budget of their window.
        self.over_budget = 0
        #: Number of issued tokens.
        self.tokens = 0

    @property
    def total(self) -> int:
        """Return the number of requests."""
        return self.statuses.total()

    def note(self, asked: Asked, answer: Answer, fault: str) -> None:
        """Record an answer that is about to be sent."""
        path, _, query = asked.target.partition("?")
        agent = asked.headers.get("user-agent", "")
        self.requests.append(Request(path, query, asked.at, answer.status, fault, agent))
        self.statuses[answer.status] += 1
        self.served.update(answer.fullnames)
        if fault:
            self.faults[fault] += 1

    def undelivered(self, answer: Answer) -> None:
        """Subtract the posts of an answer whose client disconnected too early."""
        self.served.subtract(answer.fullnames)


class Budget:
    """A rate limit of `requests` per window of `seconds`. Windows begin at multiples of `seconds`, as Reddit's do."""

    def __init__(self, seconds: float, requests: int) -> None:
        self._seconds = seconds
        self._requests = requests
        self._window = 0.0
        self._used = 0

    def take(self, now: float) -> bool:
        """Spend one request; return False if none is left."""
        window = now // self._seconds
        if window > self._window:
            self._window, self._used = window, 0
        if self._used >= self._requests:
            return False
        self._used += 1
        return True

    def reset(self, now: float) -> str:
        """Return the seconds until the next window."""
        return str(max(1, math.ceil((self._window + 1) * self._seconds - now)))

    def headers(self, now: float) -> dict[str, str]:
        """Return the x-ratelimit headers in Reddit's formats: '3', '997.0', '15'."""
        return {
            "x-ratelimit-used": str(self._used),
            "x-ratelimit-remaining": f"{float(self._requests - self._used)}",
            "x-ratelimit-reset": self.reset(now),
        }


class Reddit:
    """The server of the fake Reddit.

    clock: returns seconds since 1970. client: id and secret of the only known app. window, budget: allow `budget`
    requests per `window` seconds; no limit if `window` is None or 0. seed: for random faults. listing_cap: maximum
    number of items in a listing. token_lifetime: in seconds. blocked_agents: pattern of user agents that are blocked.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        port: int = 0,
        client: tuple[str, str] = ("id", "secret"),
        window: float | None = 600.0,
        budget: int = 1000,
        seed: int = 0,
        listing_cap: int = 1000,
        token_lifetime: int = TOKEN_LIFETIME,
        blocked_agents: str | None = None,
    ) -> None:
        self.clock = clock
        self.ledger = Ledger()
        self._lock = RLock()
        self.faults = Faults(seed, self._lock)
        self._content = Content(listing_cap)
        self._budget = Budget(window, budget) if window else None
        self._basic = "Basic " + b64encode(":".join(client).encode()).decode()
        self._token_lifetime = token_lifetime
        self._blocked_agents = re.compile(blocked_agents) if blocked_agents else None
        #: Expiry times of tokens.
        self._tokens: dict[str, float] = {}
        #: Set when the server stops; it also cuts the waits of slow answers short.
        self.ending = Event()
        #: Bugs in this fake. Raised when it stops, so that tests do not take them for Reddit's errors.
        self._mistakes: list[BaseException] = []
        self._server = _Server(("127.0.0.1", port), self._handler(), self._mistakes)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.ending.set()
        self._server.shutdown()
        self._server.end_connections()
        self._server.server_close()
        if self._mistakes and error is None:
            raise self._mistakes[0]
        if self._mistakes and error:
            error.add_note(f"The fake Reddit itself failed: {self._mistakes[0]!r}")

    # Changes to the content.

    def add_subreddit(self, name: str, kind: str = "public") -> None:
        """Add a subreddit. kind: one of KINDS. Names that are not added are missing."""
        with self._lock:
            self._content.add_subreddit(name, kind, self.clock())

    def set_kind(self, name: str, kind: str) -> None:
        with self._lock:
            self._content.set_kind(name, kind)

    def redirect(self, name: str, target: str) -> None:
        """Redirect requests for a subreddit to another one, as after it was renamed."""
        with self._lock:
            self._content.redirect(name, target)

    def publish(
        self,
        subreddit: str,
        *,
        title: str,
        body: str = "",
        url: str | None = None,
        score: int = 1,
        stickied: bool = False,
        over_18: bool = False,
        spoiler: bool = False,
        created_utc: float | None = None,
        visible_from: float | None = None,
        listed_utc: float | None = None,
        crosspost_of: str | None = None,
        captions: Sequence[str] = (),
        options: Sequence[str] = (),
        promoted: bool = False,
    ) -> str:
        """Publish a post and return its fullname.

        created_utc: now by default, in whole seconds as on Reddit. visible_from: the time at which the post appears at
        its position by creation time, like a post that a filter held back; by default, and at the earliest, its
        creation. listed_utc: the creation time that its position corresponds to, if it is out of order. crosspost_of:
        fullname of the original post. captions, options: texts of a gallery and of a poll. promoted: an advertisement.
        """
        with self._lock:
            created = float(int(self.clock())) if created_utc is None else created_utc
            post = self._content.publish(
                subreddit, title=title, body=body, url=url, score=score, stickied=stickied, over_18=over_18,
                spoiler=spoiler, created_utc=created, visible_from=max(created, visible_from or 0.0),
                listed_utc=listed_utc, crosspost_of=self._content.post(crosspost_of) if crosspost_of else None,
                captions=captions, options=options, promoted=promoted,
            )  # fmt: skip
            self.ledger.published[post.fullname] = Published(post.subreddit.name, created)
            return post.fullname

    def edit(self, fullname: str, body: str) -> None:
        with self._lock:
            post = self._content.post(fullname)
            post.body, post.edited = body, float(int(self.clock()))

    def score(self, fullname: str, score: int) -> None:
        with self._lock:
            self._content.post(fullname).score = score

    def delete(self, fullname: str) -> None:
        """Delete a post as its author."""
        with self._lock:
            self._content.take_down(fullname, "deleted")

    def remove(self, fullname: str) -> None:
        """Remove a post as a moderator."""
        with self._lock:
            self._content.take_down(fullname, "moderator")

    def approve(self, fullname: str) -> None:
        """Approve a removed post as a moderator."""
        with self._lock:
            self._content.approve(fullname)

    def vanish(self, fullname: str) -> None:
        """Remove a post from listings and from /api/info."""
        with self._lock:
            self._content.vanish(fullname)

    # Answering requests.

    def answer(self, asked: Asked) -> Answer:
        """Return the answer to a request. The ledger records the answer first, so clients never see unrecorded ones."""
        with self._lock:
            answer, fault = self._answer(asked)
            if fault:
                answer.fullnames = ()
            self.ledger.note(asked, answer, fault)
            return answer

    def undelivered(self, answer: Answer) -> None:
        with self._lock:
            self.ledger.undelivered(answer)

    def _answer(self, asked: Asked) -> tuple[Answer, str]:
        if self._blocked_agents and self._blocked_agents.search(asked.headers.get("user-agent", "")):
            return blocked(), ""
        if asked.path == TOKEN_PATH:
            fault, answer = self.faults.happen(asked, self._token(asked))
            self.ledger.tokens += not fault and "access_token" in answer.said
            return answer, fault
        token = asked.headers.get("authorization", "").partition(" ")[2]
        if asked.at >= self._tokens.get(token, -math.inf):
            return refuse(401, **INVALID_TOKEN), ""
        if self._budget and not self._budget.take(asked.at):
            self.ledger.over_budget += 1
            headers = {"retry-after": self._budget.reset(asked.at)} | self._budget.headers(asked.at)
            return refuse(429, **headers), ""
        answer = self._api(asked)
        if self._budget and answer.status not in UNCOUNTED:
            answer.headers |= self._budget.headers(asked.at)
        fault, answer = self.faults.happen(asked, answer)
        if answer.revokes:
            del self._tokens[token]
        return answer, fault

    def _token(self, asked: Asked) -> Answer:
        if asked.method != "POST" or asked.headers.get("authorization") != self._basic:
            return refuse(401)
        if asked.form.get("grant_type") != "client_credentials":
            return Answer(said={"error": "unsupported_grant_type"})  # prawcore: "Why are these OKAY responses?"
        token = secrets.token_urlsafe(32)
        self._tokens[token] = asked.at + self._token_lifetime
        given = {"access_token": token, "token_type": "bearer", "expires_in": self._token_lifetime}
        return Answer(said=given | {"scope": asked.form.get("scope", "*")})

    def _api(self, asked: Asked) -> Answer:
        match [unquote(part) for part in asked.path.strip("/").split("/")]:
            case ["r", names, "about"]:
                return self._about(asked, names)
            case ["r", names, order] if order in get_args(Order):
                return self._listing(asked, names.split("+"), cast(Order, order))
            case ["api", "info"]:
                return self._info(asked)
        return refuse(404)

    def _listing(self, asked: Asked, names: Sequence[str], order: Order) -> Answer:
        query = asked.query
        if "before" in query:
            raise NotImplementedError("the fake Reddit supports `after`, not `before`")
        limit = min(max(int(query["limit"]), 1), MOST) if query.get("limit", "").isdigit() else USUAL
        try:
            page = self._content.page(names, order, asked.at, limit, query.get("after"), query.get("t", "day"))
        except Refused as refused:
            return _refusal(asked, refused)
        pinnable = self._content.pinnable(names, asked.at) if order == "new" else None
        answer = _posts_answer(asked, page.posts, page.after)
        answer.pinnable = _escaped(asked, post_thing(pinnable)) if pinnable else None
        return answer

    def _info(self, asked: Asked) -> Answer:
        query = asked.query
        if "sr_name" in query:
            found = self._content.about(query["sr_name"].split(",")[:MOST])
            return _listing_answer(asked, [subreddit_thing(subreddit) for subreddit in found], None)
        fullnames = query.get("id", "").split(",")[:MOST]
        return _posts_answer(asked, list(self._content.info(fullnames, asked.at)), None)

    def _about(self, asked: Asked, name: str) -> Answer:
        try:
            (subreddit,) = self._content.readable([name])
        except Refused as refused:
            return _refusal(asked, refused)
        return Answer(said=_escaped(asked, subreddit_thing(subreddit)))

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        reddit = self

        class Handler(_Handler):
            serves = reddit

        return Handler


def _refusal(asked: Asked, refused: Refused) -> Answer:
    """Return Reddit's answer for a subreddit that cannot be read.

    FACTS.md: "banned → 404; private, gated, quarantined → 403 (the reason is …); missing → redirect to search".
    """
    if refused.target:
        path = asked.path.replace(f"/r/{refused.name}", f"/r/{refused.target}")
        return Answer(302, {}, {"location": f"{asked.url}{path}"})
    if refused.kind is None:
        return Answer(302, {}, {"location": f"{asked.url}/subreddits/search?q={refused.name}"})
    answer = refuse(refused.kind.status)
    answer.said = {"reason": refused.kind.reason} | answer.said
    return answer


def _posts_answer(asked: Asked, posts: Sequence[Post], after: str | None) -> Answer:
    answer = _listing_answer(asked, [post_thing(post) for post in posts], after)
    answer.fullnames = [post.fullname for post in posts]
    return answer


def _listing_answer(asked: Asked, things: list[dict[str, Any]], after: str | None) -> Answer:
    children = [_escaped(asked, thing) for thing in things]
    data = {"modhash": None, "after": after, "before": None, "dist": len(children), "children": children}
    return Answer(said={"kind": "Listing", "data": data})


def _escaped(asked: Asked, thing: dict[str, Any]) -> dict[str, Any]:
    """Escape texts as Reddit does, unless raw ones are requested."""
    if asked.query.get("raw_json") == "1":
        return thing
    said = {
        name: value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") if isinstance(value, str) else value
        for name, value in thing["data"].items()
    }
    return thing | {"data": said}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], mistakes: list[BaseException]
    ) -> None:
        self.connections: set[socket.socket] = set()
        self._mistakes = mistakes
        super().__init__(address, handler)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - an override
        """Record an exception, unless it only shows that the client has disconnected."""
        error = sys.exception()
        if error and not isinstance(error, OSError):
            self._mistakes.append(error)

    def end_connections(self) -> None:
        """Close kept-alive connections, so that returning clients find the server gone."""
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    serves: Reddit
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        cast(_Server, self.server).connections.add(self.connection)

    def finish(self) -> None:
        cast(_Server, self.server).connections.discard(self.connection)
        super().finish()

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked = Asked(self.command, self.path, headers, body, self.serves.url, self.serves.clock())
        answer = self.serves.answer(asked)
        try:
            self._send(answer)
        except OSError:
            self.serves.undelivered(answer)
            raise

    def do_POST(self) -> None:
        self.do_GET()

    def version_string(self) -> str:
        return "snooserv"

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(self.serves.clock() if timestamp is None else int(timestamp))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Keep the test's output clean; the ledger records requests."""

    def _send(self, answer: Answer) -> None:
        self.serves.ending.wait(answer.delay)
        if answer.cut == "before":
            self.close_connection = True
            return
        body = answer.encoded()
        zipped = "gzip" in self.headers.get("Accept-Encoding", "")
        if zipped:
            body = gzip.compress(body, 1)
        self.send_response(answer.status)
        if zipped:
            self.send_header("Content-Encoding", "gzip")
        for name, value in ({"Content-Type": answer.type} | answer.headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        # As recorded. Without this header, a client could send its next request on a connection that is being closed.
        self.send_header("Connection", "close" if self.close_connection else "keep-alive")
        self.end_headers()
        self.close_connection |= bool(answer.cut)
        half = len(body) // 2 if answer.cut or answer.pause else len(body)
        self.wfile.write(body[:half])
        if answer.cut != "within":
            self.serves.ending.wait(answer.pause)
            self.wfile.write(body[half:])


if __name__ == "__main__":
    from tests.fakes.reddit_by_hand import main

    main()
