"""The `feedmill` command line: output and exit statuses."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zstandard
from redis.exceptions import ResponseError

from feedmill.shared.keys import RESULTS_STREAM, TOMBSTONE
from tests import support
from tests.e2e.test_results_commands import stored, waits
from tests.support import RedisServer, feedmill, make_posts, wait_until


def test_enqueue_reports_and_skips_bad_lines(
    redis: RedisServer, tmp_path: Path
) -> None:
    path = tmp_path / "posts.jsonl"
    path.write_text(
        '{"id": 1, "title": "x"}\nnope\n{"id": 2, "title": "y", "score": "many"}\n'
    )
    said = feedmill("enqueue", str(path), cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert said.returncode == 1
    assert counts(said.stdout) == [2, 1, 0, 1]
    assert f"{path}:2: " in said.stderr
    assert f"{path}:3: score: " in said.stderr
    again = feedmill("enqueue", str(path), cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert counts(again.stdout) == [0, 0, 2, 1]
    path.write_text('{"id": 3, "title": "z"}\n')
    another = feedmill("enqueue", str(path), cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert counts(another.stdout) == [1, 1, 0, 0]


def test_enqueue_filters_a_reddit_dump(redis: RedisServer, tmp_path: Path) -> None:
    path = tmp_path / "RS_2023-11.zst"
    records = [
        {
            "id": "1a",
            "title": "a",
            "selftext": "",
            "subreddit": "Python",
            "created_utc": 1700000000,
        },
        {
            "id": "1b",
            "title": "b",
            "selftext": "",
            "subreddit": "Python",
            "created_utc": 1690000000,
        },
        {
            "id": "1c",
            "title": "c",
            "selftext": "",
            "subreddit": "rust",
            "created_utc": "1700000001",
        },
        {
            "id": "1d",
            "title": "d",
            "selftext": "",
            "subreddit": "golang",
            "created_utc": 1700000002,
        },
        {
            "id": "1e",
            "title": "[deleted]",
            "selftext": "",
            "subreddit": "rust",
            "created_utc": 1700000003,
        },
    ]
    path.write_bytes(
        zstandard.compress(
            "".join(json.dumps(record) + "\n" for record in records).encode()
        )
    )
    flags = [
        "--subreddit",
        "r/python,cpp",
        "--subreddit",
        "Rust",
        "--since",
        "2023-11-01",
        "--until",
        "2023-12-01",
    ]
    said = feedmill(
        "enqueue", str(path), *flags, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url
    )
    assert counts(said.stdout) == [2, 1, 0, 0, 1, 2]
    assert said.returncode == 0
    assert sent_ids(redis) == ["t3_1a", "t3_1c"]
    none = feedmill(
        "enqueue",
        str(path),
        "--subreddit",
        "pyton",
        cwd=tmp_path,
        FEEDMILL_REDIS_URL=redis.url,
    )
    assert none.returncode == 1
    assert counts(none.stdout)[-1] == 5
    assert none.stderr


def test_enqueue_reads_the_given_columns(redis: RedisServer, tmp_path: Path) -> None:
    data = (
        "Nr;Betreff;Kommentar;Date\n"
        "T-1;Käse;gut;31.12.2023\nT-2;Brot;;01.04.2024\nT-3;;alt;30.04.2024\n"
    )
    (tmp_path / "tickets.csv").write_text(data, encoding="cp1252")
    url = {"FEEDMILL_REDIS_URL": redis.url}
    flags = [
        "--id-column",
        "nr",
        "--title-column",
        "Betreff",
        "--body-column",
        "Kommentar",
        "--encoding",
        "cp1252",
    ]
    dates = ["--date-format", "%d.%m.%Y", "--since", "2024-01-01"]
    said = feedmill("enqueue", "tickets.csv", *flags, *dates, cwd=tmp_path, **url)
    assert (said.returncode, problems(said.stderr)) == (0, [])
    assert sent_ids(redis) == ["T-2", "T-3"]
    said = feedmill("enqueue", "tickets.csv", *flags, cwd=tmp_path, **url)
    assert said.returncode == 0
    assert re.search(
        r"tickets.csv:2: created_utc: .*31.12.2023.*--date-format.*column date\)\n… and 2 more",
        said.stderr,
    )


def problems(stderr: str) -> list[str]:
    """Return the lines of standard error without the notes on the run and on a missing worker."""
    return [
        line
        for line in stderr.splitlines()
        if not re.match(r"run \S+ |no worker serves", line)
    ]


def counts(text: str) -> list[int]:
    """Return the numbers in a summary line."""
    return [int(each.replace(",", "")) for each in re.findall(r"\b\d[\d,]*\b", text)]


def sent_ids(redis: RedisServer) -> list[str]:
    return sorted(post["id"] for post in support.queued(redis))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_enqueue_resumes_an_interrupted_run(
    redis: RedisServer, tmp_path: Path, how: signal.Signals
) -> None:
    path = tmp_path / "posts.zst"
    lines = support.as_jsonl(make_posts(3000)).splitlines(keepends=True)
    lines.insert(500, "nope\n")
    path.write_bytes(zstandard.compress("".join(lines).encode()))
    url = {"FEEDMILL_REDIS_URL": redis.url}
    # A round trip sends 1,024 posts in 32 messages: the second waits for room in the queue.
    with support.running(
        "enqueue", str(path), cwd=tmp_path, FEEDMILL_QUEUE_LIMIT="40", **url
    ) as interrupted:
        wait_until(
            lambda: support.sent_count(redis.client) == 40 * 32,
            ("the second round trip waits"),
        )
        interrupted.end(how)
    assert "Traceback" not in interrupted.text()
    said = feedmill("enqueue", str(path), cwd=tmp_path, **url)
    assert counts(said.stdout) == [1720, 54, 1280, 1]
    assert said.returncode == 1
    assert sent_ids(redis) == sorted(post.id for post in make_posts(3000))


@pytest.mark.parametrize("command", [["enqueue", "-"], ["results", "1"]])
def test_unreachable_redis_is_named_without_its_password(
    tmp_path: Path, command: list[str]
) -> None:
    post = '{"id": 1, "title": "x"}'
    said = feedmill(
        *command,
        cwd=tmp_path,
        stdin=post,
        FEEDMILL_REDIS_URL="redis://:hunter2@127.0.0.1:1/0",
    )
    assert said.returncode == 2
    assert "Redis at 127.0.0.1:1/0 " in said.stderr
    assert "Connection refused" in said.stderr
    assert "`feedmill up`" in said.stderr
    assert "Traceback" not in said.stderr
    assert "hunter2" not in said.stderr


def test_flower_rejects_an_occupied_port(redis: RedisServer, tmp_path: Path) -> None:
    port = redis.url.rpartition(":")[2].removesuffix("/0")
    data = {
        "FEEDMILL_DATA_FOLDER": str(tmp_path / "data"),
        "FEEDMILL_FLOWER_PASSWORD": "p",
    }
    said = feedmill(
        "flower", "--port", port, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url, **data
    )
    assert said.returncode == 2
    assert re.search(
        rf"127\.0\.0\.1:{port}.*Address already in use.*--port.*--address", said.stderr
    )


def test_warns_once_about_an_unknown_setting(
    redis: RedisServer, tmp_path: Path
) -> None:
    said = feedmill(
        "results", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url, FEEDMILL_MODLE="x"
    )
    assert said.returncode == 0
    assert said.stderr.count("FEEDMILL_MODLE") == 1


def test_classifies_a_file_and_shows_results(
    served: RedisServer, tmp_path: Path
) -> None:
    url = {"FEEDMILL_REDIS_URL": served.url}
    posts = "id,title\na1,The keeper saved two penalties\na2,How long do dried beans keep?\n"
    (tmp_path / "posts.csv").write_text(posts)
    with support.running(
        "results", "--follow", "--json", cwd=tmp_path, **url
    ) as following:
        wait_until(lambda: waits(served), "the command waits for results")
        sent = feedmill(
            "enqueue",
            "posts.csv",
            "--labels",
            "sports,food",
            "--multi-label",
            cwd=tmp_path,
            **url,
        )
        assert sent.returncode == 0, sent.stderr
        wait_until(
            lambda: following.says('"a1"') and following.says('"a2"'),
            "both results are shown",
        )
        shown = {
            entry["id"]: entry
            for entry in map(json.loads, following.text().splitlines())
        }
    assert (shown["a1"]["label"], shown["a2"]["label"]) == ("sports", "food")
    assert shown["a1"]["post"]["title"] == "The keeper saved two penalties"
    assert shown["a1"]["queued_seconds"] >= 0
    listed = feedmill("results", cwd=tmp_path, **url).stdout
    assert "dried beans" in listed
    one = feedmill("results", "a2", cwd=tmp_path, **url).stdout
    assert re.match("a2: food.*sentence-transformers/all-MiniLM-L6-v2", one)
    assert (
        json.loads(feedmill("results", "a2", "--json", cwd=tmp_path, **url).stdout)[
            "label"
        ]
        == "food"
    )
    # A message is acknowledged after its results are stored.
    support.wait_until_empty(served.client)
    status = json.loads(feedmill("status", "--json", cwd=tmp_path, **url).stdout)
    assert status["queue"] == {"waiting": 0, "held": 0, "delayed": 0}
    assert status["results"]["stored"] == served.client.xlen(RESULTS_STREAM)
    assert len(status["workers"]) == 1
    told = feedmill("status", cwd=tmp_path, **url).stdout
    assert "worker@" in told
    assert max(map(len, told.splitlines())) <= 80


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("$F enqueue - <&-", 2, ""),
        ("$F status <&- >&- 2>&-", 0, ""),
        ("PYTHONUNBUFFERED=1 $F health >/dev/full", 2, "No space left on device"),
        ("$F --help >/dev/full", 2, "No space left on device"),
        ("{ $F health; echo exit $? >&2; } | :", 0, "exit 0"),
        # One stream alone, and the other way of writing.
        pytest.param("$F results >&-", 0, "", marks=pytest.mark.long),
        pytest.param("$F enqueue nosuch.csv 2>&-", 2, "", marks=pytest.mark.long),
        pytest.param(
            "$F health --json >/dev/full",
            2,
            "No space left on device",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "{ $F --help; echo exit $? >&2; } | :", 0, "exit 0", marks=pytest.mark.long
        ),
    ],
)
def test_commands_work_with_closed_streams_or_a_full_disk(
    redis: RedisServer, tmp_path: Path, command: str, status: int, words: str
) -> None:
    """As some daemons leave them, and `head` a pipe."""
    environment = os.environ | {"FEEDMILL_REDIS_URL": redis.url, "F": support.FEEDMILL}
    said = support.run(["/bin/sh", "-c", command], tmp_path, environment)
    assert "Traceback" not in said.stderr
    assert words in said.stderr
    assert not words or said.stderr.count("\n") == 1
    assert said.returncode == status, said.stderr


def test_worker_without_torch_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "raise ModuleNotFoundError('No module named torch', name='torch')"
    )
    said = feedmill(
        "worker", cwd=tmp_path, PYTHONPATH=str(tmp_path), NEW_INTERPRETER="1"
    )
    assert said.returncode == 2
    assert re.search(r"torch.*pip install 'feedmill\[worker\]'", said.stderr)


def test_purge_removes_posts_and_lift_readmits_them(
    redis: RedisServer, tmp_path: Path
) -> None:
    url = {"FEEDMILL_REDIS_URL": redis.url}
    store = stored(redis, "a1", "a2", "a3")
    sent = feedmill(
        "enqueue", "-", cwd=tmp_path, stdin='{"id": "a1", "title": "x"}', **url
    )
    assert sent.returncode == 0, sent.stderr
    said = feedmill("purge", "a1", cwd=tmp_path, **url)
    assert (said.returncode, problems(said.stderr)) == (0, [])
    assert said.stdout.startswith(
        "a1 purged (sent: 1, results: 1, entries: 1, messages: 1), "
    )
    again = feedmill("purge", "a1", cwd=tmp_path, **url)
    assert again.returncode == 1
    assert again.stdout == (
        "nothing is stored about a1, which was purged before: nothing was deleted, now blocked "
        "for 365 days; "
        "`feedmill purge --lift ID` unblocks\n"
    )
    none = feedmill("purge", "-", cwd=tmp_path, stdin="b1\nb2\n", **url)
    assert (
        none.returncode,
        none.stdout.startswith("nothing is stored about 2 posts, such as b1"),
    ) == (1, True)
    many = feedmill(
        "purge",
        "-",
        "a1",
        "--json",
        cwd=tmp_path,
        stdin="\ufeffa2\n\n a3 \r\na2",
        **url,
    )
    assert many.returncode == 0
    assert json.loads(many.stdout) == {
        "posts": 3, "sent": 0, "results": 2, "entries": 2, "dead_letters": 0, "messages": 0,
        "unmatched": 1,
        "unreadable": 0,
    }  # fmt: skip
    assert support.latest(store, 5) == []
    lifted = feedmill("purge", "--lift", "a1", "b\x1b[31m", cwd=tmp_path, **url)
    assert (lifted.returncode, counts(lifted.stdout)) == (0, [2, 1])
    odd = feedmill("purge", "--lift", "b\x1b[31m", cwd=tmp_path, **url)
    assert (odd.returncode, odd.stdout.startswith("b\\x1b[31m ")) == (1, True)
    assert (
        feedmill("purge", "--lift", "--json", "a2", cwd=tmp_path, **url).stdout
        == '{"posts": 1, "lifted": 1}\n'
    )


def test_purge_says_which_ids_matched_nothing(
    redis: RedisServer, tmp_path: Path
) -> None:
    url = {"FEEDMILL_REDIS_URL": redis.url}
    did = "did:plc:z72i7hdynmk6r22z27h6tvur"
    posts = ["t3_1a2b3c", f"at://{did}/app.bsky.feed.post/3l6oveex3ii2l", "a1", "a2"]
    stored(redis, *posts)
    for typed, meant in (
        ("1a2b3c", posts[0]),
        ("https://www.reddit.com/r/x/comments/1A2B3C/a_title/", posts[0]),
        (f"https://bsky.app/profile/{did}/post/3l6oveex3ii2l", posts[1]),
        (did, "at://DID"),
        ("https://example.com/a1", ""),
        ("t3_a1", "a1"),
    ):
        said = feedmill("purge", typed, cwd=tmp_path, **url)
        assert said.returncode == 1
        assert said.stdout.startswith(
            f"nothing is stored about {typed}: nothing was deleted"
        )
        assert "purged" not in said.stdout
        assert meant in said.stdout.partition("unblocks")[2]
        assert redis.client.exists(f"feedmill:gone:{typed}")
    mixed = feedmill("purge", "a1", "a2", "b\nc", cwd=tmp_path, **url)
    assert mixed.returncode == 0
    assert mixed.stdout.splitlines()[0].startswith(
        "2 posts purged (results: 2, entries: 2), now blocked"
    )
    assert mixed.stdout.splitlines()[1].startswith(
        "nothing is stored about b\\nc: nothing was deleted"
    )


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        (["PING"], ["PONG"]),
        (["ZRANGE", "scores", "0", "-1"], ["one", "two"]),
        (["ZSCORE", "scores", "two"], ["2.5"]),
        (["HGETALL", "hash"], ['{"field": "value"}']),
        (
            ["XINFO", "GROUPS", "stream"],
            [re.compile('{"name": "group", .*"pending": 0.*}')],
        ),
        (["GET", "nothing"], ["(nil)"]),
        (["GET", "bytes"], [r"\xff\x1b[31m", r"\x07"]),
        (["LRANGE", "nothing", "0", "-1"], []),
    ],
)
def test_redis_prints_replies(
    redis: RedisServer,
    tmp_path: Path,
    command: list[str],
    lines: list[str | re.Pattern[str]],
) -> None:
    redis.client.zadd("scores", {"one": 1, "two": 2.5})
    redis.client.hset("hash", "field", "value")
    redis.client.xgroup_create("stream", "group", mkstream=True)
    redis.client.set("bytes", b"\xff\x1b[31m\n\x07")
    said = feedmill("redis", *command, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert (said.returncode, said.stderr) == (0, "")
    printed = said.stdout.splitlines()
    assert len(printed) == len(lines)
    for line, expected in zip(printed, lines, strict=True):
        assert (
            expected.fullmatch(line)
            if isinstance(expected, re.Pattern)
            else line == expected
        )


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["NOSUCH"], "Redis refuses NOSUCH: .*unknown command"),
        (["GET", "scores"], "Redis refuses GET: .*wrong kind of value"),
        (["\x1b[31m"], r"Redis refuses \\x1b\[31m: "),
        (["monitor"], "monitor has more than one reply.*REDISCLI_AUTH"),
        (["SUBSCRIBE", "channel"], "more than one reply"),
    ],
)
def test_redis_explains_refusals(
    redis: RedisServer, tmp_path: Path, command: list[str], words: str
) -> None:
    redis.client.zadd("scores", {"one": 1})
    said = feedmill("redis", *command, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert (said.returncode, said.stdout) == (2, "")
    assert re.search(words, said.stderr)
    assert "Traceback" not in said.stderr


@pytest.mark.parametrize(
    "command",
    [["results"], ["results", "--json"], ["purge", "--yes", "--queue"], ["redis", ""]],
)
def test_arguments_that_are_not_text_are_named(
    redis: RedisServer, tmp_path: Path, command: list[str]
) -> None:
    """The shell passes any bytes."""
    said = feedmill(*command, "\udcff", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert said.returncode == 2
    assert re.fullmatch("feedmill: [^\n]*\n", said.stderr)


def test_redis_takes_any_bytes(redis: RedisServer, tmp_path: Path) -> None:
    url = {"FEEDMILL_REDIS_URL": redis.url}
    assert feedmill("redis", "SET", "k", "\udcff", cwd=tmp_path, **url).stdout == "OK\n"
    assert feedmill("redis", "STRLEN", "k", cwd=tmp_path, **url).stdout == "1\n"


def test_redis_ends_a_script_that_keeps_redis_busy(
    redis: RedisServer, tmp_path: Path
) -> None:
    """As the error of every other command advises."""
    url = {"FEEDMILL_REDIS_URL": redis.url}
    name = "busy-reply-threshold"
    before = str(redis.client.config_get(name)[name])
    redis.client.config_set(name, 1)
    with ThreadPoolExecutor(1) as threads:
        script = threads.submit(redis.client.eval, "while true do end", 0)
        wait_until(lambda: is_busy(redis), "the script keeps Redis busy")
        said = feedmill("redis", "PING", cwd=tmp_path, **url)
        assert said.returncode == 2
        assert "is busy with a slow script" in said.stderr
        assert "`feedmill redis SCRIPT KILL`" in said.stderr
        assert feedmill("redis", "SCRIPT", "KILL", cwd=tmp_path, **url).stdout == "OK\n"
        with pytest.raises(ResponseError, match="SCRIPT KILL"):
            script.result(60)
    redis.client.config_set(name, before)


def is_busy(redis: RedisServer) -> bool:
    try:
        redis.client.ping()
    except ResponseError as error:
        return "BUSY" in str(error)
    return False


def test_redis_shows_its_password_to_nobody(redis: RedisServer, tmp_path: Path) -> None:
    """A new interpreter: a forked process has another command line."""
    given = {"FEEDMILL_REDIS_URL": redis.url, "NEW_INTERPRETER": "1"}
    with support.running(
        "redis", "BLPOP", "a-list", "0", cwd=tmp_path, **given
    ) as command:
        wait_until(
            lambda: redis.client.info("clients")["blocked_clients"], "the command waits"
        )
        line = Path(f"/proc/{command.process.pid}/cmdline").read_text()
        assert "BLPOP" in line
        assert support.PASSWORD not in line
        redis.client.rpush("a-list", "a value")
        assert command.process.wait(60) == 0
        assert command.text().splitlines() == ["a-list", "a value"]


def test_documentation_shows_no_password_to_others() -> None:
    """Arguments of a command are in the list of processes; its environment is not."""
    pages = [*support.ROOT.glob("*.md"), *(support.ROOT / "docs").rglob("*.md")]
    as_argument = re.compile(r"(?<!=)\"?\$\(feedmill url[^)]*\)")
    assert len(pages) > 30
    assert {page.name: as_argument.findall(page.read_text()) for page in pages} == {
        page.name: [] for page in pages
    }


@pytest.mark.parametrize("post_id", ["", "x" * 2000])
def test_purge_refuses_an_invalid_id_before_it_asks(
    redis: RedisServer, tmp_path: Path, post_id: str
) -> None:
    ours, theirs = pty.openpty()
    try:
        said = subprocess.run(
            [sys.executable, "-m", "feedmill", "purge", "good", post_id],
            stdin=theirs,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            cwd=tmp_path,
            env={**os.environ, "FEEDMILL_REDIS_URL": redis.url},
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert said.returncode == 2
    assert "is not a post id" in said.stderr
    assert said.stdout == ""
    assert redis.client.keys(f"{TOMBSTONE}*") == []
