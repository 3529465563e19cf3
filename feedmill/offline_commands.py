"""The commands that need no queue: try a model on a text or a file."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from feedmill.file_reading import Reading
from feedmill.flags import (
    AsJson,
    Device,
    Dtype,
    Engine,
    IdColumn,
    Kind,
    Labels,
    Model,
    MultiLabel,
    Template,
    settings_of,
)
from shared.errors import (
    DeviceFull,
    DeviceLost,
    InputError,
    PostRefused,
    RequestRefused,
    UserError,
    json_line,
    printable,
)
from shared.messages import Classification, ClassifyOptions, Outcome, Post, PostError
from shared.settings import Settings

if TYPE_CHECKING:
    from workers.classifiers import Classifier

app = typer.Typer()

#: What looks like a file's name, so that a missing file is not taken for a text.
FILE_NAME = re.compile(r"\S+\.(jsonl|ndjson|json|csv|tsv)(\.gz|\.zst)?|\S+\.zst|\S*/\S+")
#: Labels that the table shows of each post, and of a single text.
SHOWN, SHOWN_OF_ONE = 3, 16
#: Cells that an id takes, at least; and those that the ones after it are held free for, at most.
ID_CELLS, MOST_ID_CELLS = 12, 40
#: Cells of the longest bar.
BAR = 30


@app.command()
def classify(
    what: Annotated[
        str,
        typer.Argument(metavar="TEXT|FILE", help="A text; or posts: JSONL, a JSON array or CSV; - is standard input."),
    ],
    labels: Labels = None,
    template: Template = None,
    multi_label: MultiLabel = False,
    model: Model = None,
    classifier: Kind = None,
    engine: Engine = None,
    device: Device = None,
    dtype: Dtype = None,
    limit: Annotated[int | None, typer.Option(help="Posts of the file, at most.", min=1, show_default=False)] = None,
    id_column: IdColumn = None,
    as_json: AsJson = False,
) -> None:
    """Classify a text, or a file's posts, right here: to try a model. No queue; nothing is stored."""
    settings = settings_of(
        labels=labels, template=template, model=model, classifier=classifier, engine=engine, device=device, dtype=dtype
    )
    options = ClassifyOptions(multi_label=multi_label)
    if what == "-" or _is_file(what):
        notes = Console(stderr=True, soft_wrap=True, highlight=False)
        reading = Reading(what, notes, id_column=id_column, shows_ids=True)
        posts = islice(reading.posts(), limit)
        # Before the model is loaded, which takes seconds: there may be none.
        first = list(islice(posts, 1))
        failed = _show_posts(classified(chain(first, posts), settings, options), as_json) if first else 0
        reading.end()
        raise typer.Exit(1 if failed or reading.skipped else 0)
    ((post, outcome),) = classified([_post(what)], settings, options)
    if isinstance(outcome, PostError):
        raise UserError(f"The text cannot be classified: {outcome.error}")
    if as_json:
        typer.echo(_as_json(post, outcome))
    else:
        _show_text(outcome)


def load_model(settings: Settings) -> "Classifier":
    """The model that the settings name, as a classifier that is ready. Raises UserError."""
    try:
        # Imported late: torch, which only workers have.
        from workers import device  # noqa: PLC0415
        from workers.classifiers.choose import load_classifier  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        raise UserError(f"This needs {missing.name}, which `pip install 'feedmill[worker]'` brings.") from None
    return load_classifier(settings, device.choose(settings.device, settings.dtype, settings.engine))


def classified(posts: Iterable[Post], settings: Settings, options: ClassifyOptions) -> Iterator[tuple[Post, Outcome]]:
    """Each post with its outcome, by the model that the settings name. Raises UserError."""
    loaded = load_model(settings)
    from workers import offline  # noqa: PLC0415
    from workers.calibration import calibrate  # noqa: PLC0415

    with refusals_told(settings):
        yield from offline.classify(posts, loaded, settings, calibrate(loaded, settings), options)


@contextmanager
def refusals_told(settings: Settings) -> Iterator[None]:
    """Turns what a model refuses, and a device that fails, into a UserError."""
    try:
        yield
    except RequestRefused as refused:
        raise UserError(f"{settings.model} cannot serve this: {refused}.") from None
    except (DeviceFull, DeviceLost) as error:
        raise UserError(f"The device failed: {error}") from None


def _is_file(what: str) -> bool:
    """Raises InputError for what looks like a file's name, but is none."""
    try:
        if Path(what).is_file():
            return True
    except OSError:  # longer than any file's name
        return False
    if FILE_NAME.fullmatch(what):
        raise InputError(f"There is no file {what}. To classify these words, put them into a sentence.")
    return False


def _post(text: str) -> Post:
    try:
        return Post.parse({"id": "text", "body": text})
    except PostRefused as refused:
        raise InputError(f"The text cannot be classified: {refused.reason}.") from None


def _as_json(post: Post, outcome: Outcome) -> str:
    if isinstance(outcome, Classification):
        found = {"id": post.id, "label": outcome.label, "scores": outcome.scores}
    else:
        found = {"id": post.id, "error": outcome.error}
    return json_line(found)


def _show_posts(outcomes: Iterator[tuple[Post, Outcome]], as_json: bool) -> int:
    """Print posts as they are classified; how many could not be."""
    failed, cells = 0, ID_CELLS
    for post, outcome in outcomes:
        failed += isinstance(outcome, PostError)
        cells = max(cells, min(len(post.id), MOST_ID_CELLS))
        if as_json:
            typer.echo(_as_json(post, outcome))
        elif isinstance(outcome, Classification):
            best = ", ".join(f"{label} {score:.2f}" for label, score in list(outcome.scores.items())[:SHOWN])
            title = " ".join((post.title or post.body).split())
            typer.echo(printable(f"{post.id:<{cells}} {best:<48} {title:.60}"))
        else:
            typer.echo(printable(f"{post.id:<{cells}} failed: {outcome.error}"))
    return failed


def _show_text(found: Classification) -> None:
    table = Table("label", "score", "", box=None, header_style="dim")
    longest = max(found.scores.values()) or 1.0
    for label, score in list(found.scores.items())[:SHOWN_OF_ONE]:
        table.add_row(escape(printable(label)), f"{score:.3f}", "█" * round(BAR * max(0.0, score) / longest))
    Console(highlight=False).print(table)
    typer.echo(printable(f"by {found.model} ({found.weights[:12]}) on {found.device}"))
