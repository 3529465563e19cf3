"""A daemon's environment: a real Redis, real PRAW and the loopback Reddit; only time is
simulated.
"""

from typing import Any

import pytest

from feedmill.producers.live.daemon import LiveDaemon
from feedmill.producers.live.source import RequestBudget
from feedmill.producers.live.state import Gaps
from feedmill.producers.push import Pusher
from feedmill.producers.reddit.arctic_shift import ArcticShiftClient
from feedmill.producers.reddit.client import RedditClient
from feedmill.producers.reddit.source import RedditSource
from feedmill.producers.reddit.topics import ReplacedSubreddit, Topics, replaced
from feedmill.shared.broker import connect, make_app
from feedmill.shared.messages import ClassifyOptions, Post, fingerprint
from feedmill.shared.results import Result
from feedmill.shared.settings import Settings
from feedmill.testing.fake_reddit import Reddit as LoopbackReddit
from tests.fakes import constants
from tests.fakes.clock import SimulatedClock
from tests.support import RedisServer, make_classification, queued

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
TOPICS = {
    "food": ("cooking", "baking", "recipes"),
    "sport": ("tennis", "chess", "golf"),
}

#: Limits listings to 200 items instead of 1,000, so that tests that fill them take a fifth of the
#: time.
short_listings = pytest.mark.parametrize(
    "loopback", [200], indirect=True, ids=["short"]
)


class House:
    """A daemon's environment. Each new daemon stands for a restarted process."""

    def __init__(
        self,
        redis: RedisServer,
        clock: SimulatedClock,
        loopback: LoopbackReddit,
        patch: pytest.MonkeyPatch,
    ) -> None:
        credentials = {
            "reddit_client_id": "id",
            "reddit_client_secret": "secret",
            "reddit_user_agent": "linux:test:1 (by /u/nobody)",
        }
        self.settings = Settings.model_validate({"redis_url": redis.url} | credentials)
        self.redis = redis
        self.clock = clock
        self.loopback = loopback
        self.topics = Topics(active=2, topics=TOPICS)
        self._open: list[RedditClient | ArcticShiftClient] = []
        self.patch = patch
        self.read_from(constants.reddit(loopback.url))

    def read_from(self, addresses: dict[str, Any]) -> None:
        """Set the addresses of sources that are created from now on."""
        for name, url in addresses.items():
            self.patch.setattr(name, url)

    def reddit(self) -> RedditClient:
        reddit = RedditClient(
            self.settings, RequestBudget(self.clock, 90), self.topics.topic_of
        )
        self._open.append(reddit)
        return reddit

    @property
    def gaps(self) -> Gaps:
        return Gaps(self.redis.client)

    def source(
        self,
        settings: Settings,
        depth: int = 1000,
        archive: ArcticShiftClient | None = None,
    ) -> RedditSource:
        reddit = RedditClient(
            settings, RequestBudget(self.clock, 90), self.topics.topic_of
        )
        self._open.append(reddit)
        return RedditSource(
            reddit, connect(settings), self.topics, settings, self.clock, depth, archive
        )

    def daemon(
        self,
        depth: int = 1000,
        archive: ArcticShiftClient | None = None,
        **settings: Any,
    ) -> LiveDaemon:
        chosen = self.settings.model_copy(update=settings)
        client = connect(chosen)
        pusher = Pusher(
            make_app(chosen), client, chosen, ClassifyOptions(), wait=self.clock.wait
        )
        return LiveDaemon(
            self.source(chosen, depth, archive), client, pusher, chosen, self.clock
        )

    def run(self, daemon: LiveDaemon, seconds: float) -> None:
        """Run the daemon for this much simulated time.

        In days, a step may be late by 1/200 of the time.
        """
        late = seconds / 200 if seconds > HOUR else 0.0
        until = self.clock.monotonic() + seconds
        while (left := until - self.clock.monotonic()) > 0:
            self.clock.wait(min(max(min(daemon.step(), 300.0), late), left))

    def replaced(self) -> dict[str, ReplacedSubreddit]:
        """Return the subreddits that are not read, by name."""
        return {
            entry.subreddit: entry
            for entries in replaced(self.redis.client).values()
            for entry in entries
        }

    def publish(self, name: str, count: int = 1, **fields: Any) -> list[str]:
        number = len(self.loopback.ledger.published)
        return [
            self.loopback.publish(name, title=f"post {number + each}", **fields)
            for each in range(count)
        ]

    def queued(self) -> list[dict[str, Any]]:
        return queued(self.redis)

    def ids(self) -> list[str]:
        return [post["id"] for post in self.queued()]

    def close(self) -> None:
        for reddit in self._open:
            reddit.close()


def result(post: Post, label: str = "x") -> Result:
    found = make_classification(
        post.id,
        label=label,
        scores={label: 1.0},
        weights="w",
        fingerprint=fingerprint(post, "r"),
    )
    return Result(post, found)
