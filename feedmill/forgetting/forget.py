"""Forget posts: what `feedmill forget` and `feedmill.forget` do."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from redis import Redis

from feedmill.exporting.request import ExportRequest
from feedmill.forgetting import deletion_log, search
from feedmill.forgetting.deletion_log import Deletion
from feedmill.forgetting.places import Places, folder_of_answers
from feedmill.forgetting.search import Matches, Search
from feedmill.forgetting.selection import (
    Selection,
    ValueDigest,
    make_selection,
)
from feedmill.outcomes.copies import Copy
from feedmill.producers.files import FileSource
from feedmill.shared import runs as run_progress
from feedmill.shared.broker import connect
from feedmill.shared.errors import UserError, truncate
from feedmill.shared.redis_errors import user_errors
from feedmill.shared.settings import Settings, load_arguments

#: Maximum characters of a note in the log.
MAX_NOTE = 500


class Forgotten(NamedTuple):
    """The outcome of `feedmill.forget`.

    Attributes:
        ids: Ids of the posts that were deleted and blocked; with `dry_run`, of those that would
            be.
        runs: Runs that were deleted.
        counts: Numbers of removed items by name; with `dry_run`, of found items by place.
        unmatched: Ids and runs about which nothing is stored. They are not blocked.
        similar: Ids of stored posts that were probably meant by these.
        problems: Places that could not be searched or changed, and what to do. Repeat the
            deletion afterwards, by `feedmill forget --replay` with the log.
    """

    ids: list[str]
    runs: list[str]
    counts: dict[str, int]
    unmatched: list[str]
    similar: list[str]
    problems: list[str]

    @property
    def is_complete(self) -> bool:
        """True if everything that was selected was found and deleted."""
        return not self.unmatched and not self.problems


class Forgetting:
    """A request to forget posts. Methods raise UserError and redis.exceptions.RedisError.

    copies: exports and answers beside those that are remembered. note: for the log. earlier: the
    deletions of a log that this one repeats.
    """

    def __init__(
        self,
        redis: Redis,
        settings: Settings,
        selection: Selection,
        copies: Sequence[Copy] = (),
        note: str = "",
        earlier: Sequence[Deletion] = (),
    ) -> None:
        if len(note) > MAX_NOTE:
            raise UserError(
                f"The note has {len(note):,} characters, not up to {MAX_NOTE}."
            )
        self._redis = redis
        self._settings = settings
        self._selection = selection
        self._note = note
        self._earlier = earlier
        self._places = Places(redis, settings, copies)
        self._matches: Matches | None = None

    def find(self) -> Matches:
        """Return the posts of the selection, without their numbers of items."""
        redis = self._redis
        known_runs = []
        for run in self._selection.runs:
            progress = run_progress.progress(redis, run)
            if progress is not None:
                known_runs.append(run)
        run_search = Search(self._redis, self._selection, known_runs)
        run_search.look_at(self._places.records())
        matches = run_search.matches()
        # posts that were deleted before stay blocked, whether or not they are stored
        ids = dict.fromkeys(matches.ids)
        for deletion in self._earlier:
            ids |= dict.fromkeys(deletion.ids)
        self._matches = matches._replace(
            ids=list(ids),
            shown_ids=matches.shown_ids.union(ids),
        )
        return self._matches

    def preview(self) -> Forgotten:
        """Return what would be deleted."""
        matches = self._matches
        if matches is None:
            matches = self.find()
        records = self._places.records()
        counted = search.count(records, matches)
        self._matches = counted
        return self._outcome(counted.counts)

    @property
    def shared(self) -> int:
        """Number of the previewed posts whose id occurs in several runs."""
        return 0 if self._matches is None else self._matches.shared

    def run(self) -> Forgotten:
        """Delete the posts of the selection, and log it."""
        matches = self._matches
        if matches is None:
            matches = self.find()
        ids = matches.ids
        if not ids and not matches.runs and not self._earlier:
            return self._outcome(Counter())
        path = deletion_log.path_of(self._settings)
        entries = self._new_entries(path, ids)
        deletion_log.append(path, entries)
        counts = self._places.remove(ids, matches.runs, matches.shown_ids)
        outcome = self._outcome(counts)
        if not outcome.problems:
            repeated = deletion_log.unfinished(path, self._earlier)
            known_names = {entry.name for entry in entries}
            for deletion in repeated:
                if deletion.name not in known_names:
                    entries.append(deletion)
            finished = []
            removed = outcome.counts
            for entry in entries:
                end = entry._replace(
                    ids=[],
                    counts=removed,
                )
                finished.append(end)
                removed = {}  # a deletion that was split is counted once
            deletion_log.append(path, finished)
        return outcome

    def _new_entries(self, path: Path, ids: Sequence[str]) -> list[Deletion]:
        """Return the entries that the log needs for a deletion: of one that repeats others, those
        that it lacks, with their times, and one with the posts that were found in addition.
        """
        if self._earlier:
            logged = {entry.name for entry in deletion_log.read(path)}
            known_ids: set[str] = set()
            lacking = []
            for deletion in self._earlier:
                known_ids.update(deletion.ids)
                if deletion.name not in logged:
                    lacking.append(deletion._replace(counts=None))
            further_ids = [post_id for post_id in ids if post_id not in known_ids]
            entries = deletion_log.begin(Selection(), further_ids, self._note)
            return entries + lacking
        # The addresses of posts contain words of their titles: the log has the ids alone.
        selection = replace(self._selection, ids=())
        return deletion_log.begin(selection, ids, self._note)

    def _outcome(self, counts: Mapping[str, int]) -> Forgotten:
        matches = self._matches
        assert matches is not None  # noqa: S101 - for mypy: every caller has searched
        return Forgotten(
            ids=matches.ids,
            runs=matches.runs,
            counts={name: number for name, number in counts.items() if number},
            unmatched=matches.unmatched,
            similar=matches.similar,
            problems=list(self._places.problems),
        )


def replay(
    redis: Redis,
    settings: Settings,
    deletions: Sequence[Deletion],
    copies: Sequence[Copy] = (),
    *,
    dry_run: bool = False,
) -> Forgotten:
    """Repeat deletions, after a restore or on a machine with other copies.

    All their posts are blocked again, whether or not they are stored. What was sent after a
    deletion of a run, an account, a subreddit or a value stays. Raises UserError and
    redis.exceptions.RedisError.
    """
    runs: dict[str, None] = {}
    newer_runs: dict[str, None] = {}
    for deletion in deletions:
        for run in deletion.selection.runs:
            progress = run_progress.progress(redis, run)
            if progress is not None and progress.began > deletion.at:
                newer_runs[run] = None
            else:
                runs[run] = None
    for run in runs:
        newer_runs.pop(run, None)
    forgetting = Forgetting(
        redis,
        settings,
        _merged(deletions, tuple(runs)),
        copies,
        note="replay",
        earlier=deletions,
    )
    if dry_run:
        outcome = forgetting.preview()
    else:
        outcome = forgetting.run()
    problems = list(outcome.problems)
    for run in newer_runs:
        problem = (
            f"run {run} was sent again after its deletion and was not deleted: if it should be, "
            f"`feedmill forget --run {run}` deletes it"
        )
        problems.append(problem)
    # a run that the backup lacks needs no deletion
    return outcome._replace(
        unmatched=[],
        similar=[],
        problems=problems,
    )


def _merged(deletions: Iterable[Deletion], runs: tuple[str, ...]) -> Selection:
    """Return what these deletions selected, each part up to its latest deletion."""
    accounts: dict[str, None] = {}
    subreddits: dict[str, None] = {}
    values: dict[ValueDigest, None] = {}
    until: dict[str | ValueDigest, float] = {}
    for deletion in deletions:
        selection = deletion.selection
        accounts |= dict.fromkeys(selection.accounts)
        subreddits |= dict.fromkeys(selection.subreddits)
        values |= dict.fromkeys(selection.values)
        parts: list[str | ValueDigest] = [
            *selection.accounts,
            *selection.subreddits,
            *selection.values,
        ]
        for part in parts:
            earlier = until.get(part, 0.0)
            until[part] = max(earlier, deletion.at)
    return Selection(
        accounts=tuple(accounts),
        subreddits=tuple(subreddits),
        runs=runs,
        values=tuple(values),
        until=until,
    )


def copies_of(
    exports: Sequence[str], answers: Sequence[str | os.PathLike[str]], table: str | None
) -> list[Copy]:
    """Return the copies that a person names. table: of exports to a database.

    Raises UserError for a destination that no export can have.
    """
    copies = []
    for destination in exports:
        request = ExportRequest(destination=destination, purge=True)
        if request.is_table:
            request = ExportRequest(
                destination=destination,
                table=table,
                purge=True,
            )
            place = destination
        else:
            place = str(request.path.expanduser().absolute())
        request.check()
        copies.append(
            Copy(
                kind="export",
                place=place,
                form=request.file_form,
                table=request.table,
            )
        )
    for folder in answers:
        place = str(folder_of_answers(Path(folder)))
        copy = Copy(
            kind="answers",
            place=place,
        )
        copies.append(copy)
    return copies


def ids_of_file(path: str, column: str) -> tuple[str, ...]:
    """Return the ids in a column of a file of any format that `feedmill enqueue` reads.

    Raises UserError.
    """
    source = FileSource(path)
    return tuple(dict.fromkeys(source.values(column)))


def forget(
    *ids: str,
    author: str | Sequence[str] = (),
    account: str | Sequence[str] = (),
    run: str | Sequence[str] = (),
    subreddit: str | Sequence[str] = (),
    where: Mapping[str, str] | None = None,
    file: str | os.PathLike[str] | None = None,
    column: str = "id",
    exports: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    table: str | None = None,
    answers: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    note: str = "",
    dry_run: bool = False,
    redis_url: str | None = None,
) -> Forgotten:
    """Delete every known copy of posts, block them for a year, and log the deletion. Does not ask.

    Posts that belong to any part of the selection are deleted: in waiting, reserved and delayed
    messages, results, streams, sent records, dead letters, Celery's results, Flower's file,
    answers of reviewers, exports, and files dropped on the web pages. docs/security.md says how
    copies are found, and what is not deleted.

    Args:
        ids: Ids of posts in any form: bare, `t3_…`, an address, an at-URI; or an account's DID.
        author: Names of authors, which messages, dead letters and `extra` may hold.
        account: DIDs of accounts on Bluesky.
        run: Runs, whose ids are not blocked: their posts can be sent again.
        subreddit: Names of subreddits.
        where: Values of kept columns, such as `{"customer": "4711"}`.
        file: File with ids in the column `column`.
        column: Name of that column.
        exports: Files, folders or addresses of databases beside those that are remembered.
        table: Table of a database in `exports`. Default: `feedmill_results`.
        answers: Folders of `feedmill label` beside those that are remembered.
        note: Text for the log, such as the number of a request.
        dry_run: Delete nothing; return what would be deleted.
        redis_url: URL of Redis. Default: FEEDMILL_REDIS_URL, else the running `feedmill up`, else
            localhost.

    Returns:
        Forgotten: the deleted posts, numbers of removed items, and what was not found or not
        changed.

    Raises:
        feedmill.UserError: For an invalid selection, a file that cannot be read, a log that cannot
            be written, or if Redis cannot be reached.

    Example:
        >>> import feedmill
        >>> feedmill.forget("https://www.reddit.com/r/python/comments/1abc/a_title/").ids
        ['t3_1abc']
    """
    post_ids = _texts("id", ids)
    if file is not None:
        post_ids += ids_of_file(os.fspath(file), column)
    wheres = tuple(f"{name}={value}" for name, value in (where or {}).items())
    selection = make_selection(
        ids=post_ids,
        authors=_texts("author", author),
        accounts=_texts("account", account),
        runs=_texts("run", run),
        subreddits=_texts("subreddit", subreddit),
        values=wheres,
    )
    if not selection:
        raise UserError(
            "Give what to forget: ids, author, account, run, subreddit, where or file."
        )
    copies = copies_of(_paths(exports), _paths(answers), table)
    settings = load_arguments(redis_url=redis_url)
    with user_errors(settings), closing(connect(settings)) as redis:
        forgetting = Forgetting(redis, settings, selection, copies, note)
        if dry_run:
            return forgetting.preview()
        return forgetting.run()


def _texts(name: str, values: str | Sequence[str]) -> tuple[str, ...]:
    """Return the texts of an argument. Raises UserError for other values."""
    if isinstance(values, str):
        return (values,)
    for value in values:
        if not isinstance(value, str):
            raise UserError(f"{name} must be text, not {truncate(repr(value))}.")
    return tuple(values)


def _paths(
    values: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> list[str]:
    if isinstance(values, str | os.PathLike):
        return [os.fspath(values)]
    return [os.fspath(value) for value in values]
