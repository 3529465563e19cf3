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
from typing import Any

from feedmill import __version__
from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import printable
from feedmill.training.data import Provenance
from feedmill.workers.training.examples import Dataset
from feedmill.workers.training.options import TrainOptions

RECORD_FILE = "training.json"
#: Packages whose versions are recorded.
LIBRARIES = ("torch", "transformers", "tokenizers")
CARD_TEMPLATE = """\
---
library_name: {library}
pipeline_tag: text-classification
base_model: {base}
---

# {name}

A post classifier with {count} labels, trained by Feedmill: {what}. Serve it with `feedmill worker --model FOLDER`, or
load it with {loaded_by}.

```
{command}
```

- {posts[read]:,} posts read; {purged}; {posts[unlabelled]:,} had no usable label{left_out}.
- {record[train]:,} posts for training, {record[validation]:,} for validation, {record[test]:,} for testing.
- {record[seconds]:.0f} s on {plan[device]} ({plan[precision]}); {versions}. training.json has every option and figure.
- Weights cannot be purged: they keep what they learnt from a post that is deleted later. To remove it, train again
  without the post and delete this folder (docs/training.md).

{result}
"""


def write(
    folder: Path,
    options: TrainOptions,
    dataset: Dataset,
    provenance: Provenance,
    trained: Mapping[str, Any],
    tested: Mapping[str, Any] | None,
    zero_shot: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Write README.md and training.json; return the record in training.json.

    trained: the training's own part. tested: metrics of the model. zero_shot: metrics of its base model on the same
    posts. Raises OSError.
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
        **trained,
        "metrics": tested,
        "zero_shot": zero_shot,
        "versions": {"feedmill": __version__, "python": platform.python_version()}
        | {name: version(name) for name in LIBRARIES},
    }
    for file, content in (
        ("README.md", _card(folder, options, record)),
        (RECORD_FILE, json.dumps(record, ensure_ascii=False, indent=1) + "\n"),
    ):
        with replacing(folder / file) as temporary:
            temporary.write_text(content, encoding="utf-8")
    return record


def _card(folder: Path, options: TrainOptions, record: Mapping[str, Any]) -> str:
    posts, plan, base = record["posts"], record["plan"], printable(options.base)
    if options.head:
        what = f"a logistic regression (L2 penalty {plan['penalty']:g}) on the frozen embeddings of {base}"
        loaded_by = "`sentence_transformers` and `safetensors`: softmax(weight · embedding + bias)"
    else:
        steps = f"{plan['steps']:,} optimization steps of {plan['effective_batch']} posts"
        what, loaded_by = f"{base}, fine-tuned in {steps}", "`transformers.AutoModelForSequenceClassification`"
    return CARD_TEMPLATE.format(
        base=base,
        library="sentence-transformers" if options.head else "transformers",
        what=what,
        loaded_by=loaded_by,
        name=printable(folder.name),
        count=len(record["labels"]),
        purged="purged posts unknown" if posts["purged"] is None else f"{posts['purged']:,} had been purged",
        left_out="".join(f"; {count:,} {why}" for why, count in posts["left_out"].items()),
        result=_result(record, options),
        record=record,
        plan=plan,
        posts=posts,
        command=printable(record["command"]),
        versions=", ".join(f"{name} {number}" for name, number in record["versions"].items()),
    )


def _result(record: Mapping[str, Any], options: TrainOptions) -> str:
    if record["metrics"] is None:
        return "Not tested."
    models = ", ".join(f"{printable(model)} ({count:,})" for model, count in record["posts"]["labelled_by"].items())
    by_topics = options.targets == "topic" or options.test
    against = "their topics" if by_topics else f"the labels of {models}, which may be wrong"
    lines = [f"On {record['metrics']['posts']:,} posts outside the training data, compared with {against}:", ""]
    lines += ["| | accuracy | macro-F1 | calibration error | posts/s |", "|---|---|---|---|---|"]
    for name, found in (("this model", record["metrics"]), ("its base, zero-shot", record["zero_shot"])):
        if found:
            figures = " | ".join(f"{found[key]:.3f}" for key in ("accuracy", "macro_f1", "calibration_error"))
            lines.append(f"| {name} | {figures} | {found['posts_per_s']:.1f} |")
    return "\n".join(lines)
