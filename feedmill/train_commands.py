"""`feedmill train` makes a model of one's own, and `feedmill trainer` does so for whoever asks through the queue."""

import json
import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from feedmill import charts
from feedmill.flags import Device, Model, RedisUrl, settings_of
from feedmill.offline_commands import load_model
from shared.errors import UserError
from shared.settings import Settings
from shared.topics import DESCRIBED_TOPICS
from shared.training import BEGUN, CHECKPOINTS, RUNS, TrainOptions

if TYPE_CHECKING:
    from workers.training.examples import Dataset

app = typer.Typer()

#: What a training needs besides what a worker has.
PACKAGES = ("torch", "transformers", "accelerate")


def _option(help_text: str, *names: str) -> Any:
    """Of an option whose default stands, with its reason, in shared/training.py."""
    return typer.Option(*names, help=help_text, show_default=False)


@app.command()
def train(
    source: Annotated[str, typer.Option("--from", help="results, an export (file or folder), or a file of posts.")],
    out: Annotated[str, typer.Option(help="Folder of the trained model; new, or empty.")],
    base: Model = None,
    labels: Annotated[str | None, _option("What is learnt: topic, zero-shot or soft.")] = None,
    min_score: Annotated[float | None, _option("Of the best zero-shot label, at least.")] = None,
    min_posts: Annotated[int | None, _option("Posts that each label needs.")] = None,
    limit: Annotated[int | None, _option("Posts that are read, at most.")] = None,
    test: Annotated[str | None, _option("File of posts with topics to test on.")] = None,
    split: Annotated[str | None, _option("What is tested on else: random, subreddit, time or none.")] = None,
    test_share: Annotated[float | None, _option("Share of the posts to test on.")] = None,
    compare: Annotated[
        bool | None, _option("Test the base's zero-shot labels as well.", "--compare/--no-compare")
    ] = None,
    epochs: Annotated[float | None, _option("Times that each post is seen.")] = None,
    max_steps: Annotated[int | None, _option("Optimization steps, in place of epochs.")] = None,
    batch_size: Annotated[int | None, _option("Rows of a forward pass on each device.")] = None,
    accumulation: Annotated[int | None, _option("Forward passes of an optimization step.")] = None,
    learning_rate: Annotated[float | None, _option("Of the base's weights, at its highest.")] = None,
    head_rate: Annotated[float | None, _option("How many times that for the classifier on top.")] = None,
    warmup: Annotated[float | None, _option("Share of the steps in which the rate rises.")] = None,
    schedule: Annotated[str | None, _option("How it falls: linear, cosine or constant.")] = None,
    weight_decay: Annotated[float | None, _option("AdamW's.")] = None,
    fit_head: Annotated[bool | None, _option("Fit the classifier on top first.", "--fit-head/--no-fit-head")] = None,
    class_weights: Annotated[
        bool | None, _option("Weigh rare labels more.", "--class-weights/--no-class-weights")
    ] = None,
    max_tokens: Annotated[int | None, _option("Tokens of a post that are read, at most.")] = None,
    seed: Annotated[int | None, _option("Of all that is random.")] = None,
    patience: Annotated[int | None, _option("Epochs without progress after which to stop; 0: never.")] = None,
    precision: Annotated[str | None, _option("auto, float32, bfloat16 or float16.")] = None,
    length_grouping: Annotated[
        bool | None, _option("Batches of posts of similar length.", "--length-grouping/--no-length-grouping")
    ] = None,
    gradient_checkpointing: Annotated[
        bool | None,
        _option("Less memory for more time.", "--gradient-checkpointing/--no-gradient-checkpointing"),
    ] = None,
    fused_optimizer: Annotated[
        bool | None, _option("One kernel for all weights.", "--fused-optimizer/--no-fused-optimizer")
    ] = None,
    loader_workers: Annotated[int | None, _option("Processes that put batches together.")] = None,
    pin_memory: Annotated[bool | None, _option("Batches in pinned memory.", "--pin-memory/--no-pin-memory")] = None,
    checkpoint_steps: Annotated[int | None, _option("Steps between checkpoints; else an epoch.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on at the last checkpoint.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard's logs.")] = False,
    device: Device = None,
    redis_url: RedisUrl = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, one object a line: plan, progress, trained.")
    ] = False,
) -> None:
    """Fine-tune a classifier on posts with labels; `feedmill worker --model OUT` then serves it (docs/training.md)."""
    given = dict(locals())
    settings = settings_of(device=given.pop("device"), redis_url=given.pop("redis_url"))
    given.pop("as_json")
    options = TrainOptions.parse(given)
    _check_packages()
    _train(options, settings, as_json)


@app.command()
def trainer(
    device: Device = None,
    name: Annotated[str | None, typer.Option(help="Node name; unique among the workers of one Redis.")] = None,
    training_folder: Annotated[
        Path | None, typer.Option(help="Folder that queued trainings read from and write to.", show_default=False)
    ] = None,
    redis_url: RedisUrl = None,
) -> None:
    """Train what applications ask for by the task `feedmill.train`, one at a time, until SIGTERM."""
    settings = settings_of(device=device, training_folder=training_folder, redis_url=redis_url)
    _check_packages()
    from feedmill.training_job import run_trainer  # noqa: PLC0415 - torch, which only workers have

    raise typer.Exit(run_trainer(settings, name))


def _check_packages() -> None:
    for package in PACKAGES:
        if find_spec(package) is None:
            raise UserError(f"Training needs {package}, which `pip install 'feedmill[worker,train]'` brings.")


def _train(options: TrainOptions, settings: Settings, as_json: bool) -> None:
    first = os.environ.get("RANK", "0") == "0"  # of several processes, as torchrun numbers them
    notes = Console(stderr=True, soft_wrap=True, highlight=False, quiet=not first)
    folder = Path(options.out).expanduser().absolute()
    options = options.model_copy(update={"out": str(folder)})
    if first:
        check_folder(folder, options.resume)
    # Imported late: torch, which only workers have, and which takes its time.
    from feedmill import model_card, training_report  # noqa: PLC0415
    from feedmill.training_data import collect  # noqa: PLC0415
    from workers.training import run  # noqa: PLC0415
    from workers.training.examples import make_dataset  # noqa: PLC0415

    collected = collect(options, settings, notes)
    dataset = make_dataset(collected.examples, collected.tested, options)
    report = training_report.Report(notes, as_json, quiet=not first)
    report.data(dataset)
    training = run.Training(dataset, options, settings, report.planned, report.progress)
    if first:
        begin(folder, options, dataset)
    try:
        trained = training.run()
    finally:
        report.stop()
    if not first:
        return
    run.save(trained, folder)
    tested, zero_shot = _tested(folder, options, dataset, settings)
    record = model_card.write(folder, options, dataset, collected.provenance, trained, tested, zero_shot)
    title = f"{folder.name}: {len(dataset.train):,} posts, effective batch {trained.plan.effective_batch}"
    charts.save(folder / "training.png", partial(charts.draw_training, curve=trained.curve, title=title), notes)
    report.finished(Console(highlight=False), record, trained.curve, folder)


def check_folder(folder: Path, resume: bool) -> None:
    """Raises UserError where a model cannot be written there."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: name a folder with --out.")
    held = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if resume and CHECKPOINTS not in held:
        raise UserError(f"{folder} holds no training to go on with: leave out --resume.")
    if not resume and CHECKPOINTS in held:
        raise UserError(f"{folder} holds a training that was interrupted: --resume goes on with it, or delete it.")
    if held - {CHECKPOINTS, RUNS} and not resume:
        raise UserError(f"{folder} holds other files: give a new folder, or an empty one.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}.") from None


def begin(folder: Path, options: TrainOptions, dataset: "Dataset") -> None:
    """Note of which posts and options the checkpoints will be. Raises UserError where there are some of others."""
    asked = {"options": options.model_dump(mode="json", exclude={"resume"}), "digest": dataset.digest}
    noted = folder / CHECKPOINTS / BEGUN
    if options.resume:
        try:
            begun = json.loads(noted.read_text())
        except (OSError, ValueError):
            begun = {}
        if begun != asked:
            what = "other options" if begun.get("digest") == asked["digest"] else "other posts"
            raise UserError(
                f"The training in {folder} was begun with {what}: give the same ones, or delete the folder. Where "
                "posts still come, train on an export of them."
            )
        return
    noted.parent.mkdir(exist_ok=True)
    noted.write_text(json.dumps(asked))


def _tested(
    folder: Path, options: TrainOptions, dataset: "Dataset", settings: Settings
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """What a worker says of the test's posts with the trained model, and with its base."""
    from feedmill.evaluation_run import measure  # noqa: PLC0415 - torch, which only workers have

    if not dataset.test:
        return None, None
    known = [(example.post, example.label) for example in dataset.test]
    own = {"model": str(folder), "revision": None, "classifier": "sequence", "labels": None, "template": None}
    tested, zero_shot = [
        None if each is None else measure(known, load_model(each), each).summary(0)
        for each in (settings.model_copy(update=own), _zero_shot(options, dataset, settings))
    ]
    return tested, zero_shot


def _zero_shot(options: TrainOptions, dataset: "Dataset", settings: Settings) -> Settings | None:
    """The settings of the base as it classifies without training; None where it cannot, or need not."""
    from workers.classifiers.choose import kind_of  # noqa: PLC0415 - torch, which only workers have
    from workers.weights import locate  # noqa: PLC0415

    if not options.compare:
        return None
    try:
        kind = kind_of(locate(options.base, settings.revision, settings.offline, settings.trust_remote_code))
    except UserError:  # it does not classify as it is
        return None
    if kind == "sequence":
        return None
    described = settings.labels or (DESCRIBED_TOPICS if kind == "similarity" else {})
    labels = {label: described.get(label, (label,)) for label in dataset.labels}
    return settings.model_copy(update={"model": options.base, "classifier": kind, "labels": labels})
