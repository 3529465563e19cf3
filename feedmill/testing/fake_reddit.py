"""A fake Reddit on loopback for real PRAW: tokens, /r/<a+b>/<new|hot|top|rising> and /api/info.

    with Reddit(clock=clock) as reddit:
        reddit.add_subreddit("python")
        fullname = reddit.publish("python", title="A title", body="A text.")
        reddit.faults.next("too_many", seconds=5)                 # the next answer of the API
        reddit.faults.always("html", where="access_token")  # requests whose path and query match
        reddit.faults.random(0.1, among=["server_error_503", "slow"])

It limits the request rate as Reddit does, and records posts, requests and answers
(`reddit.ledger`). Faults affect only requests with a valid token within the rate limit. Recorded
answers and prawcore's code are evidence for each answer here.
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
from html import escape
from http import HTTPStatus
from itertools import islice
from random import Random
from threading import Event, RLock
from typing import Any
from urllib.parse import parse_qs, unquote

from feedmill.testing.loopback import Handler, Loopback

#: Items of one response: maximum, and default.
MOST = 100
USUAL = 25
#: Lifetime of a token in seconds, as in the recorded answer of 2026.
TOKEN_LIFETIME = 86400
TOKEN_PATH = "/api/v1/access_token"  # noqa: S105 - a path
#: Statuses whose recorded answers have no x-ratelimit headers.
UNCOUNTED = (401, 403, 404)
#: The header of the recorded 401.
INVALID_TOKEN = {"www-authenticate": 'Bearer realm="reddit", error="invalid_token"'}
#: Reddit: "banned → 404; private, gated, quarantined → 403 (the reason is in
#: exc.response.json()["reason"])".
UNREADABLE = {
    "private": 403,
    "gold_only": 403,
    "gated": 403,
    "quarantined": 403,
    "banned": 404,
}
#: Number of the first post.
FIRST_POST = 1_000_000


@dataclass(eq=False)
class Subreddit:
    name: str
    #: A key of UNREADABLE or a `subreddit_type`.
    kind: str
    #: Its posts in the order of listings, including those that are gone: they keep their places in
    #: the listing.
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
        if self.gone:
            return False
        return self.visible_from <= now


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
        path, _, _ = self.target.partition("?")
        return path

    @property
    def user_agent(self) -> str:
        return self.headers.get("user-agent", "")

    @cached_property
    def query(self) -> dict[str, str]:
        _, _, query = self.target.partition("?")
        parameters = parse_qs(query)
        return {name: values[-1] for name, values in parameters.items()}


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
        if isinstance(self.said, bytes):
            return self.said
        text = json.dumps(self.said)
        return text.encode()

    def first_half(self) -> bytes:
        """Return the first half of the content, which is not valid JSON."""
        content = self.encoded()
        middle = len(content) // 2
        return content[:middle]

    @property
    def listing(self) -> dict[str, Any] | None:
        """Return the answer's listing, which faults may change."""
        if self.status != 200 or not isinstance(self.said, dict):
            return None
        if self.said.get("kind") != "Listing":
            return None
        data: dict[str, Any] = self.said["data"]
        return data


def refuse(status: int, **headers: str) -> Answer:
    """Return an error in Reddit's format, as in the recorded 401, 403 and 404."""
    reason = HTTPStatus(status).phrase
    content = {"message": reason, "error": status}
    return Answer(status, content, headers)


def html(status: int) -> Answer:
    """Return an HTML error such as proxies send, as in the recorded 400."""
    text = f"<html><body><h1>{status}</h1></body></html>\n"
    return Answer(status, text.encode())


# Faults. Each changes a good answer or returns another one; None if it cannot affect this request.

Fault = Callable[[Asked, Answer, float], Answer | None]


def _changed(**fields: Any) -> Fault:
    def change(_: Asked, answer: Answer, seconds: float) -> Answer:
        for name, value in fields.items():
            setattr(answer, name, value)
            if value is float:
                setattr(answer, name, seconds)
        return answer

    return change


def _with_headers(**headers: str) -> Fault:
    def change(_: Asked, answer: Answer, __: float) -> Answer:
        return replace(answer, headers=answer.headers | headers)

    return change


def _affects(where: str, asked: Asked, answer: Answer) -> bool:
    """Return whether a fault of the pages `where` affects an answer; see `_items`."""
    if where == "any":
        return True
    is_first = "after" not in asked.query
    if where == "further":
        return not is_first
    return is_first and answer.old is not None


def _items(
    change: Callable[[list[Any], Answer, Asked, float], list[Any]],
    where: str = "first",
    **more: Any,
) -> Fault:
    """Change a listing's items in place. where: pages affected: "any"; "first", if the subreddit
    has an old post to pin; or "further".
    """

    def change_listing(asked: Asked, answer: Answer, seconds: float) -> Answer | None:
        listing = answer.listing
        if listing is None or not _affects(where, asked, answer):
            return None
        children = change(
            listing["children"],
            answer,
            asked,
            seconds,
        )
        listing["children"] = children
        listing["dist"] = len(children)
        listing.update(more)
        return answer

    return change_listing


def _pin(children: list[Any], answer: Answer, *_: object) -> list[Any]:
    pinned = answer.old
    if pinned is None:
        return children
    data = pinned["data"]
    data["stickied"] = True
    name = data["name"]
    others = [child for child in children if child["data"]["name"] != name]
    return [pinned, *others]


#: Faults by name, each with a comment on its evidence where it is not plain.
FAULTS: dict[str, Fault] = {
    "too_many": lambda _, __, seconds: refuse(429, **{"retry-after": f"{seconds:g}"}),
    "too_many_bare": lambda *_: refuse(429),
    "too_many_word": lambda *_: refuse(429, **{"retry-after": "soon"}),
    # Reddit: "408, 500, 502, 503, 504, 520, 522 and connection errors are tried 3 times".
    **{
        f"server_error_{each}": lambda *_, each=each: html(each)
        for each in (500, 502, 503, 504, 520)
    },
    "html": lambda *_: html(200),  # Reddit: "HTML with status 200 gives BadJSON"
    "html_400": lambda *_: html(400),
    # from a proxy; in JSON, the status means a private subreddit
    "html_403": lambda *_: html(403),
    # Reddit: "302 without Location (KeyError)"
    "redirect_nowhere": lambda *_: Answer(302, {}),
    # the token becomes invalid, too
    "token_expired": lambda *_: refuse(401, **INVALID_TOKEN),
    "slow": _changed(delay=float),
    "slow_body": _changed(pause=float),
    "cut": _changed(cut="before"),
    "cut_body": _changed(cut="within"),
    "remaining_nan": _with_headers(
        **{"x-ratelimit-remaining": "nan", "x-ratelimit-reset": "-5"}
    ),
    # Reddit: "loses posts silently after a quiet spell, or when its anchor post is deleted".
    "empty_listing": _items(lambda *_: [], "any", after=None),
    "dead_anchor": _items(lambda *_: [], "further", after=None),
    "no_data": lambda _, answer, __: (
        Answer(said={"kind": "Listing"}) if answer.listing else None
    ),
    "truncated_json": lambda _, answer, __: Answer(said=answer.first_half()),
    # Reddit: "/new includes pinned posts".
    "sticky_head": _items(_pin),
    # Seen in replayed recordings: a listing of some seconds ago.
    "stale": _items(
        lambda items, _, asked, s: [
            each for each in items if each["data"]["created_utc"] <= asked.at - s
        ]
    ),
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
        if self.where is None:
            return asked.path != TOKEN_PATH
        return bool(re.search(self.where, asked.target))


class Faults:
    """The schedule of faults, in the order they were added.

    `seconds`: the fault's delay, or the one it asks for.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._rules: list[Rule] = []

    def next(
        self, name: str, times: int = 1, where: str | None = None, seconds: float = 1.0
    ) -> None:
        """Inject the fault into the next `times` requests that match `where` and that the fault
        can affect.
        """
        rule = Rule(
            names=[name],
            where=where,
            seconds=seconds,
            times=times,
        )
        self._rules = [*self._rules, rule]

    def always(self, name: str, where: str | None = None, seconds: float = 1.0) -> None:
        self.next(
            name,
            times=sys.maxsize,
            where=where,
            seconds=seconds,
        )

    def random(self, rate: float, among: Collection[str], seconds: float = 1.0) -> None:
        """Inject one of these faults into each request with probability `rate`."""
        rule = Rule(
            names=list(among),
            where=None,
            seconds=seconds,
            rate=rate,
        )
        self._rules = [*self._rules, rule]

    def clear(self) -> None:
        self._rules = []

    def happen(self, asked: Asked, answer: Answer) -> tuple[str, Answer]:
        """Choose a fault for a request. Return its name ("" for none) and the resulting answer."""
        for rule in self._rules:
            if not rule.times or not rule.matches(asked):
                continue
            if rule.rate != 1 and self._random.random() >= rule.rate:
                continue
            count = len(rule.names)
            names = self._random.sample(rule.names, count)
            for name in names:
                inject = FAULTS[name]
                faulty_answer = inject(
                    asked,
                    answer,
                    rule.seconds,
                )
                if faulty_answer:
                    rule.times -= 1
                    return name, faulty_answer
        return "", answer


# The server.


class Ledger:
    """Published posts, requests and answers.

    Changes while the server runs: copy with list() before iterating.
    """

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
    """A rate limit of `requests` per window of `seconds`.

    Windows begin at multiples of `seconds`, as Reddit's do.
    """

    def __init__(self, seconds: float, requests: int) -> None:
        self._seconds = seconds
        self._requests = requests
        self._window = 0.0
        self._used = 0

    def take(self, now: float) -> bool:
        """Spend one request; return False if none is left."""
        window = now // self._seconds
        if window > self._window:
            self._window = window
            self._used = 0
        if self._used >= self._requests:
            return False
        self._used += 1
        return True

    def reset(self, now: float) -> str:
        """Return the seconds until the next window."""
        next_window = self._window + 1
        end = next_window * self._seconds
        seconds = math.ceil(end - now)
        seconds = max(1, seconds)
        return str(seconds)

    def headers(self, now: float) -> dict[str, str]:
        """Return the x-ratelimit headers in Reddit's formats: '3', '997.0', '15'."""
        remaining = float(self._requests - self._used)
        return {
            "x-ratelimit-used": str(self._used),
            "x-ratelimit-remaining": str(remaining),
            "x-ratelimit-reset": self.reset(now),
        }


class Reddit(Loopback):
    """The server of the fake Reddit.

    clock: returns seconds since 1970. client: id and secret of the only known app. window, budget:
    allow `budget` requests per `window` seconds; no limit if `window` is None. seed: for random
    faults. listing_cap: maximum number of items in a listing. port: of the server; 0 for a free
    one.
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
        port: int = 0,
    ) -> None:
        super().__init__(_Answers, port)
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
        #: Whether feeds are served without a login.
        self.has_feeds = False
        self._redirects: dict[str, str] = {}
        self._cap = listing_cap
        self._budget: Budget | None = None
        if window:
            self._budget = Budget(window, budget)
        name_and_secret = ":".join(client)
        credentials = b64encode(name_and_secret.encode())
        self._basic = "Basic " + credentials.decode()
        #: Expiry times of tokens.
        self._tokens: dict[str, float] = {}
        #: Set when the server stops; it also cuts the waits of slow answers short.
        self.ending = Event()
        self._connections: set[socket.socket] = set()
        #: Bugs in this fake. Raised when it stops, so that tests do not take them for Reddit's
        #: errors.
        self._mistakes: list[BaseException] = []

    def __exit__(self, *failure: object) -> None:
        self.ending.set()
        super().__exit__()
        # kept alive: returning clients find the server gone
        for connection in list(self._connections):
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

    # An override.
    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        """Record an exception, unless it only shows that the client has disconnected."""
        error = sys.exception()
        if error and not isinstance(error, OSError):
            self._mistakes.append(error)

    # Changes to the content.

    def add_subreddit(self, name: str, kind: str = "public") -> None:
        """Add a subreddit. Names that are not added are missing."""
        key = name.lower()
        self.subreddits[key] = Subreddit(name, kind)

    def set_kind(self, name: str, kind: str) -> None:
        subreddit = self.subreddits[name.lower()]
        subreddit.kind = kind

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

        created_utc: now by default, in whole seconds as on Reddit. visible_from: the time at which
        the post appears at its position by creation time, like a post that a filter held back.
        crosspost_of: fullname of the original post. options: texts of a poll. more: other fields,
        such as score, stickied or promoted (an advertisement).
        """
        with self.lock:
            published = self.ledger.published
            home = self.subreddits[subreddit.lower()]
            number = FIRST_POST + len(published)
            if created_utc is None:
                second = int(self.clock())
                created_utc = float(second)
            parent: Post | None = None
            if crosspost_of:
                parent = self.posts[crosspost_of]
            fields = _fields(
                home.name,
                number,
                title,
                body,
                url,
                created_utc,
            )
            post = Post(
                data=fields | _poll(options) | more,
                subreddit=home,
                age_key=(created_utc, number),
                visible_from=max(created_utc, visible_from),
                parent=parent,
            )
            fullname = post.fullname
            self.posts[fullname] = post
            insort(
                home.posts,
                post,
                key=lambda post: post.age_key,
            )
            published[fullname] = post
            return fullname

    def edit(self, fullname: str, body: str) -> None:
        second = int(self.clock())
        post = self.posts[fullname]
        post.data |= {
            "selftext": body,
            "edited": float(second),
        }

    def score(self, fullname: str, score: int) -> None:
        post = self.posts[fullname]
        post.data |= {
            "score": score,
            "ups": score,
        }

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
            post = self.posts.pop(fullname)
            post.gone = "author"

    # Answering requests.

    def answer(self, asked: Asked) -> Answer:
        """Return the answer to a request.

        The ledger records the answer first, so clients never see unrecorded ones.
        """
        with self.lock:
            answer, fault = self._answer(asked)
            if fault:
                answer.fullnames = ()
            self.ledger.note(asked, answer, fault)
            return answer

    def _answer(self, asked: Asked) -> tuple[Answer, str]:
        blocked = self.blocked_agents
        if blocked and re.search(blocked, asked.user_agent):
            return html(403), ""
        if asked.path == TOKEN_PATH:
            answer = self._token(asked)
            fault, answer = self.faults.happen(asked, answer)
            return answer, fault
        if asked.path.endswith("/.rss"):
            return self._feed(asked), ""
        authorization = asked.headers.get("authorization", "")
        _, _, token = authorization.partition(" ")
        expiry = self._tokens.get(token, -math.inf)
        if asked.at >= expiry:
            return refuse(401, **INVALID_TOKEN), ""
        budget = self._budget
        if budget and not budget.take(asked.at):
            self.ledger.over_budget += 1
            headers = {"retry-after": budget.reset(asked.at)}
            headers |= budget.headers(asked.at)
            return refuse(429, **headers), ""
        answer = self._api(asked)
        if budget and answer.status not in UNCOUNTED:
            answer.headers |= budget.headers(asked.at)
        fault, answer = self.faults.happen(asked, answer)
        if fault == "token_expired":
            del self._tokens[token]
        return answer, fault

    def _token(self, asked: Asked) -> Answer:
        authorization = asked.headers.get("authorization")
        if asked.method != "POST" or authorization != self._basic:
            return refuse(401)
        token = secrets.token_urlsafe(32)
        self._tokens[token] = asked.at + TOKEN_LIFETIME
        content = {
            "access_token": token,
            "token_type": "bearer",
            "expires_in": TOKEN_LIFETIME,
            "scope": "*",
        }
        return Answer(said=content)

    def _feed(self, asked: Asked) -> Answer:
        """Return a subreddit's feed; without `has_feeds`, refuse it as Reddit mostly does."""
        if not self.has_feeds:
            return refuse(429)
        _, _, name = asked.path.removesuffix("/new/.rss").rpartition("/")
        feed = f"""<feed xmlns="http://www.w3.org/2005/Atom"><title>r/{name}</title>
            <id>/r/{name}</id><entry><id>t3_1</id><title>a post</title></entry></feed>"""
        return Answer(said=feed.encode())

    def _api(self, asked: Asked) -> Answer:
        path = asked.path.strip("/")
        parts = [unquote(part) for part in path.split("/")]
        match parts:
            case ["r", joined_names, ("new" | "hot" | "top" | "rising") as order]:
                names = joined_names.split("+")
                return self._listing(asked, names, order)
            case ["api", "info"]:
                posts = self._named_posts(asked)
                return _posts_answer(posts, None, asked)
        return refuse(404)

    def _named_posts(self, asked: Asked) -> list[Post]:
        """Return the readable ones of the posts that a request names."""
        names = asked.query.get("id", "").split(",")
        posts: list[Post] = []
        for name in names[:MOST]:
            post = self.posts.get(name)
            if post is None or post.visible_from > asked.at:
                continue
            if post.subreddit.kind not in UNREADABLE:
                posts.append(post)
        return posts

    def _listing(self, asked: Asked, names: Sequence[str], order: str) -> Answer:
        """Return a page. It is empty if the anchor `after` is not in the listing.

        Reddit: "banned → 404; private, gated, quarantined → 403 (the reason is …); missing →
        redirect to search".
        """
        first_name = names[0]
        target = self._redirects.get(first_name.lower())
        if len(names) == 1 and target:
            path = asked.path.replace(first_name, target)
            return _redirect(f"{self.url}{path}")
        readable: dict[str, Subreddit] = {}
        for name in names:
            key = name.lower()
            subreddit = self.subreddits.get(key)
            if subreddit and subreddit.kind not in UNREADABLE:
                readable[key] = subreddit
        if not readable:
            return self._unreadable(first_name)
        subreddits = list(readable.values())
        posts, pinned = self._entries(subreddits, order, asked.at)
        limit = int(asked.query.get("limit", USUAL))
        limit = min(limit, MOST)
        after = asked.query.get("after")
        start = 0
        if after is not None:
            start = _place_after(posts, after)
        end = start + limit
        if not after:
            # recorded: 102 items for a limit of 100, two of them pinned
            end += pinned
        anchor = None
        if end < len(posts):
            last_post = posts[end - 1]
            anchor = last_post.fullname
        page = posts[start:end]
        answer = _posts_answer(page, anchor, asked)
        if order == "new":
            answer.old = _oldest(subreddits[0], asked.at)
        return answer

    def _unreadable(self, name: str) -> Answer:
        """Return the answer for a subreddit that is missing or cannot be read."""
        subreddit = self.subreddits.get(name.lower())
        if subreddit is None:
            return _redirect(f"{self.url}/subreddits/search?q={name}")
        status = UNREADABLE[subreddit.kind]
        answer = refuse(status)
        answer.said["reason"] = subreddit.kind
        return answer

    def _entries(
        self, subreddits: Sequence[Subreddit], order: str, now: float
    ) -> tuple[list[Post], int]:
        """Return the posts of a listing in order, and the number of those pinned to its top."""
        newest = heapq.merge(
            *(reversed(subreddit.posts) for subreddit in subreddits),
            key=lambda post: post.age_key,
            reverse=True,
        )
        # Reddit precomputes a thousand entries, and does not refill them when posts disappear.
        visible = (post for post in newest if post.visible_from <= now)
        entries = islice(visible, self._cap)
        posts = [post for post in entries if not post.gone]
        if order == "top":
            posts.sort(
                key=lambda post: post.data["score"],
                reverse=True,
            )
        # Reddit pins posts only in the listing of a single subreddit: the recorded r/popular has
        # no pinned item.
        pins = []
        if order == "hot" and len(subreddits) == 1:
            pins = [post for post in posts if post.data["stickied"]]
        others = [post for post in posts if post not in pins]
        return pins + others, len(pins)


def _redirect(location: str) -> Answer:
    return Answer(302, {}, {"location": location})


def _place_after(posts: Sequence[Post], anchor: str) -> int:
    """Return the place after the post of this fullname; beyond the end if there is none."""
    for place, post in enumerate(posts):
        if post.fullname == anchor:
            return place + 1
    return len(posts)


def _oldest(subreddit: Subreddit, now: float) -> dict[str, Any] | None:
    """Return the oldest visible post of a subreddit, in Reddit's format."""
    for post in subreddit.posts:
        if post.shown(now):
            return post_thing(post)
    return None


def _posts_answer(posts: Sequence[Post], after: str | None, asked: Asked) -> Answer:
    children = [post_thing(post) for post in posts]
    is_raw = asked.query.get("raw_json") == "1"
    if not is_raw:
        children = [escaped(child) for child in children]
    data = {
        "modhash": None,
        "after": after,
        "before": None,
        "dist": len(children),
        "children": children,
    }
    return Answer(
        said={"kind": "Listing", "data": data},
        fullnames=[post.fullname for post in posts],
    )


def escaped(thing: dict[str, Any]) -> dict[str, Any]:
    """Escape texts as Reddit does, unless raw ones are requested."""
    data: dict[str, Any] = {}
    for name, value in thing["data"].items():
        data[name] = value
        if isinstance(value, str):
            data[name] = escape(value, quote=False)
    return thing | {"data": data}


def post_thing(post: Post) -> dict[str, Any]:
    """Return a post in Reddit's format."""
    data = dict(post.data)
    parent = post.parent
    if parent:
        parent_thing = post_thing(parent)
        data["crosspost_parent"] = parent.fullname
        data["crosspost_parent_list"] = [parent_thing["data"]]
    if post.gone == "author":
        data["removed_by_category"] = "deleted"
        data["selftext"] = "[deleted]"
        data["author"] = "[deleted]"
    elif post.gone == "moderator":
        data["removed_by_category"] = "moderator"
        data["selftext"] = "[removed]"
    return {"kind": "t3", "data": data}


def _fields(
    subreddit: str,
    number: int,
    title: str,
    body: str,
    url: str | None,
    created_utc: float,
) -> dict[str, Any]:
    """Return those fields of the answer recorded in 2026 that Feedmill may read."""
    name = str(number)
    words = re.sub(r"\W+", "_", title.lower())
    slug = words.strip("_")[:50]
    if not slug:
        slug = "_"
    permalink = f"/r/{subreddit}/comments/{name}/{slug}/"
    is_self = url is None
    if not url:
        url = f"https://www.reddit.com{permalink}"
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
        "url": url,
        "permalink": permalink,
        "is_self": is_self,
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
    if not options:
        return {}
    choices: list[dict[str, str]] = []
    for place, text in enumerate(options):
        choice = {
            "id": str(place),
            "text": text,
        }
        choices.append(choice)
    return {"poll_data": {"options": choices}}


class _Answers(Handler):
    server: Reddit
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def respond(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        headers: dict[str, str] = {}
        for name, value in self.headers.items():
            key = name.lower()
            headers[key] = value
        asked = Asked(
            method=self.command,
            target=self.path,
            headers=headers,
            body=body.decode(),
            at=self.server.clock(),
        )
        answer = self.server.answer(asked)
        try:
            self._send(answer)
        except OSError:  # the client disconnected
            with self.server.lock:
                self.server.ledger.served.subtract(answer.fullnames)
            raise

    def date_time_string(self, timestamp: float | None = None) -> str:
        if timestamp is None:
            timestamp = self.server.clock()
        else:
            timestamp = int(timestamp)
        return super().date_time_string(timestamp)

    def _send(self, answer: Answer) -> None:
        self.server.ending.wait(answer.delay)
        if answer.cut == "before":
            self.close_connection = True
            return
        body = answer.encoded()
        kind = "application/json"
        if isinstance(answer.said, bytes) and answer.said.startswith(b"<"):
            kind = "text/html"
        headers = {"Content-Type": f"{kind}; charset=UTF-8"}
        headers |= answer.headers
        encodings = self.headers.get("Accept-Encoding", "")
        if "gzip" in encodings:
            body = gzip.compress(body, 1)
            headers["Content-Encoding"] = "gzip"
        # As recorded. Without this header, a client could send its next request on a connection
        # that is being closed.
        headers["Connection"] = "keep-alive"
        if self.close_connection:
            headers["Connection"] = "close"
        length = len(body)
        self.send(answer.status, headers, length)
        if answer.cut:
            self.close_connection = True
        first_bytes = length
        if answer.cut or answer.pause:
            first_bytes //= 2
        self.wfile.write(body[:first_bytes])
        if answer.cut != "within":
            self.server.ending.wait(answer.pause)
            self.wfile.write(body[first_bytes:])
