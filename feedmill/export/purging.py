"""Copy an export's file without the rows of purged posts, and with `--latest` without earlier results."""

from collections import Counter
from pathlib import Path

from feedmill.export.text import Format, PostKey
from feedmill.reading.rows import RowReader


def without_purged(
    path: Path, target: Path, form: Format, reader: RowReader, latest: bool = False
) -> tuple[int, int | None]:
    """Copy a file to `target` without purged posts and, if `latest`, with only the last row of each post.

    Returns the number of removed rows of purged posts, and the number of rows in `target`. If nothing has to be
    removed, makes no copy and returns (0, None).
    """
    gone = reader.gone(post.id for post in form.posts(path))
    rows = Counter(form.posts(path) if gone or latest else ())
    if not gone and rows.total() == len(rows):
        return 0, None
    removed = sum(count for post, count in rows.items() if post.id in gone)

    def kept(post: PostKey) -> bool:
        rows[post] -= 1  # now the number of later rows of this post
        return post.id not in gone and not (latest and rows[post])

    return removed, form.copy(path, target, kept)
