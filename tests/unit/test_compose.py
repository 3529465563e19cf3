"""docker/: nothing here can start containers, so each command, flag, variable and path is held against the program."""

import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from celery.bin.celery import celery
from redis import Redis
from redis.exceptions import RedisError
from typer.main import get_command

from feedmill.cli import app
from feedmill.dashboard import PASSED_ON
from feedmill.stack import free_port
from shared.settings import Settings
from tests.support import redis_servers, wait_until

DOCKER = Path(__file__).parent.parent.parent / "docker"
ROOT = DOCKER.parent
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
OURS = {name: service for name, service in SERVICES.items() if service["image"] == "feedmill"}


def accept(command: Any, words: list[str], parent: Any = None) -> None:
    """Parse the words as the command would, down to its last subcommand, and run nothing.

    command: click's, or that of the click that typer brings along. Raises their errors.
    """
    with command.make_context(words[0], words[1:], parent=parent) as context:
        rest = [*context._protected_args, *context.args]
        if rest and hasattr(command, "get_command"):
            found = command.get_command(context, rest[0])
            assert found is not None, f"{words[0]} has no command {rest[0]}"
            accept(found, rest, context)


def asked_for(line: str) -> list[str]:
    """The words of a line of the shell; what the shell fills in is one of them."""
    return shlex.split(re.sub(r"\$\([^)]*\)|\$\w+", "filled-in", line.replace("$$", "$")))


def test_what_there_is() -> None:
    assert set(SERVICES) == {"redis", "worker", "flower", "reddit"}
    assert SERVICES["reddit"]["profiles"] == ["reddit"]
    assert all("profiles" not in service for name, service in SERVICES.items() if name != "reddit")
    assert {volume.partition(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])} == {
        "./redis.conf",
        *COMPOSE["volumes"],
    }


@pytest.mark.parametrize("name", OURS)
def test_commands_are_the_program_s(name: str) -> None:
    accept(get_command(app), ["feedmill", *OURS[name]["command"]])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("feedmill flower --adress x", "--adress"),
        ("feedmill flower --port x", "valid integer"),
        ("feedmill bloom", "feedmill has no command bloom"),
        ("celery --app workers.app inspect ping --timout 5", "--timout"),
    ],
)
def test_a_command_that_is_not_would_be_found(wrong: str, words: str) -> None:
    with pytest.raises(Exception, match=words) as raised:
        accept(celery if wrong.startswith("celery") else get_command(app), wrong.split())
    assert type(raised.value).__name__ in ("NoSuchOption", "BadParameter", "AssertionError")


def variables() -> Iterator[tuple[str, str]]:
    for service in OURS.values():
        yield from service["environment"].items()
    yield from re.findall(r"\b(FEEDMILL_\w+)=(\S+)", DOCKERFILE)


def test_variables_are_settings() -> None:
    for name, value in variables():
        if name.startswith("FEEDMILL_"):
            assert name.removeprefix("FEEDMILL_").lower() in Settings.model_fields
            # What is passed through bears the same name outside, and may be missing.
            assert not value.startswith("${FEEDMILL_") or value == f"${{{name}:-}}"
    for name in re.findall(r"\bFLOWER_(\w+)", (DOCKER / "compose.yaml").read_text().replace("FEEDMILL_FLOWER_", "")):
        assert name.removesuffix("'s").lower() in PASSED_ON


def test_flower_is_reached_from_this_machine_alone_and_with_a_password() -> None:
    flower = SERVICES["flower"]
    assert flower["ports"] == ["127.0.0.1:5555:5555"]
    assert "--no-auth" not in flower["command"]
    assert "FEEDMILL_FLOWER_PASSWORD" in flower["environment"]
    assert all("ports" not in service for name, service in SERVICES.items() if name != "flower")


def test_the_address_of_redis() -> None:
    for service in OURS.values():
        given = service["environment"]["FEEDMILL_REDIS_URL"]
        assert given.count(SERVICES["redis"]["environment"]["REDIS_PASSWORD"]) == 1
        assert Settings(redis_url=re.sub(r"\$\{.*\}", "x1", given)).redis_address == "redis:6379/0"


def test_health_checks() -> None:
    kind, line = SERVICES["worker"]["healthcheck"]["test"]
    assert kind == "CMD-SHELL"
    accept(celery, asked_for(line))
    name = OURS["worker"]["command"][OURS["worker"]["command"].index("--name") + 1]
    assert f'--destination "{name}@$$(hostname)"' in line
    kind, python, flag, script = SERVICES["flower"]["healthcheck"]["test"]
    assert (kind, python, flag) == ("CMD", "python", "-c")
    compile(script, "health check", "exec")
    assert ":5555/healthcheck" in script
    # What the worker may take for its last messages is less than what it is given.
    assert int(SERVICES["worker"]["stop_grace_period"].removesuffix("s")) > Settings().drain


def test_redis_starts_as_it_would_there(tmp_path: Path) -> None:
    servers = redis_servers()
    if not servers:
        pytest.skip("needs a redis-server: apt install redis-server")
    shell, flag, script = SERVICES["redis"]["command"]
    port = free_port()
    places = {
        "redis-server": next(iter(servers.values())),
        "/etc/feedmill/redis.conf": str(DOCKER / "redis.conf"),
        "dir /data": f"dir {tmp_path}",
        "bind 0.0.0.0": f"bind 127.0.0.2\nport {port}",
        "$$": "$",
    }
    for there, here in places.items():
        assert there in script
        script = script.replace(there, here)
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen([shell, flag, script], env=os.environ | {"REDIS_PASSWORD": "s3"}, stdout=log)
    client = Redis("127.0.0.2", port, password="s3", decode_responses=True)
    try:
        wait_until(lambda: server.poll() is None and _answers(client), "Redis answers", 20)
        found = client.config_get("*")
        assert (found["bind"], found["dir"], found["requirepass"]) == ("127.0.0.2", str(tmp_path), "s3")
        assert (found["appendonly"], found["maxmemory-policy"]) == ("yes", "noeviction")
        assert client.info()["process_id"] == server.pid  # signals reach it, not a shell
    finally:
        client.close()
        server.terminate()
        server.wait(20)


def _answers(client: Redis) -> bool:
    try:
        return bool(client.ping())
    except RedisError:
        return False


def test_the_dockerfile() -> None:
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE) == ["python:3.12-slim"] * 2
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.findall(r"^ARG EXTRAS=(\S+)", DOCKERFILE, re.MULTILINE)[0].split(",")
    assert set(extras) <= set(project["optional-dependencies"])
    copied = [word for line in re.findall(r"^COPY (?!--)(.*)", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]]
    assert all((ROOT / word).exists() for word in copied)
    # What is copied is let into the build, and nothing else is.
    kept = re.findall(r"^!(\S+)", (DOCKER / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert set(kept) == set(copied)
    # What the wheel is built from is among it.
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(packages["packages"]) | {project["readme"], *project["license-files"]} <= set(copied)
    assert re.search(r"^USER feedmill$", DOCKERFILE, re.MULTILINE)
    assert 'ENTRYPOINT ["feedmill"]' in DOCKERFILE
    assert project["scripts"]["feedmill"]
    for service in OURS.values():
        for volume in service.get("volumes", []):
            assert volume.partition(":")[2] in DOCKERFILE
    assert SERVICES["worker"]["build"] == {"context": "..", "dockerfile": "docker/Dockerfile"}
