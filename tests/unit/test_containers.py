"""The container test's helpers: cleaning up, pip's configuration, the override of the compose file."""

import os
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import yaml  # type: ignore[import-untyped]

from tests.containers import engine, stack
from tests.containers.engine import (
    commands_to_restore,
    configuration_for_builds,
    missing_requirement,
    pip_configuration,
    pip_options,
    served_folders,
)
from tests.unit.test_compose import OURS, ROOT, SERVICES

BEFORE = """\
*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [1:60]
-A INPUT -s 192.0.2.1/32 -j DROP
COMMIT
"""
AFTER = """\
*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [0:0]
:DOCKER - [0:0]
:DOCKER-USER - [0:0]
:OTHER - [0:0]
-A INPUT -s 192.0.2.1/32 -j DROP
-A INPUT -p tcp -m comment --comment "added meanwhile" -j OTHER
-A FORWARD -j DOCKER-USER
-A FORWARD -o br-0123456789ab -j ACCEPT
-A DOCKER-USER -j RETURN
COMMIT
*nat
:POSTROUTING ACCEPT [0:0]
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
COMMIT
"""


def test_removes_only_dockers_rules_and_chains() -> None:
    commands = [" ".join(command) for command in commands_to_restore(BEFORE, AFTER)]
    assert commands == [
        "iptables -t filter -D FORWARD -j DOCKER-USER",
        "iptables -t filter -D FORWARD -o br-0123456789ab -j ACCEPT",
        "iptables -t filter -D DOCKER-USER -j RETURN",
        "iptables -t nat -D POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE",
        "iptables -t filter -F DOCKER",
        "iptables -t filter -F DOCKER-USER",
        "iptables -t filter -X DOCKER",
        "iptables -t filter -X DOCKER-USER",
        "iptables -t filter -P FORWARD ACCEPT",
    ]
    assert commands_to_restore(AFTER, AFTER) == []


def test_names_the_packages_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = missing_requirement()
    assert missing is not None
    assert missing.endswith(
        "apt-get install --no-install-recommends debootstrap docker-compose docker.io iproute2 iptables"
    )
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root is required" in str(missing_requirement())


def test_reads_pips_options_and_prefers_the_environment() -> None:
    listed = (
        "global.extra-index-url='file:///a/simple https://index.example/simple'\n"
        ":env:.find-links='/b'\nglobal.find-links='/c'\nglobal.timeout='5'\n"
    )
    options = pip_options(listed)
    assert options == {"extra-index-url": ["file:///a/simple", "https://index.example/simple"], "find-links": ["/b"]}
    # An index links to files beside it.
    assert served_folders(options) == [Path("/a"), Path("/b")]
    lines = configuration_for_builds(options, 8080).splitlines()
    assert "extra-index-url = http://127.0.0.1:8080/a/simple https://index.example/simple" in lines
    assert "find-links = http://127.0.0.1:8080/b" in lines


def test_serves_only_pips_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheels, other = tmp_path / "wheels", tmp_path / "other"
    for folder in (wheels, other):
        folder.mkdir()
        (folder / "one.whl").write_text("content")
    (wheels / "link").symlink_to(other)
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    with pip_configuration() as configuration:
        (line,) = (line for line in configuration.splitlines() if line.startswith("find-links"))
        address = line.partition(" = ")[2]
        with urlopen(f"{address}/one.whl") as answer:  # noqa: S310 - http
            assert answer.read() == b"content"
        for path in ("/../other/one.whl", "/link/one.whl"):
            with pytest.raises(HTTPError, match="404") as refused:
                urlopen(address + path)  # noqa: S310
            refused.value.close()


def test_override_replaces_every_image_of_a_registry() -> None:
    override = yaml.safe_load((Path(stack.__file__).parent / "compose.debian.yaml").read_text())["services"]
    assert set(override) == set(stack.SERVICES) - set(OURS)
    assert {service["image"] for service in override.values()} == {engine.DEBIAN}
    assert {SERVICES[name]["image"] for name in set(stack.SERVICES) & set(OURS)} == {engine.PRODUCER, engine.WORKER}


def test_queries_use_documented_metrics() -> None:
    documented = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    for query in stack.QUERIES.values():
        name = query.partition("(")[2].partition("{")[0].partition(")")[0]
        assert name == "up" or f"`{name}`" in documented, query
