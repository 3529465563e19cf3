"""Measure how accurate a head is after some answers of `feedmill label`, beside random posts and
zero-shot.

    python -m benchmarks.label --posts FILE [--answers 48,98,158] [--seeds 5]
        [--none 6 [--pooled 0.5]]

The posts' topics are the answers. A random half of the posts, another for each seed, are those to
label; accuracy is that on the others.

- `zero-shot`: the classifier `similarity`, without any answer;
- `adapted`: a head without any answer, adapted to the posts;
- `label`: the posts that `feedmill label` picks, and its head;
- `random`: random posts, and the same head.

For `label`, `error` is the expected accuracy, which the command shows, less the accuracy; then the
number of answers at which the command stops asking.

With `--none 6`, the labels are six of the topics, others for each seed, and the posts of all
other topics are answered with "none of these". The figures are then areas under the ROC curve of
the best label's score on the posts to test on: `fits`, whether a post fits one of the labels;
`right`, whether its best label is right; `accuracy`, the share of right best labels among the
posts that fit one; and `precision`, the share of right labels at the model's own threshold, with
`promised`, what the model expects of it. Without an answer, they are those of zero-shot
classification with everyday subjects, and of labels and subjects `adapted` to the posts to label,
which `feedmill train --head` does without answers if each label has a description. `--pooled 0.9`
makes nine tenths of the posts those to label, and `--answers 0` asks for none.

Each runs with the topics' names as labels, and with their descriptions. The figures are means of
the seeds, with the lowest and the highest. The last line is JSON.
"""

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from statistics import mean

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.hardware import describe
from benchmarks.throughput import read_posts
from feedmill.console import Report
from feedmill.shared.errors import UserError
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import DESCRIBED_TOPICS, load
from feedmill.training.active import Answer, Session
from feedmill.training.head import Embedder, Fit, Fitted, logits_of, one_thread
from feedmill.training.none_class import fit_none, outcomes_of
from feedmill.training.options import TrainOptions
from feedmill.training.picked import NONE_OF_THESE, RANDOM
from feedmill.workers.models.classifiers.none_of_these import (
    apart,
    fitting_scores,
    read_subjects,
)
from feedmill.workers.models.classifiers.similarity import COSINE_SCALE

#: Maximum tokens to read of a post, as in `feedmill label`.
MAX_TOKENS = TrainOptions.max_tokens

#: Names of the figures without an answer.
ZERO_SHOT = "zero-shot"
ADAPTED = "adapted"
#: Variants that have answers.
VARIANTS = ("label", "error", "random")

console = Console(soft_wrap=True, highlight=False)


class Run:
    """A session of `feedmill label`: its answers, the expected accuracy after each round, and when
    it stops asking.
    """

    def __init__(self, session: Session, truth: Sequence[int], count: int) -> None:
        self.expected: dict[int, float] = {}
        self.stopped: int | None = None
        while (pick := session.next()) is not None and len(session.answers) < count:
            self._note(session)
            session.answer(truth[pick.place])
        self._note(session)
        self.answers = session.answers

    def _note(self, session: Session) -> None:
        answered = len(session.answers)
        if session.measured:
            self.expected[answered] = session.measured.accuracy
        if session.settled and self.stopped is None:
            self.stopped = answered


class Half:
    """A random half of the posts, to label; the others are to test on."""

    def __init__(
        self,
        vectors: torch.Tensor,
        truth: torch.Tensor,
        of_labels: torch.Tensor,
        seed: int,
    ) -> None:
        order = torch.randperm(
            len(truth), generator=torch.Generator().manual_seed(seed)
        )
        places, tested = order[: len(order) // 2], order[len(order) // 2 :]
        self.pooled, self.known, self._of_labels = (
            vectors[places],
            truth[places].tolist(),
            of_labels,
        )
        self._tested, self._truth = vectors[tested], truth[tested]

    def accuracy(self, head: Fitted) -> float:
        """Return the accuracy of a head on the posts to test on."""
        return float(
            (logits_of(head, self._tested).argmax(1) == self._truth).double().mean()
        )

    def after(self, answers: Sequence[Answer]) -> float:
        """Return the accuracy of the head of these answers."""
        return self.accuracy(
            Session(self.pooled, self._of_labels, 7, answers).fit().head
        )


def at_random(truth: Sequence[int], seed: int, count: int) -> list[Answer]:
    """Return the answers to random posts."""
    places = random.Random(seed).sample(range(len(truth)), count)
    return [Answer(place, RANDOM, truth[place]) for place in places]


def roc_area(scores: torch.Tensor, is_positive: torch.Tensor) -> float:
    """Return the area under the ROC curve: how often a positive has a higher score than a
    negative, where equal scores count half.
    """
    positives = scores[is_positive]
    negatives, _ = scores[~is_positive].sort()
    lower = torch.searchsorted(negatives, positives)
    not_higher = torch.searchsorted(negatives, positives, right=True)
    wins = (lower + not_higher).double() / 2
    return float(wins.mean() / len(negatives))


class NoneHalf:
    """A random part of the posts, to label, of which many fit none of the labels; the others are
    to test on.

    labels: the number of topics that are labels, drawn by the seed. The others' posts fit none.
    pooled: the share of the posts to label.
    """

    def __init__(
        self,
        vectors: torch.Tensor,
        truth: torch.Tensor,
        of_topics: torch.Tensor,
        subjects: torch.Tensor,
        labels: int,
        pooled: float,
        seed: int,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(truth), generator=generator)
        topics = torch.randperm(len(of_topics), generator=generator)
        label_topics = topics[:labels]
        answers = torch.full((len(of_topics),), NONE_OF_THESE)
        answers[label_topics] = torch.arange(labels)
        border = int(pooled * len(order))
        pool_places = order[:border]
        test_places = order[border:]
        self._pooled = vectors[pool_places]
        self._answers: list[int] = answers[truth[pool_places]].tolist()
        self._tested = vectors[test_places]
        self._truth = answers[truth[test_places]]
        self._of_labels = of_topics[label_topics]
        self._subjects = subjects
        self._seed = seed

    def zero_shot(self) -> dict[str, float]:
        """Return the figures without an answer."""
        logits = COSINE_SCALE * self._tested @ self._of_labels.T
        subjects = apart(self._of_labels, self._subjects)
        subject_logits = COSINE_SCALE * self._tested @ subjects.T
        scores = fitting_scores(logits, subject_logits)
        return self._areas(scores)

    def adapted(self) -> dict[str, float]:
        """Return the figures of labels and subjects adapted to the posts to label, without an
        answer.
        """
        no_targets = torch.empty(0, len(self._of_labels) + 1)
        fitted = fit_none(
            self._pooled,
            no_targets,
            self._of_labels,
            self._subjects,
            self._seed,
        )
        return self._figures(fitted)

    def after(self, counts: Sequence[int]) -> dict[str, dict[str, float]]:
        """Return the figures after some answers of `feedmill label`, by their number."""
        session = Session(
            self._pooled,
            self._of_labels,
            self._seed,
            subject_vectors=self._subjects,
        )
        figures: dict[str, dict[str, float]] = {}
        if max(counts) == 0:
            return figures
        while (pick := session.next()) is not None:
            count_so_far = len(session.answers)
            if count_so_far in counts:
                figures[str(count_so_far)] = self._figures(session.fit())
            if count_so_far >= max(counts):
                break
            session.answer(self._answers[pick.place])
        return figures

    def _figures(self, fitted: Fit) -> dict[str, float]:
        if fitted.none is None:
            return self._areas(logits_of(fitted.head, self._tested).softmax(1))
        outcomes = outcomes_of(fitted.head, fitted.none, self._tested)
        scores = outcomes[:, :-1]
        best, places = scores.max(1)
        has_label = best >= fitted.none.threshold
        is_right = places == self._truth
        figures = self._areas(scores)
        if bool(has_label.any()):
            figures["precision"] = float(is_right[has_label].double().mean())
        figures["promised"] = fitted.none.precision or 0.0
        return figures

    def _areas(self, scores: torch.Tensor) -> dict[str, float]:
        best, places = scores.max(1)
        fits = self._truth != NONE_OF_THESE
        is_right = places == self._truth
        return {
            "fits": roc_area(best, fits),
            "right": roc_area(best, is_right),
            "accuracy": float(is_right[fits].double().mean()),
        }


def measure_none(
    vectors: torch.Tensor,
    truth: torch.Tensor,
    sentences: Mapping[str, torch.Tensor],
    subjects: torch.Tensor,
    arguments: argparse.Namespace,
    counts: Sequence[int],
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return each figure of each seed, by the kind of sentences, its name and the answers."""
    all_figures: dict[str, dict[str, dict[str, list[float]]]] = {}
    for kind, of_topics in sentences.items():
        figures: dict[str, dict[str, list[float]]] = {}
        for seed in range(arguments.seeds):
            half = NoneHalf(
                vectors,
                truth,
                of_topics,
                subjects,
                arguments.none,
                arguments.pooled,
                seed,
            )
            by_count = {ZERO_SHOT: half.zero_shot(), ADAPTED: half.adapted()}
            by_count |= half.after(counts)
            for count, values in by_count.items():
                for name, value in values.items():
                    of_name = figures.setdefault(name, {})
                    of_name.setdefault(count, []).append(value)
        all_figures[kind] = figures
    return all_figures


def show_none(
    all_figures: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]],
    counts: Sequence[int],
) -> None:
    """Print the figures of `measure_none`: a table, and the means as JSON."""
    answers = [str(count) for count in counts if count]
    headings = [f"{count} answers" for count in answers]
    table = Table("labels", "figure", ZERO_SHOT, ADAPTED, *headings)
    means: dict[str, dict[str, dict[str, float]]] = {}
    for kind, figures in all_figures.items():
        means[kind] = {}
        for name, by_count in figures.items():
            columns = (ZERO_SHOT, ADAPTED, *answers)
            cells = [_figures(by_count.get(column, [])) for column in columns]
            table.add_row(kind, name, *cells)
            means[kind][name] = {
                count: round(mean(values), 4) for count, values in by_count.items()
            }
    console.print(table)
    print(json.dumps({"none": means}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--posts",
        required=True,
        help=("file of posts with topics, which are the answers"),
    )
    parser.add_argument(
        "--answers", default="48,98,158", help=("ends of rounds; default: %(default)s")
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=5,
        help=("number of random seeds; default: %(default)s"),
    )
    parser.add_argument(
        "--none",
        type=int,
        metavar="LABELS",
        help="number of topics that are labels; the posts of the others fit none",
    )
    parser.add_argument(
        "--pooled",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="with --none: share of the posts to label; default: %(default)s",
    )
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.answers.split(",")]
    try:
        settings = load()
        posts = [
            post
            for post in read_posts(arguments.posts, sys.maxsize)
            if post.topic in DESCRIBED_TOPICS
        ]
        embedder = Embedder(settings.model, settings, MAX_TOKENS)
        console.print(describe(embedder.classifier.device))
        vectors = embedder.embed([post.text for post in posts], Report())
        names = tuple(DESCRIBED_TOPICS)
        by_sentences = {
            "names": {name: (name,) for name in names},
            "descriptions": DESCRIBED_TOPICS,
        }
        sentences = {
            kind: embedder.label_vectors(ClassifyOptions.parse({"labels": described}))
            for kind, described in by_sentences.items()
        }
    except UserError as error:
        sys.exit(f"benchmark: {error}")
    truth = torch.tensor([names.index(post.topic or "") for post in posts])
    if arguments.none is not None:
        subjects = embedder.label_vectors(ClassifyOptions(labels=read_subjects()))
        with one_thread():
            all_figures = measure_none(
                vectors, truth, sentences, subjects, arguments, counts
            )
        show_none(all_figures, counts)
        return
    stops: dict[str, list[int | None]] = {kind: [] for kind in sentences}
    accuracies: dict[str, dict[str, dict[int, list[float]]]] = {}
    with one_thread():
        for kind, of_labels in sentences.items():
            found: dict[str, dict[int, list[float]]] = {
                name: {count: [] for count in counts} for name in VARIANTS
            }
            found |= {"zero-shot": {0: []}, "adapted": {0: []}}
            for seed in range(arguments.seeds):
                half = Half(vectors, truth, of_labels, seed)
                run = Run(
                    Session(half.pooled, of_labels, seed), half.known, max(counts)
                )
                chosen = run.answers
                stops[kind].append(run.stopped)
                unchosen = at_random(half.known, seed, max(counts))
                for count in counts:
                    found["label"][count].append(half.after(chosen[:count]))
                    found["error"][count].append(
                        run.expected[count] - found["label"][count][-1]
                    )
                    found["random"][count].append(half.after(unchosen[:count]))
                found["zero-shot"][0].append(
                    half.accuracy((of_labels, torch.zeros(len(names))))
                )
                found["adapted"][0].append(half.after(()))
            accuracies[kind] = found
    table = Table("labels", "variant", *(f"{count} answers" for count in (0, *counts)))
    for kind, variants in accuracies.items():
        for name, by_count in variants.items():
            table.add_row(
                kind,
                name,
                *(_figures(by_count.get(count, [])) for count in (0, *counts)),
            )
    pooled, tested = len(posts) // 2, len(posts) - len(posts) // 2
    console.print(
        f"{pooled:,} posts to label, {tested:,} to test on; means of {arguments.seeds} seeds"
    )
    console.print(table)
    console.print(f"stops asking at: {stops}")
    means = {
        kind: {
            name: {count: round(mean(each), 4) for count, each in by.items()}
            for name, by in variants.items()
        }
        for kind, variants in accuracies.items()
    }
    print(
        json.dumps(
            {
                "pooled": pooled,
                "tested": tested,
                "seeds": arguments.seeds,
                "accuracy": means,
                "stops": stops,
            }
        )
    )


def _figures(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ({min(values):.3f}–{max(values):.3f})" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"


if __name__ == "__main__":
    main()
