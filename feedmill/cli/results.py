"""The `feedmill results` command: show the newest results, follow new ones, read as a group, or look up posts; and
`feedmill report`: write recent results as an HTML page.
"""

import json
import select
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from redis import Redis
from typer import Argument, Option

from feedmill import reading
from feedmill.cli.options import AsJson, RunName, Since, excludes, needs, utc, with_settings
from feedmill.console import ID_WIDTH, counted, notes_console, with_title
from feedmill.export.columns import label_set as label_set_named
from feedmill.reading import NO_FILTER, Missed, Reader, ResultFilter
from feedmill.shared.atomic_files import replacing
from feedmill.shared.broker import connect
from feedmill.shared.errors import explain_unwritable, json_line, printable, truncate
from feedmill.shared.messages import Classification, Post
from feedmill.shared.results import Result, ResultsStore, Score
from feedmill.shared.runs import progress
from feedmill.shared.settings import PREFIX, Settings

#: Results that are shown by default.
DEFAULT_LIMIT = 20
#: The longest period of a report, in hours: a year.
MAX_HOURS = 366 * 24
#: Maximum number of other label sets to list.
MAX_SHOWN = 10


@excludes("ID...", "--follow", "--limit", "--label", "--min-score", "--subreddit", "--since", "--group")
@needs("--from-start", "--group")
@needs("--claim-after", "--group")
@excludes("--group", "--limit")
@excludes("--from-start", "--since")
@with_settings("redis_url")
def results(
    settings: Settings,
    ids: Annotated[list[str] | None, Argument(metavar="ID...", help="Posts to look up.")] = None,
    follow: Annotated[bool, Option("--follow", help="Keep showing new results until Ctrl-C.")] = False,
    limit: Annotated[int | None, Option(help=f"Number of results to show (default: {DEFAULT_LIMIT}).", min=0)] = None,
    label: Annotated[str | None, Option(help="Show only results with this best label.")] = None,
    min_score: Annotated[
        float | None, Option(help="Show only results whose best label has at least this score.")
    ] = None,
    subreddit: Annotated[str | None, Option(help="Show only posts of this subreddit.")] = None,
    run: RunName = None,
    since: Since = None,
    group: Annotated[
        str | None, Option(help="Read as a member of this consumer group, which resumes where it stopped.")
    ] = None,
    consumer: Annotated[
        str | None, Option(help="Unique name of this reader in the group (default: host and process ID).")
    ] = None,
    from_start: Annotated[
        bool, Option("--from-start", help="Start a new group at the oldest result instead of now.")
    ] = False,
    claim_after: Annotated[
        float, Option(help="Seconds before taking over another reader's unacknowledged results.")
    ] = reading.CLAIM_AFTER_S,
    as_json: AsJson = False,
) -> None:
    """With --group, read as a consumer group: each result goes to one of its readers, at least once, and is
    acknowledged once it is written to standard output. With ids, shows every result of these posts: one for each text,
    model and label set, and each run. Exits 1 if no result matches the filters, or one of the posts has none.
    """
    redis = connect(settings)
    filters = ResultFilter(label, min_score, subreddit, run)
    start = since and max(0.0, since)
    shown = 0 if since is not None else DEFAULT_LIMIT if limit is None else limit
    reader = reading.open_reader(redis, group, consumer, filters, 0.0 if from_start else start, shown, claim_after)
    if ids or not (follow or group):
        if run is not None:
            reading.check_run(redis, run)
        if ids:
            _get(ResultsStore(redis, settings), ids, run, as_json)
        else:
            _list(redis, filters, limit, as_json, start)
        return
    if run is not None and progress(redis, run) is None:  # it may be about to be sent
        typer.echo(f"feedmill: {reading.unknown_run(redis, run)}", err=True)
    _show(reader, follow, as_json)


def _lines(results: Sequence[Result], as_json: bool) -> list[str]:
    """Format results as lines of JSON or of a table."""
    if as_json:
        return [json_line(_as_json(found, post)) for post, found in results]
    starts = [
        f"{printable(post.id):<{ID_WIDTH}} {printable(found.label):<16} {found.scores[found.label]:.2f}  "
        for post, found in results
    ]
    return [with_title(start, result.post) for start, result in zip(starts, results, strict=True)]


def _as_json(found: Classification, post: Post | None) -> dict[str, Any]:
    """Return a result as an object: its post (None once the stream has dropped it), then the classification."""
    shown = None if post is None else post.model_dump(mode="json", exclude_defaults=True)
    return {"post": shown, **found.model_dump(mode="json")}


def _list(redis: Redis, filters: ResultFilter, limit: int | None, as_json: bool, since: float | None) -> None:
    """Print the newest results. since: seconds since 1970."""
    count = DEFAULT_LIMIT + 1 if limit is None else limit  # one more, to know if there are more
    lines = _lines(reading.newest(redis, count, filters, since=since), as_json)
    if not lines and limit != 0 and (filters._replace(run=None) != NO_FILTER or since is not None):
        typer.echo("feedmill: no result matches the filters", err=True)
        raise typer.Exit(1)
    more = limit is None and len(lines) > DEFAULT_LIMIT
    _print(lines[1:] if more else lines)
    if more and not as_json:
        typer.echo(f"showing the newest {DEFAULT_LIMIT}; use --limit N for more", err=True)


def _show(reader: Reader, follow: bool, as_json: bool) -> None:
    """Show batch by batch; acknowledge each batch after it is written and flushed."""
    for batch in reading.batches(reader, follow):
        for missed in [item for item, _ in batch if isinstance(item, Missed)]:
            typer.echo(_missed(missed, as_json), err=True)
        _print(_lines([item for item, _ in batch if isinstance(item, Result)], as_json))
        reader.acknowledge([entry_id for _, ids in batch for entry_id in ids])
        if not batch and _is_pipe_closed():
            return


def _print(lines: Sequence[str]) -> None:
    if lines:
        typer.echo("\n".join(lines))  # flushes


def _is_pipe_closed() -> bool:
    """Return True if the reader of standard output has closed the pipe, which only the next write would report."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _missed(missed: Missed, as_json: bool) -> str:
    if as_json:
        return json.dumps({"missed": missed.count, "since": missed.since, "until": missed.until})
    how_many = "an unknown number of results" if missed.count is None else counted(missed.count, "result")
    return (
        f"feedmill: missed {how_many} between {utc(missed.since)} and {utc(missed.until)}: trimmed before they were "
        f"read. Raise {PREFIX}RESULTS_STREAM_LENGTH, or read faster."
    )


def _get(store: ResultsStore, ids: Sequence[str], run: str | None, as_json: bool) -> None:
    """Print every result of the posts, of the run if given. Exits 1 if one of the posts has none."""
    missing = 0
    for post_id in dict.fromkeys(ids):
        found = [(each, store.post_of(each)) for each in store.get(post_id)]
        found = [each for each in found if run is None or (each[1] is not None and each[1].run == run)]
        if found:
            _show_post(found, store.score(post_id), as_json)
            continue
        missing += 1
        shown = printable(f"{post_id!r:.80}")
        typer.echo(f"No result for post {shown}: not classified yet, purged or expired.", err=True)
    raise typer.Exit(1 if missing else 0)


def _show_post(found: Sequence[tuple[Classification, Post | None]], score: Score | None, as_json: bool) -> None:
    for classification, post in found:
        if as_json:
            seen = {} if score is None else {"score": score.score, "score_seen_at": score.at}
            typer.echo(json_line(_as_json(classification, post) | seen))
        else:
            typer.echo(_described(classification, post))
    if score and not as_json:
        typer.echo(f"score {score.score}, seen {utc(score.at)}")


def _described(found: Classification, post: Post | None) -> str:
    when = utc(found.classified_at)
    scores = [f"  {score:6.3f}  {printable(label)}" for label, score in found.scores.items()]
    lines = [f"{found.id}: {found.label}, by {found.model} ({found.weights[:12]}) on {found.device}, {when}"]
    if post is not None:
        title = " ".join((post.title or post.body).split())
        lines.append(f"  {title:.100}" + (f" (run {post.run})" if post.run else ""))
    return "\n".join([*map(printable, lines), *scores])


@with_settings("redis_url")
def report(
    settings: Settings,
    out: Annotated[Path, Argument(metavar="OUT", help="HTML file to write.", dir_okay=False)] = Path(
        "feedmill-report.html"
    ),
    hours: Annotated[int, Option(help="Hours to report on, including the current one.", min=1, max=MAX_HOURS)] = 24,
    run: RunName = None,
    label_set: Annotated[
        str | None,
        Option("--label-set", help="Only results of this label set: a,b,c (default: that of the most results)."),
    ] = None,
) -> None:
    """A report is of one label set, and with --run of one run. Covers posts, labels, subreddits, scores, queueing times
    and failures. The page is self-contained and has no scripts. Writes nothing and exits 1 if there is nothing to
    report.
    """
    from feedmill.report import gather, page  # noqa: PLC0415 - imports Jinja, which few commands need

    labels = None if label_set is None else label_set_named(filter(None, map(str.strip, label_set.split(","))))
    notes = notes_console()
    began = time.monotonic()
    with notes.status("reading results") if notes.is_terminal else notes:
        redis = connect(settings)
        if run is not None:
            reading.check_run(redis, run)
        found = gather(redis, settings, hours, run, labels)
    for name, count in list(found.others.items())[:MAX_SHOWN]:
        notes.print(f"Left out: {counted(count, 'post')} of the label set {printable(truncate(name))}", markup=False)
    if found.others:
        notes.print("A report is of one label set: see --label-set or, if the posts have a run, --run.", markup=False)
    period = counted(hours, "hour")
    if not (found.posts or found.reasons or found.gaps):
        of = printable("".join(f" of {value}" for value in (run, label_set) if value is not None))
        typer.echo(f"No posts in the last {period}{of}: nothing written. See --hours.", err=True)
        raise typer.Exit(1)
    with explain_unwritable(out), replacing(out) as temporary:
        temporary.write_text(page(found), encoding="utf-8")
    typer.echo(f"{counted(found.posts, 'post')} in {period}: wrote {out} in {time.monotonic() - began:.1f} s")
