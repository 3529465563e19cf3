"""The `feedmill report` command: write recent results as an HTML page, and its charts as images."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from feedmill.cli.options import RedisUrl, settings_of
from feedmill.report import charts
from feedmill.report.data import gather
from feedmill.report.page import page
from shared.atomic_files import replacing
from shared.broker import connect, user_errors
from shared.errors import UserError

app = typer.Typer()

#: The longest period of a report, in hours: a year.
MAX_HOURS = 366 * 24


@app.command()
def report(
    hours: Annotated[
        int, typer.Option(help="Hours to report on, including the current one.", min=1, max=MAX_HOURS)
    ] = 24,
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("feedmill-report.html"),
    png: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also write the charts as images into this folder.")
    ] = None,
    redis_url: RedisUrl = None,
) -> None:
    """Write an HTML report on the last hours.

    Covers posts, labels, subreddits, scores, queueing times and failures. The page is self-contained and has no
    scripts. Exits 1 if there was nothing to report.
    """
    settings = settings_of(redis_url=redis_url)
    notes = Console(stderr=True, soft_wrap=True, highlight=False)
    began = time.monotonic()
    with user_errors(settings), notes.status("reading results") if notes.is_terminal else notes:
        found = gather(connect(settings), settings, hours)
    try:
        with replacing(out) as temporary:
            temporary.write_text(page(found), encoding="utf-8")
        pictures = charts.save(found, png, notes) if png else []
    except OSError as error:
        raise UserError(f"Cannot write the report: {error}. Give a writable --out and --png.") from None
    more = f" and {len(pictures)} images in {png}" if pictures else ""
    what = f"{found.posts:,} post{'' if found.posts == 1 else 's'} in {hours:,} hour{'' if hours == 1 else 's'}"
    typer.echo(f"{what}: wrote {out}{more} in {time.monotonic() - began:.1f} s")
    raise typer.Exit(0 if found.posts or found.reasons else 1)
