"""Compare Feedmill's reserving transport with kombu's own, alternating in one run.

    python -m benchmarks.queue [--messages 20000] [--rounds 5] [--samples 300] [--kills 0] [--redis
    PATH]

Messages have 400 bytes. `transport` is a consumer without Celery that acknowledges at once.
`worker` is a complete Celery worker with a no-op task, late acknowledgement and the solo pool
(which adds no processes or threads), with and without task events. Rates are measured between 10%
and 90% of the messages. `latency` is the time in milliseconds from publishing until an idle
consumer has the message. kombu's own transport gets a fifth of the messages.

--kills N kills N busy workers of each transport with SIGKILL. A message is missing if it is
neither done, nor queued, nor in flight. `back` is the time in seconds until all messages of the
dead worker are back in the queue. Progress goes to standard error; the last line is JSON.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from celery import Celery
from kombu import Connection, Consumer, Exchange, Producer, Queue
from redis import Redis, RedisError

from benchmarks.running import free_port
from feedmill.stack.embedded import find_redis_server, server_version
from feedmill.stack.processes import Child

KOMBU, OURS = "kombu", "ours"
TRANSPORTS = {
    KOMBU: "redis",
    OURS: "feedmill.workers.transport.redis_transport:Transport",
}
#: Share of the messages that each transport gets, so that their rounds take a similar time.
SHARE = {KOMBU: 0.2, OURS: 1.0}
#: Redis hash with the messages in flight.
HELD = {KOMBU: "unacked", OURS: "reserved"}
TEXT = "x" * 400
PREFETCH = 256
QUEUE = Queue("bench", Exchange("bench"), routing_key="bench")
#: Messages sent to a worker that is to be killed; minimum and maximum number of finished messages
#: at the kill.
KILLED_WITH, DONE = 4000, (100, 2000)

#: The workers' application. Worker processes import it with these environment variables set.
app = Celery("queue", broker=os.environ.get("BENCH_BROKER", "redis://"))
app.conf.update(
    broker_transport=os.environ.get("BENCH_TRANSPORT", TRANSPORTS[KOMBU]),
    broker_connection_retry_on_startup=True,
    task_acks_late=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=PREFETCH,
    worker_hijack_root_logger=False,
)
done = Redis.from_url(str(app.conf.broker_url))


@app.task(name="noop")
def noop(_: str) -> None:
    """Do nothing."""


@app.task(name="note", bind=True)
def note(self: Any, _: str) -> None:
    """Record the message's id as done."""
    done.sadd("done", self.request.id)


def say(words: str) -> None:
    sys.stderr.write(f"{words}\n")


@contextmanager
def worker(
    url: str, name: str, events: bool, pool: str, folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        sys.executable,
        "-m",
        "celery",
        "-A",
        "benchmarks.queue:app",
        "worker",
        "-P",
        pool,
        "-n",
        f"{name}@bench",
    ]
    options = ["-E"] if events else ["--without-heartbeat"]
    with (folder / "worker.log").open("ab") as log:
        process = subprocess.Popen(
            [
                *command,
                *options,
                "-c",
                "1" if pool == "solo" else "4",
                "-l",
                "ERROR",
                "--without-mingle",
                "--without-gossip",
            ],
            env=os.environ | {"BENCH_BROKER": url, "BENCH_TRANSPORT": TRANSPORTS[name]},
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def send(url: str, task: str, count: int) -> set[str]:
    """Publish tasks with a stock Celery client and return their ids."""
    with (
        Celery(broker=url) as client,
        client.producer_or_acquire() as producer,
        producer.batch(),
    ):
        return {
            client.send_task(task, (TEXT,), producer=producer).id for _ in range(count)
        }


def measure_transport(url: str, name: str, count: int) -> float:
    """Return the throughput of the bare transport in messages/s."""
    with Connection(url) as connection:
        producer: Any = Producer(connection.channel())
        with producer.batch():
            for _ in range(count):
                producer.publish(
                    TEXT,
                    exchange=QUEUE.exchange,
                    routing_key="bench",
                    declare=[QUEUE],
                    serializer="json",
                )
    with Connection(url, transport=TRANSPORTS[name]) as connection:
        channel: Any = connection.channel()
        times: list[float] = []
        channel.basic_qos(0, PREFETCH, False)

        def received(message: Any) -> None:
            message.ack()
            times.append(time.perf_counter())

        with Consumer(channel, [QUEUE], on_message=received, accept=["json"]):
            while len(times) < count:
                connection.drain_events(timeout=10)
    return count * 0.8 / (times[int(count * 0.9)] - times[int(count * 0.1)])


def measure_worker(
    url: str, name: str, count: int, events: bool, folder: Path
) -> float:
    """Return the throughput of a worker in acknowledged messages/s."""
    redis = Redis.from_url(url)
    redis.flushall()
    send(url, "noop", count)
    passed: list[float] = []
    with worker(url, name, events, "solo", folder) as process:
        for mark in (0.9, 0.1):
            while _left(redis, name) > count * mark:
                if process.poll() is not None:
                    raise SystemExit(
                        f"the worker has exited: {(folder / 'worker.log').read_text()}"
                    )
                time.sleep(0.005)
            passed += [time.perf_counter(), _left(redis, name)]
    redis.close()
    return (passed[1] - passed[3]) / (passed[2] - passed[0])


def _left(redis: Redis, name: str) -> int:
    pipe = redis.pipeline(transaction=True)
    pipe.llen("celery")
    pipe.hlen(HELD[name])
    return sum(pipe.execute())


def measure_latency(url: str, name: str, samples: int) -> float:
    """Return the median milliseconds from publishing until an idle consumer has the message."""
    taken: list[float] = []
    came = threading.Event()

    def received(message: Any) -> None:
        taken.append((time.perf_counter() - message.payload) * 1000)
        message.ack()
        came.set()

    with (
        Connection(url, transport=TRANSPORTS[name]) as connection,
        Connection(url) as sending,
    ):
        producer = Producer(sending.channel())
        channel: Any = connection.channel()
        channel.basic_qos(0, PREFETCH, False)

        def consume() -> None:
            with Consumer(channel, [QUEUE], on_message=received, accept=["json"]):
                while len(taken) < samples:
                    connection.drain_events(timeout=10)

        thread = threading.Thread(target=consume)
        thread.start()
        for _ in range(samples):
            time.sleep(random.uniform(0.005, 0.015))
            came.clear()
            producer.publish(
                time.perf_counter(),
                exchange=QUEUE.exchange,
                routing_key="bench",
                declare=[QUEUE],
                serializer="json",
            )
            came.wait(10)
        thread.join()
    return median(taken)


def measure_kill(url: str, name: str, folder: Path) -> tuple[int, float]:
    """Kill a busy worker; return the number of missing messages and the seconds until none was in
    flight.
    """
    redis = Redis.from_url(url)
    redis.flushall()
    sent = send(url, "note", KILLED_WITH)
    until = random.randint(*DONE)
    with worker(
        url, name, False, random.choice(("solo", "threads")), folder
    ) as process:
        while redis.scard("done") < until:
            time.sleep(0.001)
        process.kill()
        process.wait()
    killed = time.perf_counter()
    if name == OURS:  # a consumer of another queue sweeps expired leases
        with (
            Connection(url, transport=TRANSPORTS[OURS]) as connection,
            Consumer(connection.channel(), [QUEUE], on_message=print, accept=["json"]),
        ):
            while redis.hlen(HELD[OURS]):
                time.sleep(0.05)
    seconds = time.perf_counter() - killed
    members: Any = redis.smembers("done")
    found = {each.decode() for each in members}
    found |= {
        json.loads(each)["headers"]["id"] for each in redis.lrange("celery", 0, -1)
    }
    found |= {json.loads(each)[0]["headers"]["id"] for each in redis.hvals("unacked")}
    redis.close()
    return len(sent - found), seconds


def compare(what: str, rounds: int, measure: Any) -> dict[str, Any]:
    """Measure both transports alternately; return the medians of their figures and of the rounds'
    ratios.
    """
    figures: dict[str, list[float]] = {KOMBU: [], OURS: []}
    for number in range(rounds):
        for name in sorted(figures, reverse=bool(number % 2)):
            figures[name].append(measure(name))
            say(f"{what:<16} round {number + 1}: {name:<6} {figures[name][-1]:>10,.2f}")
    ratios = [
        ours / theirs
        for ours, theirs in zip(figures[OURS], figures[KOMBU], strict=True)
    ]
    return {name: round(median(each), 2) for name, each in figures.items()} | {
        "ratio": round(median(ratios), 2)
    }


def run(given: argparse.Namespace, url: str, folder: Path) -> dict[str, Any]:
    def messages(name: str) -> int:
        return int(given.messages * SHARE[name])

    found: dict[str, Any] = {}
    if given.rounds:
        found["transport"] = compare(
            "messages/s alone",
            given.rounds,
            lambda name: measure_transport(url, name, messages(name)),
        )
        found["latency_ms"] = compare(
            "latency ms",
            given.rounds,
            lambda name: measure_latency(url, name, given.samples),
        )
        for events in (False, True):
            found["worker_events" if events else "worker"] = compare(
                f"worker{', events' * events}",
                given.rounds,
                lambda name, events=events: measure_worker(
                    url, name, messages(name), events, folder
                ),
            )
    if given.kills:
        lost: dict[str, list[int]] = {KOMBU: [], OURS: []}
        back = []
        for number in range(given.kills):
            for name, counts in lost.items():
                missing, seconds = measure_kill(url, name, folder)
                counts.append(missing)
                back += [seconds] * (name == OURS)
                say(
                    f"kill {number + 1}: {name:<6} {missing} missing"
                    + (f", back in {seconds:.1f} s") * (name == OURS)
                )
        found["kills"] = {
            "each": given.kills,
            "longest_back_s": round(max(back), 1),
        } | {
            name: {"kills_that_lost": sum(map(bool, counts)), "missing": sum(counts)}
            for name, counts in lost.items()
        }
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5, help="rounds; 0: only kills")
    parser.add_argument(
        "--samples", type=int, default=300, help="latency samples per round"
    )
    parser.add_argument(
        "--kills", type=int, default=0, help="workers of each transport to kill"
    )
    parser.add_argument(
        "--redis",
        default=None,
        help=("path of redis-server; default: the one that Feedmill finds"),
    )
    given = parser.parse_args(arguments)
    path = given.redis or find_redis_server()
    version, port = ".".join(map(str, server_version(path)[1])), free_port()
    url = f"redis://127.0.0.1:{port}/0"
    with tempfile.TemporaryDirectory() as folder:
        configuration = f'bind 127.0.0.1\nport {port}\nsave ""\ndir "{folder}"\n'
        child = Child(
            "redis", [path, "-"], Path(folder), dict(os.environ), stdin=configuration
        )
        try:
            client = Redis.from_url(url)
            child.wait_until(lambda: _answers(client))
            say(
                f"Redis {version}, {os.cpu_count()} CPUs, messages of {len(TEXT)} bytes"
            )
            found = run(given, url, Path(folder))
        finally:
            child.stop(10)
    print(json.dumps({"redis": version, "cpus": os.cpu_count()} | found))
    return 0


def _answers(client: Redis) -> bool:
    try:
        return bool(client.ping())
    except RedisError:
        return False


if __name__ == "__main__":
    sys.exit(main())
