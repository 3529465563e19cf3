"""Flower's process: Flower as it is, behind a password, with a state that lasts, and nobody's posts in it.

The one file that knows Flower. What Feedmill does otherwise than the `celery flower` command:

- basic auth for every page and for /api/*; `/metrics`, which Flower leaves open, answers this machine alone;
- what it has seen is kept as JSON, where Flower writes a pickle;
- the broker page names our queues whoever else works on this Redis; a worker's page shows the pool in its own words;
- a failed message shows its reason in the list of messages;
- a worker is asked about itself at its first heartbeat; Flower asks once, whoever is there as it starts;
- arguments that other applications' task-sent events carry, which may be posts, are dropped.

What it leans on in Flower 2.2: `Events.load_state`, `save_state` and `on_event`; `Flower(events=…)`, its `started` and
`update_workers`; the handlers `Metrics`, `BrokerView`, `GetQueueLengths`, `WorkerView`; the options, which are
Tornado's; and in Celery, that a `Task` of celery/events/state.py is made from its fields.
"""

import fcntl
import ipaddress
import json
import logging
import math
import os
import signal
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
from flower.views.workers import WorkerView  # type: ignore[import-untyped]
from kombu.utils.functional import LRUCache
from redis.exceptions import RedisError as RedisFault

from shared.broker import CLASSIFY_TASK, Application, make_app
from shared.errors import UserError, clause
from shared.metrics import connect_briefly
from shared.serving import PERIOD, queues
from shared.settings import Settings

logger = logging.getLogger(__name__)

#: In the data folder.
STATE_FILE, LOCK_FILE = "flower.json", "flower.lock"
#: Milliseconds between two savings of the state: what a killed Flower loses. Pages wait while it is written down.
SAVE_INTERVAL = 30_000
#: Messages that are remembered, the newest; of so many the file has 9 MB.
MAX_TASKS = 20_000
#: Of a task; the other fields are links to tasks.
KEPT_FIELDS = frozenset(Task._fields) - {"root", "parent", "children"}  # type: ignore[attr-defined]  # not in the stub
#: Flower's own variables (FLOWER_CERTFILE, …) that count here too; the others are Feedmill's to set.
PASSED_ON = (
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
#: A request with one of these came through a proxy, and from whom a proxy does not prove.
FORWARDED = ("Forwarded", "Via", "X-Forwarded-For", "X-Real-Ip")


class Dashboard:
    """Flower, listening; `run` serves until SIGTERM or Ctrl-C.

    password: of settings.flower_user; None asks for none. Raises UserError.
    """

    def __init__(self, settings: Settings, address: str, port: int, password: str | None) -> None:
        os.umask(0o077)  # what it writes is its owner's alone
        options = _configure(settings, address, port, password)
        self.encrypted = bool(options.certfile)
        app = make_app(settings)
        with _told(address, port):
            events = MessageEvents(app, settings, options.max_tasks, options.max_workers)
            self._flower = Flower(capp=app, options=options, events=events, **tornado_settings)
            events.met = self._flower.update_workers
            self._flower.add_handlers(".*", _handlers(options.url_prefix))
            port = self._flower.start_http_server()
        prefix = f"/{options.url_prefix.strip('/')}" if options.url_prefix else ""
        host = f"[{address}]" if ":" in address else address
        self.url = f"http{'s' * self.encrypted}://{host}:{port}{prefix}"

    def run(self) -> None:
        loop = self._flower.io_loop
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                loop.asyncio_loop.add_signal_handler(number, loop.stop)
        try:
            # As Flower.start does, without asking who is there: where nobody is yet, it warns that this failed.
            self._flower.events.start()
            self._flower.started = True
            loop.start()
        finally:
            self._flower.stop()


def _configure(settings: Settings, address: str, port: int, password: str | None) -> Any:
    """Flower's options: some from its variables, ours over them. Raises UserError."""
    options = tornado.options.options
    given = {name: os.environ.get(f"FLOWER_{name.upper()}") for name in PASSED_ON}
    options.max_tasks = MAX_TASKS
    options.tasks_columns = "state,kwargs,result,runtime,worker,received,started,uuid"
    try:
        options.parse_command_line(["", *(f"--{name}={value}" for name, value in given.items() if value)], final=False)
    except (tornado.options.Error, ValueError) as error:
        raise UserError(f"One of the FLOWER_ variables cannot be read: {clause(error)}.") from None
    options.address, options.port = address, port
    options.basic_auth = [] if password is None else [f"{settings.flower_user}:{password}"]
    options.format_task = _with_reason
    extract_settings()
    setup_logging()
    return options


@contextmanager
def _told(address: str, port: int) -> Iterator[None]:
    """Turns what keeps Flower from listening into UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"Flower cannot listen on {address}:{port}: {error.strerror}. Choose another --port, or another --address."
        ) from None
    except ValueError as error:  # a certificate that is not there
        raise UserError(f"Flower cannot start: {clause(error)}.") from None


def _with_reason(task: Any) -> Any:
    """For the pages: a failed message shows its reason where others show their result."""
    task.result = task.result or task.exception
    return task


class MessageEvents(Events):  # type: ignore[misc]
    """What Flower has seen: without posts, and kept from one run to the next.

    met: called in the loop's thread at the first heartbeat of a worker; while it says that it is online, it cannot
        answer questions yet.
    """

    met: Callable[[], object]

    def __init__(self, app: Application, settings: Settings, max_tasks: int, max_workers: int) -> None:
        self.queues = Queues(settings)
        self._path = settings.data_folder / STATE_FILE
        self._lock = _locked(settings.data_folder)
        self._max_workers, self._max_tasks = max_workers, max_tasks
        self._known: Any = LRUCache(max_workers)
        super().__init__(
            app,
            io_loop=tornado.ioloop.IOLoop.current(),
            persistent=self._lock is not None,
            state_save_interval=SAVE_INTERVAL,
            max_tasks_in_memory=max_tasks,
            max_workers_in_memory=max_workers,
        )

    def on_event(self, event: dict[str, Any]) -> None:
        # Only another application's task-sent shows arguments as their sender does; the worker's own come next.
        if event["type"] == "task-sent" and self._is_ours(event):
            event = {name: value for name, value in event.items() if name not in ("args", "kwargs")}
        node = str(event.get("hostname"))
        if event["type"] == "worker-online":
            self._known.pop(node, None)
        elif event["type"] == "worker-heartbeat" and node not in self._known:
            self._known[node] = True
            self.io_loop.add_callback(self.met)
        super().on_event(event)

    def _is_ours(self, event: dict[str, Any]) -> bool:
        """Whether a message is for a worker of ours: by its task, or, where that is one's own, by its queue."""
        return event.get("name") == CLASSIFY_TASK or any(
            event.get(where) in self.queues.names() for where in ("queue", "routing_key")
        )

    def load_state(self) -> Any:
        """What the last run had seen; None where there is nothing. A damaged file is set aside."""
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
            logger.warning("what Flower had seen cannot be read (%r) and is set aside as %s", error, aside)
            with suppress(OSError):
                self._path.replace(aside)
            return None
        return state

    def save_state(self) -> None:
        known = self.state.workers.data.values()
        workers = [{name: getattr(worker, name) for name in worker._fields} for worker in known]
        tasks = [_fields(task) for task in self.state.tasks.data.values()]
        written = self._path.with_suffix(".new")
        try:
            written.unlink(missing_ok=True)
            written.write_text(json.dumps({"workers": workers, "tasks": tasks, "counter": self.state.counter}))
            written.replace(self._path)
        except OSError as error:
            logger.warning("what Flower has seen cannot be kept in %s: %s", self._path, error.strerror)


def _fields(task: Task) -> dict[str, Any]:
    """What makes the task again."""
    fields = {name: value for name, value in vars(task).items() if name in KEPT_FIELDS and value is not None}
    return fields | {"worker": task.worker.hostname} if task.worker else fields


class Queues:
    """The names of our queues, as Redis knew them a minute ago at most: events come by the thousand."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._redis = connect_briefly(settings)
        self._names = {settings.queue}
        self._asked = -math.inf

    def names(self) -> set[str]:
        """Where Redis does not answer, those that were known before."""
        if time.monotonic() - self._asked > PERIOD:
            self._asked = time.monotonic()
            try:
                self._names.update(queues(self._redis, self._settings))
            except RedisFault as fault:
                logger.warning("which queues there are cannot be asked (%s)", fault)
        return self._names


class OwnQueues(BaseHandler):  # type: ignore[misc]
    """Names our queues also while no worker of ours runs, but other applications' do."""

    def get_active_queue_names(self) -> list[str]:
        return sorted({*super().get_active_queue_names(), *self.application.events.queues.names()})


class BrokerPage(OwnQueues, BrokerView):  # type: ignore[misc]
    """The broker page: each queue's length over all priorities, without what workers hold."""


class QueueLengths(OwnQueues, GetQueueLengths):  # type: ignore[misc]
    """The same for programs."""


class Verbatim:
    """A text that Flower's pages show as it is: of a str they take the first letter and the dashes for theirs."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text


class PoolPage(WorkerView):  # type: ignore[misc]
    """A worker's page: the pool's statistics in the pool's own words."""

    def render(self, template: str, **shown: Any) -> None:
        if worker := shown.get("worker"):
            pool = worker["stats"].get("pool", {})
            said = {name: Verbatim(value) if isinstance(value, str) else value for name, value in pool.items()}
            shown["worker"] = worker | {"stats": worker["stats"] | {"pool": said}}
        super().render(template, **shown)


class LoopbackMetrics(Metrics):  # type: ignore[misc]
    """Flower's metrics, without a password: for programs on this machine alone."""

    async def get(self) -> None:
        proxied = any(name in self.request.headers for name in FORWARDED)
        if proxied or not ipaddress.ip_address(self.request.remote_ip).is_loopback:
            self.set_status(403)
            self.finish("/metrics answers this machine alone, at its loopback address.\n")
            return
        await super().get()


def _handlers(prefix: str | None) -> list[Any]:
    """What answers before Flower's own handlers of these paths do."""
    ours = [
        ("/metrics", LoopbackMetrics),
        ("/broker", BrokerPage),
        ("/api/queues/length", QueueLengths),
        ("/worker/(.+)", PoolPage),
    ]
    return [rewrite_handler(handler, prefix) for handler in ours] if prefix else ours


def _locked(folder: Path) -> Any:
    """The folder's lock, held as long as this process lives; None where the state cannot be kept there."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (folder / LOCK_FILE).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.warning("another Flower keeps what it sees in %s: this one keeps nothing (--data-folder)", folder)
    except OSError as error:
        logger.warning("nothing of what Flower sees is kept: %s: %s", folder, error.strerror)
    else:
        return lock
    return None
