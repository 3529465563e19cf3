"""The Helm chart renders what docker/kubernetes has, and its values do what they say.

Helm's own library renders in another process: its Go runtime takes over signals.
"""

import json
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]

import feedmill
from feedmill.shared.broker import queue_lists
from tests.support import ROOT

KUBERNETES = ROOT / "docker" / "kubernetes"
CHART = ROOT / "docker" / "helm" / "feedmill"
#: Print the result of linting the chart, and its rendered templates or what Helm refused.
RENDER = """
import json, sys
import helm_python
chart, values = sys.argv[1], json.loads(sys.argv[2])
helm_python.disable_logging()
lint = helm_python.lint(chart, values, strict=True)
try:
    with helm_python.Chart.load(chart) as loaded:
        loaded.validate_schema(values)
        rendered = loaded.render(values, name="feedmill", namespace="feedmill")
except helm_python.HelmError as error:
    rendered = {"refused": str(error)}
print(json.dumps([lint, rendered]))
"""
#: Values for each thing that a user can choose.
CHOICES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "redis elsewhere": {
        "redis": {"enabled": False, "scheme": "rediss", "host": "redis.example.org"}
    },
    "keda": {"keda": {"enabled": True, "priorities": [0, 9]}},
    "budgets": {"podDisruptionBudget": {"enabled": True}},
    "policies": {"networkPolicy": {"pagesFrom": ["ingress-nginx"]}},
    "bluesky": {"bluesky": {"enabled": True}, "ingest": {"enabled": False}},
    "only cpu": {"workers": {"gpu": {"enabled": False}, "cpu": {"replicas": 3}}},
    "settings": {"settings": {"FEEDMILL_MODEL": "example/model", "FEEDMILL_DRAIN": 20}},
}

Objects = dict[tuple[str, str], dict[str, Any]]


@cache
def run_helm(values: str) -> Any:
    if find_spec("helm_python") is None:
        pytest.skip("needs Helm: pip install helm-python-sdk")
    command = [sys.executable, "-c", RENDER, str(CHART), values]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def render(values: dict[str, Any]) -> Objects:
    _, rendered = run_helm(json.dumps(values))
    assert "refused" not in rendered, rendered
    return by_name("\n---\n".join(rendered.values()))


def by_name(text: str) -> Objects:
    found: Objects = {}
    for each in yaml.safe_load_all(text):
        if each:
            key = (each["kind"], each["metadata"]["name"])
            assert key not in found
            found[key] = each
    return found


def manifests() -> Objects:
    texts = [file.read_text() for file in sorted(KUBERNETES.glob("*.yaml"))]
    return by_name("\n---\n".join(texts))


def pods(objects: Objects) -> list[dict[str, Any]]:
    return [
        found["spec"]["template"]["spec"]
        for (kind, _), found in objects.items()
        if kind in ("Deployment", "StatefulSet")
    ]


def test_defaults_render_the_manifests() -> None:
    """The namespace is Helm's to create; KEDA and Bluesky are off, as in kustomization."""
    rendered = render({})
    configuration = rendered.pop(("ConfigMap", "redis"))
    expected = manifests()
    for key in list(expected):
        if key[0] in ("Namespace", "ScaledObject") or key[1] == "bluesky":
            del expected[key]
    assert rendered == expected
    files = {
        name: (ROOT / "docker" / name).read_text() for name in configuration["data"]
    }
    assert configuration["data"] == files
    assert set(files) == {"redis.conf", "redis.sh", "users.conf"}


def test_bluesky_is_that_of_the_manifests() -> None:
    key = ("Deployment", "bluesky")
    assert render(CHOICES["bluesky"])[key] == manifests()[key]


@pytest.mark.parametrize("choice", CHOICES)
def test_objects_match_kubernetes_schemas(choice: str) -> None:
    lint, _ = run_helm(json.dumps(CHOICES[choice]))
    assert [each for each in lint["messages"] if each["severity"] > 1] == []
    for (kind, _), found in render(CHOICES[choice]).items():
        if kind != "ScaledObject":  # KEDA's kind
            version = kubernetes_validate.latest_version()
            kubernetes_validate.validate(found, version, strict=True)


@pytest.mark.parametrize("choice", CHOICES)
def test_pods_have_least_privileges(choice: str) -> None:
    for pod in pods(render(CHOICES[choice])):
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_redis_of_your_own() -> None:
    objects = render(CHOICES["redis elsewhere"])
    assert ("StatefulSet", "redis") not in objects
    assert ("NetworkPolicy", "redis") not in objects
    for pod in pods(objects):
        values = {
            each["name"]: each.get("value") for each in pod["containers"][0]["env"]
        }
        url = values["FEEDMILL_REDIS_URL"]
        assert url.startswith("rediss://")
        assert url.endswith("@redis.example.org:6379/0")


def test_keda_reads_the_lists_of_the_queue() -> None:
    objects = render(CHOICES["keda"])
    for device in ("cpu", "gpu"):
        scaled = objects["ScaledObject", f"worker-{device}"]["spec"]
        assert scaled["scaleTargetRef"] == {"name": f"worker-{device}"}
        names = [trigger["metadata"]["listName"] for trigger in scaled["triggers"]]
        assert names == [queue_lists("feedmill")[0], queue_lists("feedmill")[-1]]
        worker = objects["Deployment", f"worker-{device}"]["spec"]
        assert "replicas" not in worker
        (container,) = worker["template"]["spec"]["containers"]
        variables = {each["name"] for each in container["env"]}
        for trigger in scaled["triggers"]:
            assert trigger["metadata"]["usernameFromEnv"] in variables
            assert trigger["metadata"]["passwordFromEnv"] in variables
    (rule,) = objects["NetworkPolicy", "redis"]["spec"]["ingress"]
    assert len(rule["from"]) == 2


def test_budgets_and_policies_select_pods() -> None:
    labels = [
        found["spec"]["template"]["metadata"]["labels"]
        for (kind, _), found in render({}).items()
        if kind in ("Deployment", "StatefulSet")
    ]
    objects = render(CHOICES["budgets"]) | render(CHOICES["policies"])
    selectors = []
    for (kind, _), found in objects.items():
        if kind == "PodDisruptionBudget":
            selectors.append(found["spec"]["selector"]["matchLabels"])
        if kind == "NetworkPolicy":
            selectors.append(found["spec"]["podSelector"]["matchLabels"])
    assert len(selectors) == 5
    for selector in selectors:
        assert any(selector.items() <= each.items() for each in labels)


def test_settings_reach_the_workers() -> None:
    objects = render(CHOICES["settings"])
    env = objects["Deployment", "worker-cpu"]["spec"]["template"]["spec"]["containers"][
        0
    ]["env"]
    assert {"name": "FEEDMILL_MODEL", "value": "example/model"} in env
    assert {"name": "FEEDMILL_DRAIN", "value": "20"} in env
    assert (
        render(CHOICES["only cpu"])["Deployment", "worker-cpu"]["spec"]["replicas"] == 3
    )


@pytest.mark.parametrize(
    "values",
    [
        {"redis": {"hostname": "x"}},
        {"settings": {"MODEL": "x"}},
        {"keda": {"priorities": [10]}},
    ],
)
def test_refuses_unknown_values(values: dict[str, Any]) -> None:
    _, rendered = run_helm(json.dumps(values))
    assert "refused" in rendered


def test_versions_are_those_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == feedmill.__version__
