"""Posts per second from queue to stored result, beside the same model on the same posts without any queue.

    python -m benchmarks.throughput [--posts FILE] [--rounds 3] [--posts-per-message 32]

offline: the whole backlog tokenized, sorted by length and cut by the token budget, forward and scored; the fastest
of a few budgets. feedmill: published by a producer, through Redis, a real worker process with events on, until the
last result is in the store, while Flower listens. The two alternate in one run. The last line is JSON.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import median

from rich.progress import track

from benchmarks.hardware import describe, matrix_ceiling
from feedmill.demo import sample_posts
from feedmill.stack import WORKER_NODE, Stack
from feedmill.watch import worker_statistics
from producers.files import read
from producers.push import Pusher
from shared.broker import connect, make_app
from shared.keys import COUNTERS, RESULTS_STREAM
from shared.messages import ClassifyOptions, Post
from shared.results import ResultsStore
from shared.settings import Settings, load
from workers import device
from workers.classifiers import Row
from workers.classifiers.similarity import Similarity
from workers.weights import locate

#: Token budgets that the offline run tries; its best counts.
OFFLINE_BUDGETS = (1024, 2048, 4096)
#: Seconds after which a round is given up.
LIMIT = 900.0


def offline(classifier: Similarity, posts: Sequence[Post], token_budget: int, row_limit: int) -> float:
    """Posts/s over the sorted backlog, tokenization and scoring included."""
    began = time.perf_counter()
    label_set = classifier.label_set(ClassifyOptions())
    rows = sorted((row for rows in classifier.prepare([post.text for post in posts], label_set) for row in rows),
                  key=lambda row: row.length)  # fmt: skip
    batch: list[Row] = []
    for row in rows:
        if batch and ((len(batch) + 1) * row.length > token_budget or len(batch) == row_limit):
            classifier.finish(batch, classifier.forward(batch))
            batch = []
        batch.append(row)
    classifier.finish(batch, classifier.forward(batch))
    return len(posts) / (time.perf_counter() - began)


def through_the_queue(stack: Stack, settings: Settings, posts: Sequence[Post]) -> float:
    """Posts/s from the first publish to the last stored result, into an empty store."""
    redis = connect(stack.settings)
    for name in redis.scan_iter("feedmill:result:*", count=1000):
        redis.unlink(name)
    redis.unlink(RESULTS_STREAM, COUNTERS)
    store = ResultsStore(redis, stack.settings)
    pusher = Pusher(make_app(settings), redis, settings, ClassifyOptions(), again=True)
    began = time.perf_counter()
    pusher.push(posts)
    while (counters := store.counters()).stored + counters.repeated + counters.failed < pusher.sent:
        stack.check()
        if time.perf_counter() - began > LIMIT:
            raise SystemExit(f"not finished after {LIMIT:.0f} s: {counters}")
        time.sleep(0.02)
    return pusher.sent / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--posts", help="a file of posts; default: the bundled ones, repeated")
    parser.add_argument("--limit", type=int, default=12_000, help="posts, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--posts-per-message", type=int, default=32)
    arguments = parser.parse_args()
    settings = load(posts_per_message=arguments.posts_per_message)
    if arguments.posts:
        posts = [item for item in read(arguments.posts) if isinstance(item, Post)][: arguments.limit]
    else:
        repeated = islice(cycle(sample_posts()), 4_800)
        posts = [post.model_copy(update={"id": f"{post.id}-{number}"}) for number, post in enumerate(repeated)]

    chosen = device.choose(settings.device, settings.dtype)
    print(describe(chosen))
    ceiling = matrix_ceiling(chosen)
    print(f"ceiling: {ceiling:.0f} GFLOP/s in a matrix product")
    classifier = Similarity(locate(settings.model), chosen, settings)
    classifier.warm_up()
    budgets = list(OFFLINE_BUDGETS)
    rates: dict[str, list[float]] = {"offline": [], "feedmill": []}
    with tempfile.TemporaryDirectory(prefix="feedmill-benchmark-") as folder:
        stack = Stack(settings, Path(folder), durable=False)
        try:
            for line in stack.start():
                print(line)
            queue_settings = stack.settings.model_copy(update={"posts_per_message": arguments.posts_per_message})
            for _ in track(
                range(arguments.rounds),
                f"{arguments.rounds} rounds of {len(posts)} posts",
                disable=not sys.stdout.isatty(),
            ):
                # The sweep is made once: its best budget goes on.
                tried = {budget: offline(classifier, posts, budget, settings.batch_rows) for budget in budgets}
                budgets = [max(tried, key=tried.__getitem__)]
                rates["offline"].append(tried[budgets[0]])
                rates["feedmill"].append(through_the_queue(stack, queue_settings, posts))
                print("  ".join(f"{name} {rates[name][-1]:.1f}" for name in rates) + " posts/s")
            pool = worker_statistics(make_app(stack.settings))[WORKER_NODE]
        finally:
            stack.stop()
    shares = [ours / ideal for ours, ideal in zip(rates["feedmill"], rates["offline"], strict=True)]
    print(
        json.dumps(
            {
                "posts": len(posts),
                "posts_per_message": arguments.posts_per_message,
                "offline_token_budget": budgets[0],
                "offline_posts_s": round(median(rates["offline"]), 1),
                "feedmill_posts_s": round(median(rates["feedmill"]), 1),
                "share": round(median(shares), 3),
                "shares": [round(share, 3) for share in shares],
                "padding_efficiency": pool["padding_efficiency"],
                "ceiling_gflops": round(ceiling),
            }
        )
    )


if __name__ == "__main__":
    main()
