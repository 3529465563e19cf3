"""`feedmill dead`: list, show, retry, drop."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from feedmill.cli import app
from shared import logs
from shared.broker import queue_depth
from shared.dead import DeadLetters, Entry
from shared.errors import UserError
from shared.keys import DEAD_LETTERS, UNDECODABLE
from shared.messages import DeadLetter
from shared.purge import purge
from shared.results import ResultsStore
from shared.settings import Settings
from tests.support import RedisServer

GOOD = json.dumps({"id": "good", "title": "A title"})


def letter(post_id: str | None, post: str | None = GOOD, **fields: Any) -> DeadLetter:
    known: dict[str, Any] = {"reason": "no", "options": '{"top_k": 2}', "message": "m", "worker": "w", "failed_at": 0.0}
    return DeadLetter(id=post_id, post=post, **known | fields)


class House:
    """A Redis with dead letters, and the command."""

    def __init__(self, redis: RedisServer) -> None:
        self.redis = redis
        self.store, self.dead = ResultsStore(redis.client, Settings()), DeadLetters(redis.client)

    def keep(self, *letters: DeadLetter) -> list[str]:
        """Have these letters; returns the names of all that are there."""
        self.store.write([], letters)
        return [each.name for each in self.dead.all()]

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Exit status, and what it says on standard output and error; in this process, whose log stays as it is."""
        said = CliRunner().invoke(app, ["dead", *arguments], env={"FEEDMILL_REDIS_URL": self.redis.url})
        if isinstance(said.exception, UserError):
            return 2, said.stdout, f"feedmill: {said.exception}\n"
        return said.exit_code, said.stdout, said.stderr


@pytest.fixture
def house(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(logs, "configure", lambda _: None)
    return House(redis)


def test_none_is_said(house: House) -> None:
    assert house.run("list", "--json") == (0, "", "no dead letters\n")


def test_they_are_listed_and_shown(house: House) -> None:
    house.redis.client.lpush(UNDECODABLE, b"\xff\x1b[31m")
    traceback = 'File "a.py", line 1\nValueError\n'
    raw, first, second = house.keep(
        letter("a1", reason="odd \x1b[31m"), letter(None, None, payload="[1", attempts=3, traceback=traceback)
    )
    assert house.run("list") == (
        0,
        f"{raw}  6 bytes, not a message\n"
        f"{first:<18} a1           1970-01-01 00:00:00+00:00  odd \\x1b[31m\n"
        f"{second:<18} -            1970-01-01 00:00:00+00:00  no\n",
        "",
    )
    _, said, _ = house.run("list", "--count", "1", "--json")
    element, found = map(json.loads, said.splitlines())
    assert element == {"entry": raw, "element": "\ufffd\x1b[31m"}
    assert found == {"entry": second, **house.store.dead_letters(1)[0].model_dump()}
    status, said, _ = house.run("show", second)
    assert status == 0
    assert "attempts   3\n" in said
    assert "payload    [1\n" in said
    assert said.endswith(traceback)
    status, said, _ = house.run("show", "a1")
    assert (status, f"letter     {first}\n" in said) == (0, True)
    assert house.run("show", "nobody") == (1, "", "feedmill: no dead letter matches nobody\n")


def test_they_are_sent_again(house: House) -> None:
    house.redis.client.lpush(UNDECODABLE, "?")
    raw, _, kept_none, empty, newer, _ = house.keep(
        letter("good"),
        letter("long", None),
        letter("empty", '{"id": "empty"}'),
        letter("newer", options='{"version": 99}'),
        letter("gone", GOOD.replace("good", "gone")),
    )
    purge(house.redis.client, Settings(), ["gone"])
    house.redis.client.xadd(
        DEAD_LETTERS, {"id": "", "letter": letter(None, GOOD.replace("good", "gone")).model_dump_json()}
    )
    purged = [each.name for each in house.dead.all()][-1]
    status, said, complaints = house.run("retry", "--all")
    assert (status, said) == (1, "1 retried, 5 not retried and kept\n")
    reasons = [
        f"feedmill: {raw} not retried: ",
        f"feedmill: {kept_none} not retried: ",
        f"feedmill: {empty} not retried: title or body must contain text",
        f"feedmill: {newer} not retried: version: ",
        f"feedmill: {purged} not retried: post gone was purged",
    ]
    lines = complaints.splitlines()
    assert len(lines) == len(reasons)
    assert all(line.startswith(reason) for line, reason in zip(lines, reasons, strict=True)), lines
    assert [each.name for each in house.dead.all()] == [raw, kept_none, empty, newer, purged]
    assert queue_depth(house.redis.client, "feedmill").waiting == 1
    (waiting,) = map(json.loads, house.redis.client.lrange("feedmill", 0, -1))
    assert waiting["headers"]["kwargsrepr"] == "{'posts': <1 post: good>, 'top_k': 2}"


def test_options_that_were_not_kept(house: House) -> None:
    (name,) = house.keep(letter("good", options=None))
    complaint = f"feedmill: {name} not retried: the options were too long to store\n"
    assert house.run("retry", name) == (1, "0 retried, 1 not retried and kept\n", complaint)


def test_each_goes_back_to_the_queue_that_it_came_out_of(house: House) -> None:
    names = house.keep(letter("good"), letter("good", queue="feedmill"), letter("good", queue="feedmill-other"))
    assert len(names) == 2, "another model's letter is another letter; the default queue's is not"
    assert "queue      feedmill-other\n" in house.run("show", names[1])[1]
    assert house.run("retry", "--all") == (0, "2 retried\n", "")
    for queue in ("feedmill", "feedmill-other"):
        (sent,) = map(json.loads, house.redis.client.lrange(queue, 0, -1))
        assert sent["headers"]["kwargsrepr"] == "{'posts': <1 post: good>, 'top_k': 2}"
    house.keep(letter("good", queue="feedmill-other"))
    assert house.dead.count() == 1, "should it fail again, that is another letter"


def test_one_is_sent_again_by_its_posts_id(house: House) -> None:
    house.keep(letter("a1"), letter("b1"))
    assert house.run("retry", "a1", "nobody") == (
        1,
        "1 retried\n",
        "feedmill: no dead letter matches nobody\n",
    )
    (left,) = house.dead.all()
    assert isinstance(left, Entry)
    assert left.post_id == "b1"


def test_what_cannot_be_sent_to_the_queue_stays(house: House) -> None:
    names = house.keep(letter("a1"))
    house.redis.client.set("feedmill", "in the way")
    assert house.run("retry", "--all")[0] != 0
    assert [each.name for each in house.dead.all()] == names


def test_they_are_dropped(house: House) -> None:
    house.redis.client.lpush(UNDECODABLE, b"\xff", b"\xff", "?")
    same, again, other, first, second, _ = house.keep(letter("a1"), letter("a1", options=None), letter("b1"))
    assert same == again
    assert house.run("drop", "b1", "a1") == (
        2,
        "",
        f"feedmill: 2 dead letters match a1, so nothing was changed. Give the id of one: {first}, {second}.\n",
    )
    assert house.run("drop", first, "b1", same) == (0, "3 dropped\n", "")
    assert [each.name for each in house.dead.all()] == [other, second]
    assert house.run("drop", "--all") == (
        2,
        "",
        "feedmill: --all drops every dead letter permanently. Add --yes to confirm.\n",
    )
    assert house.run("drop", "--all", "--yes") == (0, "2 dropped\n", "")
    assert house.dead.count() == 0


@pytest.mark.parametrize("arguments", [["retry"], ["drop", "--all", "x"]], ids=" ".join)
def test_which_ones_has_to_be_said(house: House, arguments: list[str]) -> None:
    words = "feedmill: Select dead letters: give ids, as `feedmill dead list` shows them, or --all.\n"
    assert house.run(*arguments) == (2, "", words)
