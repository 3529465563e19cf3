"""Write a trained model's record beside its weights: README.md for people, training.json for programs.

Neither file quotes a post, because a purge of the training posts does not reach them.
"""

import json
import platform
import shlex
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feedmill import __version__
from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import printable
from feedmill.training.data import Provenance
from feedmill.workers.training.examples import Dataset
from feedmill.workers.training.options import TrainOptions

if TYPE_CHECKING:
    from feedmill.workers.training.finetune import Trained
    from feedmill.workers.training.head import TrainedHead

RECORD_FILE = "training.json"
#: Packages whose versions are recorded.
LIBRARIES = ("torch", "transformers", "accelerate", "tokenizers")
#: Those that the training of a head does not import.
NOT_FOR_HEADS = ("accelerate",)

CARD_TEMPLATE = """\
---
library_name: {library}
pipeline_tag: text-classification
base_model: {base}
---

# {name}

A post classifier with {count} labels, {trained_how} by Feedmill. Serve it with `feedmill worker --model FOLDER`, or
load it with {loaded_by}.

- Source: `{source}`. {posts[read]:,} posts read; {purged}; {posts[unlabelled]:,} had no usable label{left_out}.
- Labels: {labels_from}.
- Split: {split}. {record[train]:,} posts for training, {record[validation]:,} for validation (early stopping), \
{record[test]:,} for testing.
- Training: {training} in {record[seconds]:.0f} s on {plan[device]} ({plan[precision]}); \
{record[samples_per_s]:.1f} posts/s; seed {options.seed}; {versions}.
- Weights cannot be purged: they keep what they learnt from a post that is deleted later. To remove it, train again
  without the post and delete this folder (docs/training.md).

{result}

| label | training posts | test posts | F1 |
|---|---|---|---|
{table}

```
{command}
```
"""


def write(
    folder: Path,
    options: TrainOptions,
    dataset: Dataset,
    provenance: Provenance,
    trained: "Trained | TrainedHead",
    tested: Mapping[str, Any] | None,
    zero_shot: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Write README.md and training.json; return the record in training.json.

    tested: metrics of the model. zero_shot: metrics of its base model on the same posts. Raises OSError.
    """
    record = {
        "trained_at": time.time(),
        # Rebuilt from the options: the command as typed may contain a password in the Redis URL.
        "command": shlex.join(["feedmill", "train", *options.flags()]),
        "options": options.model_dump(mode="json", by_alias=True),
        "posts": provenance._asdict() | {"left_out": dataset.left_out, "digest": dataset.digest},
        "labels": list(dataset.labels),
        "train": len(dataset.train),
        "validation": len(dataset.validation),
        "test": len(dataset.test),
        "train_by_label": dataset.counts,
        **trained.summary(),
        "metrics": tested,
        "zero_shot": zero_shot,
        "versions": {"feedmill": __version__, "python": platform.python_version()}
        | {name: version(name) for name in LIBRARIES if not (options.head and name in NOT_FOR_HEADS)},
    }
    with replacing(folder / "README.md") as temporary:
        temporary.write_text(_card(folder, options, dataset, record), encoding="utf-8")
    with replacing(folder / RECORD_FILE) as temporary:
        temporary.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return record


def _card(folder: Path, options: TrainOptions, dataset: Dataset, record: Mapping[str, Any]) -> str:
    posts, plan = record["posts"], record["plan"]
    tested = (record["metrics"] or {}).get("labels", {})
    table = []
    for label, count in dataset.counts.items():
        figures = f"{tested[label]['support']:,} | {tested[label]['f1']:.3f}" if label in tested else "– | –"
        table.append(f"| {printable(label).replace('|', chr(92) + '|')} | {count:,} | {figures} |")
    base = printable(options.base)
    if options.head:
        training = f"a logistic regression with the L2 penalty {plan['penalty']:g}, chosen by cross-validation,"
        loaded_by = "`sentence_transformers` and `safetensors`: softmax(weight · embedding + bias)"
    else:
        training = (
            f"{plan['steps']:,} optimization steps of {plan['effective_batch']} posts ({plan['batch_size']} × "
            f"{plan['accumulation']} × {plan['devices']} devices), {plan['epochs']:.3g} epochs,"
        )
        loaded_by = "`transformers.AutoModelForSequenceClassification`"
    return CARD_TEMPLATE.format(
        base=base,
        library="sentence-transformers" if options.head else "transformers",
        trained_how=f"a head on the frozen embeddings of {base}, fitted" if options.head else f"fine-tuned from {base}",
        loaded_by=loaded_by,
        training=training,
        name=printable(folder.name),
        count=len(dataset.labels),
        source=printable(options.source),
        purged="purged posts unknown" if posts["purged"] is None else f"{posts['purged']:,} had been purged",
        left_out="".join(f"; {count:,} {why}" for why, count in dataset.left_out.items()),
        labels_from=_labels_from(options, posts["labelled_by"]),
        split=f"a separate test file, `{printable(options.test)}`" if options.test else _split(options),
        table="\n".join(table),
        result=_result(record["metrics"], record["zero_shot"], options),
        record=record,
        plan=plan,
        posts=posts,
        options=options,
        command=printable(record["command"]),
        versions=", ".join(f"{name} {number}" for name, number in record["versions"].items()),
    )


def _labels_from(options: TrainOptions, labelled_by: Mapping[str, int]) -> str:
    if options.targets == "topic":
        return "the posts' topics"
    models = ", ".join(f"{printable(model)} ({count:,})" for model, count in labelled_by.items())
    what = "the best label" if options.targets == "zero-shot" else "all scores"
    return f"{what} of each post whose best score is at least {options.min_score}, by {models}"


def _split(options: TrainOptions) -> str:
    if options.split == "none":
        return "none, so the model was not tested"
    how = {"random": "random, by a hash of the ids", "subreddit": "by whole subreddits", "time": "newest posts"}
    return f"{how[options.split]}, {options.test_share:.0%} for testing"


def _result(tested: Mapping[str, Any] | None, zero_shot: Mapping[str, Any] | None, options: TrainOptions) -> str:
    if tested is None:
        return "Not tested."
    against = (
        "the topics" if options.targets == "topic" or options.test else "labels by the models above, which may be wrong"
    )
    lines = [f"On {tested['posts']:,} posts outside the training data, compared with {against}:", ""]
    lines += ["| | accuracy | macro-F1 | calibration error | posts/s |", "|---|---|---|---|---|"]
    for name, found in (("this model", tested), ("its base, zero-shot", zero_shot)):
        if found:
            figures = " | ".join(f"{found[key]:.3f}" for key in ("accuracy", "macro_f1", "calibration_error"))
            lines.append(f"| {name} | {figures} | {found['posts_per_s']:.1f} |")
    return "\n".join(lines)
