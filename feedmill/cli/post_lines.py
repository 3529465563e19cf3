"""Show a post as one line: its id in a column that fits, and its title, cut to the width of the terminal."""

import shutil
import sys
from collections.abc import Iterable

from rich.cells import cell_len
from rich.text import Text

from feedmill.shared.errors import printable
from feedmill.shared.messages import Post

#: Width of the id column in terminal cells: at least, and at most when long ids widen it.
MIN_ID_WIDTH, MAX_ID_WIDTH = 12, 40
#: Cells that a title gets in a terminal that is too narrow.
MIN_TITLE_WIDTH = 20


def id_width(ids: Iterable[str], least: int = MIN_ID_WIDTH) -> int:
    """Return the width of a column with these ids. least: the width so far."""
    return max([least, *(min(cell_len(printable(each)), MAX_ID_WIDTH) for each in ids)])


def with_title(start: str, post: Post) -> str:
    """Append the post's title, or else its body, to the start of a line. Only a terminal gets it cut to its width."""
    title = Text(printable(" ".join((post.title or post.body).split())))
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns - cell_len(start)
        title.truncate(max(room, MIN_TITLE_WIDTH), overflow="ellipsis")
    return f"{start}{title.plain}"
