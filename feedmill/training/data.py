"""The options of `feedmill train`, and its data: collect labelled posts, and split them without leakage.

Purged posts are left out, provided Redis answers. Does not import torch.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha1
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from rich.console import Console
from typer import Option

from feedmill.cli.options import FileFlags
from feedmill.producers.files import FileReading
from feedmill.producers.records import Labelled
from feedmill.reading import RowReader
from feedmill.shared.broker import connect
from feedmill.shared.errors import InputError, RedisUnavailable, UserError, printable
from feedmill.shared.messages import Post, digest
from feedmill.shared.redis_errors import user_errors
from feedmill.shared.settings import Settings

#: Default minimum of posts per label, for fine-tuning and for a head.
MIN_POSTS, MIN_POSTS_OF_A_HEAD = 8, 2

#: Folder of the checkpoints in the output folder, removed when the training is complete.
CHECKPOINTS = "checkpoints"
#: Flags that have no effect on the training of a head.
OF_FINE_TUNING = ("--epochs", "--batch-size", "--accumulation", "--learning-rate")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of one training, from reading posts to writing the model's folder; comments add reasons and details.

    Raises UserError if a number is not finite.
    """

    # Data and model.

    source: Annotated[str, Option("--from", help="Training data: an export, or a file of posts.")]
    out: Annotated[str, Option(help="Folder for the trained model; new, empty, or of the same interrupted training.")]
    #: The default model is small and available offline.
    base: Annotated[
        str, Option(help="Model: a folder or a Hugging Face Hub name.", show_default="the bundled all-MiniLM-L6-v2")
    ] = "sentence-transformers/all-MiniLM-L6-v2"
    #: The base must be a sentence-transformers model. Its weights stay as they are.
    head: Annotated[
        bool,
        Option("--head", help="Fit only a head on the base model's embeddings: takes seconds, suits few posts."),
    ] = False
    #: "topic" uses the posts' topics; "zero-shot" uses each result's best label; "soft" uses all of a result's scores,
    #: so that the trained model also learns their confidence.
    targets: Annotated[
        Literal["topic", "zero-shot", "soft"],
        Option(help="What to learn: topic (the column topic, label or category), zero-shot or soft."),
    ] = "topic"
    #: Posts with a lower score are skipped. At 0.5, no other label is as likely. Does not apply to topics.
    min_score: Annotated[float, Option(min=0, max=1, help="Minimum score of the best label in exports.")] = 0.5
    #: With fewer posts, a model memorizes them instead of learning the label. A head has few weights, and penalized.
    min_posts: Annotated[
        int | None, Option(min=1, max=65_536, help="Minimum posts per label (default: 8; with --head 2).")
    ] = None
    #: Posts are read from the start of the source, and all held in memory, about 10 KB each.
    limit: Annotated[int, Option(min=1, max=10_000_000, help="Maximum number of posts to read.")] = 200_000

    # Test.

    #: "random" uses a hash of the posts' ids, so that a post keeps its side when posts are added. "subreddit" and
    #: "time" hold out whole subreddits, or the newest posts, to measure accuracy on unfamiliar data.
    split: Annotated[
        Literal["random", "subreddit", "time", "none"],
        Option(help="Test split: random, subreddit, time or none."),
    ] = "random"
    #: Approximate. A fifth of 2,000 posts resolves accuracies that differ by 4%.
    test_share: Annotated[float, Option(min=0, max=0.9, help="Share of the posts to test on.")] = 0.2
    #: Shows the benefit of the training. Skipped if the base model cannot classify.
    compare: Annotated[bool, Option(help="Also test the untrained base model.")] = True

    # Training.

    #: A few hundred posts need several passes; too many passes cause overfitting.
    epochs: Annotated[float, Option(min=0.01, max=1000, help="Passes over the training posts.")] = 4.0
    #: If the device runs out of memory, lower this value and raise `accumulation`.
    batch_size: Annotated[int, Option(min=1, max=65_536, help="Rows per forward pass.")] = 16
    #: Effective batch size = batch size x accumulation.
    accumulation: Annotated[int, Option(min=1, max=65_536, help="Forward passes per optimization step.")] = 1
    #: The default suits fine-tuning of small encoders.
    learning_rate: Annotated[float, Option(min=0, max=1, help="Peak learning rate.")] = 1e-4
    #: Improves macro-F1 rather than accuracy.
    class_weights: Annotated[bool, Option(help="Weight rare labels more.")] = False
    #: Also the trained model's limit. Most titles have fewer than 64; tokens after the 128th rarely change the topic.
    max_tokens: Annotated[int, Option(min=8, max=8192, help="Maximum tokens to read of a post.")] = 128
    #: Seeds the head, the order of posts, dropout and the split.
    seed: Annotated[int, Option(min=0, max=2**32 - 1, help="Random seed.")] = 7

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"--{name.replace('_', '-')} must be a finite number, not {value}.")


class Collected(NamedTuple):
    """Examples, posts without a label, and counts of posts, without content.

    counts: read; unlabelled: without a usable label or text; purged: left out (None if Redis did not answer);
    labelled_by: posts per labelling model, empty if the labels are topics.
    """

    examples: list[Labelled]
    counts: dict[str, Any]
    unlabelled: list[Labelled]


def collect(options: TrainOptions, file: FileFlags, settings: Settings, notes: Console) -> Collected:
    """Read the posts that the options name. Raises UserError."""
    read = list(islice(_read(options.source, file, notes), options.limit))
    gone = purged_ids((each.post.id for each in read), settings, notes)
    kept = [each for each in read if each.post.id not in (gone or ())]
    examples = [example for each in kept if (example := _example(each, options))]
    unlabelled = [each for each in kept if each.post.text and not _example(each, options)]
    if not examples and not (options.head and unlabelled and settings.labels):
        raise InputError(
            f"None of {len(kept):,} posts has a label for --targets {options.targets}. Topics are in a column topic, "
            "label or category of the file; a model's labels are in exports, with scores of at least "
            f"--min-score {options.min_score}."
        )
    models = Counter(example.model for example in examples if example.model)
    counts = {"source": options.source, "read": len(read), "unlabelled": len(kept) - len(examples)}
    counts |= {"purged": None if gone is None else len(read) - len(kept), "labelled_by": dict(models)}
    return Collected(examples, counts, unlabelled)


def _example(labelled: Labelled, options: TrainOptions) -> Labelled | None:
    """Return the training example, or None without a label, with a score below `min_score`, or without text."""
    post, label, scores, model = labelled
    if options.targets == "topic":
        label, scores, model = post.topic or "", {}, ""
    elif scores.get(label, -1.0) < options.min_score:
        return None
    if not label or not post.text:  # exports have truncated bodies, possibly to nothing
        return None
    return Labelled(post, label.strip(), scores, model)


def _read(path: str, flags: FileFlags, notes: Console) -> Iterator[Labelled]:
    """Yield the posts of a file, or of an export's parts, whose names sort by time. Raises InputError."""
    files = sorted(map(str, Path(path).glob("*/part-*"))) if Path(path).is_dir() else [path]
    if not files:
        raise InputError(
            f"The folder {printable(path)} contains no parts of an export. Name a file or an export folder."
        )
    for file in files:
        reading = FileReading(file, notes, columns=flags.columns(), encoding=flags.encoding)
        for post in reading.labelled():
            yield Labelled(post) if isinstance(post, Post) else post
        reading.end()


def purged_ids(ids: Iterable[str], settings: Settings, notes: Console) -> set[str] | None:
    """Return the ids of purged posts; None, with a note, if Redis is unreachable."""
    try:
        with user_errors(settings):
            return RowReader(connect(settings)).gone(ids)
    except RedisUnavailable as error:
        notes.print(f"Purged posts cannot be identified and may be included: {error}", markup=False)
        return None


class Dataset(NamedTuple):
    """The labels, and the examples for training and testing."""

    labels: tuple[str, ...]
    train: list[Labelled]
    test: list[Labelled]
    #: Number of excluded examples by reason.
    left_out: dict[str, int]
    #: Posts without a label, for a head.
    unlabelled: Sequence[Labelled] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Number of training examples per label."""
        counted = Counter(example.label for example in self.train)
        return {label: counted[label] for label in self.labels}

    def targets(self, examples: Sequence[Labelled], options: TrainOptions) -> list[list[float]]:
        """Return the distribution over the labels to learn for each example: 1 for its label or, if soft, its scores.

        Scores are normalized to sum to 1, because models score on different scales. With `class_weights`, a label's
        values are weighted so that all labels contribute equally; the mean weight of the training examples is 1. A
        label without examples, which only soft targets have, weighs nothing.
        """
        counts = self.counts.values()
        weights = [1.0] * len(counts)
        if options.class_weights:
            share = len(self.train) / sum(count > 0 for count in counts)
            weights = [share / count if count else 0.0 for count in counts]
        rows = []
        for example in examples:
            found = example.scores if options.targets == "soft" else {example.label: 1.0}
            scores = [max(found.get(label, 0.0), 0.0) for label in self.labels]
            total = sum(scores) or 1.0
            rows.append([weight * score / total for weight, score in zip(weights, scores, strict=True)])
        return rows

    @property
    def digest(self) -> str:
        """Digest of the labels and all training examples. A training resumes only with an equal digest."""
        parts = (part for each in self.train for part in (each.post.id, each.post.text, each.label))
        return digest(*self.labels, *parts)

    def summary(self) -> Iterator[str]:
        """Yield lines with the sizes and labels of the dataset."""
        yield f"{len(self.train):,} posts for training, {len(self.test):,} for testing"
        yield f"{len(self.labels)} labels: {', '.join(f'{label} {count:,}' for label, count in self.counts.items())}"
        if self.left_out:
            yield f"Left out: {', '.join(f'{count:,} {why}' for why, count in self.left_out.items())}"


def make_dataset(
    found: Iterable[Labelled], options: TrainOptions, unlabelled: Iterable[Labelled] = (), names: Sequence[str] = ()
) -> Dataset:
    """Deduplicate the examples and the unlabelled posts, and split the examples according to `options`.

    names: labels that a head has even without examples, if no example has another. Raises InputError if there are too
    few examples to train or test on.
    """
    left_out: Counter[str] = Counter()
    examples = _deduplicate(found, left_out)
    if options.targets == "soft":
        examples = _keep_common_label_set(examples, left_out)
    train, test = split(examples, options.split, options.test_share, options.seed)
    labels = tuple(names)
    if not options.head or len(labels) < 2 or not {example.label for example in examples} <= set(labels):
        labels = _labels(train, options)
    known = [example for example in test if example.label in labels]
    left_out["tests of another label"] += len(test) - len(known)
    if examples and not known and options.split != "none":
        raise InputError(
            f"No post is left to test on; {len(train):,} are training posts. Provide more posts or another "
            "--split; --split none trains without a test."
        )
    return Dataset(labels, train, known, dict(+left_out), _deduplicate(unlabelled, Counter()))


def split(examples: Sequence[Labelled], how: str, share: float, seed: int) -> tuple[list[Labelled], list[Labelled]]:
    """Return (train, test). share: approximate share of test examples. Raises InputError if posts lack a field."""
    if how == "none":
        return list(examples), []
    field = {"time": "created_utc", "subreddit": "subreddit"}.get(how)
    if field and (missing := sum(getattr(example.post, field) is None for example in examples)):
        raise InputError(f"--split {how} needs {field}, which {missing:,} posts lack. Use another --split.")
    if how == "time":
        dated = sorted(examples, key=lambda example: example.post.created_utc or 0.0)
        border = len(dated) - round(len(dated) * share)
        return dated[:border], dated[border:]
    sides: tuple[list[Labelled], list[Labelled]] = ([], [])
    for example in examples:
        key = (example.post.subreddit or "").casefold() if how == "subreddit" else example.post.id
        sides[_fraction(key, seed) < share].append(example)
    return sides


def _fraction(key: str, seed: int) -> float:
    """Map a key to a number from 0 to 1 that depends only on the key and the seed."""
    return int.from_bytes(sha1(f"{seed} {key}".encode(), usedforsecurity=False).digest()[:8]) / 2**64


def _deduplicate(examples: Iterable[Labelled], left_out: Counter[str]) -> list[Labelled]:
    """Keep the first post of each text: reposts would leak training posts into the test."""
    seen: dict[str, Labelled] = {}
    for example in examples:
        if seen.setdefault(" ".join(example.post.text.casefold().split()), example) is not example:
            left_out["repeated text"] += 1
    return list(seen.values())


def _keep_common_label_set(examples: Sequence[Labelled], left_out: Counter[str]) -> list[Labelled]:
    """Keep the examples scored with the most common label set."""
    sets = [frozenset(example.scores) for example in examples]
    usual = Counter(sets).most_common(1)
    kept = [example for example, found in zip(examples, sets, strict=True) if found == usual[0][0]]
    left_out["scores of other labels"] += len(examples) - len(kept)
    return kept


def _labels(train: Sequence[Labelled], options: TrainOptions) -> tuple[str, ...]:
    """Return the labels in alphabetical order. Raises InputError for too few labels, or too few posts per label."""
    if not train:
        raise InputError("No post is left to train on. Add labelled posts, or lower --test-share.")
    counts = Counter(example.label for example in train)
    if options.targets == "soft":
        # Soft labels come from all scores, including labels that are never the best.
        return tuple(sorted(train[0].scores))
    if len(counts) < 2:
        raise InputError(f"All posts have the label {printable(next(iter(counts)))!r}. Add posts of another label.")
    least = options.min_posts or (MIN_POSTS_OF_A_HEAD if options.head else MIN_POSTS)
    if few := sorted((count, label) for label, count in counts.items() if count < least):
        count, label = few[0]
        raise InputError(
            f"{len(few)} labels have fewer than {least} posts, such as {printable(label)} ({count}). Add "
            "posts, remove these labels, or lower --min-posts."
        )
    return tuple(sorted(counts))
