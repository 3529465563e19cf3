"""`feedmill results`: the newest results, those that come, what a group is given, and one post's."""

import json
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated

import typer

from feedmill.flags import AsJson, RedisUrl, settings_of
from shared.broker import connect
from shared.dead import DeadLetters
from shared.errors import UserError, json_line, printable
from shared.messages import Classification, DeadLetter
from shared.readers import CLAIM_AFTER, Missed, Read, Reader, Wanted, batches, newest, open_reader, told_plainly
from shared.results import Result, ResultsStore
from shared.settings import PREFIX

#: Results that are shown where no limit is given.
LIMIT = 20

app = typer.Typer(invoke_without_command=True, no_args_is_help=False)


@app.callback()
def results(
    context: typer.Context,
    follow: Annotated[bool, typer.Option(help="Go on with results as they come, until Ctrl-C.")] = False,
    failed: Annotated[
        bool, typer.Option("--failed", help="Show instead the posts that got no label, and why.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(help=f"How many of the newest to show: {LIMIT} unless given.", min=0)
    ] = None,
    label: Annotated[str | None, typer.Option(help="Only posts of this label.", show_default=False)] = None,
    min_score: Annotated[
        float | None, typer.Option(help="Only posts whose label has this score, or more.", show_default=False)
    ] = None,
    subreddit: Annotated[str | None, typer.Option(help="Only posts of this subreddit.", show_default=False)] = None,
    group: Annotated[
        str | None,
        typer.Option(help="Share the results with the readers of this group; it goes on where it stopped."),
    ] = None,
    consumer: Annotated[
        str | None, typer.Option(help="This reader's name in the group, its alone: host and process unless given.")
    ] = None,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="A group that is new begins with all that is there.")
    ] = False,
    claim_after: Annotated[
        float | None,
        typer.Option(help=f"Seconds until another reader's results are taken over: {CLAIM_AFTER:.0f} unless given."),
    ] = None,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Show the newest results; with --follow, also those to come; with --group, what this reader is given of them."""
    if context.invoked_subcommand:
        return
    if failed and follow:
        raise UserError("What failed is not followed: leave out --follow or --failed.")
    if failed and (group, consumer, label, min_score, subreddit) != (None,) * 5:
        raise UserError("What failed has no label, and no readers in groups: give --failed with --limit alone.")
    if group is None and (from_start or claim_after is not None):
        raise UserError("--from-start and --claim-after are for groups: add --group, or leave them out.")
    if group is not None and limit is not None:
        raise UserError("A group goes on where it stopped, not with the newest: leave out --limit or --group.")
    settings = settings_of(redis_url=redis_url)
    redis = connect(settings)
    wanted = Wanted(label, min_score, subreddit)
    shown = LIMIT if limit is None else limit
    since, after = 0.0 if from_start else None, CLAIM_AFTER if claim_after is None else claim_after
    reader = open_reader(redis, group, consumer, wanted, since, shown, after)
    with _ending_quietly(), told_plainly(settings):
        if follow or group is not None:
            _show(reader, follow, as_json)
            return
        count = LIMIT + 1 if limit is None else limit  # the one tells whether there are more
        if failed:
            failures = (_failure(each.letter, as_json) for each in DeadLetters(redis).letters(count))
            if limit is not None:
                for line in failures:  # a letter may have half a megabyte
                    _print([line])
                return
            lines = list(failures)
        else:
            lines = [_line(result, as_json) for result in newest(redis, count, wanted)]
        more = limit is None and len(lines) > LIMIT
        _print(lines[1:] if more else lines)
        if more and not as_json:
            typer.echo(f"the newest {LIMIT}; --limit N shows more", err=True)


@contextmanager
def _ending_quietly() -> Iterator[None]:
    """End with status 130 on Ctrl-C, which is how following ends."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _show(reader: Reader, follow: bool, as_json: bool) -> None:
    """Batch by batch: it is acknowledged when it was written, and nothing of it waits in a buffer."""
    for batch in batches(reader, follow):
        _show_batch(batch, as_json)
        reader.acknowledge([entry_id for _, ids in batch for entry_id in ids])
        if not batch and _nobody_reads():
            return


def _show_batch(batch: Sequence[Read], as_json: bool) -> None:
    lines = []
    for item, _ in batch:
        if isinstance(item, Missed):
            typer.echo(json.dumps(_missed(item)) if as_json else f"feedmill: {_sentence(item)}", err=True)
        else:
            lines.append(_line(item, as_json))
    _print(lines)


def _print(lines: Sequence[str]) -> None:
    if lines:
        typer.echo("\n".join(lines))  # flushes


def _nobody_reads() -> bool:
    """Whether the other end of the pipe that is our standard output was closed: writing would tell too late."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _missed(missed: Missed) -> dict[str, float | None]:
    return {"missed": missed.count, "at_most": missed.at_most, "since": missed.since, "until": missed.until}


def _sentence(missed: Missed) -> str:
    if missed.count is not None:
        how_many = f"{missed.count:,} result{'s' if missed.count != 1 else ''}"
    elif missed.at_most is not None:
        how_many = f"up to {missed.at_most:,} results"
    else:
        how_many = "an unknown number of results"
    return (
        f"missed {how_many} between {_time(missed.since)} and {_time(missed.until)}: reading was slower than trimming; "
        f"raise {PREFIX}RESULTS_STREAM_LENGTH or read faster"
    )


def _line(result: Result, as_json: bool) -> str:
    post, found = result
    if as_json:
        entry = {"post": post.model_dump(mode="json", exclude_defaults=True), **found.model_dump(mode="json")}
        return json_line(entry)
    title = printable(" ".join((post.title or post.body).split()))
    return f"{printable(post.id):<12} {printable(found.label):<16} {found.scores[found.label]:.2f}  {title:.80}"


def _failure(letter: DeadLetter, as_json: bool) -> str:
    if as_json:
        return json_line(letter.model_dump())
    return printable(f"{letter.id or '-':<12} {_time(letter.failed_at)}  {letter.worker}  {letter.reason}")


@app.command("get")
def get(
    post_id: Annotated[str, typer.Argument(metavar="ID", help="The post's id.")],
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Show every classification of one post: one for each text, model and label set."""
    settings = settings_of(redis_url=redis_url)
    store = ResultsStore(connect(settings), settings)
    with told_plainly(settings):
        found, score = store.get(post_id), store.score(post_id)
    if not found:
        typer.echo(f"No result of a post {post_id!r} is in the store: not classified yet, or expired.", err=True)
        raise typer.Exit(1)
    for classification in found:
        if as_json:
            seen = {} if score is None else {"score": score.score, "score_seen_at": score.at}
            typer.echo(json_line(classification.model_dump(mode="json") | seen))
        else:
            typer.echo(_described(classification))
    if score and not as_json:
        typer.echo(f"score {score.score}, seen {_time(score.at)}")


def _described(found: Classification) -> str:
    when = _time(found.classified_at)
    scores = "\n".join(f"  {score:6.3f}  {printable(label)}" for label, score in found.scores.items())
    said = f"{found.id}: {found.label}, by {found.model} ({found.weights[:12]}) on {found.device}, {when}"
    return f"{printable(said)}\n{scores}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(" ", "seconds")
