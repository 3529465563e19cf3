"""Measure a model from Python: `feedmill.tune`."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from feedmill.api.request import Request, make_frame, read_options
from feedmill.console import Report, notes_console
from feedmill.shared.errors import InputError, explain_missing
from feedmill.shared.messages import Post
from feedmill.shared.settings import load_arguments
from feedmill.tuning.sizes import ARRIVAL_SIZES


def tune(
    items: Any,
    labels: Any = None,
    *,
    sizes: Iterable[int] = ARRIVAL_SIZES,
    ladder: bool = False,
    dtypes: Sequence[str] = (),
    title: Any = None,
    body: Any = None,
    template: str | None = None,
    model: str | Path | None = None,
    device: str | None = None,
    dtype: str | None = None,
    engine: str | None = None,
    progress: bool = False,
) -> Any:
    """Measure a model on your items: batch sizes, data types, and each step from a pipeline to the
    queue.

    Stores the best token budget if there are enough items; workers on this machine with the same
    model, device and settings then start with it. Needs `pip install 'feedmill[worker]'` and
    pandas or polars.

    Args:
        items: Texts, dictionaries or a DataFrame, as for `feedmill.classify`.
        labels: Labels, as for `feedmill.classify`.
        sizes: Posts per batch in arrival order.
        ladder: Measure transformers' pipeline, a forward pass by hand, Feedmill offline and
            through the queue; the last needs a Redis server, which `pip install 'feedmill[demo]'`
            brings.
        dtypes: Data types to compare with float32: `float32`, `bfloat16`, `float16`, `int8`.
        title, body, template, model, device, dtype, engine: As for `feedmill.classify` and
            `feedmill.Classifier`.
        progress: Print the progress to standard error.

    Returns:
        A pandas DataFrame, or one of polars if only that is installed, with a row for each
        measurement and for each that was not possible, with the `reason`. The column `experiment`
        is `budget` (micro-batches sorted by length; `size` in tokens), `arrival` (`size` in
        posts), `ladder` or `dtype`. Seconds, posts and tokens per second, and megabytes; missing
        where a figure does not apply.

    Raises:
        feedmill.UserError: For an invalid argument, a missing package, or a model that cannot be
            loaded.

    Example:
        >>> import feedmill
        >>> figures = feedmill.tune(frame, labels=["praise", "complaint"])
        >>> figures.query("experiment == 'arrival'").plot("size", "posts_per_s")
    """
    options = read_options(labels, template, False)
    settings = load_arguments(
        model=None if model is None else str(model),
        device=device,
        dtype=dtype,
        engine=engine,
    )
    own_settings = {
        "labels": options.labels or settings.labels,
        "template": template or settings.template,
    }
    settings = settings.model_copy(update=own_settings)
    request = Request(items, options, names=(None, title, body))
    posts = [item.post for item in request.items if isinstance(item.post, Post)]
    if not posts:
        raise InputError(
            "No item has a text. Give texts, dictionaries with title and body, or a DataFrame."
        )
    with explain_missing("Measuring a model", "worker"):
        # Need torch, which only workers have.
        from feedmill.tuning import experiment, output  # noqa: PLC0415

    plan = experiment.Plan(sizes=tuple(sizes), ladder=ladder, dtypes=tuple(dtypes))
    notes = notes_console()
    report = Report(notes if progress else None)
    findings = experiment.run(settings, posts, plan, notes, report)
    columns = output.columns(findings.rows())
    return make_frame(columns)
