"""Functions for the queue: look up and mark sent posts, and find known ids."""

import json
from collections.abc import Sequence
from hashlib import sha1
from typing import NamedTuple

from redis import Redis

from feedmill.shared.scripts import call

#: Status of a post in `lookup`; 0 if it is unknown.
SENT, PURGED = 1, 2
#: Bytes of an id's digest: its bucket (shared/scripts/tables.lua), and the start of its marks.
BUCKET_BYTES, ID_BYTES = 2, 4
#: Bytes of the other parts of a mark: digests of the run and of what was sent. The probability that a new post is taken
#: for sent is 2**-48 (4e-15) for each mark of its id, and 2**-112 for each mark of another id.
RUN_BYTES, DIGEST_BYTES = 2, 6
MARK_BYTES = ID_BYTES + RUN_BYTES + DIGEST_BYTES
#: Ids per call of `known`. Redis is blocked during a call.
IDS_PER_CALL = 500


def _digest(text: str, size: int) -> bytes:
    return sha1(text.encode(), usedforsecurity=False).digest()[:size]


class Mark(NamedTuple):
    """Record of a sent post: digests of its id, of its run, and of its text and where it was sent."""

    post_id: str
    #: Its bucket, and what Redis stores there.
    content: bytes

    @classmethod
    def of(cls, post_id: str, field: str, run: str = "") -> "Mark":
        """Return a mark. field: digest of what was sent, in hex. run: the post's run; "" for none."""
        start = _digest(post_id, BUCKET_BYTES + ID_BYTES) + _digest(run, RUN_BYTES)
        return cls(post_id, start + bytes.fromhex(field[: 2 * DIGEST_BYTES]))


def lookup(redis: Redis, marks: Sequence[Mark]) -> list[int]:
    """Return the status of each post: 0, SENT or PURGED."""
    return list(map(int, call(redis, "lookup", *_packed(marks)))) if marks else []


def mark(redis: Redis, marks: Sequence[Mark], ttl: int, memory: int, run: str = "") -> None:
    """Mark posts as sent, except posts that were purged meanwhile, and count new marks in the progress of their run.

    ttl: seconds for which a mark is kept; at most an eighth longer. memory: bytes of all marks. run: the posts' run; ""
    for none.
    """
    if marks:
        call(redis, "mark", *_packed(marks), ttl, memory, run)


def _packed(marks: Sequence[Mark]) -> tuple[str, bytes]:
    """Return the ids as JSON, and what Redis stores."""
    return json.dumps([mark.post_id for mark in marks]), b"".join([mark.content for mark in marks])


def known_ids(redis: Redis, ids: Sequence[str]) -> list[str]:
    """Return the ids of posts that were sent or have results."""
    found: list[str] = []
    for start in range(0, len(ids), IDS_PER_CALL):
        batch = ids[start : start + IDS_PER_CALL]
        digits = call(redis, "known", json.dumps(batch))
        found += [post_id for post_id, digit in zip(batch, digits, strict=True) if digit == "1"]
    return found
