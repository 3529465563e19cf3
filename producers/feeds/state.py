"""The state of each feed in Redis: its entries that were read, and when it is read again.

Entries and their validators (ETag, Last-Modified) are stored together, after the entries were
sent: a daemon that is killed before that reads them again.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import blake2b
from typing import Any, NamedTuple

from redis import Redis

from feedmill.producers.feeds.documents import Document, Entry
from feedmill.producers.live.source import seconds_of_date
from feedmill.shared.keys import FEED_STATE

#: Lifetime of a feed's state in seconds, once it is no longer read. After it, reading begins anew.
STATE_TTL = 365 * 86_400
#: Maximum entries to remember that a feed no longer lists: it may list them again.
MAX_FORMER = 2_000
#: Maximum times that an entry is sent again because its text has changed. In some feeds texts
#: have counters, and change with each read.
MAX_EDITS = 5
#: Bytes of the digest of an entry's key, which is part of its post's id, and of its text.
KEY_BYTES = 10
TEXT_BYTES = 8
#: Bounds of the seconds between two reads: in any case, and by what is learnt from the feed's
#: entries. Those before anything is known of it; after a first failure; and after 410.
MIN_INTERVAL_S = 300.0
MAX_INTERVAL_S = 86_400.0
MAX_LEARNT_S = 4 * 3_600.0
FIRST_INTERVAL_S = 1_800.0
FIRST_RETRY_S = 300.0
GONE_INTERVAL_S = 7 * 86_400.0
#: Share of the latest interval in a feed's rate of new entries.
RATE_WEIGHT = 0.3
#: Share of a feed's entries that may be replaced between two reads.
MAX_REPLACED = 0.5


@dataclass
class FeedState:
    """The state of one feed. Times are seconds since 1970.

    own: digest of its address in the user's file. url: its address if it has moved, else "".
    due: time of the next read. read_at: time of the latest successful one; 0 before the first.
    whole_at: time of the latest one without conditions. body: digest of the latest document.
    per_hour: its rate of new entries. wish: seconds between reads that it asks for. listed:
    entries of its latest document. failures: in a row.
    ids_repeat: whether entries were seen that share an id. entries: digest of an entry's key ->
    digest of its text, and times that it was sent again; in the order in which they were listed
    last.
    """

    own: str = ""
    url: str = ""
    etag: str = ""
    modified: str = ""
    body: str = ""
    due: float = 0.0
    read_at: float = 0.0
    whole_at: float = 0.0
    per_hour: float = 0.0
    wish: float = 0.0
    listed: int = 0
    failures: int = 0
    problem: str = ""
    is_gone: bool = False
    ids_repeat: bool = False
    entries: dict[str, list[Any]] = field(default_factory=dict)

    def without_entries(self) -> "FeedState":
        return replace(self, entries={})


def at_address(state: FeedState, url: str) -> FeedState:
    """Return a feed's state for its address in the user's file.

    If that has changed, what was learnt of the former one is dropped: above all where it has moved
    to. The entries that were read remain: the feed may list them at its new address.
    """
    own = digest(url)
    if own == state.own:
        return state
    return FeedState(
        own=own,
        read_at=state.read_at,
        ids_repeat=state.ids_repeat,
        entries=state.entries,
    )


class ListedEntry(NamedTuple):
    """An entry, with the digest of its key and of its text."""

    key: str
    text: str
    entry: Entry


class Changes(NamedTuple):
    """The entries of a document that were not read before. overlaps: whether it has entries that
    were.
    """

    new: list[ListedEntry]
    edited: list[ListedEntry]
    overlaps: bool


def load(redis: Redis, name: str) -> FeedState:
    """Return a feed's state. Raises redis.exceptions.RedisError."""
    stored: Any = redis.get(FEED_STATE + name)
    if not stored:
        return FeedState()
    values = json.loads(stored)
    known = {attribute.name for attribute in fields(FeedState)}
    return FeedState(**{name: value for name, value in values.items() if name in known})


def store(redis: Redis, name: str, state: FeedState) -> None:
    """Store a feed's state. Raises redis.exceptions.RedisError."""
    values = asdict(state)
    redis.set(FEED_STATE + name, json.dumps(values), ex=STATE_TTL)


def changes(state: FeedState, entries: Iterable[Entry]) -> Changes:
    """Compare a document's entries with those that were read, and remember them."""
    listed = _list(state, entries)
    known_texts = {text for text, _ in state.entries.values()}
    new: list[ListedEntry] = []
    edited: list[ListedEntry] = []
    overlaps = False
    latest: dict[str, list[Any]] = {}
    for item in listed:
        before = state.entries.get(item.key)
        edits = 0
        if before is not None:
            overlaps = True
            edits = before[1]
            if before[0] != item.text and edits < MAX_EDITS:
                edits += 1
                edited.append(item)
        elif item.text in known_texts:
            # The same entry with another id.
            overlaps = True
        else:
            known_texts.add(item.text)
            new.append(item)
        latest[item.key] = [item.text, edits]
    former = [(key, value) for key, value in state.entries.items() if key not in latest]
    state.entries = dict(former[-MAX_FORMER:]) | latest
    return Changes(
        new=new,
        edited=edited,
        overlaps=overlaps,
    )


def _list(state: FeedState, entries: Iterable[Entry]) -> list[ListedEntry]:
    """Return the entries that have a text, by their ids; or by ids and links, in a feed whose
    entries share ids.
    """
    with_text = [entry for entry in entries if entry.title or entry.body]
    texts = {entry: digest(entry.title, entry.body, entry.link) for entry in with_text}
    text_of_id: dict[str, str] = {}
    for entry in with_text:
        if entry.id and text_of_id.setdefault(entry.id, texts[entry]) != texts[entry]:
            state.ids_repeat = True
    listed: dict[str, ListedEntry] = {}
    for entry in with_text:
        key = entry.id or entry.link
        if state.ids_repeat or not key:
            key = f"{entry.id}\n{entry.link or texts[entry]}"
        key_digest = digest(key, size=KEY_BYTES)
        listed.setdefault(
            key_digest,
            ListedEntry(
                key=key_digest,
                text=texts[entry],
                entry=entry,
            ),
        )
    return list(listed.values())


def digest(*parts: str, size: int = TEXT_BYTES) -> str:
    """Return the digest of texts."""
    text = "\0".join(parts)
    return blake2b(text.encode(), digest_size=size).hexdigest()


def next_interval(
    state: FeedState,
    new: int,
    document: Document | None,
    max_age: float,
    now: float,
) -> float:
    """Return the seconds until the next read, and note the rate of new entries.

    About one new entry is expected by then. The feed's wish, or its server's, is respected, unless
    too many of its entries would be replaced meanwhile.

    new: number of new entries. document: None if it has not changed. max_age: seconds for which
    the server says that it will not.
    """
    wish = state.wish
    if document is not None:
        wish = document.interval
        state.listed = len(document.entries)
    state.wish = min(wish, MAX_INTERVAL_S)
    wish = max(state.wish, min(max_age, MAX_INTERVAL_S))
    if state.read_at:
        hours = max(now - state.read_at, MIN_INTERVAL_S) / 3600
        rate = new / hours
        state.per_hour += RATE_WEIGHT * (rate - state.per_hour)
    elif document is not None:
        state.per_hour = rate_by_dates(document.entries)
    interval = FIRST_INTERVAL_S
    longest = MAX_INTERVAL_S
    if state.per_hour > 0:
        until_next = 3600 / state.per_hour
        interval = min(until_next, MAX_LEARNT_S)
        longest = max(1.0, state.listed * MAX_REPLACED) * until_next
    interval = min(max(interval, wish), longest)
    return clamp(interval, MIN_INTERVAL_S, MAX_INTERVAL_S)


def rate_by_dates(entries: Sequence[Entry]) -> float:
    """Return the new entries per hour that a feed's dates show; 0 if they show none."""
    times = [seconds_of_date(entry.published) for entry in entries]
    dates = sorted(time for time in times if time)
    if len(dates) < 2:
        return 0.0
    hours = (dates[-1] - dates[0]) / 3600
    if hours <= 0:
        return 0.0
    return (len(dates) - 1) / hours


def retry_interval(failures: int, at_least: float) -> float:
    """Return the seconds until a feed that failed is read again."""
    doublings = min(failures - 1, 20)
    pause = FIRST_RETRY_S * 2.0**doublings
    return clamp(max(pause, at_least), FIRST_RETRY_S, MAX_INTERVAL_S)


def clamp(value: float, lowest: float, highest: float) -> float:
    return max(lowest, min(value, highest))


def summary(states: Mapping[str, FeedState]) -> dict[str, Any]:
    """Return the feeds' part of the daemon's status."""
    failing = [name for name, state in states.items() if state.failures]
    gone = [name for name, state in states.items() if state.is_gone]
    return {
        "feeds": len(states),
        "failing_feeds": sorted(set(failing) - set(gone)),
        "gone_feeds": sorted(gone),
    }
