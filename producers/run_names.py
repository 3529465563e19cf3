"""Name the runs of files."""

import time
from pathlib import Path

from feedmill.producers.files import is_file
from feedmill.shared.errors import UNPRINTABLE_CHARACTERS
from feedmill.shared.messages import MAX_RUN, digest

#: Leading bytes that identify a file. Its size does not, since an interrupted download may
#: continue later.
HEAD_BYTES = 1 << 16
#: Characters of the digest in a run's name.
DIGEST_CHARACTERS = 6


def default_run(path: str, name: str | None = None) -> str:
    """Return the run of a file's posts, without blanks: "posts.csv-3f2a9c".

    Sending the file again continues its run and skips what was sent, also if the file has grown.
    A file of this name that begins otherwise is another run. A file that cannot be read twice,
    such as standard input, is a run of its own each time: "stdin-2026-11-22T21:30:05" (UTC; those
    that start within the same second share one).

    name: the file's own name, if it is not that of the path.
    """
    stem = _run_stem(path) if name is None else _words(name)
    suffix = _run_suffix(path)
    room = MAX_RUN - len(suffix) - 1
    return f"{stem[:room]}-{suffix}"


def _run_stem(path: str) -> str:
    """Return the start of a run's name: the file's name without blanks."""
    if path == "-":
        return "stdin"
    name = Path(path).name
    if name.isdecimal() and not is_file(path):
        return "pipe"  # /dev/fd/63, the shell's name of <(command)
    return _words(name)


def _words(name: str) -> str:
    """Return a file's name without blanks."""
    words = UNPRINTABLE_CHARACTERS.sub("_", name).split()
    return "_".join(words)


def _run_suffix(path: str) -> str:
    """Return the end of a run's name: a digest of the file's start, or else the time."""
    now = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
    if not is_file(path):
        return now
    try:
        with Path(path).open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:  # reported when the posts are read
        return now
    return digest(head.decode("latin-1"))[:DIGEST_CHARACTERS]
