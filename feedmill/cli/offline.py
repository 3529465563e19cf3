"""The `feedmill classify` command: classify a text or a file in this process, without Redis or a worker.

With --out, it copies the file with a label for each row."""

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer
from rich.markup import escape
from rich.table import Table
from typer import Argument, Option

from feedmill.cli.options import MODEL, AsJson, FileFlags, Limit, MultiLabelOption, needs, refuse, with_settings
from feedmill.console import ID_WIDTH, LiveBar, counted, notes_console, output_console, span, with_title
from feedmill.local_model import load_calibrated
from feedmill.producers.files import NOT_UTF8, CsvTable, FileReading, Place, Row, Source, is_file
from feedmill.producers.records import NO_TEXT, REMOVED, parse_text
from feedmill.shared import errors
from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import InputError, UserError, printable
from feedmill.shared.messages import Classification, ClassifyOptions, Outcome, Post, PostError
from feedmill.shared.settings import Settings
from feedmill.tables import Classify, check_new_columns, format_of, label_columns, with_outcomes

#: Arguments that look like a file name, so that a mistyped one is not classified as a text.
FILE_NAME = re.compile(r"\S+\.(jsonl|ndjson|json|csv|tsv|txt|parquet|xlsx?)(\.gz|\.zst)?|\S+\.zst|\S*/\S+")
#: Labels shown per post of a file, and for a single text.
POST_LABELS, TEXT_LABELS = 3, 16
#: Width of the longest bar in characters.
BAR_WIDTH = 30
#: Labels and reasons in the summary; the rest are only counted.
MAX_LABELS_SHOWN, MAX_REASONS_SHOWN = 20, 10


@dataclass(frozen=True)
class OutFlags:
    """Flags of `feedmill classify` about the output file."""

    out: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Write every row with its label to this .csv, .tsv, .jsonl or .parquet file, or .csv.gz; - prints it.",
        ),
    ] = None
    scores: Annotated[bool, Option("--scores", help="With --out: add a column with each label's score.")] = False
    prefix: Annotated[str, Option(help="With --out: text before the names of the new columns (default: none).")] = ""


#: Loads the model and returns its labels, and the function that classifies posts with it.
Load = Callable[[], tuple[Sequence[str], Classify]]


class Tally:
    """Counts of labelled rows."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.rows = 0
        self.labels: Counter[str] = Counter()
        #: Rows without a label; and rows that the output lacks, because they could not be parsed; by reason.
        self.unlabelled: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        #: Place of the first row with a reason.
        self.first: dict[str, Place] = {}

    def add(self, row: Row, outcome: Outcome | None) -> None:
        self.rows += 1
        if isinstance(outcome, Classification):
            self.labels[outcome.label] += 1
            return
        reason = str(row.post) if outcome is None else outcome.error
        (self.left_out if row.values is None else self.unlabelled)[reason] += 1
        self.first.setdefault(reason, row.place)

    @property
    def has_failures(self) -> bool:
        """True if a row was left out, or has a text and no label."""
        return bool(self.left_out) or not self.unlabelled.keys() <= {NO_TEXT, REMOVED}

    def as_json(self) -> str:
        """Return the counts as JSON."""
        counts = {"rows": self.rows, "labels": dict(self.labels.most_common()), "unlabelled": self.unlabelled}
        return json.dumps(counts | {"left_out": self.left_out, "seconds": round(time.monotonic() - self._began, 3)})

    def described(self, source: Source, out: str) -> str:
        """Return the summary: rows per label, and rows without one by reason."""
        where = "" if out == "-" else f", written to {printable(out)}"
        written = self.rows - self.left_out.total()
        rows = f"{written:,} of {counted(self.rows, 'row')}" if self.left_out else counted(self.rows, "row")
        lines = [f"{rows} of {source.name} in {span(time.monotonic() - self._began)}{where}"]
        labels = self.labels.most_common(MAX_LABELS_SHOWN)
        width = max((len(printable(label)) for label, _ in labels), default=0)
        lines += [f"  {printable(label):<{width}}  {count:>9,}  {count / written:>4.0%}" for label, count in labels]
        if more := self.labels.total() - sum(count for _, count in labels):
            lines.append(f"  and {counted(more, 'row')} with other labels")
        for what, reasons in (("no label", self.unlabelled), ("left out", self.left_out)):
            shown = reasons.most_common(MAX_REASONS_SHOWN)
            for reason, count in shown:
                place = f"first in {source.unit} {self.first[reason]}"
                lines.append(f"{what}: {counted(count, 'row')}, {place}: {printable(reason)}")
            if others := reasons.total() - sum(count for _, count in shown):
                lines.append(f"{what}: {counted(others, 'row')} for other reasons")
        return "\n".join(lines)


class Labelling:
    """One run of `feedmill classify FILE --out OUT`.

    If reading fails, the rows read before the error are still written, and `run` raises the error at the end.

    path: path of the input; - is standard input. limit: maximum rows. Raises UserError if the output cannot be written.
    """

    def __init__(self, path: str, file: FileFlags, flags: OutFlags, limit: int | None) -> None:
        with errors.explain_missing("--out", "tables"):
            from feedmill.tables import writing  # noqa: PLC0415 - pyarrow, an extra
        self._path, self._file, self._flags, self._limit = path, file, flags, limit
        self._writing = writing
        self._out = Path(flags.out or "-")
        self._is_printed = flags.out == "-"
        #: None is the input's format.
        self._form = None if self._is_printed else format_of(str(self._out))
        self._check_out()
        self._notes = notes_console()
        self._broken: InputError | None = None
        self.tally = Tally()

    def _check_out(self) -> None:
        """Raise UserError if the output cannot be written, or is the input."""
        out = self._out
        if self._is_printed:
            return
        if self._form is None:
            raise UserError(
                f"Cannot tell the format of {out}. Give an --out that ends in .csv, .tsv, .jsonl or .parquet."
            )
        with errors.explain_unwritable(out):  # a name that is too long
            is_taken = out.is_dir() or (out.exists() and is_file(self._path) and out.samefile(self._path))
        if is_taken:
            raise UserError(f"{out} is a folder or the input file. Give another --out.")

    def _source(self) -> Source:
        return Source(self._path, columns=self._file.columns(), encoding=self._file.encoding)

    def run(self, load: Load) -> None:
        """Classify the rows and write the output. Raises UserError and OSError."""
        source = self._source()
        rows = source.rows()
        # Read a row before loading the model, which takes seconds.
        first = next(rows)
        form = self._form or ("csv" if isinstance(source.table, CsvTable) else "jsonl")
        keys = self._keys(source, form)
        is_copied = source.table is None and form == "jsonl"
        given = source.table.header if source.table else list(first.values or ()) if keys is None else keys.names
        prefix = self._flags.prefix
        check_new_columns(source.name, given, label_columns((), prefix), "--prefix")
        with self._notes.status("loading the model"):
            labels, classify = load()
        labels = labels if self._flags.scores else ()
        new = label_columns(labels, prefix)
        check_new_columns(source.name, given, new, "--prefix")
        found = with_outcomes(islice(self._readable(chain([first], rows)), self._limit), classify)
        # Closed after any error: threads of a running model would abort the process at its exit.
        with self._output() as file, self._bar(source), closing(found):
            batch_rows = 1 if self._is_printed and not is_file(self._path) else self._writing.COPIED_ROWS
            copy = (
                self._writing.JsonCopy(file, self._out, new, labels)
                if is_copied
                else self._writing.LabelledCopy(file, self._out, form, source, keys, new, labels, batch_rows)
            )
            for row, outcome in found:
                if row.post == NOT_UTF8 and NOT_UTF8 not in self.tally.first:  # most rows may lack a label
                    self._notes.print(escape(f"{source.name}:{row.place}: {row.post}"))
                self.tally.add(row, outcome)
                if row.values is not None:
                    copy.add(row, outcome if isinstance(outcome, Classification) else None)
                    if batch_rows == 1:
                        file.flush()
            copy.close()
        self._notes.print(escape(self.tally.described(source, self._flags.out or "")))
        if self._broken:
            raise self._broken

    def _keys(self, source: Source, form: str) -> Any:
        """Return the columns of JSON records, which are read twice for them; None for other sources and outputs."""
        if source.table is not None or form == "jsonl":
            return None
        if not is_file(self._path):
            raise UserError(f"{source.name} is a pipe with JSON, whose keys are not known beforehand. Write .jsonl, or "
                            "save it as a file first.")  # fmt: skip
        with self._notes.status(escape(f"reading {source.name}")):
            return self._writing.schema_of(islice(self._readable(self._source().rows()), self._limit), form)

    def _readable(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Yield the rows up to an error, which is kept."""
        try:
            yield from rows
        except InputError as error:
            self._broken = error

    @contextmanager
    def _output(self) -> Iterator[BinaryIO]:
        """Yield the output file. It gets its name once it is complete. Raises UserError if it cannot be written."""
        if self._is_printed:
            yield sys.stdout.buffer
        else:
            with errors.explain_unwritable(self._out), replacing(self._out) as temporary, temporary.open("wb") as file:
                yield file

    def _bar(self, source: Source) -> LiveBar:
        """Return a bar of the bytes read."""

        def figures(seconds: float) -> tuple[str, float, float | None]:
            rows = self.tally.rows
            rate = f", {rows / seconds:,.0f}/s" if seconds and rows else ""
            return f"{counted(rows, 'row')}{rate}", source.done, source.size

        return LiveBar(self._notes, figures)


@needs("--scores", "--out")
@needs("--prefix", "--out")
@with_settings(*MODEL, plain_logs=True)
def classify(
    settings: Settings,
    what: Annotated[
        str,
        Argument(
            metavar="TEXT|FILE",
            help="A text, or a file of posts (CSV, JSONL, a JSON array, Parquet, .txt); - is standard input.",
        ),
    ],
    file: FileFlags,
    output: OutFlags,
    multi_label: MultiLabelOption = False,
    limit: Limit = None,
    as_json: AsJson = False,
) -> None:
    """Needs neither Redis nor a worker. Prints the labels, or writes the file's rows with their labels to --out. Exits
    1 if a post failed or a record could not be read; rows without text are no failure.
    """
    load = partial(_load, settings, ClassifyOptions(multi_label=multi_label))
    is_file = what == "-" or _is_file(what)
    refuse(
        (
            output.out is not None and not is_file,
            "--out needs a file of posts, not a text. Give a file, or omit --out.",
        ),
        (as_json and output.out == "-", "--json and --out - both print to standard output. Omit one of them."),
    )
    with errors.explain_refusals(settings.model):
        if output.out is not None:
            labelling = Labelling(what, file, output, limit)
            labelling.run(load)
            if as_json:
                typer.echo(labelling.tally.as_json())
            failed = labelling.tally.has_failures
        elif is_file:
            failed = _classify_file(what, file, limit, load, as_json)
        else:
            failed = _classify_text(what, load, as_json)
    raise typer.Exit(1 if failed else 0)


def _load(settings: Settings, options: ClassifyOptions) -> tuple[Sequence[str], Classify]:
    """Load the model; return its labels, and the function that classifies posts with it. Raises UserError."""
    loaded, budget = load_calibrated(settings)
    from feedmill.workers.pipeline import offline  # noqa: PLC0415 - needs torch, which only workers have

    labels = loaded.label_set(options).labels
    return labels, lambda posts: offline.classify(posts, loaded, settings, budget, options)


def _classify_file(path: str, file: FileFlags, limit: int | None, load: Load, as_json: bool) -> bool:
    """Print the labels of the file's posts. Return whether a post or a record failed."""
    reading = FileReading(
        path, notes_console(), columns=file.columns(), encoding=file.encoding, shows_ids=True, text_only=True
    )
    posts = islice(reading.posts(), limit)
    # Read a post before loading the model, which takes seconds: the file may have none.
    first = list(islice(posts, 1))
    failed = 0
    if first:
        # Closed after any error: threads of a running model would abort the process at its exit.
        with closing(load()[1](chain(first, posts))) as outcomes:
            failed = _show_posts(outcomes, as_json)
    reading.end()
    return failed > 0 or reading.skipped > reading.without_text


def _classify_text(text: str, load: Load, as_json: bool) -> bool:
    """Print the labels of a text. Raises UserError if it cannot be classified."""
    post = parse_text({"body": text}, "text")
    if isinstance(post, str):
        raise InputError(f"Cannot classify the text: {post}.")
    ((post, outcome),) = load()[1]([post])
    if isinstance(outcome, PostError):
        raise UserError(f"Cannot classify the text: {outcome.error}. Change the text, or use another --model.")
    if as_json:
        typer.echo(_as_json(post, outcome))
    else:
        _show_text(outcome)
    return False


def _is_file(what: str) -> bool:
    """Return True for an existing file. Raises InputError for a missing one: a word that looks like a file name."""
    try:
        if Path(what).is_dir():
            raise InputError(f"{what} is a folder. Give a file in it, or a text of at least two words.")
        if Path(what).exists():  # a file, or a pipe
            return True
    except (OSError, ValueError):  # too long for a file name, or with a null character
        return False
    if FILE_NAME.fullmatch(what):
        raise InputError(
            f"There is no file {what}. A single word with an extension or a slash is read as a file name; "
            "to classify text, give at least two words."
        )
    return False


def _as_json(post: Post, outcome: Outcome) -> str:
    if isinstance(outcome, Classification):
        found = {"id": post.id, "label": outcome.label, "scores": outcome.scores}
    else:
        found = {"id": post.id, "error": outcome.error}
    return errors.json_line(found)


def _show_posts(outcomes: Iterable[tuple[Post, Outcome]], as_json: bool) -> int:
    """Print posts as they are classified; return how many failed."""
    failed = 0
    for post, outcome in outcomes:
        failed += isinstance(outcome, PostError)
        if as_json:
            typer.echo(_as_json(post, outcome))
        elif isinstance(outcome, Classification):
            best = ", ".join(f"{label} {score:.2f}" for label, score in list(outcome.scores.items())[:POST_LABELS])
            typer.echo(with_title(printable(f"{post.id:<{ID_WIDTH}} {best:<48} "), post))
        else:
            typer.echo(printable(f"{post.id:<{ID_WIDTH}} failed: {outcome.error}"))
    return failed


def _show_text(found: Classification) -> None:
    table = Table("label", "score", "", box=None, header_style="dim")
    longest = max(found.scores.values()) or 1.0
    for label, score in list(found.scores.items())[:TEXT_LABELS]:
        table.add_row(escape(printable(label)), f"{score:.3f}", "█" * round(BAR_WIDTH * max(0.0, score) / longest))
    output_console().print(table)
    typer.echo(printable(f"by {found.model} ({found.weights[:12]}) on {found.device}"))
