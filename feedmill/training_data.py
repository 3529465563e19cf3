"""Posts that a model is trained on, with their labels: from the stream of results, an export, or a file of posts.

What was purged is left out wherever it comes from, as far as Redis is there to say so. Knows nothing of training.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from feedmill.file_reading import Reading
from feedmill.result_rows import Place, RowReader
from producers.exported import Labelled, labelled_of
from producers.records import BadRecord
from shared.broker import connect
from shared.errors import InputError, RedisError, UserError, clause, printable
from shared.messages import Post
from shared.readers import told_plainly
from shared.settings import Settings
from shared.training import RESULTS, TrainOptions
from workers.training.examples import Example

#: Rows of Parquet that are held together.
AT_ONCE = 5000


class Provenance(NamedTuple):
    """Counts of posts; nothing of what they say."""

    source: str
    read: int
    #: Without a label, or below the score that it should have.
    unlabelled: int
    #: Left out, since they were purged; None where Redis could not be asked.
    purged: int | None
    #: Whose labels these are: model -> posts. Of topics none.
    labelled_by: dict[str, int]


class Collected(NamedTuple):
    """Examples, those of the test's own file (None where it has none), and where they come from."""

    examples: list[Example]
    tested: list[Example] | None
    provenance: Provenance


def collect(options: TrainOptions, settings: Settings, notes: Console) -> Collected:
    """Read the posts that the options name. Raises UserError."""
    source = _of_results(settings) if options.source == RESULTS else _of_path(options.source, notes)
    found = list(islice(source, options.limit))
    if options.source == RESULTS:
        notes.print(f"Bodies are their first {settings.stream_body} characters: the stream keeps no more.")
    tested = None
    if options.test is not None:
        tested = [post for post in islice(_of_path(options.test, notes), options.limit) if _post(post).topic]
        if not tested:
            raise InputError(f"None of the posts of {printable(options.test)} has a topic to be tested against.")
    gone: set[str] | None = set()
    if options.source != RESULTS:
        gone = _purged((_post(post).id for post in [*found, *(tested or [])]), settings, notes)
    kept = [post for post in found if not gone or _post(post).id not in gone]
    labelled_by: Counter[str] = Counter()
    examples = [example for post in kept if (example := _example(post, options, labelled_by))]
    if not examples:
        raise InputError(_nothing(len(kept), options))
    if len(labelled_by) > 1:
        notes.print(
            f"The labels are those of {len(labelled_by)} models ({', '.join(map(printable, labelled_by))}): of a post "
            "that several have labelled the oldest result counts.",
            markup=False,
        )
    provenance = Provenance(
        options.source,
        len(found),
        len(kept) - len(examples),
        None if gone is None else len(found) - len(kept),
        dict(labelled_by),
    )
    if tested is not None:
        topics = options.model_copy(update={"labels": "topic"})
        known = (_example(post, topics, Counter()) for post in tested if not gone or _post(post).id not in gone)
        return Collected(examples, [example for example in known if example], provenance)
    return Collected(examples, None, provenance)


def _post(found: Post | Labelled) -> Post:
    return found if isinstance(found, Post) else found.post


def _example(found: Post | Labelled, options: TrainOptions, labelled_by: Counter[str]) -> Example | None:
    """None where it has no label, or too small a score."""
    post, label, scores = _post(found), _post(found).topic, None
    if options.labels != "topic":
        if isinstance(found, Post) or found.scores[found.label] < options.min_score:
            return None
        labelled_by[found.model] += 1
        label, scores = found.label, found.scores if options.labels == "soft" else None
    if not label or not post.text:  # a body that the stream has clipped to nothing
        return None
    return Example(post, label.strip(), scores)


def _nothing(posts: int, options: TrainOptions) -> str:
    if options.labels == "topic":
        return (
            f"None of {posts:,} posts has a topic to learn: add it to the file, or learn what a model said of them, "
            "with --labels zero-shot."
        )
    return (
        f"None of {posts:,} posts has a label by a model with a score of {options.min_score} or more: results and "
        "exports have labels, files of posts have none. Lower --min-score, or use --labels topic."
    )


def _of_results(settings: Settings) -> Iterator[Labelled]:
    """The stream's, oldest first. Of bodies it has the first `stream_body` characters. Raises RedisError."""
    with told_plainly(settings):
        for chunk in RowReader(connect(settings)).chunks(Place("0-0")):
            for row in chunk.rows:
                # It was valid when it was written, and may have been clipped since.
                post = Post.model_construct(**row.post)
                yield Labelled(post, row.found["label"], row.found["scores"], row.found["model"])


def _of_path(path: str, notes: Console) -> Iterator[Post | Labelled]:
    """A file's, or those of an export's parts, in the order of their names, which is that of time."""
    folder = Path(path)
    if not folder.is_dir():
        yield from _of_file(path, notes)
        return
    parts = sorted(folder.glob("*/part-*"))
    if not parts:
        raise InputError(f"{printable(path)} is a folder without parts of an export: name a file, or such a folder.")
    for part in parts:
        yield from _of_file(str(part), notes)


def _of_file(path: str, notes: Console) -> Iterator[Post | Labelled]:
    if path.endswith(".parquet"):
        yield from _of_parquet(path)
        return
    reading = Reading(path, notes)
    yield from reading.labelled()
    reading.end()


def _of_parquet(path: str) -> Iterator[Labelled]:
    try:
        import pyarrow as pa  # noqa: PLC0415 - an extra
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ModuleNotFoundError:
        raise UserError("Parquet needs pyarrow: `pip install 'feedmill[export]'` brings it.") from None
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(AT_ONCE):
                for number, row in enumerate(batch.to_pylist()):
                    record = {column.lower(): value for column, value in row.items()}
                    for found in labelled_of(record, f"{printable(path)}:{number}"):
                        if isinstance(found, BadRecord):
                            raise InputError(f"{found.where} is no row of an export: {found.reason}.")
                        yield found
    except (OSError, pa.ArrowException, KeyError) as error:
        raise InputError(f"{printable(path)} cannot be read as an export in Parquet: {clause(error)}.") from None


def _purged(ids: Iterable[str], settings: Settings, notes: Console) -> set[str] | None:
    """Which of them were purged; None where Redis does not say."""
    try:
        with told_plainly(settings):
            return RowReader(connect(settings)).gone(ids)
    except RedisError as away:
        notes.print(f"Purged posts are not left out, since nobody knows them here: {away}", markup=False)
        return None
