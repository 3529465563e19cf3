"""Compare ways to run zero-shot classification by entailment, on the same posts, labels and
weights.

    python -m benchmarks.zero_shot [--posts FILE] [--limit N] [--shape bart-large|minilm] [--layers
    L] [--model MODEL]
                                   [--dtypes float32,bfloat16] [--rounds R] [--chart FILE.svg]
    python -m benchmarks.zero_shot --labels 2,16,64 [--posts FILE] [--limit N] [--layers L]
    [--rounds R]

- `pipeline_1`: transformers' zero-shot pipeline with its default batch size of 1;
- `pipeline_best`: the same pipeline at the best of several batch sizes, found on a sample;
- `direct`: a hand-written forward pass over padded batches of pairs in arrival order, with each
  premise tokenized once, at the best of the same batch sizes;
- `direct_sorted`: the same, with all pairs sorted by length;
- `ideal`: Feedmill's model code without a queue, sorted by length, at the best of six token
  budgets and two numbers of lanes: the offline optimum;
- `feedmill`: the complete system with 32 posts per message.

Measuring speed needs no trained weights. Without --model, the model has the shape's real
configuration with random weights, and a tokenizer trained on the posts (bart-large) or that of the
embedded model (minilm). --layers reduces the number of layers of each stack, for machines on which
the full model is too slow. Each post has sixteen rows, one per label. A variant whose labels
differ too much from the ideal's is left out; the JSON in the last line gives the reason.

With --labels, compare the classifiers `gliclass`, `rerank` and `nli` instead, by number of labels
(by_labels.py).
"""

import argparse
import gc
import json
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    pipeline,
)

from benchmarks import by_labels
from benchmarks.hardware import describe, matrix_ceiling
from benchmarks.ours import FeedmillVariant, Ideal
from benchmarks.random_models import CLASSES, save, save_bart_large
from benchmarks.report import (
    VariantResults,
    agreement,
    comparable,
    draw,
    print_round,
    rates,
    summary,
)
from benchmarks.rivals import BenchmarkJob, Variant
from benchmarks.running import run_folder
from benchmarks.throughput import measure, read_posts
from feedmill.shared.errors import StackError
from feedmill.shared.messages import Post
from feedmill.shared.settings import EMBEDDED_MODEL, TOPICS, Settings, load
from feedmill.workers.models import device
from feedmill.workers.models.device import Device
from feedmill.workers.models.tokenizer import Tokenizer as RowTokenizer
from feedmill.workers.models.weights import locate

#: Batch sizes to try, and the number of posts to try them on.
BATCH_SIZES, SAMPLE = (8, 16, 32, 64, 128), 8

console = Console(soft_wrap=True, highlight=False)


class ZeroShotPipeline:
    """transformers' zero-shot pipeline. batch_size: None until `tune` has found the best one."""

    def __init__(self, job: BenchmarkJob, batch_size: int | None) -> None:
        self._job = job
        self.batch_size = batch_size
        self._pipeline: Any = None
        self._labels: list[str] = []

    def start(self) -> None:
        torch.set_num_threads(device.TORCH_THREADS)
        folder = locate(self._job.settings.model).folder
        chosen = self._job.device
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.model_max_length = self._job.settings.max_tokens
        model = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=chosen.dtype
        )
        self._pipeline = pipeline(
            "zero-shot-classification",
            model=model,
            tokenizer=tokenizer,
            device=chosen.torch,
        )

    def tune(self, sample: Sequence[Post]) -> None:
        """Find the best batch size."""
        seconds = {}
        for size in BATCH_SIZES:
            began = perf_counter()
            self._classify(sample, size)
            seconds[size] = perf_counter() - began
        self.batch_size = min(seconds, key=seconds.__getitem__)

    def run(self, posts: Sequence[Post]) -> None:
        if self.batch_size is None:
            raise StackError("The pipeline's batch size was not tuned.")
        self._labels = self._classify(posts, self.batch_size)

    def _classify(self, posts: Sequence[Post], batch_size: int) -> list[str]:
        texts = [post.text for post in posts]
        found = self._pipeline(
            texts, candidate_labels=list(TOPICS), batch_size=batch_size
        )
        return [entry["labels"][0] for entry in found]

    def labels(self) -> list[str]:
        return self._labels

    def stop(self) -> None:
        self._pipeline = None
        gc.collect()


class DirectForward:
    """The usual hand-written replacement for the pipeline: forward passes over padded batches of
    pairs.
    """

    def __init__(self, job: BenchmarkJob, by_length: bool) -> None:
        self._job = job
        self._by_length = by_length
        self.batch_size = BATCH_SIZES[0]
        self._model: Any = None
        self._labels: list[str] = []

    def start(self) -> None:
        torch.set_num_threads(device.TORCH_THREADS)
        weights = locate(self._job.settings.model)
        self._tokenizer = RowTokenizer(weights, self._job.settings.max_tokens)
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            weights.folder, dtype=self._job.device.dtype
        )
        self._model = model.to(self._job.device.torch).eval()

    def tune(self, sample: Sequence[Post]) -> None:
        """Find the best batch size."""
        seconds = {}
        for size in BATCH_SIZES:
            began = perf_counter()
            self._classify(sample, size)
            seconds[size] = perf_counter() - began
        self.batch_size = min(seconds, key=seconds.__getitem__)

    def run(self, posts: Sequence[Post]) -> None:
        self._labels = self._classify(posts, self.batch_size)

    @torch.inference_mode()
    def _classify(self, posts: Sequence[Post], batch_size: int) -> list[str]:
        topics = self._tokenizer.parts(
            [f"This example is {topic}." for topic in TOPICS]
        )
        parts = self._tokenizer.parts([post.text for post in posts])
        pairs = [
            self._tokenizer.pair(part, topic) for part in parts for topic in topics
        ]
        order = (
            sorted(range(len(pairs)), key=lambda at: len(pairs[at].ids))
            if self._by_length
            else range(len(pairs))
        )
        entailment = torch.empty(len(pairs))
        for at in range(0, len(pairs), batch_size):
            members = list(order[at : at + batch_size])
            rows = [pairs[member] for member in members]
            longest = max(len(row.ids) for row in rows)
            inputs = {
                "input_ids": [
                    row.ids + [self._tokenizer.pad_id] * (longest - len(row.ids))
                    for row in rows
                ],
                "attention_mask": [
                    [1] * len(row.ids) + [0] * (longest - len(row.ids)) for row in rows
                ],
            }
            if rows[0].types:
                inputs["token_type_ids"] = [
                    (row.types or []) + [0] * (longest - len(row.ids)) for row in rows
                ]
            tensors = {
                name: torch.tensor(values, device=self._job.device.torch)
                for name, values in inputs.items()
            }
            entailment[members] = self._model(**tensors).logits[:, -1].float().cpu()
        return [
            TOPICS[best] for best in entailment.view(len(posts), -1).argmax(-1).tolist()
        ]

    def labels(self) -> list[str]:
        return self._labels

    def stop(self) -> None:
        self._model = None
        gc.collect()


def make_bart_large(folder: Path, posts: Sequence[Post], layers: int | None) -> None:
    """Save a model with facebook/bart-large-mnli's configuration and a byte-level tokenizer
    trained on the posts.
    """
    shortened: dict[str, Any] = (
        {"encoder_layers": layers, "decoder_layers": layers} if layers else {}
    )
    save_bart_large(folder, [post.text for post in posts], **shortened)


def make_minilm(folder: Path, posts: Sequence[Post], layers: int | None) -> None:  # noqa: ARG001 - one signature
    """Save a model with the embedded model's configuration and tokenizer and a head of three
    classes.
    """
    source = locate(EMBEDDED_MODEL).folder
    given = json.loads((source / "config.json").read_text()) | {
        "id2label": CLASSES,
        "architectures": None,
    }
    given |= {"label2id": {name: number for number, name in CLASSES.items()}}
    given |= {"num_hidden_layers": layers} if layers else {}
    save(AutoModelForSequenceClassification, BertConfig(**given), folder)
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "vocab.txt",
    ):
        shutil.copy(source / name, folder)


SHAPES = {"bart-large": make_bart_large, "minilm": make_minilm}


def main() -> None:
    arguments = parsed()
    with run_folder() as folder:
        if arguments.labels:
            by_labels.run(arguments, folder)
        else:
            run(arguments, folder)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--posts", help="file of posts; default: the bundled posts, repeated"
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=160,
        help=("maximum number of posts; default: %(default)s"),
    )
    parser.add_argument("--shape", choices=SHAPES, default="minilm")
    parser.add_argument(
        "--layers",
        type=int,
        help=("layers of each stack; default: all layers of the shape"),
    )
    parser.add_argument(
        "--model",
        help=("name or folder of a model, instead of a shape with random weights"),
    )
    parser.add_argument(
        "--dtypes",
        help=(
            "comma-separated; default: float32 and the dtype that a worker would use here"
        ),
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--chart",
        type=Path,
        help=("draw the medians of the first dtype into this .svg or .png file"),
    )
    parser.add_argument(
        "--labels",
        type=by_labels.numbers,
        help=("numbers of labels, to compare classifiers by them"),
    )
    arguments = parser.parse_args()
    if arguments.limit < SAMPLE or arguments.rounds < 1:
        parser.error(f"--limit must be at least {SAMPLE}, and --rounds at least 1")
    if arguments.chart and not find_spec("matplotlib"):
        parser.error("--chart requires the package matplotlib: run `make rivals`")
    return arguments


def run(arguments: argparse.Namespace, folder: Path) -> None:
    """Measure all variants in each precision and print the results."""
    settings = load()
    own = device.select_device(settings.device)
    precisions = (
        arguments.dtypes or f"float32,{str(own.dtype).removeprefix('torch.')}"
    ).split(",")
    posts = read_posts(arguments.posts, arguments.limit)
    model = arguments.model
    if model is None:
        model = str(folder / "model")
        SHAPES[arguments.shape](folder / "model", posts, arguments.layers)
    console.print(describe(own))
    what = arguments.model or (
        f"{arguments.shape}, {arguments.layers or 'all'} layers, random weights"
    )
    console.print(f"{what}; {len(posts)} posts, {len(TOPICS)} labels")
    found: dict[str, Any] = {}
    exact: Sequence[str] = ()
    for precision in dict.fromkeys(precisions):
        chosen = device.select_device(settings.device, precision)
        of_precision = settings.model_copy(
            update={"model": model, "dtype": precision, "classifier": "nli"}
        )
        found[precision], labels = ladder(
            of_precision, chosen, posts, arguments, folder / precision
        )
        exact = exact or labels
        found[precision]["top_label_as_in_" + next(iter(found))] = round(
            agreement(labels, exact), 4
        )
    print(
        json.dumps(found | {"posts": len(posts), "labels": len(TOPICS), "model": what})
    )


def ladder(
    settings: Settings,
    chosen: Device,
    posts: Sequence[Post],
    arguments: argparse.Namespace,
    folder: Path,
) -> tuple[dict[str, Any], Sequence[str]]:
    """Measure all variants in one precision; return their figures and the ideal's labels."""
    ceiling = matrix_ceiling(chosen)
    console.print(f"{chosen}; ceiling: {ceiling:.0f} GFLOP/s in a matrix product")
    folder.mkdir()
    job = BenchmarkJob(settings, chosen, folder)
    best, ideal = ZeroShotPipeline(job, None), Ideal(job)
    direct, by_length = (
        DirectForward(job, by_length=False),
        DirectForward(job, by_length=True),
    )
    sample = posts[:: max(1, len(posts) // SAMPLE)][:SAMPLE]
    for variant in (best, direct, by_length, ideal):
        variant.start()
        with console.status("tuning batch size, token budget and lanes …"):
            variant.tune(sample)
        variant.stop()
    console.print(
        f"batch sizes: pipeline {best.batch_size}, direct {direct.batch_size}, sorted "
        f"{by_length.batch_size}; "
        f"ideal: token budget {ideal.token_budget}, {ideal.lanes} lanes"
    )
    variants: dict[str, Variant] = {
        "pipeline_1": ZeroShotPipeline(job, 1),
        "pipeline_best": best,
        "direct": direct,
        "direct_sorted": by_length,
        "ideal": ideal,
        "feedmill": (feedmill := FeedmillVariant(job, 32)),
    }
    record: VariantResults = {name: [] for name in variants}
    for number in range(1, arguments.rounds + 1):
        for name in list(variants) if number % 2 else reversed(variants):
            what = f"{settings.dtype}, round {number} of {arguments.rounds}: {name}"
            record[name].append(measure(name, variants[name], posts, what))
        print_round(console, record, number, arguments.rounds)
    compared = comparable(record)
    if arguments.chart and not arguments.chart.exists():
        draw(
            arguments.chart,
            {name: rates(compared, name) for name in variants},
            f"{len(posts)} posts, {chosen.name}",
        )
    last = record["ideal"][-1]
    faster = [
        mine / theirs
        for mine, theirs in zip(
            rates(compared, "feedmill"), rates(compared, "pipeline_best"), strict=False
        )
    ]
    figures = summary(record, list(variants)) | {
        "over_pipeline_best": [round(ratio, 2) for ratio in faster],
        "pipeline_batch_size": best.batch_size,
        "ideal_token_budget": ideal.token_budget,
        "ideal_lanes": ideal.lanes,
        "worker": feedmill.ran,
        "ceiling_gflops": round(ceiling),
    }
    return figures, last.labels if last else ()


if __name__ == "__main__":
    main()
