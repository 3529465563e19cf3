"""Run Flower with a password, persistent state and no post texts.

This is the only module that imports Flower. The dashboard differs from the `celery flower` command in these ways:

- Basic auth protects every page, /api/* and /metrics, which Flower leaves open.
- The state is saved as JSON; Flower saves a pickle.
- The broker page lists Feedmill's queues even while no Feedmill worker runs.
- The task list shows the reason of a failed message.
- Arguments in task-sent events are dropped, because those of other applications may contain posts.
- Messages are indexed for searches when a page searches: half of an event's CPU time.

Relies on these internals. Flower 2.2: `Events.load_state`, `save_state` and `on_event`; `events.TaskSearchEngine`;
`Flower(events=…)` and its `started`; `Metrics.get` and `BaseHandler.get_active_queue_names`; `apply_env_options`.
Celery: `Task` in celery/events/state.py is constructed from its fields.
"""

import json
import logging
import os
from collections import Counter
from contextlib import suppress
from typing import Any

import tornado.ioloop
import tornado.options
from celery.events.state import Task, Worker
from flower import events as flower_events  # type: ignore[import-untyped]
from flower.app import Flower  # type: ignore[import-untyped]
from flower.command import apply_env_options, extract_settings, setup_logging  # type: ignore[import-untyped]
from flower.urls import settings as tornado_settings  # type: ignore[import-untyped]
from flower.utils.search import TaskSearchEngine  # type: ignore[import-untyped]
from flower.views import BaseHandler  # type: ignore[import-untyped]
from flower.views.monitor import Metrics  # type: ignore[import-untyped]
from kombu.utils.functional import LRUCache
from pydantic import SecretStr
from tornado.web import authenticated

from feedmill.shared.atomic_files import replacing
from feedmill.shared.broker import make_app
from feedmill.shared.errors import SettingsError, UserError, clause
from feedmill.shared.linux import notify
from feedmill.shared.metrics import connect_for_monitoring
from feedmill.shared.model_routing import queues
from feedmill.shared.settings import FLOWER_USER, PREFIX, Settings
from feedmill.stack.processes import EXIT_SIGNALS, not_ignored

logger = logging.getLogger(__name__)

#: File in the data folder.
STATE_FILE = "flower.json"
#: Milliseconds between saves of the state. A killed Flower loses the events since the last save; pages block during a
#: save.
SAVE_INTERVAL_MS = 120_000
#: Maximum number of messages to remember, newest first. The state file is about 9 MB at this number.
MAX_TASKS = 20_000
#: Task fields to save: all but the links to other tasks.
SAVED_FIELDS = frozenset(Task._fields) - {"root", "parent", "children"}  # type: ignore[attr-defined]  # not in the stub


class Dashboard:
    """A Flower server that listens from construction on; `run` serves until SIGTERM or Ctrl-C. Raises UserError."""

    def __init__(self, settings: Settings, address: str, port: int) -> None:
        os.umask(0o077)  # only the owner may read the state file
        if settings.flower_password is None:
            raise SettingsError(f"{PREFIX}FLOWER_PASSWORD must be set: anyone who can open Flower can stop workers.")
        options = _configure(address, port, settings.flower_password)
        Metrics.get = authenticated(Metrics.get)
        BaseHandler.get_active_queue_names = _queue_names
        flower_events.TaskSearchEngine = SearchEngine
        app = make_app(settings)
        try:
            events = MessageEvents(
                app,
                io_loop=tornado.ioloop.IOLoop.current(),
                db=settings.data_folder / STATE_FILE,
                persistent=True,
                state_save_interval=SAVE_INTERVAL_MS,
                max_tasks_in_memory=options.max_tasks,
                max_workers_in_memory=options.max_workers,
            )
            self._flower = Flower(capp=app, options=options, events=events, **tornado_settings)
            port = self._flower.start_http_server()
        except OSError as error:
            raise UserError(
                f"Flower cannot listen on {address}:{port}: {error.strerror}. Choose another --port or --address."
            ) from None
        except ValueError as error:  # a missing certificate file
            raise UserError(f"Flower cannot start: {clause(error)}. Correct the FLOWER_ variables.") from None
        prefix = f"/{options.url_prefix.strip('/')}" if options.url_prefix else ""
        host = f"[{address}]" if ":" in address else address
        logger.info("Flower at %s", f"http{'s' * bool(options.certfile)}://{host}:{port}{prefix}")

    def run(self) -> None:
        loop = self._flower.io_loop
        for number in not_ignored(*EXIT_SIGNALS):
            loop.asyncio_loop.add_signal_handler(number, loop.stop)
        try:
            # Like Flower.start, but without inspecting workers, which only logs a warning while no worker is online.
            self._flower.events.start()
            self._flower.started = True
            notify("READY=1")
            loop.start()
        finally:
            self._flower.stop()


def _configure(address: str, port: int, password: SecretStr) -> Any:
    """Return Flower's options: from FLOWER_ variables, except those that are set here. Raises UserError."""
    options = tornado.options.options
    options.max_tasks = MAX_TASKS
    options.tasks_columns = "state,kwargs,result,runtime,worker,received,started,uuid"
    os.environ.pop("FLOWER_PORT", None)  # `port` applies; Kubernetes sets a URL beside a service named flower
    try:
        apply_env_options()
    except (tornado.options.Error, TypeError, ValueError) as error:
        given = ", ".join(sorted(name for name in os.environ if name.startswith("FLOWER_")))
        raise UserError(f"One of {given} is invalid: {clause(error)}. Correct or unset it.") from None
    options.address, options.port = address, port
    options.basic_auth = [f"{FLOWER_USER}:{password.get_secret_value()}"]
    options.format_task = _with_reason
    extract_settings()
    setup_logging()
    return options


def _with_reason(task: Any) -> Any:
    """Show a failed task's exception in the column for results."""
    task.result = task.result or task.exception
    return task


class MessageEvents(flower_events.Events):  # type: ignore[misc]
    """Flower's event store: drops post texts and saves its state between runs. db: path of the state file."""

    def on_event(self, event: dict[str, Any]) -> None:
        if event["type"] == "task-sent":
            event = {name: value for name, value in event.items() if name not in ("args", "kwargs")}
        super().on_event(event)

    def load_state(self) -> Any:
        """Load the saved state; None if there is none. Rename a damaged file to `.damaged`."""
        try:
            kept = json.loads(self.db.read_text())
            workers: Any = LRUCache(tornado.options.options.max_workers)
            tasks: Any = LRUCache(tornado.options.options.max_tasks)
            workers.update((fields["hostname"], Worker(**fields)) for fields in kept["workers"])
            for fields in kept["tasks"]:
                tasks[fields["uuid"]] = Task(**fields | {"worker": workers.data.get(fields.get("worker"))})
            state = flower_events.EventsState(workers=workers, tasks=tasks)
            for task in tasks.data.values():
                task.cluster_state = state
            state.counter.update({name: Counter(counted) for name, counted in kept["counter"].items()})
        except FileNotFoundError:
            return None
        except Exception as error:
            aside = self.db.with_suffix(".damaged")
            logger.warning("cannot read Flower's saved state (%r): moved to %s, starting empty", error, aside)
            with suppress(OSError):
                self.db.replace(aside)
            return None
        return state

    def save_state(self) -> None:
        known = self.state.workers.data.values()
        workers = [{name: getattr(worker, name) for name in worker._fields} for worker in known]
        tasks = [_fields(task) for task in self.state.tasks.data.values()]
        try:
            self.db.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with replacing(self.db) as temporary:
                temporary.write_text(json.dumps({"workers": workers, "tasks": tasks, "counter": self.state.counter}))
        except OSError as error:
            logger.warning(
                "cannot save Flower's state to %s (%s): free space there, or correct the folder's permissions",
                self.db,
                error.strerror,
            )


class SearchEngine(TaskSearchEngine):  # type: ignore[misc]
    """Flower's index of messages for searches, updated before a search."""

    def __init__(self) -> None:
        super().__init__()
        self._changed: dict[str, Task] = {}

    def upsert(self, task: Task) -> None:
        self._changed[task.uuid] = task

    def remove(self, task_id: str) -> None:
        self._changed.pop(task_id, None)
        super().remove(task_id)

    def search(self, *args: Any, **kwargs: Any) -> Any:
        changed, self._changed = self._changed, {}
        for task in changed.values():
            super().upsert(task)
        return super().search(*args, **kwargs)


def _fields(task: Task) -> dict[str, Any]:
    """Return the fields that recreate the task."""
    fields = {name: value for name, value in vars(task).items() if name in SAVED_FIELDS and value is not None}
    return fields | {"worker": task.worker.hostname} if task.worker else fields


def _queue_names(page: Any) -> list[str]:
    """Return Feedmill's queues, for the pages that list queues. Their lengths leave out messages in flight."""
    with connect_for_monitoring(page.capp.settings) as redis:
        return queues(redis, page.capp.settings)
