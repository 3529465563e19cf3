"""The table of an evaluation: each post's prediction by each model that was evaluated."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import explain_unwritable
from feedmill.shared.messages import Classification, Outcome, Post
from feedmill.shared.none_of_these import NO_LABEL
from feedmill.tables import compression_of, format_of

#: Least share of a post that the labels leave to none of them. Independent scores, and those that
#: sum to 1, leave none.
MIN_REST = 1e-3
#: Decimals of a margin: those of scores.
MARGIN_DECIMALS = 7
#: Columns that do not hold text.
NUMBERS = ("label_score", "topic_score", "margin", "nearest_similarity")
TRUTH_VALUES = ("correct", "seen")
COLUMNS = (
    "id",
    "topic",
    "label",
    "label_score",
    "topic_score",
    "margin",
    "correct",
    "seen",
    "error",
    "model",
    "dtype",
    "title",
    "body",
)
#: The training post nearest to a post that was labelled wrong.
NEAREST_COLUMNS = (
    "nearest_id",
    "nearest_label",
    "nearest_similarity",
    "nearest_title",
)


def rows_of(
    known: Sequence[tuple[Post, str]],
    outcomes: Sequence[Outcome],
    model: str,
    dtype: str,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each post. known: (post, true label). outcomes: of the posts, by one
    model.

    topic_score is the score of the true label, margin the distance between the two best scores.
    A post whose truth is NO_LABEL has no topic. If there is one, "none of these" has a score, too:
    what the labels' scores lack to 1.
    """
    has_none = any(truth == NO_LABEL for _, truth in known)
    for (post, truth), outcome in zip(known, outcomes, strict=True):
        row: dict[str, Any] = {
            "id": post.id,
            "topic": None if truth == NO_LABEL else truth,
            "model": model,
            "dtype": dtype,
            "title": post.title,
            "body": post.body,
        }
        if isinstance(outcome, Classification):
            scores = dict(outcome.scores)
            rest = 1 - sum(scores.values())
            if has_none and rest > MIN_REST:
                scores[NO_LABEL] = rest
            row["label"] = outcome.label
            row["label_score"] = outcome.label_score
            # A post that fits none of the labels has no score for that.
            row["topic_score"] = scores.get(truth)
            row["margin"] = _margin(scores)
            row["correct"] = (outcome.label or NO_LABEL) == truth
        else:
            row["error"] = outcome.error
        yield row


def _margin(scores: Mapping[str, float]) -> float:
    """Return the best score less the second; a single score itself, as if the second were 0."""
    best_first = sorted(scores.values(), reverse=True)
    margin = best_first[0]
    if len(best_first) > 1:
        margin -= best_first[1]
    return round(margin, MARGIN_DECIMALS)


def write_rows(
    rows: Sequence[dict[str, Any]],
    out: str,
    has_mark: bool,
    columns: Sequence[str] = COLUMNS,
) -> None:
    """Write the table. has_mark: begin CSV with a byte order mark.

    Raises UserError if it cannot be written.
    """
    import pyarrow as pa  # noqa: PLC0415 - an extra

    from feedmill.tables.writing import (  # noqa: PLC0415 - pyarrow, too
        CsvLayout,
        delimiter_of,
        writer_to,
    )

    types = dict.fromkeys(columns, pa.string())
    for name in columns:
        if name in NUMBERS:
            types[name] = pa.float64()
        elif name in TRUTH_VALUES:
            types[name] = pa.bool_()
    schema = pa.schema(list(types.items()))
    batch = pa.RecordBatch.from_pylist(list(rows), schema=schema)
    path = Path(out)
    form = format_of(out) or "csv"
    layout = CsvLayout(delimiter_of(form), has_mark=has_mark)
    with (
        explain_unwritable(path),
        replacing(path) as temporary,
        temporary.open("wb") as file,
    ):
        writer = writer_to(
            file,
            form,
            schema,
            compression_of(path),
            layout,
        )
        writer.write(batch)
        writer.close()
