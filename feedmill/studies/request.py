"""A request for a study: which dumps, which of their records, which labels, and where to.

The command and `feedmill.study` make the same requests.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from feedmill.producers.files import is_file
from feedmill.producers.records import (
    COMMENTS,
    NO_FILTERS,
    FileOptions,
    Filters,
)
from feedmill.shared.errors import InputError, UserError, printable
from feedmill.shared.messages import ClassifyOptions, digest
from feedmill.studies.state import STATE_FILE, DumpState

#: Endings of the files that are read of a folder of dumps.
DUMP_ENDINGS = (".zst", ".gz", ".jsonl", ".ndjson", ".json", ".csv", ".parquet")
#: Where the model computes.
HERE = "here"
RAY = "ray"
#: Rows of a chunk, and seconds after which one is written: the most that a killed process loses.
PART_ROWS = 20_000
PART_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class StudyRequest:
    """A study's dumps, filters and labels.

    dumps: files, or folders of them. filters: of the records. options: those of the call.
    is_default: see `load_offline`. context: classify comments with their posts' titles. titles:
    further files with such posts. on: HERE, or RAY with `actors` copies of the model.
    """

    dumps: Sequence[str]
    out: Path
    filters: Filters = NO_FILTERS
    options: ClassifyOptions = field(default_factory=ClassifyOptions)
    is_default: bool = False
    file: FileOptions = field(default_factory=FileOptions)
    context: bool = False
    titles: Sequence[str] = ()
    on: str = HERE
    actors: int | None = None
    part_rows: int = PART_ROWS
    part_seconds: float = PART_SECONDS

    def check(self) -> None:
        """Raise UserError for a request that cannot be met."""
        if self.on not in (HERE, RAY):
            raise UserError(f"--on {self.on:.80}: give ray, or leave it out.")
        if self.actors is not None and self.on != RAY:
            raise UserError("--actors needs --on ray.")
        if self.actors is not None and self.actors < 1:
            raise UserError(f"--actors {self.actors}: give at least 1.")
        if self.context and COMMENTS not in self.filters.kinds:
            raise UserError("--context is for comments. Give --kind posts,comments.")
        if self.titles and not self.context:
            raise UserError("--titles needs --context title.")
        self._check_folder()

    def _check_folder(self) -> None:
        """Raise UserError if the folder holds something else."""
        out = self.out
        name = printable(str(out))
        if out.exists() and not out.is_dir():
            raise UserError(f"{name} is a file. Give the name of a folder as --out.")
        if not out.is_dir() or (out / STATE_FILE).exists():
            return
        others = [path for path in out.iterdir() if not path.name.startswith(".")]
        if others:
            raise UserError(
                f"{name} contains other files. Give a new or an empty folder as --out."
            )

    def found_dumps(self) -> list[DumpState]:
        """Return the dumps, those of a folder in the order of their names. Raises InputError.

        A dump that is named twice, maybe in another way or by a link, is one.
        """
        paths: dict[Path, None] = {}
        for dump in self.dumps:
            for path in _files_of(dump):
                paths[path.resolve()] = None
        dumps: list[DumpState] = []
        for path in paths:
            size = path.stat().st_size
            dumps.append(DumpState(name=str(path), size=size))
        if not dumps:
            raise InputError(
                "There are no dumps to study. Give files, or folders of them."
            )
        return dumps

    def identity(self, recipe: str, columns: Iterable[str]) -> dict[str, Any]:
        """Return everything that decides on the rows, as JSON. recipe: see `OfflineModel`."""
        filters = self.filters
        # authors are never stored, not even those that a user looks for
        author_digests = [digest(author) for author in filters.authors]
        identity = {
            "--kind": sorted(filters.kinds),
            "--subreddit": sorted(filters.subreddits),
            "--author": sorted(author_digests),
            "--words": list(filters.words),
            "--since": filters.since,
            "--until": filters.until,
            "--languages": sorted(filters.languages),
            "--context": self.context,
            "--titles": sorted(self.titles),
            "choice of columns": vars(self.file),
            "model or other labels": recipe,
            "columns": list(columns),
        }
        # as a state has it that was read
        stored: dict[str, Any] = json.loads(json.dumps(identity))
        return stored


def _files_of(dump: str) -> list[Path]:
    """Return a file, or the dumps in a folder. Raises InputError."""
    path = Path(dump)
    name = printable(dump)
    if path.is_dir():
        files = [file for file in sorted(path.iterdir()) if _is_dump(file)]
        if not files:
            endings = ", ".join(DUMP_ENDINGS)
            raise InputError(
                f"{name} contains no dumps ({endings}). Give another folder."
            )
        return files
    if not is_file(dump):
        raise InputError(
            f"There is no file {name}. A study reads its dumps again when it continues, so they "
            "cannot come from a pipe."
        )
    return [path]


def _is_dump(path: Path) -> bool:
    name = path.name.lower()
    if name.startswith((".", "_")):
        return False
    if not name.endswith(DUMP_ENDINGS):
        return False
    return path.is_file()
