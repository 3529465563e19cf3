"""Compare the throughput of Feedmill with the offline ideal and with alternatives.

    python -m benchmarks.throughput [--posts FILE] [--limit N] [--rounds R] [--only a,b,c] [--chart
    FILE.svg]

In each round every variant starts its processes, loads its model and classifies a few posts as a
warm-up. It then classifies all posts, timed from handing over the first post to the last result,
and stops, so that no idle variant disturbs the next one. All variants use the same model,
precision, posts, labels and token limit, and all cores. `make rivals` installs the alternatives
that Feedmill does not depend on. The last line is JSON.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from rich.console import Console

from benchmarks.hardware import describe, forward_flops, matrix_ceiling
from benchmarks.ours import FeedmillOverHttp, FeedmillVariant, Ideal
from benchmarks.report import (
    VariantResult,
    VariantResults,
    comparable,
    draw,
    middle,
    print_round,
    rates,
    summary,
)
from benchmarks.rivals import BenchmarkJob, NotInstalled, Variant
from benchmarks.rivals.by_celery import (
    celery_batches,
    plain_celery,
    plain_celery_prefork,
    ray_consumer,
)
from benchmarks.rivals.by_http import Infinity, litserve, ray_serve
from benchmarks.rivals.offline_libraries import Pipeline32, SentenceTransformers
from benchmarks.running import family_cpu_seconds, run_folder
from feedmill.producers.files import FileSource
from feedmill.shared.messages import Post
from feedmill.shared.settings import load
from feedmill.stack.demo import sample_posts
from feedmill.workers.models import device
from feedmill.workers.models.weights import locate

#: Factory of each variant, in the order of the report.
VARIANTS: dict[str, Callable[[BenchmarkJob], Variant]] = {
    "ideal": Ideal,
    "feedmill_32": partial(FeedmillVariant, posts_per_message=32),
    "feedmill_1": partial(FeedmillVariant, posts_per_message=1),
    "feedmill_http_1": partial(FeedmillOverHttp, posts_per_request=1),
    "feedmill_http_32": partial(FeedmillOverHttp, posts_per_request=32),
    "plain_celery": plain_celery,
    "plain_celery_prefork": plain_celery_prefork,
    "celery_batches": celery_batches,
    "pipeline_32": Pipeline32,
    "sentence_transformers": SentenceTransformers,
    "ray_serve": ray_serve,
    "ray_consumer": ray_consumer,
    "litserve": litserve,
    "infinity": Infinity,
}
#: Variants whose failure aborts the benchmark.
OURS = ("ideal", "feedmill_32", "feedmill_1")
#: Maximum number of posts made by repeating the bundled posts.
MAX_REPEATED_POSTS = 4_800
#: Posts of the warm-up, and of the sample on which the ideal is tuned.
WARM_UP, TUNING = 64, 512

console = Console(soft_wrap=True, highlight=False)


def main() -> None:
    arguments = parsed()
    with run_folder() as folder:
        run(arguments, folder)


def parsed() -> argparse.Namespace:
    """Parse the command line; reject at once what would fail only at the end of a long run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--posts", help="file of posts; default: the bundled posts, repeated"
    )
    parser.add_argument(
        "--limit", type=int, default=12_000, help="maximum number of posts"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only",
        default=",".join(VARIANTS),
        help=("variants, comma-separated; default: %(default)s"),
    )
    parser.add_argument(
        "--chart", type=Path, help="draw the medians into this .svg or .png file"
    )
    arguments = parser.parse_args()
    arguments.only = [name.strip() for name in arguments.only.split(",")]
    if unknown := set(arguments.only) - set(VARIANTS):
        parser.error(
            f"--only: unknown {', '.join(sorted(unknown))}; choose from {', '.join(VARIANTS)}"
        )
    if arguments.limit < 1 or arguments.rounds < 1:
        parser.error("--limit and --rounds must be at least 1")
    if arguments.chart and arguments.chart.suffix not in (".svg", ".png"):
        parser.error("--chart: the file name must end in .svg or .png")
    if arguments.chart and not find_spec("matplotlib"):
        parser.error("--chart requires the package matplotlib: run `make rivals`")
    return arguments


def run(arguments: argparse.Namespace, folder: Path) -> None:
    """Measure all variants and print the results."""
    settings = load()
    job = BenchmarkJob(
        settings, device.select_device(settings.device, settings.dtype), folder
    )
    hardware = describe(job.device)
    console.print(hardware)
    ceiling = matrix_ceiling(job.device)
    console.print(f"ceiling: {ceiling:.0f} GFLOP/s in a matrix product")
    posts = read_posts(arguments.posts, arguments.limit)
    ideal = Ideal(job)
    lengths = statistics_of(ideal, posts, tune="ideal" in arguments.only)
    variants = make(arguments.only, job, ideal)
    record: VariantResults = {name: [] for name in variants}
    statistics: list[WorkerStatistics] = []
    for number in range(1, arguments.rounds + 1):
        # Every other round runs backwards, so that a machine that drifts favours no variant.
        for name in list(variants) if number % 2 else reversed(variants):
            measured = measure(
                name,
                variants[name],
                posts,
                (f"round {number} of {arguments.rounds}: {name}"),
            )
            record[name].append(measured)
            if name == "feedmill_32" and measured:
                statistics.append(
                    worker_statistics(variants[name], len(posts) / measured.posts_per_s)
                )
        print_round(console, record, number, arguments.rounds)
    if arguments.chart:
        draw(
            arguments.chart,
            {name: rates(comparable(record), name) for name in variants},
            f"{len(posts)} posts; {hardware.partition(';')[0]}",
        )
    config = json.loads((locate(settings.model).folder / "config.json").read_text())
    model_gflops = (
        (middle(rates(comparable(record), "feedmill_32"), 3) or 0)
        * forward_flops(config, lengths)
        / len(posts)
        / 1e9
    )
    found = summary(record, list(VARIANTS)) | {
        "padding_efficiency": middle(
            [look.padding_efficiency for look in statistics], 4
        ),
        "device_busy": middle([look.device_busy for look in statistics], 3),
        "ceiling_share": round(model_gflops / ceiling, 3) if model_gflops else None,
        "posts": len(posts),
        "tokens_per_post": round(sum(lengths) / len(posts), 1),
        "rounds": arguments.rounds,
        "ceiling_gflops": round(ceiling),
        "offline_token_budget": ideal.token_budget,
        "offline_lanes": ideal.lanes,
        "worker": next(
            (
                made.ran
                for made in variants.values()
                if isinstance(made, FeedmillVariant)
            ),
            {},
        ),
    }
    print(json.dumps(found))


def read_posts(path: str | None, limit: int) -> list[Post]:
    """Read posts, or repeat the bundled posts.

    Ids are unique, because Feedmill stores results by post id.
    """
    if path:
        posts = {
            item.id: item for item in FileSource(path).items() if isinstance(item, Post)
        }
        return list(islice(posts.values(), limit))
    repeated = islice(cycle(sample_posts()), min(limit, MAX_REPEATED_POSTS))
    return [
        post.model_copy(update={"id": f"{post.id}-{number}"})
        for number, post in enumerate(repeated)
    ]


def statistics_of(ideal: Ideal, posts: Sequence[Post], tune: bool) -> list[int]:
    """Return the number of tokens of each post and, if `tune`, tune the ideal on a sample."""
    ideal.start()
    try:
        lengths = ideal.lengths(posts)
        console.print(
            f"{len(posts)} posts, {sum(lengths) / len(posts):.1f} tokens on average"
        )
        if tune:
            with console.status(
                "tuning the ideal's token budget and number of lanes …"
            ):
                ideal.tune(posts[:: max(1, len(posts) // TUNING)][:TUNING])
            console.print(
                f"ideal: token budget {ideal.token_budget}, {ideal.lanes} lanes, tuned on a sample"
            )
    finally:
        ideal.stop()
    return lengths


def make(names: Sequence[str], job: BenchmarkJob, ideal: Ideal) -> dict[str, Variant]:
    """Create the requested variants; print the variants that are not installed."""
    variants: dict[str, Variant] = {}
    for name in (name for name in VARIANTS if name in names):
        try:
            variants[name] = ideal if name == "ideal" else VARIANTS[name](job)
        except NotInstalled as missing:
            console.print(str(missing), style="yellow")
    return variants


def measure(
    name: str, variant: Variant, posts: Sequence[Post], what: str
) -> VariantResult | None:
    """Measure one variant in one round.

    Return None if an alternative fails; failures of OURS are raised.
    """
    warm_up = [
        post.model_copy(update={"id": f"warm-up-{number}"})
        for number, post in enumerate(posts[:WARM_UP])
    ]
    try:
        with console.status(f"{what} …"):
            variant.start()
            variant.run(warm_up)
            variant.labels()
            began, before = perf_counter(), family_cpu_seconds()
            variant.run(posts)
            seconds, after = perf_counter() - began, family_cpu_seconds()
            spent = sum(used - before.get(pid, 0.0) for pid, used in after.items())
            measured = VariantResult(
                len(posts) / seconds, variant.labels(), 1e6 * spent / len(posts)
            )
    except Exception as error:
        if name in OURS:
            raise
        console.print(
            f"{what} failed: {type(error).__name__}: {error}",
            style="yellow",
            markup=False,
        )
        return None
    finally:
        variant.stop()
    console.print(f"{what}: {measured.posts_per_s:.1f} posts/s")
    return measured


class WorkerStatistics(NamedTuple):
    """Statistics of Feedmill's worker after a run."""

    padding_efficiency: float
    device_busy: float


def worker_statistics(variant: Variant, seconds: float) -> WorkerStatistics:
    """Return the worker's statistics after a run of `seconds`.

    Raises TypeError for other variants than Feedmill.
    """
    if not isinstance(variant, FeedmillVariant):
        raise TypeError(f"{type(variant).__name__} has no Feedmill worker")
    return WorkerStatistics(
        variant.padding_efficiency, variant.device_seconds / seconds
    )


if __name__ == "__main__":
    main()
