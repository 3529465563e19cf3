"""Send a file's rows to the queue as a run, on a thread, as `feedmill enqueue --keep` does."""

import io
import logging
import threading
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from rich.console import Console

from feedmill.exporting.columns import COLUMNS
from feedmill.producers.files import FileReading
from feedmill.producers.push import Pusher
from feedmill.producers.records import Columns, is_export_row, normalize_key
from feedmill.shared import runs
from feedmill.shared.broker import connect, make_app
from feedmill.shared.errors import UserError, printable, sentence
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.model_routing import check_options
from feedmill.shared.redis_errors import user_errors
from feedmill.shared.settings import Settings
from feedmill.web.failures import Failure
from feedmill.web.pages.uploads import Upload, Uploads

logger = logging.getLogger(__name__)

#: Priority of posts of a run: those that somebody waits for come first.
PRIORITY = 3
#: Files that are sent at once, and sendings to remember.
MAX_SENDING = 4
MAX_REMEMBERED = 100
#: Notes of a file to show, and characters of each.
MAX_NOTES = 60
MAX_NOTE = 500
#: Seconds to wait for the threads when the server stops.
STOP_S = 5.0
#: Columns that an export has itself; those of a file with such a name are kept under another.
EXPORT_COLUMNS = frozenset(map(str.lower, COLUMNS))
KEPT_PREFIX = "file_"
#: Fields of a post that an export has under the name of their usual column.
OWN_FIELDS = frozenset({"id", "title", "body", "subreddit"})


class Stopped(Exception):  # noqa: N818 - named after the event
    """The server or a person has ended a sending."""


@dataclass(frozen=True)
class SendRequest:
    """A file to send, and its columns and options.

    columns: those that people chose. keep: names of columns to keep for the download.
    """

    run: str
    options: ClassifyOptions
    columns: Columns
    encoding: str | None = None
    again: bool = False


class Notes(io.TextIOBase):
    """Lines that reading a file prints, the first ones."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._rest = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        unfinished = self._rest + text
        *lines, self._rest = unfinished.split("\n")
        for line in lines:
            self._add(line)
        return len(text)

    def _add(self, line: str) -> None:
        has_room = len(self.lines) < MAX_NOTES
        if line.strip() and has_room:
            note = printable(line)
            self.lines.append(note[:MAX_NOTE])


@dataclass(eq=False)
class Sending:
    """A file that is sent, or was."""

    upload: Upload
    request: SendRequest
    person: str
    notes: Notes = field(default_factory=Notes)
    reading: FileReading | None = None
    pusher: Pusher | None = None
    is_ended: bool = False
    #: Reason for an early end; "" if there is none.
    problem: str = ""
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def share(self) -> float:
        """The share of the file that was read, from 0 to 1."""
        if self.is_ended and not self.problem:
            return 1.0
        if self.reading is None or not self.reading.size:
            return 0.0
        return min(1.0, self.reading.done / self.reading.size)

    @property
    def malformed(self) -> int:
        """Records without a post, other than those without text."""
        if self.reading is None:
            return 0
        return self.reading.skipped - self.reading.without_text


class Sendings:
    """The files that are sent, newest last, by the name of their run."""

    def __init__(self, settings: Settings, uploads: Uploads) -> None:
        self._settings = settings.model_copy(update={"priority": PRIORITY})
        self._uploads = uploads
        self._lock = threading.Lock()
        self._sendings: list[Sending] = []
        self._threads: list[threading.Thread] = []

    def of_run(self, run: str) -> Sending | None:
        """Return the newest sending of a run; None if this server remembers none."""
        for sending in reversed(self._sendings):
            if sending.request.run == run:
                return sending
        return None

    @property
    def active(self) -> list[Sending]:
        return [sending for sending in self._sendings if not sending.is_ended]

    def start(self, upload: Upload, request: SendRequest, person: str) -> Sending:
        """Begin to send a file. Raises Failure, and UserError for options that no worker takes."""
        with user_errors(self._settings):
            redis = connect(self._settings)
            check_options(redis, self._settings.queue, request.options)
            redis.close()
        sending = Sending(
            upload=upload,
            request=request,
            person=person,
        )
        with self._lock:
            active = self.active
            if len(active) >= MAX_SENDING:
                raise Failure(503, "busy", "Other files are being sent. Try again.")
            if any(other.upload is upload for other in active):
                raise Failure(409, "busy", "This file is being sent already.")
            upload.users += 1
            self._sendings.append(sending)
            del self._sendings[:-MAX_REMEMBERED]
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(
                target=self._send,
                args=(sending,),
                name="sending",
                daemon=True,
            )
            self._threads.append(thread)
        thread.start()
        return sending

    def close(self) -> None:
        """Stop all sendings; what was sent stays sent."""
        for sending in self._sendings:
            sending.stop.set()
        for thread in self._threads:
            thread.join(STOP_S)

    def _send(self, sending: Sending) -> None:
        """Send a file to its end, and note the outcome."""
        upload = sending.upload
        try:
            with user_errors(self._settings):
                self._push(sending)
        except Stopped:
            sending.problem = (
                "Stopped. Drop the file again, with the same run, to send the rest."
            )
        except UserError as error:
            sending.problem = sentence(upload.hide_path(str(error)))
        except Exception:
            logger.exception("sending a file failed")
            sending.problem = "The server failed. Its log has the reason; report it."
        else:
            self._uploads.delete(upload)
        finally:
            sending.is_ended = True
            upload.users -= 1

    def _push(self, sending: Sending) -> None:
        settings = self._settings
        request = sending.request
        redis = connect(settings)

        def wait(seconds: float) -> None:
            if sending.stop.wait(seconds):
                raise Stopped

        pusher = Pusher(
            make_app(settings, current=False),
            redis,
            settings,
            request.options,
            request.again,
            wait=wait,
            wait_for_memory=True,
            run=request.run,
        )
        sending.pusher = pusher
        console = Console(
            file=sending.notes,  # type: ignore[arg-type]  # all that a console writes with
            width=MAX_NOTE,
            no_color=True,
        )
        reading = FileReading(
            str(sending.upload.path),
            console,
            columns=request.columns,
            encoding=request.encoding,
        )
        reading.name = sending.upload.name
        sending.reading = reading
        try:
            names = [name for _, name in request.columns.keep]
            keep_columns = partial(
                runs.keep_columns, redis, request.run, names, settings.sent_ttl
            )
            pusher.retry_until_memory(keep_columns)
            pusher.push(_until_stopped(reading.posts(), sending))
            reading.end()
        finally:
            redis.close()


def _until_stopped(posts: Iterator[Post], sending: Sending) -> Iterator[Post]:
    for post in posts:
        if sending.stop.is_set():
            raise Stopped
        yield post


def kept_columns(
    names: Sequence[str], chosen_names: Container[str], columns: Columns
) -> tuple[tuple[str, str], ...]:
    """Return the columns of a file to keep: each key, with the name that it gets in an export.

    names: of all columns. chosen_names: of those to keep. columns: those that people chose for a
    field; an export has these fields anyway.
    """
    keys = [normalize_key(name) for name in names]
    if is_export_row(keys):
        return ()
    used_names = {*map(str.lower, names), *EXPORT_COLUMNS}
    pairs: list[tuple[str, str]] = []
    for name, key in zip(names, keys, strict=True):
        is_ambiguous = not key or keys.count(key) > 1
        if name not in chosen_names or is_ambiguous or _is_field(name, columns):
            continue
        new_name = name
        if name.lower() in EXPORT_COLUMNS:
            new_name = _unused_name(name, used_names)
        used_names.add(new_name.lower())
        pairs.append((key, new_name))
    return tuple(pairs)


def _is_field(name: str, columns: Columns) -> bool:
    """Return whether an export has a column of a file under its own name, as a post's field."""
    if name not in OWN_FIELDS:
        return False
    chosen_key = getattr(columns, name)
    return chosen_key in (None, name)


def _unused_name(name: str, used_names: Container[str]) -> str:
    """Return a name for a column whose own name an export uses itself."""
    new_name = KEPT_PREFIX + name
    while new_name.lower() in used_names:
        new_name = KEPT_PREFIX + new_name
    return new_name
