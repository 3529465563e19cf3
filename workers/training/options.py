"""Options of a training: the flags of `feedmill train`. Does not import torch."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from feedmill.shared.errors import UserError, first_problem

#: Value of `source` that selects the results stream in Redis.
RESULTS = "results"
#: Names in the output folder: checkpoints, removed when the training is complete; and in that folder, the record of the
#: training's posts and options.
CHECKPOINTS, BEGUN = "checkpoints", "begun.json"

#: Options that have no effect on the training of a head.
OF_FINE_TUNING = (
    "epochs", "batch_size", "accumulation", "learning_rate", "patience", "gradient_checkpointing", "resume",
)  # fmt: skip
#: Minimum posts per label of a head. Its few weights are penalized, so that few posts suffice.
MIN_POSTS_OF_A_HEAD = 2

#: Metadata of a boolean option that has no opposite flag, such as --no-resume.
SWITCH = "switch"

Text = Annotated[str, StringConstraints(min_length=1, max_length=4096, strip_whitespace=True)]
Size = Annotated[int, Field(ge=1, le=65_536)]


class TrainOptions(BaseModel):
    """Options of one training, from reading posts to writing the model's folder.

    Descriptions are the flags' help texts (feedmill/cli/option_groups.py); comments add reasons and details.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True)

    # Data and model.

    #: "results"; an export of results, as a file or a folder; or a file of posts with topics.
    source: Text = Field(
        alias="from", description="Training data: `results` (the stream), an export, or a file of posts."
    )
    out: Text = Field(description="Folder for the trained model; must be new or empty.")
    #: The default model is small and available offline.
    base: Text = Field(
        "sentence-transformers/all-MiniLM-L6-v2",
        description="Model: a folder or a Hugging Face Hub name (default: the bundled all-MiniLM-L6-v2).",
    )
    #: The base must be a sentence-transformers model. Its weights stay as they are.
    head: Annotated[bool, SWITCH] = Field(
        False, description="Fit only a head on the base model's embeddings: takes seconds, suits few posts."
    )
    #: "topic" uses the posts' topics; "zero-shot" uses each result's best label; "soft" uses all of a result's scores,
    #: so that the trained model also learns their confidence.
    targets: Literal["topic", "zero-shot", "soft"] = Field(
        "topic", description="What to learn: topic (the column topic, label or category), zero-shot or soft."
    )
    #: Posts with a lower score are skipped. At 0.5, no other label is as likely. Does not apply to topics.
    min_score: float = Field(0.5, ge=0, le=1, description="Minimum score of the best label in results or exports.")
    #: With fewer posts, a model memorizes them instead of learning the label.
    min_posts: Size = Field(8, description="Minimum posts per label (default: 8; with --head 2).")
    #: Posts are read from the start of the source, and all held in memory, about 10 KB each.
    limit: int = Field(200_000, ge=1, le=10_000_000, description="Maximum number of posts to read.")

    # Files: also those of `test`, but not Parquet.

    id_column: Text | None = Field(None, description="Column or JSON key with the post id (default: id or post_id).")
    title_column: Text | None = Field(
        None, description="Column or JSON key with the title (default: found by its name)."
    )
    body_column: Text | None = Field(None, description="Column or JSON key with the text (default: found by its name).")
    encoding: Text | None = Field(
        None, description="Encoding of the files, such as cp1252 (default: UTF-8, or UTF-16 with its mark)."
    )

    # Test.

    #: With this option, all posts of `source` are used for training.
    test: Text | None = Field(None, description="File of posts with topics to test on (default: a split).")
    #: "random" uses a hash of the posts' ids, so that a post keeps its side when posts are added. "subreddit" and
    #: "time" hold out whole subreddits, or the newest posts, to measure accuracy on unfamiliar data.
    split: Literal["random", "subreddit", "time", "none"] = Field(
        "random", description="Test split: random, subreddit, time or none."
    )
    #: Approximate. A fifth of 2,000 posts resolves accuracies that differ by 4%.
    test_share: float = Field(0.2, gt=0, le=0.9, description="Share of the posts to test on.")
    #: Shows the benefit of the training. Skipped if the base model cannot classify.
    compare: bool = Field(True, description="Also test the untrained base model.")

    # Training.

    #: A few hundred posts need several passes; too many passes cause overfitting.
    epochs: float = Field(4.0, gt=0, le=1000, description="Passes over the training posts.")
    #: If the device runs out of memory, lower this value and raise `accumulation`.
    batch_size: Size = Field(16, description="Rows per forward pass and device.")
    #: Effective batch size = batch size x accumulation x devices.
    accumulation: Size = Field(1, description="Forward passes per optimization step.")
    #: The default suits fine-tuning of small encoders.
    learning_rate: float = Field(1e-4, gt=0, le=1, description="Peak learning rate of the base model's weights.")
    #: Improves macro-F1 rather than accuracy.
    class_weights: bool = Field(False, description="Weight rare labels more.")
    #: Also the trained model's limit. Most titles have fewer than 64; tokens after the 128th rarely change the topic.
    max_tokens: int = Field(128, ge=8, le=8192, description="Maximum tokens to read of a post.")
    #: Seeds the head, the order of posts, dropout and the split.
    seed: int = Field(7, ge=0, lt=2**32, description="Random seed.")
    #: Progress is a lower loss on a held-out tenth of the training posts; the best weights are kept. 0 trains on all
    #: posts.
    patience: int = Field(0, ge=0, le=1000, description="Epochs without progress before stopping; 0 never stops early.")

    #: Training takes a third longer and a fraction of the memory. Small models do not need it.
    gradient_checkpointing: bool = Field(False, description="Recompute activations to save memory.")

    #: Requires the posts and options of the interrupted training.
    resume: Annotated[bool, SWITCH] = Field(False, description="Resume from the last checkpoint in OUT.")

    @classmethod
    def parse(cls, given: dict[str, Any]) -> "TrainOptions":
        """Parse options; None means unset. Raises UserError with the option and the reason."""
        try:
            options = cls.model_validate({name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            option, reason = first_problem(error)
            raise UserError(f"{option}: {reason}.") from None
        if not options.head:
            return options
        if unused := [name for name in OF_FINE_TUNING if name in options.model_fields_set]:
            raise UserError(f"{unused[0]}: this option has no effect with `head`, which trains no other weights.")
        if "min_posts" in options.model_fields_set:
            return options
        return options.model_copy(update={"min_posts": MIN_POSTS_OF_A_HEAD})

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
