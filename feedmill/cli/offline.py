"""The `feedmill classify` command: classify a text or a file in this process, without Redis or a
worker.

With --out, it copies the file with a label for each row.
"""

import errno
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table
from typer import Argument, Option

from feedmill.cli.options import (
    MODEL,
    AsJson,
    FileFlags,
    ForExcel,
    KindFlags,
    Limit,
    MultiLabelOption,
    NoneOption,
    excludes,
    message_options,
    needs,
    with_settings,
)
from feedmill.console import (
    ID_WIDTH,
    Figures,
    LiveBar,
    counted,
    notes_console,
    output_console,
    span,
    with_title,
    without_label,
)
from feedmill.offline.journal import Journal, journal_for
from feedmill.offline.model import load_offline
from feedmill.offline.observer import LabellingObserver
from feedmill.offline.precision import label_precisely
from feedmill.offline.tally import FOREIGN, NO_FIT, Tally
from feedmill.producers.files import FileReading, FileSource
from feedmill.producers.records import NO_TEXT, Filters, parse_text
from feedmill.shared import errors
from feedmill.shared.errors import InputError, UserError, printable, truncate
from feedmill.shared.interrupts import received
from feedmill.shared.language import is_in_another, languages_of
from feedmill.shared.messages import (
    Classification,
    ClassifyOptions,
    Outcome,
    Post,
    PostError,
    further_fields,
)
from feedmill.shared.none_of_these import NO_LABEL
from feedmill.shared.settings import Settings
from feedmill.tables import ENDINGS, Classify

if TYPE_CHECKING:
    from feedmill.offline.labelling import Labelling, Load

#: Arguments that look like a file name, so that a mistyped one is not classified as a text.
FILE_NAME = re.compile(
    r"\S+\.(jsonl|ndjson|json|csv|tsv|txt|parquet|xlsx?)(\.gz|\.zst)?|\S+\.zst|\S*/\S+"
)
#: Labels shown per post of a file, and for a single text.
POST_LABELS = 3
TEXT_LABELS = 16
#: Advice to users whose posts have no label.
NONE_OFF = (
    "--none off gives each of them its best label; --none SCORE moves the threshold"
)
#: Width of the longest bar in characters.
BAR_WIDTH = 30
#: Labels and reasons in the summary; the rest are only counted.
MAX_LABELS_SHOWN = 20
MAX_REASONS_SHOWN = 10
#: Share of rows without a text from which the summary names the columns that were read.
MAX_SHARE_WITHOUT_TEXT = 0.5


@dataclass(frozen=True)
class OutFlags:
    """Flags of `feedmill classify` about the output file."""

    out: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help=f"Write every row with its label to this {ENDINGS} file, or .csv.gz; - prints "
            "it.",
        ),
    ] = None
    scores: Annotated[
        bool,
        Option("--scores", help=("With --out: add a column with each label's score.")),
    ] = False
    min_score: Annotated[
        float | None,
        Option(
            min=-1,
            max=1,
            help=(
                "With --multi-label and --out: least score of a label in the column labels "
                "(default: the model's threshold)."
            ),
        ),
    ] = None
    excel: ForExcel = False
    prefix: Annotated[
        str,
        Option(
            help=(
                "With --out: text before the names of the new columns (default: none)."
            )
        ),
    ] = ""


class _Notes(LabellingObserver):
    """Prints what happens while a file is labelled, below a bar of the bytes read."""

    def __init__(self, notes: Console, out: str, multi_label: bool = False) -> None:
        self._notes = notes
        self._out = out
        self._multi_label = multi_label

    def note(self, message: str) -> None:
        self._notes.print(escape(message))

    def working(self, what: str) -> Status:
        return self._notes.status(escape(what))

    def watching(self, labelling: "Labelling") -> LiveBar:
        def figures(seconds: float) -> Figures:
            rows = labelling.tally.rows
            text = counted(rows, "row")
            if seconds and rows:
                rate = rows / seconds
                text += f", {rate:,.0f}/s"
            source = labelling.source
            return Figures(text, done=source.done, total=source.size)

        return LiveBar(self._notes, figures)

    def finished(self, labelling: "Labelling") -> None:
        summary = describe(
            labelling.tally,
            labelling.source,
            self._out,
            self._multi_label,
        )
        self._notes.print(escape(summary))


def describe(
    tally: Tally, source: FileSource, out: str, multi_label: bool = False
) -> str:
    """Return the summary: rows per label, and rows without one by reason.

    multi_label: several labels of a row may apply, of which only the best one is counted.
    """
    rows = counted(tally.rows, "row")
    if tally.left_out:
        rows = f"{tally.written:,} of {rows}"
    summary = f"{rows} of {source.name} in {span(tally.seconds)}"
    if out != "-":
        summary += f", written to {printable(out)}"
    lines = [summary]
    if multi_label and tally.labels:
        lines.append("rows by their best label:")
    labels = tally.labels.most_common(MAX_LABELS_SHOWN)
    names = [printable(label) for label, _ in labels]
    width = max(map(len, names), default=0)
    others = tally.labels.total()
    for name, (_, count) in zip(names, labels, strict=True):
        others -= count
        share = count / tally.written
        lines.append(f"  {name:<{width}}  {count:>9,}  {share:>4.0%}")
    if others:
        rows = counted(others, "row")
        lines.append(f"  and {rows} with other labels")
    lines.extend(_reason_lines("no label", tally.unlabelled, tally, source))
    if tally.unlabelled[NO_TEXT] > MAX_SHARE_WITHOUT_TEXT * tally.rows:
        lines.extend(_text_columns_lines(source))
    if tally.unlabelled[NO_FIT]:
        lines.append(NONE_OFF)
    lines.extend(_reason_lines("left out", tally.left_out, tally, source))
    for column, problem in tally.lost.items():
        line = f"column {column}: {problem}"
        lines.append(printable(line))
    return "\n".join(lines)


def _text_columns_lines(source: FileSource) -> Iterator[str]:
    """Yield a line about the columns that were read as texts, if the table has others."""
    names = source.text_columns
    if source.table is None or len(names) == len(source.table.header):
        return
    columns = ", ".join(names)
    yield printable(
        f"Texts are read from the column {columns} only: name others with --title-column and "
        "--body-column"
    )


def _reason_lines(
    what: str, reasons: Counter[str], tally: Tally, source: FileSource
) -> Iterator[str]:
    """Yield a line for each of the most common reasons, and one for the others."""
    others = reasons.total()
    for reason, count in reasons.most_common(MAX_REASONS_SHOWN):
        rows = counted(count, "row")
        place = f"first in {source.unit} {tally.first[reason]}"
        text = printable(reason)
        yield f"{what}: {rows}, {place}: {text}"
        others -= count
    if others:
        rows = counted(others, "row")
        yield f"{what}: {rows} for other reasons"


def label_file(
    path: str,
    file: FileFlags,
    flags: OutFlags,
    limit: int | None,
    load: "Load",
    labels_file: Path | None = None,
    options: ClassifyOptions | None = None,
    languages: frozenset[str] = frozenset(),
    journal: Journal | None = None,
    kinds: KindFlags | None = None,
) -> Tally:
    """Write the rows of a file with their labels, and print notes and a summary.

    labels_file: the file of labels, which must stay. options: those of the call. languages: those
    of rows that get a label; empty for all. journal: that of `load`, by which the next run
    continues an interrupted one. Raises UserError and OSError.
    """
    kinds = kinds or KindFlags()
    with errors.explain_missing("--out", "tables"):
        # pyarrow, an extra
        from feedmill.offline.labelling import LabelledFile, Labelling  # noqa: PLC0415
    path_out = None
    stream = None
    if flags.out == "-":
        stream = sys.stdout.buffer
    else:
        path_out = Path(flags.out or "-")
    output = LabelledFile(
        path=path_out,
        stream=stream,
        scores=flags.scores,
        prefix=flags.prefix,
        has_mark=flags.excel,
        options=options or ClassifyOptions(),
        has_languages=bool(languages),
        min_score=flags.min_score,
    )
    notes = notes_console()
    with kinds.open_titles(path, file) as titles:
        labelling = Labelling(
            path,
            output,
            columns=file.columns(),
            encoding=file.encoding,
            limit=limit,
            labels_file=labels_file,
            observer=_Notes(notes, flags.out or "", output.options.multi_label),
            languages=languages,
            kinds=kinds.kinds,
            titles=titles,
        )
        try:
            labelling.run(load)
        except BaseException as error:
            # a library may report Ctrl-C as an error of its own
            if not isinstance(error, KeyboardInterrupt) and not received():
                raise
            state = _interruption_message(labelling.tally, path_out, journal)
            notes.print(escape(state))
            raise KeyboardInterrupt from None
        finally:
            _end_journal(journal, labelling, notes)
    return labelling.tally


def _end_journal(
    journal: Journal | None, labelling: "Labelling", notes: Console
) -> None:
    """Delete the outcomes that were kept for the next run, if the output is complete.

    A run that failed leaves those of earlier runs, even if it reached none of them itself.
    """
    if journal is None:
        return
    if journal.resumed and labelling.is_published:
        rows = counted(journal.resumed, "row")
        notes.print(f"{rows} had been labelled before an interruption")
    if labelling.is_published or journal.is_empty:
        journal.discard()


def _interruption_message(
    tally: Tally, out: Path | None, journal: Journal | None
) -> str:
    """Return what an interrupted run did, and how to repeat it. out: None is standard output."""
    rows = counted(tally.rows, "row")
    if out is None:
        return f"interrupted: {rows} written to standard output. The same command starts over."
    name = printable(str(out))
    state = "is unchanged" if out.exists() else "was not written"
    continues = "starts over; --limit labels fewer rows"
    if journal is not None and journal.rows:
        labelled_rows = counted(journal.rows, "labelled row")
        continues = f"continues after {labelled_rows}"
    elif journal is not None and not journal.is_empty:
        continues = "continues where an earlier one ended"
    return f"interrupted after {rows}: {name} {state}. The same command {continues}."


@excludes("--precision", "--none")
@needs("--scores", "--out")
@needs("--prefix", "--out")
@needs("--min-score", "--out")
@needs("--min-score", "--multi-label")
@needs("--excel", "--out")
@with_settings(*MODEL, "devices", "languages", plain_logs=True)
def classify(
    settings: Settings,
    what: Annotated[
        str,
        Argument(
            metavar="TEXT|FILE",
            help=(
                "A text, or a file of posts (CSV, JSONL, a JSON array, Parquet, .txt); - is "
                "standard input."
            ),
        ),
    ],
    file: FileFlags,
    output: OutFlags,
    kinds: KindFlags,
    multi_label: MultiLabelOption = False,
    none: NoneOption = None,
    precision: Annotated[
        float | None,
        Option(
            metavar="SHARE",
            help=(
                "For a file: give no label to posts whose label is uncertain, so that about this "
                "share of the labels is right, such as 0.9."
            ),
        ),
    ] = None,
    limit: Limit = None,
    as_json: AsJson = False,
) -> None:
    """Needs neither Redis nor a worker.

    Prints the labels, or writes the file's rows with their labels to --out. Posts of a file that
    fit none of your --labels have no label; --none off gives each its best one. After an
    interruption, the same command with --out continues. Exits 1 if a post failed, a record could
    not be read, or no row has text. Single rows without text do not count.
    """
    is_file = what == "-" or _exists(what)
    if is_file:
        _check_folder(what)
    else:
        _check_text(what)
    if precision is not None:
        none = _none_for_precision(precision, is_file=is_file, multi_label=multi_label)
    is_default = none is None and settings.none is None
    if is_default and is_file and settings.labels is not None:
        # Most rows of a file fit none of the labels that its owner asks for.
        none = True
    options = message_options(multi_label=multi_label, none=none)
    journal = journal_for(output.out)
    load = partial(
        _load,
        settings,
        options,
        precision,
        is_default,
        journal,
    )
    _check_out(output.out, what, is_file=is_file, as_json=as_json)
    languages = languages_of(settings)
    with errors.explain_refusals(settings.model):
        if output.out is not None:
            tally = label_file(
                what,
                file,
                output,
                limit,
                load,
                settings.labels_file,
                options,
                languages,
                journal,
                kinds,
            )
            if as_json:
                summary = json.dumps(tally.counts())
                typer.echo(summary)
            failed = tally.has_failures
        elif is_file:
            failed = _classify_file(
                what,
                file,
                limit,
                load,
                as_json,
                languages,
                kinds,
            )
        else:
            failed = _classify_text(what, load, as_json)
    raise typer.Exit(1 if failed else 0)


def _check_out(out: str | None, what: str, *, is_file: bool, as_json: bool) -> None:
    """Raise UserError if --out does not suit the input or --json."""
    if out is not None and not is_file:
        name = printable(truncate(what))
        raise UserError(
            f"There is no file {name}, and --out needs one. Give a file of posts, or omit --out."
        )
    if as_json and out == "-":
        raise UserError(
            "--json and --out - both print to standard output. Omit one of them."
        )


def _none_for_precision(precision: float, *, is_file: bool, multi_label: bool) -> float:
    """Return `none` for a precision: 0, since the precision chooses the threshold later.

    Raises UserError for a precision that cannot be kept.
    """
    if not 0 < precision <= 1:
        raise UserError(
            f"--precision {precision} must be above 0 and up to 1, such as 0.9."
        )
    if not is_file:
        raise UserError(
            "--precision chooses a threshold by the scores of many posts. Give a file of posts, "
            "or --none with a score."
        )
    if multi_label:
        raise UserError(
            "--precision cannot be combined with --multi-label, whose scores are no probabilities "
            "of being right. Use --none with a score."
        )
    return 0.0


def _load(
    settings: Settings,
    options: ClassifyOptions,
    precision: float | None,
    is_default: bool,
    journal: Journal | None,
) -> tuple[Sequence[str], Classify]:
    """Load the model; return its labels, and the function that classifies posts with it.

    precision: see `label_precisely`. is_default: see `load_offline`. journal: outcomes of an
    interrupted run, which the function returns again. Raises UserError.
    """
    model = load_offline(settings, options, is_default)
    classify_posts = model.classify
    if journal is not None:
        classify_posts = journal.remembering(classify_posts, model.recipe)
    if precision is None:
        return model.labels, classify_posts

    def classify_precisely(posts: Iterable[Post]) -> Generator[tuple[Post, Outcome]]:
        return label_precisely(
            classify_posts(posts),
            precision,
            partial(_note_threshold, precision),
        )

    return model.labels, classify_precisely


def _note_threshold(precision: float, threshold: float) -> None:
    """Print the threshold that a precision has chosen, for later files and for queues."""
    if math.isinf(threshold):
        typer.echo(f"--precision {precision:g}: no label is that certain", err=True)
        return
    typer.echo(
        f"--precision {precision:g}: labels of these posts need a score of {threshold:.7g}; "
        f"--none {threshold:.7g} asks for the same of other posts",
        err=True,
    )


def _classify_file(
    path: str,
    file: FileFlags,
    limit: int | None,
    load: "Load",
    as_json: bool,
    languages: frozenset[str],
    kinds: KindFlags,
) -> bool:
    """Print the labels of the file's posts. Return whether a post or a record failed."""
    with kinds.open_titles(path, file) as titles:
        reading = FileReading(
            path,
            notes_console(),
            filters=Filters(kinds=kinds.kinds),
            columns=file.columns(),
            encoding=file.encoding,
            titles=titles,
            shows_ids=True,
            text_only=True,
        )
        return _show_file(reading, limit, load, as_json, languages)


def _show_file(
    reading: FileReading,
    limit: int | None,
    load: "Load",
    as_json: bool,
    languages: frozenset[str],
) -> bool:
    """Print the labels of the posts. Return whether a post or a record failed."""
    posts = islice(reading.posts(), limit)
    # Read a post before loading the model, which takes seconds: the file may have none.
    first = next(posts, None)
    if first is None:
        reading.end()
        return reading.skipped > 0
    _, classify_posts = load()
    all_posts = chain([first], posts)
    # Closed after any error: threads of a running model would abort the process at its exit.
    with closing(classify_posts(all_posts)) as outcomes:
        shown = _show_posts(outcomes, as_json, languages)
    all_posts_shown = counted(shown.posts, "post")
    if shown.unlabelled:
        posts_without = f"{shown.unlabelled:,} of {all_posts_shown}"
        notes_console().print(f"{NO_LABEL}: {posts_without}. {NONE_OFF}.")
    if shown.foreign:
        posts_without = f"{shown.foreign:,} of {all_posts_shown}, {FOREIGN}"
        notes_console().print(f"{NO_LABEL}: {posts_without}.")
    reading.end()
    return shown.failures > 0 or reading.skipped > reading.without_text


def _classify_text(text: str, load: "Load", as_json: bool) -> bool:
    """Print the labels of a text. Raises UserError if it cannot be classified."""
    post = parse_text({"body": text}, "text")
    if isinstance(post, str):
        raise InputError(f"Cannot classify the text: {post}.")
    _, classify_posts = load()
    ((post, outcome),) = classify_posts([post])
    if isinstance(outcome, PostError):
        raise UserError(
            f"Cannot classify the text: {outcome.error}. Change the text, or use another --model."
        )
    if as_json:
        typer.echo(_as_json(post, outcome))
    else:
        _show_text(outcome)
    return False


def _exists(what: str) -> bool:
    """Return whether there is a file, a pipe or a folder of this name."""
    try:
        return what != "" and Path(what).exists()
    except (OSError, ValueError):  # too long for a file name, or with a null character
        return False


def _check_folder(name: str) -> None:
    """Raise InputError for a folder."""
    if Path(name).is_dir():
        raise InputError(
            f"{printable(name)} is a folder. Give a file in it, or a text of at least two "
            "words."
        )


def _check_text(what: str) -> None:
    """Raise InputError for an empty text, and for a word that looks like the name of a missing
    file.
    """
    if not what:
        raise InputError(
            "The text is empty. Give a text of at least two words, or a file of posts."
        )
    if FILE_NAME.fullmatch(what):
        _check_missing(what)


def _check_missing(name: str) -> None:
    """Raise InputError for the name of a missing file. A name that is too long, or contains a null
    character, is a text.
    """
    printed = printable(name)
    try:
        Path(name).stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except ValueError:
        return
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return
        raise InputError(
            f"Cannot read {printed}: {error.strerror}. Check the file, then run the command again."
        ) from None
    raise InputError(
        f"There is no file {printed}. A single word with an extension or a slash is "
        "read as a file name; to classify text, give at least two words."
    )


def _as_json(post: Post, outcome: Outcome) -> str:
    fields: dict[str, Any] = {"id": post.id}
    if isinstance(outcome, Classification):
        fields["label"] = outcome.label
        fields["scores"] = outcome.scores
        fields |= further_fields(outcome)
    else:
        fields["error"] = outcome.error
    return errors.json_line(fields)


@dataclass
class Shown:
    """Numbers of posts that were printed.

    unlabelled: those that fit none of the labels. foreign: those in another language.
    """

    posts: int = 0
    failures: int = 0
    unlabelled: int = 0
    foreign: int = 0


def _show_posts(
    outcomes: Iterable[tuple[Post, Outcome]],
    as_json: bool,
    languages: frozenset[str] = frozenset(),
) -> Shown:
    """Print posts as they are classified."""
    shown = Shown()
    for post, outcome in outcomes:
        shown.posts += 1
        if isinstance(outcome, PostError):
            shown.failures += 1
        elif outcome.label is None and is_in_another(outcome.language, languages):
            shown.foreign += 1
        elif outcome.label is None:
            shown.unlabelled += 1
        if as_json:
            line = _as_json(post, outcome)
        else:
            line = _post_line(post, outcome)
        typer.echo(line)
    return shown


def _post_line(post: Post, outcome: Outcome) -> str:
    """Return a post's best labels with their scores, or why it has none."""
    name = f"{post.id:<{ID_WIDTH}}"
    if isinstance(outcome, PostError):
        return printable(f"{name} failed: {outcome.error}")
    scores = islice(outcome.scores.items(), POST_LABELS)
    labels = [f"{label} {score:.2f}" for label, score in scores]
    best = ", ".join(labels)
    if outcome.label is None:
        best = f"{without_label(outcome)} ({best})"
    start = f"{name} {best:<48} "
    return with_title(printable(start), post)


def _show_text(classification: Classification) -> None:
    table = Table(
        "label",
        "score",
        "",
        box=None,
        header_style="dim",
    )
    scores = classification.scores
    highest = max(scores.values()) or 1.0
    for label, score in islice(scores.items(), TEXT_LABELS):
        share = max(0.0, score) / highest
        width = round(BAR_WIDTH * share)
        table.add_row(
            escape(printable(label)),
            f"{score:.3f}",
            "█" * width,
        )
    console = output_console()
    console.print(table)
    if classification.label is None:
        typer.echo(without_label(classification))
    weights = classification.weights[:12]
    origin = f"by {classification.model} ({weights}) on {classification.device}"
    typer.echo(printable(origin))
