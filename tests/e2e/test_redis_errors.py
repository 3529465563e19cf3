"""Every error that Redis, or what answers in its place, may give at any command of Feedmill."""

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import feedmill
from feedmill.cli.main import application
from feedmill.shared import logs
from feedmill.shared.broker import connect
from feedmill.shared.errors import RedisUnavailable
from feedmill.shared.messages import DeadLetter, Post
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from tests import support
from tests.fakes.failing_redis import (
    ANSWERS,
    BUSY,
    GREETINGS,
    HTTP,
    LOADING,
    NOPERM,
    Answer,
    FailingRedis,
)
from tests.support import RedisServer, long_cases, wait_until

#: Commands that use Redis, and end by themselves, one of each kind: that read, send, remove, wait
#: and report.
USUAL_COMMANDS = [
    "health --json", "results --group readers", "purge --run r --yes", "dead retry --all",
    "enqueue posts.jsonl --run r --again --keep row", "export out.jsonl", "deploy",
]  # fmt: skip
#: The others, with other options.
FURTHER_COMMANDS = [
    "status --run r", "results p1", "report out.html", "purge p1", "dead list", "ingest gaps",
    "status", "status --json", "health", "results", "results --run r",
    "enqueue posts.jsonl --run r", "enqueue posts.jsonl --no-run", "purge p1 --lift",
    "purge --queue feedmill --yes", "dead list d1", "dead drop d1", "dead drop --all --yes",
    "export out.parquet --run r", "export out --format csv", "export labels.jsonl --purge",
    "ingest gaps --clear", "deploy --reset",
]  # fmt: skip
#: Those that wait until Redis answers again, once it has answered.
RETRYING = ("results --group readers",)
#: Numbers of commands before the one that fails. A client's first five log in.
PLACES = (6, 12, 28)


@pytest.fixture(scope="module")
def failing(redis_server: RedisServer) -> Iterator[FailingRedis]:
    proxy = FailingRedis(redis_server.port)
    yield proxy
    proxy.stop()


@pytest.fixture
def settings(failing: FailingRedis, redis: RedisServer) -> Settings:
    failing.heal()
    return Settings.model_validate(
        {"redis_url": redis.url.replace(str(redis.port), str(failing.port))}
    )


@pytest.fixture
def house(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Settings:
    """A working folder, and a result, a dead letter and a waiting message for each command to
    find.
    """
    monkeypatch.setattr(logs, "configure", lambda *_, **__: None)
    monkeypatch.setenv("FEEDMILL_REDIS_URL", settings.broker_url)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "posts.jsonl").write_text(
        '{"id": "p1", "title": "The keeper saved two penalties", "row": 7}\n'
    )
    fill(settings)
    assert invoke("export labels.jsonl").exit_code == 0
    return settings


def fill(settings: Settings) -> None:
    with connect(settings) as redis:
        redis.flushall()
        store = ResultsStore(redis, settings)
        letter = DeadLetter(
            id="d1", reason="refused", post='{"id": "d1", "title": "a title"}', options="{}",
            message=None, worker="w",
            failed_at=time.time(), payload=None,
        )  # fmt: skip
        store.write(
            [
                feedmill.Result(
                    Post(id="p1", title="a", run="r"), support.make_classification("p1")
                )
            ],
            [letter],
        )
        support.push(settings, [Post(id="p2", title="a title", run="r")])


def invoke(command: str) -> Result:
    """Run a command in this process."""
    name, *arguments = command.split()
    return CliRunner().invoke(application(name), [name, *arguments])


def check(
    error: BaseException | None, answer: Answer, settings: Settings, where: object
) -> None:
    """Check the error that users read: where it failed and what to do, in one line and without
    advice on TLS.
    """
    assert isinstance(error, RedisUnavailable), f"{where}: {error!r}"
    said = str(error)
    assert said.startswith(f"Redis at {settings.redis_address} "), where
    assert all(word in said for word in answer.words), (where, said)
    assert support.PASSWORD not in said, where
    assert "\n" not in said, where
    assert ("rediss://" in said) == ("rediss://" in answer.words), (where, said)


def check_command(command: str, answer: Answer, settings: Settings) -> None:
    check_result(command, invoke(command), answer, settings)


def check_result(
    command: str, result: Result, answer: Answer, settings: Settings
) -> None:
    where = (command, answer.line)
    if not command.startswith("health"):
        check(result.exception, answer, settings, where)
        return
    assert result.exit_code == 1, where
    if "--json" in command:
        said = json.loads(result.output)["checks"][0]["said"]
    else:
        said = result.output.removeprefix("✗ redis").strip()
    check(RedisUnavailable(said), answer, settings, where)


@pytest.mark.parametrize("command", [*USUAL_COMMANDS, *long_cases(*FURTHER_COMMANDS)])
def test_a_command_explains_each_answer(
    house: Settings, failing: FailingRedis, command: str
) -> None:
    for answer in ANSWERS:
        failing.fail(answer)
        check_command(command, answer, house)
    for answer in GREETINGS:
        failing.greet(answer.reply)
        check_command(command, answer, house)
    failing.greet(b"")
    check_command(command, Answer(b"", ("ends the connection", "rediss://")), house)


@pytest.mark.parametrize(
    "command",
    [
        *(command for command in USUAL_COMMANDS if command not in RETRYING),
        *long_cases(*FURTHER_COMMANDS),
    ],
)
def test_a_command_explains_an_answer_in_its_middle(
    house: Settings, failing: FailingRedis, command: str
) -> None:
    """Failing at each of several places, until the command ends before the next one."""
    for answer in (BUSY, HTTP):
        for before in PLACES:
            failing.heal()
            fill(house)
            failing.fail(answer, before)
            result = invoke(command)
            if failing.commands <= before:
                break
            check_result(command, result, answer, house)


@pytest.mark.filterwarnings("ignore:No worker serves")
def test_python_explains_each_answer(house: Settings, failing: FailingRedis) -> None:
    submitted = feedmill.submit(["a text"])
    for answer in ANSWERS:
        failing.fail(answer)
        calls: tuple[Callable[[], object], ...] = (
            submitted.progress,
            partial(feedmill.submit, ["a text"]),
            partial(list, feedmill.results(follow=False)),
        )
        for call in calls:
            with pytest.raises(RedisUnavailable) as raised:
                call()
            check(raised.value, answer, house, (call, answer.line))


#: A live source with a new post for each turn.
SOURCE = """
from itertools import count
from time import time
from feedmill.producers.live.source import Event, Pause, Source

class Endless(Source):
    name = "endless"

    def __init__(self, settings, clock):
        pass

    def events(self, cursor):
        for number in count((cursor or 0) + 1):
            yield Event(number, time(), {"id": f"e{number}", "title": "a title"})
            yield Pause(0.1)
"""
#: Commands that run until they are stopped.
SERVICES = [
    "results --follow", "results --follow --group readers --from-start",
    "export out --format jsonl --follow --part-seconds 0.1", "ingest live endless:Endless",
    "worker --name w",
]  # fmt: skip


class Service:
    """A running service, and signs that it works. direct: settings of the Redis behind the failing
    one.
    """

    def __init__(
        self, command: str, running: support.Feedmill, direct: Settings, folder: Path
    ) -> None:
        self.kind = command.partition(" ")[0]
        self.running = running
        self._direct = direct
        self._folder = folder
        self._redis = connect(direct)
        self._store = ResultsStore(self._redis, direct)

    def wait_until_it_works(self, post_id: str) -> None:
        """Give it a post or a result, and wait until it has read it."""
        sent = self._redis.llen("feedmill")
        if self.kind == "worker":
            support.push(self._direct, [Post(id=post_id, title="a title")])
        elif self.kind != "ingest":
            result = feedmill.Result(
                Post(id=post_id, title="a title"), support.make_classification(post_id)
            )
            self._store.write([result])

        def works() -> bool:
            if self.kind == "ingest":
                return self.running.lives() and self._redis.llen("feedmill") > sent
            if self.kind == "worker":
                return self.running.lives() and self._store.get(post_id) != []
            if self.kind == "export":
                parts = self._folder.glob("out/*/part-*")
                return self.running.lives() and any(
                    post_id in part.read_text() for part in parts
                )
            return self.running.says(post_id)

        wait_until(works, f"it reads {post_id}")

    def wait_until_it_waits(self, why: Answer) -> None:
        said = self.running.text().count("etrying")
        wait_until(
            lambda: self.running.says("etrying", said + 1),
            f"it waits after {why.line!r}",
        )


@pytest.mark.parametrize("command", SERVICES)
def test_a_service_waits_for_redis(
    house: Settings,
    failing: FailingRedis,
    redis: RedisServer,
    tmp_path: Path,
    command: str,
) -> None:
    """From its first command on, and later."""
    (tmp_path / "endless.py").write_text(SOURCE)
    direct = Settings.model_validate({"redis_url": redis.url})
    environment = {"FEEDMILL_REDIS_URL": house.broker_url, "PYTHONPATH": str(tmp_path)}
    failing.fail(BUSY)
    with support.running(*command.split(), cwd=tmp_path, **environment) as running:
        wait_until(lambda: running.says("etrying"), "it waits for its first answer")
        failing.heal()
        service = Service(command, running, direct, tmp_path)
        service.wait_until_it_works("w0")
        for number, answer in enumerate((BUSY, LOADING, HTTP), 1):
            failing.fail(answer)
            service.wait_until_it_waits(answer)
            failing.heal()
            service.wait_until_it_works(f"w{number}")
        assert "Traceback" not in running.text()


def test_a_refused_service_ends(
    house: Settings, failing: FailingRedis, tmp_path: Path
) -> None:
    """Waiting does not help where Redis will never accept a command."""
    with support.running(
        "results", "--follow", cwd=tmp_path, FEEDMILL_REDIS_URL=house.broker_url
    ) as service:
        wait_until(lambda: failing.commands > 5, "the service reads")
        failing.fail(NOPERM)
        assert service.process.wait(120) == 2
    assert all(word in service.text() for word in NOPERM.words)
    assert "Traceback" not in service.text()
