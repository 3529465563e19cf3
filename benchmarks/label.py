"""Measure how accurate a head is after some answers of `feedmill label`, beside random posts and zero-shot.

    python -m benchmarks.label --posts FILE [--answers 48,98,158] [--seeds 5]

The posts' topics are the answers. A random half of the posts, another for each seed, are those to label; accuracy is
that on the others.

- `zero-shot`: the classifier `similarity`, without any answer;
- `adapted`: a head without any answer, adapted to the posts;
- `label`: the posts that `feedmill label` picks, and its head;
- `random`: random posts, and the same head.

For `label`, `error` is the expected accuracy, which the command shows, less the accuracy; then the number of answers at
which the command stops asking.

Each runs with the topics' names as labels, and with their descriptions. The figures are means of the seeds, with the
lowest and the highest. The last line is JSON.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
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
from feedmill.training.active import RANDOM, Answer, Session
from feedmill.training.data import TrainOptions
from feedmill.training.head import Embedder, Fitted, one_thread, scores_of

#: Maximum tokens to read of a post, as in `feedmill label`.
MAX_TOKENS = TrainOptions.max_tokens

#: Variants that have answers.
VARIANTS = ("label", "error", "random")

console = Console(soft_wrap=True, highlight=False)


class Run:
    """A session of `feedmill label`: its answers, the expected accuracy after each round, and when it stops asking."""

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

    def __init__(self, vectors: torch.Tensor, truth: torch.Tensor, of_labels: torch.Tensor, seed: int) -> None:
        order = torch.randperm(len(truth), generator=torch.Generator().manual_seed(seed))
        places, tested = order[: len(order) // 2], order[len(order) // 2 :]
        self.pooled, self.known, self._of_labels = vectors[places], truth[places].tolist(), of_labels
        self._tested, self._truth = vectors[tested], truth[tested]

    def accuracy(self, head: Fitted) -> float:
        """Return the accuracy of a head on the posts to test on."""
        return float((scores_of(head, self._tested).argmax(1) == self._truth).double().mean())

    def after(self, answers: Sequence[Answer]) -> float:
        """Return the accuracy of the head of these answers."""
        return self.accuracy(Session(self.pooled, self._of_labels, 7, answers).fit().head)


def at_random(truth: Sequence[int], seed: int, count: int) -> list[Answer]:
    """Return the answers to random posts."""
    places = random.Random(seed).sample(range(len(truth)), count)
    return [Answer(place, RANDOM, truth[place]) for place in places]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--posts", required=True, help="file of posts with topics, which are the answers")
    parser.add_argument("--answers", default="48,98,158", help="ends of rounds; default: %(default)s")
    parser.add_argument("--seeds", type=int, default=5, help="number of random seeds; default: %(default)s")
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.answers.split(",")]
    try:
        settings = load()
        posts = [post for post in read_posts(arguments.posts, sys.maxsize) if post.topic in DESCRIBED_TOPICS]
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
    stops: dict[str, list[int | None]] = {kind: [] for kind in sentences}
    accuracies: dict[str, dict[str, dict[int, list[float]]]] = {}
    with one_thread():
        for kind, of_labels in sentences.items():
            found: dict[str, dict[int, list[float]]] = {name: {count: [] for count in counts} for name in VARIANTS}
            found |= {"zero-shot": {0: []}, "adapted": {0: []}}
            for seed in range(arguments.seeds):
                half = Half(vectors, truth, of_labels, seed)
                run = Run(Session(half.pooled, of_labels, seed), half.known, max(counts))
                chosen = run.answers
                stops[kind].append(run.stopped)
                unchosen = at_random(half.known, seed, max(counts))
                for count in counts:
                    found["label"][count].append(half.after(chosen[:count]))
                    found["error"][count].append(run.expected[count] - found["label"][count][-1])
                    found["random"][count].append(half.after(unchosen[:count]))
                found["zero-shot"][0].append(half.accuracy((of_labels, torch.zeros(len(names)))))
                found["adapted"][0].append(half.after(()))
            accuracies[kind] = found
    table = Table("labels", "variant", *(f"{count} answers" for count in (0, *counts)))
    for kind, variants in accuracies.items():
        for name, by_count in variants.items():
            table.add_row(kind, name, *(_figures(by_count.get(count, [])) for count in (0, *counts)))
    pooled, tested = len(posts) // 2, len(posts) - len(posts) // 2
    console.print(f"{pooled:,} posts to label, {tested:,} to test on; means of {arguments.seeds} seeds")
    console.print(table)
    console.print(f"stops asking at: {stops}")
    means = {
        kind: {name: {count: round(mean(each), 4) for count, each in by.items()} for name, by in variants.items()}
        for kind, variants in accuracies.items()
    }
    print(json.dumps({"pooled": pooled, "tested": tested, "seeds": arguments.seeds, "accuracy": means, "stops": stops}))


def _figures(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ({min(values):.3f}–{max(values):.3f})" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"


if __name__ == "__main__":
    main()
