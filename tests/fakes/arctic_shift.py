"""A fake Arctic Shift on loopback: the archive's search and look-up of the posts of a fake Reddit.

    with Reddit(clock=clock) as reddit, ArcticShift(reddit) as archive:
        reddit.publish("python", title="A title")
        requests.get(f"{archive.url}/api/posts/search?subreddit=python&sort=asc&after=0")

It archives each post some time after its creation and reads it again after 36 hours: before, the score is 1, and later
removals are unknown. Texts are escaped. Faults are those of the fake Reddit that fit, and `overload`, status 422.
Sources: the archive's documentation (api/README.md) and reports in its issues.
"""

import math
import random
from bisect import bisect_left
from typing import Any

from tests.fakes.reddit import Answer, Asked, Budget, Post, Reddit, escaped, post_thing

#: Seconds after which the archive reads a post again.
SECOND_READ_S = 36 * 3600.0
#: Posts of one search: maximum, default, and of the limit "auto".
MOST, USUAL, AUTO = 100, 25, 1000
#: Ids of one look-up.
MOST_IDS = 500


class ArcticShift(Reddit):
    """The server of the fake archive. It shares the posts, the clock and the faults' names of a fake Reddit.

    lag: seconds after which posts are archived. late, latest: share of posts that are archived later, and up to how
    many seconds. inclusive: whether bounds include posts of their second. overload: share of searches answered with
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
    ) -> None:
        super().__init__(clock=reddit.clock, window=None, seed=seed)
        self._reddit = reddit
        self.posts, self.subreddits = reddit.posts, reddit.subreddits
        self.lag = lag
        self._late, self._latest = late, latest
        self._inclusive = inclusive
        self.overload = overload
        self._limit = Budget(window, budget) if window else None
        self._random = random.Random(seed)
        #: Fullname -> seconds after which a post is archived; None for `lag`.
        self._delays: dict[str, float | None] = {}
        #: Posts that the archive never has.
        self.missing: set[str] = set()

    def _answer(self, asked: Asked) -> tuple[Answer, str]:
        headers = {}
        if self._limit:
            allowed = self._limit.take(asked.at)
            reset = str(int(asked.at) + int(self._limit.reset(asked.at)))
            headers = {"X-RateLimit-Remaining": self._limit.headers(asked.at)["x-ratelimit-remaining"][:-2]}
            headers["X-RateLimit-Reset"] = reset
            if not allowed:
                self.ledger.over_budget += 1
                return Answer(429, {"data": None, "error": "Too many requests"}, headers), ""
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
            named = [self.posts.get(f"t3_{name.removeprefix('t3_')}") for name in ids]
            return self._records([post for post in named if post and self._archived(post, asked.at)], asked)
        if asked.path != "/api/posts/search":
            return _refused(404, "Not found")
        if self._random.random() < self.overload:
            return _refused(422, "Timeout. Maybe slow down a bit")
        limit = query.get("limit", str(USUAL))
        if limit != "auto" and not (limit.isdigit() and 1 <= int(limit) <= MOST):
            return _refused(400, "'limit' must be between 1 and 100 or auto")
        subreddit = self.subreddits.get(query.get("subreddit", "").lower())
        after, before = float(query.get("after", -math.inf)), float(query.get("before", math.inf))
        posts = subreddit.posts if subreddit else []
        # The posts are in the order of creation.
        first, end = (
            bisect_left(posts, (bound, edge), key=lambda post: post.age_key)
            for bound, edge in ((after, -1), (before, math.inf))
        )
        found = [
            post
            for post in posts[first:end]
            if self._archived(post, asked.at)
            and (after < post.created_utc < before or (self._inclusive and post.created_utc in (after, before)))
        ]
        found.sort(key=lambda post: post.created_utc, reverse=query.get("sort", "desc") == "desc")
        return self._records(found[: AUTO if limit == "auto" else int(limit)], asked)

    def _archived(self, post: Post, now: float) -> bool:
        if post.fullname not in self._delays:
            late = self._random.random() < self._late
            self._delays[post.fullname] = self._random.uniform(0, self._latest) if late else None
        delay = self._delays[post.fullname]
        delay = self.lag if delay is None else delay
        return post.fullname not in self.missing and post.created_utc + delay <= now

    def _records(self, posts: list[Post], asked: Asked) -> Answer:
        answer = Answer(said={"data": [_record(post, asked) for post in posts]})
        answer.fullnames = [post.fullname for post in posts]
        return answer


def _record(post: Post, asked: Asked) -> dict[str, Any]:
    """Return a post as the archive read it: as it was first, with what changed if it was read again."""
    gone, post.gone = post.gone, ""
    try:
        data: dict[str, Any] = escaped(post_thing(post))["data"]
    finally:
        post.gone = gone
    del data["name"]  # the archive's records have only `id`
    data["retrieved_on"] = int(post.created_utc)
    if asked.at - post.created_utc < SECOND_READ_S:
        return data | {"score": 1}
    meta: dict[str, Any] = {"retrieved_2nd_on": int(post.created_utc + SECOND_READ_S)}
    if gone:
        meta |= {"was_deleted_later": True, "removal_type": "deleted" if gone == "author" else "removed"}
    return data | {"_meta": meta}


def _refused(status: int, error: str) -> Answer:
    return Answer(status, {"data": None, "error": error})
