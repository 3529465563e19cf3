"""Choose each topic's subreddits: the first in its list that can be read and are active.

A subreddit that cannot be read is replaced by the next in the list; this is logged and stored in Redis. The daily check
tries the original again.
"""

import logging
from collections.abc import Mapping, Sequence

from feedmill.producers.live.clock import Clock
from feedmill.producers.live.source import RequestFailed
from feedmill.producers.reddit.listing import PostSource, SubredditUnreadable
from feedmill.producers.reddit.state import ReplacedSubreddit, State
from feedmill.producers.reddit.topics import Topics

logger = logging.getLogger(__name__)

#: Seconds without a new post after which a subreddit counts as asleep.
ASLEEP_AFTER_S = 30 * 86_400.0
#: Items fetched to find a subreddit's newest post; more than can be pinned.
NEWEST_PAGE_SIZE = 5


class Roster:
    """The subreddits that are read for each topic."""

    def __init__(self, reddit: PostSource, topics: Topics, state: State, clock: Clock) -> None:
        self._reddit = reddit
        self._topics = topics
        self._state = state
        self._clock = clock
        replaced = state.replaced()
        #: Topic -> its subreddits that are not read.
        self._replaced = {topic: replaced.get(topic, []) for topic in topics.topics}
        #: Topic -> names, best first. Before the first check, the choice of the previous run.
        self.active = {
            topic: [name for name in names if name not in self._reasons(topic)][: topics.active]
            for topic, names in topics.topics.items()
        }

    def check(self, topic: str) -> None:
        """Choose a topic's subreddits by accessibility and newest post; log and store changes.

        Raises SourceFailed if Reddit is unavailable; nothing has changed then.
        """
        awake: list[str] = []
        asleep: list[str] = []
        reasons: dict[str, str] = {}
        for name in self._topics.topics[topic]:
            if len(awake) == self._topics.active:
                break
            newest = self._newest(name)
            if isinstance(newest, str):
                reasons[name] = newest
            elif self._clock.time() - newest > ASLEEP_AFTER_S:
                reasons[name] = "asleep"
                asleep.append(name)
            else:
                awake.append(name)
        # Inactive subreddits are chosen last.
        chosen = awake + asleep[: self._topics.active - len(awake)]
        self._apply(topic, sorted(chosen, key=self._topics.topics[topic].index), reasons)

    def drop(self, topic: str, name: str, why: str) -> None:
        """Until the next check, replace a subreddit that can no longer be read with the next one of its topic."""
        reasons = self._reasons(topic) | {name: why}
        active = self.active[topic]
        free = [other for other in self._topics.topics[topic] if other not in reasons and other not in active]
        self._apply(topic, [other for other in active if other != name] + free[:1], reasons)

    def _reasons(self, topic: str) -> dict[str, str]:
        return {entry.subreddit: entry.reason for entry in self._replaced[topic]}

    def _newest(self, name: str) -> float | str:
        """Return the time of a subreddit's newest post, or the reason why the subreddit cannot be read."""
        try:
            items = self._reddit.page([name], limit=NEWEST_PAGE_SIZE).items
        except SubredditUnreadable as fault:
            return fault.why
        except RequestFailed:
            return self._clock.time()  # unclear: read it, and let the poll handle its failures
        return max((item.created_utc for item in items), default=0.0)

    def _apply(self, topic: str, active: list[str], reasons: Mapping[str, str]) -> None:
        """Replace a topic's subreddits, and store which are not read."""
        before = {entry.subreddit: entry for entry in self._replaced[topic]}
        replaced = self._entries(topic, active, reasons)
        restored = [name for name in before if name in active]
        for name in restored:
            self._state.rewind(name)  # before they are stored as read, so that a crash in between repeats it
            logger.info("topic %s: reading r/%s again", topic, name)
        self._state.replace(topic, replaced)
        for entry in replaced:
            if entry.subreddit not in before or before[entry.subreddit].reason != entry.reason:
                instead = f"reading r/{entry.by} instead" if entry.by else "no substitute is left"
                logger.warning("topic %s: not reading r/%s (%s); %s", topic, entry.subreddit, entry.reason, instead)
        if not active and self.active[topic]:
            logger.error(
                "topic %s: none of its subreddits can be read; add others to the topics file (--reddit-topics)", topic
            )
        self.active[topic] = active
        self._replaced[topic] = replaced

    def _entries(self, topic: str, active: Sequence[str], reasons: Mapping[str, str]) -> list[ReplacedSubreddit]:
        """Return the entries for a topic's subreddits that are not read, with their substitutes."""
        best = self._topics.topics[topic][: self._topics.active]
        substitutes = [name for name in active if name not in best]
        since = {(entry.subreddit, entry.reason): entry.since for entry in self._replaced[topic]}
        return [
            ReplacedSubreddit(
                name, reason, since.get((name, reason), self._clock.time()),
                substitutes.pop(0) if substitutes and name in best else None,
            )
            for name, reason in reasons.items()
            if name not in active
        ]  # fmt: skip
