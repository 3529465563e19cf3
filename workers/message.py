"""One message inside the worker: from its arguments to one outcome per post.

It holds the promise that other applications are given: one bad post does not fail the others of its message.
Knows nothing of Celery; the pool keeps what it needs to answer in `ticket`.
"""

from dataclasses import dataclass
from typing import Any

from shared.errors import MessageFailed, RequestRefused
from shared.messages import MAX_POSTS_PER_MESSAGE, ClassifyOptions, Outcome, Post, PostError, parse_posts

#: Seconds since 1970 in the year 5138: what a header says beyond is no time.
LATEST = 1e11


class Message:
    """One message inside the worker: its posts, and an outcome for each as they come.

    arguments: of `feedmill.classify`, as they were sent. ticket: whatever its owner needs to answer it.
    """

    def __init__(self, arguments: dict[str, Any], sent_at: object, ticket: Any = None) -> None:
        self.arguments = dict(arguments)
        #: Seconds since 1970, where the sender said so.
        self.sent_at = float(sent_at) if isinstance(sent_at, int | float) and 0 < sent_at < LATEST else None
        self.ticket = ticket
        posts = self.arguments.pop("posts", None)
        self.raw_posts: list[object] = posts if isinstance(posts, list) else []
        self.outcomes: list[Outcome | None] = [None] * len(self.raw_posts)
        self.unsettled = len(self.raw_posts)
        self.strict = False
        #: Why the message as a whole cannot be served, where that is so.
        self.refused: RequestRefused | None = None
        #: A row of it has entered a forward pass, or it needed none.
        self.started = False
        #: It will be delivered again, to someone else or to us: forget it.
        self.abandoned = False

    def read(self) -> tuple[list[Post | PostError], ClassifyOptions]:
        """Its posts, each read or refused, and its options. Raises RequestRefused."""
        if not self.raw_posts:
            raise RequestRefused("posts: expected a list of at least one post")
        if len(self.raw_posts) > MAX_POSTS_PER_MESSAGE:
            raise RequestRefused(f"posts: {len(self.raw_posts)} in one message; at most {MAX_POSTS_PER_MESSAGE}")
        options = ClassifyOptions.parse(self.arguments)
        self.strict = options.strict
        return parse_posts(self.raw_posts), options

    def settle(self, index: int, outcome: Outcome) -> None:
        """Record the outcome of the post at `index`."""
        self.outcomes[index] = outcome
        self.unsettled -= 1

    def errors(self) -> list[PostError]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, PostError)]

    def failed(self) -> int:
        """How many of its posts got no classification, once it is complete."""
        return len(self.outcomes) if self.refused else len(self.errors())

    def result(self) -> list[dict[str, Any]]:
        """One outcome per post, in order. Raises RequestRefused or MessageFailed, as the promise says."""
        if self.refused:
            raise self.refused
        reasons = [f"{error.id}: {error.error}" for error in self.errors()]
        if reasons and (self.strict or len(reasons) == len(self.outcomes)):
            raise MessageFailed.of(reasons, len(self.outcomes))
        return [outcome.model_dump() for outcome in self.outcomes if outcome is not None]


@dataclass(eq=False, slots=True)
class PostAtWork:
    """One post of a message between `prepare` and its outcome."""

    post: Post
    message: Message
    index: int
