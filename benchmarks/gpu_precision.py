"""Compare data types on real posts: posts/s, largest difference of a score from float32, and
share of posts whose label changes.

`python -m benchmarks.gpu --precision` runs it. TF32 is float32 whose products on a GPU have ten
bits of mantissa; int8 needs engine onnx and a CPU.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from feedmill.local_model import load_model
from feedmill.shared.errors import clause
from feedmill.shared.messages import Outcome, Post
from feedmill.shared.settings import Settings
from feedmill.tuning.precisions import FAILURES, changed_labels, largest_difference
from feedmill.workers.pipeline import offline
from feedmill.workers.pipeline.backlog import Loaded
from feedmill.workers.pipeline.calibration import calibrate

#: Data types by device type; the first one is what the others are compared with.
PRECISIONS = {
    "cpu": ("float32", "bfloat16", "int8"),
    "cuda": ("float32", "tf32", "bfloat16", "float16"),
}
#: Posts that are computed before each measurement.
WARM_UP = 64
#: Rounds; the fastest counts.
ROUNDS = 2


class Figures(NamedTuple):
    """The measurement of one data type, compared with float32; or why there is none."""

    precision: str
    posts_per_s: float = 0.0
    #: Posts per CPU second of this process, which other processes hardly disturb.
    posts_per_cpu_s: float = 0.0
    largest_difference: float = 0.0
    changed_labels: float = 0.0
    problem: str = ""


def measure(
    settings: Settings, device_type: str, posts: Sequence[Post], console: Console
) -> list[dict[str, Any]]:
    """Measure each data type of the device, print a table and return its rows."""
    exact: list[Outcome] = []
    rows: list[Figures] = []
    for name in PRECISIONS.get(device_type, ("float32", "float16")):
        console.print(f"precision: {name}")
        try:
            figures, outcomes = _measure_one(settings, name, posts, exact)
        except FAILURES as error:
            rows.append(Figures(name, problem=clause(error)))
            continue
        exact = exact or outcomes
        rows.append(figures)
    console.print(_table(rows, len(posts)))
    return [row._asdict() for row in rows]


def _measure_one(
    settings: Settings, name: str, posts: Sequence[Post], exact: Sequence[Outcome]
) -> tuple[Figures, list[Outcome]]:
    changes: dict[str, object] = {"dtype": name}
    if name == "int8":
        changes["engine"] = "onnx"
    if name == "tf32":
        changes["dtype"] = "float32"
    own_settings = settings.model_copy(update=changes)
    with _products_in(name):
        classifier = load_model(own_settings)
        budget = calibrate(classifier, own_settings)
        loaded = Loaded(classifier, budget)

        def outcomes_of(some_posts: Sequence[Post]) -> list[Outcome]:
            classified = offline.classify(some_posts, [loaded], own_settings)
            return [outcome for _, outcome in classified]

        outcomes_of(posts[:WARM_UP])
        best_s = best_cpu_s = float("inf")
        for _ in range(ROUNDS):
            began = time.perf_counter()
            began_cpu = time.process_time()
            outcomes = outcomes_of(posts)
            best_cpu_s = min(best_cpu_s, time.process_time() - began_cpu)
            best_s = min(best_s, time.perf_counter() - began)
    count = len(posts)
    figures = Figures(
        precision=name,
        posts_per_s=count / best_s,
        posts_per_cpu_s=count / best_cpu_s,
        largest_difference=largest_difference(outcomes, exact or outcomes),
        changed_labels=changed_labels(outcomes, exact or outcomes),
    )
    return figures, outcomes


@contextmanager
def _products_in(name: str) -> Iterator[None]:
    """Use TF32 for products of float32 inside the block, if this is the precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _table(rows: Sequence[Figures], posts: int) -> Table:
    table = Table(
        "precision",
        "posts/s",
        "posts per CPU second",
        "largest difference",
        "changed labels",
        title=f"{posts:,} posts",
    )
    for row in rows:
        if row.problem:
            table.add_row(row.precision, row.problem)
            continue
        table.add_row(
            row.precision,
            f"{row.posts_per_s:,.0f}",
            f"{row.posts_per_cpu_s:,.0f}",
            f"{row.largest_difference:.4f}",
            f"{row.changed_labels:.2%}",
        )
    return table
