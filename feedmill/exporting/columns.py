"""The columns of every export, and the selection of its rows.

Independent of Arrow, which takes time to import.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from feedmill.outcomes.rows import Chunk, ResultRow
from feedmill.producers.records import POST_COLUMNS
from feedmill.shared.errors import UserError, printable
from feedmill.shared.messages import Post

#: Column of a post -> the post's field, and the field's default, which stored posts omit.
POST_FIELDS = {
    column: (field, Post.model_fields[field].default)
    for field, column in POST_COLUMNS.items()
}
RESULT_COLUMNS = (
    "label", "label_score", "label_set", "scores", "model", "revision", "weights", "fingerprint",
    "classified_at",
    "queued_seconds",
)  # fmt: skip
#: Columns in order: the fields of the post, then the classification. Docs: docs/export.md.
COLUMNS = (*POST_FIELDS, *RESULT_COLUMNS)
#: Columns after these, which folders and tables of earlier versions lack. A column of the user's
#: own takes precedence.
FURTHER_COLUMNS = ("best_label", "labels", "language", "kind")
#: Rows per batch, and per transaction of a database: in PostgreSQL, they fit into the default
#: `temp_buffers`, 8 MB.
BATCH_ROWS = 5000
#: Separator of the labels in the name of a label set.
LABEL_SEPARATOR = ", "


class ExportFilter(NamedTuple):
    """A selection of results: stored at or after `since` and before `until` (seconds since 1970),
    with this label and run.

    latest: keep only the newest result of each post: see `newest_entries`. Single files only,
    because a folder's parts are published before later results are known.
    """

    since: float | None = None
    until: float | None = None
    label: str | None = None
    latest: bool = False
    run: str | None = None

    def of(self, rows: Sequence[ResultRow]) -> Sequence[ResultRow]:
        selected: list[ResultRow] = []
        for row in rows:
            if self.label is not None and row.found["label"] != self.label:
                continue
            if self.run is not None and row.post.get("run") != self.run:
                continue
            selected.append(row)
        return selected


def newest_entries(chunks: Iterable[Chunk], selection: ExportFilter) -> set[str]:
    """Return the stream entries of each post's newest result.

    Posts of different runs can have the same id.
    """
    newest: dict[tuple[str, str | None], str] = {}
    for chunk in chunks:
        for row in selection.of(chunk.rows):
            post_id = row.post["id"]
            run = row.post.get("run")
            newest[post_id, run] = row.entry
    return set(newest.values())


def label_set(labels: Iterable[str]) -> str:
    """Return the name of a label set: its labels in alphabetical order.

    Results of one set can be compared.
    """
    return LABEL_SEPARATOR.join(sorted(labels))


def all_columns(own: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of an export without `--columns`. own: see `choose`."""
    further = [column for column in FURTHER_COLUMNS if column not in own]
    return (*COLUMNS, *further, *own)


def choose(names: str, own: Sequence[str]) -> tuple[str, ...]:
    """Parse `--columns`, ignoring case and repetitions.

    Raises UserError for an unknown column or without `id`.

    own: the columns that the posts of the selected run carry.
    """
    known_columns = (*FURTHER_COLUMNS, *own, *COLUMNS)
    column_of = {column.lower(): column for column in known_columns}
    columns: list[str] = []
    for part in names.split(","):
        name = part.strip()
        if not name:
            continue
        column = column_of.get(name.lower())
        if column is None:
            choices = printable(", ".join((*COLUMNS, *FURTHER_COLUMNS, *own)))
            raise UserError(
                f"--columns: unknown column {name!r:.80}. Choose from {choices}. Your own "
                "columns need --run, and `feedmill enqueue --keep`."
            )
        if column not in columns:
            columns.append(column)
    if "id" not in columns:
        raise UserError(
            "--columns must include id, by which --purge finds purged posts. Add id to --columns."
        )
    return tuple(columns)


def check_same_options(
    name: str, stored: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Raise UserError if an earlier run had other options. name: of what it exported to."""
    for option, value in options.items():
        if stored.get(option) != value:
            raise UserError(
                f"{printable(name)} belongs to an export with another value of --{option}. Give "
                "another OUT, or repeat the earlier flags."
            )
