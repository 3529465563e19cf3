"""Measure the milliseconds from publishing a post until its result is readable, idle and under
load.

    python -m benchmarks.latency [--posts FILE] [--count 200] [--seconds 20]

Idle: one post at a time through the real system (Redis, a worker process with events on, Flower
listening). The same post's bare forward pass runs in this process just before; the difference is
the system's overhead. Loaded: posts at 25, 50, 75 and 90% of the maximum rate, which is measured
first, at random times (Poisson), one post per message. The last line is JSON.
"""

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.hardware import describe, matrix_ceiling
from benchmarks.running import run_folder
from benchmarks.throughput import read_posts
from feedmill.shared.broker import connect, make_app, publish
from feedmill.shared.errors import StackError
from feedmill.shared.keys import RESULTS_STREAM
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.settings import Settings, load
from feedmill.stack.embedded import Stack
from feedmill.workers.models import device
from feedmill.workers.models.classifiers import Classifier
from feedmill.workers.models.classifiers.registry import load_classifier

#: Loads as shares of the maximum rate.
LOADS = (0.25, 0.5, 0.75, 0.9)
#: Posts for the measurement of the maximum rate, and for the warm-up.
RATE_POSTS, WARM_UP = 600, 20
#: Seconds without a result after which the benchmark aborts.
STALL_TIMEOUT_S = 60.0

console = Console(soft_wrap=True, highlight=False)


class Posting:
    """A client of the running system: publishes posts and reads their results."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._app = make_app(stack.settings)
        self._redis: Any = connect(stack.settings)
        self._cursor = "0"
        #: Time at which each result was read, by post id.
        self.read_at: dict[str, float] = {}

    def send(self, post: Post) -> float:
        """Publish a message with this post and return the time just before."""
        began = time.perf_counter()
        publish(self._app, [[post]], ClassifyOptions())
        return began

    def read(self, block_ms: int = 1000) -> int:
        """Read new entries of the results stream, waiting up to `block_ms` for the first one;
        return their number.
        """
        answer = self._redis.xread({RESULTS_STREAM: self._cursor}, block=block_ms)
        now = time.perf_counter()
        # redis-py returns a mapping or a list of pairs, depending on the protocol.
        streams = (
            answer.values()
            if isinstance(answer, dict)
            else [entries for _, entries in answer or ()]
        )
        count = 0
        for entries in streams:
            for entry_id, fields in (
                entries[0] if entries and isinstance(entries[0], list) else entries
            ):
                self.read_at[json.loads(fields["post"])["id"]] = now
                self._cursor = entry_id
                count += 1
        return count

    def read_until(self, count: int) -> None:
        """Read until `count` results in total have arrived.

        Raises StackError if no more arrive.
        """
        last = time.perf_counter()
        while len(self.read_at) < count:
            if self.read():
                last = time.perf_counter()
            self._stack.check()
            if time.perf_counter() - last > STALL_TIMEOUT_S:
                raise StackError(
                    f"no result for {STALL_TIMEOUT_S:.0f} s, after {len(self.read_at)} of {count}."
                )


def idle(
    posting: Posting, classifier: Classifier, posts: Sequence[Post]
) -> dict[str, float]:
    """Send one post at a time; return the latency, the bare forward pass's time and the
    difference.
    """
    through, bare, added = [], [], []
    label_set = classifier.label_set(ClassifyOptions())
    for post in track(posts, "idle", console=console, disable=not sys.stdout.isatty()):
        began = time.perf_counter()
        (rows,) = classifier.prepare([post.text], label_set)
        classifier.finish(rows, classifier.forward(rows))
        alone = time.perf_counter() - began
        sent = posting.send(post)
        posting.read_until(len(posting.read_at) + 1)
        through.append(1000 * (posting.read_at[post.id] - sent))
        bare.append(1000 * alone)
        added.append(through[-1] - bare[-1])
    return {
        "p50_ms": median(through),
        "p99_ms": percentile(through, 99),
        "bare_p50_ms": median(bare),
        "added_p50_ms": median(added),
    }


def rate(posting: Posting, posts: Sequence[Post]) -> float:
    """Return the throughput in posts/s when posts arrive faster than they are classified, one per
    message.
    """
    before = len(posting.read_at)
    began = time.perf_counter()
    for post in posts:
        posting.send(post)
    posting.read_until(before + len(posts))
    return len(posts) / (time.perf_counter() - began)


def loaded(
    posting: Posting, posts: Iterator[Post], posts_per_s: float, seconds: float
) -> dict[str, float]:
    """Send posts at random times, `posts_per_s` on average, and return the latency percentiles."""
    source = random.Random(7)
    moments, moment = [], 0.0
    while moment < seconds:
        moment += source.expovariate(posts_per_s)
        moments.append(moment)
    sent: dict[str, float] = {}
    start = time.perf_counter()

    def produce() -> None:
        for due in moments:
            time.sleep(max(0.0, start + due - time.perf_counter()))
            post = next(posts)
            # The latency runs from the due time: a producer that falls behind must not make the
            # system look fast.
            sent[post.id] = start + due
            posting.send(post)

    before = len(posting.read_at)
    thread = threading.Thread(target=produce)
    thread.start()
    posting.read_until(before + len(moments))
    thread.join()
    waits = [1000 * (posting.read_at[post_id] - due) for post_id, due in sent.items()]
    return {
        "posts_s": posts_per_s,
        "p50_ms": median(waits),
        "p99_ms": percentile(waits, 99),
    }


def percentile(values: Sequence[float], percent: int) -> float:
    return quantiles(values, n=100)[percent - 1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--posts", help="file of posts; default: the bundled posts, repeated"
    )
    parser.add_argument(
        "--count", type=int, default=200, help="posts of the idle run, at least 2"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help=("duration of each load, in seconds"),
    )
    arguments = parser.parse_args()
    with run_folder() as folder:
        run(arguments, load(), folder)


def run(arguments: argparse.Namespace, settings: Settings, folder: Path) -> None:
    chosen = device.select_device(settings.device, settings.dtype)
    console.print(describe(chosen))
    ceiling = matrix_ceiling(chosen)
    console.print(f"ceiling: {ceiling:.0f} GFLOP/s in a matrix product")
    classifier = load_classifier(settings, chosen)
    known = read_posts(arguments.posts, 12_000)
    # Unique ids, so that no post finds an earlier result.
    posts = (
        post.model_copy(update={"id": f"{turn}-{post.id}"})
        for turn in range(1_000_000)
        for post in known
    )
    stack = Stack(settings, folder, durable=False)
    try:
        for line in stack.start():
            console.print(line)
        posting = Posting(stack)
        for _ in range(WARM_UP):
            posting.send(next(posts))
        posting.read_until(WARM_UP)
        alone = idle(
            posting, classifier, [next(posts) for _ in range(max(2, arguments.count))]
        )
        most = rate(posting, [next(posts) for _ in range(RATE_POSTS)])
        console.print(f"maximum rate: {most:.1f} posts/s, one per message")
        loads = {}
        for load_share in LOADS:
            loads[f"{load_share:.0%}"] = loaded(
                posting, posts, load_share * most, arguments.seconds
            )
    finally:
        stack.stop()
    table = Table(
        "load",
        "posts/s",
        "p50",
        "p99",
        title="ms from publishing to the result",
        title_justify="left",
    )
    table.add_row("idle", "", f"{alone['p50_ms']:.1f}", f"{alone['p99_ms']:.1f}")
    for name, found in loads.items():
        table.add_row(
            name,
            f"{found['posts_s']:.1f}",
            f"{found['p50_ms']:.1f}",
            f"{found['p99_ms']:.1f}",
        )
    console.print(table)
    print(
        json.dumps(
            rounded(
                {
                    "idle": alone,
                    "loads": loads,
                    "most_posts_s": most,
                    "ceiling_gflops": ceiling,
                }
            )
        )
    )


def rounded(found: Any) -> Any:
    """Round every number to two decimals."""
    if isinstance(found, dict):
        return {name: rounded(value) for name, value in found.items()}
    return round(found, 2)


if __name__ == "__main__":
    main()
