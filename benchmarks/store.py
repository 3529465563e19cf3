"""Measure the cost of storing results relative to computing them.

    python -m benchmarks.store [--posts FILE] [--count 1500] [--rounds 3]

Each round classifies posts through the worker's pipeline without a queue, then writes the results to a real Redis (a
micro-batch at a time) and looks them up (a message at a time), as a worker does. A worker does both on threads other
than the device thread, so each share is an upper bound of the device time lost. The last line is JSON.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console

from benchmarks.hardware import describe
from benchmarks.running import run_folder
from benchmarks.throughput import read_posts
from feedmill.stack.embedded import Stack
from shared.broker import connect
from shared.errors import StackError
from shared.messages import Classification
from shared.results import Result, ResultsStore
from shared.scripts.results import forget
from shared.settings import load
from workers.models import device
from workers.models.classifiers.registry import load_classifier
from workers.pipeline import offline
from workers.pipeline.calibration import calibrate

#: Posts per write, about the size of the default model's micro-batch on a CPU.
WRITE_SIZE = 40

console = Console(soft_wrap=True, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--posts", help="file of posts; default: the bundled posts, repeated")
    parser.add_argument("--count", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with run_folder() as folder:
        print(json.dumps(run(given.posts, given.count, given.rounds, folder)))


def run(file: str | None, count: int, rounds: int, folder: Path) -> dict[str, Any]:
    settings = load()
    posts = read_posts(file, count)
    where = device.select_device(settings.device, settings.dtype, settings.engine)
    console.print(describe(where))
    classifier = load_classifier(settings, where)
    budget = calibrate(classifier, settings)
    stack = Stack(settings, folder, durable=False)
    next(stack.start())  # starts only Redis
    try:
        redis = connect(stack.settings)
        store = ResultsStore(redis, stack.settings)
        computed, written, found = [], [], []
        for number in range(rounds):
            began = perf_counter()
            outcomes = list(offline.classify(posts, classifier, settings, budget))
            computed.append((perf_counter() - began) / len(posts))
            results = [Result(post, outcome) for post, outcome in outcomes if isinstance(outcome, Classification)]
            if len(results) < len(posts):
                raise StackError(f"{len(posts) - len(results)} posts could not be classified.")
            written.append(_seconds(store.write, results, WRITE_SIZE))
            wanted = [(result.post.id, result.classification.fingerprint) for result in results]
            found.append(_seconds(store.find, wanted, settings.posts_per_message))
            forget(redis, [post.id for post in posts])
            console.print(
                f"round {number + 1}: {1 / computed[-1]:.1f} posts/s computed; relative to that, writing a post takes "
                f"{written[-1] / computed[-1]:.2%} and a lookup {found[-1] / computed[-1]:.2%}"
            )
    finally:
        stack.stop()
    return {
        "posts": len(posts),
        "posts_per_second": round(1 / median(computed), 1),
        "write_us": round(1e6 * median(written), 1),
        "find_us": round(1e6 * median(found), 1),
        "write_share": round(median(w / c for w, c in zip(written, computed, strict=True)), 4),
        "find_share": round(median(f / c for f, c in zip(found, computed, strict=True)), 4),
    }


def _seconds(call: Any, items: Sequence[Any], together: int) -> float:
    """Call `call` with each slice of `together` items; return the mean seconds per item."""
    began = perf_counter()
    for start in range(0, len(items), together):
        call(items[start : start + together])
    return (perf_counter() - began) / len(items)


if __name__ == "__main__":
    main()
