"""docker/compose.yaml agrees with the program, the images and the configuration files. Starts no containers."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError
from redis.retry import Retry
from typer.main import get_command

from feedmill.cli.main import app
from feedmill.monitoring.dashboard import PASSED_OPTIONS
from feedmill.shared.settings import Settings
from tests.support import free_port, installed_redis, wait_until
from tests.unit.test_images import DOCKERFILES, accept, check_health_script, folders_in, settings_in

ROOT = Path(__file__).parent.parent.parent
DOCKER = ROOT / "docker"
PAGES = ("README.md", "docs/deployment.md")
TEXT = (DOCKER / "compose.yaml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"].startswith("feedmill-")}
WORKERS = {name: service for name, service in OURS.items() if service["command"][0] == "worker"}
EXAMPLE = DOCKER / ".env.example"
#: Files that document how to copy the example, and the one command that all of them show.
COPY_DOCS = [DOCKER / "compose.yaml", DOCKER / "kustomization.yaml", EXAMPLE, *(ROOT / page for page in PAGES)]
(COPY,) = {command for file in COPY_DOCS for command in re.findall(r"umask 077; (sed .* > \.env)", file.read_text())}


def dockerfile_of(service: dict[str, Any]) -> str:
    return DOCKERFILES[service["image"].partition(":")[0]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of docker/ with an .env made by the documented command."""
    folder = tmp_path_factory.mktemp("project") / "docker"
    shutil.copytree(DOCKER, folder, ignore=shutil.ignore_patterns(".env"))
    subprocess.run(["sh", "-c", f"umask 077; {COPY}"], cwd=folder, check=True)  # noqa: S607 - wherever it is
    return folder


def environment_in(folder: Path) -> dict[str, str]:
    return dict(re.findall(r"^(\w+)=(.*)$", (folder / ".env").read_text(), re.MULTILINE))


def docker_compose(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = shutil.which("docker-compose")
    if path is None:
        pytest.skip("needs docker-compose: apt install --no-install-recommends docker-compose")
    return subprocess.run([path, *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_copied_env_has_distinct_secret_passwords(folder: Path) -> None:
    made = environment_in(folder)
    assert (folder / ".env").stat().st_mode & 0o777 == 0o600
    passwords = [value for name, value in made.items() if name.endswith("_PASSWORD")]
    assert len(set(passwords)) == len(passwords) == 6
    assert all(re.fullmatch("[0-9a-f]{48}", password) for password in passwords)
    assert set(made) - {"COMPOSE_PROJECT_NAME"} == set(re.findall(r"\$\{(\w+)", TEXT))
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "docker/.env" in ignored


def test_docker_compose_accepts_the_file(folder: Path) -> None:
    profiles = [flag for name in ("cpu", "gpu", "reddit", "bluesky", "tools") for flag in ("--profile", name)]
    done = docker_compose(folder, *profiles, "config")
    assert (done.returncode, done.stderr) == (0, "")
    found = yaml.safe_load(done.stdout)["services"]
    assert set(found) == set(SERVICES)
    password = environment_in(folder)["WORKER_PASSWORD"]
    for name in OURS:
        assert found[name]["environment"]["FEEDMILL_REDIS_URL"] == f"redis://worker:{password}@redis:6379/0"
        assert Path(found[name]["build"]["context"]) == folder.parent


def test_missing_passwords_point_to_the_example(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "compose.yaml", tmp_path)
    done = docker_compose(tmp_path, "config")
    assert done.returncode == 1
    assert ".env.example" in done.stderr


def test_services_profiles_and_volumes() -> None:
    assert {name: service.get("profiles", []) for name, service in SERVICES.items()} == {
        "redis": [], "metrics": [], "flower": [], "prometheus": [], "grafana": [],
        "worker-cpu": ["cpu"], "worker-gpu-0": ["gpu"], "worker-gpu-1": ["gpu"],
        "ingest": ["reddit"], "bluesky": ["bluesky"], "feedmill": ["tools"],
    }  # fmt: skip
    sources = {volume.partition(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    assert {source for source in sources if not source.startswith("./")} == set(COMPOSE["volumes"])
    assert all((DOCKER / source).exists() for source in sources if source.startswith("./"))


@pytest.mark.parametrize("name", OURS)
def test_service_matches_its_image(name: str) -> None:
    service = OURS[name]
    accept(get_command(app), ["feedmill", *service["command"]])
    image, _, tag = service["image"].partition(":")
    assert service["build"]["dockerfile"] == f"docker/{image.removeprefix('feedmill-')}.Dockerfile"
    assert set(service["build"].get("args", ())) <= set(re.findall(r"^ARG (\w+)", dockerfile_of(service), re.MULTILINE))
    assert ("TORCH_INDEX" in service["build"].get("args", ())) == (tag == "cuda")
    for volume in service.get("volumes", []):
        assert volume.partition(":")[2] in folders_in(dockerfile_of(service))


@pytest.mark.parametrize("name", OURS)
def test_no_anonymous_volumes(name: str) -> None:
    """`down --volumes` leaves the volumes that an image declares and no service mounts."""
    mounted = {volume.partition(":")[2] for volume in OURS[name].get("volumes", [])}
    declared = set(re.findall(r'^VOLUME \["(.*)"\]', dockerfile_of(OURS[name]), re.MULTILINE))
    assert declared <= mounted


def test_environment_variables_are_settings() -> None:
    for service in OURS.values():
        for name, value in service["environment"].items():
            assert name.removeprefix("FEEDMILL_").lower() in Settings.model_fields
            # A variable passed through keeps its name.
            assert not value.startswith("${") or value.startswith(f"${{{name}:")
        Settings.model_validate({"device": service["environment"].get("FEEDMILL_DEVICE", "auto")})
    for name in re.findall(r"\bFLOWER_(\w+)", TEXT.replace("FEEDMILL_FLOWER_", "")):
        assert name.removesuffix("'s").lower() in PASSED_OPTIONS


def test_each_device_has_a_worker() -> None:
    reserved = [
        device["device_ids"]
        for service in WORKERS.values()
        for device in service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", ())
    ]
    assert reserved == [["0"], ["1"]]
    for name, service in WORKERS.items():
        assert ("deploy" in service) == (service["image"].endswith(":cuda")) == name.startswith("worker-gpu-")
        # Draining takes less time than the grace period.
        assert int(service["stop_grace_period"].removesuffix("s")) > Settings().drain + 5


def test_services_have_least_privileges() -> None:
    for name, service in SERVICES.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is True, name
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"flower": ["127.0.0.1:5555:5555"], "grafana": ["127.0.0.1:3000:3000"]}
    flower = SERVICES["flower"]
    assert "--no-auth" not in flower["command"]
    assert "FEEDMILL_FLOWER_PASSWORD" in flower["environment"]
    # Redis has no outbound network access, and only Feedmill's services can connect to it.
    assert COMPOSE["networks"]["queue"] == {"internal": True}
    assert SERVICES["redis"]["networks"] == ["queue"]
    assert {name for name, service in SERVICES.items() if "queue" in service["networks"]} == {"redis", *OURS}
    assert [name for name, service in SERVICES.items() if "REDIS_PASSWORD" in service.get("environment", ())] == [
        "redis"
    ]


def test_third_party_images_are_pinned() -> None:
    for name in set(SERVICES) - set(OURS):
        assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+\S*@sha256:[0-9a-f]{64}", SERVICES[name]["image"])


@pytest.mark.parametrize("name", ["ingest", "bluesky", "metrics"])
def test_health_checks_request_the_served_port(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"][:3] == ["CMD", "python", "-c"]
    port = service["command"][service["command"].index("--metrics-port") + 1]
    check_health_script(service["healthcheck"]["test"][3], port)


def test_prometheus_scrapes_every_metrics_port() -> None:
    configuration = yaml.safe_load((DOCKER / "prometheus" / "compose.yml").read_text())
    (mounted,) = (volume for volume in SERVICES["prometheus"]["volumes"] if volume.startswith("./"))
    assert f"--config.file={mounted.split(':')[1]}/compose.yml" in SERVICES["prometheus"]["command"]
    found = set()
    for job in configuration["scrape_configs"]:
        for each in job.get("dns_sd_configs", ()):
            found |= {f"{name}:{each['port']}" for name in each["names"]}
        for each in job.get("static_configs", ()):
            found |= set(each["targets"])
    ports = {name: settings_in(dockerfile_of(service))["FEEDMILL_METRICS_PORT"] for name, service in WORKERS.items()}
    ports |= {name: OURS[name]["command"][-1] for name in ("ingest", "bluesky", "metrics")}
    assert found == {f"{name}:{port}" for name, port in ports.items()}
    assert all({"metrics"} & set(SERVICES[name]["networks"]) for name in ports)


def test_grafana_finds_its_datasource_and_dashboard() -> None:
    provisioning = DOCKER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"].strip("${}") in SERVICES["grafana"]["environment"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "feedmill.yml").read_text())["providers"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in SERVICES["grafana"]["volumes"]
    assert json.loads((DOCKER / "grafana" / "dashboards" / "feedmill.json").read_text())["panels"]


@pytest.fixture
def redis_of_the_containers(folder: Path, tmp_path: Path) -> Iterator[int]:
    """The port of a Redis started by redis.sh with its own configuration, except for address and folder."""
    installed = installed_redis()
    if installed is None:
        pytest.skip("needs a redis-server of the system: apt install redis-server")
    assert SERVICES["redis"]["command"] == ["sh", "/etc/feedmill/redis.sh"]
    for name in ("redis.sh", "redis.conf", "users.conf"):
        assert f"./{name}:/etc/feedmill/{name}:ro" in SERVICES["redis"]["volumes"]
        shutil.copy(folder / name, tmp_path)
    port, script = free_port(), (tmp_path / "redis.sh").read_text()
    places = {
        "exec redis-server": f"exec {installed}",
        "dir /data": f"dir {tmp_path}",
        "bind * -::*": f"bind 127.0.0.2\nport {port}",
    }
    for there, here in places.items():
        assert script.count(there) == 1
        script = script.replace(there, here)
    (tmp_path / "redis.sh").write_text(script)
    made = environment_in(folder)
    given = {name: made[name] for name in SERVICES["redis"]["environment"]}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(["sh", tmp_path / "redis.sh"], env=os.environ | given, stdout=log)  # noqa: S607
    try:
        wait_until(lambda: process.poll() is None and _answers(port, made["REDIS_PASSWORD"]), "Redis answers")
        yield port
    finally:
        process.terminate()
        assert process.wait(120) == 0, "signals must reach Redis, not a shell"


@pytest.mark.parametrize("missing", SERVICES["redis"]["environment"])
def test_redis_refuses_an_empty_password(folder: Path, missing: str) -> None:
    given = dict.fromkeys(SERVICES["redis"]["environment"], "x") | {missing: ""}
    done = subprocess.run(
        ["sh", folder / "redis.sh"],  # noqa: S607 - wherever it is
        env={"PATH": os.environ["PATH"]} | given,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode != 0
    assert missing in done.stderr


def client_of(port: int, password: str | None, user: str | None = None) -> Redis:
    return Redis(
        "127.0.0.2", port, username=user, password=password, decode_responses=True, retry=Retry(NoBackoff(), 0)
    )


def _answers(port: int, password: str) -> bool:
    try:
        with client_of(port, password) as client:
            return bool(client.ping())
    except RedisError:
        return False


def test_redis_starts_with_the_containers_configuration(folder: Path, redis_of_the_containers: int) -> None:
    made, port = environment_in(folder), redis_of_the_containers
    with client_of(port, made["REDIS_PASSWORD"]) as client:
        found = client.config_get("*")
        assert (found["appendonly"], found["maxmemory-policy"], found["maxmemory"]) == ("yes", "noeviction", str(2**31))
    for user in ("worker", "producer", "reader"):
        with client_of(port, made[f"{user.upper()}_PASSWORD"], user) as client:
            assert client.ping()
            with pytest.raises(NoPermissionError):
                client.config_get("*")
    with client_of(port, None) as client, pytest.raises(AuthenticationError):
        client.ping()
