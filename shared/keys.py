"""Every key in Redis, in one table: name, type, who writes it, and what bounds it.

A test runs the whole system and fails when a key appears that is not here, or that nothing bounds.
"""

from fnmatch import fnmatchcase
from typing import NamedTuple

#: Stream of results, newest last; one entry for each classification that was new.
RESULTS_STREAM = "feedmill:results"
#: Stream of dead letters, newest last; one entry for each post that could not be classified, and for each message in
#: which no posts could be made out.
DEAD_LETTERS = "feedmill:dead"
#: Counters since the store was made: `stored`, `repeated` (already there), `failed` (posts without a label), `gone`
#: (purged before they could be stored), `answered` (found there), `trimmed` and `dead_trimmed` (results and dead
#: letters cut from their stream's old end).
COUNTERS = "feedmill:counters"
#: List of what lay in a queue and is no message at all, newest first; raw bytes.
UNDECODABLE = "feedmill:undecodable"
#: Hash: consumer group of the stream of results -> its place there, to tell what was trimmed before the group read it.
GROUPS = "feedmill:groups"
#: Hash: worker process and lane -> which posts are in the forward pass that it is at, as JSON.
PASSES = "feedmill:passes"
#: Hash: queue -> the model that workers serve it with, and when one said so last, as JSON.
MODELS = "feedmill:models"
#: Hash: worker's node name -> when it was alive last, by Redis' clock, and its process, as JSON.
WORKERS = "feedmill:workers"
#: Hash: queue -> the model that it is to be served with, by `feedmill deploy`, as JSON.
WANTED = "feedmill:wanted"
#: Celery's results of messages that an application waits for, each with its outcomes: JSON, of tasks that are ours.
CELERY_RESULTS = "celery-task-meta-*"

#: Hash of the Reddit daemon: subreddit -> the time until which everything of it is dealt with.
REDDIT_WATERMARKS = "feedmill:reddit:watermarks"
#: Hash: subreddit -> when the oldest post was created that the daemon promised to send.
REDDIT_BEGINNINGS = "feedmill:reddit:beginnings"
#: Hash: topic -> when its listings were last walked to their end.
REDDIT_DEEP = "feedmill:reddit:deep"
#: Hash: subreddit and beginning -> a gap, posts that were out of reach, as JSON.
REDDIT_GAPS = "feedmill:reddit:gaps"
#: Hash: subreddit -> why it is not read, and who stands in for it, as JSON.
REDDIT_REPLACED = "feedmill:reddit:replaced"
#: Sorted set of posts to look at again, by when.
REDDIT_LOOKS = "feedmill:reddit:looks"
#: String, JSON: how the daemon fares.
REDDIT_STATUS = "feedmill:reddit:status"


def reddit_known_key(subreddit: str) -> str:
    """Sorted set of a subreddit's posts that are dealt with: fullname, by when it was created."""
    return f"feedmill:reddit:known:{subreddit}"


def result_key(post_id: str) -> str:
    """Hash of a post's results: fingerprint -> Classification as JSON; and `score` -> its latest score as JSON."""
    return f"feedmill:result:{post_id}"


def suspect_key(message: str) -> str:
    """Hash: index of a post -> in how many passes of vanished workers it was. message: digest of its id."""
    return f"feedmill:suspect:{message}"


def labels_key(hour: int) -> str:
    """Hash of what was stored in one hour, counted since 1970: label -> new results."""
    return f"feedmill:labels:{hour}"


def sent_key(post_id: str) -> str:
    """Hash of what was already sent of a post: digest of text and options -> when, in seconds since 1970."""
    return f"feedmill:sent:{post_id}"


def tombstone_key(post_id: str) -> str:
    """Of a post that was purged: when, in seconds since 1970, and nothing else. Nothing is sent or stored of it."""
    return f"feedmill:gone:{post_id}"


def buried_key(letter: str) -> str:
    """Which entry of their stream a dead letter is. letter: digest of what was sent."""
    return f"feedmill:buried:{letter}"


def position_key(file: str) -> str:
    """Where the reading of a file stopped: a number of records. file: digest of which, and of how it is read."""
    return f"feedmill:position:{file}"


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
    Key(COUNTERS, "hash", "shared/results.py", "seven fields"),
    Key(GROUPS, "hash", "shared/readers.py", "one field a group; a new group's first removes stale ones"),
    Key(PASSES, "hash", "workers/suspects.py", "a field a lane of a worker process, KEPT at most; ttl NOTE_TTL_S"),
    Key(MODELS, "hash", "shared/serving.py", "a field a queue, MOST at most; dropped after KEPT"),
    Key(WANTED, "hash", "shared/serving.py", "a field a queue, MOST at most"),
    Key(
        WORKERS,
        "hash",
        "shared/serving.py",
        "a field a worker; dropped after EXPECTED_S of silence; ttl EXPECTED_S",
    ),
    Key("feedmill:suspect:*", "hash", "workers/suspects.py", "ttl NOTE_TTL_S; deleted when the message has ended"),
    Key("feedmill:result:*", "hash", "shared/results.py", "ttl results_ttl"),
    Key("feedmill:labels:*", "hash", "shared/results.py", "LABELS_COUNTED fields; ttl label_counts_ttl"),
    Key("feedmill:sent:*", "hash", "producers/push.py", "ttl sent_ttl"),
    Key(REDDIT_WATERMARKS, "hash", "producers/reddit/state.py", "one field a subreddit of the topics file"),
    Key(REDDIT_BEGINNINGS, "hash", "producers/reddit/state.py", "one field a subreddit of the topics file"),
    Key(REDDIT_DEEP, "hash", "producers/reddit/state.py", "one field a topic of the topics file"),
    Key(REDDIT_GAPS, "hash", "producers/reddit/state.py", "MAX_GAPS fields"),
    Key(REDDIT_REPLACED, "hash", "producers/reddit/state.py", "one field a subreddit of the topics file"),
    Key(REDDIT_LOOKS, "zset", "producers/reddit/state.py", "ttl LOOKS_TTL; one member a post, until its last look"),
    Key(REDDIT_STATUS, "string", "producers/reddit/state.py", "ttl STATUS_TTL"),
    Key("feedmill:reddit:known:*", "zset", "producers/reddit/state.py", "KNOWN members; ttl KNOWN_TTL"),
    Key("feedmill:position:*", "string", "producers/positions.py", "ttl POSITION_TTL; deleted at the file's end"),
    Key("feedmill:buried:*", "string", "shared/results.py", "ttl results_ttl"),
    Key("feedmill:gone:*", "string", "shared/purge.py", "ttl tombstone_ttl"),
    Key(CELERY_RESULTS, "string", "Celery, for messages whose result is kept", "ttl celery_result_ttl"),
    Key("celery-taskset-meta-*", "any", "Celery, groups and chords", "ttl celery_result_ttl"),
    Key("feedmill:reserved", "hash", "shared/leases.py, what workers hold", "window_rows of each worker"),
    Key("feedmill:reserved_index", "zset", "shared/leases.py, their leases", "window_rows of each worker"),
    Key(UNDECODABLE, "list", "shared/leases.py, what is no message", "undecodable_limit entries"),
    Key("_kombu.binding.*", "set", "kombu, which queue hears which exchange", "one member a queue and worker"),
    Key("_kombu.binding_permanent.*", "set", "kombu, bindings without expiry", "one member a queue"),
    Key("_kombu.binding_deadlines*", "any", "kombu, when bindings expire", "one member a binding"),
    Key("*.reply.celery.pidbox*", "list", "Celery, answers to inspect", "expires with its reader"),
    Key("*.celery.pidbox*", "list", "Celery, remote control", "expires with its worker"),
    Key("celeryev.*", "list", "Celery, event readers such as Flower", "expires with its reader"),
    Key(
        "training*",
        "list",
        "applications, the trainings that they ask for",
        "a message a training that was asked for by hand",
    ),
    Key("feedmill", "list", "producers, the waiting messages", "queue_limit messages"),
    Key("feedmill\x06\x16?", "list", "producers, those of priority 3, 6 and 9", "queue_limit messages"),
    Key("feedmill-*", "list", "producers, the same for another model's queue", "queue_limit messages"),
)


def find(name: str) -> Key | None:
    """The row of the table that the key `name` belongs to."""
    return next((key for key in TABLE if fnmatchcase(name, key.pattern)), None)
