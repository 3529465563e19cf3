"""Simulate eight hours of a live source's daemon under faults and kills
(`python -m tests.soak --source bluesky`).

The daemon runs in its own process on a simulated clock, which advances at once when the daemon
waits. The source's loopback server runs in this process, shares the clock, publishes posts as time
advances and fails at random. PRAW, websockets, Redis and the requests are real. In the first hour,
the daemon is killed with SIGKILL at random times, and Redis is killed and restarted. The daemon's
memory may grow until its bounded state is full, and must be constant then.

The last line is JSON: source, hours, published, sent, missing, doubled (posts), gaps, switches (of
servers by the last process), faults,
kills, budget_exceeded (requests), rss_mib (at the end of each hour), growth (of the last hour
relative to hour FILLED). Exits 1 if a post is missing or doubled, there is a gap, memory grew or
the request budget was exceeded. Doubled posts are printed with their time: a kill between sending
and marking can repeat a message.
"""

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from feedmill.producers import jetstream
from feedmill.producers.bluesky import BlueskySource
from feedmill.producers.feeds import state as feed_state
from feedmill.producers.feeds.source import FeedsSource
from feedmill.producers.feeds.subscriptions import Feed
from feedmill.producers.hacker_news import HackerNews
from feedmill.producers.live.daemon import LiveDaemon
from feedmill.producers.live.source import RequestBudget, Source
from feedmill.producers.push import Pusher
from feedmill.producers.reddit import arctic_shift, client
from feedmill.producers.reddit.source import ArchiveSource, RedditSource
from feedmill.producers.reddit.topics import Topics
from feedmill.shared.broker import connect, make_app
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import Settings
from feedmill.testing.fake_arctic_shift import ArcticShift
from feedmill.testing.fake_reddit import Reddit as LoopbackReddit
from tests.fakes import constants
from tests.fakes.clock import SimulatedClock
from tests.fakes.feeds import Feeds
from tests.fakes.hacker_news import HackerNews as LoopbackHackerNews
from tests.fakes.jetstream import Jetstream
from tests.support import Restartable, body_of, redis_servers

#: Posts per hour by source. Of Hacker News' items, half are comments.
POSTS_AN_HOUR = {
    "reddit": 12_000,
    "arctic-shift": 12_000,
    "bluesky": 108_000,
    "hacker-news": 2_000,
    "feeds": 4_000,
}
TOPICS = {f"topic {number}": (f"sub{number:02}",) for number in range(16)}
HOUR_S = 3600.0
#: Kills of the daemon and of Redis, in the first hour.
KILLS, RESTARTS = 10, 3
CONTEXT = multiprocessing.get_context("spawn")
#: Longest step of simulated time between two batches of published posts.
TICK_S = 30.0
#: Simulated seconds per batch of a live source, whose real wait for further events takes no
#: simulated time.
BATCH_S = 5.0
#: Simulated seconds after the last post without another one sent, after which the daemon must have
#: sent all posts.
REST_S = 600.0
#: Hour by which the daemon's bounded state is full, and the allowed relative growth of its memory
#: after that: allocators do not return all memory.
FILLED, MAX_GROWTH = 5, 0.05
#: Share of requests with a fault, and the seconds of delays. Faults of Reddit, and of its archive.
FAULT_RATE, FAULT_SECONDS = 0.02, 0.05
FAULTS = (
    "too_many", "too_many_bare", "too_many_word", "server_error_500", "server_error_502",
    "server_error_503",
    "server_error_504", "server_error_520", "html", "html_403", "redirect_nowhere",
    "token_expired", "cut", "cut_body",
    "remaining_nan", "empty_listing", "dead_anchor", "no_data", "truncated_json", "sticky_head",
    "slow", "slow_body",
)  # fmt: skip
ARCHIVE_FAULTS = (
    "too_many",
    "server_error_502",
    "server_error_503",
    "html",
    "truncated_json",
    "cut",
    "cut_body",
)
#: Number of feeds, and the variable with their server's address.
FEEDS = 24
FEEDS_URL = "SOAK_FEEDS_URL"
#: Share of Bluesky's posts that are deleted, and of events with a fault. Events that the loopback
#: Jetstream keeps.
DELETED, EVENT_FAULT_RATE, KEPT_EVENTS = 0.02, 0.00005, 50_000
#: Seconds by which the second Jetstream's clock is ahead; share of posts before which one of the
#: servers goes down, and for how many posts, of which there are 30 a second.
SERVER_AHEAD_S, OUTAGE_RATE, OUTAGE_POSTS = 3.0, 0.0001, (900, 36_000)


class SharedClock(SimulatedClock):
    """A simulated clock that several processes can read, and that goes on where a killed process
    left it.

    published: time up to which posts have been published.
    """

    def __init__(self, shared: Any, published: Any) -> None:
        super().__init__(start=shared.value)
        self._shared, self._published = shared, published

    def wait(self, seconds: float) -> None:
        super().wait(seconds)
        self._shared.value = self.time()
        while self._published.value < self.time() - TICK_S:
            time.sleep(0.001)


class RedditServer:
    """The loopback Reddit, and an archive of it."""

    def __init__(self, running: ExitStack, clock: Any) -> None:
        self._random = Random(1)
        self._reddit = running.enter_context(
            LoopbackReddit(clock=lambda: clock.value, window=600, budget=1000)
        )
        self._archive = running.enter_context(
            ArcticShift(self._reddit, lag=20.0, overload=0.01, window=60, budget=60)
        )
        self._reddit.faults.random(FAULT_RATE, FAULTS, seconds=FAULT_SECONDS)
        self._archive.faults.random(FAULT_RATE, ARCHIVE_FAULTS, seconds=FAULT_SECONDS)
        for names in TOPICS.values():
            self._reddit.add_subreddit(names[0])
            self._reddit.publish(names[0], title="the first")
        self.settings = {
            "reddit_client_id": "id", "reddit_client_secret": "secret",
            "reddit_user_agent": "linux:hours:1 (by /u/nobody)",
        }  # fmt: skip
        # The daemon's process inherits it.
        os.environ[constants.VARIABLE] = json.dumps(
            constants.reddit(self._reddit.url)
            | constants.arctic_shift(self._archive.url)
        )

    @property
    def ids(self) -> set[str]:
        return set(self._reddit.ledger.published)

    @property
    def faults(self) -> int:
        return self._reddit.ledger.faults.total() + self._archive.ledger.faults.total()

    @property
    def over_budget(self) -> int:
        return self._reddit.ledger.over_budget + self._archive.ledger.over_budget

    def publish(self, number: int) -> None:
        name = f"sub{min(self._random.randrange(16), self._random.randrange(16)):02}"
        self._reddit.publish(
            name,
            title=f"post {number}",
            body="some words " * self._random.randrange(60),
        )


class BlueskyServer:
    """Two loopback Jetstreams with the same events, deleted posts and faults.

    The second one's clock is ahead. Each is down for some minutes now and then.
    """

    over_budget = 0

    def __init__(self, running: ExitStack, clock: Any) -> None:
        self._random = Random(1)
        # Events have simulated times: with real ones, the overlap would hold most of a run.
        first = running.enter_context(Jetstream(clock=lambda: clock.value))
        second = running.enter_context(
            Jetstream(seed=1, clock=lambda: clock.value + SERVER_AHEAD_S)
        )
        self._servers = (first, second)
        for server in self._servers:
            server.random_faults(EVENT_FAULT_RATE)
        #: Server that is down, and the number of the post at which it is up again.
        self._down: Jetstream | None = None
        self._up_at = 0
        self._outages = 0
        self._newest: list[str] = []
        self.settings = {"bluesky_url": f"{first.url},{second.url}"}
        self.ids = set[str]()

    @property
    def faults(self) -> int:
        counts = [server.fault_counts.total() for server in self._servers]
        return sum(counts) + self._outages

    def publish(self, number: int) -> None:
        # the daemon begins with the posts of the moment
        while not any(server.queries for server in self._servers):
            time.sleep(0.01)
        self._change_outage(number)
        text = f"post {number} " + "some words " * self._random.randrange(25)
        (post_id, _) = [server.post(text) for server in self._servers]
        self.ids.add(post_id)
        self._newest = [*self._newest[-999:], post_id]
        if (
            self._random.random() < DELETED
            and (deleted := self._random.choice(self._newest)) in self.ids
        ):
            for server in self._servers:
                server.delete(deleted)
            self.ids.remove(deleted)
        if number % KEPT_EVENTS == 0:
            for server in self._servers:
                server.forget(KEPT_EVENTS)

    def _change_outage(self, number: int) -> None:
        """Begin or end an outage of one of the servers."""
        if self._down is not None and number >= self._up_at:
            self._down.down = False
            self._down = None
        if self._down is None and self._random.random() < OUTAGE_RATE:
            self._down = self._random.choice(self._servers)
            self._down.down = True
            self._up_at = number + self._random.randrange(*OUTAGE_POSTS)
            self._outages += 1


class FeedsServer:
    """Loopback feeds of all forms: reordered, without ids or dates, with wrong dates, and with
    faults.
    """

    over_budget = 0

    def __init__(self, running: ExitStack, clock: Any) -> None:
        self._random = Random(1)
        self._server = running.enter_context(Feeds(lambda: clock.value))
        self._server.random_faults(FAULT_RATE)
        self._feeds = []
        for number in range(FEEDS):
            form = ("rss", "atom", "json")[number % 3]
            feed = self._server.add(
                f"feed{number:02}",
                form=form,
                capacity=200,
                ids="own"
                if form != "rss"
                else ("own", "links", "none")[number // 3 % 3],
                order=("newest", "oldest", "random")[number // 3 % 3],
                dates=("true", "none", "future", "odd")[number % 4],
                has_validators=number % 2 == 0,
                head="<ttl>10</ttl>" if form == "rss" and number % 5 == 0 else "",
            )
            self._feeds.append(feed)
        self.settings: dict[str, Any] = {}
        os.environ[FEEDS_URL] = self._server.url  # the daemon's process inherits it
        self.ids = set[str]()

    @property
    def faults(self) -> int:
        return self._server.fault_counts.total()

    def publish(self, number: int) -> None:
        del self._server.asked[:]
        feed = self._random.choice(self._feeds)
        title = f"post {number}"
        entry = feed.publish(title, "some words " * self._random.randrange(60))
        key = entry["id"] or entry["link"]
        if not key:
            body = entry["body"].strip()
            text = feed_state.digest(title, body, "")
            key = f"\n{text}"
        digest = feed_state.digest(key, size=feed_state.KEY_BYTES)
        self.ids.add(f"feed:{feed.name}:{digest}")


class HackerNewsServer:
    """The loopback Hacker News."""

    faults = over_budget = 0

    def __init__(self, running: ExitStack, clock: Any) -> None:
        self._clock = clock
        self._server = running.enter_context(LoopbackHackerNews())
        self._server.items[0] = None
        self.settings: dict[str, Any] = {}
        # The daemon's process inherits it.
        os.environ[constants.VARIABLE] = json.dumps(
            constants.hacker_news(self._server.url)
        )
        self.ids = set[str]()

    def publish(self, number: int) -> None:
        # the daemon begins with the items of the moment
        while "/v0/updates.json" not in self._server.asked:
            time.sleep(0.01)
        item = {
            "type": "comment" if number % 2 else "story",
            "time": int(self._clock.value),
            "title": f"post {number}",
        }
        if not number % 2:
            self.ids.add(f"hn-{number + 1}")
        self._server.changed = [number // 2, number]
        del self._server.asked[10:]
        self._server.items[number + 1] = item


#: A source's loopback server. settings: for the daemon; ids: posts that must be sent; faults:
#: their number so far; over_budget: requests beyond the limit; publish(number): publishes a post.
SERVERS: dict[str, Callable[[ExitStack, Any], Any]] = {
    "reddit": RedditServer, "arctic-shift": RedditServer, "bluesky": BlueskyServer,
    "hacker-news": HackerNewsServer, "feeds": FeedsServer,
}  # fmt: skip


def make_source(name: str, settings: Settings, clock: SharedClock) -> Source:
    topics = Topics(active=1, topics=TOPICS)
    redis = connect(settings)
    if name == "reddit":
        budget = RequestBudget(clock, client.REQUESTS_PER_MINUTE)
        return RedditSource(
            client.RedditClient(settings, budget, topics.topic_of),
            redis,
            topics,
            settings,
            clock,
            depth=1000,
        )
    if name == "arctic-shift":
        budget = RequestBudget(clock, arctic_shift.REQUESTS_PER_MINUTE)
        archive = arctic_shift.ArcticShiftClient(settings, budget, topics.topic_of)
        return ArchiveSource(archive, redis, topics, settings, clock, 1000)
    if name == "bluesky":
        jetstream.IDLE_S = 0.02  # real time
        return BlueskySource(settings, clock)
    if name == "feeds":
        feeds = {
            f"feed{number:02}": Feed(url=f"{os.environ[FEEDS_URL]}/feed{number:02}")
            for number in range(FEEDS)
        }
        return FeedsSource(feeds, redis, settings, clock, limit=5_000)
    return HackerNews(settings, clock)


def follow(
    source: str,
    settings: dict[str, Any],
    shared: Any,
    published: Any,
    ends: Sequence[float],
    connection: Connection,
) -> None:
    """Run the daemon in this process.

    Send its memory and status at the ends of hours, and its final status.
    """
    clock = SharedClock(shared, published)
    constants.replace(json.loads(os.environ.get(constants.VARIABLE, "{}")))
    validated = Settings.model_validate(settings)
    redis = connect(validated)
    pusher = Pusher(
        make_app(validated), redis, validated, ClassifyOptions(), wait=clock.wait
    )
    daemon = LiveDaemon(
        make_source(source, validated, clock), redis, pusher, validated, clock
    )
    shortest = BATCH_S if source in ("bluesky", "hacker-news") else 0.0

    def run(until: float) -> None:
        while (left := until - clock.time()) > 0:
            pause = max(daemon.step(), shortest)
            clock.wait(min(pause, left, TICK_S))
            clock.waits.clear()

    for end in ends:
        run(end)
        gc.collect()
        connection.send({"rss_mib": _resident() / 2**20, **daemon.status()})
    connection.send(None)
    connection.recv()  # all posts have been published by now
    sent = -1
    while sent != daemon.status()["sent"]:
        sent = daemon.status()["sent"]
        run(clock.time() + REST_S)
    connection.send(daemon.status())
    daemon.close()


def _resident() -> int:
    """Return this process' resident memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return (
        int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) * 1024
    )


class Soak:
    """A run of the test."""

    def __init__(self, source: str, hours: int, folder: Path) -> None:
        self._source, self._folder = source, folder
        self._begin = SimulatedClock().time()
        self._clock, self._until = (
            CONTEXT.Value("d", self._begin),
            CONTEXT.Value("d", self._begin),
        )
        self._ends = [self._begin + HOUR_S * hour for hour in range(1, hours + 1)]
        faults = [self._kill] * KILLS + [self._restart_redis] * RESTARTS
        random = Random(1)
        moments = sorted(
            self._begin + random.uniform(0.05, 0.95) * HOUR_S for _ in faults
        )
        random.shuffle(faults)
        self._faults = deque(zip(moments, faults, strict=True))
        self._figures: dict[str, Any] = {
            "source": source,
            "hours": hours,
            "kills": KILLS,
            "restarts": RESTARTS,
        }
        self._published = 0
        self._memory: list[float] = []
        #: Number of messages with each post.
        self._sent: Counter[str] = Counter()

    def run(self) -> dict[str, Any]:
        with ExitStack() as running:
            self._redis = Restartable(
                next(iter(redis_servers().values())), self._folder, "everysec"
            )
            running.callback(self._redis.stop)
            self._server = SERVERS[self._source](running, self._clock)
            self._start()
            running.callback(self._end)
            while self._step():
                pass
            self._until.value = float("inf")
            self._connection.send("published")
            last = self._connection.recv()
            self._process.join(30)
            self._take()
        growth = self._memory[-1] / self._memory[min(FILLED, len(self._memory)) - 1] - 1
        return self._figures | {
            "published": self._published,
            "sent": self._sent.total(),
            "missing": len(set(self._server.ids) - self._sent.keys()),
            "doubled": sum(times - 1 for times in self._sent.values()),
            "gaps": last["gaps"],
            "switches": last.get("switches", 0),
            "faults": self._server.faults,
            "budget_exceeded": self._server.over_budget,
            "rss_mib": self._memory,
            "growth": round(growth, 3),
        }

    def _step(self) -> bool:
        """Publish what is due, take what was sent, and inject a fault.

        Returns false after the last hour.
        """
        now = self._clock.value
        while self._faults and self._faults[0][0] <= now:
            self._faults.popleft()[1]()
        due = int((now - self._begin) / HOUR_S * POSTS_AN_HOUR[self._source])
        for number in range(self._published, due):
            self._server.publish(number)
        self._published, self._until.value = max(due, self._published), now
        self._take()
        if not self._connection.poll(0.005):
            return True
        if (status := self._connection.recv()) is None:
            return False
        self._memory.append(round(status["rss_mib"], 1))
        _tell(
            f"hour {len(self._memory)}: {self._memory[-1]} MiB, {self._published:,} posts, "
            f"{status['sent']:,} sent"
        )
        return True

    def _start(self) -> None:
        settings = {"redis_url": self._redis.url, **self._server.settings}
        self._connection, there = CONTEXT.Pipe()
        arguments = (
            self._source,
            settings,
            self._clock,
            self._until,
            self._ends[len(self._memory) :],
            there,
        )
        self._process = CONTEXT.Process(target=follow, args=arguments, daemon=True)
        self._process.start()
        there.close()

    def _end(self) -> None:
        self._process.kill()
        self._process.join()

    def _kill(self) -> None:
        self._end()
        self._start()

    def _restart_redis(self) -> None:
        self._redis.kill()
        self._redis.start()

    def _take(self) -> None:
        """Empty the queue like a worker, and count the posts."""
        client: Any = self._redis.client
        while messages := client.lpop("feedmill", 1000):
            now = self._clock.value - self._begin
            for post_id in (
                post["id"]
                for message in messages
                for post in body_of(message)[1]["posts"]
            ):
                if post_id in self._sent:
                    _tell(f"{post_id} sent again at {now:.0f} s")
                self._sent[post_id] += 1


def _tell(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--source", choices=tuple(SERVERS), default="reddit")
    parser.add_argument("--hours", type=int, default=8)
    given = parser.parse_args(arguments)
    with TemporaryDirectory(prefix="feedmill-soak-") as folder:
        found = Soak(given.source, given.hours, Path(folder)).run()
    sys.stdout.write(json.dumps(found) + "\n")
    wrong = any(
        found[name] for name in ("missing", "doubled", "gaps", "budget_exceeded")
    )
    return 1 if wrong or found["growth"] > MAX_GROWTH else 0


if __name__ == "__main__":
    sys.exit(main())
