"""The `feedmill train` command: fine-tune a model, or fit a head on embeddings.

Beside the weights are README.md for people, and training.json for programs. Neither quotes a post, because a purge of
the training posts does not reach them.
"""

import json
import platform
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer
from jinja2 import Environment, StrictUndefined

from feedmill import __version__
from feedmill.cli.options import AsJson, FileFlags, excludes, with_settings
from feedmill.console import Report, notes_console, output_console, span
from feedmill.local_model import load_model
from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import (
    DeviceFull,
    DeviceLost,
    ModelError,
    UserError,
    clause,
    explain_missing,
    explain_unwritable,
    json_line,
    printable,
)
from feedmill.shared.settings import Settings
from feedmill.shared.topics import DESCRIBED_TOPICS
from feedmill.training.data import CHECKPOINTS, OF_FINE_TUNING, Dataset, TrainOptions, collect, make_dataset

#: Packages whose versions are recorded.
LIBRARIES = ("torch", "transformers", "tokenizers")
#: Template of the model card, README.md.
CARD = Path(__file__).with_name("model_card.jinja")


@excludes("--head", *OF_FINE_TUNING)
@with_settings("device", "redis_url", plain_logs=True)
def train(
    settings: Settings,
    options: TrainOptions,
    file: FileFlags,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a classifier on labelled posts, or fit a head on embeddings (--head).

    Switch running workers to the trained model with `feedmill deploy OUT`, or start one with `feedmill worker --model
    OUT`. See docs/training.md.
    """
    folder = Path(options.out).expanduser().absolute()
    try:
        record = _train(replace(options, out=str(folder)), file, settings)
    except (DeviceFull, DeviceLost) as error:
        raise ModelError(
            f"The device failed: {clause(error)}. If it is out of memory, set a smaller --batch-size and a larger "
            "--accumulation, or lower --max-tokens; else run the same command again to continue."
        ) from error
    finally:
        with suppress(OSError):  # only an empty folder: a model and an interrupted training stay
            folder.rmdir()
    if as_json:
        typer.echo(json_line({"folder": str(folder), **record}))
    else:
        show_trained(record, str(folder))


def _train(options: TrainOptions, file: FileFlags, settings: Settings) -> dict[str, Any]:
    """Collect the posts, train, write the model, and return its record."""
    notes, folder = notes_console(), Path(options.out)
    held = make_folder(folder)
    if held and (options.head or CHECKPOINTS not in held):
        raise UserError(f"{folder} is not empty. Choose a new or empty folder.")
    train = _trainer(options)
    collected = collect(options, file, settings, notes)
    dataset = make_dataset(collected.examples, options)
    report = Report(notes)
    for line in dataset.summary():
        report.print(line)
    try:
        trained = train(dataset, options, settings, report)
        trained.save(folder)
        tested = _tested(options, dataset, settings, report)
    finally:
        report.stop()
    record = {
        "trained_at": time.time(),
        "options": asdict(options) | asdict(file),
        "labels": list(dataset.labels),
        "train": len(dataset.train),
        "test": len(dataset.test),
        "train_by_label": dataset.counts,
        "posts": collected.counts | {"left_out": dataset.left_out},
        **trained.record,
        **tested,
        "versions": {"feedmill": __version__, "python": platform.python_version()}
        | {name: version(name) for name in LIBRARIES},
    }
    _write(folder, options, record)
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)  # until here, the same command continues
    return record


def _trainer(options: TrainOptions) -> Callable[[Dataset, TrainOptions, Settings, Report], Any]:
    """Return the function that trains. Raises UserError if a package is missing."""
    # Imported late: needs torch, which only workers have and which loads slowly.
    with explain_missing("Training", "worker" if options.head else "worker,train"):
        if options.head:
            from feedmill.training.head import train_head  # noqa: PLC0415

            return train_head
        import accelerate  # noqa: F401, PLC0415 - the Trainer needs it

        from feedmill.training.finetune import Training  # noqa: PLC0415
    return lambda *given: Training(*given).run()


def _write(folder: Path, options: TrainOptions, record: Mapping[str, Any]) -> None:
    """Write the record of a training, and its model card. Raises OSError."""
    content = json.dumps(record, ensure_ascii=False, indent=1) + "\n"
    for name, text in (("README.md", _card(folder, options, record)), ("training.json", content)):
        with replacing(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _card(folder: Path, options: TrainOptions, record: Mapping[str, Any]) -> str:
    """Return the model card of a training with this record, in Markdown."""
    templates = Environment(  # noqa: S701 - Markdown, whose values are made printable
        undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True,
        finalize=lambda value: printable(value) if isinstance(value, str) else value,
    )  # fmt: skip
    templates.filters["number"] = "{:,}".format
    card = templates.from_string(CARD.read_text("utf-8"))
    return card.render(record=record, posts=record["posts"], options=options, name=folder.name)


def make_folder(folder: Path) -> set[str]:
    """Create a folder, unless it exists, and return the names of what it contains. Raises UserError."""
    with explain_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return {path.name for path in folder.iterdir()}


def _tested(options: TrainOptions, dataset: Dataset, settings: Settings, report: Report) -> dict[str, Any]:
    """Evaluate the trained model and its untrained base on the test posts, as a worker would classify them."""
    # Imported late: needs torch, which only workers have.
    from feedmill.evaluation import measure, usable_settings  # noqa: PLC0415
    from feedmill.workers.models.classifiers.registry import WITH_FIXED_LABELS, kind_of  # noqa: PLC0415

    known = [(example.post, example.label) for example in dataset.test]

    def summary(what: str, changes: dict[str, Any]) -> dict[str, Any]:
        report.phase(f"loading {what} and measuring its token budget")
        chosen = usable_settings(settings.model_copy(update=changes))
        return measure(known, load_model(chosen), chosen, report).summary

    tested: dict[str, Any] = {"metrics": None, "zero_shot": None}
    if not known:
        return tested
    own = {"model": options.out, "classifier": "head" if options.head else "sequence", "revision": None}
    tested["metrics"] = summary("the trained model", own)
    base, kind = {"model": options.base, "classifier": "auto"}, ""
    with suppress(UserError):  # not a classifier without training
        kind = kind_of(settings.model_copy(update=base))
    if options.compare and kind and kind not in WITH_FIXED_LABELS:
        described = settings.labels or (DESCRIBED_TOPICS if kind == "similarity" else {})
        labels = {label: described.get(label, (label,)) for label in dataset.labels}
        tested["zero_shot"] = summary("its base", base | {"labels": labels})
    return tested


def show_trained(record: Mapping[str, Any], folder: str) -> None:
    """Print the training time and the metrics of the finished model, and what to do next."""
    typer.echo(f"Trained in {span(record['seconds'])}, {record['samples_per_s']:.1f} posts/s")
    if losses := [point["loss"] for point in record["curve"] if "loss" in point]:
        typer.echo(f"loss {losses[0]:.3g} → {losses[-1]:.3g}")
    tested, zero_shot = record["metrics"], record["zero_shot"]
    if tested:
        from feedmill.evaluation import models_table  # noqa: PLC0415 - needs torch, which only workers have

        output_console().print(models_table("", ((folder, tested), ("its base, zero-shot", zero_shot))))
    if not (tested and zero_shot and tested["accuracy"] <= zero_shot["accuracy"]):
        advise(folder)
        return
    helps = "more posts (`feedmill label` asks for the most useful ones), or all weights, without --head"
    typer.echo(
        f"Do not deploy this model: it is no more accurate ({tested['accuracy']:.3f}) than its base zero-shot "
        f"({zero_shot['accuracy']:.3f}) on the same {tested['posts']:,} posts. What helps: "
        + (helps if record["options"]["head"] else "more posts or --epochs")
    )


def advise(folder: str) -> None:
    """Print how to serve a model."""
    where = printable(shlex.quote(folder))
    typer.echo(f"Next, switch running workers to the model:\n  feedmill deploy {where}")
    typer.echo(f"Or start a worker with it:\n  feedmill worker --model {where}")
