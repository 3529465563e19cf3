"""Measure what a post costs in Redis: bytes of memory, and CPU time of writing and finding.

    python -m benchmarks.memory [--posts FILE] [--count 100000] [--rounds 1] [--against CHECKOUT]

Marks and stores the posts in an empty Redis, with scores for the sixteen default topics, and looks
them up before and after. Bytes are the growth of `used_memory` (INFO) ÷ posts: all keys, with
their overhead; the results stream is shown by itself. CPU time is that of this
process and of Redis (INFO cpu), in µs per post.

--against: another checkout of Feedmill to compare with. Both are measured in turn in each round,
by processes of their own, and the median of the rounds is printed. The last line is JSON.
"""

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.hardware import describe
from benchmarks.running import run_folder
from benchmarks.throughput import read_posts
from feedmill.producers import push
from feedmill.producers.push import POSTS_PER_ROUND_TRIP, mark_of
from feedmill.shared import broker
from feedmill.shared.keys import RESULTS_STREAM
from feedmill.shared.messages import Classification, ClassifyOptions, Post, digest
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import PREFIX, TOPICS, load
from feedmill.stack.embedded import Stack
from feedmill.workers.models import device

#: Posts per write, about the size of the default model's micro-batch on a CPU, and per message.
WRITE_SIZE, MESSAGE_SIZE = 40, 32
HOME = Path(__file__).parent.parent

console = Console(soft_wrap=True, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--posts", help="file of posts; default: the bundled posts, repeated"
    )
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--against", type=Path, help="another checkout of Feedmill")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(
            json.dumps(
                measure(repeated(read_posts(given.posts, given.count), given.count))
            )
        )
        return
    console.print(describe(device.select_device("cpu", "auto", "torch")))
    checkouts = {"this": HOME} | (
        {"other": given.against.resolve()} if given.against else {}
    )
    found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    with run_folder() as folder:
        stack = Stack(load(), folder, durable=False)
        next(stack.start())  # starts only Redis
        try:
            for number in range(given.rounds):
                for name, checkout in list(checkouts.items())[
                    :: -1 if number % 2 else 1
                ]:
                    command = ["--measure", "--count", str(given.count)]
                    command += (
                        ["--posts", str(Path(given.posts).resolve())]
                        if given.posts
                        else []
                    )
                    found[name].append(
                        _measure_in(checkout, command, stack.settings.broker_url)
                    )
        finally:
            stack.stop()
    medians = {name: _medians(rounds) for name, rounds in found.items()}
    table = Table("per post", *medians)
    for name in medians["this"]:
        table.add_row(name, *(f"{each[name]:,}" for each in medians.values()))
    console.print(table)
    print(json.dumps({"count": given.count, "rounds": given.rounds, **medians}))


def repeated(posts: Sequence[Post], count: int) -> list[Post]:
    """Return `count` posts: the given ones, repeated with new ids of the form of Reddit's."""
    return [
        post.model_copy(update={"id": f"t3_{number * 2_654_435_761 % 36**7:07x}"})
        for number, post in enumerate(islice(cycle(posts), count))
    ]


def measure(posts: Sequence[Post]) -> dict[str, float]:
    """Return bytes and CPU time per post, in the empty Redis of the settings."""
    settings = load()
    redis: Any = broker.connect(settings)
    store = ResultsStore(redis, settings)
    chance = random.Random(0)
    results = [Result(post, _classified(post, chance)) for post in posts]
    marks = [mark_of(post, "purpose") for post in posts]
    wanted = [(post.id, found.fingerprint) for post, found in results]
    store.write(results[:1])
    push.mark_sent(
        redis, marks[:1], settings.sent_ttl, settings.sent_memory
    )  # loads the scripts
    redis.flushall()
    found: dict[str, float] = {}
    gc.collect()
    gc.disable()  # as good as in a worker, whose heap is frozen

    def each(
        what: str, call: Callable[[Any], object], items: Sequence[Any], size: int
    ) -> None:
        before, used = _cpu(redis), _used(redis)
        for start in range(0, len(items), size):
            call(items[start : start + size])
        for name, seconds, earlier in zip(
            ("process", "Redis"), _cpu(redis), before, strict=True
        ):
            found[f"{what}, µs of {name}"] = round(
                1e6 * (seconds - earlier) / len(items), 2
            )
        found[f"{what}, bytes"] = round((_used(redis) - used) / len(items), 1)

    each(
        "look up unsent",
        lambda some: push.lookup(redis, some),
        marks,
        POSTS_PER_ROUND_TRIP,
    )
    each(
        "mark",
        lambda some: push.mark_sent(
            redis, some, settings.sent_ttl, settings.sent_memory
        ),
        marks,
        POSTS_PER_ROUND_TRIP,
    )
    each(
        "look up sent",
        lambda some: push.lookup(redis, some),
        marks,
        POSTS_PER_ROUND_TRIP,
    )
    redis.flushall()
    each("find nothing", store.find, wanted, MESSAGE_SIZE)
    each("write", store.write, results, WRITE_SIZE)
    each("find", store.find, wanted, MESSAGE_SIZE)
    used, length = _used(redis), redis.xlen(RESULTS_STREAM)
    redis.delete(RESULTS_STREAM)
    stream = used - _used(redis)
    found["write, bytes"] = round(found["write, bytes"] - stream / len(results), 1)
    found["entry of the results stream, bytes"] = round(stream / length, 1)
    redis.flushall()
    app = broker.make_app(settings)
    messages = [
        posts[start : start + MESSAGE_SIZE]
        for start in range(0, len(posts), MESSAGE_SIZE)
    ]
    broker.publish(app, messages, ClassifyOptions(), settings.priority, None)
    found["waiting, bytes"] = round(_list_bytes(redis, settings.queue) / len(posts), 1)
    size = sum(
        len(post.model_dump_json(exclude_defaults=True)) for post in posts
    ) / len(posts)
    found["waiting, share of its JSON"] = round(found["waiting, bytes"] / size, 3)
    redis.flushall()
    return found


def _classified(post: Post, chance: random.Random) -> Classification:
    weights = {topic: chance.random() ** 8 for topic in TOPICS}
    total = sum(weights.values())
    scores = dict(
        sorted(
            ((topic, each / total) for topic, each in weights.items()),
            key=lambda item: -item[1],
        )
    )
    return Classification(
        id=post.id,
        label=next(iter(scores)),
        scores=scores,
        model="sentence-transformers/all-MiniLM-L6-v2",
        revision=None,
        weights=digest("weights") * 2,
        fingerprint=digest(post.id, post.text),
        classified_at=time.time(),
        worker="feedmill@worker-0",
        device="cpu",
        queued_seconds=chance.random(),
    )


def _cpu(redis: Any) -> tuple[float, float]:
    """Return the seconds of CPU time that this process and Redis have used."""
    info = redis.info("cpu")
    return time.process_time(), info["used_cpu_user"] + info["used_cpu_sys"]


def _used(redis: Any) -> int:
    return int(redis.info("memory")["used_memory"])


def _list_bytes(redis: Any, name: str) -> int:
    return sum(
        redis.memory_usage(each, samples=0) or 0 for each in broker.queue_lists(name)
    )


def _measure_in(checkout: Path, arguments: Sequence[str], url: str) -> dict[str, float]:
    """Run this file with the packages of a checkout."""
    environment = os.environ | {"PYTHONPATH": str(checkout), f"{PREFIX}REDIS_URL": url}
    program = (
        f"import runpy; runpy.run_path({str(Path(__file__))!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(median(each[name] for each in rounds), 3) for name in rounds[0]}


if __name__ == "__main__":
    main()
