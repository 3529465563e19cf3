"""Values that producers may write never make a function loop, or fail for good.

They may write feedmill:sent-marks, its generations, feedmill:run:* and feedmill:runs. Whatever
stands there, posts are sent and stored, and other users' commands work.
"""

import pytest
from redis import Redis

from feedmill.producers import push
from feedmill.producers.push import SENT, Mark
from feedmill.shared import runs
from feedmill.shared.keys import MARKS, RUN, RUNS
from feedmill.shared.messages import digest
from feedmill.shared.purge import forget
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.runs import Progress
from feedmill.shared.settings import Settings
from tests.integration.test_results import result
from tests.support import RedisServer

pytestmark = pytest.mark.each_redis

NUMBERS = ("inf", "-inf", "nan", "1e999", "-1", "0", "1.5", "17", "0x20", "9" * 400, "99999999999", "", "text", "\x00")
BUCKETS = (b"", b"x", b"x" * 13, b"\xff" * 12 * 40 + b"x", b"\x00" * 100_000)
MARKED = [Mark.of(f"t3_{number}", digest(str(number)), "r") for number in range(200)]


@pytest.fixture
def client(server: RedisServer) -> Redis:
    """A client that gives up on a function that loops, before Redis kills the test."""
    return Redis.from_url(server.url, decode_responses=True, socket_timeout=20)


def use_everything(client: Redis) -> None:
    """Send, store, count, bound and forget posts."""
    settings = Settings()
    store = ResultsStore(client, settings)
    push.mark_sent(client, MARKED, 86_400, 10**9, "r")
    assert push.lookup(client, MARKED) == [SENT] * len(MARKED)
    assert push.known_ids(client, [mark.post_id for mark in MARKED]) == {mark.post_id for mark in MARKED}
    post, classification = result("t3_1")
    stored = Result(
        post.model_copy(update={"run": "r"}), classification.model_copy(update={"fingerprint": digest("r")})
    )
    assert store.write([stored]) == 1
    assert store.get("t3_1")
    found = runs.progress(client, "r")
    assert isinstance(found, Progress)
    runs.recent(client, 10)
    assert forget(client, ["t3_0"]) == (1, 0)
    low = settings.model_copy(update={"results_memory": 8000})
    ResultsStore(client, low).write([result("another")])


@pytest.mark.parametrize("number", NUMBERS)
def test_any_table(server: RedisServer, client: Redis, number: str) -> None:
    server.client.set(MARKS, number)
    use_everything(client)


@pytest.mark.parametrize("ends", ["inf", "-inf", "0", "1e300", "now"])
def test_any_generations(server: RedisServer, client: Redis, ends: str) -> None:
    seconds, _ = server.client.time()
    score = float(seconds + 1.05 * 86_400 if ends == "now" else ends)
    names = [*NUMBERS, *(f"\xff{number}" for number in range(1000))]
    server.client.zadd(MARKS, dict.fromkeys(names, score))
    for number, name in enumerate(names[:20]):
        if number % 2:
            server.client.set(f"{MARKS}:{name}", "x")
        else:
            server.client.rpush(f"{MARKS}:{name}", "x")
    use_everything(client)


@pytest.mark.parametrize("records", BUCKETS)
def test_any_records_in_buckets(server: RedisServer, client: Redis, records: bytes) -> None:
    push.mark_sent(client, MARKED[:1], 86_400, 10**9)
    (key,) = server.client.scan_iter(f"{MARKS}:*")
    for mark in MARKED:
        server.client.hset(key, mark.content[:2], records)
    use_everything(client)


@pytest.mark.parametrize("number", NUMBERS)
def test_any_fields_of_a_run(server: RedisServer, client: Redis, number: str) -> None:
    names = ("sent", "stored", "failed", "began", "latest", "used", "columns")
    server.client.hset(RUN + "r", mapping=dict.fromkeys(names, number))
    server.client.zadd(RUNS, {"r": float("inf"), "another": float("-inf")})
    use_everything(client)
