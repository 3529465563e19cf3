"""The daemon on Arctic Shift instead of Reddit: the same topics, state and rechecks, but another way of reading.

The archive serves posts from any time onwards, oldest first. A poll therefore reads each subreddit upwards from its
watermark, a little below it for posts that were archived late. Nothing overflows, so a daemon that was away catches up.
"""

from collections.abc import Sequence
from typing import Any

from feedmill.producers.reddit.arctic_shift import ArcticShiftClient
from feedmill.producers.reddit.daemon import MAX_HELD_POSTS, Daemon, Feed
from feedmill.producers.reddit.listing import ListingItem
from feedmill.producers.reddit.state import Gap
from feedmill.producers.reddit.walk import Track, Walk

#: Seconds below the watermark from which each poll reads, because posts can be archived late.
OVERLAP_S = 900.0
#: Seconds below the watermark from which a full read starts, every six hours.
FULL_OVERLAP_S = 12 * 3600.0
#: Maximum requests per subreddit and poll. A subreddit with more new posts continues in the next poll, at once.
MAX_PAGES = 10


class ArchiveDaemon(Daemon):
    """A daemon that reads Arctic Shift. See `Daemon`."""

    reads_jointly = False

    def __init__(self, archive: ArcticShiftClient, *arguments: Any, **named: Any) -> None:
        super().__init__(archive, *arguments, **named)
        self._archive = archive
        #: Subreddits not read to their end yet: name -> time from which to continue, and whether the read is full.
        self._behind: dict[str, tuple[float, bool]] = {}
        #: Newest posts of subreddits whose first read has not finished.
        self._started: dict[str, dict[str, ListingItem]] = {}

    def _walk(self, feed: Feed, tracks: Sequence[Track], full: bool) -> None:
        for track in tracks:
            self._read(feed, track, full)

    def _poll(self, feed: Feed) -> float:
        pause = super()._poll(feed)
        # Failing subreddits wait for their retry.
        behind = any(name in self._behind and name not in feed.failing for name in feed.tracks)
        return 0.0 if behind and self._outbox.held < MAX_HELD_POSTS else pause

    def _read(self, feed: Feed, track: Track, full: bool) -> None:
        """Read a subreddit's posts from its watermark on, and buffer new ones.

        Raises RedditFault, after buffering the posts read before it: else a source that often fails would never be read
        to its end.
        """
        if track.watermark is None:
            found = self._started.setdefault(track.name, {})
            items = self._archive.newest(track.name, -(-self._depth // len(feed.tracks)), found)
            del self._started[track.name]
            self._hold_walk(feed, Walk(items, [], items[::-1]), [track])
            return
        since, started_full = self._behind.get(track.name, (None, False))
        if since is None or full > started_full:
            since = max(track.beginning or 0.0, track.watermark - (FULL_OVERLAP_S if full else OVERLAP_S))
        full |= started_full
        self._behind[track.name] = since, full
        found = {}
        gaps = []
        try:
            for _ in range(MAX_PAGES):
                span = self._archive.since(track.name, since)
                found |= {item.fullname: item for item in span.items}
                if span.crowded is not None:
                    gaps.append(Gap(track.name, span.crowded, span.crowded + 1, self._clock.time()))
                since = span.reached
                self._behind[track.name] = since, full
                if not span.more:
                    del self._behind[track.name]
                    break
        finally:
            items = sorted(found.values(), key=lambda item: (item.created_utc, item.fullname))
            self._hold_walk(feed, Walk(items, [], items[::-1]), [track], gaps)
