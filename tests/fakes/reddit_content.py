"""The content of the fake Reddit: subreddits, their posts, and the listings and pages derived from them.

It is independent of HTTP and not thread-safe: tests/fakes/reddit.py serves it under a lock.
"""

import heapq
import math
import re
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
#: Numbers of the first post and subreddit, close to Reddit's in April 2026 and in 2008.
FIRST_POST, FIRST_SUBREDDIT = int("1skbyfv", 36), int("2qizd", 36)
#: Maximum number of a subreddit's pinned posts.
STICKIES = 2
#: Time range of /top in seconds.
PERIODS = {"hour": 3600.0, "day": 86400.0, "week": 7 * 86400.0, "month": 30 * 86400.0, "year": 365 * 86400.0}
#: Maximum age of a post in /rising, in seconds.
RISING = 86400.0

Order = Literal["new", "hot", "top", "rising"]


class Kind(NamedTuple):
    """A kind of subreddit. type: its `subreddit_type`; status, reason: in the error answer if it cannot be read."""

    type: str = "public"
    status: int = 200
    reason: str = ""

    @property
    def readable(self) -> bool:
        return self.status == 200


#: FACTS.md: "banned → 404; private, gated, quarantined → 403 (the reason is in exc.response.json()["reason"])".
KINDS = {
    "public": Kind(),
    "restricted": Kind("restricted"),
    "archived": Kind("archived"),
    "user": Kind("user"),
    "gold_restricted": Kind("gold_restricted"),
    "private": Kind("private", 403, "private"),
    "gold_only": Kind("gold_only", 403, "gold_only"),
    "gated": Kind("public", 403, "gated"),
    "quarantined": Kind("public", 403, "quarantined"),
    "banned": Kind("public", 404, "banned"),
}


class Refused(Exception):  # noqa: N818 - named after what happened
    """A subreddit cannot be read. kind: None if it does not exist. target: the subreddit that requests go to."""

    def __init__(self, name: str, kind: Kind | None, target: str = "") -> None:
        super().__init__(name)
        self.name = name
        self.kind = kind
        self.target = target


@dataclass(slots=True, eq=False)
class Subreddit:
    name: str
    number: int
    kind: str
    created_utc: float
    #: Its posts in the order of listings, including those that are gone: they keep their places in the listing.
    posts: list["Post"] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Post:
    number: int
    subreddit: Subreddit
    title: str
    body: str
    #: URL of a link post; None for a text post.
    url: str | None
    score: int
    stickied: bool
    over_18: bool
    spoiler: bool
    #: Seconds since 1970, like all times here.
    created_utc: float
    #: Time from which listings and /api/info show the post.
    visible_from: float
    #: Time of creation that its place in listings corresponds to, if out of order.
    listed_utc: float | None = None
    #: Fullname of the original post of a crosspost.
    crosspost_of: "Post | None" = None
    captions: Sequence[str] = ()
    options: Sequence[str] = ()
    #: True for an advertisement.
    promoted: bool = False
    edited: float | None = None
    #: The remover; "" while the post is visible.
    gone: Literal["", "deleted", "moderator"] = ""
    fullname: str = field(init=False)

    def __post_init__(self) -> None:
        self.fullname = f"t3_{base36(self.number)}"

    @property
    def id(self) -> str:
        return self.fullname.removeprefix("t3_")

    @property
    def age_key(self) -> tuple[float, int]:
        """Return the sort key of /new: Reddit's whole seconds, then the number."""
        return (self.created_utc if self.listed_utc is None else self.listed_utc), self.number

    @property
    def heat(self) -> float:
        """Return the sort key of /hot by Reddit's published formula: ten times the votes offset 12.5 hours of age."""
        votes = math.copysign(math.log10(max(abs(self.score), 1)), self.score)
        return votes + (self.created_utc - 1134028003) / 45000


class Page(NamedTuple):
    """A page of a listing. after: the fullname after which the next page begins; None on the last page."""

    posts: list[Post]
    after: str | None


class Content:
    """All subreddits and posts. listing_cap: maximum number of items in a listing, over all its pages."""

    def __init__(self, listing_cap: int) -> None:
        self._cap = listing_cap
        #: Subreddits by lower-case name.
        self._subreddits: dict[str, Subreddit] = {}
        #: Posts by fullname, without those that vanished.
        self._posts: dict[str, Post] = {}
        self._published = 0
        #: Subreddit -> the subreddit that its requests are redirected to; in lower case.
        self._redirects: dict[str, str] = {}

    def redirect(self, name: str, target: str) -> None:
        self._redirects[name.lower()] = target

    def add_subreddit(self, name: str, kind: str, now: float) -> None:
        if name.lower() in self._subreddits:
            raise ValueError(f"r/{name} already exists")
        number = FIRST_SUBREDDIT + len(self._subreddits)
        self._subreddits[name.lower()] = Subreddit(name, number, _known(kind), now)

    def set_kind(self, name: str, kind: str) -> None:
        self._subreddits[name.lower()].kind = _known(kind)

    def publish(self, subreddit: str, **fields: Any) -> Post:
        """Add a post. fields: the fields of Post except `number` and `subreddit`."""
        post = Post(FIRST_POST + self._published, self._subreddits[subreddit.lower()], **fields)
        self._published += 1
        self._posts[post.fullname] = post
        insort(post.subreddit.posts, post, key=_age_key)
        return post

    def post(self, fullname: str) -> Post:
        return self._posts[fullname]

    def take_down(self, fullname: str, by: Literal["deleted", "moderator"]) -> None:
        """Remove a post from listings; /api/info still shows that it existed."""
        self._posts[fullname].gone = by

    def approve(self, fullname: str) -> None:
        """Undo a removal. The post appears at its original place."""
        self._posts[fullname].gone = ""

    def vanish(self, fullname: str) -> None:
        """Remove a post from listings and from /api/info."""
        self.take_down(fullname, "deleted")
        del self._posts[fullname]

    def readable(self, names: Sequence[str]) -> list[Subreddit]:
        """Return those of the named subreddits that are readable. Raises Refused for the first name if none is."""
        if len(names) == 1 and (target := self._redirects.get(names[0].lower())):
            raise Refused(names[0], None, target)
        found = {name.lower(): self._subreddits.get(name.lower()) for name in names}
        readable = [subreddit for subreddit in found.values() if subreddit and KINDS[subreddit.kind].readable]
        if not readable:
            first = found[names[0].lower()]
            raise Refused(names[0], KINDS[first.kind] if first else None)
        return readable

    def page(
        self, names: Sequence[str], order: Order, now: float, limit: int, after: str | None = None, period: str = "day"
    ) -> Page:
        """Return the page after the anchor `after`. It is empty if the anchor is not in the listing.

        period: a key of PERIODS, or "all"; only affects /top. Raises Refused.
        """
        posts, pinned = self._listing(self.readable(names), order, now, period)
        start = 0
        if after is None:
            limit += pinned  # the recorded /hot of 2016 has 102 items for a limit of 100, two of them pinned
        else:
            start = next((place for place, post in enumerate(posts, 1) if post.fullname == after), len(posts))
        end = start + limit
        return Page(posts[start:end], posts[end - 1].fullname if end < len(posts) else None)

    def _listing(
        self, subreddits: Sequence[Subreddit], order: Order, now: float, period: str
    ) -> tuple[list[Post], int]:
        """Return the posts of a listing in order, and the number of those pinned to its top."""
        newest = [reversed(subreddit.posts) for subreddit in subreddits]
        if order == "new":
            merged = heapq.merge(*newest, key=_age_key, reverse=True)
            # Reddit precomputes a thousand entries, and does not refill them when posts disappear.
            entries = islice((post for post in merged if post.visible_from <= now), self._cap)
            return [post for post in entries if not post.gone], 0
        shown = [post for posts in newest for post in posts if post.visible_from <= now and not post.gone]
        if order == "top":
            since = now - PERIODS.get(period, math.inf)
            recent = (post for post in shown if post.created_utc >= since)
            return heapq.nlargest(self._cap, recent, key=lambda post: (post.score, post.age_key)), 0
        if order == "rising":
            recent = (post for post in shown if post.created_utc > now - RISING)
            return heapq.nlargest(self._cap, recent, key=lambda post: post.score / (60 + now - post.created_utc)), 0
        # Reddit pins posts only in the listing of a single subreddit: the recorded r/popular has no pinned item.
        pinned = [post for post in shown if post.stickied][:STICKIES] if len(subreddits) == 1 else []
        others = (post for post in shown if post not in pinned)
        return pinned + heapq.nlargest(self._cap, others, key=lambda post: post.heat), len(pinned)

    def pinnable(self, names: Sequence[str], now: float) -> Post | None:
        """Return an old post of the first subreddit: the oldest pinned one, or the oldest."""
        shown = [post for post in self.readable(names)[0].posts if post.visible_from <= now and not post.gone]
        return next((post for post in shown if post.stickied), shown[0] if shown else None)

    def info(self, fullnames: Iterable[str], now: float) -> Iterator[Post]:
        """Yield the posts that exist and are visible, in the order of `fullnames`."""
        for fullname in fullnames:
            post = self._posts.get(fullname)
            if post and post.visible_from <= now and KINDS[post.subreddit.kind].readable:
                yield post

    def about(self, names: Iterable[str]) -> Iterator[Subreddit]:
        """Yield the named subreddits that exist and are not banned. Like Reddit, ignore the order of `names`."""
        asked = {name.lower() for name in names}
        for name, subreddit in self._subreddits.items():
            if name in asked and subreddit.kind != "banned":
                yield subreddit


def _age_key(post: Post) -> tuple[float, int]:
    return post.age_key


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"unknown kind of subreddit {kind!r}; choose from {', '.join(KINDS)}")
    return kind


def base36(number: int) -> str:
    """Encode a number as in Reddit's ids."""
    digits = ""
    while number:
        number, digit = divmod(number, 36)
        digits = DIGITS[digit] + digits
    return digits or "0"


def post_thing(post: Post) -> dict[str, Any]:
    """Return a post in Reddit's format, with those fields of the answer recorded in 2026 that Feedmill may read."""
    said = _fields(post)
    if post.gone:
        said["selftext"] = "[removed]" if post.gone == "moderator" else "[deleted]"
        said["removed_by_category"] = post.gone
    if post.gone == "deleted":
        said["author"] = "[deleted]"
        del said["author_fullname"]
    return {"kind": "t3", "data": said}


def _extras(post: Post) -> dict[str, Any]:
    """Return the fields of crossposts, galleries, polls and advertisements, as in answers of 2026."""
    said: dict[str, Any] = {}
    if parent := post.crosspost_of:
        said |= {"crosspost_parent": parent.fullname, "crosspost_parent_list": [post_thing(parent)["data"]]}
    if post.captions:
        items = [{"media_id": f"m{number}", "id": number, "caption": text} for number, text in enumerate(post.captions)]
        said |= {"is_gallery": True, "gallery_data": {"items": items}}
    if post.options:
        options = [{"id": str(number), "text": text} for number, text in enumerate(post.options)]
        said["poll_data"] = {"options": options, "total_vote_count": 0, "voting_end_timestamp": 0}
    if post.promoted:
        said["promoted"] = True
    return said


def _fields(post: Post) -> dict[str, Any]:
    name, number = post.subreddit.name, post.number % 4096
    slug = re.sub(r"\W+", "_", post.title.lower()).strip("_")[:50].rstrip("_")
    permalink = f"/r/{name}/comments/{post.id}/{slug or '_'}/"
    url = post.url or f"https://www.reddit.com{permalink}"
    return {
        "id": post.id,
        "name": post.fullname,
        "title": post.title,
        "selftext": post.body,
        "subreddit": name,
        "subreddit_name_prefixed": f"r/{name}",
        "subreddit_id": f"t5_{base36(post.subreddit.number)}",
        "subreddit_type": KINDS[post.subreddit.kind].type,
        "author": f"reader_{number}",
        "author_fullname": f"t2_{base36(number)}",
        "score": post.score,
        "ups": post.score,
        "downs": 0,
        "upvote_ratio": 0.8,
        "num_comments": 0,
        "url": url,
        "permalink": permalink,
        "domain": re.sub(r"^\w+://([^/?#]*).*", r"\1", post.url) if post.url else f"self.{name}",
        "is_self": post.url is None,
        "created_utc": post.created_utc,
        "created": post.created_utc,
        "edited": False if post.edited is None else post.edited,
        "stickied": post.stickied,
        "over_18": post.over_18,
        "spoiler": post.spoiler,
        "quarantine": post.subreddit.kind == "quarantined",
        "locked": False,
        "archived": False,
        "hidden": False,
        "pinned": False,
        "distinguished": None,
        "removed_by_category": None,
        "link_flair_text": None,
        "is_video": False,
        "media": None,
    } | _extras(post)


def subreddit_thing(subreddit: Subreddit) -> dict[str, Any]:
    """Return a subreddit in Reddit's format, as in the recorded look-up by sr_name."""
    number = base36(subreddit.number)
    said = {
        "id": number,
        "name": f"t5_{number}",
        "display_name": subreddit.name,
        "display_name_prefixed": f"r/{subreddit.name}",
        "title": subreddit.name,
        "public_description": "",
        "subreddit_type": KINDS[subreddit.kind].type,
        "quarantine": subreddit.kind == "quarantined",
        "over18": False,
        "subscribers": 1000,
        "created_utc": subreddit.created_utc,
        "created": subreddit.created_utc,
        "url": f"/r/{subreddit.name}/",
        "lang": "en",
    }
    return {"kind": "t5", "data": said}
