"""The `feedmill` command as a person meets it: what it prints, and its exit status."""

import gzip
import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard
from celery import Celery

from feedmill import __version__
from shared.keys import RESULTS_STREAM
from shared.messages import Classification, Post
from shared.results import Result, ResultsStore
from shared.serving import announce
from shared.settings import Settings
from tests.support import RedisServer, as_jsonl, body_of, feedmill, make_posts, running, wait_until


def test_version_and_help(tmp_path: Path) -> None:
    assert feedmill("--version", cwd=tmp_path).stdout == f"feedmill {__version__}\n"
    said = feedmill("--help", cwd=tmp_path)
    for command in ("demo", "up", "worker", "flower", "enqueue", "results", "status"):
        assert command in said.stdout


def test_enqueue_skips_bad_lines_and_says_so(redis: RedisServer, tmp_path: Path) -> None:
    path = tmp_path / "posts.jsonl"
    path.write_text('{"id": 1, "title": "x"}\nnope\n{"id": 2, "title": "y", "score": "many"}\n')
    said = feedmill("enqueue", str(path), cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert said.returncode == 1
    assert said.stdout == "2 posts sent (messages: 1), 0 already sent, 1 malformed\n"
    assert f"{path}:2: not JSON: Expecting value at column 1 " in said.stderr
    assert f"{path}:3: score: input should be a valid integer" in said.stderr
    assert "(kept without this field)" in said.stderr
    again = feedmill("enqueue", str(path), cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert again.stdout == "0 posts sent (messages: 0), 2 already sent, 1 malformed\n"
    path.write_text('{"id": 3, "title": "z"}\n')
    another = feedmill("enqueue", str(path), cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert another.stdout == "1 post sent (messages: 1), 0 already sent, 0 malformed\n"


def test_a_file_that_breaks_off_costs_none_of_the_posts_before(redis: RedisServer, tmp_path: Path) -> None:
    path = tmp_path / "posts.jsonl.gz"
    # In pieces, each with an end of its own: what breaks off is the last one alone.
    packed = [gzip.compress(as_jsonl([post]).encode()) for post in make_posts(101)]
    path.write_bytes(b"".join(packed)[:-10])
    said = feedmill("enqueue", str(path), cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert said.returncode == 2
    assert said.stdout.startswith("100 posts sent (messages: 4)")
    assert "to the end: " in said.stderr


def test_a_dump_with_filters(redis: RedisServer, tmp_path: Path) -> None:
    path = tmp_path / "RS_2023-11.zst"
    records = [
        {"id": "1a", "title": "a", "selftext": "", "subreddit": "Python", "created_utc": 1700000000},
        {"id": "1b", "title": "b", "selftext": "", "subreddit": "Python", "created_utc": 1690000000},
        {"id": "1c", "title": "c", "selftext": "", "subreddit": "rust", "created_utc": "1700000001"},
        {"id": "1d", "title": "d", "selftext": "", "subreddit": "golang", "created_utc": 1700000002},
        {"id": "1e", "title": "[deleted]", "selftext": "", "subreddit": "rust", "created_utc": 1700000003},
    ]
    path.write_bytes(zstandard.compress("".join(json.dumps(record) + "\n" for record in records).encode()))
    flags = ["--subreddit", "r/python,cpp", "--subreddit", "Rust", "--since", "2023-11-01", "--until", "2023-12-01"]
    said = feedmill("enqueue", str(path), *flags, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert said.stdout == (
        "2 posts sent (messages: 1), 0 already sent, 0 malformed, 1 removed on Reddit, 2 excluded by the filters\n"
    )
    assert said.returncode == 0
    assert sent_ids(redis) == ["t3_1a", "t3_1c"]
    none = feedmill("enqueue", str(path), "--subreddit", "pyton", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert none.returncode == 1
    assert "5 excluded by the filters" in none.stdout
    assert "The filters exclude every record" in none.stderr


def test_a_key_of_ones_own(redis: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "tickets.csv").write_text("ticket,channel,text\nT-1,mail,x\nT-2,web,y\n")
    url = {"FEEDMILL_REDIS_URL": redis.url}
    wrong = feedmill("enqueue", "tickets.csv", "--id-column", "tickets", cwd=tmp_path, **url)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("feedmill: tickets.csv has no column tickets ")
    assert "ticket, channel, text" in wrong.stderr
    said = feedmill("enqueue", "tickets.csv", "--id-column", "ticket", cwd=tmp_path, **url)
    assert (said.returncode, said.stderr) == (0, "")
    assert sent_ids(redis) == ["T-1", "T-2"]
    found = feedmill("enqueue", "tickets.csv", cwd=tmp_path, **url)
    assert found.stdout.startswith("2 posts sent")
    assert "tickets.csv: no id column (id, post_id)" in found.stderr


def sent_ids(redis: RedisServer) -> list[str]:
    messages: list[Any] = redis.client.lrange("feedmill", 0, -1)
    return sorted(post["id"] for message in messages for post in body_of(message)[1]["posts"])


def positions(redis: RedisServer) -> list[int]:
    return [int(redis.client.get(key) or 0) for key in redis.client.keys("feedmill:position:*")]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_run_goes_on_where_it_stopped(redis: RedisServer, tmp_path: Path, how: signal.Signals) -> None:
    path = tmp_path / "posts.zst"
    lines = as_jsonl(make_posts(3000)).splitlines(keepends=True)
    lines.insert(500, "nope\n")
    path.write_bytes(zstandard.compress("".join(lines).encode()))
    url = {"FEEDMILL_REDIS_URL": redis.url}
    # A trip is of 1,024 posts, in 32 messages: the second waits for room in the queue.
    with running("enqueue", str(path), cwd=tmp_path, FEEDMILL_QUEUE_LIMIT="40", **url) as interrupted:
        wait_until(lambda: len(redis.client.keys("feedmill:sent:*")) == 40 * 32, "the second trip waits")
        interrupted.end(how)
    assert "Traceback" not in interrupted.text()
    assert positions(redis) == [1025]
    said = feedmill("enqueue", str(path), cwd=tmp_path, **url)
    assert "resuming at record 1,026, where the last run stopped (--again starts over)" in said.stderr
    assert said.stdout == "1,720 posts sent (messages: 54), 256 already sent, 0 malformed\n"
    assert said.returncode == 0
    assert sent_ids(redis) == sorted(post.id for post in make_posts(3000))
    assert positions(redis) == []


def test_each_queue_has_its_own_place_in_a_file(redis: RedisServer, tmp_path: Path) -> None:
    path = tmp_path / "posts.jsonl"
    path.write_text(as_jsonl(make_posts(1100)))
    for queue in ("feedmill", "feedmill-other"):
        where = {"FEEDMILL_REDIS_URL": redis.url, "FEEDMILL_QUEUE": queue, "FEEDMILL_QUEUE_LIMIT": "32"}
        said = feedmill("enqueue", str(path), "--when-full", "refuse", cwd=tmp_path, **where)
        assert said.returncode == 2
        assert "1,024 posts were sent" in said.stderr
        assert "resuming" not in said.stderr
    assert positions(redis) == [1024, 1024]


def test_who_would_rather_be_told_is_refused_by_a_full_queue(redis: RedisServer, tmp_path: Path) -> None:
    path = tmp_path / "posts.jsonl"
    path.write_text(as_jsonl(make_posts(100)))
    url = {"FEEDMILL_REDIS_URL": redis.url}
    said = feedmill("enqueue", str(path), "--when-full", "refuse", cwd=tmp_path, FEEDMILL_QUEUE_LIMIT="2", **url)
    assert said.returncode == 2
    assert "FEEDMILL_QUEUE_LIMIT allows 2 " in said.stderr
    assert "64 posts were sent" in said.stderr
    assert "Traceback" not in said.stderr
    said = feedmill("enqueue", str(path), cwd=tmp_path, **url)
    assert said.stdout.startswith("36 posts sent (messages: 2), 64 already sent")


def test_a_turn_in_another_queue(redis: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "posts.jsonl").write_text(as_jsonl(make_posts(40)))
    announce(redis.client, "feedmill-bart", "facebook/bart-large-mnli")
    flags = ("--queue", "feedmill-bart", "--priority", "3")
    said = feedmill("enqueue", "posts.jsonl", *flags, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert said.stdout.startswith("40 posts sent (messages: 2)"), said.stderr
    assert redis.client.llen("feedmill-bart\x06\x163") == 2


@pytest.fixture
def frames() -> list[bytes]:
    """Four posts in a frame each, none of which packs well: the first alone is larger than what a file is known by."""
    texts = [random.Random(number).randbytes(49_000).hex() for number in range(4)]
    records = [{"id": f"p{number}", "title": "x", "body": text} for number, text in enumerate(texts)]
    records[0]["preview"] = random.Random(4).randbytes(49_000).hex()
    return [zstandard.compress(json.dumps(record).encode() + b"\n") for record in records]


def test_a_download_that_is_continued(redis: RedisServer, tmp_path: Path, frames: list[bytes]) -> None:
    path = tmp_path / "posts.zst"
    path.write_bytes(b"".join(frames[:2]) + frames[2][:-4])
    url = {"FEEDMILL_REDIS_URL": redis.url}
    said = feedmill("enqueue", str(path), cwd=tmp_path, **url)
    assert (said.returncode, said.stdout[:12]) == (2, "2 posts sent")
    assert said.stderr.endswith("posts.zst to the end: the file is truncated.\n")
    path.write_bytes(b"".join(frames))
    otherwise = feedmill("enqueue", str(path), "--labels", "a,b", cwd=tmp_path, **url)
    assert (otherwise.stdout[:12], otherwise.stderr) == ("4 posts sent", "")
    said = feedmill("enqueue", str(path), cwd=tmp_path, **url)
    assert said.stdout == "2 posts sent (messages: 1), 0 already sent, 0 malformed\n"
    assert said.stderr == "resuming at record 3, where the last run stopped (--again starts over)\n"
    assert positions(redis) == []


def test_again_starts_over(redis: RedisServer, tmp_path: Path, frames: list[bytes]) -> None:
    path = tmp_path / "posts.zst"
    path.write_bytes(b"".join(frames)[:-4])
    url = {"FEEDMILL_REDIS_URL": redis.url}
    assert feedmill("enqueue", str(path), cwd=tmp_path, **url).stdout.startswith("3 posts sent")
    assert positions(redis) == [3]
    path.write_bytes(b"".join(frames))
    said = feedmill("enqueue", str(path), "--again", cwd=tmp_path, **url)
    assert (said.stdout[:12], said.stderr) == ("4 posts sent", "")
    assert positions(redis) == []


@pytest.mark.each_redis
def test_a_full_redis(redis: RedisServer, tmp_path: Path) -> None:
    redis.client.config_set("maxmemory", 1)
    try:
        refuse = ("enqueue", "-", "--when-full", "refuse")
        said = feedmill(*refuse, cwd=tmp_path, stdin=as_jsonl(make_posts(3)), FEEDMILL_REDIS_URL=redis.url)
    finally:
        redis.client.config_set("maxmemory", 0)
    assert said.returncode == 2
    assert "has reached its memory limit" in said.stderr


def test_other_celery_workers_are_left_out(redis: RedisServer, tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-P", "-m", "celery", "-b", redis.url, "worker", "--pool", "solo", "-n", "other@elsewhere"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        answers = Celery(broker=redis.url, set_as_current=False).control.inspect(timeout=1)
        wait_until(answers.ping, "the other worker answers")
        said = feedmill("status", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    finally:
        other.kill()
        other.wait()
    assert said.returncode == 0, said.stderr
    assert "none answers" in said.stdout


def test_enqueue_from_standard_input(redis: RedisServer, tmp_path: Path) -> None:
    said = feedmill("enqueue", "-", cwd=tmp_path, stdin=as_jsonl(make_posts(3)), FEEDMILL_REDIS_URL=redis.url)
    assert (said.returncode, said.stdout[:12]) == (0, "3 posts sent")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["enqueue", "/no/such/file"], "There is no file /no/such/file."),
        (["enqueue", "-", "--labels", "a,a"], "--labels: the label 'a' is named twice."),
        (["enqueue", "-", "--labels", '{"a": "b"'], "--labels: invalid JSON: "),
        (
            ["enqueue", "-", "--since", "yesterday"],
            "--since: 'yesterday' is not a date. Write 2026-01-31",
        ),
        (["enqueue", "-", "--until", "1700000000"], "--until: '1700000000' is not a date"),
        (
            ["enqueue", "-", "--since", "2024-02-01", "--until", "2024-01-01"],
            "--since 2024-02-01 must be before --until 2024-01-01.",
        ),
        (
            ["enqueue", "-", "--subreddit", "a, b c"],
            "--subreddit: 'b c' is not a subreddit name.",
        ),
        (["enqueue", "-", "--subreddit", ","], "--subreddit: ',' is not a subreddit name."),
        (["flower", "--port", "99999"], "--port"),
        (["flower", "--port", "0", "--address", "192.0.2.1"], "Flower cannot listen on 192.0.2.1:0: Cannot assign"),
        (["enqueue", "-", "--template", "x"], "--template: must contain {}"),
        (["enqueue", "-", "--posts-per-message", "0"], "--posts-per-message: "),
        (["--log-format", "xml", "status"], "--log-format: "),
    ],
)
def test_mistakes_are_one_sentence(redis: RedisServer, tmp_path: Path, arguments: list[str], words: str) -> None:
    url = {"FEEDMILL_REDIS_URL": redis.url, "FEEDMILL_DATA_FOLDER": str(tmp_path / "data")}
    said = feedmill(*arguments, cwd=tmp_path, **url)
    assert said.returncode == 2
    assert words in said.stderr
    assert "Traceback" not in said.stderr


@pytest.mark.parametrize("command", [["enqueue", "-"], ["status"], ["results"], ["results", "get", "1"]])
def test_without_a_redis(tmp_path: Path, command: list[str]) -> None:
    post = '{"id": 1, "title": "x"}'
    said = feedmill(*command, cwd=tmp_path, stdin=post, FEEDMILL_REDIS_URL="redis://:hunter2@127.0.0.1:1/0")
    assert said.returncode == 2
    assert "Redis at 127.0.0.1:1/0 is unreachable" in said.stderr
    assert "Connection refused" in said.stderr
    assert "Traceback" not in said.stderr
    assert "hunter2" not in said.stderr


@pytest.mark.parametrize(
    ("password", "words"),
    [
        (":wrong@", "the password. Set FEEDMILL_REDIS_URL"),
        ("", "none is set. Set FEEDMILL_REDIS_URL"),
    ],
)
def test_with_the_wrong_password(redis: RedisServer, tmp_path: Path, password: str, words: str) -> None:
    said = feedmill("status", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url.replace(":test-password@", password))
    assert said.returncode == 2
    assert words in said.stderr


def test_flower_on_a_port_that_is_taken(redis: RedisServer, tmp_path: Path) -> None:
    port = redis.url.rpartition(":")[2].removesuffix("/0")
    data = {"FEEDMILL_DATA_FOLDER": str(tmp_path / "data")}
    said = feedmill("flower", "--port", port, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url, **data)
    assert said.returncode == 2
    assert said.stderr.startswith(f"feedmill: Flower cannot listen on 127.0.0.1:{port}: Address already in use. ")
    assert len(said.stderr.splitlines()) == 1


def test_a_variable_that_is_no_setting_is_told_once(redis: RedisServer, tmp_path: Path) -> None:
    said = feedmill("results", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url, FEEDMILL_MODLE="x")
    assert said.returncode == 0
    assert said.stderr.count("FEEDMILL_MODLE is not a setting and is ignored; did you mean FEEDMILL_MODEL?") == 1


def test_from_a_file_to_results(served: RedisServer, tmp_path: Path) -> None:
    url = {"FEEDMILL_REDIS_URL": served.url}
    posts = "id,title\na1,The keeper saved two penalties\na2,How long do dried beans keep?\n"
    (tmp_path / "posts.csv").write_text(posts)
    with running("results", "--follow", "--json", cwd=tmp_path, **url) as following:
        sent = feedmill("enqueue", "posts.csv", "--labels", "sports,food", "--multi-label", cwd=tmp_path, **url)
        assert sent.returncode == 0, sent.stderr
        wait_until(lambda: following.says('"a1"') and following.says('"a2"'), "both results are shown")
        shown = {entry["id"]: entry for entry in map(json.loads, following.text().splitlines())}
    assert (shown["a1"]["label"], shown["a2"]["label"]) == ("sports", "food")
    assert shown["a1"]["post"]["title"] == "The keeper saved two penalties"
    assert shown["a1"]["queued_seconds"] >= 0
    listed = feedmill("results", cwd=tmp_path, **url).stdout
    assert "dried beans" in listed
    one = feedmill("results", "get", "a2", cwd=tmp_path, **url).stdout
    assert one.startswith("a2: food, by sentence-transformers/all-MiniLM-L6-v2")
    assert json.loads(feedmill("results", "get", "a2", "--json", cwd=tmp_path, **url).stdout)["label"] == "food"
    status = json.loads(feedmill("status", "--json", cwd=tmp_path, **url).stdout)
    assert status["queue"] == {"waiting": 0, "held": 0}
    assert status["results"]["stored"] == served.client.xlen(RESULTS_STREAM)
    assert len(status["workers"]) == 1
    told = feedmill("status", cwd=tmp_path, **url).stdout
    assert "padding efficiency" in told
    assert max(map(len, told.splitlines())) <= 80


def test_nobody_works(redis: RedisServer, tmp_path: Path) -> None:
    assert "none answers" in feedmill("status", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url).stdout


def test_a_folder_with_other_packages_of_our_names(tmp_path: Path) -> None:
    """The installed command does not see it; `python -m`, which puts the folder first, names both paths."""
    for name in ("shared", "workers", "producers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    assert feedmill("--version", cwd=tmp_path).stdout == f"feedmill {__version__}\n"
    said = subprocess.run(
        [sys.executable, "-m", "feedmill", "--version"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert said.returncode == 2
    assert str(tmp_path / "shared") in said.stderr
    assert str(Path(__file__).parent.parent.parent / "shared") in said.stderr
    assert "Traceback" not in said.stderr


def test_a_worker_needs_its_extra(tmp_path: Path) -> None:
    """Without torch: one sentence that says what brings it."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch', name='torch')")
    said = feedmill("worker", cwd=tmp_path, PYTHONPATH=str(tmp_path), NEW_INTERPRETER="1")
    assert said.returncode == 2
    assert "A worker requires the package torch: run `pip install 'feedmill[worker]'`." in said.stderr


def stored(redis: RedisServer, *ids: str) -> ResultsStore:
    """A store with a result of each of these posts."""
    store = ResultsStore(redis.client, Settings())
    found = Classification(
        id="", label="food", scores={"food": 0.9}, model="m", revision=None, weights="00", fingerprint="f",
        classified_at=0.0, worker="w", device="cpu", queued_seconds=None,
    )  # fmt: skip
    store.write([Result(Post(id=name, title="t"), found.model_copy(update={"id": name})) for name in ids])
    return store


def test_purging(redis: RedisServer, tmp_path: Path) -> None:
    url = {"FEEDMILL_REDIS_URL": redis.url}
    store = stored(redis, "a1", "a2", "a3")
    sent = feedmill("enqueue", "-", cwd=tmp_path, stdin='{"id": "a1", "title": "x"}', **url)
    assert sent.returncode == 0, sent.stderr
    said = feedmill("purge", "a1", cwd=tmp_path, **url)
    assert (said.returncode, said.stderr) == (0, "")
    deleted = "marked as sent: 1, results: 1, stream entries: 1, messages: 1"
    assert said.stdout == f"a1 purged ({deleted}); blocked for 365 days\n"
    again = feedmill("purge", "a1", cwd=tmp_path, **url)
    assert again.returncode == 1
    assert again.stdout == "a1 purged (nothing was stored); blocked for 365 days\n"
    many = feedmill("purge", "-", "a1", "--json", cwd=tmp_path, stdin="a2\n\n a3 \r\na2", **url)
    assert many.returncode == 0
    assert json.loads(many.stdout) == {
        "posts": 3, "sent": 0, "results": 2, "entries": 2, "dead_letters": 0, "celery_results": 0,
        "messages": 0,
    }  # fmt: skip
    assert store.latest(5) == []
    lifted = feedmill("purge", "--lift", "a1", "b\x1b[31m", cwd=tmp_path, **url)
    assert (lifted.returncode, lifted.stdout) == (0, "2 posts unblocked (1 had been purged)\n")
    odd = feedmill("purge", "--lift", "b\x1b[31m", cwd=tmp_path, **url)
    assert (odd.returncode, odd.stdout) == (1, "b\\x1b[31m unblocked (0 had been purged)\n")
    assert feedmill("purge", "--lift", "--json", "a2", cwd=tmp_path, **url).stdout == '{"posts": 1, "lifted": 1}\n'


@pytest.mark.parametrize(
    ("ids", "stdin", "words"),
    [
        (["-"], "\n \n", "feedmill: Standard input contains no post id. Give one id per line.\n"),
        (
            ["--lift", "--rewrite", "a1"],
            "",
            "feedmill: --lift deletes nothing, so there is nothing to rewrite. Leave out --rewrite.\n",
        ),
        (["a1", ""], "", "feedmill: '' is not a post id: it has 0 characters, not 1 to 128.\n"),
        (
            ["-"],
            "\x1b" * 200,
            "feedmill: '" + "\\x1b" * 10 + "' is not a post id: it has 200 characters, not 1 to 128.\n",
        ),
    ],
)
def test_what_cannot_be_purged(redis: RedisServer, tmp_path: Path, ids: list[str], stdin: str, words: str) -> None:
    said = feedmill("purge", *ids, cwd=tmp_path, stdin=stdin, FEEDMILL_REDIS_URL=redis.url)
    assert (said.returncode, said.stdout, said.stderr) == (2, "", words)
    assert redis.client.keys() == []


def test_purging_without_a_redis(tmp_path: Path) -> None:
    said = feedmill("purge", "a1", cwd=tmp_path, FEEDMILL_REDIS_URL="redis://127.0.0.1:1/0")
    assert (said.returncode, said.stdout) == (2, "")
    assert "Redis at 127.0.0.1:1/0 is unreachable" in said.stderr
