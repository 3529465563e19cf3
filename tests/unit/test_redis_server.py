"""feedmill/stack/embedded.py: the search for a redis-server."""

import shutil
from pathlib import Path

import pytest

from feedmill.shared.errors import StackError
from feedmill.stack import embedded
from feedmill.stack.embedded import find_redis_server, installed_redis_server, is_supported


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
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, redis: str, valkey: str | None, expected: str | None
) -> None:
    paths = {"redis-server": fake_server(tmp_path, "redis-server", redis)}
    if valkey:
        paths["valkey-server"] = fake_server(tmp_path, "valkey-server", valkey)
    monkeypatch.setattr(shutil, "which", lambda name, **_: paths.get(name))
    assert installed_redis_server() == (str(tmp_path / expected) if expected else None)


def test_falls_back_to_the_embedded_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _, **__: None)
    path = find_redis_server()
    assert path.endswith("valkey-server")
    assert is_supported(path)
    monkeypatch.setattr(embedded, "find_spec", lambda _: None)
    with pytest.raises(StackError, match="redis-server"):
        find_redis_server()
