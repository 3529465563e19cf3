"""Fuzz test: hostile messages must neither crash a worker nor get lost
(`python -m tests.fuzz --messages N --seed X`).

One message in ten goes to a real worker with a stand-in model, which must still answer a valid
message after each batch, without a restart. The test process decodes the other messages with the
worker's code. A purge of another post must change no message, and a purge of a message's post must
leave none of its text in what can be read.

Fates of a message:

- a Celery state, such as `FAILURE`: Celery has a result for its id
- `dead`: a dead letter has its id
- `stored`: its classification is stored
- `waits`: it waits for its ETA
- `logged`: the worker logged a dead letter, because the message has no id or its posts already
  have a dead letter
- `untraceable`: its id or `ignore_result` was changed, so its fate cannot be found

Any other message has vanished. The last line is JSON. Exits 1 if a message vanished.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import randrange
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed
from hypothesis import settings as hypothesis_settings
from kombu.exceptions import ContentDisallowed, DecodeError

from feedmill.shared.broker import SENT_AT, TRANSPORT_KEYS, format_arguments
from feedmill.shared.encoding import UnreadableError
from feedmill.shared.errors import RequestRefused
from feedmill.shared.keys import DEAD_LETTERS
from feedmill.shared.purge import purge
from feedmill.shared.settings import Settings
from feedmill.shared.stored_messages import ids_in, without_posts
from feedmill.workers.pipeline.message import Message
from feedmill.workers.runtime.task import arguments_by_name
from feedmill.workers.transport.leases import (
    MAX_UNDECODABLE_BYTES,
    UndecodableError,
    count_delivery,
    decoded,
)
from feedmill.workers.transport.redis_transport import Channel
from tests.fakes.hostile_messages import HOSTILE, Hostile
from tests.support import (
    Feedmill,
    RedisServer,
    application,
    has_results,
    redis_servers,
    standing_in,
    wait_until,
)

#: Hostile messages per good message.
BATCH_SIZE = 200
#: The worker's log line about a message that no task can take.
LOGGED_DEAD = re.compile(r"message (\S+) is a dead letter")
#: The only future ETA that is generated. Messages with it wait.
FUTURE = b"9999-12-31"


def generate(messages: int, number: int, take: Callable[[Hostile], object]) -> None:
    """Pass generated messages to `take`. number: the seed."""

    @seed(number)
    @hypothesis_settings(
        max_examples=messages,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(HOSTILE)
    def each(hostile: Hostile) -> None:
        take(hostile)

    each()


def purge_copies(element: bytes, task_id: str) -> bool:
    """Purge copies of an element.

    Return whether a purge can read it. task_id: id of the message and of its post.
    """
    try:
        assert without_posts(element, {"unrelated"}) is None
        redacted = without_posts(element, {task_id})
    except UnreadableError:
        return False
    if redacted:
        left = redacted.message.encode()
        assert without_posts(left, {task_id}) is None
        assert not set(ids_in(left)) & redacted.ids
        read(left)
    return True


def read(element: bytes) -> str:
    """Decode an element like a worker, up to its dead letters.

    Return the outcome. Any exception is a bug.
    """
    count_delivery(element, lapse=True)
    try:
        found = decoded(element)
        found["properties"]["delivery_tag"] = "tag"
        message = Channel.Message(
            found, channel=Channel.__new__(Channel), accept={"application/json"}
        )
    except UndecodableError:
        return "undecodable"
    try:
        if message.errors:
            return "damaged"
        body = message.payload
    except (DecodeError, ContentDisallowed):
        return "refused"
    if isinstance(body, dict):
        body = [body.get("args"), body.get("kwargs"), None]
    if not isinstance(body, list) or len(body) != 3:
        return "no arguments"
    args, kwargs, _ = body
    if isinstance(kwargs, dict):
        format_arguments(kwargs)
    request = Message(arguments_by_name(args, kwargs), message.headers.get(SENT_AT))
    try:
        for index, post in enumerate(request.read()):
            request.set_outcome(index, post)  # type: ignore[arg-type]  # valid posts stand in for their outcomes
    except RequestRefused as refused:
        request.refused = refused
    for letter in request.dead_letters("worker", 0.0):
        letter.model_dump_json()
    return "refused by us" if request.refused or request.errors() else "good"


class Served:
    """A real worker with its own redis-server."""

    def __init__(self, redis: RedisServer, worker: Feedmill) -> None:
        self._redis, self._worker, self._app = redis.client, worker, application(redis)
        self._settings = Settings.model_validate({"redis_url": redis.url})
        self._sent = 0
        self.fates: Counter[str] = Counter()
        self.vanished: list[str] = []

    def revoke_a_stamp(self) -> None:
        """Revoke a stamp. Only then does the worker read the stamps of messages."""
        assert self._app.control.revoke_by_stamped_headers(
            {"user": "revoked"}, reply=True, timeout=5, limit=1
        )

    def take(self, batch: Sequence[Hostile]) -> None:
        """Send a batch, wait until a good message is answered, and record each message's fate."""
        elements = {
            f"h{self._sent + number:09d}": each for number, each in enumerate(batch)
        }
        written = {task_id: each.element(task_id) for task_id, each in elements.items()}
        self._sent += len(batch)
        logged = len(self._worker.text())
        self._redis.lpush("feedmill", *written.values())
        purge(self._redis, self._settings, ["unrelated"])
        posts = [{"id": "good", "title": f"after {self._sent}"}]
        result = self._app.send_task("feedmill.classify", kwargs={"posts": posts})
        wait_until(
            lambda: self._worker.lives() and result.ready(),
            "a good message is answered",
        )
        assert "label" in result.get()[0]
        wait_until(
            lambda: self._worker.lives() and self._is_done(),
            ("the whole batch is processed"),
        )
        logged_dead = Counter(LOGGED_DEAD.findall(self._worker.text()[logged:]))
        lost = []
        for task_id, fate in self._fates(written):
            if fate or logged_dead[task_id]:
                self.fates[fate or "logged"] += 1
            elif not _is_named(written[task_id], task_id):
                self.fates["untraceable"] += 1
            else:
                lost.append(f"{elements[task_id].kind}: {written[task_id][:2000]!r}")
        nameless = min(logged_dead["None"], len(lost))
        self.fates["logged"] += nameless
        self.vanished += lost[nameless:]
        self._redis.delete(DEAD_LETTERS)

    def _fates(self, written: dict[str, bytes]) -> Iterator[tuple[str, str | None]]:
        waiting = set(self._raw("HVALS", TRANSPORT_KEYS["delayed_key"]))
        entries: Any = self._redis.xrange(DEAD_LETTERS)
        letters = [json.loads(fields["letter"]) for _, fields in entries]
        dead = {
            letter[name] for letter in letters for name in ("message", "id")
        }  # the generated posts have the message's id
        unread = {letter["payload"] for letter in letters}
        results: Any = self._redis.mget(
            [f"celery-task-meta-{task_id}" for task_id in written]
        )
        for (task_id, element), result in zip(written.items(), results, strict=True):
            if result:
                yield task_id, json.loads(result)["status"]
            elif (
                task_id in dead
                or element[:MAX_UNDECODABLE_BYTES].decode("utf-8", "replace") in unread
            ):
                yield task_id, "dead"
            elif has_results(self._redis, task_id):
                yield task_id, "stored"
            else:
                yield task_id, "waits" if element in waiting else None

    def _raw(self, *command: Any) -> Any:
        """Return the raw reply, which may not be UTF-8."""
        redis: Any = self._redis
        return redis.execute_command(*command, NEVER_DECODE=True)

    def _is_done(self) -> bool:
        waiting = sum(
            self._redis.llen(name)
            for name in self._redis.keys("feedmill*")
            if "\x06" in name or name == "feedmill"
        )
        held = self._redis.hlen(TRANSPORT_KEYS["reserved_key"])
        delayed = self._raw("HVALS", TRANSPORT_KEYS["delayed_key"])
        return not (waiting or held) and all(FUTURE in element for element in delayed)


def _is_named(element: bytes, task_id: str) -> bool:
    """Return whether the message's fate can be found by its id."""
    try:
        found = json.loads(element)
        return found["headers"].get("id", task_id) == task_id and found["headers"].get(
            "ignore_result"
        ) in (False, None)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return True


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    redis = RedisServer(next(iter(redis_servers().values())), folder)
    try:
        with standing_in(redis, folder) as worker:
            wait_until(lambda: worker.says(" ready."), "the worker is ready")
            served = Served(redis, worker)
            served.revoke_a_stamp()
            yield served
            assert worker.end() == 0
    finally:
        redis.stop()


def run(messages: int, number: int, folder: Path) -> dict[str, Any]:
    """Run the test with hypothesis. Return the figures to print as JSON."""
    to_worker = max(1, messages // 10)
    outcomes: Counter[str] = Counter()

    def take(hostile: Hostile) -> None:
        element = hostile.element("h000000000")
        outcome = read(element)
        outcomes[outcome] += 1
        assert purge_copies(element, "h000000000") or outcome not in (
            "good",
            "refused by us",
        )

    generate(messages - to_worker, number, take)
    drawn: list[Hostile] = []
    generate(to_worker, number + 1, drawn.append)
    with serving(folder) as served:
        while batch := drawn[:BATCH_SIZE]:
            del drawn[:BATCH_SIZE]
            served.take(batch)
    for line in served.vanished[:10]:
        sys.stderr.write(f"vanished: {line}\n")
    return {
        "messages": messages,
        "seed": number,
        "read": dict(outcomes),
        "fates": dict(served.fates),
        "vanished": len(served.vanished),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=None)
    given_ = parser.parse_args(arguments)
    number = randrange(2**31) if given_.seed is None else given_.seed
    sys.stderr.write(f"seed {number}\n")
    with TemporaryDirectory(prefix="feedmill-fuzz-") as folder:
        found = run(given_.messages, number, Path(folder))
    sys.stdout.write(json.dumps(found) + "\n")
    return 1 if found["vanished"] else 0


if __name__ == "__main__":
    sys.exit(main())
