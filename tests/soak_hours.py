"""Simulate eight hours of a daemon and watch its memory (`python -m tests.soak_hours --source bluesky`).

The daemon runs in its own process on a simulated clock, which advances at once when the daemon waits. The source's
loopback server runs in this process, shares the clock and publishes posts as time advances. PRAW, websockets, Redis and
the requests are real. The daemon's memory may grow until its bounded state is full, and must be constant after that.

The last line is JSON: source, hours, published, sent, missing (posts), gaps, budget_exceeded, rss_mib (at the end of
each hour), growth (of the last hour relative to hour `--filled`). Exits 1 if a post is missing, memory grew or the
request budget was exceeded.
"""

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from feedmill.producers import bluesky
from feedmill.producers.live.budget import RequestBudget
from feedmill.producers.live.daemon import LiveDaemon
from feedmill.producers.live.source import Source
from feedmill.producers.push import Pusher
from feedmill.producers.reddit.arctic_shift import ArcticShiftClient
from feedmill.producers.reddit.client import RedditClient
from feedmill.producers.reddit.source import ArchiveSource, RedditSource
from feedmill.producers.reddit.topics import Topics
from feedmill.shared.broker import connect, make_app
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.scripts.queue import known
from feedmill.shared.settings import Settings
from tests.fakes.arctic_shift import ArcticShift
from tests.fakes.clock import SimulatedClock
from tests.fakes.hacker_news import HackerNews
from tests.fakes.jetstream import Jetstream
from tests.fakes.reddit import Reddit as LoopbackReddit
from tests.support import RedisServer, redis_servers

#: Posts per hour by source. Of Hacker News' items, half are comments.
POSTS_AN_HOUR = {"reddit": 12_000, "arctic-shift": 12_000, "bluesky": 108_000, "hacker-news": 2_000}
EXAMPLES = Path(__file__).parent.parent / "docs" / "examples" / "extending"
TOPICS = {f"topic {number}": (f"sub{number:02}",) for number in range(16)}
HOUR_S = 3600.0
#: Longest step of simulated time between two batches of published posts.
TICK_S = 30.0
#: Simulated seconds per batch of a live source, whose real wait for further events takes no simulated time.
BATCH_S = 5.0
#: Simulated seconds after the last post in which the daemon must have sent all posts.
REST_S = 600.0
#: Allowed relative growth of memory once it is filled: allocators do not return all memory.
MAX_GROWTH = 0.05
#: Share of Bluesky's posts that are deleted, and of events with a fault. Events that the loopback Jetstream keeps.
DELETED, FAULT_RATE, KEPT_EVENTS = 0.02, 0.00001, 50_000


class SharedClock(SimulatedClock):
    """A simulated clock that several processes can read. published: time up to which posts have been published."""

    def __init__(self, shared: Any, published: Any) -> None:
        super().__init__()
        self._shared, self._published = shared, published

    def wait(self, seconds: float) -> None:
        super().wait(seconds)
        self._shared.value = self.time()
        while self._published.value < self.time() - TICK_S:
            time.sleep(0.001)


class Server(Protocol):
    """A source's loopback server. settings: for the daemon. ids: posts that must be sent."""

    @property
    def settings(self) -> Mapping[str, Any]: ...

    @property
    def ids(self) -> Collection[str]: ...

    def publish(self, number: int) -> None: ...

    def over_budget(self) -> int: ...


class RedditServer:
    """The loopback Reddit, and an archive of it."""

    def __init__(self, running: ExitStack, clock: Any) -> None:
        self._random = Random(1)
        self._reddit = running.enter_context(LoopbackReddit(clock=lambda: clock.value, window=600, budget=1000))
        self._archive = running.enter_context(ArcticShift(self._reddit, lag=20.0, window=60, budget=60))
        for names in TOPICS.values():
            self._reddit.add_subreddit(names[0])
            self._reddit.publish(names[0], title="the first")
        self.settings = {
            "reddit_url": self._reddit.url, "arctic_shift_url": self._archive.url, "reddit_client_id": "id",
            "reddit_client_secret": "secret", "reddit_user_agent": "linux:hours:1 (by /u/nobody)",
        }  # fmt: skip

    @property
    def ids(self) -> set[str]:
        return set(self._reddit.ledger.published)

    def publish(self, number: int) -> None:
        name = f"sub{min(self._random.randrange(16), self._random.randrange(16)):02}"
        self._reddit.publish(name, title=f"post {number}", body="some words " * self._random.randrange(60))

    def over_budget(self) -> int:
        return self._reddit.ledger.over_budget + self._archive.ledger.over_budget


class BlueskyServer:
    """The loopback Jetstream, with deleted posts and faults."""

    def __init__(self, running: ExitStack, _: Any) -> None:
        self._random = Random(1)
        self._jetstream = running.enter_context(Jetstream())
        self._jetstream.random_faults(FAULT_RATE)
        self._newest: list[str] = []
        self.settings = {"bluesky_url": self._jetstream.url}
        self.ids = set[str]()

    def publish(self, number: int) -> None:
        while not self._jetstream.queries:  # the daemon begins with the posts of the moment
            time.sleep(0.01)
        post_id = self._jetstream.post(f"post {number} " + "some words " * self._random.randrange(25))
        self.ids.add(post_id)
        self._newest = [*self._newest[-999:], post_id]
        if self._random.random() < DELETED and (deleted := self._random.choice(self._newest)) in self.ids:
            self._jetstream.delete(deleted)
            self.ids.remove(deleted)
        if number % KEPT_EVENTS == 0:
            self._jetstream.forget(KEPT_EVENTS)

    def over_budget(self) -> int:
        return 0


class HackerNewsServer:
    """The loopback Hacker News."""

    def __init__(self, running: ExitStack, clock: Any) -> None:
        self._clock = clock
        self._server = running.enter_context(HackerNews())
        self._server.items[0] = None
        self.settings: dict[str, Any] = {}
        os.environ["HACKER_NEWS_URL"] = self._server.url  # the daemon's process inherits it
        self.ids = set[str]()

    def publish(self, number: int) -> None:
        while "/v0/updates.json" not in self._server.asked:  # the daemon begins with the items of the moment
            time.sleep(0.01)
        item = {"type": "comment" if number % 2 else "story", "time": int(self._clock.value), "title": f"post {number}"}
        if not number % 2:
            self.ids.add(f"hn-{number + 1}")
        self._server.changed = [number // 2, number]
        del self._server.asked[10:]
        self._server.items[number + 1] = item

    def over_budget(self) -> int:
        return 0


SERVERS: dict[str, Callable[[ExitStack, Any], Server]] = {
    "reddit": RedditServer, "arctic-shift": RedditServer, "bluesky": BlueskyServer, "hacker-news": HackerNewsServer,
}  # fmt: skip


def make_source(name: str, settings: Settings, clock: SharedClock) -> Source:
    topics = Topics(active=1, topics=TOPICS)
    redis = connect(settings)
    if name == "reddit":
        budget = RequestBudget(clock, settings.reddit_requests_per_minute)
        return RedditSource(RedditClient(settings, budget, topics.topic_of), redis, topics, settings, clock, depth=1000)
    if name == "arctic-shift":
        budget = RequestBudget(clock, settings.arctic_shift_requests_per_minute)
        archive = ArcticShiftClient(settings, budget, topics.topic_of)
        return ArchiveSource(archive, redis, topics, settings, clock, 1000)
    if name == "bluesky":
        bluesky.IDLE_S = 0.02  # real time
        return bluesky.BlueskySource(settings, clock)
    sys.path.insert(0, str(EXAMPLES))
    source: Source = import_module("hacker_news").HackerNews(settings, clock)
    return source


def follow(
    source: str, settings: dict[str, Any], shared: Any, published: Any, hours: int, connection: Connection
) -> None:
    """Run the daemon in this process. Send its memory and status at the end of each hour, and its final status."""
    clock = SharedClock(shared, published)
    validated = Settings.model_validate(settings)
    redis = connect(validated)
    pusher = Pusher(make_app(validated), redis, validated, ClassifyOptions(), wait=clock.wait)
    daemon = LiveDaemon(make_source(source, validated, clock), redis, pusher, validated, clock)
    shortest = BATCH_S if source in ("bluesky", "hacker-news") else 0.0

    def run(until: float) -> None:
        while (left := until - clock.monotonic()) > 0:
            pause = max(daemon.step(), shortest)
            clock.wait(min(pause, left, TICK_S))
            clock.waits.clear()

    for hour in range(1, hours + 1):
        run(hour * HOUR_S)
        gc.collect()
        connection.send({"hour": hour, "rss_mib": _resident() / 2**20, **daemon.status()})
    connection.send(None)
    connection.recv()  # all posts have been published by now
    run(clock.monotonic() + REST_S)
    connection.send(daemon.status())
    daemon.close()


def _resident() -> int:
    """Return this process' resident memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) * 1024


def run(source: str, hours: int, an_hour: int, filled: int, folder: Path) -> dict[str, Any]:
    """Publish `an_hour` posts per hour while a second process runs the daemon. Return the final figures."""
    context = multiprocessing.get_context("spawn")
    start = SimulatedClock().time()
    shared, until = context.Value("d", start), context.Value("d", start)
    here, there = context.Pipe()
    with ExitStack() as running:
        redis = RedisServer(next(iter(redis_servers().values())), folder)
        running.callback(redis.stop)
        server = SERVERS[source](running, shared)
        settings = {"redis_url": redis.url, **server.settings}
        process = context.Process(target=follow, args=(source, settings, shared, until, hours, there), daemon=True)
        process.start()
        there.close()
        memory: list[float] = []
        published = 0
        while True:
            now = shared.value
            for number in range(published, int((now - start) / HOUR_S * an_hour)):
                server.publish(number)
                published = number + 1
            until.value = now
            redis.client.delete("feedmill")  # empty the queue like a worker
            if not here.poll(0.005):
                continue
            if (status := here.recv()) is None:
                break
            memory.append(round(status["rss_mib"], 1))
            _tell(f"hour {status['hour']}: {memory[-1]} MiB, {published:,} posts published, {status['sent']:,} sent")
        until.value = float("inf")
        here.send("published")
        last = here.recv()
        process.join(30)
        return {
            "source": source,
            "hours": hours,
            "published": published,
            "sent": last["sent"],
            "missing": len(server.ids) - len(known(redis.client, list(server.ids))),
            "gaps": last["gaps"],
            "budget_exceeded": server.over_budget(),
            "rss_mib": memory,
            "growth": round(memory[-1] / memory[filled - 1] - 1, 3),
        }


def _tell(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--source", choices=tuple(SERVERS), default="reddit")
    parser.add_argument("--hours", type=int, default=8)
    parser.add_argument("--posts-an-hour", type=int, help="default: as many as the source usually has")
    parser.add_argument("--filled", type=int, default=4, help="hour by which the daemon's bounded state is full")
    given = parser.parse_args(arguments)
    an_hour = given.posts_an_hour or POSTS_AN_HOUR[given.source]
    with TemporaryDirectory(prefix="feedmill-hours-") as folder:
        found = run(given.source, given.hours, an_hour, given.filled, Path(folder))
    sys.stdout.write(json.dumps(found) + "\n")
    return 1 if found["missing"] or found["growth"] > MAX_GROWTH or found["budget_exceeded"] else 0


if __name__ == "__main__":
    sys.exit(main())
