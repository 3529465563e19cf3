"""Reading many large dead letters from a real Redis in bounded memory."""

import time
import tracemalloc
from collections.abc import Callable

import pytest

from feedmill.cli import main
from feedmill.outcomes.dead_letters import DeadLetterStream
from feedmill.report import gather
from feedmill.shared.errors import UserError
from feedmill.shared.keys import DEAD_LETTERS
from feedmill.shared.messages import DeadLetter
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from tests.support import RedisServer, dead_letters

COUNT, BYTES = 400, 100_000
#: Maximum memory in bytes: a few pages of dead letters, as text and as objects. All dead letters
#: take 40 MB.
MEMORY = 12_000_000


@pytest.fixture
def redis(redis: RedisServer) -> RedisServer:
    """Fill Redis with dead letters of one post; the newest half failed within the last hour."""
    now = time.time()
    for number in range(COUNT):
        failed_at = now if number >= COUNT // 2 else 0.0
        letter = DeadLetter(
            id="same", reason=f"reason {number % 2}", post="x" * BYTES, options="{}",
            message=str(number), worker="w",
            failed_at=failed_at,
        )  # fmt: skip
        name = "*" if failed_at else f"1-{number + 1}"
        redis.client.xadd(DEAD_LETTERS, {"letter": letter.model_dump_json()}, id=name)
    return redis


def peak(read: Callable[[], object]) -> int:
    """Return Python's peak memory, in bytes, during the call."""
    tracemalloc.start()
    try:
        read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_report_pages_through_dead_letters(redis: RedisServer) -> None:
    report = []
    assert (
        peak(lambda: report.append(gather(redis.client, Settings(), hours=2))) < MEMORY
    )
    assert report[0].reasons == {"reason 0": COUNT // 4, "reason 1": COUNT // 4}


def test_finds_dead_letters_by_name_in_bounded_memory(redis: RedisServer) -> None:
    found: dict[str, list[str]] = {}
    dead = DeadLetterStream(redis.client)
    assert peak(lambda: found.update(dead.find(["same", "1-7", "other"]))) < MEMORY
    assert (len(found["same"]), found["1-7"], found["other"]) == (COUNT, ["1-7"], [])
    with pytest.raises(UserError, match=r"\b400\b.*\bsame\b"):
        dead.named(["same"])
    with pytest.raises(UserError, match=r"\bother\b"):
        dead.named(["1-7", "other"])
    assert [letter.name for letter in dead.named(["1-7", "1-7"])] == ["1-7"]


def test_lists_dead_letters_in_bounded_memory(
    redis: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FEEDMILL_REDIS_URL", redis.url)
    monkeypatch.setattr(
        "sys.argv", ["feedmill", "dead", "list", "--count", str(COUNT - 1)]
    )

    def run() -> None:
        with pytest.raises(SystemExit):
            main.run()

    assert peak(run) < MEMORY
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == COUNT - 1
    assert lines[0].endswith("reason 1")


def test_newest_returns_at_most_count_in_order(redis: RedisServer) -> None:
    names = [each.name for each in DeadLetterStream(redis.client).all()]
    for count in (1, 20, 21, 45, COUNT + 1):
        newest = [each.name for each in DeadLetterStream(redis.client).newest(count)]
        assert newest == names[max(0, COUNT - count) :]
    letters = dead_letters(ResultsStore(redis.client, Settings()), 45)
    assert [letter.message for letter in letters] == [
        str(number) for number in range(COUNT - 45, COUNT)
    ]
