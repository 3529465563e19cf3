"""Commands never print control characters that came from outside."""

import io
import json
import logging
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from feedmill.cli import main, status
from feedmill.monitoring import watch
from feedmill.shared.errors import (
    UNPRINTABLE_CHARACTERS,
    json_line,
    printable,
    printable_lines,
)
from feedmill.shared.keys import (
    LIVE_GAPS,
    LIVE_STATUS,
    MODELS,
    REQUESTED_MODELS,
    WORKERS,
)
from feedmill.shared.logs import JsonFormatter, TextFormatter
from feedmill.shared.messages import DeadLetter, Post
from feedmill.shared.metrics import connect_for_monitoring
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from tests.integration.test_metrics import POOL
from tests.support import RedisServer, make_classification

#: Characters that move the cursor, set the terminal's title, end a line, reverse the text
#: direction, or are invisible.
HOSTILE = {
    "escape": "\x1b[2J",
    "title": "\x1b]0;mine\x07",
    "C1": "\x9b2J",
    "newline": "a\nb\r\x0b\x0c",
    "separator": "\u2028\u2029\x85",
    "delete": "\x7f\x08",
    "override": "\u202egnp.exe\u202c",
    "isolate": "\u2066\u2067\u2068\u2069",
    "mark": "\u200e\u200f\u061c",
    "tag": "\U000e0041\U000e007f",
    "zero width": "\u200b\u200c\u200d\u2060\ufeff\xad",
    "filler": "\u3164\u115f\ufe0f\U000e0100",
}
#: Control characters that our own output may contain: line ends.
ALLOWED = re.compile(r"\n")

COMMANDS = [
    ["results"],
    ["results", "--json"],
    ["results", "--group", "g", "--from-start"],
    ["results", "--group", "h", "--from-start", "--json"],
    ["results", "ID"],
    ["results", "ID", "--json"],
    ["results", "no HOSTILE"],
    ["results", "--group", "HOSTILE"],
    ["results", "--subreddit", "HOSTILE"],
    ["dead", "list"],
    ["dead", "list", "--json"],
    ["dead", "list", "ID"],
    ["dead", "list", "ID", "--json"],
    ["dead", "list", "twice"],
    ["dead", "retry", "--all"],
    ["dead", "retry", "no HOSTILE"],
    ["dead", "drop", "no HOSTILE"],
    ["status"],
    ["status", "--json"],
    ["health"],
    ["health", "--json"],
    ["ingest", "gaps"],
    ["ingest", "gaps", "--json"],
    ["deploy"],
    ["deploy", "--json"],
    ["enqueue", "posts.jsonl"],
    ["enqueue", "posts.csv"],
    ["enqueue", "posts.jsonl", "--queue", "HOSTILE"],
    ["purge", "HOSTILE"],
    ["purge", "--lift", "HOSTILE"],
    ["export", "out.csv"],
    ["report", "report.html"],
]


def filled(redis: RedisServer, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """Put this text wherever a producer with access to Redis can, and into a worker's answers."""
    found = make_classification(
        words,
        label=words,
        scores={words: 0.9},
        model=words,
        revision=words,
        weights=words,
        fingerprint=words,
        worker=words,
        device=words,
    )
    post = Post(
        id=f"x{words}x", title=f"x{words}x", subreddit=words, url=words, topic=words
    )
    letter = DeadLetter(
        id=f"x{words}x", reason=words, post=json.dumps({"id": "1", "title": "t", "url": words}),
        message=words,
        options=json.dumps({words: words}), worker=words, failed_at=1.0,
        traceback=words.replace("\n", ""),
        queue="feedmill", payload=words,
    )  # fmt: skip
    twice = [
        letter.model_copy(update={"id": "twice", "message": name, "post": None})
        for name in ("a", words)
    ]
    ResultsStore(redis.client, Settings()).write(
        [Result(post, found)], [letter, *twice]
    )
    redis.client.hset(MODELS, words, json.dumps({"model": words, "seen": 2e9}))
    redis.client.hset(
        REQUESTED_MODELS,
        words,
        json.dumps({"model": words, "weights": words, "at": 1.0}),
    )
    redis.client.hset(WORKERS, words, 2_000_000_000)
    redis.client.hset(LIVE_GAPS, words, json.dumps(["reddit", words, 1.0, 2.0, 3.0]))
    told = {
        "subreddits": 1, "topics": 1, "sent": 1, "paused": False, "delay": None,
        "failing": [words], "gaps": 1,
        "budget": 1.0, "hindrance": words, "purged": 1, "requests": 1, "read": 1,
        "at": time.time(),
    }  # fmt: skip
    redis.client.hset(LIVE_STATUS, words, json.dumps(told))
    deployed = {"at": 1.0, "stage": words, "said": words}
    pool = POOL | {
        "device": words,
        "model": words,
        "weights": words,
        "queues": [words],
        "deploy": deployed,
    }
    monkeypatch.setattr(watch, "worker_statistics", lambda *_: {words: pool})


@pytest.fixture
def hostile(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str
) -> str:
    filled(redis, monkeypatch, words)
    monkeypatch.setenv("FEEDMILL_REDIS_URL", redis.url)
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.chdir(tmp_path)
    bad: list[Any] = [
        {"id": words},
        {"id": "2", "title": "t", "extra": {words: float("nan")}},
        {words: words},
    ]
    Path("posts.jsonl").write_text(
        "".join(f"{json.dumps(each)}\n" for each in bad) + f'{{"{words}\n'
    )
    with Path("posts.csv").open("w", newline="") as file:
        file.write(f'"{words}",title\n"{words}",t\n')
    return words


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("words", ["".join(HOSTILE.values())], ids=["all"])
def test_commands_print_no_control_characters(
    hostile: str,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [
        each.replace("HOSTILE", hostile).replace("ID", f"x{hostile}x")
        for each in command
    ]
    monkeypatch.setattr(sys, "argv", ["feedmill", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code in (0, 1, 2, None)
    said = "".join(capsys.readouterr())
    assert "Traceback" not in said
    assert not UNPRINTABLE_CHARACTERS.search(ALLOWED.sub("", said)), said
    assert "a\nb" not in said
    if command[-1] == "--json":
        assert all(
            isinstance(json.loads(line), dict)
            for line in said.splitlines()
            if line.startswith("{")
        )
    if command[0] == "report":
        assert not UNPRINTABLE_CHARACTERS.search(
            ALLOWED.sub("", Path("report.html").read_text())
        )


@pytest.mark.parametrize("words", ["".join(HOSTILE.values())], ids=["all"])
@pytest.mark.usefixtures("hostile")
def test_status_screen_shows_no_control_characters(settings: Settings) -> None:
    shown = io.StringIO()
    seen = watch.status(connect_for_monitoring(settings), None, settings)
    Console(file=shown, width=80).print(status._table(seen, settings))
    assert not UNPRINTABLE_CHARACTERS.search(ALLOWED.sub("", shown.getvalue()))


@pytest.mark.parametrize("words", HOSTILE.values(), ids=HOSTILE)
def test_log_records_contain_no_control_characters(words: str) -> None:
    try:
        raise ValueError(words)
    except ValueError:
        record = logging.LogRecord(
            words, logging.ERROR, "f", 1, "post %s", (words,), sys.exc_info()
        )
    text = TextFormatter("%(name)s: %(message)s").format(record)
    assert not UNPRINTABLE_CHARACTERS.search(ALLOWED.sub("", text))
    _, *others = text.split("\n")
    assert all(line.startswith("    ") for line in others), (
        "no line looks like another log record"
    )
    assert "    Traceback (most recent call last):" in others
    found = JsonFormatter().format(record)
    assert not UNPRINTABLE_CHARACTERS.search(found)
    assert json.loads(found)["message"] == f"post {words}"


@pytest.mark.parametrize("words", HOSTILE.values(), ids=HOSTILE)
def test_json_line_escapes_control_characters_losslessly(words: str) -> None:
    value = {words: [words, 1, None, "é🙂"]}
    assert json.loads(json_line(value)) == value
    assert not UNPRINTABLE_CHARACTERS.search(json_line(value))
    assert "é🙂" in json_line(value)
    assert not UNPRINTABLE_CHARACTERS.search(printable(words))
    assert printable_lines(f"a\n{printable(words)}").count("\n") == 1
