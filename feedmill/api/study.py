"""Label whole dumps from Python: `feedmill.study`."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from feedmill.api.request import Labels, read_options
from feedmill.console import notes_console
from feedmill.producers.records import (
    FileOptions,
    Filters,
    author_name,
    parse_kinds,
    subreddit_name,
)
from feedmill.shared.errors import UserError, explain_refusals
from feedmill.shared.language import parse_languages
from feedmill.shared.messages import in_utc
from feedmill.shared.settings import load_arguments
from feedmill.studies.observer import StudyObserver
from feedmill.studies.request import HERE, StudyRequest
from feedmill.studies.result import StudyResult


class _Notes(StudyObserver):
    """Prints notes on standard error."""

    def __init__(self) -> None:
        self.notes = notes_console()

    def note(self, message: str) -> None:
        self.notes.print(message, markup=False)


def study(
    *dumps: str | Path,
    out: str | Path,
    labels: Labels | None = None,
    kinds: Iterable[str] = ("posts",),
    context: str | None = None,
    titles: Iterable[str | Path] = (),
    subreddits: Iterable[str] = (),
    authors: Iterable[str] = (),
    words: Iterable[str] = (),
    since: float | datetime | None = None,
    until: float | datetime | None = None,
    template: str | None = None,
    multi_label: bool = False,
    none: float | bool | None = None,
    model: str | Path | None = None,
    device: str | None = None,
    devices: str | None = None,
    languages: str | None = None,
    on: str | None = None,
    actors: int | None = None,
    progress: bool = False,
    **file: Any,
) -> StudyResult:
    """Label whole dumps into a folder: Parquet by month, plots, and a data set card.

    After an interruption, also by `kill -9`, the same call continues. Needs `pip install
    'feedmill[worker,tables,dumps]'`. docs/study.md describes the folder.

    Args:
        dumps: Files such as RS_2023-11.zst, or folders of them.
        out: Folder to write to.
        labels: As for `feedmill.classify`.
        kinds: `posts`, `comments` or both.
        context: `title` classifies comments with the titles of their posts, from all dumps.
        titles: Further files with such posts.
        subreddits, authors: Names; empty for all. Authors are not written.
        words: Words or phrases, of which a text must have one; empty for all.
        since, until: Times of the posts: a datetime (UTC if it has no zone), or seconds since
            1970.
        template, multi_label, none: As for `feedmill.classify`. `none` is True by default for
            labels of your own: posts that fit none of them have no label.
        model, device, devices, languages: As for `feedmill.Classifier`.
        on: `ray` classifies on the Ray cluster at RAY_ADDRESS, or on a local one.
        actors: With `on`: copies of the model.
        progress: Print notes.
        file: Names of columns and the encoding, as of `feedmill.train`, such as `id_column`.

    Returns:
        StudyResult: the numbers of rows and records, and what could not be read.

    Raises:
        feedmill.UserError: For an invalid argument, a missing package, or a folder that belongs to
            another study.

    Example:
        >>> import feedmill
        >>> feedmill.study("RS_2023-11.zst", out="study", labels=["praise", "complaint"]).rows
        3046
    """
    settings = load_arguments(
        model=None if model is None else str(model),
        device=device,
        devices=devices,
        languages=languages,
    )
    is_default = none is None and settings.none is None
    has_labels = labels is not None or settings.labels is not None
    if is_default and has_labels:
        none = True
    codes = frozenset[str]()
    if settings.languages is not None:
        codes = parse_languages(settings.languages)
    filters = Filters(
        subreddits=frozenset(map(subreddit_name, subreddits)),
        since=_seconds(since),
        until=_seconds(until),
        languages=codes,
        kinds=parse_kinds(",".join(kinds)),
        authors=frozenset(map(author_name, authors)),
        words=tuple(words),
    )
    if context not in (None, "title"):
        raise UserError('context: give "title", or None.')
    request = StudyRequest(
        dumps=_paths(dumps),
        out=Path(out),
        filters=filters,
        options=read_options(labels, template, multi_label, none),
        is_default=is_default,
        file=FileOptions(**file),
        context=context is not None,
        titles=_paths(titles),
        on=on or HERE,
        actors=actors,
    )
    observer = _Notes() if progress else StudyObserver()
    # It imports pyarrow, and public names exist without extras.
    from feedmill.studies.run import Study  # noqa: PLC0415

    with explain_refusals(settings.model):
        return Study(request, settings, observer).run()


def _paths(files: Iterable[str | Path]) -> Sequence[str]:
    return [str(file) for file in files]


def _seconds(time: float | datetime | None) -> float | None:
    """Return seconds since 1970; None for None."""
    if isinstance(time, datetime):
        return in_utc(time)
    return time
