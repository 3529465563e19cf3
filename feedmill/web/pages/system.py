"""The page of the system: queues, workers, memory, sources, and the dead letters."""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any

from fastapi import Depends, Query, Request
from rich.filesize import decimal
from starlette.responses import Response

from feedmill.monitoring import watch
from feedmill.outcomes.dead_letters import (
    DeadLetterEntry,
    DeadLetterStream,
    replacement,
)
from feedmill.outcomes.rows import ENTRY_ID
from feedmill.producers.live.state import Gaps
from feedmill.shared.broker import make_app
from feedmill.shared.errors import UserError, sentence
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.metrics import connect_for_monitoring
from feedmill.shared.redis_errors import user_errors
from feedmill.web.access import Caller
from feedmill.web.failures import Failure
from feedmill.web.pages.frame import Form, field_of, page, page_router, person
from feedmill.web.pages.options import options_of
from feedmill.web.resources import Resources, resources

#: Seconds for which a snapshot is shown to everyone: workers are asked for it.
SNAPSHOT_TTL_S = 2.0
#: Dead letters and gaps to show, and characters of a part of one.
MAX_LETTERS = 50
MAX_GAPS = 50
PART_LENGTH = 3000
#: Dead letters that one request changes, and refusals to show.
MAX_CHANGED = 1000
MAX_REFUSALS = 20

router = page_router()
Shared = Annotated[Resources, Depends(resources)]
Reader = Annotated[Caller, Depends(person("read"))]
Admin = Annotated[Caller, Depends(person("admin"))]


class Watcher:
    """The latest snapshot of the system, renewed when somebody looks."""

    def __init__(self, shared: Resources) -> None:
        self._settings = shared.settings
        self._redis = connect_for_monitoring(shared.settings)
        self._app = make_app(shared.settings, current=False)
        self._lock = threading.Lock()
        self._snapshot: watch.Status | None = None
        self._at = 0.0

    def snapshot(self) -> watch.Status:
        """Return the state of the system. Raises UserError."""
        with self._lock:
            is_old = time.monotonic() - self._at > SNAPSHOT_TTL_S
            if self._snapshot is None or is_old:
                with user_errors(self._settings):
                    self._snapshot = watch.status(
                        self._redis, self._app, self._settings
                    )
                self._at = time.monotonic()
            return self._snapshot

    def close(self) -> None:
        self._redis.close()


def watcher_of(shared: Resources) -> Watcher:
    """Return the server's watcher, made at its first use."""
    with shared.pages_lock:
        watcher: Watcher | None = shared.pages.get("system")
        if watcher is None:
            watcher = Watcher(shared)
            shared.pages["system"] = watcher
            shared.endings.append(watcher.close)
    return watcher


@dataclass
class Outcome:
    """The effect of a request on dead letters."""

    done: str = ""
    problem: str = ""
    refusals: list[tuple[str, str]] = field(default_factory=list)


NO_OUTCOME = Outcome()


@router.get("/system")
def show_system(
    request: Request,
    shared: Shared,
    _: Reader,
    run: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    """Show the state of the system. run: show only dead letters of this run."""
    return _system_page(request, shared, run, {}, NO_OUTCOME)


@router.get("/system-state")
def show_state(request: Request, shared: Shared, _: Reader) -> Response:
    """Show what changes by itself, for the page's script."""
    return page(request, "system_state.html", **_state(shared))


def _state(shared: Resources) -> dict[str, Any]:
    snapshot = watcher_of(shared).snapshot()
    memory = snapshot.memory
    problems = [str(unread) for unread in snapshot.unread]
    problems += [problem.text for problem in snapshot.problems]
    with user_errors(shared.settings):
        gaps = Gaps(shared.redis).open()
    return {
        "system": snapshot,
        "memory_used": decimal(memory.used),
        "memory_limit": decimal(memory.limit),
        "problems": problems,
        "gaps": gaps[-MAX_GAPS:],
    }


def _system_page(
    request: Request,
    shared: Resources,
    run: str,
    form: Mapping[str, list[str]],
    outcome: Outcome,
) -> Response:
    settings = shared.settings
    status = 200
    if outcome.problem:
        status = 422
    caller: Caller = request.state.person
    with user_errors(settings):
        stream = DeadLetterStream(shared.redis)
        letters = list(stream.newest(MAX_LETTERS, run or None))
        count = stream.count()
    letters.reverse()
    return page(
        request,
        "system.html",
        status,
        letters=letters,
        letter_count=count,
        run=run,
        outcome=outcome,
        values={name: field_of(form, name)[:20_000] for name in form},
        length=PART_LENGTH,
        may_change=caller.may("admin"),
        flower=settings.web_flower_url,
        grafana=settings.web_grafana_url,
        **_state(shared),
    )


# Dead letters.


@router.post("/system/dead")
def change_dead_letters(
    request: Request, shared: Shared, form: Form, _: Admin
) -> Response:
    """Retry or drop dead letters: those that were ticked, or all of them."""
    run = field_of(form, "run")[:200]
    try:
        with user_errors(shared.settings):
            outcome = _change(shared, form, run or None)
    except UserError as error:
        outcome = Outcome(problem=sentence(str(error)))
    return _system_page(request, shared, run, form, outcome)


def _change(
    shared: Resources, form: Mapping[str, list[str]], run: str | None
) -> Outcome:
    """Do what a form asks. Raises UserError."""
    stream = DeadLetterStream(shared.redis)
    action = field_of(form, "action")
    if action in {"retry", "drop"}:
        entries = _existing_letters(stream, form.get("entry", ()))
    elif action in {"retry-all", "drop-all"}:
        # Read first: a letter that fails again would come again.
        entries = islice(_all(stream, run), MAX_CHANGED)
    else:
        raise Failure(422, "invalid", "Unknown action.")
    letters = list(entries)
    if not letters:
        return Outcome(problem="Choose dead letters first.")
    if action == "drop-all" and "sure" not in form:
        return Outcome(problem="Tick “I am sure” to drop all of them.")
    if action.startswith("drop"):
        dropped = stream.drop(letters)
        return Outcome(done=f"{dropped:,} dropped.")
    options: ClassifyOptions | None = None
    if "other" in form:
        options = replacement(options_of(form), other=True)
    return _retry(shared, stream, letters, options)


def _retry(
    shared: Resources,
    stream: DeadLetterStream,
    letters: Iterable[DeadLetterEntry],
    options: ClassifyOptions | None,
) -> Outcome:
    outcome = Outcome()
    sent = 0
    refusals = 0
    for entry, refusal in stream.retry(letters, shared.settings, options):
        if refusal is None:
            sent += 1
            continue
        refusals += 1
        if len(outcome.refusals) < MAX_REFUSALS:
            outcome.refusals.append((entry.name, refusal))
    outcome.done = f"{sent:,} sent again."
    if refusals:
        outcome.done = f"{sent:,} sent again, {refusals:,} not sent and kept."
    return outcome


def _existing_letters(
    stream: DeadLetterStream, ids: Iterable[str]
) -> Iterator[DeadLetterEntry]:
    """Yield the dead letters with these ids that still exist."""
    for entry_id in islice(ids, MAX_CHANGED):
        if not ENTRY_ID.fullmatch(entry_id):
            raise Failure(
                422, "invalid", f"{entry_id!r:.200} is not an id of a dead letter."
            )
        entry = stream.get(entry_id)
        if entry is not None:
            yield entry


def _all(stream: DeadLetterStream, run: str | None) -> Iterator[DeadLetterEntry]:
    """Yield the dead letters, of a run if one is given, oldest first."""
    for entry in stream.all():
        if run is None or entry.letter.run == run:
            yield entry
