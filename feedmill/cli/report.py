"""The `feedmill report` command: write recent results as an HTML page."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from feedmill.cli.options import RedisUrl, RunFilter, settings_of
from feedmill.export.columns import label_set as label_set_named
from feedmill.reading.names import check_run
from feedmill.report.data import Report, gather
from feedmill.report.page import page
from feedmill.shared.atomic_files import replacing
from feedmill.shared.broker import connect, user_errors
from feedmill.shared.errors import UserError, printable, truncate
from feedmill.shared.messages import parse_run

app = typer.Typer()

#: The longest period of a report, in hours: a year.
MAX_HOURS = 366 * 24
#: Maximum number of other label sets to list.
MAX_SHOWN = 10


@app.command()
def report(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="HTML file to write.")] = Path("feedmill-report.html"),
    hours: Annotated[
        int, typer.Option(help="Hours to report on, including the current one.", min=1, max=MAX_HOURS)
    ] = 24,
    run: RunFilter = None,
    label_set: Annotated[
        str | None,
        typer.Option("--label-set", help="Only results of this label set: a,b,c (default: that of the most results)."),
    ] = None,
    redis_url: RedisUrl = None,
) -> None:
    """Write an HTML report on the last hours.

    A report is of one label set, and with --run of one run. Covers posts, labels, subreddits, scores, queueing times
    and failures. The page is self-contained and has no scripts. Writes nothing and exits 1 if there is nothing to
    report.
    """
    settings = settings_of(redis_url=redis_url)
    if out.is_dir():
        raise UserError(f"{out} is a folder. Name a file in it, such as {out / 'report.html'}.")
    if not out.parent.is_dir():
        raise UserError(f"The folder {out.parent} does not exist. Create it, or give another OUT.")
    run = None if run is None else parse_run(run)
    labels = None if label_set is None else label_set_named(filter(None, map(str.strip, label_set.split(","))))
    notes = Console(stderr=True, soft_wrap=True, highlight=False)
    began = time.monotonic()
    with user_errors(settings), notes.status("reading results") if notes.is_terminal else notes:
        redis = connect(settings)
        if run is not None:
            check_run(redis, run)
        found = gather(redis, settings, hours, run, labels)
    if found.others:
        notes.print(_other_label_sets(found), markup=False)
    period = f"{hours:,} hour{'' if hours == 1 else 's'}"
    if not (found.posts or found.reasons or found.gaps):
        kept = f"{printable(str(out))} is unchanged" if out.exists() else "no file written"
        typer.echo(f"No posts in the last {period}{_filters(run, label_set)}: {kept}. See --hours.", err=True)
        raise typer.Exit(1)
    try:
        with replacing(out) as temporary:
            temporary.write_text(page(found), encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write the report: {error}. Give a writable OUT.") from None
    what = f"{found.posts:,} post{'' if found.posts == 1 else 's'} in {period}"
    typer.echo(f"{what}: wrote {out} in {time.monotonic() - began:.1f} s")


def _filters(run: str | None, label_set: str | None) -> str:
    """Return what the report was limited to."""
    parts = [("run", run), ("the label set", label_set)]
    return printable("".join(f" of {what} {value}" for what, value in parts if value is not None))


def _other_label_sets(found: Report) -> str:
    """Return a note that lists the label sets which the report leaves out."""
    lines = [
        f"  {count:,} post{'' if count == 1 else 's'}: {printable(truncate(name))}"
        for name, count in list(found.others.items())[:MAX_SHOWN]
    ]
    return "\n".join(
        [
            f"This report is of the label set {printable(truncate(found.label_set))}. Others in this period, for "
            "--label-set or, if they have a run, --run:",
            *lines,
        ]
    )
