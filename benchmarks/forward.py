"""Measure which share of the matrix-product ceiling the bare forward pass reaches, by precision,
engine and shape.

    python -m benchmarks.forward [--posts FILE] [--dtypes float32,bfloat16] [--rounds 5]
    [--cpu-time]

Engines: `library` is the model as transformers loads it, padded, with an attention mask; `padded`
and `packed` are Feedmill's torch engine in either layout. In bfloat16 on x86, `plain`
is `packed` with torch's linear layers, without reordered weights. Shapes: batches of rows of
one length, and batches that the window forms from posts. Only real tokens count as work, so
padding lowers the share. The engines alternate. The last line is JSON.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModel

from benchmarks.hardware import describe, forward_flops, matrix_ceiling
from benchmarks.throughput import read_posts
from feedmill.shared.errors import UserError
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import Settings, load
from feedmill.workers.models import device
from feedmill.workers.models.classifiers import Row
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.device import Device
from feedmill.workers.models.engines.torch_engine import TorchEngine, can_reorder
from feedmill.workers.models.tokenizer import Tokens
from feedmill.workers.models.weights import Weights, locate
from feedmill.workers.pipeline.window import Window

#: Tokens per batch, and the row lengths (in tokens) of the batches whose rows have equal lengths.
TOKENS, LENGTHS = 2048, (16, 32, 64, 128, 256)
#: Batches to take from a full window of posts.
BATCHES = 8

console = Console(soft_wrap=True, highlight=False)

TokenBatch = list[Tokens]
Forward = Callable[[TokenBatch], Any]


def library(weights: Weights, chosen: Device) -> Forward:
    """Return the forward pass of the model as transformers loads it."""
    model = AutoModel.from_pretrained(
        weights.folder, dtype=chosen.dtype, local_files_only=True
    )
    model.to(chosen.torch).eval()

    @torch.inference_mode()
    def forward(rows: TokenBatch) -> Any:
        longest = max(len(row.ids) for row in rows)
        ids = torch.tensor(
            [row.ids + [0] * (longest - len(row.ids)) for row in rows],
            device=chosen.torch,
        )
        mask = torch.tensor(
            [[1] * len(row.ids) + [0] * (longest - len(row.ids)) for row in rows],
            device=chosen.torch,
        )
        return model(input_ids=ids, attention_mask=mask).last_hidden_state

    return forward


def engines(weights: Weights, chosen: Device) -> dict[str, Forward]:
    """Return the engines to compare, by name."""
    ours = partial(TorchEngine, weights, chosen, ("mean",), 0, 512)
    found: dict[str, Forward] = {
        "library": library(weights, chosen),
        "padded": ours(packed=False).forward,
    }
    packing = ours()
    if packing.packed:
        found["packed"] = packing.forward
    if packing.packed and can_reorder(chosen):
        found["plain"] = ours(reordered=False).forward
    return found


def shapes(
    settings: Settings, chosen: Device, path: str | None
) -> dict[str, list[TokenBatch]]:
    """Return batches of each shape, by the shape's name."""
    source = random.Random(7)
    found: dict[str, list[TokenBatch]] = {
        f"{TOKENS // length} × {length}": [
            [
                Tokens([source.randrange(1000, 2000) for _ in range(length)])
                for _ in range(TOKENS // length)
            ]
        ]
        for length in LENGTHS
    }
    classifier = load_classifier(settings, chosen)
    label_set = classifier.label_set(ClassifyOptions())
    window: Window[Row] = Window(time.monotonic)
    for rows in classifier.prepare(
        [post.text for post in read_posts(path, settings.window_rows)], label_set
    ):
        for row in rows:
            window.add(row)
    cut = [window.take(TOKENS, settings.batch_rows) for _ in range(BATCHES)]
    found["as cut from posts"] = [[row.tokens for row in batch] for batch in cut]
    return found


def seconds(
    forward: Forward, batches: Sequence[TokenBatch], clock: Callable[[], float]
) -> float:
    began = clock()
    for batch in batches:
        forward(batch)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - began


def measure(
    chosen: Device, by_shape: dict[str, list[TokenBatch]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Measure the ceiling and all engines in each round.

    Return the shares of the ceiling by shape and engine.
    """
    weights = locate(load().model)
    config = json.loads((weights.folder / "config.json").read_text())
    compared = engines(weights, chosen)
    for forward in compared.values():
        for batches in by_shape.values():
            forward(batches[0])
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    ceilings: list[float] = []
    found: dict[str, dict[str, list[float]]] = {
        shape: {name: [] for name in compared} for shape in by_shape
    }
    for number in range(arguments.rounds):
        for shape, batches in by_shape.items():
            flops = forward_flops(
                config, [len(row.ids) for batch in batches for row in batch]
            )
            ceilings.append(matrix_ceiling(chosen, rounds=3, clock=clock))
            for name in list(compared) if number % 2 else reversed(compared):
                found[shape][name].append(
                    flops / seconds(compared[name], batches, clock) / 1e9 / ceilings[-1]
                )
    precision = str(chosen.dtype).removeprefix("torch.")
    title = (
        f"{precision}: share of the ceiling ({median(ceilings):.0f} GFLOP/s), medians of "
        f"{arguments.rounds} rounds"
    )
    table = Table("batch", *compared, title=title, title_justify="left")
    for shape, by_engine in found.items():
        table.add_row(
            shape, *(f"{median(shares):.3f}" for shares in by_engine.values())
        )
    console.print(table)
    medians = {
        shape: {n: round(median(s), 3) for n, s in by_engine.items()}
        for shape, by_engine in found.items()
    }
    return {"ceiling_gflops": round(median(ceilings)), "share": medians}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--posts", help="file of posts; default: the bundled posts, repeated"
    )
    parser.add_argument(
        "--dtypes",
        help=("comma-separated; default: the dtype that a worker would use here"),
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help=("one thread and its CPU time, for a busy machine"),
    )
    arguments = parser.parse_args()
    if arguments.cpu_time:
        torch.set_num_threads(1)
    try:
        settings = load()
        wanted = arguments.dtypes.split(",") if arguments.dtypes else [settings.dtype]
        if unknown := set(wanted) - {"auto", *device.DTYPES}:
            parser.error(
                f"--dtypes: unknown {', '.join(sorted(unknown))}; choose from "
                f"{', '.join(device.DTYPES)}"
            )
        devices = [device.select_device(settings.device, dtype) for dtype in wanted]
        console.print(describe(devices[0]))
        by_shape = shapes(settings, devices[0], arguments.posts)
        found = {
            str(chosen.dtype).removeprefix("torch."): measure(
                chosen, by_shape, arguments
            )
            for chosen in devices
        }
    except UserError as error:
        sys.exit(f"benchmark: {error}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
