"""Run Flower with a password, persistent state and no post texts.

This is the only module that imports Flower. The dashboard differs from the `celery flower` command in these ways:

- Basic auth protects every page, /api/* and /metrics, which Flower leaves open.
- The state is saved as JSON; Flower saves a pickle.
- The broker page lists Feedmill's queues even while no Feedmill worker runs.
- The task list shows the reason of a failed message.
- Workers are inspected from their first heartbeat until they answer. Flower inspects only the workers that are online
  when it starts.
- Arguments in the task-sent events of other applications are dropped, because they may contain posts.

Relies on these internals. Flower 2.2: `Events.load_state`, `save_state` and `on_event`; `Flower(events=…)`, its
`started` and `update_workers`; the handlers `Metrics`, `BrokerView` and `GetQueueLengths`; the Tornado options.
Celery: `Task` in celery/events/state.py is constructed from its fields.
"""

import fcntl
import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tornado.ioloop
import tornado.options
from celery.events.state import Task, Worker
from flower.api.tasks import GetQueueLengths  # type: ignore[import-untyped]
from flower.app import Flower, rewrite_handler  # type: ignore[import-untyped]
from flower.command import extract_settings, setup_logging  # type: ignore[import-untyped]
from flower.events import Events, EventsState  # type: ignore[import-untyped]
from flower.urls import settings as tornado_settings  # type: ignore[import-untyped]
from flower.views import BaseHandler  # type: ignore[import-untyped]
from flower.views.broker import BrokerView  # type: ignore[import-untyped]
from flower.views.monitor import Metrics  # type: ignore[import-untyped]
from kombu.utils.functional import LRUCache
from redis.exceptions import RedisError
from tornado.web import authenticated

from feedmill.shared.atomic_files import replacing
from feedmill.shared.broker import CLASSIFY_TASK, Application, make_app
from feedmill.shared.errors import UserError, clause
from feedmill.shared.metrics import connect_for_monitoring
from feedmill.shared.model_routing import ANNOUNCE_INTERVAL_S, queues
from feedmill.shared.settings import FLOWER_USER, Settings
from feedmill.stack.signals import EXIT_SIGNALS, not_ignored

logger = logging.getLogger(__name__)

#: Files in the data folder.
STATE_FILE, LOCK_FILE = "flower.json", "flower.lock"
#: Maximum inspections of a worker that does not answer.
MAX_INSPECTIONS = 5
#: Milliseconds between saves of the state. A killed Flower loses the events since the last save; pages block during a
#: save.
SAVE_INTERVAL_MS = 30_000
#: Maximum number of messages to remember, newest first. The state file is about 9 MB at this number.
MAX_TASKS = 20_000
#: Task fields to save: all but the links to other tasks.
SAVED_FIELDS = frozenset(Task._fields) - {"root", "parent", "children"}  # type: ignore[attr-defined]  # not in the stub
#: Flower options that FLOWER_ environment variables (FLOWER_CERTFILE, …) may set. Feedmill sets all others.
PASSED_OPTIONS = (
    "auto_refresh",
    "ca_certs",
    "certfile",
    "inspect_timeout",
    "keyfile",
    "max_tasks",
    "max_workers",
    "natural_time",
    "purge_offline_workers",
    "read_only",
    "tasks_columns",
    "url_prefix",
)


class Dashboard:
    """A Flower server that listens from construction on; `run` serves until SIGTERM or Ctrl-C.

    password: password of FLOWER_USER; None disables basic auth. Raises UserError.
    """

    def __init__(self, settings: Settings, address: str, port: int, password: str | None) -> None:
        os.umask(0o077)  # only the owner may read the state file
        options = _configure(address, port, password)
        self.encrypted = bool(options.certfile)
        app = make_app(settings)
        with _start_errors(address, port):
            events = MessageEvents(app, settings, options.max_tasks, options.max_workers)
            self._flower = Flower(capp=app, options=options, events=events, **tornado_settings)
            events.inspect, events.inspected = self._flower.update_workers, self._flower.workers
            self._flower.add_handlers(".*", _handlers(options.url_prefix))
            port = self._flower.start_http_server()
        prefix = f"/{options.url_prefix.strip('/')}" if options.url_prefix else ""
        host = f"[{address}]" if ":" in address else address
        self.url = f"http{'s' * self.encrypted}://{host}:{port}{prefix}"

    def run(self) -> None:
        loop = self._flower.io_loop
        for number in not_ignored(*EXIT_SIGNALS):
            loop.asyncio_loop.add_signal_handler(number, loop.stop)
        try:
            # Like Flower.start, but without inspecting workers, which only logs a warning while no worker is online.
            self._flower.events.start()
            self._flower.started = True
            loop.start()
        finally:
            self._flower.stop()


def _configure(address: str, port: int, password: str | None) -> Any:
    """Return Flower's options: PASSED_OPTIONS from the environment, all others are set here. Raises UserError."""
    options = tornado.options.options
    given = {name: os.environ.get(f"FLOWER_{name.upper()}") for name in PASSED_OPTIONS}
    options.max_tasks = MAX_TASKS
    options.tasks_columns = "state,kwargs,result,runtime,worker,received,started,uuid"
    try:
        options.parse_command_line(["", *(f"--{name}={value}" for name, value in given.items() if value)], final=False)
    except (tornado.options.Error, ValueError) as error:
        raise UserError(f"Invalid FLOWER_ environment variable: {clause(error)}. Correct or unset it.") from None
    options.address, options.port = address, port
    options.basic_auth = [] if password is None else [f"{FLOWER_USER}:{password}"]
    options.format_task = _with_reason
    extract_settings()
    setup_logging()
    return options


@contextmanager
def _start_errors(address: str, port: int) -> Iterator[None]:
    """Translate errors that keep Flower from listening into UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"Flower cannot listen on {address}:{port}: {error.strerror}. Choose another --port or --address."
        ) from None
    except ValueError as error:  # a missing certificate file
        raise UserError(f"Flower cannot start: {clause(error)}. Correct the FLOWER_ environment variables.") from None


def _with_reason(task: Any) -> Any:
    """Show a failed task's exception in the column for results."""
    task.result = task.result or task.exception
    return task


class MessageEvents(Events):  # type: ignore[misc]
    """Flower's event store: drops post texts and saves its state between runs.

    inspect: inspects all workers. Called on the loop's thread at a worker's first heartbeats, until it has answered. At
        the earlier worker-online event, the worker cannot answer yet.
    inspected: the answers of each worker, by command.
    """

    inspect: Callable[[], object]
    inspected: dict[str, dict[str, Any]]

    def __init__(self, app: Application, settings: Settings, max_tasks: int, max_workers: int) -> None:
        self.queues = Queues(settings)
        self._path = settings.data_folder / STATE_FILE
        self._lock = _locked(settings.data_folder)
        self._max_workers, self._max_tasks = max_workers, max_tasks
        #: Number of inspections by node name.
        self._inspections: Any = LRUCache(max_workers)
        super().__init__(
            app,
            io_loop=tornado.ioloop.IOLoop.current(),
            persistent=self._lock is not None,
            state_save_interval=SAVE_INTERVAL_MS,
            max_tasks_in_memory=max_tasks,
            max_workers_in_memory=max_workers,
        )

    def on_event(self, event: dict[str, Any]) -> None:
        # A task-sent event may carry another application's arguments. Our workers' own events never contain posts.
        if event["type"] == "task-sent" and self._is_ours(event):
            event = {name: value for name, value in event.items() if name not in ("args", "kwargs")}
        node = str(event.get("hostname"))
        if event["type"] == "worker-online":
            self._inspections.pop(node, None)
            self.inspected.pop(node, None)
        elif event["type"] == "worker-heartbeat" and self._is_to_inspect(node):
            self._inspections[node] = self._inspections.get(node, 0) + 1
            self.io_loop.add_callback(self.inspect)
        super().on_event(event)

    def _is_to_inspect(self, node: str) -> bool:
        return "stats" not in self.inspected.get(node, ()) and self._inspections.get(node, 0) < MAX_INSPECTIONS

    def _is_ours(self, event: dict[str, Any]) -> bool:
        """Return True if the message is for a Feedmill worker, by its task name or, for custom tasks, by its queue."""
        return event.get("name") == CLASSIFY_TASK or any(
            event.get(where) in self.queues.names() for where in ("queue", "routing_key")
        )

    def load_state(self) -> Any:
        """Load the saved state; None if there is none. Rename a damaged file to `.damaged`."""
        try:
            kept = json.loads(self._path.read_text())
            workers: Any = LRUCache(self._max_workers)
            tasks: Any = LRUCache(self._max_tasks)
            workers.update((fields["hostname"], Worker(**fields)) for fields in kept["workers"])
            for fields in kept["tasks"]:
                tasks[fields["uuid"]] = Task(**fields | {"worker": workers.data.get(fields.get("worker"))})
            state = EventsState(workers=workers, tasks=tasks)
            for task in tasks.data.values():
                task.cluster_state = state
            state.counter.update({name: Counter(counted) for name, counted in kept["counter"].items()})
        except FileNotFoundError:
            return None
        except Exception as error:
            aside = self._path.with_suffix(".damaged")
            logger.warning("cannot read Flower's saved state (%r): moved to %s, starting empty", error, aside)
            with suppress(OSError):
                self._path.replace(aside)
            return None
        return state

    def save_state(self) -> None:
        known = self.state.workers.data.values()
        workers = [{name: getattr(worker, name) for name in worker._fields} for worker in known]
        tasks = [_fields(task) for task in self.state.tasks.data.values()]
        try:
            with replacing(self._path) as temporary:
                temporary.write_text(json.dumps({"workers": workers, "tasks": tasks, "counter": self.state.counter}))
        except OSError as error:
            logger.warning(
                "cannot save Flower's state to %s (%s): free space there, or correct the folder's permissions",
                self._path,
                error.strerror,
            )


def _fields(task: Task) -> dict[str, Any]:
    """Return the fields that recreate the task."""
    fields = {name: value for name, value in vars(task).items() if name in SAVED_FIELDS and value is not None}
    return fields | {"worker": task.worker.hostname} if task.worker else fields


class Queues:
    """The names of Feedmill's queues, cached for up to a minute because events arrive by the thousand."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._redis = connect_for_monitoring(settings)
        self._names = {settings.queue}
        self._asked = -math.inf

    def names(self) -> set[str]:
        """Return the queue names: the last known ones while Redis is unreachable."""
        if time.monotonic() - self._asked > ANNOUNCE_INTERVAL_S:
            self._asked = time.monotonic()
            try:
                self._names.update(queues(self._redis, self._settings))
            except RedisError as fault:
                logger.warning("cannot list the queues (%s): using the last known ones", fault)
        return self._names


class OwnQueues(BaseHandler):  # type: ignore[misc]
    """List Feedmill's queues even while only workers of other applications are online."""

    def get_active_queue_names(self) -> list[str]:
        return sorted({*super().get_active_queue_names(), *self.application.events.queues.names()})


class BrokerPage(OwnQueues, BrokerView):  # type: ignore[misc]
    """The broker page: each queue's length over all priorities, without the messages in flight."""


class QueueLengths(OwnQueues, GetQueueLengths):  # type: ignore[misc]
    """The JSON API for the lengths that the broker page shows."""


class ProtectedMetrics(Metrics):  # type: ignore[misc]
    """Flower's metrics, which it leaves open, with the password of all other pages."""

    @authenticated
    async def get(self) -> None:
        await super().get()


def _handlers(prefix: str | None) -> list[Any]:
    """Return the handlers that replace Flower's own for these paths."""
    ours = [
        ("/metrics", ProtectedMetrics),
        ("/broker", BrokerPage),
        ("/api/queues/length", QueueLengths),
    ]
    return [rewrite_handler(handler, prefix) for handler in ours] if prefix else ours


def _locked(folder: Path) -> Any:
    """Lock the folder until this process exits; return None if the state cannot be saved there."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (folder / LOCK_FILE).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.warning(
            "another Flower uses %s: not saving this one's state; set another --data-folder to save it", folder
        )
    except OSError as error:
        logger.warning(
            "cannot save Flower's state to %s (%s): free space there, or correct the folder's permissions",
            folder,
            error.strerror,
        )
    else:
        return lock
    return None
