"""Names of keys in Redis. docs/reference/keys.md lists all of them with their types and bounds."""

#: Results, newest last; one entry per new classification.
RESULTS_STREAM = "feedmill:results"
#: Dead letters, newest last; one entry per post that could not be classified, and per message
#: whose posts could not be read.
DEAD_LETTERS = "feedmill:dead"
#: Counters since the store was created: `stored`, `repeated`, `failed`, `gone`, `answered`,
#: `trimmed`, `dead_trimmed`, `dropped` and `sent_dropped`, as in the metrics
#: `feedmill_results_*_total`.
COUNTERS = "feedmill:counters"
#: Table of marks, the records of sent posts (producers/push.py): its generations, scored by when
#: they end, in seconds since 1970. `feedmill:sent-marks:NUMBER` is one: post id -> marks.
MARKS = "feedmill:sent-marks"
#: Table of stored results (shared/results.py). `feedmill:stored:NUMBER` is a generation: post id
#: -> records; and the number of results.
STORED = "feedmill:stored"
#: Runs, scored by the time of their latest activity, in seconds since 1970.
RUNS = "feedmill:runs"
#: Recent purges, newest last: the posts' ids or the run, and the time up to which their results
#: are gone.
PURGES = "feedmill:purges"
#: Run -> the address that learns when it has finished, and the attempts, as JSON.
WEBHOOKS = "feedmill:webhooks"
#: Queue -> the model that its workers serve, and when a worker last announced it, as JSON.
MODELS = "feedmill:models"
#: Worker's node name -> when it last registered, by Redis' clock.
WORKERS = "feedmill:workers"
#: Address of a Flower -> the time of its latest report, by Redis' clock, and the seconds for which
#: it has heard nothing.
FLOWERS = "feedmill:flowers"
#: Queue -> the model requested with `feedmill deploy`, as JSON.
REQUESTED_MODELS = "feedmill:wanted"

#: Topic -> its subreddits that are not read, the reasons, and their substitutes, as JSON.
REDDIT_SUBSTITUTES = "feedmill:reddit:replaced"
#: Topic -> the time of the latest check of its subreddits, and those that are read, as JSON.
REDDIT_CHECKED = "feedmill:reddit:checked"

#: Live source -> the latest status of its daemon, with the time by Redis' clock, as JSON.
LIVE_STATUS = "feedmill:live:status"
#: Source, subreddit and start of a gap -> the gap: a period whose posts could not be read, as
#: JSON.
LIVE_GAPS = "feedmill:live:gaps"

# Beginnings of keys, each followed by a name.

#: Subreddit, in lower case -> its state: `beginning`, `watermark`, `newest`, `full` (seconds since
#: 1970).
REDDIT_TRACK = "feedmill:reddit:track:"
#: Feed -> its state, as JSON: its entries that were read, and when it is read again.
FEED_STATE = "feedmill:feeds:"
#: Live source -> the position up to which everything is sent: `cursor`, and its time (`at`,
#: seconds since 1970).
LIVE_POSITION = "feedmill:live:position:"
#: Live source -> ids of posts that were deleted there and wait for the next purge.
LIVE_DELETED = "feedmill:live:deleted:"
#: Live source -> sent posts to look up again, scored by due time, in seconds since 1970.
LIVE_RECHECKS = "feedmill:live:rechecks:"
#: Live source -> beginnings of the ids of deleted accounts' posts, scored by the time of deletion
#: (seconds since 1970).
LIVE_AUTHORS = "feedmill:live:authors:"
#: Live source -> ids of posts that were edited there while a gap was open, scored by the time of
#: the latest edit (seconds since 1970).
LIVE_EDITED = "feedmill:live:edited:"
#: Run -> its progress: `sent`, `stored`, `failed`; `began`, `latest`, `used` (ms); kept `columns`
#: and `labels`.
RUN = "feedmill:run:"
#: Hours since 1970 -> label -> number of new results in that hour.
LABELS = "feedmill:labels:"
#: Purged post -> its tombstone: the time, in seconds since 1970. The post is not sent or stored
#: while it exists.
TOMBSTONE = "feedmill:gone:"
#: Digest of what was sent -> stream entry id of its dead letter.
DEAD_LETTER = "feedmill:buried:"
