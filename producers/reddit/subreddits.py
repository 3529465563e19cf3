"""Choose each topic's subreddits: the first in its list that can be read and are active.

A subreddit that cannot be read is replaced by the next in the list; this is logged and stored in Redis. The daily check
tries the original again.
"""

import logging
from collections.abc import Mapping, Sequence

from feedmill.producers.live.clock import Clock
from feedmill.producers.reddit.listing import PAGE_SIZE, PostSource, RequestFailed, SubredditInfo, SubredditUnreadable
from feedmill.producers.reddit.state import ReplacedSubreddit, State
from feedmill.producers.reddit.topics import Topics

logger = logging.getLogger(__name__)

#: Seconds without a new post after which a subreddit counts as asleep.
ASLEEP_AFTER_S = 30 * 86_400.0
#: Seconds for which Reddit's information on all subreddits is reused: longer than checking all topics takes.
ABOUT_TTL_S = 300.0
#: Items fetched to find a subreddit's newest post; more than can be pinned.
NEWEST_PAGE_SIZE = 5


class Roster:
    """The subreddits that are read for each topic."""

    def __init__(self, reddit: PostSource, topics: Topics, state: State, clock: Clock) -> None:
        self._reddit = reddit
        self._topics = topics
        self._state = state
        self._clock = clock
        self._replaced = state.replaced()
        #: Topic -> names, best first. Before the first check, the choice of the previous run.
        self.active = {
            topic: [name for name in names if name.lower() not in self._replaced][: topics.active]
            for topic, names in topics.topics.items()
        }
        #: Reddit's information on all subreddits, and the time of the request (monotonic seconds).
        self._about: dict[str, SubredditInfo] = {}
        self._about_at = -ABOUT_TTL_S

    def check(self, topic: str) -> None:
        """Choose a topic's subreddits by accessibility and newest post; log and store changes.

        One request covers the subreddits of all topics. Raises RedditFault; nothing has changed then.
        """
        now = self._clock.monotonic()
        if now - self._about_at >= ABOUT_TTL_S:
            self._about = self._reddit.about(self._topics.subreddits)
            self._about_at = now
        names = self._topics.topics[topic]
        chosen, reasons = self._choose(names)
        self._apply(topic, chosen, self._entries(topic, names, chosen, reasons))

    def drop(self, topic: str, name: str, why: str) -> None:
        """Until the next check, replace a subreddit that can no longer be read with the next one of its topic."""
        names = self._topics.topics[topic]
        reasons = {entry.subreddit: entry.reason for entry in self._replaced_in(topic).values()} | {name: why}
        free = [other for other in names if other not in reasons and other not in self.active[topic]]
        chosen = [other for other in self.active[topic] if other != name] + free[:1]
        self._apply(topic, chosen, self._entries(topic, names, chosen, reasons))

    def _replaced_in(self, topic: str) -> dict[str, ReplacedSubreddit]:
        names = {name.lower() for name in self._topics.topics[topic]}
        return {lower: entry for lower, entry in self._replaced.items() if lower in names}

    def _choose(self, names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return (names to read, reasons for the others). Inactive subreddits are chosen last."""
        about = self._about
        awake: list[str] = []
        asleep: list[str] = []
        reasons: dict[str, str] = {}
        waiting = list(names)
        while waiting and len(awake) < self._topics.active:
            wanted = waiting[: self._topics.active - len(awake)]
            del waiting[: len(wanted)]
            known = [name for name in wanted if name.lower() in about]
            reasons |= {name: why for name in known if (why := about[name.lower()].why)}
            joint = [name for name in known if name not in reasons]
            # Unknown names are requested once more: Reddit then gives a reason, or it was a temporary failure.
            newest = self._newest(joint) | self._newest_of_each([name for name in wanted if name not in known])
            for name, seen in newest.items():
                if isinstance(seen, str):
                    reasons[name] = seen
                elif self._clock.time() - seen > ASLEEP_AFTER_S:
                    reasons[name] = "asleep"
                    asleep.append(name)
                else:
                    awake.append(name)
        chosen = awake + asleep[: self._topics.active - len(awake)]
        return sorted(chosen, key=names.index), reasons

    def _newest(self, names: Sequence[str]) -> dict[str, float | str]:
        """Return the time of each subreddit's newest post, or the reason why the subreddit cannot be read.

        Needs a single request if each has a post on the joint first page.
        """
        if not names:
            return {}
        try:
            page = self._reddit.page(names, limit=PAGE_SIZE)
        except RequestFailed:
            return self._newest_of_each(names)
        newest: dict[str, float] = {}
        for item in page.items:
            lower = item.subreddit.lower()
            newest[lower] = max(newest.get(lower, 0), item.created_utc)
        absent = [name for name in names if name.lower() not in newest]
        return {name: newest[name.lower()] for name in names if name.lower() in newest} | self._newest_of_each(absent)

    def _newest_of_each(self, names: Sequence[str]) -> dict[str, float | str]:
        found: dict[str, float | str] = {}
        for name in names:
            try:
                items = self._reddit.page([name], limit=NEWEST_PAGE_SIZE).items
                found[name] = max((item.created_utc for item in items), default=0.0)
            except SubredditUnreadable as fault:
                found[name] = fault.why
            except RequestFailed:
                found[name] = self._clock.time()  # unclear: read it, and let the poll handle its failures
        return found

    def _entries(
        self, topic: str, names: Sequence[str], chosen: Sequence[str], reasons: Mapping[str, str]
    ) -> dict[str, ReplacedSubreddit]:
        """Return the entries for a topic's subreddits that are not read, with their substitutes."""
        substitutes = [name for name in chosen if name not in names[: self._topics.active]]
        entries = {}
        for name in names:
            if name in chosen or name not in reasons:
                continue
            before = self._replaced.get(name.lower())
            since = before.since if before and before.reason == reasons[name] else self._clock.time()
            by = substitutes.pop(0) if substitutes and name in names[: self._topics.active] else None
            entries[name.lower()] = ReplacedSubreddit(name, topic, reasons[name], since, by)
        return entries

    def _apply(self, topic: str, active: list[str], replaced: dict[str, ReplacedSubreddit]) -> None:
        before = self._replaced_in(topic)
        others = {lower: entry for lower, entry in self._replaced.items() if lower not in before}
        restored = [entry for lower, entry in before.items() if lower not in replaced]
        for entry in restored:
            self._state.rewind(entry.subreddit)  # before `replace`, so that a crash in between repeats it
        self._state.replace(replaced, (entry.subreddit.lower() for entry in restored))
        for lower, entry in replaced.items():
            if lower not in before or before[lower].reason != entry.reason:
                instead = f"reading r/{entry.by} instead" if entry.by else "no substitute is left"
                logger.warning("topic %s: not reading r/%s (%s); %s", topic, entry.subreddit, entry.reason, instead)
        for entry in restored:
            logger.info("topic %s: reading r/%s again", topic, entry.subreddit)
        if not active and self.active[topic]:
            logger.error(
                "topic %s: none of its subreddits can be read; add others to the topics file (--topics)", topic
            )
        self.active[topic] = active
        self._replaced = others | replaced
