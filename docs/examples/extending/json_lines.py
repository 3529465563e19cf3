"""A live source: posts that a program appends to a file, one JSON object a line.

POSTS=posts.jsonl PYTHONPATH=docs/examples/extending feedmill ingest live json_lines:JsonLines
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from feedmill.producers.live.source import Clock, Event, Pause, Source, SourceFailed
from feedmill.shared.settings import Settings

POLL_INTERVAL_S = 1.0


class JsonLines(Source):
    """A line's position is the number of bytes before it. The first start reads the whole file."""

    name = "json_lines"

    def __init__(self, settings: Settings, clock: Clock) -> None:  # noqa: ARG002 - other sources have settings
        self._clock = clock
        self._path = Path(os.environ["POSTS"])

    def events(self, cursor: int | None) -> Iterator[tuple[int, bytes] | Pause]:
        try:
            with self._path.open("rb") as file:
                file.seek(cursor or 0)
                while True:
                    begin = file.tell()
                    line = file.readline()
                    if line.endswith(b"\n"):
                        yield begin, line
                    else:  # the end, or a line that is being written
                        file.seek(begin)
                        yield Pause(POLL_INTERVAL_S)
        except OSError as error:
            raise SourceFailed(f"the file cannot be read ({error.strerror})") from error

    def parse(self, raw: tuple[int, bytes]) -> Event:
        begin, line = raw
        fields = json.loads(line)
        if fields.get("deleted"):
            return Event(begin, self._clock.time(), deleted=fields["id"])
        return Event(begin, self._clock.time(), post=fields)
