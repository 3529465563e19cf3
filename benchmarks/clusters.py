"""Measure docs/examples/clusters/on_ray.py on this machine beside `feedmill classify FILE`, on the
same file.

    python -m benchmarks.clusters [--posts FILE] [--limit 12000] [--rounds 3]

Both run on the first tenth of the posts, and on all of them, in turns. The time between the two
excludes the start of Ray and of the model, and the posts that Ray reads meanwhile, 0.1 ms of CPU
time each. Prints for each: seconds of both runs, posts/s of the posts between, their CPU time in
all processes and in the one with the model, and the memory of the largest process. The last line
is JSON: medians, and Ray's share of posts/s. Needs the extras `clusters` and `dumps`.
"""

import argparse
import json
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
from benchmarks.running import cpu_seconds, family, resident_megabytes, run_folder
from benchmarks.throughput import read_posts
from feedmill.shared.messages import Post
from feedmill.workers.models.device import select_device

PROGRAM = Path(__file__).parents[1] / "docs/examples/clusters/on_ray.py"
LABELS = "sports,food,technology,politics"
#: Seconds between samples of the processes. What one uses after its last sample is not counted.
SAMPLE_INTERVAL_S = 0.2

console = Console(soft_wrap=True, highlight=False)


class Usage(NamedTuple):
    """One run: seconds of the clock, of all CPUs and of the busiest process, and megabytes of the
    largest process.
    """

    seconds: float
    cpu_seconds: float
    model_seconds: float
    megabytes: float


def measured(command: Sequence[str], folder: Path) -> Usage:
    """Run a command. Raises CalledProcessError if it fails."""
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    used: dict[int, float] = {}
    largest = 0.0
    while process.poll() is None:
        for pid in family(process.pid):
            with suppress(OSError, IndexError):  # it has ended
                used[pid] = cpu_seconds(pid)
                largest = max(largest, resident_megabytes(pid))
        time.sleep(SAMPLE_INTERVAL_S)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Usage(
        time.monotonic() - began, sum(used.values()), max(used.values()), largest
    )


def write_dump(posts: Sequence[Post], folder: Path) -> Path:
    folder.mkdir()
    lines = [
        json.dumps({"id": post.id, "title": post.title, "selftext": post.body}) + "\n"
        for post in posts
    ]
    (folder / "posts.zst").write_bytes(
        zstandard.ZstdCompressor().compress("".join(lines).encode())
    )
    return folder / "posts.zst"


def by_command(dump: Path, out: str) -> list[str]:
    options = ["--out", f"{out}.parquet", "--labels", LABELS, "--device", "cpu"]
    return [sys.executable, "-m", "feedmill", "classify", str(dump), *options]


def by_ray(dump: Path, out: str) -> list[str]:
    return [sys.executable, str(PROGRAM), str(dump.parent), out]


VARIANTS: dict[str, Callable[[Path, str], list[str]]] = {
    "command": by_command,
    "ray": by_ray,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--posts", help="file of posts; default: the bundled samples, repeated"
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=12000,
        help=("number of posts; default: %(default)s"),
    )
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    arguments = parser.parse_args()
    console.print(describe(select_device("cpu")))
    rates: dict[str, list[float]] = {name: [] for name in VARIANTS}
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    with run_folder() as folder:
        posts = read_posts(arguments.posts, arguments.limit)
        few = len(posts) // 10
        dumps = (
            write_dump(posts[:few], folder / "few"),
            write_dump(posts, folder / "all"),
        )
        for turn in range(arguments.rounds):
            for name, command in list(VARIANTS.items())[:: 1 if turn % 2 else -1]:
                start, whole = (
                    measured(command(dump, f"{name}-{turn}-{dump.parent.name}"), folder)
                    for dump in dumps
                )
                count = len(posts) - few
                rates[name].append(count / (whole.seconds - start.seconds))
                seconds = (
                    whole.cpu_seconds - start.cpu_seconds,
                    whole.model_seconds - start.model_seconds,
                )
                costs[name].append(
                    (seconds[0] / count * 1000, seconds[1] / count * 1000)
                )
                console.print(
                    f"{name}: {start.seconds:.1f} and {whole.seconds:.1f} s, "
                    f"{rates[name][-1]:.1f} posts/s, "
                    f"{costs[name][-1][0]:.2f} ms of CPU time per post, {costs[name][-1][1]:.2f} "
                    "with the model, "
                    f"{start.megabytes:,.0f} and {whole.megabytes:,.0f} MB"
                )
    shares = [
        ray / command
        for ray, command in zip(rates["ray"], rates["command"], strict=True)
    ]
    found = {
        "posts": len(posts),
        "posts_per_s": {name: round(median(each), 1) for name, each in rates.items()},
        "cpu_ms": {
            name: [round(median(part), 3) for part in zip(*each, strict=True)]
            for name, each in costs.items()
        },
    }
    print(json.dumps(found | {"share": round(median(shares), 3)}))


if __name__ == "__main__":
    main()
