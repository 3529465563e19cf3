"""Ask at a terminal, explain unwritable files, and show a post as one line with its title cut to the width."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from redis.exceptions import RedisError
from rich.cells import cell_len
from rich.text import Text

from feedmill.shared.errors import UserError, printable
from feedmill.shared.messages import Post

#: Width of the id column in characters. Longer ids move the rest of their lines.
ID_WIDTH = 12
#: Cells that a title gets in a terminal that is too narrow.
MIN_TITLE_WIDTH = 20


@contextmanager
def explain_unwritable(place: Path) -> Iterator[None]:
    """Convert an OSError inside the block to UserError."""
    try:
        yield
    except (RedisError, BrokenPipeError):  # some errors of Redis are OSErrors; a closed pipe
        raise
    except OSError as error:
        where = printable(str(place))
        raise UserError(f"Cannot write {where}: {error.strerror or error}. Give another place.") from None


def make_folder(folder: Path) -> set[str]:
    """Create a folder, unless it exists, and return the names of what it contains. Raises UserError."""
    with explain_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return {path.name for path in folder.iterdir()}


def is_interactive() -> bool:
    return sys.stdin.isatty()


def confirm(action: str, yes: bool, only_in_terminal: bool = False) -> None:
    """Ask for confirmation of an action, unless `yes`; abort on "no".

    action: such as "Drop 3 dead letters". Without a terminal, raises UserError, or returns if `only_in_terminal`.
    """
    if yes or (only_in_terminal and not is_interactive()):
        return
    if not is_interactive():
        raise UserError(f"{action}? Add --yes to confirm.")
    typer.confirm(f"{action}?", abort=True)


def with_title(start: str, post: Post) -> str:
    """Append the post's title, or else its body, to the start of a line. Only a terminal gets it cut to its width."""
    title = Text(printable(" ".join((post.title or post.body).split())))
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns - cell_len(start)
        title.truncate(max(room, MIN_TITLE_WIDTH), overflow="ellipsis")
    return f"{start}{title.plain}"
