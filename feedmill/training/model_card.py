"""Write a trained model's record beside its weights: README.md for people, training.json for programs.

Neither file quotes a post, because a purge of the training posts does not reach them.
"""

import json
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from feedmill import __version__
from feedmill.cli.options import FileFlags
from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import printable
from feedmill.training.data import Dataset
from feedmill.training.options import TrainOptions

RECORD_FILE = "training.json"
#: Packages whose versions are recorded.
LIBRARIES = ("torch", "transformers", "tokenizers")
#: Template of README.md.
TEMPLATE = Path(__file__).with_suffix(".jinja")


def write(
    folder: Path,
    options: TrainOptions,
    file: FileFlags,
    dataset: Dataset,
    trained: Mapping[str, Any],
) -> dict[str, Any]:
    """Write README.md and training.json; return the record in training.json.

    trained: the training's own part, with `posts`, the counts of posts; `metrics` of the model; and `zero_shot`, those
    of its base model on the same posts. Raises OSError.
    """
    record = {
        "trained_at": time.time(),
        "options": asdict(options) | asdict(file),
        "labels": list(dataset.labels),
        "train": len(dataset.train),
        "test": len(dataset.test),
        "train_by_label": dataset.counts,
        **trained,
        "versions": {"feedmill": __version__, "python": platform.python_version()}
        | {name: version(name) for name in LIBRARIES},
    }
    content = json.dumps(record, ensure_ascii=False, indent=1) + "\n"
    for name, text in (("README.md", _card(folder, options, record)), (RECORD_FILE, content)):
        with replacing(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return record


def _card(folder: Path, options: TrainOptions, record: Mapping[str, Any]) -> str:
    templates = Environment(  # noqa: S701 - Markdown, whose values are made printable
        undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True,
        finalize=lambda value: printable(value) if isinstance(value, str) else value,
    )  # fmt: skip
    templates.filters["number"] = "{:,}".format
    card = templates.from_string(TEMPLATE.read_text("utf-8"))
    return card.render(record=record, posts=record["posts"], options=options, name=folder.name)
