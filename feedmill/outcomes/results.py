"""Read results from Python: `feedmill.results`."""

from collections.abc import Generator
from contextlib import closing
from datetime import datetime

from feedmill.outcomes.followers import ResultFilter, items, open_reader
from feedmill.outcomes.rows import Missed, check_run
from feedmill.shared.broker import connect, wait_while_starting
from feedmill.shared.messages import in_utc, parse_run
from feedmill.shared.redis_errors import user_errors
from feedmill.shared.results import Result
from feedmill.shared.settings import load_arguments


def results(
    redis_url: str | None = None,
    *,
    group: str | None = None,
    consumer: str | None = None,
    follow: bool = True,
    label: str | None = None,
    min_score: float | None = None,
    subreddit: str | None = None,
    run: str | None = None,
    since: float | datetime | None = None,
    claim_after: float = 60.0,
) -> Generator[Result | Missed]:
    """Yield classification results from Redis as they arrive.

    The generator connects when the first item is requested. After a lost connection it reconnects
    and continues at the same place.

    Args:
        redis_url: URL of Redis, such as `redis://:password@host:6379/0`. Default:
            FEEDMILL_REDIS_URL, else the running `feedmill up`, else localhost.
        group: Name of a consumer group. The readers of a group share its results, and the group
            continues where it stopped. Each result is delivered at least once; requesting the next
            item acknowledges it.
        consumer: Name of this reader, unique in the group. Default: host name and process ID.
        follow: Wait for new results. With False, stop when no result is left.
        label: Yield only results with this best label, spelled exactly.
        min_score: Yield only results whose best label has at least this score.
        subreddit: Yield only posts of this subreddit, in upper or lower case, with or without
            `r/`.
        run: Yield only posts of this run.
        since: Start at this time: a datetime (UTC if it has no zone), or seconds since 1970; 0
            starts at the oldest result in the stream. Default: now, or 0 with `follow=False` and
                no group. An existing group ignores it.
        claim_after: Seconds after which this reader takes over results that another reader of the
            group received and has not acknowledged. Must exceed the time that one result takes to
            process.

    Yields:
        A Result for each classification: `result.post` and `result.classification`. A Missed where
        results were trimmed from the stream before this reader reached them.

    Raises:
        feedmill.UserError: At the call, for an invalid argument or setting. At the first item, if
            Redis cannot be reached or refuses the connection, or has no such run and `follow` is
            False. Later, only if Redis refuses a command.

    Example:
        import feedmill

        for item in feedmill.results(group="printed", since=0, follow=False):
            if isinstance(item, feedmill.Missed):
                print("missed", item.count or "some", "results")
            else:
                found = item.classification
                print(item.post.id, found.label, found.label_score)
    """
    settings = load_arguments(redis_url=redis_url)
    if since is None and not follow and group is None:
        since = 0.0
    if isinstance(since, datetime):
        since = in_utc(since)
    if run is not None:
        run = parse_run(run)
    redis = connect(settings)
    selection = ResultFilter(
        label=label,
        min_score=min_score,
        subreddit=subreddit,
        run=run,
    )
    reader = open_reader(
        redis,
        group,
        consumer,
        selection,
        since,
        claim_after=claim_after,
    )

    def read() -> Generator[Result | Missed]:
        with closing(redis), user_errors(settings):
            if follow:
                wait_while_starting(redis, settings)
            elif run is not None:
                check_run(redis, run)
            yield from items(reader, follow)

    return read()
