"""`feedmill report`: what was classified lately, as one page of HTML, and as pictures."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from feedmill import report_charts
from feedmill.flags import RedisUrl, settings_of
from feedmill.report import gather
from feedmill.report_page import page
from shared.broker import connect, told_plainly
from shared.errors import UserError

app = typer.Typer()

#: Hours that a report is of, at most: a year.
MOST_HOURS = 366 * 24


@app.command()
def report(
    hours: Annotated[int, typer.Option(help="Of how many hours, this one included.", min=1, max=MOST_HOURS)] = 24,
    out: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("feedmill-report.html"),
    png: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Draw the charts as pictures into it, too.", show_default=False),
    ] = None,
    redis_url: RedisUrl = None,
) -> None:
    """Write a page on the last hours: posts, labels, subreddits, scores, waits, and what went wrong.

    It holds everything it needs, and no script: it can be sent, and opened anywhere.
    """
    settings = settings_of(redis_url=redis_url)
    notes = Console(stderr=True, soft_wrap=True, highlight=False)
    began = time.monotonic()
    with told_plainly(settings), notes.status("reading results") if notes.is_terminal else notes:
        found = gather(connect(settings), settings, hours)
    try:
        beside = out.with_name(f".{out.name}.tmp")
        beside.write_text(page(found), encoding="utf-8")
        beside.replace(out)
        pictures = report_charts.save(found, png, notes) if png else []
    except OSError as error:
        raise UserError(f"The report cannot be written: {error}.") from None
    more = f" and {len(pictures)} pictures in {png}" if pictures else ""
    what = f"{found.posts:,} post{'' if found.posts == 1 else 's'} of {hours:,} hour{'' if hours == 1 else 's'}"
    typer.echo(f"{what}: {out}{more}, in {time.monotonic() - began:.1f} s")
    raise typer.Exit(0 if found.posts or found.reasons else 1)
