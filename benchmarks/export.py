"""Measure throughput and memory of `feedmill export` for each format.

    python -m benchmarks.export [--count 100000] [--posts FILE] [--rounds 3] [--formats parquet csv
    jsonl]
        [--database postgresql://…]

The benchmark fills a real Redis with results for the sixteen topics, with texts of the bundled
posts or of a file, and runs `feedmill export` as a process for each format in each round. Rows/s
cover the whole life of the process, including about a second of start-up; CPU time and peak memory
are those of the process. With a database, which must be on this machine, results are also exported
to a table in PostgreSQL; CPU time of its processes and of Redis is shown, too. The last line is
JSON.
"""

import argparse
import json
import os
import random
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import psycopg
from rich.console import Console

from benchmarks.running import run_folder
from benchmarks.throughput import read_posts
from feedmill.shared.broker import connect
from feedmill.shared.errors import StackError
from feedmill.shared.messages import Classification, Post, digest
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import TOPICS, Settings, load, variables
from feedmill.stack.embedded import Stack
from feedmill.stack.processes import python_command

FORMATS = ("parquet", "csv", "jsonl")
#: Table that exports to a database replace.
TABLE = "feedmill_benchmark"
#: Results per write.
WRITE_SIZE = 200
#: Maximum number of posts to read; each post is used many times, with different ids.
MAX_POSTS = 2000

console = Console(soft_wrap=True, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--posts", help="file of posts; default: the bundled posts")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=FORMATS)
    parser.add_argument(
        "--database",
        help=("address of a PostgreSQL; its table feedmill_benchmark is replaced"),
    )
    given = parser.parse_args()
    with run_folder() as folder:
        print(
            json.dumps(
                run(
                    given.posts,
                    given.count,
                    given.rounds,
                    folder,
                    given.formats,
                    given.database,
                )
            )
        )


def run(
    file: str | None,
    count: int,
    rounds: int,
    folder: Path,
    formats: Sequence[str] = FORMATS,
    database: str | None = None,
) -> dict[str, Any]:
    # Redis trims the stream by whole nodes, so it keeps at least `count` entries.
    settings = load(
        results_stream_length=count, results_memory=max(10**9, 4_000 * count)
    )
    posts = read_posts(file, min(count, MAX_POSTS))
    stack = Stack(settings, folder / "stack", durable=False)
    next(stack.start())  # starts only Redis
    try:
        began = time.perf_counter()
        size = fill(stack.settings, posts, count)
        console.print(
            f"{count:,} results in Redis, {size / count:,.0f} bytes each, in "
            f"{time.perf_counter() - began:.0f} s; "
            f"{os.cpu_count()} CPUs"
        )
        found: dict[str, Any] = {"results": count, "entry_bytes": round(size / count)}
        for form in formats:
            measured = [
                _export(stack.settings, form, count, folder / f"{form}-{number}")
                for number in range(rounds)
            ]
            found[form] = {
                name: round(median(each[name] for each in measured), 1)
                for name in measured[0]
            }
            each = found[form]
            console.print(
                f"{form:<8} {each['rows_per_second']:>8,.0f} rows/s in {each['seconds']:.1f} s "
                f"({each['cpu_seconds']:.1f} s of CPU time); peak memory {each['peak_mb']:.0f} "
                "MB; "
                f"{each['bytes_per_row']:,.0f} bytes per row on disk"
            )
        if database is not None:
            measured = [
                _export_to_table(stack.settings, database, count) for _ in range(rounds)
            ]
            found["postgres"] = each = {
                name: round(median(each[name] for each in measured), 1)
                for name in measured[0]
            }
            console.print(
                f"postgres {each['rows_per_second']:>8,.0f} rows/s in {each['seconds']:.1f} s "
                "(CPU time: "
                f"{each['cpu_seconds']:.1f} s, {each['database_cpu_seconds']:.1f} s of "
                "PostgreSQL, "
                f"{each['redis_cpu_seconds']:.1f} s of Redis); peak memory {each['peak_mb']:.0f} "
                "MB; "
                f"{each['bytes_per_row']:,.0f} bytes per row on disk"
            )
    finally:
        stack.stop()
    return found


def fill(settings: Settings, posts: Sequence[Post], count: int) -> int:
    """Write `count` results to Redis and return the size of their JSON in bytes."""
    store = ResultsStore(connect(settings), settings)
    numbers = random.Random(1)
    size = 0
    results = (
        _result(numbers, number, posts[number % len(posts)]) for number in range(count)
    )
    while some := list(islice(results, WRITE_SIZE)):
        store.write(some)
        size += sum(
            len(each.classification.model_dump_json())
            + len(each.post.model_dump_json(exclude_defaults=True))
            for each in some
        )
    return size


def _result(numbers: random.Random, number: int, post: Post) -> Result:
    weights = sorted((numbers.random() ** 4 for _ in TOPICS), reverse=True)
    labels = numbers.sample(TOPICS, len(TOPICS))
    scores = {
        label: weight / sum(weights)
        for label, weight in zip(labels, weights, strict=True)
    }
    post = post.model_copy(update={"id": f"t3_{number:07x}", "body": post.body[:500]})
    found = Classification(
        id=post.id,
        label=labels[0],
        scores=scores,
        model="sentence-transformers/all-MiniLM-L6-v2",
        revision=None,
        weights=digest("weights") * 2,
        fingerprint=digest(post.id),
        classified_at=time.time(),
        worker="worker@host",
        device="cpu: 2 threads",
        queued_seconds=numbers.random() * 10,
    )
    return Result(post, found)


def _export(settings: Settings, form: str, count: int, out: Path) -> dict[str, float]:
    """Run the command once as a process and return its measurements.

    Raises StackError if rows are missing.
    """
    found = _run(settings, count, "--format", form, str(out))
    files = (
        [out]
        if out.is_file()
        else [path for path in out.rglob("part-*") if path.is_file()]
    )
    return found | {"bytes_per_row": sum(path.stat().st_size for path in files) / count}


def _export_to_table(settings: Settings, database: str, count: int) -> dict[str, float]:
    """Export to a new table. Raises as `_export` does."""
    redis: Any = connect(settings)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f"DROP TABLE IF EXISTS {TABLE}".encode())
        server = int(_value(connection, "SELECT pg_backend_pid()"))
        before, redis_before = _children_seconds(server), redis.info("cpu")
        found = _run(settings, count, "--table", TABLE, database)
        used = _children_seconds(server) - before
        redis_used = sum(
            redis.info("cpu")[name] - redis_before[name]
            for name in ("used_cpu_user", "used_cpu_sys")
        )
        size = float(_value(connection, f"SELECT pg_total_relation_size('{TABLE}')"))
    return found | {
        "database_cpu_seconds": used,
        "redis_cpu_seconds": redis_used,
        "bytes_per_row": size / count,
    }


def _value(connection: Any, query: str) -> Any:
    return connection.execute(query).fetchone()[0]


def _run(settings: Settings, count: int, *arguments: str) -> dict[str, float]:
    """Run the command once as a process and return its measurements.

    Raises StackError if rows are missing.
    """
    began = time.perf_counter()
    process = subprocess.Popen(
        [*python_command(), "export", "--json", *arguments],
        env=os.environ
        | variables(settings)
        | {"FEEDMILL_REDIS_URL": settings.broker_url},
        stdout=subprocess.PIPE,
        text=True,
    )
    peak, ended = 0, 0
    while not ended:
        peak = max(peak, _peak(process.pid))
        time.sleep(0.02)
        ended, status, used = os.wait4(process.pid, os.WNOHANG)
    process.returncode = os.waitstatus_to_exitcode(status)
    took = time.perf_counter() - began
    said = process.stdout.read() if process.stdout else ""
    rows = json.loads(said)["rows"] if process.returncode == 0 else 0
    if rows != count:
        raise StackError(f"{arguments[1]}: exported {rows} of {count} rows.")
    return {
        "rows_per_second": count / took,
        "seconds": took,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "peak_mb": peak / 1024,
    }


def _children_seconds(session: int) -> float:
    """Return the CPU time of PostgreSQL's processes in seconds, ended ones included. session: the
    PID of one.
    """
    server = _stat(session)[1]
    alive = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    ticks = sum(map(int, _stat(server)[11:15])) + sum(
        sum(map(int, _stat(child)[11:13])) for child in alive
    )
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(pid: object) -> list[str]:
    """Return the fields of a process' status after its name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _peak(pid: int) -> int:
    """Return a process's peak memory in KiB since it executed its program; 0 if it has exited.

    getrusage cannot be used: a child's maximum starts with the memory its parent had at the fork.
    """
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return 0


if __name__ == "__main__":
    main()
