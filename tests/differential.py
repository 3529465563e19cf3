"""Compare Feedmill's worker with a stock Celery worker: `python -m tests.differential --messages
10000 --seed N`.

Both workers run the same application, tasks and model on the same messages, each with its own
Redis. The stock prefork worker classifies one message after another; Feedmill's worker forms
micro-batches. The test compares everything that the workers leave behind: Celery's results of
messages and callbacks, the callbacks' arguments, events, stored results and dead letters.

The last line is JSON: messages, posts, seed, differing (failed comparisons),
incomplete_event_logs, by_state (messages by Celery state), and seconds of each worker. Exits 1 if
anything differs, after printing the first differences.
"""

import argparse
import json
import logging
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import randrange
from tempfile import TemporaryDirectory
from typing import Any

from celery import Celery

from feedmill.shared.broker import queue_depth
from feedmill.shared.keys import COUNTERS, DEAD_LETTERS, RESULTS_STREAM
from feedmill.shared.results import ResultsStore, stored_ids
from feedmill.shared.settings import Settings
from tests.fakes.differential_messages import (
    REVOKED_STAMP,
    WAITING,
    Draw,
    Sending,
    everything,
    is_message,
)
from tests.fakes.differential_tasks import TOLD
from tests.fakes.models import NLI, make_model
from tests.forkserver import ForkedChild
from tests.support import (
    RedisServer,
    _environment,
    application,
    forks,
    redis_servers,
    wait_for_replies,
    wait_until,
)

BIN = Path(sys.executable).parent
WORKERS = {
    "stock": [str(BIN / "celery"), "-A", "tests.fakes.stock_app", "worker", "-P", "prefork",
    "-c", "1",
              "-n", "stock@differs", "--loglevel", "INFO"],
    "feedmill": [str(BIN / "feedmill"), "worker", "--name", "feedmill@differs"],
}  # fmt: skip
POOLS = {
    "stock": "celery.concurrency.prefork:TaskPool",
    "feedmill": "feedmill.workers.runtime.pool:DevicePool",
}
ENVIRONMENT = {
    "FEEDMILL_INCLUDE": "tests.fakes.differential_tasks",
    "FEEDMILL_LABELS": "sports, technology, food",
    "FEEDMILL_TOKEN_BUDGET": "4096",
    # Half precision rounds by more than TOLERANCE.
    "FEEDMILL_DTYPE": "float32",
    # Nothing may be trimmed before the comparison.
    "FEEDMILL_RESULTS_STREAM_LENGTH": "10000000",
    "FEEDMILL_DEAD_LETTERS_LENGTH": "10000000",
}
#: Allowed difference between two scores of a post. Padding changes the order of summation.
TOLERANCE = 1e-4
#: Fields of results, metadata and dead letters that are not compared, with the reason.
IGNORED_FIELDS = {
    "worker": "the workers have different names",
    "classified_at": "a time",
    "queued_seconds": "a duration; for a post sent twice, it depends on which message was first",
    "date_done": "a time",
    "failed_at": "a time",
}
#: Compared fields of each event type. The others are worker, process, times and the clock.
COMPARED_FIELDS = {
    "task-received": ("name", "args", "kwargs", "root_id", "parent_id", "retries"),
    "task-started": (),
    "task-succeeded": ("result",),
    "task-failed": ("exception", "traceback"),
    "task-retried": ("exception", "traceback"),
    "task-revoked": ("terminated", "signum", "expired"),
    "task-rejected": ("requeue",),
}
#: The result in the events of a message with ignore_result. Other results contain times, and
#: events shorten them, so they are compared in Celery's result backend instead.
SUMMARY = re.compile(r"'\d+ of \d+ posts classified'")
#: Tasks whose events show shortened arguments. The arguments that they record are compared
#: instead.
CALLBACKS = ("differential.record", "differential.breaks")
#: Random ids of groups of callbacks, drawn by Celery.
RANDOM_ID = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
)
#: The frame that Feedmill adds to a traceback: `keep_unstored` (workers/runtime/in_flight.py).
OUR_FRAME = re.compile(
    r'  File "[^"]*/in_flight\.py", line \d+, in mark_as_done\n(?:    .*\n)*'
)
#: Ids of a chord's body and its errback. Their parent and root are the header message that happens
#: to finish last. If the body fails because of the header, Celery records that message's children
#: as the body's.
BODY = re.compile(r"-body(-error)?$")
#: A complete sequence of a message's events except task-received, in LETTERS; "b" stands for a
#: requeue.
COMPLETE = re.compile(r"(st|sb)*(sS|sF|sFJ|sJF|s|V)")
LETTERS = {
    "started": "s",
    "retried": "t",
    "succeeded": "S",
    "failed": "F",
    "revoked": "V",
    "rejected": "J",
}
END_EVENTS = ("task-succeeded", "task-failed", "task-revoked")
#: Seconds without an event after which a worker counts as done. Follow-up tasks start at once.
QUIET_S = 2.0
#: Tasks without an end event: Celery has none for Ignore.
SILENT = ("differential.ignore", "differential.own_state")


class EventLog:
    """A worker's events of each task, in order of arrival."""

    def __init__(self, sendings: Sequence[Sending]) -> None:
        self.events: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        #: Those task-received that Feedmill sends for messages with an ETA, and the stock worker's
        #: only ones.
        self._due_later: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        #: Monotonic times of the latest event of any kind, and of the latest compared one.
        self.heard_at = self.told_at = 0.0
        #: Guards `events` between the receiver's thread and the thread that waits for the end.
        self._lock = threading.Lock()
        self._silent = {call.id for call in everything(sendings) if call.task in SILENT}

    def hear(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        self.heard_at = time.monotonic()
        if kind not in COMPARED_FIELDS:
            return
        self.told_at = self.heard_at
        task_id = event["uuid"]
        kept = {name: event.get(name) for name in COMPARED_FIELDS[kind]}
        if kind == "task-succeeded" and not SUMMARY.fullmatch(str(kept["result"])):
            del kept["result"]
        if kind == "task-received" and kept["name"] in CALLBACKS:
            del kept["args"], kept["kwargs"]
        with self._lock:
            self.events[task_id].append({"type": kind} | kept)
            if kind == "task-received" and event.get("eta"):
                self._due_later[task_id].append(self.events[task_id][-1])

    def is_quiet(self, seconds: float) -> bool:
        """Return whether no compared event has arrived for so long."""
        return time.monotonic() - self.told_at >= seconds

    def received(self, task_id: str) -> bool:
        return task_id in self.events

    def unfinished(self) -> list[str]:
        """Return the ids of received tasks that have neither ended nor been retried."""
        with self._lock:
            return [
                task_id
                for task_id, events in self.events.items()
                if self._is_open(task_id, events)
            ]

    def _is_open(self, task_id: str, events: Sequence[Mapping[str, Any]]) -> bool:
        kinds = Counter(event["type"] for event in events)
        kinds["task-received"] = len(self.arrivals(task_id))
        again = kinds["task-retried"] + sum(
            bool(event.get("requeue")) for event in events
        )
        ended = any(kinds[kind] for kind in END_EVENTS)
        if task_id in self._silent and not ended:
            ended = kinds["task-started"] == kinds["task-received"]
        return kinds["task-received"] > again + ended or not (again or ended)

    def arrivals(self, task_id: str) -> list[dict[str, Any]]:
        """Return a task's task-received.

        Feedmill sends another one when a message with an ETA is due.
        """
        arrivals = [
            event
            for event in self.events.get(task_id, [])
            if event["type"] == "task-received"
        ]
        put_aside = [id(event) for event in self._due_later.get(task_id, [])]
        started = []
        for place, event in enumerate(arrivals):
            following = arrivals[place + 1] if place + 1 < len(arrivals) else None
            is_due = (
                following is not None
                and id(following) not in put_aside
                and following["retries"] == event["retries"]
            )
            if id(event) in put_aside and is_due:
                continue
            started.append(event)
        return started

    def others(self, task_id: str) -> list[dict[str, Any]]:
        """Return a task's events except task-received, which may precede the task-retried of the
        previous attempt.
        """
        return [
            event
            for event in self.events.get(task_id, [])
            if event["type"] != "task-received"
        ]

    def is_complete(self, task_id: str) -> bool:
        """Return whether each task-started follows a task-received and precedes an event that ends
        the attempt.
        """
        arrived = started = 0
        counted = {id(event) for event in self.arrivals(task_id)}
        for event in self.events.get(task_id, []):
            if event["type"] == "task-received" and id(event) not in counted:
                continue
            arrived += event["type"] == "task-received"
            started += event["type"] == "task-started"
            if started > arrived:
                return False
        letters = "".join(
            "b"
            if event.get("requeue")
            else LETTERS[event["type"].removeprefix("task-")]
            for event in self.others(task_id)
        )
        # revoked before it was received, or while it waited for its ETA
        revoked = letters.endswith("V")
        return (
            bool(COMPLETE.fullmatch(letters))
            and started <= arrived <= started + revoked
        )


@contextmanager
def listening(app: Celery, sendings: Sequence[Sending]) -> Iterator[EventLog]:
    """Record events on a separate thread. Yields the log once the receiver is subscribed."""
    log = EventLog(sendings)
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, {"*": log.hear})
        thread = threading.Thread(
            target=receiver.capture,
            kwargs={"limit": None, "timeout": None},
            daemon=True,
        )
        thread.start()
        try:
            wait_until(lambda: log.heard_at, "the worker's heartbeat is heard")
            yield log
        finally:
            receiver.should_stop = True
            thread.join(30)


@dataclass
class Side:
    """One of the two workers, with the events and the Redis content that it left behind."""

    name: str
    redis: RedisServer
    log: EventLog
    seconds: float


def start(name: str, redis: RedisServer, model: Path, folder: Path) -> ForkedChild:
    """Start a worker. `work` waits until it is ready."""
    folder.mkdir()
    ours = {"FEEDMILL_REDIS_URL": redis.url, "FEEDMILL_MODEL": str(model)}
    return ForkedChild(
        forks(), name, WORKERS[name], folder, _environment(folder, **ENVIRONMENT | ours)
    )


def work(
    worker: ForkedChild, redis: RedisServer, sendings: Sequence[Sending], limit: float
) -> Side:
    """Send all messages to a worker, wait for the last event, and stop the worker with SIGTERM."""
    worker.wait_until(lambda: " ready." in worker.log.read_text())
    app = application(redis)
    # Do not subscribe to results, because this process never waits for one.
    app.backend.result_consumer.consume_from = lambda _: None  # type: ignore[attr-defined]  # not in the stub
    wait_for_replies(app)
    (stats,) = (app.control.inspect(timeout=30, limit=1).stats() or {}).values()
    if stats["pool"]["implementation"] != POOLS[worker.name]:
        raise RuntimeError(f"{worker.name} runs {stats['pool']['implementation']}")
    with listening(app, sendings) as log:
        began = time.monotonic()
        send(app, log, sendings)
        try:
            wait_until(
                all_done(worker, redis, log, sendings),
                (f"{worker.name} has finished all messages"),
                limit,
            )
        except AssertionError as late:  # the comparison shows the missing messages
            sys.stderr.write(f"{late}\n")
        seconds = time.monotonic() - began
    worker.process.terminate()
    if status := worker.process.wait(60):
        raise RuntimeError(
            f"{worker.name} ended with status {status}. {worker.log_tail()}"
        )
    return Side(worker.name, redis, log, seconds)


def send(app: Celery, log: EventLog, sendings: Sequence[Sending]) -> None:
    """Send the messages that are revoked while they wait, revoke them, and send the other
    messages.
    """
    calls = [call for sending in sendings for call in sending.calls]
    revoke(app, [call.id for call in calls if call.fate == "revoked"])
    protocol_1 = Celery(
        broker=app.conf.broker_url,
        backend=app.conf.result_backend,
        set_as_current=False,
    )
    protocol_1.conf.update(
        task_default_queue=app.conf.task_default_queue, task_protocol=1
    )
    protocol_1.backend.result_consumer.consume_from = lambda _: None  # type: ignore[attr-defined]  # not in the stub
    senders = {1: protocol_1, 2: app}
    header, stamp = REVOKED_STAMP
    stamps: Any = {header: [stamp]}
    app.control.revoke_by_stamped_headers(stamps, reply=True, limit=1, timeout=60)
    waiting = [call.id for call in calls if call.fate in WAITING]
    eta = datetime.now(UTC) + timedelta(seconds=10 + 0.03 * len(waiting))
    for sending in sendings:
        if sending.waits():
            sending.send(senders[sending.protocol], eta)
    wait_until(
        lambda: all(map(log.received, waiting)), "the waiting messages have arrived"
    )
    revoke(app, [call.id for call in calls if call.fate == "revoked waiting"])
    if datetime.now(UTC) > eta - timedelta(seconds=1):
        raise RuntimeError(
            "this machine is too slow: messages may have started before they were "
            "revoked. Try again."
        )
    for sending in sendings:
        if not sending.waits():
            sending.send(senders[sending.protocol], eta)


def revoke(app: Celery, ids: Sequence[str]) -> None:
    """Revoke messages and wait for the worker's reply."""
    if ids and not app.control.revoke(list(ids), reply=True, limit=1, timeout=60):
        raise RuntimeError("the worker does not reply to revoke")


def all_done(
    worker: ForkedChild, redis: RedisServer, log: EventLog, sendings: Sequence[Sending]
) -> Callable[[], bool]:
    """Return a function that checks whether all messages are done, and writes progress to standard
    error.
    """
    first = [
        call.id
        for each in sendings
        for call in (each.calls[:1] if each.kind == "chain" else each.calls)
    ]
    began = reported = time.monotonic()

    def done() -> bool:
        nonlocal reported
        if worker.process.poll() is not None:
            raise RuntimeError(f"{worker.name} ended. {worker.log_tail()}")
        waiting, leased, _ = queue_depth(redis.client, "feedmill")
        now = time.monotonic()
        if now - reported > 5:
            reported = now
            left = [
                *log.unfinished(),
                *(task_id for task_id in first if not log.received(task_id)),
            ]
            sys.stderr.write(
                f"{worker.name}, {now - began:.0f} s: {len(log.events)} tasks seen, {waiting} "
                f"waiting, {leased} "
                f"leased, {len(left)} unfinished: {', '.join(left[:5])}\n"
            )
        if waiting or leased or not log.is_quiet(QUIET_S):
            return False
        return all(map(log.received, first)) and not log.unfinished()

    return done


# Comparing.


@dataclass(frozen=True)
class Difference:
    """A place where the two workers' data differ."""

    where: str
    stock: object
    feedmill: object

    def __str__(self) -> str:
        return (
            f"{self.where}\n    stock:    {self.stock!s:.1500}\n    feedmill: "
            f"{self.feedmill!s:.1500}"
        )


@dataclass
class Comparison:
    differences: list[Difference] = field(default_factory=list)

    def same(self, where: str, stock: object, feedmill: object) -> bool:
        """Record all differences between two values. Return whether there are none."""
        before = len(self.differences)
        self._walk(where, stock, feedmill)
        return len(self.differences) == before

    def _walk(self, where: str, stock: Any, feedmill: Any) -> None:
        if isinstance(stock, dict) and isinstance(feedmill, dict):
            if not stock.keys() ^ feedmill.keys():
                for name in stock:
                    if name == "scores":
                        self._scores(f"{where}.{name}", stock[name], feedmill[name])
                    elif name == "label" and is_outcome(stock):
                        self._label(f"{where}.{name}", stock, feedmill)
                    elif name not in IGNORED_FIELDS:
                        self._walk(f"{where}.{name}", stock[name], feedmill[name])
                return
        elif isinstance(stock, list | tuple) and isinstance(feedmill, list | tuple):
            if len(stock) == len(feedmill):
                for number, (one, other) in enumerate(
                    zip(stock, feedmill, strict=True)
                ):
                    self._walk(f"{where}[{number}]", one, other)
                return
        elif isinstance(stock, str) and isinstance(feedmill, str):
            if RANDOM_ID.sub("<id>", stock) == RANDOM_ID.sub(
                "<id>", OUR_FRAME.sub("", feedmill)
            ):
                return
        elif type(stock) is type(feedmill) and stock == feedmill:
            return
        self.differences.append(Difference(where, stock, feedmill))

    def _scores(
        self, where: str, stock: dict[str, float], feedmill: dict[str, float]
    ) -> None:
        """Compare scores: equal length, descending, within the tolerance.

        Equal scores may be in either order.
        """
        ordered = all(
            list(each.values()) == sorted(each.values(), reverse=True)
            for each in (stock, feedmill)
        )
        level = all(
            abs(a - b) <= TOLERANCE
            for a, b in zip(stock.values(), feedmill.values(), strict=False)
        )
        equal = all(
            abs(stock[label] - feedmill[label]) <= TOLERANCE
            for label in stock.keys() & feedmill.keys()
        )
        if not (ordered and level and equal and len(stock) == len(feedmill)):
            self.differences.append(Difference(where, stock, feedmill))

    def _label(
        self, where: str, stock: dict[str, Any], feedmill: dict[str, Any]
    ) -> None:
        """Compare labels, which may differ if the two best scores are equal."""
        ours, theirs = feedmill["label"], stock["label"]
        best = stock["scores"].get(theirs, 0.0)
        if (
            ours != theirs
            and abs(best - stock["scores"].get(ours, -1.0)) > 2 * TOLERANCE
        ):
            self.differences.append(Difference(where, theirs, ours))


def is_outcome(found: Mapping[str, Any]) -> bool:
    return isinstance(found.get("scores"), dict)


def compare(
    stock: Side, feedmill: Side, sendings: Sequence[Sending]
) -> tuple[list[Difference], int]:
    """Return all differences and the number of incomplete event logs."""
    comparison = Comparison()
    _compare_results(comparison, stock, feedmill)
    _compare_recorded(comparison, stock, feedmill)
    _compare_stored(comparison, stock, feedmill)
    _compare_dead_letters(comparison, stock, feedmill)
    incomplete = 0
    known = {call.id for call in everything(sendings)}
    for task_id in sorted(known | stock.log.events.keys() | feedmill.log.events.keys()):
        incomplete += not _compare_events(comparison, task_id, stock.log, feedmill.log)
    return comparison.differences, incomplete


def _keys(side: Side, pattern: str) -> set[str]:
    return set(map(str, side.redis.client.scan_iter(pattern, count=1000)))


def _both(
    comparison: Comparison, what: str, stock: Side, feedmill: Side, pattern: str
) -> Iterator[list[str]]:
    """Yield the keys that both sides have, in batches.

    Record keys of only one side as differences.
    """
    theirs, ours = _keys(stock, pattern), _keys(feedmill, pattern)
    for key in sorted(theirs ^ ours):
        sides = (stock.redis.client, feedmill.redis.client)
        comparison.same(
            f"{what} {key}",
            *("present" if each.exists(key) else "missing" for each in sides),
        )
    common = sorted(theirs & ours)
    for start in range(0, len(common), 500):
        yield common[start : start + 500]


def _compare_results(comparison: Comparison, stock: Side, feedmill: Side) -> None:
    """Compare Celery's stored state, result, error, traceback and children of each message and
    callback.
    """
    for keys in _both(comparison, "result", stock, feedmill, "celery-task-meta-*"):
        values: list[Any] = [side.redis.client.mget(keys) for side in (stock, feedmill)]
        for key, theirs, ours in zip(keys, *values, strict=True):
            found = [json.loads(each) for each in (theirs, ours)]
            if BODY.search(key):
                found = [each | {"parent_id": None, "children": None} for each in found]
            comparison.same(key, *found)


def _compare_recorded(comparison: Comparison, stock: Side, feedmill: Side) -> None:
    """Compare the arguments recorded by error callbacks and by tasks' handlers."""
    for keys in _both(comparison, "recorded", stock, feedmill, f"{TOLD}*"):
        for key in keys:
            lists: list[Any] = [
                side.redis.client.lrange(key, 0, -1) for side in (stock, feedmill)
            ]
            comparison.same(
                key, *([json.loads(each) for each in found] for found in lists)
            )


def _compare_stored(comparison: Comparison, stock: Side, feedmill: Side) -> None:
    """Compare each post's results, and check that each result has one stream entry."""
    theirs, ours = (set(stored_ids(side.redis.client)) for side in (stock, feedmill))
    comparison.same("ids of the stored results", sorted(theirs), sorted(ours))
    stores = [ResultsStore(side.redis.client, Settings()) for side in (stock, feedmill)]
    for post_id in theirs & ours:
        found = [
            {each.fingerprint: each.model_dump() for each in store.get(post_id)}
            for store in stores
        ]
        comparison.same(f"stored {post_id}", *found)
    for side in (stock, feedmill):
        # `repeated` and `answered` depend on which of two messages with the same post is first,
        # and are not compared.
        stored, entries = (
            side.redis.client.hget(COUNTERS, "stored"),
            side.redis.client.xlen(RESULTS_STREAM),
        )
        comparison.same(
            f"{side.name}: entries of the stream for each result",
            str(stored),
            str(entries),
        )
    counts = [side.redis.client.xlen(RESULTS_STREAM) for side in (stock, feedmill)]
    comparison.same("results stored", *counts)


def _compare_dead_letters(comparison: Comparison, stock: Side, feedmill: Side) -> None:
    """Compare all dead letters: a post that several messages repeat has one letter, which names
    one of them.

    Not compared is `attempts`: a stock worker writes a message's letters in its first attempt,
    Feedmill after the last.
    """
    found: list[Counter[str]] = []
    ignored = {*IGNORED_FIELDS, "message", "attempts"}
    for side in (stock, feedmill):
        entries: Any = side.redis.client.xrange(DEAD_LETTERS)
        letters = (json.loads(entry["letter"]) for _, entry in entries)
        found.append(
            Counter(
                json.dumps(
                    {
                        name: value
                        for name, value in letter.items()
                        if name not in ignored
                    }
                )
                for letter in letters
            )
        )
    theirs, ours = found
    comparison.same("dead letters", dict(theirs - ours), dict(ours - theirs))


def _compare_events(
    comparison: Comparison, task_id: str, stock: EventLog, feedmill: EventLog
) -> bool:
    """Compare a task's events.

    Return whether both logs are complete and have the same events in the same order.
    """
    arrivals = [log.arrivals(task_id) for log in (stock, feedmill)]
    if BODY.search(task_id):
        for event in [event for each in arrivals for event in each]:
            event |= {"parent_id": None, "root_id": None}
    comparison.same(f"arrivals of {task_id}", *arrivals)
    comparison.same(
        f"events of {task_id}", stock.others(task_id), feedmill.others(task_id)
    )
    logs = (stock, feedmill)
    if not any(log.events.get(task_id) for log in logs):
        return True  # a callback that was never called
    kinds = [
        [event["type"] for event in (*log.arrivals(task_id), *log.others(task_id))]
        for log in logs
    ]
    return kinds[0] == kinds[1] and all(log.is_complete(task_id) for log in logs)


def run(
    messages: int, largest: int, seed: int, folder: Path
) -> tuple[dict[str, Any], list[Difference]]:
    """Run the test. Return the figures to print as JSON, and the differences."""
    drawn = Draw(seed, messages, largest)
    sendings = list(drawn.sendings())
    sys.stderr.write(
        f"seed {seed}: {messages} messages of {drawn.posts} posts in {len(sendings)} sendings\n"
    )
    model = make_model("bert", folder / "model", NLI)
    server = next(iter(redis_servers().values()))
    with ExitStack() as cleanup:
        pairs = []
        for name in WORKERS:
            (folder / f"redis-{name}").mkdir()
            redis = RedisServer(server, folder / f"redis-{name}")
            cleanup.callback(redis.stop)
            worker = start(name, redis, model, folder / name)
            cleanup.callback(worker.kill)
            pairs.append((worker, redis))
        # Run one worker after the other, so that each has the machine to itself.
        stock, feedmill = (
            work(worker, redis, sendings, 120 + 0.2 * messages)
            for worker, redis in pairs
        )
        differences, incomplete = compare(stock, feedmill, sendings)
        found = {
            "messages": messages,
            "posts": drawn.posts,
            "seed": seed,
            "differing": len(differences),
            "incomplete_event_logs": incomplete,
            "by_state": dict(_states(feedmill, sendings)),
            "seconds": {
                side.name: round(side.seconds, 1) for side in (stock, feedmill)
            },
        }
    return found, differences


def _states(side: Side, sendings: Sequence[Sending]) -> Counter[str]:
    ids = [call.id for call in everything(sendings) if is_message(call)]
    states: Counter[str] = Counter()
    for start in range(0, len(ids), 500):
        keys = [f"celery-task-meta-{task_id}" for task_id in ids[start : start + 500]]
        values: Any = side.redis.client.mget(keys)
        states.update(
            json.loads(value)["status"] if value else "no result" for value in values
        )
    return states


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument(
        "--posts", type=int, default=64, help="maximum posts per message"
    )
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args(arguments)
    # Celery warns about each message that is already expired when sent.
    logging.getLogger("celery").setLevel(logging.ERROR)
    seed = randrange(2**31) if given.seed is None else given.seed
    with TemporaryDirectory(prefix="feedmill-differential-") as folder:
        found, differences = run(given.messages, given.posts, seed, Path(folder))
    for difference in differences[:20]:
        sys.stderr.write(f"{difference}\n")
    sys.stdout.write(json.dumps(found) + "\n")
    return 1 if found["differing"] or found["incomplete_event_logs"] else 0


if __name__ == "__main__":
    sys.exit(main())
