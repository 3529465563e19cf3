"""Read the results stream, from a private cursor or as a member of a consumer group, and report missed results.

XREAD alone cannot report them: Redis trims entries whether or not they were read, and XREAD then silently continues at
the oldest entry left. So a script fetches entries and, atomically, compares the reader's position with the store's
counters (shared/results.py): entries written, trimmed and present. Entries that are neither present nor trimmed were
purged, and are not reported. XREAD is used only to wait. Redis 7 has similar figures (`entries-added`, a group's
`entries-read`), but Redis 6.2 does not, and they cannot distinguish purged from trimmed entries.

Independent of the command line and of Celery's tasks.
"""

import logging
import math
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from redis import Redis
from redis.exceptions import AuthenticationError, ResponseError
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import TimeoutError as TimeoutFault

from shared.errors import UserError, printable
from shared.keys import COUNTERS, GROUPS, RESULTS_STREAM
from shared.results import Result, read_entry

logger = logging.getLogger(__name__)

#: Fetches the next entries and reports what was trimmed before them.
#:
#:   KEYS[1]  feedmill:results   stream     KEYS[2]  feedmill:counters  hash    KEYS[3]  feedmill:groups  hash
#:   ARGV[1]  entries, at most              ARGV[2]  the group, or ""           ARGV[3]  its member
#:   without a group: ARGV[4]  id of the last entry read, or "$" for the end of the stream
#:                    ARGV[5]  the position returned by the last call, or ""
#:
#: A group's member first receives its pending entries: delivered to it, but not acknowledged. A position is an entry's
#: id with the numbers of entries written up to it, trimmed, and purged. A group's position is stored in KEYS[3].
#:
#: Returns ten values. On the entries: 1 if they were pending, else 0; {id, fields} of each, with false as the fields of
#: a deleted entry; the id of the last entry read before this call, and after it; the new position. On the gap before
#: them: the number of missing entries, -1 if unknown; the number of entries purged meanwhile, in the gap or elsewhere.
#: On the stream: its first id; all entries ever trimmed; all ever purged.
FETCH = """
local stream, group, count = KEYS[1], ARGV[2], tonumber(ARGV[1])
local counts = redis.call('HMGET', KEYS[2], 'stored', 'trimmed')
local stored, trimmed = tonumber(counts[1] or 0), tonumber(counts[2] or 0)
local length = redis.call('XLEN', stream)
local purged = stored - trimmed - length
local first = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
first = first and first[1] or ''

local cursor, place, groups = ARGV[4], ARGV[5], {}
if group ~= '' then
  local own = redis.call('XREADGROUP', 'GROUP', group, ARGV[3], 'COUNT', count, 'STREAMS', stream, '0')
  if own and #own[1][2] > 0 then return {1, own[1][2], '', '', '', 0, 0, first, trimmed, purged} end
  for _, info in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local each = {}
    for i = 1, #info, 2 do each[info[i]] = info[i + 1] end
    groups[each['name']] = true
    if each['name'] == group then cursor = each['last-delivered-id'] end
  end
  place = redis.call('HGET', KEYS[3], group) or ''
end

local before, entries = cursor, {}
local gone, meanwhile = 0, 0
local at, position, trimmed_then, purged_then = string.match(place, '^(%S+) (%d+) (%d+) (-?%d+)$')
if at ~= cursor then position = nil end
if cursor == '$' then
  local newest = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  cursor, position, purged_then = newest and newest[1] or '0-0', stored, purged
else
  -- If no entry this old is left, entries after it may have been trimmed as well.
  local behind = length > 0 and #redis.call('XRANGE', stream, '-', cursor, 'COUNT', 1) == 0
  if behind and position then
    if trimmed > tonumber(trimmed_then) then
      gone = math.max(stored - position - length, 0)
      meanwhile = purged - purged_then
    end
  elseif behind and trimmed > 0 and cursor ~= '0-0' then
    gone = -1
  end
  if group ~= '' then
    local new = redis.call('XREADGROUP', 'GROUP', group, ARGV[3], 'COUNT', count, 'STREAMS', stream, '>')
    entries = new and new[1][2] or {}
  else
    entries = redis.call('XRANGE', stream, '(' .. cursor, '+', 'COUNT', count)
  end
  if #entries > 0 then cursor = entries[#entries][1] end
  if #entries < count then
    position, purged_then = stored, purged
  elseif behind then
    position, purged_then = stored - length + #entries, purged
  elseif position then
    position = position + #entries
  end
end
local now = position and string.format('%s %d %d %d', cursor, position, trimmed, purged_then) or ''
if group ~= '' and now ~= '' and now ~= place then
  if place == '' then
    for _, known in ipairs(redis.call('HKEYS', KEYS[3])) do
      if not groups[known] then redis.call('HDEL', KEYS[3], known) end
    end
  end
  redis.pcall('HSET', KEYS[3], group, now) -- pcall: reading must work even if a full Redis refuses the write
end
return {0, entries, before, cursor, now, gone, meanwhile, first, trimmed, purged}
"""

#: Takes over entries that another member received but has not acknowledged for a while, and removes members that are
#: inactive and have no pending entries.
#:
#:   KEYS[1]  feedmill:results   stream       ARGV[1]  the group          ARGV[2]  the member that takes over
#:   KEYS[2]  feedmill:counters  hash         ARGV[4]  id to start from   ARGV[5]  entries, at most
#:   ARGV[3]  milliseconds after which an entry is taken over
#:   ARGV[6]  milliseconds of inactivity after which a member is removed
#:
#: Returns the id to start from next time, "0-0" at the end; the ids of deleted entries (Redis 7 and newer; Redis 6.2
#: takes them over); the stream's first id; all entries ever trimmed; all ever purged.
CLAIM = """
local stream, group, member = KEYS[1], ARGV[1], ARGV[2]
local claimed = redis.call('XAUTOCLAIM', stream, group, member, ARGV[3], ARGV[4], 'COUNT', ARGV[5], 'JUSTID')
for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
  local each = {}
  for i = 1, #info, 2 do each[info[i]] = info[i + 1] end
  if each['name'] ~= member and each['pending'] == 0 and each['idle'] > tonumber(ARGV[6]) then
    redis.call('XGROUP', 'DELCONSUMER', stream, group, each['name'])
  end
end
local counts = redis.call('HMGET', KEYS[2], 'stored', 'trimmed')
local stored, trimmed = tonumber(counts[1] or 0), tonumber(counts[2] or 0)
local first = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
return {claimed[1], claimed[3] or {}, first and first[1] or '', trimmed, stored - trimmed - redis.call('XLEN', stream)}
"""

#: Entries per fetch: for a follower; and for a group's member, where other members wait for them if it stops.
FOLLOWED_AT_ONCE, GIVEN_AT_ONCE = 500, 100
#: Seconds without acknowledgement after which another member takes over an entry.
CLAIM_AFTER_S = 60.0
#: Fractions of that time: interval between takeovers; and age at which a member re-reads its own pending entries.
CLAIM_FRACTION, STALE_FRACTION = 0.25, 0.5
#: Minimum seconds between takeovers.
MIN_CLAIM_INTERVAL_S = 0.1
#: Seconds of inactivity after which a member without pending entries is removed. Its name can be used again.
MEMBER_TTL_S = 3600
#: Maximum seconds that a reader waits for an entry before it returns to its caller.
WAIT_S = 1.0
#: Delays before reconnecting, in seconds. The last one repeats.
RECONNECT_DELAYS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
#: Valid names of groups and members.
READER_NAME = re.compile(r"[A-Za-z0-9_.:@-]{1,64}")
#: Seconds since 1970: the end of the year 9999.
MAX_UNIX_TIME = 253_402_300_800
#: Largest sequence number of an entry id, `<milliseconds since 1970>-<sequence number>`.
LAST_OF_MILLISECOND = 2**64 - 1


@dataclass(frozen=True)
class Missed:
    """Results that were trimmed before they were read. Times are seconds since 1970."""

    #: Number of trimmed results, without purged ones; None if unknown.
    count: int | None
    #: Times of the last entry before the gap, and of the first entry after it.
    since: float
    until: float
    #: Upper bound on `count`, if posts were purged meanwhile; None if unknown.
    at_most: int | None = None


class ResultFilter(NamedTuple):
    """Filter for results. None matches all."""

    #: Best label, matched exactly.
    label: str | None = None
    #: Minimum score of the best label.
    min_score: float | None = None
    #: Subreddit, case-insensitive, with or without "r/".
    subreddit: str | None = None

    def has(self, result: Result) -> bool:
        found = result.classification
        return (
            (self.label is None or found.label == self.label)
            and (self.min_score is None or found.scores[found.label] >= self.min_score)
            and (self.subreddit is None or _normalize(result.post.subreddit or "") == _normalize(self.subreddit))
        )


NO_FILTER = ResultFilter()


class Read(NamedTuple):
    """An item for the caller, and the entries to acknowledge once it is processed."""

    item: Result | Missed
    ids: tuple[str, ...] = ()


class Reader(Protocol):
    """A source of results. Every method raises redis.exceptions.RedisError."""

    @property
    def stale(self) -> bool:
        """True if unacknowledged items may have been taken over by another member: call `read` again."""

    def read(self) -> list[Read] | None:
        """Return available items without waiting. None if there are none; an empty list if none match the filter."""

    def wait(self, seconds: float) -> None:
        """Return as soon as there may be something to read, or after `seconds`."""

    def acknowledge(self, ids: Sequence[str]) -> None:
        """Mark entries as processed. Call before the next `read`, which otherwise returns them again."""


class Follower:
    """A reader with a private cursor. Returns each result once during its lifetime."""

    stale = False

    def __init__(
        self, redis: Redis, wanted: ResultFilter = NO_FILTER, since: float | None = None, history: int = 0
    ) -> None:
        """Create a follower.

        since: start time, in seconds since 1970; None for the stream's end. history: number of earlier results to read
        first.
        """
        self._redis = redis
        self._wanted = wanted
        self._history = history
        self._cursor = "$" if since is None else _last_id_before(since)
        self._position = ""
        self._fetch: Any = redis.register_script(FETCH)

    def read(self) -> list[Read] | None:
        if self._cursor == "$":
            self._read()
        if self._history:
            found = newest(self._redis, self._history, self._wanted, until=self._cursor)
            self._history = 0
            return [Read(result) for result in found]
        return self._read()

    def _read(self) -> list[Read] | None:
        answer = self._fetch(
            keys=[RESULTS_STREAM, COUNTERS, GROUPS], args=[FOLLOWED_AT_ONCE, "", "", self._cursor, self._position]
        )
        _, entries, before, self._cursor, self._position, gone, meanwhile, *_ = answer
        if not entries:
            return None
        reads = [Read(missed) for missed in _missed(before, entries, gone, meanwhile)]
        return reads + [Read(result) for _, result in _results(entries) if result and self._wanted.has(result)]

    def wait(self, seconds: float) -> None:
        self._redis.xread({RESULTS_STREAM: self._cursor}, count=1, block=_milliseconds(seconds))

    def acknowledge(self, ids: Sequence[str]) -> None:
        """Do nothing: followers have no pending entries."""


class GroupReader:
    """A member of a consumer group. Members share the stream; an entry is delivered until a member acknowledges it.

    Results that do not match the filter are acknowledged at once, for the whole group. Member names must be unique:
    two processes with the same name would receive each other's pending entries.
    """

    def __init__(
        self,
        redis: Redis,
        group: str,
        consumer: str,
        wanted: ResultFilter = NO_FILTER,
        since: float | None = None,
        claim_after: float = CLAIM_AFTER_S,
    ) -> None:
        """Create a member. since: start of a new group, as in `Follower`. claim_after: seconds, see CLAIM_AFTER_S."""
        self._redis = redis
        self._group = group
        self._consumer = consumer
        self._wanted = wanted
        self._claim_after = claim_after
        #: The group's position. Start position if the group does not exist yet.
        self._cursor = "$" if since is None else _last_id_before(since)
        self._claim_from = "0-0"
        self._claim_at = self._read_at = time.monotonic()
        #: Entries to acknowledge.
        self._to_acknowledge: list[str] = []
        #: Items to return from the next `read`.
        self._lost_items: list[Read] = []
        self._fetch: Any = redis.register_script(FETCH)
        self._claim: Any = redis.register_script(CLAIM)

    @property
    def stale(self) -> bool:
        return time.monotonic() - self._read_at > self._claim_after * STALE_FRACTION

    def read(self) -> list[Read] | None:
        self._send_acknowledgements()
        if time.monotonic() >= self._claim_at:
            self._lost_items += self._claim_entries()
        self._read_at = time.monotonic()
        answer = self._in_group(
            self._fetch, [RESULTS_STREAM, COUNTERS, GROUPS], [GIVEN_AT_ONCE, self._group, self._consumer, "", ""]
        )
        pending, entries, before, cursor, _, gone, meanwhile, *figures = answer
        reads, self._lost_items = self._lost_items, []
        if pending:
            reads += self._lost([entry_id for entry_id, fields in entries if fields is None], *figures)
            entries = [entry for entry in entries if entry[1] is not None]
        else:
            self._cursor = cursor
            if not entries:
                return reads or None
            reads += [Read(missed) for missed in _missed(before, entries, gone, meanwhile)]
        for entry_id, result in _results(entries):
            if result and self._wanted.has(result):
                reads.append(Read(result, (entry_id,)))
            else:
                self._to_acknowledge.append(entry_id)
        return reads

    def wait(self, seconds: float) -> None:
        # Not XREADGROUP: it would deliver entries without checking for trimmed ones.
        seconds = min(seconds, self._claim_at - time.monotonic())
        if seconds > 0:
            self._redis.xread({RESULTS_STREAM: self._cursor}, count=1, block=_milliseconds(seconds))

    def acknowledge(self, ids: Sequence[str]) -> None:
        """Acknowledge entries. If Redis is unreachable, the next `read` sends the acknowledgement."""
        self._to_acknowledge.extend(ids)
        with suppress(ConnectionFault, TimeoutFault):
            self._send_acknowledgements()

    def _send_acknowledgements(self) -> None:
        if self._to_acknowledge:
            self._redis.xack(RESULTS_STREAM, self._group, *self._to_acknowledge)
            self._to_acknowledge.clear()

    def _claim_entries(self) -> list[Read]:
        """Take over entries that other members did not acknowledge. The next fetch returns them as pending."""
        idle = _milliseconds(self._claim_after)
        arguments = [self._group, self._consumer, idle, self._claim_from, GIVEN_AT_ONCE, MEMBER_TTL_S * 1000]
        self._claim_from, gone, *figures = self._in_group(self._claim, [RESULTS_STREAM, COUNTERS], arguments)
        # Continue right after this batch if more entries can be taken over.
        pause = max(self._claim_after * CLAIM_FRACTION, MIN_CLAIM_INTERVAL_S) if self._claim_from == "0-0" else 0.0
        self._claim_at = time.monotonic() + pause
        return self._lost(gone, *figures)

    def _lost(self, ids: Sequence[str], first: str, trimmed: int, purged: int) -> list[Read]:
        """Report pending entries that no longer exist."""
        # Trimming removes the oldest entries. Missing entries newer than the stream's first one were purged.
        lost = [entry_id for entry_id in ids if trimmed and first and _order(entry_id) < _order(first)]
        self._to_acknowledge.extend(set(ids).difference(lost))
        if not lost:
            return []
        count = None if purged else len(lost)
        return [Read(Missed(count, _written_at(lost[0]), _written_at(lost[-1]), len(lost)), tuple(lost))]

    def _in_group(self, script: Any, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Run a script. Create the group first if it does not exist."""
        try:
            return script(keys=keys, args=arguments)
        except ResponseError as fault:
            if "NOGROUP" not in str(fault):
                raise
        try:
            self._redis.xgroup_create(RESULTS_STREAM, self._group, id=self._cursor, mkstream=True)
        except ResponseError as fault:
            if "BUSYGROUP" not in str(fault):  # another member created it first
                raise
        return script(keys=keys, args=arguments)


def open_reader(
    redis: Redis,
    group: str | None = None,
    consumer: str | None = None,
    wanted: ResultFilter = NO_FILTER,
    since: float | None = None,
    history: int = 0,
    claim_after: float = CLAIM_AFTER_S,
) -> Reader:
    """Create a follower, or a member of a group. Raises UserError for invalid values.

    consumer: the member's name; default: host name and process id.
    """
    if wanted.min_score is not None and not math.isfinite(wanted.min_score):
        raise UserError(f"min_score must be a finite number, not {wanted.min_score}.")
    if wanted.subreddit is not None and not _normalize(wanted.subreddit):
        raise UserError(f"{printable(wanted.subreddit)!r:.80} is not a subreddit's name; write python, or r/python.")
    if since is not None and not 0 <= since < MAX_UNIX_TIME:
        raise UserError(f"since must be in seconds since 1970, before the year 10000, not {since}.")
    if group is None:
        if consumer is not None:
            raise UserError("consumer requires a group. Name the group as well, or leave out the consumer.")
        return Follower(redis, wanted, since, history)
    if not 0 < claim_after < MAX_UNIX_TIME:
        raise UserError(f"claim_after must be a positive number of seconds, not {claim_after}.")
    if consumer is None:
        consumer = re.sub(r"[^A-Za-z0-9_.-]", "-", f"{socket.gethostname():.48}-{os.getpid()}")
    for what, name in (("group", group), ("consumer", consumer)):
        if not READER_NAME.fullmatch(name):
            raise UserError(
                f"'{printable(name):.80}' is not a valid {what} name. Use 1 to 64 letters, digits, or any of - _ . : @"
            )
    return GroupReader(redis, group, consumer, wanted, since, claim_after)


def batches(reader: Reader, follow: bool = True, wait: float = WAIT_S) -> Iterator[list[Read]]:
    """Yield batches of items as they arrive; an empty list at least every `wait` seconds.

    Reconnects for as long as it takes. Without `follow`, stops at the end of the stream. The caller acknowledges.
    Raises redis.exceptions.RedisError if the first attempt fails, or if Redis refuses a command.
    """
    answered, failures = False, 0
    while True:
        try:
            batch = reader.read()
            if batch is None and follow:
                reader.wait(wait)
        except (ConnectionFault, TimeoutFault) as fault:
            if not answered or isinstance(fault, AuthenticationError):
                raise
            if not failures:
                logger.warning("Redis is unreachable (%s); retrying until it answers", fault)
            time.sleep(RECONNECT_DELAYS_S[min(failures, len(RECONNECT_DELAYS_S) - 1)])
            failures += 1
            continue
        if failures:
            logger.warning("Redis answers again; continuing at the same position")
        answered, failures = True, 0
        if batch is None and not follow:
            return
        yield batch or []


def items(reader: Reader, follow: bool = True) -> Iterator[Result | Missed]:
    """Yield single items, each acknowledged when the next one is requested. Otherwise like `batches`."""
    for batch in batches(reader, follow):
        for item, ids in batch:
            yield item
            reader.acknowledge(ids)
            if reader.stale and isinstance(item, Result):
                break  # the rest is still pending, or was taken over; the next `read` decides


def newest(redis: Redis, count: int, wanted: ResultFilter = NO_FILTER, until: str = "+") -> list[Result]:
    """Return the newest `count` matching results up to the entry id `until`, oldest first."""
    found: list[Result] = []
    while len(found) < count:
        at_once = min(FOLLOWED_AT_ONCE, count - len(found)) if wanted == NO_FILTER else FOLLOWED_AT_ONCE
        entries: Any = redis.xrevrange(RESULTS_STREAM, until, count=at_once)
        if not entries:
            break
        found += [result for _, result in _results(entries) if result and wanted.has(result)]
        until = f"({entries[-1][0]}"
    return found[:count][::-1]


def _results(entries: Iterable[Sequence[Any]]) -> Iterator[tuple[str, Result | None]]:
    """Yield (entry id, result). The result is None for unreadable entries, which would block a group forever."""
    for entry_id, fields in entries:
        try:
            by_name = fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
            yield entry_id, read_entry(by_name)
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("skipping unreadable entry %s of %s: %r", entry_id, RESULTS_STREAM, error)
            yield entry_id, None


def _missed(before: str, entries: Sequence[Sequence[Any]], gone: int, purged: int) -> list[Missed]:
    """Report missing entries before these.

    gone: number of missing entries, -1 if unknown. purged: number of entries purged meanwhile.
    """
    if not gone:
        return []
    at_most = gone if gone > 0 else None
    return [Missed(None if purged else at_most, _written_at(before), _written_at(entries[0][0]), at_most)]


def _normalize(subreddit: str) -> str:
    """Normalize a subreddit's name for comparison: "/r/Python" becomes "python"."""
    return subreddit.strip().casefold().removeprefix("/").removeprefix("r/").removesuffix("/")


def _last_id_before(since: float) -> str:
    """Return the largest entry id before a time, so that reading after it starts at that time."""
    first = int(since * 1000)
    return f"{first - 1}-{LAST_OF_MILLISECOND}" if first > 0 else "0-0"


def _milliseconds(seconds: float) -> int:
    """Convert to milliseconds, at least 1: Redis treats 0 as forever."""
    return max(1, math.ceil(seconds * 1000))


def _written_at(entry_id: str) -> float:
    """Return when an entry was written, in seconds since 1970, from its id."""
    return int(entry_id.partition("-")[0]) / 1000


def _order(entry_id: str) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split("-")))
