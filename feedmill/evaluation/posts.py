"""The posts of an evaluation that are worth a look: labelled wrong, uncertain, or disputed."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from rich.console import Console

from feedmill.evaluation.measure import Evaluation
from feedmill.evaluation.nearest import Row, add_nearest
from feedmill.shared.errors import UserError
from feedmill.shared.settings import Settings
from feedmill.tables.predictions import COLUMNS, NEAREST_COLUMNS, rows_of, write_rows


def predictions(evaluation: Evaluation) -> list[Row]:
    """Return a row for the prediction of each post that counts, by each model."""
    rows: list[Row] = []
    for model in evaluation.models:
        outcomes = model.measured.outcomes
        of_model = list(rows_of(evaluation.known, outcomes, model.model, model.dtype))
        for index in evaluation.counted_places:
            row = of_model[index]
            row["seen"] = index in evaluation.seen
            rows.append(row)
    return rows


def wrong(evaluation: Evaluation) -> list[Row]:
    """Return the posts with a wrong label, the most confident mistakes first."""
    rows = [row for row in predictions(evaluation) if row.get("correct") is False]
    return sorted(
        rows,
        key=lambda row: row["label_score"],
        reverse=True,
    )


def unsure(evaluation: Evaluation) -> list[Row]:
    """Return all posts, the least certain first: those with the smallest margin."""
    rows = [row for row in predictions(evaluation) if "margin" in row]
    return sorted(rows, key=lambda row: row["margin"])


def disputed(evaluation: Evaluation) -> list[Row]:
    """Return the posts to which the models give different labels, the rows of a post together.

    Posts come first on which the models are most certain. Raises UserError for a single model.
    """
    if len(evaluation.models) < 2:
        raise UserError("--differ compares models: repeat --model, or --dtype.")
    count = len(evaluation.counted_places)
    rows = predictions(evaluation)
    by_place: dict[int, list[Row]] = defaultdict(list)
    for number, row in enumerate(rows):
        if "label" in row:
            by_place[number % count].append(row)
    groups: list[list[Row]] = []
    for group in by_place.values():
        labels = {row["label"] for row in group}
        if len(labels) > 1:
            groups.append(group)
    groups.sort(key=_least_score, reverse=True)
    return [row for group in groups for row in group]


def _least_score(group: Sequence[Row]) -> float:
    scores: list[float] = [row["label_score"] for row in group]
    return min(scores)


def write(
    evaluation: Evaluation,
    selection: str,
    out: str,
    has_mark: bool,
    settings: Settings,
    notes: Console,
) -> int:
    """Write a table of posts, and return the number of its rows.

    selection: a key of SELECTIONS. Wrong labels get the nearest training post. has_mark: begin CSV
    with a byte order mark. Raises UserError.
    """
    rows = SELECTIONS[selection](evaluation)
    columns: Sequence[str] = COLUMNS
    if selection == "wrong":
        add_nearest(rows, evaluation, settings, notes)
        columns = [*COLUMNS, *NEAREST_COLUMNS]
    write_rows(rows, out, has_mark, columns)
    return len(rows)


#: Name of an option of `feedmill evaluate` -> the posts that it writes.
SELECTIONS: dict[str, Callable[[Evaluation], list[Row]]] = {
    "out": predictions,
    "wrong": wrong,
    "unsure": unsure,
    "differ": disputed,
}
