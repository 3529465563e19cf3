"""`feedmill enqueue`: runs, kept columns, refused labels, interruption, waiting, and
`feedmill purge --queue`.
"""

import json
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from feedmill.producers.run_names import default_run
from feedmill.shared import runs
from feedmill.shared.keys import MODELS, RUN
from feedmill.shared.messages import MAX_RUN, DeadLetter, Post, fingerprint
from feedmill.shared.model_routing import announce, deregister, known_queues, register
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from tests.support import (
    RedisServer,
    feedmill,
    make_classification,
    push,
    queued,
    running,
    wait_until,
)


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    path = tmp_path / "posts.csv"
    path.write_text("id,title,Store,country\n0,first,Ulm,DE\n1,second,,FR\n")
    return path


def enqueue(
    redis: RedisServer, *arguments: object, stdin: str = "", **environment: str
) -> Any:
    cwd = Path(str(arguments[0])).parent
    return feedmill(
        "enqueue",
        *map(str, arguments), cwd=cwd, stdin=stdin, FEEDMILL_REDIS_URL=redis.url, **environment
    )  # fmt: skip


def store(redis: RedisServer, posts: list[dict[str, Any]], at: float = 1.0) -> None:
    """Store a result for each post, as a worker does."""
    results = [
        Result(
            post,
            make_classification(
                post.id, fingerprint=fingerprint(post, "recipe"), classified_at=at
            ),
        )
        for post in map(Post.parse, posts)
    ]
    ResultsStore(redis.client, Settings()).write(results)


def test_files_with_equal_ids_are_runs_of_their_own(
    redis: RedisServer, csv: Path
) -> None:
    other = csv.parent / "other" / csv.name
    other.parent.mkdir()
    other.write_text("id,title\n0,another first\n")
    assert enqueue(redis, csv).returncode == 0
    assert enqueue(redis, other).returncode == 0
    names = {post["run"] for post in queued(redis)}
    assert len(names) == 2
    assert all(re.fullmatch(r"posts\.csv-[0-9a-f]{6}", name) for name in names)
    again = enqueue(redis, csv)
    assert again.stdout.startswith("0 posts sent")
    assert re.search(
        r"run posts\.csv-[0-9a-f]{6} has these posts already\. --again", again.stderr
    )
    assert len(queued(redis)) == 3


def test_a_limit_sends_the_first_posts_once(redis: RedisServer, csv: Path) -> None:
    assert enqueue(redis, csv, "--limit", 1, "--run", "a").stdout.startswith(
        "1 post sent"
    )
    assert enqueue(redis, csv, "--limit", 1, "--run", "a").stdout.startswith(
        "0 posts sent"
    )
    assert enqueue(redis, csv, "--run", "a").stdout.startswith("1 post sent")
    assert [post["title"] for post in queued(redis)] == ["first", "second"]


def test_no_run_skips_what_a_daemon_sent(
    redis: RedisServer, tmp_path: Path, settings: Settings
) -> None:
    posts = [
        {"id": "t3_a", "title": "sent by the daemon"},
        {"id": "t3_b", "title": "in the gap"},
    ]
    push(settings, [Post.parse(posts[0])])
    dump = tmp_path / "dump.jsonl"
    dump.write_text("\n".join(map(json.dumps, posts)))
    assert enqueue(redis, dump, "--no-run").returncode == 0
    assert [(post["id"], post.get("run")) for post in queued(redis)] == [
        ("t3_a", None),
        ("t3_b", None),
    ]
    refused = enqueue(redis, dump, "--no-run", "--run", "mine")
    assert refused.returncode == 2
    assert "--no-run" in refused.stderr


def test_default_names_are_valid(tmp_path: Path) -> None:
    odd = tmp_path / f"{'x' * 190}\n.csv"
    odd.write_text("id,title\n")
    assert len(default_run(str(odd))) <= MAX_RUN
    assert Post(id="1", title="x", run=default_run(str(odd))).run == default_run(
        str(odd)
    )
    assert default_run(str(tmp_path / "missing.csv"))
    assert default_run("/dev/fd/63").startswith("pipe-")
    assert re.fullmatch(r"stdin-\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", default_run("-"))
    blank = tmp_path / "my posts.csv"
    blank.write_text("id,title\n")
    assert default_run(str(blank)).startswith("my_posts.csv-")


def test_keeps_chosen_columns(redis: RedisServer, csv: Path) -> None:
    assert enqueue(redis, csv, "--keep", "store,country", "--run", "a").returncode == 0
    assert [post["extra"] for post in queued(redis)] == [
        {"store": "Ulm", "country": "DE"},
        {"country": "FR"},
    ]
    found = runs.progress(redis.client, "a")
    assert found
    assert found.columns == ("store", "country")
    for wrong in (
        "city",
        "title",
        ",".join(f"c{number}" for number in range(21)),
        "x" * 101,
    ):
        refused = enqueue(redis, csv, "--keep", wrong, "--run", "b")
        assert refused.returncode == 2, wrong
    assert len(queued(redis)) == 2


def test_refuses_labels_that_the_model_would_refuse(
    redis: RedisServer, csv: Path
) -> None:
    """Each post would become a dead letter."""
    announce(redis.client, "feedmill", "tuned", ("ham", "spam"))
    register(redis.client, "w@host")
    refused = enqueue(redis, csv, "--labels", "a,b")
    assert refused.returncode == 2
    assert all(word in refused.stderr for word in ("tuned", "ham", "spam", "--labels"))
    assert enqueue(redis, csv, "--template", "About {}.").returncode == 2
    assert queued(redis) == []
    accepted = enqueue(redis, csv, "--labels", "spam,ham")
    assert accepted.returncode == 0
    assert "no worker" not in accepted.stderr
    announce(redis.client, "feedmill", "any")
    assert enqueue(redis, csv, "--labels", "a,b").returncode == 0
    assert known_queues(redis.client)["feedmill"].labels == ()


def test_goes_on_without_a_worker_and_says_so(redis: RedisServer, csv: Path) -> None:
    assert "no worker serves queue feedmill" in enqueue(redis, csv).stderr
    redis.client.hset(
        MODELS, "feedmill", json.dumps({"model": "tuned", "seen": 1, "labels": ["ham"]})
    )
    said = enqueue(redis, csv, "--labels", "a,b")
    assert said.returncode == 0
    assert "no worker" in said.stderr
    announce(redis.client, "feedmill", "m")
    register(redis.client, "w@host")
    deregister(redis.client, "w@host")
    assert "no worker" in enqueue(redis, csv).stderr


def test_an_interrupted_command_says_how_to_go_on(
    redis: RedisServer, tmp_path: Path
) -> None:
    path = tmp_path / "my posts.jsonl"
    path.write_text(
        "".join(
            f'{{"id": {number}, "title": "x {number}"}}\n' for number in range(2000)
        )
    )
    environment = {"FEEDMILL_QUEUE_LIMIT": "10", "FEEDMILL_REDIS_URL": redis.url}
    with running("enqueue", str(path), cwd=tmp_path, **environment) as command:
        wait_until(lambda: redis.client.llen("feedmill") == 10, "the queue is full")
        wait_until(lambda: "queue is full" in command.text(), "the command waits")
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait() == 130
        said = command.text()
    assert "320 posts sent" in said
    (run,) = re.findall(r"--run (\S+)\.$", said, re.MULTILINE)
    assert run == default_run(str(path))
    redis.client.delete("feedmill")
    assert (
        feedmill(
            "enqueue",
            str(path),
            "--run",
            run,
            cwd=tmp_path,
            FEEDMILL_REDIS_URL=redis.url,
        ).returncode
        == 0
    )
    assert len(queued(redis)) == 2000 - 320


@pytest.mark.parametrize("keep", [(), ("--keep", "Store")])
def test_waits_for_memory_where_no_command_has_been(
    redis: RedisServer, csv: Path, request: pytest.FixtureRequest, keep: tuple[str, ...]
) -> None:
    """A full Redis without functions refuses even what reads."""
    request.addfinalizer(lambda: redis.client.config_set("maxmemory", 0))
    redis.client.function_flush()
    redis.client.config_set("maxmemory", 1)
    with running(
        "enqueue", str(csv), *keep, cwd=csv.parent, FEEDMILL_REDIS_URL=redis.url
    ) as command:
        wait_until(lambda: "waiting for room" in command.text(), "the command waits")
        redis.client.config_set("maxmemory", 0)
        assert command.process.wait() == 0, command.text()
    assert len(queued(redis)) == 2


def test_waits_until_the_run_is_done(redis: RedisServer, csv: Path) -> None:
    with running(
        "enqueue",
        str(csv),
        "--run",
        "a",
        "--wait",
        cwd=csv.parent,
        FEEDMILL_REDIS_URL=redis.url,
    ) as command:
        wait_until(
            lambda: redis.client.hget(RUN + "a", "sent") == "2", "the posts are sent"
        )
        store(redis, queued(redis))
        assert command.process.wait() == 0
        assert "run a: 2 done, 0 failed" in command.text()


def test_waiting_ends_with_an_empty_queue(redis: RedisServer, csv: Path) -> None:
    """Posts can leave the queue without a result."""
    with running(
        "enqueue",
        str(csv),
        "--run",
        "a",
        "--wait",
        cwd=csv.parent,
        FEEDMILL_REDIS_URL=redis.url,
    ) as command:
        wait_until(
            lambda: redis.client.hget(RUN + "a", "sent") == "2", "the posts are sent"
        )
        redis.client.delete("feedmill")
        assert command.process.wait() == 0
        assert "2 without a result" in command.text()


def hold_elsewhere(redis: RedisServer) -> None:
    """Store messages of another queue: one under lease, one that is due later."""
    for name, tag in (
        ("reserved", "1-60-1-0001 other"),
        ("delayed", "1-60-1-0002 other"),
    ):
        redis.client.hset(f"feedmill:{name}", tag, "{}")
        redis.client.zadd(f"feedmill:{name}_index", {tag: 2**40})


@pytest.mark.parametrize("is_again", [False, True])
def test_waiting_ignores_other_queues(
    redis: RedisServer, csv: Path, is_again: bool
) -> None:
    """Purged posts never get a result, so the counts do not end the wait."""
    assert enqueue(redis, csv, "--run", "a").returncode == 0
    redis.client.delete("feedmill")
    purge = feedmill("purge", "0", "1", cwd=csv.parent, FEEDMILL_REDIS_URL=redis.url)
    assert purge.returncode == 0, purge.stderr
    hold_elsewhere(redis)
    again = ("--again",) if is_again else ()
    waited = enqueue(redis, csv, "--run", "a", "--wait", *again)
    assert waited.returncode == 0, waited.stderr
    assert "2 purged" in waited.stdout


def test_waiting_for_resent_posts_ignores_other_queues(
    redis: RedisServer, csv: Path
) -> None:
    hold_elsewhere(redis)
    with running(
        "enqueue", str(csv), "--run", "a", "--wait", "--again",
        cwd=csv.parent, FEEDMILL_REDIS_URL=redis.url,
    ) as command:  # fmt: skip
        wait_until(
            lambda: redis.client.hget(RUN + "a", "sent") == "2", "the posts are sent"
        )
        redis.client.delete("feedmill")
        assert command.process.wait() == 0, command.text()


def test_exports_of_a_run_have_its_columns(redis: RedisServer, csv: Path) -> None:
    for name in ("a", "b"):
        assert enqueue(redis, csv, "--keep", "Store", "--run", name).returncode == 0
    store(redis, queued(redis))
    export = partial(feedmill, "export", cwd=csv.parent, FEEDMILL_REDIS_URL=redis.url)
    assert export("a.jsonl", "--run", "a").returncode == 0
    rows = [
        json.loads(line) for line in (csv.parent / "a.jsonl").read_text().splitlines()
    ]
    assert [(row["id"], row["run"], row["Store"], row["label_set"]) for row in rows] == [
        ("0", "a", "Ulm", "food"), ("1", "a", None, "food"),
    ]  # fmt: skip
    assert (
        export("chosen.csv", "--run", "a", "--columns", "id,store,label").returncode
        == 0
    )
    assert (csv.parent / "chosen.csv").read_text().split() == [
        "id,Store,label",
        "0,Ulm,food",
        "1,,food",
    ]
    assert export("chosen.csv", "--purge").returncode == 0
    assert export("latest.csv", "--latest", "--columns", "id,run").returncode == 0
    assert sorted((csv.parent / "latest.csv").read_text().split()) == [
        "0,a",
        "0,b",
        "1,a",
        "1,b",
        "id,run",
    ]
    for keep in ([], ["--keep", "store"]):  # a folder keeps its columns
        said = enqueue(redis, csv, "--run", "c", *keep)
        assert (said.returncode, "without the columns" in said.stderr) == (
            0,
            bool(keep),
        )
        store(redis, queued(redis))
        assert export("parts", "--format", "parquet", "--run", "c").returncode == 0


def test_results_status_and_dead_letters_of_a_run(
    redis: RedisServer, csv: Path
) -> None:
    ask = partial(feedmill, cwd=csv.parent, FEEDMILL_REDIS_URL=redis.url)
    for name in ("a", "b"):
        assert enqueue(redis, csv, "--run", name).returncode == 0
    posts = sorted(queued(redis), key=lambda post: str(post["run"]))
    store(redis, posts[:3])
    lost = Post.parse(posts[3])
    letter = DeadLetter(
        id=lost.id,
        reason="odd",
        post="{}",
        options="{}",
        message="m",
        worker="w",
        failed_at=1.0,
        run=lost.run,
    )
    ResultsStore(redis.client, Settings()).write([], [letter])
    shown = ask("results", "--run", "a", "--json").stdout.splitlines()
    assert [json.loads(line)["post"]["run"] for line in shown] == ["a", "a"]
    assert ask("dead", "list", "--run", "a").stdout == ""
    assert len(ask("dead", "list", "--run", "b").stdout.splitlines()) == 1
    progress = json.loads(ask("status", "--run", "b", "--json").stdout)
    assert (
        progress["sent"],
        progress["stored"],
        progress["failed"],
        progress["pending"],
    ) == (
        2,
        1,
        1,
        0,
    )
    assert "a: 2 of 2 done" in ask("status", "--run", "a").stdout
    assert ask("status", "--run", "c").returncode == 2
    status = ask("status").stdout
    assert all(f"{name}: " in status for name in ("a", "b"))
    assert enqueue(redis, csv, "--run", "c").returncode == 0
    assert re.search(
        "c: 0 of 2 done · waiting for .*no worker", ask("status", "--run", "c").stdout
    )
    redis.client.delete(RUN + "c")
    typo = ask("results", "--run", "c")
    assert all(word in typo.stderr for word in ("'c'", "b, a"))


def test_clearing_the_queue_forgets_that_its_posts_were_sent(
    redis: RedisServer, csv: Path
) -> None:
    assert enqueue(redis, csv, "--run", "a").returncode == 0
    refused = feedmill(
        "purge", "--queue", "feedmill", cwd=csv.parent, FEEDMILL_REDIS_URL=redis.url
    )
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    cleared = feedmill(
        "purge",
        "--queue",
        "feedmill",
        "--yes",
        cwd=csv.parent,
        FEEDMILL_REDIS_URL=redis.url,
    )
    assert cleared.returncode == 0
    assert cleared.stdout == "queue feedmill emptied (messages: 1, posts: 2)\n"
    assert redis.client.hget(RUN + "a", "sent") == "0"
    again = enqueue(redis, csv, "--run", "a")
    assert again.stdout.startswith("2 posts sent")
    empty = feedmill(
        "purge",
        "--queue",
        "feedmill",
        "--yes",
        "--json",
        cwd=csv.parent,
        FEEDMILL_REDIS_URL=redis.url,
    )
    assert json.loads(empty.stdout) == {"messages": 1, "posts": 2, "held": 0}
