"""Find the training post that is nearest to a post: often it explains a wrong label.

A trained model's folder quotes no post, so the file that it was trained on is read again.
"""

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from feedmill.console import Report
from feedmill.evaluation.measure import Evaluation
from feedmill.producers.records import FileOptions, Labelled
from feedmill.shared.errors import UserError, clause, printable
from feedmill.shared.settings import EMBEDDED_MODEL, Settings
from feedmill.training import learnt
from feedmill.training.data import collect
from feedmill.training.head import Embedder
from feedmill.training.options import TrainOptions

#: A row of `tables.predictions`.
Row = dict[str, Any]
#: Maximum number of training posts to compare with, chosen at random.
MAX_TRAINING_POSTS = 5_000
#: Tokens of a post that are compared.
MAX_TOKENS = TrainOptions.max_tokens


def add_nearest(
    rows: Sequence[Row], evaluation: Evaluation, settings: Settings, notes: Console
) -> None:
    """Add the nearest training post to each row: its id, label, title, and their similarity, the
    cosine of their vectors by the embedded model.

    Rows of a model that was not trained on a file stay as they are. Raises UserError.
    """
    by_model: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_model[row["model"]].append(row)
    paths = {model.model: model.path for model in evaluation.models}
    embedder: Embedder | None = None
    for name, rows_of_model in by_model.items():
        examples = _training_posts(paths[name], settings, notes)
        if not examples:
            continue
        if embedder is None:
            embedder = Embedder(EMBEDDED_MODEL, settings, MAX_TOKENS)
        _add(rows_of_model, examples, embedder, Report(notes))


def _add(
    rows: Sequence[Row],
    examples: Sequence[Labelled],
    embedder: Embedder,
    report: Report,
) -> None:
    texts = [f"{row['title'] or ''}\n\n{row['body'] or ''}".strip() for row in rows]
    try:
        training_vectors = embedder.embed(
            [example.post.text for example in examples], report
        )
        vectors = embedder.embed(texts, report)
    finally:
        report.stop()
    similarities = vectors @ training_vectors.T  # [rows, examples]
    best, indexes = similarities.max(1)
    for row, similarity, index in zip(
        rows,
        best.tolist(),
        indexes.tolist(),
        strict=True,
    ):
        example = examples[index]
        row["nearest_id"] = example.post.id
        row["nearest_label"] = example.label
        row["nearest_similarity"] = similarity
        row["nearest_title"] = example.post.title


def _training_posts(model: str, settings: Settings, notes: Console) -> list[Labelled]:
    """Return the posts that a model has learnt from, with their labels; none if its folder does
    not name their file, or the file is gone.
    """
    digests = learnt.digests_of(model)
    if not digests:
        return []
    path = Path(model).expanduser() / "training.json"
    try:
        options = json.loads(path.read_bytes())["options"]
        training = TrainOptions(**_of_class(TrainOptions, options))
        file = FileOptions(**_of_class(FileOptions, options))
        quiet = Console(quiet=True)
        examples = collect(training, file, settings, quiet).examples
    except (OSError, ValueError, KeyError, TypeError, UserError) as error:
        notes.print(
            f"No nearest training posts of {printable(model)}: {printable(clause(error))}",
            markup=False,
        )
        return []
    learnt_examples = []
    for example in examples:
        digest = learnt.digest_of(example.post)
        if digest in digests:
            learnt_examples.append(example)
    if len(learnt_examples) <= MAX_TRAINING_POSTS:
        return learnt_examples
    return random.Random(0).sample(learnt_examples, MAX_TRAINING_POSTS)


def _of_class(kind: type[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are fields of a dataclass."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in options.items() if name in names}
