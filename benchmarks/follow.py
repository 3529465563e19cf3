"""Measure the milliseconds from writing a result until `feedmill results --follow --json` has
printed it.

    python -m benchmarks.follow [--count 1000] [--rate 50] [--group]

Results are written through ResultsStore, as workers do, to a private Redis at random times
(Poisson). A latency runs from just before the write until this process has read the result's line
from the reader's standard output. The first part writes one result at a time; the second writes
the same number in micro-batches of 32, at the same rate of writes. With --group, the reader is a
member of a consumer group and acknowledges results. The last line is JSON.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median, quantiles

from redis import Redis
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table

from benchmarks.running import free_port, run_folder
from feedmill.shared.broker import connect
from feedmill.shared.errors import StackError
from feedmill.shared.messages import Classification, Post
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import PREFIX, Settings, load, variables
from feedmill.stack.embedded import find_redis_server, server_version
from feedmill.stack.processes import Child, python_command

#: Results per write in the second part, like a worker's micro-batch.
BATCH = 32
#: Number of warm-up results, and the minimum number of results per part that percentiles need.
WARM_UP, MIN_RESULTS = 20, 2
#: Seconds without a result after which the benchmark aborts.
STALL_TIMEOUT_S = 60.0
#: Title and body of every post, and the number of its scores: one for each default topic.
TITLE, BODY, TOPICS = (
    "A title of the usual length, which is some sixty characters long",
    "word " * 100,
    16,
)

console = Console(soft_wrap=True, highlight=False)


class Following:
    """A running `feedmill results --follow`, with the time at which this process read each of its
    output lines.
    """

    def __init__(self, settings: Settings, arguments: list[str]) -> None:
        self._process = subprocess.Popen(
            [*python_command(), "results", "--follow", "--json", *arguments],
            stdout=subprocess.PIPE,
            env=os.environ
            | variables(settings)
            | {f"{PREFIX}REDIS_URL": settings.broker_url},
        )
        #: Time at which each result's line was read, by post id.
        self.read_at: dict[str, float] = {}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None  # noqa: S101 - PIPE was requested above
        for line in self._process.stdout:
            now = time.perf_counter()
            self.read_at[json.loads(line)["id"]] = now

    def wait_for(self, count: int) -> None:
        """Wait until `count` results in total have been read.

        Raises StackError if no more arrive.
        """
        before, last = len(self.read_at), time.monotonic()
        while len(self.read_at) < count:
            time.sleep(0.01)
            if len(self.read_at) != before:
                before, last = len(self.read_at), time.monotonic()
            if (
                self._process.poll() is not None
                or time.monotonic() - last > STALL_TIMEOUT_S
            ):
                raise StackError(
                    f"the reader has exited or stalled after {before} of {count} results."
                )

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()
        self._thread.join()


def made(name: str) -> Iterator[Result]:
    """Yield an endless series of results, each of a different post."""
    scores = {f"topic {number}": 1 / TOPICS for number in range(TOPICS)}
    number = 0
    while True:
        post = Post(id=f"{name}-{number}", title=TITLE, body=BODY, subreddit="python")
        found = Classification(
            id=post.id,
            label="topic 0",
            scores=scores,
            model="m",
            revision=None,
            weights="0" * 64,
            fingerprint="f" * 32,
            classified_at=time.time(),
            worker="w",
            device="cpu",
            queued_seconds=0.1,
        )
        yield Result(post, found)
        number += 1


def measure(
    store: ResultsStore,
    following: Following,
    name: str,
    count: int,
    rate: float,
    batch: int,
) -> list[float]:
    """Write `count` results, `batch` per write, at `rate` writes/s; return each result's latency
    in milliseconds.
    """
    source = random.Random(7)
    results = made(name)
    before = len(following.read_at)
    written: dict[str, float] = {}
    due = time.perf_counter()
    while len(written) < count:
        due += source.expovariate(rate)
        time.sleep(max(0.0, due - time.perf_counter()))
        some = [next(results) for _ in range(min(batch, count - len(written)))]
        began = time.perf_counter()
        store.write(some)
        written.update((result.post.id, began) for result in some)
    following.wait_for(before + count)
    return [
        1000 * (following.read_at[post_id] - began)
        for post_id, began in written.items()
    ]


def percentiles(waits: list[float]) -> dict[str, float]:
    hundredths = quantiles(waits, n=100)
    return {
        "p50_ms": round(median(waits), 2),
        "p90_ms": round(hundredths[89], 2),
        "p99_ms": round(hundredths[98], 2),
    }


def answers(redis: Redis) -> bool:
    with suppress(RedisError):
        return bool(redis.ping())
    return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--count",
        type=int,
        default=1000,
        help=(f"results per part, at least {MIN_RESULTS}"),
    )
    parser.add_argument(
        "--rate", type=float, default=50.0, help="average writes per second"
    )
    parser.add_argument(
        "--group", action="store_true", help=("read as a member of a consumer group")
    )
    arguments = parser.parse_args()
    with run_folder() as folder:
        run(arguments, folder)


def run(arguments: argparse.Namespace, folder: Path) -> None:
    server, port = find_redis_server(), free_port()
    settings = load(redis_url=f"redis://127.0.0.1:{port}/0")
    configuration = f'bind 127.0.0.1\nport {port}\nsave ""\ndir "{folder}"\n'
    child = Child("redis", [server, "-"], folder, dict(os.environ), stdin=configuration)
    following = None
    try:
        redis = connect(settings)
        child.wait_until(lambda: answers(redis))
        version = ".".join(map(str, server_version(server)[1]))
        console.print(
            f"redis-server {version}, {os.cpu_count()} cores, {arguments.rate:g} writes/s"
        )
        following = Following(
            settings, ["--group", "benchmark"] if arguments.group else ["--limit", "0"]
        )
        store = ResultsStore(redis, settings)
        warm(store, following)
        count = max(arguments.count, MIN_RESULTS)
        found = {
            "single": percentiles(
                measure(store, following, "single", count, arguments.rate, 1)
            ),
            "batches": percentiles(
                measure(store, following, "batches", count, arguments.rate, BATCH)
            ),
        }
    finally:
        if following is not None:
            following.stop()
        child.stop(10)
    table = Table(
        "written",
        "p50",
        "p90",
        "p99",
        title="ms from writing to reading",
        title_justify="left",
    )
    for name, figures in found.items():
        table.add_row(name, *(f"{value:.2f}" for value in figures.values()))
    console.print(table)
    print(
        json.dumps(
            found
            | {
                "count": count,
                "rate": arguments.rate,
                "group": arguments.group,
                "redis": version,
            }
        )
    )


def warm(store: ResultsStore, following: Following) -> None:
    """Write results until the reader, which starts at the end of the stream, has read WARM_UP of
    them.
    """
    deadline = time.monotonic() + STALL_TIMEOUT_S
    for result in made("warm"):
        store.write([result])
        time.sleep(0.05)
        if len(following.read_at) >= WARM_UP:
            break
        if time.monotonic() > deadline:
            raise StackError(
                f"the reader has read {len(following.read_at)} results, fewer than {WARM_UP}."
            )
    # The reader may not have read the last results yet.
    written = len(following.read_at)
    time.sleep(0.5)
    while len(following.read_at) != written:
        written = len(following.read_at)
        time.sleep(0.5)


if __name__ == "__main__":
    main()
