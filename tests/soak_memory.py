"""Store more results than FEEDMILL_RESULTS_MEMORY holds (`python -m tests.soak_memory --memory 32MB`).

A real worker with a stand-in for the device (tests/fakes/standin_worker.py) stores 200,000 posts with sixteen scores
each in a redis-server of its own. Some of the first results are purged. The memory of results is what Redis uses
(`used_memory`), less its use before the first post and that of queue and sent records, five times a second.

The last line is JSON: megabytes of the bound, of the measured peak and of the end; the posts stored, and of these kept,
dropped and purged; entries trimmed from the stream; how many of the newest thousand results are there; posts/s. Exits 1
if the peak exceeds the bound, a result is unaccounted for, or one of the newest is missing.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ByteSize, TypeAdapter

from benchmarks.scaling import Installation
from benchmarks.throughput import read_posts
from feedmill.producers.push import Pusher
from feedmill.shared.broker import connect, queue_lists
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.purge import purge
from feedmill.shared.results import ResultsStore, stored_ids
from feedmill.shared.retention import measure
from tests.support import wait_until

#: Newest results that must be there, and results that are purged once PURGE_AFTER are stored.
NEWEST, PURGED, PURGE_AFTER = 1000, 100, 10_000
#: Seconds between two measurements.
INTERVAL_S = 0.2


class Peak(threading.Thread):
    """Measure the memory of results until `stop`."""

    def __init__(self, house: Installation) -> None:
        super().__init__(daemon=True)
        self._redis: Any = connect(house.settings)
        self._settings = house.settings
        self._others = [*queue_lists(house.settings.queue), "feedmill:reserved", "feedmill:reserved_index"]
        self._ended = threading.Event()
        self._before = self._used()
        self.latest = self.peak = 0.0

    def _used(self) -> float:
        others = sum(self._redis.memory_usage(key, samples=0) or 0 for key in self._others)
        return (
            float(self._redis.info("memory")["used_memory"]) - others - measure(self._redis, self._settings).sent_bytes
        )

    def run(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self.look()

    def look(self) -> None:
        self.latest = self._used() - self._before
        self.peak = max(self.peak, self.latest)

    def stop(self) -> None:
        self._ended.set()
        self.join()
        self.look()


def run(count: int, memory: int, folder: Path) -> dict[str, Any]:
    """Store the posts and return the figures."""
    # Few waiting messages: the bound is that of results.
    house = Installation(
        folder / "redis", read_posts(None, 160), results_memory=memory, queue_limit=100, posts_per_message=64
    )
    os.environ["STANDIN_TOPICS"] = "1"
    store = ResultsStore(connect(house.settings), house.settings)
    try:
        with house.workers([0.0]):
            peak = Peak(house)
            peak.start()
            began = time.monotonic()
            pusher = Pusher(house.app, connect(house.settings), house.settings, ClassifyOptions())
            ids: list[str] = []
            purged = 0
            while len(ids) < count:
                posts = house.posts(min(10_000, count - len(ids)))
                ids += [post.id for post in posts]
                pusher.push(posts)
                if not purged and len(ids) >= PURGE_AFTER:
                    wait_until(lambda: house.stored() >= PURGE_AFTER, "the first posts are stored")
                    purged = purge(house.redis, house.settings, ids[:PURGED]).results
            wait_until(lambda: house.stored() >= count, "all posts are stored", 1200)
            seconds = time.monotonic() - began
            # A check may be going on.
            wait_until(lambda: _settled(store), "no more results are dropped")
            peak.stop()
        counters = store.counters()
        return {
            "memory_mb": memory / 1e6,
            "peak_mb": round(peak.peak / 1e6, 1),
            "end_mb": round(peak.latest / 1e6, 1),
            "stored": counters.stored,
            "kept": sum(1 for _ in stored_ids(house.redis)),
            "dropped": counters.dropped,
            "purged": purged,
            "trimmed": counters.trimmed,
            "newest": sum(bool(store.get(post_id)) for post_id in ids[-NEWEST:]),
            "posts_per_s": round(count / seconds),
        }
    finally:
        house.close()


def _settled(store: ResultsStore) -> bool:
    before = store.counters()
    time.sleep(1)
    return before == store.counters()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--posts", type=int, default=200_000)
    parser.add_argument("--memory", type=TypeAdapter(ByteSize).validate_python, default=64_000_000)
    given = parser.parse_args(arguments)
    with TemporaryDirectory(prefix="feedmill-memory-") as folder:
        found = run(given.posts, int(given.memory), Path(folder))
    sys.stdout.write(json.dumps(found) + "\n")
    complete = found["stored"] == given.posts == found["kept"] + found["dropped"] + found["purged"]
    return 0 if complete and found["peak_mb"] <= found["memory_mb"] and found["newest"] == NEWEST else 1


if __name__ == "__main__":
    sys.exit(main())
