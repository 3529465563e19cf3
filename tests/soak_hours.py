"""Simulate eight hours of polling Reddit and watch the daemon's memory (`python -m tests.soak_hours`).

The daemon runs in its own process on a simulated clock, which advances at once when the daemon waits. The loopback
Reddit in this process shares the clock and publishes posts as time advances. PRAW, Redis and the requests are real. The
daemon's memory may grow until its bounded state is full, and must be constant after that.

The last line is JSON: hours, polls, published, sent, missing (posts), gaps, budget_exceeded, rss_mib (at the end of
each hour), growth (of the last hour relative to hour `--filled`). Exits 1 if a post is missing, memory grew or the
request budget was exceeded.
"""

import argparse
import gc
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

from producers.live.budget import RequestBudget
from producers.push import Pusher
from producers.reddit.client import RedditClient
from producers.reddit.daemon import Daemon
from producers.reddit.topics import Topics
from shared.broker import connect, make_app
from shared.messages import ClassifyOptions
from shared.settings import Settings
from tests.fakes.clock import SimulatedClock
from tests.fakes.reddit import Reddit as LoopbackReddit
from tests.support import RedisServer, redis_servers, sent_checksums

TOPICS = {f"topic {number}": (f"sub{number:02}",) for number in range(16)}
HOUR_S = 3600.0
#: Longest step of simulated time between two batches of published posts.
TICK_S = 30.0
#: Allowed relative growth of memory once it is filled: allocators do not return all memory.
MAX_GROWTH = 0.05


class SharedClock(SimulatedClock):
    """A simulated clock that several processes can read."""

    def __init__(self, shared: Any) -> None:
        super().__init__()
        self._shared = shared

    def wait(self, seconds: float) -> None:
        super().wait(seconds)
        self._shared.value = self.time()


def poll(settings: dict[str, Any], shared: Any, hours: int, connection: Connection) -> None:
    """Run the daemon in this process. Send its memory and status at the end of each hour, and its final status."""
    clock = SharedClock(shared)
    chosen = Settings.model_validate(settings)
    redis = connect(chosen)
    budget = RequestBudget(clock, chosen.reddit_requests_per_minute)
    pusher = Pusher(make_app(chosen), redis, chosen, ClassifyOptions(), wait=clock.wait)
    topics = Topics(active=1, topics=TOPICS)
    reddit = RedditClient(chosen, budget, topics.topic_of)
    daemon = Daemon(reddit, budget, redis, pusher, topics, chosen, clock, depth=1000)
    for hour in range(1, hours + 1):
        while (left := hour * HOUR_S - clock.monotonic()) > 0:
            clock.wait(min(daemon.step(), left, TICK_S))
        clock.waits.clear()
        gc.collect()
        connection.send({"hour": hour, "rss_mib": _resident() / 2**20, **daemon.status()})
    connection.send(None)
    connection.recv()  # all posts have been published by now
    for _ in range(10):
        while daemon.step() == 0:
            pass
        clock.wait(TICK_S)
    connection.send(daemon.status())
    reddit.close()


def _resident() -> int:
    """Return this process' resident memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) * 1024


def run(hours: int, an_hour: int, filled: int, folder: Path) -> dict[str, Any]:
    """Publish `an_hour` posts per hour while a second process runs the daemon. Return the final figures."""
    random = Random(1)
    context = multiprocessing.get_context("spawn")
    shared = context.Value("d", SimulatedClock().time())
    here, there = context.Pipe()
    server = RedisServer(next(iter(redis_servers().values())), folder)
    with LoopbackReddit(clock=lambda: shared.value, window=600, budget=1000) as loopback:
        for names in TOPICS.values():
            loopback.add_subreddit(names[0])
            loopback.publish(names[0], title="the first")
        settings = {
            "redis_url": server.url, "reddit_url": loopback.url, "reddit_client_id": "id",
            "reddit_client_secret": "secret", "reddit_user_agent": "linux:hours:1 (by /u/nobody)",
        }  # fmt: skip
        process = context.Process(target=poll, args=(settings, shared, hours, there), daemon=True)
        process.start()
        there.close()
        memory: list[float] = []
        start, published = shared.value, 0
        while True:
            due = (shared.value - start) / HOUR_S * an_hour
            for _ in range(published, int(due)):
                name = f"sub{min(random.randrange(16), random.randrange(16)):02}"
                loopback.publish(name, title=f"post {published}", body="some words " * random.randrange(60))
                published += 1
            server.client.delete("feedmill")  # empty the queue like a worker
            if not here.poll(0.02):
                continue
            if (status := here.recv()) is None:
                break
            memory.append(round(status["rss_mib"], 1))
            _tell(f"hour {status['hour']}: {memory[-1]} MiB, {status['polls']:,} polls, {status['sent']:,} posts sent")
        here.send("published")
        last = here.recv()
        process.join(30)
        sent = set(sent_checksums(server.client))
        server.stop()
        return {
            "hours": hours,
            "polls": last["polls"],
            "published": len(loopback.ledger.published),
            "sent": last["sent"],
            "missing": sum(crc32(each.encode()) not in sent for each in loopback.ledger.published),
            "gaps": last["gaps"],
            "budget_exceeded": loopback.ledger.over_budget,
            "rss_mib": memory,
            "growth": round(memory[-1] / memory[filled - 1] - 1, 3),
        }


def _tell(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hours", type=int, default=8)
    parser.add_argument("--posts-an-hour", type=int, default=12_000)
    parser.add_argument("--filled", type=int, default=4, help="hour by which the daemon's bounded state is full")
    given = parser.parse_args(arguments)
    with TemporaryDirectory(prefix="feedmill-hours-") as folder:
        found = run(given.hours, given.posts_an_hour, given.filled, Path(folder))
    sys.stdout.write(json.dumps(found) + "\n")
    return 1 if found["missing"] or found["growth"] > MAX_GROWTH or found["budget_exceeded"] else 0


if __name__ == "__main__":
    sys.exit(main())
