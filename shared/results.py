"""The results store: each result exactly once by fingerprint, and a stream for readers.

One function in Redis writes a micro-batch (shared/scripts/results.lua). It sets each classification if absent, and
appends only new ones to the stream. So a message that is delivered twice, or to two workers at once, leaves one result
and one stream entry. A post has at most one dead letter per request while the first one exists. Independent of models
and Celery.

A result is packed into a record of about 100 bytes. What many results share (labels, model, worker, device) is their
context. It is stored once, under a digest of its content, in each generation of the table (shared/scripts/tables.lua).
Scores are stored in 16 bits, in steps of 0.00002, so they differ from the computed ones by at most 1e-5. A result that
does not fit this form, with scores below -0.31 or above 1, is stored as JSON.
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
from itertools import islice
from math import isnan, nan
from typing import Any, Final, NamedTuple, TypeVar

from redis import Redis
from redis.client import NEVER_DECODE
from redis.exceptions import ResponseError

from feedmill.shared.keys import COUNTERS, LABELS, RESULTS_STREAM, STORED
from feedmill.shared.messages import Classification, DeadLetter, Post, digest
from feedmill.shared.redis_errors import is_full
from feedmill.shared.scripts import call
from feedmill.shared.settings import DEFAULT_QUEUE, PREFIX, Settings

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Seconds per hour.
HOUR_S = 3600
#: Scores per script call. Redis is blocked during a call.
SCORES_PER_CALL = 100
#: Limits of the search for a result's stream entry: seconds by which the clocks of a worker and of Redis may differ,
#: and entries.
MAX_CLOCK_SKEW_S, ENTRIES_SEARCHED = 1.0, 2000
#: Share of `results_memory` that the results stream may take.
STREAM_SHARE = 0.45
#: Ids per call of `stored_ids`.
IDS_PER_CALL = 1000
#: Dead letters per script call. Redis is blocked during a call.
DEAD_LETTERS_PER_CALL = 50
#: Seconds of writes that Redis may lose: two with a slow disk and an append-only file; ten with a replica and the
#: `min-replicas-max-lag` recommended in docs/durability.md.
LOSABLE_S = 10.0
#: Maximum bytes of writes kept for repetition.
MAX_KEPT_BYTES = 64 * 2**20
#: Kinds of records: a packed result, a result as JSON, a post's score on its site, as JSON, and a context.
PACKED, JSON, SCORE, CONTEXT = range(4)
#: Start of a record: its bytes, kind, and key of the fingerprint. Then comes the content. Functions read it, too
#: (shared/scripts/tables.lua).
HEAD = struct.Struct(">IB16s")
#: Start of the name under which a context is stored. Ids do not start with a space.
CONTEXT_NAME = " "
#: Start of a packed result: context, `classified_at`, `queued_seconds` (NaN for None), number of the best label. Then
#: come the scores.
BODY = struct.Struct(">8sddH")
#: Bytes of a fingerprint's key.
KEY_BYTES = 16
#: Stored steps per 1, and the stored value of 0. Scores are probabilities, or cosines, which can be negative.
STEPS: Final = 50_000
ZERO: Final = 2**16 - 1 - STEPS
#: Maximum contexts kept in memory, for writing and for reading. Applications can send any number of label sets.
MAX_CONTEXTS = 1000


class Context(NamedTuple):
    """What many results share: labels, and model, revision, weights, worker and device."""

    labels: tuple[str, ...]
    others: tuple[Any, ...]
    id: bytes
    record: bytes

    @property
    def name(self) -> str:
        """The name under which it is stored."""
        return f"{CONTEXT_NAME}{self.id.hex()}"


@lru_cache(MAX_CONTEXTS)
def make_context(labels: tuple[str, ...], others: tuple[Any, ...]) -> Context:
    """Return the context of sorted labels and of model, revision, weights, worker and device."""
    content = json.dumps([labels, *others]).encode()
    identity = blake2b(content, digest_size=8).digest()
    return Context(labels, others, identity, _record(CONTEXT, bytes(KEY_BYTES), content))


def parse_context(content: bytes) -> Context:
    """Return the context in a record's content."""
    labels, *others = json.loads(content)
    return make_context(tuple(labels), tuple(others))


def fingerprint_key(fingerprint: str) -> bytes:
    """Return the key of a fingerprint in records: its 128 bits. Other text than `fingerprint` returns is hashed."""
    try:
        key = bytes.fromhex(fingerprint)
    except ValueError:
        key = b""
    return key if len(key) == KEY_BYTES else sha1(fingerprint.encode(), usedforsecurity=False).digest()[:KEY_BYTES]


def pack(found: Classification) -> tuple[bytes, Context | None]:
    """Return a result as a record, and the context that it refers to; None if none."""
    others = (found.model, found.revision, found.weights, found.worker, found.device)
    known = make_context(tuple(sorted(found.scores)), others)
    try:
        steps = [int(found.scores[label] * STEPS + (ZERO + 0.5)) for label in known.labels]
        # Maybe less: `int` rounds towards 0. Other values that do not fit raise struct.error.
        if 0 in steps:
            raise ValueError("a score is below -0.31")
        queued = nan if found.queued_seconds is None else found.queued_seconds
        body = BODY.pack(known.id, found.classified_at, queued, known.labels.index(found.label))
        body += struct.pack(f">{len(steps)}H", *steps)
        key = bytes.fromhex(found.fingerprint)
        if key.hex() == found.fingerprint and len(key) == KEY_BYTES:
            return _record(PACKED, key, body), known
    except (struct.error, ValueError, OverflowError):
        pass
    return _record(JSON, fingerprint_key(found.fingerprint), found.model_dump_json().encode()), None


def pack_score(text: str) -> bytes:
    """Return the record of a post's score. text: the score, as JSON."""
    return _record(SCORE, bytes(KEY_BYTES), text.encode())


def _record(kind: int, key: bytes, content: bytes) -> bytes:
    return HEAD.pack(HEAD.size + len(content), kind, key) + content


class Record(NamedTuple):
    """A record of a post, or of a context."""

    kind: int
    key: bytes
    content: bytes


def split(records: bytes) -> Iterator[Record]:
    """Yield the records of an id."""
    at = 0
    while at < len(records):
        length, kind, key = HEAD.unpack_from(records, at)
        yield Record(kind, key, records[at + HEAD.size : at + length])
        at += length


def unpack(post_id: str, record: Record, context_of: Callable[[bytes], Context | None]) -> Classification | None:
    """Return the result in a post's record; None if its context is lost."""
    if record.kind == JSON:
        return Classification.model_validate_json(record.content)
    identity, classified_at, queued, best = BODY.unpack_from(record.content)
    if (known := context_of(identity)) is None:
        return None
    labels, (model, revision, weights, worker, device) = known.labels, known.others
    steps = struct.unpack_from(f">{len(labels)}H", record.content, BODY.size)
    order = sorted(range(len(labels)), key=steps.__getitem__, reverse=True)
    if order[0] != best:  # several labels have this score
        order.remove(best)
        order.insert(0, best)
    return Classification.model_construct(
        id=post_id,
        label=labels[best],
        scores={labels[number]: (steps[number] - ZERO) / STEPS for number in order},
        model=model,
        revision=revision,
        weights=weights,
        fingerprint=record.key.hex(),
        classified_at=classified_at,
        worker=worker,
        device=device,
        queued_seconds=None if isnan(queued) else queued,
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

    A killed Redis can lose the last second of its append-only file. A promoted replica can lack what its master had not
    yet replicated. A worker could then acknowledge a message whose result was lost. So each answer of the store's
    functions carries the server's identity: its `run_id`, and its `master_replid`, which changes when a replica is
    promoted. If it is the same, nothing was lost.

    identify: returns the server's identity. It and writes raise redis-py's errors.
    """

    def __init__(self, identify: Callable[[], str], clock: Callable[[], float] = time.monotonic) -> None:
        self._identify = identify
        self._clock = clock
        #: The server that has received all kept writes; "" if there may be none, None if there are no writes yet.
        self._server: str | None = None
        self._kept: deque[_Write] = deque()
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
            self._server = server if self._server in (None, server) else ""

    def keep(self, write: Callable[[], tuple[str, object]], size: int) -> None:
        """Keep a write for repetition whose results the server has. Does not use Redis."""
        with self._lock:
            self._kept.append(_Write(write, size, self._clock()))
            self._size += size
            while self._size > MAX_KEPT_BYTES:
                self._size -= self._kept.popleft().size

    def check(self) -> None:
        """Catch up if Redis may still lose a kept write."""
        if self._kept:
            self._catch_up(self._identify())

    def _catch_up(self, server: str) -> None:
        """Repeat kept writes if another server answers than the one that has them, and forget writes that are safe.

        While Redis is unreachable, nothing may be forgotten.
        """
        with self._lock:
            while self._server != server:
                self._forget(self._contact)
                # With a new time: the new server can lose them too.
                self._kept = deque(write._replace(at=self._clock()) for write in self._kept)
                expected, self._server = server, ""
                for write in self._kept:
                    server, _ = write.repeat()
                self._server = expected
            self._contact = self._clock()
            self._forget(self._contact)

    def _forget(self, now: float) -> None:
        while self._kept and now - self._kept[0].at > LOSABLE_S:
            self._size -= self._kept.popleft().size


class ResultsStore:
    """The store of results and dead letters in Redis. Thread-safe.

    Writes of the last seconds are repeated when Redis may have lost them (`Replay`).
    """

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._redis = redis
        self._settings = settings
        self._replay = Replay(lambda: str(call(redis, "identity")))
        #: Contexts that were read, by id.
        self._contexts: dict[bytes, Context] = {}

    def find(self, wanted: Sequence[tuple[str, str]]) -> list[Classification | None]:
        """Return the stored result of each (post id, fingerprint), or None. Raises redis.exceptions.RedisError."""
        if not wanted:
            return []
        ids = json.dumps([post_id for post_id, _ in wanted])
        keys = b"".join([fingerprint_key(fingerprint) for _, fingerprint in wanted])
        server, *records = call(self._redis, "find", ids, keys, raw=True)
        self._replay.note(server.decode())
        return [
            unpack(post_id, next(split(record)), self._context) if record else None
            for (post_id, _), record in zip(wanted, records, strict=True)
        ]

    def _records(self, name: str) -> bytes:
        """Return the records of a post or of a context."""
        records: bytes = call(self._redis, "get", name, raw=True)
        return records

    def _context(self, identity: bytes) -> Context | None:
        """Return the context with this id; None if it is lost."""
        if (known := self._contexts.get(identity)) is None:
            for record in split(self._records(CONTEXT_NAME + identity.hex())):
                if len(self._contexts) >= MAX_CONTEXTS:
                    self._contexts = {}
                known = self._contexts[identity] = parse_context(record.content)
        return known

    def write(self, results: Sequence[Result], dead: Sequence[DeadLetter] = ()) -> int:
        """Store a micro-batch's results and dead letters. Return the number of new results.

        Skips purged posts (shared/purge.py). Idempotent, except that counters can increase twice. Drops the oldest
        results and sent records if they exceed their memory; on a full Redis as well, before it raises. Raises
        redis.exceptions.RedisError.
        """
        if not results and not dead:
            return 0
        try:
            new, trimmed = self._replay.write(*self._write_call(results, dead[:DEAD_LETTERS_PER_CALL]))
        except ResponseError as fault:
            if is_full(fault):  # maybe because a bound was lowered
                call(self._redis, "bound", json.dumps(memory_limits(self._settings)))
            raise
        for start in range(DEAD_LETTERS_PER_CALL, len(dead), DEAD_LETTERS_PER_CALL):
            letters = dead[start : start + DEAD_LETTERS_PER_CALL]
            trimmed += self._replay.write(*self._write_call([], letters))[1]
        if trimmed:
            logger.warning(
                "trimmed the %d oldest dead letters: their stream is full. Retry or drop dead letters (`feedmill dead "
                "list`), or raise %sDEAD_LETTERS_LENGTH",
                trimmed,
                PREFIX,
            )
        return new

    def keep(self, found: Sequence[Result]) -> None:
        """Keep stored results that answered a message, to repeat their writes if Redis loses them."""
        if found:
            self._replay.keep(*self._write_call(found, ()))

    def catch_up(self) -> None:
        """Repeat writes that Redis may have lost. Raises redis.exceptions.RedisError."""
        self._replay.check()

    def _write_call(
        self, results: Sequence[Result], dead: Sequence[DeadLetter]
    ) -> tuple[Callable[[], tuple[str, tuple[int, int]]], int]:
        """Return a function that writes and may be called again, and the number of bytes that it sends.

        It returns the server's identity, and the numbers of new results and of trimmed dead letters.
        """
        records: list[bytes] = []
        texts: list[bytes] = []
        contexts: dict[str, bytes] = {}
        for post, found in results:
            record, context = pack(found)
            if context:
                contexts[context.name] = context.record
            records.append(record)
            # model_dump_json would decode the text, only for it to be encoded again.
            texts += found.__pydantic_serializer__.to_json(found), self._clipped(post)
        texts += [letter.model_dump_json().encode() for letter in dead]
        settings = self._settings
        given = {
            "ids": [post.id for post, _ in results],
            "labels": [found.label for _, found in results],
            "runs": [post.run or "" for post, _ in results],
            "contexts": list(contexts),
            # Posts sent without an id get "", which is not a valid id and cannot be purged.
            "letters": [((letter.id or "").strip(), dead_letter_digest(letter), letter.run or "") for letter in dead],
            "limits": memory_limits(settings),
            "ttl": settings.results_ttl,
            "length": settings.results_stream_length,
            "dead_length": settings.dead_letters_length,
            "run_ttl": settings.sent_ttl,
        }
        # Encoded once, for all repetitions, and to bytes: a Python string can take four bytes per character.
        arguments = [json.dumps(given).encode(), b"".join([*records, *contexts.values()]), *texts]
        write = partial(call, self._redis, "write", *arguments)
        return write, sum(map(len, arguments))

    def _clipped(self, post: Post) -> bytes:
        """Return a post as JSON for its stream entry, with its body truncated."""
        if len(post.body) > self._settings.stream_body:
            # model_copy skips validation, so a post whose body is truncated to nothing is valid.
            post = post.model_copy(update={"body": post.body[: self._settings.stream_body]})
        return post.__pydantic_serializer__.to_json(post, exclude_defaults=True)

    def get(self, post_id: str) -> list[Classification]:
        """Return a post's classifications that have not expired, oldest first: one per text, model and label set."""
        records = [record for record in split(self._records(post_id)) if record.kind != SCORE]
        classifications = [found for each in records if (found := unpack(post_id, each, self._context))]
        return sorted(classifications, key=lambda classification: classification.classified_at)

    def post_of(self, found: Classification) -> Post | None:
        """Return the post of a classification from its stream entry; None if the entry was trimmed or is not found.

        Looks at entries written around the time of the classification, because results do not refer to entries.
        """
        start = f"{max(0, int((found.classified_at - MAX_CLOCK_SKEW_S) * 1000))}-0"
        entries: Any = self._redis.xrange(RESULTS_STREAM, start, count=ENTRIES_SEARCHED)
        for _, fields in entries:
            if fields.get("id") == found.id and found.fingerprint in fields.get("classification", ""):
                return Post.model_construct(
                    **json.loads(fields["post"])
                )  # not valid if its body was truncated to nothing
        return None

    def refresh_scores(self, scores: Mapping[str, int], at: float) -> int:
        """Store the scores that posts had at the time `at`, in seconds since 1970. Return how many have results.

        Skips posts without results, and does not extend the lifetime of results. Idempotent. Raises
        redis.exceptions.RedisError.
        """
        refreshed = 0
        remaining = iter(scores.items())
        while batch := list(islice(remaining, SCORES_PER_CALL)):
            records = [(post_id, pack_score(json.dumps({"score": score, "at": at}))) for post_id, score in batch]
            refreshed += call(self._redis, "refresh", *(part for record in records for part in record))
        return refreshed

    def score(self, post_id: str) -> Score | None:
        """Return the latest score of a post with results; None if `refresh_scores` never stored one."""
        texts = [record.content for record in split(self._records(post_id)) if record.kind == SCORE]
        return Score(**json.loads(texts[0])) if texts else None

    def labels(self, hours: int) -> dict[int, dict[str, int]]:
        """Return the number of new results by label, for each of the last hours with any: hours since 1970 -> label."""
        now = int(time.time() // HOUR_S)
        wanted = range(now - hours + 1, now + 1)
        pipe: Any = self._redis.pipeline(transaction=False)
        for hour in wanted:
            pipe.hgetall(f"{LABELS}{hour}")
        found = zip(wanted, pipe.execute(), strict=True)
        return {hour: {label: int(count) for label, count in counts.items()} for hour, counts in found if counts}

    def counters(self) -> Counters:
        """Return the counters since the store was created."""
        found: Any = self._redis.hgetall(COUNTERS)
        return Counters(**{name: int(found.get(name, 0)) for name in Counters._fields})


def memory_limits(settings: Settings) -> dict[str, int]:
    """Return the bytes that the results with their stream, the stream, and sent records may take."""
    results = settings.results_memory
    return {"results": results, "stream": int(STREAM_SHARE * results), "sent": settings.sent_memory}


def stored_ids(redis: Redis) -> Iterator[str]:
    """Yield the ids of posts with results. Ids can be repeated. Raises redis.exceptions.RedisError."""
    untyped: Any = redis
    for generation in untyped.zrange(STORED, 0, -1):
        names = (name.decode() for name, _ in scan_hash(redis, f"{STORED}:{generation}", IDS_PER_CALL))
        yield from (name for name in names if not name.startswith(CONTEXT_NAME))


def scan_hash(redis: Any, key: str, count: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the fields of a hash and their values, about `count` per call. Some can be repeated."""
    cursor: Any = None
    while cursor != 0:
        cursor, fields = redis.execute_command("HSCAN", key, cursor or 0, "COUNT", count, **{NEVER_DECODE: True})
        cursor = int(cursor)
        yield from fields.items()


def newest_first(
    redis: Any, stream: str, since: str = "-", until: str = "+", page: int = PAGE_SIZE
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (id, fields) of a stream's entries, newest first, holding `page` of them in memory.

    since, until: the oldest and the newest entry id to yield. Raises redis.exceptions.RedisError.
    """
    while entries := redis.xrevrange(stream, until, since, count=page):
        yield from entries
        until = f"({entries[-1][0]}"


def dead_letter_digest(letter: DeadLetter) -> str:
    """Return a digest of the post, its options and its queue, so that repeated failures of one request are equal."""
    if letter.post is None:  # no readable post: compare the message instead
        return digest(letter.id, letter.payload, letter.message)
    elsewhere = (letter.queue,) if letter.queue not in (None, DEFAULT_QUEUE) else ()
    return digest(letter.id, letter.post, letter.options, *elsewhere)
