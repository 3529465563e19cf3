"""What a live source implements: a stream of events, each with a position from which reading can be resumed."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol


class SourceFailed(Exception):  # noqa: N818 - named after the event
    """The source could not be read. retry_after: seconds to wait at least, as required by the source."""

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class Event(NamedTuple):
    """A change at the source: a new or edited post, a deletion, or only progress.

    cursor: the event's position; positions increase and are below 2**63. at: its time at the source, in seconds since
    1970.
    post: fields of the post (`feedmill.shared.messages.Post`); its id must be the same whenever the event is repeated.
    deleted: id of a post that was deleted. deleted_author: beginning of the ids of all posts of a deleted account, up
    to and including the last slash. filtered: true if a filter left the event's post out.
    """

    cursor: int
    at: float
    post: Mapping[str, object] | None = None
    deleted: str | None = None
    deleted_author: str | None = None
    filtered: bool = False


class Source(Protocol):
    """A live source."""

    #: Name in commands, keys and metrics: lower-case letters, digits and underscores.
    name: str
    #: Distance before the stored position from which reading resumes, for events that arrive out of order.
    overlap: int

    def events(self, cursor: int | None) -> Iterator[Any]:
        """Yield events from this position on, including it, oldest first; only new events if it is None.

        Events are as the source sent them: `parse` reads them.

        The first event may be earlier. If it is later than the position stored last, the daemon records a gap, because
        the event at that position was not repeated. If nothing arrives, yield None about once a second, so that the
        daemon sends what it has. Raises SourceFailed; the daemon then pauses and calls this method again.
        """

    def parse(self, raw: Any) -> Event:
        """Read one of the events that `events` yielded.

        May raise any exception. The daemon then goes on, and reads the event once more within seconds, in case it was
        cut. If it cannot be read again, it becomes a dead letter.
        """
