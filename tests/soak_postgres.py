"""Export 100,000 results to PostgreSQL despite kills and crashes (`python -m tests.soak_postgres`).

Results are written to a real Redis and some of their posts are purged, while `feedmill export --follow` is killed with
SIGKILL at random times, and PostgreSQL with all of its processes. Both are restarted.

The last line is JSON: results, purged (posts), rows, missing, twice, wrong (rows unlike their result), purged_left
(rows), kills, crashes, rows_at_kills, seconds. Exits 1 if a row is missing, there twice,
wrong, or of a purged post.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import psycopg

from feedmill.shared.messages import Classification, Post, digest
from feedmill.shared.purge import purge
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from tests.postgres import PostgresServer, postgres_folder
from tests.support import PASSWORD, Feedmill, RedisServer, redis_servers, wait_until

#: Results per write to Redis.
WRITE_SIZE = 50
#: Results between purges, and posts per purge. They were written the same number of results before, so that some rows
#: are in the table by then.
PURGE_INTERVAL, PURGED_AT_ONCE = 2500, 25
#: Seconds in which the export must write the remaining results.
PATIENCE_S = 600.0
LABELS = ("books", "food", "music", "travel")


class Soak:
    """A run of the test. seconds: the time over which results are written."""

    def __init__(self, results: int, kills: int, crashes: int, seconds: float, seed: int, folder: Path) -> None:
        self._random = random.Random(seed)
        self._results, self._kills, self._crashes, self._seconds = results, kills, crashes, seconds
        self._folder = folder
        self._settings = Settings.model_validate({"results_stream_length": 10 * results})
        self._purged: list[str] = []

    def run(self, programs: Path) -> dict[str, Any]:
        began = time.monotonic()
        with ExitStack() as running:
            self._redis = RedisServer(next(iter(redis_servers().values())), self._folder)
            running.callback(self._redis.stop)
            self._database = PostgresServer(programs, durable=True)
            running.callback(self._database.stop)
            self._start()
            running.callback(self._kill)
            writer = Thread(target=self._write)
            writer.start()
            running.callback(writer.join)
            kills = self._kill_at_random()
            writer.join()
            wanted = self._results - len(self._purged)
            wait_until(lambda: self._rows() == wanted, f"the table has {wanted:,} rows", PATIENCE_S)
            status = self._export.end()
            found = self._compare() | {"kills": self._kills, "crashes": self._crashes, "rows_at_kills": kills}
        if status or PASSWORD in "".join(log.read_text() for log in self._folder.glob("feedmill-*.log")):
            raise AssertionError(f"status {status}, or a password in a log: {self._export.text()}")
        return found | {"seconds": round(time.monotonic() - began)}

    def _start(self) -> None:
        self._export = Feedmill(
            "export", "--follow", self._database.url, cwd=self._folder, FEEDMILL_REDIS_URL=self._redis.url
        )

    def _kill(self) -> None:
        self._export.process.kill()
        self._export.process.wait()

    def _write(self) -> None:
        """Write all results, and purge some of their posts."""
        store, began = ResultsStore(self._redis.client, self._settings), time.monotonic()
        for start in range(0, self._results, WRITE_SIZE):
            store.write([result(number) for number in range(start, min(start + WRITE_SIZE, self._results))])
            if start % PURGE_INTERVAL == 0 and start >= PURGE_INTERVAL:
                ids = [str(start - PURGE_INTERVAL + number) for number in range(PURGED_AT_ONCE)]
                purge(self._redis.client, self._settings, ids)
                self._purged += ids
            ahead = began + self._seconds * start / self._results - time.monotonic()
            time.sleep(max(0.0, ahead))

    def _kill_at_random(self) -> list[int]:
        """Kill the export and PostgreSQL in random order; return the number of rows at each kill."""
        faults = ["kill"] * self._kills + ["crash"] * self._crashes
        self._random.shuffle(faults)
        rows = []
        for number, fault in enumerate(faults):
            # At an even pace of rows, and then at any moment of a transaction.
            least = (number + self._random.random()) * self._results * 0.95 / len(faults)
            wait_until(partial(self._has_rows, least), f"{least:,.0f} rows are in the table", PATIENCE_S)
            time.sleep(self._random.random() * 0.2)
            if fault == "kill":
                self._kill()
                rows.append(self._rows())
                self._start()
            else:  # an export that cannot connect at its start exits
                wait_until(self._is_connected, "the export is connected", PATIENCE_S)
                self._database.kill()
                self._database.start()
            sys.stderr.write(f"{fault} after {rows[-1] if fault == 'kill' else self._rows():,} rows\n")
        return rows

    def _is_connected(self) -> bool:
        query = "SELECT query FROM pg_stat_activity WHERE application_name = 'feedmill export' AND state = 'idle'"
        return any(last.startswith(("SELECT options", "COMMIT")) for (last,) in self._database.rows(query))

    def _has_rows(self, least: float) -> bool:
        return self._rows() >= least

    def _rows(self) -> int:
        if (status := self._export.process.poll()) not in (None, -9):
            raise AssertionError(f"the export exited with status {status}:\n{self._export.text()}")
        try:
            return int(self._database.rows("SELECT count(*) FROM feedmill_results")[0][0])
        except psycopg.errors.UndefinedTable:
            return 0

    def _compare(self) -> dict[str, Any]:
        """Compare every row with its result."""
        rows = self._database.rows(
            "SELECT id, title, score, label, label_score, scores, fingerprint FROM feedmill_results"
        )
        wanted = {}
        for number in range(self._results):
            post, found = result(number)
            score = found.scores[found.label]
            wanted[post.id] = (post.id, post.title, post.score, found.label, score, found.scores, found.fingerprint)
        left = wanted.keys() - {*self._purged}
        ids = [row[0] for row in rows]
        return {
            "results": self._results,
            "purged": len(self._purged),
            "rows": len(rows),
            "missing": len(left - {*ids}),
            "twice": len(ids) - len({*ids}),
            "wrong": sum(row != wanted.get(row[0]) for row in rows),
            "purged_left": len({*self._purged} & {*ids}),
        }


def result(number: int) -> Result:
    """Return a result that depends only on its number."""
    label, others = LABELS[number % 4], LABELS[:3]
    scores = {label: 0.5 + number % 1000 / 2000} | {
        other: 0.01 * place for place, other in enumerate(others) if other != label
    }
    found = Classification(
        id=str(number), label=label, scores=scores, model="m", revision=None, weights="00",
        fingerprint=digest(str(number)), classified_at=float(number), worker="w", device="cpu", queued_seconds=0.5,
    )  # fmt: skip
    return Result(Post(id=str(number), title=f"title {number}", body="words " * (number % 80), score=number), found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--crashes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    programs = postgres_folder()
    if programs is None:
        parser.error("needs PostgreSQL: apt install postgresql")
    with TemporaryDirectory(prefix="feedmill-soak-") as folder:
        soak = Soak(given.results, given.kills, given.crashes, given.seconds, given.seed, Path(folder))
        found = soak.run(programs)
    sys.stdout.write(json.dumps(found) + "\n")
    bad = found["missing"] + found["twice"] + found["wrong"] + found["purged_left"]
    return 1 if bad or found["rows"] != given.results - found["purged"] else 0


if __name__ == "__main__":
    sys.exit(main())
