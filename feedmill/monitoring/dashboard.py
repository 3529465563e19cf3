"""Run Flower with a password, persistent state and no post texts.

This is the only module that imports Flower. The dashboard differs from the `celery flower` command
in these ways:

- Basic auth protects every page, /api/* and /metrics, which Flower leaves open. Beside it, people
  can log in at an OAuth provider; Flower would ask for both.
- The state is saved as JSON; Flower saves a pickle. Messages with purged posts are left out.
- The broker page lists Feedmill's queues even while no Feedmill worker runs.
- The task list shows the reason of a failed message.
- Arguments in task-sent events are dropped, because those of other applications may contain posts.
- Messages are indexed for searches when a page searches: half of an event's CPU time.
- The connection that receives events is checked every few seconds, and replaced if Redis does not
  answer. `/healthcheck` reports it.
- New workers are inspected, and their tasks are known, without a visit to their pages. Workers
  that are offline for `FLOWER_PURGE_OFFLINE_WORKERS` seconds, an hour by default, are forgotten;
  Flower only hides them.
- No other site can show a page in a frame.

Relies on these internals. Flower 2.2: `Events.run`, `load_state`, `save_state` and `on_event`; the
state's `counter` and `metrics`; `events.TaskSearchEngine`; `app.Inspector`, its `workers`,
`_inspect` and `_on_update`; the server's `started` and arguments; `Metrics.get`,
`Healthcheck.get`, `BaseHandler.get_active_queue_names` and `get_current_user`;
`apply_env_options`. Celery: a `Task`
in celery/events/state.py is constructed from its fields. kombu: a receiver calls `on_iteration`
every second; `maybe_check_subclient_health` sends a PING, and drops a connection with two
unanswered ones. redis-py: the `_sock` of a connection is None while disconnected.
"""

import hmac
import json
import logging
import math
import os
import socket
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Any

import tornado.ioloop
import tornado.options
from celery import Task as CeleryTask
from celery.events import receiver
from celery.events.state import Task, Worker
from flower import app as flower_app  # type: ignore[import-untyped]
from flower import events as flower_events
from flower.app import Flower  # type: ignore[import-untyped]
from flower.command import apply_env_options, extract_settings, setup_logging  # type: ignore[import-untyped]
from flower.inspector import Inspector  # type: ignore[import-untyped]
from flower.urls import settings as tornado_settings  # type: ignore[import-untyped]
from flower.utils.authentication import (  # type: ignore[import-untyped]
    authenticate,
    validate_auth_option,
)
from flower.utils.search import TaskSearchEngine  # type: ignore[import-untyped]
from flower.views import BaseHandler  # type: ignore[import-untyped]
from flower.views.monitor import Healthcheck, Metrics  # type: ignore[import-untyped]
from kombu.utils.functional import LRUCache
from pydantic import SecretStr
from redis.exceptions import RedisError
from tornado.web import HTTPError, OutputTransform, authenticated

# Registers the shared task, which the REST API names.
import feedmill.workers.runtime.task  # noqa: F401
from feedmill.monitoring.flower_state import STATE_FILE, IdSearch
from feedmill.monitoring.gpus import gpus_of
from feedmill.shared.atomic_files import fitting_name, replacing
from feedmill.shared.broker import (
    CHECK_INTERVAL_S,
    DEVICE_POOL,
    Application,
    make_app,
    queue_depth,
)
from feedmill.shared.errors import SettingsError, UserError, clause, printable
from feedmill.shared.linux import notify
from feedmill.shared.metrics import connect_for_monitoring
from feedmill.shared.model_routing import queues
from feedmill.shared.problems import (
    REPORT_INTERVAL_S,
    SILENCE_LIMIT_S,
    remove_flower,
    report_flower,
)
from feedmill.shared.purge import newest_purge, read_purges
from feedmill.shared.redis_errors import user_message
from feedmill.shared.settings import FLOWER_USER, PREFIX, Settings
from feedmill.stack.processes import EXIT_SIGNALS, not_ignored

logger = logging.getLogger(__name__)

#: Typed as Any: the stubs declare context managers as what they yield.
EventReceiver: Any = receiver.EventReceiver
#: Milliseconds between saves of the state. A killed Flower loses the events since the last save;
#: pages block during a save.
SAVE_INTERVAL_MS = 120_000
#: Maximum number of messages to remember, newest first. The state file is about 9 MB at this
#: number.
MAX_TASKS = 20_000
#: Seconds after which a worker that is offline is forgotten.
OFFLINE_TTL_S = 3600
#: Seconds between two attempts to connect to Redis.
RECONNECT_DELAY_S = 2.0
#: Milliseconds between two inspections of new workers, and of searches for offline ones.
TIDY_INTERVAL_MS = 5_000
#: Maximum number of tasks of workers that the REST API knows, and characters of a task's name.
MAX_TASK_NAMES = 1_000
MAX_NAME_CHARACTERS = 256
#: Options of logins at an OAuth provider: all of them, or none.
OAUTH_OPTIONS = (
    "auth", "auth_provider", "oauth2_key", "oauth2_secret", "oauth2_redirect_uri",
)  # fmt: skip
#: Headers of every response. A page in another site's frame could have its buttons clicked unseen.
HEADERS = {
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}
#: Header of responses that ask for the password.
CHALLENGE = 'Basic realm="flower"'
#: Task fields to save: all but the links to other tasks.
# Not in the stub.
SAVED_FIELDS = frozenset(Task._fields) - {"root", "parent", "children"}  # type: ignore[attr-defined]


class Dashboard:
    """A Flower server that listens from construction on; `run` serves until SIGTERM or Ctrl-C.
    Raises UserError.
    """

    def __init__(self, settings: Settings, address: str, port: int) -> None:
        os.umask(0o077)  # only the owner may read the state file
        if settings.flower_password is None:
            raise SettingsError(
                f"{PREFIX}FLOWER_PASSWORD must be set: anyone who can open Flower "
                "can stop workers."
            )
        options = _configure(address, port, settings.flower_password)
        Metrics.get = authenticated(Metrics.get)
        Healthcheck.get = _report_health
        BaseHandler.get_active_queue_names = _queue_names
        BaseHandler.get_current_user = _current_user
        flower_events.TaskSearchEngine = SearchEngine
        flower_app.Inspector = WorkerInspector
        # Flower's API looks results up in the current application.
        app = make_app(settings, current=True)
        app.conf.broker_transport_options |= {"health_check_interval": CHECK_INTERVAL_S}
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
            self._flower = Flower(
                capp=app,
                options=options,
                events=events,
                transforms=[SecurityHeaders],
                **tornado_settings,
            )
            events.flower = self._flower
            port = self._flower.start_http_server()
        except OSError as error:
            raise UserError(
                f"Flower cannot listen on {address}:{port}: {error.strerror}. Choose another "
                "--port or --address."
            ) from None
        except ValueError as error:  # a missing certificate file
            raise UserError(
                f"Flower cannot start: {clause(error)}. Correct the FLOWER_ variables."
            ) from None
        scheme = "https" if options.certfile else "http"
        host = f"[{address}]" if ":" in address else address
        path = ""
        if options.url_prefix:
            prefix = options.url_prefix.strip("/")
            path = f"/{prefix}"
        logger.info("Flower at %s", f"{scheme}://{host}:{port}{path}")
        self._reports = Reports(settings, events, port)

    def run(self) -> None:
        loop = self._flower.io_loop
        for number in not_ignored(*EXIT_SIGNALS):
            loop.asyncio_loop.add_signal_handler(number, loop.stop)
        try:
            # Like Flower.start, but without inspecting workers, which only logs a warning while no
            # worker is online: MessageEvents inspects those that it hears of.
            self._flower.events.start()
            self._flower.started = True
            self._reports.start()
            notify("READY=1")
            loop.start()
        finally:
            self._reports.stop()
            self._flower.stop()


class Reports:
    """A thread that reports to Redis, every few seconds, whether Flower hears events: nothing else
    shows that a dashboard is out of date.
    """

    def __init__(self, settings: Settings, events: "MessageEvents", port: int) -> None:
        self._settings = settings
        self._events = events
        self._name = f"{socket.gethostname()}:{port}"
        self._ended = Event()
        self._thread = Thread(
            target=self._run,
            name="reports",
            daemon=True,
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        with connect_for_monitoring(self._settings) as redis:
            while True:
                heard_at = max(began, self._events.answered_at)
                silence_s = time.monotonic() - heard_at
                with suppress(RedisError):
                    report_flower(redis, self._name, silence_s)
                if self._ended.wait(REPORT_INTERVAL_S):
                    break
            with suppress(RedisError):
                remove_flower(redis, self._name)


def _configure(address: str, port: int, password: SecretStr) -> Any:
    """Return Flower's options: from FLOWER_ variables, except those that are set here.

    Raises UserError.
    """
    options = tornado.options.options
    options.max_tasks = MAX_TASKS
    options.purge_offline_workers = OFFLINE_TTL_S
    options.tasks_columns = "state,kwargs,result,runtime,worker,received,started,uuid"
    # `port` applies; Kubernetes sets a URL beside a service named flower
    os.environ.pop("FLOWER_PORT", None)
    try:
        apply_env_options()
    except (tornado.options.Error, TypeError, ValueError) as error:
        names = sorted(name for name in os.environ if name.startswith("FLOWER_"))
        listed = ", ".join(names)
        raise UserError(
            f"One of {listed} is invalid: {clause(error)}. Correct or unset it."
        ) from None
    _check_oauth(options)
    options.address = address
    options.port = port
    options.basic_auth = [f"{FLOWER_USER}:{password.get_secret_value()}"]
    options.format_task = _with_reason
    extract_settings()
    setup_logging()
    return options


def _check_oauth(options: Any) -> None:
    """Check that the options of logins at a provider are complete. Raises UserError."""
    values = {name: getattr(options, name) for name in OAUTH_OPTIONS}
    missing = [name for name, value in values.items() if not value]
    if missing and len(missing) < len(values):
        listed = ", ".join(f"FLOWER_{name.upper()}" for name in missing)
        raise UserError(
            f"A login at an OAuth provider also needs {listed}. Set it, or unset the others."
        )
    if options.auth and not validate_auth_option(options.auth):
        raise UserError(
            "FLOWER_AUTH is invalid: give addresses such as ann@example.com|bob@example.com, or "
            ".*@example.com."
        )


def _current_user(page: Any) -> object:
    """Return who sends a request: with the password, or after a login at the OAuth provider.

    Returns None for a person who may log in there. Raises HTTPError for a wrong password, and if
    there is no provider.
    """
    options = page.application.options
    header = page.request.headers.get("Authorization", "")
    if header or not options.auth:
        if not _has_password(header, options.basic_auth):
            raise HTTPError(401)
        return FLOWER_USER
    cookie = page.get_secure_cookie("user")
    if not cookie:
        return None
    user = cookie.decode("utf-8", "replace")
    return user if authenticate(options.auth, user) else None


def _has_password(header: str, credentials: Sequence[str]) -> bool:
    """Return whether a request's header has one of the users with the password."""
    kind, _, encoded = header.partition(" ")
    if kind.lower() != "basic":
        return False
    try:
        sent = b64decode(encoded.strip(), validate=True)
    except ValueError:
        return False
    return any(hmac.compare_digest(stored.encode(), sent) for stored in credentials)


def _with_reason(task: Any) -> Any:
    """Show a failed task's exception in the column for results."""
    task.result = task.result or task.exception
    return task


async def _report_health(page: Any) -> None:
    """Answer OK if Redis has lately answered the connection that receives events, and else 503
    with the reason.
    """
    silence = time.monotonic() - page.application.events.answered_at
    if silence < SILENCE_LIMIT_S:
        page.write("OK")
        return
    page.set_status(503)
    period = (
        "since Flower started" if math.isinf(silence) else f"for {silence:.0f} seconds"
    )
    page.write(
        f"Redis has not answered {period}: what the pages show may be out of date."
    )


class SecurityHeaders(OutputTransform):
    """A transform that adds HEADERS to every response: pages, errors, files and the REST API.

    It also asks for the password wherever it is missing. Flower's API does not, and a browser that
    opened a worker's page first does not send it there unasked: the page's buttons would fail.
    """

    def transform_first_chunk(
        self,
        status_code: int,
        headers: Any,
        chunk: bytes,
        finishing: bool,  # noqa: ARG002 - Tornado's signature
    ) -> Any:
        headers.update(HEADERS)
        if status_code == 401:
            headers["WWW-Authenticate"] = CHALLENGE
        return status_code, headers, chunk


class Receiver(EventReceiver):  # type: ignore[misc]  # see EventReceiver
    """Celery's receiver of events, with a connection that Redis must answer every few seconds.

    Without that, it waits for ever if a connection is lost without a word, as behind a firewall
    that has forgotten it.
    """

    #: Time of Redis' latest answer, by the monotonic clock; -inf before the first.
    answered_at = -math.inf
    #: Time of the next check, by the monotonic clock.
    _check_at = 0.0
    _channel: Any = None

    @contextmanager
    def establish_connection(self) -> Iterator[Any]:
        with self.create_connection() as connection:
            reconnect(connection, self.app)
            yield connection

    def on_consume_ready(
        self, connection: Any, channel: Any, consumers: Any, **options: Any
    ) -> None:
        self._channel = channel
        super().on_consume_ready(
            connection,
            channel,
            consumers,
            **options,
        )

    def on_iteration(self) -> None:
        """Check the connection. Called after each event, and every second without one."""
        subscriber = self._channel.__dict__.get("subclient")
        if subscriber is None or subscriber.connection is None:
            return  # not subscribed yet
        now = time.monotonic()
        is_connected = subscriber.connection._sock is not None
        if is_connected and not subscriber.health_check_response_counter:
            self.answered_at = now
        if now >= self._check_at:
            self._check_at = now + CHECK_INTERVAL_S
            self._channel.connection.cycle.maybe_check_subclient_health()


def reconnect(connection: Any, app: Application) -> None:
    """Wait until Redis is reachable. Log each distinct error once."""
    logged: set[str] = set()

    def failed(error: Exception, *_: Any) -> None:
        reason = user_message(error, app.settings) or repr(error)
        if reason not in logged:
            logged.add(reason)
            logger.warning("%s Retrying.", reason)

    connection.ensure_connection(
        failed,
        interval_start=RECONNECT_DELAY_S,
        interval_max=RECONNECT_DELAY_S,
    )


class MessageEvents(flower_events.Events):  # type: ignore[misc]
    """Flower's event store: drops post texts and saves its state between runs. db: path of the
    state file.
    """

    #: The server, set by Dashboard before `start`.
    flower: Flower
    _receiver: Receiver | None = None
    #: Position in the log of purges up to which messages are forgotten; None before the first one.
    _purge_position: str | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Names of workers to inspect. Used only on the event loop, like the state.
        self._new_workers: set[str] = set()
        self._tidying = tornado.ioloop.PeriodicCallback(self._tidy, TIDY_INTERVAL_MS)

    @property
    def answered_at(self) -> float:
        """Time of Redis' latest answer to the connection that receives events, by the monotonic
        clock.
        """
        if self._receiver is None:
            return -math.inf
        return self._receiver.answered_at

    def start(self) -> None:
        super().start()
        self._tidying.start()

    def stop(self) -> None:
        self._tidying.stop()
        super().stop()

    def run(self) -> None:
        """Receive events for as long as the process lives.

        Flower's own pauses grow without bound.
        """
        while True:
            try:
                with self.capp.connection() as connection:
                    reconnect(connection, self.capp)
                    latest = Receiver(
                        connection,
                        handlers={"*": self.on_event},
                        app=self.capp,
                    )
                    latest.answered_at = self.answered_at
                    self._receiver = latest
                    latest.capture(
                        limit=None,
                        timeout=None,
                        wakeup=True,
                    )
            except Exception as error:
                logger.warning(
                    "cannot receive events (%s); reconnecting in %.0f s",
                    clause(error),
                    RECONNECT_DELAY_S,
                )
                time.sleep(RECONNECT_DELAY_S)

    def on_event(self, event: dict[str, Any]) -> None:
        if event["type"] == "task-sent":
            event = {
                name: value
                for name, value in event.items()
                if name not in ("args", "kwargs")
            }
        super().on_event(event)
        if event["type"] in ("worker-online", "worker-heartbeat"):
            self.io_loop.add_callback(self._note_worker, event)

    def _note_worker(self, event: dict[str, Any]) -> None:
        """Schedule the inspection of a worker that has started or was not inspected before."""
        name = event["hostname"]
        has_started = event["type"] == "worker-online"
        if has_started or name not in self.flower.workers:
            self._new_workers.add(name)

    def _tidy(self) -> None:
        """Inspect new workers, and forget workers that have been offline for as long as the option
        says.
        """
        if self._new_workers:
            self._new_workers.clear()
            self.flower.update_workers()
        limit = tornado.options.options.purge_offline_workers
        if limit is None:
            return
        offline = self._offline_workers(limit)
        for name in offline:
            self.state.workers.pop(name, None)
            self.state.counter.pop(name, None)
            self.flower.workers.pop(name, None)
        self.state.metrics.remove_workers(offline)

    def _offline_workers(self, seconds: float) -> set[str]:
        """Return the names of the workers of which nothing was heard for so many seconds."""
        now = time.time()
        offline = set()
        for name in {*self.state.workers, *self.flower.workers}:
            worker = self.state.workers.get(name)
            if worker is not None and worker.alive:
                continue
            heartbeats = worker.heartbeats if worker is not None else []
            if name in self.flower.workers:
                inspected_at = self.flower.workers[name]["timestamp"]
            else:
                inspected_at = 0.0
            if now - max([inspected_at, *heartbeats]) >= seconds:
                offline.add(name)
        return offline

    def load_state(self) -> Any:
        """Load the saved state; None if there is none. Rename a damaged file to `.damaged`."""
        try:
            saved = json.loads(self.db.read_text())
            workers: Any = LRUCache(tornado.options.options.max_workers)
            tasks: Any = LRUCache(tornado.options.options.max_tasks)
            for fields in saved["workers"]:
                workers[fields["hostname"]] = Worker(**fields)
            for fields in saved["tasks"]:
                worker = workers.data.get(fields.get("worker"))
                tasks[fields["uuid"]] = Task(**fields | {"worker": worker})
            state = flower_events.EventsState(workers=workers, tasks=tasks)
            for task in tasks.data.values():
                task.cluster_state = state
            for name, counts in saved["counter"].items():
                state.counter[name] = Counter(counts)
            position = saved.get("purges")
            if position is not None:
                self._purge_position = str(position)
        except FileNotFoundError:
            return None
        except Exception as error:
            name = fitting_name(self.db.stem, ".damaged")
            aside = self.db.with_name(name)
            logger.warning(
                "cannot read Flower's saved state (%r): moved to %s, starting empty",
                error,
                aside,
            )
            with suppress(OSError):
                self.db.replace(aside)
            return None
        return state

    def forget_purged(self) -> None:
        """Forget the messages with posts that were purged since the last call. Raises
        redis.exceptions.RedisError.
        """
        with connect_for_monitoring(self.capp.settings) as redis:
            position = self._purge_position
            if position is None:
                self._purge_position = newest_purge(redis)
                return
            ids: set[str] = set()
            while True:
                page = read_purges(redis, position)
                for purge in page.purges:
                    ids.update(purge.ids)
                if page.position == position:
                    break
                position = page.position
        if ids:
            search = IdSearch(ids)
            for name, task in list(self.state.tasks.items()):
                if search.names_post(vars(task)):
                    del self.state.tasks[name]
                    self.state.search_engine.remove(name)
        self._purge_position = position

    def save_state(self) -> None:
        try:
            self.forget_purged()
        except RedisError as error:
            # They are forgotten at the next save: the position is saved, too.
            logger.warning("cannot read which posts were purged (%s)", clause(error))
        workers = []
        for worker in self.state.workers.data.values():
            fields = {name: getattr(worker, name) for name in worker._fields}
            workers.append(fields)
        tasks = [_fields(task) for task in self.state.tasks.data.values()]
        saved = {
            "workers": workers,
            "tasks": tasks,
            "counter": self.state.counter,
            "purges": self._purge_position,
        }
        try:
            self.db.parent.mkdir(
                parents=True,
                exist_ok=True,
                mode=0o700,
            )
            with replacing(self.db) as temporary:
                temporary.write_text(json.dumps(saved))
        except OSError as error:
            logger.warning(
                (
                    "cannot save Flower's state to %s (%s): free space there, or correct the "
                    "folder's permissions"
                ),
                self.db,
                error.strerror,
            )


class WorkerInspector(Inspector):  # type: ignore[misc]
    """Flower's inspector of workers, from which the REST API learns the names of their tasks.

    Flower sets limits of tasks, and sends them, only if its own process has registered them. The
    pool's statistics of a worker on a GPU get a summary of all workers there.
    """

    #: Queues in which messages waited at the latest inspection.
    _waiting_queues: tuple[str, ...] = ()

    def _summarize_gpus(self) -> None:
        """Add the summary of its GPU to the statistics of each worker."""
        pools: dict[str, dict[str, Any]] = {}
        for node, information in self.workers.items():
            statistics = information.get("stats", {})
            pool = statistics.get("pool")
            if not isinstance(pool, dict):
                continue
            if pool.get("implementation") == DEVICE_POOL:
                pools[node] = pool
        for gpu in gpus_of(pools, self._waiting_queues):
            line = gpu.line(names_host=False)
            for node in gpu.nodes:
                pool = pools[node]
                pool["gpu"] = line

    def _inspect(self, method: str, workername: str | None) -> None:
        """Ask workers, on another thread; look at the queues, too, before statistics."""
        if method == "stats":
            self._waiting_queues = _waiting_queues(self.capp.settings)
        super()._inspect(method, workername)

    def _on_update(self, workername: str, method: str, response: Any) -> None:
        super()._on_update(workername, method, response)
        if method == "stats":
            self._summarize_gpus()
        if method != "registered":
            return
        for description in response:
            name, _, _ = str(description).partition(" ")  # a rate limit may follow
            if name != printable(name) or len(name) > MAX_NAME_CHARACTERS:
                continue
            tasks = self.capp.tasks
            if name not in tasks and len(tasks) < MAX_TASK_NAMES:
                remote = RemoteTask()
                remote.name = name
                self.capp.register_task(remote)


class RemoteTask(CeleryTask):  # type: ignore[type-arg]  # generic only in the stubs
    """A task of a worker, by its name."""

    def run(self, *_: Any, **__: Any) -> None:
        """Do nothing: workers run the task."""


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
        changed = self._changed
        self._changed = {}
        for task in changed.values():
            super().upsert(task)
        return super().search(*args, **kwargs)


def _fields(task: Task) -> dict[str, Any]:
    """Return the fields that recreate the task."""
    fields = {
        name: value
        for name, value in vars(task).items()
        if name in SAVED_FIELDS and value is not None
    }
    if task.worker:
        fields["worker"] = task.worker.hostname
    return fields


def _waiting_queues(settings: Settings) -> tuple[str, ...]:
    """Return the queues in which messages wait; none if Redis does not answer."""
    waiting: list[str] = []
    with suppress(RedisError), connect_for_monitoring(settings) as redis:
        for name in queues(redis, settings):
            depth = queue_depth(redis, name)
            if depth.waiting:
                waiting.append(name)
    return tuple(waiting)


def _queue_names(page: Any) -> list[str]:
    """Return Feedmill's queues, for the pages that list queues.

    Their lengths leave out messages in flight.
    """
    settings = page.capp.settings
    with connect_for_monitoring(settings) as redis:
        return queues(redis, settings)
