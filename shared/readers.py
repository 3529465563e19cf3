"""Reads the stream of results: on from a place of one's own, or as a member of a consumer group.

XREAD alone would not do. Redis trims the stream whether it was read or not, and XREAD then goes on at the oldest entry
that is left without a word. So entries are fetched by a script, which in the same moment compares where the reader
stands with what the store has counted (shared/results.py): how many entries were written, trimmed, and are there. What
is neither was purged, and is nobody's loss. XREAD only waits. Redis 7 has figures of its own (`entries-added`, a
group's `entries-read`), but 6.2 has not, and they cannot tell a purged entry from a trimmed one.

Nothing here knows the command, or Celery's tasks.
"""

import logging
import math
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from redis import Redis
from redis.exceptions import AuthenticationError, ResponseError
from redis.exceptions import ConnectionError as ConnectionFault
from redis.exceptions import TimeoutError as TimeoutFault

from shared import broker
from shared.errors import RedisError, UserError, printable
from shared.keys import COUNTERS, GROUPS, RESULTS_STREAM
from shared.results import Result, read_entry
from shared.settings import Settings

logger = logging.getLogger(__name__)

#: Fetches the next entries, and says what was trimmed before them.
#:
#:   KEYS[1]  feedmill:results   stream     KEYS[2]  feedmill:counters  hash    KEYS[3]  feedmill:groups  hash
#:   ARGV[1]  entries, at most              ARGV[2]  the group, or ""           ARGV[3]  its member
#:   without a group: ARGV[4]  id of the entry that was read last, or "$" for the stream's end
#:                    ARGV[5]  its place, as the last call returned it, or ""
#:
#: A member first gets what is pending with it: what it was given and has not acknowledged. A place is an id with the
#: numbers of entries that were written until then, trimmed and purged; a group's is kept in KEYS[3].
#:
#: Returns, of the entries: whether they were pending, {id, fields} of each (false for the fields where it is gone), the
#: id that was read last before, that now, the place; of what was trimmed in between: how many entries are gone (-1:
#: nobody knows), and how many were purged meanwhile, of these or others; of the stream: its first id, how many entries
#: were ever trimmed, and ever purged.
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
  -- Nothing that is this old is left: what came after it may be trimmed as well.
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
  redis.pcall('HSET', KEYS[3], group, now) -- a Redis that is full refuses, and must be read all the same
end
return {0, entries, before, cursor, now, gone, meanwhile, first, trimmed, purged}
"""

#: Takes over entries that a member of the group was given and has not acknowledged for a while, and forgets members
#: that are gone and owe nothing.
#:
#:   KEYS[1]  feedmill:results  stream      ARGV[1]  the group           ARGV[2]  the member that takes over
#:   ARGV[3]  milliseconds after which      ARGV[4]  id to begin with    ARGV[5]  entries, at most
#:   ARGV[6]  milliseconds of silence after which a member is forgotten
#:
#: Returns the id to begin with next time, "0-0" at the end; the ids that no entries are left of (Redis 7 and newer; on
#: 6.2 they are taken over); the stream's first id, how many entries were ever trimmed, and ever purged.
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

#: Entries that one call fetches: by a follower, and by a member of a group, which owes them until it is through.
FOLLOWED_AT_ONCE, GIVEN_AT_ONCE = 500, 100
#: Seconds after which what a member was given and has not acknowledged is another's.
CLAIM_AFTER = 60.0
#: Of that time: between two looks for such entries; and after which a member looks what is still its own.
CLAIM_EVERY, STALE_AFTER = 0.25, 0.5
#: Seconds between two looks, at least.
LEAST_PAUSE = 0.1
#: Seconds of silence after which a member of a group that owes nothing is forgotten. Its name may come back.
FORGET_AFTER = 3600
#: Seconds that a reader waits for an entry before it looks after other things.
WAIT = 1.0
#: Seconds before a lost connection is tried again; the last one as often as it takes.
PAUSES = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
#: What a group, and a member of one, may be called.
NAME = re.compile(r"[A-Za-z0-9_.:@-]{1,64}")
#: Seconds since 1970, until the year 9999.
LATEST = 253_402_300_800
#: The greatest second half of an entry's id, whose first are milliseconds since 1970.
LAST_OF_MILLISECOND = 2**64 - 1


@dataclass(frozen=True)
class Missed:
    """Results that were trimmed before they were read, between two times, in seconds since 1970."""

    #: How many; None where that is not known. None of them was purged.
    count: int | None
    #: When the last one before them was written, and the first one after them.
    since: float
    until: float
    #: At most so many, where posts were purged meanwhile, and it is not known which; None where it is not known at all.
    at_most: int | None = None


class Wanted(NamedTuple):
    """Which results are handed out; None for all."""

    #: The best label, exactly as it is written.
    label: str | None = None
    #: Of the best label, at least.
    min_score: float | None = None
    #: In any case, with "r/" or without.
    subreddit: str | None = None

    def has(self, result: Result) -> bool:
        found = result.classification
        return (
            (self.label is None or found.label == self.label)
            and (self.min_score is None or found.scores[found.label] >= self.min_score)
            and (self.subreddit is None or _plain(result.post.subreddit or "") == _plain(self.subreddit))
        )


ALL = Wanted()


class Read(NamedTuple):
    """Something for the reader, and the entries that are acknowledged when it was taken."""

    item: Result | Missed
    ids: tuple[str, ...] = ()


class Reader(Protocol):
    """Where results come from. Every method raises redis.exceptions.RedisError."""

    @property
    def stale(self) -> bool:
        """Whether what was read last, and is not acknowledged, may be another's by now: read again."""

    def read(self) -> list[Read] | None:
        """What is there, without waiting; None where nothing is, an empty list where nothing of it is wanted."""

    def wait(self, seconds: float) -> None:
        """Return as soon as there may be something to read, at the latest after `seconds`."""

    def acknowledge(self, ids: Sequence[str]) -> None:
        """These were taken, and need not come again. Acknowledge before the next `read`, or they do."""


class Follower:
    """Keeps its place itself: each result once, for as long as this object lives."""

    stale = False

    def __init__(self, redis: Redis, wanted: Wanted = ALL, since: float | None = None, history: int = 0) -> None:
        """since: seconds since 1970; None: the stream's end. history: how many of those before come first."""
        self._redis = redis
        self._wanted = wanted
        self._history = history
        self._cursor = "$" if since is None else _just_before(since)
        self._place = ""
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
            keys=[RESULTS_STREAM, COUNTERS, GROUPS], args=[FOLLOWED_AT_ONCE, "", "", self._cursor, self._place]
        )
        _, entries, before, self._cursor, self._place, gone, meanwhile, *_ = answer
        if not entries:
            return None
        reads = [Read(missed) for missed in _missed(before, entries, gone, meanwhile)]
        return reads + [Read(result) for _, result in _results(entries) if result and self._wanted.has(result)]

    def wait(self, seconds: float) -> None:
        self._redis.xread({RESULTS_STREAM: self._cursor}, count=1, block=_milliseconds(seconds))

    def acknowledge(self, ids: Sequence[str]) -> None:
        """Nothing is owed."""


class GroupReader:
    """A member of a consumer group: its members share the stream, and each result is given until one acknowledges it.

    Results that are not wanted are acknowledged unseen, for the whole group. No two processes may bear one name: each
    would be given what the other has in hand.
    """

    def __init__(
        self,
        redis: Redis,
        group: str,
        consumer: str,
        wanted: Wanted = ALL,
        since: float | None = None,
        claim_after: float = CLAIM_AFTER,
    ) -> None:
        """since: where the group begins, if it is new; see `Follower`. claim_after: seconds, see CLAIM_AFTER."""
        self._redis = redis
        self._group = group
        self._consumer = consumer
        self._wanted = wanted
        self._claim_after = claim_after
        #: Where the group stands; where to begin with as long as there is none.
        self._cursor = "$" if since is None else _just_before(since)
        self._claim_from = "0-0"
        self._claim_at = self._read_at = time.monotonic()
        #: Taken, and not yet acknowledged.
        self._taken: list[str] = []
        #: To be told with what is read next.
        self._found: list[Read] = []
        self._fetch: Any = redis.register_script(FETCH)
        self._claim: Any = redis.register_script(CLAIM)

    @property
    def stale(self) -> bool:
        return time.monotonic() - self._read_at > self._claim_after * STALE_AFTER

    def read(self) -> list[Read] | None:
        self._send_acknowledgements()
        if time.monotonic() >= self._claim_at:
            self._found += self._take_over()
        self._read_at = time.monotonic()
        answer = self._in_group(
            self._fetch, [RESULTS_STREAM, COUNTERS, GROUPS], [GIVEN_AT_ONCE, self._group, self._consumer, "", ""]
        )
        pending, entries, before, cursor, _, gone, meanwhile, *figures = answer
        reads, self._found = self._found, []
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
                self._taken.append(entry_id)
        return reads

    def wait(self, seconds: float) -> None:
        # Not XREADGROUP: it would hand entries out without the script's look at what was trimmed.
        seconds = min(seconds, self._claim_at - time.monotonic())
        if seconds > 0:
            self._redis.xread({RESULTS_STREAM: self._cursor}, count=1, block=_milliseconds(seconds))

    def acknowledge(self, ids: Sequence[str]) -> None:
        """What cannot be sent now is sent before the next reading."""
        self._taken.extend(ids)
        with suppress(ConnectionFault, TimeoutFault):
            self._send_acknowledgements()

    def _send_acknowledgements(self) -> None:
        if self._taken:
            self._redis.xack(RESULTS_STREAM, self._group, *self._taken)
            self._taken.clear()

    def _take_over(self) -> list[Read]:
        """Make the silent members' entries pending here, from where the next fetch takes them."""
        idle = _milliseconds(self._claim_after)
        arguments = [self._group, self._consumer, idle, self._claim_from, GIVEN_AT_ONCE, FORGET_AFTER * 1000]
        self._claim_from, gone, *figures = self._in_group(self._claim, [RESULTS_STREAM, COUNTERS], arguments)
        # Where more are to be taken over, they are when these are done.
        pause = max(self._claim_after * CLAIM_EVERY, LEAST_PAUSE) if self._claim_from == "0-0" else 0.0
        self._claim_at = time.monotonic() + pause
        return self._lost(gone, *figures)

    def _lost(self, ids: Sequence[str], first: str, trimmed: int, purged: int) -> list[Read]:
        """What is to be said of entries that were given to somebody, and are there no more."""
        # Trimming takes the oldest: what is younger than the first one left was purged.
        lost = [entry_id for entry_id in ids if trimmed and first and _order(entry_id) < _order(first)]
        self._taken.extend(set(ids).difference(lost))
        if not lost:
            return []
        count = None if purged else len(lost)
        return [Read(Missed(count, _written(lost[0]), _written(lost[-1]), len(lost)), tuple(lost))]

    def _in_group(self, script: Any, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Run a script; where there is no such group, make it first."""
        try:
            return script(keys=keys, args=arguments)
        except ResponseError as fault:
            if "NOGROUP" not in str(fault):
                raise
        try:
            self._redis.xgroup_create(RESULTS_STREAM, self._group, id=self._cursor, mkstream=True)
        except ResponseError as fault:
            if "BUSYGROUP" not in str(fault):  # another member was quicker
                raise
        return script(keys=keys, args=arguments)


def open_reader(
    redis: Redis,
    group: str | None = None,
    consumer: str | None = None,
    wanted: Wanted = ALL,
    since: float | None = None,
    history: int = 0,
    claim_after: float = CLAIM_AFTER,
) -> Reader:
    """The reader for these wishes. consumer: unset, this host and process. Raises UserError for a bad one."""
    if wanted.min_score is not None and not math.isfinite(wanted.min_score):
        raise UserError(f"{wanted.min_score} is no score that results could have at least.")
    if wanted.subreddit is not None and not _plain(wanted.subreddit):
        raise UserError(f"{printable(wanted.subreddit)!r:.80} is no subreddit's name; write python, or r/python.")
    if since is not None and not 0 <= since < LATEST:
        raise UserError(f"{since} is no time to read from: give seconds since 1970.")
    if group is None:
        if consumer is not None:
            raise UserError("A consumer is a member of a group: name the group as well, or leave out the consumer.")
        return Follower(redis, wanted, since, history)
    if not 0 < claim_after < LATEST:
        raise UserError(f"{claim_after} is no time after which to take over: give seconds, more than 0.")
    if consumer is None:
        consumer = re.sub(r"[^A-Za-z0-9_.-]", "-", f"{socket.gethostname():.48}-{os.getpid()}")
    for what, name in (("group", group), ("consumer", consumer)):
        if not NAME.fullmatch(name):
            raise UserError(
                f"'{printable(name):.80}' is no name of a {what}: give 1 to 64 letters, digits, or any of - _ . : @"
            )
    return GroupReader(redis, group, consumer, wanted, since, claim_after)


def batches(reader: Reader, follow: bool = True, wait: float = WAIT) -> Iterator[list[Read]]:
    """What a reader reads, as it comes; an empty list at least whenever nothing came for `wait` seconds.

    Goes on after a lost connection, for as long as it takes; without `follow` ends where nothing is left. The caller
    acknowledges. Raises redis.exceptions.RedisError when Redis does not answer at all, or refuses.
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
                logger.warning("Redis does not answer (%s); trying again until it does", fault)
            time.sleep(PAUSES[min(failures, len(PAUSES) - 1)])
            failures += 1
            continue
        if failures:
            logger.warning("Redis answers again; going on at the same place")
        answered, failures = True, 0
        if batch is None and not follow:
            return
        yield batch or []


def items(reader: Reader, follow: bool = True) -> Iterator[Result | Missed]:
    """Item by item; each is acknowledged when the next one is asked for. Otherwise as `batches`."""
    for batch in batches(reader, follow):
        for item, ids in batch:
            yield item
            reader.acknowledge(ids)
            if reader.stale and isinstance(item, Result):
                break  # the rest is still pending here, or was taken over: the next reading tells


def newest(redis: Redis, count: int, wanted: Wanted = ALL, until: str = "+") -> list[Result]:
    """The newest `count` results that are wanted, up to an entry's id, oldest of them first."""
    found: list[Result] = []
    while len(found) < count:
        at_once = min(FOLLOWED_AT_ONCE, count - len(found)) if wanted == ALL else FOLLOWED_AT_ONCE
        entries: Any = redis.xrevrange(RESULTS_STREAM, until, count=at_once)
        if not entries:
            break
        found += [result for _, result in _results(entries) if result and wanted.has(result)]
        until = f"({entries[-1][0]}"
    return found[:count][::-1]


@contextmanager
def told_plainly(settings: Settings) -> Iterator[None]:
    """As shared.broker's; and where a key holds what is not Feedmill's, says so. Raises RedisError."""
    try:
        with broker.told_plainly(settings):
            yield
    except ResponseError as fault:
        if "WRONGTYPE" not in str(fault):
            raise
        raise RedisError(
            f"Redis at {settings.redis_address} holds something else under a name of Feedmill's, {RESULTS_STREAM} most "
            "likely: another application uses it as well. Set another database, as in redis://host:6379/1."
        ) from None


def _results(entries: Iterable[Sequence[Any]]) -> Iterator[tuple[str, Result | None]]:
    """(entry id, result) of each; None for what somebody else wrote, which would hold up a group for ever."""
    for entry_id, fields in entries:
        try:
            by_name = fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
            yield entry_id, read_entry(by_name)
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("entry %s of %s cannot be read and is skipped: %r", entry_id, RESULTS_STREAM, error)
            yield entry_id, None


def _missed(before: str, entries: Sequence[Sequence[Any]], gone: int, purged: int) -> list[Missed]:
    """What is to be said when so many entries are gone between one that was read and these."""
    if not gone:
        return []
    at_most = gone if gone > 0 else None
    return [Missed(None if purged else at_most, _written(before), _written(entries[0][0]), at_most)]


def _plain(subreddit: str) -> str:
    """In the form in which subreddits are compared: "/r/Python" is "python"."""
    return subreddit.strip().casefold().removeprefix("/").removeprefix("r/").removesuffix("/")


def _just_before(since: float) -> str:
    """The id after which entries come that were written from then on."""
    first = int(since * 1000)
    return f"{first - 1}-{LAST_OF_MILLISECOND}" if first > 0 else "0-0"


def _milliseconds(seconds: float) -> int:
    """At least one: to Redis none means for ever."""
    return max(1, math.ceil(seconds * 1000))


def _written(entry_id: str) -> float:
    """When an entry was written, in seconds since 1970: its id tells."""
    return int(entry_id.partition("-")[0]) / 1000


def _order(entry_id: str) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split("-")))
