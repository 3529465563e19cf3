"""Traces, metrics and logs of a real worker, as a collector of OpenTelemetry receives them."""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, signals

from feedmill.shared.metrics import REDIS_METRICS
from feedmill.workers.runtime.metrics import METRICS
from tests.fakes.collector import Collector, Span, collecting
from tests.support import (
    Feedmill,
    RedisServer,
    application,
    as_jsonl,
    feedmill,
    fetch,
    free_port,
    make_posts,
    run,
    running,
    wait_until,
    wait_until_empty,
    working,
)

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"
#: Words of the posts of `make_posts`, and the label that they are asked for.
SECRETS = ("weather", "rain and wind", "p7")
#: Milliseconds after which spans and metrics are sent.
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_METRIC_EXPORT_INTERVAL": "200"}
STEPS = ["prepare", "forward", "store", "acknowledge"]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(collector: Collector) -> dict[str, str]:
    """The environment of a traced process."""
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, **SOON}


@pytest.fixture(scope="module")
def worker(
    redis_server: RedisServer,
    traced: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Feedmill]:
    """A traced worker that sends metrics, too, and logs JSON."""
    with working(
        redis_server,
        tmp_path_factory.mktemp("worker"),
        FEEDMILL_LOG_FORMAT="json",
        OTEL_METRICS_EXPORTER="otlp",
        **traced,
    ) as worker:
        yield worker
        assert worker.end() == 0, worker.text()
        assert "cannot record spans" not in worker.text()


def send(app: Celery, *posts: dict[str, Any], **options: Any) -> Any:
    """Send a message as another application does; return its task's result."""
    return app.send_task("feedmill.classify", kwargs={"posts": posts}, **options)


def spans_of(collector: Collector, trace_id: str, name: str = "process") -> list[Span]:
    """Return a trace's spans, once that of the name is among them."""

    def spans() -> list[Span]:
        return [span for span in collector.spans() if span.trace_id == trace_id]

    wait_until(
        lambda: name in [span.name.split()[0] for span in spans()],
        f"the span {name} of trace {trace_id} arrives",
    )
    return spans()


def process_of(collector: Collector, task_id: str) -> Span:
    """Return the span of a message in the worker, once it has arrived."""

    def found() -> list[Span]:
        return [
            span
            for span in collector.spans("process")
            if span.attributes["messaging.message.id"] == task_id
        ]

    wait_until(found, f"the span of message {task_id} arrives")
    return found()[0]


def by_name(spans: list[Span]) -> dict[str, Span]:
    return {span.name.split()[0]: span for span in spans}


def check_message(spans: list[Span], *, is_published_by_feedmill: bool = True) -> None:
    """Check the tree of a message's spans, and the order of their times."""
    named = by_name(spans)
    assert len(named) == len(spans)
    process = named["process"]
    wait = named.get("wait")
    if is_published_by_feedmill:
        publish = named["publish"]
        assert wait is not None
        assert wait.parent_id == process.parent_id == publish.span_id
        # The wait begins at the message's own time, just before Redis has answered.
        assert publish.began_at <= wait.began_at <= publish.ended_at
        assert wait.ended_at == process.began_at
    steps = [named[name] for name in STEPS if name in named]
    before = process.began_at
    for step in steps:
        assert step.parent_id == process.span_id
        assert before <= step.began_at <= step.ended_at, step
        before = step.ended_at
    assert process.ended_at == named["acknowledge"].ended_at
    assert all(span.began_at <= span.ended_at for span in spans)


@pytest.mark.usefixtures("worker")
def test_each_message_has_a_trace(
    redis_server: RedisServer,
    collector: Collector,
    traced: dict[str, str],
    tmp_path: Path,
) -> None:
    (tmp_path / "posts.jsonl").write_text(as_jsonl(make_posts(96)))
    sent = feedmill(
        "enqueue",
        "posts.jsonl",
        "--run",
        "monday",
        "--labels",
        "weather,food",
        cwd=tmp_path,
        FEEDMILL_REDIS_URL=redis_server.url,
        FEEDMILL_POSTS_PER_MESSAGE="8",
        **traced,
    )
    assert sent.returncode == 0, sent.stderr
    wait_until_empty(redis_server.client)

    def of_run() -> list[Span]:
        return [
            span
            for span in collector.spans("process")
            if span.attributes.get("feedmill.run") == "monday"
        ]

    wait_until(lambda: len(of_run()) == 12, "the spans of twelve messages arrive")
    forwards: dict[str, Span] = {}
    for process in of_run():
        spans = spans_of(collector, process.trace_id, "publish")
        check_message(spans)
        named = by_name(spans)
        assert set(named) == {"publish", "wait", "process", *STEPS}
        assert process.attributes["feedmill.posts"] == 8
        assert process.attributes["messaging.destination.name"] == "feedmill"
        assert named["publish"].resource["service.name"] == "feedmill"
        assert process.resource["service.name"] == "feedmill-worker"
        assert not named["publish"].parent_id
        assert (named["publish"].kind, process.kind) == (4, 5)  # producer, consumer
        forwards[named["forward"].span_id] = named["forward"]

    def batches() -> list[Span]:
        return [
            batch
            for batch in collector.spans("micro-batch")
            if any(link.span_id in forwards for link in batch.links)
        ]

    wait_until(
        lambda: sum(batch.attributes["feedmill.posts"] for batch in batches()) == 96,
        "the spans of all micro-batches arrive",
    )
    links_of_forwards = defaultdict(set)
    for forward in forwards.values():
        assert forward.attributes["feedmill.micro_batches"] == len(forward.links)
        for link in forward.links:
            links_of_forwards[link.span_id].add(forward.span_id)
    for batch in batches():
        # Links lead both ways.
        assert {link.span_id for link in batch.links} == links_of_forwards[
            batch.span_id
        ]
        assert len(batch.links) == batch.attributes["feedmill.messages"]
        assert not batch.parent_id
        assert batch.trace_id not in {span.trace_id for span in forwards.values()}
        assert (
            0
            < batch.attributes["feedmill.tokens"]
            <= batch.attributes["feedmill.padded_tokens"]
        )
        assert batch.attributes["feedmill.device"] == "cpu"
        assert batch.attributes["feedmill.model"].endswith("MiniLM-L6-v2")
        assert len(batch.attributes["feedmill.weights"]) == 64
        for link in batch.links:
            assert forwards[link.span_id].began_at <= batch.began_at
            assert batch.ended_at <= forwards[link.span_id].ended_at
    # Messages come together, while at most a few of them are on the device.
    assert max(batch.attributes["feedmill.messages"] for batch in batches()) > 1
    everything = str(collector.spans())
    assert not [secret for secret in SECRETS if secret in everything]


@pytest.mark.usefixtures("worker")
def test_a_stock_clients_trace_goes_on(
    redis_server: RedisServer, collector: Collector
) -> None:
    """The client's instrumentation writes its headers in the signal before_task_publish."""

    def inject(headers: dict[str, Any], **_: Any) -> None:
        headers["traceparent"] = TRACEPARENT
        headers["tracestate"] = "vendor=a:1"

    signals.before_task_publish.connect(inject)
    try:
        app = application(redis_server)
        link = app.signature("elsewhere.task", queue="elsewhere")
        send(app, {"id": "stock", "title": "A goal"}, task_id="stock", link=link).get(
            timeout=60
        )
    finally:
        signals.before_task_publish.disconnect(inject)
    process = process_of(collector, "stock")
    assert process.trace_id == TRACE
    assert process.parent_id == SPAN
    assert process.state == "vendor=a:1"
    spans = spans_of(collector, TRACE)
    # Its sender names no time, so the length of the wait is unknown.
    assert "wait" not in by_name(spans)
    check_message(spans, is_published_by_feedmill=False)
    # The trace goes on in the message that the link sends.
    wait_until(lambda: redis_server.client.llen("elsewhere"), "the link is sent")
    headers = json.loads(str(redis_server.client.lpop("elsewhere")))["headers"]
    assert headers["traceparent"] == f"00-{TRACE}-{process.span_id}-01"
    assert headers["tracestate"] == "vendor=a:1"


HOSTILE: list[dict[str, Any]] = [
    {"traceparent": "00-zz"},
    {"traceparent": [TRACEPARENT], "tracestate": {"a": 1}},
    {"traceparent": "0" * 100_000},
    {"traceparent": f"00-{'0' * 32}-{SPAN}-01"},
    {"traceparent": None, "tracestate": "k=1," * 100_000},
    {"baggage": "evil=1," * 10_000},
]


@pytest.mark.usefixtures("worker")
def test_hostile_headers_are_ignored(
    redis_server: RedisServer, collector: Collector
) -> None:
    app = application(redis_server)
    for number, headers in enumerate(HOSTILE):
        task_id = f"hostile-{number}"
        post = {"id": task_id, "title": "A goal"}
        send(app, post, task_id=task_id, headers=headers).get(timeout=60)
        process = process_of(collector, task_id)
        assert not process.parent_id
        assert set(process.trace_id) != {"0"}
        assert not process.state
    assert "evil" not in str(collector.spans())


@pytest.mark.usefixtures("worker")
def test_a_long_tracestate_is_dropped_alone(
    redis_server: RedisServer, collector: Collector
) -> None:
    trace_id = "1" * 32
    headers = {"traceparent": f"00-{trace_id}-{SPAN}-01", "tracestate": "k=1," * 1000}
    post = {"id": "long", "title": "A goal"}
    send(application(redis_server), post, task_id="long", headers=headers).get(
        timeout=60
    )
    process = process_of(collector, "long")
    assert (process.trace_id, process.state) == (trace_id, "")


@pytest.mark.usefixtures("worker")
def test_an_unsampled_trace_is_not_recorded(
    redis_server: RedisServer, collector: Collector
) -> None:
    trace_id = "2" * 32
    headers = {"traceparent": f"00-{trace_id}-{SPAN}-00"}
    app = application(redis_server)
    for task_id, given in (("unsampled", headers), ("sampled", {})):
        post = {"id": task_id, "title": "A goal"}
        send(app, post, task_id=task_id, headers=given).get(timeout=60)
    process_of(collector, "sampled")
    assert trace_id not in {span.trace_id for span in collector.spans()}


def test_a_failed_message_is_marked_and_logged_with_its_trace(
    redis_server: RedisServer, collector: Collector, worker: Feedmill
) -> None:
    trace_id = "3" * 32
    headers = {"traceparent": f"00-{trace_id}-{SPAN}-01"}
    post = {"id": "no-text", "run": "tuesday"}
    result = send(application(redis_server), post, task_id="failed", headers=headers)
    with pytest.raises(Exception, match="no-text"):
        result.get(timeout=60)
    process = process_of(collector, "failed")
    assert process.attributes["feedmill.failed_posts"] == 1
    assert process.attributes["feedmill.run"] == "tuesday"
    wait_until(lambda: worker.says("posts failed"), "the worker logs the failure")
    records = [
        json.loads(line) for line in worker.text().splitlines() if line[:1] == "{"
    ]
    about = [record for record in records if record.get("message_id") == "failed"]
    assert about
    for record in about:
        assert (record["trace_id"], record["span_id"]) == (trace_id, process.span_id)
        assert record["run"] == "tuesday"


PROGRAM = """
import sys, feedmill
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
if "own" in sys.argv:
    trace.set_tracer_provider(TracerProvider())
    with trace.get_tracer("application").start_as_current_span("request") as span:
        run = feedmill.submit(["A goal"], labels=["sports", "food"], run=sys.argv[1])
        print(f"{span.get_span_context().trace_id:032x}")
else:
    run = feedmill.submit(["A goal"], labels=["sports", "food"], run=sys.argv[1])
assert len(run.results(timeout=60)) == 1
"""


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("tracer", ["own", "none"])
def test_submitted_items_have_a_trace(
    tracer: str,
    redis_server: RedisServer,
    collector: Collector,
    traced: dict[str, str],
    tmp_path: Path,
) -> None:
    """An application's own tracer gets the span, and its current span is the parent."""
    environment = {"FEEDMILL_REDIS_URL": redis_server.url, "PATH": ""}
    if tracer == "none":
        environment |= traced
    command = [sys.executable, "-c", PROGRAM, tracer]
    ended = run(command, tmp_path, environment)
    assert ended.returncode == 0, ended.stderr

    def of_run() -> list[Span]:
        spans = collector.spans("process")
        return [span for span in spans if span.attributes.get("feedmill.run") == tracer]

    wait_until(of_run, "the message's span arrives")
    (process,) = of_run()
    if tracer == "own":
        assert process.trace_id == ended.stdout.strip()
        assert process.parent_id
    else:
        check_message(spans_of(collector, process.trace_id, "publish"))


@contextmanager
def web_server(
    redis: RedisServer, folder: Path, environment: dict[str, str]
) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    given = {"FEEDMILL_REDIS_URL": redis.url} | environment
    with running("web", "--port", str(port), cwd=folder, **given) as server:

        def answers() -> bool:
            try:
                return fetch(f"{url}/health")[0] == 200
            except OSError:
                return not server.lives()

        wait_until(answers, "the web server answers")
        yield url
        server.end()


@pytest.mark.usefixtures("worker")
def test_a_callers_trace_goes_on_behind_the_endpoint(
    redis_server: RedisServer,
    collector: Collector,
    traced: dict[str, str],
    tmp_path: Path,
) -> None:
    trace_id = "5" * 32
    body = json.dumps({"texts": ["A goal"], "labels": ["sports", "food"]}).encode()
    with web_server(redis_server, tmp_path, traced) as url:
        for traceparent in (f"00-{trace_id}-{SPAN}-01", "00-evil"):
            status, text, _ = fetch(
                f"{url}/v1/classify",
                body,
                **{"Content-Type": "application/json", "traceparent": traceparent},
            )
            assert status == 200, text
    spans = spans_of(collector, trace_id, "publish")
    spans_of(collector, trace_id, "process")
    check_message(spans_of(collector, trace_id))
    publish = by_name(spans)["publish"]
    assert publish.parent_id == SPAN
    assert publish.resource["service.name"] == "feedmill-web"


@pytest.mark.usefixtures("worker")
def test_metrics_have_prometheus_names(
    redis_server: RedisServer, collector: Collector
) -> None:
    post = {"id": "counted", "title": "A goal"}
    send(application(redis_server), post, task_id="counted").get(timeout=60)

    def classified() -> int:
        metrics = collector.metrics()
        if "feedmill_worker_posts_total" not in metrics:
            return 0
        return int(metrics["feedmill_worker_posts_total"].points["classified",])

    wait_until(classified, "the metrics of a classified post arrive")
    metrics = collector.metrics()
    kinds = {"gauge": "gauge", "counter": "sum", "histogram": "histogram"}
    declared = {metric.name: metric for metric in (*REDIS_METRICS, *METRICS)}
    assert set(metrics) <= set(declared)
    assert not {name for name in METRICS if name.name not in metrics} - {
        metric
        for metric in METRICS
        if metric.name == "feedmill_worker_device_memory_bytes"
    }
    for name, metric in metrics.items():
        assert metric.kind == kinds.get(declared[name].kind, "histogram"), name
        assert metric.description == declared[name].help
    counts, total = metrics["feedmill_worker_batch_rows"].points[()]
    assert sum(counts) > 0
    assert total >= 1
