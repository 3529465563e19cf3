"""How a benchmark runs: in a folder of its own, ended by signals as by Ctrl-C, a mistake told in a sentence."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from feedmill.processes import ended_by_signals
from shared.errors import UserError


@contextmanager
def own_folder() -> Iterator[Path]:
    """A folder that goes with the run; its path is short, since sockets may lie in it."""
    try:
        with tempfile.TemporaryDirectory(prefix="mill-") as folder, ended_by_signals():
            yield Path(folder)
    except UserError as error:
        sys.exit(f"benchmark: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
