"""Compare training optimisations by samples/s on the same posts; or what training reaches by number of answers.

    python -m benchmarks.training [--posts FILE] [--samples 256] [--rounds 3] [--png training.png]
    python -m benchmarks.training --accuracy FILE [--draws 4] [--fine-tuned 0]

`plain` is float32 in batches of 8; each other variant changes one option,
and `all` changes all of them. Mixed precision is left out if the device lacks hardware support. Every variant trains on
the same posts from the same weights. The first optimization step, which includes set-up, is not counted. The order of
the variants alternates by round; the figures are medians. The last line is JSON.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.answers import table as table_of_answers
from benchmarks.hardware import describe, matrix_ceiling
from benchmarks.report import draw
from benchmarks.throughput import read_posts
from feedmill.console import Report
from feedmill.producers.records import Labelled
from feedmill.shared.errors import UserError
from feedmill.shared.settings import Settings, load
from feedmill.training.data import Dataset, TrainOptions
from feedmill.training.finetune import Training
from feedmill.workers.models import device

#: Options of the variant `plain`, the basis of all others.
PLAIN: dict[str, Any] = {"batch_size": 8, "dtype": "float32"}
#: Options that each variant changes.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation 4": {"accumulation": 4},
    "mixed precision": {"dtype": "auto"},
    "all": {"accumulation": 4, "dtype": "auto"},
}
#: Labels assigned to the posts in turn. The cost of training does not depend on them.
LABELS = tuple(f"label {number}" for number in range(16))

console = Console(soft_wrap=True, highlight=False)


class TrainingResult(NamedTuple):
    """The throughput of one variant in one round."""

    samples_per_s: float


def measure(dataset: Dataset, settings: Settings, changes: dict[str, Any]) -> TrainingResult:
    """Train for one epoch with these options changed."""
    ends: list[float] = []

    class Times(Report):
        def advance(self, done: int, note: str = "") -> None:  # noqa: ARG002
            ends.append(time.perf_counter())

    chosen = PLAIN | changes
    settings = settings.model_copy(update={"dtype": chosen.pop("dtype")})
    with tempfile.TemporaryDirectory() as folder:
        options = TrainOptions(source="posts", out=folder, base=settings.model, epochs=1, **chosen)
        record = Training(dataset, options, settings, Times()).run().record
    samples = (len(ends) - 1) * record["plan"]["effective_batch"]
    return TrainingResult(samples / (ends[-1] - ends[0]))


def examples(path: str | None, count: int) -> Dataset:
    posts = read_posts(path, count)
    found = [Labelled(post, LABELS[number % len(LABELS)]) for number, post in enumerate(posts)]
    return Dataset(LABELS, found, [], {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--posts", help="file of posts; default: the bundled posts, repeated")
    parser.add_argument("--samples", type=int, default=256, help="posts per epoch; a multiple of 32, at least 64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--png", type=Path, help="draw the rates into this file")
    parser.add_argument("--accuracy", metavar="FILE", help="file of posts with topics: measure accuracies on them")
    parser.add_argument("--draws", type=int, default=4, help="draws of the answers, for accuracies")
    parser.add_argument("--fine-tuned", type=int, default=0, help="draws of the answers for fine-tuning, the slowest")
    arguments = parser.parse_args()
    if arguments.accuracy:
        table_of_answers(arguments.accuracy, load(), arguments.draws, arguments.fine_tuned, console.print)
        return
    if arguments.samples % 32 or arguments.samples < 64:
        parser.error("--samples must be a multiple of 32 and at least 64, so that all batches are full")
    try:
        settings = load()
        chosen = device.select_device(settings.device, "float32")
        precision, why = device.for_training(chosen)
        console.print(f"{describe(chosen)}; mixed precision: {why}")
        for dtype in dict.fromkeys((torch.float32, precision)):
            ceiling = matrix_ceiling(chosen._replace(dtype=dtype))
            console.print(f"matrix product in {str(dtype).removeprefix('torch.')}: {ceiling:.0f} GFLOP/s")
        variants = dict(VARIANTS)
        if precision is torch.float32:
            del variants["mixed precision"]
            console.print("Left out: mixed precision, which this device does not support. `all` uses float32, too.")
        dataset = examples(arguments.posts, arguments.samples)
        found: dict[str, list[TrainingResult]] = {name: [] for name in variants}
        for number in range(arguments.rounds):
            for name in list(variants) if number % 2 == 0 else reversed(variants):
                found[name].append(measure(dataset, settings, variants[name]))
    except UserError as error:
        sys.exit(f"benchmark: {error}")
    rates = {name: [each.samples_per_s for each in measured] for name, measured in found.items()}
    plain = median(rates["plain"])
    table = Table("variant", title=f"medians of {arguments.rounds} rounds", title_justify="left")
    for column in ("samples/s", "times plain"):
        table.add_column(column, justify="right")
    for name, values in rates.items():
        table.add_row(name, f"{median(values):.1f}", f"{median(values) / plain:.2f}")
    console.print(table)
    if arguments.png:
        draw(arguments.png, rates, f"Training {settings.model}, {arguments.samples} posts per epoch")
    print(
        json.dumps(
            {
                "samples": arguments.samples,
                "precision": str(precision).removeprefix("torch."),
                "samples_per_s": {name: round(median(values), 2) for name, values in rates.items()},
                "times_plain": {name: round(median(values) / plain, 3) for name, values in rates.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
