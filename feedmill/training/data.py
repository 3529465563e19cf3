"""The data of a training: collect labelled posts, and split them without leakage.

Purged posts are left out, provided Redis answers. Does not import torch.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha1
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from feedmill.outcomes.rows import RowReader
from feedmill.producers.files import FileReading
from feedmill.producers.records import FileOptions, Labelled
from feedmill.shared.broker import connect
from feedmill.shared.errors import InputError, RedisUnavailable, UserError, printable
from feedmill.shared.messages import Post, digest
from feedmill.shared.redis_errors import user_errors
from feedmill.shared.settings import PREFIX, Settings, is_folder_locked
from feedmill.training.options import TrainOptions
from feedmill.training.picked import PICKED_COLUMN, fits_none

#: Default minimum of posts per label, for fine-tuning and for a head.
MIN_POSTS = 8
MIN_POSTS_OF_A_HEAD = 2

#: Folder of the checkpoints in the output folder, removed when the training is complete.
CHECKPOINTS = "checkpoints"
#: Note for people who use no Redis.
NO_REDIS = (
    f"No `feedmill up` runs and {PREFIX}REDIS_URL is not set: posts that were purged, if "
    "any, may be included."
)


class Collected(NamedTuple):
    """Examples, posts without a label, and counts of posts, without content.

    counts: read; unlabelled: without a usable label or text; purged: left out (None if Redis did
    not answer); labelled_by: posts per labelling model, empty if the labels are topics; none, if
    there are any: posts that fit none of the labels, by an answer of `feedmill label`.
    """

    examples: list[Labelled]
    counts: dict[str, Any]
    unlabelled: list[Labelled]
    none: Sequence[Labelled] = ()


def check_devices(setting: str) -> None:
    """Raise UserError if the setting `devices` divides a model between devices: each trains the
    whole model.
    """
    if "+" in setting:
        raise UserError(
            f"--devices {setting}: training needs the whole model on each device. Name single "
            "ones, such as 0,1."
        )


def collect(
    options: TrainOptions, file: FileOptions, settings: Settings, notes: Console
) -> Collected:
    """Read the posts that the options name. Raises UserError."""
    rows = _read(options.source, file, notes)
    read = list(islice(rows, options.limit))
    ids = [row.post.id for row in read]
    tombstones = purged_ids(ids, settings, notes)
    posts = read
    if tombstones:
        posts = [row for row in read if row.post.id not in tombstones]
    examples: list[Labelled] = []
    unlabelled: list[Labelled] = []
    none: list[Labelled] = []
    for row in posts:
        example = _example(row, options)
        if example is not None:
            examples.append(example)
        elif options.targets == "topic" and fits_none(row.post):
            none.append(row)
        elif row.post.text:
            unlabelled.append(row)
    learns_from_labels = options.head and unlabelled and settings.labels
    if not examples and not learns_from_labels:
        raise InputError(
            f"None of {len(posts):,} posts has a label for --targets {options.targets}. Topics "
            "are in a column topic, label or category of the file; a model's labels are in "
            f"exports, with scores of at least --min-score {options.min_score}."
        )
    purged = None
    if tombstones is not None:
        purged = len(read) - len(posts)
    models = Counter(example.model for example in examples if example.model)
    counts = {
        "source": options.source,
        "read": len(read),
        "unlabelled": len(posts) - len(examples) - len(none),
        "purged": purged,
        "labelled_by": dict(models),
    }
    if none:
        counts["none"] = len(none)
    return Collected(
        examples=examples,
        counts=counts,
        unlabelled=unlabelled,
        none=none,
    )


def _example(labelled: Labelled, options: TrainOptions) -> Labelled | None:
    """Return the training example, or None without a label, with a score below `min_score`, or
    without text.
    """
    post, label, scores, model = labelled
    if options.targets == "topic":
        label = post.topic or ""
        scores = {}
        model = ""
    elif scores.get(label, -1.0) < options.min_score:
        return None
    if not label or not post.text:  # exports have truncated bodies, possibly to nothing
        return None
    return Labelled(
        post=post,
        label=label.strip(),
        scores=scores,
        model=model,
    )


def _read(path: str, options: FileOptions, notes: Console) -> Iterator[Labelled]:
    """Yield the posts of a file, or of an export's parts, whose names sort by time.

    Raises InputError.
    """
    files = [path]
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises for a name that is too long
        parts = Path(path).glob("*/part-*")
        files = sorted(str(part) for part in parts)
    if not files:
        raise InputError(
            f"The folder {printable(path)} contains no parts of an export. Name a file or an "
            "export folder."
        )
    for file in files:
        reading = FileReading(
            file,
            notes,
            columns=options.columns()._replace(mark=PICKED_COLUMN),
            encoding=options.encoding,
        )
        for row in reading.labelled():
            if isinstance(row, Post):
                yield Labelled(row)
            else:
                yield row
        reading.end()


def purged_ids(
    ids: Iterable[str], settings: Settings, notes: Console
) -> set[str] | None:
    """Return the ids of purged posts; None, with a note, if Redis is unreachable."""
    try:
        with user_errors(settings):
            reader = RowReader(connect(settings))
            return reader.gone(ids)
    except RedisUnavailable as error:
        # Many people train without a Redis: an address that they never set would only confuse
        # them.
        if settings.redis_url is not None or is_folder_locked(settings.data_folder):
            notes.print(
                f"Purged posts cannot be identified and may be included: {error}",
                markup=False,
            )
        else:
            notes.print(NO_REDIS)
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
    #: Posts that fit none of the labels: for training and for testing.
    none_train: Sequence[Labelled] = ()
    none_test: Sequence[Labelled] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Number of training examples per label."""
        counts = Counter(example.label for example in self.train)
        return {label: counts[label] for label in self.labels}

    def targets(
        self, examples: Sequence[Labelled], options: TrainOptions
    ) -> list[list[float]]:
        """Return the distribution over the labels to learn for each example: 1 for its label or,
        if soft, its scores.

        Scores are normalized to sum to 1, because models score on different scales. With
        `class_weights`, a label's values are weighted so that all labels contribute equally; the
        mean weight of the training examples is 1. A label without examples, which only soft
        targets have, weighs nothing.
        """
        weights = dict.fromkeys(self.labels, 1.0)
        if options.class_weights:
            weights = self._label_weights()
        distributions = []
        for example in examples:
            scores = {example.label: 1.0}
            if options.targets == "soft":
                scores = example.scores
            positive = {
                label: max(scores.get(label, 0.0), 0.0) for label in self.labels
            }
            total = sum(positive.values()) or 1.0
            distribution = []
            for label, score in positive.items():
                weighted = weights[label] * score
                distribution.append(weighted / total)
            distributions.append(distribution)
        return distributions

    def outcome_targets(self, options: TrainOptions) -> list[list[float]]:
        """Return the distributions to learn for the training examples, then for the posts that fit
        none of the labels; if there are any of these, with "none of these" last.
        """
        distributions = self.targets(self.train, options)
        if not self.none_train:
            return distributions
        no_label = [0.0] * len(self.labels)
        none_target = [*no_label, 1.0]
        targets: list[list[float]] = []
        for distribution in distributions:
            target = [*distribution, 0.0]
            targets.append(target)
        targets.extend(none_target for _ in self.none_train)
        return targets

    def _label_weights(self) -> dict[str, float]:
        """Return the weight of each label, with which all contribute equally."""
        counts = self.counts
        learnt = [label for label in self.labels if counts[label]]
        share = len(self.train) / len(learnt)
        weights = dict.fromkeys(self.labels, 0.0)
        for label in learnt:
            weights[label] = share / counts[label]
        return weights

    @property
    def digest(self) -> str:
        """Digest of the labels and all training examples.

        A training resumes only with an equal digest.
        """
        parts = list(self.labels)
        for example in self.train:
            post = example.post
            parts += [post.id, post.text, example.label]
        for example in self.none_train:
            post = example.post
            parts += [post.id, post.text, ""]
        return digest(*parts)

    def summary(self) -> Iterator[str]:
        """Yield lines with the sizes and labels of the dataset."""
        train_count = len(self.train)
        test_count = len(self.test)
        yield f"{train_count:,} posts for training, {test_count:,} for testing"
        counts = []
        for label, count in self.counts.items():
            counts.append(f"{label} {count:,}")
        yield f"{len(self.labels)} labels: {', '.join(counts)}"
        if self.none_train or self.none_test:
            yield (
                f"{len(self.none_train):,} posts that fit none of them for training, "
                f"{len(self.none_test):,} for testing"
            )
        reasons = []
        for reason, count in self.left_out.items():
            reasons.append(f"{count:,} {reason}")
        if reasons:
            yield f"Left out: {', '.join(reasons)}"


def make_dataset(
    found: Iterable[Labelled],
    options: TrainOptions,
    unlabelled: Iterable[Labelled] = (),
    names: Sequence[str] = (),
    none: Iterable[Labelled] = (),
) -> Dataset:
    """Deduplicate the examples and the unlabelled posts, and split the examples according to
    `options`.

    names: labels that a head has even without examples, if no example has another. none: posts
    that fit none of the labels. Raises InputError if there are too few examples to train or test
    on.
    """
    left_out: Counter[str] = Counter()
    examples = _deduplicate(found, left_out)
    if options.targets == "soft":
        examples = _keep_common_label_set(examples, left_out)
    train, test = split(
        examples,
        options.split,
        options.test_share,
        options.seed,
    )
    labels = tuple(names)
    others = {example.label for example in examples}.difference(labels)
    if not options.head or len(labels) < 2 or others:
        labels = _labels(train, options)
    testable = [example for example in test if example.label in labels]
    left_out["tests of another label"] += len(test) - len(testable)
    if examples and not testable and options.split != "none":
        raise InputError(
            f"No post is left to test on; {len(train):,} are training posts. Provide more posts "
            "or another --split; --split none trains without a test."
        )
    none_train, none_test = split(
        _deduplicate(none, left_out),
        options.split,
        options.test_share,
        options.seed,
    )
    least = options.min_posts or MIN_POSTS
    if none_train and not options.head and len(none_train) < least:
        left_out["that fit none of the labels, too few to learn"] += len(none_train)
        none_train = []
        none_test = []
    return Dataset(
        labels=labels,
        train=train,
        test=testable,
        left_out=dict(+left_out),
        none_train=none_train,
        none_test=none_test,
        unlabelled=_deduplicate(unlabelled, Counter()),
    )


def split(
    examples: Sequence[Labelled], how: str, share: float, seed: int
) -> tuple[list[Labelled], list[Labelled]]:
    """Return (train, test). share: approximate share of test examples.

    Raises InputError if posts lack a field.
    """
    if how == "none":
        return list(examples), []
    field = {"time": "created_utc", "subreddit": "subreddit"}.get(how)
    if field:
        values = [getattr(example.post, field) for example in examples]
        missing = values.count(None)
        if missing:
            raise InputError(
                f"--split {how} needs {field}, which {missing:,} posts lack. Use another --split."
            )
    if how == "time":
        dated = sorted(
            examples,
            key=lambda example: example.post.created_utc or 0.0,
        )
        count = len(dated)
        border = count - round(count * share)
        return dated[:border], dated[border:]
    train = []
    test = []
    for example in examples:
        key = example.post.id
        if how == "subreddit":
            key = (example.post.subreddit or "").casefold()
        if _fraction(key, seed) < share:
            test.append(example)
        else:
            train.append(example)
    return train, test


def _fraction(key: str, seed: int) -> float:
    """Map a key to a number from 0 to 1 that depends only on the key and the seed."""
    seeded_key = f"{seed} {key}".encode()
    hashed = sha1(seeded_key, usedforsecurity=False)
    number = int.from_bytes(hashed.digest()[:8])
    return number / 2**64


def _deduplicate(
    examples: Iterable[Labelled], left_out: Counter[str]
) -> list[Labelled]:
    """Keep the first post of each text: reposts would leak training posts into the test."""
    first_of_text: dict[str, Labelled] = {}
    for example in examples:
        words = example.post.text.casefold().split()
        text = " ".join(words)
        if text in first_of_text:
            left_out["repeated text"] += 1
        else:
            first_of_text[text] = example
    return list(first_of_text.values())


def _keep_common_label_set(
    examples: Sequence[Labelled], left_out: Counter[str]
) -> list[Labelled]:
    """Keep the examples scored with the most common label set."""
    if not examples:
        return []
    label_sets = Counter(frozenset(example.scores) for example in examples)
    [(common_set, _)] = label_sets.most_common(1)
    matches = [example for example in examples if set(example.scores) == common_set]
    left_out["scores of other labels"] += len(examples) - len(matches)
    return matches


def _labels(train: Sequence[Labelled], options: TrainOptions) -> tuple[str, ...]:
    """Return the labels in alphabetical order.

    Raises InputError for too few labels, or too few posts per label.
    """
    if not train:
        raise InputError(
            "No post is left to train on. Add labelled posts, or lower --test-share."
        )
    counts = Counter(example.label for example in train)
    if options.targets == "soft":
        # Soft labels come from all scores, including labels that are never the best.
        return tuple(sorted(train[0].scores))
    if len(counts) < 2:
        raise InputError(
            f"All posts have the label {printable(next(iter(counts)))!r}. Add posts "
            "of another label."
        )
    default = MIN_POSTS_OF_A_HEAD if options.head else MIN_POSTS
    least = options.min_posts or default
    rare = [label for label in counts if counts[label] < least]
    if rare:
        rarest = min(rare, key=lambda label: (counts[label], label))
        raise InputError(
            f"{len(rare)} labels have fewer than {least} posts, such as {printable(rarest)} "
            f"({counts[rarest]}). Add posts, remove these labels, or lower --min-posts."
        )
    return tuple(sorted(counts))
