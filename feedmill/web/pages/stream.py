"""The page of the stream: posts as they are labelled, filtered, with a chart over time."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response, StreamingResponse

from feedmill.outcomes.dead_letters import DeadLetterEntry, DeadLetterStream
from feedmill.outcomes.followers import newest_rows
from feedmill.outcomes.rows import ENTRY_ID, Place, ResultRow, best_label, label_score
from feedmill.shared import runs
from feedmill.shared.messages import Classification, Post
from feedmill.shared.none_of_these import NO_LABEL
from feedmill.shared.redis_errors import user_errors
from feedmill.shared.results import ResultsStore
from feedmill.web.failures import Failure
from feedmill.web.pages.filtering import (
    Choices,
    StreamFilter,
    language_of,
    most_common,
    sources_of,
)
from feedmill.web.pages.frame import page, page_router, person, post_address
from feedmill.web.pages.timeline import own_time, timeline_of
from feedmill.web.resources import Resources, may_still, resources, scope
from feedmill.web.streams import Cursor, end_of, events

#: Rows that the page shows; posts of the chart; and entries of the stream to look at for both.
MAX_ROWS = 200
CHART_POSTS = 5000
MAX_ENTRIES = 20_000
#: Posts to send to a page of those that come at once.
MAX_BURST = 50
#: Characters of a row's text.
TEXT_LENGTH = 300
#: Names of runs to offer, and newest dead letters to look for a post's in.
RUNS_OFFERED = 100
DEAD_LETTERS_SEARCHED = 1000
#: Results of a post to show, and of those, to look for the post's text in the stream.
MAX_RESULTS = 100
POSTS_SEARCHED = 5
WHITE_SPACE = re.compile(r"\s+")

router = page_router()
#: Routes of scripts: their errors are JSON.
scripts = APIRouter(include_in_schema=False)
Shared = Annotated[Resources, Depends(resources)]
Reader = Annotated[Any, Depends(person("read"))]
Filter = Annotated[StreamFilter, Depends()]


@router.get("/")
def show_stream(
    request: Request, shared: Shared, selection: Filter, _: Reader
) -> Response:
    """Show the newest posts. The page's script adds those that come."""
    choices = Choices(selection)
    with user_errors(shared.settings):
        end = end_of(shared.redis)
        rows = _newest(shared, choices)
        recent = runs.recent(shared.redis, RUNS_OFFERED)
    newest = [describe(row) for row in rows[-MAX_ROWS:]]
    newest.reverse()
    return page(
        request,
        "stream.html",
        rows=newest,
        chart=timeline_of(rows),
        form=selection.form,
        is_filtered=bool(selection.fields),
        query=selection.query,
        after=end.cursor,
        labels=most_common(choices.labels),
        sources=most_common(choices.sources),
        languages=most_common(choices.languages),
        runs=[progress.run for progress in recent],
        max_rows=MAX_ROWS,
    )


@router.get("/stream/chart")
def show_chart(
    request: Request, shared: Shared, selection: Filter, _: Reader
) -> Response:
    """Show the chart alone, for the page's script."""
    with user_errors(shared.settings):
        rows = _newest(shared, selection)
    return page(request, "chart.html", chart=timeline_of(rows))


@scripts.get("/stream/events")
def follow_stream(
    request: Request,
    shared: Shared,
    selection: Filter,
    _: Annotated[Any, Depends(scope("read"))],
    after: Cursor | None = None,
) -> Response:
    """Send posts as they are labelled, as server-sent events."""
    last_id = request.headers.get("last-event-id", "")
    cursor = after
    if ENTRY_ID.fullmatch(last_id):
        cursor = last_id
    if cursor is None:
        with user_errors(shared.settings):
            place = end_of(shared.redis)
    else:
        place = Place(cursor)

    def describe_match(row: ResultRow) -> object | None:
        if not selection.has(row):
            return None
        return describe(row)

    shared.newness.check_room()
    lines = events(
        shared.redis,
        shared.newness,
        place,
        describe_match,
        partial(may_still, request),
        most=MAX_BURST,
    )
    return StreamingResponse(lines, media_type="text/event-stream")


def _newest(shared: Resources, selection: StreamFilter | Choices) -> list[ResultRow]:
    """Return the newest matching rows, oldest first."""
    return newest_rows(
        shared.redis,
        CHART_POSTS,
        selection,
        max_entries=MAX_ENTRIES,
    )


def describe(row: ResultRow) -> dict[str, Any]:
    """Return what the page shows of a row."""
    result = row.found
    post = row.post
    text = post.get("title") or post.get("body") or ""
    return {
        "id": post["id"],
        "address": post_address(str(post["id"])),
        "text": WHITE_SPACE.sub(" ", str(text))[:TEXT_LENGTH].strip(),
        "label": result["label"],
        #: Its name in the chart.
        "name": result["label"] or NO_LABEL,
        "best": best_label(result),
        "score": label_score(result),
        "source": next(iter(sources_of(row)), ""),
        "run": post.get("run") or "",
        "language": language_of(row),
        "classified_at": result.get("classified_at"),
        "created_utc": own_time(row),
    }


# One post.


@router.get("/posts/{post_id:path}")
def show_post(
    request: Request,
    post_id: str,
    shared: Shared,
    _: Reader,
    id: str = "",  # noqa: A002
) -> Response:
    """Show a post with all its results and dead letters. id: in place of one that no path has."""
    post_id = post_id or id
    with user_errors(shared.settings):
        store = ResultsStore(shared.redis, shared.settings)
        history = store.get(post_id)
        history.reverse()
        post = _post_of(store, history)
        letters = _dead_letters(shared, post_id)
    if not history and not letters:
        raise Failure(404, "not_found", f"There is no result of post {post_id!r:.200}.")
    links: list[str] = []
    if post is not None:
        addresses = [post.permalink, post.url]
        links = [address for address in addresses if address and is_link(address)]
    return page(
        request,
        "post.html",
        post_id=post_id,
        post=post,
        language=getattr(post, "language", None),
        links=links,
        history=history[:MAX_RESULTS],
        hidden=max(0, len(history) - MAX_RESULTS),
        letters=letters,
        searched=DEAD_LETTERS_SEARCHED,
    )


def _post_of(store: ResultsStore, history: Sequence[Classification]) -> Post | None:
    """Return the post of the newest result whose entry the stream still has."""
    for result in history[:POSTS_SEARCHED]:
        post = store.post_of(result)
        if post is not None:
            return post
    return None


def _dead_letters(shared: Resources, post_id: str) -> list[DeadLetterEntry]:
    """Return a post's dead letters among the newest ones."""
    newest = DeadLetterStream(shared.redis).newest(DEAD_LETTERS_SEARCHED)
    return [entry for entry in newest if entry.post_id == post_id]


def is_link(address: str) -> bool:
    """Return whether a browser may follow an address: javascript: and data: run as the page."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and bool(parts.netloc)
