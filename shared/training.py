"""What a training is asked for: the flags of `feedmill train`, and the arguments of the task `feedmill.train`.

One name for argument and flag: `batch_size` is `--batch-size`. Each default says why it is that. Knows no torch.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from shared.errors import UserError, first_problem

#: The task, and the queue that a trainer takes it from: no worker that classifies serves it.
TRAIN_TASK = "feedmill.train"
TRAIN_QUEUE = "training"
#: In place of a file: the stream of results in Redis.
RESULTS = "results"
#: In the output folder: what it takes to go on, gone when the training is complete; in there, of which posts and
#: options it is; and TensorBoard's logs.
CHECKPOINTS, BEGUN, RUNS = "checkpoints", "begun.json", "runs"

Text = Annotated[str, StringConstraints(min_length=1, max_length=4096, strip_whitespace=True)]
Size = Annotated[int, Field(ge=1, le=65_536)]


class TrainOptions(BaseModel):
    """A training, from its posts to the folder of its model."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True)

    # What is learnt.

    #: RESULTS; an export of results, as a file or as a folder of parts; or a file of posts, each with its topic.
    source: Text = Field(alias="from")
    #: The model that is trained on: as the setting `model`. The embedded one is small, and is there without the hub.
    base: Text = "sentence-transformers/all-MiniLM-L6-v2"
    #: The folder of the trained model; new, or empty.
    out: Text
    #: Where labels come from: the posts' topics; or, of results and exports, the best label of each post ("zero-shot"),
    #: or all of its scores ("soft": the trained model learns how sure the other one was).
    labels: Literal["topic", "zero-shot", "soft"] = "topic"
    #: Of the best label, at least; what is below is left out. Half: then no other label is as likely. Not for topics.
    min_score: Annotated[float, Field(ge=0, le=1)] = 0.5
    #: Posts that each label needs, at least, to be learnt: from fewer a model learns the posts, and not the label.
    min_posts: Size = 8

    #: Posts that are read, at most, the first ones: all are held in memory, some 10 KB each.
    limit: Annotated[int, Field(ge=1, le=10_000_000)] = 200_000

    # What is tested.

    #: Posts that are tested on, in a file of their own, each with its topic. Then all others are trained on.
    test: Text | None = None
    #: How posts are chosen for the test: at random, by a hash of their ids, so that a post stays on its side while more
    #: come; whole subreddits, or the newest: then the score tells of what the model has not seen the like of.
    split: Literal["random", "subreddit", "time", "none"] = "random"
    #: Share of the posts that is tested on, about. A fifth of 2,000 posts tells accuracies apart that differ by 4%.
    test_share: Annotated[float, Field(gt=0, le=0.9)] = 0.2

    #: Have the base label the test's posts without training as well, where it can: is it worth the training?
    compare: bool = True

    # How it is learnt.

    #: Times that each post is seen; a few hundred posts need several, and more of them say by heart what they saw.
    epochs: Annotated[float, Field(gt=0, le=1000)] = 4.0
    #: Optimization steps, in place of epochs.
    max_steps: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    #: Rows of a forward pass on each device. Fewer, and accumulation more, where the device has no memory for them.
    batch_size: Size = 16
    #: Forward passes of each optimization step: effective batch = batch size x accumulation x devices.
    accumulation: Size = 1
    #: Of the weights that the base brings, at its highest; what fine-tuning of small encoders takes.
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-4
    #: How many times that for the classifier on top of them, which starts from nothing.
    head_rate: Annotated[float, Field(gt=0, le=1000)] = 10.0
    #: Share of the steps in which the rate rises to that: the first gradients of a new head are large.
    warmup: Annotated[float, Field(ge=0, le=1)] = 0.1
    #: How it falls afterwards, to nothing: linear needs no further figure.
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    #: AdamW's; its usual one.
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.01
    #: Fit the classifier on top by itself first, to what the base says of each post unchanged, which takes one pass.
    #: Training then begins near the right place, and changes less of what the base knows (arXiv 2202.10054).
    fit_head: bool = True
    #: Weigh each label by how rare it is: for macro-F1 rather than accuracy.
    class_weights: bool = False
    #: Tokens of a post that are read, at most; the trained model reads no more. Most titles have fewer than 64, and
    #: beyond this a post's topic rarely changes.
    max_tokens: Annotated[int, Field(ge=8, le=8192)] = 128
    #: Of all that is random: the head, the order of posts, dropout, the split.
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 7
    #: Stop when the loss on a tenth of the training posts, held back, has not fallen for so many epochs, and keep the
    #: best weights. 0: never, and train on all of them, since the schedule ends by itself.
    patience: Annotated[int, Field(ge=0, le=1000)] = 0

    # What it takes of the device.

    #: auto: bfloat16 where the device has it in hardware, else float16 with loss scaling on a GPU, else float32.
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    #: Batches of posts of similar length: less padding, which is computed like the rest. Their order stays random.
    length_grouping: bool = True
    #: Compute activations twice instead of keeping them: a third more time for a fraction of the memory. Small models
    #: need it nowhere.
    gradient_checkpointing: bool = False
    #: One kernel for all weights in place of several for each.
    fused_optimizer: bool = True
    #: Processes that put batches together. Texts are tokenized once, before: padding them takes a thread no time.
    loader_workers: Annotated[int, Field(ge=0, le=64)] = 0
    #: Batches in memory that a GPU copies from while it computes. No effect on a CPU.
    pin_memory: bool = True

    # What is kept.

    #: Optimization steps between two checkpoints; unset: at the end of each epoch.
    checkpoint_steps: Size | None = None
    #: Go on at the last checkpoint in `out`, with the same posts and options.
    resume: bool = False
    #: Write TensorBoard's logs to runs/ in `out`.
    tensorboard: bool = False

    @classmethod
    def parse(cls, given: dict[str, Any]) -> "TrainOptions":
        """Read a training's options; None counts as not given. Raises UserError with the option and the reason."""
        try:
            return cls.model_validate({name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            option, reason = first_problem(error)
            raise UserError(f"{option}: {reason}.") from None

    def flags(self) -> list[str]:
        """The flags of `feedmill train` that ask for the same; defaults are left out."""
        flags: list[str] = []
        for name, value in self.model_dump(mode="json", by_alias=True, exclude_defaults=True).items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                flags.append(f"--{flag}={value}")
        return flags
