"""The results store: each result exactly once by fingerprint, and a stream for readers.

One function in Redis writes a micro-batch (shared/scripts/results.lua). It sets each
classification if absent, and appends only new ones to the stream. So a message that is delivered
twice, or to two workers at once, leaves one result and one stream entry. A post has at most one
dead letter per request while the first one exists. Independent of models and Celery.

A result is packed into a record of about 100 bytes. What many results share (labels, model,
worker, device) is their context. It is stored once, under a digest of its content, in each
generation of the table (shared/scripts/tables.lua). Scores are stored in 16 bits, in steps of
0.00002, so they differ from the computed ones by at most 1e-5. A result that does not fit this
form, with scores below -0.31 or above 1, is stored as JSON.
"""

import json
import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from hashlib import blake2b, sha1
from math import isnan, nan
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeVar

from redis import Redis
from redis.client import NEVER_DECODE
from redis.exceptions import ResponseError

from feedmill.shared.batches import batched
from feedmill.shared.keys import COUNTERS, LABELS, RESULTS_STREAM, STORED
from feedmill.shared.mentions import MAX_MENTIONS, mentioned_ids
from feedmill.shared.messages import Classification, DeadLetter, Post, digest
from feedmill.shared.none_of_these import NO_LABEL
from feedmill.shared.redis_errors import is_full
from feedmill.shared.scripts import call
from feedmill.shared.settings import DEFAULT_QUEUE, PREFIX, Settings

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Seconds per hour.
HOUR_S = 3600
#: Scores per script call. Redis is blocked during a call.
SCORES_PER_CALL = 100
#: Limits of the search for a result's stream entry: seconds by which the clocks of a worker and of
#: Redis may differ, and entries.
MAX_CLOCK_SKEW_S = 1.0
ENTRIES_SEARCHED = 2000
#: Share of `results_memory` that the results stream may take.
STREAM_SHARE = 0.45
#: Ids per call of `stored_ids`.
IDS_PER_CALL = 1000
#: Dead letters per script call. Redis is blocked during a call.
DEAD_LETTERS_PER_CALL = 50
#: Seconds of writes that Redis may lose: two with a slow disk and an append-only file; ten with a
#: replica and the `min-replicas-max-lag` recommended in docs/durability.md.
LOSABLE_S = 10.0
#: Maximum bytes of writes kept for repetition.
MAX_KEPT_BYTES = 64 * 2**20
#: Kinds of records: a packed result, a result as JSON, a post's score on its site, as JSON, and a
#: context. Functions count those up to JSON (shared/scripts/tables.lua).
PACKED, JSON, SCORE, CONTEXT = range(4)
#: Start of a record: its bytes, kind, and key of the fingerprint. Then comes the content.
#: Functions read it, too (shared/scripts/tables.lua).
HEAD = struct.Struct(">IB16s")
#: Start of the name under which a context is stored, and the number of results. Ids do not start
#: with a space.
CONTEXT_NAME = " "
#: Start of a packed result: context, `classified_at`, `queued_seconds` (NaN for None), number of
#: the best label. Then come the scores.
BODY = struct.Struct(">8sddH")
#: Further parts after the scores: steps of `labels_threshold`, 0 for None. Then comes the
#: language, in ASCII. Workers of earlier versions do not read it.
TAIL = struct.Struct(">H")
#: The number of the best label of a post without a label. A label set has at most 1,000.
NO_NUMBER: Final = 2**16 - 1
#: Bytes of a fingerprint's key.
KEY_BYTES = 16
#: Stored steps per 1, and the stored value of 0. Scores are probabilities, or cosines, which can
#: be negative.
STEPS: Final = 50_000
ZERO: Final = 2**16 - 1 - STEPS
#: Maximum contexts kept in memory, for writing and for reading. Applications can send any number
#: of label sets.
MAX_CONTEXTS = 1000


class Origin(NamedTuple):
    """Where a result comes from: the fields of a `Classification` that many results share.

    Stored contexts have its values in this order. A new field goes last and has a default, because
    they lack it.
    """

    model: str
    revision: str | None
    weights: str
    worker: str
    device: str


#: Returns the values of a result's `Origin`.
origin_values_of = attrgetter(*Origin._fields)


class ResultContext(NamedTuple):
    """The context that many results share: labels and origin."""

    labels: tuple[str, ...]
    origin: Origin
    id: bytes
    record: bytes

    @property
    def name(self) -> str:
        """The name under which it is stored."""
        return f"{CONTEXT_NAME}{self.id.hex()}"


@lru_cache(MAX_CONTEXTS)
def make_context(labels: tuple[str, ...], origin: Origin) -> ResultContext:
    """Return the context of sorted labels and of an origin."""
    content = json.dumps([labels, *origin]).encode()
    identity = blake2b(content, digest_size=8).digest()
    record = _record(CONTEXT, bytes(KEY_BYTES), content)
    return ResultContext(
        labels=labels,
        origin=origin,
        id=identity,
        record=record,
    )


def parse_context(content: bytes) -> ResultContext:
    """Return the context in a record's content."""
    labels, *origin_values = json.loads(content)
    origin = Origin(*origin_values)
    return make_context(tuple(labels), origin)


def fingerprint_key(fingerprint: str) -> bytes:
    """Return the key of a fingerprint in records: its 128 bits.

    Other text than `fingerprint` returns is hashed.
    """
    try:
        key = bytes.fromhex(fingerprint)
    except ValueError:
        key = b""
    if len(key) == KEY_BYTES:
        return key
    text = fingerprint.encode()
    hashed = sha1(text, usedforsecurity=False).digest()
    return hashed[:KEY_BYTES]


def pack(result: Classification) -> tuple[bytes, ResultContext | None]:
    """Return a result as a record, and the context that it refers to; None if none."""
    labels = tuple(sorted(result.scores))
    origin = Origin(*origin_values_of(result))
    context = make_context(labels, origin)
    record = _pack(result, context)
    if record is not None:
        return record, context
    text = result.model_dump_json()
    record = _record(
        kind=JSON,
        key=fingerprint_key(result.fingerprint),
        content=text.encode(),
    )
    return record, None


def _pack(result: Classification, context: ResultContext) -> bytes | None:
    """Return a result as a packed record; None if it does not fit this form."""
    try:
        key = bytes.fromhex(result.fingerprint)
        if key.hex() != result.fingerprint or len(key) != KEY_BYTES:
            return None
        labels = context.labels
        scores = result.scores
        rounded_zero = ZERO + 0.5
        steps = [int(scores[label] * STEPS + rounded_zero) for label in labels]
        # A score below -0.31, maybe by less than a step: `int` rounds towards 0. Other values that
        # do not fit raise struct.error.
        if 0 in steps:
            return None
        queued = result.queued_seconds
        if queued is None:
            queued = nan
        best = NO_NUMBER
        if result.label is not None:
            best = labels.index(result.label)
        body = BODY.pack(
            context.id,
            result.classified_at,
            queued,
            best,
        )
        count = len(steps)
        packed_scores = struct.pack(f">{count}H", *steps)
        tail = _packed_tail(result)
    except (struct.error, ValueError, OverflowError):
        return None
    return _record(PACKED, key, body + packed_scores + tail)


def _packed_tail(result: Classification) -> bytes:
    """Return what follows the scores; b"" if nothing.

    Raises struct.error or ValueError for values that do not fit.
    """
    language = result.language or ""
    threshold = result.labels_threshold
    if not language and threshold is None:
        return b""
    steps = 0
    if threshold is not None:
        # Rounded as scores are, so that equal ones stay equal.
        rounded_zero = ZERO + 0.5
        steps = int(threshold * STEPS + rounded_zero)
        if steps <= 0:
            raise ValueError("a threshold below those of scores")
    packed_steps = TAIL.pack(steps)
    packed_language = language.encode("ascii")
    return packed_steps + packed_language


def _unpack_tail(tail: bytes) -> tuple[str | None, float | None]:
    """Return the language and `labels_threshold` of a packed result."""
    if not tail:
        return None, None
    (steps,) = TAIL.unpack_from(tail)
    threshold = None
    if steps:
        threshold = (steps - ZERO) / STEPS
    packed_language = tail[TAIL.size :]
    if not packed_language:
        return None, threshold
    language = packed_language.decode("ascii")
    return language, threshold


def pack_score(text: str) -> bytes:
    """Return the record of a post's score. text: the score, as JSON."""
    return _record(
        kind=SCORE,
        key=bytes(KEY_BYTES),
        content=text.encode(),
    )


def _record(kind: int, key: bytes, content: bytes) -> bytes:
    length = HEAD.size + len(content)
    head = HEAD.pack(length, kind, key)
    return head + content


class StoredRecord(NamedTuple):
    """A record of a post, or of a context."""

    kind: int
    key: bytes
    content: bytes


def split(records: bytes) -> Iterator[StoredRecord]:
    """Yield the records of an id."""
    start = 0
    while start < len(records):
        length, kind, key = HEAD.unpack_from(records, start)
        content_start = start + HEAD.size
        end = start + length
        content = records[content_start:end]
        yield StoredRecord(kind, key, content)
        start = end


def unpack(
    post_id: str,
    record: StoredRecord,
    context_of: Callable[[bytes], ResultContext | None],
) -> Classification | None:
    """Return the result in a post's record; None if its context is lost."""
    if record.kind == JSON:
        return Classification.model_validate_json(record.content)
    identity, classified_at, queued, best = BODY.unpack_from(record.content)
    context = context_of(identity)
    if context is None:
        return None
    labels = context.labels
    count = len(labels)
    steps = struct.unpack_from(f">{count}H", record.content, BODY.size)
    order = sorted(
        range(count),
        key=steps.__getitem__,
        reverse=True,
    )
    label = None
    if best != NO_NUMBER:
        label = labels[best]
    if label is not None and order[0] != best:  # several labels have this score
        order.remove(best)
        order.insert(0, best)
    scores = {labels[number]: (steps[number] - ZERO) / STEPS for number in order}
    queued_seconds = None
    if not isnan(queued):
        queued_seconds = queued
    scores_end = BODY.size + 2 * count
    language, labels_threshold = _unpack_tail(record.content[scores_end:])
    return Classification.model_construct(
        id=post_id,
        label=label,
        scores=scores,
        fingerprint=record.key.hex(),
        classified_at=classified_at,
        queued_seconds=queued_seconds,
        language=language,
        labels_threshold=labels_threshold,
        **context.origin._asdict(),
    )


class Result(NamedTuple):
    """A post and its classification. Stream entries contain only the start of the post's body."""

    post: Post
    classification: Classification


class Counters(NamedTuple):
    """Numbers since the store was created. shared/metrics.py describes each."""

    stored: int = 0
    repeated: int = 0
    failed: int = 0
    gone: int = 0
    answered: int = 0
    trimmed: int = 0
    dead_trimmed: int = 0
    dropped: int = 0
    sent_dropped: int = 0

    @property
    def settled(self) -> int:
        """Return the number of posts with a result or a dead letter."""
        return self.stored + self.failed


#: Entries per page. One dead letter can be half a megabyte.
PAGE_SIZE = 20


class Score(NamedTuple):
    """A post's score on its site at the time `at`, in seconds since 1970."""

    score: int
    at: float


class _Write(NamedTuple):
    #: Write, and return the server's identity and the answer.
    repeat: Callable[[], tuple[str, object]]
    size: int
    at: float


class Replay:
    """Recent idempotent writes of one client, repeated when Redis may have lost them. Thread-safe.

    A killed Redis can lose the last second of its append-only file. A promoted replica can lack
    what its master had not yet replicated. A worker could then acknowledge a message whose result
    was lost. So each answer of the store's functions carries the server's identity: its `run_id`,
    and its `master_replid`, which changes when a replica is promoted. If it is the same, nothing
    was lost.

    identify: returns the server's identity. It and writes raise redis-py's errors.
    """

    def __init__(
        self, identify: Callable[[], str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._identify = identify
        self._clock = clock
        #: The server that has received all kept writes; "" if there may be none, None if there are
        #: no writes yet.
        self._server: str | None = None
        self._writes: deque[_Write] = deque()
        self._size = 0
        #: Time of Redis' last answer. Writes more than LOSABLE_S seconds older than this are safe.
        self._contact = clock()
        self._lock = threading.RLock()

    def write(self, write: Callable[[], tuple[str, T]], size: int) -> T:
        """Write, keep the write for repetition, and catch up. size: bytes of the write."""
        with self._lock:
            server, answer = write()
            self.note(server)
            self.keep(write, size)
            self._catch_up(server)
            return answer

    def note(self, server: str) -> None:
        """Note the server that gave the latest answer."""
        with self._lock:
            is_same = self._server in (None, server)
            self._server = ""
            if is_same:
                self._server = server

    def keep(self, write: Callable[[], tuple[str, object]], size: int) -> None:
        """Keep a write for repetition whose results the server has. Does not use Redis."""
        with self._lock:
            now = self._clock()
            kept_write = _Write(
                repeat=write,
                size=size,
                at=now,
            )
            self._writes.append(kept_write)
            self._size += size
            while self._size > MAX_KEPT_BYTES:
                self._drop_oldest()

    def check(self) -> None:
        """Catch up if Redis may still lose a kept write."""
        if self._writes:
            server = self._identify()
            self._catch_up(server)

    def _catch_up(self, server: str) -> None:
        """Repeat kept writes if another server answers than the one that has them, and forget
        writes that are safe.

        While Redis is unreachable, nothing may be forgotten.
        """
        with self._lock:
            while self._server != server:
                self._drop_safe(self._contact)
                server = self._repeat_writes(server)
            self._contact = self._clock()
            self._drop_safe(self._contact)

    def _repeat_writes(self, server: str) -> str:
        """Repeat all kept writes on a server; return the one that gave the last answer."""
        self._server = ""
        answering = server
        repeated: deque[_Write] = deque()
        for write in self._writes:
            answering, _ = write.repeat()
            # With a new time: the new server can lose it too.
            now = self._clock()
            repeated.append(write._replace(at=now))
        self._writes = repeated
        self._server = server
        return answering

    def _drop_safe(self, now: float) -> None:
        """Drop the writes that Redis can no longer lose. now: time of its last answer."""
        while self._writes:
            oldest = self._writes[0]
            age = now - oldest.at
            if age <= LOSABLE_S:
                break
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest = self._writes.popleft()
        self._size -= oldest.size


class ResultsStore:
    """The store of results and dead letters in Redis. Thread-safe.

    Writes of the last seconds are repeated when Redis may have lost them (`Replay`).
    """

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._redis = redis
        self._settings = settings
        self._replay = Replay(lambda: str(call(redis, "identity")))
        #: Contexts that were read, by id.
        self._contexts: dict[bytes, ResultContext] = {}

    def find(self, wanted: Sequence[tuple[str, str]]) -> list[Classification | None]:
        """Return the stored result of each (post id, fingerprint), or None.

        Raises redis.exceptions.RedisError.
        """
        if not wanted:
            return []
        ids = []
        keys = []
        for post_id, fingerprint in wanted:
            key = fingerprint_key(fingerprint)
            ids.append(post_id)
            keys.append(key)
        server, *records = call(
            self._redis,
            "find",
            json.dumps(ids),
            b"".join(keys),
            raw=True,
        )
        self._replay.note(server.decode())
        results: list[Classification | None] = []
        for post_id, data in zip(ids, records, strict=True):
            result = None
            if data:
                record = next(split(data))
                result = unpack(post_id, record, self._context)
            results.append(result)
        return results

    def _records(self, name: str) -> bytes:
        """Return the records of a post or of a context."""
        records: bytes = call(
            self._redis,
            "get",
            name,
            raw=True,
        )
        return records

    def _context(self, identity: bytes) -> ResultContext | None:
        """Return the context with this id; None if it is lost."""
        context = self._contexts.get(identity)
        if context is not None:
            return context
        name = CONTEXT_NAME + identity.hex()
        records = self._records(name)
        for record in split(records):
            if len(self._contexts) >= MAX_CONTEXTS:
                self._contexts = {}
            context = parse_context(record.content)
            self._contexts[identity] = context
        return context

    def write(self, results: Sequence[Result], dead: Sequence[DeadLetter] = ()) -> int:
        """Store a micro-batch's results and dead letters. Return the number of new results.

        Skips purged posts (shared/purge.py). Idempotent, except that counters can increase twice.
        Drops the oldest results and sent records if they exceed their memory; on a full Redis as
        well, before it raises. Raises redis.exceptions.RedisError.
        """
        if not results and not dead:
            return 0
        write, size = self._write_call(results, dead[:DEAD_LETTERS_PER_CALL])
        try:
            new, trimmed = self._replay.write(write, size)
        except ResponseError as fault:
            if is_full(fault):  # maybe because a bound was lowered
                limits = memory_limits(self._settings)
                call(self._redis, "bound", json.dumps(limits))
            raise
        for start in range(DEAD_LETTERS_PER_CALL, len(dead), DEAD_LETTERS_PER_CALL):
            end = start + DEAD_LETTERS_PER_CALL
            letters = dead[start:end]
            write, size = self._write_call([], letters)
            _, trimmed_for_these = self._replay.write(write, size)
            trimmed += trimmed_for_these
        if trimmed:
            logger.warning(
                "trimmed the %d oldest dead letters: their stream is full. Retry or drop dead "
                "letters (`feedmill dead list`), or raise %sDEAD_LETTERS_LENGTH",
                trimmed,
                PREFIX,
            )
        return new

    def keep(self, found: Sequence[Result]) -> None:
        """Keep stored results that answered a message, to repeat their writes if Redis
        loses them.
        """
        if found:
            write, size = self._write_call(found, ())
            self._replay.keep(write, size)

    def catch_up(self) -> None:
        """Repeat writes that Redis may have lost. Raises redis.exceptions.RedisError."""
        self._replay.check()

    def _write_call(
        self, results: Sequence[Result], dead: Sequence[DeadLetter]
    ) -> tuple[Callable[[], tuple[str, tuple[int, int]]], int]:
        """Return a function that writes and may be called again, and the number of bytes that it
        sends.

        It returns the server's identity, and the numbers of new results and of trimmed dead
        letters.
        """
        ids = []
        labels = []
        runs = []
        records: list[bytes] = []
        texts: list[bytes] = []
        contexts: dict[str, bytes] = {}
        for post, classification in results:
            ids.append(post.id)
            labels.append(classification.label or "")  # "" is the name of no label
            runs.append(post.run or "")
            record, context = pack(classification)
            records.append(record)
            if context:
                contexts[context.name] = context.record
            # model_dump_json would decode the text, only for it to be encoded again.
            text = classification.__pydantic_serializer__.to_json(classification)
            texts.append(text)
            texts.append(self._clip(post))
        letters = []
        for letter in dead:
            letter_call = _letter_call(letter)
            letters.append(letter_call.arguments)
            texts.append(letter_call.text)
            texts.append(letter_call.bare)
        settings = self._settings
        request = {
            "ids": ids,
            "labels": labels,
            "runs": runs,
            "contexts": list(contexts),
            "letters": letters,
            "limits": memory_limits(settings),
            "ttl": settings.results_ttl,
            "length": settings.results_stream_length,
            "dead_length": settings.dead_letters_length,
            "run_ttl": settings.sent_ttl,
        }
        # Encoded once, for all repetitions, and to bytes: a Python string can take four bytes per
        # character.
        head = json.dumps(request)
        arguments = [
            head.encode(),
            b"".join([*records, *contexts.values()]),
            *texts,
        ]
        write = partial(
            call,
            self._redis,
            "write",
            *arguments,
        )
        size = sum(map(len, arguments))
        return write, size

    def _clip(self, post: Post) -> bytes:
        """Return a post as JSON for its stream entry, with its body truncated."""
        limit = self._settings.stream_body
        if len(post.body) > limit:
            # model_copy skips validation, so a post whose body is truncated to nothing is valid.
            start = post.body[:limit]
            post = post.model_copy(update={"body": start})
        return post.__pydantic_serializer__.to_json(post, exclude_defaults=True)

    def get(self, post_id: str) -> list[Classification]:
        """Return a post's classifications that have not expired, oldest first: one per text, model
        and label set.
        """
        classifications = []
        records = self._records(post_id)
        for record in split(records):
            if record.kind not in (PACKED, JSON):
                continue
            classification = unpack(post_id, record, self._context)
            if classification is not None:
                classifications.append(classification)
        return sorted(
            classifications, key=lambda classification: classification.classified_at
        )

    def post_of(self, found: Classification) -> Post | None:
        """Return the post of a classification from its stream entry; None if the entry was trimmed
        or is not found.

        Looks at entries written around the time of the classification, because results do not
        refer to entries.
        """
        earliest_s = found.classified_at - MAX_CLOCK_SKEW_S
        earliest_ms = int(earliest_s * 1000)
        earliest_ms = max(0, earliest_ms)
        entries: Any = self._redis.xrange(
            RESULTS_STREAM,
            f"{earliest_ms}-0",
            count=ENTRIES_SEARCHED,
        )
        for _, fields in entries:
            if fields.get("id") != found.id:
                continue
            classification = fields.get("classification", "")
            if found.fingerprint in classification:
                values = json.loads(fields["post"])
                # Unchecked: it is not valid if its body was truncated to nothing.
                return Post.model_construct(**values)
        return None

    def refresh_scores(self, scores: Mapping[str, int], at: float) -> int:
        """Store the scores that posts had at the time `at`, in seconds since 1970.

        Return how many have results.

        Skips posts without results, and does not extend the lifetime of results. Idempotent.
        Raises redis.exceptions.RedisError.
        """
        refreshed = 0
        for batch in batched(scores.items(), SCORES_PER_CALL):
            arguments: list[str | bytes] = []
            for post_id, score in batch:
                text = json.dumps({"score": score, "at": at})
                record = pack_score(text)
                arguments.append(post_id)
                arguments.append(record)
            refreshed += call(self._redis, "refresh", *arguments)
        return refreshed

    def score(self, post_id: str) -> Score | None:
        """Return the latest score of a post with results; None if `refresh_scores` never stored
        one.
        """
        records = self._records(post_id)
        for record in split(records):
            if record.kind == SCORE:
                values = json.loads(record.content)
                return Score(**values)
        return None

    def labels(self, hours: int) -> dict[int, dict[str, int]]:
        """Return the number of new results by label, for each of the last hours with any: hours
        since 1970 -> label.
        """
        this_hour = int(time.time() // HOUR_S)
        next_hour = this_hour + 1
        last_hours = range(next_hour - hours, next_hour)
        pipe: Any = self._redis.pipeline(transaction=False)
        for hour in last_hours:
            pipe.hgetall(f"{LABELS}{hour}")
        labels: dict[int, dict[str, int]] = {}
        answers = pipe.execute()
        for hour, counts in zip(last_hours, answers, strict=True):
            if counts:
                labels[hour] = {
                    label or NO_LABEL: int(count) for label, count in counts.items()
                }
        return labels

    def counters(self) -> Counters:
        """Return the counters since the store was created."""
        texts: Any = self._redis.hgetall(COUNTERS)
        numbers = {}
        for name in Counters._fields:
            text = texts.get(name, 0)
            numbers[name] = int(text)
        return Counters(**numbers)


def memory_limits(settings: Settings) -> dict[str, int]:
    """Return the bytes that the results with their stream, the stream, and sent records
    may take.
    """
    results = settings.results_memory
    return {
        "results": results,
        "stream": int(STREAM_SHARE * results),
        "sent": settings.sent_memory,
    }


def stored_ids(redis: Redis) -> Iterator[str]:
    """Yield the ids of posts with results.

    Ids can be repeated. Raises redis.exceptions.RedisError.
    """
    untyped: Any = redis
    for generation in untyped.zrange(STORED, 0, -1):
        key = f"{STORED}:{generation}"
        for raw_name, _ in scan_hash(redis, key, IDS_PER_CALL):
            name = raw_name.decode()
            if not name.startswith(CONTEXT_NAME):
                yield name


def scan_hash(redis: Any, key: str, count: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the fields of a hash and their values, about `count` per call.

    Some can be repeated.
    """
    cursor: Any = None
    while cursor != 0:
        cursor, fields = redis.execute_command(
            "HSCAN",
            key,
            cursor or 0,
            "COUNT",
            count,
            **{NEVER_DECODE: True},
        )
        cursor = int(cursor)
        yield from fields.items()


def newest_first(
    redis: Any, stream: str, since: str = "-", until: str = "+", page: int = PAGE_SIZE
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (id, fields) of a stream's entries, newest first, holding `page` of them in memory.

    since, until: the oldest and the newest entry id to yield. Raises redis.exceptions.RedisError.
    """
    while entries := redis.xrevrange(
        stream,
        until,
        since,
        count=page,
    ):
        yield from entries
        oldest_id, _ = entries[-1]
        until = f"({oldest_id}"


class _LetterCall(NamedTuple):
    """The fields of a dead letter for Redis (shared/scripts/results.lua)."""

    #: Post id, digest, run, reason, and the ids of posts in the text of a letter without a post
    #: id.
    arguments: tuple[str, str, str, str, list[str]]
    #: The letter, and the same without its text, b"" if none is needed.
    text: bytes
    bare: bytes = b""


def _letter_call(letter: DeadLetter) -> _LetterCall:
    # Posts sent without an id get "", which is not a valid id. Purges find such letters by the ids
    # in their text.
    post_id = letter.id or ""
    post_id = post_id.strip()
    head = (
        post_id,
        dead_letter_digest(letter),
        letter.run or "",
        letter.reason,
    )
    text = letter.model_dump_json()
    if post_id:
        return _LetterCall(
            arguments=(*head, []),
            text=text.encode(),
        )
    mentions = mentioned_ids(letter.post, letter.options, letter.payload)
    if mentions is None:
        why = f"left out: it contains more than {MAX_MENTIONS:,} ids"
        return _LetterCall(
            arguments=(*head, []),
            text=_without_text(letter, why),
        )
    bare = b""
    if mentions:
        bare = _without_text(letter, "left out: it contains a purged post")
    return _LetterCall(
        arguments=(*head, sorted(mentions)),
        text=text.encode(),
        bare=bare,
    )


def _without_text(letter: DeadLetter, why: str) -> bytes:
    """Return a dead letter as JSON, without the text that was sent. why: shown in its place."""
    update = {
        "post": None,
        "options": None,
        "payload": why,
    }
    bare = letter.model_copy(update=update)
    text = bare.model_dump_json()
    return text.encode()


def dead_letter_digest(letter: DeadLetter) -> str:
    """Return a digest of the post, its options and its queue, so that repeated failures of one
    request are equal.
    """
    if letter.post is None:  # no readable post: compare the message instead
        return digest(letter.id, letter.payload, letter.message)
    parts = [letter.id, letter.post, letter.options]
    if letter.queue not in (None, DEFAULT_QUEUE):
        parts.append(letter.queue)
    return digest(*parts)
