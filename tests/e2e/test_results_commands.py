"""`feedmill results`: output, streams and exit statuses."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import feedmill as feedmill_package
from feedmill.shared.keys import RESULTS_STREAM, RUN
from feedmill.shared.messages import Post
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from feedmill.testing.loopback import Handler, Loopback
from tests.e2e.test_documentation import blocks, commands
from tests.support import (
    NEW_INTERPRETER,
    ROOT,
    RedisServer,
    feedmill,
    make_classification,
    run,
    running,
    wait_until,
)


def result(
    post_id: str, label: str = "food", score: float = 0.9, subreddit: str | None = None
) -> Result:
    found = make_classification(
        post_id,
        label=label,
        scores={label: score},
        fingerprint=f"f{post_id}",
        classified_at=0.0,
    )
    return Result(Post(id=post_id, title="t", subreddit=subreddit), found)


def stored(redis: RedisServer, *ids: str, length: int = 100_000) -> ResultsStore:
    """Return a store with a result for each of these posts."""
    store = ResultsStore(
        redis.client, Settings.model_validate({"results_stream_length": length})
    )
    for start in range(0, len(ids), 10):
        store.write([result(post_id) for post_id in ids[start : start + 10]])
    return store


@contextmanager
def piped(
    redis: RedisServer, cwd: Path, *arguments: str
) -> Iterator[subprocess.Popen[str]]:
    """Run `feedmill results` with its output in a pipe."""
    process = subprocess.Popen(
        [str(Path(sys.executable).parent / "feedmill"), "results", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=os.environ | {"FEEDMILL_REDIS_URL": redis.url},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def shown(text: str) -> list[str]:
    return [json.loads(line)["id"] for line in text.splitlines()]


def waits(redis: RedisServer) -> bool:
    """Return whether a reader is blocked waiting for the next result."""
    clients = redis.client.client_list()
    return any(client["cmd"] == "xread" for client in clients)


def owed(redis: RedisServer, group: str) -> int:
    groups = redis.client.xinfo_groups(RESULTS_STREAM)
    return sum(each["pending"] for each in groups if each["name"] == group)


def test_shows_the_newest_matching_results(redis: RedisServer, tmp_path: Path) -> None:
    url = {"FEEDMILL_REDIS_URL": redis.url}
    store = stored(redis, *map(str, range(30)))
    store.write(
        [
            result("b1", "books"),
            result("b2", "books", 0.2, "Python"),
            result("\x1b[31m"),
        ]
    )
    shortened = feedmill("results", cwd=tmp_path, **url)
    assert (len(shortened.stdout.splitlines()), "--limit" in shortened.stderr) == (
        20,
        True,
    )
    assert feedmill("results", "--label", "books", cwd=tmp_path, **url).stderr == ""
    as_json = feedmill("results", "--json", cwd=tmp_path, **url)
    assert (shown(as_json.stdout)[0], as_json.stderr) == ("13", "")
    newest = feedmill("results", "--limit", "2", cwd=tmp_path, **url).stdout
    assert newest == (
        "b2           books            0.20  t\n\\x1b[31m     food             0.90  t\n"
    )
    for flags, ids in (
        (["--label", "books", "--min-score", "0.5"], ["b1"]),
        (["--subreddit", "r/python"], ["b2"]),
        (["--label", "none"], []),
        (["--since", "2999-01-01"], []),
        (["--limit", "0"], []),
    ):
        said = feedmill("results", "--json", *flags, cwd=tmp_path, **url)
        assert shown(said.stdout) == ids
        assert (said.returncode, bool(said.stderr)) == (
            (0, False) if ids or "0" in flags else (1, True)
        )


@pytest.mark.parametrize("command", ["results", "status", "export out.csv"])
def test_an_unknown_run_is_one_error(
    redis: RedisServer, tmp_path: Path, command: str
) -> None:
    url = {"FEEDMILL_REDIS_URL": redis.url}
    store = stored(redis, "a1")
    store.write(
        [Result(Post(id="m1", title="t", run="monday"), result("m1").classification)]
    )
    said = feedmill(*command.split(), "--run", "tuesday", cwd=tmp_path, **url)
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr == (
        "feedmill: There is no run 'tuesday', or its posts were sent too long ago. Recent runs: "
        "monday.\n"
    )
    assert list(tmp_path.iterdir()) == []
    store.write(
        [Result(Post(id="b1", title="t", run="tuesday"), result("b1").classification)]
    )
    redis.client.delete(RUN + "tuesday")  # expired, but its results are in the stream
    if command != "status":
        assert (
            feedmill(
                *command.split(), "--run", "tuesday", cwd=tmp_path, **url
            ).returncode
            == 0
        )


@pytest.mark.parametrize(
    ("group", "how", "status"),
    [([], signal.SIGINT, 130), (["--group", "g"], signal.SIGTERM, -signal.SIGTERM)],
)
def test_a_signal_ends_follow(
    redis: RedisServer,
    tmp_path: Path,
    group: list[str],
    how: signal.Signals,
    status: int,
) -> None:
    with running(
        "results", "--follow", *group, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url
    ) as following:
        wait_until(lambda: waits(redis), "the reader is waiting")
        assert following.end(how) == status
        assert following.text() == ""


@pytest.mark.parametrize("group", [[], ["--group", "g", "--from-start"]])
def test_follow_ends_when_its_pipe_closes(
    redis: RedisServer, tmp_path: Path, group: list[str]
) -> None:
    stored(redis, *map(str, range(5)))
    with piped(redis, tmp_path, "--follow", "--json", *group) as following:
        assert following.stdout
        assert following.stderr
        assert [json.loads(following.stdout.readline())["id"] for _ in range(3)] == [
            "0",
            "1",
            "2",
        ]
        following.stdout.close()
        # The reader notices the closed pipe although it writes nothing more.
        assert following.wait(120) == 0
        assert following.stderr.read() == ""
        following.stdout = None


def test_a_group_resumes_where_it_stopped(redis: RedisServer, tmp_path: Path) -> None:
    url = {"FEEDMILL_REDIS_URL": redis.url}
    store = stored(redis, "a1")
    group = ["results", "--json", "--group", "archive", "--consumer", "one"]
    assert (
        feedmill(*group, cwd=tmp_path, **url).stdout == ""
    )  # a new group starts at the end
    store.write([result("a2"), result("a3")])
    assert shown(feedmill(*group, cwd=tmp_path, **url).stdout) == ["a2", "a3"]
    with running(*group, "--follow", cwd=tmp_path, **url) as following:
        wait_until(lambda: waits(redis), "the reader is waiting")
        store.write([result("a4")])
        wait_until(
            lambda: following.says('"a4"') and not owed(redis, "archive"),
            "the result is acknowledged",
        )
        following.end(signal.SIGKILL)
    other = ["results", "--json", "--group", "other", "--from-start"]
    assert shown(feedmill(*other, cwd=tmp_path, **url).stdout) == [
        "a1",
        "a2",
        "a3",
        "a4",
    ]
    assert (owed(redis, "archive"), owed(redis, "other")) == (0, 0)


def test_unwritten_results_are_redelivered(redis: RedisServer, tmp_path: Path) -> None:
    """A reader that is killed while its output blocks has not acknowledged the unwritten
    results.
    """
    ids = [str(number) for number in range(90)]
    ResultsStore(redis.client, Settings()).write(
        [
            Result(Post(id=post_id, title="t" * 4000), result(post_id).classification)
            for post_id in ids
        ]
    )
    group = ["--json", "--group", "g", "--from-start"]
    with piped(redis, tmp_path, *group, "--consumer", "killed", "--follow") as reader:
        wait_until(
            lambda: redis.client.exists(RESULTS_STREAM) and owed_at_all(redis),
            "the reader has read results",
        )
        reader.kill()
    url = {"FEEDMILL_REDIS_URL": redis.url}
    again = feedmill(
        "results",
        *group,
        "--consumer",
        "next",
        "--claim-after",
        "0.001",
        cwd=tmp_path,
        **url,
    )
    found = [json.loads(line)["post"]["id"] for line in again.stdout.splitlines()]
    assert (found, again.stderr, owed(redis, "g")) == (ids, "", 0)


def owed_at_all(redis: RedisServer) -> bool:
    return bool(redis.client.xinfo_groups(RESULTS_STREAM)) and owed(redis, "g") > 0


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_reports_missed_results(
    redis: RedisServer, tmp_path: Path, flags: list[str]
) -> None:
    url = {"FEEDMILL_REDIS_URL": redis.url}
    group = ["results", *flags, "--group", "g", "--consumer", "me"]
    stored(redis, "first", length=100)
    assert feedmill(*group, "--from-start", cwd=tmp_path, **url).returncode == 0
    stored(redis, *map(str, range(2000)), length=100)
    said = feedmill(*group, cwd=tmp_path, **url)
    missed = 2000 - len(said.stdout.splitlines())
    if flags:
        told = json.loads(said.stderr)
        assert told["missed"] == missed
        assert told["since"] < told["until"]
    else:
        assert re.fullmatch(
            rf"feedmill: .*\b{missed:,} results .*[-0-9]+ [0-9:+]+ "
            r".*FEEDMILL_RESULTS_STREAM_LENGTH.*\n",
            said.stderr,
        )
    assert feedmill(*group, cwd=tmp_path, **url).stderr == ""


def test_documented_example_prints_as_shown(redis: RedisServer, tmp_path: Path) -> None:
    """Also to somebody who follows the page from its top, whose commands read the stream first."""
    code, _ = blocks("docs/results.md", "python")
    printed, *_ = blocks("docs/results.md", "")
    store = ResultsStore(redis.client, Settings())
    store.write([result("a1", "sport", 0.91), result("a2", "kitchen", 0.84)])
    for command in commands("docs/results.md"):
        if "--group" in command and "--follow" not in command:
            read = feedmill(*command, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
            assert shown(read.stdout) == ["a1", "a2"]
    for _ in range(2):  # the second run finds nothing new
        environment = os.environ | NEW_INTERPRETER | {"FEEDMILL_REDIS_URL": redis.url}
        said = run([sys.executable, "-W", "error", "-c", code], tmp_path, environment)
        assert (said.stdout, said.stderr) == (printed, "")


def test_documented_web_hook_receives_results(
    redis: RedisServer, tmp_path: Path
) -> None:
    told: list[Any] = []

    class Hook(Handler):
        def respond(self) -> None:
            told.append(
                json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            )
            self.send(204, {}, 0)

    with Loopback(Hook) as server:
        code = blocks("docs/results.md", "python")[1].replace(
            "http://127.0.0.1:8080", server.url
        )
        reading = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=os.environ | {"FEEDMILL_REDIS_URL": redis.url},
        )
        try:
            wait_until(lambda: waits(redis), "the script waits for results")
            stored(redis, "a1", "a2")
            wait_until(lambda: len(told) == 2, "the web hook has received both")
        finally:
            reading.kill()
            reading.wait()
    assert [(each["id"], each["label"]) for each in told] == [
        ("a1", "food"),
        ("a2", "food"),
    ]


def test_no_two_documented_examples_share_a_group() -> None:
    """The second one would print nothing."""
    pages = [
        "README.md",
        *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
    ]
    examples = [
        block
        for page in pages
        for language in ("sh", "python")
        for block in blocks(page, language)
    ]
    examples.append(str(feedmill_package.results.__doc__))
    groups: list[str] = []
    for example in examples:
        names = re.findall(r"""(?:group="|--group )([\w-]+)""", example)
        groups += sorted(set(names))
    assert groups
    assert sorted(groups) == sorted(set(groups))
