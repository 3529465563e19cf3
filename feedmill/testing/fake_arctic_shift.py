"""A fake Arctic Shift on loopback: the archive's search and look-up of the posts of a fake Reddit.

    with Reddit(clock=clock) as reddit, ArcticShift(reddit) as archive:
        reddit.publish("python", title="A title")
        requests.get(f"{archive.url}/api/posts/search?subreddit=python&sort=asc&after=0")

It archives each post some time after its creation and reads it again after 36 hours: before, the
score is 1, and later removals are unknown. Texts are escaped. Faults are those of the fake Reddit
that fit, and `overload`, status 422. Sources: the archive's documentation (api/README.md) and
reports in its issues.
"""

import math
import random
from bisect import bisect_left
from typing import Any

from feedmill.testing.fake_reddit import (
    Answer,
    Asked,
    Budget,
    Post,
    Reddit,
    escaped,
    post_thing,
)

#: Seconds after which the archive reads a post again.
SECOND_READ_S = 36 * 3600.0
#: Posts of one search: maximum, default, and of the limit "auto".
MOST = 100
USUAL = 25
AUTO = 1000
#: Ids of one look-up.
MOST_IDS = 500


class ArcticShift(Reddit):
    """The server of the fake archive.

    It shares the posts, the clock and the faults' names of a fake Reddit.

    lag: seconds after which posts are archived. late, latest: share of posts that are archived
    later, and up to how many seconds. inclusive: whether bounds include posts of their second.
    overload: share of searches answered with
    422. window, budget: as in `Reddit`; the headers' reset is a time.
    """

    def __init__(
        self,
        reddit: Reddit,
        lag: float = 0.0,
        late: float = 0.0,
        latest: float = 0.0,
        inclusive: bool = False,
        overload: float = 0.0,
        window: float | None = None,
        budget: int = 1000,
        seed: int = 0,
        port: int = 0,
    ) -> None:
        super().__init__(
            clock=reddit.clock,
            window=None,
            seed=seed,
            port=port,
        )
        self._reddit = reddit
        self.posts = reddit.posts
        self.subreddits = reddit.subreddits
        self.lag = lag
        self._late = late
        self._latest = latest
        self._inclusive = inclusive
        self.overload = overload
        self._limit: Budget | None = None
        if window:
            self._limit = Budget(window, budget)
        self._random = random.Random(seed)
        #: Fullname -> seconds after which a post is archived; None for `lag`.
        self._delays: dict[str, float | None] = {}
        #: Posts that the archive never has.
        self.missing: set[str] = set()

    def _answer(self, asked: Asked) -> tuple[Answer, str]:
        headers = {}
        limit = self._limit
        if limit:
            allowed = limit.take(asked.at)
            seconds = int(limit.reset(asked.at))
            reset = int(asked.at) + seconds
            reddit_headers = limit.headers(asked.at)
            remaining = reddit_headers["x-ratelimit-remaining"]
            headers = {
                "X-RateLimit-Remaining": remaining.removesuffix(".0"),
                "X-RateLimit-Reset": str(reset),
            }
            if not allowed:
                self.ledger.over_budget += 1
                answer = _refused(429, "Too many requests")
                answer.headers = headers
                return answer, ""
        with self._reddit.lock:
            answer = self._api(asked)
        answer.headers |= headers
        fault, answer = self.faults.happen(asked, answer)
        return answer, fault

    def _api(self, asked: Asked) -> Answer:
        query = asked.query
        if asked.path == "/api/posts/ids":
            ids = query.get("ids", "").split(",")
            if len(ids) > MOST_IDS:
                return _refused(400, "Too many ids")
            archived_posts = []
            for name in ids:
                post_id = name.removeprefix("t3_")
                post = self.posts.get(f"t3_{post_id}")
                if post and self._archived(post, asked.at):
                    archived_posts.append(post)
            return self._records(archived_posts, asked)
        if asked.path != "/api/posts/search":
            return _refused(404, "Not found")
        if self._random.random() < self.overload:
            return _refused(422, "Timeout. Maybe slow down a bit")
        limit = query.get("limit", str(USUAL))
        is_number = limit.isdigit() and 1 <= int(limit) <= MOST
        if limit != "auto" and not is_number:
            return _refused(400, "'limit' must be between 1 and 100 or auto")
        name = query.get("subreddit", "").lower()
        subreddit = self.subreddits.get(name)
        after = float(query.get("after", -math.inf))
        before = float(query.get("before", math.inf))
        posts: list[Post] = []
        if subreddit:
            posts = subreddit.posts
        # The posts are in the order of creation.
        first = bisect_left(
            posts,
            (after, -1),
            key=lambda post: post.age_key,
        )
        end = bisect_left(
            posts,
            (before, math.inf),
            key=lambda post: post.age_key,
        )
        matches = []
        for post in posts[first:end]:
            if not self._archived(post, asked.at):
                continue
            created = post.created_utc
            is_bound = created in (after, before)
            is_within = after < created < before
            if is_within or (self._inclusive and is_bound):
                matches.append(post)
        matches.sort(
            key=lambda post: post.created_utc,
            reverse=query.get("sort", "desc") == "desc",
        )
        most = AUTO
        if is_number:
            most = int(limit)
        return self._records(matches[:most], asked)

    def _archived(self, post: Post, now: float) -> bool:
        name = post.fullname
        if name not in self._delays:
            self._delays[name] = None
            if self._random.random() < self._late:
                self._delays[name] = self._random.uniform(0, self._latest)
        delay = self._delays[name]
        if delay is None:
            delay = self.lag
        if name in self.missing:
            return False
        return post.created_utc + delay <= now

    def _records(self, posts: list[Post], asked: Asked) -> Answer:
        records = [_record(post, asked) for post in posts]
        answer = Answer(said={"data": records})
        answer.fullnames = [post.fullname for post in posts]
        return answer


def _record(post: Post, asked: Asked) -> dict[str, Any]:
    """Return a post as the archive read it: as it was first, with what changed if it was read
    again.
    """
    gone = post.gone
    post.gone = ""
    try:
        thing = escaped(post_thing(post))
        data: dict[str, Any] = thing["data"]
    finally:
        post.gone = gone
    del data["name"]  # the archive's records have only `id`
    data["retrieved_on"] = int(post.created_utc)
    if asked.at - post.created_utc < SECOND_READ_S:
        return data | {"score": 1}
    second_read = post.created_utc + SECOND_READ_S
    meta: dict[str, Any] = {"retrieved_2nd_on": int(second_read)}
    if gone:
        meta["was_deleted_later"] = True
        meta["removal_type"] = "removed"
        if gone == "author":
            meta["removal_type"] = "deleted"
    return data | {"_meta": meta}


def _refused(status: int, error: str) -> Answer:
    content = {
        "data": None,
        "error": error,
    }
    return Answer(status, content)
