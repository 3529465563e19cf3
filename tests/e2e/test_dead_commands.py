"""`feedmill dead`: list, show, retry, drop."""

import json
import re
from typing import Any

import pytest
from typer.testing import CliRunner

from feedmill.cli.main import application
from feedmill.outcomes.dead_letters import DeadLetterStream
from feedmill.shared import logs
from feedmill.shared.broker import queue_depth
from feedmill.shared.errors import UserError
from feedmill.shared.keys import DEAD_LETTERS
from feedmill.shared.messages import DeadLetter
from feedmill.shared.purge import purge
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from tests.support import RedisServer, body_of, dead_letters

GOOD = json.dumps({"id": "good", "title": "A title"})


def letter(post_id: str | None, post: str | None = GOOD, **fields: Any) -> DeadLetter:
    known: dict[str, Any] = {
        "reason": "no",
        "options": '{"top_k": 2}',
        "message": "m",
        "worker": "w",
        "failed_at": 0.0,
    }
    return DeadLetter(id=post_id, post=post, **known | fields)


class House:
    """A Redis with dead letters, and the `feedmill dead` command."""

    def __init__(self, redis: RedisServer) -> None:
        self.redis = redis
        self.store, self.dead = (
            ResultsStore(redis.client, Settings()),
            DeadLetterStream(redis.client),
        )

    def keep(self, *letters: DeadLetter) -> list[str]:
        """Store these dead letters; return the names of all dead letters in Redis."""
        self.store.write([], letters)
        return [each.name for each in self.dead.all()]

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Run the command in this process; return its exit status, output and errors.

        Logging stays unconfigured.
        """
        said = CliRunner().invoke(
            application(),
            ["dead", *arguments],
            env={"FEEDMILL_REDIS_URL": self.redis.url},
        )
        if isinstance(said.exception, UserError):
            return 2, said.stdout, f"feedmill: {said.exception}\n"
        return said.exit_code, said.stdout, said.stderr


@pytest.fixture
def house(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(logs, "configure", lambda *_, **__: None)
    return House(redis)


def test_list_and_show(house: House) -> None:
    traceback = 'File "a.py", line 1\nValueError\n'
    first, second = house.keep(
        letter("a1", reason="odd \x1b[31m"),
        letter(None, None, payload="[1", attempts=3, traceback=traceback),
    )
    status, said, complaints = house.run("list")
    assert (status, complaints) == (0, "")
    assert said.splitlines() == [
        f"{first:<18} a1           1970-01-01 00:00:00+00:00  odd \\x1b[31m",
        f"{second:<18} -            1970-01-01 00:00:00+00:00  no",
    ]
    _, said, _ = house.run("list", "--count", "1", "--json")
    assert json.loads(said) == {
        "entry": second,
        **dead_letters(house.store, 1)[0].model_dump(),
    }
    status, said, _ = house.run("list", second)
    assert status == 0
    assert "attempts   3\n" in said
    assert "payload    [1\n" in said
    assert said.endswith(traceback)
    status, said, _ = house.run("list", "a1")
    assert (status, f"entry      {first}\n" in said) == (0, True)
    status, said, complaints = house.run("list", "nobody")
    assert (status, said, "nobody" in complaints) == (2, "", True)


def test_retry_all_reports_letters_that_cannot_be_resent(house: House) -> None:
    _, kept_none, empty, newer, _ = house.keep(
        letter("good"),
        letter("long", None),
        letter("empty", '{"id": "empty"}'),
        letter("newer", options='{"version": 99}'),
        letter("gone", GOOD.replace("good", "gone")),
    )
    purge(house.redis.client, Settings(), ["gone"])
    house.redis.client.xadd(
        DEAD_LETTERS,
        {
            "id": "",
            "letter": letter(None, GOOD.replace("good", "gone")).model_dump_json(),
        },
    )
    purged = [each.name for each in house.dead.all()][-1]
    status, said, complaints = house.run("retry", "--all")
    assert (status, re.findall(r"\d+", said)) == (1, ["1", "4"])
    for line, (name, reason) in zip(
        complaints.splitlines(),
        [(kept_none, ""), (empty, "title or body"), (newer, "99"), (purged, "gone")],
        strict=True,
    ):
        assert line.startswith(f"feedmill: {name} ")
        assert reason in line
    assert [each.name for each in house.dead.all()] == [kept_none, empty, newer, purged]
    assert queue_depth(house.redis.client, "feedmill").waiting == 1
    (waiting,) = map(json.loads, house.redis.client.lrange("feedmill", 0, -1))
    assert waiting["headers"]["kwargsrepr"] == "{'posts': <1 post: good>, 'top_k': 2}"


def test_retry_sends_to_the_original_queue(house: House) -> None:
    names = house.keep(
        letter("good"),
        letter("good", queue="feedmill"),
        letter("good", queue="feedmill-other"),
    )
    assert len(names) == 2, (
        "letters of two queues are distinct; queue None means the default queue"
    )
    assert "queue      feedmill-other\n" in house.run("list", names[1])[1]
    assert house.run("retry", "--all")[::2] == (0, "")
    for queue in ("feedmill", "feedmill-other"):
        (sent,) = map(json.loads, house.redis.client.lrange(queue, 0, -1))
        assert sent["headers"]["kwargsrepr"] == "{'posts': <1 post: good>, 'top_k': 2}"
    house.keep(letter("good", queue="feedmill-other"))
    assert len(list(house.dead.all())) == 1, "a repeated failure is stored again"


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ([], {"top_k": 2}),
        (["--other"], {}),
        (
            ["--labels", '{"x": "a text", "y": "b"}', "--multi-label"],
            {"labels": {"x": ["a text"], "y": ["b"]}, "multi_label": True},
        ),
        (
            ["--template", "It is {}.", "--none", "0.5"],
            {"template": "It is {}.", "none": 0.5},
        ),
    ],
)
def test_retry_sends_with_other_options(
    house: House, flags: list[str], options: dict[str, Any]
) -> None:
    house.keep(letter("good"))
    assert house.run("retry", "good", *flags)[::2] == (0, "")
    (message,) = house.redis.client.lrange("feedmill", 0, -1)
    sent = body_of(message)[1]
    assert {
        key: sent[key] for key in sent if key not in {"posts", "version"}
    } == options


def test_retry_refuses_wrong_options_and_keeps_the_letters(house: House) -> None:
    house.keep(letter("good"))
    status, _, complaints = house.run("retry", "--all", "--template", "no place")
    assert (status, "template" in complaints) == (2, True)
    assert len(list(house.dead.all())) == 1


def test_retry_accepts_post_ids(house: House) -> None:
    house.keep(letter("a1"), letter("b1"))
    status, said, complaints = house.run("retry", "a1", "nobody")
    assert (status, said, "nobody" in complaints) == (2, "", True)
    assert house.run("retry", "a1")[0] == 0
    (left,) = house.dead.all()
    assert left.post_id == "b1"


def test_drop_requires_unique_ids_or_yes(house: House) -> None:
    first, second, _ = house.keep(
        letter("a1"), letter("a1", options=None), letter("b1")
    )
    status, said, complaints = house.run("drop", "b1", "a1")
    assert (status, said) == (2, "")
    assert f"{first}, {second}" in complaints
    status, said, complaints = house.run("drop", first, "b1")
    assert (status, said[:2], complaints) == (0, "2 ", "")
    assert [each.name for each in house.dead.all()] == [second]
    status, said, complaints = house.run("drop", "--all")
    assert (status, said, "--yes" in complaints) == (2, "", True)
    status, said, complaints = house.run("drop", "--all", "--yes")
    assert (status, said[:2], complaints) == (0, "1 ", "")
    assert list(house.dead.all()) == []


@pytest.mark.parametrize("arguments", [["retry"], ["drop", "--all", "x"]], ids=" ".join)
def test_retry_and_drop_require_a_selection(house: House, arguments: list[str]) -> None:
    status, said, complaints = house.run(*arguments)
    assert (status, said) == (2, "")
    assert "--all" in complaints
