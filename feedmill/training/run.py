"""Train a model: collect posts, fine-tune or fit a head, test, and write the model's folder.

Beside the weights are README.md for people, training.json for programs, and digests of the texts
(`learnt`). None quotes a post, because a purge of the training posts does not reach them. Imports
torch once the data was checked.
"""

import json
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from feedmill import __version__
from feedmill.console import Report
from feedmill.local_model import load_model
from feedmill.producers.records import FileOptions
from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import (
    DeviceFull,
    DeviceLost,
    ModelError,
    UserError,
    clause,
    explain_missing,
    explain_unwritable,
    printable,
    require_packages,
)
from feedmill.shared.none_of_these import NO_LABEL
from feedmill.shared.settings import Settings
from feedmill.training import learnt
from feedmill.training.data import CHECKPOINTS, Dataset, collect, make_dataset
from feedmill.training.options import TrainOptions

#: Packages whose versions are recorded, and those that fitting a head needs.
LIBRARIES = ("torch", "transformers", "tokenizers")
HEAD_PACKAGES = ("torch", "transformers")
#: Words of errors of safetensors and torch, which are no OSErrors, about a file that could not be
#: written.
WRITE_FAILURES = ("Error while serializing", "inline_container", "iostream error")
#: Template of the model card, README.md.
CARD = Path(__file__).with_name("model_card.jinja")


def train(
    options: TrainOptions, file: FileOptions, settings: Settings, notes: Console
) -> dict[str, Any]:
    """Train a model, write it to the folder in the options, and return its record.

    The folder is removed if it is left empty. notes: progress and notes. Raises UserError.
    """
    folder = output_folder(options)
    try:
        return _train(replace(options, out=str(folder)), file, settings, notes)
    except (DeviceFull, DeviceLost) as error:
        raise _device_failed(error) from error
    finally:
        remove_if_empty(folder)


def output_folder(options: TrainOptions) -> Path:
    """Return the folder of the trained model."""
    return Path(options.out).expanduser().absolute()


def has_checkpoints(folder: Path) -> bool:
    """Return whether an interrupted training can be continued there."""
    return (folder / CHECKPOINTS).is_dir()


def is_joining() -> bool:
    """Return whether torchrun, or a launcher like it, has started this process as one of
    several.
    """
    return all(
        name in os.environ
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
    )


def follow(settings: Settings) -> None:
    """Train with the process of rank 0, which alone reads and writes files and the terminal.

    Raises UserError.
    """
    with explain_missing("Training", "worker,train"):
        from feedmill.training import distributed  # noqa: PLC0415 - needs torch
    try:
        distributed.train_as_peer(settings)
    except (DeviceFull, DeviceLost) as error:
        raise _device_failed(error) from error


def _device_failed(error: DeviceFull | DeviceLost) -> ModelError:
    return ModelError(
        f"The device failed: {clause(error)}. If it is out of memory, set a smaller --batch-size "
        "and a larger --accumulation, or lower --max-tokens; else run the same command again to "
        "continue."
    )


def _train(
    options: TrainOptions, file: FileOptions, settings: Settings, notes: Console
) -> dict[str, Any]:
    """Collect the posts, train, write the model, and return its record."""
    folder = Path(options.out)
    names = make_folder(folder)
    if names and (options.head or CHECKPOINTS not in names):
        raise UserError(f"{folder} is not empty. Choose a new or empty folder.")
    _require_packages(options)
    collected = collect(options, file, settings, notes)
    labels = tuple(settings.labels or ())
    dataset = make_dataset(
        collected.examples, options, collected.unlabelled, labels, collected.none
    )
    report = Report(notes)
    for line in dataset.summary():
        report.print(line)
    try:
        with _explain_writes(folder):
            trained, settings = _fit(dataset, options, settings, report)
        tested = _test_model(options, dataset, settings, report)
    except BaseException:
        if options.head:
            # it was empty before; the same command would refuse a folder with half a model
            _empty(folder)
        raise
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
        **trained,
        **tested,
        "versions": _versions(),
    }
    with _explain_writes(folder):
        _write(folder, options, record)
        learnt_from = (*dataset.train, *dataset.none_train)
        learnt.save(folder, (example.post for example in learnt_from))
    # until here, the same command continues
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return record


@contextmanager
def _explain_writes(folder: Path) -> Iterator[None]:
    """Raise UserError if the model or a checkpoint cannot be written, as on a full disk."""
    try:
        with explain_unwritable(folder):
            yield
    except Exception as error:
        text = str(error)
        if not any(words in text for words in WRITE_FAILURES):
            raise
        raise UserError(
            f"Cannot write {printable(str(folder))}: {printable(clause(error))}. Free space "
            "there, then run the same command again: it continues from the last checkpoint, if "
            "there is one."
        ) from error


def _versions() -> dict[str, str]:
    """Return the versions of what trained the model."""
    versions = {"feedmill": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        versions[name] = version(name)
    return versions


def _require_packages(options: TrainOptions) -> None:
    """Raise UserError if a package is missing that the training needs."""
    if options.head:
        require_packages("Training", "worker", HEAD_PACKAGES)
    else:
        # the Trainer needs it
        require_packages("Training", "worker,train", (*HEAD_PACKAGES, "accelerate"))


def _fit(
    dataset: Dataset, options: TrainOptions, settings: Settings, report: Report
) -> tuple[dict[str, Any], Settings]:
    """Train, and write the model.

    Return the training's record, and the settings to test the model with.

    Called after the data was checked, because it imports torch, which takes seconds. Raises
    UserError.
    """
    folder = Path(options.out)
    if options.head:
        with explain_missing("Training", "worker"):
            from feedmill.training.head import train_head  # noqa: PLC0415 - needs torch
        head = train_head(dataset, options, settings, report)
        head.save(folder)
        return head.record, settings
    with explain_missing("Training", "worker,train"):
        from feedmill.training import distributed, finetune  # noqa: PLC0415 - need torch
    if is_joining():
        settings = distributed.join(settings)
        distributed.send(dataset, options)
    elif settings.named_devices:
        finetune.check(options)
        record = distributed.launch(dataset, options, settings, report)
        device = distributed.first_device(settings.named_devices)
        return record, settings.model_copy(update={"device": device, "devices": None})
    trained = finetune.Training(dataset, options, settings, report).run()
    trained.save(folder)
    distributed.leave()
    return trained.record, settings


def _write(folder: Path, options: TrainOptions, record: Mapping[str, Any]) -> None:
    """Write the record of a training, and its model card. Raises OSError."""
    card = _card(folder, options, record)
    content = json.dumps(
        record,
        ensure_ascii=False,
        indent=1,
    )
    files = {"README.md": card, "training.json": f"{content}\n"}
    for name, text in files.items():
        with replacing(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _card(folder: Path, options: TrainOptions, record: Mapping[str, Any]) -> str:
    """Return the model card of a training with this record, in Markdown."""
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415 - few commands need it

    templates = Environment(  # noqa: S701 - Markdown, whose values are made printable
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: printable(value) if isinstance(value, str) else value,
    )
    templates.filters["number"] = "{:,}".format
    card = templates.from_string(CARD.read_text("utf-8"))
    return card.render(
        record=record,
        posts=record["posts"],
        options=options,
        name=folder.name,
        shown=_figure_of_card,
    )


def _figure_of_card(figure: float | None) -> str:
    return "–" if figure is None else f"{figure:.3f}"


def make_folder(folder: Path) -> set[str]:
    """Create a folder, unless it exists, and return the names of what it contains.

    Raises UserError.
    """
    with explain_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return {path.name for path in folder.iterdir()}


def _empty(folder: Path) -> None:
    """Delete what a folder contains. Errors are ignored: another one is being raised."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def remove_if_empty(folder: Path) -> None:
    """Remove the output folder unless it contains something, such as a model or an interrupted
    training.
    """
    with suppress(OSError):
        folder.rmdir()


def _test_model(
    options: TrainOptions, dataset: Dataset, settings: Settings, report: Report
) -> dict[str, Any]:
    """Evaluate the trained model and its untrained base on the test posts, as a worker would
    classify them.
    """
    # Imported late: needs torch, which only workers have.
    from feedmill.evaluation.measure import measure  # noqa: PLC0415
    from feedmill.training.head import described  # noqa: PLC0415
    from feedmill.workers.models.classifiers.registry import (  # noqa: PLC0415
        WITH_FIXED_LABELS,
        kind_of,
        usable_settings,
    )

    known = [(example.post, example.label) for example in dataset.test]
    if dataset.none_train and NO_LABEL not in dataset.labels:
        known += [(example.post, NO_LABEL) for example in dataset.none_test]

    def summary(what: str, changes: dict[str, Any]) -> dict[str, Any]:
        report.phase(f"loading {what} and measuring its token budget")
        chosen = usable_settings(settings.model_copy(update=changes))
        return measure(known, load_model(chosen), chosen, report).summary

    tested: dict[str, Any] = {"metrics": None, "zero_shot": None}
    if not known:
        return tested
    own = {"model": options.out, "classifier": "auto", "revision": None}
    tested["metrics"] = summary("the trained model", own)
    base = {"model": options.base, "classifier": "auto"}
    kind = ""
    with suppress(UserError):  # not a classifier without training
        kind = kind_of(settings.model_copy(update=base))
    if options.compare and kind and kind not in WITH_FIXED_LABELS:
        if kind == "similarity" or settings.labels:
            labels = described(dataset.labels, settings)
        else:
            labels = {}
        labels = labels or {label: (label,) for label in dataset.labels}
        tested["zero_shot"] = summary("its base", base | {"labels": labels})
    return tested
