"""The places that hold posts: search all of them, and delete from all of them."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from redis import Redis

from feedmill.exporting.request import DATABASES, ExportRequest
from feedmill.exporting.sink import Destination
from feedmill.forgetting.celery_results import remove_from_results
from feedmill.forgetting.uploads import remove_uploads
from feedmill.monitoring.flower_state import STATE_FILE, without_posts
from feedmill.outcomes.copies import Copy, read_copies, without_password
from feedmill.outcomes.dead_letters import DeadLetterEntry, DeadLetterStream
from feedmill.outcomes.rows import Place, RowReader, seconds_of
from feedmill.shared import model_routing
from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import UserError, clause, printable
from feedmill.shared.mentions import mentioned_ids
from feedmill.shared.purge import (
    are_held,
    clean_run,
    held_of_run,
    purge_posts,
    records_in_messages,
)
from feedmill.shared.results import stored_ids
from feedmill.shared.settings import Settings
from feedmill.shared.unread_lists import find_unread_lists
from feedmill.teaching.answer_file import LABELS_FILE, AnswerFile

#: Folder of the web server's answers in the data folder, if no other one is set.
ANSWERS_FOLDER = "answers"
#: Seconds to wait for workers that hold messages of a run, and between two looks.
HELD_WAIT_S = 60.0
POLL_INTERVAL_S = 0.1


class Record(NamedTuple):
    """A post as a place has it.

    fields: at least those that tell whose it is. at: when it was sent or stored, in seconds since
    1970; 0 if the place does not tell.
    """

    place: str
    post_id: str
    fields: Mapping[str, Any]
    at: float = 0.0


class OpenExport(NamedTuple):
    """An export that exists. name: for people."""

    name: str
    destination: Destination


class Places:
    """All places that are known. copies: exports and answers beside those that are remembered.

    Methods raise redis.exceptions.RedisError. Copies that cannot be read or changed are no errors
    but `problems`, sentences for people.
    """

    def __init__(
        self, redis: Redis, settings: Settings, copies: Sequence[Copy] = ()
    ) -> None:
        self._redis = redis
        self._settings = settings
        self._reader = RowReader(redis)
        self.queues = model_routing.queues(redis, settings)
        unread_lists = find_unread_lists(redis, self.queues)
        self._further_lists = [unread.key for unread in unread_lists]
        self.problems: dict[str, None] = {}
        remembered = read_copies(settings)
        self._exports: list[OpenExport] = []
        self._open_exports(copies, remembered)
        self._answer_files = self._open_answers([*copies, *remembered])

    def _open_exports(self, named: Sequence[Copy], remembered: Sequence[Copy]) -> None:
        """Open the exports that a person names, and those that are remembered."""
        opened = set()
        for copy in [*named, *remembered]:
            if copy.kind != "export":
                continue
            # its address may have a password here, and none there
            identity = _identity(copy)
            if identity in opened:
                continue
            opened.add(identity)
            is_named = copy in named
            self._open_export(copy, is_named=is_named)

    def _open_export(self, copy: Copy, *, is_named: bool) -> None:
        request = ExportRequest(
            destination=copy.place,
            form=copy.form,
            table=copy.table,
            purge=True,
        )
        if not request.is_table and not os.path.lexists(copy.place):
            if is_named:
                self._note(f"{copy.place} does not exist")
            return
        try:
            request.check()
            destination = request.open_destination()
        except UserError as error:
            self._note(f"{copy.place}: {error}")
            return
        name = copy.place
        if request.is_table:
            name = f"{destination} at {without_password(copy.place)}"
        export = OpenExport(
            name=name,
            destination=destination,
        )
        self._exports.append(export)

    def _open_answers(self, copies: Collection[Copy]) -> list[AnswerFile]:
        settings = self._settings
        web_folder = settings.answers
        if web_folder is None:
            web_folder = settings.data_folder / ANSWERS_FOLDER
        own_folder = web_folder.expanduser().absolute()
        folders = {own_folder: None}
        for copy in copies:
            if copy.kind != "answers":
                continue
            folder = Path(copy.place)
            folders[folder] = None
        return [AnswerFile(folder) for folder in folders]

    def _note(self, problem: str) -> None:
        self.problems[printable(problem)] = None

    def records(self) -> Iterator[Record]:
        """Yield every post with its fields, at least once."""
        redis = self._redis
        messages = records_in_messages(redis, self.queues, self._further_lists)
        for post_id, fields in messages:
            yield Record(
                place="messages",
                post_id=post_id,
                fields=fields,
                at=_seconds(fields.get("created_utc")),
            )
        beginning = Place("0-0")
        with closing(self._reader.chunks(beginning)) as chunks:
            for chunk in chunks:
                for row in chunk.rows:
                    yield Record(
                        place="entries",
                        post_id=row.post["id"],
                        fields=row.post,
                        at=seconds_of(row.entry),
                    )
        for post_id in stored_ids(redis):
            yield Record(
                place="results",
                post_id=post_id,
                fields={},
            )
        for entry in DeadLetterStream(redis).all():
            yield from _records_of(entry)
        for file in self._answer_files:
            yield from self._answers(file)
        for export in self._exports:
            yield from self._rows(export)

    def _answers(self, file: AnswerFile) -> Iterator[Record]:
        try:
            answers = file.read()
        except UserError as error:
            self._note(str(error))
            return
        for answer in answers:
            post = answer.post
            fields = post.model_dump() | dict(answer.others)
            yield Record(
                place="answers",
                post_id=post.id,
                fields=fields,
                at=_seconds(answer.at),
            )

    def _rows(self, export: OpenExport) -> Iterator[Record]:
        rows = export.destination.records(self._reader)
        while True:
            try:
                row = next(rows, None)
            except (UserError, OSError) as error:
                self._note(f"{export.name} was not searched: {clause(error)}")
                return
            if row is None:
                return
            post_id = row.get("id")
            if isinstance(post_id, str):
                yield Record(
                    place=export.name,
                    post_id=post_id,
                    fields=row,
                    at=_seconds(row.get("classified_at")),
                )

    def remove(
        self, ids: Sequence[str], runs: Sequence[str], shown_ids: Collection[str]
    ) -> Counter[str]:
        """Delete these posts and runs everywhere; return the numbers of removed items.

        shown_ids: the ids of the posts, and those of the runs' posts.
        """
        redis = self._redis
        settings = self._settings
        counts: Counter[str] = Counter()
        if ids:
            outcome = purge_posts(redis, settings, ids, self._further_lists)
            counts.update(outcome.counts)
            if outcome.unreadable:
                self._note(
                    f"{outcome.unreadable:,} messages in the queues cannot be read and were not "
                    "changed: workers refuse them, and keep no text of these posts"
                )
            chosen_ids = frozenset(ids)
            counts["celery_results"] += remove_from_results(redis, chosen_ids)
        for run in runs:
            counts.update(self._remove_run(run))
        steps: list[tuple[str, Callable[[], int]]] = [
            ("flower_messages", lambda: self._remove_from_flower(shown_ids)),
            ("uploads", lambda: remove_uploads(shown_ids, self._note)),
        ]
        for file in self._answer_files:
            removal = _answer_removal(file, ids, runs)
            steps.append(("answers", removal))
        for export in self._exports:
            removal = self._export_removal(export, runs)
            steps.append(("exported_rows", removal))
        for name, step in steps:
            try:
                counts[name] += step()
            except (UserError, OSError) as error:
                self._note(str(error))
        return counts

    def _remove_run(self, run: str) -> Counter[str]:
        """Delete a run, and again after workers have finished the messages that they hold."""
        redis = self._redis
        settings = self._settings
        tags = held_of_run(redis, run)
        counts = clean_run(redis, settings, run, self._further_lists)
        if tags:
            deadline = time.monotonic() + HELD_WAIT_S
            while are_held(redis, tags) and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL_S)
            if are_held(redis, tags):
                self._note(
                    f"workers still hold messages of run {run}, and will store their results: "
                    "repeat the command later"
                )
            counts.update(clean_run(redis, settings, run, self._further_lists))
        del counts["outside"]
        return counts

    def _remove_from_flower(self, ids: Collection[str]) -> int:
        """Delete messages with these posts from Flower's file. A running Flower forgets them
        itself before it writes the file again.
        """
        path = self._settings.data_folder / STATE_FILE
        try:
            saved = json.loads(path.read_text())
            tasks = saved["tasks"]
            kept = without_posts(tasks, ids)
        except FileNotFoundError:
            return 0
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"{path} is damaged and was not searched. Delete it: Flower makes a new one."
            ) from None
        removed = len(tasks) - len(kept)
        if removed:
            saved["tasks"] = kept
            with replacing(path) as temporary:
                temporary.write_text(json.dumps(saved))
        return removed

    def _export_removal(
        self, export: OpenExport, runs: Sequence[str]
    ) -> Callable[[], int]:
        def remove() -> int:
            try:
                return export.destination.purge(self._reader, runs)
            except (UserError, OSError) as error:
                reason = clause(error)
                raise UserError(f"{export.name} was not changed: {reason}") from None

        return remove


def _identity(copy: Copy) -> tuple[str, str]:
    """Return what two names of the same copy have in common."""
    place = copy.place
    for database in DATABASES:
        if place.startswith(database.schemes):
            place = without_password(place)
    return place, copy.table or ""


def _records_of(entry: DeadLetterEntry) -> Iterator[Record]:
    """Yield the posts of a dead letter. One of a message that could not be read has several."""
    letter = entry.letter
    fields: Any = {}
    if letter.post is not None:
        try:
            fields = json.loads(letter.post)
        except (ValueError, RecursionError):
            fields = {}
    if not isinstance(fields, dict):
        fields = {}
    if letter.run is not None:
        fields["run"] = letter.run
    if entry.post_id is not None:
        yield Record(
            place="dead_letters",
            post_id=entry.post_id,
            fields=fields,
            at=letter.failed_at,
        )
        return
    for post_id in mentioned_ids(letter.post, letter.options, letter.payload) or ():
        yield Record(
            place="dead_letters",
            post_id=post_id,
            fields=fields,
            at=letter.failed_at,
        )


def _seconds(value: object) -> float:
    """Return a time in seconds since 1970, from the form that any place has; 0 without one."""
    try:
        if isinstance(value, str):
            if value.replace(".", "", 1).isdecimal():
                return float(value)
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            if value.tzinfo is None:
                value = value.replace(tzinfo=UTC)
            return value.timestamp()
    except (ValueError, OverflowError):
        return 0.0
    if isinstance(value, int | float):
        return float(value)
    return 0.0


def _answer_removal(
    file: AnswerFile, ids: Sequence[str], runs: Sequence[str]
) -> Callable[[], int]:
    gone = set(ids)

    def remove() -> int:
        keys = []
        snapshot = file.snapshot()
        for key in snapshot.answers:
            is_gone = key.id in gone
            is_of_run = key.run in runs
            if is_gone or is_of_run:
                keys.append(key)
        if keys:
            file.remove(keys)
        return len(keys)

    return remove


def folder_of_answers(path: Path) -> Path:
    """Return the folder of a file with answers, or the folder itself."""
    if path.name == LABELS_FILE:
        path = path.parent
    return path.expanduser().absolute()
