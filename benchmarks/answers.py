"""Accuracy of what training makes of some answers: `python -m benchmarks.training --accuracy
FILE`.

Draw N tests on quarter N % 4 of the posts, by the hash of their ids; the answers are drawn from
the others, which else have no label. The calibration error is that of all draws' posts together,
`floor` its mean for as many scores that are right exactly as often as they say. `before` is a
logistic regression of four fifths of the answers, as `train --head` once was; `probe` is one of
all answers, without zero-shot classification.
"""

import random
import tempfile
from collections.abc import Callable, Sequence
from hashlib import sha1
from itertools import chain
from pathlib import Path
from statistics import mean, stdev

import torch
from rich.table import Table
from torch.nn.functional import one_hot

from benchmarks.throughput import read_posts
from feedmill.console import Report
from feedmill.evaluation.metrics import calibration, metrics
from feedmill.producers.records import Labelled
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import DESCRIBED_TOPICS, Settings
from feedmill.training.data import Dataset
from feedmill.training.finetune import Training
from feedmill.training.head import Embedder, fit, logits_of
from feedmill.training.options import TrainOptions
from feedmill.workers.models.classifiers.fixed_labels import read_head
from feedmill.workers.models.classifiers.similarity import COSINE_SCALE
from feedmill.workers.models.weights import locate

#: Simulations of perfect scores.
SIMULATIONS = 200
COUNTS = (0, 48, 80, 160, 320, 800, 1600)
#: Least answers for each variant.
LEAST = {
    "zero-shot": 0,
    "adapted": 0,
    "before": 48,
    "probe": 48,
    "head": 48,
    "fine-tuned": 48,
}


class Accuracies:
    """The posts of a file, embedded, and the scores of each variant on those to test on."""

    def __init__(self, path: str, settings: Settings) -> None:
        self._posts = [
            post
            for post in read_posts(path, 1_000_000)
            if post.topic in DESCRIBED_TOPICS
        ]
        self._names, self._settings = tuple(DESCRIBED_TOPICS), settings
        embedder = Embedder(settings.model, settings, TrainOptions.max_tokens)
        self._vectors = embedder.embed([post.text for post in self._posts], Report())
        self._sentences = embedder.label_vectors(
            ClassifyOptions.parse({"labels": DESCRIBED_TOPICS})
        )
        self._truth = torch.tensor(
            [self._names.index(post.topic or "") for post in self._posts]
        )
        self._quarters = torch.tensor(
            [
                sha1(post.id.encode(), usedforsecurity=False).digest()[0] // 64
                for post in self._posts
            ]
        )

    def __len__(self) -> int:
        return len(self._posts)

    def measure(
        self, variant: str, count: int, seed: int
    ) -> tuple[float, float, list[tuple[int, float, bool]]]:
        """Return accuracy and macro-F1 on a quarter, and place, best score and correctness of each
        of its posts.
        """
        is_test = self._quarters == seed % 4
        train, tested = (~is_test).nonzero().squeeze(1), is_test.nonzero().squeeze(1)
        train = train[
            torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
        ]
        best, truth = (
            self._scores(variant, train, tested, count).softmax(1).max(1),
            self._truth[tested],
        )
        pairs = [
            (self._names[one], self._names[other])
            for one, other in zip(truth, best.indices, strict=True)
        ]
        found, right = metrics(self._names, pairs), (best.indices == truth).tolist()
        scored = list(zip(tested.tolist(), best.values.tolist(), right, strict=True))
        return found["accuracy"], found["macro_f1"], scored

    def _scores(
        self, variant: str, train: torch.Tensor, places: torch.Tensor, count: int
    ) -> torch.Tensor:
        tested, vectors, count = (
            self._vectors[places],
            self._vectors[train],
            min(count, len(train)),
        )
        targets = one_hot(self._truth[train[:count]], len(self._names))
        if variant == "fine-tuned":
            return self._fine_tuned(train[:count].tolist(), places.tolist())
        if variant in ("before", "probe"):
            learnt = count * 4 // 5 if variant == "before" else count
            return logits_of(
                fit(vectors[:learnt], targets[:learnt], None, 7).head, tested
            )
        if variant == "zero-shot":
            return COSINE_SCALE * tested @ self._sentences.T
        return logits_of(
            fit(
                vectors,
                targets if variant == "head" else targets[:0],
                self._sentences,
                7,
            ).head,
            tested,
        )

    def _fine_tuned(self, places: Sequence[int], tested: Sequence[int]) -> torch.Tensor:
        examples = [
            Labelled(self._posts[place], self._posts[place].topic or "")
            for place in places
        ]
        texts = [self._posts[place].text for place in tested]
        with tempfile.TemporaryDirectory() as folder:
            options = TrainOptions(
                source="posts", out=folder, base=self._settings.model
            )
            Training(
                Dataset(self._names, examples, [], {}),
                options,
                self._settings,
                Report(),
            ).run().save(Path(folder))
            _, weight, bias = read_head(locate(folder))
            vectors = Embedder(folder, self._settings, options.max_tokens).embed(
                texts, Report()
            )
        return logits_of((weight, bias), vectors)


def calibrations(scored: Sequence[tuple[int, float, bool]]) -> tuple[float, float]:
    """Return the calibration error, and its mean where a post is right as often as its score says.

    scored: place, best score and correctness of posts. Those of one place are right together.
    """
    source, places, simulated = random.Random(7), {place for place, _, _ in scored}, []
    for _ in range(SIMULATIONS):
        chances = {place: source.random() for place in sorted(places)}
        simulated.append(
            calibration([(score, chances[place] < score) for place, score, _ in scored])
        )
    error = calibration([(score, right) for _, score, right in scored])[
        "calibration_error"
    ]
    return error, mean(each["calibration_error"] for each in simulated)


def table(
    path: str,
    settings: Settings,
    draws: int,
    fine_tuned: int,
    show: Callable[[object], None],
) -> None:
    """Print each variant's figures as soon as they are measured, then all: means and deviations of
    the draws.
    """
    accuracies = Accuracies(path, settings)
    found = Table(
        "variant",
        "answers",
        "accuracy",
        "macro-F1",
        "calibration error",
        "floor",
        "draws",
    )
    for variant, least in LEAST.items():
        for count in COUNTS[: 1 if variant in ("zero-shot", "adapted") else None]:
            repeats = fine_tuned if variant == "fine-tuned" else draws
            if count < least or not repeats:
                continue
            *columns, scored = zip(
                *(accuracies.measure(variant, count, seed) for seed in range(repeats)),
                strict=True,
            )
            figures = [
                f"{mean(each):.3f} ± {stdev(each) if repeats > 1 else 0:.3f}"
                for each in columns
            ]
            figures += [
                f"{each:.3f}"
                for each in calibrations(list(chain.from_iterable(scored)))
            ]
            most = min(count, len(accuracies) * 3 // 4)
            show(f"{variant} {most}: {', '.join(figures)}")
            found.add_row(variant, str(most), *figures, str(repeats))
    show(found)
