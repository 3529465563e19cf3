"""Measure docs/examples/clusters/on_ray.py on this machine beside `feedmill classify FILE`, on the same file.

    python -m benchmarks.clusters [--posts FILE] [--limit 6000] [--rounds 3]

Both run on the first tenth of the posts, and on all of them, in turns. The time between the two excludes the start of
Ray and of the model. Prints for each: seconds of both runs, posts/s of the posts between, the CPU time of all
processes per post, and the memory of the largest one. The last line is JSON: medians, and Ray's share of posts/s.
Needs the extras `clusters` and `dumps`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import zstandard
from rich.console import Console

from benchmarks.hardware import describe
from benchmarks.running import cpu_seconds, family, run_folder
from benchmarks.throughput import read_posts
from feedmill.shared.messages import Post
from feedmill.workers.models.device import select_device

PROGRAM = Path(__file__).parents[1] / "docs/examples/clusters/on_ray.py"
LABELS = "sports,food,technology,politics"
#: Seconds between samples of the processes. What one uses after its last sample is not counted.
SAMPLE_INTERVAL_S = 0.2
PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20

console = Console(soft_wrap=True, highlight=False)


class Usage(NamedTuple):
    """One run: seconds of the clock and of all CPUs, and megabytes of the largest process."""

    seconds: float
    cpu_seconds: float
    megabytes: float


def measured(command: Sequence[str], folder: Path) -> Usage:
    """Run a command. Raises CalledProcessError if it fails."""
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    used: dict[int, float] = {}
    largest = 0.0
    while process.poll() is None:
        for pid in family(process.pid):
            with suppress(OSError, IndexError):  # it has ended
                used[pid] = cpu_seconds(pid)
                largest = max(largest, int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_MB)
        time.sleep(SAMPLE_INTERVAL_S)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Usage(time.monotonic() - began, sum(used.values()), largest)


def write_dump(posts: Sequence[Post], folder: Path) -> Path:
    folder.mkdir()
    lines = [json.dumps({"id": post.id, "title": post.title, "selftext": post.body}) + "\n" for post in posts]
    (folder / "posts.zst").write_bytes(zstandard.ZstdCompressor().compress("".join(lines).encode()))
    return folder / "posts.zst"


def by_command(dump: Path, out: str) -> list[str]:
    options = ["--out", f"{out}.parquet", "--labels", LABELS, "--device", "cpu"]
    return [sys.executable, "-m", "feedmill", "classify", str(dump), *options]


def by_ray(dump: Path, out: str) -> list[str]:
    return [sys.executable, str(PROGRAM), str(dump.parent), out]


VARIANTS: dict[str, Callable[[Path, str], list[str]]] = {"command": by_command, "ray": by_ray}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--posts", help="file of posts; default: the bundled samples, repeated")
    parser.add_argument("--limit", type=int, default=6000, help="number of posts; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    arguments = parser.parse_args()
    console.print(describe(select_device("cpu")))
    rates: dict[str, list[float]] = {name: [] for name in VARIANTS}
    costs: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with run_folder() as folder:
        posts = read_posts(arguments.posts, arguments.limit)
        few = len(posts) // 10
        dumps = write_dump(posts[:few], folder / "few"), write_dump(posts, folder / "all")
        for turn in range(arguments.rounds):
            for name, command in list(VARIANTS.items())[:: 1 if turn % 2 else -1]:
                start, whole = (measured(command(dump, f"{name}-{turn}-{dump.parent.name}"), folder) for dump in dumps)
                rates[name].append((len(posts) - few) / (whole.seconds - start.seconds))
                costs[name].append((whole.cpu_seconds - start.cpu_seconds) / (len(posts) - few) * 1000)
                console.print(
                    f"{name}: {start.seconds:.1f} and {whole.seconds:.1f} s, {rates[name][-1]:.1f} posts/s, "
                    f"{costs[name][-1]:.2f} ms of CPU time per post, {start.megabytes:,.0f} and "
                    f"{whole.megabytes:,.0f} MB"
                )
    shares = [ray / command for ray, command in zip(rates["ray"], rates["command"], strict=True)]
    found = {
        "posts": len(posts),
        "posts_per_s": {name: round(median(each), 1) for name, each in rates.items()},
        "cpu_ms": {name: round(median(each), 3) for name, each in costs.items()},
    }
    print(json.dumps(found | {"share": round(median(shares), 3)}))


if __name__ == "__main__":
    main()
