"""The card of a study's data set: sources, counts, filters, the model, licence notes and what is
missing, as a README.md with the front matter that dataset hubs read.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from feedmill.shared.errors import printable
from feedmill.studies.figures import Figures
from feedmill.studies.state import DumpState, StudyState

#: Labels and subreddits that are listed with their numbers.
MAX_LISTED = 50
#: A trained model's record, with the accuracy of its test.
TRAINING_FILE = "training.json"
#: Options of a study that are filters, and what those without a value mean.
FILTERS = {
    "--kind": "posts",
    "--subreddit": "all",
    "--author": "all",
    "--words": "any",
    "--since": "from the beginning",
    "--until": "to the end",
    "--languages": "all",
}
LICENCE = """\
The texts belong to the people who wrote them. Reddit's user agreement and its data terms say what
may be done with them; the archives that the dumps come from have terms of their own. This folder
grants no licence. Before you publish it, check whether you may publish texts, or only ids and
labels."""
REMOVED = """\
Records that were deleted or removed on Reddit when the dump was made are left out. What was
deleted later is still here, because a dump does not know of it: look the ids up before you publish
the rows, and remove rows whose authors ask for it."""


def card(name: str, state: StudyState, figures: Figures, model: str) -> str:
    """Return the card as Markdown. name: of the folder. model: the model in the settings."""
    lines: list[str] = []
    lines.extend(_front_matter(name))
    lines.extend(_opening(name, state, figures))
    lines.extend(_sources(state))
    lines.extend(_selection(state))
    lines.extend(_model(state, model))
    lines.extend(_counts(figures))
    lines.extend(["", "## Removed posts", "", REMOVED, ""])
    lines.extend(["## Licence", "", LICENCE])
    return "\n".join(lines) + "\n"


def _front_matter(name: str) -> Iterator[str]:
    yield "---"
    yield f"pretty_name: {json.dumps(printable(name))}"
    yield "license: other"
    yield "task_categories: [text-classification]"
    yield "tags: [feedmill, reddit]"
    yield "configs:"
    yield "- config_name: default"
    yield '  data_files: "data/month=*/*.parquet"'
    yield "---"


def _opening(name: str, state: StudyState, figures: Figures) -> Iterator[str]:
    posts = figures.rows - figures.comments
    title = _cell(name)
    yield ""
    yield f"# {title}"
    yield ""
    yield (
        f"{posts:,} posts and {figures.comments:,} comments with labels of a model, made by "
        "`feedmill study`. Parquet in `data`, partitioned by the month in which they were written "
        "(UTC); the columns are those of an export (docs/export.md)."
    )
    if not state.is_complete:
        yield ""
        yield "**Not complete**: the same command continues."


def _sources(state: StudyState) -> Iterator[str]:
    yield ""
    yield "## Sources"
    yield ""
    yield (
        "| file | bytes | records | rows | filtered | removed | without text | malformed | "
        "failed |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for dump in state.dumps:
        yield _source_row(dump)
    for dump in state.dumps:
        if dump.problem:
            yield ""
            problem = _cell(dump.problem)
            yield f"Not read to its end: {problem}"


def _source_row(dump: DumpState) -> str:
    numbers = (
        dump.size,
        dump.records,
        dump.rows,
        dump.filtered,
        dump.removed,
        dump.without_text,
        dump.malformed,
        dump.failed,
    )
    name = _cell(Path(dump.name).name)
    cells = " | ".join(f"{number:,}" for number in numbers)
    return f"| {name} | {cells} |"


def _selection(state: StudyState) -> Iterator[str]:
    yield ""
    yield "## Filters"
    yield ""
    yield "| filter | value |"
    yield "|---|---|"
    for option, nothing in FILTERS.items():
        value = state.options.get(option)
        value_text = nothing
        if option == "--author" and value:
            value_text = f"of {len(value):,} chosen authors"
        elif isinstance(value, list) and value:
            value_text = ", ".join(map(str, value))
        elif isinstance(value, int | float):
            value_text = f"{value:.0f} seconds since 1970"
        yield f"| `{option}` | {_cell(value_text)} |"
    context = "none"
    if state.options.get("--context"):
        context = "title of the post"
    yield f"| context of comments | {context} |"


def _model(state: StudyState, model: str) -> Iterator[str]:
    described = state.model
    revision = described["revision"] or "none"
    labels = ", ".join(map(str, described["labels"]))
    yield ""
    yield "## Model"
    yield ""
    yield f"- model: {_cell(described['name'])}, revision {_cell(revision)}"
    yield f"- SHA-256 of its weights: `{described['weights']}`"
    yield f"- labels: {_cell(labels)}"
    yield f"- accuracy: {_accuracy(model)}"


def _accuracy(model: str) -> str:
    """Return the accuracy of a model's test, if its folder has one."""
    try:
        text = (Path(model) / TRAINING_FILE).read_text(encoding="utf-8")
        metrics: Mapping[str, Any] = json.loads(text)["metrics"]
        accuracy = float(metrics["accuracy"])
        posts = int(metrics["posts"])
    except (OSError, ValueError, KeyError, TypeError):
        return (
            "not known; `feedmill evaluate` measures it on posts whose labels you know"
        )
    return f"{accuracy:.3f} on {posts:,} posts of its test, which may differ from these"


def _counts(figures: Figures) -> Iterator[str]:
    yield ""
    yield "## Labels"
    yield ""
    yield "| label | rows |"
    yield "|---|---|"
    for label, count in figures.labels.most_common(MAX_LISTED):
        yield f"| {_cell(label)} | {count:,} |"


def _cell(text: str) -> str:
    """Return a text for a line or a cell of Markdown, without markup of its own."""
    plain = printable(text)
    for character in "\\`*_[]<>|#":
        plain = plain.replace(character, f"\\{character}")
    return plain
