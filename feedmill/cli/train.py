"""The `feedmill train` command: fine-tune a model, or fit a head on embeddings."""

import json
import os
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from feedmill.cli.option_groups import with_groups
from feedmill.cli.options import DeviceOption, RedisUrl, settings_of
from feedmill.console import output_console
from feedmill.local_model import load_model
from feedmill.report import plots
from feedmill.shared.errors import UserError
from feedmill.shared.settings import Settings
from feedmill.shared.topics import DESCRIBED_TOPICS
from feedmill.workers.training.options import BEGUN, CHECKPOINTS, TrainOptions

if TYPE_CHECKING:
    from feedmill.training.report import TrainingReport
    from feedmill.workers.training.examples import Dataset

app = typer.Typer()

#: Packages that a training imports; the extra `train` adds them to a worker's.
PACKAGES = ("torch", "transformers", "accelerate")
PACKAGES_OF_A_HEAD = ("torch", "transformers")


@app.command()
@with_groups
def train(
    *,
    options: TrainOptions,
    device: DeviceOption = None,
    redis_url: RedisUrl = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, one object per line: plan, progress, trained.")
    ] = False,
) -> None:
    """Fine-tune a classifier on labelled posts, or fit a head on embeddings (--head).

    Switch running workers to the trained model with `feedmill deploy OUT`, or start one with `feedmill worker --model
    OUT`. See docs/training.md.
    """
    settings = settings_of(device=device, redis_url=redis_url, plain_logs=True)
    packages, extras = (PACKAGES_OF_A_HEAD, "worker") if options.head else (PACKAGES, "worker,train")
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
    """Collect the posts, train, and write the model, its test results and its charts. Only rank 0 writes."""
    first = os.environ.get("RANK", "0") == "0"  # torchrun numbers its processes
    notes = Console(stderr=True, soft_wrap=True, highlight=False, quiet=not first)
    folder = Path(options.out).expanduser().absolute()
    options = options.model_copy(update={"out": str(folder)})
    if first:
        check_folder(folder, options.resume)
    # Imported late: needs torch, which only workers have and which loads slowly.
    from feedmill.training import model_card  # noqa: PLC0415
    from feedmill.training.data import collect  # noqa: PLC0415
    from feedmill.training.report import TrainingReport  # noqa: PLC0415
    from feedmill.workers.training.examples import make_dataset  # noqa: PLC0415

    collected = collect(options, settings, notes)
    dataset = make_dataset(collected.examples, collected.tested, options)
    report = TrainingReport(notes, as_json, quiet=not first)
    report.data(dataset)
    try:
        trained = (_fit_head if options.head else _fine_tune)(folder, dataset, options, settings, report)
    finally:
        report.stop()
    if not first:
        return
    tested, zero_shot = _tested(folder, options, dataset, settings, report)
    record = model_card.write(folder, options, dataset, collected.provenance, trained, tested, zero_shot)
    if not options.head:
        title = f"{folder.name}: {len(dataset.train):,} posts, effective batch {record['plan']['effective_batch']}"
        plots.save(folder / "training.png", partial(plots.draw_training, curve=trained.curve, title=title), notes)
    report.finished(output_console(), record, folder)


def _fit_head(
    folder: Path, dataset: "Dataset", options: TrainOptions, settings: Settings, report: "TrainingReport"
) -> Any:
    from feedmill.workers.training import head  # noqa: PLC0415 - needs torch, which only workers have

    trained = head.train_head(dataset, options, settings, report.phase, report.counting)
    head.save(trained.model, folder, settings)
    return trained


def _fine_tune(
    folder: Path, dataset: "Dataset", options: TrainOptions, settings: Settings, report: "TrainingReport"
) -> Any:
    from feedmill.workers.training import finetune  # noqa: PLC0415 - needs torch, which only workers have

    first = os.environ.get("RANK", "0") == "0"
    training = finetune.Training(dataset, options, settings, report.planned, report.progress, report.phase)
    if first:
        record_start(folder, options, dataset)
    trained = training.run()
    if first:
        finetune.save(trained, folder)
    return trained


def check_folder(folder: Path, resume: bool) -> None:
    """Create the folder for a model. Raises UserError if it is unusable or does not fit `resume`."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out: {folder} is a file. Choose a folder.")
    held = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if resume and CHECKPOINTS not in held:
        raise UserError(f"{folder} contains no interrupted training. Leave out --resume.")
    if not resume and CHECKPOINTS in held:
        raise UserError(f"{folder} contains an interrupted training. Continue it with --resume, or delete the folder.")
    if held - {CHECKPOINTS} and not resume:
        raise UserError(f"{folder} is not empty. Choose a new or empty folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"Cannot create {folder}: {error.strerror}. Set another --out.") from None


def record_start(folder: Path, options: TrainOptions, dataset: "Dataset") -> None:
    """Record the options and posts of the checkpoints. Raises UserError on a resume with different ones."""
    current = {"options": options.model_dump(mode="json", exclude={"resume"}), "digest": dataset.digest}
    record_file = folder / CHECKPOINTS / BEGUN
    if options.resume:
        try:
            recorded = json.loads(record_file.read_text())
        except (OSError, ValueError):
            recorded = {}
        if recorded != current:
            what = "other options" if recorded.get("digest") == current["digest"] else "other posts"
            raise UserError(
                f"The training in {folder} was started with {what}. Give the same options and posts, or delete the "
                "folder; if posts still arrive, train on an export."
            )
        return
    record_file.parent.mkdir(exist_ok=True)
    record_file.write_text(json.dumps(current))


def _tested(
    folder: Path, options: TrainOptions, dataset: "Dataset", settings: Settings, report: "TrainingReport"
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Evaluate the trained model and its untrained base on the test posts, as a worker would classify them."""
    from feedmill.evaluation.run import measure  # noqa: PLC0415 - needs torch, which only workers have
    from feedmill.workers.models.classifiers.registry import unused_settings  # noqa: PLC0415

    if not dataset.test:
        return None, None
    known = [(example.post, example.label) for example in dataset.test]
    kind = "head" if options.head else "sequence"
    unset = dict.fromkeys(("revision", "labels", "template", *unused_settings(kind)))
    own = settings.model_copy(update={"model": str(folder), "classifier": kind, **unset})

    def summary(what: str, chosen: Settings | None) -> dict[str, Any] | None:
        if chosen is None:
            return None
        report.phase(f"loading {what} and measuring its token budget")
        try:
            return measure(known, load_model(chosen), chosen, partial(report.testing, what)).summary(0)
        finally:
            report.stop()

    return summary("the trained model", own), summary("its base", _zero_shot(options, dataset, settings))


def _zero_shot(options: TrainOptions, dataset: "Dataset", settings: Settings) -> Settings | None:
    """Return the settings to test the untrained base with, or None if it cannot classify or is not compared."""
    from feedmill.workers.models.classifiers.registry import (  # noqa: PLC0415 - needs torch, which only workers have
        WITH_FIXED_LABELS,
        classifier_kind,
        unused_settings,
    )
    from feedmill.workers.models.weights import locate  # noqa: PLC0415

    if not options.compare:
        return None
    try:
        kind = classifier_kind(locate(options.base, settings.revision, settings.offline, settings.trust_remote_code))
    except UserError:  # not a classifier without training
        return None
    if kind in WITH_FIXED_LABELS:
        return None
    described = settings.labels or (DESCRIBED_TOPICS if kind == "similarity" else {})
    labels = {label: described.get(label, (label,)) for label in dataset.labels}
    own = {"model": options.base, "classifier": kind, "labels": labels}
    return settings.model_copy(update=dict.fromkeys(unused_settings(kind)) | own)
