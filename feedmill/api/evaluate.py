"""Evaluate models from Python: `feedmill.evaluate`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from feedmill.api.request import Labels, read_options
from feedmill.console import Report, notes_console
from feedmill.evaluation.known import read_posts
from feedmill.local_model import candidates
from feedmill.producers.records import FileOptions
from feedmill.shared.errors import UserError, explain_missing
from feedmill.shared.settings import load_arguments
from feedmill.tables import check_output


def evaluate(
    source: str | Path,
    labels: Labels | None = None,
    *,
    models: Sequence[str | Path] = (),
    dtypes: Sequence[str] = (),
    template: str | None = None,
    classifier: str | None = None,
    engine: str | None = None,
    device: str | None = None,
    limit: int | None = None,
    seen: bool = False,
    out: str | Path | None = None,
    wrong: str | Path | None = None,
    unsure: str | Path | None = None,
    differ: str | Path | None = None,
    id_column: str | None = None,
    title_column: str | None = None,
    body_column: str | None = None,
    label_column: str | None = None,
    encoding: str | None = None,
    progress: bool = False,
) -> dict[str, dict[str, Any]]:
    """Measure the accuracy, calibration and throughput of models on posts with known labels.

    Needs `pip install 'feedmill[worker]'`.

    Args:
        source: A file of posts with their true labels, in a column `topic`, `label` or `category`.
        labels: Labels to choose from, as for `feedmill.classify`. Posts with another topic are
            left out.
        models: Folders or names of models. Default: FEEDMILL_MODEL, else the included one.
        dtypes: Data types of each model. Default: FEEDMILL_DTYPE.
        template, classifier, engine, device: As for `feedmill classify`.
        limit: Maximum number of posts to read.
        seen: Count posts that a model has learnt from, too. By default they are measured apart:
            `seen` of the metrics has their number and the accuracy on them.
        out: Write the prediction of each post by each model to this file: .csv, .tsv, .jsonl,
            .parquet or .xlsx.
        wrong: Write the posts with a wrong label to this file, the most confident mistakes first,
            each with the nearest training post.
        unsure: Write all posts to this file, the least certain first.
        differ: Write the posts to which the models give different labels to this file.
        id_column, title_column, body_column, label_column, encoding: How to read the file.
        progress: Print notes and the progress to standard error.

    Returns:
        The metrics of each model, by its name: `accuracy`, `macro_f1`, `posts`, `labels`,
        `confusion`, `calibration`, `posts_per_s`, `left_out` and others
        (docs/reference/json.md).

    Raises:
        feedmill.UserError: For an invalid argument, a missing package, a model that cannot be
            loaded, or a file without posts or without true labels.

    Example:
        >>> import feedmill
        >>> measured = feedmill.evaluate("test.csv", ["praise", "complaint"], models=["model"])
        >>> measured["model"]["accuracy"]
        0.91
    """
    if isinstance(models, str | Path) or isinstance(dtypes, str):
        raise UserError("models and dtypes must be lists, such as models=['folder'].")
    if differ is not None and len(models) < 2 and len(dtypes) < 2:
        raise UserError("differ compares models: give several models, or data types.")
    if limit is not None and (isinstance(limit, bool) or limit < 1):
        raise UserError(f"limit must be a whole number above 0, not {limit!r:.80}.")
    options = read_options(labels, template, False)
    settings = load_arguments(classifier=classifier, engine=engine, device=device)
    changes: dict[str, Any] = {}
    if options.labels:
        changes["labels"] = options.labels
    if template:
        changes["template"] = template
    settings = settings.model_copy(update=changes)
    name = str(source)
    named_outputs = {"out": out, "wrong": wrong, "unsure": unsure, "differ": differ}
    outputs = {
        option: str(path) for option, path in named_outputs.items() if path is not None
    }
    for path in outputs.values():
        check_output(Path(path), source=name)
    candidate_settings = candidates(
        settings,
        [str(model) for model in models] or [settings.model],
        dtypes or [settings.dtype],
    )
    file = FileOptions(
        id_column=id_column,
        title_column=title_column,
        body_column=body_column,
        encoding=encoding,
        label_column=label_column,
    )
    notes = notes_console() if progress else Console(quiet=True)
    posts, reading = read_posts(name, file, limit, notes)
    reading.end()
    with explain_missing("Evaluating", "worker"):
        # Need torch, which only workers have.
        from feedmill.evaluation.measure import evaluate_models  # noqa: PLC0415
        from feedmill.evaluation.posts import write  # noqa: PLC0415
    evaluation = evaluate_models(posts, candidate_settings, Report(notes), seen)
    for selection, path in outputs.items():
        write(evaluation, selection, path, False, settings, notes)
    return evaluation.summaries
