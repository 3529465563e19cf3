"""Every key in Redis, in one table: name, type, who writes it, and what bounds it.

A test runs the whole system and fails when a key appears that is not here, or that nothing bounds.
"""

from fnmatch import fnmatchcase
from typing import NamedTuple

#: Stream of results, newest last; one entry for each classification that was new.
RESULTS_STREAM = "feedmill:results"
#: Stream of dead letters, newest last; one entry for each post that could not be classified.
DEAD_LETTERS = "feedmill:dead"
#: Counters since the store was made: `stored`, `repeated` (already there), `failed` (posts without a label).
COUNTERS = "feedmill:counters"


def result_key(post_id: str) -> str:
    """Hash of a post's results: fingerprint -> Classification as JSON."""
    return f"feedmill:result:{post_id}"


def sent_key(post_id: str) -> str:
    """Hash of what was already sent of a post: digest of text and options -> when, in seconds since 1970."""
    return f"feedmill:sent:{post_id}"


def tombstone_key(post_id: str) -> str:
    """Of a post that was purged: when, in seconds since 1970, and nothing else. Nothing is sent or stored of it."""
    return f"feedmill:gone:{post_id}"


class Key(NamedTuple):
    """One row of the table. `bound` says why the key cannot grow, or stay, for ever."""

    pattern: str
    type: str
    writer: str
    bound: str


#: First match counts. The patterns of Celery and kombu hold for their versions in constraints.txt.
TABLE: tuple[Key, ...] = (
    Key(RESULTS_STREAM, "stream", "shared/results.py", "trimmed to results_stream_length"),
    Key(DEAD_LETTERS, "stream", "shared/results.py", "trimmed to dead_letters_length"),
    Key(COUNTERS, "hash", "shared/results.py", "three fields"),
    Key("feedmill:result:*", "hash", "shared/results.py", "ttl results_ttl"),
    Key("feedmill:sent:*", "hash", "producers/push.py", "ttl sent_ttl"),
    Key("feedmill:gone:*", "string", "shared/purge.py", "ttl tombstone_ttl"),
    Key("celery-task-meta-*", "string", "Celery, for messages whose result is kept", "ttl celery_result_ttl"),
    Key("celery-taskset-meta-*", "any", "Celery, groups and chords", "ttl celery_result_ttl"),
    Key("unacked", "hash", "kombu, what workers hold", "window_rows of each worker"),
    Key("unacked_index", "zset", "kombu, when they took it", "window_rows of each worker"),
    Key("unacked_mutex", "string", "kombu, one sweep at a time", "ttl"),
    Key("_kombu.binding.*", "set", "kombu, which queue hears which exchange", "one member a queue and worker"),
    Key("_kombu.binding_permanent.*", "set", "kombu, bindings without expiry", "one member a queue"),
    Key("_kombu.binding_deadlines*", "any", "kombu, when bindings expire", "one member a binding"),
    Key("*.reply.celery.pidbox*", "list", "Celery, answers to inspect", "expires with its reader"),
    Key("*.celery.pidbox*", "list", "Celery, remote control", "expires with its worker"),
    Key("celeryev.*", "list", "Celery, event readers such as Flower", "expires with its reader"),
    Key("feedmill", "list", "producers, the waiting messages", "queue_limit messages"),
    Key("feedmill\x06\x16?", "list", "producers, those of priority 3, 6 and 9", "queue_limit messages"),
)


def find(name: str) -> Key | None:
    """The row of the table that the key `name` belongs to."""
    return next((key for key in TABLE if fnmatchcase(name, key.pattern)), None)
