"""Ingest ten thousand Bluesky posts despite faults and kills (`python -m tests.soak_bluesky`).

A loopback Jetstream publishes posts, deletes some of them and lets connections fail. Real processes ingest and classify
the posts: a worker, and `feedmill ingest bluesky`, which is killed with SIGKILL at random times. Redis is killed and
restarted.

The last line is JSON: published, deleted, stored, missing, duplicated, deleted_stored (posts), gaps, connections,
faults, kills, redis_restarts. Exits 1 if a post is missing, duplicated or stored although it was deleted, or if there
is a gap.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from redis.exceptions import RedisError

from feedmill.producers.live.state import Gaps
from feedmill.shared.keys import RESULTS_STREAM
from feedmill.shared.scripts.queue import known
from tests.fakes.jetstream import Jetstream
from tests.support import Feedmill, Restartable, redis_servers, wait_until, working

#: Share of the events at which a fault strikes, for each kind of fault. Every connection repeats hundreds of events, so
#: a larger share would never let the daemon get beyond them.
FAULT_RATE = 0.00015
#: Share of the posts that are deleted, and of the events that concern no post.
DELETED, OTHERS = 0.05, 0.3
#: Authors of the posts. The accounts of the last ones are deleted in the end.
AUTHORS, DELETED_AUTHORS = 50, 2
#: Maximum seconds without a new result after which posts count as missing.
PATIENCE_S = 120.0
WORDS = (
    "river", "kettle", "goal", "budget", "novel", "teacher", "guitar", "vaccine",
    "senate", "galaxy", "ticket", "mortgage", "boss", "recipe", "storm", "patch",
)  # fmt: skip


class Soak:
    """A run of the test. seconds: the time over which posts are published."""

    def __init__(self, posts: int, kills: int, restarts: int, seconds: float, seed: int, folder: Path) -> None:
        self._random = random.Random(seed)
        self._posts, self._kills, self._restarts, self._seconds = posts, kills, restarts, seconds
        self._folder = folder
        self._jetstream = Jetstream(early=50, seed=seed)
        self._published: list[str] = []
        self._deleted: set[str] = set()
        self._daemon: Feedmill | None = None

    def run(self) -> dict[str, Any]:
        with ExitStack() as running:
            server = Restartable(next(iter(redis_servers().values())), self._folder)
            running.callback(server.stop)
            running.enter_context(self._jetstream)
            running.enter_context(working(server, self._folder, FEEDMILL_RESULTS_STREAM_LENGTH="1000000"))
            running.callback(self._kill)
            self._start(server)
            wait_until(lambda: self._jetstream.queries, "the daemon is connected")
            self._published.append(self._jetstream.post("the first post", _author(0)))
            wait_until(lambda: _stored(server), "the first post is stored", 240)
            self._jetstream.random_faults(FAULT_RATE)
            self._publish_and_kill(server)
            for number in range(AUTHORS - DELETED_AUTHORS, AUTHORS):
                self._jetstream.account(_author(number), "deleted")
                self._deleted |= {post_id for post_id in self._published if f"/{_author(number)}/" in post_id}
            remaining = set(self._published) - self._deleted
            _tell(f"{len(remaining):,} posts remain; waiting until all are stored")
            self._wait_for_results(server, remaining)
            # The accounts' posts are searched for at the start: no ten minutes must pass.
            self._kill()
            self._start(server)
            with suppress(AssertionError):
                wait_until(lambda: not self._deleted & set(_stored(server)), "deleted posts are purged", PATIENCE_S)
            return self._judge(server, remaining)

    def _publish(self) -> None:
        """Publish a post, and perhaps other events."""
        text = " ".join(self._random.choices(WORDS, k=self._random.randint(3, 40)))
        author = _author(self._random.randrange(AUTHORS))
        self._published.append(self._jetstream.post(f"{len(self._published)} {text}", author))
        if self._random.random() < OTHERS:
            self._jetstream.raw({"did": "did:plc:other", "kind": "identity", "identity": {"handle": "other"}})
        if self._random.random() < DELETED:
            # Some at once, others after they were classified.
            gone = self._published[-1] if self._random.random() < 0.2 else self._random.choice(self._published)
            if gone not in self._deleted:
                self._deleted.add(gone)
                self._jetstream.delete(gone)

    def _publish_and_kill(self, server: Restartable) -> None:
        """Publish for the given seconds; kill the daemon and restart Redis at random times."""
        begun = time.monotonic()
        events = ["kill"] * self._kills + ["restart"] * self._restarts
        moments = sorted((self._random.uniform(0.05, 0.95) * self._seconds, event) for event in events)
        for moment, event in [*moments, (self._seconds, "end")]:
            while (passed := time.monotonic() - begun) < moment:
                while len(self._published) < self._posts * passed / self._seconds:
                    self._publish()
                time.sleep(0.02)
            if event == "kill":
                self._kill()
                self._start(server)
            elif event == "restart":
                server.kill()
                server.start()
            _tell(f"{event} after {moment:.0f} s, {len(self._published):,} published, {len(_stored(server)):,} stored")
        while len(self._published) < self._posts:
            self._publish()

    def _start(self, server: Restartable) -> None:
        self._daemon = Feedmill(
            "ingest", "bluesky", cwd=self._folder,
            FEEDMILL_REDIS_URL=server.url, FEEDMILL_BLUESKY_URL=self._jetstream.url,
        )  # fmt: skip

    def _kill(self) -> None:
        if self._daemon is not None:
            if self._daemon.process.poll() is not None:
                raise AssertionError(f"the daemon exited unexpectedly:\n{self._daemon.text()}")
            self._daemon.process.kill()
            self._daemon.process.wait()
            self._daemon = None

    def _wait_for_results(self, server: Restartable, expected: set[str]) -> None:
        """Wait until all posts are stored, or until no result arrives for two minutes."""
        missing, since = len(expected), time.monotonic()
        while missing and time.monotonic() - since < PATIENCE_S:
            now = len(expected - set(_stored(server)))
            if now != missing:
                missing, since = now, time.monotonic()
            time.sleep(0.5)

    def _judge(self, server: Restartable, remaining: set[str]) -> dict[str, Any]:
        stored = _stored(server)
        for post_id in sorted(remaining - set(stored)):
            _tell(f"missing: {post_id}, sent={bool(known(server.client, [post_id]))}")
        return {
            "published": len(self._published),
            "deleted": len(self._deleted),
            "stored": len(set(stored) & remaining),
            "missing": len(remaining - set(stored)),
            "duplicated": sum(count - 1 for count in stored.values()),
            "deleted_stored": len(set(stored) & self._deleted),
            "gaps": len(Gaps(server.client).all()),
            "connections": len(self._jetstream.queries),
            "faults": self._jetstream.fault_counts.total(),
            "kills": self._kills,
            "redis_restarts": self._restarts,
        }


def _author(number: int) -> str:
    return f"did:plc:author{number:02}"


def _stored(server: Restartable) -> Counter[str]:
    """Return the number of entries in the results stream of each post."""
    ids: Counter[str] = Counter()
    client: Any = server.client
    start = "-"
    with suppress(RedisError):  # just restarted
        while entries := client.xrange(RESULTS_STREAM, start, count=5000):
            ids.update(fields["id"] for _, fields in entries)
            start = f"({entries[-1][0]}"
    return ids


def _tell(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--posts", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=8, help="kills of the daemon")
    parser.add_argument("--redis-restarts", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=240, help="time over which posts are published")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    with TemporaryDirectory(prefix="feedmill-soak-") as folder:
        soak = Soak(given.posts, given.kills, given.redis_restarts, given.seconds, given.seed, Path(folder))
        found = soak.run()
    sys.stdout.write(json.dumps(found) + "\n")
    return 1 if found["missing"] or found["duplicated"] or found["deleted_stored"] or found["gaps"] else 0


if __name__ == "__main__":
    sys.exit(main())
