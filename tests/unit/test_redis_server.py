"""feedmill/stack/embedded.py: the search for a redis-server."""

import shutil
import sys
from pathlib import Path

import pytest

from feedmill.shared.errors import StackError
from feedmill.stack import embedded
from feedmill.stack.embedded import (
    find_redis_server,
    installed_redis_server,
    is_supported,
)

#: Programs that report no version: one reads until its end, one writes bytes that are no text.
HANGS = "#!/bin/sh\nexec sleep 60\n"
NOT_UTF8 = "#!/bin/sh\nprintf '\\377'\n"


def fake_server(folder: Path, name: str, version: str) -> str:
    path = folder / name
    kind = name.removesuffix("-server").capitalize()
    path.write_text(f"#!/bin/sh\necho '{kind} server v={version} sha=0 bits=64'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("redis", "valkey", "expected"),
    [
        ("7.0.15", None, "redis-server"),
        ("6.2.14", "8.0.1", "valkey-server"),
        ("6.2.14", "7.2.8", None),
        ("x", None, None),
    ],
)
def test_finds_the_systems_server_if_new_enough(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    redis: str,
    valkey: str | None,
    expected: str | None,
) -> None:
    paths = {"redis-server": fake_server(tmp_path, "redis-server", redis)}
    if valkey:
        paths["valkey-server"] = fake_server(tmp_path, "valkey-server", valkey)
    monkeypatch.setattr(shutil, "which", lambda name, **_: paths.get(name))
    assert installed_redis_server() == (str(tmp_path / expected) if expected else None)


@pytest.mark.parametrize(
    ("folder", "is_found"), [("venv/bin", False), ("venv", False), ("venv2/bin", True)]
)
def test_ignores_servers_of_the_virtual_environment_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str, is_found: bool
) -> None:
    (tmp_path / folder).mkdir(parents=True)
    path = fake_server(tmp_path / folder, "redis-server", "7.0.15")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setenv("PATH", str(tmp_path / folder))
    assert installed_redis_server() == (path if is_found else None)


def test_falls_back_to_the_embedded_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _, **__: None)
    path = find_redis_server()
    assert path.endswith("valkey-server")
    assert is_supported(path)
    monkeypatch.setattr(embedded, "find_spec", lambda _: None)
    with pytest.raises(StackError, match="redis-server"):
        find_redis_server()


@pytest.mark.parametrize(
    "program", ["#!/nowhere\n", "\0", HANGS, "#!/bin/sh\nexit 1\n", NOT_UTF8]
)
def test_skips_a_server_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str
) -> None:
    broken = tmp_path / "redis-server"
    broken.write_text(program)
    broken.chmod(0o755)
    working = fake_server(tmp_path, "valkey-server", "8.0.1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    # The working server, a shell script, must answer in time on a busy machine.
    monkeypatch.setattr(embedded, "VERSION_TIMEOUT_S", 5.0)
    assert installed_redis_server() == working
