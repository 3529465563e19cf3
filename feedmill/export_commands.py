"""`feedmill export`: results into files that other tools read."""

import gc
import json
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from redis.exceptions import AuthenticationError
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import TimeoutError as TimeoutFault
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from feedmill import export
from feedmill.export import Folder, Target, Wanted
from feedmill.export_text import COLUMNS
from feedmill.flags import RedisUrl, settings_of
from feedmill.result_rows import Chunk, RowReader, seconds_of
from producers.records import seconds_of_date
from shared.broker import connect, told_plainly
from shared.errors import UserError
from shared.settings import PREFIX

logger = logging.getLogger(__name__)

#: Seconds after which a part is closed while one follows.
PART_SECONDS = 600.0
#: Seconds that following waits for an entry before it looks whether it is to end.
WAIT = 1.0
#: Seconds before a lost connection is tried again; the last one as often as it takes.
PAUSES = (0.1, 0.25, 0.5, 1.0)

app = typer.Typer()


class Form(StrEnum):
    """The formats."""

    PARQUET = "parquet"
    CSV = "csv"
    JSONL = "jsonl"


Date = Annotated[str | None, typer.Option(metavar="DATE", show_default=False)]


@app.command("export")
def export_results(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A file; for Parquet, and with --follow, a folder of parts by day.")
    ],
    form: Annotated[
        Form | None,
        typer.Option(
            "--format", help="What to write, unless OUT ends in .csv, .jsonl or .parquet.", show_default=False
        ),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Columns to write, in this order: id,label,title. All unless given.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="DATE", help="Only results stored since: 2026-01-31, or 2026-01-31T12:30; UTC."),
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="DATE", help="Only results stored before then.")] = None,
    label: Annotated[str | None, typer.Option(help="Only posts of this label.")] = None,
    latest: Annotated[
        bool, typer.Option("--latest", help="Of each post its newest result alone; for one file.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with results as they come, until Ctrl-C.")] = False,
    part_rows: Annotated[
        int | None, typer.Option(help=f"Rows of a part, about: {export.PART_ROWS:,} unless given.", min=1)
    ] = None,
    part_seconds: Annotated[
        float | None,
        typer.Option(help=f"With --follow: seconds after which a part is closed, {PART_SECONDS:.0f} unless given."),
    ] = None,
    purge: Annotated[
        bool, typer.Option("--purge", help="Export nothing: take what was purged since out of OUT.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
    redis_url: RedisUrl = None,
) -> None:
    """Write results to files: Parquet, CSV or JSONL, whole at any time.

    A run that was interrupted goes on where it stopped when it is started again.
    """
    others = (form, columns, since, until, label, part_rows, part_seconds)
    if purge and (follow or latest or any(other is not None for other in others)):
        raise UserError("--purge takes posts out of OUT, and exports nothing: give it alone.")
    if not purge and form is None:
        form = _form_of(out)
    if latest and (follow or form is Form.PARQUET):
        raise UserError("--latest is for one file, csv or jsonl: of parts it is not known what comes later.")
    if latest and label is not None:
        raise UserError("A post's newest result may have another label: leave out --latest, or --label.")
    if follow and until is not None:
        raise UserError("--follow goes on with what comes: leave out --until, or --follow.")
    if part_seconds is not None and not (follow and part_seconds > 0):
        raise UserError("--part-seconds goes with --follow, and is more than 0.")
    settings = settings_of(redis_url=redis_url)
    notes = Console(stderr=True, soft_wrap=True, highlight=False)
    with told_plainly(settings), _files_told_plainly():
        redis = connect(settings)
        if purge:
            removed = export.purge(out, RowReader(redis))
            typer.echo(json.dumps({"removed": removed}) if as_json else f"{_rows(removed)} of purged posts removed")
            return
        wanted = Wanted(_seconds("--since", since), _seconds("--until", until), label, latest)
        if wanted.since is not None and wanted.until is not None and wanted.since >= wanted.until:
            raise UserError(f"--since {since} is not before --until {until}: no result is from between them.")
        writes = export.format_of(str(form), COLUMNS if columns is None else _columns(columns))
        if part_rows is not None and not (follow or form is Form.PARQUET):
            raise UserError("--part-rows is for exports in parts: Parquet, or --follow.")
        reader = RowReader(redis, wanted.until)
        redis.ping()  # before anything is made
        with (
            _asked_to_end() as ending,
            export.opened(out, writes, wanted, reader, follow, part_rows or export.PART_ROWS) as target,
        ):
            # What was imported stays: a collection among a hundred thousand rows need not look through it each time.
            gc.freeze()
            run = _Run(reader, target, wanted, ending, notes, follow, part_seconds or PART_SECONDS)
            run.all()
    raise typer.Exit(run.tell(out, as_json))


def _form_of(out: Path) -> Form:
    """What OUT's ending says. Raises UserError."""
    try:
        return Form(out.suffix.lower().removeprefix("."))
    except ValueError:
        raise UserError(
            "Say what to write: --format parquet, csv or jsonl, or an OUT that ends in .parquet, .csv or .jsonl."
        ) from None


def _columns(given: str) -> tuple[str, ...]:
    """The columns that are named, in any case of their letters. Raises UserError."""
    known = {column.lower(): column for column in COLUMNS}
    names = [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        if name.lower() not in known:
            raise UserError(f"--columns: {name!r:.80} is no column; there are {', '.join(COLUMNS)}.")
    columns = tuple(dict.fromkeys(known[name.lower()] for name in names))
    if "id" not in columns:
        raise UserError("--columns: id has to be among them: by it posts are found that are purged later.")
    return columns


class _Asked:
    """Whether a signal asked us to end."""

    yet = False


@contextmanager
def _asked_to_end() -> Iterator[_Asked]:
    """Inside the block the first SIGTERM, SIGHUP or Ctrl-C is noted, so that what is begun is completed."""
    asked = _Asked()
    # What is ignored stays ignored: under nohup a closed terminal is no reason to end.
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before: dict[signal.Signals, Any] = {
        number: signal.getsignal(number) for number in numbers if signal.getsignal(number) != signal.SIG_IGN
    }

    def note(number: int, _: object) -> None:
        asked.yet = True
        signal.signal(number, before[signal.Signals(number)])  # the second one ends it at once

    for number in before:
        signal.signal(number, note)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _files_told_plainly() -> Iterator[None]:
    try:
        yield
    except (ConnectionFault, TimeoutFault):  # of Redis; some of these are OSErrors
        raise
    except OSError as error:
        raise UserError(f"The export cannot be written: {error}. Run it again to go on where it stopped.") from None


class _Run:
    """One run of an export."""

    def __init__(
        self,
        reader: RowReader,
        target: Target,
        wanted: Wanted,
        ending: _Asked,
        notes: Console,
        follow: bool,
        part_seconds: float,
    ) -> None:
        self._reader, self._target, self._wanted = reader, target, wanted
        self._ending = ending
        self._notes = notes
        self._follow = follow
        self._part_seconds = part_seconds
        self._before = target.written
        self._missed: int | None = 0
        self._any_missed = False
        self._complete = False

    def all(self) -> None:
        """Raises redis.exceptions.RedisError and OSError."""
        target = self._target
        if target.resumed:
            where = f"after {self._before:,} rows, " if self._before else ""
            self._notes.print(f"going on {where}where the last run stopped")
        if isinstance(target, Folder):
            target.sweep()
        with _Bar(self._notes) as bar:
            if self._follow and isinstance(target, Folder):
                self._keep_on(target, bar)
            else:
                self._once(bar)

    def _once(self, bar: "_Bar") -> None:
        place = self._target.place
        for chunk in self._reader.chunks(place):
            place = chunk.place
            self._take(chunk, bar)
            if self._ending.yet and not chunk.ended:
                self._target.stop(place)
                return
        self._target.close(place)
        self._complete = True

    def _keep_on(self, target: Folder, bar: "_Bar") -> None:
        """Until a signal comes. After a lost connection what is not closed is read again."""
        place, failures, swept_at = target.place, 0, time.monotonic()
        while not self._ending.yet:
            try:
                chunk = self._reader.fetch(place)
                place = chunk.place
                self._take(chunk, bar)
                if time.monotonic() - target.begun >= self._part_seconds:
                    target.close(place)
                if time.monotonic() - swept_at >= export.SWEEP_EVERY:
                    target.sweep()
                    swept_at = time.monotonic()
                if chunk.ended:
                    self._reader.wait(place, WAIT)
                failures = 0
            except (ConnectionFault, TimeoutFault) as fault:
                if isinstance(fault, AuthenticationError):
                    raise
                if not failures:
                    logger.warning("Redis does not answer (%s); trying again until it does", fault)
                target.abandon()
                place = target.place
                time.sleep(PAUSES[min(failures, len(PAUSES) - 1)])
                failures += 1
        target.close(place)
        self._complete = True

    def _take(self, chunk: Chunk, bar: "_Bar") -> None:
        if chunk.missed != 0:
            self._tell_missed(chunk)
        rows = self._wanted.of(chunk.rows)
        if rows:
            self._target.add(rows, chunk.place)
        bar.move(len(rows), chunk)

    def _tell_missed(self, chunk: Chunk) -> None:
        self._any_missed = True
        known = chunk.missed is not None and self._missed is not None
        self._missed = (self._missed or 0) + (chunk.missed or 0) if known else None
        how_many = "results were" if chunk.missed is None else f"up to {chunk.missed:,} results were"
        if chunk.missed == 1:
            how_many = "up to 1 result was"
        self._notes.print(
            f"{how_many} trimmed from the stream before being exported: export more often, or raise "
            f"{PREFIX}RESULTS_STREAM_LENGTH"
        )

    def tell(self, out: Path, as_json: bool) -> int:
        """Say what was done; returns the exit status."""
        target = self._target
        rows = target.written - (self._before if isinstance(target, Folder) else 0)
        if as_json:
            said = {"rows": rows, "removed": target.removed, "complete": self._complete}
            typer.echo(json.dumps(said | {"missed": self._missed if self._any_missed else 0}))
        else:
            told = [f"{_rows(rows)} written to {out}"]
            if target.removed:
                told.append(f"{_rows(target.removed)} of purged posts removed")
            if not self._complete:
                told.append("stopped before the end; the same command goes on there")
            typer.echo(", ".join(told))
        nothing = not rows and not target.resumed and not self._follow
        return 1 if nothing or self._any_missed or not self._complete else 0


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"


def _seconds(flag: str, date: str | None) -> float | None:
    if date is None:
        return None
    try:
        seconds = seconds_of_date(date.strip())
    except ValueError:
        seconds = -1.0
    if seconds < 0:
        raise UserError(
            f"{flag}: {date!r:.80} is no date; write it as 2026-01-31, or with a time (UTC) as 2026-01-31T12:30."
        )
    return seconds


class _Bar(Progress):
    """How far it is; of a stream whose rest is not known, how long it takes."""

    def __init__(self, notes: Console) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        super().__init__(*columns, console=notes, transient=True, disable=not notes.is_terminal)
        self._task = self.add_task("reading", total=None)
        self._rows = self._read = 0
        self._began = time.monotonic()

    def move(self, rows: int, chunk: Chunk) -> None:
        self._rows += rows
        self._read += len(chunk.rows)
        if self.disable:
            return
        rate = self._rows / max(time.monotonic() - self._began, 0.001)
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds_of(chunk.place.cursor)))
        total = None if chunk.left is None else self._read + chunk.left
        told = f"{self._rows:,} rows, {rate:,.0f}/s" + (f", at {when}" if chunk.rows else "")
        self.update(self._task, description=told, completed=self._read, total=total)
