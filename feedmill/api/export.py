"""Export results from Python: `feedmill.export`."""

from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path

from feedmill.exporting.columns import ExportFilter
from feedmill.exporting.request import ExportRequest
from feedmill.exporting.run import Export, ExportCounts
from feedmill.outcomes.followers import MAX_UNIX_TIME
from feedmill.shared.errors import UserError
from feedmill.shared.messages import in_utc, parse_run
from feedmill.shared.redis_errors import user_errors
from feedmill.shared.settings import load_arguments


def export(
    destination: str | Path,
    *,
    form: str | None = None,
    columns: Sequence[str] | None = None,
    since: float | datetime | None = None,
    until: float | datetime | None = None,
    label: str | None = None,
    run: str | None = None,
    latest: bool = False,
    table: str | None = None,
    follow: bool = False,
    part_seconds: float | None = None,
    purge: bool = False,
    redis_url: str | None = None,
) -> ExportCounts:
    """Export results to a file, to a folder of parts by day, or to a table in PostgreSQL.

    A file gets its name once it is complete. An interrupted export to a folder or a table
    continues with the next call; a single file starts over. Needs `pip install 'feedmill[tables]'`
    and for a table `feedmill[postgres]`. docs/export.md describes columns, folders and tables.

    Args:
        destination: A file, such as `labels.parquet` or `labels.csv.gz`; a folder, with `follow`
            or if it exists; or the address of a database, `postgresql://user@host/database`.
        form: `csv`, `jsonl` or `parquet`. Default: from the name of the file.
        columns: Names of the columns, in order. Default: all.
        since, until: Export only results that were stored at or after, and before these times: a
            datetime (UTC if it has no zone), or seconds since 1970.
        label: Export only results with this best label.
        run: Export only results of this run.
        latest: Keep only the newest result of each post; needs a single file.
        table: Table in the database, `name` or `schema.name`. Default: `feedmill_results`.
        follow: Continue with new results until KeyboardInterrupt.
        part_seconds: Seconds after which `follow` closes a part. Default: 600.
        purge: Export nothing; remove posts that were purged after the export.
        redis_url: URL of Redis. Default: FEEDMILL_REDIS_URL, else the running `feedmill up`, else
            localhost.

    Returns:
        ExportCounts: the numbers of rows written, removed, refused and missed.

    Raises:
        feedmill.UserError: For an invalid argument, a missing package, a destination that cannot
            be written or belongs to another export, or a Redis or database that cannot be reached.

    Example:
        >>> import feedmill
        >>> feedmill.export("labels.parquet", run="monday").rows
        1200
    """
    start = _seconds("since", since)
    end = _seconds("until", until)
    if start is not None and end is not None and start >= end:
        raise UserError("since must be before until.")
    selection = ExportFilter(
        since=start,
        until=end,
        label=label,
        latest=latest,
        run=None if run is None else parse_run(run),
    )
    request = ExportRequest(
        destination=str(destination),
        form=form,
        columns=None if columns is None else ",".join(columns),
        selection=selection,
        table=table,
        follow=follow,
        part_seconds=part_seconds,
        purge=purge,
    )
    _check_together(request)
    request.check()
    settings = load_arguments(redis_url=redis_url)
    with user_errors(settings), closing(Export(request, settings)) as prepared:
        if not purge:
            return prepared.run()
        return ExportCounts(
            rows=0,
            removed=prepared.purge(),
            refused=0,
            missed=0,
            complete=True,
            resumed=False,
            can_resume=False,
        )


def _check_together(request: ExportRequest) -> None:
    """Raise UserError for arguments that exclude each other whatever the destination is."""
    selection = request.selection
    has_selection = selection != ExportFilter() or request.columns is not None
    if request.purge and (has_selection or request.follow):
        raise UserError(
            "purge removes rows of any result. Leave out what selects results."
        )
    if request.follow and selection.until is not None:
        raise UserError("follow cannot be combined with until. Leave out one of them.")
    if selection.latest and selection.label is not None:
        raise UserError("latest cannot be combined with label. Leave out one of them.")
    if request.part_seconds is not None and not request.follow:
        raise UserError("part_seconds needs follow.")


def _seconds(name: str, time: float | datetime | None) -> float | None:
    """Return a time of an argument in seconds since 1970. Raises UserError if it is invalid."""
    if time is None:
        return None
    seconds = in_utc(time) if isinstance(time, datetime) else time
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    # NaN is in no range.
    if is_number and 0 <= seconds < MAX_UNIX_TIME:
        return float(seconds)
    raise UserError(f"{name} must be a time before the year 10000, not {time!r:.80}.")
