"""Chaos test: inject faults and poison, and count posts (`python -m tests.chaos --posts 10000
--kill-every 5`).

Real processes run on a real, persistent redis-server: stand-in workers
(tests/fakes/standin_worker.py, which replaces only the model), their launcher, and a producer in
this process that keeps the queue full. The seed spreads faults at random: kills over time, other
faults over the share of posts that have ended.

The last line is JSON. Counts of accepted posts:

- `sent`, `stored`, `dead_lettered`, `poison_stored`
- `lost`: neither stored nor dead-lettered
- `lost_waiting`: like `lost`, but the posts waited in the queue of a Redis that lost its latest
  writes
- `duplicated`: surplus entries in the results and dead-letter streams, and posts in both
- `innocent_dead_letters`: dead letters of posts that are not poison
- `miscounted`: difference between the counters of the run and the results and dead letters that
  are stored

Figures:

- `longest_pause_s`: longest time between two results
- `workers_restarted` (--rolling), and `worker_start_s`: longest time from a worker's end until its
  successor is ready
- `posts_per_second`, `faults`

Exits 1 if posts are lost, duplicated, miscounted or wrongly dead-lettered, or if the time limit is
reached.

Limits: a clock jump moves only a worker's clock, not Redis'. A power cut is a kill -9 of Redis
followed by truncating the last second of its append-only file, which is the documented loss of
`everysec`. No machine is crashed.
"""

import argparse
import heapq
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

from redis.exceptions import RedisError

from feedmill.producers.push import Pusher
from feedmill.shared.broker import (
    TRANSPORT_KEYS,
    connect,
    make_app,
    queue_depth,
    queue_lists,
)
from feedmill.shared.keys import DEAD_LETTERS, RESULTS_STREAM
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.runs import Progress, progress
from feedmill.shared.settings import PREFIX, Settings
from feedmill.stack.processes import Child
from feedmill.workers.transport.redis_transport import Channel
from tests.fakes.proxy import Proxy
from tests.fakes.standin_worker import CLOCK, FULL, HANG, KILLS, RAISES
from tests.support import ROOT, Restartable, body_of, redis_servers, wait_until

#: Name of the run of all posts.
RUN = "chaos"
#: Seconds: a message's lease, the forward timeout, the delay of each piece of a delayed
#: connection.
LEASE_S, FORWARD_TIMEOUT_S, DELAY_S = Channel.visibility_timeout, 8, 0.2
#: Durations of faults, in seconds: a paused worker (longer than its leases), slow connections, a
#: full Redis.
PAUSE_S, SLOW_S, FULL_MEMORY_S = 2.0 * LEASE_S, 3.0, 3.0
#: Seconds of the append-only file that a power cut loses.
UNSYNCED_S = 1.0
#: Option with the number of a fault -> name of its method in `Chaos`, and the option's help.
FAULTS = {
    "--redis-restarts": (
        "redis_restart",
        "restarts of Redis, alternating between kill -9 and an orderly stop",
    ),
    "--power-cuts": ("power_cut", "power cuts that lose the last second of writes"),
    "--failovers": ("failover", "kill -9s of Redis, each followed by a failover"),
    "--cuts": ("cut", "resets of all connections"),
    "--delays": ("delay", f"periods of {SLOW_S:.0f} s with slow connections"),
    "--memory": ("memory_full", f"periods of {FULL_MEMORY_S:.0f} s with a full Redis"),
    "--pauses": ("pause", f"workers paused for {PAUSE_S:.0f} s, longer than leases"),
    "--oom": ("oom", "forward passes that run out of memory"),
    "--hangs": ("hang", "forward passes that hang"),
    "--launcher-kills": ("launcher_kill", "kill -9s of the workers' launcher"),
    "--clock-jumps": ("clock_jump", "one-hour jumps of a worker's clock"),
    "--rolling": ("rolling_restart", "rolling restarts of all workers"),
}
#: A port without a server, so that the proxy closes each connection.
CLOSED_PORT = 1
#: Celery's log line of a worker that is ready.
READY = " ready."
#: Share of ended posts by which all faults are done. The remaining posts show the recovery from
#: the last fault.
FAULT_SHARE = 0.9
#: Messages in the queue at which the producer waits, and posts per push.
QUEUE_LIMIT, PUSH_SIZE = 400, 320
#: Seconds without progress after which missing posts count as lost.
NO_PROGRESS_S = 5.0 * LEASE_S
#: Seconds between two counts of the posts that have ended.
COUNT_INTERVAL_S = 1.0


class Ledger:
    """The outcome of each post, read incrementally from the streams."""

    def __init__(self, posts: int) -> None:
        self._read = {RESULTS_STREAM: "0", DEAD_LETTERS: "0"}
        #: Stream -> number of entries of each post, by the post's number.
        self.entries = {stream: bytearray(posts) for stream in self._read}
        #: The latest result and the longest pause, in milliseconds of Redis' clock.
        self._latest = self.longest_pause = 0
        #: Number of a dead-lettered post -> reason.
        self.reasons: dict[int, str] = {}

    def read(self, redis: Any) -> None:
        """Count the entries added since the last call. Raises redis.exceptions.RedisError."""
        while answer := redis.xread(self._read, count=2000):
            for stream, entries in answer:
                for entry_id, fields in entries:
                    number = int(fields["id"].removeprefix("p"))
                    self.entries[stream][number] += 1
                    if stream == DEAD_LETTERS:
                        self.reasons[number] = json.loads(fields["letter"])["reason"]
                    else:
                        moment = int(entry_id.partition("-")[0])
                        self.longest_pause = max(
                            self.longest_pause, moment - (self._latest or moment)
                        )
                        self._latest = moment
                self._read[stream] = entries[-1][0]


class Chaos:
    """A run of the test. given: the command's arguments; folder: for the files of all
    processes.
    """

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given, self._folder = given, folder
        self._numbers = count()
        self._random = random.Random(given.seed)
        poison = self._random.sample(
            range(given.posts), round(given.posts * given.poison / 100)
        )
        killing = round(len(poison) * given.killing / 100)
        self.poison = dict.fromkeys(poison[killing:], RAISES) | dict.fromkeys(
            poison[:killing], KILLS
        )
        self._redis = self._start_redis()
        self._replica = self._start_replica() if given.failovers else None
        proxied = given.cuts or given.delays or given.failovers or given.power_cuts
        self._proxy = Proxy(self._redis.port) if proxied else None
        self._settings = Settings.model_validate(
            {
                "redis_url": f"redis://127.0.0.1:{(self._proxy or self._redis).port}/0",
                "queue_limit": QUEUE_LIMIT,
                "posts_per_message": 32,
                "batch_rows": given.batch_rows,
                "token_budget": 65_536,
                "window_rows": 512,
                "forward_timeout": FORWARD_TIMEOUT_S,
                "results_stream_length": 2 * given.posts,
                "dead_letters_length": 2 * given.posts,
                "results_ttl": 86_400,
                "sent_ttl": 86_400,
            }
        )
        self.ledger = Ledger(given.posts)
        self._sent, self._stopping = 0, Event()
        #: Posts unknown to a Redis that restarted without its latest writes.
        self._unknown: set[int] = set()
        #: Scheduled actions: (monotonic seconds, sequence number, action).
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        #: Number of faults of each kind.
        self._done: Counter[str] = Counter()
        #: Seconds from each restarted worker's end until its successor was ready.
        self._starts: list[float] = []
        #: Sizes of the append-only file: (monotonic seconds, file, bytes).
        self._written: deque[tuple[float, Path, int]] = deque(maxlen=200)
        self._launcher = self._launch()

    # The processes.

    def _start_redis(self) -> Restartable:
        """Start a redis-server in its own folder."""
        folder = self._folder / f"redis-{next(self._numbers)}"
        folder.mkdir()
        return Restartable(
            next(iter(redis_servers().values())), folder, self._given.appendfsync
        )

    def _start_replica(self) -> Restartable:
        replica = self._start_redis()
        replica.client.replicaof("127.0.0.1", self._redis.port)
        return replica

    def _launch(self) -> Child:
        given = {
            f"{PREFIX}{name.upper()}": str(value)
            for name, value in self._settings.model_dump(
                exclude_unset=True, exclude={"redis_url"}
            ).items()
        }
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(PREFIX)
        } | given
        environment |= {
            f"{PREFIX}REDIS_URL": self._settings.broker_url,
            "PYTHONPATH": str(ROOT),
            "STANDIN_ROW_SECONDS": str(self._given.row_ms / 1000),
        }
        command = [
            sys.executable,
            "-m",
            "tests.fakes.launcher",
            str(self._folder),
            str(self._given.workers),
        ]
        return Child("launcher", command, self._folder, environment)

    def _workers(self) -> dict[str, int]:
        """Return the process id of each running worker by name."""
        pid, found = self._launcher.process.pid, {}
        with suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                with suppress(OSError):
                    if (
                        name := Path(f"/proc/{child}/comm").read_text().strip()
                    ).startswith("worker-"):
                        found[name] = int(child)
        return found

    def _produce(self) -> None:
        """Send all posts. Retry while Redis is unreachable or rejects them."""
        settings = self._settings
        pusher = Pusher(
            make_app(settings),
            connect(settings),
            settings,
            ClassifyOptions(),
            wait=self._wait,
            run=RUN,
        )
        posts = self._posts()
        while (some := list(islice(posts, PUSH_SIZE))) and not self._stopping.is_set():
            while not self._stopping.is_set():
                try:
                    pusher.push(some)
                except RedisError:
                    self._stopping.wait(0.2)
                else:
                    self._sent += len(some)
                    break

    def _wait(self, _: float) -> None:
        if self._stopping.wait(0.02):
            raise RedisError("time limit reached")

    def _posts(self) -> Iterator[Post]:
        for number in range(self._given.posts):
            title = (
                f"Post number {number} about the weather {self.poison.get(number, '')}"
            )
            yield Post(
                id=f"p{number}", title=title, body="rain and wind " * (number % 8)
            )

    # The faults.

    def _plan(self) -> list[tuple[float, str]]:
        """Return (share of ended posts, fault) in order of time."""
        counts = {
            fault: getattr(self._given, option[2:].replace("-", "_"))
            for option, (fault, _) in FAULTS.items()
        }
        return sorted(
            (self._random.uniform(0.02, FAULT_SHARE), name)
            for name, times in counts.items()
            for _ in range(times)
        )

    def _do(self, name: str) -> None:
        getattr(self, f"_{name}")()
        self._done[name] += 1

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(
            self._due, (time.monotonic() + seconds, next(self._numbers), what)
        )

    def _signal(self, number: int) -> int:
        """Send the signal to a random worker and return its process id."""
        while not (workers := self._workers()):
            time.sleep(0.05)
        pid = self._random.choice(sorted(workers.values()))
        _send(pid, number)
        return pid

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _launcher_kill(self) -> None:
        self._launcher.kill()
        self._launcher = self._launch()

    def _pause(self) -> None:
        pid = self._signal(signal.SIGSTOP)
        self._later(PAUSE_S, lambda: _send(pid, signal.SIGCONT))

    def _hang(self) -> None:
        self._signal(HANG)

    def _oom(self) -> None:
        self._signal(FULL)

    def _clock_jump(self) -> None:
        self._signal(CLOCK)

    def _rolling_restart(self) -> None:
        """Restart the workers one at a time by SIGTERM. Wait until one is replaced before stopping
        the next.
        """
        self._roll(deque(sorted(self._workers())))

    def _roll(self, names: deque[str]) -> None:
        if not names or (old := self._workers().get(names[0])) is None:
            return
        log = self._folder / f"{names[0]}.log"
        ready = log.read_text().count(READY)
        gone: list[float] = []
        _send(old, signal.SIGTERM)

        def check() -> None:
            if not gone and not Path(f"/proc/{old}").exists():
                gone.append(time.monotonic())
            if log.read_text().count(READY) == ready:
                self._later(0.05, check)
            else:
                self._starts.append(time.monotonic() - (gone or [time.monotonic()])[0])
                names.popleft()
                self._roll(names)

        check()

    def _redis_restart(self) -> None:
        """Restart Redis, alternating between kill -9 and an orderly stop."""
        if self._done["redis_restart"] % 2:
            self._redis.child.stop(30)
        else:
            self._redis.kill()
        self._redis.start()

    def _power_cut(self) -> None:
        self._redis.kill()
        moment = time.monotonic() - UNSYNCED_S
        path, size = next(
            (
                (path, size)
                for at, path, size in reversed(self._written)
                if at <= moment
            ),
            self._written[0][1:],
        )
        if path == self._log():  # otherwise, a rewrite has synced the file since then
            os.truncate(path, size)
        if proxy := self._proxy:
            proxy.server_port = CLOSED_PORT
            self._redis.start()
            self._note_unknown()
            proxy.server_port = self._redis.port
        self._written.clear()
        self._note_log()

    def _note_log(self) -> None:
        path = self._log()
        self._written.append((time.monotonic(), path, path.stat().st_size))

    def _log(self) -> Path:
        """Return the append-only file that Redis currently writes."""
        logs = [
            *self._redis.folder.glob("appendonlydir/*.incr.aof"),
            *self._redis.folder.glob("appendonly.aof"),
        ]
        return max(logs, key=lambda path: path.stat().st_mtime)

    def _failover(self) -> None:
        """Kill the master with kill -9 and promote its replica, with the writes replicated
        so far.
        """
        if (replica := self._replica) and self._proxy:
            wait_until(lambda: _is_in_sync(replica.client), "the replica is in sync")
            self._redis.kill()
            replica.client.replicaof("NO", "ONE")
            self._redis = replica
            self._note_unknown()
            self._proxy.server_port = replica.port
            self._replica = self._start_replica()

    def _note_unknown(self) -> None:
        """Record sent posts that Redis does not know, before workers and producers reconnect."""
        client: Any = self._redis.client
        queued = [
            message
            for name in queue_lists(self._settings.queue)
            for message in client.lrange(name, 0, -1)
        ]
        known = {
            int(post["id"].removeprefix("p"))
            for message in (*queued, *client.hvals(TRANSPORT_KEYS["reserved_key"]))
            for post in body_of(message)[1]["posts"]
        }
        for stream in (RESULTS_STREAM, DEAD_LETTERS):
            known |= {
                int(fields["id"].removeprefix("p"))
                for _, fields in client.xrange(stream)
            }
        self._unknown |= (
            set(range(min(self._sent + PUSH_SIZE, self._given.posts))) - known
        )

    def _cut(self) -> None:
        if self._proxy:
            self._proxy.cut()

    def _delay(self) -> None:
        if proxy := self._proxy:
            proxy.delay = DELAY_S
            self._later(SLOW_S, lambda: setattr(proxy, "delay", 0.0))

    def _memory_limit(self, size: int) -> None:
        with suppress(
            RedisError
        ):  # a Redis that is down has no limit after its restart
            self._redis.client.config_set("maxmemory", size)

    def _memory_full(self) -> None:
        self._memory_limit(1)
        self._later(FULL_MEMORY_S, lambda: self._memory_limit(0))

    # The run.

    def run(self) -> dict[str, Any]:
        producer = Thread(target=self._produce, name="producer")
        began = time.monotonic()
        try:
            producer.start()
            finished = self._go_on(began)
            seconds = time.monotonic() - began
        finally:
            self._stopping.set()
            producer.join()
            self._end()
        counted = self._counted()
        for server in filter(None, (self._redis, self._replica)):
            server.stop()
        figures = {
            "seconds": round(seconds, 1),
            "longest_pause_s": self.ledger.longest_pause / 1000,
            "posts_per_second": round(counted["stored"] / seconds, 1),
            "faults": dict(self._done),
        }
        if self._starts:
            figures |= {
                "worker_start_s": round(max(self._starts), 1),
                "workers_restarted": len(self._starts),
            }
        return {"finished": finished, **counted, **figures}

    def _go_on(self, began: float) -> bool:
        """Inject faults until all posts have ended, or nothing waits and progress stops.

        Returns false if the time limit is reached.
        """
        plan, given = self._plan(), self._given
        self._note_log()
        counted_at, ended, since = 0.0, 0, time.monotonic()
        if given.kill_every:
            self._later(given.kill_every, self._kill_again)
        while time.monotonic() - began < given.limit:
            time.sleep(0.05)
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            while plan and plan[0][0] * given.posts <= ended:
                self._do(plan.pop(0)[1])
            if given.power_cuts:
                self._note_log()
            if now - counted_at < COUNT_INTERVAL_S:
                continue
            counted_at = now
            with suppress(RedisError):
                counted = self._ended()
                if counted != ended or self._sent < given.posts:
                    ended, since = counted, now
                elif self._is_idle() and (
                    now - since > NO_PROGRESS_S
                    or (ended >= self._sent and not plan and not self._due)
                ):
                    return True
        return False

    def _kill_again(self) -> None:
        if self._ended() < FAULT_SHARE * self._given.posts:
            self._do("kill")
            self._later(
                self._random.uniform(0.5, 1.5) * self._given.kill_every,
                self._kill_again,
            )

    def _ended(self) -> int:
        """Return the number of entries in both streams. Raises redis.exceptions.RedisError."""
        client: Any = self._redis.client
        return int(client.xlen(RESULTS_STREAM) + client.xlen(DEAD_LETTERS))

    def _is_idle(self) -> bool:
        return not sum(queue_depth(self._redis.client, self._settings.queue))

    def _end(self) -> None:
        """End every process except Redis."""
        due, self._due = self._due, []
        for _, _, action in due:
            action()  # such as SIGCONT; those that it schedules are dropped
        self._launcher.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._launcher.process.wait(60)
        self._launcher.kill()
        if self._proxy:
            self._proxy.stop()

    # The outcome.

    def _counted(self) -> dict[str, int]:
        """Count posts by outcome. Raises redis.exceptions.RedisError."""
        self.ledger.read(self._redis.client)
        results, dead = (
            self.ledger.entries[RESULTS_STREAM],
            self.ledger.entries[DEAD_LETTERS],
        )
        missing = [
            number
            for number in range(self._sent)
            if not (results[number] or dead[number])
        ]
        lost = [number for number in missing if number not in self._unknown]
        innocent = [
            number for number in self.ledger.reasons if number not in self.poison
        ]
        for problem, numbers in (
            ("lost", lost),
            ("dead-lettered without being poison", innocent),
        ):
            for number in numbers[:10]:
                _tell(f"{problem}: p{number}: {self.ledger.reasons.get(number)}")
        counted = progress(self._redis.client, RUN) or Progress(RUN)
        both = sum(
            1
            for stored, dead_lettered in zip(results, dead, strict=True)
            if stored and dead_lettered
        )
        return {
            "sent": self._sent,
            "stored": sum(map(bool, results)),
            "dead_lettered": sum(map(bool, dead)),
            "lost": len(lost),
            "lost_waiting": len(missing) - len(lost),
            "duplicated": both
            + sum(
                times - 1
                for entries in (results, dead)
                for times in entries
                if times > 1
            ),
            "innocent_dead_letters": len(innocent),
            "miscounted": abs(counted.stored - sum(map(bool, results)))
            + abs(counted.failed - sum(map(bool, dead))),
            "poison_stored": sum(1 for number in self.poison if results[number]),
        }


def _is_in_sync(replica: Any) -> bool:
    return bool(replica.info("replication").get("master_link_status") == "up")


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _tell(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def _percent(text: str) -> float:
    return float(text.removesuffix("%"))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--posts", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--kill-every",
        type=float,
        default=0.0,
        help=("seconds between kill -9s of workers"),
    )
    for option, (_, meaning) in FAULTS.items():
        parser.add_argument(option, type=int, default=0, help=meaning)
    parser.add_argument(
        "--poison",
        type=_percent,
        default=0.0,
        metavar="P%",
        help="share of poison posts",
    )
    parser.add_argument(
        "--killing",
        type=_percent,
        default=10.0,
        metavar="P%",
        help="share of poison posts that kill the worker",
    )
    parser.add_argument(
        "--appendfsync", choices=("always", "everysec", "no"), default="always"
    )
    parser.add_argument(
        "--row-ms",
        type=float,
        default=0.0,
        help=("milliseconds per row of a forward pass"),
    )
    parser.add_argument("--batch-rows", type=int, default=64)
    parser.add_argument(
        "--limit",
        type=float,
        default=1800.0,
        help=("time limit of the run, in seconds"),
    )
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    with TemporaryDirectory(prefix="feedmill-chaos-") as folder:
        found = Chaos(given, Path(folder)).run()
    sys.stdout.write(json.dumps(found) + "\n")
    wrong = (
        "lost",
        "duplicated",
        "innocent_dead_letters",
        "miscounted",
        "poison_stored",
    )
    good = found["finished"] and not any(found[name] for name in wrong)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
