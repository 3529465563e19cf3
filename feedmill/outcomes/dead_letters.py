"""Dead letters, posts that could not be classified: list, retry and drop them.

The commands of `feedmill dead` and the function `feedmill.dead_letters` call the same functions.
A selection is checked as a whole before the first dead letter changes. A dead letter can have a
megabyte, so iterators hold one page of them in memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import TracebackType
from typing import Any, NamedTuple, Self

from redis import Redis

from feedmill.api.request import read_options
from feedmill.outcomes.rows import check_run, seconds_of
from feedmill.producers.push import Pusher
from feedmill.shared.broker import Application, connect, make_app
from feedmill.shared.encoding import UnreadableError, parse
from feedmill.shared.errors import (
    PostRefused,
    RequestRefused,
    UserError,
    printable,
    truncate,
)
from feedmill.shared.keys import DEAD_LETTER, DEAD_LETTERS
from feedmill.shared.messages import (
    MAX_DEAD_POST_BYTES,
    ClassifyOptions,
    DeadLetter,
    Post,
    parse_run,
)
from feedmill.shared.model_routing import check_options
from feedmill.shared.redis_errors import user_errors
from feedmill.shared.results import PAGE_SIZE, dead_letter_digest, newest_first
from feedmill.shared.scripts import call
from feedmill.shared.settings import Settings, load_arguments

#: Dead letters to list by default.
DEFAULT_COUNT = 20
#: Ids that an error message quotes at most.
MAX_QUOTED_IDS = 5


class DeadLetterEntry(NamedTuple):
    """A dead letter and the id of its stream entry.

    Attributes:
        name: Id of the entry, such as `1795255200000-0`.
        letter: The dead letter: `id` and `post` of the post, `reason`, `failed_at` and others
            (docs/dead-letters.md).
    """

    name: str
    letter: DeadLetter

    @property
    def post_id(self) -> str | None:
        """The post's id; None if the message did not name it."""
        if self.letter.id is None:
            return None
        return self.letter.id.strip()


class Retry(NamedTuple):
    """The outcome of one retry."""

    entry: DeadLetterEntry
    #: Reason for which the post was not sent; None if it was.
    refusal: str | None = None


class Retries(NamedTuple):
    """The outcome of `DeadLetters.retry`.

    Attributes:
        sent: Number of posts that were sent again. Their dead letters are deleted.
        refused: Reason of each dead letter that stays because its post cannot be sent, by the
            name of its entry.
    """

    sent: int
    refused: dict[str, str]


class DeadLetterStream:
    """Access to the dead letters in Redis. Each method raises redis.exceptions.RedisError."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def count(self) -> int:
        """Return the number of dead letters."""
        number: Any = self._redis.xlen(DEAD_LETTERS)
        return int(number)

    def newest(self, count: int, run: str | None = None) -> Iterator[DeadLetterEntry]:
        """Yield the newest `count` dead letters, of the run if given, oldest first, one page in
        memory at a time.
        """
        matching = self._names_of_run(run)
        names = list(islice(matching, count))
        names.reverse()
        return self._entries(names)

    def all(self) -> Iterator[DeadLetterEntry]:
        """Yield all dead letters, oldest first; skip letters added meanwhile."""
        newest: Any = self._redis.xrevrange(DEAD_LETTERS, count=1)
        if newest:
            last_name, _ = newest[0]
            yield from self._between("-", last_name)

    def find(self, ids: Iterable[str]) -> dict[str, list[str]]:
        """Return the names of all entries that match each id, of an entry or of a post.

        Does not keep their content.
        """
        names_of: dict[str, list[str]] = {}
        for search_id in ids:
            names_of[search_id] = []
        for entry in self.all():
            name = entry.name
            post_id = entry.post_id
            if name in names_of:
                names_of[name].append(name)
            if post_id in names_of and post_id != name:
                names_of[post_id].append(name)
        return names_of

    def named(self, ids: Iterable[str]) -> Iterator[DeadLetterEntry]:
        """Return the dead letter of each id, of an entry or of a post, read lazily.

        Raises UserError if none or several match an id.
        """
        names: dict[str, None] = {}
        for wanted_id, matches in self.find(ids).items():
            if not matches:
                raise UserError(
                    f"No dead letter matches {printable(wanted_id)}. List them with "
                    "`feedmill dead list`."
                )
            if len(matches) > 1:
                raise UserError(
                    f"{len(matches):,} dead letters match {printable(wanted_id)}, so nothing was "
                    f"changed. Give the id of one: {_quote_some(matches)}."
                )
            names[matches[0]] = None
        return self._entries(names)

    def get(self, name: str) -> DeadLetterEntry | None:
        """Return the entry with this name, or None if it no longer exists."""
        entries = self._between(name, name)
        return next(entries, None)

    def drop(self, entries: Iterable[DeadLetterEntry]) -> int:
        """Delete entries permanently; return how many were deleted."""
        dropped = 0
        for entry in entries:
            deleted: Any = self._redis.xdel(DEAD_LETTERS, entry.name)
            dropped += int(deleted)
        return dropped

    def retry(
        self,
        entries: Iterable[DeadLetterEntry],
        settings: Settings,
        options: ClassifyOptions | None = None,
    ) -> Iterator[Retry]:
        """Send the posts of dead letters to their queues again, and yield the outcome of each.

        A dead letter is removed once its post is in the queue. One that names no queue goes to
        that of the settings. options: in place of the original ones. Raises UserError if a queue's
        model would refuse them.
        """
        apps: dict[str, Application] = {}
        for entry in entries:
            letter = entry.letter
            queue = letter.queue or settings.queue
            if queue not in apps:
                if options is not None:
                    check_options(self._redis, queue, options)
                queue_settings = settings.model_copy(update={"queue": queue})
                apps[queue] = make_app(queue_settings)
            try:
                self._send_again(letter, apps[queue], options)
            except (PostRefused, RequestRefused) as refusal:
                yield Retry(entry, str(refusal))
            else:
                self.remove_retried(entry)
                yield Retry(entry)

    def remove_retried(self, entry: DeadLetterEntry) -> None:
        """Delete an entry whose post was sent again, and subtract it from the failures of
        its run.
        """
        run = entry.letter.run or ""
        call(self._redis, "remove_retried", entry.name, run)

    def _send_again(
        self,
        letter: DeadLetter,
        app: Application,
        new_options: ClassifyOptions | None,
    ) -> None:
        """Publish the post of a dead letter again.

        Raises PostRefused or RequestRefused if it was purged, or if a part was not stored.
        """
        post = _stored_post(letter)
        options = new_options or _stored_options(letter)
        # else a second failure would write none
        mark = DEAD_LETTER + dead_letter_digest(letter)
        self._redis.delete(mark)
        pusher = Pusher(
            app,
            self._redis,
            app.settings,
            options,
            again=True,
        )
        pusher.push([post])
        if pusher.gone:
            raise PostRefused(post.id, "", f"post {post.id} was purged")

    def _names_of_run(self, run: str | None) -> Iterator[str]:
        """Yield the names of the run's entries, of all entries if None, newest first."""
        for name, fields in newest_first(self._redis, DEAD_LETTERS):
            entry = _entry(name, fields)
            letter = entry.letter
            if run is None or letter.run == run:
                yield name

    def _entries(self, names: Iterable[str]) -> Iterator[DeadLetterEntry]:
        """Yield the entries with these names that still exist."""
        for name in names:
            entry = self.get(name)
            if entry is not None:
                yield entry

    def _between(self, start: str, end: str) -> Iterator[DeadLetterEntry]:
        """Yield the letters between two stream ids, oldest first."""
        client: Any = self._redis
        while page := client.xrange(
            DEAD_LETTERS,
            start,
            end,
            count=PAGE_SIZE,
        ):
            for name, fields in page:
                yield _entry(name, fields)
            last_name, _ = page[-1]
            start = f"({last_name}"


def replacement(options: ClassifyOptions, *, other: bool) -> ClassifyOptions | None:
    """Return the options to retry with in place of the original ones; None for those.

    other: whether somebody asks for others although none is given.
    """
    if other or options != ClassifyOptions():
        return options
    return None


def _entry(name: str, fields: dict[str, str]) -> DeadLetterEntry:
    return DeadLetterEntry(name, letter=read_letter(name, fields))


def read_letter(name: str, fields: Mapping[str, str]) -> DeadLetter:
    """Return the dead letter in a stream entry.

    One that cannot be read, such as another version's, is a letter without a post and with the
    stored text, so that it can be listed and dropped like any other.
    """
    text = fields.get("letter", "")
    try:
        return DeadLetter.model_validate_json(text)
    except ValueError:
        return DeadLetter(
            id=None,
            reason="the stored dead letter cannot be read",
            post=None,
            options=None,
            message=None,
            worker="",
            failed_at=seconds_of(name),
            payload=text[:MAX_DEAD_POST_BYTES],
        )


def _quote_some(names: Sequence[str]) -> str:
    """Return some names for an error message."""
    quoted = ", ".join(names[:MAX_QUOTED_IDS])
    if len(names) > MAX_QUOTED_IDS:
        quoted += ", …"
    return quoted


def _stored_post(letter: DeadLetter) -> Post:
    """Return the post of a dead letter.

    Raises PostRefused or RequestRefused if it was not stored, or would be refused again.
    """
    if letter.post is None:
        raise PostRefused(
            letter.id,
            "",
            "the dead letter does not contain the post; send the post again from its source",
        )
    post_fields = _parse(letter.post)
    return Post.parse(post_fields)


def _stored_options(letter: DeadLetter) -> ClassifyOptions:
    """Return the options of a dead letter. Raises RequestRefused, as `_stored_post`."""
    if letter.options is None:
        raise RequestRefused(
            "the options were too long to store; send the post again from its source"
        )
    option_fields = _parse(letter.options)
    return ClassifyOptions.parse(option_fields)


def _parse(text: str) -> Any:
    """Parse what a dead letter keeps of a message, within the bounds of messages.

    Raises RequestRefused.
    """
    try:
        return parse(text)
    except UnreadableError as error:
        raise RequestRefused(f"the dead letter cannot be read: {error}") from None


class DeadLetters:
    """The dead letters of one Redis. Created by `feedmill.dead_letters`.

    Iterating yields all of them, oldest first. Every method raises feedmill.UserError if Redis
    cannot be reached or refuses a command. A `with` block closes the connection at its end.

    Ids are those of dead letters or of their posts. If an id matches none, or several dead letters
    share it, UserError says so and nothing is changed.
    """

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._redis = redis
        self._settings = settings
        self._stream = DeadLetterStream(redis)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        with user_errors(self._settings):
            return self._stream.count()

    def __iter__(self) -> Iterator[DeadLetterEntry]:
        with user_errors(self._settings):
            yield from self._stream.all()

    def list(
        self, *ids: str, count: int = DEFAULT_COUNT, run: str | None = None
    ) -> "list[DeadLetterEntry]":
        """Return the newest dead letters, oldest first, or those with the given ids.

        Args:
            ids: Return exactly these, whatever `count` and `run` are.
            count: Maximum number of dead letters.
            run: Return only dead letters of this run.

        Raises:
            feedmill.UserError: Also if there is no such run.
        """
        _check_ids(ids)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UserError(f"count must be a whole number above 0, not {count!r:.80}.")
        if run is not None:
            run = parse_run(run)
        with user_errors(self._settings):
            if ids:
                entries = self._stream.named(ids)
                return [*entries]
            if run is not None:
                check_run(self._redis, run)
            entries = self._stream.newest(count, run)
            return [*entries]

    def retry(
        self,
        *ids: str,
        every: bool = False,
        other: bool = False,
        labels: Any = None,
        template: str | None = None,
        multi_label: bool = False,
        none: float | bool | None = None,
    ) -> Retries:
        """Send the posts of dead letters to their queues again, with their original options, or
        with others.

        A dead letter is deleted once its post is in the queue. It stays if it contains no post, if
        the post or its options would be refused again, or if the post was purged.

        Args:
            ids: Dead letters to retry.
            every: Retry all of them.
            other: Send none of the original options. Those that are not given are the worker's.
                Implied by any of the following.
            labels: A list of labels, or a dictionary of descriptions.
            template: Sentence with {} in place of the label.
            multi_label: Score each label by itself.
            none: Score below which a post has no label; True for the model's default.

        Raises:
            feedmill.UserError: Also for options that the model of a queue would refuse.
        """
        sent = 0
        refused: dict[str, str] = {}
        given = read_options(labels, template, multi_label, none)
        options = replacement(given, other=other)
        with user_errors(self._settings):
            entries = self._select(ids, every)
            for entry, refusal in self._stream.retry(entries, self._settings, options):
                if refusal is None:
                    sent += 1
                else:
                    refused[entry.name] = refusal
        return Retries(sent=sent, refused=refused)

    def drop(self, *ids: str, every: bool = False) -> int:
        """Delete dead letters permanently.

        Args:
            ids: Dead letters to delete.
            every: Delete all of them.

        Returns:
            The number of deleted dead letters.
        """
        with user_errors(self._settings):
            entries = self._select(ids, every)
            return self._stream.drop(entries)

    def close(self) -> None:
        """Close the connection to Redis. A later call opens a new one."""
        self._redis.close()

    def _select(self, ids: Sequence[str], every: bool) -> Iterator[DeadLetterEntry]:
        """Return the selected dead letters. Raises UserError unless one selection is given."""
        _check_ids(ids)
        if bool(ids) == every:
            raise UserError("Select dead letters: give either ids, or every=True.")
        if every:
            return self._stream.all()
        return self._stream.named(ids)


def _check_ids(ids: Sequence[str]) -> None:
    """Raise UserError for ids other than text."""
    for value in ids:
        if not isinstance(value, str):
            raise UserError(
                f"An id must be text, not {truncate(repr(value))}. Pass several ids as arguments "
                "of their own, such as retry(*ids)."
            )


def dead_letters(redis_url: str | None = None) -> DeadLetters:
    """Return the dead letters, the posts that could not be classified, to list, retry or drop
    them.

    Connects at the first use.

    Args:
        redis_url: URL of Redis, such as `redis://:password@host:6379/0`. Default:
            FEEDMILL_REDIS_URL, else the running `feedmill up`, else localhost.

    Raises:
        feedmill.UserError: For an invalid setting.

    Example:
        import feedmill

        with feedmill.dead_letters() as letters:
            for entry in letters.list(run="monday"):
                print(entry.name, entry.post_id, entry.letter.reason)
            print(letters.retry(every=True).sent, "sent again")
    """
    settings = load_arguments(redis_url=redis_url)
    return DeadLetters(connect(settings), settings)
