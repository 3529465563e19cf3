"""The `feedmill export` command: write results to Parquet, CSV or JSONL files, or to a table in PostgreSQL."""

import gc
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal, cast, get_args

import typer
from redis import Redis
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import TimeoutError as TimeoutFault
from rich.console import Console

from feedmill.cli.dates import parse_period
from feedmill.cli.export_run import ExportRun, format_rows, stop_on_signal
from feedmill.cli.options import JsonSummary, RedisUrl, RunFilter, settings_of
from feedmill.export import writer
from feedmill.export.text import COLUMNS
from feedmill.export.writer import ExportFilter, Folder
from feedmill.reading.rows import RowReader
from feedmill.reading.runs import check_run, unknown_run
from shared.broker import connect, user_errors
from shared.errors import UserError, explain_missing, printable
from shared.messages import parse_run
from shared.runs import progress
from shared.settings import Settings

#: OUT that stands for standard output.
STANDARD = "-"
#: Seconds after which `--follow` closes a part by default.
DEFAULT_PART_S = 600.0
#: Seconds between transactions when few results arrive.
TRANSACTION_S = 1.0
#: Beginnings of a database's address, and the default table in it.
DATABASE_SCHEMES = ("postgresql://", "postgres://")
DEFAULT_TABLE = "feedmill_results"

app = typer.Typer()


#: Export formats.
Form = Literal["parquet", "csv", "jsonl"]


@app.command("export")
def export_results(
    destination: Annotated[
        str,
        typer.Argument(
            metavar="OUT",
            help="Output file, such as labels.parquet; - prints it; with --follow, a folder of parts by day; or a "
            "database, such as postgresql://user@host/database.",
        ),
    ],
    form: Annotated[
        Form | None, typer.Option("--format", help="File format (default: from the extension of OUT).")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Columns to write, in this order, such as id,label,title (default: all).")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="DATE", help="Export only results stored since DATE, such as 2026-01-31 or 2026-01-31T12:30 (UTC)."
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="DATE", help="Export only results stored before DATE (UTC).")
    ] = None,
    label: Annotated[str | None, typer.Option(help="Export only results with this best label.")] = None,
    run: RunFilter = None,
    latest: Annotated[
        bool, typer.Option("--latest", help="Keep only the newest result of each post; needs a single file.")
    ] = False,
    excel: Annotated[bool, typer.Option("--excel", help="Mark CSV as UTF-8, so that Excel reads it.")] = False,
    table: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Table in the database, NAME or SCHEMA.NAME (default: {DEFAULT_TABLE})."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Keep exporting new results until Ctrl-C.")] = False,
    part_rows: Annotated[
        int | None, typer.Option(help=f"Approximate rows per part (default: {writer.PART_ROWS:,}).", min=1)
    ] = None,
    part_seconds: Annotated[
        float | None, typer.Option(help=f"Seconds after which --follow closes a part (default: {DEFAULT_PART_S:.0f}).")
    ] = None,
    purge: Annotated[
        bool, typer.Option("--purge", help="Export nothing; remove posts from OUT that were purged after the export.")
    ] = False,
    as_json: JsonSummary = False,
    redis_url: RedisUrl = None,
) -> None:
    """Write results to Parquet, CSV or JSONL files, or to a table in PostgreSQL.

    A file gets its name once it is complete. An interrupted export resumes when the same command runs again; a single
    Parquet file starts over. Exits 1 if nothing was exported or results were missed.
    """
    others = (form, columns, since, until, label, run, part_rows, part_seconds)
    run = None if run is None else parse_run(run)
    if purge and (follow or latest or any(other is not None for other in others)):
        raise UserError("--purge removes posts from OUT and exports nothing. Leave out the other export options.")
    if follow and until is not None:
        raise UserError("--follow cannot be combined with --until: following has no end. Leave out one of them.")
    if destination.startswith(DATABASE_SCHEMES):
        if latest or excel or any(other is not None for other in (form, columns, part_rows, part_seconds)):
            raise UserError(
                "A table has all columns and results. Leave out --format, --columns, --latest, --excel, --part-rows "
                "and --part-seconds."
            )
        wanted = None if purge else ExportFilter(*parse_period(since, until, earliest=0.0), label, run=run)
        settings = settings_of(redis_url=redis_url)
        raise typer.Exit(_export_to_table(destination, table or DEFAULT_TABLE, wanted, follow, as_json, settings))
    if table is not None:
        raise UserError("--table is for databases. Give an OUT such as postgresql://user@host/database.")
    out = Path(destination)
    is_printed = destination == STANDARD
    if is_printed and (form in (None, "parquet") or follow or purge or as_json):
        raise UserError(
            "OUT - prints CSV or JSONL to standard output: give --format csv or --format jsonl, without --follow, "
            "--purge and --json. `feedmill results --follow --json` prints new results."
        )
    if not purge and form is None:
        form = _form_of(out)
    if excel and (purge or form != "csv"):
        raise UserError("--excel is for new CSV files. Give an OUT that ends in .csv, or leave out --excel.")
    in_folder = follow or (form == "parquet" and not writer.names_file(out)) or out.is_dir()
    _check_flags(out, form, follow, latest, label, part_seconds, in_folder)
    settings = settings_of(redis_url=redis_url)
    notes = Console(stderr=True, soft_wrap=True, highlight=False)
    with user_errors(settings), _explaining_write_errors():
        redis = connect(settings)
        if purge:
            _report_purge(writer.purge(out, RowReader(redis)), as_json)
            return
        filters = ExportFilter(*parse_period(since, until, earliest=0.0), label, latest, run)
        own = () if run is None else _own_columns(redis, run, follow, notes)
        chosen = (*COLUMNS, *own) if columns is None else _columns(columns, own)
        if latest and run is None and "run" not in chosen:
            raise UserError(
                "--latest needs the column run, because posts of different runs can have the same id. Add run to "
                "--columns, or select a run with --run."
            )
        writes = writer.format_of(form or "", chosen, excel)
        if part_rows is not None and not in_folder:
            raise UserError(
                "--part-rows requires an export in parts. Give a folder with --format parquet, or leave out "
                "--part-rows."
            )
        reader = RowReader(redis, filters.until)
        redis.ping()  # before any file is created
        with (
            stop_on_signal() as stop,
            _printed(writes.name) if is_printed else nullcontext(out) as path,
            writer.opened(path, writes, filters, reader, follow, part_rows or writer.PART_ROWS) as target,
        ):
            # Exempt imported modules from garbage collection, which runs often while 100,000 rows are created.
            gc.freeze()
            this = ExportRun(reader, target, filters, stop, notes, follow, part_seconds or DEFAULT_PART_S)
            this.all()
    where = f"the folder {out}" if isinstance(target, Folder) else str(out)
    raise typer.Exit(this.report(None if is_printed else where, as_json))


@contextmanager
def _printed(form: str) -> Iterator[Path]:
    """Yield the path of a temporary file, and print the file once it is complete.

    Not streamed: `--latest` and purges remove rows at the end of an export.
    """
    with TemporaryDirectory(prefix="feedmill-export-") as folder:
        path = Path(folder) / f"results.{form}"
        yield path
        if path.exists():
            with path.open("rb") as file:
                shutil.copyfileobj(file, sys.stdout.buffer)


def _check_flags(
    out: Path,
    form: Form | None,
    follow: bool,
    latest: bool,
    label: str | None,
    part_seconds: float | None,
    in_folder: bool,
) -> None:
    """Raise UserError for flags of file exports that exclude each other."""
    if follow and writer.names_file(out) and not out.is_dir():
        folder = printable(str(out.with_suffix("")))
        raise UserError(
            f"--follow needs a folder, to which it adds files until it is stopped; {printable(str(out))} names one "
            f"file. Give a folder and its format, such as --format {form} {folder}/."
        )
    if latest and in_folder:
        raise UserError(
            "--latest needs a single file, because finished parts cannot be changed. Give an OUT that ends in "
            ".parquet, .csv or .jsonl, without --follow."
        )
    if latest and label is not None:
        raise UserError(
            "--latest cannot be combined with --label, because a post's newest result may have another label. Leave "
            "out one of them."
        )
    if part_seconds is not None and not (follow and part_seconds > 0):
        raise UserError("--part-seconds requires --follow and a value above 0.")


def _export_to_table(
    url: str, table: str, wanted: ExportFilter | None, follow: bool, as_json: bool, settings: Settings
) -> int:
    """Export to a table in PostgreSQL and return the exit status. wanted: None to only remove purged posts."""
    with explain_missing("PostgreSQL", "postgres"):
        from feedmill.export import postgres  # noqa: PLC0415 - psycopg, which the extra `postgres` brings
    notes = Console(stderr=True, soft_wrap=True, highlight=False)
    with user_errors(settings):
        redis = connect(settings)
        if wanted is not None and wanted.run is not None:
            _own_columns(redis, wanted.run, follow, notes)  # refuses an unknown run
        reader = RowReader(redis, wanted and wanted.until)
        with stop_on_signal() as stop, postgres.opened(url, table, wanted, reader, redis) as target:
            if wanted is None:
                target.purge()
                _report_purge(target.removed, as_json)
                return 0
            gc.freeze()
            this = ExportRun(reader, target, wanted, stop, notes, follow, TRANSACTION_S)
            this.all()
    return this.report(str(target), as_json)


def _report_purge(removed: int, as_json: bool) -> None:
    typer.echo(json.dumps({"removed": removed}) if as_json else f"{format_rows(removed)} of purged posts removed")


def _own_columns(redis: Redis, run: str, follow: bool, notes: Console) -> Sequence[str]:
    """Return the columns that the posts of a run carry. Raises UserError if there is no such run, unless following."""
    if not follow:
        check_run(redis, run)
    known = progress(redis, run)
    if known is None:
        notes.print(unknown_run(redis, run), markup=False)
    return known.columns if known else ()


def _form_of(out: Path) -> Form:
    """Return the format for the ending of OUT. Raises UserError for any other ending."""
    for form in get_args(Form):
        if out.suffix.lower() == f".{form}":
            return cast(Form, form)
    raise UserError(f"Cannot tell the format of {out}. Give --format, or an OUT that ends in .parquet, .csv or .jsonl.")


def _columns(given: str, own: Sequence[str]) -> tuple[str, ...]:
    """Parse `--columns`, ignoring case and repetitions. Raises UserError for an unknown column or without `id`.

    own: the columns that the posts of the selected run carry.
    """
    known = {column.lower(): column for column in (*own, *COLUMNS)}
    names = [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        if name.lower() not in known:
            raise UserError(
                f"--columns: unknown column {name!r:.80}. Choose from {printable(', '.join((*COLUMNS, *own)))}. "
                "Your own columns need --run, and `feedmill enqueue --keep`."
            )
    columns = tuple(dict.fromkeys(known[name.lower()] for name in names))
    if "id" not in columns:
        raise UserError("--columns must include id, by which --purge finds purged posts. Add id to --columns.")
    if sum(column in COLUMNS for column in columns) < min(2, len(columns)):
        raise UserError("--columns selects only id and columns of your own. Add a column of the result, such as label.")
    return columns


@contextmanager
def _explaining_write_errors() -> Iterator[None]:
    """Convert a failed write inside the block into UserError."""
    try:
        yield
    except (ConnectionFault, TimeoutFault, BrokenPipeError):  # from Redis, some of them OSErrors; a closed pipe
        raise
    except OSError as error:
        raise UserError(f"Cannot write the export: {error}. Correct the cause, then run the command again.") from None
