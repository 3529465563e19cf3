"""The `feedmill results` command: show the newest results, follow new ones, read as a group, or
look up posts; and `feedmill report`: write recent results as an HTML page.
"""

import json
import select
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from redis import Redis
from rich.console import Console
from typer import Argument, Option

from feedmill.cli.options import (
    AsJson,
    RunName,
    Since,
    excludes,
    needs,
    utc,
    with_settings,
)
from feedmill.console import (
    ID_WIDTH,
    counted,
    notes_console,
    with_title,
    without_label,
)
from feedmill.exporting.columns import label_set as label_set_named
from feedmill.outcomes import followers, rows
from feedmill.outcomes.followers import NO_FILTER, Reader, ResultFilter
from feedmill.outcomes.rows import Missed, result_as_json
from feedmill.shared.broker import connect, wait_while_starting
from feedmill.shared.errors import json_line, printable, truncate
from feedmill.shared.messages import Classification, Post
from feedmill.shared.results import Result, ResultsStore, Score
from feedmill.shared.runs import progress
from feedmill.shared.settings import PREFIX, Settings
from feedmill.tables import check_page, save_page

if TYPE_CHECKING:
    from feedmill.report import ResultsReport

#: Results that are shown by default.
DEFAULT_LIMIT = 20
#: The longest period of a report, in hours: a year.
MAX_HOURS = 366 * 24
#: Maximum number of other label sets to list.
MAX_SHOWN = 10

#: A classification and its post; None if the post has been trimmed.
StoredResult = tuple[Classification, Post | None]


@excludes(
    "ID...",
    "--follow",
    "--limit",
    "--label",
    "--min-score",
    "--subreddit",
    "--since",
    "--group",
)
@needs("--from-start", "--group")
@needs("--claim-after", "--group")
@excludes("--group", "--limit")
@excludes("--from-start", "--since")
@with_settings("redis_url")
def results(
    settings: Settings,
    ids: Annotated[
        list[str] | None, Argument(metavar="ID...", help="Posts to look up.")
    ] = None,
    follow: Annotated[
        bool, Option("--follow", help="Keep showing new results until Ctrl-C.")
    ] = False,
    limit: Annotated[
        int | None,
        Option(help=(f"Number of results to show (default: {DEFAULT_LIMIT})."), min=0),
    ] = None,
    label: Annotated[
        str | None, Option(help="Show only results with this best label.")
    ] = None,
    min_score: Annotated[
        float | None,
        Option(help="Show only results whose best label has at least this score."),
    ] = None,
    subreddit: Annotated[
        str | None, Option(help="Show only posts of this subreddit.")
    ] = None,
    run: RunName = None,
    since: Since = None,
    group: Annotated[
        str | None,
        Option(
            help=(
                "Read as a member of this consumer group, which resumes where it stopped."
            )
        ),
    ] = None,
    consumer: Annotated[
        str | None,
        Option(
            help=(
                "Unique name of this reader in the group (default: host and process ID)."
            )
        ),
    ] = None,
    from_start: Annotated[
        bool,
        Option(
            "--from-start",
            help="Start a new group at the oldest result instead of now.",
        ),
    ] = False,
    claim_after: Annotated[
        float,
        Option(
            help="Seconds before taking over another reader's unacknowledged results."
        ),
    ] = followers.CLAIM_AFTER_S,
    as_json: AsJson = False,
) -> None:
    """With --group, read as a consumer group: each result goes to one of its readers, at least
    once, and is acknowledged once it is written to standard output. With ids, shows every result
    of these posts: one for each text, model and label set, and each run. Exits 1 if no result
    matches the filters, or one of the posts has none.
    """
    redis = connect(settings)
    filters = ResultFilter(
        label=label,
        min_score=min_score,
        subreddit=subreddit,
        run=run,
    )
    start = None if since is None else max(0.0, since)
    # With --since, everything from there on is shown.
    history = 0
    if since is None:
        history = DEFAULT_LIMIT if limit is None else limit
    # Also for a list, because it checks the filters.
    reader = followers.open_reader(
        redis,
        group,
        consumer,
        filters,
        since=0.0 if from_start else start,
        history=history,
        claim_after=claim_after,
    )
    if follow or group:
        if follow:
            wait_while_starting(redis, settings)
        _warn_of_unknown_run(redis, run)
        _show(reader, follow=follow, as_json=as_json)
        return
    if run is not None:
        rows.check_run(redis, run)
    if ids:
        store = ResultsStore(redis, settings)
        if not _print_results(store, ids, run, as_json):
            raise typer.Exit(1)
        return
    _list(
        redis,
        filters,
        limit,
        as_json,
        start,
    )


def _warn_of_unknown_run(redis: Redis, run: str | None) -> None:
    """Warn of a run that does not exist yet: it may be about to be sent."""
    if run is not None and progress(redis, run) is None:
        warning = rows.unknown_run(redis, run)
        typer.echo(f"feedmill: {warning}", err=True)


def _format_lines(results: Sequence[Result], as_json: bool) -> list[str]:
    """Format results as lines of JSON or of a table."""
    lines = []
    for post, classification in results:
        if as_json:
            line = json_line(result_as_json(classification, post))
        else:
            line = with_title(_format_start(classification, post), post)
        lines.append(line)
    return lines


def _format_start(classification: Classification, post: Post) -> str:
    """Return the start of a result's line: the post's id, the best label and its score."""
    score = classification.label_score
    name = printable(post.id)
    label = printable(_format_label(classification))
    return f"{name:<{ID_WIDTH}} {label:<16} {score:.2f}  "


def _format_label(classification: Classification) -> str:
    """Return the label for a person; of a post that fits none, with the best one."""
    if classification.label is None:
        return f"{without_label(classification)} ({classification.best_label})"
    return classification.label


def _list(
    redis: Redis,
    filters: ResultFilter,
    limit: int | None,
    as_json: bool,
    since: float | None,
) -> None:
    """Print the newest results. since: seconds since 1970."""
    if limit is None:
        count = DEFAULT_LIMIT + 1  # one more, to know if there are more
    else:
        count = limit
    newest = followers.newest(
        redis,
        count,
        filters,
        since=since,
    )
    lines = _format_lines(newest, as_json)
    # An unknown run is an error of its own, and a known one may have no result yet.
    other_filters = filters._replace(run=None)
    is_filtered = other_filters != NO_FILTER or since is not None
    if not lines and limit != 0 and is_filtered:
        typer.echo("feedmill: no result matches the filters", err=True)
        raise typer.Exit(1)
    has_more = limit is None and len(lines) > DEFAULT_LIMIT
    if not has_more:
        _print(lines)
        return
    _print(lines[1:])
    if not as_json:
        typer.echo(
            f"showing the newest {DEFAULT_LIMIT}; use --limit N for more", err=True
        )


def _show(reader: Reader, *, follow: bool, as_json: bool) -> None:
    """Show batch by batch; acknowledge each batch after it is written and flushed."""
    for batch in followers.batches(reader, follow):
        results = []
        entry_ids: list[str] = []
        for item, ids in batch:
            entry_ids.extend(ids)
            if isinstance(item, Missed):
                typer.echo(_format_missed(item, as_json), err=True)
            elif isinstance(item, Result):
                results.append(item)
        lines = _format_lines(results, as_json)
        _print(lines)
        reader.acknowledge(entry_ids)
        if not batch and _is_pipe_closed():
            return


def _print(lines: Sequence[str]) -> None:
    if lines:
        typer.echo("\n".join(lines))  # flushes


def _is_pipe_closed() -> bool:
    """Return True if the reader of standard output has closed the pipe, which only the next write
    would report.
    """
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    closed = select.POLLERR | select.POLLHUP
    reports = poll.poll(0)
    return any(events & closed for _, events in reports)


def _format_missed(missed: Missed, as_json: bool) -> str:
    if as_json:
        fields = {
            "missed": missed.count,
            "since": missed.since,
            "until": missed.until,
        }
        return json.dumps(fields)
    if missed.count is None:
        how_many = "an unknown number of results"
    else:
        how_many = counted(missed.count, "result")
    period = f"between {utc(missed.since)} and {utc(missed.until)}"
    return (
        f"feedmill: missed {how_many} {period}: trimmed before they were read. Raise "
        f"{PREFIX}RESULTS_STREAM_LENGTH, or read faster."
    )


def _print_results(
    store: ResultsStore, ids: Sequence[str], run: str | None, as_json: bool
) -> bool:
    """Print every result of the posts, of the run if given. Return whether each post has one."""
    has_all = True
    for post_id in dict.fromkeys(ids):
        results = _results_of(store, post_id, run)
        if results:
            score = store.score(post_id)
            _show_post(results, score, as_json)
            continue
        has_all = False
        name = printable(f"{post_id!r:.80}")
        typer.echo(
            f"No result for post {name}: not classified yet, purged or expired.",
            err=True,
        )
    return has_all


def _results_of(
    store: ResultsStore, post_id: str, run: str | None
) -> list[StoredResult]:
    """Return every result of a post, of the run if given, each with its post."""
    results: list[StoredResult] = []
    for classification in store.get(post_id):
        post = store.post_of(classification)
        if run is None or (post is not None and post.run == run):
            results.append((classification, post))
    return results


def _show_post(
    results: Sequence[StoredResult],
    score: Score | None,
    as_json: bool,
) -> None:
    """Print the results of a post. score: its latest score on its site."""
    if as_json:
        site_score: dict[str, Any] = {}
        if score is not None:
            site_score = {"score": score.score, "score_seen_at": score.at}
        for classification, post in results:
            fields = result_as_json(classification, post)
            typer.echo(json_line(fields | site_score))
        return
    for classification, post in results:
        typer.echo(_format_in_full(classification, post))
    if score is not None:
        typer.echo(f"score {score.score}, seen {utc(score.at)}")


def _format_in_full(classification: Classification, post: Post | None) -> str:
    """Format one result: what classified the post, its title, and each label's score."""
    label = _format_label(classification)
    weights = classification.weights[:12]
    when = utc(classification.classified_at)
    origin = (
        f"{classification.id}: {label}, by {classification.model} "
        f"({weights}) on {classification.device}, {when}"
    )
    lines = [printable(origin)]
    if post is not None:
        words = (post.title or post.body).split()
        title = " ".join(words)
        line = f"  {title:.100}"
        if post.run:
            line += f" (run {post.run})"
        lines.append(printable(line))
    for label, score in classification.scores.items():
        name = printable(label)
        lines.append(f"  {score:6.3f}  {name}")
    return "\n".join(lines)


@with_settings("redis_url")
def report(
    settings: Settings,
    out: Annotated[
        Path,
        Argument(
            metavar="OUT",
            help="HTML file to write.",
            dir_okay=False,
        ),
    ] = Path("feedmill-report.html"),
    hours: Annotated[
        int,
        Option(
            help="Hours to report on, including the current one.",
            min=1,
            max=MAX_HOURS,
        ),
    ] = 24,
    run: RunName = None,
    label_set: Annotated[
        str | None,
        Option(
            "--label-set",
            help=(
                "Only results of this label set: a,b,c (default: that of the most posts)."
            ),
        ),
    ] = None,
    model: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help=(
                "Only results of this model, or of the weights with this digest (default: the "
                "model of the most posts)."
            ),
        ),
    ] = None,
) -> None:
    """A report is of one label set and one model, and with --run of one run.

    Covers posts, labels, subreddits, scores, queueing times and failures. The page is
    self-contained and has no scripts. Writes nothing and exits 1 if there is nothing to report.
    """
    # Imports Jinja, which few commands need.
    from feedmill.report import page  # noqa: PLC0415

    check_page(out)
    notes = notes_console()
    began = time.monotonic()
    try:
        contents = _gather(settings, hours, run, label_set, model, notes)
    except KeyboardInterrupt:
        name = printable(str(out))
        notes.print(
            f"interrupted: no report was written to {name}",
            markup=False,
        )
        raise
    _note_others(contents.others, notes)
    _note_other_models(contents.other_models, notes)
    period = counted(hours, "hour")
    if not (contents.posts or contents.reasons or contents.gaps):
        message = _nothing_message(period, run, label_set, model)
        typer.echo(message, err=True)
        raise typer.Exit(1)
    save_page(out, page(contents))
    posts = counted(contents.posts, "post")
    seconds = time.monotonic() - began
    typer.echo(f"{posts} in {period}: wrote {out} in {seconds:.1f} s")


def _gather(
    settings: Settings,
    hours: int,
    run: str | None,
    label_set: str | None,
    model: str | None,
    notes: Console,
) -> "ResultsReport":
    """Gather the contents of a report, and show on a terminal that this takes time.

    Raises UserError and redis.exceptions.RedisError.
    """
    from feedmill.report import gather  # noqa: PLC0415 - Jinja, as above

    set_name = None
    if label_set is not None:
        labels = map(str.strip, label_set.split(","))
        set_name = label_set_named(filter(None, labels))
    with notes.status("reading results"):
        redis = connect(settings)
        if run is not None:
            rows.check_run(redis, run)
        return gather(
            redis,
            settings,
            hours,
            run,
            set_name,
            model,
        )


def _nothing_message(
    period: str, run: str | None, label_set: str | None, model: str | None
) -> str:
    """Return the message of a report without contents."""
    subject = ""
    for choice in (run, label_set, model):
        if choice is not None:
            subject += f" of {choice}"
    subject = printable(subject)
    return f"No posts in the last {period}{subject}: nothing written. See --hours."


def _note_others(others: Mapping[str, int], notes: Console) -> None:
    """Note the label sets that are not in a report. others: posts by label set."""
    for name, count in list(others.items())[:MAX_SHOWN]:
        posts = counted(count, "post")
        label_set = printable(truncate(name))
        notes.print(f"Left out: {posts} of the label set {label_set}", markup=False)
    if others:
        notes.print(
            "A report is of one label set: see --label-set or, if the posts have a run, --run.",
            markup=False,
        )


def _note_other_models(models: Mapping[str, int], notes: Console) -> None:
    """Note the models that are not in a report. models: posts by model."""
    for name, count in list(models.items())[:MAX_SHOWN]:
        posts = counted(count, "post")
        model = printable(truncate(name))
        line = f"Left out: {posts} of the model {model}"
        notes.print(line, markup=False)
    if models:
        notes.print("A report is of one model: see --model.", markup=False)
