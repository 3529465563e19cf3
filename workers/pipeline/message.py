"""A message inside the worker: from its arguments to one outcome per post.

One bad post does not fail the other posts of its message. Independent of Celery: the pipeline's
owner keeps what it needs to reply in `pending`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from itertools import islice
from traceback import format_tb
from typing import Any, NamedTuple

from pydantic_core import to_json

from feedmill.shared.errors import MessageFailed, RequestRefused
from feedmill.shared.logs import fields_of
from feedmill.shared.messages import (
    MAX_DEAD_MESSAGE_BYTES,
    MAX_DEAD_OPTIONS_BYTES,
    MAX_DEAD_POST_BYTES,
    MAX_DEAD_TRACEBACK,
    MAX_POSTS_PER_MESSAGE,
    TIME_FIELDS,
    Classification,
    ClassifyOptions,
    DeadLetter,
    Outcome,
    Post,
    PostError,
    as_seconds,
    as_text,
    id_text,
    is_missing,
    parse_posts,
    run_of,
)
from feedmill.shared.trace_context import TraceContext

#: Seconds since 1970, in the year 5138. Later times in a header are invalid and ignored.
MAX_TIMESTAMP_S = 1e11
#: Deaths of workers in isolation after which a post, or a message that is not on the device yet,
#: is a dead letter.
MAX_DEATHS = 3
#: Innermost frames per error that a dead letter keeps, and errors per chain of causes.
MAX_FRAMES = 20
MAX_CHAINED_ERRORS = 4


class State(IntEnum):
    """A message's state. A message never returns to an earlier one."""

    #: None of the message's rows has entered a forward pass.
    WAITING = auto()
    #: One of the message's rows has entered a forward pass, or none needs to.
    STARTED = auto()
    #: The message has all of its outcomes, was withdrawn, or exceeded a time limit.
    ENDED = auto()


class _Failure(NamedTuple):
    """A post without a classification, as sent: the reason, and the traceback if any."""

    raw: object
    reason: str
    traceback: str | None


class Message:
    """A message inside the worker: its posts and their outcomes.

    arguments: the arguments of the task `feedmill.classify`, as sent.
    sent_at: the sender's time, in seconds since 1970; ignored unless plausible.
    task_id: Celery's task id, for dead letters.
    priority: 0 (first) to 9 (last).
    pending: anything that the owner needs to reply to the message.
    attempts: number of deliveries, including this one.
    queue: the queue that the message was taken from, if any.
    deaths: number of workers that died in isolation while a post was on the device, by the post's
        index; None if the message is not handled in isolation (workers/transport/leases.py).
    trace: the context that its sender's headers carry, if any.
    """

    def __init__(
        self,
        arguments: dict[str, Any],
        sent_at: object,
        task_id: str | None = None,
        priority: int = 0,
        pending: Any = None,
        attempts: int = 1,
        queue: str | None = None,
        deaths: Mapping[int, int] | None = None,
        trace: TraceContext | None = None,
    ) -> None:
        self.arguments = dict(arguments)
        #: Time of sending in seconds since 1970; None if unknown.
        self.sent_at: float | None = None
        if isinstance(sent_at, int | float) and 0 < sent_at < MAX_TIMESTAMP_S:
            self.sent_at = float(sent_at)
        self.task_id = task_id
        self.priority = priority
        self.pending = pending
        self.attempts = attempts
        self.queue = queue
        self.deaths = deaths
        self.trace = trace
        #: The message's spans while they are recorded (workers/runtime/spans.py).
        self.spans: Any = None
        #: The argument `posts` as sent, of any type.
        self._posts = self.arguments.pop("posts", None)
        self.raw_posts: list[object] = []
        if isinstance(self._posts, list):
            self.raw_posts = self._posts
        count = len(self.raw_posts)
        self.outcomes: list[Outcome | None] = [None] * count
        #: Tracebacks by post index; only for dead letters.
        self.tracebacks: dict[int, str] = {}
        self.missing_outcomes = count
        self.options = ClassifyOptions()
        #: Reason to reject the whole message, if any.
        self.refused: RequestRefused | None = None
        #: Reason why a valid message fails as a whole, such as a timeout.
        self.fault: Exception | None = None
        #: True if its task was retried as a new message: failed posts do not become dead letters
        #: yet.
        self.sent_again = False
        #: Guarded by the backlog's lock.
        self.state = State.WAITING

    def log_fields(self) -> dict[str, Any]:
        """Return the argument `extra` of a log record about the message."""
        run = None
        if self.raw_posts:
            run = run_of(self.raw_posts[0])
        return fields_of(self.task_id, run, self.trace)

    def enter(self, state: State) -> bool:
        """Enter a later state. Return False if the message has reached it already."""
        if state <= self.state:
            return False
        self.state = state
        return True

    def read(self) -> Sequence[Post | PostError]:
        """Parse the options, and return each post or its error. Raises RequestRefused."""
        # Options first: a newer version may have a different format for posts, too.
        self.options = ClassifyOptions.parse(self.arguments)
        if not self.raw_posts:
            raise RequestRefused("posts: expected a list of at least one post")
        count = len(self.raw_posts)
        if count > MAX_POSTS_PER_MESSAGE:
            raise RequestRefused(
                f"posts: {count} in one message; at most {MAX_POSTS_PER_MESSAGE}"
            )
        return parse_posts(self.raw_posts)

    def set_outcome(self, index: int, outcome: Outcome) -> bool:
        """Set the outcome of the post at `index`.

        Return whether the message is complete with it.
        """
        if self.outcomes[index] is not None:
            return False  # several rows of a post can fail; the first error counts
        self.outcomes[index] = outcome
        self.missing_outcomes -= 1
        return not self.missing_outcomes

    def give_up(self, fault: Exception, reason: str) -> None:
        """Fail the whole message. Posts without an outcome fail with the given reason."""
        self.fault = fault
        for index, raw in enumerate(self.raw_posts):
            error = PostError(id=_id_of(raw), error=reason)
            self.set_outcome(index, error)

    def errors(self) -> list[PostError]:
        """Return the outcomes that are errors."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, PostError)]

    def dead_letters(self, worker: str, now: float) -> list[DeadLetter]:
        """Return a dead letter for each post of a complete message that has no classification.

        A message with too many posts gets a single letter without a post, because its size is
        unbounded. A message whose posts are not a list gets a single letter with the value that
        was sent.
        """
        if self.sent_again:
            return []
        failures = self._failures()
        if not failures:
            return []
        return self._letters(failures, worker, now)

    def refused_letters(
        self, reason: str, traceback: str | None, worker: str, now: float
    ) -> list[DeadLetter]:
        """Return a dead letter for each post of a message that is refused as a whole."""
        failures = []
        for raw in self._refused_posts():
            failure = _Failure(
                raw=raw,
                reason=reason,
                traceback=traceback,
            )
            failures.append(failure)
        return self._letters(failures, worker, now)

    def _letters(
        self, failures: Sequence[_Failure], worker: str, now: float
    ) -> list[DeadLetter]:
        """Return a dead letter for each failed post, with as much of its text as fits."""
        bare_letters = []
        room = MAX_DEAD_MESSAGE_BYTES
        for failure in failures:
            letter = self._letter(
                failure.reason,
                worker,
                now,
                id=_id_of(failure.raw),
                run=run_of(failure.raw),
            )
            bare_letters.append(letter)
            room -= len(letter.model_dump_json().encode())

        options = _as_json(self.arguments, MAX_DEAD_OPTIONS_BYTES)
        letters = []
        for letter, failure in zip(bare_letters, failures, strict=True):
            texts = {
                "post": _post_as_json(failure.raw),
                "options": options,
                "traceback": failure.traceback,
            }
            fitting = {}
            for name, text in texts.items():
                if text is None:
                    continue
                # Measured as it appears in the letter's JSON, quotes included.
                size = len(to_json(text))
                if size <= room:
                    fitting[name] = text
                    room -= size
            letters.append(letter.model_copy(update=fitting))
        return letters

    def dead_letter_of_body(
        self, body: object, reason: str, traceback: str | None, worker: str, now: float
    ) -> DeadLetter:
        """Return the dead letter of a message in which no posts are found. body: undecoded if
        possible.
        """
        if isinstance(body, bytes):
            payload = body[:MAX_DEAD_POST_BYTES].decode("utf-8", "replace")
        elif isinstance(body, str):
            payload = body[:MAX_DEAD_POST_BYTES]
        else:
            text = _as_json(body, MAX_DEAD_POST_BYTES) or ""
            payload = text[:MAX_DEAD_POST_BYTES]
        return self._letter(
            reason,
            worker,
            now,
            traceback=traceback,
            payload=payload,
        )

    def _letter(
        self, reason: str, worker: str, now: float, **fields: Any
    ) -> DeadLetter:
        """Return a dead letter without the post and the options."""
        source = {
            "message": self.task_id,
            "attempts": self.attempts,
            "queue": self.queue,
        }
        unset = {"id": None, "post": None, "options": None}
        return DeadLetter(
            reason=reason,
            worker=worker,
            failed_at=now,
            **unset | source | fields,
        )

    def _failures(self) -> list[_Failure]:
        """Return the posts of a complete message that have no classification."""
        failures = []
        if self.refused:
            reason = str(self.refused)
            for index, raw in enumerate(self._refused_posts()):
                failure = _Failure(
                    raw=raw,
                    reason=reason,
                    traceback=self.tracebacks.get(index),
                )
                failures.append(failure)
            return failures
        for index, outcome in enumerate(self.outcomes):
            if isinstance(outcome, PostError):
                failure = _Failure(
                    raw=self.raw_posts[index],
                    reason=outcome.error,
                    traceback=self.tracebacks.get(index),
                )
                failures.append(failure)
        return failures

    def _refused_posts(self) -> list[object]:
        """Return the posts of a refused message that get a dead letter each, as sent.

        Too many posts are a single None, and an invalid list of posts is a single post.
        """
        if len(self.raw_posts) > MAX_POSTS_PER_MESSAGE:
            return [None]
        if not self.raw_posts:
            return [self._posts]
        return self.raw_posts

    def check(self) -> None:
        """Raise the message's fault or refusal, or MessageFailed if its posts failed.

        A message fails when all of its posts failed. With the option `strict`, one failed post is
        enough.
        """
        if self.fault:
            raise self.fault
        if self.refused:
            raise self.refused
        errors = self.errors()
        if not errors:
            return
        posts = len(self.outcomes)
        if self.options.strict or len(errors) == posts:
            reasons = [f"{error.id}: {error.error}" for error in errors]
            raise MessageFailed.of(reasons, posts)

    def summary(self) -> str:
        """Return the number of classified posts as text, and of those that fit no label."""
        posts = len(self.outcomes)
        classified = posts - len(self.errors())
        summary = f"{classified} of {posts} posts classified"
        unlabelled = 0
        for outcome in self.outcomes:
            if isinstance(outcome, Classification) and outcome.label is None:
                unlabelled += 1
        if unlabelled:
            summary += f", {unlabelled} without a label"
        return summary

    def result(self) -> list[dict[str, Any]]:
        """Return one outcome per post, in order, of a complete message. Raises as `check` does."""
        self.check()
        replies = []
        for index, outcome in enumerate(self.outcomes):
            if outcome is None:
                raise RuntimeError(f"posts[{index}] has no outcome yet")
            reply = self._reply(outcome)
            replies.append(reply)
        return replies

    def _reply(self, outcome: Outcome) -> dict[str, Any]:
        reply = outcome.model_dump()
        top_k = self.options.top_k
        if top_k and "scores" in reply:
            scores = reply["scores"].items()  # sorted by score, best first
            reply["scores"] = dict(islice(scores, top_k))
        return reply


def traceback_of(error: BaseException) -> str:
    """Return the tracebacks of an error's causes and of the error, without messages, because these
    may quote a post.
    """
    tracebacks: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(tracebacks) < MAX_CHAINED_ERRORS:
        frames = "".join(format_tb(cause.__traceback__, -MAX_FRAMES))
        tracebacks.append(f"{frames}{type(cause).__name__}\n")
        cause = _cause_of(cause)
    tracebacks.reverse()  # causes first
    end = "\n".join(tracebacks)[-MAX_DEAD_TRACEBACK:]
    return end.encode("utf-8", "replace").decode()


def _cause_of(error: BaseException) -> BaseException | None:
    """Return the error that Python's traceback of this one names as its cause."""
    if error.__cause__:
        return error.__cause__
    if error.__suppress_context__:
        return None
    return error.__context__


def _id_of(raw: object) -> str | None:
    """Return a raw post's id, shortened to the maximum length, or None."""
    if not isinstance(raw, dict):
        return None
    post_id = raw.get("id")
    return None if is_missing(post_id) else id_text(post_id)


def _known_fields(raw: object) -> object:
    """Return a raw post without unknown fields, such as its author."""
    if not isinstance(raw, dict):
        return raw
    fields = {name: value for name, value in raw.items() if name in Post.model_fields}
    for name in TIME_FIELDS & fields.keys():
        time = fields[name]
        fields[name] = as_seconds(time)
    return fields


def _post_as_json(raw: object) -> str | None:
    """Return a raw post's known fields as JSON; None if there is no post, or as `_as_json`."""
    if raw is None:
        return None
    return _as_json(_known_fields(raw), MAX_DEAD_POST_BYTES)


def _as_json(value: object, limit: int) -> str | None:
    """Return a value as JSON, with the texts of types that only Celery's JSON has, and with
    characters replaced that UTF-8 cannot encode.

    None if it is too long, nested too deeply, or not serializable.
    """
    try:
        text = json.dumps(
            value,
            ensure_ascii=False,
            default=as_text,
        )
    except (ValueError, TypeError, RecursionError):
        return None
    encoded = text.encode("utf-8", "replace")
    if len(encoded) > limit:
        return None
    return encoded.decode()


@dataclass(eq=False, slots=True)
class PendingPost:
    """A post of a message between `prepare` and its outcome."""

    post: Post
    message: Message
    index: int
    #: Key under which its classification is stored.
    fingerprint: str
    #: Its language; None if it is uncertain, or not to be detected.
    language: str | None = None
