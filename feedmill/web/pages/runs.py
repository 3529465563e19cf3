"""The pages of runs: drop a file, choose its columns, follow its progress, download the labels."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from starlette.background import BackgroundTask
from starlette.responses import FileResponse, Response

from feedmill.exporting.columns import ExportFilter
from feedmill.exporting.request import ExportRequest
from feedmill.exporting.run import Export
from feedmill.producers.files import FileSource, Record
from feedmill.producers.records import (
    Columns,
    is_export_row,
    normalize_key,
    normalize_keys,
)
from feedmill.producers.run_names import default_run
from feedmill.shared import runs
from feedmill.shared.errors import UserError, printable, sentence
from feedmill.shared.messages import MAX_RUN, parse_run
from feedmill.shared.model_routing import known_queues, missing_worker
from feedmill.shared.redis_errors import user_errors
from feedmill.web.access import Caller
from feedmill.web.endpoint import json_response
from feedmill.web.failures import Failure
from feedmill.web.pages.frame import (
    Form,
    field_of,
    page,
    page_router,
    person,
    run_address,
    see_other,
)
from feedmill.web.pages.options import options_of
from feedmill.web.pages.sending import Sending, Sendings, SendRequest, kept_columns
from feedmill.web.pages.uploads import Upload, Uploads
from feedmill.web.resources import Resources, resources, scope

#: Runs of the list.
MAX_RUNS = 100
#: Rows and columns of a preview, and characters of a cell.
PREVIEW_ROWS = 8
MAX_COLUMNS = 200
CELL_LENGTH = 120
#: Characters of a field.
MAX_LENGTH = 200
#: Exports, and previews of files, at once; of each, requests that wait for their turn, and for how
#: many seconds. Each holds one of the threads (40) that answer everything else, too.
MAX_EXPORTS = 2
MAX_PREVIEWS = 4
MAX_QUEUED = 4
QUEUE_WAIT_S = 30.0
FORMS = {
    "csv": "text/csv; charset=utf-8",
    "jsonl": "application/x-ndjson",
    "parquet": "application/vnd.apache.parquet",
}
#: Names of a post's fields in the form.
CHOICES = ("title", "body", "id", "date", "subreddit")

router = page_router()
#: Routes of scripts: their errors are JSON.
scripts = APIRouter(include_in_schema=False)
Shared = Annotated[Resources, Depends(resources)]
Reader = Annotated[Caller, Depends(person("read"))]
Sender = Annotated[Caller, Depends(person("send"))]


class Turns:
    """Lets a few threads do something at once. A few others may wait."""

    def __init__(self, active: int) -> None:
        self._most = active + MAX_QUEUED
        self._users = 0
        self._lock = threading.Lock()
        self._active = threading.BoundedSemaphore(active)

    @property
    def has_room(self) -> bool:
        return self._users < self._most

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn. Raises Failure."""
        busy = Failure(503, "busy", "Too many people read or make files. Try again.")
        with self._lock:
            if not self.has_room:
                raise busy
            self._users += 1
        is_active = self._active.acquire(timeout=QUEUE_WAIT_S)
        try:
            if not is_active:
                raise busy
            yield
        finally:
            if is_active:
                self._active.release()
            with self._lock:
                self._users -= 1


class Desk:
    """The state of the pages of runs: files, sendings, and the turns of exports."""

    def __init__(self, shared: Resources) -> None:
        self.uploads = Uploads()
        self.sendings = Sendings(shared.settings, self.uploads)
        self.exports = Turns(MAX_EXPORTS)
        self.previews = Turns(MAX_PREVIEWS)

    def close(self) -> None:
        self.sendings.close()
        self.uploads.close()


def desk_of(shared: Resources) -> Desk:
    """Return the server's desk, made at its first use."""
    with shared.pages_lock:
        desk: Desk | None = shared.pages.get("runs")
        if desk is None:
            desk = Desk(shared)
            shared.pages["runs"] = desk
            shared.endings.append(desk.close)
    return desk


@dataclass
class RunView:
    """A run as the pages show it."""

    progress: runs.Progress
    sending: Sending | None
    #: Whether the file was being sent before the progress was read: its rows count at once.
    is_sending: bool
    now: float

    @property
    def name(self) -> str:
        return self.progress.run

    @property
    def address(self) -> str:
        return run_address(self.name)

    @property
    def state(self) -> str:
        """A word for the run's state."""
        if self.is_sending:
            return "being sent"
        if self.progress.pending == 0:
            return "done"
        if runs.is_waiting(self.progress, self.now):
            return "waiting"
        return "running"

    @property
    def seconds_left(self) -> float | None:
        if self.is_sending or self.state != "running":
            return None
        return self.progress.seconds_left


# The list, and one run.


@router.get("/runs")
def show_runs(request: Request, shared: Shared, _: Reader) -> Response:
    """Show the runs, and where to drop a file."""
    return page(
        request,
        "runs.html",
        runs=_recent(shared),
        warning=_warning(shared),
    )


@router.get("/runs-list")
def show_list(request: Request, shared: Shared, _: Reader) -> Response:
    """Show the list alone, for the page's script."""
    return page(request, "runs_list.html", runs=_recent(shared))


def _recent(shared: Resources) -> list[RunView]:
    desk = desk_of(shared)
    active = {sending.request.run for sending in desk.sendings.active}
    with user_errors(shared.settings):
        recent = runs.recent(shared.redis, MAX_RUNS)
    names = {progress.run for progress in recent}
    new = [runs.Progress(name) for name in active - names]
    views: list[RunView] = []
    for progress in [*new, *recent]:
        view = RunView(
            progress=progress,
            sending=desk.sendings.of_run(progress.run),
            is_sending=progress.run in active,
            now=time.time(),
        )
        views.append(view)
    return views


def _warning(shared: Resources) -> str:
    """Return why posts would wait; "" if a worker serves the queue."""
    with user_errors(shared.settings):
        return missing_worker(shared.redis, shared.settings)


def _known_run(shared: Resources, run: str) -> RunView:
    """Return a run. Raises Failure if there is none."""
    name = parse_run(run)
    sending = desk_of(shared).sendings.of_run(name)
    is_sending = sending is not None and not sending.is_ended
    with user_errors(shared.settings):
        progress = runs.progress(shared.redis, name)
    if progress is None and sending is None:
        raise Failure(
            404,
            "not_found",
            f"There is no run {name!r}, or its posts were sent too long ago.",
        )
    return RunView(
        progress=progress or runs.Progress(name),
        sending=sending,
        is_sending=is_sending,
        now=time.time(),
    )


@router.get("/runs/{run:path}")
def show_run(
    request: Request,
    run: str,
    shared: Shared,
    _: Reader,
    other: Annotated[str, Query(alias="run")] = "",
) -> Response:
    """Show the progress of a run, and its downloads. ?run=: a name that no path has."""
    view = _known_run(shared, run or other)
    return page(
        request,
        "run.html",
        view=view,
        warning=_warning(shared),
        forms=list(FORMS),
    )


@router.get("/run-progress")
def show_progress(request: Request, run: str, shared: Shared, _: Reader) -> Response:
    """Show the progress alone, for the page's script."""
    view = _known_run(shared, run)
    return page(
        request,
        "run_progress.html",
        view=view,
        warning=_warning(shared),
    )


@router.post("/runs-stop")
def stop_sending(shared: Shared, form: Form, _: Sender) -> Response:
    """End the sending of a run. What was sent stays in the queue."""
    run = parse_run(field_of(form, "run"))
    sending = desk_of(shared).sendings.of_run(run)
    if sending is not None:
        sending.stop.set()
    return see_other(run_address(run))


# Downloads.


@router.get("/download")
def download(
    shared: Shared,
    _: Reader,
    run: str,
    form: Annotated[str, Query(pattern="^(csv|jsonl|parquet)$")] = "csv",
) -> Response:
    """Send a run's labels as a file, with the columns that the rows had."""
    name = parse_run(run)
    desk = desk_of(shared)
    file, path = desk.uploads.temporary_file()
    file.close()
    path.unlink()
    # An export finds its format in the name, and writes beside it before renaming.
    path = path.with_suffix(f".{form}")
    try:
        with desk.exports.turn(), user_errors(shared.settings):
            request = ExportRequest(
                destination=str(path),
                selection=ExportFilter(run=name, latest=True),
            )
            export = Export(request, shared.settings)
            try:
                export.run()
            finally:
                export.close()
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return FileResponse(
        path,
        media_type=FORMS[form],
        filename=f"{printable(name)}.{form}",
        background=BackgroundTask(path.unlink, missing_ok=True),
    )


# Files.


@scripts.post("/files/upload")
async def upload(
    request: Request,
    shared: Shared,
    _: Annotated[Caller, Depends(scope("send"))],
    name: Annotated[str, Query(max_length=1000)] = "file",
) -> Response:
    """Keep the body as a file; answer with the address of its page."""
    received = await desk_of(shared).uploads.receive(name, request.stream())
    return json_response(
        {
            "id": received.identity,
            "name": received.name,
            "bytes": received.size,
            "address": f"/upload/{received.identity}",
        }
    )


@dataclass
class Preview:
    """The first rows of a file."""

    names: list[str]
    rows: list[list[str]] = field(default_factory=list)
    #: Columns that are not shown.
    hidden: int = 0
    is_export: bool = False
    #: Columns that are found by their names, by the field of a post.
    detected: dict[str, str] = field(default_factory=dict)


def _preview(upload: Upload, encoding: str | None) -> Preview:
    """Read the first rows of a file. Raises UserError."""
    source = FileSource(str(upload.path), encoding=encoding)
    source.name = upload.name
    names, records = source.head(PREVIEW_ROWS)
    names = [name for name in names if normalize_key(name)]
    first_names = names[:MAX_COLUMNS]
    keys = [normalize_key(name) for name in names]
    preview = Preview(
        names=first_names,
        hidden=len(names) - len(first_names),
        is_export=is_export_row(keys),
    )
    for record in records:
        preview.rows.append(_cells(record, first_names))
    any_columns = Columns()
    fields = {"title": "title", "body": "body", "id": "id"}
    fields |= {"date": "created_utc", "subreddit": "subreddit"}
    for choice, post_field in fields.items():
        for key in any_columns.names_of(post_field):
            if key in keys:
                preview.detected[choice] = names[keys.index(key)]
                break
    return preview


def _cells(record: Record, names: list[str]) -> list[str]:
    """Return a row of a preview: a cell for each name."""
    if not isinstance(record.fields, dict):
        problem = record.fields or "an empty row"
        return [f"({problem})"[:CELL_LENGTH], *[""] * (len(names) - 1)]
    values = normalize_keys(record.fields)
    cells: list[str] = []
    for name in names:
        value = values.get(normalize_key(name))
        text = ""
        if value is not None:
            text = str(value)
        if len(text) > CELL_LENGTH:
            text = text[:CELL_LENGTH] + "…"
        cells.append(text)
    return cells


@router.get("/upload/{identity}")
def show_upload(
    request: Request,
    identity: str,
    shared: Shared,
    _: Sender,
    encoding: Annotated[str, Query(max_length=40)] = "",
) -> Response:
    """Show the first rows of a file, and the form to send it."""
    form = {"encoding": [encoding]}
    return _upload_page(request, shared, identity, form, "")


def _upload_page(
    request: Request,
    shared: Resources,
    identity: str,
    form: Mapping[str, list[str]],
    problem: str,
) -> Response:
    """Return the page of a file. form: what a person has filled in, if anything."""
    desk = desk_of(shared)
    upload = desk.uploads.get(identity)
    preview = Preview([])
    status = 200
    try:
        with desk.previews.turn():
            preview = _preview(upload, field_of(form, "encoding") or None)
    except UserError as error:
        problem = problem or sentence(upload.hide_path(str(error)))
    if problem:
        status = 422
    known_runs: list[str] = []
    caller: Caller = request.state.person
    if caller.may("read"):
        with user_errors(shared.settings):
            recent = runs.recent(shared.redis, MAX_RUNS)
        known_runs = [progress.run for progress in recent]
    values = {name: field_of(form, name)[:20_000] for name in form}
    return page(
        request,
        "upload.html",
        status,
        upload=upload,
        preview=preview,
        problem=problem,
        values=values,
        kept=form.get("keep", preview.names),
        choices=CHOICES,
        run=values.get("run") or default_run(str(upload.path), upload.name),
        runs=known_runs,
        max_run=MAX_RUN,
        warning=_warning(shared),
        labels_of_worker=_worker_labels(shared),
    )


def _worker_labels(shared: Resources) -> list[str]:
    """Return the labels of the workers' model, if they announced them."""
    with user_errors(shared.settings):
        served = known_queues(shared.redis).get(shared.settings.queue)
    if served is None or not served.labels:
        return []
    return list(served.labels)


@router.post("/upload/{identity}")
def start_run(
    request: Request, identity: str, shared: Shared, form: Form, caller: Sender
) -> Response:
    """Send a file's rows as a run."""
    desk = desk_of(shared)
    upload = desk.uploads.get(identity)
    try:
        with desk.previews.turn():
            send_request = _request_of(form, upload)
        desk.sendings.start(upload, send_request, caller.name)
    except UserError as error:
        text = sentence(upload.hide_path(str(error)))
        return _upload_page(request, shared, identity, form, text)
    return see_other(run_address(send_request.run))


@router.post("/upload/{identity}/delete")
def delete_upload(identity: str, shared: Shared, _: Sender) -> Response:
    """Delete a file that is not sent."""
    desk = desk_of(shared)
    upload = desk.uploads.get(identity)
    if not upload.users:
        desk.uploads.delete(upload)
    return see_other("/runs")


def _request_of(form: Mapping[str, list[str]], upload: Upload) -> SendRequest:
    """Return what a form asks to send. Raises UserError."""
    run = parse_run(field_of(form, "run").strip())
    encoding = field_of(form, "encoding").strip()[:MAX_LENGTH] or None
    chosen: dict[str, str | None] = {}
    for name in CHOICES:
        chosen[name] = field_of(form, name)[:MAX_LENGTH] or None
    columns = Columns.of(
        date_format=field_of(form, "date_format").strip()[:MAX_LENGTH] or None,
        **chosen,  # type: ignore[arg-type]
    )
    source = FileSource(str(upload.path), encoding=encoding)
    source.name = upload.name
    names, _ = source.head(1)
    pairs = kept_columns(names, form.get("keep", ()), columns)
    return SendRequest(
        run=run,
        options=options_of(form),
        columns=columns._replace(keep=pairs),
        encoding=encoding,
        again="again" in form,
    )
