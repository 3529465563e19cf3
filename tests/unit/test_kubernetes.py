"""docker/kubernetes/ agrees with Kubernetes' schemas, the images and the program. Needs no cluster."""

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]
from typer.main import get_command

from feedmill.cli.main import app
from feedmill.shared.settings import Settings
from tests.unit.test_compose import SERVICES
from tests.unit.test_images import DOCKERFILES, accept, folders_in, settings_in
from tests.unit.test_metrics import known, names_in, promtool

DOCKER = Path(__file__).parent.parent.parent / "docker"
FILES = sorted((DOCKER / "kubernetes").glob("*.yaml"))
OBJECTS: list[dict[str, Any]] = [found for file in FILES for found in yaml.safe_load_all(file.read_text())]
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((DOCKER / "kustomization.yaml").read_text())
SECRETS = set(re.findall(r"^(\w+)=", (DOCKER / ".env.example").read_text(), re.MULTILINE))


def named(kind: str) -> dict[str, dict[str, Any]]:
    return {found["metadata"]["name"]: found for found in OBJECTS if found["kind"] == kind}


#: Name -> pod template of each Deployment and of Redis.
PODS = {name: found["spec"]["template"] for name, found in (named("Deployment") | named("StatefulSet")).items()}
OURS = {name: pod for name, pod in PODS.items() if name != "redis"}
WORKERS = {name: pod for name, pod in OURS.items() if name.startswith("worker-")}


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def test_manifests_are_complete() -> None:
    assert set(PODS) == {"redis", "worker-cpu", "worker-gpu", "metrics", "flower", "ingest", "bluesky"}
    # KEDA's objects are applied separately: a cluster without KEDA rejects them. Bluesky would fill the queue unasked.
    assert {str(DOCKER / path) for path in KUSTOMIZATION["resources"]} == {
        str(file) for file in FILES if file.name not in ("keda.yaml", "bluesky.yaml")
    }
    (secrets,), (files,) = KUSTOMIZATION["secretGenerator"], KUSTOMIZATION["configMapGenerator"]
    assert (secrets["name"], secrets["envs"]) == ("feedmill", [".env"])
    assert all((DOCKER / name).exists() for name in files["files"])
    (configuration,) = (each for each in PODS["redis"]["spec"]["volumes"] if each["name"] == "configuration")
    assert configuration["configMap"]["name"] == files["name"]
    assert {image["name"] for image in KUSTOMIZATION["images"]} == set(DOCKERFILES)


@pytest.mark.parametrize(
    "found",
    [each for each in OBJECTS if each["kind"] != "ScaledObject"],  # KEDA's kind, which Kubernetes' schemas lack
    ids=lambda found: f"{found['kind']} {found['metadata']['name']}",
)
def test_manifests_match_kubernetes_schemas(found: dict[str, Any]) -> None:
    kubernetes_validate.validate(found, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", OURS)
def test_pod_matches_its_image(name: str) -> None:
    container = container_of(OURS[name])
    accept(get_command(app), ["feedmill", *container["args"]])
    image, _, tag = container["image"].partition(":")
    assert (tag in ("cpu", "cuda")) == (name in WORKERS)
    volumes = {volume["mountPath"] for volume in container.get("volumeMounts", ())} - {"/tmp"}  # noqa: S108
    assert volumes <= set(folders_in(DOCKERFILES[image]))
    assert f"USER {OURS[name]['spec']['securityContext']['runAsUser']}\n" in DOCKERFILES[image]
    given = {variable["name"]: variable for variable in container["env"]}
    for variable in set(given) - {"WORKER_PASSWORD", "OMP_NUM_THREADS"}:
        assert variable.removeprefix("FEEDMILL_").lower() in Settings.model_fields
    # A variable must precede the variables that refer to it.
    assert list(given).index("WORKER_PASSWORD") < list(given).index("FEEDMILL_REDIS_URL")
    Settings.model_validate({"redis_url": given["FEEDMILL_REDIS_URL"]["value"].replace("$(WORKER_PASSWORD)", "x1")})
    if name in WORKERS:
        assert given["FEEDMILL_DEVICE"]["value"] == tag
        Settings.model_validate({"device": tag})


def test_pods_run_the_same_commands_as_compose() -> None:
    for name, pod in OURS.items():
        container, service = container_of(pod), SERVICES["worker-gpu-0" if name == "worker-gpu" else name]
        assert (container["image"], container["args"]) == (service["image"], service["command"])
    redis = container_of(PODS["redis"])
    assert (redis["image"], redis["command"]) == (SERVICES["redis"]["image"], SERVICES["redis"]["command"])
    assert {variable["name"] for variable in redis["env"]} == set(SERVICES["redis"]["environment"])


@pytest.mark.parametrize("name", PODS)
def test_pod_has_least_privileges(name: str) -> None:
    """Check what the namespace's label requires. Service links must be off: their variables look like settings."""
    spec, container = PODS[name]["spec"], container_of(PODS[name])
    (namespace,) = named("Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
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
            assert secret["key"] in SECRETS


def test_only_feedmills_pods_reach_redis() -> None:
    (policy,) = named("NetworkPolicy").values()
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= PODS["redis"]["metadata"]["labels"].items()
    ((rule,),) = (entry["from"] for entry in policy["spec"]["ingress"])
    for name, pod in PODS.items():
        let_in = rule["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert let_in == (name in OURS)


@pytest.mark.parametrize("name", OURS)
def test_probes_request_served_paths(name: str) -> None:
    container = container_of(OURS[name])
    (port,) = container["ports"]
    served = {"--metrics-port": {"/healthz", "/readyz"}, "--port": {"/healthcheck"}}
    flag = next((flag for flag in served if flag in container["args"]), None)
    if flag:
        assert container["args"][container["args"].index(flag) + 1] == str(port["containerPort"])
    else:
        image = DOCKERFILES[container["image"].partition(":")[0]]
        assert settings_in(image)["FEEDMILL_METRICS_PORT"] == str(port["containerPort"])
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = container.get(kind, {})
        if "httpGet" in probe:
            assert probe["httpGet"]["port"] == port["name"]
            assert probe["httpGet"]["path"] in served[flag or "--metrics-port"]
        elif "exec" in probe:
            accept(get_command(app), probe["exec"]["command"])
    # An unreachable Redis must not restart a pod.
    assert container["livenessProbe"]["httpGet"]["path"] in ("/healthz", "/healthcheck")
    assert "readinessProbe" in container


def test_worker_pods_have_device_cores_and_grace_period() -> None:
    for pod in WORKERS.values():
        assert pod["spec"]["terminationGracePeriodSeconds"] > Settings().drain + 5
    assert container_of(WORKERS["worker-gpu"])["resources"]["limits"]["nvidia.com/gpu"] == 1
    cpu = container_of(WORKERS["worker-cpu"])
    assert cpu["resources"]["limits"] == cpu["resources"]["requests"]
    (threads,) = (variable for variable in cpu["env"] if variable["name"] == "OMP_NUM_THREADS")
    assert threads["valueFrom"]["resourceFieldRef"]["resource"] == "limits.cpu"


def test_keda_scales_workers_by_exported_metrics(tmp_path: Path) -> None:
    scaled = named("ScaledObject")
    assert {found["spec"]["scaleTargetRef"]["name"] for found in scaled.values()} == set(WORKERS)
    for found in scaled.values():
        # KEDA sets the replicas, so the manifest must not.
        assert "replicas" not in named("Deployment")[found["spec"]["scaleTargetRef"]["name"]]["spec"]
        (trigger,) = found["spec"]["triggers"]
        assert trigger["type"] == "prometheus"
        metadata = trigger["metadata"]
        assert names_in(metadata["query"]) <= known()
        assert re.findall(r'queue="([^"]*)"', metadata["query"]) == [Settings().queue]
        assert float(metadata["threshold"]) > 0
        assert metadata["ignoreNullValues"] == "false"
        rules = [{"record": "wanted", "expr": metadata["query"]}]
        (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "keda", "rules": rules}]}))
        promtool("check", "rules", str(tmp_path / "rules.yml"))
    # The metrics pod reports the backlog while no worker runs.
    assert container_of(OURS["metrics"])["args"][0] == "metrics"
    assert named("Deployment")["metrics"]["spec"]["replicas"] == 1


def test_prometheus_scrapes_the_pods() -> None:
    (job,) = yaml.safe_load((DOCKER / "prometheus" / "kubernetes.yml").read_text())["scrape_configs"]
    (discovery,) = job["kubernetes_sd_configs"]
    assert discovery["namespaces"]["names"] == [KUSTOMIZATION["namespace"]]
    kept, by_label, _ = job["relabel_configs"]
    assert by_label["source_labels"] == ["__meta_kubernetes_pod_label_app_kubernetes_io_component"]
    for name, pod in OURS.items():
        ports = {port["name"] for port in container_of(pod)["ports"]}
        assert (kept["regex"] in ports) == (name != "flower")
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        assert component == {"bluesky": "live"}.get(name, name.partition("-")[0])
