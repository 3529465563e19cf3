"""The commands that make a model: `feedmill train` fine-tunes one, or fits a head on embeddings;
`feedmill label` asks for the labels of a few posts in the terminal, and fits a head to them.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from feedmill.cli.accuracy import models_table
from feedmill.cli.options import AsJson, FileFlags, JsonSummary, excludes, with_settings
from feedmill.console import notes_console, output_console, span
from feedmill.shared.errors import (
    UserError,
    json_line,
    printable,
    printable_lines,
)
from feedmill.shared.messages import Post
from feedmill.shared.settings import Settings
from feedmill.tables import check_folder, check_page, save_page
from feedmill.teaching.answer_file import LABELS_FILE
from feedmill.teaching.label_keys import LABEL_KEYS, Keys, assign_keys
from feedmill.training import answers, run
from feedmill.training.data import check_devices
from feedmill.training.options import BOUNDS, TrainOptions
from feedmill.training.picked import NONE_OF_THESE

if TYPE_CHECKING:
    from feedmill.training.active import ExpectedAccuracy

#: Flags that have no effect on the training of a head.
OF_FINE_TUNING = (
    "--epochs", "--batch-size", "--accumulation", "--learning-rate", "--eval", "--patience",
    "--trainer", "--devices",
    "--page",
)  # fmt: skip
#: Characters of a body to show.
MAX_BODY_SHOWN = 1000
#: Posts to choose from: embedding them takes a minute on two cores, and 10 MB of memory besides
#: the posts' texts.
USUAL_POOL = 2000
MAX_POOL = 100_000


def _number(name: str, help: str, **details: Any) -> Any:  # noqa: A002 - as typer's
    """Return an option for a number within its bounds."""
    lower, upper = BOUNDS[name]
    return Option(
        min=lower,
        max=upper,
        help=help,
        **details,
    )


@dataclass(frozen=True, kw_only=True)
class TrainFlags(TrainOptions):
    """Flags of `feedmill train`. See TrainOptions for reasons and details."""

    # Data and model.

    source: Annotated[
        str, Option("--from", help="Training data: an export, or a file of posts.")
    ]
    out: Annotated[
        str,
        Option(
            help=(
                "Folder for the trained model; new, empty, or of the same interrupted training."
            )
        ),
    ]
    base: Annotated[
        str,
        Option(
            help="Model: a folder or a Hugging Face Hub name.",
            show_default="the bundled all-MiniLM-L6-v2",
        ),
    ] = TrainOptions.base
    head: Annotated[
        bool,
        Option(
            "--head",
            help=(
                "Fit only a head on the base model's embeddings: takes seconds, suits few posts."
            ),
        ),
    ] = TrainOptions.head
    targets: Annotated[
        Literal["topic", "zero-shot", "soft"],
        Option(
            help=(
                "What to learn: topic (the column topic, label or category), zero-shot or soft."
            )
        ),
    ] = TrainOptions.targets
    min_score: Annotated[
        float,
        _number("min_score", help=("Minimum score of the best label in exports.")),
    ] = TrainOptions.min_score
    min_posts: Annotated[
        int | None,
        _number(
            "min_posts", help=("Minimum posts per label (default: 8; with --head 2).")
        ),
    ] = TrainOptions.min_posts
    limit: Annotated[int, _number("limit", help="Maximum number of posts to read.")] = (
        TrainOptions.limit
    )

    # Test.

    split: Annotated[
        Literal["random", "subreddit", "time", "none"],
        Option(help="Test split: random, subreddit, time or none."),
    ] = TrainOptions.split
    test_share: Annotated[
        float, _number("test_share", help="Share of the posts to test on.")
    ] = TrainOptions.test_share
    compare: Annotated[bool, Option(help="Also test the untrained base model.")] = (
        TrainOptions.compare
    )

    # Training.

    epochs: Annotated[
        float, _number("epochs", help="Passes over the training posts.")
    ] = TrainOptions.epochs
    batch_size: Annotated[
        int, _number("batch_size", help=("Rows per forward pass, on each device."))
    ] = TrainOptions.batch_size
    accumulation: Annotated[
        int, _number("accumulation", help=("Forward passes per optimization step."))
    ] = TrainOptions.accumulation
    learning_rate: Annotated[
        float, _number("learning_rate", help="Peak learning rate.")
    ] = TrainOptions.learning_rate
    class_weights: Annotated[bool, Option(help="Weight rare labels more.")] = (
        TrainOptions.class_weights
    )
    evaluate: Annotated[
        Literal["none", "epoch"],
        Option(
            "--eval", help=("Evaluate on a tenth of the training posts: none or epoch.")
        ),
    ] = TrainOptions.evaluate
    patience: Annotated[
        int | None,
        _number(
            "patience",
            metavar="N",
            help=("Stop after N epochs without a better evaluation (needs --eval)."),
        ),
    ] = TrainOptions.patience
    trainer: Annotated[
        list[str] | None,
        Option(
            metavar="KEY=VALUE",
            help=("Option of transformers' TrainingArguments, such as max_steps=100."),
        ),
    ] = TrainOptions.trainer
    max_tokens: Annotated[
        int, _number("max_tokens", help="Maximum tokens to read of a post.")
    ] = TrainOptions.max_tokens
    seed: Annotated[int, _number("seed", help="Random seed.")] = TrainOptions.seed


@excludes("--head", *OF_FINE_TUNING)
@with_settings(
    "labels",
    "device",
    "devices",
    "dtype",
    "redis_url",
    plain_logs=True,
)
def train(
    settings: Settings,
    flags: TrainFlags,
    file: FileFlags,
    page: Annotated[
        Path | None,
        Option(metavar="FILE", help=("Write an HTML page with the training's curves.")),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Switch running workers to the trained model with `feedmill deploy OUT`, or start one with
    `feedmill worker --model OUT`. See docs/training.md.
    """
    if run.is_joining() and int(os.environ["RANK"]) > 0:
        run.follow(settings)
        return
    if settings.named_devices:
        check_devices(settings.named_devices)  # before a large file is read
    # Processes of other devices get the options, and do not import the command.
    values = asdict(flags)
    options = TrainOptions(**values)
    folder = run.output_folder(options)
    if page is not None:
        check_folder(folder, page)
        check_page(
            page,
            source=options.source,
            labels_file=settings.labels_file,
            folder=folder,
        )
    try:
        record = run.train(options, file, settings, notes_console())
    except KeyboardInterrupt:
        notes_console().print(_interrupted_training_message(folder), markup=False)
        raise
    if as_json:
        fields = {"folder": str(folder), **record}
        typer.echo(json_line(fields))
    else:
        show_trained(record, str(folder))
    # Last, because a full disk must not cost the figures.
    if page is not None:
        _write_page(page, folder.name, record)


def _write_page(path: Path, name: str, record: Mapping[str, Any]) -> None:
    """Write the page of a training. Raises UserError."""
    from feedmill.training.page import page  # noqa: PLC0415 - jinja, which few commands need

    save_page(path, page(name, record))


def _interrupted_training_message(folder: Path) -> str:
    """Return what an interrupted training left, and how to repeat it."""
    where = printable(str(folder))
    if run.has_checkpoints(folder):
        return f"interrupted: the checkpoints in {where} stay, and the same command continues."
    return (
        f"interrupted: no model was written to {where}. The same command starts over."
    )


def show_trained(record: Mapping[str, Any], folder: str) -> None:
    """Print the training time and the metrics of the finished model, and what to do next."""
    typer.echo(_time_line(record))
    losses = [point["loss"] for point in record["curve"]]
    if losses:
        first = losses[0]
        last = losses[-1]
        typer.echo(f"loss {first:.3g} → {last:.3g}")
    metrics = record["metrics"]
    zero_shot = record["zero_shot"]
    none_class = record["plan"].get("none")
    if not metrics:
        advise(folder, none_class)
        return
    models = ((folder, metrics), ("its base, zero-shot", zero_shot))
    console = output_console()
    console.print(models_table("", models))
    if not zero_shot or metrics["accuracy"] > zero_shot["accuracy"]:
        advise(folder, none_class)
        return
    accuracy = f"{metrics['accuracy']:.3f}"
    base_accuracy = f"{zero_shot['accuracy']:.3f}"
    advice = "more posts or --epochs"
    if record["options"]["head"]:
        advice = (
            "more posts (`feedmill label` asks for the most useful ones), or all weights, "
            "without --head"
        )
    typer.echo(
        f"Do not deploy this model: it is no more accurate ({accuracy}) than its base "
        f"zero-shot ({base_accuracy}) on the same {metrics['posts']:,} posts. What helps: "
        f"{advice}"
    )


def _time_line(record: Mapping[str, Any]) -> str:
    """Return the line with the time, the rate and the memory of a training."""
    duration = span(record["seconds"])
    time = f"Trained in {duration}"
    first_step = record.get("resumed_at_step")
    if first_step:
        time += f" from step {first_step:,} on"
    parts = [time]
    rate = record["samples_per_s"]
    if rate:
        parts.append(f"{rate:.1f} posts/s")
    peak_memory = record.get("peak_memory_bytes")
    if peak_memory:
        megabytes = peak_memory / 1e6
        parts.append(f"{megabytes:,.0f} MB at most")
    if record.get("stopped_early"):
        step = record["kept_step"]
        parts.append(f"stopped early, with the model of step {step:,}")
    return ", ".join(parts)


def advise(folder: str, none_class: Mapping[str, Any] | None = None) -> None:
    """Print how to use a model. none_class: the threshold of its none-class, and what to expect of
    it, if it has one.
    """
    where = printable(shlex.quote(folder))
    threshold = ""
    if none_class is not None:
        threshold = f" --none {none_class['threshold']:.2f}"
    if none_class is not None and none_class["precision"] is not None:
        typer.echo(
            f"With{threshold}, {none_class['coverage']:.0%} of the posts get a label, of which "
            f"about {none_class['precision']:.0%} are right."
        )
    typer.echo(
        "Next, label the posts of a file with the model:\n"
        f"  feedmill classify FILE --model {where}{threshold}"
    )
    typer.echo(f"Or start a worker with it:\n  feedmill worker --model {where}")
    typer.echo(f"Or switch running workers to it:\n  feedmill deploy {where}")


@with_settings("labels", "template", "device", "redis_url")
def label(
    settings: Settings,
    posts: Annotated[
        str,
        Argument(metavar="FILE", help=("File of posts (JSONL, a JSON array or CSV).")),
    ],
    out: Annotated[
        Path,
        Option(
            help=("Folder for the labels and the model; one with labels is resumed.")
        ),
    ],
    file: FileFlags,
    base: Annotated[
        str, Option(help="Embedding model: a folder or a Hugging Face Hub name.")
    ] = TrainOptions.base,
    pool: Annotated[
        int,
        Option(
            metavar="N",
            min=10,
            max=MAX_POOL,
            help=("Posts to choose from: a random sample of the file."),
        ),
    ] = USUAL_POOL,
    as_json: JsonSummary = False,
) -> None:
    """Shows one post at a time and saves each answer.

    Writes OUT/labels.csv and the model OUT/model, for `feedmill worker --model` and
    `feedmill deploy`. The same command resumes. Answers can be piped, one per
    line: keys or labels.
    """
    _check_label_count(len(settings.labels or ()))
    if posts == "-":
        raise UserError("Standard input has the answers. Give a file of posts.")
    folder = out.expanduser().absolute()
    try:
        notes = notes_console()
        session = answers.begin_session(
            posts,
            folder,
            base,
            pool,
            file=file,
            settings=settings,
            notes=notes,
        )
        _ask(session, notes)
        summary = session.finish()
    except KeyboardInterrupt:
        notes_console().print(_interrupted_labelling_message(folder), markup=False)
        raise
    finally:
        run.remove_if_empty(folder)
    if as_json:
        typer.echo(json_line(summary))
    else:
        _show_session(summary, session.measured)


def _check_label_count(count: int) -> None:
    if not 2 <= count <= len(LABEL_KEYS):
        raise UserError(
            f"--labels: give 2 to {len(LABEL_KEYS)} labels, such as delivery,refund; these are "
            f"{count}."
        )


def _interrupted_labelling_message(folder: Path) -> str:
    path = folder / LABELS_FILE
    state = "there are no answers yet"
    if path.exists():
        state = f"{printable(str(path))} has all answers"
    return f"interrupted: {state}. The same command resumes."


def _show_session(
    summary: Mapping[str, Any], measured: "ExpectedAccuracy | None"
) -> None:
    """Print the number of answers and the accuracy, and what to do next."""
    counts = f"{summary['labelled']:,} labels"
    if summary["none"]:
        counts = f"{summary['labelled']:,} answers, {summary['none']:,} of them none of these"
    counts = f"{counts}, {summary['skipped']:,} skipped, in {summary['labels_file']}"
    typer.echo(printable(counts))
    if measured is not None:
        typer.echo(
            f"By cross-validation on {measured.measured_on:,} random posts: {measured}"
        )
    if measured is not None and measured.accuracy <= measured.zero_shot_accuracy:
        typer.echo(
            "Do not deploy this model yet. The same command asks for more posts."
        )
    elif summary["model"]:
        advise(summary["model"], summary["none_class"])


def _ask(session: answers.LabelSession, notes: Console) -> None:
    """Ask for labels until the user quits, more would hardly help, or no post is left."""
    names = session.names
    by_name = {name: index for index, name in enumerate(names)}
    keys = assign_keys(names)
    choices = _choices(keys, names)
    while (post := session.next()) is not None:
        if session.is_settled:
            notes.print(
                "The last 50 answers changed at most 4% of the posts' labels: more would "
                "hardly help."
            )
            notes.print("The same command asks for 50 more.")
            return
        _show_post(post, session, notes)
        notes.print(Text(choices, style="bold"))
        answer = _answer()
        label = keys.labels.get(answer, by_name.get(answer))
        if label is not None:
            session.answer(label)
        elif answer == keys.none:
            session.answer(NONE_OF_THESE)
        elif answer == keys.undo:
            session.undo()
        elif answer == keys.skip:
            session.answer(None)
        elif answer in (keys.quit, ""):
            return
        else:
            notes.print(Text(f"Unknown key {answer!r}. Type one of those above."))
    notes.print("Every post has an answer.")


def _choices(keys: Keys, names: Sequence[str]) -> str:
    """Return the keys with their meanings, for a person."""
    labels = "  ".join(
        f"{printable(key)} {printable(names[index])}"
        for key, index in keys.labels.items()
    )
    return (
        f"{labels}\n{keys.none} none of these  {keys.undo} undo  {keys.skip} skip  "
        f"{keys.quit} quit"
    )


def _show_post(post: Post, session: answers.LabelSession, notes: Console) -> None:
    """Show a post, below the accuracy so far."""
    notes.rule(style="dim")
    so_far = f"answers: {session.answer_count:,}"
    if session.measured is not None:
        so_far += f"; {session.measured}"
    notes.print(Text(so_far, style="dim"))
    body = post.body.replace("\r\n", "\n")
    body = body if len(body) <= MAX_BODY_SHOWN else f"{body[:MAX_BODY_SHOWN]} …"
    if post.title:
        notes.print(Text(printable(post.title), style="bold"))
    if body.strip():
        notes.print(Text(printable_lines(body)))


def _answer() -> str:
    """Return a key press on a terminal, else the next line that is not blank, stripped; "" at the
    end.
    """
    if sys.stdin.isatty():
        try:
            return typer.getchar()
        except EOFError:  # Ctrl-D
            return ""
    return next((line.strip() for line in sys.stdin if line.strip()), "")
