"""Measure the cost of tracing to a worker: CPU time per post with and without OpenTelemetry.

    python -m benchmarks.tracing --posts posts.jsonl --limit 2000 --rounds 6

Two workers run, one of them traced; posts go to them in turn, 32 in a message. A collector in this
process receives the spans and drops them. Publishing is not part of it.
"""

import argparse
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median

from benchmarks.hardware import describe
from benchmarks.ours import FeedmillVariant
from benchmarks.rivals import BenchmarkJob
from benchmarks.running import cpu_seconds, family, run_folder
from benchmarks.throughput import read_posts
from feedmill.shared.messages import Post
from feedmill.shared.settings import load
from feedmill.workers.models import device

POSTS_PER_MESSAGE = 32
#: Posts that each worker classifies untimed.
WARM_UP_POSTS = 320


@contextmanager
def collector() -> Iterator[str]:
    """Run a collector that keeps nothing, and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def workers() -> set[int]:
    """Return the process ids of the workers that this process has started."""
    found = set()
    for pid in family(os.getpid()):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"worker" in words:
            found.add(pid)
    return found


def start(job: BenchmarkJob, name: str) -> tuple[FeedmillVariant, int]:
    """Start a stack; return it, and the process id of its worker."""
    before = workers()
    folder = job.folder / name
    folder.mkdir()
    variant = FeedmillVariant(job._replace(folder=folder), POSTS_PER_MESSAGE)
    variant.start()
    (pid,) = workers() - before
    return variant, pid


def measure(variant: FeedmillVariant, pid: int, posts: Sequence[Post]) -> float:
    """Return the worker's CPU time per post in microseconds."""
    before = cpu_seconds(pid)
    variant.run(posts)
    used = cpu_seconds(pid) - before
    variant.labels()
    return used / len(posts) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--posts", help="file of posts; default: the bundled posts")
    parser.add_argument("--limit", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    with run_folder() as folder, collector() as address:
        settings = load()
        job = BenchmarkJob(
            settings, device.select_device(settings.device, settings.dtype), folder
        )
        print(describe(job.device))
        posts = read_posts(arguments.posts, arguments.limit)
        started: dict[str, tuple[FeedmillVariant, int]] = {}
        try:
            started["off"] = start(job, "off")
            os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = address
            started["on"] = start(job, "on")
            del os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"]
            for variant, pid in started.values():
                measure(variant, pid, posts[:WARM_UP_POSTS])
            costs: dict[str, list[float]] = {"off": [], "on": []}
            for number in range(arguments.rounds):
                names = list(costs) if number % 2 else list(reversed(costs))
                for name in names:
                    variant, pid = started[name]
                    costs[name].append(measure(variant, pid, posts))
                off, on = costs["off"][-1], costs["on"][-1]
                print(
                    f"round {number + 1}: off {off:.0f}, on {on:.0f} µs of CPU a post"
                )
        finally:
            for variant, _ in started.values():
                variant.stop()
    ratios = [on / off for off, on in zip(costs["off"], costs["on"], strict=True)]
    print(
        json.dumps(
            {
                "off_us": round(median(costs["off"])),
                "on_us": round(median(costs["on"])),
                "on_to_off": round(median(ratios), 4),
                "ratios": [round(ratio, 3) for ratio in ratios],
                "posts": len(posts),
            }
        )
    )


if __name__ == "__main__":
    main()
