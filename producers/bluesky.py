"""Bluesky's posts from Jetstream, its public stream of events. Needs no key.

`producers/jetstream.py` connects to the servers. The daemon notices that a server no longer has
the event at the position. Of chosen accounts, there may be no event for days, so that the position
is also moved by time: a server reads its stored events faster than they were written.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from redis import Redis

from feedmill.producers.jetstream import Jetstream
from feedmill.producers.live.source import Clock, Event, Source
from feedmill.producers.live.state import Gap
from feedmill.shared.errors import SettingsError, explain_missing, printable
from feedmill.shared.language import is_foreign, parse_languages
from feedmill.shared.messages import COMMENT_KIND, in_utc
from feedmill.shared.settings import Settings

COLLECTION = "app.bsky.feed.post"
#: Seconds before the stored position from which the stream is read again: events come out of
#: order. With several servers, whose clocks and delays differ, more of them.
OVERLAP_S = 10
SERVERS_OVERLAP_S = 60
#: Maximum number of accounts that a server accepts (internal/subscribe), and bytes of a file of
#: them.
MAX_ACCOUNTS = 10_000
MAX_ACCOUNTS_BYTES = 2**22
#: An account's identifier.
ACCOUNT = re.compile(r"did:[a-z]{1,32}:[A-Za-z0-9._:%-]{1,256}")
#: Seconds for which servers keep events, at least, if they are Bluesky's.
KEPT_S = 36 * 3600.0
#: Seconds without an event of the chosen accounts after which the position is moved by them.
PROGRESS_INTERVAL_S = 60.0
#: Account states in which an author's posts must be deleted. Other inactive accounts may come
#: back.
DELETED_STATES = frozenset({"deleted", "takendown"})
#: Labels by which authors mark their own posts as not safe for work.
NSFW_LABELS = frozenset({"porn", "sexual", "nudity", "graphic-media"})
#: Characters of keys that hold the time at which they were made, and their number.
KEY_CHARACTERS = "234567abcdefghijklmnopqrstuvwxyz"
KEY_LENGTH = 13
#: Maximum characters of a link, as in shared/messages.py.
MAX_URL = 4096


def _parse_codes(languages: str) -> frozenset[str]:
    """Return the codes in the setting `bluesky_languages`."""
    codes = [code.strip() for code in languages.lower().split(",")]
    return frozenset(filter(None, codes))


def _read_accounts(text: str) -> frozenset[str]:
    """Return the accounts in the setting `bluesky_accounts`: a list, or a file. Raises
    SettingsError.
    """
    source = "FEEDMILL_BLUESKY_ACCOUNTS"
    if not text.startswith("did:"):
        source = f"The accounts file {text}"
        try:
            with Path(text).expanduser().open("rb") as file:
                content = file.read(MAX_ACCOUNTS_BYTES + 1)
        except OSError as error:
            raise SettingsError(
                f"{source} cannot be read: {error.strerror}."
            ) from error
        if len(content) > MAX_ACCOUNTS_BYTES:
            raise SettingsError(f"{source} is larger than 4 MiB.")
        text = content.decode("utf-8", "replace")
    text = text.strip()
    text = text.strip(",")
    names = re.split(r"[,\s]+", text)
    accounts = frozenset(names)
    for name in names:
        if not ACCOUNT.fullmatch(name):
            raise SettingsError(
                f"{source}: {printable(name)[:80]!r} is not an account's DID, such as "
                "did:plc:z72i7hdynmk6r22z27h6tvur. docs/bluesky.md says how to find it."
            )
    if len(accounts) > MAX_ACCOUNTS:
        raise SettingsError(
            f"{source} names {len(accounts):,} accounts; servers accept at most "
            f"{MAX_ACCOUNTS:,}."
        )
    return accounts


class BlueskySource(Source):
    """New, edited and deleted posts of Bluesky. See `Source`."""

    name = "bluesky"

    def __init__(
        self, settings: Settings, clock: Clock, redis: Redis | None = None
    ) -> None:
        urls = [url.strip() for url in settings.bluesky_url.split(",")]
        has_several = len(urls) > 1
        overlap_s = OVERLAP_S
        if has_several:
            overlap_s = SERVERS_OVERLAP_S
        self.overlap = overlap_s * 1_000_000
        #: Accounts whose posts are read; empty for all.
        self._accounts = frozenset[str]()
        if settings.bluesky_accounts is not None:
            self._accounts = _read_accounts(settings.bluesky_accounts)
        if self._accounts:
            self.gap_tolerance = math.inf
        elif has_several:  # they number the event at the position differently
            self.gap_tolerance = self.overlap
        self._jetstream = Jetstream(urls, COLLECTION, sorted(self._accounts), clock)
        #: Time at the source up to which the connection was read, in microseconds, and when
        #: (monotonic seconds).
        self._reached = (0, 0.0)
        #: Languages that authors must declare; empty for any, and for none.
        self._languages = _parse_codes(settings.bluesky_languages or "")
        self._min_characters = settings.bluesky_min_characters
        #: Languages that must be detected in texts; empty for any.
        self._accepted_languages = frozenset[str]()
        if settings.languages is not None:
            self._accepted_languages = parse_languages(settings.languages)
        self._clock = clock
        #: Fills gaps; None if no archive is set.
        self._filler: Any = None
        if redis is not None and settings.bluesky_archive_url:
            self._filler = self._make_filler(settings, clock, redis)

    def _make_filler(self, settings: Settings, clock: Clock, redis: Redis) -> Any:
        with explain_missing("Filling gaps", "bluesky"):
            # Need requests and zstd, optional packages.
            from feedmill.producers.bluesky_gaps import BlueskyGapFiller  # noqa: PLC0415
            from feedmill.producers.jetstream_archive import JetstreamArchive  # noqa: PLC0415

        key = ""
        if settings.bluesky_archive_key is not None:
            key = settings.bluesky_archive_key.get_secret_value()
        url = str(settings.bluesky_archive_url)
        archive = JetstreamArchive(url, key, clock)
        return BlueskyGapFiller(
            archive=archive,
            redis=redis,
            parse=self._event,
            collection=COLLECTION,
            clock=clock,
        )

    def needed_later(self, ids: Collection[str]) -> set[str]:
        if self._filler is None:
            return set()
        needed: set[str] = self._filler.needed_later(ids)
        return needed

    def written_at(self, post_id: str) -> float | None:
        return time_of_post(post_id)

    def position_at(self, at: float) -> int | None:
        microseconds = round(at * 1_000_000)
        return max(0, microseconds)

    def status(self) -> Mapping[str, Any]:
        jetstream = self._jetstream
        filled = 0
        if self._filler is not None:
            filled = self._filler.filled
        return {
            "server": jetstream.server,
            "switches": jetstream.switches,
            "accounts": len(self._accounts),
            "filled": filled,
        }

    def events(self, cursor: int | None) -> Iterator[Any]:
        for raw in self._live_events(cursor):
            yield raw
            if self._filler is not None:
                yield from self._filler.step()

    def _live_events(self, cursor: int | None) -> Iterator[Any]:
        if not self._accounts:
            yield from self._jetstream.events(cursor)
            return
        now = self._clock.time()
        oldest = round((now - KEPT_S) * 1_000_000)
        if cursor is not None and cursor < oldest:
            yield Gap(
                source=self.name,
                subreddit="",
                since=(cursor + self.overlap) / 1_000_000,
                until=now - KEPT_S,
                noted=now,
            )
        begin = round(now * 1_000_000)
        if cursor is not None:
            begin = max(cursor, oldest)
        opened = self._clock.monotonic()
        self._reached = (begin, opened)
        for raw in self._jetstream.events(cursor):
            yield raw
            if raw is None:
                yield from self._progress()

    def _progress(self) -> Iterator[str]:
        """Yield an event that only moves the position, if none has come for a while."""
        at, since = self._reached
        elapsed_s = self._clock.monotonic() - since
        if elapsed_s < PROGRESS_INTERVAL_S:
            return
        time_us = at + round(elapsed_s * 1_000_000)
        event = {"time_us": time_us, "kind": "progress", "did": ""}
        yield json.dumps(event)

    def parse(self, raw: str | bytes | Event) -> Event:
        if isinstance(raw, Event):  # from the archive
            return raw
        data = json.loads(raw)
        event = self._event(data)
        if self._filler is not None and event.post is not None:
            fields = dict(event.post)
            if fields["edited_utc"] is not None:
                self._filler.note_edit(str(fields["id"]), event.at)
        received = self._clock.monotonic()
        self._reached = (event.cursor or 0, received)
        return event

    def _event(self, data: Mapping[str, Any]) -> Event:
        """Return the event. Raises exceptions of any kind if it is malformed."""
        time_us = data["time_us"]
        kind = data["kind"]
        progress = Event(
            cursor=int(time_us),
            at=time_us / 1_000_000,
        )
        user = data["did"]
        author = f"at://{user}/{COLLECTION}/"
        if kind == "account":
            account = data["account"]
            is_active = account.get("active", True)
            if not is_active and account.get("status") in DELETED_STATES:
                return progress._replace(deleted_author=author)
            return progress
        if kind != "commit":
            return progress
        commit = data["commit"]
        if commit["collection"] != COLLECTION:
            return progress
        operation = commit["operation"]
        record_key = commit["rkey"]
        post_id = f"{author}{record_key}"
        if operation == "delete":
            return progress._replace(deleted=post_id)
        record = commit["record"]
        is_unwanted = self._accounts and user not in self._accounts
        if is_unwanted or not isinstance(record, dict) or not self._wants(record):
            return progress._replace(filtered=True)
        written = record.get("createdAt")
        created = _seconds(written) or progress.at
        edited = None
        if operation == "update":
            edited = progress.at
        labels = _labels(record)
        post_kind = None
        reply = record.get("reply")
        if isinstance(reply, dict):
            post_kind = COMMENT_KIND
        fields = {
            "id": post_id,
            "body": record["text"],
            "url": _link(record),
            "permalink": f"https://bsky.app/profile/{user}/post/{record_key}",
            "created_utc": min(created, progress.at),
            "edited_utc": edited,
            "kind": post_kind,
            "nsfw": not NSFW_LABELS.isdisjoint(labels),
        }
        return progress._replace(post=fields)

    def _wants(self, record: Mapping[str, Any]) -> bool:
        """Apply the filters.

        Posts without text, which only show images or quote others, are left out.

        Anyone can write a record, so its fields may have any type.
        """
        text = record.get("text")
        if not isinstance(text, str):
            return False
        count = len(text.strip())
        if count < self._min_characters:
            return False
        if self._languages and not self._declares_language(record):
            return False
        if not self._accepted_languages:
            return True
        return not is_foreign(text, self._accepted_languages)

    def _declares_language(self, record: Mapping[str, Any]) -> bool:
        codes = record.get("langs")
        if not isinstance(codes, list):
            return False
        languages: set[str] = set()
        for code in codes:
            language, _, _ = str(code).partition("-")
            languages.add(language.lower())
        return not self._languages.isdisjoint(languages)


def _link(record: Mapping[str, Any]) -> str | None:
    """Return the URL of the post's link card."""
    uri = _part(record, "embed", "external", "uri")
    if isinstance(uri, str) and len(uri) <= MAX_URL:
        return uri
    return None


def _labels(record: Mapping[str, Any]) -> set[str]:
    """Return the labels that the author gave to the post."""
    values = _part(record, "labels", "values")
    if isinstance(values, list):
        return {str(_part(value, "val")) for value in values}
    return set()


def _part(value: Any, *names: str) -> Any:
    """Return a part of nested objects; None if there is none."""
    for name in names:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


def _seconds(text: object) -> float | None:
    """Parse the time that the author's application wrote, in seconds since 1970; None if it is
    invalid.
    """
    try:
        created = datetime.fromisoformat(str(text))
        seconds = in_utc(created)
    except (ValueError, OverflowError):
        return None
    return max(0.0, seconds)


def time_of_post(post_id: str) -> float | None:
    """Return when a post was written, in seconds since 1970; None if its key does not say so."""
    _, _, key = post_id.rpartition("/")
    return time_of_key(key)


def time_of_key(key: str) -> float | None:
    """Return when a record's key was made, in seconds since 1970; None if it does not say so.

    Source: atproto.com/specs/tid.
    """
    if len(key) != KEY_LENGTH:
        return None
    number = 0
    for character in key:
        digit = KEY_CHARACTERS.find(character)
        if digit < 0:
            return None
        number *= len(KEY_CHARACTERS)
        number += digit
    microseconds = number >> 10
    return microseconds / 1_000_000
