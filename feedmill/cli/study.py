"""The `feedmill study` command: label whole dumps into a folder, with plots and a card."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from typer import Argument, Option

from feedmill.cli.enqueue import filters_of
from feedmill.cli.options import (
    MODEL,
    FileFlags,
    JsonSummary,
    KindFlags,
    MultiLabelOption,
    NoneOption,
    Period,
    message_options,
    with_settings,
)
from feedmill.console import Figures, LiveBar, counted, notes_console
from feedmill.shared import errors
from feedmill.shared.errors import printable
from feedmill.shared.settings import Settings
from feedmill.stack.processes import note_signals
from feedmill.studies.observer import StudyObserver
from feedmill.studies.request import HERE, StudyRequest

if TYPE_CHECKING:
    from feedmill.studies.result import StudyResult
    from feedmill.studies.run import Study


class _Notes(StudyObserver):
    """Prints what happens during a study, below a bar of the bytes read."""

    def __init__(self, notes: Console) -> None:
        self.notes = notes

    def note(self, message: str) -> None:
        self.notes.print(escape(printable(message)))

    def watching(self, study: "Study") -> LiveBar:
        def figures(seconds: float) -> Figures:
            text = f"{study.state.records:,} records, {study.state.rows:,} rows"
            if seconds and study.new_rows:
                rate = study.new_rows / seconds
                text += f", {rate:,.0f}/s"
            reading = study.reading
            if reading is None:
                return Figures(text, done=0.0, total=None)
            return Figures(text, done=reading.done, total=reading.size)

        return LiveBar(self.notes, figures)


@with_settings(*MODEL, "devices", "languages", plain_logs=True)
def study(
    settings: Settings,
    dumps: Annotated[
        list[str],
        Argument(
            metavar="DUMP...",
            help="Dumps such as RS_2023-11.zst, or folders of them; any file of posts.",
        ),
    ],
    file: FileFlags,
    kinds: KindFlags,
    period: Period,
    out: Annotated[Path, Option("--out", metavar="FOLDER", help="Folder to write to.")],
    subreddit: Annotated[
        list[str] | None,
        Option(help="Only these subreddits: a,b,c; may be repeated."),
    ] = None,
    author: Annotated[
        list[str] | None,
        Option(help="Only these authors, who are not written: a,b,c; may be repeated."),
    ] = None,
    words: Annotated[
        list[str] | None,
        Option(
            help=(
                "Only texts with one of these words or phrases: a,b,c; may be repeated."
            )
        ),
    ] = None,
    multi_label: MultiLabelOption = False,
    none: NoneOption = None,
    on: Annotated[
        str,
        Option(
            "--on",
            metavar="ray",
            help="ray: classify on the Ray cluster at RAY_ADDRESS (default: here).",
        ),
    ] = HERE,
    actors: Annotated[
        int | None,
        Option(
            min=1,
            help="With --on ray: copies of the model (default: one per GPU, else per node).",
        ),
    ] = None,
    as_json: JsonSummary = False,
) -> None:
    """Writes labelled Parquet by month, report.html and a README.md about the data.

    After an interruption, also by kill -9, the same command continues. Posts that fit none of your
    --labels have no label; --none off gives each its best one. Exits 1 if a post failed, a record
    was malformed or a dump could not be read to its end, and if there are no rows.
    """
    with errors.explain_missing("A study", "tables"):
        # pyarrow, an extra
        from feedmill.studies.run import Study, summary  # noqa: PLC0415
    is_default = none is None and settings.none is None
    if is_default and settings.labels is not None:
        # Most posts of a dump fit none of the labels that somebody asks for.
        none = True
    request = StudyRequest(
        dumps=dumps,
        out=out,
        filters=filters_of(
            subreddit or [],
            period,
            settings.languages,
            kinds.kinds,
            author or [],
            words or [],
        ),
        options=message_options(multi_label=multi_label, none=none),
        is_default=is_default,
        file=file,
        context=kinds.context is not None,
        titles=kinds.titles or [],
        on=on,
        actors=actors,
    )
    notes = notes_console()
    with errors.explain_refusals(settings.model), note_signals(once=True) as stop:
        result = Study(request, settings, _Notes(notes)).run(stop)
    if as_json:
        typer.echo(json.dumps(summary(result)))
    else:
        typer.echo(describe(result))
    raise typer.Exit(exit_status(result, stop))


def describe(result: "StudyResult") -> str:
    """Return the outcome as text."""
    rows = counted(result.rows, "row")
    records = counted(result.records, "record")
    folder = printable(str(result.out))
    parts = [f"{rows} of {records} in {folder}"]
    if result.removed:
        parts.append(f"{result.removed:,} deleted or removed")
    if result.malformed:
        parts.append(f"{result.malformed:,} malformed")
    if result.failed:
        parts.append(f"{result.failed:,} failed")
    counts = ", ".join(parts)
    lines = [counts]
    for problem in result.problems.values():
        line = printable(problem)
        lines.append(line)
    if not result.complete:
        lines.append("stopped before the end; run the same command to continue")
    return "\n".join(lines)


def exit_status(result: "StudyResult", stop: Sequence[int]) -> int:
    """Return the exit status. stop: signals received."""
    if not result.complete:
        return 128 + stop[0] if stop else 1
    is_whole = not (result.failed or result.malformed or result.problems)
    return 0 if is_whole and result.rows else 1
