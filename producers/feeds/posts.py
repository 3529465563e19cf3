"""Posts of a feed's entries."""

from collections.abc import Collection
from typing import NamedTuple
from urllib.parse import urljoin

from feedmill.producers.feeds.state import ListedEntry
from feedmill.producers.feeds.subscriptions import split_http
from feedmill.producers.live.source import Event, seconds_of_date
from feedmill.shared.language import is_foreign
from feedmill.shared.messages import clean


class PostForm(NamedTuple):
    """The common fields of a feed's posts. url: its address, to which links are relative.
    languages: those of the posts to send; empty for all.
    """

    name: str
    topic: str
    url: str
    languages: Collection[str]

    def event(
        self, item: ListedEntry, now: float, edited: float | None = None
    ) -> Event:
        """Return the event of an entry. edited: when its edit was noticed."""
        entry = item.entry
        # A date in the future is wrong, or the date of what the entry announces.
        created = min(seconds_of_date(entry.published) or now, now)
        text = clean(entry.title, entry.body)
        if not text or (self.languages and is_foreign(text, self.languages)):
            return Event(None, created, filtered=True)
        fields = {
            "id": f"feed:{self.name}:{item.key}",
            "topic": self.topic,
            "title": entry.title,
            "body": entry.body,
            "permalink": _link(entry.link or entry.id, self.url),
            "created_utc": created,
            "edited_utc": edited,
        }
        return Event(None, created, post=fields)


def time_of(event: Event) -> float:
    return event.at


def _link(link: str, url: str) -> str | None:
    """Return an entry's address; None if it has none of HTTP."""
    if not link:
        return None
    try:
        absolute = urljoin(url, link)
        split_http(absolute)
    except ValueError:
        return None
    return absolute
