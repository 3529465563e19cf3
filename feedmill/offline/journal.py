"""Keep the outcomes of a labelling beside its output, so that an interrupted one continues.

The output itself is complete or absent, in any format, so its rows cannot be added to. But nearly
all time goes into the model: the next run writes the same rows again and takes their outcomes from
here. Each outcome has the digest of its post and of all that determines the scores, so a changed
row, model or label is classified again, with all rows after it.
"""

import errno
import json
import os
import stat
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pydantic_core import from_json

from feedmill.shared.atomic_files import PRIVATE, final_path, fitting_name, is_special
from feedmill.shared.errors import UserError, printable
from feedmill.shared.messages import (
    Classification,
    Outcome,
    Post,
    PostError,
    fingerprint,
)
from feedmill.tables import Classify

#: Seconds after which outcomes are written to the file: the most that a killed process loses.
FLUSH_S = 1.0
#: Flags that open neither a symbolic link nor wait for a pipe, and the errors that say so.
NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK
NO_FILE_ERRORS = (errno.ELOOP, errno.ENXIO, errno.EISDIR)
#: Fields of a classification that are the same for all posts of a run; written once.
COMMON_FIELDS = (
    "model",
    "revision",
    "weights",
    "worker",
    "device",
)


class _Entry(NamedTuple):
    """A stored outcome. end: the place after it in the file, in bytes."""

    fingerprint: str
    fields: dict[str, Any]
    end: int

    def outcome(self, post: Post, recipe: str) -> Outcome | None:
        """Return the outcome of a post; None if it is that of another, or damaged."""
        if self.fingerprint != fingerprint(post, recipe):
            return None
        try:
            if "error" in self.fields:
                return PostError(id=post.id, error=self.fields["error"])
            return Classification.model_validate({"id": post.id, **self.fields})
        except ValueError:
            return None


class _Rest(NamedTuple):
    """The posts without a stored outcome, and the place in the file for theirs."""

    posts: Iterator[Post]
    end: int


class Journal:
    """The outcomes of a labelling that is not complete.

    out: the output of the labelling.
    """

    def __init__(self, out: Path) -> None:
        target = final_path(out)
        self._path = target.with_name(fitting_name(f".{target.name}", ".outcomes"))
        #: Rows whose outcome an earlier run computed.
        self.resumed = 0
        #: Rows whose outcome is in the file.
        self.rows = 0

    def remembering(self, classify: Classify, recipe: str) -> Classify:
        """Return a function that classifies as `classify` does, except posts with an outcome here.

        recipe: see `OfflineModel`. The function raises OSError.
        """

        def classify_rest(
            posts: Iterable[Post],
        ) -> Generator[tuple[Post, Outcome]]:
            rest = yield from self._resume(iter(posts), recipe)
            with (
                self._open(rest.end) as file,
                closing(classify(rest.posts)) as outcomes,
            ):
                yield from self._record(outcomes, file, recipe)

        return classify_rest

    def _resume(
        self, posts: Iterator[Post], recipe: str
    ) -> Generator[tuple[Post, Outcome], None, _Rest]:
        """Yield the first posts, those whose outcome is stored. Return the others."""
        end = 0
        # Closed before the same file is opened for writing.
        with closing(self._entries()) as entries:
            for entry in entries:
                post = next(posts, None)
                if post is None:
                    break
                outcome = entry.outcome(post, recipe)
                if outcome is None:
                    posts = chain([post], posts)
                    break
                end = entry.end
                self.resumed += 1
                self.rows += 1
                yield post, outcome
        return _Rest(posts, end)

    def _record(
        self,
        outcomes: Iterable[tuple[Post, Outcome]],
        file: BinaryIO,
        recipe: str,
    ) -> Iterator[tuple[Post, Outcome]]:
        """Yield the outcomes, each after it was added to the file."""
        common: dict[str, Any] = {}
        flushed_at = time.monotonic()
        for post, outcome in outcomes:
            if isinstance(outcome, Classification):
                fields = outcome.model_dump(exclude={"id", "fingerprint"})
                common_fields = {name: fields.pop(name) for name in COMMON_FIELDS}
                if common_fields != common:
                    common = common_fields
                    _write_line(file, {"common": common})
            else:
                fields = {"error": outcome.error}
            _write_line(file, {"post": fingerprint(post, recipe), **fields})
            self.rows += 1
            now = time.monotonic()
            if now - flushed_at >= FLUSH_S:
                file.flush()
                flushed_at = now
            yield post, outcome

    def _entries(self) -> Generator[_Entry]:
        """Yield the stored outcomes, up to a damaged or incomplete line."""
        try:
            file = self._open_file(os.O_RDONLY)
        except FileNotFoundError:
            return
        common: dict[str, Any] = {}
        end = 0
        with file:
            for line in file:
                fields = _parse_line(line)
                if fields is None:
                    return
                end += len(line)
                if "common" in fields:
                    common = fields["common"]
                    continue
                digest = fields.pop("post", "")
                stored = {**common, "fingerprint": digest, **fields}
                yield _Entry(digest, stored, end)

    def _open(self, end: int) -> BinaryIO:
        """Open the file to add outcomes at this place; those after it are dropped."""
        file = self._open_file(os.O_RDWR | os.O_CREAT)
        file.truncate(end)
        file.seek(end)
        return file

    def _open_file(self, flags: int) -> BinaryIO:
        """Open the file. Raises UserError if it is none, and OSError.

        In a folder of everybody, another user may have put a link there, through which a file of
        this user would be truncated, or a pipe, which would block.
        """
        try:
            descriptor = os.open(self._path, flags | NO_LINK, PRIVATE)
        except OSError as error:
            if error.errno in NO_FILE_ERRORS:
                raise self._no_file() from None
            raise
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            os.close(descriptor)
            raise self._no_file()
        if flags & os.O_RDWR:
            return os.fdopen(descriptor, "r+b")
        return os.fdopen(descriptor, "rb")

    def _no_file(self) -> UserError:
        name = printable(str(self._path))
        return UserError(
            f"{name} must be a file, for the outcomes of an interrupted run, but is a link or "
            "something else. Delete it, or give another --out."
        )

    @property
    def is_empty(self) -> bool:
        """True if no run has left an outcome, whatever this one has read of them."""
        try:
            status = self._path.lstat()
        except FileNotFoundError:
            return True
        return stat.S_ISREG(status.st_mode) and status.st_size == 0

    def discard(self) -> None:
        """Delete the outcomes: the output is complete."""
        self._path.unlink(missing_ok=True)


def journal_for(out: str | None) -> Journal | None:
    """Return the journal of an output; None for one that has no name to continue under, such as a
    pipe.
    """
    if out is None or out == "-":
        return None
    path = Path(out)
    if is_special(path):
        return None
    return Journal(path)


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the fields of a line; None if it is damaged or incomplete."""
    if not line.endswith(b"\n"):
        return None
    try:
        fields = from_json(line)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    common = fields.get("common", {})
    if not isinstance(common, dict):
        return None
    return fields


def _write_line(file: BinaryIO, fields: dict[str, Any]) -> None:
    line = json.dumps(fields, separators=(",", ":"))
    file.write(line.encode() + b"\n")
