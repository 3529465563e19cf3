"""A live source that goes on after a signal, and a command that follows it with a short
limit.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

from feedmill.cli import ingest
from feedmill.cli.main import run
from feedmill.producers.live.source import Source, Stopped


class Stubborn(Source):
    """A source that hangs in a request, and swallows what should end it."""

    name = "stubborn"

    def __init__(self, settings: Any, clock: Any) -> None:
        pass

    def events(self, cursor: int | None) -> Iterator[Any]:
        sys.stderr.write("reading\n")
        while cursor is None:
            try:
                time.sleep(60)
            except Stopped:
                sys.stderr.write("asked to stop\n")
        yield None

    def parse(self, raw: Any) -> Any:
        return raw

    def status(self) -> dict[str, Any]:
        return {}


if __name__ == "__main__":
    ingest.STOP_LIMIT_S = 0.5
    sys.argv[1:] = ["ingest", "live", "tests.fakes.stubborn:Stubborn"]
    run()
