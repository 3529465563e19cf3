"""The `feedmill train` command: fine-tune a model, or fit a head on embeddings."""

import json
import os
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from feedmill.cli.option_groups import with_settings
from feedmill.cli.options import AsJson
from feedmill.cli.terminal import make_folder
from feedmill.console import notes_console, output_console
from feedmill.local_model import load_model
from feedmill.shared.errors import UserError, json_line
from feedmill.shared.settings import Settings
from feedmill.shared.topics import DESCRIBED_TOPICS
from feedmill.workers.training.options import BEGUN, CHECKPOINTS, TrainOptions

if TYPE_CHECKING:
    from feedmill.training.report import TrainingReport
    from feedmill.workers.training.examples import Dataset

app = typer.Typer()

#: Packages that a training imports, and the extras that bring them: of a head, and of all weights.
PACKAGES_OF_A_HEAD = (("torch", "transformers"), "worker")
PACKAGES = (("torch", "transformers", "accelerate"), "worker,train")


@app.command()
@with_settings("device", "redis_url", plain_logs=True)
def train(
    settings: Settings,
    options: TrainOptions,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a classifier on labelled posts, or fit a head on embeddings (--head).

    Switch running workers to the trained model with `feedmill deploy OUT`, or start one with `feedmill worker --model
    OUT`. See docs/training.md.
    """
    packages, extras = PACKAGES_OF_A_HEAD if options.head else PACKAGES
    for package in packages:
        if find_spec(package) is None:
            raise UserError(f"Training requires the package {package}: run `pip install 'feedmill[{extras}]'`.")
    try:
        _train(options, settings, as_json)
    except UserError:
        with suppress(OSError):  # a model and an interrupted training stay
            Path(options.out).expanduser().rmdir()
        raise


def _train(options: TrainOptions, settings: Settings, as_json: bool) -> None:
    """Collect the posts, train, and write the model, and its test results. Only rank 0 writes."""
    first = os.environ.get("RANK", "0") == "0"  # torchrun numbers its processes
    notes = notes_console(quiet=not first)
    folder = Path(options.out).expanduser().absolute()
    options = options.model_copy(update={"out": str(folder)})
    if first:
        check_folder(folder, options.resume)
    # Imported late: needs torch, which only workers have and which loads slowly.
    from feedmill.training import model_card  # noqa: PLC0415
    from feedmill.training.data import collect  # noqa: PLC0415
    from feedmill.training.report import TrainingReport, show_trained  # noqa: PLC0415
    from feedmill.workers.training.examples import make_dataset  # noqa: PLC0415

    collected = collect(options, settings, notes)
    dataset = make_dataset(collected.examples, collected.tested, options)
    report = TrainingReport(notes)
    report.data(dataset)
    try:
        if options.head:
            from feedmill.workers.training.head import train_head  # noqa: PLC0415

            trained: Any = train_head(dataset, options, settings, report)
        else:
            from feedmill.workers.training.finetune import Training  # noqa: PLC0415

            training = Training(dataset, options, settings, report)
            if first:
                record_start(folder, options, dataset)
            trained = training.run()
        if not first:
            return
        trained.save(folder)
        tested, zero_shot = _tested(folder, options, dataset, settings, report)
    finally:
        report.stop()
    record = model_card.write(folder, options, dataset, collected.provenance, trained.record, tested, zero_shot)
    if as_json:
        typer.echo(json_line({"folder": str(folder), **record}))
    else:
        show_trained(output_console(), record, folder)


def check_folder(folder: Path, resume: bool) -> None:
    """Create the folder for a model. Raises UserError if it is unusable or does not fit `resume`."""
    held = make_folder(folder)
    if resume and CHECKPOINTS not in held:
        raise UserError(f"{folder} contains no interrupted training. Leave out --resume.")
    if not resume and CHECKPOINTS in held:
        raise UserError(f"{folder} contains an interrupted training. Continue it with --resume, or delete the folder.")
    if held and not resume:
        raise UserError(f"{folder} is not empty. Choose a new or empty folder.")


def record_start(folder: Path, options: TrainOptions, dataset: "Dataset") -> None:
    """Record the options and posts of the checkpoints. Raises UserError on a resume with different ones."""
    started = json.dumps({"options": options.model_dump(mode="json", exclude={"resume"}), "digest": dataset.digest})
    file = folder / CHECKPOINTS / BEGUN
    if not options.resume:
        file.parent.mkdir(exist_ok=True)
        file.write_text(started)
    elif not file.is_file() or file.read_text() != started:
        raise UserError(
            f"The training in {folder} was started with other options or posts. Give the same, or delete the folder; "
            "if posts still arrive, train on an export."
        )


def _tested(
    folder: Path, options: TrainOptions, dataset: "Dataset", settings: Settings, report: "TrainingReport"
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Evaluate the trained model and its untrained base on the test posts, as a worker would classify them."""
    if not dataset.test:
        return None, None
    from feedmill.evaluation.measures import measure, usable_settings  # noqa: PLC0415 - needs torch, which only workers have

    known = [(example.post, example.label) for example in dataset.test]
    own = settings.model_copy(
        update={"model": str(folder), "classifier": "head" if options.head else "sequence", "revision": None}
    )

    def summary(what: str, chosen: Settings) -> dict[str, Any]:
        report.phase(f"loading {what} and measuring its token budget")
        track = partial(report.counting, f"testing {what} on")
        return measure(known, load_model(chosen), chosen, track).summary(0)

    base = _zero_shot(options, dataset, settings)
    return summary("the trained model", usable_settings(own)), summary("its base", base) if base else None


def _zero_shot(options: TrainOptions, dataset: "Dataset", settings: Settings) -> Settings | None:
    """Return the settings to test the untrained base with, or None if it cannot classify or is not compared."""
    from feedmill.evaluation.measures import usable_settings  # noqa: PLC0415 - needs torch, which only workers have
    from feedmill.workers.models.classifiers.registry import WITH_FIXED_LABELS, kind_of  # noqa: PLC0415

    own = settings.model_copy(update={"model": options.base, "classifier": "auto"})
    try:
        kind = kind_of(own)
    except UserError:  # not a classifier without training
        return None
    if kind in WITH_FIXED_LABELS or not options.compare:
        return None
    described = settings.labels or (DESCRIBED_TOPICS if kind == "similarity" else {})
    labels = {label: described.get(label, (label,)) for label in dataset.labels}
    return usable_settings(own.model_copy(update={"labels": labels}))
