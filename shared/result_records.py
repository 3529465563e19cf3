"""Pack results into records of about 100 bytes, and unpack them.

What many results share (labels, model, worker, device) is their context. It is stored once, under a digest of its
content, in each generation of the table (shared/scripts/tables.lua). Scores are stored in 16 bits, in steps of 0.00002,
so they differ from the computed ones by at most 1e-5. A result that does not fit this form, with scores below -0.31 or
above 1, is stored as JSON.
"""

import json
import struct
from collections.abc import Callable, Iterator
from hashlib import blake2b, sha1
from math import isnan, nan
from typing import Any, Final, NamedTuple

from feedmill.shared.messages import Classification

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
#: Maximum contexts kept in memory. Applications can send any number of label sets.
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


class Contexts:
    """Contexts that this process has met. Thread-safe."""

    def __init__(self) -> None:
        self._by_content: dict[tuple[Any, ...], Context] = {}
        self._by_id: dict[bytes, Context] = {}

    def of(self, found: Classification) -> Context:
        """Return the context of a result."""
        labels = tuple(sorted(found.scores))
        others = (found.model, found.revision, found.weights, found.worker, found.device)
        return self._by_content.get((labels, others)) or self._add(labels, others)

    def get(self, identity: bytes) -> Context | None:
        return self._by_id.get(identity)

    def parse(self, content: bytes) -> Context:
        """Return the context in a record's content, and keep it."""
        labels, *others = json.loads(content)
        return self._add(tuple(labels), tuple(others))

    def _add(self, labels: tuple[str, ...], others: tuple[Any, ...]) -> Context:
        content = json.dumps([labels, *others]).encode()
        identity = blake2b(content, digest_size=8).digest()
        context = Context(labels, others, identity, _record(CONTEXT, bytes(KEY_BYTES), content))
        if len(self._by_id) >= MAX_CONTEXTS:
            self._by_id, self._by_content = {}, {}
        self._by_id[context.id] = self._by_content[labels, others] = context
        return context


def fingerprint_key(fingerprint: str) -> bytes:
    """Return the key of a fingerprint in records: its 128 bits. Other text than `fingerprint` returns is hashed."""
    try:
        key = bytes.fromhex(fingerprint)
    except ValueError:
        key = b""
    return key if len(key) == KEY_BYTES else sha1(fingerprint.encode(), usedforsecurity=False).digest()[:KEY_BYTES]


def pack(found: Classification, contexts: Contexts) -> tuple[bytes, Context | None]:
    """Return a result as a record, and the context that it refers to; None if none."""
    known = contexts.of(found)
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
