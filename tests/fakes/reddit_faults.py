"""Named faults of Reddit or the network, and the choice of requests that they affect.

    reddit.faults.next("too_many", seconds=5)                      # the next answer of the API
    reddit.faults.next("cut_body", times=3, where=r"/new")         # three requests whose path and query match
    reddit.faults.always("html", where=r"/api/v1/access_token")    # the token endpoint, exempt without `where`
    reddit.faults.random(0.1, among=["server_error_503", "slow"])
    reddit.faults.clear()

`FAULTS` lists all faults with the evidence for each. Faults affect only requests with a valid token and within the rate
limit; all others get their usual error.
"""

import json
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import cached_property
from http import HTTPStatus
from random import Random
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qs

TOKEN_PATH = "/api/v1/access_token"
JSON, HTML = "application/json; charset=UTF-8", "text/html; charset=UTF-8"


@dataclass(frozen=True)
class Asked:
    """A request to the loopback Reddit."""

    method: str
    #: The path and query as sent.
    target: str
    headers: dict[str, str]
    body: str
    #: The server's address.
    url: str
    #: Seconds since 1970.
    at: float

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @cached_property
    def query(self) -> dict[str, str]:
        return _form(self.target.partition("?")[2])

    @property
    def form(self) -> dict[str, str]:
        return _form(self.body)


def _form(text: str) -> dict[str, str]:
    return {name: values[-1] for name, values in parse_qs(text).items()}


@dataclass
class Answer:
    """The answer to a request. said: the content, sent as JSON unless `body` is set."""

    status: int = 200
    said: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    type: str = JSON
    #: Posts that the answer contains.
    fullnames: Sequence[str] = ()
    #: A post that could be pinned to the top of this listing.
    pinnable: dict[str, Any] | None = None
    #: Delays in seconds: before the answer, and in the middle of its body.
    delay: float = 0.0
    pause: float = 0.0
    #: Position at which the connection is cut.
    cut: Literal["", "before", "within"] = ""
    #: True if this answer makes the request's token invalid.
    revokes: bool = False

    def encoded(self) -> bytes:
        return json.dumps(self.said).encode() if self.body is None else self.body

    @property
    def is_listing(self) -> bool:
        return self.status == 200 and isinstance(self.said, dict) and self.said.get("kind") == "Listing"


class Fault(NamedTuple):
    """A kind of fault.

    apply: turns a good answer into the faulty one; its last argument is the fault's seconds. applies: returns whether
    the fault can affect a request with this answer.
    """

    name: str
    does: str
    #: Evidence that the fault occurs: the section on PRAW in FACTS.md, a recorded answer, or praw's or prawcore's code.
    source: str
    apply: Callable[[Asked, Answer, float], Answer]
    applies: Callable[[Asked, Answer], bool] = lambda _asked, _answer: True


#: Items of a listing that ends early.
EARLY_ITEMS = 20
#: Default duration of a fault in seconds.
SECONDS = 1.0


def refuse(status: int, **headers: str) -> Answer:
    """Return an error in Reddit's format, as in the recorded 401, 403 and 404."""
    phrase = {401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 429: "Too Many Requests"}[status]
    return Answer(status, {"message": phrase, "error": status}, headers)


def _html(status: int) -> Answer:
    """Return an HTML error such as proxies send, as in the recorded 400."""
    title = f"{status} {HTTPStatus(status).phrase if status < 520 else 'Unknown'}"
    return Answer(status, body=f"<html><body><h1>{title}</h1>\n</body></html>\n".encode(), type=HTML)


def blocked() -> Answer:
    """Return the page for user agents that Reddit blocks."""
    page = b"<html><body>You've been blocked by network security.</body></html>"
    return Answer(403, body=page, type=HTML)


#: The header of the recorded 401.
INVALID_TOKEN = {"www-authenticate": 'Bearer realm="reddit", error="invalid_token"'}


def _with_headers(answer: Answer, **headers: str | None) -> Answer:
    """Set x-ratelimit-<name> headers, or remove those given as None. Missing ones get recorded values."""
    recorded = {"used": "3", "remaining": "997.0", "reset": "15"}
    for name, value in (recorded | headers).items():
        if name in headers:
            answer.headers.pop(f"x-ratelimit-{name}", None)
        if value is not None:
            answer.headers.setdefault(f"x-ratelimit-{name}", value)
    return answer


def _empty(answer: Answer) -> Answer:
    answer.said = {"kind": "Listing", "data": answer.said["data"] | {"after": None, "dist": 0, "children": []}}
    return answer


def _sticky_head(answer: Answer) -> Answer:
    assert answer.pinnable is not None
    pinned = answer.pinnable
    pinned["data"]["stickied"] = True
    data = answer.said["data"]
    others = [thing for thing in data["children"] if thing["data"]["name"] != pinned["data"]["name"]]
    data |= {"children": [pinned, *others], "dist": 1 + len(others)}
    return answer


def _stale(asked: Asked, answer: Answer, seconds: float) -> Answer:
    data = answer.said["data"]
    old = [thing for thing in data["children"] if thing["data"]["created_utc"] <= asked.at - seconds]
    data |= {"children": old, "dist": len(old)}
    return answer


def _ends_early(answer: Answer) -> Answer:
    data = answer.said["data"]
    data |= {"after": None, "children": data["children"][:EARLY_ITEMS]}
    data["dist"] = len(data["children"])
    return answer


def _old_last(answer: Answer) -> Answer:
    assert answer.pinnable is not None
    data = answer.said["data"]
    data |= {"children": [*data["children"], answer.pinnable], "dist": data["dist"] + 1}
    return answer


def _set(answer: Answer, **fields: Any) -> Answer:
    for name, value in fields.items():
        setattr(answer, name, value)
    return answer


def _truncated(answer: Answer) -> Answer:
    whole = answer.encoded()
    return _set(answer, body=whole[: len(whole) // 2])


def _listing(_asked: Asked, answer: Answer) -> bool:
    return answer.is_listing


def _further_page(asked: Asked, answer: Answer) -> bool:
    return answer.is_listing and "after" in asked.query


def _first_page(asked: Asked, answer: Answer) -> bool:
    return answer.pinnable is not None and "after" not in asked.query


def _full_page(_asked: Asked, answer: Answer) -> bool:
    return answer.pinnable is not None and answer.said["data"]["after"] is not None


RETRIED = 'FACTS.md: "408, 500, 502, 503, 504, 520, 522 and connection errors are tried 3 times"'
NOT_RETRIED = 'FACTS.md: "429 is never retried by prawcore"'
VALUE_ERROR = 'FACTS.md: "a non-numeric Retry-After or a fractional x-ratelimit-reset (ValueError)"'
LIMITER = "prawcore: rate_limit.RateLimiter.update"
REPLAYED = "seen: in replayed recordings of Reddit's listings"
TIMEOUT = 'FACTS.md: "praw.Reddit(timeout=…) has no effect"'

FAULTS = {
    fault.name: fault
    for fault in (
        Fault("too_many", "429 with Retry-After in seconds", NOT_RETRIED,
              lambda _, __, seconds: refuse(429, **{"retry-after": f"{seconds:g}"})),
        Fault("too_many_bare", "429 without Retry-After", NOT_RETRIED, lambda *_: refuse(429)),
        Fault("too_many_word", "429 with a Retry-After that is neither number nor date", VALUE_ERROR,
              lambda *_: refuse(429, **{"retry-after": "soon"})),
        Fault("too_many_date", "429 with a date as Retry-After", VALUE_ERROR,
              lambda asked, _, seconds: refuse(429, **{"retry-after": formatdate(asked.at + seconds, usegmt=True)})),
        *(Fault(f"server_error_{status}", f"{status}, in HTML", RETRIED, lambda *_, status=status: _html(status))
          for status in (500, 502, 503, 504, 520, 522)),
        Fault("html", "HTML with status 200", 'FACTS.md: "HTML with status 200 gives BadJSON"', lambda *_: _html(200)),
        Fault("html_400", "400 in HTML", "recorded: TestReddit.test_bad_request_without_json_text_html_response",
              lambda *_: _html(400)),
        Fault("html_403", "403 in HTML, as from a proxy", "recorded: the 400 in HTML. In JSON, the status means "
              "a private subreddit", lambda *_: _html(403)),
        Fault("forbidden", "403 without a reason", "recorded: TestSubredditQuarantine.test_opt_in",
              lambda *_: refuse(403)),
        Fault("not_found", "404 without a reason", 'recorded: TestSubreddit.test_sticky__not_set; FACTS.md: '
              '"missing → redirect to search, or 404"', lambda *_: refuse(404)),
        Fault("redirect_search", "302 to the search for a subreddit", 'FACTS.md: "missing → redirect to search"',
              lambda asked, *_: Answer(302, {}, {"location": f"{asked.url}/subreddits/search?q=x"})),
        Fault("redirect_nowhere", "302 without Location", 'FACTS.md: "302 without Location (KeyError)"',
              lambda *_: Answer(302, {})),
        Fault("token_expired", "401, and the token becomes invalid; a new one works",
              "recorded: TestAuthImplicit.test_implicit__with_invalid_token",
              lambda *_: _set(refuse(401, **INVALID_TOKEN), revokes=True)),
        Fault("unauthorized", "401 for every token", "recorded: TestAuthImplicit.test_implicit__with_invalid_token",
              lambda *_: refuse(401, **INVALID_TOKEN)),
        Fault("unauthorized_bare", "401 without www-authenticate", 'FACTS.md: "persistent 401 (KeyError)"',
              lambda *_: refuse(401)),
        Fault("slow", "the answer is delayed", TIMEOUT, lambda _, answer, seconds: _set(answer, delay=seconds)),
        Fault("slow_body", "the answer pauses in the middle of its body", TIMEOUT,
              lambda _, answer, seconds: _set(answer, pause=seconds)),
        Fault("cut", "the connection is closed before the answer", RETRIED,
              lambda _, answer, __: _set(answer, cut="before")),
        Fault("cut_body", "the connection is closed within the body, before Content-Length bytes", RETRIED,
              lambda _, answer, __: _set(answer, cut="within")),
        Fault("reset_fractional", 'x-ratelimit-reset is "15.5"', VALUE_ERROR,
              lambda _, answer, __: _with_headers(answer, reset="15.5")),
        Fault("reset_negative", 'x-ratelimit-reset is "-5"', LIMITER,
              lambda _, answer, __: _with_headers(answer, reset="-5")),
        Fault("remaining_nan", 'x-ratelimit-remaining is "nan"', LIMITER,
              lambda _, answer, __: _with_headers(answer, remaining="nan")),
        Fault("used_missing", "x-ratelimit-used is missing; its two companions are present", LIMITER,
              lambda _, answer, __: _with_headers(answer, used=None)),
        Fault("empty_listing", "an empty listing without a next page",
              'FACTS.md: "loses posts silently … after a quiet spell"', lambda _, answer, __: _empty(answer), _listing),
        Fault("dead_anchor", "an empty page after the anchor, as if the anchor had been deleted",
              'FACTS.md: "when its anchor post is deleted"', lambda _, answer, __: _empty(answer), _further_page),
        Fault("no_data", 'a listing without "data"', "praw: ListingGenerator._extract_sublist (ValueError)",
              lambda _, answer, __: _set(answer, said={"kind": "Listing"}), _listing),
        Fault("truncated_json", "half of the JSON, with a matching Content-Length",
              'FACTS.md: "HTML with status 200 gives BadJSON", as does any other invalid JSON',
              lambda _, answer, __: _truncated(answer)),
        Fault("sticky_head", "an old post is pinned to the top of /new",
              'FACTS.md: "includes pinned posts: ask for more and drop `stickied`"',
              lambda _, answer, __: _sticky_head(answer), _first_page),
        Fault("stale", "the listing as it was some seconds ago", REPLAYED,
              _stale, _first_page),
        Fault("ends_early", "the listing ends after 20 items", REPLAYED,
              lambda _, answer, __: _ends_early(answer), _first_page),
        Fault("old_last", "an old post that is not pinned comes last on a page", REPLAYED,
              lambda _, answer, __: _old_last(answer), _full_page),
    )
}  # fmt: skip


@dataclass
class _Rule:
    names: Sequence[str]
    where: re.Pattern[str] | None
    seconds: float
    #: Number of further requests to affect; None for all.
    times: int | None = None
    #: Probability of affecting a request.
    rate: float = 1.0

    def for_(self, asked: Asked, answer: Answer) -> list[str]:
        """Return the names of the faults that can affect this request."""
        if self.times == 0 or not self._matches(asked):
            return []
        return [name for name in self.names if FAULTS[name].applies(asked, answer)]

    def _matches(self, asked: Asked) -> bool:
        if self.where is None:
            return asked.path != TOKEN_PATH
        return bool(self.where.search(asked.target))


class Faults:
    """The schedule of faults. Scripted faults come first, in the order they were added, then random ones.

    seed: for random faults. `seconds`, in all methods: the fault's delay, or the delay that its answer asks for.
    """

    def __init__(self, seed: int, lock: AbstractContextManager[object]) -> None:
        self._random = Random(seed)
        self._lock = lock
        self._scripted: list[_Rule] = []
        self._at_random: list[_Rule] = []

    def next(self, name: str, times: int = 1, where: str | None = None, seconds: float = SECONDS) -> None:
        """Inject the fault into the next `times` requests that match `where` and that the fault can affect."""
        self._add(self._scripted, _Rule([name], _pattern(where), seconds, times))

    def always(self, name: str, where: str | None = None, seconds: float = SECONDS) -> None:
        self._add(self._scripted, _Rule([name], _pattern(where), seconds))

    def random(
        self, rate: float, among: Collection[str] = tuple(FAULTS), where: str | None = None, seconds: float = SECONDS
    ) -> None:
        """Inject one of these faults into each request with probability `rate`."""
        self._add(self._at_random, _Rule(list(among), _pattern(where), seconds, rate=rate))

    def clear(self) -> None:
        with self._lock:
            self._scripted.clear()
            self._at_random.clear()

    def _add(self, rules: list[_Rule], rule: _Rule) -> None:
        if unknown := [name for name in rule.names if name not in FAULTS]:
            raise ValueError(f"unknown fault {unknown[0]!r}; choose from {', '.join(FAULTS)}")
        with self._lock:
            rules.append(rule)

    def happen(self, asked: Asked, answer: Answer) -> tuple[str, Answer]:
        """Choose a fault for a request. Return its name ("" for none) and the resulting answer."""
        with self._lock:
            for rule in [*self._scripted, *self._at_random]:
                names = rule.for_(asked, answer)
                if names and (rule.rate == 1 or self._random.random() < rule.rate):
                    if rule.times is not None:
                        rule.times -= 1
                    name = names[0] if len(names) == 1 else self._random.choice(names)
                    return name, FAULTS[name].apply(asked, answer, rule.seconds)
        return "", answer


def _pattern(where: str | None) -> re.Pattern[str] | None:
    return None if where is None else re.compile(where)
