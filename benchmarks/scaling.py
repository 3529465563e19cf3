"""Measure how far one Redis scales: throughput of many workers, cost of a post by stage, and
memory.

    python -m benchmarks.scaling [--posts FILE] [--only PART,…] [--rounds 3] [--seconds 10]
    [--backlog 1000000]
                                 [--against FOLDER]

Workers are Feedmill's own with a stand-in for the device (tests/fakes/standin_worker.py) that
takes a fixed time per row, or none; everything but the model is real. Each run starts with the
whole backlog queued and all workers ready. Parts:

    publish   posts/s of two producers on one core, with Redis on the others, 64 posts per
              message: compressed, uncompressed, and of a single producer, which waits for Redis a
              third of its time
    worker    posts/s of one worker whose device takes no time, and its CPU time per post, by
              posts per message; with --against, alternating with the worker of another checkout.
              Microseconds per Redis command
    sharing   posts/s and CPU time per post of one worker whose device takes no time, and of two
              that share it
    stages    cost of a post by posts per message: CPU time of the producer, of Redis, of a worker
              whose device takes no time, and of the real tokenizer; bytes over the network and in
              Redis
    memory    bytes in Redis per waiting post, relative to its JSON, by posts per message
    speedup   throughput of 2, 4 and 8 workers of 1,000 posts/s each relative to one, 32 posts per
              message, and the share of the cores used
    fairness  two workers, one five times slower: time of the first to finish relative to the last
    backlog   posts/s with the whole backlog waiting relative to posts/s with 1,000 posts waiting
    first     seconds from the start of a real worker with a cached model to its first result

Runs that are compared alternate. Progress goes to standard error; the last line is JSON with
medians over the rounds.
"""

import argparse
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from celery import Celery
from redis.exceptions import RedisError
from rich.console import Console

from benchmarks.running import cpu_seconds, free_port
from benchmarks.throughput import read_posts
from feedmill.monitoring.watch import worker_statistics
from feedmill.producers.push import Pusher
from feedmill.shared import encoding
from feedmill.shared.broker import connect, make_app, publish
from feedmill.shared.errors import UserError
from feedmill.shared.keys import COUNTERS, RESULTS_STREAM
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.settings import PREFIX, Settings, variables
from feedmill.stack.embedded import find_redis_server, server_version
from feedmill.stack.processes import Child, python_command

#: This checkout.
ROOT = Path(__file__).parent.parent
PARTS = (
    "publish",
    "worker",
    "sharing",
    "stages",
    "memory",
    "speedup",
    "fairness",
    "backlog",
    "first",
)
#: Posts per message for maximum throughput, and by default.
LARGE, USUAL = 64, 32
#: Posts per message for which `stages` measures, and the number of messages for each.
SIZES, STAGED = (1, 8, USUAL, LARGE), 8000
#: Seconds per row of a fast and a slow stand-in: 1,000 and 200 posts/s.
FAST, SLOW = 0.001, 0.005
#: Redis list that holds a backlog until the workers are ready.
ASIDE = "aside"
#: Start and end of the measurement as shares of a run's posts; ramp-up and ramp-down are left out.
BEGIN, END = 0.1, 0.9
#: Minimum microseconds of Redis time per post for a command to be reported.
MIN_COMMAND_US = 0.05
#: Number of posts waiting in the short backlog.
SHORT_BACKLOG = 1000
#: Seconds without a new result after which the benchmark aborts.
STALL_TIMEOUT_S = 60.0
#: Seconds between checks of the number of results.
POLL_INTERVAL_S = 0.01

#: Lua: move messages from KEYS[1] to KEYS[2] until the latter holds ARGV[1] of them.
TOP_UP = """
for _ = redis.call('LLEN', KEYS[2]) + 1, tonumber(ARGV[1]) do
  redis.call('LMOVE', KEYS[1], KEYS[2], 'RIGHT', 'LEFT')
end
"""

console = Console(stderr=True, soft_wrap=True, highlight=False)


class Pace(NamedTuple):
    """The throughput of a run and the CPU time it took."""

    #: Posts stored per second.
    posts_per_s: float
    #: CPU time of all workers per post, in microseconds.
    worker_us: float
    #: Cores used by the workers and by Redis (seconds of CPU time per second).
    workers: float
    redis: float
    #: Share of all cores used by any process.
    cores_busy: float

    def __str__(self) -> str:
        return (
            f"{self.posts_per_s:,.0f} posts/s; workers: {self.workers:.2f} cores, "
            f"{self.worker_us:.1f} µs per post; "
            f"Redis: {self.redis:.2f} cores; machine {self.cores_busy:.0%} busy"
        )


class Spent(NamedTuple):
    """Redis' resource use: total CPU seconds, total network bytes, and current memory in bytes."""

    cpu: float
    network: int
    memory: int


class Installation:
    """A private redis-server and the workers connected to it."""

    def __init__(self, folder: Path, posts: Sequence[Post], **settings: Any) -> None:
        port = free_port()
        folder.mkdir()
        self._folder = folder
        self._source = posts
        self._number = 0
        self.settings = Settings.model_validate(
            {
                "redis_url": f"redis://127.0.0.1:{port}/0",
                "queue_limit": 10**9,
                "data_folder": folder,
                **settings,
            }
        )
        configuration = (
            f'bind 127.0.0.1\nport {port}\nsave ""\ndir '
            f'"{folder}"\nstream-node-max-entries 1\n'
        )
        self.server = Child(
            "redis",
            [find_redis_server(), "-"],
            folder,
            dict(os.environ),
            stdin=configuration,
        )
        self.redis: Any = connect(self.settings)
        self.server.wait_until(self._answers)
        self.app = make_app(self.settings)

    def _answers(self) -> bool:
        with suppress(RedisError):
            return bool(self.redis.ping())
        return False

    def posts(self, count: int) -> list[Post]:
        """Return the next `count` posts of an endless repetition of the source's posts, with
        unique ids.
        """
        self._number += count
        numbers = range(self._number - count, self._number)
        found = zip(numbers, cycle(self._source), strict=False)
        return [
            Post.model_validate(post.model_dump() | {"id": f"p{number}"})
            for number, post in found
        ]

    def fill(self, count: int, size: int) -> None:
        """Fill the list ASIDE with `count` posts, `size` per message.

        Skip the check for posts sent before.
        """
        for start in range(0, count, 1000 * size):
            posts = self.posts(min(1000 * size, count - start))
            publish(
                self.app,
                [posts[at : at + size] for at in range(0, len(posts), size)],
                ClassifyOptions(),
            )
        self.redis.rename(self.settings.queue, ASIDE)

    def begin(self) -> None:
        self.redis.rename(ASIDE, self.settings.queue)

    @contextmanager
    def workers(
        self, row_seconds: Sequence[float], root: Path = ROOT
    ) -> Iterator[list[Child]]:
        """Run one stand-in worker per entry of `row_seconds` (its time per row).

        Yield the workers once all answer, and stop them afterwards. root: the checkout with the
        workers' code.
        """
        environment = (
            os.environ
            | variables(self.settings)
            | {
                f"{PREFIX}REDIS_URL": self.settings.broker_url,
                f"{PREFIX}TOKEN_BUDGET": "100000",
                f"{PREFIX}CACHE_FOLDER": str(self._folder),
                "PYTHONPATH": str(root),
            }
        )
        command = [sys.executable, "-m", "tests.fakes.standin_worker"]
        children = [
            Child(
                f"w{number}",
                [*command, f"w{number}"],
                self._folder,
                environment | {"STANDIN_ROW_SECONDS": str(each)},
            )
            for number, each in enumerate(row_seconds)
        ]
        try:
            children[0].wait_until(
                lambda: len(worker_statistics(self.app)) == len(children)
            )
            yield children
        finally:
            for child in children:
                child.process.terminate()
            for child in children:
                child.stop(60)

    def spent(self) -> Spent:
        found: Any = self.redis.info()
        network = found["total_net_input_bytes"] + found["total_net_output_bytes"]
        return Spent(
            found["used_cpu_user"] + found["used_cpu_sys"],
            network,
            found["used_memory"],
        )

    def stored(self) -> int:
        return int(self.redis.hget(COUNTERS, "stored") or 0)

    def pace(self, count: int, children: Sequence[Child] = ()) -> Pace:
        """Measure throughput while the workers store the next `count` posts, without the first and
        the last tenth.
        """
        before = self.stored()
        marks = []
        for share in (BEGIN, END):
            self.wait_for(before + count * share)
            taken = sum(cpu_seconds(child.process.pid) for child in children)
            redis = cpu_seconds(self.server.process.pid)
            marks.append(
                (time.perf_counter(), self.stored(), taken, redis, *machine_seconds())
            )
        seconds, posts, taken, redis, busy, cores = (
            end - begin for begin, end in zip(*marks, strict=True)
        )
        return Pace(
            posts / seconds,
            1e6 * taken / posts,
            taken / seconds,
            redis / seconds,
            busy / cores,
        )

    def wait_for(self, stored: float) -> None:
        latest, at = -1, time.monotonic()
        while (now := self.stored()) < stored:
            if now > latest:
                latest, at = now, time.monotonic()
            if time.monotonic() - at > STALL_TIMEOUT_S:
                raise SystemExit(
                    f"no new result for {STALL_TIMEOUT_S:.0f} s, with "
                    f"{stored - now:,.0f} posts missing"
                )
            time.sleep(POLL_INTERVAL_S)

    def clear(self) -> None:
        self.redis.flushall()

    def close(self) -> None:
        self.server.stop(20)


def machine_seconds() -> tuple[float, float]:
    """Return the busy and the total CPU time of all cores since boot, in clock ticks."""
    numbers = [
        int(number)
        for number in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    ]
    return sum(numbers) - numbers[3] - numbers[4], float(sum(numbers))


def produce(settings: Settings, posts: Sequence[Post], ready: Any, spent: Any) -> None:
    """Send posts as a producer does (look up, publish, mark) in a child process; put its CPU
    seconds into `spent`.
    """
    pusher = Pusher(make_app(settings), connect(settings), settings, ClassifyOptions())
    pusher.push(posts[:LARGE])  # opens the connection
    ready.wait()
    cpu = time.process_time()
    pusher.push(posts[LARGE:])
    spent.put(time.process_time() - cpu)


def measure_publish(house: Installation, given: argparse.Namespace) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    rates: dict[tuple[int, str], list[float]] = {
        (1, "gzip"): [],
        (2, "gzip"): [],
        (2, "none"): [],
    }
    spent: dict[tuple[int, str], list[float]] = {kind: [] for kind in rates}
    fork = multiprocessing.get_context("fork")
    compressed_from = encoding.MIN_COMPRESSED_CHARACTERS
    try:
        if len(cores) > 1:
            os.sched_setaffinity(0, cores[:1])
            os.sched_setaffinity(house.server.process.pid, cores[1:])
        for number in range(given.rounds):
            for kind in list(rates)[:: -1 if number % 2 else 1]:
                count, packed = kind
                house.clear()
                encoding.MIN_COMPRESSED_CHARACTERS = (
                    compressed_from if packed == "gzip" else sys.maxsize
                )
                settings = house.settings.model_copy(
                    update={"posts_per_message": LARGE}
                )
                ready, told = fork.Barrier(count + 1), fork.Queue()
                parts = [
                    house.posts(LARGE + given.published // count) for _ in range(count)
                ]
                gc.freeze()  # keeps garbage collection in the children from copying shared pages
                producers = [
                    fork.Process(target=produce, args=(settings, part, ready, told))
                    for part in parts
                ]
                for producer in producers:
                    producer.start()
                ready.wait()
                began = time.perf_counter()
                cpu = sum(told.get() for _ in producers)
                sent = sum(map(len, parts)) - count * LARGE
                rates[kind].append(sent / (time.perf_counter() - began))
                spent[kind].append(1e6 * cpu / sent)
                for producer in producers:
                    producer.join()
                console.print(
                    f"publish, {count} producers, {packed}: {rates[kind][-1]:,.0f} posts/s"
                )
    finally:
        encoding.MIN_COMPRESSED_CHARACTERS = compressed_from
        gc.unfreeze()
        os.sched_setaffinity(0, cores)
        os.sched_setaffinity(house.server.process.pid, cores)
        house.clear()
    return {
        "publish_posts_s": round(median(rates[2, "gzip"])),
        "publish_unpacked_posts_s": round(median(rates[2, "none"])),
        "publish_alone_posts_s": round(median(rates[1, "gzip"])),
        "publish_cpu_us": round(median(spent[2, "gzip"]), 1),
        "publish_unpacked_cpu_us": round(median(spent[2, "none"]), 1),
    }


def measure_worker(house: Installation, given: argparse.Namespace) -> dict[str, Any]:
    checkouts = {"": ROOT} | ({"before_": given.against} if given.against else {})
    paces: dict[tuple[str, int], list[Pace]] = {
        (name, size): [] for size in SIZES for name in checkouts
    }
    commands: dict[str, float] = {}
    for number in range(given.rounds):
        for name, size in list(paces)[:: -1 if number % 2 else 1]:
            count = min(given.published, STAGED * size)
            house.clear()
            house.fill(count, size)
            with house.workers([0.0], checkouts[name]) as children:
                house.redis.config_resetstat()
                house.begin()
                paces[name, size].append(house.pace(count, children))
                house.wait_for(count)
            console.print(f"worker: {name}{size} per message: {paces[name, size][-1]}")
            if (name, size) == ("", LARGE):
                commands = {
                    command.removeprefix("cmdstat_"): round(figures["usec"] / count, 2)
                    for command, figures in house.redis.info("commandstats").items()
                    if figures["usec"] / count > MIN_COMMAND_US
                }
    found: dict[str, Any] = {"worker_redis_us": commands}
    for name in checkouts:
        of_sizes = {size: paces[name, size] for size in SIZES}
        found[f"{name}worker_posts_s"] = {
            size: _median(each, "posts_per_s", 0) for size, each in of_sizes.items()
        }
        found[f"{name}worker_cpu_us"] = {
            size: _median(each, "worker_us", 1) for size, each in of_sizes.items()
        }
    return found


def measure_sharing(house: Installation, given: argparse.Namespace) -> dict[str, Any]:
    paces: dict[tuple[int, int], list[Pace]] = {
        (size, workers): [] for size in (1, USUAL, LARGE) for workers in (1, 2)
    }
    for number in range(given.rounds):
        for size, workers in list(paces)[:: -1 if number % 2 else 1]:
            count = min(given.published, STAGED * size)
            house.clear()
            house.fill(count, size)
            with house.workers([0.0] * workers) as children:
                house.begin()
                paces[size, workers].append(house.pace(count, children))
                house.wait_for(count)
            console.print(
                f"sharing: {size} per message, {workers} workers: {paces[size, workers][-1]}"
            )
    return {
        f"sharing_{what}": {
            f"{size}x{workers}": _median(each, field, digits)
            for (size, workers), each in paces.items()
        }
        for what, field, digits in (
            ("posts_s", "posts_per_s", 0),
            ("cpu_us", "worker_us", 1),
            ("cores", "workers", 2),
        )
    }


def _median(paces: Sequence[Pace], field: str, digits: int) -> float:
    return round(median(float(getattr(pace, field)) for pace in paces), digits)


def measure_stages(house: Installation, given: argparse.Namespace) -> dict[str, Any]:
    found: dict[int, dict[str, float]] = {}
    for size in SIZES:
        house.clear()
        posts = house.posts(min(given.published, STAGED * size))
        settings = house.settings.model_copy(update={"posts_per_message": size})
        pusher = Pusher(make_app(settings), house.redis, settings, ClassifyOptions())
        start, cpu = house.spent(), time.process_time()
        pusher.push(posts)
        cpu, sent = time.process_time() - cpu, house.spent()
        house.redis.rename(settings.queue, ASIDE)
        with house.workers([0.0]) as (child,):
            ready, before = house.spent(), cpu_seconds(child.process.pid)
            house.begin()
            house.wait_for(len(posts))
            worked, stored = cpu_seconds(child.process.pid) - before, house.spent()
        found[size] = {
            "producer_us": round(1e6 * cpu / len(posts), 1),
            "redis_publish_us": round(1e6 * (sent.cpu - start.cpu) / len(posts), 1),
            "worker_us": round(1e6 * worked / len(posts), 1),
            "redis_work_us": round(1e6 * (stored.cpu - ready.cpu) / len(posts), 1),
            "network_bytes": round(
                (sent.network - start.network + stored.network - ready.network)
                / len(posts)
            ),
            "waiting_bytes": round((sent.memory - start.memory) / len(posts)),
            "stored_bytes": round((stored.memory - start.memory) / len(posts)),
        }
        console.print(f"stages: {size} per message: {found[size]}")
    house.clear()
    return {"stages_by_posts_per_message": found, "tokenize_us": _tokenizing(house)}


def _tokenizing(house: Installation) -> float:
    """Return the CPU time that the embedded model's tokenizer takes per post, in microseconds."""
    from feedmill.workers.models.classifiers.registry import load_classifier  # noqa: PLC0415 - torch
    from feedmill.workers.models.device import select_device  # noqa: PLC0415

    classifier = load_classifier(house.settings, select_device("cpu"))
    label_set, texts = (
        classifier.label_set(ClassifyOptions()),
        [post.text for post in house.posts(6400)],
    )
    began = time.process_time()
    for start in range(0, len(texts), LARGE):
        classifier.prepare(texts[start : start + LARGE], label_set)
    took = round(1e6 * (time.process_time() - began) / len(texts), 1)
    console.print(f"stages: the tokenizer takes {took} µs per post")
    return took


def measure_memory(house: Installation, _: argparse.Namespace) -> dict[str, Any]:
    found, stock = {}, {}
    for size in SIZES:
        house.clear()
        posts = house.posts(6400)
        plain = sum(
            len(post.model_dump_json(exclude_defaults=True).encode()) for post in posts
        ) / len(posts)
        publish(
            house.app,
            [posts[at : at + size] for at in range(0, len(posts), size)],
            ClassifyOptions(),
        )
        held = house.redis.memory_usage(house.settings.queue, samples=0) / len(posts)
        found[size] = round(held / plain, 3)
        console.print(
            f"memory: {size} per message: {held:.0f} bytes per waiting post, "
            f"{found[size]} of its JSON"
        )
        stock[size] = {
            packed: _held_by_stock_client(house, posts, size, packed)
            for packed in ("none", "gzip")
        }
        console.print(
            f"memory: {size} per message, sent by a stock Celery client: {stock[size]} bytes"
        )
    house.clear()
    return {
        "bytes_per_post_over_json": found[LARGE],
        "bytes_over_json_by_posts_per_message": found,
        "stock_client_bytes_per_post": stock,
    }


def _held_by_stock_client(
    house: Installation, posts: Sequence[Post], size: int, packed: str
) -> int:
    """Return the bytes in Redis per waiting post when a stock Celery client sends the posts."""
    house.clear()
    client: Any = Celery(
        "elsewhere", broker=house.settings.broker_url, set_as_current=False
    )
    compression = None if packed == "none" else packed
    for at in range(0, len(posts), size):
        given = {
            "posts": [
                post.model_dump(exclude_defaults=True) for post in posts[at : at + size]
            ]
        }
        client.send_task(
            "feedmill.classify",
            kwargs=given,
            queue=house.settings.queue,
            compression=compression,
        )
    held: int = house.redis.memory_usage(house.settings.queue, samples=0)
    return round(held / len(posts))


def measure_speedup(house: Installation, given: argparse.Namespace) -> dict[str, Any]:
    paces: dict[int, list[Pace]] = {1: [], 2: [], 4: [], 8: []}
    for number in range(given.rounds):
        for count in list(paces)[:: -1 if number % 2 else 1]:
            house.clear()
            posts = round(count * given.seconds / FAST)
            house.fill(posts, USUAL)
            with house.workers([FAST] * count) as children:
                house.begin()
                paces[count].append(house.pace(posts, children))
                house.wait_for(posts)
            console.print(f"speedup: {count} workers: {paces[count][-1]}")
    rates = {
        count: median(pace.posts_per_s for pace in each)
        for count, each in paces.items()
    }
    taken = {
        count: [round(share, 2) for share in each[-1][2:]]
        for count, each in paces.items()
    }
    speedups = {
        f"speedup_{count}": round(rates[count] / rates[1], 2) for count in (2, 4, 8)
    }
    return speedups | {
        "one_worker_posts_s": round(rates[1]),
        "cores_of_workers_redis_and_share_of_all": taken,
    }


def measure_fairness(house: Installation, given: argparse.Namespace) -> dict[str, Any]:
    ratios = []
    for _ in range(given.rounds):
        house.clear()
        posts = round(2 * given.seconds * (1 / FAST + 1 / SLOW))
        house.fill(posts, USUAL)
        with house.workers([FAST, SLOW]):
            began = house.redis.time()
            house.begin()
            house.wait_for(posts)
        ended: dict[str, float] = {}
        for entry, fields in house.redis.xrange(RESULTS_STREAM):
            ended[json.loads(fields["classification"])["worker"]] = (
                int(entry.partition("-")[0]) / 1000
            )
        took = [at - began[0] - began[1] / 1e6 for at in ended.values()]
        ratios.append(min(took) / max(took))
        console.print(
            "fairness: the workers finished after "
            f"{', '.join(f'{each:.1f}' for each in sorted(took))} s"
        )
    return {"fairness_ratio": round(median(ratios), 3)}


def measure_backlog(house: Installation, given: argparse.Namespace) -> dict[str, Any]:
    """Compare the throughput with a long and a short backlog.

    Each round consumes a part of the long backlog; the short backlog is topped up.
    """
    rates: dict[str, list[float]] = {"long": [], "short": []}
    short = Installation(house._folder / "short", house._source)
    try:
        house.clear()
        with console.status(f"sending {given.backlog:,} posts …"):
            house.fill(given.backlog + given.rounds * given.published, LARGE)
            house.begin()
        for number in range(given.rounds):
            for name, at in (("long", house), ("short", short))[
                :: -1 if number % 2 else 1
            ]:
                if name == "short":
                    at.fill(given.published, LARGE)
                else:
                    at.redis.rename(at.settings.queue, ASIDE)
                with (
                    at.workers([0.0]),
                    _topped_up(at, SHORT_BACKLOG // LARGE if name == "short" else 0),
                ):
                    if name == "long":
                        at.begin()
                    rates[name].append(at.pace(given.published).posts_per_s)
                    if name == "short":
                        at.wait_for(len(rates[name]) * given.published)
                console.print(f"backlog {name}: {rates[name][-1]:,.0f} posts/s")
    finally:
        short.close()
        house.clear()
    ratio = median(
        mine / other for mine, other in zip(rates["long"], rates["short"], strict=True)
    )
    return {"backlog_ratio": round(ratio, 3), "backlog_posts": given.backlog}


@contextmanager
def _topped_up(house: Installation, messages: int) -> Iterator[None]:
    """While the block runs, keep `messages` messages in the queue, refilled from the list ASIDE
    until that is empty.
    """
    done = threading.Event()
    script = house.redis.register_script(TOP_UP)

    def run() -> None:
        while not done.wait(0.002):
            script(keys=[ASIDE, house.settings.queue], args=[messages])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def measure_first(house: Installation, given: argparse.Namespace) -> dict[str, Any]:
    """Measure the time to the first result; the first start, which measures the token budget, is
    not counted.
    """
    took = []
    environment = (
        os.environ
        | variables(house.settings)
        | {
            f"{PREFIX}REDIS_URL": house.settings.broker_url,
            f"{PREFIX}CACHE_FOLDER": str(house._folder / "cache"),
            f"{PREFIX}DATA_FOLDER": str(house._folder),
        }
    )
    for number in range(given.rounds + 1):
        house.clear()
        publish(house.app, [house.posts(1)], ClassifyOptions())
        began = time.perf_counter()
        child = Child(
            "worker", [*python_command(), "worker"], house._folder, environment
        )
        try:
            house.wait_for(1)
            took += [time.perf_counter() - began] * bool(number)
        finally:
            child.stop(60)
        console.print(
            (
                f"first: {time.perf_counter() - began:.1f} s with calibration and shutdown, not "
                "counted"
            )
            if not number
            else f"first: {took[-1]:.1f} s"
        )
    return {"first_result_s": round(median(took), 2)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--posts",
        default=None,
        help=("JSONL file of posts; default: the bundled posts"),
    )
    parser.add_argument(
        "--only", default=",".join(PARTS), help=("parts, comma-separated; default: all")
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help=("duration of each run with a timed stand-in"),
    )
    parser.add_argument(
        "--published",
        type=int,
        default=64_000,
        help=("posts of each run whose device takes no time"),
    )
    parser.add_argument(
        "--backlog", type=int, default=1_000_000, help="posts of the long backlog"
    )
    parser.add_argument(
        "--against",
        type=Path,
        help=("another checkout, whose workers alternate in the part `worker`"),
    )
    given = parser.parse_args(arguments)
    parts = given.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(
            f"--only: unknown {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}"
        )
    try:
        posts = read_posts(given.posts, 12_000)
    except UserError as error:
        parser.error(str(error))
    version = ".".join(map(str, server_version(find_redis_server())[1]))
    console.print(
        f"{os.cpu_count()} cores, Redis {version}, Python {sys.version.split()[0]}, "
        f"{len(posts):,} posts"
    )
    found: dict[str, Any] = {"cores": os.cpu_count(), "redis": version}
    with tempfile.TemporaryDirectory() as folder:
        house = Installation(Path(folder) / "house", posts)
        try:
            for part in PARTS:
                if part in parts:
                    found |= globals()[f"measure_{part}"](house, given)
        finally:
            house.close()
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
