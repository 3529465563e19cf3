"""What was done to train a model, beside its weights: README.md for people, training.json for programs.

Neither quotes a post: what was trained on may be purged one day, and these stay.
"""

import json
import platform
import shlex
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from feedmill import __version__
from feedmill.training_data import Provenance
from shared.errors import printable
from shared.training import TrainOptions
from workers.training.examples import Dataset
from workers.training.run import Trained

RECORD = "training.json"
#: Whose versions are noted.
LIBRARIES = ("torch", "transformers", "accelerate", "tokenizers")

CARD = """\
---
library_name: transformers
pipeline_tag: text-classification
base_model: {base}
---

# {name}

A classifier of posts with {count} labels, fine-tuned by Feedmill {feedmill} on {base}. `feedmill worker --model FOLDER`
serves it; `transformers.AutoModelForSequenceClassification` loads it.

## Data

- From `{source}`: {read:,} posts read; {purged}; {unlabelled:,} had no label that counts{left_out}.
- Labels: {labels_from}.
- Split: {split}. Trained on {train:,}, held back for early stopping {validation:,}, tested on {test:,}.
- Weights cannot be purged: what was learnt from a post that is deleted later stays in them. Train anew without it, and
  delete this folder (docs/training.md).

| label | trained on | tested on | F1 |
|---|---|---|---|
{table}

## Result

{result}

## Training

{steps:,} optimization steps of {effective} posts ({batch} × {accumulation} × {devices} devices), {epochs:.3g} epochs,
in {seconds:.0f} s on {device} ({precision}); {samples:.1f} posts/s. Seed {seed}.

```
{command}
```

{versions}
"""


def write(
    folder: Path,
    options: TrainOptions,
    dataset: Dataset,
    provenance: Provenance,
    trained: Trained,
    tested: Mapping[str, Any] | None,
    zero_shot: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Write both; returns what training.json says. tested, zero_shot: of the model and of its base, on the same posts.

    Raises OSError.
    """
    plan = trained.plan
    record = {
        "trained_at": time.time(),
        # Not as it was typed: there a password may stand, in Redis' address.
        "command": shlex.join(["feedmill", "train", *options.flags()]),
        "options": options.model_dump(mode="json", by_alias=True),
        "posts": provenance._asdict() | {"left_out": dataset.left_out, "digest": dataset.digest},
        "labels": list(dataset.labels),
        "train": len(dataset.train),
        "validation": len(dataset.validation),
        "test": len(dataset.test),
        "train_by_label": dataset.counts,
        "plan": plan._asdict() | {"effective_batch": plan.effective_batch},
        "seconds": trained.seconds,
        "samples_per_s": trained.samples_per_s,
        "peak_mb": trained.peak_mb,
        "curve": [point._asdict() for point in trained.curve],
        "metrics": tested,
        "zero_shot": zero_shot,
        "versions": {"feedmill": __version__, "python": platform.python_version()}
        | {name: version(name) for name in LIBRARIES},
    }
    _replace(folder / "README.md", _card(folder, options, dataset, record))
    _replace(folder / RECORD, json.dumps(record, ensure_ascii=False, indent=1) + "\n")
    return record


def _card(folder: Path, options: TrainOptions, dataset: Dataset, record: Mapping[str, Any]) -> str:
    posts, plan, tested = record["posts"], record["plan"], record["metrics"]
    by_label = (tested or {}).get("labels", {})
    rows = [
        f"| {_cell(label)} | {count:,} | {by_label.get(label, {}).get('support', 0):,} | "
        f"{by_label[label]['f1']:.3f} |" if label in by_label else f"| {_cell(label)} | {count:,} | – | – |"
        for label, count in dataset.counts.items()
    ]  # fmt: skip
    purged = (
        "which of them were purged was not known" if posts["purged"] is None else f"{posts['purged']:,} were purged"
    )
    return CARD.format(
        base=printable(options.base),
        name=printable(folder.name),
        count=len(dataset.labels),
        feedmill=__version__,
        source=printable(options.source),
        read=posts["read"],
        purged=purged,
        unlabelled=posts["unlabelled"],
        left_out="".join(f"; {count:,} {why}" for why, count in dataset.left_out.items()),
        labels_from=_labels_from(options, posts["labelled_by"]),
        split=f"a file of its own, `{printable(options.test)}`" if options.test else _split(options),
        train=record["train"],
        validation=record["validation"],
        test=record["test"],
        table="\n".join(rows),
        result=_result(tested, record["zero_shot"], options),
        steps=plan["steps"],
        effective=plan["effective_batch"],
        batch=plan["batch_size"],
        accumulation=plan["accumulation"],
        devices=plan["devices"],
        epochs=plan["epochs"],
        seconds=record["seconds"],
        device=plan["device"],
        precision=plan["precision"],
        samples=record["samples_per_s"],
        seed=options.seed,
        command=printable(record["command"]),
        versions=", ".join(f"{name} {number}" for name, number in record["versions"].items()),
    )


def _labels_from(options: TrainOptions, labelled_by: Mapping[str, int]) -> str:
    if options.labels == "topic":
        return "the posts' topics"
    whose = ", ".join(f"{printable(model)} ({count:,})" for model, count in labelled_by.items())
    what = "the best label" if options.labels == "zero-shot" else "all scores"
    return f"{what} of each post, where that has {options.min_score} or more, by {whose}"


def _split(options: TrainOptions) -> str:
    if options.split == "none":
        return "none: nothing was tested"
    how = {"random": "at random, by a hash of ids", "subreddit": "whole subreddits", "time": "the newest"}
    return f"{how[options.split]}, {options.test_share:.0%} for the test"


def _result(tested: Mapping[str, Any] | None, zero_shot: Mapping[str, Any] | None, options: TrainOptions) -> str:
    if tested is None:
        return "Not tested."
    against = (
        "topics" if options.labels == "topic" or options.test else "labels by the models above, which may be wrong"
    )
    lines = [f"On {tested['posts']:,} posts that it was not trained on, against {against}:", ""]
    lines += ["| | accuracy | macro-F1 | calibration error | posts/s |", "|---|---|---|---|---|"]
    for name, found in (("this model", tested), ("its base, zero-shot", zero_shot)):
        if found:
            figures = " | ".join(f"{found[key]:.3f}" for key in ("accuracy", "macro_f1", "calibration_error"))
            lines.append(f"| {name} | {figures} | {found['posts_per_s']:.1f} |")
    return "\n".join(lines)


def _cell(label: str) -> str:
    return printable(label).replace("|", "\\|")


def _replace(path: Path, text: str) -> None:
    """Write a small file so that it is whole at any time."""
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
