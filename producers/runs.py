"""Default names of runs: a file's name and a digest of its beginning, so that the same file is the same run."""

import time
from contextlib import suppress
from pathlib import Path

from feedmill.producers.files import is_file
from feedmill.producers.positions import head
from feedmill.shared.errors import UNPRINTABLE_CHARACTERS
from feedmill.shared.messages import MAX_RUN, digest

#: Characters of the digest in a run's name.
DIGEST_CHARACTERS = 6


def default_run(path: str) -> str:
    """Return the run of a file's posts, without blanks: "posts.csv-3f2a9c".

    Sending the file again continues its run and skips what was sent; another file of this name is another run. A file
    that cannot be read twice, such as standard input, is a run of its own each time: "stdin-2026-11-22T21:30:05" (UTC).
    """
    suffix = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
    if is_file(path):
        with suppress(OSError):  # reading the file reports it
            suffix = digest(head(path))[:DIGEST_CHARACTERS]
    name = "_".join(UNPRINTABLE_CHARACTERS.sub("_", Path(path).name).split())
    if path == "-":
        name = "stdin"
    elif name.isdecimal() and not is_file(path):  # /dev/fd/63, the shell's name of <(command)
        name = "pipe"
    return f"{name[: MAX_RUN - len(suffix) - 1]}-{suffix}"
