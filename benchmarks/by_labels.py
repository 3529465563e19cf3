"""Compare zero-shot classifiers of one shape by the number of labels: the second mode of
benchmarks.zero_shot.

`gliclass`, `rerank` and `nli` have the same encoder (DeBERTa-v2 in MiniLM's shape, with the
embedded model's tokenizer) and random weights. Posts go through the worker's pipeline. Rows and
tokens are per post. Rounds alternate; CPU seconds count all threads.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DebertaV2Config,
)

from benchmarks.hardware import describe
from benchmarks.random_models import CLASSES, MINILM, save
from benchmarks.throughput import read_posts
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.settings import EMBEDDED_MODEL, TOPICS, Settings, load
from feedmill.workers.models import device
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.weights import locate
from feedmill.workers.pipeline import offline
from feedmill.workers.pipeline.backlog import Loaded

#: Token budget of all micro-batches.
TOKENS = 2048
#: Completions of the topics, for more labels than topics.
KINDS = ("", " news", " questions", " advice")
#: DeBERTa-v3's options of attention.
RELATIVE: dict[str, Any] = {
    "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "type_vocab_size": 0,
}  # fmt: skip

console = Console(soft_wrap=True, highlight=False)


def numbers(text: str) -> list[int]:
    """Parse numbers of labels. Raises ValueError."""
    found = [int(part) for part in text.split(",")]
    if not all(1 < number <= len(TOPICS) * len(KINDS) for number in found):
        raise ValueError
    return found


def run(arguments: argparse.Namespace, folder: Path) -> None:
    """Measure each classifier with each number of labels and print a table, and JSON in the last
    line.
    """
    posts = read_posts(arguments.posts, arguments.limit)
    settings = load().model_copy(
        update={
            "dtype": (arguments.dtypes or "auto").split(",")[0],
            "classifier": "auto",
        }
    )
    chosen = device.select_device(settings.device, settings.dtype)
    layers = arguments.layers or MINILM["num_hidden_layers"]
    _save_models(folder, layers)
    console.print(
        f"{describe(chosen)}\n{layers} layers, random weights; {len(posts)} posts"
    )
    runs: dict[tuple[str, int], Callable[[], dict[str, float]]] = {}
    for name in ("gliclass", "rerank", "nli"):
        for count in arguments.labels:
            labels = {label: (label,) for label in _labels(count)}
            own = {"model": str(folder / name), "labels": labels}
            runs[name, count] = partial(
                _measure, settings.model_copy(update=own), chosen, posts
            )
    found: dict[tuple[str, int], list[dict[str, float]]] = {key: [] for key in runs}
    for number in range(arguments.rounds):
        for key in list(runs) if number % 2 == 0 else reversed(runs):
            with console.status(
                f"round {number + 1} of {arguments.rounds}: {key[0]}, {key[1]} labels"
            ):
                found[key].append(runs[key]())
    console.print("classifier, labels: rows, tokens, posts/s, CPU ms per post")
    record = []
    for (name, count), rounds in found.items():
        figures = {
            each: round(median(one[each] for one in rounds), 2) for each in rounds[0]
        }
        record.append({"classifier": name, "labels": count} | figures)
        console.print(
            f"{name:<10} {count:>3}: "
            + ", ".join(f"{figure:>9,.2f}" for figure in figures.values())
        )
    print(json.dumps(record))


def _labels(count: int) -> list[str]:
    return [f"{topic}{kind}" for kind in KINDS for topic in TOPICS][:count]


def _measure(
    settings: Settings, chosen: device.Device, posts: Sequence[Post]
) -> dict[str, float]:
    """Classify the posts and return figures per post."""
    classifier = load_classifier(settings, chosen)
    label_set = classifier.label_set(ClassifyOptions())
    rows = [
        row.length
        for of_post in classifier.prepare([post.text for post in posts], label_set)
        for row in of_post
    ]
    began, used = time.perf_counter(), time.process_time()
    classified = sum(
        1 for _ in offline.classify(iter(posts), [Loaded(classifier, TOKENS)], settings)
    )
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    per_post = {"rows": len(rows) / classified, "tokens": sum(rows) / classified}
    return per_post | {
        "posts_per_s": classified / seconds,
        "cpu_ms": 1000 * cpu / classified,
    }


def _save_models(folder: Path, layers: int) -> None:
    from gliclass import GLiClassModel, GLiClassModelConfig  # noqa: PLC0415 - only this benchmark needs it

    tokenizer = AutoTokenizer.from_pretrained(locate(EMBEDDED_MODEL).folder)
    tokenizer.model_max_length = 1024
    markers = ["<<LABEL>>", "<<SEP>>"]
    tokenizer.add_tokens(markers, special_tokens=True)
    label, separator = (tokenizer.convert_tokens_to_ids(marker) for marker in markers)

    def config(**heads: Any) -> DebertaV2Config:
        shape = (
            MINILM
            | RELATIVE
            | {"num_hidden_layers": layers, "pooler_hidden_size": MINILM["hidden_size"]}
        )
        return DebertaV2Config(vocab_size=len(tokenizer), **shape, **heads)

    names = {name: number for number, name in CLASSES.items()}
    save(
        AutoModelForSequenceClassification,
        config(id2label=CLASSES, label2id=names),
        folder / "nli",
    )
    save(AutoModelForSequenceClassification, config(num_labels=1), folder / "rerank")
    tokens = {"class_token_index": label, "text_token_index": separator}
    made = GLiClassModelConfig(
        config(), encoder_model="none", scorer_type="mlp", prompt_first=True, **tokens
    )
    GLiClassModel(made).save_pretrained(folder / "gliclass")
    for name in ("nli", "rerank", "gliclass"):
        tokenizer.save_pretrained(folder / name)
