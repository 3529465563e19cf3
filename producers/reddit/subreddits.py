"""Which subreddits are read: a topic's first ones that can be, and that are alive.

What cannot be read is replaced by the next of its topic's list, which is told and written down; the check of the next
day tries the original again.
"""

import logging
from collections.abc import Mapping, Sequence

from producers.reddit.client import Reddit
from producers.reddit.clock import Clock
from producers.reddit.state import Replaced, State
from producers.reddit.things import PAGE, About, Fault, Unreadable
from producers.reddit.topics import Topics

logger = logging.getLogger(__name__)

#: Seconds without a new post after which a subreddit counts as asleep.
ASLEEP_AFTER = 30 * 86_400.0
#: Seconds for which it counts what Reddit said of all names: a round of checks takes less.
ABOUT_HOLDS = 300.0
#: Items of a subreddit that are asked for to see when the newest was posted: more than may be pinned.
A_FEW = 5


class Roster:
    """The subreddits of each topic that are read now."""

    def __init__(self, reddit: Reddit, topics: Topics, state: State, clock: Clock) -> None:
        self._reddit = reddit
        self._topics = topics
        self._state = state
        self._clock = clock
        self._replaced = state.replaced()
        #: Topic -> names, best first. Before its first check, those that could be read last time.
        self.active = {
            topic: [name for name in names if name.lower() not in self._replaced][: topics.active]
            for topic, names in topics.topics.items()
        }
        #: What Reddit said of all names, and when it was asked (monotonic seconds).
        self._about: dict[str, About] = {}
        self._asked = -ABOUT_HOLDS

    def check(self, topic: str) -> None:
        """Choose a topic's subreddits by what Reddit says of them and by their newest posts; tell and write down.

        All topics' names are asked for in one request, whichever topic comes first. Raises RedditFault: nothing has
        changed then.
        """
        now = self._clock.monotonic()
        if now - self._asked >= ABOUT_HOLDS:
            self._about = self._reddit.about(self._topics.subreddits)
            self._asked = now
        names = self._topics.topics[topic]
        chosen, reasons = self._choose(names)
        self._settle(topic, chosen, self._entries(topic, names, chosen, reasons))

    def drop(self, topic: str, name: str, why: str) -> None:
        """A subreddit that was read cannot be any more: the next of its topic stands in until the next check."""
        names = self._topics.topics[topic]
        reasons = {entry.subreddit: entry.reason for entry in self._of(topic).values()} | {name: why}
        free = [other for other in names if other not in reasons and other not in self.active[topic]]
        chosen = [other for other in self.active[topic] if other != name] + free[:1]
        self._settle(topic, chosen, self._entries(topic, names, chosen, reasons))

    def _of(self, topic: str) -> dict[str, Replaced]:
        names = {name.lower() for name in self._topics.topics[topic]}
        return {lower: entry for lower, entry in self._replaced.items() if lower in names}

    def _choose(self, names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """(names to read, why others are not) of one topic. Sleepers are read where nothing better is left."""
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
            # What Reddit does not know is asked for once more: it says why, or that it was a slip.
            newest = self._newest(joint) | self._alone([name for name in wanted if name not in known])
            for name, seen in newest.items():
                if isinstance(seen, str):
                    reasons[name] = seen
                elif self._clock.time() - seen > ASLEEP_AFTER:
                    reasons[name] = "asleep"
                    asleep.append(name)
                else:
                    awake.append(name)
        chosen = awake + asleep[: self._topics.active - len(awake)]
        return sorted(chosen, key=names.index), reasons

    def _newest(self, names: Sequence[str]) -> dict[str, float | str]:
        """When the newest post of each was created, or why it cannot be read. One request where all are busy."""
        if not names:
            return {}
        try:
            page = self._reddit.page(names, limit=PAGE)
        except Fault:
            return self._alone(names)
        newest: dict[str, float] = {}
        for item in page.items:
            lower = item.subreddit.lower()
            newest[lower] = max(newest.get(lower, 0), item.created_utc)
        absent = [name for name in names if name.lower() not in newest]
        return {name: newest[name.lower()] for name in names if name.lower() in newest} | self._alone(absent)

    def _alone(self, names: Sequence[str]) -> dict[str, float | str]:
        found: dict[str, float | str] = {}
        for name in names:
            try:
                items = self._reddit.page([name], limit=A_FEW).items
                found[name] = max((item.created_utc for item in items), default=0.0)
            except Unreadable as fault:
                found[name] = fault.why
            except Fault:
                found[name] = self._clock.time()  # in doubt it is read: what fails shows there
        return found

    def _entries(
        self, topic: str, names: Sequence[str], chosen: Sequence[str], reasons: Mapping[str, str]
    ) -> dict[str, Replaced]:
        """What to write down of a topic: who is not read, and who stands in."""
        substitutes = [name for name in chosen if name not in names[: self._topics.active]]
        entries = {}
        for name in names:
            if name in chosen or name not in reasons:
                continue
            before = self._replaced.get(name.lower())
            since = before.since if before and before.reason == reasons[name] else self._clock.time()
            by = substitutes.pop(0) if substitutes and name in names[: self._topics.active] else None
            entries[name.lower()] = Replaced(name, topic, reasons[name], since, by)
        return entries

    def _settle(self, topic: str, active: list[str], replaced: dict[str, Replaced]) -> None:
        before = self._of(topic)
        others = {lower: entry for lower, entry in self._replaced.items() if lower not in before}
        back = [entry for lower, entry in before.items() if lower not in replaced]
        for entry in back:
            self._state.rewind(entry.subreddit)  # first: a process that is killed in between does it once more
        self._state.replace(replaced, (entry.subreddit.lower() for entry in back))
        for lower, entry in replaced.items():
            if lower not in before or before[lower].reason != entry.reason:
                logger.warning("%s: r/%s is %s; %s", topic, entry.subreddit, entry.reason, _instead(entry.by))
        for entry in back:
            logger.info("%s: r/%s can be read again", topic, entry.subreddit)
        if not active and self.active[topic]:
            logger.error("%s: none of its subreddits can be read; the other topics go on", topic)
        self.active[topic] = active
        self._replaced = others | replaced


def _instead(name: str | None) -> str:
    return f"r/{name} stands in" if name else "nobody stands in"
