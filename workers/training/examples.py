"""Build the training, validation and test sets: deduplicate texts, check labels, split without leakage.

Pure Python: no torch.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha1
from typing import NamedTuple

from feedmill.shared.errors import InputError, printable
from feedmill.shared.messages import Post, digest
from feedmill.workers.training.options import TrainOptions

#: Share of the training posts held back for early stopping.
VALIDATION_SHARE = 0.1


class Example(NamedTuple):
    """A post and its label."""

    post: Post
    label: str
    #: Score of every label, for soft labels.
    scores: Mapping[str, float] | None = None


class Dataset(NamedTuple):
    """The labels, and the examples for training, early stopping and testing."""

    labels: tuple[str, ...]
    train: list[Example]
    validation: list[Example]
    test: list[Example]
    #: Number of excluded examples by reason.
    left_out: dict[str, int]

    @property
    def counts(self) -> dict[str, int]:
        """Number of training examples per label."""
        counted = Counter(example.label for example in self.train)
        return {label: counted[label] for label in self.labels}

    @property
    def label_weights(self) -> list[float]:
        """Weight of each label so that all labels contribute equally; the mean over the training examples is 1."""
        counts = self.counts.values()
        share = len(self.train) / sum(count > 0 for count in counts)
        return [share / count if count else 0.0 for count in counts]

    def target(self, example: Example, soft: bool) -> int | list[float]:
        """Return the number of the example's label; if `soft`, its scores normalized to sum to 1.

        They are normalized because models score on different scales.
        """
        if not soft:
            return self.labels.index(example.label)
        scores = [max((example.scores or {})[label], 0.0) for label in self.labels]
        total = sum(scores) or 1.0
        return [score / total for score in scores]

    @property
    def digest(self) -> str:
        """Digest of the labels and all training and validation examples. A run resumes only with an equal digest."""
        learnt = (*self.train, *self.validation)
        return digest(*self.labels, *(part for each in learnt for part in (each.post.id, each.post.text, each.label)))


def make_dataset(found: Iterable[Example], tested: Iterable[Example] | None, options: TrainOptions) -> Dataset:
    """Deduplicate the examples and split them according to `options`. tested: test examples from a separate file.

    Raises InputError if the examples are not enough to train or test on.
    """
    left_out: Counter[str] = Counter()
    examples = _deduplicate(found, left_out, "repeated text")
    if options.targets == "soft":
        examples = _keep_common_label_set(examples, left_out)
    if tested is None:
        train, test = split(examples, options.split, options.test_share, options.seed)
    else:
        test = _deduplicate(tested, left_out, "repeated text in the test")
        texts = {_normalized(example.post.text) for example in test}
        train = [example for example in examples if _normalized(example.post.text) not in texts]
        left_out["also in the test"] += len(examples) - len(train)
    labels = _labels(train, options)
    known = [example for example in test if example.label in labels]
    left_out["tests of another label"] += len(test) - len(known)
    if not known and options.split != "none":
        raise InputError(
            f"No post is left to test on; {len(train):,} are training posts. Provide more posts, another --split, or "
            "--test FILE; --split none trains without a test."
        )
    validation: list[Example] = []
    if options.patience:
        # A different seed than the test split's: with the same seed, no training post would hash below the share.
        train, validation = split(train, "random", VALIDATION_SHARE, options.seed + 1)
        if not validation:
            raise InputError(f"--patience: {len(train):,} posts are too few to hold some back. Add posts.")
    return Dataset(labels, train, validation, known, {why: count for why, count in left_out.items() if count})


def split(examples: Sequence[Example], how: str, share: float, seed: int) -> tuple[list[Example], list[Example]]:
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
    sides: tuple[list[Example], list[Example]] = ([], [])
    for example in examples:
        key = (example.post.subreddit or "").casefold() if how == "subreddit" else example.post.id
        sides[_fraction(key, seed) < share].append(example)
    return sides


def _fraction(key: str, seed: int) -> float:
    """Map a key to a number from 0 to 1 that depends only on the key and the seed."""
    return int.from_bytes(sha1(f"{seed} {key}".encode(), usedforsecurity=False).digest()[:8]) / 2**64


def _deduplicate(examples: Iterable[Example], left_out: Counter[str], why: str) -> list[Example]:
    """Keep the first post of each text: reposts would leak training posts into the test."""
    seen: dict[str, Example] = {}
    for example in examples:
        if seen.setdefault(_normalized(example.post.text), example) is not example:
            left_out[why] += 1
    return list(seen.values())


def _normalized(text: str) -> str:
    return " ".join(text.casefold().split())


def _keep_common_label_set(examples: Sequence[Example], left_out: Counter[str]) -> list[Example]:
    """Keep the examples scored with the most common label set."""
    sets = [frozenset(example.scores or ()) for example in examples]
    usual = Counter(sets).most_common(1)
    kept = [example for example, found in zip(examples, sets, strict=True) if found == usual[0][0]]
    left_out["scores of other labels"] += len(examples) - len(kept)
    return kept


def _labels(train: Sequence[Example], options: TrainOptions) -> tuple[str, ...]:
    """Return the labels in alphabetical order. Raises InputError for too few labels, or too few posts per label."""
    if not train:
        raise InputError("No post is left to train on. Add labelled posts, or lower --test-share.")
    counts = Counter(example.label for example in train)
    if options.targets == "soft":
        # Soft labels come from all scores, including labels that are never the best.
        return tuple(sorted(train[0].scores or ()))
    if len(counts) < 2:
        raise InputError(f"All posts have the label {printable(next(iter(counts)))!r}. Add posts of another label.")
    if few := sorted((count, label) for label, count in counts.items() if count < options.min_posts):
        count, label = few[0]
        raise InputError(
            f"{len(few)} labels have fewer than {options.min_posts} posts, such as {printable(label)} ({count}). Add "
            "posts, remove these labels, or lower --min-posts."
        )
    return tuple(sorted(counts))
