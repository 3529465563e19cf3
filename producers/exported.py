"""Rows of an export of results: what their columns are called, and the post that one of them holds.

They are read apart from other people's records, since no column stands in for another here: `label` is what a model
said, and no topic; `permalink` is no `URL`. Knows nothing of files, and nothing of how exports are written.
"""

import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from pydantic_core import from_json

from producers.records import BadRecord, seconds_of_date
from shared.errors import PostRefused, printable
from shared.messages import Post

#: A post's field -> its column.
COLUMNS = {
    "id": "id",
    "topic": "Topic",
    "title": "Title",
    "body": "Body",
    "subreddit": "Subreddit",
    "score": "Score",
    "url": "URL",
    "created_utc": "Date",
    "permalink": "permalink",
    "edited_utc": "edited",
    "stickied": "stickied",
    "nsfw": "nsfw",
    "spoiler": "spoiler",
    "extra": "extra",
}
#: Columns, in lower case, that other people's files do not have together.
MARKS = frozenset({"id", "label", "scores", "fingerprint", "classified_at"})
#: Text of a cell that a spreadsheet would run as a formula; as it stands, or escaped (more than once).
FORMULA = re.compile("'*[=+\\-@\\t\\r\\n\uff1d\uff0b\uff0d\uff20]")
#: What such a text begins with.
SUSPICIOUS = frozenset("'=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")


class Labelled(NamedTuple):
    """A post and what a model said of it."""

    post: Post
    label: str
    scores: dict[str, float]
    model: str


def escaped(text: str) -> str:
    """A cell that no spreadsheet takes for a formula: with an apostrophe before it, where it would."""
    return f"'{text}" if text[:1] in SUSPICIOUS and FORMULA.match(text) else text


def unescaped(cell: str) -> str:
    """The text that `escaped` made a cell of."""
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell) else cell


def is_exported(columns: Collection[str]) -> bool:
    """Whether a record with these columns, in lower case, is a row of an export."""
    return all(mark in columns for mark in MARKS)


def post_of(record: dict[str, Any], where: str) -> Iterator[Post | BadRecord]:
    """The post of a row, or what is wrong with it. Its keys are in lower case."""
    cells = ((field, record.get(column.lower())) for field, column in COLUMNS.items())
    fields = {field: value for field, value in cells if value is not None and value != ""}
    for field in {"created_utc", "edited_utc"} & fields.keys():
        with suppress(ValueError):  # what is no date is the model's to refuse
            fields[field] = seconds_of_date(str(fields[field]))
    if isinstance(extra := fields.get("extra"), str):
        with suppress(ValueError):
            fields["extra"] = from_json(extra)
    try:
        yield Post.parse(fields)
    except PostRefused as refused:
        yield BadRecord(where, printable(str(refused)))


def labelled_of(record: dict[str, Any], where: str) -> Iterator[Labelled | BadRecord]:
    """The post of a row with its label, or what is wrong with it. Its keys are in lower case."""
    for found in post_of(record, where):
        if isinstance(found, BadRecord):
            yield found
            continue
        scores = record["scores"]
        with suppress(ValueError):
            scores = dict(from_json(scores) if isinstance(scores, str) else scores)
        label = record["label"]
        if (
            isinstance(scores, dict)
            and label in scores
            and all(isinstance(score, float | int) for score in scores.values())
        ):
            yield Labelled(found, label, scores, str(record.get("model")))
        else:
            yield BadRecord(where, "scores: expected an object with the score of each label")
