"""A fake Reddit on loopback for real PRAW: tokens, /r/<a+b>/<new|hot|top|rising> and /api/info.

    with Reddit(clock=clock) as reddit:
        reddit.add_subreddit("python")
        fullname = reddit.publish("python", title="A title", body="A text.")
        reddit.faults.next("too_many", seconds=5)                 # the next answer of the API
        reddit.faults.always("html", where="access_token")        # requests whose path and query match
        reddit.faults.random(0.1, among=["server_error_503", "slow"])

It limits the request rate as Reddit does, and records posts, requests and answers (`reddit.ledger`). Faults affect
only requests with a valid token within the rate limit. Recorded answers and prawcore's code are evidence for
each answer here.
"""

import gzip
import heapq
import json
import math
import re
import secrets
import socket
import sys
import time
from base64 import b64encode
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from http import HTTPStatus
from itertools import islice
from random import Random
from threading import Event, RLock
from typing import Any
from urllib.parse import parse_qs, unquote

from tests.fakes.loopback import Handler, Loopback

#: Items of one response: maximum, and default.
MOST, USUAL = 100, 25
#: Lifetime of a token in seconds, as in the recorded answer of 2026.
TOKEN_LIFETIME = 86400
TOKEN_PATH = "/api/v1/access_token"
#: Statuses whose recorded answers have no x-ratelimit headers.
UNCOUNTED = (401, 403, 404)
#: The header of the recorded 401.
INVALID_TOKEN = {"www-authenticate": 'Bearer realm="reddit", error="invalid_token"'}
#: Reddit: "banned → 404; private, gated, quarantined → 403 (the reason is in exc.response.json()["reason"])".
UNREADABLE = {"private": 403, "gold_only": 403, "gated": 403, "quarantined": 403, "banned": 404}
#: Number of the first post.
FIRST_POST = 1_000_000


@dataclass(eq=False)
class Subreddit:
    name: str
    #: A key of UNREADABLE or a `subreddit_type`.
    kind: str
    #: Its posts in the order of listings, including those that are gone: they keep their places in the listing.
    posts: list["Post"] = field(default_factory=list)


@dataclass(eq=False)
class Post:
    #: The fields in Reddit's format.
    data: dict[str, Any]
    subreddit: Subreddit
    #: Sort key of /new: Reddit's whole seconds, then the number.
    age_key: tuple[float, int]
    #: Seconds since 1970 from which listings and /api/info show the post.
    visible_from: float
    #: The original post of a crosspost.
    parent: "Post | None" = None
    #: The remover, "author" or "moderator"; "" while the post is visible.
    gone: str = ""

    @property
    def fullname(self) -> str:
        return str(self.data["name"])

    @property
    def created_utc(self) -> float:
        return float(self.data["created_utc"])

    def shown(self, now: float) -> bool:
        return self.visible_from <= now and not self.gone


@dataclass(frozen=True)
class Asked:
    """A request."""

    method: str
    #: The path and query as sent.
    target: str
    headers: dict[str, str]
    body: str
    #: Seconds since 1970.
    at: float

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def user_agent(self) -> str:
        return self.headers.get("user-agent", "")

    @cached_property
    def query(self) -> dict[str, str]:
        return {name: values[-1] for name, values in parse_qs(self.target.partition("?")[2]).items()}


@dataclass
class Answer:
    """The answer to a request. said: the content, sent as JSON unless it is bytes."""

    status: int = 200
    said: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    #: Posts that the answer contains.
    fullnames: Sequence[str] = ()
    #: An old post of the listing's first subreddit, for faults.
    old: dict[str, Any] | None = None
    #: Delays in seconds: before the answer, and in the middle of its body.
    delay: float = 0.0
    pause: float = 0.0
    #: Position at which the connection is cut: "before" the answer or "within" its body.
    cut: str = ""

    def encoded(self) -> bytes:
        return self.said if isinstance(self.said, bytes) else json.dumps(self.said).encode()

    @property
    def listing(self) -> dict[str, Any] | None:
        """Return the answer's listing, which faults may change."""
        said = self.said if self.status == 200 and isinstance(self.said, dict) else {}
        return said["data"] if said.get("kind") == "Listing" else None


def refuse(status: int, **headers: str) -> Answer:
    """Return an error in Reddit's format, as in the recorded 401, 403 and 404."""
    return Answer(status, {"message": HTTPStatus(status).phrase, "error": status}, headers)


def html(status: int) -> Answer:
    """Return an HTML error such as proxies send, as in the recorded 400."""
    return Answer(status, f"<html><body><h1>{status}</h1></body></html>\n".encode())


# Faults. Each changes a good answer or returns another one; None if it cannot affect this request.

Fault = Callable[[Asked, Answer, float], Answer | None]


def _changed(**fields: Any) -> Fault:
    def change(_: Asked, answer: Answer, seconds: float) -> Answer:
        for name, value in fields.items():
            setattr(answer, name, seconds if value is float else value)
        return answer

    return change


def _with_headers(**headers: str) -> Fault:
    return lambda _, answer, __: replace(answer, headers=answer.headers | headers)


def _items(change: Callable[[list[Any], Answer, Asked, float], list[Any]], where: str = "first", **more: Any) -> Fault:
    """Change a listing's items. where: pages affected: "any", "first" or "further"."""

    def changed(asked: Asked, answer: Answer, seconds: float) -> Answer | None:
        listing, first = answer.listing, "after" not in asked.query
        fits = {"any": True, "first": answer.old and first, "further": not first}
        if listing is None or not fits[where]:
            return None
        children = change(listing["children"], answer, asked, seconds)
        listing |= {"children": children, "dist": len(children)} | more
        return answer

    return changed


def _pin(children: list[Any], answer: Answer, *_: object) -> list[Any]:
    assert answer.old
    answer.old["data"]["stickied"] = True
    return [answer.old, *(each for each in children if each["data"]["name"] != answer.old["data"]["name"])]


#: Faults by name, each with a comment on its evidence where it is not plain.
FAULTS: dict[str, Fault] = {
    "too_many": lambda _, __, seconds: refuse(429, **{"retry-after": f"{seconds:g}"}),
    "too_many_bare": lambda *_: refuse(429),
    "too_many_word": lambda *_: refuse(429, **{"retry-after": "soon"}),
    # Reddit: "408, 500, 502, 503, 504, 520, 522 and connection errors are tried 3 times".
    **{f"server_error_{each}": lambda *_, each=each: html(each) for each in (500, 502, 503, 504, 520)},
    "html": lambda *_: html(200),  # Reddit: "HTML with status 200 gives BadJSON"
    "html_400": lambda *_: html(400),
    "html_403": lambda *_: html(403),  # from a proxy; in JSON, the status means a private subreddit
    "redirect_nowhere": lambda *_: Answer(302, {}),  # Reddit: "302 without Location (KeyError)"
    "token_expired": lambda *_: refuse(401, **INVALID_TOKEN),  # the token becomes invalid, too
    "slow": _changed(delay=float),
    "slow_body": _changed(pause=float),
    "cut": _changed(cut="before"),
    "cut_body": _changed(cut="within"),
    "remaining_nan": _with_headers(**{"x-ratelimit-remaining": "nan", "x-ratelimit-reset": "-5"}),
    # Reddit: "loses posts silently after a quiet spell, or when its anchor post is deleted".
    "empty_listing": _items(lambda *_: [], "any", after=None),
    "dead_anchor": _items(lambda *_: [], "further", after=None),
    "no_data": lambda _, answer, __: Answer(said={"kind": "Listing"}) if answer.listing else None,
    "truncated_json": lambda _, answer, __: Answer(said=answer.encoded()[: len(answer.encoded()) // 2]),
    # Reddit: "/new includes pinned posts".
    "sticky_head": _items(_pin),
    # Seen in replayed recordings: a listing of some seconds ago.
    "stale": _items(lambda items, _, asked, s: [each for each in items if each["data"]["created_utc"] <= asked.at - s]),
}


@dataclass
class Rule:
    names: Sequence[str]
    #: Pattern of the target; None for all but tokens.
    where: str | None
    seconds: float
    #: Number of further requests to affect.
    times: float = math.inf
    #: Probability of affecting a request.
    rate: float = 1.0

    def matches(self, asked: Asked) -> bool:
        return asked.path != TOKEN_PATH if self.where is None else bool(re.search(self.where, asked.target))


class Faults:
    """The schedule of faults, in the order they were added. `seconds`: the fault's delay, or the one it asks for."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._rules: list[Rule] = []

    def next(self, name: str, times: int = 1, where: str | None = None, seconds: float = 1.0) -> None:
        """Inject the fault into the next `times` requests that match `where` and that the fault can affect."""
        self._rules = [*self._rules, Rule([name], where, seconds, times)]

    def always(self, name: str, where: str | None = None, seconds: float = 1.0) -> None:
        self.next(name, sys.maxsize, where, seconds)

    def random(self, rate: float, among: Collection[str], seconds: float = 1.0) -> None:
        """Inject one of these faults into each request with probability `rate`."""
        self._rules = [*self._rules, Rule(list(among), None, seconds, rate=rate)]

    def clear(self) -> None:
        self._rules = []

    def happen(self, asked: Asked, answer: Answer) -> tuple[str, Answer]:
        """Choose a fault for a request. Return its name ("" for none) and the resulting answer."""
        for rule in self._rules:
            if rule.times and rule.matches(asked) and (rule.rate == 1 or self._random.random() < rule.rate):
                for name in self._random.sample(rule.names, len(rule.names)):
                    if changed := FAULTS[name](asked, answer, rule.seconds):
                        rule.times -= 1
                        return name, changed
        return "", answer


# The server.


class Ledger:
    """Published posts, requests and answers. Changes while the server runs: copy with list() before iterating."""

    def __init__(self) -> None:
        #: Posts by fullname, in the order of publication.
        self.published: dict[str, Post] = {}
        #: The newest requests, and the number of all, including those for tokens.
        self.requests: deque[Asked] = deque(maxlen=20_000)
        self.total = 0
        #: Fullname -> number of intact answers that contained the post.
        self.served: Counter[str] = Counter()
        #: Number of faults by name.
        self.faults: Counter[str] = Counter()
        #: Number of requests beyond the budget of their window.
        self.over_budget = 0

    def note(self, asked: Asked, answer: Answer, fault: str) -> None:
        self.requests.append(asked)
        self.total += 1
        self.served.update(answer.fullnames)
        if fault:
            self.faults[fault] += 1


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
        remaining = f"{float(self._requests - self._used)}"
        found = {"used": str(self._used), "remaining": remaining, "reset": self.reset(now)}
        return {f"x-ratelimit-{name}": value for name, value in found.items()}


class Reddit(Loopback):
    """The server of the fake Reddit.

    clock: returns seconds since 1970. client: id and secret of the only known app. window, budget: allow `budget`
    requests per `window` seconds; no limit if `window` is None. seed: for random faults. listing_cap: maximum number of
    items in a listing.
    """

    request_queue_size = 128

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        client: tuple[str, str] = ("id", "secret"),
        window: float | None = 600.0,
        budget: int = 1000,
        seed: int = 0,
        listing_cap: int = 1000,
    ) -> None:
        super().__init__(_Answers)
        self.clock = clock
        self.ledger = Ledger()
        self.lock = RLock()
        self.faults = Faults(seed)
        #: Subreddits by lower-case name.
        self.subreddits: dict[str, Subreddit] = {}
        #: Posts by fullname, without those that vanished.
        self.posts: dict[str, Post] = {}
        #: Pattern of the user agents that are blocked.
        self.blocked_agents = ""
        self._redirects: dict[str, str] = {}
        self._cap = listing_cap
        self._budget = Budget(window, budget) if window else None
        self._basic = "Basic " + b64encode(":".join(client).encode()).decode()
        #: Expiry times of tokens.
        self._tokens: dict[str, float] = {}
        #: Set when the server stops; it also cuts the waits of slow answers short.
        self.ending = Event()
        self._connections: set[socket.socket] = set()
        #: Bugs in this fake. Raised when it stops, so that tests do not take them for Reddit's errors.
        self._mistakes: list[BaseException] = []

    def __exit__(self, *failure: object) -> None:
        self.ending.set()
        super().__exit__()
        for connection in list(self._connections):  # kept alive: returning clients find the server gone
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._mistakes and failure[0] is None:
            raise self._mistakes[0]

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - an override
        """Record an exception, unless it only shows that the client has disconnected."""
        error = sys.exception()
        if error and not isinstance(error, OSError):
            self._mistakes.append(error)

    # Changes to the content.

    def add_subreddit(self, name: str, kind: str = "public") -> None:
        """Add a subreddit. Names that are not added are missing."""
        self.subreddits[name.lower()] = Subreddit(name, kind)

    def set_kind(self, name: str, kind: str) -> None:
        self.subreddits[name.lower()].kind = kind

    def redirect(self, name: str, target: str) -> None:
        """Redirect requests for a subreddit to another one, as after it was renamed."""
        self._redirects[name.lower()] = target

    def publish(
        self,
        subreddit: str,
        *,
        title: str,
        body: str = "",
        url: str | None = None,
        created_utc: float | None = None,
        visible_from: float = 0.0,
        crosspost_of: str | None = None,
        options: Sequence[str] = (),
        **more: Any,
    ) -> str:
        """Publish a post and return its fullname.

        created_utc: now by default, in whole seconds as on Reddit. visible_from: the time at which the post appears at
        its position by creation time, like a post that a filter held back. crosspost_of: fullname of the original
        post. options: texts of a poll. more: other fields, such as score, stickied or promoted (an advertisement).
        """
        with self.lock:
            home = self.subreddits[subreddit.lower()]
            number = FIRST_POST + len(self.ledger.published)
            created = float(int(self.clock())) if created_utc is None else created_utc
            data = _fields(home.name, number, title, body, url, created) | _poll(options) | more
            parent = self.posts[crosspost_of] if crosspost_of else None
            post = Post(data, home, (created, number), max(created, visible_from), parent)
            self.posts[post.fullname] = post
            insort(home.posts, post, key=lambda each: each.age_key)
            self.ledger.published[post.fullname] = post
            return post.fullname

    def edit(self, fullname: str, body: str) -> None:
        self.posts[fullname].data |= {"selftext": body, "edited": float(int(self.clock()))}

    def score(self, fullname: str, score: int) -> None:
        self.posts[fullname].data |= {"score": score, "ups": score}

    def delete(self, fullname: str) -> None:
        """Delete a post as its author. Listings omit it; /api/info still shows that it existed."""
        self.posts[fullname].gone = "author"

    def remove(self, fullname: str) -> None:
        """Remove a post as a moderator."""
        self.posts[fullname].gone = "moderator"

    def approve(self, fullname: str) -> None:
        """Undo a removal. The post appears at its original place."""
        self.posts[fullname].gone = ""

    def vanish(self, fullname: str) -> None:
        """Remove a post from listings and from /api/info."""
        with self.lock:
            self.posts.pop(fullname).gone = "author"

    # Answering requests.

    def answer(self, asked: Asked) -> Answer:
        """Return the answer to a request. The ledger records the answer first, so clients never see unrecorded ones."""
        with self.lock:
            answer, fault = self._answer(asked)
            if fault:
                answer.fullnames = ()
            self.ledger.note(asked, answer, fault)
            return answer

    def _answer(self, asked: Asked) -> tuple[Answer, str]:
        if self.blocked_agents and re.search(self.blocked_agents, asked.user_agent):
            return html(403), ""
        if asked.path == TOKEN_PATH:
            fault, answer = self.faults.happen(asked, self._token(asked))
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
        if fault == "token_expired":
            del self._tokens[token]
        return answer, fault

    def _token(self, asked: Asked) -> Answer:
        if asked.method != "POST" or asked.headers.get("authorization") != self._basic:
            return refuse(401)
        token = secrets.token_urlsafe(32)
        self._tokens[token] = asked.at + TOKEN_LIFETIME
        given = {"access_token": token, "token_type": "bearer", "expires_in": TOKEN_LIFETIME, "scope": "*"}
        return Answer(said=given)

    def _api(self, asked: Asked) -> Answer:
        match [unquote(part) for part in asked.path.strip("/").split("/")]:
            case ["r", names, ("new" | "hot" | "top" | "rising") as order]:
                return self._listing(asked, names.split("+"), order)
            case ["api", "info"]:
                named = [self.posts.get(name) for name in asked.query.get("id", "").split(",")[:MOST]]
                visible = [each for each in named if each and each.visible_from <= asked.at]
                return _posts_answer([each for each in visible if each.subreddit.kind not in UNREADABLE], None, asked)
        return refuse(404)

    def _listing(self, asked: Asked, names: Sequence[str], order: str) -> Answer:
        """Return a page. It is empty if the anchor `after` is not in the listing.

        Reddit: "banned → 404; private, gated, quarantined → 403 (the reason is …); missing → redirect to search".
        """
        if len(names) == 1 and (target := self._redirects.get(names[0].lower())):
            return Answer(302, {}, {"location": f"{self.url}{asked.path.replace(names[0], target)}"})
        found = {name.lower(): self.subreddits.get(name.lower()) for name in names}
        readable = [each for each in found.values() if each and each.kind not in UNREADABLE]
        if not readable:
            first = found[names[0].lower()]
            if first is None:
                return Answer(302, {}, {"location": f"{self.url}/subreddits/search?q={names[0]}"})
            answer = refuse(UNREADABLE[first.kind])
            answer.said["reason"] = first.kind
            return answer
        posts, pinned = self._entries(readable, order, asked.at)
        limit = min(int(asked.query.get("limit", USUAL)), MOST)
        after = asked.query.get("after")
        start = 0 if after is None else next((n for n, each in enumerate(posts, 1) if each.fullname == after), MOST**3)
        end = start + limit + (0 if after else pinned)  # recorded: 102 items for a limit of 100, two of them pinned
        answer = _posts_answer(posts[start:end], posts[end - 1].fullname if end < len(posts) else None, asked)
        old = next((each for each in readable[0].posts if each.shown(asked.at)), None)
        answer.old = post_thing(old) if old and order == "new" else None
        return answer

    def _entries(self, subreddits: Sequence[Subreddit], order: str, now: float) -> tuple[list[Post], int]:
        """Return the posts of a listing in order, and the number of those pinned to its top."""
        newest = heapq.merge(
            *(reversed(each.posts) for each in subreddits), key=lambda each: each.age_key, reverse=True
        )
        # Reddit precomputes a thousand entries, and does not refill them when posts disappear.
        entries = islice((post for post in newest if post.visible_from <= now), self._cap)
        posts = [post for post in entries if not post.gone]
        if order == "top":
            posts.sort(key=lambda post: post.data["score"], reverse=True)
        # Reddit pins posts only in the listing of a single subreddit: the recorded r/popular has no pinned item.
        pins = [post for post in posts if post.data["stickied"]] if order == "hot" and len(subreddits) == 1 else []
        return pins + [post for post in posts if post not in pins], len(pins)


def _posts_answer(posts: Sequence[Post], after: str | None, asked: Asked) -> Answer:
    things = map(post_thing, posts)
    children = [thing if asked.query.get("raw_json") == "1" else escaped(thing) for thing in things]
    data = {"modhash": None, "after": after, "before": None, "dist": len(children), "children": children}
    return Answer(said={"kind": "Listing", "data": data}, fullnames=[post.fullname for post in posts])


def escaped(thing: dict[str, Any]) -> dict[str, Any]:
    """Escape texts as Reddit does, unless raw ones are requested."""
    said = {
        name: value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") if isinstance(value, str) else value
        for name, value in thing["data"].items()
    }
    return thing | {"data": said}


def post_thing(post: Post) -> dict[str, Any]:
    """Return a post in Reddit's format."""
    said = dict(post.data)
    if parent := post.parent:
        said |= {"crosspost_parent": parent.fullname, "crosspost_parent_list": [post_thing(parent)["data"]]}
    if post.gone:
        by = {"author": ("deleted", "[deleted]"), "moderator": ("moderator", "[removed]")}[post.gone]
        said |= dict(zip(("removed_by_category", "selftext"), by, strict=True))
    if post.gone == "author":
        said["author"] = "[deleted]"
    return {"kind": "t3", "data": said}


def _fields(subreddit: str, number: int, title: str, body: str, url: str | None, created_utc: float) -> dict[str, Any]:
    """Return those fields of the answer recorded in 2026 that Feedmill may read."""
    name = str(number)
    slug = re.sub(r"\W+", "_", title.lower()).strip("_")[:50]
    permalink = f"/r/{subreddit}/comments/{name}/{slug or '_'}/"
    return {
        "id": name,
        "name": f"t3_{name}",
        "title": title,
        "selftext": body,
        "subreddit": subreddit,
        "author": f"reader_{number % 4096}",
        "score": 1,
        "ups": 1,
        "num_comments": 0,
        "url": url or f"https://www.reddit.com{permalink}",
        "permalink": permalink,
        "is_self": url is None,
        "created_utc": created_utc,
        "edited": False,
        "stickied": False,
        "over_18": False,
        "spoiler": False,
        "removed_by_category": None,
        "link_flair_text": None,
    }


def _poll(options: Sequence[str]) -> dict[str, Any]:
    """Return the field of a poll, as in answers of 2026."""
    return (
        {"poll_data": {"options": [{"id": str(at), "text": text} for at, text in enumerate(options)]}}
        if options
        else {}
    )


class _Answers(Handler):
    server: Reddit
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = self.server.answer(Asked(self.command, self.path, headers, body, self.server.clock()))
        try:
            self._send(answer)
        except OSError:  # the client disconnected
            with self.server.lock:
                self.server.ledger.served.subtract(answer.fullnames)
            raise

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(self.server.clock() if timestamp is None else int(timestamp))

    def _send(self, answer: Answer) -> None:
        self.server.ending.wait(answer.delay)
        if answer.cut == "before":
            self.close_connection = True
            return
        body = answer.encoded()
        zipped = "gzip" in self.headers.get("Accept-Encoding", "")
        body = gzip.compress(body, 1) if zipped else body
        kind = "text/html" if isinstance(answer.said, bytes) and answer.said.startswith(b"<") else "application/json"
        headers = {"Content-Type": f"{kind}; charset=UTF-8"} | answer.headers
        if zipped:
            headers["Content-Encoding"] = "gzip"
        # As recorded. Without this header, a client could send its next request on a connection that is being closed.
        headers["Connection"] = "close" if self.close_connection else "keep-alive"
        self.send(answer.status, headers, len(body))
        self.close_connection |= bool(answer.cut)
        half = len(body) // 2 if answer.cut or answer.pause else len(body)
        self.wfile.write(body[:half])
        if answer.cut != "within":
            self.server.ending.wait(answer.pause)
            self.wfile.write(body[half:])
