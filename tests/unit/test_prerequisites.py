"""feedmill/stack/prerequisites.py and the search for a redis-server, before anything is downloaded."""

import platform
import shutil
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from feedmill.shared.errors import StackError
from feedmill.stack import embedded, prerequisites
from feedmill.stack.prerequisites import installed_redis_server, is_supported, missing_prerequisite, torch_index


def fake_server(folder: Path, name: str, version: str) -> str:
    path = folder / name
    kind = name.removesuffix("-server").capitalize()
    path.write_text(f"#!/bin/sh\necho '{kind} server v={version} sha=0 bits=64'\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _, **__: None)


def test_this_machine_meets_the_prerequisites() -> None:
    assert missing_prerequisite() is None


@pytest.mark.usefixtures("no_server")
@pytest.mark.parametrize(
    ("machine", "libc"), [("ppc64le", ("glibc", "2.41")), ("x86_64", ("", "")), ("aarch64", ("glibc", "2.17"))]
)
def test_machines_without_a_wheel_need_a_system_redis(
    monkeypatch: pytest.MonkeyPatch, machine: str, libc: tuple[str, str]
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    assert "redis-server" in str(missing_prerequisite())
    monkeypatch.setattr(prerequisites, "installed_redis_server", lambda: "/usr/bin/redis-server")
    assert missing_prerequisite() is None


def test_rejects_other_python_versions_and_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "version_info", (3, 15, 0))
        assert "3.11 to 3.14" in str(missing_prerequisite())
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "darwin" in str(missing_prerequisite())


@pytest.mark.parametrize(
    ("redis", "valkey", "expected"),
    [
        ("7.0.15", None, "redis-server"),
        ("6.2.14", "8.0.1", "valkey-server"),
        ("6.2.14", None, None),
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


@pytest.mark.usefixtures("no_server")
def test_falls_back_to_the_embedded_server(monkeypatch: pytest.MonkeyPatch) -> None:
    path = embedded.find_redis_server()
    assert path.endswith("valkey-server")
    assert is_supported(path)
    monkeypatch.setattr(embedded, "find_spec", lambda _: None)
    with pytest.raises(StackError, match="redis-server"):
        embedded.find_redis_server()


class Index(BaseHTTPRequestHandler):
    """A package index that has torch."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/cpu/torch/" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Index) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/cpu"
        server.shutdown()


def test_takes_torchs_cpu_build_without_an_nvidia_driver(
    index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "nvidiactl"
    monkeypatch.setattr(prerequisites, "NVIDIA_FILES", (str(driver),))
    assert torch_index("auto", index)[0] == str(torch_index("auto", f"{index}/")[0]).removesuffix("/") == index
    assert torch_index("cuda", index)[0] is None
    driver.touch()
    assert torch_index("auto", index)[0] is None
    assert torch_index("cpu", index)[0] == index
