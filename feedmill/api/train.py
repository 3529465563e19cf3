"""Train a model from Python: `feedmill.train`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from feedmill.api.request import Labels, read_options
from feedmill.console import notes_console
from feedmill.producers.records import FileOptions
from feedmill.shared.errors import UserError
from feedmill.shared.settings import load_arguments
from feedmill.training import run
from feedmill.training.options import TrainOptions

#: Options without an effect on the training of a head.
OF_FINE_TUNING = (
    "epochs",
    "batch_size",
    "accumulation",
    "learning_rate",
    "evaluate",
    "patience",
    "trainer",
)


def train(
    source: str | Path,
    out: str | Path,
    *,
    labels: Labels | None = None,
    base: str | Path = TrainOptions.base,
    head: bool = TrainOptions.head,
    targets: Literal["topic", "zero-shot", "soft"] = "topic",
    min_score: float = TrainOptions.min_score,
    min_posts: int | None = TrainOptions.min_posts,
    limit: int = TrainOptions.limit,
    split: Literal["random", "subreddit", "time", "none"] = "random",
    test_share: float = TrainOptions.test_share,
    compare: bool = TrainOptions.compare,
    epochs: float = TrainOptions.epochs,
    batch_size: int = TrainOptions.batch_size,
    accumulation: int = TrainOptions.accumulation,
    learning_rate: float = TrainOptions.learning_rate,
    class_weights: bool = TrainOptions.class_weights,
    evaluate: Literal["none", "epoch"] = "none",
    patience: int | None = TrainOptions.patience,
    trainer: Sequence[str] | None = None,
    max_tokens: int = TrainOptions.max_tokens,
    seed: int = TrainOptions.seed,
    id_column: str | None = None,
    title_column: str | None = None,
    body_column: str | None = None,
    label_column: str | None = None,
    date_column: str | None = None,
    date_format: str | None = None,
    subreddit_column: str | None = None,
    encoding: str | None = None,
    device: str | None = None,
    devices: str | None = None,
    dtype: str | None = None,
    redis_url: str | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Fine-tune a model, or fit a head on embeddings, and write the model's folder.

    Needs `pip install 'feedmill[worker,train]'`, and for a head `feedmill[worker]`. Serve the
    model with `feedmill deploy OUT`, or load it with `feedmill.Classifier(OUT)`. docs/training.md
    describes data, options and the record.

    Args:
        source: An export, a folder of its parts, or a file of posts with their labels.
        out: Folder for the model: new, empty, or of the same interrupted training.
        labels: With `head`, labels with descriptions, as for `feedmill.classify`.
        base: Model to train: a folder or a name on the Hugging Face Hub.
        head: Fit only a head on the base's embeddings: takes seconds, suits few posts.
        targets: What to learn: the posts' `topic`, the label of an earlier `zero-shot`
            classification, or all of its scores (`soft`).
        min_score: Minimum score of the best label in exports.
        min_posts: Minimum number of posts per label. Default: 8; with `head` 2.
        limit: Maximum number of posts to read.
        split, test_share: How to choose the test posts, and their share.
        compare: Also test the untrained base.
        epochs, batch_size, accumulation, learning_rate, class_weights, max_tokens, seed: Options
            of the training, as of `feedmill train --help`.
        evaluate, patience: Evaluate on a tenth of the training posts after each `epoch`, and stop
            after that many epochs without a better evaluation.
        trainer: Options of transformers' TrainingArguments, such as `["max_steps=100"]`.
        id_column, title_column, body_column, label_column, date_column, subreddit_column,
            encoding: How to read the file. Default: by the names of its columns, and UTF-8.
        date_format: Format of the file's dates, as for `strptime`. Default: ISO.
        device, devices, dtype: As for `feedmill.Classifier`. `devices` trains on several GPUs.
        redis_url: Redis that knows the purged posts, which are left out. Default:
            FEEDMILL_REDIS_URL, else the running `feedmill up`, else localhost.
        progress: Print notes and the progress to standard error.

    Returns:
        The record of the training, as in `training.json`: `labels`, `metrics` on the test posts,
        `zero_shot` of the untrained base, `curve`, `seconds`, `options` and others.

    Raises:
        feedmill.UserError: For an invalid argument, a missing package, a folder that is not empty,
            data without labels, or a device that fails. The same call then continues a fine-tuning
            from its last checkpoint.

    Example:
        >>> import feedmill
        >>> record = feedmill.train("labels.csv", "model", head=True)
        >>> feedmill.classify("Where is my parcel?", model="model").label
        'delivery'
    """
    options = TrainOptions(
        source=str(source),
        out=str(out),
        base=str(base),
        head=head,
        targets=targets,
        min_score=min_score,
        min_posts=min_posts,
        limit=limit,
        split=split,
        test_share=test_share,
        compare=compare,
        epochs=epochs,
        batch_size=batch_size,
        accumulation=accumulation,
        learning_rate=learning_rate,
        class_weights=class_weights,
        evaluate=evaluate,
        patience=patience,
        trainer=None if trainer is None else list(trainer),
        max_tokens=max_tokens,
        seed=seed,
    )
    if head:
        _refuse_fine_tuning_options(options, devices)
    file = FileOptions(
        id_column=id_column,
        title_column=title_column,
        body_column=body_column,
        encoding=encoding,
        label_column=label_column,
        date_column=date_column,
        date_format=date_format,
        subreddit_column=subreddit_column,
    )
    settings = load_arguments(
        device=device,
        devices=devices,
        dtype=dtype,
        redis_url=redis_url,
    )
    if labels is not None:
        chosen = read_options(labels, None, False).labels
        settings = settings.model_copy(update={"labels": chosen})
    notes = notes_console() if progress else Console(quiet=True)
    return run.train(options, file, settings, notes)


def _refuse_fine_tuning_options(options: TrainOptions, devices: str | None) -> None:
    """Raise UserError for an option without an effect on the training of a head."""
    for name in OF_FINE_TUNING:
        if getattr(options, name) != getattr(TrainOptions, name):
            raise UserError(
                f"{name} cannot be combined with head. Leave out one of them."
            )
    if devices is not None:
        raise UserError("devices cannot be combined with head. Leave out one of them.")
