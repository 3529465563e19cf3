"""Run a study: read its dumps, classify, and write parts; then describe them.

Rows are written in chunks: first the parts of a chunk, then the state, which says how far the
dumps are read. Whatever ends the process, the next run deletes parts that the state does not know
and continues behind its position, so that the rows are those of a run that never ended.
"""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from feedmill.exporting.files import hold_lock
from feedmill.offline.model import OfflineModel, load_offline
from feedmill.producers.files import FileReading
from feedmill.producers.titles import Titles, posts_with_titles
from feedmill.shared.errors import InputError, explain_unwritable
from feedmill.shared.messages import Classification, Outcome, Post
from feedmill.shared.settings import Settings
from feedmill.studies.card import card
from feedmill.studies.figures import Figures, figures_of
from feedmill.studies.observer import StudyObserver
from feedmill.studies.parts import Parts, Row, columns_of
from feedmill.studies.request import RAY, StudyRequest
from feedmill.studies.result import StudyResult
from feedmill.studies.state import (
    DumpState,
    StudyState,
    check_continues,
    read_state,
)
from feedmill.tables import save_page, with_outcomes

#: The file of titles, while the study is not complete; the page and the card.
TITLES_FILE = ".titles.sqlite"
PAGE_FILE = "report.html"
CARD_FILE = "README.md"
#: Names of Reddit's dumps of comments, by month or by subreddit, which have no titles. A name that
#: may be of another file is none of them: reading it takes time, but no title is missed.
COMMENT_DUMP = re.compile(
    r"rc_\d{4}-\d\d(-\d\d)?\..+|(?!.*(posts|submissions)).+_comments\..+",
    re.IGNORECASE,
)


class _Waiting(NamedTuple):
    """A post that is being classified, and how far its dump is read with it.

    post: "" at the end of the dump, or where the reading stopped.
    """

    post: Post | str
    progress: DumpState


class Study:
    """A study that was checked, ready to run. Raises UserError and OSError."""

    def __init__(
        self,
        request: StudyRequest,
        settings: Settings,
        observer: StudyObserver | None = None,
    ) -> None:
        self._request = request
        self._settings = settings
        self._observer = observer or StudyObserver()
        request.check()
        self._dumps = request.found_dumps()
        self.state = StudyState(options={}, dumps=self._dumps)
        #: The reading of the dump in work, for a progress bar.
        self.reading: FileReading | None = None
        #: Rows of this run.
        self.new_rows = 0

    def run(self, stop: Sequence[int] = ()) -> StudyResult:
        """Read all dumps, or until `stop` is not empty, and describe the rows."""
        out = self._request.out
        with explain_unwritable(out):
            out.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            opened.enter_context(explain_unwritable(out))
            opened.enter_context(hold_lock(out, "study"))
            self._check_earlier()
            model = opened.enter_context(self._open_model())
            self._begin(model)
            self._read_dumps(model, stop)
            figures = figures_of(out)
            self._describe(figures)
        return self._result()

    def _check_earlier(self) -> None:
        """Check an earlier run's dumps before the model is loaded."""
        stored = read_state(self._request.out)
        if stored is not None:
            check_continues(self._request.out, stored, {}, self._dumps)

    def _open_model(self) -> AbstractContextManager[OfflineModel]:
        request = self._request
        if request.on == RAY:
            # Ray, an extra.
            from feedmill.studies.on_ray import ray_model  # noqa: PLC0415

            return ray_model(
                self._settings,
                request.options,
                request.is_default,
                request.actors,
            )
        model = load_offline(
            self._settings,
            request.options,
            request.is_default,
        )
        return nullcontext(model)

    def _begin(self, model: OfflineModel) -> None:
        """Make the state, or take that of an earlier run."""
        request = self._request
        has_languages = self._settings.languages is not None
        columns = columns_of(request.options, has_languages)
        options = request.identity(model.recipe, columns)
        stored = read_state(request.out)
        if stored is None:
            self.state.options = options
            self.state.model = {
                "name": model.name,
                "revision": model.revision,
                "weights": model.weights,
                "labels": list(model.labels),
            }
            self.state.save(request.out)
        else:
            check_continues(request.out, stored, options, self._dumps)
            self.state = stored
            if stored.records and not stored.is_complete:
                self._observer.note(
                    f"continuing after {stored.records:,} records, {stored.rows:,} rows"
                )
        self._parts = Parts(request.out, columns)
        self._parts.remove_unsaved(self.state)

    def _read_dumps(self, model: OfflineModel, stop: Sequence[int]) -> None:
        if self.state.is_complete:
            return
        with ExitStack() as opened:
            titles = None
            if self._request.context:
                titles = opened.enter_context(self._open_titles())
                self._add_titles(titles, stop)
            opened.enter_context(self._observer.watching(self))
            for index, dump in enumerate(self.state.dumps):
                if not dump.is_done and not stop:
                    self._read_dump(
                        index,
                        model,
                        titles,
                        stop,
                    )
        if self.state.is_complete:
            for file in self._request.out.glob(f"{TITLES_FILE}*"):
                file.unlink()

    def _open_titles(self) -> Titles:
        return Titles(self._request.out / TITLES_FILE)

    def _add_titles(self, titles: Titles, stop: Sequence[int]) -> None:
        """Read the titles of all posts, once."""
        request = self._request
        names = [dump.name for dump in self.state.dumps]
        files = [name for name in names if not _has_only_comments(name)]
        # files that the user names for their titles are read, whatever their name is
        files.extend(request.titles)
        for name in files:
            if stop:
                return
            if titles.has_file(name):
                continue
            self._observer.note(f"reading the titles of {Path(name).name}")
            posts = posts_with_titles(
                name,
                request.file.columns(),
                request.file.encoding,
                request.filters.subreddits,
                stop,
            )
            try:
                titles.add_file(name, posts, stop)
            except InputError:
                # reading its rows reports it, and further comments have no context
                continue

    def _read_dump(
        self,
        index: int,
        model: OfflineModel,
        titles: Titles | None,
        stop: Sequence[int],
    ) -> None:
        """Classify the rest of a dump, and write its rows."""
        dump = self.state.dumps[index]
        chunk = _Chunk(dump, begun_at=time.monotonic())
        posts = self._waiting(
            dump,
            titles,
            stop,
        )
        labelled = with_outcomes(posts, model.classify)
        # Closed after any error: threads of a running model would abort the process at its exit.
        with closing(labelled):
            for waiting, outcome in labelled:
                chunk.add(waiting, outcome)
                if stop:
                    break
                if self._is_due(chunk):
                    chunk = self._save(index, chunk)
        self._save(index, chunk)

    def _waiting(
        self, begun: DumpState, titles: Titles | None, stop: Sequence[int]
    ) -> Iterator[_Waiting]:
        """Yield the posts of the rest of a dump, and its end or the place where it stopped."""
        request = self._request
        reading = FileReading(
            begun.name,
            self._observer.notes,
            filters=request.filters,
            columns=request.file.columns(),
            encoding=request.file.encoding,
            titles=titles,
            skip=begun.records,
            text_only=True,
        )
        self.reading = reading
        for post in reading.posts_of_records():
            if post is not None:
                yield _Waiting(post, _progress(begun, reading))
            if stop:
                yield _Waiting("", _progress(begun, reading))
                return
        end = _progress(begun, reading)
        problem = ""
        try:
            reading.end()
        except InputError as error:
            problem = str(error)
        done = replace(end, is_done=True, problem=problem)
        yield _Waiting("", done)

    def _is_due(self, chunk: "_Chunk") -> bool:
        """Return whether a chunk has enough rows to be written, or is old enough."""
        if len(chunk.rows) >= self._request.part_rows:
            return True
        age_s = time.monotonic() - chunk.begun_at
        return age_s >= self._request.part_seconds

    def _save(self, index: int, chunk: "_Chunk") -> "_Chunk":
        """Write a chunk's rows, then the state. Return the next chunk of the dump."""
        now = time.monotonic()
        dump = chunk.dump_with_rows()
        if chunk.rows:
            saved_records = self.state.dumps[index].records
            self._parts.write(
                chunk.rows,
                index,
                saved_records + 1,
                dump.records,
            )
        self.state.dumps[index] = dump
        self.state.seconds += now - chunk.begun_at
        self.state.save(self._request.out)
        self.new_rows += len(chunk.rows)
        return _Chunk(dump, begun_at=now)

    def _describe(self, figures: Figures) -> None:
        """Write the page and the card of the rows so far."""
        # Jinja, which takes time to import.
        from feedmill.studies.page import page  # noqa: PLC0415

        out = self._request.out
        page_text = page(self.state, figures)
        save_page(out / PAGE_FILE, page_text)
        name = out.resolve().name
        card_text = card(
            name,
            self.state,
            figures,
            self._settings.model,
        )
        card_file = out / CARD_FILE
        card_file.write_text(card_text, encoding="utf-8")

    def _result(self) -> StudyResult:
        state = self.state
        problems: dict[str, str] = {}
        for dump in state.dumps:
            if dump.problem:
                problems[dump.name] = dump.problem
        return StudyResult(
            rows=state.rows,
            records=state.records,
            removed=state.removed,
            failed=state.failed,
            malformed=state.malformed,
            complete=state.is_complete,
            problems=problems,
            out=self._request.out,
        )


class _Chunk:
    """Rows of a dump that are not written yet, and how far the dump is read with them.

    dump: its state when the chunk began. begun_at: monotonic seconds.
    """

    def __init__(self, dump: DumpState, begun_at: float) -> None:
        self.begun_at = begun_at
        self.rows: list[Row] = []
        self._failed = 0
        self._dump = dump
        self._progress = dump

    def add(self, waiting: _Waiting, outcome: Outcome | None) -> None:
        """Add a post with its outcome, or the end of the dump."""
        self._progress = waiting.progress
        if not isinstance(waiting.post, Post):
            return
        if isinstance(outcome, Classification):
            row = Row(waiting.post, outcome)
            self.rows.append(row)
        else:
            self._failed += 1

    def dump_with_rows(self) -> DumpState:
        """Return the dump's state after this chunk."""
        return replace(
            self._progress,
            rows=self._dump.rows + len(self.rows),
            failed=self._dump.failed + self._failed,
        )


def _progress(begun: DumpState, reading: FileReading) -> DumpState:
    """Return how far a dump is read. begun: where the reading began."""
    malformed = reading.skipped - reading.without_text
    return replace(
        begun,
        records=begun.records + reading.records,
        filtered=begun.filtered + reading.left_out,
        removed=begun.removed + reading.removed,
        malformed=begun.malformed + malformed,
        without_text=begun.without_text + reading.without_text,
    )


def _has_only_comments(name: str) -> bool:
    """Return whether a dump has the name of one of comments."""
    file = Path(name).name
    return COMMENT_DUMP.fullmatch(file) is not None


def summary(result: StudyResult) -> dict[str, Any]:
    """Return the outcome for JSON."""
    return result._asdict() | {"out": str(result.out)}
