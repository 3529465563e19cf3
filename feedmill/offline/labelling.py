"""Copy a file of posts with a label for each row. Needs pyarrow.

The model is loaded once the first row has been read, and the output gets its name once it is
complete.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from feedmill.offline.observer import LabellingObserver
from feedmill.offline.tally import Tally
from feedmill.producers.files import NOT_UTF8, FileRow, FileSource, TextTable, is_file
from feedmill.producers.parquet import ParquetTable
from feedmill.producers.records import NO_FILTERS, Columns, Filters
from feedmill.producers.titles import Titles
from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import InputError, UserError, explain_unwritable, printable
from feedmill.shared.messages import Classification, ClassifyOptions, Outcome
from feedmill.tables import (
    Classify,
    LabelColumns,
    check_new_columns,
    check_output,
    with_outcomes,
    writing,
)

#: Loads the model and returns its labels, and the function that classifies posts with it.
Load = Callable[[], tuple[Sequence[str], Classify]]


@dataclass(frozen=True, kw_only=True)
class LabelledFile:
    """The file to write, a path or a stream that is open.

    scores: add a column with each label's score. prefix: text before the names of the new columns.
    has_mark: begin CSV with a byte order mark. options: those of the call, which decide on
    further columns. has_languages: only rows in some languages get a label. min_score: least score
    of a label in the column `labels`; None is the model's.
    """

    path: Path | None = None
    stream: BinaryIO | None = None
    scores: bool = False
    prefix: str = ""
    has_mark: bool = False
    options: ClassifyOptions = field(default_factory=ClassifyOptions)
    has_languages: bool = False
    min_score: float | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.stream is None):
            raise ValueError("give either a path or a stream")

    def columns(self, labels: Sequence[str] = ()) -> LabelColumns:
        """Return the new columns. labels: those of the model; empty if unknown."""
        score_labels = labels if self.scores else ()
        columns = LabelColumns(self.prefix, score_labels, min_score=self.min_score)
        return columns.of(self.options, self.has_languages)


class Labelling:
    """One labelling of a file.

    If reading fails, the rows read before the error are still written, and `run` raises the error
    at the end.

    path: path of the input; - is standard input. limit: maximum rows. labels_file: the file
    of labels, which must stay. languages: those of rows that get a label; empty for all. kinds:
    those of records that get a label, see `Filters`. titles: see `FileSource`. Raises UserError if
    the output cannot be written.
    """

    def __init__(
        self,
        path: str,
        output: LabelledFile,
        *,
        columns: Columns,
        encoding: str | None = None,
        limit: int | None = None,
        labels_file: Path | None = None,
        observer: LabellingObserver | None = None,
        languages: frozenset[str] = frozenset(),
        kinds: frozenset[str] = NO_FILTERS.kinds,
        titles: Titles | None = None,
    ) -> None:
        self._path = path
        self._output_options = output
        self._columns = columns
        self._encoding = encoding
        self._limit = limit
        self._filters = Filters(kinds=kinds)
        self._titles = titles
        self._observer = observer or LabellingObserver()
        #: None is the input's format.
        self._form: str | None = None
        if output.path is not None:
            self._form = check_output(
                output.path,
                source=path,
                for_excel=output.has_mark,
                labels_file=labels_file,
            )
        self._broken: InputError | None = None
        #: True once the output has its name.
        self.is_published = False
        self.source = self._open_source()
        self.tally = Tally(languages)

    def _open_source(self) -> FileSource:
        return FileSource(
            self._path,
            filters=self._filters,
            columns=self._columns,
            encoding=self._encoding,
            titles=self._titles,
        )

    def run(self, load: Load) -> None:
        """Classify the rows and write the output. Raises UserError and OSError."""
        with closing(self.source) as source:
            source.keep_open()
            self._label(source, load)
        if self._broken:
            raise self._broken

    def _label(self, source: FileSource, load: Load) -> None:
        rows = source.rows()
        # Read a row before loading the model, which takes seconds.
        first = next(rows)
        form = self._form or _form_of(source)
        keys = self._keys(source, form)
        names = _column_names(source, keys, first)
        encoded = self._check_parquet(source, form)
        first_columns = self._output_options.columns()
        check_new_columns(source.name, names, first_columns.names, "--prefix")
        with self._observer.working("loading the model"):
            labels, classify = load()
        new_columns = self._output_options.columns(labels)
        check_new_columns(source.name, names, new_columns.names, "--prefix")

        readable = self._readable(chain([first], rows))
        first_rows = islice(readable, self._limit)
        labelled = with_outcomes(first_rows, classify)
        # Closed after any error: threads of a running model would abort the process at its exit.
        with (
            self._open_output() as file,
            self._observer.watching(self),
            closing(labelled),
        ):
            copy: Any
            if source.table is None and form == "jsonl":
                copy = writing.JsonCopy(
                    file,
                    self._output_path,
                    new_columns,
                )
            else:
                copy = writing.LabelledCopy(
                    file,
                    self._output_path,
                    form,
                    source,
                    keys,
                    new_columns,
                    self._batch_rows,
                    encoded,
                    has_mark=self._output_options.has_mark,
                )
            self._write(labelled, copy, file)
        self.is_published = True
        self._observer.finished(self)

    def _write(
        self,
        labelled: Generator[tuple[FileRow, Outcome | None]],
        copy: Any,
        file: BinaryIO,
    ) -> None:
        """Write the rows with their outcomes."""
        is_flushed = self._batch_rows == 1
        try:
            for row, outcome in labelled:
                # most rows may lack a label
                if row.post == NOT_UTF8 and NOT_UTF8 not in self.tally.first:
                    self._observer.note(f"{self.source.name}:{row.place}: {row.post}")
                self.tally.add(row, outcome)
                if row.values is None:
                    continue
                classification: Classification | None = None
                if isinstance(outcome, Classification):
                    classification = outcome
                copy.add(row, classification)
                if is_flushed:
                    file.flush()
            copy.finish()
            self.tally.lost = copy.lost()
        except InputError as error:
            # a column that is only copied is damaged: the rows before that are written
            self._broken = error
            copy.close()
            self.tally.lost = copy.lost()
        except BaseException:
            copy.abandon()
            raise

    @property
    def _output_path(self) -> Path:
        """The output's path, - for a stream."""
        return self._output_options.path or Path("-")

    @property
    def _batch_rows(self) -> int:
        """Rows to write at once: one from a pipe to a pipe, whose reader waits."""
        if self._output_options.path is not None:
            return writing.COPIED_ROWS
        if is_file(self._path):
            return writing.COPIED_ROWS
        return 1

    def _check_parquet(self, source: FileSource, form: str) -> list[str]:
        """Check that the columns of Parquet can be copied, before the model works for nothing.

        Raises InputError.

        Return the columns whose bytes are no text, which an output of text has in Base64.
        """
        table = source.table
        if not isinstance(table, ParquetTable):
            return []
        table.check_pages()
        encoded: list[str] = []
        if form != "parquet":
            table.check_lists()
            encoded = table.columns_of_bytes(self._limit)
        if encoded:
            names = ", ".join(encoded)
            note = f"{source.name}: {names}: not UTF-8, so written in Base64"
            self._observer.note(printable(note))
        copy = writing.LabelledCopy(
            BytesIO(),
            Path(),
            form,
            source,
            None,
            self._output_options.columns(),
            1,
            encoded,
        )
        copy.rehearse()
        return encoded

    def _keys(self, source: FileSource, form: str) -> Any:
        """Return the columns of JSON records, which are read twice for them; None for other
        sources and outputs.

        Raises InputError if the file is gone meanwhile.
        """
        if source.table is not None or form == "jsonl":
            return None
        if source.size is None:
            raise UserError(
                f"{source.name} is a pipe with JSON, whose keys are not known beforehand. Write "
                ".jsonl, or save it as a file first."
            )
        with self._observer.working(f"reading {source.name}"):
            second_source = self._open_source()
            rows = self._readable(second_source.rows())
            first_rows = islice(rows, self._limit)
            keys = writing.schema_of(first_rows, form)
        if self._broken and not keys.names:
            raise self._broken
        return keys

    def _readable(self, rows: Iterator[FileRow]) -> Iterator[FileRow]:
        """Yield the rows up to an error, which `run` raises."""
        try:
            yield from rows
        except InputError as error:
            self._broken = error

    @contextmanager
    def _open_output(self) -> Iterator[BinaryIO]:
        """Yield the output file.

        It gets its name once it is complete. Raises UserError if it cannot be written.
        """
        stream = self._output_options.stream
        if stream is not None:
            yield stream
            return
        with (
            explain_unwritable(self._output_path),
            replacing(self._output_path) as temporary,
            temporary.open("wb") as file,
        ):
            yield file


def _form_of(source: FileSource) -> str:
    """Return the format in which a stream gets the rows of a source."""
    return "csv" if isinstance(source.table, TextTable) else "jsonl"


def _column_names(source: FileSource, keys: Any, first: FileRow) -> Sequence[str]:
    """Return the names of the columns or keys of a source.

    keys: the schema of JSON records; None if unknown. first: the first row.
    """
    if source.table:
        return source.table.header
    if keys is not None:
        names: Sequence[str] = keys.names
        return names
    if isinstance(first.values, Mapping):
        return list(first.values)
    return []  # a record that could not be parsed has none
