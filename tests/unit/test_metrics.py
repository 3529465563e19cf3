"""Metrics: their names, what is served, and what dashboard and alerts make of them."""

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own
from prometheus_client.parser import text_string_to_metric_families

from producers.reddit import metrics as reddit_metrics
from shared import metrics
from shared.errors import SettingsError, UserError
from shared.metrics import REDIS_FIGURES, Figure, Kind, Sample, Server, Sum, serve
from shared.results import Counters
from shared.settings import Settings, load
from workers import metrics as worker_metrics
from workers.device import Device
from workers.statistics import Histogram, Statistics

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "metrics.md"
ALERTS = ROOT / "docker" / "prometheus" / "alerts.yml"
DASHBOARD = ROOT / "docker" / "grafana" / "dashboards" / "feedmill.json"
FIGURES: tuple[Figure, ...] = (*REDIS_FIGURES, *worker_metrics.FIGURES, *reddit_metrics.FIGURES)
#: What a gauge may be counted in: base units, and things.
UNITS = ("seconds", "bytes", "ratio", "messages", "tokens", "requests", "info", "up")
STATUS: dict[str, Any] = {
    "topics": 2, "subreddits": 4, "failing": ["x"], "polls": 7, "sent": 33, "skipped": 1, "held": 0, "paused": False,
    "looked": 3, "purged": 2, "gaps": 1, "faults": {"TooMany": 2}, "requests": 40, "budget": 90.0, "hindrance": "",
}  # fmt: skip


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_names_follow_prometheus(figure: Figure) -> None:
    assert re.fullmatch(r"feedmill_[a-z]+(_[a-z]+)*", figure.name)
    assert figure.name.endswith("_total") == (figure.kind is Kind.COUNTER)
    assert figure.help.endswith((".", ".)"))
    assert not set(figure.labels) & {"job", "instance", "le", "quantile"}
    for unit in ("milliseconds", "minutes", "kilobytes", "mb", "percent"):
        assert unit not in figure.name.split("_")


def test_no_name_comes_twice() -> None:
    names = [figure.name for figure in FIGURES]
    assert len(names) == len(set(names))
    assert set(metrics.RESULTS) == set(Counters._fields), "every counter of the store is told"


class Pipeline:
    """As much of a pipeline as is told of."""

    failure: BaseException | None = None

    def __init__(self) -> None:
        self.statistics = Statistics(60.0, 0.0)
        weights = SimpleNamespace(name=Settings().model)
        self.classifier = SimpleNamespace(kind="nli", device=None, weights=weights)
        self.budget = SimpleNamespace(tokens=2048)

    def waiting(self) -> int:
        return 12

    def oldest_age(self) -> float:
        return 0.5


class Clock:
    """Stands still but for what a test adds."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(worker_metrics, "time", clock)
    monkeypatch.setattr(reddit_metrics, "time", clock)
    return clock


@pytest.fixture
def worker(clock: Clock) -> worker_metrics.WorkerMetrics:  # noqa: ARG001 - the worker's
    """A worker's metrics, without a Redis."""
    settings = Settings.model_validate({"redis_url": "redis://127.0.0.1:1/0", "drain": 1})
    return worker_metrics.WorkerMetrics(settings, "one@here")


def loaded(worker: worker_metrics.WorkerMetrics, kind: str = "cpu") -> Pipeline:
    pipeline = Pipeline()
    pipeline.classifier.device = Device(torch.device(kind), torch.float16, "for a test")
    worker.loaded(pipeline, lambda: 4)  # type: ignore[arg-type]
    return pipeline


def scrape(server: Server, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=10)
    with closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


@pytest.fixture
def served() -> Iterator[Any]:
    servers = []

    def start(samples: Iterable[Sample] = (), health: Iterable[str] = (), ready: Iterable[str] = ()) -> Server:
        settings = Settings.model_validate({"metrics_port": 0})
        servers.append(serve(settings, [lambda: samples], lambda: list(health), lambda: list(ready)))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def values(text: str) -> dict[str, float]:
    """What was served, by name and labels."""
    return {
        f"{sample.name}{json.dumps(sample.labels, sort_keys=True)}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_worker_tells_what_it_has_done(worker: worker_metrics.WorkerMetrics, served: Any) -> None:
    assert list(worker.samples()) == [], "before its model is loaded there is nothing to tell"
    statistics = loaded(worker).statistics
    statistics.totals.posts, statistics.totals.answered, statistics.totals.failed = 5, 2, 1
    statistics.totals.messages, statistics.totals.queued_seconds = 3, 6.0
    statistics.count([SimpleNamespace(length=10), SimpleNamespace(length=6)], 0.02, 0.5)
    statistics.lag.add(0.3)
    server = served(list(worker.samples()))
    found = values(scrape(server)[1])
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
    info = {"classifier": "nli", "device": "cpu", "dtype": "float16", "node": "one@here", "queue": "feedmill"}
    assert found[f"feedmill_worker_info{json.dumps(info | {'model': Settings().model}, sort_keys=True)}"] == 1
    assert not any("device_memory" in name for name in found), "on a CPU the process' memory is what counts"


def test_a_gpu_tells_its_memory(worker: worker_metrics.WorkerMetrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=10))
    loaded(worker, "cuda:0")
    told = {sample.labels[0]: sample.value for sample in worker.samples() if sample.figure is worker_metrics.MEMORY}
    assert told == {"allocated": 3, "reserved": 4, "total": 10}


def test_every_figure_of_the_tables_is_told(
    worker: worker_metrics.WorkerMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_metrics, "_memory", lambda _: {"total": 1})
    loaded(worker)
    assert {sample.figure for sample in worker.samples()} == set(worker_metrics.FIGURES)
    daemon = reddit_metrics.Metrics(Settings())
    daemon.tell(STATUS)
    assert {sample.figure for sample in daemon.samples()} == set(reddit_metrics.FIGURES)
    for sample in [*worker.samples(), *daemon.samples()]:
        assert len(sample.labels) == len(sample.figure.labels)


def test_a_worker_from_loading_to_its_end(worker: worker_metrics.WorkerMetrics, clock: Clock) -> None:
    assert (worker.unhealthy(), worker.unready()) == ([], ["the model is being loaded"])
    pipeline = loaded(worker)
    assert worker.unready() == ["it is not connected to the queue yet"]
    worker.turn()
    (away,) = worker.unready()
    assert away.startswith("Redis at 127.0.0.1:1/0 does not answer (")
    # That Redis is away is no reason to start a worker again, however long.
    for _ in range(10):
        clock.now += 60.0
        assert worker.unhealthy() == []
    worker._redis.away = lambda: []  # type: ignore[method-assign]
    clock.now += 60.0
    assert (worker.unhealthy(), worker.unready()) == ([], []), "after an outage the consumer has time to come back"
    clock.now += 62.0
    assert worker.unhealthy() == worker.unready() == ["the consumer has not come round for 122 s"]
    worker.turn()
    assert worker.unhealthy() == []
    pipeline.failure = AssertionError("a bug")
    assert worker.unhealthy() == worker.unready() == ["a thread died: a bug"]


def test_the_daemon_from_its_start_on(clock: Clock) -> None:
    daemon = reddit_metrics.Metrics(Settings.model_validate({"redis_url": "redis://127.0.0.1:1/0"}))
    assert (daemon.unhealthy(), daemon.unready()) == ([], ["it has not read any topic yet"])
    assert list(daemon.samples()) == []
    daemon.tell(STATUS | {"polls": 0, "hindrance": "no connection to Reddit"})
    assert daemon.unready() == ["no connection to Reddit"]
    daemon.tell(STATUS | {"hindrance": "Reddit answered 500"})
    assert daemon.unready() == ["Reddit answered 500"]
    daemon.tell(STATUS)
    assert daemon.unready()[0].startswith("Redis at 127.0.0.1:1/0 does not answer")
    daemon._redis.away = lambda: []  # type: ignore[method-assign]
    assert daemon.unready() == []
    clock.now += 901.0
    assert daemon.unhealthy() == daemon.unready() == ["the daemon has not come round for 901 s"]


def test_what_is_not_known_is_absent() -> None:
    daemon = reddit_metrics.Metrics(Settings())
    daemon.tell(STATUS | {"budget": None, "faults": {}})
    assert "feedmill_reddit_budget_remaining_requests" not in {sample.figure.name for sample in daemon.samples()}


def test_what_is_served(served: Any) -> None:
    figure = Figure("feedmill_test_messages", Kind.GAUGE, "Of a test.", ("queue",))
    server = served([Sample(figure, 3, ('a"b',))], health=(), ready=["one thing", "another"])
    assert scrape(server, "/healthz") == (200, "ok\n")
    assert scrape(server, "/readyz") == (503, "one thing\nanother\n")
    status, text = scrape(server, "/")
    assert status == 404
    assert "/metrics, /healthz and /readyz" in text
    assert 'feedmill_test_messages{queue="a\\"b"} 3.0' in scrape(server)[1]
    status, text = scrape(server, Accept="application/openmetrics-text; version=1.0.0")
    assert (status, text.endswith("# EOF\n")) == (200, True)
    assert scrape(server, "/healthz", "HEAD") == (200, "")


def test_a_histogram_and_a_summary(served: Any) -> None:
    histogram = Histogram((1.0, 2.5))
    for value in (0.5, 1.0, 2.0, 99.0):
        histogram.add(value)
    spread = Figure("feedmill_test_seconds", Kind.HISTOGRAM, "Of a test.")
    summary = Figure("feedmill_test_wait_seconds", Kind.SUMMARY, "Of a test.")
    text = scrape(served([Sample(spread, histogram), Sample(summary, Sum(4, 10.0))]))[1]
    assert text.endswith(
        "# HELP feedmill_test_seconds Of a test.\n"
        "# TYPE feedmill_test_seconds histogram\n"
        'feedmill_test_seconds_bucket{le="1.0"} 2.0\n'
        'feedmill_test_seconds_bucket{le="2.5"} 3.0\n'
        'feedmill_test_seconds_bucket{le="+Inf"} 4.0\n'
        "feedmill_test_seconds_count 4.0\n"
        "feedmill_test_seconds_sum 102.5\n"
        "# HELP feedmill_test_wait_seconds Of a test.\n"
        "# TYPE feedmill_test_wait_seconds summary\n"
        "feedmill_test_wait_seconds_count 4.0\n"
        "feedmill_test_wait_seconds_sum 10.0\n"
    )


def test_what_cannot_be_told_is_an_error_and_the_server_goes_on(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    figure = Figure("feedmill_test_messages", Kind.GAUGE, "Of a test.")
    server = served([Sample(figure, "many")])  # type: ignore[arg-type]
    assert scrape(server)[0] == 500
    assert "cannot collect metrics" in caplog.text
    assert scrape(server, "/healthz")[0] == 200


def test_who_hangs_up_is_no_reason_for_words(served: Any, capfd: pytest.CaptureFixture[str]) -> None:
    server = served()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET /healthz HTTP/1.0\r\n")
    assert scrape(server, "/healthz")[0] == 200
    assert capfd.readouterr().err == ""


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = Settings.model_validate({"metrics_port": port})
        with pytest.raises(UserError, match=f"127.0.0.1:{port}: Address already in use. .*FEEDMILL_METRICS_PORT"):
            serve(settings, [], list, list)


def test_an_address_of_somebody_else() -> None:
    settings = Settings.model_validate({"metrics_port": 0, "metrics_address": "192.0.2.1"})
    with pytest.raises(UserError, match="192.0.2.1:0: Cannot assign requested address.*FEEDMILL_METRICS_ADDRESS"):
        serve(settings, [], list, list)
    with pytest.raises(SettingsError, match="^--metrics-address: should be .*http://here"):
        load(metrics_address="http://here")


def test_without_prometheus_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UserError, match=r"pip install 'feedmill\[monitor\]'"):
        serve(Settings(), [], list, list)


# Dashboard and alerts.


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\bfeedmill_\w+", expression))


def known() -> set[str]:
    """Every name that PromQL may use."""
    suffixes = {Kind.HISTOGRAM: ("_bucket", "_count", "_sum"), Kind.SUMMARY: ("_count", "_sum")}
    return {figure.name + suffix for figure in FIGURES for suffix in suffixes.get(figure.kind, ("",))}


def dashboard_expressions() -> dict[str, str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {
        f"{panel['id']}{target['refId']}": target["expr"] for panel in panels for target in panel.get("targets", ())
    }


def alert_rules() -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    return rules


def test_dashboard_and_alerts_use_what_there_is() -> None:
    used = [*dashboard_expressions().values(), *(rule["expr"] for rule in alert_rules())]
    for expression in used:
        assert names_in(expression) <= known(), expression
    shown = set().union(*map(names_in, dashboard_expressions().values()))
    stems = {re.sub(r"_(bucket|count|sum)$", "", name) for name in shown}
    left_out = {figure.name for figure in FIGURES} - stems
    trimmed = {"feedmill_results_trimmed_total", "feedmill_results_dead_trimmed_total"}
    assert left_out == trimmed, "the dashboard shows all but these"


def test_the_jobs_that_the_alerts_know_are_scraped() -> None:
    jobs = {job for rule in alert_rules() for job in re.findall(r'job="([^"]+)"', rule["expr"])}
    for file in ("prometheus.yml", "compose.yml"):
        configuration = yaml.safe_load((ALERTS.parent / file).read_text())
        scraped = {job["job_name"] for job in configuration["scrape_configs"]}
        assert scraped == jobs | {"feedmill-metrics"}
        assert all(name in (ALERTS.parent / "kubernetes.yml").read_text() for name in scraped)


def test_every_alert_is_told_and_tried() -> None:
    tried = yaml.safe_load((ALERTS.parent / "alerts_test.yml").read_text())["tests"]
    fired = {attempt["alertname"] for test in tried for attempt in test["alert_rule_test"] if attempt.get("exp_alerts")}
    rules = alert_rules()
    assert fired == {rule["alert"] for rule in rules}
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}
        assert f"`{rule['alert']}`" in PAGE.read_text()


def test_every_alert_has_its_part_in_the_operations_page() -> None:
    parts = re.findall(r"^### (Feedmill\w+)\n", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    rules = alert_rules()
    assert parts == [rule["alert"] for rule in rules]
    for rule in rules:
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"


def test_no_two_panels_lie_on_each_other() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = [
        (x, y)
        for panel in panels
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(places) == len(set(places))
    assert len({panel["id"] for panel in panels}) == len(panels)


def promtool(*arguments: str) -> None:
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("needs promtool: apt install prometheus")
    ran = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("check", "file"),
    [
        (("check", "rules"), "alerts.yml"),
        (("check", "config"), "prometheus.yml"),
        (("check", "config"), "compose.yml"),
        (("test", "rules"), "alerts_test.yml"),
    ],
    ids=["rules", "configuration", "in compose", "alerts tried"],
)
def test_promtool_agrees(check: tuple[str, ...], file: str) -> None:
    promtool(*check, str(ALERTS.parent / file))


def test_promtool_agrees_with_what_is_for_kubernetes(tmp_path: Path) -> None:
    """But for the pods: Debian's promtool is built without Kubernetes."""
    configuration = yaml.safe_load((ALERTS.parent / "kubernetes.yml").read_text())
    assert configuration.pop("rule_files") == [ALERTS.name]
    del configuration["scrape_configs"][0]["kubernetes_sd_configs"]
    path = tmp_path / "kubernetes.yml"
    path.write_text(json.dumps(configuration))
    promtool("check", "config", str(path))


def test_the_dashboards_expressions_are_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{name}", "expr": expression.replace("$__rate_interval", "1m")}
        for name, expression in dashboard_expressions().items()
    ]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", str(path))
