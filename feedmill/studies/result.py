"""The outcome of a study. It needs no package of an extra."""

from pathlib import Path
from typing import NamedTuple


class StudyResult(NamedTuple):
    """The outcome of a study, or of a part of it.

    Attributes:
        rows: Number of labelled posts and comments in the folder.
        records: Number of records that were read.
        removed: Number of records that were deleted or removed on Reddit.
        failed: Number of records that the model could not classify.
        malformed: Number of records that could not be read.
        complete: False if it was interrupted: the same call continues.
        problems: Why dumps could not be read to their end, by name.
        out: The folder.
    """

    rows: int
    records: int
    removed: int
    failed: int
    malformed: int
    complete: bool
    problems: dict[str, str]
    out: Path
