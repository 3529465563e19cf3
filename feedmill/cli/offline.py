"""The `feedmill classify` command: classify a text or a file in this process, without Redis or a worker."""

import re
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from feedmill.cli.file_reading import FileReading
from feedmill.cli.labelling import Labelling, OutFlags
from feedmill.cli.option_groups import needs, with_groups
from feedmill.cli.options import AsJson, FileFlags, Limit, ModelFlags, ModelOption, MultiLabelOption, settings_of
from feedmill.cli.post_lines import MIN_ID_WIDTH, id_width, with_title
from feedmill.console import output_console
from feedmill.local_model import explain_refusals, load_calibrated
from feedmill.producers.files import Source
from feedmill.producers.records import cut
from feedmill.producers.tables import Place
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
@with_groups
def classify(
    *,
    what: Annotated[
        str,
        typer.Argument(
            metavar="TEXT|FILE",
            help="A text, or a file of posts (CSV, JSONL, a JSON array, Parquet, .txt); - is standard input.",
        ),
    ],
    model: ModelOption = None,
    flags: ModelFlags,
    multi_label: MultiLabelOption = False,
    limit: Limit = None,
    file: FileFlags,
    output: OutFlags,
    as_json: AsJson = False,
) -> None:
    """Classify a text or a file's posts in this process.

    Needs neither Redis nor a worker. Prints the labels, or writes the file's rows with their labels to --out. Exits 1
    if a post failed or a record could not be read; rows without text are no failure.
    """
    settings = settings_of(model=model, **vars(flags), plain_logs=True)
    options = ClassifyOptions(multi_label=multi_label)
    is_file = what == "-" or _is_file(what)
    if output.out is not None:
        if not is_file:
            raise UserError("--out needs a file of posts, not a text. Give a file, or omit --out.")
        _label_file(what, file, output, settings, options, limit, as_json)
    if is_file:
        notes = Console(stderr=True, soft_wrap=True, highlight=False)
        reading = FileReading(
            what, notes, columns=file.columns(), encoding=file.encoding, shows_ids=as_json, text_only=True
        )
        #: Lines of the posts that were read and not shown yet, in order, if the file has no ids.
        places: deque[Place] = deque()
        posts = islice(_noting_places(reading, places), limit)
        # Read a post before loading the model, which takes seconds: the file may have none.
        first = list(islice(posts, 1))
        failed = 0
        if first:
            # Closed after any error: threads of a running model would abort the process at its exit.
            with closing(classify_posts(chain(first, posts), settings, options)) as outcomes:
                source = reading.source
                failed = _show_posts(
                    outcomes, as_json, None if source.columns_to_choose is None else places, source.unit
                )
        reading.end()
        raise typer.Exit(1 if failed or reading.skipped > reading.without_text else 0)
    ((post, outcome),) = classify_posts([_post(what)], settings, options)
    if isinstance(outcome, PostError):
        raise UserError(f"Cannot classify the text: {outcome.error}. Change the text, or use another --model.")
    if as_json:
        typer.echo(_as_json(post, outcome))
    else:
        _show_text(outcome)


def _label_file(
    path: str,
    file: FileFlags,
    output: OutFlags,
    settings: Settings,
    options: ClassifyOptions,
    limit: int | None,
    as_json: bool,
) -> NoReturn:
    """Write the file's rows with their labels, and exit."""

    def load() -> tuple[Sequence[str], Classify]:
        loaded, budget = load_calibrated(settings)
        from feedmill.workers.pipeline import offline  # noqa: PLC0415 - needs torch, which only workers have

        with explain_refusals(settings):
            labels = loaded.label_set(options).labels
        return labels, lambda posts: offline.classify(posts, loaded, settings, budget, options)

    if as_json and output.out == "-":
        raise UserError("--json and --out - both print to standard output. Omit --json, or give --out a file.")
    labelling = Labelling(
        lambda: Source(path, columns=file.columns(), encoding=file.encoding), path, output, limit, options.multi_label
    )
    with explain_refusals(settings):
        labelling.run(load)
    if as_json:
        typer.echo(labelling.tally.as_json())
    raise typer.Exit(1 if labelling.tally.has_failures else 0)


def classify_posts(
    posts: Iterable[Post], settings: Settings, options: ClassifyOptions
) -> Generator[tuple[Post, Outcome]]:
    """Yield each post with its outcome from the model in the settings.

    Raises UserError if the model cannot be loaded, refuses the options, or the device fails.
    """
    loaded, budget = load_calibrated(settings)
    from feedmill.workers.pipeline import offline  # noqa: PLC0415 - needs torch, which only workers have

    with explain_refusals(settings):
        yield from offline.classify(posts, loaded, settings, budget, options)


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


def _post(text: str) -> Post:
    """Return a post with this text. Raises InputError for a text that no post can have."""
    try:
        return Post.parse({"id": "text", "body": cut("body", text)})
    except PostRefused as refused:
        raise InputError(f"Cannot classify the text: {refused.reason}.") from None


def _as_json(post: Post, outcome: Outcome) -> str:
    if isinstance(outcome, Classification):
        found = {"id": post.id, "label": outcome.label, "scores": outcome.scores}
    else:
        found = {"id": post.id, "error": outcome.error}
    return json_line(found)


def _noting_places(reading: FileReading, places: deque[Place]) -> Iterator[Post]:
    """Yield the posts, and append the place of each to `places` if the file has no ids."""
    for post in reading.posts():
        if reading.source.columns_to_choose is not None:
            places.append(reading.source.place)
        yield post


def _show_posts(
    outcomes: Iterable[tuple[Post, Outcome]], as_json: bool, places: deque[Place] | None = None, unit: str = "line"
) -> int:
    """Print posts as they are classified; return how many failed.

    places: the posts' places in the file, shown instead of ids. unit: the word for a place.
    """
    failed, width = 0, MIN_ID_WIDTH
    for post, outcome in outcomes:
        failed += isinstance(outcome, PostError)
        name = post.id if places is None else f"{unit} {places.popleft()}"
        width = id_width([name], width)
        if as_json:
            typer.echo(_as_json(post, outcome))
        elif isinstance(outcome, Classification):
            best = ", ".join(f"{label} {score:.2f}" for label, score in list(outcome.scores.items())[:POST_LABELS])
            typer.echo(with_title(printable(f"{name:<{width}} {best:<48} "), post))
        else:
            typer.echo(printable(f"{name:<{width}} failed: {outcome.error}"))
    return failed


def _show_text(found: Classification) -> None:
    table = Table("label", "score", "", box=None, header_style="dim")
    longest = max(found.scores.values()) or 1.0
    for label, score in list(found.scores.items())[:TEXT_LABELS]:
        table.add_row(escape(printable(label)), f"{score:.3f}", "█" * round(BAR_WIDTH * max(0.0, score) / longest))
    output_console().print(table)
    typer.echo(printable(f"by {found.model} ({found.weights[:12]}) on {found.device}"))
