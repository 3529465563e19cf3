"""Metrics: names, values, the HTTP server, and their use in the dashboard and alerts."""

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own
from prometheus_client.parser import text_string_to_metric_families

from feedmill.producers.live import daemon as live_metrics
from feedmill.shared.errors import SettingsError, UserError
from feedmill.shared.metrics import (
    REDIS_METRICS,
    SYSTEM_METRICS,
    Metric,
    MetricsServer,
    Values,
    declare,
    serve,
)
from feedmill.shared.settings import Settings, load
from feedmill.workers.models.device import Device
from feedmill.workers.pipeline.statistics import Statistics
from feedmill.workers.runtime import metrics as worker_metrics
from tests.fakes.clock import SimulatedClock
from tests.support import ROOT, fetch, naming, wait_until

ALERTS = ROOT / "docker" / "prometheus" / "alerts.yml"
DASHBOARD = ROOT / "docker" / "grafana" / "dashboards" / "feedmill.json"
METRICS: tuple[Metric, ...] = (
    *REDIS_METRICS,
    *SYSTEM_METRICS,
    *worker_metrics.METRICS,
    *live_metrics.METRICS,
)
STATUS: dict[str, Any] = {
    "read": 100, "sent": 33, "skipped": 1, "filtered": 20, "refused": 2, "ahead": 1,
    "unreadable": 1, "purged": 3,
    "gaps": 1, "gaps_recorded": 1, "connections": 4, "faults": {"source": 3}, "paused": True,
    "delay": 1.5,
    "hindrance": "reddit: the server answered 502",
    "topics": 2, "subreddits": 4, "failing": ["x"], "polls": 7,
    "rechecked": 3, "returned": 1, "filled": 1, "requests": 40, "budget": 90.0, "earlier": 2,
    "steps_back": 1, "feeds": 3, "failing_feeds": ["y"], "switches": 2,
}  # fmt: skip


class Pipeline:
    """The parts of a pipeline that metrics read."""

    failure: BaseException | None = None

    def __init__(self) -> None:
        self.statistics = Statistics(0.0)
        weights = SimpleNamespace(name=Settings().model)
        self.classifier = SimpleNamespace(kind="nli", device=None, weights=weights)
        self.backlog = SimpleNamespace(
            oldest_age=lambda: 0.5, loaded=SimpleNamespace(budget=2048)
        )

    def waiting(self) -> int:
        return 12


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimulatedClock:
    clock = SimulatedClock()
    monkeypatch.setattr(worker_metrics, "time", clock)
    monkeypatch.setattr(live_metrics, "time", clock)
    return clock


@pytest.fixture
def worker(clock: SimulatedClock) -> worker_metrics.WorkerMetrics:  # noqa: ARG001 - replaces its clock
    """A worker's metrics, without a Redis."""
    settings = Settings.model_validate(
        {"redis_url": "redis://127.0.0.1:1/0", "drain": 1}
    )
    return worker_metrics.WorkerMetrics(settings, "one@here")


def loaded(worker: worker_metrics.WorkerMetrics, kind: str = "cpu") -> Pipeline:
    pipeline = Pipeline()
    pipeline.classifier.device = Device(torch.device(kind), torch.float16, "for a test")
    worker.loaded(pipeline, lambda: 4)  # type: ignore[arg-type]
    return pipeline


def scrape(
    server: MetricsServer, path: str = "/metrics", **headers: str
) -> tuple[int, str]:
    return fetch(f"http://127.0.0.1:{server.server_port}{path}", **headers)[:2]


@pytest.fixture
def served() -> Iterator[Any]:
    servers = []

    def start(
        metrics: Iterable[Metric] = (),
        values: Values | None = None,
        ready: Iterable[str] = (),
    ) -> MetricsServer:
        settings = Settings.model_validate({"metrics_port": 0})
        servers.append(
            serve(
                settings, [(metrics, lambda: values or {})], list, lambda: list(ready)
            )
        )
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def values(text: str) -> dict[str, float]:
    """Parse served metrics into values by name and labels."""
    return {
        f"{sample.name}{json.dumps(sample.labels, sort_keys=True)}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize(
    "start", [b"", b"GET /met", b"GET /metrics HTTP/1.1\r\nX-Odd: "]
)
def test_a_dribbled_request_holds_no_thread(
    served: Any, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr("feedmill.shared.metrics.HTTP_TIMEOUT_S", 0.5)
    server = served()
    with socket.create_connection(("127.0.0.1", server.server_port)) as client:
        client.sendall(start)
        client.setblocking(False)

        def is_closed() -> bool:
            try:
                client.send(b"x")
                return client.recv(1) == b""
            except BlockingIOError:
                return False
            except OSError:
                return True

        wait_until(is_closed, "the server ends the connection")
    assert scrape(server, "/healthz") == (200, "ok\n")


def test_worker_exports_its_statistics(
    worker: worker_metrics.WorkerMetrics, served: Any
) -> None:
    assert worker.values() == {}, "nothing before the model is loaded"
    statistics = loaded(worker).statistics
    statistics.totals.posts, statistics.totals.answered, statistics.totals.failed = (
        5,
        2,
        1,
    )
    statistics.totals.messages, statistics.totals.queued_seconds = 3, 6.0
    statistics.count([SimpleNamespace(length=10), SimpleNamespace(length=6)], 0.02, 0.5)
    statistics.lag.add(0.3)
    found = values(scrape(served(worker_metrics.METRICS, worker.values()))[1])
    assert found['feedmill_worker_posts_total{"state": "classified"}'] == 5
    assert found['feedmill_worker_posts_total{"state": "answered"}'] == 2
    assert found['feedmill_worker_posts_total{"state": "failed"}'] == 1
    assert found["feedmill_worker_rows_total{}"] == 2
    assert found['feedmill_worker_batch_rows_bucket{"le": "1.0"}'] == 0
    assert found['feedmill_worker_batch_rows_bucket{"le": "2.0"}'] == 1
    assert found['feedmill_worker_batch_tokens_bucket{"le": "+Inf"}'] == 1
    assert found["feedmill_worker_batch_tokens_sum{}"] == 20
    assert found["feedmill_worker_batch_padding_ratio_sum{}"] == pytest.approx(0.2)
    assert found["feedmill_worker_forward_seconds_sum{}"] == 0.02
    assert found["feedmill_worker_device_busy_seconds_total{}"] == 0.01
    assert found["feedmill_worker_queue_wait_seconds_count{}"] == 3
    assert found['feedmill_results_lag_seconds_bucket{"le": "0.5"}'] == 1
    assert found["feedmill_worker_rows_waiting{}"] == 12
    assert found['feedmill_worker_messages_held{"queue": "feedmill"}'] == 4
    assert found["process_resident_memory_bytes{}"] > 0
    info = {
        "classifier": "nli",
        "device": "cpu",
        "dtype": "float16",
        "node": "one@here",
        "queue": "feedmill",
    }
    assert (
        found[
            f"feedmill_worker_info{json.dumps(info | {'model': Settings().model}, sort_keys=True)}"
        ]
        == 1
    )
    assert not any("device_memory" in name for name in found), (
        "a CPU has no device memory"
    )


def test_every_declared_metric_is_exported(
    worker: worker_metrics.WorkerMetrics,
) -> None:
    loaded(worker)
    live = live_metrics.LiveMetrics(Settings(), "reddit")
    live.update(STATUS)
    for metrics, found in (
        (worker_metrics.METRICS, worker.values()),
        (live_metrics.METRICS, live.values()),
    ):
        assert {metric.name for metric in metrics} == found.keys()


def test_daemons_export_their_status(served: Any) -> None:
    live = live_metrics.LiveMetrics(Settings(), "reddit")
    live.update(STATUS | {"budget": None})
    found = values(scrape(served(live_metrics.METRICS, live.values()))[1])
    assert found['feedmill_live_hindered{"source": "reddit"}'] == 1
    assert found['feedmill_live_delay_seconds{"source": "reddit"}'] == 1.5
    assert (
        found['feedmill_live_faults_total{"kind": "source", "source": "reddit"}'] == 3
    )
    assert found['feedmill_live_subreddits_failing{"source": "reddit"}'] == 1
    assert 'feedmill_live_budget_remaining_requests{"source": "reddit"}' not in found, (
        "unknown values are absent"
    )


def test_worker_health_from_loading_to_failure(
    worker: worker_metrics.WorkerMetrics, clock: SimulatedClock
) -> None:
    assert worker.unhealthy() == []
    (loading,) = worker.unready()
    assert "model" in loading
    pipeline = loaded(worker)
    (unconnected,) = worker.unready()
    assert "queue" in unconnected
    worker.heartbeat()
    (unreachable,) = worker.unready()
    assert "127.0.0.1:1/0" in unreachable
    # An unreachable Redis never makes a worker unhealthy, which would restart it.
    for _ in range(10):
        clock.wait(60.0)
        worker.redis_away()
        assert worker.unhealthy() == []
    clock.wait(600.0)
    assert worker.unhealthy() == [], "Redis is away, and the consumer waits for it"
    worker.redis_away()
    worker._redis.ping = lambda **_: True  # type: ignore[method-assign]
    clock.wait(60.0)
    assert (worker.unhealthy(), worker.unready()) == ([], []), (
        "after an outage the consumer has time to reconnect"
    )
    clock.wait(62.0)
    (stuck,) = worker.unhealthy()
    assert re.search(r"consumer.*\b122 s", stuck)
    assert worker.unready() == [stuck]
    worker.heartbeat()
    assert worker.unhealthy() == []
    pipeline.failure = AssertionError("a bug")
    (died,) = worker.unhealthy()
    assert "a bug" in died
    assert worker.unready() == [died]


def test_asking_for_health_does_not_change_it(
    worker: worker_metrics.WorkerMetrics, clock: SimulatedClock
) -> None:
    """Else a probe during an outage postpones the next report, and another does not."""
    loaded(worker)
    worker.heartbeat()
    clock.wait(300.0)
    assert worker.unhealthy() == [], "Redis is unreachable"
    worker._redis.ping = lambda **_: True  # type: ignore[method-assign]
    (stuck,) = worker.unhealthy()
    assert re.search(r"consumer.*\b300 s", stuck)


def test_daemon_health_from_start_to_failure(clock: SimulatedClock) -> None:
    daemon = live_metrics.LiveMetrics(
        Settings.model_validate({"redis_url": "redis://127.0.0.1:1/0"}), "reddit"
    )
    assert daemon.unhealthy() == []
    (starting,) = daemon.unready()
    assert "not read" in starting
    assert daemon.values() == {}
    daemon.update(STATUS | {"read": 0, "hindrance": "no connection to Reddit"})
    assert daemon.unready() == ["no connection to Reddit"]
    daemon.update(STATUS | {"hindrance": "Reddit answered 500"})
    assert daemon.unready() == ["Reddit answered 500"]
    daemon.update(STATUS | {"hindrance": ""})
    assert "127.0.0.1:1/0" in daemon.unready()[0]
    daemon._redis.ping = lambda **_: True  # type: ignore[method-assign]
    assert daemon.unready() == []
    clock.wait(901.0)
    (stuck,) = daemon.unhealthy()
    assert re.search(r"daemon.*\b901 s", stuck)
    assert daemon.unready() == [stuck]


def test_serves_metrics_and_health(served: Any) -> None:
    metrics = declare(gauge={"feedmill_test_messages{queue}": "Of a test."})
    server = served(
        metrics,
        {"feedmill_test_messages": {'a"b': 3, "c": None}},
        ready=["one thing", "another"],
    )
    assert scrape(server, "/healthz") == (200, "ok\n")
    assert scrape(server, "/readyz") == (503, "one thing\nanother\n")
    status, text = scrape(server, "/")
    assert (status, "/metrics" in text, "/healthz" in text, "/readyz" in text) == (
        404,
        True,
        True,
        True,
    )
    assert 'feedmill_test_messages{queue="a\\"b"} 3.0' in scrape(server)[1]
    assert 'queue="c"' not in scrape(server)[1]
    status, text = scrape(server, Accept="application/openmetrics-text; version=1.0.0")
    assert (status, text.endswith("# EOF\n")) == (200, True)


def test_rejects_an_address_of_another_machine() -> None:
    settings = Settings.model_validate(
        {"metrics_port": 0, "metrics_address": "192.0.2.1"}
    )
    with pytest.raises(
        UserError, match=naming("192.0.2.1:0", "FEEDMILL_METRICS_ADDRESS")
    ):
        serve(settings, [], list, list)
    with pytest.raises(SettingsError, match="^--metrics-address: "):
        load(metrics_address="http://here")


# Dashboard and alerts.


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\bfeedmill_\w+", expression))


def known() -> set[str]:
    """Return the names of all time series, for use in PromQL."""
    suffixes = {
        "histogram": ("_bucket", "_count", "_sum"),
        "summary": ("_count", "_sum"),
    }
    return {
        metric.name + suffix
        for metric in METRICS
        for suffix in suffixes.get(metric.kind, ("",))
    }


def dashboard_expressions() -> dict[str, str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {
        f"{panel['id']}{target['refId']}": target["expr"]
        for panel in panels
        for target in panel.get("targets", ())
    }


def alert_rules() -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"][0][
        "rules"
    ]
    return rules


def test_dashboard_and_alerts_use_existing_metrics() -> None:
    used = [
        *dashboard_expressions().values(),
        *(rule["expr"] for rule in alert_rules()),
    ]
    for expression in used:
        assert names_in(expression) <= known(), expression
    shown = set().union(*map(names_in, dashboard_expressions().values()))
    stems = {re.sub(r"_(bucket|count|sum)$", "", name) for name in shown}
    left_out = {metric.name for metric in METRICS} - stems
    trimmed = {"feedmill_results_trimmed_total", "feedmill_results_dead_trimmed_total"}
    assert left_out == trimmed, "the dashboard shows all but these"


def test_jobs_named_in_alerts_are_scraped() -> None:
    jobs = {
        job
        for rule in alert_rules()
        for job in re.findall(r'job="([^"]+)"', rule["expr"])
    }
    for file in ("prometheus.yml", "compose.yml"):
        configuration = yaml.safe_load((ALERTS.parent / file).read_text())
        scraped = {job["job_name"] for job in configuration["scrape_configs"]}
        assert scraped == jobs | {"feedmill-metrics"}
        assert all(
            name in (ALERTS.parent / "kubernetes.yml").read_text() for name in scraped
        )


def test_every_alert_is_documented_and_tested() -> None:
    tests = yaml.safe_load((ALERTS.parent / "alerts_test.yml").read_text())["tests"]
    fired = {
        attempt["alertname"]
        for test in tests
        for attempt in test["alert_rule_test"]
        if attempt.get("exp_alerts")
    }
    rules = alert_rules()
    assert fired == {rule["alert"] for rule in rules}
    sections = re.findall(
        r"^### (Feedmill\w+)\n",
        (ROOT / "docs" / "operations.md").read_text(),
        re.MULTILINE,
    )
    assert sections == [rule["alert"] for rule in rules]
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}
        assert (
            rule["annotations"]["runbook"]
            == f"docs/operations.md#{rule['alert'].lower()}"
        )


def promtool(*arguments: str) -> None:
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("needs promtool: apt install prometheus")
    ran = subprocess.run(
        [path, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("check", "file"),
    [
        (("check", "rules"), "alerts.yml"),
        (("check", "config"), "prometheus.yml"),
        (("check", "config"), "compose.yml"),
        (("test", "rules"), "alerts_test.yml"),
    ],
    ids=["rules", "configuration", "compose", "alert tests"],
)
def test_promtool_accepts_the_configuration(check: tuple[str, ...], file: str) -> None:
    promtool(*check, str(ALERTS.parent / file))


def test_promtool_accepts_the_kubernetes_configuration(tmp_path: Path) -> None:
    """The test leaves out service discovery, because Debian's promtool is built without
    Kubernetes.
    """
    configuration = yaml.safe_load((ALERTS.parent / "kubernetes.yml").read_text())
    assert configuration.pop("rule_files") == [ALERTS.name]
    del configuration["scrape_configs"][0]["kubernetes_sd_configs"]
    path = tmp_path / "kubernetes.yml"
    path.write_text(json.dumps(configuration))
    promtool("check", "config", str(path))


def test_dashboard_expressions_are_valid_promql(tmp_path: Path) -> None:
    rules = [
        {
            "record": f"panel:{name}",
            "expr": expression.replace("$__rate_interval", "1m"),
        }
        for name, expression in dashboard_expressions().items()
    ]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", str(path))
