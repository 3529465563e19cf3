"""The titles of a dump's posts, by which its comments get their context.

A month of Reddit has some thirty million posts, so the titles are in an SQLite file, not in
memory.
"""

import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from feedmill.producers.files import FileSource, is_file
from feedmill.producers.records import DETECTED, POST_PREFIX, POSTS, Columns, Filters
from feedmill.shared.batches import batched
from feedmill.shared.errors import InputError, UserError, printable
from feedmill.shared.messages import Post

#: Posts that are stored at once.
BATCH_POSTS = 5_000
#: Kibibytes of memory for the file's pages; negative is SQLite's sign for this unit.
CACHE_KIB = -64_000
SCHEMA = """
CREATE TABLE IF NOT EXISTS titles (id TEXT PRIMARY KEY, title TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS files (name TEXT PRIMARY KEY) WITHOUT ROWID;
"""


class Titles:
    """A file of titles. Use it as a context manager. Raises UserError if the disk is full.

    It may be lost at any time, because it can be made again from the dumps: a damaged one is
    deleted.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        try:
            self._database = _open(self._path)
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise self._explained(error) from None
            self._delete()
            with self._explaining():
                self._database = _open(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    def has_file(self, name: str) -> bool:
        """Return whether all posts of a file were added."""
        query = "SELECT 1 FROM files WHERE name = ?"
        with self._explaining():
            row = self._database.execute(query, [name]).fetchone()
        return row is not None

    def add_file(
        self, name: str, posts: Iterable[Post], stop: Sequence[int] = ()
    ) -> None:
        """Add the titles of a file's posts. Repeated posts keep the last title.

        stop: not empty if `posts` may have ended early, so that the file is read again.
        """
        for batch in batched(posts, BATCH_POSTS):
            rows = [(_key(post.id), post.title) for post in batch if post.title]
            self._insert("INSERT OR REPLACE INTO titles VALUES (?, ?)", rows)
        if stop:
            return
        self._insert("INSERT OR REPLACE INTO files VALUES (?)", [(name,)])

    def _insert(self, statement: str, rows: Sequence[tuple[str, ...]]) -> None:
        with self._explaining():
            self._database.executemany(statement, rows)
            self._database.commit()

    def title_of(self, fullname: str) -> str:
        """Return the title of a post; "" if it is unknown."""
        query = "SELECT title FROM titles WHERE id = ?"
        with self._explaining():
            row = self._database.execute(query, [_key(fullname)]).fetchone()
        if row is None:
            return ""
        title: str = row[0]
        return title

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Raise UserError for an error of SQLite, and delete a file that is damaged."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            if _is_damage(error):
                self.close()
                self._delete()
            raise self._explained(error) from None

    def _explained(self, error: sqlite3.DatabaseError) -> UserError:
        name = printable(str(self._path))
        if _is_damage(error):
            return UserError(
                f"{name}, the titles of posts, is damaged and was deleted: {error}. Run the same "
                "command again: it reads them anew."
            )
        return UserError(
            f"Cannot keep the titles of posts in {name}: {error}. Make room there, or correct its "
            "permissions. TMPDIR names another folder for temporary files."
        )

    def _delete(self) -> None:
        for file in self._path.parent.glob(f"{self._path.name}*"):
            file.unlink(missing_ok=True)


def _open(path: Path) -> sqlite3.Connection:
    """Open a file of titles, or make one. Raises sqlite3.DatabaseError."""
    database = sqlite3.connect(path)
    try:
        # A killed process leaves it whole; only a power failure may not.
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = OFF")
        database.execute(f"PRAGMA cache_size = {CACHE_KIB}")
        database.executescript(SCHEMA)
    except sqlite3.DatabaseError:
        database.close()
        raise
    return database


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Return whether the file is damaged, unlike a full disk or a missing permission."""
    # its lowest byte; the others say where
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@contextmanager
def titles_of(
    paths: Sequence[str],
    columns: Columns = DETECTED,
    encoding: str | None = None,
    subreddits: frozenset[str] = frozenset(),
) -> Iterator[Titles]:
    """Yield the titles of the posts in files, in a temporary file.

    subreddits: those of the posts to read; empty for all. Raises InputError.
    """
    with (
        tempfile.TemporaryDirectory(prefix="feedmill-") as folder,
        Titles(Path(folder) / "titles.sqlite") as titles,
    ):
        for path in paths:
            posts = posts_with_titles(path, columns, encoding, subreddits)
            titles.add_file(path, posts)
        yield titles


def posts_with_titles(
    path: str,
    columns: Columns = DETECTED,
    encoding: str | None = None,
    subreddits: frozenset[str] = frozenset(),
    stop: Sequence[int] = (),
) -> Iterator[Post]:
    """Yield the posts of a file, without its comments and removed posts.

    Ends early if `stop` is not empty any more. Raises InputError.
    """
    if not is_file(path):
        raise InputError(
            "The titles of posts are read before their comments, so they cannot come from a "
            "pipe. Save the posts as a file, and name it with --titles."
        )
    filters = Filters(subreddits=subreddits, kinds=frozenset({POSTS}))
    source = FileSource(
        path,
        filters=filters,
        columns=columns,
        encoding=encoding,
    )
    for item in source.items():
        if stop:
            return
        if isinstance(item, Post):
            yield item


def _key(post_id: str) -> str:
    """Return a post's id without the prefix, which some dumps lack."""
    return post_id.removeprefix(POST_PREFIX)
