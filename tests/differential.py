"""Every message keeps Celery's full meaning: `python -m tests.differential --messages 10000 --seed N`.

The same messages go to a stock prefork worker, whose task classifies in the process that runs it, one message after
the other, and to Feedmill's, which micro-batches them: same application, same tasks, same model, a Redis each. Then
everything that either has left behind is compared: Celery's result of each message and of its callbacks, what they got,
each message's events, the stored results of each post, and the dead letters.

The last line is JSON: messages, posts, seed, differing (how many comparisons failed), incomplete_event_logs, by_state
(messages by the state that Celery keeps of them), seconds of each worker. Exit status 1 where anything differs; the
first differences stand above it.
"""

import argparse
import json
import logging
import os
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

from shared.broker import queue_depth
from shared.keys import CELERY_RESULTS, COUNTERS, DEAD_LETTERS, RESULTS_STREAM, result_key
from tests.fakes.differential_messages import REVOKED_STAMP, WAITING, Draw, Sending, everything, is_message
from tests.fakes.differential_tasks import TOLD
from tests.fakes.models import NLI, make_model
from tests.support import Forking, RedisServer, redis_servers, wait_until

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
#: "processes" is prefork; by that name Celery would take it for no choice at all, and run the pool that is configured.
WORKERS = {
    "stock": [str(BIN / "celery"), "-A", "workers.app", "worker", "-P", "processes", "-c", "1", "-n", "stock@differs",
              "--loglevel", "INFO"],
    "feedmill": [str(BIN / "feedmill"), "worker", "--name", "feedmill@differs"],
}  # fmt: skip
POOLS = {"stock": "celery.concurrency.prefork:TaskPool", "feedmill": "workers.pool:DevicePool"}
ENVIRONMENT = {
    "FEEDMILL_INCLUDE": "tests.fakes.differential_tasks",
    "FEEDMILL_LABELS": "sports, technology, food",
    "FEEDMILL_TOKEN_BUDGET": "4096",
    # Half precision, where a CPU has it, rounds by more than what is to be told apart.
    "FEEDMILL_DTYPE": "float32",
    # Nothing is trimmed before it is compared.
    "FEEDMILL_RESULTS_STREAM_LENGTH": "10000000",
    "FEEDMILL_DEAD_LETTERS_LENGTH": "10000000",
    "FEEDMILL_CELERY_RESULT_TTL": "86400",
}
#: By how much two scores of the same post may differ: another length of padding is another order of summation.
TOLERANCE = 1e-4
#: Fields that are not compared, in results, metadata and dead letters.
LEFT_OUT = {
    "worker": "the two have names of their own",
    "classified_at": "a time",
    "queued_seconds": "a time; of a post that was sent twice, that of whichever message came first",
    "date_done": "a time",
    "failed_at": "a time",
}
#: What is compared of each kind of event; the rest is worker, process, times and the clock.
COMPARED = {
    "task-received": ("name", "args", "kwargs", "root_id", "parent_id", "retries"),
    "task-started": (),
    "task-succeeded": ("result",),
    "task-failed": ("exception", "traceback"),
    "task-retried": ("exception", "traceback"),
    "task-revoked": ("terminated", "signum", "expired"),
    "task-rejected": ("requeue",),
}
#: The result that an event tells is shortened text, full of times and digits; compared is that of a message whose
#: result nobody reads. The others' results are compared where they are kept.
SUMMARY = re.compile(r"'\d+ of \d+ posts classified'")
#: What these are given is shown as its text, as well; compared is what they say that they got.
CALLBACKS = ("differential.record", "differential.breaks")
#: Ids that Celery draws by itself, of groups of callbacks.
DRAWN = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
#: A chord's body, and what follows it: the message of its header that happens to be the last is its parent and root;
#: and where the body fails by the header, Celery notes the children of that one for its own.
BODY = re.compile(r"-body(-error)?$")
#: Events of one message, arrivals left out: started, retried, Succeeded, Failed, reVoked, reJected; back in the queue.
COMPLETE = re.compile(r"(st|sb)*(sS|sF|sFJ|sJF|s|V)")
LETTERS = {"started": "s", "retried": "t", "succeeded": "S", "failed": "F", "revoked": "V", "rejected": "J"}
ENDS = ("task-succeeded", "task-failed", "task-revoked")
#: Seconds without an event before a worker counts as done: what follows a task's end follows at once.
QUIET = 0.5
#: These tell nobody that they have ended: Celery has no event for Ignore.
SILENT = ("differential.ignore", "differential.own_state")


class EventLog:
    """What a worker tells of each task, in order of arrival."""

    def __init__(self, sendings: Sequence[Sending]) -> None:
        self.events: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        #: When anything was heard, and when something of a task was.
        self.heard_at = self.told_at = 0.0
        #: Between the receiver's thread, which writes, and the one that waits for the end.
        self._lock = threading.Lock()
        self._silent = {call.id for call in everything(sendings) if call.task in SILENT}

    def hear(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        self.heard_at = time.monotonic()
        if kind not in COMPARED:
            return
        self.told_at = self.heard_at
        task_id = event["uuid"]
        kept = {name: event.get(name) for name in COMPARED[kind]}
        if kind == "task-succeeded" and not SUMMARY.fullmatch(str(kept["result"])):
            del kept["result"]
        if kind == "task-received" and kept["name"] in CALLBACKS:
            del kept["args"], kept["kwargs"]
        with self._lock:
            self.events[task_id].append({"type": kind} | kept)

    def received(self, task_id: str) -> bool:
        return task_id in self.events

    def unfinished(self) -> list[str]:
        """Those that have been received and have yet to end, or to be sent again."""
        with self._lock:
            return [task_id for task_id, events in self.events.items() if self._is_open(task_id, events)]

    def _is_open(self, task_id: str, events: Sequence[Mapping[str, Any]]) -> bool:
        kinds = Counter(event["type"] for event in events)
        again = kinds["task-retried"] + sum(bool(event.get("requeue")) for event in events)
        ended = any(kinds[kind] for kind in ENDS)
        if task_id in self._silent and not ended:
            ended = kinds["task-started"] == kinds["task-received"]
        return kinds["task-received"] > again + ended or not (again or ended)

    def arrivals(self, task_id: str) -> list[dict[str, Any]]:
        return [event for event in self.events.get(task_id, []) if event["type"] == "task-received"]

    def others(self, task_id: str) -> list[dict[str, Any]]:
        """Without the arrivals: a retry is sent before its task has ended, and may arrive before Celery tells so."""
        return [event for event in self.events.get(task_id, []) if event["type"] != "task-received"]

    def is_complete(self, task_id: str) -> bool:
        """Whether each of its starts has an arrival before it and an ending after it."""
        arrived = started = 0
        for event in self.events.get(task_id, []):
            arrived += event["type"] == "task-received"
            started += event["type"] == "task-started"
            if started > arrived:
                return False
        letters = "".join(
            "b" if event.get("requeue") else LETTERS[event["type"].removeprefix("task-")]
            for event in self.others(task_id)
        )
        withdrawn = letters.endswith("V")  # before it arrived, or while it waited for its ETA
        return bool(COMPLETE.fullmatch(letters)) and started <= arrived <= started + withdrawn


@contextmanager
def listening(app: Celery, sendings: Sequence[Sending]) -> Iterator[EventLog]:
    """A real receiver of events, on a thread of its own, that has subscribed."""
    log = EventLog(sendings)
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, {"*": log.hear})
        thread = threading.Thread(target=receiver.capture, kwargs={"limit": None, "timeout": None}, daemon=True)
        thread.start()
        try:
            wait_until(lambda: log.heard_at, "the worker's heartbeat is heard")
            yield log
        finally:
            receiver.should_stop = True
            thread.join(30)


@dataclass
class Side:
    """One worker with all that it left behind."""

    name: str
    redis: RedisServer
    log: EventLog
    seconds: float


def start(name: str, redis: RedisServer, model: Path, folder: Path) -> Forking:
    """A worker that loads its model; `work` waits for it."""
    folder.mkdir()
    clean = {variable: value for variable, value in os.environ.items() if not variable.startswith("FEEDMILL_")}
    ours = {
        "PYTHONPATH": str(ROOT),
        "FEEDMILL_REDIS_URL": redis.url,
        "FEEDMILL_MODEL": str(model),
        "FEEDMILL_CACHE_FOLDER": str(folder),
    }
    return Forking(name, WORKERS[name], folder, clean | ENVIRONMENT | ours)


def work(worker: Forking, redis: RedisServer, sendings: Sequence[Sending], limit: float) -> Side:
    """Send a worker everything, wait for the last event, and end the worker in order."""
    worker.wait_until(lambda: " ready." in worker.said())
    app = Celery("elsewhere", broker=redis.url, backend=redis.url, set_as_current=False)
    app.conf.task_default_queue = "feedmill"
    # It would subscribe to each result, and nobody here waits for one.
    app.backend.result_consumer.consume_from = lambda _: None  # type: ignore[attr-defined]  # not in the stub
    (stats,) = (app.control.inspect(timeout=30, limit=1).stats() or {}).values()
    if stats["pool"]["implementation"] != POOLS[worker.name]:
        raise RuntimeError(f"{worker.name} runs {stats['pool']['implementation']}")
    with listening(app, sendings) as log:
        began = time.monotonic()
        send(app, log, sendings)
        try:
            wait_until(told_now_and_then(worker, redis, log, sendings), f"{worker.name} is done with all", limit)
        except AssertionError as late:  # what it lacks is told by the comparison
            sys.stderr.write(f"{late}\n")
        seconds = time.monotonic() - began
    worker.process.terminate()
    if status := worker.process.wait(60):
        raise RuntimeError(f"{worker.name} ended with status {status}. {worker.last_words()}")
    return Side(worker.name, redis, log, seconds)


def send(app: Celery, log: EventLog, sendings: Sequence[Sending]) -> None:
    """First what has to wait for its withdrawal, then the rest."""
    calls = [call for sending in sendings for call in sending.calls]
    revoke(app, [call.id for call in calls if call.fate == "revoked"])
    header, stamp = REVOKED_STAMP
    stamps: Any = {header: [stamp]}
    app.control.revoke_by_stamped_headers(stamps, reply=True, limit=1, timeout=60)
    waiting = [call.id for call in calls if call.fate in WAITING]
    eta = datetime.now(UTC) + timedelta(seconds=3 + 0.03 * len(waiting))
    for sending in sendings:
        if sending.waits():
            sending.send(app, eta)
    wait_until(lambda: all(map(log.received, waiting)), "those that are to wait have arrived")
    revoke(app, [call.id for call in calls if call.fate == "revoked waiting"])
    if datetime.now(UTC) > eta - timedelta(seconds=1):
        raise RuntimeError("this machine is too slow: what was to be withdrawn may have started. Try again.")
    for sending in sendings:
        if not sending.waits():
            sending.send(app, eta)


def revoke(app: Celery, ids: Sequence[str]) -> None:
    """Return when the worker has heard of it."""
    if ids and not app.control.revoke(list(ids), reply=True, limit=1, timeout=60):
        raise RuntimeError("the worker does not answer")


def told_now_and_then(
    worker: Forking, redis: RedisServer, log: EventLog, sendings: Sequence[Sending]
) -> Callable[[], bool]:
    """Whether all is done; says on standard error how far it is."""
    first = [call.id for each in sendings for call in (each.calls[:1] if each.kind == "chain" else each.calls)]
    began = told = time.monotonic()

    def done() -> bool:
        nonlocal told
        if worker.process.poll() is not None:
            raise RuntimeError(f"{worker.name} ended. {worker.last_words()}")
        waiting, held = queue_depth(redis.client, "feedmill")
        now = time.monotonic()
        if now - told > 5:
            told = now
            left = [*log.unfinished(), *(task_id for task_id in first if not log.received(task_id))]
            sys.stderr.write(
                f"{worker.name}, {now - began:.0f} s: {len(log.events)} tasks heard of, {waiting} wait, {held} are "
                f"held; unfinished: {len(left)}, {', '.join(left[:5])}\n"
            )
        if waiting or held or now - log.told_at < QUIET:
            return False
        return all(map(log.received, first)) and not log.unfinished()

    return done


# Comparing.


@dataclass(frozen=True)
class Difference:
    """Where the two are not the same."""

    where: str
    stock: object
    feedmill: object

    def __str__(self) -> str:
        return f"{self.where}\n    stock:    {self.stock!s:.1500}\n    feedmill: {self.feedmill!s:.1500}"


@dataclass
class Comparison:
    differences: list[Difference] = field(default_factory=list)

    def same(self, where: str, stock: object, feedmill: object) -> bool:
        """Note where they differ; whether they do not."""
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
                    elif name not in LEFT_OUT:
                        self._walk(f"{where}.{name}", stock[name], feedmill[name])
                return
        elif isinstance(stock, list | tuple) and isinstance(feedmill, list | tuple):
            if len(stock) == len(feedmill):
                for number, (one, other) in enumerate(zip(stock, feedmill, strict=True)):
                    self._walk(f"{where}[{number}]", one, other)
                return
        elif isinstance(stock, str) and isinstance(feedmill, str):
            if DRAWN.sub("<id>", stock) == DRAWN.sub("<id>", feedmill):
                return
        elif type(stock) is type(feedmill) and stock == feedmill:
            return
        self.differences.append(Difference(where, stock, feedmill))

    def _scores(self, where: str, stock: dict[str, float], feedmill: dict[str, float]) -> None:
        """As many, best first, each as the other within the tolerance. Of labels that are level, either is first."""
        ordered = all(list(each.values()) == sorted(each.values(), reverse=True) for each in (stock, feedmill))
        level = all(abs(a - b) <= TOLERANCE for a, b in zip(stock.values(), feedmill.values(), strict=False))
        equal = all(abs(stock[label] - feedmill[label]) <= TOLERANCE for label in stock.keys() & feedmill.keys())
        if not (ordered and level and equal and len(stock) == len(feedmill)):
            self.differences.append(Difference(where, stock, feedmill))

    def _label(self, where: str, stock: dict[str, Any], feedmill: dict[str, Any]) -> None:
        """The same, unless the two best are level."""
        ours, theirs = feedmill["label"], stock["label"]
        best = stock["scores"].get(theirs, 0.0)
        if ours != theirs and abs(best - stock["scores"].get(ours, -1.0)) > 2 * TOLERANCE:
            self.differences.append(Difference(where, theirs, ours))


def is_outcome(found: Mapping[str, Any]) -> bool:
    return isinstance(found.get("scores"), dict)


def compare(stock: Side, feedmill: Side, sendings: Sequence[Sending]) -> tuple[list[Difference], int]:
    """All differences, and how many logs of events are incomplete."""
    comparison = Comparison()
    _compare_results(comparison, stock, feedmill)
    _compare_told(comparison, stock, feedmill)
    _compare_stored(comparison, stock, feedmill)
    _compare_dead_letters(comparison, stock, feedmill)
    incomplete = 0
    known = {call.id for call in everything(sendings)}
    for task_id in sorted(known | stock.log.events.keys() | feedmill.log.events.keys()):
        incomplete += not _compare_events(comparison, task_id, stock.log, feedmill.log)
    return comparison.differences, incomplete


def _keys(side: Side, pattern: str) -> set[str]:
    return set(map(str, side.redis.client.scan_iter(pattern, count=1000)))


def _both(comparison: Comparison, what: str, stock: Side, feedmill: Side, pattern: str) -> Iterator[list[str]]:
    """The keys that both have, some at a time; what only one has is a difference."""
    theirs, ours = _keys(stock, pattern), _keys(feedmill, pattern)
    for key in sorted(theirs ^ ours):
        sides = (stock.redis.client, feedmill.redis.client)
        comparison.same(f"{what} {key}", *("kept" if each.exists(key) else "not kept" for each in sides))
    common = sorted(theirs & ours)
    for start in range(0, len(common), 500):
        yield common[start : start + 500]


def _compare_results(comparison: Comparison, stock: Side, feedmill: Side) -> None:
    """What Celery keeps of each message and callback: state, result or error with its traceback, children."""
    for keys in _both(comparison, "result", stock, feedmill, CELERY_RESULTS):
        values: list[Any] = [side.redis.client.mget(keys) for side in (stock, feedmill)]
        for key, theirs, ours in zip(keys, *values, strict=True):
            found = [json.loads(each) for each in (theirs, ours)]
            if BODY.search(key):
                found = [each | {"parent_id": None, "children": None} for each in found]
            comparison.same(key, *found)


def _compare_told(comparison: Comparison, stock: Side, feedmill: Side) -> None:
    """What callbacks for failures, and a task's own handlers, were told."""
    for keys in _both(comparison, "told", stock, feedmill, f"{TOLD}*"):
        for key in keys:
            lists: list[Any] = [side.redis.client.lrange(key, 0, -1) for side in (stock, feedmill)]
            comparison.same(key, *([json.loads(each) for each in found] for found in lists))


def _compare_stored(comparison: Comparison, stock: Side, feedmill: Side) -> None:
    """Each post's results, and that each has one entry in the stream."""
    for keys in _both(comparison, "stored", stock, feedmill, result_key("*")):
        values = []
        for side in (stock, feedmill):
            pipe: Any = side.redis.client.pipeline(transaction=False)
            for key in keys:
                pipe.hgetall(key)
            values.append(pipe.execute())
        for key, theirs, ours in zip(keys, *values, strict=True):
            comparison.same(
                key, *({name: json.loads(value) for name, value in each.items()} for each in (theirs, ours))
            )
    for side in (stock, feedmill):
        # `repeated` and `answered` tell which of two messages with the same post came first.
        stored, entries = side.redis.client.hget(COUNTERS, "stored"), side.redis.client.xlen(RESULTS_STREAM)
        comparison.same(f"{side.name}: entries of the stream for each result", str(stored), str(entries))
    counts = [side.redis.client.xlen(RESULTS_STREAM) for side in (stock, feedmill)]
    comparison.same("results stored", *counts)


def _compare_dead_letters(comparison: Comparison, stock: Side, feedmill: Side) -> None:
    """The same of each message, in any order.

    A message that is retried has none yet, says Feedmill's pool, and leaves them to the last attempt. A stock worker's
    task knows nothing of its end when it stores them, and leaves some of each attempt.
    """
    found = []
    for side in (stock, feedmill):
        letters: defaultdict[str, Counter[str]] = defaultdict(Counter)
        entries: Any = side.redis.client.xrange(DEAD_LETTERS)
        for _, entry in entries:
            letter = {name: value for name, value in json.loads(entry["letter"]).items() if name not in LEFT_OUT}
            letters[str(letter["message"])][json.dumps(letter)] += 1
        found.append(letters)
    theirs, ours = found
    for message in sorted(theirs.keys() | ours.keys()):
        attempts = sum(event["type"] == "task-started" for event in stock.log.others(message))
        expected = {letter: count * attempts for letter, count in ours[message].items()}
        if theirs[message] != expected:
            missing, more = theirs[message] - Counter(expected), Counter(expected) - theirs[message]
            comparison.same(f"dead letters of {message}, {attempts} attempts", dict(missing), dict(more))


def _compare_events(comparison: Comparison, task_id: str, stock: EventLog, feedmill: EventLog) -> bool:
    """Whether both logs are complete and tell the same events in the same order; their fields are compared as well."""
    arrivals = [log.arrivals(task_id) for log in (stock, feedmill)]
    if BODY.search(task_id):
        for event in [event for each in arrivals for event in each]:
            event |= {"parent_id": None, "root_id": None}
    comparison.same(f"arrivals of {task_id}", *arrivals)
    comparison.same(f"events of {task_id}", stock.others(task_id), feedmill.others(task_id))
    logs = (stock, feedmill)
    if not any(log.events.get(task_id) for log in logs):
        return True  # a callback that never came to be
    kinds = [[event["type"] for event in (*log.arrivals(task_id), *log.others(task_id))] for log in logs]
    return kinds[0] == kinds[1] and all(log.is_complete(task_id) for log in logs)


def run(messages: int, largest: int, seed: int, folder: Path) -> tuple[dict[str, Any], list[Difference]]:
    """The whole test: what the last line tells, and the differences."""
    drawn = Draw(seed, messages, largest)
    sendings = list(drawn.sendings())
    sys.stderr.write(f"seed {seed}: {messages} messages of {drawn.posts} posts in {len(sendings)} sendings\n")
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
        # One after the other: each has the machine to itself.
        stock, feedmill = (work(worker, redis, sendings, 120 + 0.2 * messages) for worker, redis in pairs)
        differences, incomplete = compare(stock, feedmill, sendings)
        found = {
            "messages": messages,
            "posts": drawn.posts,
            "seed": seed,
            "differing": len(differences),
            "incomplete_event_logs": incomplete,
            "by_state": dict(_states(feedmill, sendings)),
            "seconds": {side.name: round(side.seconds, 1) for side in (stock, feedmill)},
        }
    return found, differences


def _states(side: Side, sendings: Sequence[Sending]) -> Counter[str]:
    ids = [call.id for call in everything(sendings) if is_message(call)]
    states: Counter[str] = Counter()
    for start in range(0, len(ids), 500):
        keys = [CELERY_RESULTS.replace("*", task_id) for task_id in ids[start : start + 500]]
        values: Any = side.redis.client.mget(keys)
        states.update(json.loads(value)["status"] if value else "nothing kept" for value in values)
    return states


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--posts", type=int, default=64, help="of one message, at most")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--folder", type=Path, default=None, help="keep logs here")
    given = parser.parse_args(arguments)
    # It warns of each message that is sent although it has expired.
    logging.getLogger("celery").setLevel(logging.ERROR)
    seed = randrange(2**31) if given.seed is None else given.seed
    with TemporaryDirectory(prefix="feedmill-differential-") as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        found, differences = run(given.messages, given.posts, seed, folder)
    for difference in differences[:20]:
        sys.stderr.write(f"{difference}\n")
    sys.stdout.write(json.dumps(found) + "\n")
    return 1 if found["differing"] or found["incomplete_event_logs"] else 0


if __name__ == "__main__":
    sys.exit(main())
