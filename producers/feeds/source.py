"""Feeds as a live source: each feed is read when it is due, one after the other.

A feed lists its latest entries, in any order. Those that were not listed before are yielded,
oldest first, and what was read is stored once they are in the queue: a generator continues after a
`yield None` when everything before is sent. While the queue is full, no feed is read.

One connection is open at a time, and none to a host within HOST_PAUSE_S after the last.
"""

import logging
from collections import Counter
from collections.abc import Generator, Mapping
from typing import Any

from redis import Redis

from feedmill.producers.feeds import state as feed_state
from feedmill.producers.feeds.client import Answer, FeedClient, FeedGone
from feedmill.producers.feeds.documents import Document
from feedmill.producers.feeds.parser import Parser
from feedmill.producers.feeds.posts import PostForm, time_of
from feedmill.producers.feeds.state import Changes, FeedState
from feedmill.producers.feeds.subscriptions import Feed, split_http
from feedmill.producers.live.source import Clock, Event, Pause, Source, SourceFailed
from feedmill.producers.live.state import Gap
from feedmill.shared.errors import printable
from feedmill.shared.language import languages_of
from feedmill.shared.settings import Settings

logger = logging.getLogger(__name__)

#: Seconds between two requests to a host.
HOST_PAUSE_S = 2.0
#: Seconds after which a feed is asked for without conditions: some servers answer "not modified"
#: for ever.
UNCONDITIONAL_S = 86_400.0


class FeedsSource(Source):
    """New and edited entries of feeds. See `Source`.

    limit: entries of a feed to start with, the newest ones. Later ones are all read.
    """

    name = "feeds"

    def __init__(
        self,
        feeds: Mapping[str, Feed],
        redis: Redis,
        settings: Settings,
        clock: Clock,
        limit: int,
    ) -> None:
        self._feeds = feeds
        self._redis = redis
        self._clock = clock
        self._limit = limit
        self._languages = languages_of(settings)
        self._client = FeedClient(clock, settings.feeds_user_agent)
        self._parser = Parser()
        #: States of the feeds without their entries, which are loaded for each read.
        self._states: dict[str, FeedState] = {}
        #: Host -> time from which it may be asked (monotonic seconds).
        self._host_due: dict[str, float] = {}
        self._faults: Counter[str] = Counter()

    # Each feed has a position of its own.
    def events(self, cursor: int | None) -> Generator[Any]:  # noqa: ARG002
        """Read the feeds in turn."""
        try:
            for name in self._feeds:
                self._states[name] = self._load(name).without_entries()
            while True:
                name, pause = self._next()
                if pause > 0:
                    yield Pause(pause)
                    continue
                yield from self._poll(name)
                problem = self._states[name].problem
                if all(state.failures for state in self._states.values()):
                    raise SourceFailed(f"no feed can be read; {name}: {problem}")
                yield Event(None, self._clock.time())  # progress: the source answers
        finally:
            self._parser.close()

    def _load(self, name: str) -> FeedState:
        stored = feed_state.load(self._redis, name)
        state = feed_state.at_address(stored, self._feeds[name].url)
        latest = self._clock.time() + feed_state.GONE_INTERVAL_S
        if state.due > latest:  # it was stored while the clock was wrong
            state.due = 0.0
        return state

    def _next(self) -> tuple[str, float]:
        """Return the feed to read next, and the seconds until then."""
        now = self._clock.time()
        monotonic = self._clock.monotonic()
        pauses: dict[str, float] = {}
        for name, state in self._states.items():
            host_due = self._host_due.get(self._host(name), monotonic)
            pauses[name] = max(state.due - now, host_due - monotonic)
        name = min(pauses, key=pauses.__getitem__)
        return name, pauses[name]

    def _host(self, name: str) -> str:
        url = self._states[name].url or self._feeds[name].url
        return (split_http(url).hostname or "").lower()

    def _poll(self, name: str) -> Generator[Any]:
        """Read a feed, send what is new, and then store that it was read."""
        state = self._load(name)
        host = self._host(name)
        try:
            answer, document = self._read(name, state)
        except SourceFailed as fault:
            self._note_failure(name, state, fault)
            return
        except Exception as error:
            # One odd answer must not keep the other feeds from being read.
            logger.exception("unexpected error at feed %s", name)
            kind = type(error).__name__
            failure = SourceFailed(f"unexpected error ({kind}), see the log")
            self._note_failure(name, state, failure)
            return
        finally:
            self._host_due[host] = self._clock.monotonic() + HOST_PAUSE_S
        now = self._clock.time()
        changes = Changes(
            new=[],
            edited=[],
            overlaps=True,
        )
        if document is not None:
            had_entries = bool(state.entries)
            changes = feed_state.changes(state, document.entries)
            if had_entries and not changes.overlaps and len(changes.new) > 1:
                yield Gap(
                    self.name,
                    name,
                    since=state.read_at,
                    until=now,
                    noted=now,
                )
            yield from self._events_of(name, state, changes, answer.url)
        yield None
        if state.failures:
            logger.info("feed %s can be read again", name)
        self._note_success(name, state, answer, document, len(changes.new))

    def _read(self, name: str, state: FeedState) -> tuple[Answer, Document | None]:
        """Return the server's answer, and its document; None if that has not changed."""
        now = self._clock.time()
        etag = state.etag
        modified = state.modified
        if not 0 <= now - state.whole_at < UNCONDITIONAL_S:
            etag = modified = ""
        own_url = self._feeds[name].url
        answer = self._client.get(
            state.url or own_url,
            etag=etag,
            modified=modified,
            own_url=own_url,
        )
        if answer.body is None:
            return answer, None
        state.whole_at = now
        body = feed_state.digest(answer.body.decode("latin-1"))
        if body == state.body:
            return answer, None
        document = self._parser.parse(answer.body)
        state.body = body if document.whole else ""
        return answer, document

    def _events_of(
        self, name: str, state: FeedState, changes: Changes, url: str
    ) -> list[Event]:
        """Return the events of new and edited entries, oldest first."""
        now = self._clock.time()
        form = PostForm(name, self._feeds[name].topic or name, url, self._languages)
        new = [form.event(item, now) for item in changes.new]
        new.sort(key=time_of)
        if not state.read_at:
            new = new[-self._limit :]
        edited = [form.event(item, now, edited=now) for item in changes.edited]
        return new + edited

    def _note_success(
        self,
        name: str,
        state: FeedState,
        answer: Answer,
        document: Document | None,
        new: int,
    ) -> None:
        now = self._clock.time()
        is_whole = document is None or document.whole
        if answer.body is not None:
            state.etag = answer.etag if is_whole else ""
            state.modified = answer.modified if is_whole else ""
        if answer.moved_to:
            state.url = answer.moved_to
            logger.info("feed %s has moved; update its address in the feeds file", name)
        learnt_s = feed_state.next_interval(state, new, document, answer.max_age, now)
        state.read_at = now
        state.due = now + (self._feeds[name].interval or learnt_s)
        state.failures = 0
        state.problem = ""
        state.is_gone = False
        self._store(name, state)

    def _note_failure(self, name: str, state: FeedState, fault: SourceFailed) -> None:
        self._faults[type(fault).__name__] += 1
        state.problem = printable(str(fault))
        if not state.failures:
            logger.warning(
                "cannot read feed %s: %s; retrying later", name, state.problem
            )
        state.failures += 1
        state.is_gone = isinstance(fault, FeedGone)
        # An address that a server has sent may have been wrong.
        state.url = ""
        interval = feed_state.retry_interval(state.failures, fault.retry_after)
        if state.is_gone:
            interval = feed_state.GONE_INTERVAL_S
        state.due = self._clock.time() + interval
        self._store(name, state)

    def _store(self, name: str, state: FeedState) -> None:
        feed_state.store(self._redis, name, state)
        self._states[name] = state.without_entries()

    def status(self) -> dict[str, Any]:
        return {
            **feed_state.summary(self._states),
            "requests": self._client.budget.spent,
            "faults": self._faults,
        }
