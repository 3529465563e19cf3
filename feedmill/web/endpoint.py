"""The HTTP endpoint for applications: classify through the queue, runs, results and posts.

Each route reads its request, calls what the commands call, and answers with JSON.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from datetime import datetime
from functools import partial
from secrets import token_hex
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from pydantic_core import to_json
from starlette.responses import Response, StreamingResponse

from feedmill.api.request import Item, item_of, read_options
from feedmill.api.submission import complete, id_of
from feedmill.outcomes.followers import ResultFilter
from feedmill.outcomes.purge import count_posts
from feedmill.outcomes.rows import (
    ENTRY_ID,
    Place,
    ResultRow,
    RowReader,
    result_as_json,
    unknown_run,
)
from feedmill.producers.push import Pusher
from feedmill.producers.records import Columns
from feedmill.shared import runs
from feedmill.shared.broker import make_app
from feedmill.shared.errors import MessageFailed, RequestRefused, sentence
from feedmill.shared.messages import (
    Classification,
    ClassifyOptions,
    Post,
    PostError,
    further_fields,
    parse_run,
)
from feedmill.shared.model_routing import check_options
from feedmill.shared.none_of_these import NONE_WORDS
from feedmill.shared.purge import purge_posts, valid_ids
from feedmill.shared.redis_errors import user_errors
from feedmill.shared.results import ResultsStore
from feedmill.shared.trace_context import read_context
from feedmill.shared.tracing import current_context
from feedmill.web import schema
from feedmill.web.answers import forget
from feedmill.web.asking import Asker
from feedmill.web.failures import Failure
from feedmill.web.resources import Resources, depend_on_resources, may_still, scope
from feedmill.web.streams import Cursor, as_fields, end_of, events

#: Chunks of the stream that one request for results may read.
MAX_CHUNKS = 20
#: Runs that a list names.
MAX_RUNS = 100
#: Priority of posts that are sent as a run: those that somebody waits for come first.
RUN_PRIORITY = 3
MAX_REFUSED = 100
NO_COLUMNS = Columns()

T = TypeVar("T")

router = APIRouter(prefix="/v1", responses=schema.ERRORS)
Shared = Annotated[Resources, Depends(depend_on_resources)]


@router.post("/classify", responses={200: {"model": schema.ClassifyAnswer}})
async def classify(
    request: Request,
    body: schema.ClassifyRequest,
    shared: Shared,
    _: Annotated[Any, Depends(scope("send"))],
) -> Response:
    """Classify texts or posts through the queue, and answer when all have an outcome.

    The results are stored, too. A caller that leaves withdraws what has not started.
    """
    outcomes = await outcomes_of(request, shared.asker, body, body.timeout_s)
    return json_response({"results": outcomes})


@router.post(
    "/runs",
    status_code=202,
    response_model=schema.Sent,
)
def send(
    body: schema.RunRequest,
    shared: Shared,
    _: Annotated[Any, Depends(scope("send"))],
) -> schema.Sent:
    """Send posts to the queue as a run, and answer when they wait there.

    More posts can be sent to the same run. Posts that were sent before are not sent again.
    """
    options = options_of(body)
    settings = shared.settings
    name = run_name(body.run)
    posts: list[Post] = []
    refused: list[PostError] = []
    for item in items_of(body):
        if isinstance(item.post, Post):
            posts.append(complete(item, item.post, id_of(item, item.post)))
        else:
            refused.append(PostError(id=item.id, error=item.post))
    with user_errors(settings):
        check_options(shared.redis, settings.queue, options)
        pusher = Pusher(
            make_app(settings, current=False),
            shared.redis,
            settings.model_copy(update={"priority": RUN_PRIORITY}),
            options,
            again=body.again,
            run=name,
        )
        if pusher.room() < len(posts):
            raise Failure(503, "busy", "The queue is full. Send again in some seconds.")
        if body.webhook is not None:
            shared.webhooks.add(name, body.webhook)
        pusher.push(posts)
    return schema.Sent(
        run=name,
        sent=pusher.sent,
        skipped=pusher.skipped,
        purged=pusher.gone,
        refused=refused[:MAX_REFUSED],
    )


@router.get("/runs", response_model=schema.Runs)
def list_runs(
    shared: Shared, _: Annotated[Any, Depends(scope("read"))]
) -> dict[str, Any]:
    """Return the most recently active runs, newest first."""
    with user_errors(shared.settings):
        recent = runs.recent(shared.redis, MAX_RUNS)
    return {"runs": [progress.to_dict() for progress in recent]}


@router.get("/runs/{run}", response_model=schema.RunProgress)
def show_run(
    run: str, shared: Shared, _: Annotated[Any, Depends(scope("read"))]
) -> dict[str, Any]:
    """Return the progress of a run."""
    name = parse_run(run)
    with user_errors(shared.settings):
        progress = runs.progress(shared.redis, name)
        if progress is None:
            raise Failure(404, "not_found", unknown_run(shared.redis, name))
    return progress.to_dict()


class Wanted:
    """The query of requests for results: a filter, and where to begin."""

    def __init__(
        self,
        label: str | None = None,
        min_score: Annotated[float | None, Query(ge=0, le=1)] = None,
        subreddit: str | None = None,
        run: str | None = None,
        after: Cursor | None = None,
    ) -> None:
        self.filter = ResultFilter(
            label=label,
            min_score=min_score,
            subreddit=subreddit,
            run=run,
        )
        self.after = after


@router.get("/results", responses={200: {"model": schema.ResultPage}})
def read_results(
    shared: Shared,
    wanted: Annotated[Wanted, Depends()],
    _: Annotated[Any, Depends(scope("read"))],
    limit: Annotated[int, Query(ge=1, le=schema.MAX_PAGE)] = 100,
) -> Response:
    """Return stored results in order, a page at a time. Begins with the oldest."""
    place = Place(wanted.after or "0-0")
    results: list[dict[str, Any]] = []
    missed: dict[str, object] | None = None
    ended = False
    with user_errors(shared.settings):
        reader = RowReader(shared.redis)
        for _chunk in range(MAX_CHUNKS):
            chunk = reader.fetch(place)
            if chunk.missed is not None:
                missed = as_fields(chunk.missed)
            place = chunk.place
            ended = chunk.ended
            for row in chunk.rows:
                if not wanted.filter.has(row):
                    continue
                results.append(row_as_json(row))
                if len(results) == limit:
                    place = Place(row.entry)
                    ended = False
                    break
            if ended or len(results) == limit:
                break
    return json_response(
        {
            "results": results,
            "cursor": place.cursor,
            "ended": ended,
            "missed": missed,
        }
    )


@router.get("/results/stream")
def stream_results(
    request: Request,
    shared: Shared,
    wanted: Annotated[Wanted, Depends()],
    _: Annotated[Any, Depends(scope("read"))],
) -> Response:
    """Send results as server-sent events as they are stored.

    Continues after the header Last-Event-ID or the query `after`; else begins with new results. An
    event `missed` names results that were trimmed before they were sent.
    """
    last_id = request.headers.get("last-event-id", "")
    cursor = last_id if ENTRY_ID.fullmatch(last_id) else wanted.after
    with user_errors(shared.settings):
        place = Place(cursor) if cursor else end_of(shared.redis)

    def describe(row: ResultRow) -> object | None:
        return row_as_json(row) if wanted.filter.has(row) else None

    shared.newness.check_room()
    may_follow = partial(may_still, request)
    lines = events(shared.redis, shared.newness, place, describe, may_follow)
    return StreamingResponse(lines, media_type="text/event-stream")


@router.get("/posts/{post_id:path}", responses={200: {"model": schema.PostResults}})
def show_post(
    post_id: str, shared: Shared, _: Annotated[Any, Depends(scope("read"))]
) -> Response:
    """Return the results of a post that have not expired, oldest first."""
    found: list[dict[str, Any]] = []
    with user_errors(shared.settings):
        store = ResultsStore(shared.redis, shared.settings)
        for classification in store.get(post_id):
            post = store.post_of(classification)
            found.append(result_as_json(classification, post))
    if not found:
        raise Failure(404, "not_found", f"There is no result of post {post_id!r}.")
    return json_response({"results": found})


@router.delete("/posts/{post_id:path}", response_model=schema.Purge)
def purge_post(
    post_id: str, shared: Shared, _: Annotated[Any, Depends(scope("admin"))]
) -> schema.Purge:
    """Delete everything stored about a post, and block it from being sent again for a year."""
    posts = valid_ids([post_id])
    with user_errors(shared.settings):
        outcome = purge_posts(shared.redis, shared.settings, posts)
    counts = count_posts(posts, outcome)
    answer_count = forget(shared, posts)
    if answer_count:
        counts["answers"] = answer_count
    return schema.Purge(counts=counts)


# What routes of other modules use, too.


async def outcomes_of(
    request: Request, asker: Asker, body: schema.Options, timeout_s: float
) -> list[dict[str, Any]]:
    """Return an outcome for each text or post, in order."""
    options = options_of(body)
    items = items_of(body)
    posts: list[Post] = []
    outcomes: list[dict[str, Any]] = []
    for item in items:
        outcome: dict[str, Any] = {"id": item.id, "error": item.post}
        if isinstance(item.post, Post):
            post = complete(item, item.post, id_of(item, item.post))
            posts.append(post)
            outcome = {}
        outcomes.append(outcome)
    if not posts:
        return outcomes
    try:
        trace = current_context() or read_context(request.headers)
        asking = asker.ask(posts, options, timeout_s, trace)
        answers = iter(await while_connected(request, asking))
    except RequestRefused as error:
        raise Failure(422, "refused", sentence(str(error))) from None
    except MessageFailed as error:
        raise Failure(422, "failed", sentence(str(error))) from None
    for place, outcome in enumerate(outcomes):
        if not outcome:
            outcomes[place] = with_further_fields(next(answers))
    return outcomes


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what the work returns; cancel it when the caller leaves."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Failure(499, "left", "The caller has left.")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    """Wait until the caller has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def with_further_fields(outcome: dict[str, Any]) -> dict[str, Any]:
    """Return an outcome with what JSON of stored results has in addition."""
    if "error" in outcome:
        return outcome
    classification = Classification.model_construct(**outcome)
    return outcome | further_fields(classification)


def options_of(body: schema.Options) -> ClassifyOptions:
    """Return the options of a request. Raises UserError."""
    threshold: float | bool | None = None
    if isinstance(body.none, str):
        threshold = NONE_WORDS[body.none]
    elif body.none is not None:
        threshold = body.none
    return read_options(body.labels, body.template, body.multi_label, threshold)


def items_of(body: schema.Options) -> Sequence[Item]:
    """Return the texts or posts of a request. Raises Failure."""
    if (body.texts is None) == (body.posts is None):
        raise Failure(422, "invalid", "Give either texts or posts.")
    values: list[Any] = list(body.texts or ())
    values += [post.model_dump(exclude_unset=True) for post in body.posts or ()]
    return [item_of(value, place, NO_COLUMNS) for place, value in enumerate(values)]


def run_name(name: str | None) -> str:
    """Return a valid name of a run: a new one with the time if there is none. Raises UserError."""
    if name is not None:
        return parse_run(name)
    return f"web {datetime.now():%Y-%m-%d %H:%M:%S} {token_hex(2)}"


def row_as_json(row: ResultRow) -> dict[str, Any]:
    """Return a row as `feedmill results --json` prints it."""
    result = row.result
    return result_as_json(result.classification, result.post)


def json_response(content: object) -> Response:
    """Return an answer, without the validation of a response model."""
    return Response(
        to_json(content, inf_nan_mode="null"), media_type="application/json"
    )
