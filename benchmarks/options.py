"""Measure what the options `none` and `languages` cost: CPU time of a post with and without them.

    python -m benchmarks.options [--posts FILE] [--limit 400] [--rounds 8]

The posts go through the worker's pipeline, with one model for all variants, which alternate in
each round. `ratio` is the CPU time relative to that of `off` in the same round. Figures are
medians of the rounds, with the lowest and the highest. The last line is JSON.

`languages` needs `pip install 'feedmill[languages]'`.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.hardware import describe
from benchmarks.throughput import read_posts
from feedmill.shared.errors import UserError
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.settings import Settings, load
from feedmill.workers.pipeline.offline import OfflinePipeline, load_models

#: Variants, in order: `off` is what the others are compared with.
OFF = "off"
NONE = "none"
LANGUAGES = "languages"
VARIANTS = (OFF, NONE, LANGUAGES)

console = Console(soft_wrap=True, highlight=False)


class Cost(NamedTuple):
    """CPU time per post in microseconds, and posts per second."""

    cpu_us: float
    posts_per_s: float


def measure(variant: str, pipeline: OfflinePipeline, posts: Sequence[Post]) -> Cost:
    """Classify the posts once."""
    options = ClassifyOptions(none=variant == NONE)
    began = time.perf_counter()
    cpu_began = time.process_time()
    for _ in pipeline.classify(posts, options):
        pass
    cpu_seconds = time.process_time() - cpu_began
    seconds = time.perf_counter() - began
    count = len(posts)
    return Cost(cpu_us=1e6 * cpu_seconds / count, posts_per_s=count / seconds)


def make_pipelines(settings: Settings) -> dict[str, OfflinePipeline]:
    """Load the model once, for a pipeline of each variant. Raises UserError."""
    models = load_models(settings)
    console.print(describe(models[0].classifier.device))
    pipelines = {}
    for variant in VARIANTS:
        languages = "en" if variant == LANGUAGES else None
        changed = settings.model_copy(update={"languages": languages})
        pipelines[variant] = OfflinePipeline(models, changed)
    return pipelines


def show(costs: dict[str, list[Cost]]) -> None:
    """Print a table of the costs, and their medians as JSON."""
    table = Table("variant", "CPU µs per post", "ratio", "posts/s")
    medians = {}
    for variant, rounds in costs.items():
        ratios = []
        for cost, off in zip(rounds, costs[OFF], strict=True):
            ratios.append(cost.cpu_us / off.cpu_us)
        cpu_us = [cost.cpu_us for cost in rounds]
        rates = [cost.posts_per_s for cost in rounds]
        table.add_row(
            variant,
            _with_range(cpu_us, 0),
            _with_range(ratios, 3),
            _with_range(rates, 1),
        )
        medians[variant] = {
            "cpu_us": round(median(cpu_us)),
            "ratio": round(median(ratios), 4),
            "posts_per_s": round(median(rates), 1),
        }
    console.print(table)
    print(json.dumps(medians))


def _with_range(values: Sequence[float], digits: int) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--posts", help="file of posts; default: the bundled posts")
    parser.add_argument(
        "--limit", type=int, default=400, help="number of posts; default: %(default)s"
    )
    parser.add_argument(
        "--rounds", type=int, default=8, help="number of rounds; default: %(default)s"
    )
    arguments = parser.parse_args()
    try:
        posts = read_posts(arguments.posts, arguments.limit)
        pipelines = make_pipelines(load())
        for variant, pipeline in pipelines.items():
            measure(variant, pipeline, posts[:64])  # warm-up
        costs: dict[str, list[Cost]] = {variant: [] for variant in VARIANTS}
        for number in range(arguments.rounds):
            # Every other round runs backwards, so that a machine that drifts favours no variant.
            order = VARIANTS if number % 2 else VARIANTS[::-1]
            for variant in order:
                cost = measure(variant, pipelines[variant], posts)
                costs[variant].append(cost)
    except UserError as error:
        sys.exit(f"benchmark: {error}")
    show(costs)


if __name__ == "__main__":
    main()
