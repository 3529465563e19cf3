"""Every Redis key: its name, type, writer and bound.

A test runs the whole system and fails if it finds a key that is missing from `TABLE` or can grow without bound.
"""

from fnmatch import fnmatchcase
from typing import NamedTuple

#: Results, newest last; one entry per new classification.
RESULTS_STREAM = "feedmill:results"
#: Dead letters, newest last; one entry per post that could not be classified, and per message whose posts could not be
#: read.
DEAD_LETTERS = "feedmill:dead"
#: Counters since the store was created: `stored`, `repeated`, `failed`, `gone`, `answered`, `trimmed`, `dead_trimmed`,
#: `dropped` and `sent_dropped`, as in the metrics `feedmill_results_*_total`.
COUNTERS = "feedmill:counters"
#: Table of marks, the records of sent posts (shared/scripts/queue.py): its generations, scored by when they end, in
#: seconds since 1970. `feedmill:sent-marks:NUMBER` is one: post id -> marks.
MARKS = "feedmill:sent-marks"
#: Table of stored results (shared/result_records.py). `feedmill:stored:NUMBER` is a generation: post id -> records.
STORED = "feedmill:stored"
#: Runs, scored by the time of their latest activity, in seconds since 1970.
RUNS = "feedmill:runs"
#: Queue -> number of messages that `feedmill purge --queue` removed. A change makes positions in files void.
CLEARS = "feedmill:clears"
#: Recent purges, newest last: the posts' ids or the run, and the time up to which their results are gone.
PURGES = "feedmill:purges"
#: Consumer group of the results stream -> its position, used to detect entries that it missed.
GROUPS = "feedmill:groups"
#: Worker process and lane -> the posts in its current forward pass, as JSON.
PASSES = "feedmill:passes"
#: Queue -> the model that its workers serve, and when a worker last announced it, as JSON.
MODELS = "feedmill:models"
#: Worker's node name -> when it last registered, by Redis' clock.
WORKERS = "feedmill:workers"
#: Queue -> the model requested with `feedmill deploy`, as JSON.
REQUESTED_MODELS = "feedmill:wanted"
#: Task results that an application waits for. Feedmill's hold one outcome per post, as JSON.
CELERY_RESULTS = "celery-task-meta-*"

#: Topic -> its subreddits that are not read, the reasons, and their substitutes, as JSON.
REDDIT_SUBSTITUTES = "feedmill:reddit:replaced"

#: Live source -> the latest status of its daemon, with the time by Redis' clock, as JSON.
LIVE_STATUS = "feedmill:live:status"
#: Source, subreddit and start of a gap -> the gap: a period whose posts could not be read, as JSON.
LIVE_GAPS = "feedmill:live:gaps"


def reddit_track_key(subreddit: str) -> str:
    """State of a subreddit: `beginning`, `watermark`, `newest`, `full` (seconds since 1970)."""
    return f"feedmill:reddit:track:{subreddit}"


def live_position_key(source: str) -> str:
    """Position in a live source up to which everything is sent: `cursor`, and its time (`at`, seconds since 1970)."""
    return f"feedmill:live:position:{source}"


def live_deleted_key(source: str) -> str:
    """Ids of posts that were deleted at the source and wait for the next purge."""
    return f"feedmill:live:deleted:{source}"


def live_rechecks_key(source: str) -> str:
    """Sent posts to look up again, scored by due time, in seconds since 1970."""
    return f"feedmill:live:rechecks:{source}"


def live_authors_key(source: str) -> str:
    """Beginnings of the ids of deleted accounts' posts, scored by the time of deletion, in seconds since 1970."""
    return f"feedmill:live:authors:{source}"


def run_key(run: str) -> str:
    """Progress of a run: `sent`, `stored`, `failed`; `began`, `latest`, `used` (ms); kept `columns`. run: its name."""
    return f"feedmill:run:{run}"


def poison_key(message: str) -> str:
    """Index of a post -> number of forward passes in which its worker vanished. message: digest of the message's id."""
    return f"feedmill:suspect:{message}"


def labels_key(hour: int | str) -> str:
    """Label -> number of new results in one hour. hour: hours since 1970."""
    return f"feedmill:labels:{hour}"


def tombstone_key(post_id: str) -> str:
    """Tombstone of a purged post: the time, in seconds since 1970. The post is not sent or stored while it exists."""
    return f"feedmill:gone:{post_id}"


def dead_letter_key(letter: str) -> str:
    """Stream entry id of a dead letter. letter: digest of what was sent."""
    return f"feedmill:buried:{letter}"


def position_key(file: str) -> str:
    """Number of records read from a file so far. file: digest of the file and of the reading options."""
    return f"feedmill:position:{file}"


class Key(NamedTuple):
    """A row of the table. `bound` says what limits the key's size or lifetime."""

    pattern: str
    type: str
    writer: str
    bound: str


#: The first matching pattern applies. Patterns for Celery's and kombu's keys match the versions in constraints.txt.
TABLE: tuple[Key, ...] = (
    Key(RESULTS_STREAM, "stream", "shared/results.py", "trimmed to results_stream_length"),
    Key(DEAD_LETTERS, "stream", "shared/results.py", "trimmed to dead_letters_length"),
    Key(COUNTERS, "hash", "shared/results.py", "nine fields"),
    Key(GROUPS, "hash", "reading/readers.py", "one field per group; stale ones go with the next new group"),
    Key(PASSES, "hash", "workers/pipeline/poison.py", "one field per lane of a worker process; ttl NOTE_TTL_S"),
    Key(MODELS, "hash", "shared/model_routing.py", "MAX_QUEUES fields, each dropped after QUEUE_TTL_S"),
    Key(REQUESTED_MODELS, "hash", "shared/model_routing.py", "one field per queue, at most MAX_QUEUES"),
    Key(WORKERS, "hash", "shared/model_routing.py", "one field per worker; ttl EXPECTED_S"),
    Key("feedmill:suspect:*", "hash", "workers/pipeline/poison.py", "ttl NOTE_TTL_S"),
    Key(STORED, "zset", "shared/results.py", "64 members; ttl results_ttl and an eighth"),
    Key("feedmill:stored:*", "hash", "shared/results.py", "an eighth of results_memory; ttl results_ttl and a quarter"),
    Key("feedmill:run:*", "hash", "shared/runs.py", "seven fields; ttl sent_ttl"),
    Key(CLEARS, "hash", "producers/clear.py", "one field per queue"),
    Key(RUNS, "zset", "shared/runs.py", "MAX_RUNS members; ttl sent_ttl"),
    Key("feedmill:labels:*", "hash", "shared/results.py", "1,000 fields; ttl 30 days"),
    Key(MARKS, "zset", "producers/push.py", "64 members; ttl sent_ttl and an eighth"),
    Key("feedmill:sent-marks:*", "hash", "producers/push.py", "1/16 of results_memory; ttl sent_ttl and a quarter"),
    Key(REDDIT_SUBSTITUTES, "hash", "producers/reddit/topics.py", "one field per topic of the topics file"),
    Key("feedmill:reddit:track:*", "hash", "producers/reddit/source.py", "four fields; ttl TRACK_TTL"),
    Key(LIVE_STATUS, "hash", "producers/live/state.py", "one field per source"),
    Key(LIVE_GAPS, "hash", "producers/live/state.py", "MAX_GAPS fields"),
    Key("feedmill:live:position:*", "hash", "producers/live/state.py", "two fields"),
    Key("feedmill:live:deleted:*", "set", "producers/live/purges.py", "emptied every PURGE_INTERVAL_S seconds"),
    Key("feedmill:live:rechecks:*", "zset", "producers/live/rechecks.py", "one member per post; ttl RECHECKS_TTL"),
    Key("feedmill:live:authors:*", "zset", "producers/live/purges.py", "one member per account, for AUTHOR_KEPT_S"),
    Key("feedmill:position:*", "string", "feedmill/cli/enqueue.py", "ttl POSITION_TTL; deleted at the end of the file"),
    Key("feedmill:buried:*", "string", "shared/results.py", "ttl results_ttl"),
    Key("feedmill:gone:*", "string", "shared/purge.py", "ttl TOMBSTONE_TTL_S"),
    Key(PURGES, "stream", "shared/purge.py", "MAX_PURGES entries; ttl TOMBSTONE_TTL_S"),
    Key(CELERY_RESULTS, "string", "Celery, results of messages sent with a result", "ttl an hour"),
    Key("celery-taskset-meta-*", "any", "Celery, state of groups and chords", "ttl an hour"),
    Key("feedmill:reserved", "hash", "workers/transport/leases.py, messages under leases", "window_rows per worker"),
    Key("feedmill:reserved_index", "zset", "workers/transport/leases.py, ends of leases", "window_rows per worker"),
    Key("_kombu.binding.*", "set", "kombu, queues bound to each exchange", "one member per queue and worker"),
    Key("_kombu.binding_permanent.*", "set", "kombu, bindings that do not expire", "one member per queue"),
    Key("_kombu.binding_deadlines*", "any", "kombu, expiry of bindings", "one member per binding"),
    Key("*.reply.celery.pidbox*", "list", "Celery, replies to inspect commands", "expires with its reader"),
    Key("*.celery.pidbox*", "list", "Celery, remote control commands", "expires with its worker"),
    Key("celeryev.*", "list", "Celery, events for readers such as Flower", "expires with its reader"),
    Key("feedmill", "list", "producers, waiting messages of priority 0 to 2", "queue_limit messages"),
    Key("feedmill\x06\x16?", "list", "producers, waiting messages of priority 3 to 9", "queue_limit messages"),
    Key("feedmill-*", "list", "producers, waiting messages for another model's queue", "queue_limit messages"),
)


def find(name: str) -> Key | None:
    """Return the table's row that matches the key `name`, or None."""
    return next((key for key in TABLE if fnmatchcase(name, key.pattern)), None)
