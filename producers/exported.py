"""Read posts back from rows of an export of results.

Exports have fixed column names, so they bypass the name guessing that other files need (records.py). In an export,
`label` is a model's prediction, not a topic, and `permalink` is not `url`. This module depends neither on file formats
nor on the code that writes exports.
"""

import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from pydantic_core import from_json

from feedmill.producers.records import BadRecord, seconds_of_date
from feedmill.shared.errors import PostRefused, printable
from feedmill.shared.messages import Post

#: Post field -> column name.
COLUMNS = {
    "id": "id",
    "topic": "topic",
    "title": "title",
    "body": "body",
    "subreddit": "subreddit",
    "score": "score",
    "url": "url",
    "created_utc": "date",
    "permalink": "permalink",
    "edited_utc": "edited",
    "stickied": "stickied",
    "nsfw": "nsfw",
    "spoiler": "spoiler",
    "extra": "extra",
    "run": "run",
}
#: Columns, in lower case, that together identify an export.
EXPORT_COLUMNS = frozenset({"id", "label", "scores", "fingerprint", "classified_at"})
#: A cell that a spreadsheet would run as a formula, plain or escaped (possibly more than once).
FORMULA_START = re.compile("'*[=+\\-@\\t\\r\\n\uff1d\uff0b\uff0d\uff20]")
#: First characters of such cells: a cheap check before the regular expression.
FORMULA_STARTS = frozenset("'=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")


class Labelled(NamedTuple):
    """A post with the label and scores that a model assigned."""

    post: Post
    label: str
    scores: dict[str, float]
    model: str


def escape_formula(text: str) -> str:
    """Prefix an apostrophe if a spreadsheet would run the text as a formula."""
    return f"'{text}" if text[:1] in FORMULA_STARTS and FORMULA_START.match(text) else text


def unescape_formula(cell: str) -> str:
    """Reverse `escape_formula`."""
    return cell[1:] if cell.startswith("'") and FORMULA_START.match(cell) else cell


def is_export_row(columns: Collection[str]) -> bool:
    """Return true if the columns, in lower case, include those that identify an export."""
    return all(mark in columns for mark in EXPORT_COLUMNS)


def parse_export(record: dict[str, Any], where: str, labelled: bool = False) -> Iterator[Post | Labelled | BadRecord]:
    """Yield the row's post, with its label if `labelled`, or a BadRecord. Keys must be in lower case."""
    cells = ((field, record.get(column)) for field, column in COLUMNS.items())
    fields = {field: value for field, value in cells if value is not None and value != ""}
    for field in {"created_utc", "edited_utc"} & fields.keys():
        with suppress(ValueError):  # Post.parse rejects values that are not dates
            fields[field] = seconds_of_date(str(fields[field]))
    if isinstance(extra := fields.get("extra"), str):
        with suppress(ValueError):
            fields["extra"] = from_json(extra)
    try:
        post = Post.parse(fields)
    except PostRefused as refused:
        yield BadRecord(where, printable(str(refused)))
    else:
        yield _labelled(post, record, where) if labelled else post


def _labelled(post: Post, record: dict[str, Any], where: str) -> Labelled | BadRecord:
    scores, label = record["scores"], record["label"]
    with suppress(ValueError):
        scores = dict(from_json(scores) if isinstance(scores, str) else scores)
    if isinstance(scores, dict) and label in scores and all(isinstance(each, float | int) for each in scores.values()):
        return Labelled(post, label, scores, str(record.get("model")))
    return BadRecord(where, "scores: expected an object with a score for each label")
