"""The `feedmill export` command: write results to Parquet, CSV or JSONL files, or to a table in PostgreSQL."""

import gc
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer
from redis import Redis
from rich.console import Console
from typer import Argument, Option

from feedmill.cli.option_groups import excludes, needs, refuse, with_settings
from feedmill.cli.options import JsonSummary, RunName, Since, Until, check_period
from feedmill.cli.terminal import explain_unwritable
from feedmill.console import counted, notes_console
from feedmill.export.columns import COLUMNS, ExportFilter, choose
from feedmill.export.run import ExportRun
from feedmill.reading.rows import RowReader, check_run, unknown_run
from feedmill.shared.broker import connect
from feedmill.shared.errors import UserError, explain_missing
from feedmill.shared.runs import progress
from feedmill.shared.settings import Settings
from feedmill.stack.signals import note_signals
from feedmill.tables import format_of

if TYPE_CHECKING:
    from feedmill.export.files import File, Folder
    from feedmill.export.postgres import Table

#: Seconds after which `--follow` closes a part by default.
DEFAULT_PART_S = 600.0
#: Seconds between transactions when few results arrive.
TRANSACTION_S = 1.0
#: Beginnings of a database's address, and the default table in it.
DATABASE_SCHEMES = ("postgresql://", "postgres://")
DEFAULT_TABLE = "feedmill_results"

app = typer.Typer()


#: Flags that select what is exported. --purge exports nothing.
SELECTING = ("--columns", "--since", "--until", "--label", "--run", "--part-seconds")
#: Export formats.
Form = Literal["csv", "jsonl", "parquet"]


@app.command("export")
@excludes("--purge", *SELECTING, "--follow", "--latest")
@excludes("--follow", "--until")
@excludes("--latest", "--label")
@needs("--part-seconds", "--follow")
@with_settings("redis_url")
def export_results(
    settings: Settings,
    destination: Annotated[
        str,
        Argument(
            metavar="OUT",
            help="Output file, such as labels.parquet or labels.csv.gz; with --follow, a folder of parts by day; or a "
            "database, such as postgresql://user@host/database.",
        ),
    ],
    form: Annotated[Form | None, Option("--format", help="File format (default: from the extension of OUT).")] = None,
    columns: Annotated[
        str | None, Option(help="Columns to write, in this order, such as id,label,title (default: all).")
    ] = None,
    since: Since = None,
    until: Until = None,
    label: Annotated[str | None, Option(help="Export only results with this best label.")] = None,
    run: RunName = None,
    latest: Annotated[
        bool, Option("--latest", help="Keep only the newest result of each post; needs a single file.")
    ] = False,
    table: Annotated[
        str | None,
        Option(metavar="NAME", help=f"Table in the database, NAME or SCHEMA.NAME (default: {DEFAULT_TABLE})."),
    ] = None,
    follow: Annotated[bool, Option("--follow", help="Keep exporting new results until Ctrl-C.")] = False,
    part_seconds: Annotated[
        float | None, Option(help=f"Seconds after which --follow closes a part (default: {DEFAULT_PART_S:.0f}).")
    ] = None,
    purge: Annotated[
        bool, Option("--purge", help="Export nothing; remove posts from OUT that were purged after the export.")
    ] = False,
    as_json: JsonSummary = False,
) -> None:
    """Write results to Parquet, CSV or JSONL files, or to a table in PostgreSQL.

    A file gets its name once it is complete. An interrupted export to a folder or a table resumes when the same command
    runs again; a single file starts over. Exits 1 if nothing was exported or results were missed.
    """
    is_table = destination.startswith(DATABASE_SCHEMES)
    out = Path(destination)
    of_name = None if is_table else format_of(out.name)
    kind = form or of_name
    is_folder = os.path.isdir(out)  # noqa: PTH112 - Path.is_dir raises for a name that is too long
    in_parts = follow or is_folder or (kind == "parquet" and of_name is None)
    of_file = any(value is not None for value in (form, columns, part_seconds)) or latest
    refuse(
        (not is_table and "://" in destination, "OUT must be a path, or begin with postgresql://."),
        (destination == "-", "OUT must be a file or folder. `feedmill results --json` prints results."),
        (is_table and of_file, "A table has all columns and results. Leave out --format, --columns, --latest and "
         "--part-seconds."),
        (table is not None and not is_table, "--table needs a database: an OUT such as postgresql://user@host/database."),
        (not (is_table or purge or kind in get_args(Form)), f"Cannot tell the format of {out}. Give --format, or an "
         "OUT that ends in .parquet, .csv or .jsonl."),
        (follow and of_name is not None and not is_folder, "--follow needs a folder, to which it adds files until "
         f"it is stopped, such as --format {kind} {out.with_suffix('')}/"),
        (latest and in_parts, "--latest needs a single file, because finished parts cannot be changed. Give an OUT "
         "that ends in .parquet, .csv or .jsonl, without --follow."),
        (part_seconds is not None and part_seconds <= 0, "--part-seconds must be above 0."),
    )  # fmt: skip
    check_period(since, until)
    selection = ExportFilter(since and max(0.0, since), until and max(0.0, until), label, latest, run)
    sinks = _sinks(is_table)
    notes = notes_console()
    with explain_unwritable(Path("the table") if is_table else out):  # an address may contain a password
        redis = connect(settings)
        reader = RowReader(redis, selection.until)
        if purge:
            removed = sinks.purge(*((destination, table or DEFAULT_TABLE) if is_table else (out,)), reader)
            typer.echo(
                json.dumps({"removed": removed}) if as_json else f"{counted(removed, 'row')} of purged posts removed"
            )
            return
        own = () if selection.run is None else _own_columns(redis, selection.run, follow, notes)
        redis.ping()  # before any file is created
        with note_signals(once=True) as stop, ExitStack() as stack:
            target: File | Folder | Table
            if is_table:
                target = stack.enter_context(sinks.opened(destination, table or DEFAULT_TABLE, selection, reader))
            else:
                chosen = _chosen(columns, own, selection)
                layout = sinks.Layout(str(kind), chosen)
                target = stack.enter_context(sinks.opened(out, layout, selection, reader, in_parts))
            # Exempt imported modules from garbage collection, which runs often while 100,000 rows are created.
            gc.freeze()
            close_after = TRANSACTION_S if is_table else part_seconds or DEFAULT_PART_S
            this = ExportRun(reader, target, selection, stop, notes, follow, close_after)
            this.all()
    where = str(target) if is_table else f"the folder {out}" if in_parts else str(out)
    typer.echo(json.dumps(this.summary()) if as_json else this.described(where))
    raise typer.Exit(this.status)


def _sinks(of_tables: bool) -> ModuleType:
    """Return the module of sinks, which needs an extra."""
    with explain_missing("An export", "tables"):
        from feedmill.export import files  # noqa: PLC0415 - pyarrow
    if not of_tables:
        return files
    with explain_missing("PostgreSQL", "postgres"):
        from feedmill.export import postgres  # noqa: PLC0415 - psycopg
    return postgres


def _chosen(columns: str | None, own: Sequence[str], selection: ExportFilter) -> Sequence[str]:
    """Return the columns to write. Raises UserError."""
    chosen = (*COLUMNS, *own) if columns is None else choose(columns, own)
    if selection.latest and selection.run is None and "run" not in chosen:
        raise UserError(
            "--latest needs the column run, because posts of different runs can have the same id. Add run to "
            "--columns, or select a run with --run."
        )
    return chosen


def _own_columns(redis: Redis, run: str, follow: bool, notes: Console) -> Sequence[str]:
    """Return the columns that the posts of a run carry. Raises UserError if there is no such run, unless following."""
    if not follow:
        check_run(redis, run)
    found = progress(redis, run)
    if found is None:
        notes.print(unknown_run(redis, run), markup=False)
    return found.columns if found else ()
