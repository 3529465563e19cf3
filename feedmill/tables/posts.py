"""Write posts as a table, as they arrive. What was written before an interruption stays readable.

The table is complete when its block ends without an error: it then gets its name. After an error
or an interruption, the posts so far get the name as well, unless a file with this name existed:
that one stays, and the posts so far are written beside it, as posts.partial.csv.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

import pyarrow as pa

from feedmill.producers.records import POST_COLUMNS, SNAPSHOT_COLUMNS
from feedmill.shared.atomic_files import (
    final_path,
    fitting_name,
    is_special,
    publish,
    temporary_path,
)
from feedmill.shared.messages import Post, clean_body, clean_title
from feedmill.tables import compression_of, format_of
from feedmill.tables.writing import CsvLayout, delimiter_of, writer_to

#: Posts per batch.
BATCH_POSTS = 100
TIME = pa.timestamp("ms", tz="UTC")
#: Types of the columns that do not hold text.
TYPES = {
    "score": pa.int64(),
    "date": TIME,
    "edited": TIME,
    "nsfw": pa.bool_(),
    "spoiler": pa.bool_(),
}
#: Column -> the post's field.
FIELDS = {
    column: field
    for field, column in POST_COLUMNS.items()
    if column in SNAPSHOT_COLUMNS
}
SCHEMA = pa.schema(
    [(column, TYPES.get(column, pa.string())) for column in SNAPSHOT_COLUMNS]
)


class PostFile:
    """A table of posts in a file, one row for each id. Use it as a context manager.

    is_raw: write title and body as Reddit returned them; else HTML-unescaped, without white space
    around them. has_mark: begin a text file with a byte order mark, for Excel. Raises OSError.
    """

    def __init__(
        self, path: Path, *, is_raw: bool = False, has_mark: bool = False
    ) -> None:
        self.path = path
        self._is_raw = is_raw
        self._has_mark = has_mark
        self._is_special = is_special(path)
        self._existed = path.exists()
        self._ids: set[str] = set()
        self._waiting: list[Post] = []
        #: True while an exception of a signal handler would damage the file.
        self.is_writing = False
        #: Posts in the file.
        self.rows = 0
        #: The file with the posts, once the block has ended; None if there were none after an
        #: error.
        self.written: Path | None = None

    def __enter__(self) -> Self:
        self.is_writing = True
        self._temporary = self.path
        if not self._is_special:
            self._temporary = temporary_path(self.path)
        self._file: BinaryIO = self._temporary.open("wb")
        form = format_of(str(self.path)) or "csv"
        layout = CsvLayout(
            delimiter=delimiter_of(form),
            has_mark=self._has_mark,
        )
        self._writer = writer_to(
            self._file,
            form,
            SCHEMA,
            compression_of(self.path),
            layout,
        )
        self._file.flush()
        self.is_writing = False
        return self

    def add(self, posts: Iterable[Post]) -> None:
        """Add posts as they come. The file has them at the latest when the posts end."""
        for post in posts:
            if post.id in self._ids:
                continue
            self._ids.add(post.id)
            self._waiting.append(post)
            if len(self._waiting) >= BATCH_POSTS:
                self._write()
        self._write()

    def _write(self) -> None:
        if not self._waiting:
            return
        self.is_writing = True
        rows = [self._row(post) for post in self._waiting]
        batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
        self._writer.write(batch)
        self._file.flush()
        self.rows += len(rows)
        self._waiting.clear()
        self.is_writing = False

    def _row(self, post: Post) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for column, field in FIELDS.items():
            row[column] = getattr(post, field)
        if not self._is_raw:
            row["title"] = clean_title(post.title)
            row["body"] = clean_body(post.body)
        for column in ("date", "edited"):
            seconds = row[column]
            if seconds is not None:
                milliseconds = seconds * 1000
                row[column] = round(milliseconds)
        return row

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = kind is not None
        is_damaged = self.is_writing
        self.is_writing = True
        try:
            if is_damaged:
                self._writer.abandon()
            else:
                self._write()
                self._writer.close()
            self._file.close()
            if not (failed and self.rows == 0):
                self._publish(failed)
        finally:
            with suppress(OSError):
                self._file.close()
            if not self._is_special:
                self._temporary.unlink(missing_ok=True)

    def _publish(self, failed: bool) -> None:
        """Give the file its name."""
        self.written = self.path
        if self._is_special:
            return
        if failed and self._existed:
            self.written = partial_path(self.path)
        publish(self._temporary, self.written, durable=False)


def partial_path(path: Path) -> Path:
    """Return the name of an unfinished file beside an older one: posts.partial.csv.gz for
    posts.csv.gz.
    """
    target = final_path(path)
    count = 2 if compression_of(target) else 1
    suffixes = target.suffixes[-count:]
    ending = "".join(suffixes)
    stem = target.name.removesuffix(ending)
    name = fitting_name(stem, f".partial{ending}")
    return target.with_name(name)
