"""A message inside the worker: from its arguments to one outcome per post.

One bad post does not fail the other posts of its message. Independent of Celery: the pipeline's owner keeps what it
needs to reply in `pending`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from traceback import format_tb
from typing import Any

from pydantic_core import to_json

from feedmill.shared.errors import MessageFailed, RequestRefused
from feedmill.shared.messages import (
    MAX_DEAD_MESSAGE_BYTES,
    MAX_DEAD_OPTIONS_BYTES,
    MAX_DEAD_POST_BYTES,
    MAX_DEAD_TRACEBACK,
    MAX_ID,
    MAX_POSTS_PER_MESSAGE,
    ClassifyOptions,
    DeadLetter,
    Outcome,
    Post,
    PostError,
    is_missing,
    parse_posts,
    run_of,
)

#: Seconds since 1970, in the year 5138. Later times in a header are invalid and ignored.
MAX_TIMESTAMP_S = 1e11
#: Deaths of workers in isolation after which a post, or a message that is not on the device yet, is a dead letter.
MAX_DEATHS = 3
#: Innermost frames per error that a dead letter keeps, and errors per chain of causes.
MAX_FRAMES, MAX_CHAINED_ERRORS = 20, 4


class State(IntEnum):
    """A message's state. A message never returns to an earlier one."""

    #: None of the message's rows has entered a forward pass.
    WAITING = auto()
    #: One of the message's rows has entered a forward pass, or none needs to.
    STARTED = auto()
    #: The message has all of its outcomes, was withdrawn, or exceeded a time limit.
    ENDED = auto()


class Message:
    """A message inside the worker: its posts and their outcomes.

    arguments: the arguments of the task `feedmill.classify`, as sent.
    sent_at: the sender's time, in seconds since 1970; ignored unless plausible.
    task_id: Celery's task id, for dead letters.
    priority: 0 (first) to 9 (last).
    pending: anything that the owner needs to reply to the message.
    attempts: number of deliveries, including this one.
    queue: the queue that the message was taken from, if any.
    deaths: number of workers that died in isolation while a post was on the device, by the post's index; None if the
        message is not handled in isolation (workers/transport/leases.py).
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
    ) -> None:
        self.arguments = dict(arguments)
        #: Time of sending in seconds since 1970; None if unknown.
        self.sent_at = float(sent_at) if isinstance(sent_at, int | float) and 0 < sent_at < MAX_TIMESTAMP_S else None
        self.task_id = task_id
        self.priority = priority
        self.pending = pending
        self.attempts = attempts
        self.queue = queue
        self.deaths = deaths
        self._given = self.arguments.pop("posts", None)
        self.raw_posts: list[object] = self._given if isinstance(self._given, list) else []
        self.outcomes: list[Outcome | None] = [None] * len(self.raw_posts)
        #: Tracebacks by post index; only for dead letters.
        self.tracebacks: dict[int, str] = {}
        self.missing_outcomes = len(self.raw_posts)
        self.options = ClassifyOptions()
        #: Reason to reject the whole message, if any.
        self.refused: RequestRefused | None = None
        #: Reason why a valid message fails as a whole, such as a timeout.
        self.fault: Exception | None = None
        #: True if its task was retried as a new message: failed posts do not become dead letters yet.
        self.sent_again = False
        #: Guarded by the backlog's lock.
        self.state = State.WAITING

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
        if len(self.raw_posts) > MAX_POSTS_PER_MESSAGE:
            raise RequestRefused(f"posts: {len(self.raw_posts)} in one message; at most {MAX_POSTS_PER_MESSAGE}")
        return parse_posts(self.raw_posts)

    def set_outcome(self, index: int, outcome: Outcome) -> bool:
        """Set the outcome of the post at `index`. Return whether the message is complete with it."""
        if self.outcomes[index] is not None:
            return False  # several rows of a post can fail; the first error counts
        self.outcomes[index] = outcome
        self.missing_outcomes -= 1
        return not self.missing_outcomes

    def give_up(self, fault: Exception, reason: str) -> None:
        """Fail the whole message. Posts without an outcome fail with the given reason."""
        self.fault = fault
        for index, raw in enumerate(self.raw_posts):
            self.set_outcome(index, PostError(id=_id_of(raw), error=reason))

    def errors(self) -> list[PostError]:
        """Return the outcomes that are errors."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, PostError)]

    def dead_letters(self, worker: str, now: float) -> list[DeadLetter]:
        """Return a dead letter for each post of a complete message that has no classification.

        A message with too many posts gets a single letter without a post, because its size is unbounded. A message
        whose posts are not a list gets a single letter with the value that was sent.
        """
        if self.sent_again or not (self.refused or self.errors()):
            return []
        failures = self._failures()
        bare = [self._letter(why, worker, now, id=_id_of(raw), run=run_of(raw)) for raw, why, _ in failures]
        options = _as_json(self.arguments, MAX_DEAD_OPTIONS_BYTES)
        letters, room = [], MAX_DEAD_MESSAGE_BYTES - sum(len(letter.model_dump_json().encode()) for letter in bare)
        for letter, (raw, _, traceback) in zip(bare, failures, strict=True):
            post = None if raw is None else _as_json(_known_fields(raw), MAX_DEAD_POST_BYTES)
            kept = {}
            for name, text in (("post", post), ("options", options), ("traceback", traceback)):
                # Measured as it appears in the letter's JSON, quotes included.
                if text is not None and (size := len(to_json(text))) <= room:
                    kept[name], room = text, room - size
            letters.append(letter.model_copy(update=kept))
        return letters

    def dead_letter_of_body(
        self, body: object, reason: str, traceback: str | None, worker: str, now: float
    ) -> DeadLetter:
        """Return the dead letter of a message in which no posts are found. body: undecoded if possible."""
        start = body if isinstance(body, str | bytes) else _as_json(body, MAX_DEAD_POST_BYTES) or ""
        payload = start[:MAX_DEAD_POST_BYTES]
        text = payload.decode("utf-8", "replace") if isinstance(payload, bytes) else payload
        return self._letter(reason, worker, now, traceback=traceback, payload=text)

    def _letter(self, reason: str, worker: str, now: float, **fields: Any) -> DeadLetter:
        """Return a dead letter without the post and the options."""
        source = {"message": self.task_id, "attempts": self.attempts, "queue": self.queue}
        unset = {"id": None, "post": None, "options": None}
        return DeadLetter(reason=reason, worker=worker, failed_at=now, **unset | source | fields)

    def _failures(self) -> list[tuple[object, str, str | None]]:
        """Return each raw post without a classification, with the reason and the traceback."""
        if self.refused:
            bounded = len(self.raw_posts) <= MAX_POSTS_PER_MESSAGE
            refused = (self.raw_posts or [self._given]) if bounded else [None]
            return [(raw, str(self.refused), self.tracebacks.get(index)) for index, raw in enumerate(refused)]
        return [
            (raw, outcome.error, self.tracebacks.get(index))
            for index, (raw, outcome) in enumerate(zip(self.raw_posts, self.outcomes, strict=True))
            if isinstance(outcome, PostError)
        ]

    def check(self) -> None:
        """Raise the message's fault or refusal, or MessageFailed if its posts failed.

        A message fails when all of its posts failed. With the option `strict`, one failed post is enough.
        """
        if self.fault:
            raise self.fault
        if self.refused:
            raise self.refused
        reasons = [f"{error.id}: {error.error}" for error in self.errors()]
        if reasons and (self.options.strict or len(reasons) == len(self.outcomes)):
            raise MessageFailed.of(reasons, len(self.outcomes))

    def summary(self) -> str:
        """Return the number of classified posts as text."""
        return f"{len(self.outcomes) - len(self.errors())} of {len(self.outcomes)} posts classified"

    def result(self) -> list[dict[str, Any]]:
        """Return one outcome per post, in order. Raises as `check` does."""
        self.check()
        return [self._reply(outcome) for outcome in self.outcomes if outcome is not None]

    def _reply(self, outcome: Outcome) -> dict[str, Any]:
        reply = outcome.model_dump()
        if self.options.top_k and "scores" in reply:
            reply["scores"] = dict(list(reply["scores"].items())[: self.options.top_k])  # sorted by score, best first
        return reply


def traceback_of(error: BaseException) -> str:
    """Return the tracebacks of an error's causes and of the error, without messages, because these may quote a post."""
    found: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(found) < MAX_CHAINED_ERRORS:
        found.insert(0, f"{''.join(format_tb(cause.__traceback__, -MAX_FRAMES))}{type(cause).__name__}\n")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "\n".join(found)[-MAX_DEAD_TRACEBACK:].encode("utf-8", "replace").decode()


def _id_of(raw: object) -> str | None:
    """Return a raw post's id, shortened to the maximum length, or None."""
    post_id = raw.get("id") if isinstance(raw, dict) else None
    return None if is_missing(post_id) else str(post_id)[:MAX_ID]


def _known_fields(raw: object) -> object:
    """Return a raw post without unknown fields, such as its author."""
    if isinstance(raw, dict):
        return {name: value for name, value in raw.items() if name in Post.model_fields}
    return raw


def _as_json(value: object, limit: int) -> str | None:
    """Return a value as JSON, with characters replaced that UTF-8 cannot encode.

    None if it is too long, nested too deeply, or not serializable.
    """
    try:
        written = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    except (ValueError, TypeError, RecursionError):  # kombu's JSON supports additional types
        return None
    return written.decode() if len(written) <= limit else None


@dataclass(eq=False, slots=True)
class PendingPost:
    """A post of a message between `prepare` and its outcome."""

    post: Post
    message: Message
    index: int
    #: Key under which its classification is stored.
    fingerprint: str
