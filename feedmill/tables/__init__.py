"""Read and write tables of posts and results as Arrow record batches: CSV, JSONL and Parquet.

This module is independent of Arrow: formats, pairs of rows and outcomes, and names of the columns of labels.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from feedmill.producers.records import normalize_key
from feedmill.shared.errors import UserError, printable
from feedmill.shared.messages import Outcome, Post

#: Formats by ending, and endings of compressed text files.
FORMATS = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".zst")

#: Function that classifies posts in order, such as workers.pipeline.offline.classify.
Classify = Callable[[Iterable[Post]], Generator[tuple[Post, Outcome]]]


def format_of(name: str) -> str | None:
    """Return the format for the ending of a file's name, in any case; None for another ending."""
    path = Path(name.lower())
    if path.suffix in COMPRESSIONS:
        form = FORMATS.get(Path(path.stem).suffix)
        return None if form == "parquet" else form
    return FORMATS.get(path.suffix)


def with_outcomes(rows: Iterable[Any], classify: Classify) -> Generator[tuple[Any, Outcome | None]]:
    """Yield every row or item, in order, with the outcome of its `post`; None if that is not a Post.

    Close the generator to stop the model.
    """
    waiting: deque[Any] = deque()

    def posts() -> Iterator[Post]:
        for row in rows:
            waiting.append(row)
            if isinstance(row.post, Post):
                yield row.post

    with closing(classify(posts())) as outcomes:
        for _, outcome in outcomes:
            while not isinstance(waiting[0].post, Post):
                yield waiting.popleft(), None
            yield waiting.popleft(), outcome
    while waiting:
        yield waiting.popleft(), None


def label_columns(labels: Iterable[str], prefix: str) -> list[str]:
    """Return the names of the new columns: label, its score, and the scores of `labels`."""
    return [f"{prefix}{name}" for name in ("label", "label_score", *(f"score_{label}" for label in labels))]


def check_new_columns(table: str, given: Iterable[object], new: Sequence[str], flag: str) -> None:
    """Raise UserError if a new column has the name of a given one, in any case. table, flag: names in the error."""
    known = {normalize_key(str(name)): name for name in given}
    for name in new:
        if (same := known.get(normalize_key(name))) is not None:
            raise UserError(
                f"{table} already has a column {printable(str(same))}. Rename it, or give {flag}, such as predicted_, "
                "for the names of the new columns."
            )
