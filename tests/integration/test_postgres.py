"""feedmill/exporting/postgres.py on a real PostgreSQL: each result once, whatever crashes; purges
reach the table.
"""

import random
import re
import signal
import string
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from redis import Redis

from feedmill.exporting import postgres
from feedmill.exporting.columns import ExportFilter
from feedmill.exporting.files import batch_of
from feedmill.exporting.postgres import Table, opened
from feedmill.exporting.table_rows import TYPES
from feedmill.outcomes.rows import RowReader, seconds_of
from feedmill.shared.errors import DatabaseUnavailable, UserError
from feedmill.shared.keys import COUNTERS, PURGES, RESULTS_STREAM
from feedmill.shared.messages import Post, digest
from feedmill.shared.purge import PURGES_PER_READ, lift_tombstones, purge, purge_run
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from tests import support
from tests.postgres import PostgresServer, postgres_folder
from tests.support import Feedmill, RedisServer, feedmill, wait_until

TABLE = "feedmill_results"
#: Lets every INSERT fail as on a full disk.
FULL_DISK = """
CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql
AS $$ BEGIN RAISE EXCEPTION 'disk full' USING ERRCODE = 'disk_full'; END $$;
CREATE TRIGGER full_disk BEFORE INSERT ON feedmill_results
FOR EACH STATEMENT EXECUTE FUNCTION fail()
"""
DOCUMENTATION = Path(__file__).parent.parent.parent / "docs" / "export.md"


@pytest.fixture(scope="module")
def postgres_server() -> Iterator[PostgresServer]:
    programs = postgres_folder()
    if programs is None:
        pytest.skip("needs PostgreSQL: apt install postgresql")
    server = PostgresServer(programs)
    yield server
    server.stop()


@pytest.fixture
def database(postgres_server: PostgresServer) -> PostgresServer:
    """The module's PostgreSQL, emptied."""
    postgres_server.rows("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    return postgres_server


@pytest.fixture
def store(redis: RedisServer) -> ResultsStore:
    return ResultsStore(redis.client, Settings())


def result(post_id: str, label: str = "food", at: float = 1.0, **fields: Any) -> Result:
    found = support.make_classification(
        post_id,
        label=label,
        scores={label: 0.9, "other": 0.1},
        fingerprint=digest(post_id, label),
        classified_at=at,
    )
    return Result(
        Post(id=post_id, **({"title": f"title of {post_id}"} | fields)), found
    )


def export(
    redis: RedisServer,
    database: PostgresServer,
    wanted: ExportFilter | None = None,
    table: str = TABLE,
) -> Table:
    reader = RowReader(redis.client)
    with opened(database.url, table, wanted or ExportFilter(), reader) as target:
        place = target.place
        for chunk in reader.chunks(place):
            place = chunk.place
            target.add(
                batch_of((wanted or ExportFilter()).of(chunk.rows), target.schema),
                place,
            )
        target.close(place)
    return target


def ids(database: PostgresServer, table: str = TABLE) -> list[str]:
    rows = database.rows(f"SELECT id FROM {table} ORDER BY id")  # noqa: S608
    return [post_id for (post_id,) in rows]


# Rows.


def test_writes_every_column(
    redis: RedisServer, database: PostgresServer, store: ResultsStore
) -> None:
    """Text with what PostgreSQL cannot store, too."""
    post: dict[str, Any] = {
        "title": "nul \0, \\u0000, “quotes”",
        "score": 2**53,
        "created_utc": 253_402_300_799,
        "nsfw": True,
        "extra": {"a\0": ["\0", {"b": None}], "c": 0.5},
        "run": "monday",
    }
    store.write([result("1", "food\0", **post), result("2", at=1.5)])
    assert export(redis, database).written == 2
    full, plain = database.rows("SELECT * FROM feedmill_results ORDER BY id")
    first, second = (
        dict(zip(TYPES, full, strict=True)),
        dict(zip(TYPES, plain, strict=True)),
    )
    assert first["title"] == "nul \ufffd, \\u0000, “quotes”"
    assert first["extra"] == {"a\ufffd": ["\ufffd", {"b": None}], "c": 0.5}
    assert (first["label"], first["label_score"], first["scores"]) == (
        "food\ufffd",
        0.9,
        {"food\ufffd": 0.9, "other": 0.1},
    )
    assert (first["score"], first["nsfw"], first["run"], first["label_set"]) == (
        2**53,
        True,
        "monday",
        "food\ufffd, other",
    )
    assert (second["title"], second["body"], second["url"], second["nsfw"]) == (
        "title of 2",
        "",
        None,
        False,
    )
    assert second["classified_at"].timestamp() == 1.5
    stored_at = database.rows(
        "SELECT extract(epoch FROM stored_at)::float8, date::text FROM feedmill_results ORDER BY "
        "id"
    )
    entries: Any = redis.client.xrange(RESULTS_STREAM)
    assert stored_at[0] == (seconds_of(entries[0][0]), "9999-12-31 23:59:59+00")


def without_label(post_id: str) -> Result:
    labelled = result(post_id)
    classification = labelled.classification.model_copy(update={"label": None})
    return labelled._replace(classification=classification)


def test_writes_results_without_a_label(
    redis: RedisServer, database: PostgresServer, store: ResultsStore
) -> None:
    store.write([result("1"), without_label("2")])
    assert export(redis, database).written == 2
    rows = database.rows("SELECT label, label_score FROM feedmill_results ORDER BY id")
    (_, score), (label, other_score) = rows
    assert label is None
    assert other_score == score


def test_tables_have_the_best_label_and_the_list_of_labels(
    redis: RedisServer, database: PostgresServer, store: ResultsStore
) -> None:
    """Lists with what PostgreSQL cannot store, too."""
    several = result("1", "food\0")
    scores = {"food\0": 0.9, 'a "b", {c}': 0.5, "other": 0.1}
    update = {"scores": scores, "labels_threshold": 0.5, "language": "en"}
    classification = several.classification.model_copy(update=update)
    store.write([several._replace(classification=classification), without_label("2")])
    assert export(redis, database).written == 2
    columns = "label, best_label, labels, language"
    rows = database.rows(f"SELECT {columns} FROM feedmill_results ORDER BY id")  # noqa: S608
    assert rows == [
        ("food\ufffd", "food\ufffd", ["food\ufffd", 'a "b", {c}'], "en"),
        (None, "food", [], None),
    ]


@pytest.mark.parametrize(
    "change",
    [
        "DROP best_label, DROP labels",
        "DROP labels",
        "DROP language",
        "DROP language, ADD language int DEFAULT 1",
        "DROP labels, ADD labels jsonb DEFAULT '[1]'",
        "DROP best_label, ADD best_label text GENERATED ALWAYS AS (upper(label)) STORED",
    ],
)
def test_tables_without_the_further_columns_keep_working(
    change: str, redis: RedisServer, database: PostgresServer, store: ResultsStore
) -> None:
    """Columns of the user's own with these names stay the user's own."""
    store.write([result("1")])
    export(redis, database)
    database.rows(f"ALTER TABLE feedmill_results {change}")
    store.write([result("2"), without_label("3")])
    assert export(redis, database).written == 2
    assert ids(database) == ["1", "2", "3"]


@pytest.mark.parametrize("column", ["best_label", "language", "labels"])
def test_leaves_a_column_with_the_values_of_its_owner(
    column: str,
    redis: RedisServer,
    database: PostgresServer,
    store: ResultsStore,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In a table of an earlier version, which had no such column."""
    store.write([result("1"), result("2")])
    export(redis, database)
    _forget_own_columns(database)
    value = "'{mine}'" if column == "labels" else "'mine'"
    database.rows(f"UPDATE feedmill_results SET {column} = {value} WHERE id = '1'")  # noqa: S608
    database.rows(f"UPDATE feedmill_results SET {column} = NULL WHERE id = '2'")  # noqa: S608
    query = f"SELECT id, {column} FROM feedmill_results ORDER BY id"  # noqa: S608
    before = database.rows(query)

    update = {"language": "en"}
    again = result("1", at=2.0)
    classification = again.classification.model_copy(update=update)
    store.write([again._replace(classification=classification), result("3")])
    for _ in range(2):
        caplog.clear()
        export(redis, database)
        assert database.rows(query)[:2] == before
        assert column in caplog.text
        assert "rename yours" in caplog.text
    assert database.rows(query)[2] == ("3", None)


def test_fills_an_empty_column_and_keeps_on(
    redis: RedisServer,
    database: PostgresServer,
    store: ResultsStore,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its owner has added it to a table of an earlier version, for the export."""
    store.write([result("1")])
    export(redis, database)
    database.rows("ALTER TABLE feedmill_results DROP language, DROP best_label")
    _forget_own_columns(database)
    database.rows("UPDATE feedmill_results SET labels = NULL")
    store.write([result("2")])
    export(redis, database)
    database.rows("ALTER TABLE feedmill_results ADD language text, ADD best_label text")
    for number in (3, 4):
        store.write([result(str(number))])
        export(redis, database)
    rows = database.rows("SELECT id, best_label FROM feedmill_results ORDER BY id")
    assert rows == [("1", None), ("2", None), ("3", "food"), ("4", "food")]
    assert not caplog.text


def _forget_own_columns(database: PostgresServer) -> None:
    """Make the row of the table's position that of an earlier version."""
    database.rows("UPDATE feedmill_exports SET options = options - 'own_columns'")


@pytest.mark.parametrize("columns", [["weights"], ["label_score", "scores", "title"]])
def test_names_the_statement_that_adds_missing_columns(
    columns: list[str],
    redis: RedisServer,
    database: PostgresServer,
    store: ResultsStore,
) -> None:
    """After it, the export continues where it was and loses nothing."""
    store.write([result("1")])
    export(redis, database)
    for column in columns:
        database.rows(f"ALTER TABLE feedmill_results DROP {column}")
    store.write([result("2")])
    with pytest.raises(UserError) as raised:
        export(redis, database)
    assert ids(database) == ["1"]
    statement = re.search(r"`(ALTER TABLE [^`]*)`", str(raised.value))
    assert statement is not None
    database.rows(statement[1])
    export(redis, database)
    selection = " AND ".join(f"{column} IS NOT NULL" for column in columns)
    query = f"SELECT id FROM feedmill_results WHERE {selection}"  # noqa: S608
    assert database.rows(query) == [("2",)]
    assert ids(database) == ["1", "2"]


def test_purges_tables_that_lack_columns(
    redis: RedisServer, database: PostgresServer, store: ResultsStore
) -> None:
    store.write([result("1"), result("2")])
    export(redis, database)
    database.rows("ALTER TABLE feedmill_results DROP weights")
    purge(redis.client, Settings(), ["1"])
    assert postgres.purge(database.url, TABLE, RowReader(redis.client)) == 1
    assert ids(database) == ["2"]


def test_a_table_that_requires_labels_refuses_only_results_without_one(
    redis: RedisServer, database: PostgresServer, store: ResultsStore
) -> None:
    """Tables made before results could have no label."""
    store.write([result("1")])
    export(redis, database)
    table = "ALTER TABLE feedmill_results ALTER label"
    database.rows(f"{table} SET NOT NULL")
    store.write([without_label("2"), result("3")])
    export(redis, database)
    assert ids(database) == ["1", "3"]
    database.rows(f"{table} DROP NOT NULL")
    export(redis, database)
    assert ids(database) == ["1", "2", "3"]


def test_documented_tables_and_queries_work(
    redis: RedisServer, database: PostgresServer, store: ResultsStore
) -> None:
    def columns() -> list[tuple[Any, ...]]:
        return database.rows(
            "SELECT table_name, column_name, data_type, is_nullable, column_default FROM "
            "information_schema.columns "
            "WHERE table_schema = 'public' ORDER BY table_name, ordinal_position"
        )

    store.write([result("1")])
    export(redis, database)
    created = columns()
    database.rows("DROP TABLE feedmill_results, feedmill_exports, feedmill_refused")
    tables, queries = re.findall(
        r"```sql\n(.*?)```", DOCUMENTATION.read_text(), re.DOTALL
    )
    database.rows(tables)
    assert columns() == created
    export(redis, database)
    for query in queries.split(";"):
        database.rows(query)
    assert ids(database) == ["1"]


def test_result_that_is_stored_again_replaces_its_row(
    redis: RedisServer, database: PostgresServer, store: ResultsStore
) -> None:
    store.write([result("1", at=1.0)])
    redis.client.delete(
        *redis.client.keys("feedmill:stored*")
    )  # as after their time to live
    store.write([result("1", at=2.0)])
    for at in (2.0, 3.0):  # within a transaction, then in another one
        redis.client.delete(*redis.client.keys("feedmill:stored*"))
        store.write([result("1", at=at)])
        export(redis, database)
        assert database.rows(
            "SELECT extract(epoch FROM classified_at)::float8 FROM feedmill_results"
        ) == [(at,)]


def test_exports_selections_to_several_tables(
    redis: RedisServer, database: PostgresServer, store: ResultsStore
) -> None:
    store.write([result("1"), result("2", "books"), result("3", run="monday")])
    database.rows("CREATE SCHEMA other")
    export(redis, database, ExportFilter(label="books"), "other.books")
    export(redis, database, ExportFilter(run="monday"), "Monday's posts")
    assert (ids(database, "other.books"), ids(database, '"Monday\'s posts"')) == (
        ["2"],
        ["3"],
    )
    with pytest.raises(UserError, match=support.naming("books", "--label")):
        export(redis, database, ExportFilter(label="food"), "other.books")


def test_dropped_table_is_exported_from_the_beginning(
    redis: RedisServer, database: PostgresServer, store: ResultsStore
) -> None:
    store.write([result("1")])
    export(redis, database)
    assert export(redis, database).resumed
    database.rows("DROP TABLE feedmill_results")
    assert not export(redis, database).resumed
    assert ids(database) == ["1"]


# Purges.


def test_purged_posts_leave_the_table(
    redis: RedisServer, database: PostgresServer, store: ResultsStore
) -> None:
    store.write([result("1"), result("2"), result("2", "books")])
    export(redis, database)
    for number in range(PURGES_PER_READ):
        purge(redis.client, Settings(), [f"unknown {number}"])
    purge(redis.client, Settings(), ["2", "unknown"])
    assert export(redis, database).removed == 2
    lift_tombstones(redis.client, ["2"])
    store.write([result("2")])
    assert (export(redis, database).removed, ids(database)) == (0, ["1", "2"])


@pytest.mark.parametrize("missed", [False, True])
def test_post_purged_after_it_was_read_leaves_the_table(
    redis: RedisServer, database: PostgresServer, store: ResultsStore, missed: bool
) -> None:
    """missed: the log lacks the purge by then."""
    store.write([result("1"), result("2")])
    purge(redis.client, Settings(), ["0"])
    reader = RowReader(redis.client)
    with opened(database.url, TABLE, ExportFilter(), reader) as target:
        chunk = reader.fetch(target.place)
        purge(redis.client, Settings(), ["1"])
        if missed:
            redis.client.xtrim(PURGES, 0)
        target.add(batch_of(chunk.rows, target.schema), chunk.place)
        target.close(chunk.place)
        assert ids(database) == ["2"]
        purge(redis.client, Settings(), ["2"])
        target.close(chunk.place)
    assert (ids(database), target.removed) == ([], 2)


def test_post_purged_between_fetching_and_writing_its_row_leaves_the_table(
    redis: RedisServer, database: PostgresServer, store: ResultsStore
) -> None:
    """The log of purges is read before the row is written, because the reader fetches ahead."""
    store.write([result("1"), result("2")])
    reader = RowReader(redis.client)
    with opened(database.url, TABLE, ExportFilter(), reader) as target:
        chunk = reader.fetch(target.place)
        purge(redis.client, Settings(), ["1"])
        target.close(target.place)
        target.add(batch_of(chunk.rows, target.schema), chunk.place)
    assert ids(database) == ["2"]


def test_purged_runs_leave_the_table(
    redis: RedisServer, database: PostgresServer, store: ResultsStore
) -> None:
    settings = Settings.model_validate({"redis_url": redis.url})
    store.write(
        [
            result("1", run="monday"),
            result("1", "books", run="tuesday"),
            result("2", run="monday"),
        ]
    )
    export(redis, database)
    purge_run(redis.client, settings, "monday")
    purged: Any = redis.client.time()
    wait_until(
        lambda: redis.client.time() > (purged[0], purged[1] + 1000),
        ("a millisecond has passed"),
    )
    store.write([result("1", run="monday")])  # the file is sent again
    assert (export(redis, database).removed, ids(database)) == (1, ["1", "1"])


def test_removes_purged_posts_without_exporting(
    redis: RedisServer, database: PostgresServer, store: ResultsStore
) -> None:
    def remove() -> int:
        return postgres.purge(database.url, TABLE, RowReader(redis.client))

    with pytest.raises(UserError, match="feedmill_exports"):
        remove()
    store.write([result(str(number)) for number in range(4)])
    export(redis, database, ExportFilter(label="food"))
    purge(redis.client, Settings(), ["1", "3"])
    redis.client.delete(PURGES)
    store.write([result("5")])
    assert (remove(), ids(database)) == (2, ["0", "2"])


# Mistakes.


def test_second_export_to_a_table_is_refused(
    redis: RedisServer,
    database: PostgresServer,
    store: ResultsStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(postgres.SESSION, "lock_timeout", "50ms")
    store.write([result("1")])
    reader = RowReader(redis.client)
    with opened(database.url, TABLE, ExportFilter(), reader) as target:
        with pytest.raises(DatabaseUnavailable, match=TABLE):
            export(redis, database)
        export(redis, database, table="another")
        # As if a pooler in transaction mode had let a second one in.
        database.rows(
            "UPDATE feedmill_exports SET place = '{}' WHERE table_name = %s", TABLE
        )
        chunk = reader.fetch(target.place)
        with pytest.raises(UserError, match=TABLE):
            target.add(batch_of(chunk.rows, target.schema), chunk.place)
    assert (ids(database), ids(database, "another")) == ([], ["1"])


@pytest.mark.parametrize("name", ["", "a.b.c", "feedmill_exports", "é" * 32, 'a"b'])
def test_name_of_a_table_is_checked(redis: RedisServer, name: str) -> None:
    with (
        pytest.raises(UserError, match="--table"),
        opened(
            "postgresql://nowhere.invalid/db",
            name,
            ExportFilter(),
            RowReader(redis.client),
        ),
    ):
        pass


@pytest.mark.parametrize(
    "address", ["user:sec/ret@host/db", "user:sec@ret@host/db", "user:sec?ret@host/db",
    "user:sec#ret@host/db",
                "user:secret@host:port/db", "user:secret@host/db?secret=1", "user:secret@[host/db"]
)  # fmt: skip
def test_malformed_address_is_not_quoted(address: str) -> None:
    with pytest.raises(UserError) as error:
        postgres.parse_address(f"postgresql://{address}")
    assert not {"sec", "ret"} & {*str(error.value).split("'")}
    assert "secret" not in str(error.value)
    assert "host/db" not in str(error.value)


def test_mistakes_do_not_show_the_password(
    redis: RedisServer, database: PostgresServer, tmp_path: Path
) -> None:
    for url, said in (
        (
            database.url.replace(support.PASSWORD, "wrong-password"),
            "authentication failed",
        ),
        (database.url.replace(f":{database.port}/", ":1/"), "refused"),
        (database.url + "x", '"postgresx"'),
    ):
        found = feedmill("export", url, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
        assert (found.returncode, found.stdout, len(found.stderr.splitlines())) == (
            2,
            "",
            1,
        ), found.stderr
        assert said in found.stderr
        assert support.PASSWORD not in found.stderr
        assert "wrong-password" not in found.stderr


# The command.


def test_follows_through_faults(
    redis: RedisServer, database: PostgresServer, store: ResultsStore, tmp_path: Path
) -> None:
    """Lost connections, a full disk, a crash of PostgreSQL and a purge; SIGTERM ends it."""
    command = ("export", "--follow", database.url)
    store.write([result("1"), result("2")])
    with support.running(
        *command, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url
    ) as following:
        _wait_for(database, "1", "2")
        database.rows(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = "
            "'feedmill export'"
        )
        store.write([result("3")])
        _wait_for(database, "1", "2", "3")
        redis.client.client_kill_filter(_type="normal", skipme=True)
        purge(redis.client, Settings(), ["2"])
        _wait_for(database, "1", "3")
        database.rows(FULL_DISK)
        store.write([result("4")])
        wait_until(
            lambda: "disk full" in following.text(),
            "the export has noticed the full disk",
        )
        database.rows("DROP TRIGGER full_disk ON feedmill_results")
        _wait_for(database, "1", "3", "4")
        faults = following.text().count("retrying")
        database.kill()
        store.write([result("5")])
        wait_until(
            lambda: following.text().count("retrying") > faults,
            ("the export has noticed the crash"),
        )
        database.start()
        _wait_for(database, "1", "3", "4", "5")
        assert following.end(signal.SIGTERM) == 0
    assert support.PASSWORD not in following.text()
    store.write([result("6")])
    said = feedmill(
        "export", database.url, "--json", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url
    )
    assert support.last_json(said.stdout) == {
        "rows": 1,
        "removed": 0,
        "complete": True,
        "missed": 0,
    }
    said = feedmill(
        "export",
        database.url,
        "--purge",
        "--json",
        cwd=tmp_path,
        FEEDMILL_REDIS_URL=redis.url,
    )
    assert support.last_json(said.stdout) == {"removed": 0}


def _wait_for(database: PostgresServer, *wanted: str) -> None:
    def arrived() -> bool:
        try:
            return ids(database) == [*wanted]
        except psycopg.errors.UndefinedTable:
            return False

    wait_until(arrived, f"the table has {wanted}")


def test_reports_missed_results(
    redis: RedisServer, database: PostgresServer, store: ResultsStore, tmp_path: Path
) -> None:
    store.write([result("1")])
    export(redis, database)
    small = ResultsStore(
        redis.client, Settings.model_validate({"results_stream_length": 100})
    )
    for start in range(0, 900, 90):
        small.write([result(f"new {number}") for number in range(start, start + 90)])
    said = feedmill(
        "export", database.url, "--json", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url
    )
    found = support.last_json(said.stdout)
    assert (said.returncode, found["rows"] + found["missed"]) == (1, 900)


def test_kill_at_any_time_leaves_each_result_once(
    redis: RedisServer, database: PostgresServer, store: ResultsStore, tmp_path: Path
) -> None:
    wanted = {f"p{number}" for number in range(6_000)}
    posts = [result(post_id, score=len(post_id)) for post_id in wanted]
    for start in range(0, len(posts), 500):
        store.write(posts[start : start + 500])
    for rows in (1, 2_000, 4_000):
        with support.running(
            "export",
            "--follow",
            database.url,
            cwd=tmp_path,
            FEEDMILL_REDIS_URL=redis.url,
        ) as process:
            wait_until(
                partial(_has_rows, database, process, rows),
                (f"{rows} rows are in the table"),
            )
            process.end(signal.SIGKILL)
    said = feedmill("export", database.url, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert said.returncode == 0, said.stderr
    assert len(ids(database)) == len(wanted)
    assert set(ids(database)) == wanted
    assert database.rows(
        "SELECT count(*) FROM feedmill_results WHERE score <> length(id) OR title <> 'title of ' "
        "|| id"
    ) == [(0,)]


def _has_rows(database: PostgresServer, process: Feedmill, rows: int) -> bool:
    assert process.process.poll() is None, process.text()
    try:
        return len(ids(database)) >= rows
    except psycopg.errors.UndefinedTable:
        return False


def test_results_below_a_lost_position_are_exported(
    redis: RedisServer, database: PostgresServer, store: ResultsStore, tmp_path: Path
) -> None:
    """Redis' clock was ahead, Redis lost the end of its log, and its clock went back."""
    call = partial(feedmill, "export", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    store.write([result(f"old {number}") for number in range(3)])
    binary: Any = Redis.from_url(redis.url)
    log = {key: binary.dump(key) for key in (RESULTS_STREAM, COUNTERS)}
    ((newest, fields),) = binary.xrevrange(RESULTS_STREAM, count=1)
    binary.xadd(
        RESULTS_STREAM, fields, id=f"{int(newest.partition(b'-')[0]) + 600_000}-0"
    )
    binary.hincrby(COUNTERS, "stored", 1)
    assert call(database.url).returncode == 0
    assert call("--format", "parquet", "parts").returncode == 0
    for key, content in log.items():
        binary.restore(key, 0, content, replace=True)
    binary.close()
    store.write([result(f"new {number}") for number in range(3)])
    said = call(database.url)
    assert said.returncode == 0
    assert "clock went back" in said.stderr
    assert ids(database) == ["new 0", "new 1", "new 2", "old 0", "old 1", "old 2"]
    said = call("--format", "parquet", "parts")
    assert said.returncode == 2
    assert "Export to a new OUT" in said.stderr


def test_refused_rows_are_named_and_the_others_are_written(
    redis: RedisServer, database: PostgresServer, store: ResultsStore, tmp_path: Path
) -> None:
    export(redis, database)
    database.rows("CREATE INDEX ON feedmill_results (title)")
    database.rows("ALTER TABLE feedmill_results ADD CHECK (subreddit <> 'forbidden')")
    texts = "".join(
        random.Random(1).choices(string.ascii_letters, k=5000)
    )  # does not compress
    store.write(
        [result(f"{number:03}", title=f"a title {number}") for number in range(300)]
    )
    store.write(
        [result("long", title=texts[:3900]), result("other", subreddit="forbidden")]
    )
    store.write(
        [result(f"spam {number}", subreddit="forbidden") for number in range(150)]
        + [result("z")]
    )
    command = ("export", database.url, "--json")
    said = feedmill(*command, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert support.last_json(said.stdout) == {
        "rows": 301,
        "removed": 0,
        "complete": True,
        "missed": 0,
        "refused": 152,
    }
    assert said.returncode == 1
    assert re.search(
        r"post long \(index row .*post other \(.*check constraint",
        said.stderr,
        re.DOTALL,
    )
    assert ids(database) == [*(f"{number:03}" for number in range(300)), "z"]
    store.write([result("later")])
    # The refused rows are still kept.
    assert (
        feedmill(*command, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url).returncode == 1
    )
    assert ids(database)[-2:] == ["later", "z"]


TAKING_FUNCTION = """
CREATE FUNCTION take() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$
"""
TAKING_TRIGGER = """
CREATE TRIGGER take BEFORE INSERT ON feedmill_results FOR EACH ROW EXECUTE FUNCTION take()
"""


def test_rows_that_a_trigger_takes_are_reported(
    redis: RedisServer,
    database: PostgresServer,
    store: ResultsStore,
    caplog: pytest.LogCaptureFixture,
) -> None:
    export(redis, database)
    database.rows(TAKING_FUNCTION)
    database.rows(TAKING_TRIGGER)
    assert not caplog.messages
    store.write([result(str(number)) for number in range(20)])
    export(redis, database)
    assert ids(database) == []
    (warning,) = caplog.messages
    assert "20 rows" in warning
    assert "trigger" in warning


def test_table_that_refuses_every_row_ends_the_export(
    redis: RedisServer, database: PostgresServer, store: ResultsStore
) -> None:
    export(redis, database)
    database.rows("ALTER TABLE feedmill_results ADD CHECK (false)")
    store.write([result(str(number)) for number in range(200)])
    with pytest.raises(UserError, match="refuses the export .*check constraint"):
        export(redis, database)
