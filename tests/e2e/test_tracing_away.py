"""Workers without tracing, or without a collector that answers."""

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from feedmill.shared.broker import make_app, publish
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.settings import Settings
from feedmill.shared.trace_context import TraceContext
from tests.support import (
    NEW_INTERPRETER,
    RedisServer,
    application,
    as_jsonl,
    feedmill,
    free_port,
    make_posts,
    run,
    wait_until,
    wait_until_empty,
    working,
)

SPAN = "b7ad6b7169203331"


def send(app: Celery, *posts: dict[str, Any], **options: Any) -> Any:
    """Send a message as another application does; return its task's result."""
    return app.send_task("feedmill.classify", kwargs={"posts": posts}, **options)


def test_logs_name_messages_without_tracing(redis: RedisServer, tmp_path: Path) -> None:
    trace_id = "4" * 32
    headers = {"traceparent": f"00-{trace_id}-{SPAN}-01"}
    post = {"id": "no-text", "run": "tuesday"}
    with working(redis, tmp_path, FEEDMILL_LOG_FORMAT="json") as worker:
        send(application(redis), post, task_id="untraced", headers=headers)
        wait_until(lambda: worker.says("posts failed"), "the worker logs the failure")
        lines = worker.text().splitlines()
    (line,) = [line for line in lines if "posts failed" in line]
    record = json.loads(line)
    assert record["message_id"] == "untraced"
    assert record["run"] == "tuesday"
    assert (record["trace_id"], record["span_id"]) == (trace_id, SPAN)


def test_a_worker_without_variables_imports_nothing(
    redis: RedisServer, tmp_path: Path
) -> None:
    """redis-py imports parts of OpenTelemetry by itself where it is installed."""
    program = (
        "import redis, sys; print(*[m for m in sys.modules if m[:8] == 'opentele'])"
    )
    by_redis = run([sys.executable, "-c", program], tmp_path, {})
    allowed = set(by_redis.stdout.split())
    assert not {name for name in allowed if "exporter" in name}
    with working(
        redis,
        tmp_path,
        FEEDMILL_INCLUDE="tests.fakes.modules_task",
        OTEL_SERVICE_NAME="posts",
        **NEW_INTERPRETER,
    ):
        app = application(redis)
        send(app, {"id": "off", "title": "A goal"}).get(timeout=60)
        imported = set(app.send_task("tests.imported").get(timeout=60))
    assert "feedmill.workers.runtime.pool" in imported
    assert "feedmill.workers.runtime.spans" not in imported
    assert {name for name in imported if name.startswith("opentelemetry")} <= allowed


@contextmanager
def silent() -> Iterator[int]:
    """Yield the port of a collector that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@contextmanager
def away() -> Iterator[int]:
    """Yield a port on which nothing listens."""
    yield free_port()


@pytest.mark.parametrize("failure", [away, silent])
def test_a_worker_goes_on_without_its_collector(
    failure: Any, redis: RedisServer, tmp_path: Path
) -> None:
    with failure() as port:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_BSP_MAX_QUEUE_SIZE": "64",
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "16",
            "FEEDMILL_POSTS_PER_MESSAGE": "1",
            "OTEL_METRICS_EXPORTER": "otlp",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_METRIC_EXPORT_INTERVAL": "200",
        }
        (tmp_path / "posts.jsonl").write_text(as_jsonl(make_posts(400)))
        with working(redis, tmp_path, **environment) as worker:
            sent = feedmill(
                "enqueue",
                "posts.jsonl",
                cwd=tmp_path,
                FEEDMILL_REDIS_URL=redis.url,
                **environment,
            )
            assert sent.returncode == 0, sent.stderr
            wait_until_empty(redis.client)
            assert worker.end() == 0, worker.text()
            lines = worker.text().splitlines()
    about_export = [line for line in lines if "opentelemetry" in line]
    assert len(about_export) <= 10, worker.text()
    assert "Traceback" not in worker.text()
    assert len(sent.stderr.splitlines()) <= 10, sent.stderr


def test_a_wrong_variable_is_a_warning(redis: RedisServer, tmp_path: Path) -> None:
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
        "OTEL_BSP_MAX_QUEUE_SIZE": "-1",
    }
    with working(redis, tmp_path, **environment) as worker:
        send(application(redis), {"id": "warned", "title": "A goal"}).get(timeout=60)
        assert worker.says("check the OTEL_* variables")
        assert worker.end() == 0
    assert "Traceback" not in worker.text()


def test_an_untraced_sender_passes_a_callers_context_on(settings: Settings) -> None:
    parent = TraceContext("6" * 32, SPAN, 1, "vendor=1")
    app = make_app(settings)
    messages = [[Post(id="a", title="A goal")], [Post(id="b", title="A goal")]]
    publish(app, messages, ClassifyOptions(), parents=[parent, None])
    queued: Any = app.redis.lrange("feedmill", 0, -1)
    second, first = [json.loads(message)["headers"] for message in queued]
    assert first["traceparent"] == f"00-{'6' * 32}-{SPAN}-01"
    assert first["tracestate"] == "vendor=1"
    assert "traceparent" not in second
