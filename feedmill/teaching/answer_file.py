"""People's answers in one file, for `feedmill label` and for the web server.

A folder has them in labels.csv. Each write reads the file again under a lock, so that several
processes and people can write to one folder. Columns of others are kept.
"""

import csv
import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import (
    PostRefused,
    UserError,
    explain_unwritable,
    printable,
)
from feedmill.shared.label_files import decoded
from feedmill.shared.messages import Post
from feedmill.training.picked import read_picked, with_none

#: Name of the answers in their folder. `feedmill train --from` reads it, too.
LABELS_FILE = "labels.csv"
#: A post that was skipped, or fits none of the labels, has an empty label; `picked` tells one from
#: the other.
ANSWER_COLUMNS = ("id", "title", "body", "label", "picked")
#: Columns of answers from the web server: the post's run, who answered and when (UTC), the label
#: that the post had before, and the digest of the model that gave it.
MORE_COLUMNS = ("run", "by", "at", "was", "was_by")
#: Most answers in a file, and its most bytes: each answer rewrites it.
MAX_ANSWERS = 50_000
MAX_BYTES = 2**28


@dataclass(frozen=True, kw_only=True)
class AnsweredPost:
    """A post with its label, empty if it was skipped or fits none, and why it was picked."""

    post: Post
    label: str
    why: str
    fits_none: bool
    by: str = ""
    at: str = ""
    was: str = ""
    was_by: str = ""
    #: Values of other columns.
    others: Mapping[str, str] = field(default_factory=dict)

    @property
    def teaches(self) -> bool:
        """False for a post that was skipped."""
        return bool(self.label) or self.fits_none

    @property
    def key(self) -> "AnswerKey":
        return key_of(self.post)


class AnswerKey(NamedTuple):
    """The identity of a post with an answer. Ids alone are unique only within a run or a file."""

    id: str
    run: str
    text: str


def key_of(post: Post) -> AnswerKey:
    return AnswerKey(post.id, post.run or "", folded(post.text))


def folded(text: str) -> str:
    """Return a text without differences in case and spaces."""
    return " ".join(text.casefold().split())


class Snapshot(NamedTuple):
    """The content of the file. state: of the file when it was read; texts: of all answered
    posts.
    """

    state: tuple[int, ...]
    answers: Mapping[AnswerKey, AnsweredPost]
    texts: frozenset[str]


def _snapshot_of(answers: Iterable[AnsweredPost], state: tuple[int, ...]) -> Snapshot:
    by_key = {answer.key: answer for answer in answers}
    texts = frozenset(key.text for key in by_key)
    return Snapshot(state, by_key, texts)


def _state_of(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_mtime_ns, status.st_size, status.st_ino)


class AnswerFile:
    """The answers in a folder. Thread-safe. Every method raises UserError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / LABELS_FILE
        self._latest = Snapshot((), {}, frozenset())

    def read(self) -> list[AnsweredPost]:
        """Return the answers, the oldest first; none if there is no file."""
        return list(self.snapshot().answers.values())

    def snapshot(self) -> "Snapshot":
        """Return the content of the file."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return Snapshot((), {}, frozenset())
        except OSError as error:
            raise self._unreadable(error.strerror or str(error)) from None
        latest = self._latest
        state = _state_of(status)
        if state != latest.state:
            if status.st_size > MAX_BYTES:
                raise self._unreadable(f"it has more than {MAX_BYTES:,} bytes")
            latest = _snapshot_of(self._parse(), state)
            self._latest = latest
        return latest

    def _parse(self) -> list[AnsweredPost]:
        try:
            # spreadsheets add a byte order mark
            text = decoded(self.path.read_bytes())
            rows = csv.DictReader(StringIO(text, newline=""), strict=True)
            return [_answered_post(row) for row in rows]
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            csv.Error,
            PostRefused,
        ) as error:
            raise self._unreadable(str(error)) from None

    def _unreadable(self, reason: str) -> UserError:
        return UserError(
            f"{printable(str(self.path))} is not a list of answers of `feedmill label` "
            f"({printable(reason)}). Restore it, or choose another folder."
        )

    def put(self, answers: Sequence[AnsweredPost]) -> None:
        """Store answers. One to a post that has an answer replaces it, and becomes the newest."""
        with self._locked():
            by_key = dict(self.snapshot().answers)
            for answer in answers:
                by_key.pop(answer.key, None)
                by_key[answer.key] = answer
            if len(by_key) > MAX_ANSWERS:
                raise UserError(
                    f"{printable(str(self.path))} would have more than {MAX_ANSWERS:,} answers. "
                    "Choose another folder, or delete rows that no longer matter."
                )
            self._write(list(by_key.values()))

    def remove(self, keys: Iterable[AnswerKey]) -> None:
        """Remove the answers to posts, as far as there are any."""
        gone = set(keys)
        with self._locked():
            before = self.read()
            answers = [answer for answer in before if answer.key not in gone]
            if len(answers) < len(before):
                self._write(answers)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes and threads from writing. Creates the folder."""
        with explain_unwritable(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # NFS does not lock folders
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _write(self, answers: Sequence[AnsweredPost]) -> None:
        columns = _columns_of(answers)
        with (
            explain_unwritable(self.path),
            replacing(self.path) as temporary,
            temporary.open(
                "w",
                encoding="utf-8",
                newline="",
            ) as file,
        ):
            writer = csv.DictWriter(
                file,
                columns,
                restval="",
                extrasaction="ignore",
            )
            writer.writeheader()
            for answer in answers:
                writer.writerow(_row_of(answer))
            file.flush()
            if temporary.stat().st_size > MAX_BYTES:
                # It could not be read again.
                raise UserError(
                    f"{printable(str(self.path))} would have more than {MAX_BYTES:,} bytes. "
                    "Choose another folder, or delete rows that no longer matter."
                )
        # The lock is held: nobody has written since.
        state = _state_of(self.path.stat())
        self._latest = _snapshot_of(answers, state)


def _answered_post(row: dict[str | None, str | None]) -> AnsweredPost:
    """Return the answer in a row. Raises KeyError, TypeError, ValueError or PostRefused."""
    fields = {name: row[name] or "" for name in ANSWER_COLUMNS[:3]}
    run = row.get("run")
    if run:
        fields["run"] = run
    # A row that was added by hand may end early.
    why, fits_none = read_picked(row["picked"] or "")
    label = row["label"] or ""
    others: dict[str, str] = {}
    for name, value in row.items():
        if name is None:
            raise ValueError("a row has more cells than the header")
        if name not in (*ANSWER_COLUMNS, *MORE_COLUMNS) and value:
            others[name] = value
    return AnsweredPost(
        post=Post.parse(fields),
        label=label,
        why=why,
        fits_none=fits_none and not label,
        by=row.get("by") or "",
        at=row.get("at") or "",
        was=row.get("was") or "",
        was_by=row.get("was_by") or "",
        others=others,
    )


def _row_of(answer: AnsweredPost) -> dict[str, str]:
    post = answer.post
    picked = answer.why
    if answer.fits_none:
        picked = with_none(answer.why)
    return {
        **answer.others,
        "id": post.id,
        "title": post.title,
        "body": post.body,
        "label": answer.label,
        "picked": picked,
        "run": post.run or "",
        "by": answer.by,
        "at": answer.at,
        "was": answer.was,
        "was_by": answer.was_by,
    }


def _columns_of(answers: Sequence[AnsweredPost]) -> list[str]:
    """Return the columns of these answers: those of the web server and of others only with a
    value.
    """
    names: dict[str, None] = {}
    for answer in answers:
        row = _row_of(answer)
        for name in MORE_COLUMNS:
            if row[name]:
                names[name] = None
        for name in answer.others:
            names[name] = None
    columns = list(ANSWER_COLUMNS)
    columns += [name for name in MORE_COLUMNS if name in names]
    columns += [name for name in names if name not in columns]
    return columns


def now_text() -> str:
    """Return the time as answers have it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
