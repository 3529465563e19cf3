"""Read and write tables of posts and results as Arrow record batches: CSV, JSONL and Parquet.

This module is independent of Arrow: formats, pairs of rows and outcomes, and names of the columns
of labels.
"""

import codecs
import os
import sys
from collections import deque
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from feedmill.producers.files import is_file
from feedmill.producers.records import normalize_key
from feedmill.shared.atomic_files import final_path, is_special, replacing
from feedmill.shared.errors import (
    UserError,
    explain_unwritable,
    printable,
    require_packages,
)
from feedmill.shared.messages import (
    ClassifyOptions,
    Outcome,
    Post,
    labels_above,
)

#: Formats by ending, and endings of compressed text files.
FORMATS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".xlsx": "xlsx",
}
#: Formats that are compressed by themselves.
PACKED_FORMATS = ("parquet", "xlsx")
COMPRESSIONS = (".gz", ".zst")
#: Endings and beginnings of HTML pages, and bytes to read of a file to find one.
PAGE_ENDINGS = (".html", ".htm")
PAGE_STARTS = (b"<!doctype html", b"<html")
PAGE_BYTES = 256
#: Endings of files to write, for messages.
ENDINGS = ".csv, .tsv, .jsonl, .parquet or .xlsx"

#: Function that classifies posts in order, such as workers.pipeline.offline.classify.
Classify = Callable[[Iterable[Post]], Generator[tuple[Post, Outcome]]]


def format_of(name: str) -> str | None:
    """Return the format for the ending of a file's name, in any case; None for another ending."""
    path = Path(name.lower())
    if path.suffix not in COMPRESSIONS:
        return FORMATS.get(path.suffix)
    uncompressed = Path(path.stem)
    form = FORMATS.get(uncompressed.suffix)
    if form in PACKED_FORMATS:
        return None
    return form


def compression_of(path: Path) -> str:
    """Return the ending of a compressed text file, in lower case; "" for another file."""
    ending = path.suffix.lower()
    if ending in COMPRESSIONS:
        return ending
    return ""


def require_format(form: str) -> None:
    """Raise UserError if a package for writing this format is not installed.

    Imports none of them.
    """
    require_packages("Writing a table", "tables", ["pyarrow"])
    if form == "xlsx":
        require_packages("Writing .xlsx", "excel", ["openpyxl"])


def check_output(
    out: Path,
    source: str | None = None,
    for_excel: bool = False,
    labels_file: Path | None = None,
) -> str:
    """Return the format of a table to write.

    Check before the work that it can be written; write nothing.

    source: path of the input, which must stay; - is standard input. for_excel: begin with a byte
    order mark. labels_file: the file of labels, which must stay, too. Raises UserError.
    """
    form = format_of(str(out))
    if form is None:
        raise UserError(
            f"Cannot tell the format of {printable(str(out))}. Give an --out that "
            f"ends in {ENDINGS}."
        )
    require_format(form)
    if for_excel and form not in ("csv", "tsv"):
        raise UserError(
            "--excel marks CSV for Excel. Give an --out that ends in .csv or .tsv, or "
            "leave out --excel."
        )
    check_file(out, source, labels_file)
    return form


def check_file(
    out: Path, source: str | None = None, labels_file: Path | None = None
) -> None:
    """Raise UserError if a file cannot be made there, or if it would replace an input.

    A file needs a folder in which files may be made, because it replaces an earlier one when it is
    complete. Pipes and devices are written directly. source: path of the input; - is standard
    input. labels_file: the file of labels.
    """
    with explain_unwritable(out):  # a name that is too long
        _refuse_folder(out)
        _refuse_loop(out)
        if source is not None:
            _refuse_input(out, source, "the input file")
        if labels_file is not None:
            _refuse_input(out, str(labels_file), "the file of --labels")
        if not is_special(out):
            _refuse_unwritable_folder(out)


def _refuse_folder(out: Path) -> None:
    if out.is_dir():
        where = printable(str(out))
        raise UserError(f"{where} is a folder. Give the name of a file.")


def _refuse_loop(out: Path) -> None:
    if final_path(out).is_symlink():
        where = printable(str(out))
        raise UserError(
            f"Cannot write {where}: it is a symbolic link to itself. Delete it, or "
            "give another place."
        )


def _refuse_input(out: Path, source: str, what: str) -> None:
    if _is_input(out, source):
        where = printable(str(out))
        raise UserError(f"{where} is also {what}. Give another name.")


def _refuse_unwritable_folder(out: Path) -> None:
    """Raise UserError if no files can be made in the folder of a file, or of a link's target."""
    folder = out.parent
    if out.is_symlink():
        folder = final_path(out).parent
    where = printable(str(out))
    folder_name = printable(str(folder))
    if not folder.is_dir():
        raise UserError(
            f"Cannot write {where}: there is no folder {folder_name}. Create it first."
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(
            f"Cannot write {where}: you may not create files in {folder_name}. "
            "Give another place."
        )


def _is_input(out: Path, source: str) -> bool:
    """Return whether a file is the input, which standard input may be, too. Raises OSError."""
    if not out.is_file():
        return False
    if source != "-":
        return is_file(source) and out.samefile(source)
    try:
        status = os.fstat(sys.stdin.fileno())
    except (OSError, ValueError, AttributeError):  # closed, or no file
        return False
    return os.path.samestat(status, out.stat())


def check_folder(folder: Path, *files: Path | str | None) -> None:
    """Check before the work that files can be written to a folder, which may be new.

    files: those that the same command writes, which need names of their own. Raises UserError.
    """
    for file in files:
        if file is None:
            continue
        if Path(file).resolve() == folder.resolve():
            name = printable(str(folder))
            raise UserError(
                f"{name} cannot be both a folder and a file to write. Give two names."
            )
    with explain_unwritable(folder):
        paths = (folder, *folder.absolute().parents)
        existing = next(path for path in paths if path.exists())
        is_folder = existing.is_dir()
    if not is_folder:
        name = printable(str(existing))
        raise UserError(f"{name} is a file. Give the name of a folder.")


def save_page(page: Path, text: str) -> None:
    """Write an HTML page. Raises UserError."""
    with explain_unwritable(page), replacing(page) as temporary:
        temporary.write_text(text, encoding="utf-8")


def check_page(
    page: Path,
    source: str | None = None,
    table: str | None = None,
    labels_file: Path | None = None,
    folder: Path | None = None,
) -> None:
    """Check before the work that an HTML page can be written, and replaces nothing but another
    page.

    source: path of the input. table: path of a table that the same command writes. labels_file:
    the file of labels. folder: the folder of other files that the same command writes. Raises
    UserError.
    """
    check_file(page, source, labels_file)
    name = printable(str(page))
    if table is not None and page.resolve() == Path(table).resolve():
        raise UserError(f"{name} is also the --out. Give another --page.")
    has_ending = page.suffix.lower() in PAGE_ENDINGS
    is_beside_files = False
    with explain_unwritable(page):
        is_other = page.is_file() and not has_ending and not _is_page(page)
        if folder is not None:
            is_beside_files = folder.resolve() in page.resolve().parents
    if is_beside_files and not has_ending:
        raise UserError(
            f"{name} is in a folder that this command writes other files to. Give a --page that "
            "ends in .html."
        )
    if is_other:
        raise UserError(
            f"{name} exists and is not an HTML page. Give a name that ends in .html, or a new one."
        )


def _is_page(file: Path) -> bool:
    """Return whether a file is empty or begins as an HTML page does. Raises OSError."""
    with file.open("rb") as page:
        start = page.read(PAGE_BYTES)
    start = start.removeprefix(codecs.BOM_UTF8)
    start = start.lstrip()
    start = start.lower()
    is_empty = start == b""
    return is_empty or start.startswith(PAGE_STARTS)


def with_outcomes(
    rows: Iterable[Any], classify: Classify
) -> Generator[tuple[Any, Outcome | None]]:
    """Yield every row or item, in order, with the outcome of its `post`; None if that is not a
    Post.

    Close the generator to stop the model.
    """
    waiting: deque[Any] = deque()

    def posts() -> Iterator[Post]:
        for row in rows:
            waiting.append(row)
            if isinstance(row.post, Post):
                yield row.post

    with closing(classify(posts())) as posts_and_outcomes:
        for _, outcome in posts_and_outcomes:
            row = waiting.popleft()
            while not isinstance(row.post, Post):
                yield row, None
                row = waiting.popleft()
            yield row, outcome
    while waiting:
        yield waiting.popleft(), None


class Classified(Protocol):
    """A classification or a prediction."""

    @property
    def label(self) -> str | None: ...
    @property
    def scores(self) -> Mapping[str, float]:
        """The score of every label, best first."""

    @property
    def labels(self) -> Sequence[str]: ...
    @property
    def language(self) -> str | None: ...


class LabelColumns(NamedTuple):
    """The columns that labelled rows get: the label and its score, and further ones.

    score_labels: the labels that get a column with their score. has_best_label: a column with the
    best label, also of a row that fits none. has_labels: a column with the list of all labels that
    apply, best first: those with at least the score `min_score`, if it is set. has_language: a
    column with the row's language.
    """

    prefix: str = ""
    score_labels: Sequence[str] = ()
    has_best_label: bool = False
    has_labels: bool = False
    has_language: bool = False
    min_score: float | None = None

    def of(
        self, options: ClassifyOptions, has_languages: bool = False
    ) -> "LabelColumns":
        """Return these columns and the ones that the options call for.

        has_languages: only rows in some languages get a label.
        """
        may_lack_label = options.none is not None and options.none is not False
        return self._replace(
            has_best_label=may_lack_label or has_languages,
            has_labels=options.multi_label,
            has_language=has_languages,
        )

    @property
    def names(self) -> list[str]:
        names = [self.label, f"{self.prefix}label_score"]
        if self.has_best_label:
            names.append(self.best_label)
        if self.has_labels:
            names.append(self.labels)
        if self.has_language:
            names.append(self.language)
        names.extend(f"{self.prefix}score_{label}" for label in self.score_labels)
        return names

    @property
    def label(self) -> str:
        """The name of the column with the label."""
        return f"{self.prefix}label"

    @property
    def best_label(self) -> str:
        """The name of the column with the best label."""
        return f"{self.prefix}best_label"

    @property
    def labels(self) -> str:
        """The name of the column with the list of labels."""
        return f"{self.prefix}labels"

    @property
    def language(self) -> str:
        """The name of the column with the language."""
        return f"{self.prefix}language"

    def values(self, classified: "Classified | None") -> list[Any]:
        """Return the values of a row. classified: None, or without scores, if it was not."""
        if classified is None or not classified.scores:
            return [None] * len(self.names)
        scores = classified.scores
        best_label = classified.label
        if best_label is None:
            best_label = next(iter(scores))
        values: list[Any] = [classified.label, scores[best_label]]
        if self.has_best_label:
            values.append(best_label)
        if self.has_labels:
            values.append(self._labels(classified))
        if self.has_language:
            values.append(classified.language)
        values.extend(scores.get(score_label) for score_label in self.score_labels)
        return values

    def _labels(self, classified: "Classified") -> Sequence[str]:
        if self.min_score is None:
            return classified.labels
        return labels_above(classified.scores, self.min_score)


def check_new_columns(
    table: str, given: Iterable[object], new: Sequence[str], flag: str
) -> None:
    """Raise UserError if a new column has the name of a given one, in any case. table, flag: names
    in the error.
    """
    columns = {normalize_key(str(name)): name for name in given}
    for name in new:
        column = columns.get(normalize_key(name))
        if column is not None:
            shown = printable(str(column))
            raise UserError(
                f"{table} already has a column {shown}. Rename it, or give {flag}, such as "
                "predicted_, for the names of the new columns."
            )
