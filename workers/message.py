"""One message inside the worker: from its arguments to one outcome per post.

It holds the promise that other applications are given: one bad post does not fail the others of its message.
Knows nothing of Celery; the pool keeps what it needs to answer in `ticket`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from traceback import format_tb
from typing import Any

from pydantic_core import to_json

from shared.errors import MessageFailed, RequestRefused
from shared.messages import (
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
    parse_posts,
)

#: Seconds since 1970 in the year 5138: what a header says beyond is no time.
LATEST = 1e11
#: Frames of an error that a dead letter keeps, the innermost; and how many errors that it came of, itself counted.
FRAMES, LONGEST_CHAIN = 20, 4


class Message:
    """One message inside the worker: its posts, and an outcome for each as they come.

    arguments: of `feedmill.classify`, as they were sent. task_id: Celery's, for dead letters. priority: whose turn it
    is when several wait, 0 before 9. redelivered: whether a worker had it before. ticket: whatever its owner needs to
    answer it. attempts: how many times it was delivered, this one included. queue: that it came out of, if any.
    """

    def __init__(
        self,
        arguments: dict[str, Any],
        sent_at: object,
        task_id: str | None = None,
        priority: int = 0,
        redelivered: bool = False,
        ticket: Any = None,
        attempts: int = 1,
        queue: str | None = None,
    ) -> None:
        self.arguments = dict(arguments)
        #: Seconds since 1970, where the sender said so.
        self.sent_at = float(sent_at) if isinstance(sent_at, int | float) and 0 < sent_at < LATEST else None
        self.task_id = task_id
        self.priority = priority
        self.redelivered = redelivered
        #: By index, how many workers vanished in a forward pass that this post was in (workers/suspects.py).
        self.deaths: Mapping[int, int] = {}
        self.ticket = ticket
        self.attempts = attempts
        self.queue = queue
        self._given = self.arguments.pop("posts", None)
        self.raw_posts: list[object] = self._given if isinstance(self._given, list) else []
        self.outcomes: list[Outcome | None] = [None] * len(self.raw_posts)
        #: Where an error came from, by the index of its post: for dead letters, and nobody else.
        self.tracebacks: dict[int, str] = {}
        self.unsettled = len(self.raw_posts)
        self.options = ClassifyOptions()
        #: Why the message as a whole cannot be served, where that is so.
        self.refused: RequestRefused | None = None
        #: Why it fails as a whole although it could be served: it took too long.
        self.fault: Exception | None = None
        #: A row of it has entered a forward pass, or it needed none.
        self.started = False
        #: Its owner has been handed its outcomes.
        self.finished = False
        #: Nothing more of it is computed: it was withdrawn, or took too long.
        self.dropped = False
        #: Its owner has sent it once more, as a message of its own: what it lacks is no dead letter yet.
        self.sent_again = False

    def read(self) -> list[Post | PostError]:
        """Its posts, each read or refused; its options from now on. Raises RequestRefused."""
        # First: of a newer version, the posts may look different as well.
        self.options = ClassifyOptions.parse(self.arguments)
        if not self.raw_posts:
            raise RequestRefused("posts: expected a list of at least one post")
        if len(self.raw_posts) > MAX_POSTS_PER_MESSAGE:
            raise RequestRefused(f"posts: {len(self.raw_posts)} in one message; at most {MAX_POSTS_PER_MESSAGE}")
        return parse_posts(self.raw_posts)

    def settle(self, index: int, outcome: Outcome) -> bool:
        """Record the outcome of the post at `index`; whether the message is complete by it."""
        if self.outcomes[index] is not None:
            return False  # of a post with many rows more than one may fail: the first counts
        self.outcomes[index] = outcome
        self.unsettled -= 1
        return not self.unsettled

    def give_up(self, fault: Exception, reason: str) -> None:
        """Fail as a whole; the posts without an outcome get the reason for theirs."""
        self.fault = fault
        for index, raw in enumerate(self.raw_posts):
            self.settle(index, PostError(id=_id_of(raw), error=reason))

    def errors(self) -> list[PostError]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, PostError)]

    def failed(self) -> bool:
        """Whether any of its posts got no classification, once it is complete."""
        return bool(self.refused) or any(isinstance(outcome, PostError) for outcome in self.outcomes)

    def dead_letters(self, worker: str, now: float) -> list[DeadLetter]:
        """One for each of its posts that got no classification, once it is complete.

        One in all, without posts, for a message of more posts than one may hold: it is bounded in nothing else. And one
        for what was sent in place of a list of posts.
        """
        if self.sent_again or not self.failed():
            return []
        failures = self._failures()
        bare = [
            DeadLetter(
                id=_id_of(raw),
                reason=why,
                post=None,
                options=None,
                message=self.task_id,
                worker=worker,
                failed_at=now,
                attempts=self.attempts,
                queue=self.queue,
            )
            for raw, why, _ in failures
        ]
        options = _as_json(self.arguments, MAX_DEAD_OPTIONS_BYTES)
        letters, room = [], MAX_DEAD_MESSAGE_BYTES - sum(len(letter.model_dump_json().encode()) for letter in bare)
        for letter, (raw, _, traceback) in zip(bare, failures, strict=True):
            post = None if raw is None else _as_json(_known_fields(raw), MAX_DEAD_POST_BYTES)
            kept = {}
            for name, text in (("post", post), ("options", options), ("traceback", traceback)):
                # Quoted, as a part of the letter's own JSON.
                if text is not None and (size := len(to_json(text))) <= room:
                    kept[name], room = text, room - size
            letters.append(letter.model_copy(update=kept))
        return letters

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
        """Raises RequestRefused or MessageFailed where the promise says so, or what it was given up for."""
        if self.fault:
            raise self.fault
        if self.refused:
            raise self.refused
        reasons = [f"{error.id}: {error.error}" for error in self.errors()]
        if reasons and (self.options.strict or len(reasons) == len(self.outcomes)):
            raise MessageFailed.of(reasons, len(self.outcomes))

    def summary(self) -> str:
        return f"{len(self.outcomes) - len(self.errors())} of {len(self.outcomes)} posts classified"

    def result(self) -> list[dict[str, Any]]:
        """One outcome per post, in order. Raises as `check` does."""
        self.check()
        return [self._reply(outcome) for outcome in self.outcomes if outcome is not None]

    def _reply(self, outcome: Outcome) -> dict[str, Any]:
        reply = outcome.model_dump()
        if self.options.top_k and "scores" in reply:
            reply["scores"] = dict(list(reply["scores"].items())[: self.options.top_k])  # the best come first
        return reply


def without_posts(
    body: object,
    reason: str,
    message: str | None,
    worker: str,
    now: float,
    traceback: str | None,
    attempts: int,
    queue: str | None = None,
) -> DeadLetter:
    """The dead letter of a message in which no posts can be made out. body: as it came."""
    start = (body if isinstance(body, str | bytes) else _as_json(body, MAX_DEAD_POST_BYTES) or "")[:MAX_DEAD_POST_BYTES]
    return DeadLetter(
        id=None,
        reason=reason,
        post=None,
        options=None,
        message=message,
        worker=worker,
        failed_at=now,
        traceback=traceback,
        attempts=attempts,
        queue=queue,
        payload=start.decode("utf-8", "replace") if isinstance(start, bytes) else start,
    )


def traced(error: BaseException) -> str:
    """Where an error came from, after what it came of. Its words are left out: they may be the post's."""
    found: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(found) < LONGEST_CHAIN:
        found.insert(0, f"{''.join(format_tb(cause.__traceback__, -FRAMES))}{type(cause).__name__}\n")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "\n".join(found)[-MAX_DEAD_TRACEBACK:].encode("utf-8", "replace").decode()


def _id_of(raw: object) -> str | None:
    """As much of a raw post's id as names it."""
    post_id = raw.get("id") if isinstance(raw, dict) else None
    return None if post_id is None else str(post_id)[:MAX_ID]


def _known_fields(raw: object) -> object:
    """What a post may hold: authors are not kept, here neither."""
    if isinstance(raw, dict):
        return {name: value for name, value in raw.items() if name in Post.model_fields}
    return raw


def _as_json(value: object, limit: int) -> str | None:
    """What UTF-8 cannot carry is replaced; None where it is longer than `limit` bytes, too deep, or no JSON."""
    try:
        written = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    except (ValueError, TypeError, RecursionError):  # kombu's JSON has types that JSON has not
        return None
    return written.decode() if len(written) <= limit else None


@dataclass(eq=False, slots=True)
class PostAtWork:
    """One post of a message between `prepare` and its outcome."""

    post: Post
    message: Message
    index: int
    #: What its classification is stored under.
    fingerprint: str
