"""Options of a training: the flags of `feedmill train`. Does not import torch."""

import math
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from typer import Option

from feedmill.shared.errors import UserError

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
