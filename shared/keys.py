"""Names of keys in Redis. docs/reference/keys.md lists all of them with their types and bounds."""

#: Results, newest last; one entry per new classification.
RESULTS_STREAM = "feedmill:results"
#: Dead letters, newest last; one entry per post that could not be classified, and per message whose posts could not be
#: read.
DEAD_LETTERS = "feedmill:dead"
#: Counters since the store was created: `stored`, `repeated`, `failed`, `gone`, `answered`, `trimmed`, `dead_trimmed`,
#: `dropped` and `sent_dropped`, as in the metrics `feedmill_results_*_total`.
COUNTERS = "feedmill:counters"
#: Table of marks, the records of sent posts (producers/push.py): its generations, scored by when they end, in
#: seconds since 1970. `feedmill:sent-marks:NUMBER` is one: post id -> marks.
MARKS = "feedmill:sent-marks"
#: Table of stored results (shared/result_records.py). `feedmill:stored:NUMBER` is a generation: post id -> records.
STORED = "feedmill:stored"
#: Runs, scored by the time of their latest activity, in seconds since 1970.
RUNS = "feedmill:runs"
#: Recent purges, newest last: the posts' ids or the run, and the time up to which their results are gone.
PURGES = "feedmill:purges"
#: Queue -> the model that its workers serve, and when a worker last announced it, as JSON.
MODELS = "feedmill:models"
#: Worker's node name -> when it last registered, by Redis' clock.
WORKERS = "feedmill:workers"
#: Queue -> the model requested with `feedmill deploy`, as JSON.
REQUESTED_MODELS = "feedmill:wanted"

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


def labels_key(hour: int | str) -> str:
    """Label -> number of new results in one hour. hour: hours since 1970."""
    return f"feedmill:labels:{hour}"


def tombstone_key(post_id: str) -> str:
    """Tombstone of a purged post: the time, in seconds since 1970. The post is not sent or stored while it exists."""
    return f"feedmill:gone:{post_id}"


def dead_letter_key(letter: str) -> str:
    """Stream entry id of a dead letter. letter: digest of what was sent."""
    return f"feedmill:buried:{letter}"
