"""Columns of a labelled file: those of the input, then the new ones."""

import json
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any, NamedTuple

from feedmill.producers.files import Row, Source
from feedmill.producers.records import normalize_column
from feedmill.shared.errors import InputError, UserError, printable
from feedmill.shared.messages import Classification, is_missing

#: Column with the score of a label.
SCORE_COLUMN = "score_{}"
MAX_INTEGER = 2**63 - 1


class Columns(NamedTuple):
    """The columns of an output file.

    given: the input's columns, as in the file. kinds: the type of each, if it is JSON: bool, int, float or str. new:
    names of the new columns: label, its score, and the scores of `labels`.
    """

    given: Sequence[str]
    kinds: Sequence[type] | None
    new: Sequence[str]
    labels: Sequence[str]

    def found(self, found: Classification | str) -> list[str | float | None]:
        """Return the values of the new columns; None without a classification."""
        if isinstance(found, str):
            return [None] * len(self.new)
        return [found.label, found.scores[found.label], *map(found.scores.get, self.labels)]

    def names(self) -> list[str]:
        """Return the names of all columns, different from each other and not empty."""
        names: list[str] = []
        for number, name in enumerate((*self.given, *self.new), 1):
            unique = first = name.strip() or f"column_{number}"
            count = 1
            while unique in names:
                count += 1
                unique = f"{first}_{count}"
            names.append(unique)
        return names


def new_columns(labels: Sequence[str], prefix: str) -> list[str]:
    """Return the names of the new columns. labels: those whose scores get a column."""
    return [f"{prefix}{name}" for name in ("label", "label_score", *map(SCORE_COLUMN.format, labels))]


def check_new_columns(source: Source, given: Iterable[str], new: Iterable[str]) -> None:
    """Raise UserError if a new column has the name of a given one, in any case."""
    known = {normalize_column(name): name for name in given}
    for name in new:
        if (same := known.get(normalize_column(name))) is not None:
            raise UserError(
                f"{source.name} already has a column {printable(same)}. Give --prefix, such as --prefix predicted_, "
                "for the names of the new columns."
            )


class Survey:
    """The keys of JSON records, in order, and the types of their values."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._kinds: dict[str, set[type]] = {}
        self.rows = 0
        for row in rows:
            self.rows += 1
            if isinstance(row.values, dict):
                for key, value in row.values.items():
                    if not is_missing(value):
                        self._kinds.setdefault(key, set()).add(_kind(value))
                    elif key not in self._kinds:
                        self._kinds[key] = set()

    @property
    def keys(self) -> list[str]:
        return list(self._kinds)

    @property
    def kinds(self) -> list[type]:
        """The type of each key's values; str if they differ."""
        return [_common(kinds) for kinds in self._kinds.values()]


def _kind(value: Any) -> type:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_INTEGER:
        return str
    return type(value) if isinstance(value, bool | int | float) else str


def _common(kinds: set[type]) -> type:
    if kinds == {int, float}:
        return float
    return next(iter(kinds)) if len(kinds) == 1 else str


def as_text(value: Any) -> str | None:
    """Return a JSON value as text: strings unchanged, other values as JSON; None for a missing value."""
    if is_missing(value):
        return None
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_kind(value: Any, kind: type) -> Any:
    """Return a JSON value as `kind`; None for a missing or infinite one."""
    if is_missing(value) or (isinstance(value, float) and not isfinite(value)):
        return None
    return as_text(value) if kind is str else kind(value)


def check_header(source: Source, header: Iterable[str]) -> None:
    """Raise InputError if the header is not UTF-8: its names could not be written."""
    try:
        "".join(header).encode()
    except UnicodeEncodeError:
        raise InputError(
            f"{source.name} is not UTF-8. Give its encoding, such as --encoding cp1252 for Excel on Windows."
        ) from None
