"""Export results to a single file. See writer.py."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from feedmill.export.purging import without_purged
from feedmill.export.state import read_state
from feedmill.export.text import Format, TextFormat
from feedmill.reading.entry_ids import id_before
from feedmill.reading.rows import ResultRow, RowReader
from shared.atomic_files import replacing
from shared.scripts.stream import Place

#: Approximate number of rows between saves of a single file's state.
SAVE_INTERVAL_ROWS = 20_000


class File:
    """A single file, published as OUT when the export is complete. See Folder; `written` includes earlier runs' rows.

    partial: OUT.partial, open for appending.
    """

    can_resume = True

    def __init__(
        self, out: Path, partial: BinaryIO, form: TextFormat, state: dict[str, Any], reader: RowReader
    ) -> None:
        self._out, self._partial = out, partial_path(out)
        self._state_file = out.with_name(f"{out.name}.partial.json")
        self._format = form
        self._reader = reader
        self._state = state
        size = self._partial.stat().st_size
        known = read_state(self._state_file, state) if size else None
        if known is not None and known["bytes"] > size:  # the state belongs to another file
            known = None
        self.resumed = known is not None
        self.place = Place(**known["place"]) if known else Place(id_before(state["since"] or 0.0))
        self.written = int(known["rows"]) if known else 0
        self.removed = 0
        os.truncate(self._partial, known["bytes"] if known else 0)
        partial.seek(0, os.SEEK_END)
        self._file = partial
        self._writer = form.open(partial)
        self._rows_saved = self.written

    def add(self, rows: Sequence[ResultRow], place: Place) -> None:
        self._writer.add(rows)
        self.written += len(rows)
        self.place = place
        if self.written - self._rows_saved >= SAVE_INTERVAL_ROWS:
            self.stop(place)

    def stop(self, place: Place) -> None:
        """Save the position of an unfinished export, so that a later run can resume it."""
        self.place = place
        self._file.flush()
        os.fsync(self._file.fileno())
        state = self._state | {
            "place": self.place._asdict(), "rows": self.written, "bytes": self._partial.stat().st_size
        }  # fmt: skip
        with replacing(self._state_file, durable=True) as temporary:
            temporary.write_text(json.dumps(state))
        self._rows_saved = self.written

    def close(self, place: Place) -> None:
        self.place = place
        self._file.flush()
        # The state is deleted first: it does not match the file published below. After a crash here, a later run starts
        # from the beginning.
        self._state_file.unlink(missing_ok=True)
        self.removed, left = _publish_file(self._partial, self._out, self._format, self._reader, self._state["latest"])
        self.written = self.written if left is None else left

    def abandon(self) -> None:
        """Delete the partial file unless a later run can resume it."""
        if not self._state_file.exists():
            self._partial.unlink(missing_ok=True)


class ParquetFile:
    """A single Parquet file, published as OUT when the export is complete. See File.

    Parquet files cannot be appended to: an interrupted export starts over.
    """

    can_resume = resumed = False

    def __init__(self, out: Path, form: Format, latest: bool, reader: RowReader, state: Mapping[str, Any]) -> None:
        self._out, self._partial = out, partial_path(out)
        self._format, self._latest, self._reader = form, latest, reader
        self.place = Place(id_before(state["since"] or 0.0))
        self.written = self.removed = 0
        self._writer = form.create(self._partial)

    def add(self, rows: Sequence[ResultRow], place: Place) -> None:
        self._writer.add(rows)
        self.written += len(rows)
        self.place = place

    def stop(self, place: Place) -> None:
        """Leave the export unfinished; `abandon` deletes its rows."""
        self.place = place
        self.written = 0

    def close(self, place: Place) -> None:
        self.place = place
        self._writer.close()
        self.removed, left = _publish_file(self._partial, self._out, self._format, self._reader, self._latest)
        self.written = self.written if left is None else left

    def abandon(self) -> None:
        with suppress(Exception):  # an interrupted writer may fail in any way
            self._writer.close()
        self._partial.unlink(missing_ok=True)


def partial_path(out: Path) -> Path:
    """Return the name of a single file until it is complete."""
    return out.with_name(f"{out.name}.partial")


def _publish_file(partial: Path, out: Path, form: Format, reader: RowReader, latest: bool) -> tuple[int, int | None]:
    """Rename a complete file to OUT, or publish its copy. See `without_purged`."""
    with replacing(out, durable=True) as temporary:
        removed, left = without_purged(partial, temporary, form, reader, latest)
        if left is None:
            partial.replace(temporary)
    return removed, left
