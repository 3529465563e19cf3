"""The state of a study: what it was asked for, and how far it is.

It is saved after the parts that it counts were written, in one step. A part of rows behind the
saved position comes from a run that was killed in between, and is deleted: its rows are written
again.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import UserError, printable

#: The state's file. Dataset readers ignore names that begin with `_`.
STATE_FILE = "_study.json"
#: Incremented when a state of an earlier version cannot be continued.
VERSION = 1


@dataclass
class DumpState:
    """The position in a dump.

    size: in bytes, by which a changed file is noticed. records: those read. problem: why it could
    not be read to its end; "" if it could. The other numbers are records without a row: left out
    by the filters, removed on Reddit, malformed, without a text, and failed in the model.
    """

    name: str
    size: int
    records: int = 0
    rows: int = 0
    filtered: int = 0
    removed: int = 0
    malformed: int = 0
    without_text: int = 0
    failed: int = 0
    is_done: bool = False
    problem: str = ""


@dataclass
class StudyState:
    """The state of a study. options: everything that decides on its rows, as JSON.

    model: name, revision, weights and labels of the model. seconds: those that its runs took.
    """

    options: dict[str, Any]
    dumps: list[DumpState]
    model: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    version: int = VERSION

    @property
    def is_complete(self) -> bool:
        return all(dump.is_done for dump in self.dumps)

    @property
    def rows(self) -> int:
        return sum(dump.rows for dump in self.dumps)

    @property
    def records(self) -> int:
        return sum(dump.records for dump in self.dumps)

    @property
    def failed(self) -> int:
        return sum(dump.failed for dump in self.dumps)

    @property
    def removed(self) -> int:
        return sum(dump.removed for dump in self.dumps)

    @property
    def malformed(self) -> int:
        return sum(dump.malformed for dump in self.dumps)

    def save(self, out: Path) -> None:
        """Save the state to a folder, durably. Raises OSError."""
        text = json.dumps(asdict(self), indent=1)
        with replacing(out / STATE_FILE, durable=True) as temporary:
            temporary.write_text(text, encoding="utf-8")


def read_state(out: Path) -> StudyState | None:
    """Return a folder's state; None if there is none.

    Raises UserError if it is damaged, and OSError.
    """
    path = out / STATE_FILE
    try:
        text = path.read_text(encoding="utf-8")
        stored = json.loads(text)
        if stored["version"] != VERSION:
            raise ValueError("another version")
        dumps = [DumpState(**dump) for dump in stored.pop("dumps")]
        return StudyState(dumps=dumps, **stored)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        name = printable(str(path))
        raise UserError(
            f"Cannot read {name}, the state of the study. Give a new folder as --out."
        ) from None


def check_continues(
    out: Path, stored: StudyState, options: Mapping[str, Any], dumps: list[DumpState]
) -> None:
    """Raise UserError if a folder belongs to a study with other options or other dumps."""
    name = printable(str(out))
    for option, value in options.items():
        if stored.options.get(option) != value:
            raise UserError(
                f"{name} belongs to a study with another {option}. Give another --out, or repeat "
                "the earlier command."
            )
    sizes = {dump.name: dump.size for dump in stored.dumps}
    for dump in dumps:
        dump_name = printable(dump.name)
        if dump.name not in sizes:
            raise UserError(
                f"{name} belongs to a study without {dump_name}. Give another --out, or the "
                "earlier dumps."
            )
        if sizes[dump.name] != dump.size:
            raise UserError(
                f"{dump_name} has changed since {name} was begun. Give another --out."
            )
    if len(dumps) != len(stored.dumps):
        raise UserError(
            f"{name} belongs to a study of {len(stored.dumps)} dumps, not {len(dumps)}. Give "
            "another --out, or the earlier dumps."
        )
