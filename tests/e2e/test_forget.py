"""`feedmill forget`: afterwards no key, file, table or page holds the text of a forgotten post."""

import gzip
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
from celery import Celery
from redis import Redis

from feedmill.monitoring.flower_state import STATE_FILE
from feedmill.outcomes.copies import Copy, note_copy
from feedmill.shared.broker import (
    CLASSIFY_TASK,
    connect,
    queue_depth,
    queue_lists,
)
from feedmill.shared.messages import Post
from feedmill.shared.model_routing import announce
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from feedmill.teaching.answer_file import AnsweredPost, AnswerFile
from tests.e2e.test_acl import rules
from tests.e2e.test_delayed import as_protocol_1
from tests.e2e.test_flower import Visitor
from tests.fakes.standin_worker import RAISES
from tests.postgres import PostgresServer, postgres_folder
from tests.support import (
    Feedmill,
    RedisServer,
    feedmill,
    installed_redis,
    last_json,
    make_classification,
    reserve,
    running,
    shapes,
    standing_in,
    wait_until,
)

REDIS_CONF = Path(__file__).parent.parent.parent / "docker" / "redis.conf"
#: Text of the posts of a person, her name, and text of all others.
WORDS, AUTHOR = "Rhubarb and custard, she said", "Rosalind_Thimblewick"
OTHERS = "Nobody asked for these to go"
RUN = "monday"


@pytest.fixture(scope="module")
def database() -> Iterator[PostgresServer]:
    programs = postgres_folder()
    if programs is None:
        pytest.skip("needs PostgreSQL: apt install postgresql")
    server = PostgresServer(programs)
    yield server
    server.stop()


class Scene(NamedTuple):
    """A Redis with an append-only file, and folders with copies of its posts."""

    server: RedisServer
    #: A client that does not decode responses.
    raw: Any
    settings: Settings
    folder: Path
    environment: dict[str, str]

    def run(self, *arguments: str, stdin: str = "") -> Any:
        return feedmill(*arguments, cwd=self.folder, stdin=stdin, **self.environment)

    def forget(self, *arguments: str) -> dict[str, Any]:
        done = self.run("forget", *arguments, "--yes", "--json")
        assert not done.stderr, done.stderr
        return last_json(done.stdout)


@pytest.fixture
def scene(redis_path: str, tmp_path: Path) -> Iterator[Scene]:
    # Text would be undetectable in compressed files, and late in a file that is written every
    # second.
    configuration = REDIS_CONF.read_text().replace(
        "\nport 6379\n", "\nrdbcompression no\n"
    )
    redis_folder = tmp_path / "redis"
    redis_folder.mkdir()
    server = RedisServer(
        redis_path,
        redis_folder,
        configuration.replace("appendfsync everysec", "appendfsync always"),
    )
    environment = {
        "FEEDMILL_REDIS_URL": server.url,
        "FEEDMILL_DATA_FOLDER": str(tmp_path / "data"),
        "FEEDMILL_FLOWER_PASSWORD": "a-password-of-flower",
        "TMPDIR": str(tmp_path / "temporary"),
    }
    (tmp_path / "temporary").mkdir()
    settings = Settings.model_validate(
        {"redis_url": server.url, "data_folder": tmp_path / "data"}
    )
    raw = Redis.from_url(server.url)
    try:
        yield Scene(server, raw, settings, tmp_path, environment)
    finally:
        raw.close()
        server.stop()


def post(post_id: str, **fields: Any) -> dict[str, Any]:
    """Return a post as senders send it: of the person, if its id begins with t3_h."""
    is_hers = post_id.startswith("t3_h")
    words = WORDS if is_hers else OTHERS
    author = AUTHOR if is_hers else "somebody_else"
    return {
        "id": post_id,
        "title": f"{words} ({post_id})",
        "body": f"{words}. " * 5,
        "subreddit": "Puddings" if is_hers else "python",
        "extra": {"author": author, "customer": "4711" if is_hers else "1"},
        **fields,
    }


def stock(scene: Scene, queue: str = "feedmill", **options: Any) -> Celery:
    app = Celery(
        broker=scene.server.url, backend=scene.server.url, set_as_current=False
    )
    app.conf.broker_transport_options = options
    app.conf.task_default_queue = queue
    return app


def send(app: Celery, *ids: str, **options: Any) -> Any:
    posts = [post(post_id, run=RUN) for post_id in ids]
    return app.send_task(CLASSIFY_TASK, kwargs={"posts": posts}, **options)


def as_waiting(scene: Scene) -> None:
    """Put messages where no worker reads them: lists of all priorities of a queue without a
    worker, its reserved messages, and the list of a sender with another separator.
    """
    app = stock(scene, "feedmill-other")
    announce(connect(scene.settings), "feedmill-other", "another model")
    for priority in (0, 3, 6, 9):
        send(app, "t3_hwait", "t3_owait", priority=priority)
    send(app, "t3_hheld", "t3_oheld", priority=0)
    lists = queue_lists("feedmill-other")
    assert reserve(connect(scene.settings), lists, "gone-worker", limit=1) == 1
    with stock(scene, "feedmill-other", sep=":") as other:
        send(other, "t3_hsep", "t3_osep", priority=6)
    app.close()


def protocol_1(scene: Scene, *ids: str) -> None:
    """Queue a delayed message in the form of clients that write protocol 1."""
    eta = datetime.now(UTC) + timedelta(hours=1)
    as_protocol_1(scene.server, eta)
    message = json.loads(scene.raw.lpop("feedmill"))
    body = json.loads(message["body"])
    body["kwargs"]["posts"] = [post(post_id, run=RUN) for post_id in ids]
    message["body"] = json.dumps(body)
    scene.raw.lpush("feedmill", json.dumps(message))


def fill(scene: Scene) -> None:
    """Classify posts with a worker, and leave others as dead letters, delayed, waiting, held."""
    protocol_1(scene, "t3_hone", "t3_oone")
    with (
        standing_in(scene.server, scene.folder, **scene.environment) as worker,
        running(
            "flower", "--port", "0", cwd=scene.folder, **scene.environment
        ) as flower,
        stock(scene) as app,
    ):
        wait_until(lambda: worker.says("ready."), "the worker is ready")
        wait_until(lambda: flower.says("Flower at"), "Flower runs")
        visitor = visitor_of(scene, flower)
        wait_until(
            lambda: visitor.json("/?json=1")["data"], "Flower hears of the worker"
        )
        send(app, "t3_hdue", "t3_odue", countdown=3600)
        result = send(app, "t3_hdone", "t3_odone")
        result.get(timeout=120)
        title = f"{WORDS} {RAISES}"
        failing = [post("t3_hdead", title=title), post("t3_odead", title=RAISES)]
        failed = app.send_task(CLASSIFY_TASK, kwargs={"posts": failing})
        wait_until(failed.ready, "the message failed")
        wait_until(
            lambda: queue_depth(scene.server.client, "feedmill").delayed == 2,
            "two messages are delayed",
        )
        wait_until(lambda: "t3_hdone" in str(visitor.tasks()), "Flower shows the posts")
        flower.end()
    as_waiting(scene)


def visitor_of(scene: Scene, flower: Feedmill) -> Visitor:
    address = re.search(r"Flower at (http\S+)", flower.text())
    assert address
    return Visitor(address[1], scene.environment["FEEDMILL_FLOWER_PASSWORD"])


def export(scene: Scene, *destinations: str) -> None:
    for destination in destinations:
        # a folder of parts needs its format
        form = ["--format", "parquet"] if destination == "parts" else []
        done = scene.run("export", destination, "--run", RUN, *form)
        assert done.returncode == 0, done.stderr


def copy_posts(scene: Scene) -> None:
    """Store answers, in the web server's folder and in one of `feedmill label`, and a dropped
    file.
    """
    labelled = scene.folder / "labelled"
    note_copy(scene.settings, Copy(kind="answers", place=str(labelled)))
    for folder in (scene.settings.data_folder / "answers", labelled):
        answers = []
        for post_id in ("t3_hdone", "t3_odone"):
            answer = AnsweredPost(
                post=Post.parse(post(post_id)), label="food", why="", fits_none=False
            )
            answers.append(answer)
        AnswerFile(folder).put(answers)
    dropped = scene.folder / "temporary" / "feedmill-web-abc"
    dropped.mkdir()
    (dropped / "hers").write_text(json.dumps(post("t3_hdone")))
    (dropped / "others").write_text(json.dumps(post("t3_odone")))


def places_of(scene: Scene, words: str) -> set[str]:
    """Return the keys and files that contain the text, deleted bytes and packed files included."""
    contents: dict[str, bytes] = {}
    for key in scene.raw.scan_iter():
        contents[str(key)] = scene.raw.dump(key) or b""
    for path in scene.folder.rglob("*"):
        if not path.is_file() or path.suffix == ".log":
            continue
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        elif path.suffix == ".parquet":
            content = str(pq.read_table(path).to_pylist()).encode()
        contents[str(path)] = content
    found = set()
    for place, content in contents.items():
        if any(shape in content for shape in shapes(words)):
            found.add(place)
    return found


def rewrite(scene: Scene) -> None:
    """Rewrite the append-only file, as docs/security.md says, without a redis-cli."""
    done = scene.run("redis", "BGREWRITEAOF")
    assert done.returncode == 0, done.stderr

    def is_rewritten() -> bool:
        state = scene.raw.info("persistence")
        return not (state["aof_rewrite_in_progress"] or state["aof_rewrite_scheduled"])

    wait_until(is_rewritten, "the append-only file is rewritten")


def shown_by_flower(scene: Scene) -> str:
    text = (scene.settings.data_folder / STATE_FILE).read_text()
    return str([task.get("kwargs") for task in json.loads(text)["tasks"]])


def test_no_copy_of_a_forgotten_posts_text_remains(
    scene: Scene, database: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", database.url.split(":")[2].split("@")[0])
    fill(scene)
    export(scene, "a.csv", "a.jsonl.gz", "a.parquet", "parts", database.url)
    copy_posts(scene)
    before = places_of(scene, WORDS)
    # both streams, held and delayed messages, five lists, the append-only file, four exports, two
    # files of answers and a dropped file
    assert len(before) >= 2 + 2 + 5 + 1 + 4 + 2 + 1
    assert len(places_of(scene, AUTHOR)) >= len(before) - 2
    assert "t3_hdone" in shown_by_flower(scene)
    kept = places_of(scene, OTHERS)
    preview = scene.run("forget", "--author", f"/u/{AUTHOR.lower()}", "--dry-run")
    assert preview.returncode == 0, preview.stderr
    assert "would forget 7 posts" in preview.stdout
    assert places_of(scene, WORDS) == before

    outcome = scene.forget("--author", f"/u/{AUTHOR.lower()}")

    assert sorted(outcome["ids"]) == [
        "t3_hdead", "t3_hdone", "t3_hdue", "t3_hheld", "t3_hone", "t3_hsep", "t3_hwait",
    ]  # fmt: skip
    assert outcome["counts"]["exported_rows"] == 5
    assert outcome["counts"]["messages"] == 4 + 1 + 1 + 2
    assert outcome["counts"]["answers"] == 2
    assert outcome["counts"]["uploads"] == 1
    rewrite(scene)
    assert places_of(scene, WORDS) == set()
    assert places_of(scene, AUTHOR) == set()
    assert "t3_hdone" not in shown_by_flower(scene)
    assert "t3_odone" not in shown_by_flower(scene)  # shown in the same message
    assert places_of(scene, OTHERS) >= {place for place in kept if "b'" in place}
    rows = database.rows("SELECT id FROM feedmill_results ORDER BY id")
    assert rows == [("t3_odone",)]
    for path in ("a.csv", "a.jsonl.gz", "a.parquet", "parts"):
        done = scene.run("export", path, "--purge", "--json")
        assert last_json(done.stdout) == {"removed": 0}
    # a worker answers for a message without the post, and the others are classified
    again = scene.run("forget", "--author", AUTHOR, "--yes")
    assert (again.returncode, again.stdout) == (1, "nothing found\n")


@pytest.mark.system_redis
def test_works_with_a_workers_permissions(tmp_path: Path) -> None:
    """docker/users.conf has no user of its own for deletions."""
    path = installed_redis()
    if path is None:
        pytest.skip("needs a redis-server of the system: apt install redis-server")
    users = rules(worker="w-secret", producer="p", reader="r", web="w")
    server = RedisServer(path, tmp_path, users)
    environment = {
        "FEEDMILL_REDIS_URL": f"redis://worker:w-secret@127.0.0.1:{server.port}/0",
        "FEEDMILL_DATA_FOLDER": str(tmp_path / "data"),
    }

    def forget(*arguments: str) -> tuple[int, str, str]:
        done = feedmill("forget", *arguments, cwd=tmp_path, **environment)
        return done.returncode, done.stdout, done.stderr

    try:
        settings = Settings.model_validate({"redis_url": server.url})
        store = ResultsStore(server.client, settings)
        posts = [Post.parse(post(post_id)) for post_id in ("t3_1abc", "t3_1abd")]
        store.write([Result(each, make_classification(each.id)) for each in posts])
        outcome = json.dumps({"result": [{"id": "t3_1abc", "label": "x"}]})
        server.client.set("celery-task-meta-1", outcome, ex=60)
        server.client.zadd("celery-taskset-meta-1.j", {outcome: 1})
        status, text, _ = forget("t3_1abx")
        assert status == 1
        question, _, similar = text.strip().partition("; did you mean ")
        assert question == "nothing found about t3_1abx"
        assert sorted(similar.strip("?").split(", ")) == ["t3_1abc", "t3_1abd"]
        status, text, problem = forget("1ABC", "--note", "request 17")
        assert (status, problem) == (0, "")
        assert text.startswith("nothing is stored as 1ABC: taken as t3_1abc\n")
        assert "\nt3_1abc forgotten (" in text
        assert "stored results: 1" in text
        assert "Celery results: 2" in text
        assert "blocked for 365 days" in text
        status, text, _ = forget("t3_1abc")
        assert status == 1
        assert "t3_1abc was deleted on 20" in text
        status, text, _ = forget("--list")
        assert (status, text.count("\n"), "request 17" in text) == (0, 1, True)
        status, text, _ = forget("--list", "--json")
        log = tmp_path / "exported.jsonl"
        log.write_text(text)
        store.write([Result(posts[0], make_classification("t3_1abc"))])
        server.client.flushdb()  # as in a backup of before
        store.write([Result(posts[0], make_classification("t3_1abc"))])
        status, text, problem = forget("--replay", str(log), "--yes")
        assert (status, problem) == (0, "")
        assert "stored results: 1" in text
        assert server.client.acl_log() == []
        for wrong, words in (
            (["--list", "t3_1abc"], "--list"),
            (["--replay", str(tmp_path / "none")], "no deletions"),
            ([], "Give what to forget"),
            (["--column", "x", "t3_1abc"], "--from"),
        ):
            status, _, problem = forget(*wrong)
            assert (status, words in problem) == (2, True), problem
    finally:
        server.stop()
