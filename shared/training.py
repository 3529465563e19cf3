"""Options of a training: flags of `feedmill train`, and arguments of the task `feedmill.train`.

Arguments and flags have the same names: `batch_size` is `--batch-size`. Does not import torch.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from shared.errors import UserError, first_problem

#: Name of the training task, and the queue from which trainers take it. Classification workers do not serve it.
TRAIN_TASK = "feedmill.train"
TRAIN_QUEUE = "training"
#: Value of `source` that selects the results stream in Redis.
RESULTS = "results"
#: Names in the output folder: checkpoints, removed when the training is complete; in that folder, the record of the
#: training's posts and options; and TensorBoard's logs.
CHECKPOINTS, BEGUN, RUNS = "checkpoints", "begun.json", "runs"

Text = Annotated[str, StringConstraints(min_length=1, max_length=4096, strip_whitespace=True)]
Size = Annotated[int, Field(ge=1, le=65_536)]


class TrainOptions(BaseModel):
    """Options of one training, from reading posts to writing the model's folder."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True)

    # Data and model.

    #: Training data: "results"; an export of results, as a file or a folder; or a file of posts with topics.
    source: Text = Field(alias="from")
    #: Base model, as in the setting `model`. The default is small and available offline.
    base: Text = "sentence-transformers/all-MiniLM-L6-v2"
    #: Folder for the trained model. Must be new or empty.
    out: Text
    #: Source of the labels: "topic" uses the posts' topics; "zero-shot" uses each result's best label; "soft" uses all
    #: of a result's scores, so that the trained model also learns their confidence.
    labels: Literal["topic", "zero-shot", "soft"] = "topic"
    #: Minimum score of a result's best label; others are skipped. At 0.5, no other label is as likely. Not for topics.
    min_score: Annotated[float, Field(ge=0, le=1)] = 0.5
    #: Minimum posts per label. With fewer, a model memorizes the posts instead of learning the label.
    min_posts: Size = 8

    #: Maximum posts to read, from the start. All are held in memory, about 10 KB each.
    limit: Annotated[int, Field(ge=1, le=10_000_000)] = 200_000

    # Test.

    #: File of posts with topics to test on. All posts of `source` are then used for training.
    test: Text | None = None
    #: Choice of the test posts. "random" uses a hash of their ids, so that a post keeps its side when posts are added.
    #: "subreddit" and "time" hold out whole subreddits, or the newest posts, to measure accuracy on unfamiliar data.
    split: Literal["random", "subreddit", "time", "none"] = "random"
    #: Approximate share of posts to test on. A fifth of 2,000 posts resolves accuracies that differ by 4%.
    test_share: Annotated[float, Field(gt=0, le=0.9)] = 0.2

    #: Also test the untrained base model, if it can classify, to show the benefit of the training.
    compare: bool = True

    # Training.

    #: Passes over the training posts. A few hundred posts need several; too many cause overfitting.
    epochs: Annotated[float, Field(gt=0, le=1000)] = 4.0
    #: Number of optimization steps. Overrides `epochs`.
    max_steps: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    #: Rows per forward pass on each device. If the device runs out of memory, lower it and raise `accumulation`.
    batch_size: Size = 16
    #: Forward passes per optimization step. Effective batch size = batch size x accumulation x devices.
    accumulation: Size = 1
    #: Peak learning rate of the base model's weights. The default suits fine-tuning of small encoders.
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-4
    #: Factor on the learning rate for the classification head, which starts untrained.
    head_rate: Annotated[float, Field(gt=0, le=1000)] = 10.0
    #: Share of the steps in which the learning rate rises to its peak: a new head's first gradients are large.
    warmup: Annotated[float, Field(ge=0, le=1)] = 0.1
    #: Learning rate after warm-up. "linear" and "cosine" fall to zero.
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    #: AdamW's weight decay.
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.01
    #: Fit the head first, on the frozen base model's outputs; takes one pass. Training then starts near a solution and
    #: changes less of the base model's features (arXiv 2202.10054).
    fit_head: bool = True
    #: Weight labels by their rarity. Improves macro-F1 rather than accuracy.
    class_weights: bool = False
    #: Maximum tokens per post; also the trained model's limit. Most titles have fewer than 64, and text beyond 128
    #: rarely changes a post's topic.
    max_tokens: Annotated[int, Field(ge=8, le=8192)] = 128
    #: Random seed for the head, the order of posts, dropout and the split.
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 7
    #: Stop if the loss on a held-out tenth of the training posts has not fallen for this many epochs, and keep the best
    #: weights. 0 disables early stopping and trains on all posts.
    patience: Annotated[int, Field(ge=0, le=1000)] = 0

    # Device.

    #: "auto": bfloat16 if the device supports it in hardware, else float16 with loss scaling on a GPU, else float32.
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    #: Batch posts of similar length, which reduces padding. The order of batches stays random.
    length_grouping: bool = True
    #: Recompute activations instead of storing them: a third more time for a fraction of the memory. Small models do
    #: not need it.
    gradient_checkpointing: bool = False
    #: Update all weights in one kernel instead of several per weight.
    fused_optimizer: bool = True
    #: Processes that assemble batches. 0 is usually best: texts are tokenized beforehand, and padding them is cheap.
    loader_workers: Annotated[int, Field(ge=0, le=64)] = 0
    #: Use page-locked host memory, from which a GPU copies while it computes. No effect on a CPU.
    pin_memory: bool = True

    # Output.

    #: Optimization steps between checkpoints. Unset: one at the end of each epoch.
    checkpoint_steps: Size | None = None
    #: Resume from the last checkpoint in `out`. Requires the same posts and options.
    resume: bool = False
    #: Write TensorBoard's logs to runs/ in `out`.
    tensorboard: bool = False

    @classmethod
    def parse(cls, given: dict[str, Any]) -> "TrainOptions":
        """Parse options; None means unset. Raises UserError with the option and the reason."""
        try:
            return cls.model_validate({name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            option, reason = first_problem(error)
            raise UserError(f"{option}: {reason}.") from None

    def flags(self) -> list[str]:
        """Return the flags of `feedmill train` for these options, without defaults."""
        flags: list[str] = []
        for name, value in self.model_dump(mode="json", by_alias=True, exclude_defaults=True).items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                flags.append(f"--{flag}={value}")
        return flags
