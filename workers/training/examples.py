"""What is learnt and what is tested: one example a text, labels that have enough of them, and a split that is honest.

Pure Python: no torch.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha1
from typing import NamedTuple

from shared.errors import InputError, printable
from shared.messages import Post, digest
from shared.training import TrainOptions

#: Labels that a sentence names.
NAMED = 5
#: Share of the training posts that early stopping holds back.
VALIDATION_SHARE = 0.1


class Example(NamedTuple):
    """A post and what it is."""

    post: Post
    label: str
    #: Every label's score, where these are learnt.
    scores: Mapping[str, float] | None = None


class Dataset(NamedTuple):
    """What is trained on, what early stopping looks at, and what is tested on in the end."""

    labels: tuple[str, ...]
    train: list[Example]
    validation: list[Example]
    test: list[Example]
    #: Examples that were left out, by why.
    left_out: dict[str, int]

    @property
    def counts(self) -> dict[str, int]:
        """Training examples of each label."""
        counted = Counter(example.label for example in self.train)
        return {label: counted[label] for label in self.labels}

    @property
    def digest(self) -> str:
        """Of all that the training reads: with another one nothing can be resumed."""
        learnt = (*self.train, *self.validation)
        return digest(*self.labels, *(part for each in learnt for part in (each.post.id, each.post.text, each.label)))


def make_dataset(found: Iterable[Example], tested: Iterable[Example] | None, options: TrainOptions) -> Dataset:
    """Examples without repeated texts, split as the options say. tested: those of a file of their own.

    Raises InputError where nothing can be learnt from them.
    """
    left_out: Counter[str] = Counter()
    examples = _once(found, left_out, "repeated text")
    if options.labels == "soft":
        examples = _of_one_label_set(examples, left_out)
    if tested is None:
        train, test = split(examples, options.split, options.test_share, options.seed)
    else:
        test = _once(tested, left_out, "repeated text in the test")
        texts = {_plain(example.post.text) for example in test}
        train = [example for example in examples if _plain(example.post.text) not in texts]
        left_out["also in the test"] += len(examples) - len(train)
    labels = _labels(train, options)
    known = [example for example in test if example.label in labels]
    left_out["tests of another label"] += len(test) - len(known)
    if not known and options.split != "none":
        raise InputError(
            f"No post is left to test on: {len(train):,} are trained on. Give more, another --split, or --test FILE; "
            "or --split none, and nobody knows how good the model is."
        )
    validation: list[Example] = []
    if options.patience:
        # Another hash than the test's, which has these on one side.
        train, validation = split(train, "random", VALIDATION_SHARE, options.seed + 1)
        if not validation:
            raise InputError(f"{len(train):,} posts are too few to hold some back for --patience: leave it out.")
    return Dataset(labels, train, validation, known, {why: count for why, count in left_out.items() if count})


def split(examples: Sequence[Example], how: str, share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """(train, test). share: of the test, about. Raises InputError where the examples do not say by what to split."""
    if how == "none":
        return list(examples), []
    if how == "time":
        dated = sorted(examples, key=lambda example: example.post.created_utc or 0.0)
        if dated and dated[0].post.created_utc is None:
            missing = sum(example.post.created_utc is None for example in dated)
            raise InputError(f"{missing:,} posts have no created_utc, so that --split time cannot order them.")
        border = len(dated) - round(len(dated) * share)
        return dated[:border], dated[border:]
    if how == "subreddit" and (missing := sum(example.post.subreddit is None for example in examples)):
        raise InputError(f"{missing:,} posts have no subreddit, so that --split subreddit cannot tell them apart.")
    sides: tuple[list[Example], list[Example]] = ([], [])
    for example in examples:
        key = (example.post.subreddit or "").casefold() if how == "subreddit" else example.post.id
        sides[_fraction(key, seed) < share].append(example)
    return sides


def _fraction(key: str, seed: int) -> float:
    """From 0 to 1, the same for the same key, whatever else there is."""
    return int.from_bytes(sha1(f"{seed} {key}".encode(), usedforsecurity=False).digest()[:8]) / 2**64


def _once(examples: Iterable[Example], left_out: Counter[str], why: str) -> list[Example]:
    """The first of each text: people post the same again, and a test must not ask what was learnt by heart."""
    seen: dict[str, Example] = {}
    for example in examples:
        if seen.setdefault(_plain(example.post.text), example) is not example:
            left_out[why] += 1
    return list(seen.values())


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _of_one_label_set(examples: Sequence[Example], left_out: Counter[str]) -> list[Example]:
    """Those whose scores are of the labels that most have."""
    sets = Counter(frozenset(example.scores or ()) for example in examples)
    if not sets:
        return []
    ((usual, count),) = sets.most_common(1)
    left_out["scores of other labels"] += len(examples) - count
    return [example for example in examples if frozenset(example.scores or ()) == usual]


def _labels(train: Sequence[Example], options: TrainOptions) -> tuple[str, ...]:
    """In the order of the alphabet. Raises InputError where they are too few, or have too few posts."""
    if not train:
        raise InputError("No post is left to train on: none has a label, or all are tested on.")
    counts = Counter(example.label for example in train)
    if options.labels == "soft":
        # A label that is nobody's best is learnt from all the scores it has.
        return tuple(sorted(train[0].scores or ()))
    if len(counts) < 2:
        raise InputError(f"All posts have the label {printable(next(iter(counts)))!r}: there is nothing to tell apart.")
    if few := sorted((count, label) for label, count in counts.items() if count < options.min_posts):
        named = ", ".join(f"{printable(label)} ({count})" for count, label in few[:NAMED])
        more = f" and {len(few) - NAMED} more" if len(few) > NAMED else ""
        raise InputError(
            f"Too few posts have the labels {named}{more}; {options.min_posts} each are needed to train on. Give more "
            "of them, take them out of the file, or lower --min-posts."
        )
    return tuple(sorted(counts))
