"""Hostile messages, of which none may end a worker or vanish: `python -m tests.fuzz --messages N --seed X`.

One message in ten goes into the queue of a real worker with a stand-in for its model; after each batch a good message
must be answered, by the same process. The others are read in this process as a worker reads them. `--engine atheris`
has coverage guide what is read; it does without the worker, and atheris must be installed.

What may become of a message: its element is set aside (`undecodable`); its id has a dead letter (`dead`), a result of
Celery's (by its state), a stored classification (`stored`), or a place among those that wait for later (`waits`); or
the worker says that it is a dead letter, where there is one of the same posts, or where it has no id (`told`). One
whose id or `ignore_result` was changed cannot be found again (`unnamed`). Any other has vanished. The last line is
JSON; exit status 1 where a message vanished.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import randrange
from tempfile import TemporaryDirectory
from typing import Any

from celery import Celery
from hypothesis import HealthCheck, Phase, given, seed, settings
from kombu.exceptions import ContentDisallowed, DecodeError

from shared.broker import HELD, SENT_AT, shown_arguments
from shared.errors import RequestRefused
from shared.keys import CELERY_RESULTS, DEAD_LETTERS, result_key
from shared.leases import MAX_UNDECODABLE_BYTES, lapsed
from shared.transport import Channel, UndecodableError, decoded
from tests.fakes.hostile_messages import HOSTILE, Hostile
from tests.support import Process, RedisServer, redis_servers, start, wait_until
from workers.message import Message
from workers.task import named

ROOT = Path(__file__).parent.parent
#: Messages between two good ones.
BATCH = 200
#: Elements that atheris begins with, at most, and bytes of one that it tries, at most.
SEEDS, LONGEST_GUIDED = 500, 4096
#: What a worker says of a message that no task can take.
TOLD = re.compile(r"message (\S+) is a dead letter")
#: The only time to come that is ever drawn: a message with it for its ETA waits.
FUTURE = b"9999-12-31"


def generate(messages: int, number: int, take: Callable[[Hostile], object]) -> None:
    """Draw so many, by this seed, and have them taken."""

    @seed(number)
    @settings(
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


def read(element: bytes) -> str:
    """Read an element as a worker does, up to its dead letters; returns how far it came. Raises what must not be."""
    lapsed(element)
    try:
        found = decoded(element)
        found["properties"]["delivery_tag"] = "tag"
        message = Channel.Message(found, channel=Channel.__new__(Channel), accept={"application/json"})
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
        shown_arguments(kwargs)
    asked = Message(named(args, kwargs), message.headers.get(SENT_AT))
    try:
        for index, post in enumerate(asked.read()):
            asked.settle(index, post)  # type: ignore[arg-type]  # a post that is good stands for its outcome
    except RequestRefused as refused:
        asked.refused = refused
    for letter in asked.dead_letters("worker", 0.0):
        letter.model_dump_json()
    return "refused by us" if asked.failed() else "good"


class Served:
    """A real worker on a redis-server of its own."""

    def __init__(self, redis: RedisServer, worker: Process, log: Path) -> None:
        self._redis, self._worker, self._log = redis.client, worker, log
        self._app = Celery("elsewhere", broker=redis.url, backend=redis.url, set_as_current=False)
        self._app.conf.task_default_queue = "feedmill"
        self._sent = 0
        self.fates: Counter[str] = Counter()
        self.vanished: list[str] = []

    def revoke_a_stamp(self) -> None:
        """Have the worker look at stamps, which it does once any was revoked."""
        assert self._app.control.revoke_by_stamped_headers({"user": "revoked"}, reply=True, timeout=5, limit=1)

    def take(self, batch: Sequence[Hostile]) -> None:
        """Put them into the queue, see a good one answered, and find out what became of each."""
        elements = {f"h{self._sent + number:09d}": each for number, each in enumerate(batch)}
        written = {task_id: each.element(task_id) for task_id, each in elements.items()}
        self._sent += len(batch)
        said = len(self._log.read_text())
        self._redis.lpush("feedmill", *written.values())
        posts = [{"id": "good", "title": f"after {self._sent}"}]
        asked = self._app.send_task("feedmill.classify", kwargs={"posts": posts})
        wait_until(lambda: self._lives() and asked.ready(), "a good message is answered")
        assert "label" in asked.get()[0]
        wait_until(lambda: self._lives() and self._is_done(), "all of the batch is dealt with")
        told = Counter(TOLD.findall(self._log.read_text()[said:]))
        lost = []
        for task_id, fate in self._fates(written):
            if fate or told[task_id]:
                self.fates[fate or "told"] += 1
            elif not _is_named(written[task_id], task_id):
                self.fates["unnamed"] += 1
            else:
                lost.append(f"{elements[task_id].kind}: {written[task_id][:2000]!r}")
        nameless = min(told["None"], len(lost))
        self.fates["told"] += nameless
        self.vanished += lost[nameless:]
        self._redis.delete(HELD["undecodable_key"], DEAD_LETTERS)

    def _fates(self, written: dict[str, bytes]) -> Iterator[tuple[str, str | None]]:
        aside = set(self._raw("LRANGE", HELD["undecodable_key"], 0, -1))
        waiting = set(self._raw("HVALS", HELD["reserved_key"]))
        entries: Any = self._redis.xrange(DEAD_LETTERS)
        letters = [json.loads(fields["letter"]) for _, fields in entries]
        dead = {letter[name] for letter in letters for name in ("message", "id")}  # its post bears the message's id
        results: Any = self._redis.mget([CELERY_RESULTS.replace("*", task_id) for task_id in written])
        for (task_id, element), result in zip(written.items(), results, strict=True):
            if element[:MAX_UNDECODABLE_BYTES] in aside:
                yield task_id, "undecodable"
            elif result:
                yield task_id, json.loads(result)["status"]
            elif task_id in dead:
                yield task_id, "dead"
            elif self._redis.exists(result_key(task_id)):
                yield task_id, "stored"
            else:
                yield task_id, "waits" if element in waiting else None

    def _raw(self, *command: Any) -> Any:
        """The answer in bytes: not all of it is UTF-8."""
        redis: Any = self._redis
        return redis.execute_command(*command, NEVER_DECODE=True)

    def _lives(self) -> bool:
        assert self._worker.poll() is None, f"the worker ended: {self._log.read_text()[-6000:]}"
        return True

    def _is_done(self) -> bool:
        waiting = sum(
            self._redis.llen(name) for name in self._redis.keys("feedmill*") if "\x06" in name or name == "feedmill"
        )
        return not waiting and all(FUTURE in element for element in self._raw("HVALS", HELD["reserved_key"]))


def _is_named(element: bytes, task_id: str) -> bool:
    """Whether what becomes of it can be told by its id."""
    try:
        found = json.loads(element)
        return found["headers"].get("id", task_id) == task_id and found["headers"].get("ignore_result") in (False, None)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return True


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    redis = RedisServer(next(iter(redis_servers().values())), folder)
    environment = {"FEEDMILL_REDIS_URL": redis.url, "FEEDMILL_TOKEN_BUDGET": "2048"}
    log = folder / "worker.log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "tests.fakes.standin_worker", "standin"]
        worker = start(command, ROOT, os.environ | environment, output)
    try:
        served = Served(redis, worker, log)
        wait_until(lambda: served._lives() and " ready." in log.read_text(), "the worker is ready")
        served.revoke_a_stamp()
        yield served
        worker.terminate()
        assert worker.wait(60) == 0, log.read_text()[-6000:]
    finally:
        worker.kill()
        worker.wait()
        redis.stop()


def run(messages: int, number: int, folder: Path) -> dict[str, Any]:
    """The whole test: what the last line tells."""
    to_worker = max(1, messages // 10)
    outcomes: Counter[str] = Counter()
    generate(messages - to_worker, number, lambda each: outcomes.update([read(each.element("h000000000"))]))
    drawn: list[Hostile] = []
    generate(to_worker, number + 1, drawn.append)
    with serving(folder) as served:
        while batch := drawn[:BATCH]:
            del drawn[:BATCH]
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


def run_atheris(messages: int, number: int, folder: Path) -> dict[str, Any]:
    """Reads as many in a process of its own, which begins with what hypothesis draws: the library ends its process."""
    corpus = folder / "corpus"
    corpus.mkdir()
    drawn: list[bytes] = []
    generate(SEEDS, number, lambda each: drawn.append(each.element("h000000000")))
    for place, element in enumerate(drawn):
        if len(element) <= LONGEST_GUIDED:
            (corpus / f"{place}").write_bytes(element)
    limits = (f"-runs={messages}", f"-seed={number}", f"-max_len={LONGEST_GUIDED}", f"-artifact_prefix={folder}/")
    command = [sys.executable, "-m", "tests.fuzz_coverage", *limits, str(corpus)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    done = re.search(r"^Done (\d+) runs in (\d+) second", ended.stderr, re.MULTILINE)
    if ended.returncode or not done:
        raise AssertionError(ended.stderr[-6000:])
    covered = re.findall(r"\bcov: (\d+)", ended.stderr)
    return {"messages": int(done[1]), "seed": number, "seconds": int(done[2]), "covered": int(covered[-1])}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--engine", choices=["hypothesis", "atheris"], default="hypothesis")
    given_ = parser.parse_args(arguments)
    number = randrange(2**31) if given_.seed is None else given_.seed
    sys.stderr.write(f"seed {number}\n")
    with TemporaryDirectory(prefix="feedmill-fuzz-") as folder:
        engine = run if given_.engine == "hypothesis" else run_atheris
        found = engine(given_.messages, number, Path(folder))
    sys.stdout.write(json.dumps(found) + "\n")
    return 1 if found.get("vanished") else 0


if __name__ == "__main__":
    sys.exit(main())
