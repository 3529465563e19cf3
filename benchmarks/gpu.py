"""Measure a GPU with Feedmill's own model code, without Redis, Celery or network.

    python -m benchmarks.gpu [--device cuda:0] [--models minilm,distilbert,bart-large] [--posts
    FILE] [--quick]
    python -m benchmarks.gpu --all [--only PART,…]      # end to end, for the record: gpu_record.py
    python -m benchmarks.gpu --precision [--posts FILE] # data types on real posts

For the configurations of MODELS with random weights, padded, in the precision that a worker
would use:

- share of the measured ceiling that forward passes reach: of batches of equal rows, and of
  micro-batches as the window cuts them from posts, also larger ones, padded and as a worker lays
  them out; `device` leaves out the time between two passes;
- stalls: how much longer the first pass of a shape takes than later ones. `default` is torch's
  choice of attention with shapes as they come, `no cuDNN` leaves cuDNN out, `few shapes` also pads
  to few shapes, as a worker does on a GPU;
- host time per post: tokenize, window, start the forward pass, read the outputs;
- tokens per second by token budget and maximum rows, as the first start of a worker measures them.

Also the number of shapes of a day's traffic, and the padding efficiency of the window by the
number of waiting rows. Takes under eight minutes on a data-center GPU. --quick checks in seconds,
on any device, that everything runs: its models are tiny and its figures mean nothing. The last
line is JSON.
"""

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.hardware import describe, forward_flops, matrix_ceiling
from benchmarks.padded_engine import PaddedEngine
from benchmarks.random_models import (
    save_bart_large,
    save_bert_base,
    save_distilbert,
    save_minilm,
    save_modernbert_base,
)
from benchmarks.traffic import backlog, day, texts
from feedmill.producers.files import FileSource
from feedmill.shared.errors import DeviceFull, DeviceLost, UserError
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers import Classifier, LabelSet, Row
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.device import Device, select_device
from feedmill.workers.models.engines.torch_engine import TorchEngine
from feedmill.workers.models.shapes import EXACT, FEW, Shapes
from feedmill.workers.models.tokenizer import Tokens
from feedmill.workers.pipeline.calibration import sweep
from feedmill.workers.pipeline.window import Window

MODELS: dict[str, Callable[[Path, Sequence[str], bool], None]] = {
    "minilm": save_minilm,
    "distilbert": save_distilbert,
    "bert-base": save_bert_base,
    "modernbert-base": save_modernbert_base,
    "bart-large": save_bart_large,
}
#: Parts of --all (gpu_record.py), in order.
RECORD_PARTS = ("waits", "workers", "modernbert", "precision", "tests")
#: Row lengths in tokens of the batches of equal rows.
LENGTHS = (16, 32, 64, 128, 256)
#: Maximum tokens of a row.
MAX_TOKENS = 256
#: Micro-batches that a GPU has at a time. A worker's device thread is one ahead.
IN_FLIGHT = 2
#: Posts per message, while tokenizing.
POSTS_PER_MESSAGE = 32
#: Devices for the window's padding efficiency: rows per second, and the token budget of such a
#: device.
SIMULATED = {500: 2048, 5000: 16_384, 50_000: 32_768}
#: Waiting rows: 0.1, 0.8 and 1.6 seconds of the device in the middle.
WAITING = (1024, 4096, 8192)

console = Console(soft_wrap=True, highlight=False)


class Effort(NamedTuple):
    """The amount to measure. seconds: minimum of each measurement of the share."""

    posts: int
    seconds: float
    batch_tokens: int
    batch_rows: int
    #: Shapes per way of the stalls, and micro-batches of the simulated day.
    shapes: int
    day: int
    sweeps: tuple[int, ...]


FULL = Effort(4096, 1.0, 32_768, 256, 16, 5000, (256, 1024))
QUICK = Effort(64, 0.0, 512, 16, 2, 100, ())


class Loaded(NamedTuple):
    """A loaded model, and its config.json."""

    classifier: Classifier
    engine: PaddedEngine
    label_set: LabelSet
    config: dict[str, Any]

    def rows(self, count: int, length: int) -> list[Row]:
        """Return random rows of one length."""
        source = random.Random(length)
        ids = [source.randrange(5, 200) for _ in range(length - 1)]
        return [
            Row(Tokens([*ids, self.config.get("eos_token_id") or 3]), self.label_set)
            for _ in range(count)
        ]


def load(
    name: str, folder: Path, posts: Sequence[str], chosen: Device, quick: bool
) -> Loaded:
    MODELS[name](folder, posts, quick)
    settings = Settings(
        model=str(folder),
        engine=f"{PaddedEngine.__module__}:{PaddedEngine.__name__}",
        max_tokens=MAX_TOKENS,
        classifier="auto",
        labels=None,
        template=None,
    )
    classifier: Any = load_classifier(settings, chosen)
    config = json.loads((folder / "config.json").read_text())
    return Loaded(
        classifier, classifier._engine, classifier.label_set(ClassifyOptions()), config
    )


def as_in_a_worker(loaded: Loaded) -> Loaded:
    """Return the same model with the engine that a worker has on this device: packed, where it can
    be.
    """
    weights, device, padded = (
        loaded.classifier.weights,
        loaded.classifier.device,
        loaded.engine.network,
    )
    classifier: Any = copy(loaded.classifier)
    classifier._engine = TorchEngine(
        weights, device, padded.reads, padded.pad_id, MAX_TOKENS
    )
    return loaded._replace(classifier=classifier)


def stalls(loaded: Loaded, effort: Effort) -> dict[str, Any]:
    """Measure first and later passes of shapes that were not used before, for each way to choose
    shapes and attention.

    Each way has other shapes, because a process prepares a shape once.
    """
    shapes = iter(_shapes_of_traffic(effort))
    attention: Any = torch.backends.cuda  # without annotations
    allowed = attention.cudnn_sdp_enabled()
    ways: dict[str, tuple[Shapes, bool]] = {
        "default": (EXACT, True),
        "no cuDNN": (EXACT, False),
        "few shapes": (FEW, False),
    }
    passes: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    used: set[tuple[int, int]] = set()
    for _ in range(effort.shapes):
        for way, (padded_to, cudnn) in ways.items():
            rows, length = next(
                shape for shape in shapes if _new(used, padded_to, *shape)
            )
            attention.enable_cudnn_sdp(cudnn)
            loaded.engine.pad_to(padded_to)
            # so that it needs a mask
            batch = loaded.rows(rows - 1, length) + loaded.rows(1, max(2, length - 1))
            first, *later = [_one_pass(loaded, batch) for _ in range(4)]
            passes[way].append((first, median(later)))
    attention.enable_cudnn_sdp(allowed)
    loaded.engine.pad_to(loaded.classifier.device.shapes)
    return {
        way: {
            "first_ms": _ms(median(first for first, _ in found)),
            "slowest_first_ms": _ms(max(first for first, _ in found)),
            "later_ms": _ms(median(later for _, later in found)),
            "stall_ms": _ms(median(first - later for first, later in found)),
        }
        for way, found in passes.items()
    }


@cache
def _shapes_of_traffic(effort: Effort) -> list[tuple[int, int]]:
    """Return shapes of several rows in random order."""
    found = list(day(EXACT, 20 * effort.day, 16_384, 5000, window_rows=64).shapes)
    random.Random(7).shuffle(found)
    return [
        shape
        for shape in found
        if shape[0] > 1 and shape[0] * shape[1] <= effort.batch_tokens
    ]


def _new(used: set[tuple[int, int]], shapes: Shapes, rows: int, length: int) -> bool:
    """Return whether the padded shape is new, and remember it."""
    padded = shapes.rows(rows), shapes.length(length)
    is_new = padded not in used
    used.add(padded)
    return is_new


def _one_pass(loaded: Loaded, batch: Sequence[Row]) -> float:
    began = time.perf_counter()
    outputs: Any = loaded.classifier.forward(batch)
    outputs.wait()
    return time.perf_counter() - began


def share(
    loaded: Loaded, batches: Sequence[Sequence[Row]], ceiling: float, effort: Effort
) -> dict[str, float]:
    """Repeat the batches for `seconds`, with a few in flight; return achieved shares of the
    ceiling (GFLOP/s).
    """
    each = [
        forward_flops(loaded.config, [row.length for row in batch]) for batch in batches
    ]
    for batch in batches[:IN_FLIGHT]:
        _one_pass(loaded, batch)
    in_flight: deque[Any] = deque()
    device_seconds = flops = 0.0
    began = time.perf_counter()
    while not flops or time.perf_counter() - began < effort.seconds:
        for batch, of_batch in zip(batches, each, strict=True):
            in_flight.append(loaded.classifier.forward(batch))
            flops += of_batch
            if len(in_flight) > IN_FLIGHT:
                device_seconds += _finish(in_flight.popleft())
    device_seconds += sum(map(_finish, in_flight))
    seconds = time.perf_counter() - began
    return {
        "share": round(flops / seconds / 1e9 / ceiling, 6),
        "device": round(flops / device_seconds / 1e9 / ceiling, 6),
    }


def _finish(outputs: Any) -> float:
    outputs.wait()
    return float(outputs.seconds)


def cut(
    loaded: Loaded, posts: Sequence[str], effort: Effort
) -> tuple[list[list[Row]], dict[str, float]]:
    """Cut micro-batches from a full window.

    Return them, and the host's µs per post for tokenizing and the window.
    """
    began = time.perf_counter()
    rows: list[Row] = []
    for at in range(0, len(posts), POSTS_PER_MESSAGE):
        for of_post in loaded.classifier.prepare(
            posts[at : at + POSTS_PER_MESSAGE], loaded.label_set
        ):
            rows += of_post
    tokenized = time.perf_counter()
    window: Window[Row] = Window(time.monotonic, loaded.classifier.device.shapes)
    batches = []
    for row in rows:
        window.add(row)
        if len(window) >= max(WAITING):
            batches.append(window.take(effort.batch_tokens, effort.batch_rows))
    while batch := window.take(effort.batch_tokens, effort.batch_rows):
        batches.append(batch)
    cut_all = time.perf_counter()
    each = {"tokenize": tokenized - began, "window": cut_all - tokenized}
    return batches, {
        part: round(1e6 * seconds / len(posts), 1) for part, seconds in each.items()
    }


def host(
    loaded: Loaded, batches: Sequence[Sequence[Row]], posts: int
) -> dict[str, float | None]:
    """Return the host's µs per post for starting forward passes (None on a CPU, which computes)
    and for outputs.
    """
    starting = finishing = 0.0
    for batch in batches:
        began = time.perf_counter()
        outputs: Any = loaded.classifier.forward(batch)
        starting += time.perf_counter() - began
        outputs.wait()
        began = time.perf_counter()
        loaded.classifier.finish(batch, outputs)
        finishing += time.perf_counter() - began
    on_cpu = loaded.classifier.device.torch.type == "cpu"
    return {
        "forward": None if on_cpu else round(1e6 * starting / posts, 1),
        "outputs": round(1e6 * finishing / posts, 1),
    }


def measure(
    loaded: Loaded, posts: Sequence[str], ceiling: float, effort: Effort
) -> dict[str, Any]:
    """Measure one model."""
    found: dict[str, Any] = {"stalls": stalls(loaded, effort)}
    rows = {length: max(1, effort.batch_tokens // length) for length in LENGTHS}
    shares = {
        f"{count} × {length}": share(
            loaded, [loaded.rows(count, length)], ceiling, effort
        )
        for length, count in rows.items()
    }
    count = max(1, len(posts) // loaded.label_set.rows)
    batches, microseconds = cut(loaded, posts[:count], effort)
    shares["as cut from posts"] = share(loaded, batches, ceiling, effort)
    large = effort._replace(
        batch_tokens=2 * effort.batch_tokens, batch_rows=16 * effort.batch_rows
    )
    batches, _ = cut(loaded, posts[:count], large)
    shares["larger, padded"] = share(loaded, batches, ceiling, effort)
    batches, _ = cut(
        loaded, posts[:count], large
    )  # rows of entailment models keep their outputs
    shares["larger, as in a worker"] = share(
        as_in_a_worker(loaded), batches, ceiling, effort
    )
    found["share"] = shares
    again, _ = cut(
        loaded, posts[:count], effort
    )  # rows of entailment models keep their outputs
    found["host_us_per_post"] = microseconds | host(loaded, again, count)
    found["posts_of_host_figures"] = count
    found["tokens_per_s"] = {}
    for limit in effort.sweeps:
        rates = sweep(loaded.classifier, limit, time.perf_counter)
        found["tokens_per_s"][str(limit)] = {
            str(budget): round(rate) for budget, rate in rates.items()
        }
    return found


def simulate(lengths: Sequence[int], effort: Effort) -> dict[str, Any]:
    """Return figures of the window that need no device: shapes of a day, and padding efficiency by
    waiting rows.
    """
    days = {
        "exact": day(EXACT, effort.day, 16_384, 5000),
        "few": day(FEW, effort.day, 16_384, 5000),
    }
    padding = {
        str(rows_per_s): {
            str(waiting): {
                name: round(backlog(lengths, shapes, waiting, budget)[0], 3)
                for name, shapes in (("exact", EXACT), ("few", FEW))
            }
            for waiting in WAITING
            if waiting <= max(2 * rows_per_s, min(WAITING))
            and 2 * waiting <= len(lengths)
        }
        for rows_per_s, budget in SIMULATED.items()
    }
    few = days["few"]
    return {
        "micro_batches": effort.day,
        "shapes": {name: len(found.shapes) for name, found in days.items()},
        "padding_by_few_shapes": round(1 - few.padded / few.computed, 4),
        "padding_efficiency": padding,
    }


def show(found: dict[str, Any]) -> None:
    """Print the tables."""
    simulated = found["window"]
    shapes = simulated["shapes"]
    console.print(
        f"shapes in {simulated['micro_batches']} simulated micro-batches: {shapes['exact']}, "
        "padded to few: "
        f"{shapes['few']}, which adds {simulated['padding_by_few_shapes']:.1%} of the computed "
        "tokens"
    )
    padding = Table(
        "device, rows/s",
        "waiting rows",
        "exact",
        "few shapes",
        title="padding efficiency of the window",
    )
    for speed, by_waiting in simulated["padding_efficiency"].items():
        for waiting, each in by_waiting.items():
            padding.add_row(
                speed, waiting, f"{each['exact']:.3f}", f"{each['few']:.3f}"
            )
    console.print(padding)
    models = found["models"]
    shares = Table(
        "batch, rows × tokens",
        *models,
        title=("share of the ceiling (without the time between passes)"),
    )
    for batch in next(iter(models.values()))["share"]:
        each_share = (model["share"][batch] for model in models.values())
        shares.add_row(
            batch,
            *(f"{each['share']:.3f} ({each['device']:.3f})" for each in each_share),
        )
    console.print(shares)
    table = Table(
        "ms", *models, title="stalls: first pass of a shape (slowest), later passes"
    )
    for way in next(iter(models.values()))["stalls"]:
        each_way = (model["stalls"][way] for model in models.values())
        table.add_row(
            way,
            *(
                f"{each['first_ms']} ({each['slowest_first_ms']}), {each['later_ms']}"
                for each in each_way
            ),
        )
    console.print(table)
    hosts = Table("µs per post", *models, title="host")
    for part in next(iter(models.values()))["host_us_per_post"]:
        each_part = (model["host_us_per_post"][part] for model in models.values())
        hosts.add_row(
            part, *("—" if value is None else f"{value:.1f}" for value in each_part)
        )
    console.print(hosts)
    for name, model in models.items():
        for limit, rates in model["tokens_per_s"].items():
            by_budget = ", ".join(
                f"{rate:,} at {budget}" for budget, rate in rates.items()
            )
            console.print(
                f"{name}, at most {limit} rows: tokens/s by token budget: {by_budget}"
            )


def read_texts(path: str | None, count: int) -> list[str]:
    """Read posts' texts, or generate texts."""
    if path is None:
        return texts(count, MAX_TOKENS)
    return [
        post.text
        for post in islice(
            (item for item in FileSource(path).items() if isinstance(item, Post)), count
        )
    ]


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        default="auto",
        help=("auto, cpu, cuda or cuda:N; default: %(default)s"),
    )
    parser.add_argument(
        "--models",
        default=",".join(MODELS),
        help=("comma-separated; default: %(default)s"),
    )
    parser.add_argument("--posts", help="file of posts; default: generated texts")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny models and few passes, to check that everything runs",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="measure waits, workers, ModernBERT, data types and tests, and print the record",
    )
    parser.add_argument(
        "--only",
        default=",".join(RECORD_PARTS),
        help="parts of --all, comma-separated; default: %(default)s",
    )
    parser.add_argument(
        "--precision",
        action="store_true",
        help="compare data types on the embedded model; the same as --all --only precision",
    )
    arguments = parser.parse_args(given)
    if arguments.precision:
        arguments.all = True
        arguments.only = "precision"
    arguments.only = arguments.only.split(",")
    if unknown := set(arguments.only) - set(RECORD_PARTS):
        parser.error(
            f"--only: unknown {', '.join(sorted(unknown))}; choose from {', '.join(RECORD_PARTS)}"
        )
    arguments.models = list(
        dict.fromkeys(name.strip() for name in arguments.models.split(","))
    )
    if unknown := set(arguments.models) - set(MODELS):
        parser.error(
            f"--models: unknown {', '.join(sorted(unknown))}; choose from {', '.join(MODELS)}"
        )
    return arguments


def main() -> None:
    arguments, began = parsed(), time.perf_counter()
    effort = QUICK if arguments.quick else FULL
    try:
        chosen = select_device(arguments.device)
        console.print(describe(chosen))
        if arguments.all:
            # Needs Redis and Celery, unlike the rest.
            from benchmarks.gpu_record import record  # noqa: PLC0415

            measured = record(arguments, chosen, console)
            measured["seconds"] = round(time.perf_counter() - began)
            print(json.dumps(measured))
            return
        posts = read_texts(arguments.posts, effort.posts)
        if len(posts) < QUICK.posts:
            raise UserError(
                f"{arguments.posts} has {len(posts)} posts; at least {QUICK.posts} are needed."
            )
        ceiling = matrix_ceiling(chosen, size=256 if arguments.quick else None)
        console.print(
            f"{chosen.hardware}; ceiling: {ceiling:,.0f} GFLOP/s in a matrix product"
        )
        found: dict[str, Any] = {
            "hardware": chosen.hardware,
            "device": str(chosen),
            "torch": torch.__version__,
            "quick": arguments.quick,
            "ceiling_gflops": round(ceiling),
            "models": {},
        }
        lengths: list[int] = []
        for name in arguments.models:
            with (
                console.status(name),
                tempfile.TemporaryDirectory(prefix="mill-") as folder,
            ):
                loaded = load(name, Path(folder), posts, chosen, arguments.quick)
                lengths = lengths or [
                    of_post[0].length
                    for of_post in loaded.classifier.prepare(posts, loaded.label_set)
                ]
                found["models"][name] = measure(loaded, posts, ceiling, effort)
            del loaded
            gc.collect()
            chosen.give_back()
        found["window"] = simulate(
            random.Random(7).choices(lengths, k=10 * effort.day), effort
        )
        found["seconds"] = round(time.perf_counter() - began)
    except (UserError, DeviceFull, DeviceLost) as error:
        sys.exit(f"benchmark: {error}")
    show(found)
    print(json.dumps(found))


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)


if __name__ == "__main__":
    main()
