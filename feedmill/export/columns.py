"""The columns of every export, and the selection of its rows. Independent of Arrow, which takes time to import."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from feedmill.producers.records import POST_COLUMNS
from feedmill.reading import Chunk, ResultRow
from feedmill.shared.errors import UserError, printable
from feedmill.shared.messages import Post

#: Column of a post -> the post's field, and the field's default, which stored posts omit.
POST_FIELDS = {column: (field, Post.model_fields[field].default) for field, column in POST_COLUMNS.items()}
RESULT_COLUMNS = (
    "label", "label_score", "label_set", "scores", "model", "revision", "weights", "fingerprint", "classified_at",
    "queued_seconds",
)  # fmt: skip
#: All columns in order: the fields of the post, then the classification. Docs: docs/export.md.
COLUMNS = (*POST_FIELDS, *RESULT_COLUMNS)
#: Rows per batch, and per transaction of a database: in PostgreSQL, they fit into the default `temp_buffers`, 8 MB.
BATCH_ROWS = 5000
#: Separator of the labels in the name of a label set.
LABEL_SEPARATOR = ", "


class ExportFilter(NamedTuple):
    """A selection of results: stored at or after `since` and before `until` (seconds since 1970), with this label and
    run.

    latest: keep only the newest result of each post: see `newest_entries`. Single files only, because a folder's parts
    are published before later results are known.
    """

    since: float | None = None
    until: float | None = None
    label: str | None = None
    latest: bool = False
    run: str | None = None

    def of(self, rows: Sequence[ResultRow]) -> Sequence[ResultRow]:
        if self.label is not None:
            rows = [row for row in rows if row.found["label"] == self.label]
        return rows if self.run is None else [row for row in rows if row.post.get("run") == self.run]


def newest_entries(chunks: Iterable[Chunk], selection: ExportFilter) -> set[str]:
    """Return the stream entries of each post's newest result. Posts of different runs can have the same id."""
    newest: dict[tuple[str, str | None], str] = {}
    for chunk in chunks:
        newest |= {(row.post["id"], row.post.get("run")): row.entry for row in selection.of(chunk.rows)}
    return {*newest.values()}


def label_set(labels: Iterable[str]) -> str:
    """Return the name of a label set: its labels in alphabetical order. Results of one set can be compared."""
    return LABEL_SEPARATOR.join(sorted(labels))


def choose(names: str, own: Sequence[str]) -> tuple[str, ...]:
    """Parse `--columns`, ignoring case and repetitions. Raises UserError for an unknown column or without `id`.

    own: the columns that the posts of the selected run carry.
    """
    known = {column.lower(): column for column in (*own, *COLUMNS)}
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name.lower() not in known:
            raise UserError(
                f"--columns: unknown column {name!r:.80}. Choose from {printable(', '.join((*COLUMNS, *own)))}. "
                "Your own columns need --run, and `feedmill enqueue --keep`."
            )
    columns = tuple(dict.fromkeys(known[name.lower()] for name in chosen))
    if "id" not in columns:
        raise UserError("--columns must include id, by which --purge finds purged posts. Add id to --columns.")
    return columns


def check_options(name: str, stored: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise UserError if an earlier run had other options. name: of what it exported to."""
    for option, value in options.items():
        if stored.get(option) != value:
            raise UserError(
                f"{printable(name)} belongs to an export with another value of --{option}. Give another OUT, or repeat "
                "the earlier flags."
            )
