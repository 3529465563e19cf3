"""The `feedmill report` command: write recent results as an HTML page."""

import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from feedmill.cli.options import RunName, with_settings
from feedmill.cli.terminal import explain_unwritable
from feedmill.console import counted, notes_console
from feedmill.export.columns import label_set as label_set_named
from feedmill.reading.rows import check_run
from feedmill.report.data import gather
from feedmill.report.page import page
from feedmill.shared.atomic_files import replacing
from feedmill.shared.broker import connect
from feedmill.shared.errors import printable, truncate
from feedmill.shared.settings import Settings

app = typer.Typer()

#: The longest period of a report, in hours: a year.
MAX_HOURS = 366 * 24
#: Maximum number of other label sets to list.
MAX_SHOWN = 10


@app.command()
@with_settings("redis_url")
def report(
    settings: Settings,
    out: Annotated[Path, Argument(metavar="OUT", help="HTML file to write.", dir_okay=False)] = Path(
        "feedmill-report.html"
    ),
    hours: Annotated[int, Option(help="Hours to report on, including the current one.", min=1, max=MAX_HOURS)] = 24,
    run: RunName = None,
    label_set: Annotated[
        str | None,
        Option("--label-set", help="Only results of this label set: a,b,c (default: that of the most results)."),
    ] = None,
) -> None:
    """Write an HTML report on the last hours.

    A report is of one label set, and with --run of one run. Covers posts, labels, subreddits, scores, queueing times
    and failures. The page is self-contained and has no scripts. Writes nothing and exits 1 if there is nothing to
    report.
    """
    labels = None if label_set is None else label_set_named(filter(None, map(str.strip, label_set.split(","))))
    notes = notes_console()
    began = time.monotonic()
    with notes.status("reading results") if notes.is_terminal else notes:
        redis = connect(settings)
        if run is not None:
            check_run(redis, run)
        found = gather(redis, settings, hours, run, labels)
    for name, count in list(found.others.items())[:MAX_SHOWN]:
        notes.print(f"Left out: {counted(count, 'post')} of the label set {printable(truncate(name))}", markup=False)
    if found.others:
        notes.print("A report is of one label set: see --label-set or, if the posts have a run, --run.", markup=False)
    period = counted(hours, "hour")
    if not (found.posts or found.reasons or found.gaps):
        of = printable("".join(f" of {value}" for value in (run, label_set) if value is not None))
        typer.echo(f"No posts in the last {period}{of}: nothing written. See --hours.", err=True)
        raise typer.Exit(1)
    with explain_unwritable(out), replacing(out) as temporary:
        temporary.write_text(page(found), encoding="utf-8")
    typer.echo(f"{counted(found.posts, 'post')} in {period}: wrote {out} in {time.monotonic() - began:.1f} s")
