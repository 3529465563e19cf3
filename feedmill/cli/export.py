"""The `feedmill export` command: write results to Parquet, CSV or JSONL files, or to a table in
PostgreSQL.
"""

import gc
import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option

from feedmill.cli.options import (
    JsonSummary,
    Period,
    RunName,
    excludes,
    needs,
    with_settings,
)
from feedmill.console import Figures, LiveBar, counted, notes_console
from feedmill.exporting.columns import ExportFilter
from feedmill.exporting.request import DATABASES, DEFAULT_TABLE, ExportRequest, Form
from feedmill.exporting.run import (
    Export,
    ExportCounts,
    ExportObserver,
    ExportRun,
)
from feedmill.exporting.sink import DEFAULT_PART_S
from feedmill.shared.settings import Settings
from feedmill.stack.processes import note_signals


@excludes(
    "--purge",
    "--columns",
    "--since",
    "--until",
    "--label",
    "--run",
    "--part-seconds",
    "--follow",
    "--latest",
)
@excludes("--follow", "--until")
@excludes("--latest", "--label")
@needs("--part-seconds", "--follow")
@with_settings("redis_url")
def export(
    settings: Settings,
    destination: Annotated[
        str,
        Argument(
            metavar="OUT",
            help=(
                "Output file, such as labels.parquet or labels.csv.gz; with --follow, a folder "
                f"of parts by day; or a database, such as {DATABASES[0].example_address}."
            ),
        ),
    ],
    period: Period,
    form: Annotated[
        Form | None,
        Option("--format", help=("File format (default: from the extension of OUT).")),
    ] = None,
    columns: Annotated[
        str | None,
        Option(
            help=(
                "Columns to write, in this order, such as id,label,title (default: all)."
            )
        ),
    ] = None,
    label: Annotated[
        str | None, Option(help="Export only results with this best label.")
    ] = None,
    run: RunName = None,
    latest: Annotated[
        bool,
        Option(
            "--latest",
            help=("Keep only the newest result of each post; needs a single file."),
        ),
    ] = False,
    table: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help=(
                f"Table in the database, NAME or SCHEMA.NAME (default: {DEFAULT_TABLE})."
            ),
        ),
    ] = None,
    follow: Annotated[
        bool, Option("--follow", help="Keep exporting new results until Ctrl-C.")
    ] = False,
    part_seconds: Annotated[
        float | None,
        Option(
            help=(
                f"Seconds after which --follow closes a part (default: {DEFAULT_PART_S:.0f})."
            )
        ),
    ] = None,
    purge: Annotated[
        bool,
        Option(
            "--purge",
            help=(
                "Export nothing; remove posts from OUT that were purged after the export."
            ),
        ),
    ] = False,
    as_json: JsonSummary = False,
) -> None:
    """A file gets its name once it is complete.

    An interrupted export to a folder or a table resumes when the same command runs again; a single
    file starts over. Exits 1 if nothing was exported or results were missed.
    """
    selection = ExportFilter(
        since=_since_1970(period.since),
        until=_since_1970(period.until),
        label=label,
        latest=latest,
        run=run,
    )
    request = ExportRequest(
        destination=destination,
        form=form,
        columns=columns,
        selection=selection,
        table=table,
        follow=follow,
        part_seconds=part_seconds,
        purge=purge,
    )
    request.check(_flag)
    notes = _Notes(notes_console())
    export = Export(request, settings, notes)
    if purge:
        removed = export.purge()
        if as_json:
            text = json.dumps({"removed": removed})
        else:
            rows = counted(removed, "row")
            text = f"{rows} of purged posts removed"
        typer.echo(text)
        return
    with note_signals(once=True) as stop:
        counts = export.run(stop)
    if as_json:
        text = json.dumps(summary(counts))
    else:
        text = describe(counts, str(export.destination))
    typer.echo(text)
    status = exit_status(counts, stop, follow)
    raise typer.Exit(status)


def _since_1970(date: float | None) -> float | None:
    """Return a date of an option, at the earliest 1970."""
    if date is None:
        return None
    return max(0.0, date)


def _flag(name: str) -> str:
    """Return the option or argument that sets a field of a request."""
    if name == "destination":
        return "OUT"
    if name == "form":
        return "--format"
    words = name.replace("_", "-")
    return f"--{words}"


class _Notes(ExportObserver):
    """Prints what happens during an export, below a progress bar."""

    def __init__(self, notes: Console) -> None:
        self._notes = notes

    def unknown_run(self, message: str) -> None:
        self._notes.print(message, markup=False)

    def resumed(self) -> None:
        self._notes.print("resuming where the last run stopped")

    def missed(self, message: str) -> None:
        self._notes.print(message)

    def watching(self, run: ExportRun) -> LiveBar:
        # Exempt imported modules from garbage collection, which runs often while 100,000 rows
        # are created.
        gc.freeze()

        def figures(seconds: float) -> Figures:
            rate = run.rows / max(seconds, 0.001)
            text = f"{run.rows:,} rows, {rate:,.0f}/s"
            return Figures(text, done=run.read, total=run.total)

        return LiveBar(self._notes, figures)


def summary(counts: ExportCounts) -> dict[str, Any]:
    """Return the counts for JSON."""
    values: dict[str, Any] = {
        "rows": counts.rows,
        "removed": counts.removed,
        "complete": counts.complete,
    }
    if counts.refused:
        values["refused"] = counts.refused
    values["missed"] = counts.missed
    return values


def describe(counts: ExportCounts, out: str) -> str:
    """Return the counts as a sentence. out: what was exported to."""
    if not counts.complete and not counts.can_resume:
        return f"stopped before the end: {out} is unchanged; run the same command to start over"
    rows = counted(counts.rows, "row")
    parts = [f"{rows} written to {out}"]
    if counts.removed:
        rows = counted(counts.removed, "row")
        parts.append(f"{rows} of purged posts removed")
    if counts.refused:
        rows = counted(counts.refused, "row")
        parts.append(f"{rows} refused by the database and kept for the next run")
    if not counts.complete:
        parts.append("stopped before the end; run the same command to resume")
    return ", ".join(parts)


def exit_status(counts: ExportCounts, stop: Sequence[int], follow: bool) -> int:
    """Return the exit status. stop: signals received."""
    if not counts.complete:
        return 128 + stop[0] if stop else 1
    if counts.missed != 0 or counts.refused:
        return 1
    has_exported = counts.rows or counts.resumed
    return 0 if has_exported or follow else 1
