"""The `feedmill evaluate` command: measure models' accuracy on a file's posts."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Option

from feedmill.cli.accuracy import confusion_lines, models_table, show
from feedmill.cli.options import (
    MODEL,
    File,
    FileFlags,
    ForExcel,
    JsonSummary,
    Limit,
    NoneOption,
    setting_help,
    with_settings,
)
from feedmill.console import Report, counted, notes_console, output_console
from feedmill.evaluation.known import read_posts
from feedmill.local_model import candidates
from feedmill.producers.files import FileReading
from feedmill.shared.errors import (
    UserError,
    explain_missing,
    json_line,
    printable,
)
from feedmill.shared.settings import Settings
from feedmill.tables import ENDINGS, check_output, check_page, save_page

if TYPE_CHECKING:
    from feedmill.evaluation.measure import Evaluation


def _table(what: str) -> Any:
    """Return an option for a table of posts."""
    return Option(metavar="FILE", help=f"{what}, to this file ({ENDINGS}).")


@with_settings(
    *(name for name in MODEL if name not in ("model", "dtype")), plain_logs=True
)
def evaluate(
    settings: Settings,
    file: File,
    columns: FileFlags,
    models: Annotated[
        list[str] | None,
        Option(
            "--model",
            help=("Model to evaluate, as for classify; repeat to compare several."),
        ),
    ] = None,
    dtypes: Annotated[
        list[str] | None,
        Option("--dtype", help=(f"{setting_help('dtype')} Repeat to compare several.")),
    ] = None,
    none: NoneOption = None,
    limit: Limit = None,
    out: Annotated[str | None, _table("Write each post's prediction")] = None,
    wrong: Annotated[
        str | None,
        _table(
            "Write the posts with a wrong label, the most confident mistakes first, each with the "
            "nearest training post"
        ),
    ] = None,
    unsure: Annotated[
        str | None, _table("Write all posts, the least certain first")
    ] = None,
    differ: Annotated[
        str | None,
        _table("Write the posts to which the models give different labels"),
    ] = None,
    page: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help=(
                "Write a page with the confusion table, the calibration and the mistakes, which "
                "ends in .html."
            ),
        ),
    ] = None,
    seen: Annotated[
        bool,
        Option(
            "--seen",
            help=(
                "Count the posts that a model has learnt from, too, although it remembers them."
            ),
        ),
    ] = False,
    excel: ForExcel = False,
    as_json: JsonSummary = False,
) -> None:
    """Prints precision, recall, F1 and the most frequent mistake per label, the confusion matrix
    of up to 20 labels, accuracy and macro-F1. Give --model or --dtype several times to compare.
    Posts that a model has learnt from are measured apart. With --none, posts of other topics
    count, too: they fit none of the labels. Exits 1 if a post failed or a record was malformed.
    """
    names = {"out": out, "wrong": wrong, "unsure": unsure, "differ": differ}
    outputs = {option: path for option, path in names.items() if path is not None}
    _check_outputs(outputs, file, excel, settings.labels_file)
    if page is not None:
        check_page(Path(page), source=file, labels_file=settings.labels_file)
    if none is not None:
        settings = settings.model_copy(update={"none": none})
    candidate_settings = candidates(
        settings, models or [settings.model], dtypes or [settings.dtype]
    )
    if differ is not None and len(candidate_settings) < 2:
        raise UserError("--differ compares models: repeat --model, or --dtype.")
    notes = notes_console()
    posts, reading = read_posts(file, columns, limit, notes)
    with explain_missing("Evaluating", "worker"):
        from feedmill.evaluation.measure import evaluate_models  # noqa: PLC0415 - needs torch
    evaluation = evaluate_models(posts, candidate_settings, Report(notes), seen)
    _show(evaluation)
    if as_json:
        typer.echo(json_line(_summary(evaluation)))
    # Last, because a full disk must not cost the figures.
    _write(evaluation, outputs, excel, settings, notes)
    if page is not None:
        _write_page(evaluation, page, notes)
    _end(reading, bool(evaluation.failures))


def _check_outputs(
    outputs: Mapping[str, str], file: str, excel: bool, labels_file: Path | None
) -> None:
    """Check the tables to write. Raises UserError."""
    if excel and not outputs:
        raise UserError("--excel needs --out, --wrong, --unsure or --differ.")
    if len(set(outputs.values())) < len(outputs):
        raise UserError("Give each table a file of its own.")
    for out in outputs.values():
        check_output(
            Path(out),
            source=file,
            for_excel=excel,
            labels_file=labels_file,
        )


def _write(
    evaluation: "Evaluation",
    outputs: Mapping[str, str],
    excel: bool,
    settings: Settings,
    notes: Console,
) -> None:
    """Write the tables of posts. Raises UserError."""
    # Need torch, which only workers have.
    from feedmill.evaluation.posts import write  # noqa: PLC0415

    for option, path in outputs.items():
        count = write(evaluation, option, path, excel, settings, notes)
        noun = "prediction" if option == "out" else "row"
        written = printable(f"{counted(count, noun)} written to {path}")
        notes.print(written, markup=False)


def _write_page(evaluation: "Evaluation", page: str, notes: Console) -> None:
    """Write the page. Raises UserError."""
    # Needs torch, which only workers have.
    from feedmill.evaluation import page as evaluation_page  # noqa: PLC0415

    save_page(Path(page), evaluation_page.page(evaluation))
    notes.print(printable(f"Page written to {page}"), markup=False)


def _show(evaluation: "Evaluation") -> None:
    """Print the metrics of one model, or a table of several, and what was excluded."""
    is_comparison = len(evaluation.models) > 1
    summaries = evaluation.summaries
    if is_comparison:
        best_first = sorted(
            summaries.items(), key=lambda item: item[1]["accuracy"], reverse=True
        )
        output_console().print(models_table("model", best_first))
        typer.echo(f"{len(evaluation.counted_places):,} posts.")
    else:
        (summary,) = summaries.values()
        show(output_console(), summary)
        typer.echo("\n".join(confusion_lines(summary)))
    uses_none = "coverage" in next(iter(summaries.values()))
    if evaluation.left_out and uses_none:
        count = counted(evaluation.left_out, "post")
        typer.echo(
            f"Excluded: {count} without a topic. To count them as posts that fit no label, write "
            "a topic that is none of the labels, such as none."
        )
    elif evaluation.left_out:
        of_models = " of every model" if is_comparison else ""
        typer.echo(
            f"Excluded: {evaluation.left_out:,} posts whose topic is missing or not a "
            f"label{of_models}."
        )
    _show_seen(evaluation)
    failures = evaluation.failures
    if failures:
        typer.echo(
            f"Excluded: {len(failures):,} posts that could not be classified; the first: "
            f"{failures[0]}"
        )


def _show_seen(evaluation: "Evaluation") -> None:
    """Print how many posts a model has learnt from, and its accuracy on them."""
    if not evaluation.seen:
        return
    count = counted(len(evaluation.seen), "post")
    if evaluation.counts_seen:
        typer.echo(
            f"A model has learnt from {count} of these: it remembers them, so these figures are "
            "too high for others."
        )
        return
    typer.echo(f"Excluded: {count} that a model has learnt from. --seen counts them.")
    for model in evaluation.models:
        learnt_posts = model.measured.summary.get("seen")
        if learnt_posts:
            accuracy = learnt_posts["accuracy"]
            name = printable(model.name)
            typer.echo(f"Accuracy on them: {accuracy:.3f} ({name}).")


def _summary(evaluation: "Evaluation") -> dict[str, Any]:
    """Return the metrics for JSON."""
    summaries = evaluation.summaries
    if len(evaluation.models) > 1:
        return {"posts": len(evaluation.counted_places), "models": summaries}
    (summary,) = summaries.values()
    return summary


def _end(reading: FileReading, failed: bool = False) -> None:
    """Report skipped records and exit, with status 1 if a post failed or a record was
    malformed.
    """
    reading.end()
    raise typer.Exit(1 if failed or reading.skipped > reading.without_text else 0)
