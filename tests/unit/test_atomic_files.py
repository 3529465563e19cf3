"""shared/atomic_files.py: the old file or the new one, and no leftover."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from feedmill.shared.atomic_files import publish, replacing, temporary_path
from feedmill.shared.messages import Post
from feedmill.tables.posts import PostFile
from tests.support import ROOT


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "state.json"
    path.write_text("old")
    return path


def write(
    file: Path, durable: bool = False, error: BaseException | None = None
) -> None:
    with replacing(file, durable) as temporary:
        temporary.write_text("new")
        assert file.read_text() == "old"
        if error:
            raise error


@pytest.mark.parametrize("durable", [False, True])
def test_replaces_the_file_at_the_end_of_the_block(file: Path, durable: bool) -> None:
    write(file, durable)
    assert file.read_text() == "new"
    assert [*file.parent.iterdir()] == [file]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_an_error_keeps_the_old_file_and_leaves_no_other(
    file: Path, error: BaseException
) -> None:
    with pytest.raises(type(error)):
        write(file, error=error)
    assert file.read_text() == "old"
    assert [*file.parent.iterdir()] == [file]


def test_syncs_the_file_before_the_rename_and_the_folder_after_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, str]] = []

    def note(descriptor: int) -> None:
        synced.append(
            (str(Path(f"/proc/self/fd/{descriptor}").readlink()), file.read_text())
        )

    monkeypatch.setattr(os, "fsync", note)
    write(file, durable=True)
    assert synced == [(str(temporary_path(file)), "old"), (str(file.parent), "new")]
    synced.clear()
    file.write_text("old")
    write(file)
    assert synced == []


def test_new_files_get_the_permissions_of_the_umask(file: Path) -> None:
    file.unlink()
    left_over = temporary_path(file)
    left_over.touch()
    left_over.chmod(0o666)
    before = os.umask(0o077)
    try:
        with replacing(file) as temporary:
            temporary.write_text("new")
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_replaced_file_keeps_its_mode(file: Path) -> None:
    """Also while it is written: the temporary file is never readable by more users than the old
    file.
    """
    file.chmod(0o640)
    with replacing(file) as temporary:
        assert temporary.stat().st_mode & 0o077 == 0
        temporary.write_text("new")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("new", 0o640)
    left_over = temporary_path(file)
    left_over.write_text("complete")
    publish(left_over, file)
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("complete", 0o640)


def test_a_chosen_mode_replaces_that_of_the_file(file: Path) -> None:
    file.chmod(0o666)
    for path in (file, file.with_name("new.json")):
        with replacing(path, mode=0o600) as temporary:
            temporary.write_text("secret")
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
def test_a_replaced_file_keeps_its_owner(file: Path) -> None:
    os.chown(file, 1234, 5678)
    write(file)
    assert (file.stat().st_uid, file.stat().st_gid) == (1234, 5678)


#: A user, and two groups, that no system has by default.
BOB, TEAM, USERS = 61_234, 61_235, 61_236
#: Code that replaces a file.
REPLACES_FILE = """
import sys
from pathlib import Path
from feedmill.shared.atomic_files import replacing
with replacing(Path(sys.argv[1])) as temporary:
    temporary.write_text("new")
"""


@pytest.fixture
def team_folder() -> Iterator[Path]:
    """A folder that TEAM can write to. Others cannot enter those of pytest."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        os.chown(folder, 0, TEAM)
        folder.chmod(0o770)
        yield folder


def write_in_process(file: Path, prepare: Callable[[], object]) -> None:
    """Replace a file in another process, after a call that changes its rights."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            prepare()
            with replacing(file) as temporary:
                temporary.write_text("new")
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(process, 0)
    assert status == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize(
    ("groups", "mode", "expected_group", "expected_mode"),
    [
        ([TEAM], 0o660, TEAM, 0o660),
        ([TEAM], 0o2664, TEAM, 0o2664),
        ([], 0o660, USERS, 0o600),
        ([], 0o664, USERS, 0o644),
        ([], 0o2604, USERS, 0o604),
        ([], 0o666, USERS, 0o666),
    ],
)
def test_a_file_replaced_by_another_user_is_open_to_no_other_group(
    team_folder: Path,
    groups: list[int],
    mode: int,
    expected_group: int,
    expected_mode: int,
) -> None:
    """It keeps its group if the user is a member."""
    if not groups:
        os.chown(team_folder, BOB, USERS)
    file = team_folder / "state.json"
    file.write_text("old")
    os.chown(file, 0, TEAM)
    file.chmod(mode)

    def become_bob() -> None:
        os.setgroups(groups)
        os.setgid(USERS)
        os.setuid(BOB)

    write_in_process(file, become_bob)
    status = file.stat()
    assert file.read_text() == "new"
    assert (status.st_uid, status.st_gid) == (BOB, expected_group)
    assert stat.S_IMODE(status.st_mode) == expected_mode


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
def test_a_file_of_an_owner_that_the_namespace_lacks_can_be_replaced(
    file: Path,
) -> None:
    namespace = ["unshare", "--map-root-user"]
    try:
        subprocess.run([*namespace, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine does not allow user namespaces")
    os.chown(file, BOB, TEAM)
    file.chmod(0o664)
    subprocess.run(
        [*namespace, sys.executable, "-c", REPLACES_FILE, str(file)],
        check=True,
        cwd=ROOT,
    )
    assert file.read_text() == "new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


@pytest.mark.parametrize("exists", [True, False])
def test_a_symbolic_link_stays_and_its_file_is_replaced(
    file: Path, exists: bool
) -> None:
    (file.parent / "other").mkdir()
    target = file.parent / "other" / "target.json"
    if exists:
        target.write_text("old")
    for name, destination in (("first", "second"), ("second", "other/target.json")):
        (file.parent / name).symlink_to(destination)
    with replacing(file.parent / "first") as temporary:
        temporary.write_text("new")
    assert (file.parent / "first").is_symlink()
    assert (file.parent / "second").is_symlink()
    assert target.read_text() == "new"
    assert [*target.parent.iterdir()] == [target]


def test_pipes_and_devices_are_written_directly(tmp_path: Path) -> None:
    """A device that a rename replaced would be lost to the whole machine."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with replacing(link, durable=True) as path:
            path.write_text("through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert sorted(tmp_path.iterdir()) == [link, pipe]


def long_name(character: str, size: int, ending: str) -> str:
    """Return a name of this many bytes, as long as characters divide them."""
    count = (size - len(ending)) // len(character.encode())
    return character * count + ending


@pytest.mark.parametrize("character", ["x", "ü", "\U0001f600"])
@pytest.mark.parametrize(
    "size", [1, 120, 138, 139, 143, 144, 246, 250, 251, 252, 253, 254, 255]
)
def test_every_name_of_a_file_can_be_replaced(
    tmp_path: Path, character: str, size: int
) -> None:
    """The longest name has 255 bytes on most file systems."""
    path = tmp_path / (long_name(character, size, "") or character)
    path.write_text("old")
    write(path)
    assert path.read_text() == "new"
    assert [*tmp_path.iterdir()] == [path]


def test_long_names_with_one_beginning_have_temporary_files_of_their_own(
    tmp_path: Path,
) -> None:
    paths = [tmp_path / ("x" * 254 + end) for end in "abc"]
    assert len({temporary_path(path) for path in paths}) == 3
    assert all(temporary_path(path).name.startswith(".xxx") for path in paths)
    assert all(temporary_path(path).name.endswith(".tmp") for path in paths)


def test_names_that_are_not_utf8_can_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff" * 255)
    path.write_text("old")
    write(path)
    assert path.read_text() == "new"


@pytest.mark.parametrize(
    "ending", [".csv", ".csv.gz", ".tsv", ".parquet", ".jsonl.zst", ".xlsx"]
)
@pytest.mark.parametrize("character", ["x", "ü"])
@pytest.mark.parametrize("fails", [False, True])
def test_posts_are_written_to_files_of_any_name(
    tmp_path: Path, ending: str, character: str, fails: bool
) -> None:
    """After an error, the posts so far are written beside a file that existed."""
    path = tmp_path / long_name(character, 255, ending)
    path.write_text("old")
    with suppress(KeyboardInterrupt), PostFile(path) as file:
        file.add([Post(id="1", title="a title")])
        if fails:
            raise KeyboardInterrupt
    assert file.written is not None
    assert (file.written == path) != fails
    assert (path.read_bytes() == b"old") == fails
    assert file.written.name.endswith(ending)
    assert set(tmp_path.iterdir()) == {path, file.written}
