"""The options of a training. Does not import torch."""

import math
from dataclasses import asdict, dataclass
from typing import Literal, TypeGuard

from feedmill.shared.errors import UserError
from feedmill.shared.settings import EMBEDDED_MODEL
from feedmill.training.trainer_options import parse

#: Smallest and largest value of each number.
BOUNDS: dict[str, tuple[float, float]] = {
    "min_score": (0, 1),
    "min_posts": (1, 65_536),
    "limit": (1, 10_000_000),
    "test_share": (0, 0.9),
    "epochs": (0.01, 1000),
    "batch_size": (1, 65_536),
    "accumulation": (1, 65_536),
    "learning_rate": (0, 1),
    "patience": (1, 1000),
    "max_tokens": (8, 8192),
    "seed": (0, 2**32 - 1),
}
#: Numbers that may be missing, and those that need not be whole.
OPTIONAL = frozenset({"min_posts", "patience"})
FRACTIONS = frozenset({"min_score", "test_share", "epochs", "learning_rate"})
#: Values of each choice.
CHOICES = {
    "targets": ("topic", "zero-shot", "soft"),
    "split": ("random", "subreddit", "time", "none"),
    "evaluate": ("none", "epoch"),
}


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of one training, from reading posts to writing the model's folder; comments add
    reasons and details. `feedmill train --help` describes each.

    Raises UserError if a number is not finite or out of BOUNDS.
    """

    # Data and model.

    source: str
    out: str
    #: The default model is small and available offline.
    base: str = EMBEDDED_MODEL
    #: The base must be a sentence-transformers model. Its weights stay as they are.
    head: bool = False
    #: "topic" uses the posts' topics; "zero-shot" uses each result's best label; "soft" uses all
    #: of a result's scores, so that the trained model also learns their confidence.
    targets: Literal["topic", "zero-shot", "soft"] = "topic"
    #: Posts with a lower score are skipped. At 0.5, no other label is as likely. Does not apply to
    #: topics.
    min_score: float = 0.5
    #: With fewer posts, a model memorizes them instead of learning the label. A head has few
    #: weights, and penalized.
    min_posts: int | None = None
    #: Posts are read from the start of the source, and all held in memory, about 10 KB each.
    limit: int = 200_000

    # Test.

    #: "random" uses a hash of the posts' ids, so that a post keeps its side when posts are added.
    #: "subreddit" and "time" hold out whole subreddits, or the newest posts, to measure accuracy
    #: on unfamiliar data.
    split: Literal["random", "subreddit", "time", "none"] = "random"
    #: Approximate. A fifth of 2,000 posts resolves accuracies that differ by 4%.
    test_share: float = 0.2
    #: Shows the benefit of the training. Skipped if the base model cannot classify.
    compare: bool = True

    # Training.

    #: A few hundred posts need several passes; too many passes cause overfitting.
    epochs: float = 4.0
    #: Halved, and `accumulation` doubled, when the device runs out of memory.
    batch_size: int = 16
    #: Effective batch size = batch size x accumulation x devices.
    accumulation: int = 1
    #: The default suits fine-tuning of small encoders.
    learning_rate: float = 1e-4
    #: Improves macro-F1 rather than accuracy.
    class_weights: bool = False
    #: A tenth of the training posts is held out for it. The test posts stay unseen until the end.
    evaluate: Literal["none", "epoch"] = "none"
    #: The model of the best epoch is kept.
    patience: int | None = None
    #: For transformers' TrainingArguments, such as max_steps=100; see `trainer_options`.
    trainer: list[str] | None = None
    #: Also the trained model's limit. Most titles have fewer than 64; tokens after the 128th
    #: rarely change the topic.
    max_tokens: int = 128
    #: Seeds the head, the order of posts, dropout and the split.
    seed: int = 7

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(
                    f"--{name.replace('_', '-')} must be a finite number, not {value}."
                )
        for name in BOUNDS:
            _check_bounds(name, getattr(self, name))
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                names = ", ".join(choices)
                raise UserError(f"{name} must be one of {names}, not {value!r:.80}.")
        if self.patience is not None and self.evaluate == "none":
            raise UserError("--patience needs --eval epoch.")
        parse(self.trainer or ())


def _check_bounds(name: str, value: object) -> None:
    """Raise UserError for a value out of bounds. None is a default."""
    if value is None and name in OPTIONAL:
        return
    lower, upper = BOUNDS[name]
    if _is_number(value, is_whole=name not in FRACTIONS) and lower <= value <= upper:
        return
    raise UserError(f"{name} must be from {lower:,} to {upper:,}, not {value!r:.80}.")


def _is_number(value: object, *, is_whole: bool) -> TypeGuard[float]:
    """Return whether a value is a number. is_whole: an integer. True and False are none."""
    if isinstance(value, bool):
        return False
    if is_whole:
        return isinstance(value, int)
    return isinstance(value, int | float)
