"""Faults of a whole table in PostgreSQL, and servers that do not answer: no result is lost or
doubled.
"""

import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

from feedmill.exporting.columns import ExportFilter
from feedmill.exporting.files import batch_of
from feedmill.exporting.postgres import opened
from feedmill.outcomes.rows import RowReader
from feedmill.shared.errors import UserError
from feedmill.shared.purge import purge, purge_run
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from tests import support
from tests.fakes import constants
from tests.integration.test_postgres import (
    TABLE,
    database,
    export,
    ids,
    postgres_server,
    result,
    store,
)
from tests.postgres import PostgresServer
from tests.support import RedisServer, feedmill, long_cases, wait_until

__all__ = ["database", "postgres_server", "store"]  # fixtures


class Fault(NamedTuple):
    """A fault of a table, by its owner. begin, end: statements."""

    begin: str
    end: str


#: Fails for every row, or for those of a condition.
TRIGGER = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql
AS $$ BEGIN IF {} THEN RAISE EXCEPTION 'refused by a trigger'; END IF; RETURN NEW; END $$;
CREATE TRIGGER refuse BEFORE INSERT ON feedmill_results FOR EACH ROW EXECUTE FUNCTION refuse()
"""
DROP_TRIGGER = "DROP FUNCTION refuse CASCADE"
FAULTS = {
    "required column": Fault(
        "ALTER TABLE feedmill_results ADD extra_column text NOT NULL DEFAULT 'x';"
        "ALTER TABLE feedmill_results ALTER extra_column DROP DEFAULT",
        "ALTER TABLE feedmill_results DROP extra_column",
    ),
    "required column of ours": Fault(
        "UPDATE feedmill_results SET topic = 'x' WHERE topic IS NULL;"
        "ALTER TABLE feedmill_results ALTER topic SET NOT NULL",
        "ALTER TABLE feedmill_results ALTER topic DROP NOT NULL",
    ),
    "constraint": Fault(
        "ALTER TABLE feedmill_results ADD CONSTRAINT never CHECK (false) NOT VALID",
        "ALTER TABLE feedmill_results DROP CONSTRAINT never",
    ),
    "deferred constraint": Fault(
        "CREATE TABLE known (id text PRIMARY KEY); ALTER TABLE feedmill_results ADD CONSTRAINT "
        "known "
        "FOREIGN KEY (id) REFERENCES known NOT VALID DEFERRABLE INITIALLY DEFERRED",
        "DROP TABLE known CASCADE",
    ),
    "trigger": Fault(TRIGGER.format("true"), DROP_TRIGGER),
    "trigger for most": Fault(TRIGGER.format("NEW.id NOT LIKE '%7'"), DROP_TRIGGER),
    "full domain": Fault(
        "ALTER TABLE feedmill_results ALTER title TYPE varchar(3) USING left(title, 3)",
        "ALTER TABLE feedmill_results ALTER title TYPE text",
    ),
}


def export_in_parts(redis: RedisServer, database: PostgresServer, size: int) -> None:
    """Export with transactions of this many rows, as if so many had arrived since the last one."""
    reader = RowReader(redis.client)
    with opened(database.url, TABLE, ExportFilter(), reader) as target:
        place = target.place
        rows = [row for chunk in reader.chunks(place) for row in chunk.rows]
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            place = place._replace(cursor=part[-1].entry, number=None)
            target.add(batch_of(part, target.schema), place)
        target.close(place)


def faults_and_sizes() -> list[Any]:
    """Return each fault with a transaction of 99 rows, and one that refuses all rows and one that
    refuses most of them also with transactions of one row; `make long` has the others.
    """
    usual = [(fault, 99) for fault in FAULTS]
    usual += [("constraint", 1), ("trigger for most", 1)]
    cases = []
    for fault in FAULTS:
        for size in (1, 20, 99, 100):
            marks = () if (fault, size) in usual else (pytest.mark.long,)
            cases.append(pytest.param(fault, size, marks=marks))
    return cases


@pytest.mark.parametrize(("fault", "size"), faults_and_sizes())
def test_after_a_repair_each_result_is_there_once(
    redis: RedisServer,
    database: PostgresServer,
    store: ResultsStore,
    fault: str,
    size: int,
) -> None:
    """Whatever the table refused, and in transactions of any size."""
    count = 20 if size == 1 else 120
    store.write([result("before")])
    export(redis, database)
    database.rows(FAULTS[fault].begin)
    store.write([result(f"{number:03}") for number in range(count)])
    for _ in range(2):  # a service is restarted
        with suppress(UserError):
            export_in_parts(redis, database, size)
    assert len(ids(database)) < 0.2 * count
    database.rows(FAULTS[fault].end)
    store.write([result("later")])
    export_in_parts(redis, database, size)
    assert ids(database) == [
        *(f"{number:03}" for number in range(count)),
        "before",
        "later",
    ]
    assert database.rows("SELECT count(*) FROM feedmill_refused") == [(0,)]


@pytest.mark.parametrize("seed", [0, *long_cases(1, 2)])
def test_faults_that_come_and_go_lose_nothing(
    redis: RedisServer, database: PostgresServer, store: ResultsStore, seed: int
) -> None:
    chance = random.Random(seed)
    export(redis, database)
    written: set[str] = set()
    faulty: set[str] = set()
    for turn in range(8):
        fault = chance.choice([*FAULTS])
        if not fault.startswith("trigger") or not {
            each for each in faulty if each.startswith("trigger")
        } - {fault}:
            database.rows(FAULTS[fault].end if fault in faulty else FAULTS[fault].begin)
            faulty ^= {fault}
        new = {f"{turn}-{number}" for number in range(chance.choice([1, 5, 30]))}
        store.write([result(post_id) for post_id in sorted(new)])
        written |= new
        with suppress(UserError):
            export_in_parts(redis, database, chance.choice([3, 7, 50]))
    for fault in faulty:
        database.rows(FAULTS[fault].end)
    export(redis, database)
    assert ids(database) == sorted(written)


def test_command_tells_of_refused_rows_and_repeats_them(
    redis: RedisServer, database: PostgresServer, store: ResultsStore, tmp_path: Path
) -> None:
    def run() -> tuple[int, dict[str, Any], str]:
        said = feedmill(
            "export", database.url, "--json", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url
        )
        return said.returncode, support.last_json(said.stdout or "{}"), said.stderr

    store.write([result("before")])
    run()
    database.rows(FAULTS["constraint"].begin)
    store.write([result(f"{number:02}") for number in range(99)])
    status, found, said = run()
    assert (status, found["rows"], found["refused"]) == (1, 0, 99)
    assert said.count("check constraint") == 20
    assert "feedmill_refused" in said
    assert database.rows(
        "SELECT count(*), min(reason) ~ 'check constraint' FROM feedmill_refused"
    ) == [(99, True)]
    left = {"rows": 0, "removed": 0, "complete": True, "refused": 99, "missed": 0}
    for _ in range(
        2
    ):  # rows of an earlier run count as long as they are missing from the table
        assert run()[:2] == (1, left)
    database.rows(FAULTS["constraint"].end)
    status, found, said = run()
    assert (status, found) == (
        0,
        {"rows": 99, "removed": 0, "complete": True, "missed": 0},
    )
    assert len(ids(database)) == 100
    assert run()[:2] == (0, {"rows": 0, "removed": 0, "complete": True, "missed": 0})


def test_required_column_of_others_ends_the_export_with_the_position_kept(
    redis: RedisServer, database: PostgresServer, store: ResultsStore
) -> None:
    """Not a single row of another table's version is tried."""
    export(redis, database)
    database.rows(FAULTS["required column"].begin)
    store.write([result("1")])
    with pytest.raises(UserError, match="extra_column"):
        export(redis, database)
    assert database.rows("SELECT count(*) FROM feedmill_refused") == [(0,)]


def test_follower_offers_refused_rows_again(
    redis: RedisServer, database: PostgresServer, store: ResultsStore, tmp_path: Path
) -> None:
    environment = {
        constants.VARIABLE: json.dumps(
            {"feedmill.exporting.postgres.OFFER_INTERVAL_S": 0.2}
        )
    }
    environment |= {"FEEDMILL_REDIS_URL": redis.url}
    store.write([result("before")])
    with support.running(
        "export", "--follow", database.url, cwd=tmp_path, **environment
    ) as following:
        wait_until(lambda: has(database, 1), "the first row is there")
        database.rows(FAULTS["trigger"].begin)
        for number in range(30):
            store.write([result(f"{number:02}")])
        wait_until(
            lambda: count(database, "feedmill_refused") == 30, "all rows are refused"
        )
        database.rows(FAULTS["trigger"].end)
        wait_until(lambda: has(database, 31), "the refused rows are in the table")
        assert following.end(signal.SIGTERM) == 0, following.text()
    assert count(database, "feedmill_refused") == 0


def count(database: PostgresServer, table: str) -> int:
    ((rows,),) = database.rows(f"SELECT count(*) FROM {table}")  # noqa: S608
    return int(rows)


def has(database: PostgresServer, rows: int) -> bool:
    with suppress(psycopg.errors.UndefinedTable):
        return count(database, TABLE) == rows
    return False


def test_later_result_is_not_replaced_by_a_refused_one(
    redis: RedisServer, database: PostgresServer, store: ResultsStore
) -> None:
    def write(at: float) -> None:
        redis.client.delete(*redis.client.keys("feedmill:stored*"))
        store.write([result("1", at=at)])

    store.write([result("0")])
    export(redis, database)
    database.rows(FAULTS["trigger"].begin)
    for at in (2.0, 3.0):
        write(at)
        export(redis, database)
    assert count(database, "feedmill_refused") == 1
    database.rows(FAULTS["trigger"].end)
    write(4.0)
    reader = RowReader(redis.client)
    with opened(database.url, TABLE, ExportFilter(), reader) as target:
        target._offer_at = float(
            "inf"
        )  # the refused row is offered after the newer one
        chunk = reader.fetch(target.place)
        target.add(batch_of(chunk.rows, target.schema), chunk.place)
    export(redis, database)
    query = "SELECT extract(epoch FROM classified_at)::float8 FROM feedmill_results WHERE id = '1'"
    assert database.rows(query) == [(4.0,)]
    assert count(database, "feedmill_refused") == 0


@pytest.mark.parametrize("missed", [False, True])
def test_refused_rows_of_purged_posts_and_runs_are_deleted(
    redis: RedisServer, database: PostgresServer, store: ResultsStore, missed: bool
) -> None:
    """missed: the log of purges was trimmed before the export read it."""
    settings = Settings.model_validate({"redis_url": redis.url})
    export(redis, database)
    database.rows(FAULTS["trigger"].begin)
    store.write([result("kept"), result("gone"), result("run", run="monday")])
    export(redis, database)
    assert count(database, "feedmill_refused") == 3
    purge(redis.client, settings, ["gone"])
    if missed:
        redis.client.delete("feedmill:purges")
    else:
        purge_run(redis.client, settings, "monday")
    export(redis, database)
    left = {post_id for (post_id,) in database.rows("SELECT id FROM feedmill_refused")}
    assert left == {"kept", "run"} if missed else {"kept"}
    database.rows(FAULTS["trigger"].end)
    purge(redis.client, settings, ["kept"])
    export(redis, database)
    assert "kept" not in ids(database)
    assert count(database, "feedmill_refused") == 0


def test_number_of_refused_rows_is_bounded_without_stepping_over_a_fault(
    redis: RedisServer,
    database: PostgresServer,
    store: ResultsStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("feedmill.exporting.refused_rows.MAX_REFUSED_ROWS", 25)
    export(redis, database)
    database.rows(FAULTS["trigger"].begin)
    store.write([result(f"{number:03}") for number in range(90)])
    for _ in range(3):
        with pytest.raises(UserError, match="refused by a trigger"):
            export_in_parts(redis, database, 10)
    assert count(database, "feedmill_refused") == 20
    database.rows(FAULTS["trigger"].end)
    export_in_parts(redis, database, 10)
    assert ids(database) == [f"{number:03}" for number in range(90)]


# Servers that do not answer.


@contextmanager
def hanging(server: PostgresServer) -> Iterator[None]:
    """Stop all of the server's processes: its kernel still accepts connections and acknowledges
    packets.
    """
    main = server._child.process.pid
    children = Path(f"/proc/{main}/task/{main}/children")

    def signal_all(number: signal.Signals) -> None:
        for process in (main, *map(int, children.read_text().split())):
            with suppress(ProcessLookupError):
                os.kill(process, number)

    signal_all(signal.SIGSTOP)
    try:
        yield
    finally:
        signal_all(signal.SIGCONT)


def short_times(redis: RedisServer, **times: float) -> dict[str, str]:
    replaced = {
        f"feedmill.exporting.bounded_connection.{name}": seconds
        for name, seconds in times.items()
    }
    replaced["feedmill.exporting.postgres.CONNECTION"] = {
        "application_name": "feedmill export",
        "connect_timeout": "2",
    }  # type: ignore[assignment]
    return {"FEEDMILL_REDIS_URL": redis.url, constants.VARIABLE: json.dumps(replaced)}


def test_signal_ends_an_export_whose_server_hangs(
    redis: RedisServer, database: PostgresServer, store: ResultsStore, tmp_path: Path
) -> None:
    store.write([result("1")])
    times = short_times(redis, STOP_TIMEOUT_S=0.2)
    with support.running(
        "export", "--follow", database.url, cwd=tmp_path, **times
    ) as following:
        wait_until(lambda: has(database, 1), "the first row is there")
        with hanging(database):
            store.write([result("2")])
            assert following.end(signal.SIGTERM) == 0, following.text()
    assert "Traceback" not in following.text()
    export(redis, database)
    assert ids(database) == ["1", "2"]


def test_signal_ends_an_export_to_the_end_whose_server_hangs(
    redis: RedisServer, database: PostgresServer, store: ResultsStore, tmp_path: Path
) -> None:
    export(redis, database)
    store.write([result("1")])
    database.rows("CREATE TABLE waits (); ")
    with psycopg.connect(database.url) as owner:
        owner.execute("LOCK TABLE feedmill_results IN ACCESS EXCLUSIVE MODE")
        times = short_times(redis, STOP_TIMEOUT_S=0.2)
        with support.running("export", database.url, cwd=tmp_path, **times) as running:
            wait_until(lambda: waits(database), "the export waits for the lock")
            assert running.end(signal.SIGTERM) == 128 + signal.SIGTERM, running.text()
    assert "Traceback" not in running.text()
    export(redis, database)
    assert ids(database) == ["1"]


def waits(database: PostgresServer) -> bool:
    query = (
        "SELECT 1 FROM pg_stat_activity WHERE application_name = 'feedmill export' AND "
        "wait_event_type = 'Lock'"
    )
    return bool(database.rows(query))


def test_follower_survives_a_server_that_hangs(
    redis: RedisServer, database: PostgresServer, store: ResultsStore, tmp_path: Path
) -> None:
    store.write([result("1")])
    times = short_times(redis, ANSWER_TIMEOUT_S=1.0)
    with support.running(
        "export", "--follow", database.url, cwd=tmp_path, **times
    ) as following:
        wait_until(lambda: has(database, 1), "the first row is there")
        with hanging(database):
            store.write([result("2")])
            wait_until(
                lambda: following.says("no answer within"),
                "the export gives up waiting",
            )
        wait_until(lambda: has(database, 2), "the second row is there")
        assert following.end(signal.SIGTERM) == 0, following.text()


# Damaged positions.


#: The largest id that an entry of a stream can have.
LAST_ID = "18446744073709551615-18446744073709551615"
ODD_IDS = ("", "x", "5", "5-x", "99999999999999999999-0", LAST_ID)


@pytest.mark.parametrize(
    "change",
    [
        *(
            f"place = '{place}'"
            for place in (
                "{}", "[]", "null",
                '"5-0"', '{"cursor": 5}', '{"cursor": "x"}', '{"cursor": "5-0", "number": "x"}',
                '{"cursor": "5-0", "number": -1}', '{"cursor": "5-0", "more": 1}',
                '{"cursor": "99999999999999999999-0"}', '{"cursor": "5-0", "number": true}',
                f'{{"cursor": "{LAST_ID}"}}',
            )
        ),
        *(f"purges = '{purges}'" for purges in ODD_IDS),
        *(f"options = '{options}'" for options in ("[]", "5", "null", '"x"', "[[1]]")),
    ],
)  # fmt: skip
def test_damaged_position_is_reported(
    redis: RedisServer, database: PostgresServer, store: ResultsStore, change: str
) -> None:
    store.write([result("1")])
    export(redis, database)
    database.rows(f"UPDATE feedmill_exports SET {change}")  # noqa: S608
    with pytest.raises(UserError, match=support.naming("feedmill_exports", TABLE)):
        export(redis, database)
    database.rows("DELETE FROM feedmill_exports")
    store.write([result("2")])
    export(redis, database)
    assert ids(database) == ["1", "2"]


ROW = {"id": "old", "fingerprint": "f", "stored_at": "2026-11-28T00:00:00+00:00"}
ODD_VALUES: tuple[dict[str, Any], ...] = (
    {"id": None}, {"id": 5}, {"stored_at": "soon"}, {"stored_at": 5}, {"score": "x"},
    {"score": True}, {"score": 10**30}, {"label_score": "x"}, {"nsfw": 1}, {"scores": {}},
    {"title": 5},
)  # fmt: skip


@pytest.mark.parametrize(
    "damaged",
    [
        "", "x", "{", "null", "5", "[]", "[1, 2]", "{}", "[" * 100_000, json.dumps([None] * 30),
        *(json.dumps(ROW | change) for change in ODD_VALUES),
    ],
    ids=range(21),
)  # fmt: skip
def test_damaged_refused_row_is_reported(
    redis: RedisServer, database: PostgresServer, store: ResultsStore, damaged: str
) -> None:
    store.write([result("1")])
    export(redis, database)
    database.rows(
        "INSERT INTO feedmill_refused (table_name, id, fingerprint, stored_at, reason, result) "
        "VALUES (%s, 'old', 'f', now(), 'why', %s)",
        TABLE,
        damaged,
    )
    ((number,),) = database.rows("SELECT number FROM feedmill_refused")
    store.write([result("2")])
    with pytest.raises(
        UserError, match=support.naming("feedmill_refused", f"number {number}")
    ):
        export(redis, database)
    database.rows("DELETE FROM feedmill_refused")
    export(redis, database)
    assert ids(database) == ["1", "2"]
