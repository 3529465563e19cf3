"""Collect labelled posts for training from the results stream, an export or a file of posts.

Purged posts are left out of every source, provided Redis answers.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from feedmill.producers.exported import Labelled
from feedmill.producers.files import FileReading
from feedmill.producers.records import Columns
from feedmill.reading.rows import Place, RowReader
from feedmill.shared.broker import connect, user_errors
from feedmill.shared.errors import InputError, RedisUnavailable, printable
from feedmill.shared.messages import Post
from feedmill.shared.settings import Settings
from feedmill.workers.training.examples import Example
from feedmill.workers.training.options import RESULTS, TrainOptions


class Provenance(NamedTuple):
    """The origin of a dataset as counts of posts, without any content."""

    source: str
    read: int
    #: Posts without a label or text, or with a score below `min_score`.
    unlabelled: int
    #: Posts left out because they were purged; None if Redis did not answer.
    purged: int | None
    #: Posts per labelling model; empty if the labels are topics.
    labelled_by: dict[str, int]


class Collected(NamedTuple):
    """Training examples, the examples of a separate test file (None without one), and their provenance."""

    examples: list[Example]
    tested: list[Example] | None
    provenance: Provenance


def collect(options: TrainOptions, settings: Settings, notes: Console) -> Collected:
    """Read the posts that the options name. Raises UserError."""
    if options.source == RESULTS:
        notes.print(f"The results stream keeps the first {settings.stream_body} characters of each body.")
    source = _of_results(settings) if options.source == RESULTS else _of_path(options.source, options, notes)
    found = list(islice(source, options.limit))
    tests = list(islice(_of_path(options.test, options, notes), options.limit)) if options.test else []
    in_files = [post.post.id for post in (tests if options.source == RESULTS else [*found, *tests])]
    gone = purged_ids(in_files, settings, notes) if in_files else set()
    by_topic = options.model_copy(update={"targets": "topic"})
    known = [_example(post, by_topic, Counter()) for post in tests if post.post.id not in (gone or ())]
    tested = [example for example in known if example]
    if options.test and not tested:
        raise InputError(f"No post in {printable(options.test)} has a topic to compare with. Add a column `topic`.")
    kept = [post for post in found if post.post.id not in (gone or ())]
    labelled_by: Counter[str] = Counter()
    examples = [example for post in kept if (example := _example(post, options, labelled_by))]
    if not examples:
        raise InputError(_nothing(len(kept), options))
    if len(labelled_by) > 1:
        notes.print(
            f"The labels come from {len(labelled_by)} models ({', '.join(map(printable, labelled_by))}). A post "
            "with labels from several models gets the label of its oldest result.",
            markup=False,
        )
    purged = None if gone is None else len(found) - len(kept)
    provenance = Provenance(options.source, len(found), len(kept) - len(examples), purged, dict(labelled_by))
    return Collected(examples, tested if options.test else None, provenance)


def _example(found: Labelled, options: TrainOptions, labelled_by: Counter[str]) -> Example | None:
    """Return the training example, or None without a label, with a score below `min_score`, or without a soft label."""
    label, scores = found.post.topic, None
    if options.targets != "topic":
        if not found.scores or found.scores[found.label] < options.min_score:
            return None
        labelled_by[found.model] += 1
        label, scores = found.label, found.scores if options.targets == "soft" else None
    if not label or not found.post.text:  # the stream truncates bodies, possibly to nothing
        return None
    return Example(found.post, label.strip(), scores)


def _nothing(posts: int, options: TrainOptions) -> str:
    if options.targets == "topic":
        return (
            f"None of {posts:,} posts has a topic to learn. Add topics to the file, or train on a model's labels "
            "with --targets zero-shot."
        )
    return (
        f"None of {posts:,} posts has a model's label with a score of at least {options.min_score}; only results and "
        "exports contain such labels. Lower --min-score, or use --targets topic."
    )


def _of_results(settings: Settings) -> Iterator[Labelled]:
    """Yield the results in the stream, oldest first, with bodies cut to `stream_body` characters.

    Raises RedisUnavailable.
    """
    with user_errors(settings):
        for chunk in RowReader(connect(settings)).chunks(Place("0-0")):
            for row in chunk.rows:
                # Not validated again: it was valid when written, and truncation may have made it invalid since.
                post = Post.model_construct(**row.post)
                found = row.found
                yield Labelled(post, found["label"], found["scores"], found["model"])


def _of_path(path: str, options: TrainOptions, notes: Console) -> Iterator[Labelled]:
    """Yield the posts of a file, or of an export's parts, whose names sort by time. Raises InputError."""
    files = sorted(map(str, Path(path).glob("*/part-*"))) if Path(path).is_dir() else [path]
    if not files:
        raise InputError(
            f"The folder {printable(path)} contains no parts of an export. Name a file or an export folder."
        )
    columns = Columns.of(options.id_column, options.title_column, options.body_column)
    for file in files:
        reading = FileReading(file, notes, columns=columns, encoding=options.encoding)
        for post in reading.labelled():
            yield Labelled(post, "", {}, "") if isinstance(post, Post) else post
        reading.end()


def purged_ids(ids: Iterable[str], settings: Settings, notes: Console) -> set[str] | None:
    """Return the ids of purged posts; None, with a note, if Redis is unreachable."""
    try:
        with user_errors(settings):
            return RowReader(connect(settings)).gone(ids)
    except RedisUnavailable as error:
        notes.print(f"Purged posts cannot be identified and may be included: {error}", markup=False)
        return None
