"""The `feedmill train` and `feedmill trainer` commands: fine-tune a model now, or run trainings from the queue."""

import json
import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from feedmill.cli.offline import load_model
from feedmill.cli.options import DeviceOption, ModelOption, RedisUrl, settings_of
from feedmill.report import plots
from shared.errors import UserError
from shared.settings import Settings
from shared.topics import DESCRIBED_TOPICS
from shared.training import BEGUN, CHECKPOINTS, RUNS, TrainOptions

if TYPE_CHECKING:
    from workers.training.examples import Dataset

app = typer.Typer()

#: Packages that a training imports; the extra `train` adds them to a worker's.
PACKAGES = ("torch", "transformers", "accelerate")


def _option(help_text: str, *names: str) -> Any:
    """Return an option whose default is set, with its reason, in shared/training.py; keep the help text in step."""
    return typer.Option(*names, help=help_text, show_default=False)


@app.command()
def train(
    source: Annotated[
        str, typer.Option("--from", help="Training data: `results` (the stream), an export, or a file of posts.")
    ],
    out: Annotated[str, typer.Option(help="Folder for the trained model; must be new or empty.")],
    base: ModelOption = None,
    labels: Annotated[str | None, _option("Label source: topic, zero-shot or soft (default: topic).")] = None,
    min_score: Annotated[
        float | None, _option("Minimum score of the best label in results or exports (default: 0.5).")
    ] = None,
    min_posts: Annotated[int | None, _option("Minimum posts per label (default: 8).")] = None,
    limit: Annotated[int | None, _option("Maximum number of posts to read (default: 200,000).")] = None,
    test: Annotated[str | None, _option("File of posts with topics to test on, instead of a split.")] = None,
    split: Annotated[str | None, _option("Test split: random, subreddit, time or none (default: random).")] = None,
    test_share: Annotated[float | None, _option("Share of the posts to test on (default: 0.2).")] = None,
    compare: Annotated[
        bool | None, _option("Also test the untrained base model (default: on).", "--compare/--no-compare")
    ] = None,
    epochs: Annotated[float | None, _option("Passes over the training posts (default: 4).")] = None,
    max_steps: Annotated[int | None, _option("Optimization steps, instead of --epochs.")] = None,
    batch_size: Annotated[int | None, _option("Rows per forward pass and device (default: 16).")] = None,
    accumulation: Annotated[int | None, _option("Forward passes per optimization step (default: 1).")] = None,
    learning_rate: Annotated[
        float | None, _option("Peak learning rate of the base model's weights (default: 0.0001).")
    ] = None,
    head_rate: Annotated[
        float | None, _option("Learning rate of the head, as a multiple of --learning-rate (default: 10).")
    ] = None,
    warmup: Annotated[float | None, _option("Share of the steps with a rising learning rate (default: 0.1).")] = None,
    schedule: Annotated[
        str | None, _option("Learning-rate schedule: linear, cosine or constant (default: linear).")
    ] = None,
    weight_decay: Annotated[float | None, _option("Weight decay of AdamW (default: 0.01).")] = None,
    fit_head: Annotated[
        bool | None, _option("Fit the classification head first (default: on).", "--fit-head/--no-fit-head")
    ] = None,
    class_weights: Annotated[
        bool | None, _option("Weight rare labels more (default: off).", "--class-weights/--no-class-weights")
    ] = None,
    max_tokens: Annotated[int | None, _option("Maximum tokens to read of a post (default: 128).")] = None,
    seed: Annotated[int | None, _option("Random seed (default: 7).")] = None,
    patience: Annotated[
        int | None, _option("Epochs without progress before stopping; 0 never stops early (default: 0).")
    ] = None,
    precision: Annotated[str | None, _option("Precision: auto, float32, bfloat16 or float16 (default: auto).")] = None,
    length_grouping: Annotated[
        bool | None, _option("Batch posts of similar length (default: on).", "--length-grouping/--no-length-grouping")
    ] = None,
    gradient_checkpointing: Annotated[
        bool | None,
        _option(
            "Recompute activations to save memory (default: off).",
            "--gradient-checkpointing/--no-gradient-checkpointing",
        ),
    ] = None,
    fused_optimizer: Annotated[
        bool | None, _option("Use the fused AdamW kernel (default: on).", "--fused-optimizer/--no-fused-optimizer")
    ] = None,
    loader_workers: Annotated[int | None, _option("Processes that assemble batches (default: 0).")] = None,
    pin_memory: Annotated[
        bool | None, _option("Copy batches to a GPU from pinned memory (default: on).", "--pin-memory/--no-pin-memory")
    ] = None,
    checkpoint_steps: Annotated[
        int | None, _option("Optimization steps between checkpoints (default: one epoch).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint in OUT.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard logs to OUT/runs.")] = False,
    device: DeviceOption = None,
    redis_url: RedisUrl = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, one object per line: plan, progress, trained.")
    ] = False,
) -> None:
    """Fine-tune a classifier on labelled posts.

    Serve the trained model with `feedmill worker --model OUT`. See docs/training.md.
    """
    given = dict(locals())
    settings = settings_of(device=given.pop("device"), redis_url=given.pop("redis_url"))
    given.pop("as_json")
    options = TrainOptions.parse(given)
    _check_packages()
    _train(options, settings, as_json)


@app.command()
def trainer(
    device: DeviceOption = None,
    name: Annotated[
        str | None, typer.Option(help="Worker name, unique among the workers of one Redis (default: generated).")
    ] = None,
    training_folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder that queued trainings read and write (default: ~/.local/share/feedmill/training).",
            show_default=False,
        ),
    ] = None,
    redis_url: RedisUrl = None,
) -> None:
    """Run queued trainings one at a time until SIGTERM.

    Applications queue a training with the Celery task `feedmill.train`.
    """
    settings = settings_of(device=device, training_folder=training_folder, redis_url=redis_url)
    _check_packages()
    from feedmill.training.job import run_trainer  # noqa: PLC0415 - needs torch, which only workers have

    raise typer.Exit(run_trainer(settings, name))


def _check_packages() -> None:
    """Raise UserError if a package that trainings import is missing."""
    for package in PACKAGES:
        if find_spec(package) is None:
            raise UserError(f"Training requires the package {package}: run `pip install 'feedmill[worker,train]'`.")


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
    from feedmill.training import report as training_report  # noqa: PLC0415
    from feedmill.training.data import collect  # noqa: PLC0415
    from workers.training import run  # noqa: PLC0415
    from workers.training.examples import make_dataset  # noqa: PLC0415

    collected = collect(options, settings, notes)
    dataset = make_dataset(collected.examples, collected.tested, options)
    report = training_report.TrainingReport(notes, as_json, quiet=not first)
    report.data(dataset)
    training = run.Training(dataset, options, settings, report.planned, report.progress)
    if first:
        record_start(folder, options, dataset)
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
    plots.save(folder / "training.png", partial(plots.draw_training, curve=trained.curve, title=title), notes)
    report.finished(Console(highlight=False), record, trained.curve, folder)


def check_folder(folder: Path, resume: bool) -> None:
    """Create the folder for a model. Raises UserError if it is unusable or does not fit `resume`."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out: {folder} is a file. Choose a folder.")
    held = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if resume and CHECKPOINTS not in held:
        raise UserError(f"{folder} contains no interrupted training. Leave out --resume.")
    if not resume and CHECKPOINTS in held:
        raise UserError(f"{folder} contains an interrupted training. Continue it with --resume, or delete the folder.")
    if held - {CHECKPOINTS, RUNS} and not resume:
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
                f"The training in {folder} was started with {what}. Use the same ones or delete the folder; if posts "
                "still arrive, train on an export."
            )
        return
    record_file.parent.mkdir(exist_ok=True)
    record_file.write_text(json.dumps(current))


def _tested(
    folder: Path, options: TrainOptions, dataset: "Dataset", settings: Settings
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Evaluate the trained model and its untrained base on the test posts, as a worker would classify them."""
    from feedmill.evaluation.run import measure  # noqa: PLC0415 - needs torch, which only workers have

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
    """Return the settings to test the untrained base with, or None if it cannot classify or is not compared."""
    from workers.models.classifiers.registry import classifier_kind  # noqa: PLC0415 - needs torch, which only workers have
    from workers.models.weights import locate  # noqa: PLC0415

    if not options.compare:
        return None
    try:
        kind = classifier_kind(locate(options.base, settings.revision, settings.offline, settings.trust_remote_code))
    except UserError:  # not a classifier without training
        return None
    if kind == "sequence":
        return None
    described = settings.labels or (DESCRIBED_TOPICS if kind == "similarity" else {})
    labels = {label: described.get(label, (label,)) for label in dataset.labels}
    return settings.model_copy(update={"model": options.base, "classifier": kind, "labels": labels})
