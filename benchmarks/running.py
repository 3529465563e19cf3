"""Run a benchmark in a temporary folder, with clean exits on signals and one-line messages for user errors."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from feedmill.stack.signals import exit_on_signals
from shared.errors import UserError


@contextmanager
def run_folder() -> Iterator[Path]:
    """Yield a temporary folder. Its path is short enough for Unix sockets."""
    try:
        with tempfile.TemporaryDirectory(prefix="mill-") as folder, exit_on_signals():
            yield Path(folder)
    except UserError as error:
        sys.exit(f"benchmark: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
