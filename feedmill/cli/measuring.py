"""The `feedmill tune` and `feedmill evaluate` commands: measure a model's speed and accuracy on a file's posts."""

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Annotated

import typer
from typer import Option

from feedmill.cli.options import MODEL, File, FileFlags, JsonSummary, Limit, with_settings
from feedmill.console import Report, notes_console, output_console
from feedmill.local_model import load_model
from feedmill.producers.files import FileReading
from feedmill.shared.errors import InputError, ModelError, explain_missing, explain_refusals, json_line, printable
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.settings import Settings

#: Topics that an error message names at most, the most frequent ones.
MAX_TOPICS_NAMED = 10


@with_settings(*MODEL, plain_logs=True)
def tune(
    settings: Settings,
    file: File,
    columns: FileFlags,
    limit: Annotated[int, Option(help="Maximum number of posts to read.", min=1)] = 200,
    as_json: JsonSummary = False,
) -> None:
    """Stores the best token budget; workers on this machine with the same model, device and settings then start with
    it.
    """
    notes = notes_console()
    reading = FileReading(file, notes, columns=columns.columns(), encoding=columns.encoding, text_only=True)
    texts = [post.text for post in _first(reading, file, limit)]
    loaded = load_model(settings)
    # Imported late: needs torch, which only workers have.
    from feedmill.evaluation import show_rates  # noqa: PLC0415
    from feedmill.workers.pipeline.calibration import measure, remember  # noqa: PLC0415

    with explain_refusals(settings.model), notes.status(f"measuring {len(texts):,} posts"):
        label_set = loaded.label_set(ClassifyOptions())
        tokens = sum(row.length for rows in loaded.prepare(texts, label_set) for row in rows)
        rates = measure(loaded, settings, lambda chance: chance.choice(texts))
    if not any(rates.values()):
        raise ModelError(f"{loaded.device.name} has too little memory for {loaded.weights.name}. Use a smaller model, "
                         "fewer labels, or half precision (FEEDMILL_DTYPE).")  # fmt: skip
    typer.echo(f"{loaded.weights.name} on {loaded.device}: {len(texts):,} posts, {tokens:,} tokens")
    found = show_rates(output_console(), rates, tokens / len(texts), loaded.device.lanes)
    if stored := remember(loaded, settings, rates):
        typer.echo(f"Workers of this model, device and settings now start with token budget {found['knee']}.")
    if settings.token_budget:
        typer.echo(f"FEEDMILL_TOKEN_BUDGET is set, so workers use that budget: {settings.token_budget}.")
    if as_json:
        typer.echo(json_line({"posts": len(texts), "token_budget": found, "stored": stored}))
    _end(reading)


@with_settings(*(name for name in MODEL if name != "model"), plain_logs=True)
def evaluate(
    settings: Settings,
    file: File,
    columns: FileFlags,
    models: Annotated[
        list[str] | None, Option("--model", help="Model to evaluate, as for classify; repeat to compare several.")
    ] = None,
    limit: Limit = None,
    as_json: JsonSummary = False,
) -> None:
    """Prints precision, recall, F1 and the most frequent mistake per label, accuracy and macro-F1. Give --model several
    times to compare models. Exits 1 if a post failed or a record was malformed.
    """
    each = [settings.model_copy(update={"model": model}) for model in models or (settings.model,)]
    notes = notes_console()
    reading = FileReading(file, notes, columns=columns.columns(), encoding=columns.encoding, shows_ids=False)
    posts = _first(reading, file, limit)
    if not any(post.topic for post in posts):
        raise InputError("No post has a topic. Add the true labels in the field `topic`.")
    with explain_missing("Evaluating", "worker"):
        # Imported late: need torch, which only workers have.
        from feedmill import evaluation  # noqa: PLC0415
        from feedmill.workers.models.classifiers.registry import usable_settings  # noqa: PLC0415
    if compared := len(each) > 1:
        each = [usable_settings(settings) for settings in each]
    loaded = [load_model(settings) for settings in each]
    known = _known(posts, [model.label_set(ClassifyOptions()).labels for model in loaded])
    found = [evaluation.measure(known, model, own, Report(notes)) for model, own in zip(loaded, each, strict=True)]
    left_out = len(posts) - len(known)
    for one in found:
        one.summary["left_out"] += left_out
    summaries = {model.weights.name: one.summary for model, one in zip(loaded, found, strict=True)}
    if compared:
        best_first = sorted(summaries.items(), key=lambda one: one[1]["accuracy"], reverse=True)
        output_console().print(evaluation.models_table("model", best_first))
        typer.echo(f"{len(known):,} posts.")
    else:
        evaluation.show(output_console(), found[0].summary)
    if left_out:
        typer.echo(f"Excluded: {left_out:,} posts whose topic is missing or not a label{' of every model' * compared}.")
    if failures := [] if compared else found[0].failures:
        typer.echo(f"Excluded: {len(failures):,} posts that could not be classified; the first: {failures[0]}")
    if as_json:
        typer.echo(
            json_line({"posts": len(known), "models": summaries} if compared else next(iter(summaries.values())))
        )
    _end(reading, bool(failures))


def _known(posts: Sequence[Post], label_sets: Sequence[Sequence[str]]) -> list[tuple[Post, str]]:
    """Return the posts whose topic is a label of every set, each with that label. Raises InputError without any."""
    from feedmill.evaluation import matching_label  # noqa: PLC0415 - needs numpy, which comes with torch

    labels = [label for label in label_sets[0] if all(label in one for one in label_sets)]
    known = [(post, truth) for post in posts if (truth := matching_label(post.topic, label_sets[0])) in labels]
    if not known:
        topics = Counter(post.topic for post in posts if post.topic)
        named = ", ".join(printable(topic) for topic, _ in topics.most_common(MAX_TOPICS_NAMED))
        raise InputError(
            f"No post's topic is one of the labels (topics: {named}; labels: {', '.join(labels)}). Pass the topics as "
            "--labels."
        )
    return known


def _first(reading: FileReading, file: str, limit: int | None) -> list[Post]:
    """Return the first `limit` posts. Raises InputError if the file has none."""
    posts = list(islice(reading.posts(), limit))
    if not posts:
        reading.end()
        raise InputError(f"{file} contains no valid post. Give another file.")
    return posts


def _end(reading: FileReading, failed: bool = False) -> None:
    """Report skipped records and exit, with status 1 if a post failed or a record was malformed."""
    reading.end()
    raise typer.Exit(1 if failed or reading.skipped > reading.without_text else 0)
