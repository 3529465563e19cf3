"""The file of answers of `feedmill label`: labels.csv, read and replaced as a whole.

`feedmill train --from labels.csv` reads it, too. A skipped post has an empty label.
"""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shared.atomic_files import replacing
from shared.errors import PostRefused, UserError, printable
from shared.messages import Post

LABELS_FILE = "labels.csv"
COLUMNS = ("id", "title", "body", "label", "picked")


class AnsweredPost(NamedTuple):
    """A post with its label; None if it was skipped. picked: why it was picked."""

    post: Post
    label: str | None
    picked: str


def read_answers(path: Path) -> list[AnsweredPost]:
    """Read the answers, in order; none if there is no file. Raises UserError if the file has another form."""
    if not path.exists():
        return []
    found = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file, strict=True):
                post = Post.parse({name: row[name] or "" for name in COLUMNS[:3]})
                found.append(AnsweredPost(post, row["label"] or None, row["picked"]))
    except OSError as error:
        raise UserError(f"Cannot read {printable(str(path))}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, csv.Error, PostRefused) as error:
        raise UserError(
            f"Cannot resume: {printable(str(path))} is not a list of answers of `feedmill label` "
            f"({printable(str(error))}). Restore it, or give another --out."
        ) from None
    return found


def write_answers(path: Path, answers: Iterable[AnsweredPost]) -> None:
    """Replace the file atomically. Raises OSError."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for post, label, picked in answers:
            writer.writerow((post.id, post.title, post.body, label or "", picked))
