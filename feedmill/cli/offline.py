"""The `feedmill classify` command: classify a text or a file in this process, without Redis or a worker."""

import re
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table
from typer import Argument

from feedmill.cli.labelling import Labelling, Load, OutFlags
from feedmill.cli.options import MODEL, AsJson, FileFlags, Limit, MultiLabelOption, needs, refuse, with_settings
from feedmill.cli.terminal import ID_WIDTH, with_title
from feedmill.console import notes_console, output_console
from feedmill.local_model import explain_refusals, load_calibrated
from feedmill.producers.files import FileReading, Source
from feedmill.producers.records import cut
from feedmill.shared.errors import InputError, PostRefused, UserError, json_line, printable
from feedmill.shared.messages import Classification, ClassifyOptions, Outcome, Post, PostError
from feedmill.shared.settings import Settings
from feedmill.tables.labels import Classify

app = typer.Typer()

#: Arguments that look like a file name, so that a mistyped one is not classified as a text.
FILE_NAME = re.compile(r"\S+\.(jsonl|ndjson|json|csv|tsv|txt|parquet|xlsx?)(\.gz|\.zst)?|\S+\.zst|\S*/\S+")
#: Labels shown per post of a file, and for a single text.
POST_LABELS, TEXT_LABELS = 3, 16
#: Width of the longest bar in characters.
BAR_WIDTH = 30


@app.command()
@needs("--scores", "--out")
@needs("--prefix", "--out")
@with_settings(*MODEL, plain_logs=True)
def classify(
    settings: Settings,
    what: Annotated[
        str,
        Argument(
            metavar="TEXT|FILE",
            help="A text, or a file of posts (CSV, JSONL, a JSON array, Parquet, .txt); - is standard input.",
        ),
    ],
    file: FileFlags,
    output: OutFlags,
    multi_label: MultiLabelOption = False,
    limit: Limit = None,
    as_json: AsJson = False,
) -> None:
    """Classify a text or a file's posts in this process.

    Needs neither Redis nor a worker. Prints the labels, or writes the file's rows with their labels to --out. Exits 1
    if a post failed or a record could not be read; rows without text are no failure.
    """
    load = partial(_load, settings, ClassifyOptions(multi_label=multi_label))
    is_file = what == "-" or _is_file(what)
    refuse(
        (
            output.out is not None and not is_file,
            "--out needs a file of posts, not a text. Give a file, or omit --out.",
        ),
        (as_json and output.out == "-", "--json and --out - both print to standard output. Omit one of them."),
    )
    with explain_refusals(settings):
        if output.out is not None:
            failed = _label_file(what, file, output, limit, multi_label, load, as_json)
        elif is_file:
            failed = _classify_file(what, file, limit, load, as_json)
        else:
            failed = _classify_text(what, load, as_json)
    raise typer.Exit(1 if failed else 0)


def _load(settings: Settings, options: ClassifyOptions) -> tuple[Sequence[str], Classify]:
    """Load the model; return its labels, and the function that classifies posts with it. Raises UserError."""
    loaded, budget = load_calibrated(settings)
    from feedmill.workers.pipeline import offline  # noqa: PLC0415 - needs torch, which only workers have

    labels = loaded.label_set(options).labels
    return labels, lambda posts: offline.classify(posts, loaded, settings, budget, options)


def _label_file(
    path: str, file: FileFlags, output: OutFlags, limit: int | None, alone: bool, load: Load, as_json: bool
) -> bool:
    """Write the file's rows with their labels. Return whether a row failed."""
    labelling = Labelling(
        lambda: Source(path, columns=file.columns(), encoding=file.encoding), path, output, limit, alone
    )
    labelling.run(load)
    if as_json:
        typer.echo(labelling.tally.as_json())
    return labelling.tally.has_failures


def _classify_file(path: str, file: FileFlags, limit: int | None, load: Load, as_json: bool) -> bool:
    """Print the labels of the file's posts. Return whether a post or a record failed."""
    reading = FileReading(
        path, notes_console(), columns=file.columns(), encoding=file.encoding, shows_ids=True, text_only=True
    )
    posts = islice(reading.posts(), limit)
    # Read a post before loading the model, which takes seconds: the file may have none.
    first = list(islice(posts, 1))
    failed = 0
    if first:
        # Closed after any error: threads of a running model would abort the process at its exit.
        with closing(load()[1](chain(first, posts))) as outcomes:
            failed = _show_posts(outcomes, as_json)
    reading.end()
    return failed > 0 or reading.skipped > reading.without_text


def _classify_text(text: str, load: Load, as_json: bool) -> bool:
    """Print the labels of a text. Raises UserError if it cannot be classified."""
    try:
        post = Post.parse({"id": "text", "body": cut("body", text)})
    except PostRefused as refused:
        raise InputError(f"Cannot classify the text: {refused.reason}.") from None
    ((post, outcome),) = load()[1]([post])
    if isinstance(outcome, PostError):
        raise UserError(f"Cannot classify the text: {outcome.error}. Change the text, or use another --model.")
    if as_json:
        typer.echo(_as_json(post, outcome))
    else:
        _show_text(outcome)
    return False


def _is_file(what: str) -> bool:
    """Return True for an existing file. Raises InputError for a missing one: a word that looks like a file name."""
    try:
        if Path(what).is_dir():
            raise InputError(f"{what} is a folder. Give a file in it, or a text of at least two words.")
        if Path(what).exists():  # a file, or a pipe
            return True
    except (OSError, ValueError):  # too long for a file name, or with a null character
        return False
    if FILE_NAME.fullmatch(what):
        raise InputError(
            f"There is no file {what}. A single word with an extension or a slash is read as a file name; "
            "to classify text, give at least two words."
        )
    return False


def _as_json(post: Post, outcome: Outcome) -> str:
    if isinstance(outcome, Classification):
        found = {"id": post.id, "label": outcome.label, "scores": outcome.scores}
    else:
        found = {"id": post.id, "error": outcome.error}
    return json_line(found)


def _show_posts(outcomes: Iterable[tuple[Post, Outcome]], as_json: bool) -> int:
    """Print posts as they are classified; return how many failed."""
    failed = 0
    for post, outcome in outcomes:
        failed += isinstance(outcome, PostError)
        if as_json:
            typer.echo(_as_json(post, outcome))
        elif isinstance(outcome, Classification):
            best = ", ".join(f"{label} {score:.2f}" for label, score in list(outcome.scores.items())[:POST_LABELS])
            typer.echo(with_title(printable(f"{post.id:<{ID_WIDTH}} {best:<48} "), post))
        else:
            typer.echo(printable(f"{post.id:<{ID_WIDTH}} failed: {outcome.error}"))
    return failed


def _show_text(found: Classification) -> None:
    table = Table("label", "score", "", box=None, header_style="dim")
    longest = max(found.scores.values()) or 1.0
    for label, score in list(found.scores.items())[:TEXT_LABELS]:
        table.add_row(escape(printable(label)), f"{score:.3f}", "█" * round(BAR_WIDTH * max(0.0, score) / longest))
    output_console().print(table)
    typer.echo(printable(f"by {found.model} ({found.weights[:12]}) on {found.device}"))
