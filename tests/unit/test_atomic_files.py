"""shared/atomic_files.py: the old file or the new one, and no leftover."""

import os
from pathlib import Path

import pytest

from feedmill.shared.atomic_files import replacing, temporary_path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "state.json"
    path.write_text("old")
    return path


def write(file: Path, durable: bool = False, error: BaseException | None = None) -> None:
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
def test_an_error_keeps_the_old_file_and_leaves_no_other(file: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        write(file, error=error)
    assert file.read_text() == "old"
    assert [*file.parent.iterdir()] == [file]


def test_syncs_the_file_before_the_rename_and_the_folder_after_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, str]] = []

    def note(descriptor: int) -> None:
        synced.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), file.read_text()))

    monkeypatch.setattr(os, "fsync", note)
    write(file, durable=True)
    assert synced == [(str(temporary_path(file)), "old"), (str(file.parent), "new")]
    synced.clear()
    file.write_text("old")
    write(file)
    assert synced == []


def test_new_files_get_the_permissions_of_the_umask(file: Path) -> None:
    left_over = temporary_path(file)
    left_over.touch()
    left_over.chmod(0o666)
    before = os.umask(0o077)
    try:
        write(file)
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o600
