"""Compare training optimisations by samples/s and memory on the same posts; or what training
reaches by number of answers.

    python -m benchmarks.training [--posts FILE] [--samples 256] [--rounds 3] [--png training.png]
    python -m benchmarks.training --accuracy FILE [--draws 4] [--fine-tuned 0]

`plain` is float32 in batches of 8 in random order, padded to the longest row, with an optimizer
that is not fused and no loader processes; each other variant changes one option, and `all` changes
those that save time. Mixed precision is left out if the device lacks hardware support. Every
variant trains on the same posts from the same weights. The first optimization step, which includes
set-up, is not counted. Memory is the device's highest on a GPU, else the resident memory of the
process, which hardly shrinks from one variant to the next. The order of the variants alternates by
round; the figures are medians. The last line is JSON.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
from feedmill.training import batches
from feedmill.training.data import Dataset
from feedmill.training.finetune import Training
from feedmill.training.options import TrainOptions
from feedmill.tuning.trials import MemoryMeter
from feedmill.workers.models import device


class Variant(NamedTuple):
    """The changes of a variant: options of the training, its precision, values of --trainer, and
    the order of posts.
    """

    options: Mapping[str, Any] = {}
    dtype: str = "float32"
    trainer: Mapping[str, str] = {}
    #: Whether posts of similar length are batched together, as Feedmill does.
    is_grouped: bool = False


#: Values of --trainer that all variants have, unless they change them.
PLAIN = {"optim": "adamw_torch"}
FUSED = {"optim": "adamw_torch_fused"}
VARIANTS = {
    "plain": Variant(),
    "accumulation 4": Variant(options={"accumulation": 4}),
    "mixed precision": Variant(dtype="auto"),
    "length grouping": Variant(is_grouped=True),
    "fused optimizer": Variant(trainer=FUSED),
    "2 loader processes": Variant(trainer={"dataloader_num_workers": "2"}),
    "activation checkpointing": Variant(trainer={"activation_checkpointing": "true"}),
    "all": Variant(
        options={"accumulation": 4}, dtype="auto", trainer=FUSED, is_grouped=True
    ),
}
#: Rows per forward pass.
BATCH_SIZE = 8
#: Labels assigned to the posts in turn. The cost of training does not depend on them.
LABELS = tuple(f"label {number}" for number in range(16))

console = Console(soft_wrap=True, highlight=False)


class TrainingResult(NamedTuple):
    """The throughput and the highest memory of one variant in one round."""

    samples_per_s: float
    memory_mb: float | None


class Trained(Exception):  # noqa: N818 - named after what happened
    """The training has ended, and its calibration, another training, begins."""


class Times(Report):
    """The end of each optimization step. Raises Trained when the training has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []
        self._is_training = False

    def phase(self, what: str, total: int | None = None) -> None:
        if self._is_training:
            raise Trained
        super().phase(what, total)
        self._is_training = what == "training"

    def advance(self, done: int, note: str = "") -> None:  # noqa: ARG002
        self.ends.append(time.perf_counter())


def measure(dataset: Dataset, settings: Settings, variant: Variant) -> TrainingResult:
    """Train for one epoch as this variant does."""
    times = Times()
    settings = settings.model_copy(update={"dtype": variant.dtype})
    trainer = [
        f"{key}={value}" for key, value in (PLAIN | dict(variant.trainer)).items()
    ]
    usual = batches.STEPS_SORTED_TOGETHER
    # within a step, the order does not matter
    batches.STEPS_SORTED_TOGETHER = usual if variant.is_grouped else 1
    try:
        with tempfile.TemporaryDirectory() as folder:
            options = TrainOptions(
                source="posts",
                out=folder,
                base=settings.model,
                epochs=1,
                batch_size=BATCH_SIZE,
                trainer=trainer,
                **variant.options,
            )
            meter = MemoryMeter(device.select_device(settings.device, "float32").torch)
            with suppress(Trained):
                Training(dataset, options, settings, times).run()
            memory = meter.peak()
    finally:
        batches.STEPS_SORTED_TOGETHER = usual
    samples = (len(times.ends) - 1) * options.batch_size * options.accumulation
    return TrainingResult(
        samples_per_s=samples / (times.ends[-1] - times.ends[0]),
        memory_mb=None if memory is None else memory / 1e6,
    )


def examples(path: str | None, count: int) -> Dataset:
    posts = read_posts(path, count)
    found = [
        Labelled(post, LABELS[number % len(LABELS)])
        for number, post in enumerate(posts)
    ]
    return Dataset(LABELS, found, [], {})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--posts", help="file of posts; default: the bundled posts, repeated"
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=256,
        help=("posts per epoch; a multiple of 32, at least 64"),
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--png", type=Path, help="draw the rates into this file")
    parser.add_argument(
        "--accuracy",
        metavar="FILE",
        help=("file of posts with topics: measure accuracies on them"),
    )
    parser.add_argument(
        "--draws", type=int, default=4, help=("draws of the answers, for accuracies")
    )
    parser.add_argument(
        "--fine-tuned",
        type=int,
        default=0,
        help=("draws of the answers for fine-tuning, the slowest"),
    )
    arguments = parser.parse_args()
    if arguments.accuracy:
        table_of_answers(
            arguments.accuracy,
            load(),
            arguments.draws,
            arguments.fine_tuned,
            console.print,
        )
        return
    if arguments.samples % 32 or arguments.samples < 64:
        parser.error(
            "--samples must be a multiple of 32 and at least 64, so that all batches are full"
        )
    try:
        settings = load()
        chosen = device.select_device(settings.device, "float32")
        precision, why = device.for_training(chosen)
        console.print(f"{describe(chosen)}; mixed precision: {why}")
        for dtype in dict.fromkeys((torch.float32, precision)):
            ceiling = matrix_ceiling(chosen._replace(dtype=dtype))
            console.print(
                f"matrix product in {str(dtype).removeprefix('torch.')}: {ceiling:.0f} GFLOP/s"
            )
        variants = dict(VARIANTS)
        if precision is torch.float32:
            del variants["mixed precision"]
            console.print(
                "Left out: mixed precision, which this device does not support. `all` "
                "uses float32, too."
            )
        dataset = examples(arguments.posts, arguments.samples)
        found: dict[str, list[TrainingResult]] = {name: [] for name in variants}
        for number in range(arguments.rounds):
            for name in list(variants) if number % 2 == 0 else reversed(variants):
                found[name].append(measure(dataset, settings, variants[name]))
    except UserError as error:
        sys.exit(f"benchmark: {error}")
    rates = {
        name: [each.samples_per_s for each in measured]
        for name, measured in found.items()
    }
    memories = {name: memory_of(measured) for name, measured in found.items()}
    plain = median(rates["plain"])
    table = Table(
        "variant", title=f"medians of {arguments.rounds} rounds", title_justify="left"
    )
    for column in ("samples/s", "times plain", "memory MB"):
        table.add_column(column, justify="right")
    for name, values in rates.items():
        memory = memories[name]
        shown = "–" if memory is None else f"{memory:,.0f}"
        table.add_row(
            name, f"{median(values):.1f}", f"{median(values) / plain:.2f}", shown
        )
    console.print(table)
    if arguments.png:
        draw(
            arguments.png,
            rates,
            (f"Training {settings.model}, {arguments.samples} posts per epoch"),
        )
    result = {
        "samples": arguments.samples,
        "precision": str(precision).removeprefix("torch."),
        "samples_per_s": {
            name: round(median(values), 2) for name, values in rates.items()
        },
        "times_plain": {
            name: round(median(values) / plain, 3) for name, values in rates.items()
        },
        "memory_mb": memories,
    }
    print(json.dumps(result))


def memory_of(measured: Sequence[TrainingResult]) -> float | None:
    """Return the median memory of a variant; None if unknown."""
    known = [each.memory_mb for each in measured if each.memory_mb is not None]
    return round(median(known), 1) if known else None


if __name__ == "__main__":
    main()
