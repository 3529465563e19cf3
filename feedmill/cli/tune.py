"""The `feedmill tune` command: measure batch sizes, precisions and each step of the ladder on a
file's posts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer import Option

from feedmill.cli.options import MODEL, File, FileFlags, JsonSummary, with_settings
from feedmill.console import Report, counted, notes_console, output_console, table
from feedmill.producers.files import FileReading
from feedmill.shared.errors import (
    InputError,
    UserError,
    explain_missing,
    json_line,
    printable,
)
from feedmill.shared.settings import Settings
from feedmill.tables import check_folder, check_output, check_page
from feedmill.tuning.sizes import ARRIVAL_SIZES, MAX_ARRIVAL_SIZE, MAX_SIZES

if TYPE_CHECKING:
    from feedmill.tuning.curve import Curve
    from feedmill.tuning.experiment import Findings
    from feedmill.tuning.trials import Unmeasured

#: Posts to read. A GPU's largest token budget holds some 5,000 posts.
DEFAULT_LIMIT = 10_000
#: Data types that --dtypes accepts.
DTYPES = ("float32", "bfloat16", "float16", "int8")


def parse_sizes(text: str) -> list[int]:
    """Parse sizes such as 5:40:5 (first, last, step), or 8,16,32. Raises UserError."""
    try:
        if ":" in text:
            first, last, step = map(int, text.split(":"))
            all_sizes = range(first, last + 1, step)
            # The first ones are enough to see that there are too many.
            sizes = list(all_sizes[: MAX_SIZES + 1])
        else:
            numbers = map(int, text.split(","))
            sizes = sorted(set(numbers))
    except ValueError:
        sizes = []
    is_count_valid = 1 <= len(sizes) <= MAX_SIZES
    if not is_count_valid or sizes[0] < 1 or sizes[-1] > MAX_ARRIVAL_SIZE:
        raise UserError(
            f"--sizes {printable(text):.80} are no sizes. Write FIRST:LAST:STEP such as 5:40:5, "
            f"or 8,16,32; from 1 to {MAX_ARRIVAL_SIZE:,}, at most {MAX_SIZES}."
        )
    return sizes


def parse_dtypes(text: str) -> list[str]:
    """Parse a list of data types. Raises UserError."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in DTYPES:
            dtypes = ",".join(DTYPES)
            raise UserError(
                f"--dtypes: {printable(name):.40} is not a data type. Give some of "
                f"{dtypes}."
            )
    return names


@dataclass(frozen=True)
class ExperimentFlags:
    """Flags of what to measure, and where to write it."""

    sizes: Annotated[
        str | None,
        Option(
            metavar="SIZES",
            help="Posts per batch in arrival order: FIRST:LAST:STEP or a,b,c (default: 5:40:5).",
        ),
    ] = None
    ladder: Annotated[
        bool,
        Option(
            "--ladder",
            help=("Measure each step from the transformers pipeline to the queue."),
        ),
    ] = False
    dtypes: Annotated[
        str | None,
        Option(
            metavar="TYPES",
            help=(
                "Compare data types: speed, memory, scores, labels, accuracy; such as "
                "float32,bfloat16,int8."
            ),
        ),
    ] = None
    out: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help=("Write all figures to this .csv, .tsv, .jsonl or .parquet file."),
        ),
    ] = None
    page: Annotated[
        Path | None, Option(metavar="FILE", help="Write an HTML page with curves.")
    ] = None
    profile: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help=(
                "Profile ten micro-batches: the largest operations, and a trace for a browser."
            ),
        ),
    ] = None


@with_settings(*MODEL, plain_logs=True)
def tune(
    settings: Settings,
    file: File,
    columns: FileFlags,
    experiment: ExperimentFlags,
    limit: Annotated[
        int, Option(help="Maximum number of posts to read.", min=1)
    ] = DEFAULT_LIMIT,
    as_json: JsonSummary = False,
) -> None:
    """Token budgets in length order and batches in arrival order, each with its time, rate,
    padding and memory.

    Stores the best token budget if the file has enough posts; workers on this machine with the
    same model, device and settings then start with it.
    """
    sizes: Sequence[int] = ARRIVAL_SIZES
    if experiment.sizes is not None:
        sizes = parse_sizes(experiment.sizes)
    dtypes: Sequence[str] = ()
    if experiment.dtypes is not None:
        dtypes = parse_dtypes(experiment.dtypes)
    _check_outputs(experiment, file, settings)
    notes = notes_console()
    reading = FileReading(
        file,
        notes,
        columns=columns.columns(),
        encoding=columns.encoding,
        text_only=True,
    )
    first_posts = islice(reading.posts(), limit)
    posts = list(first_posts)
    if not posts:
        reading.end()
        name = printable(file)
        raise InputError(f"{name} contains no valid post. Give another file.")
    with explain_missing("Measuring a model", "worker"):
        # Imported late: need torch, which only workers have.
        from feedmill.tuning import experiment as experiments  # noqa: PLC0415
        from feedmill.tuning import output  # noqa: PLC0415
    plan = experiments.Plan(
        sizes,
        experiment.ladder,
        dtypes,
        experiment.profile,
    )

    def keep(findings: "Findings") -> None:
        show(output_console(), findings)
        _say_what_is_stored(findings, settings)
        if as_json:
            figures = output.as_json(findings)
            typer.echo(json_line(figures))
        _write_outputs(findings, experiment)

    report = Report(notes)
    findings = experiments.run(
        settings,
        posts,
        plan,
        notes,
        report,
        keep,
    )
    keep(findings)
    reading.end()
    has_malformed = reading.skipped > reading.without_text
    raise typer.Exit(1 if has_malformed else 0)


def _check_outputs(experiment: ExperimentFlags, file: str, settings: Settings) -> None:
    """Check before the work that the table, the page and the profiles can be written.

    file: the posts, which must stay. Raises UserError.
    """
    labels_file = settings.labels_file
    if experiment.out is not None:
        check_output(
            Path(experiment.out),
            source=file,
            labels_file=labels_file,
        )
    if experiment.page is not None:
        check_page(
            experiment.page,
            source=file,
            table=experiment.out,
            labels_file=labels_file,
            folder=experiment.profile,
        )
    if experiment.profile is not None:
        check_folder(experiment.profile, experiment.out, experiment.page)


def _write_outputs(findings: "Findings", experiment: ExperimentFlags) -> None:
    """Write the table and the page; the page also if the table fails. Raises UserError."""
    from feedmill.tuning import output  # noqa: PLC0415 - see `tune`

    try:
        if experiment.out is not None:
            output.write_table(findings, experiment.out)
    finally:
        if experiment.page is not None:
            output.write_page(findings, experiment.page)


def show(console: Console, findings: "Findings") -> None:
    """Print the tables, and a sentence for what each shows."""
    from feedmill.tuning import tables  # noqa: PLC0415 - see `tune`

    model = printable(findings.model)
    batches = counted(findings.lanes, "batch", "batches")
    typer.echo(
        f"{model} on {findings.device}: {findings.sample_posts:,} of {findings.posts:,} "
        f"posts, {findings.tokens_per_post:.0f} tokens each, {batches} at a time."
    )
    _show_curve(
        console, "Micro-batches by token budget, sorted by length", findings.budgets
    )
    _show_curve(console, "Batches in arrival order", findings.arrival)
    if findings.is_packed:
        typer.echo(
            "Batches are packed: nothing is computed for padding. Its share is that of "
            "padded batches."
        )
    ladder = findings.ladder
    if ladder is not None:
        typer.echo("\nFrom the pipeline to the queue")
        rungs = [tables.rung_cells(ladder, rung) for rung in ladder.rungs]
        console.print(table(tables.LADDER_COLUMNS, rungs))
        _say_unmeasured(ladder.unmeasured)
    if findings.precisions or findings.unmeasured_precisions:
        typer.echo("\nData types, compared with float32")
        precisions = map(tables.precision_cells, findings.precisions)
        console.print(table(tables.PRECISION_COLUMNS, precisions))
        _say_unmeasured(findings.unmeasured_precisions)
    if findings.operations:
        typer.echo("\nLargest operations of ten micro-batches")
        operations = map(tables.operation_cells, findings.operations)
        console.print(table(tables.OPERATION_COLUMNS, operations))


def _show_curve(console: Console, title: str, curve: "Curve") -> None:
    from feedmill.tuning import tables  # noqa: PLC0415 - see `tune`

    typer.echo(f"\n{title}")
    if curve.trials:
        trials = map(tables.curve_cells, curve.trials)
        console.print(table(tables.CURVE_COLUMNS, trials))
    _say_unmeasured(curve.unmeasured)
    for sentence in curve.sentences():
        typer.echo(sentence)


def _say_unmeasured(unmeasured: "Sequence[Unmeasured]") -> None:
    for trial in unmeasured:
        what = printable(trial.what)
        reason = printable(trial.reason)
        typer.echo(f"Not measured: {what}: {reason}")


def _say_what_is_stored(findings: "Findings", settings: Settings) -> None:
    if findings.stored:
        knee = findings.budgets.knee.size.number
        typer.echo(
            f"\nWorkers of this model, device and settings now start with token budget {knee}."
        )
    elif findings.not_stored_because:
        typer.echo(f"\nNo budget is stored: {findings.not_stored_because}.")
    if settings.token_budget:
        typer.echo(
            f"FEEDMILL_TOKEN_BUDGET is set, so workers use that budget: {settings.token_budget}."
        )
