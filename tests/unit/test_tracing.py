"""The environment that switches tracing on, and messages in logs."""

import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from feedmill.shared import otlp_metrics, tracing
from feedmill.shared.logs import (
    CURRENT_FIELDS,
    JsonFormatter,
    TextFormatter,
    fields_of,
)
from feedmill.shared.trace_context import TraceContext
from feedmill.workers.runtime import pool

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
TRACE = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", 1)


@pytest.mark.parametrize(
    ("interval", "seconds"),
    [("", 60), ("2000", 2), ("1", 0.1), ("-5", 0.1), ("1e300", 86_400)],
)
def test_the_interval_of_metrics_is_bounded(
    interval: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(otlp_metrics.INTERVAL, interval)
    assert otlp_metrics.Sender([], "tests")._interval_s == seconds


@pytest.mark.parametrize("interval", ["nan", "inf", "soon"])
def test_a_wrong_interval_of_metrics_is_a_warning(
    interval: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(otlp_metrics.INTERVAL, interval)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    monkeypatch.setattr(otlp_metrics.Sender, "run", fail)
    otlp_metrics.start([], "tests")
    assert "cannot start to send metrics (ValueError" in caplog.text


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("failed as the test wants")


@pytest.mark.parametrize(
    ("environment", "is_on"),
    [
        ({}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, True),
        ({"OTEL_SERVICE_NAME": "posts"}, False),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, False),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "zipkin"}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "TRUE"}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "false"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
    ],
)
def test_environment_switches_tracing(
    environment: dict[str, str], is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert tracing.is_requested() is is_on


def test_another_protocol_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert not tracing.has_protocol(tracing.PROTOCOLS)
    assert "OTEL_EXPORTER_OTLP_PROTOCOL" in caplog.text
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    assert tracing.has_protocol(tracing.PROTOCOLS)


@pytest.mark.parametrize(
    ("exporter", "is_on"), [("", False), ("none", False), ("otlp", True)]
)
def test_metrics_are_sent_only_on_request(
    exporter: str, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", exporter)
    assert otlp_metrics.is_requested() is is_on


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Let each test have the first warning of a failed step."""
    filters = list(tracing.step_logger.filters)
    tracing.step_logger.filters.clear()
    yield caplog
    tracing.step_logger.filters.extend(filters)


def test_an_exporter_that_fails_to_stop_is_a_warning(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporting = tracing.Exporting("tests")
    monkeypatch.setattr(exporting.processor.span_exporter, "shutdown", fail)
    exporting.stop()
    assert "cannot send the last spans (RuntimeError)" in said.text


def test_a_processor_of_another_sdk_is_a_warning(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporting = tracing.Exporting("tests")
    processor = exporting.processor
    exporting.processor = SimpleNamespace(shutdown=fail)  # type: ignore[assignment]
    monkeypatch.setattr(tracing, "_exporting", exporting)
    tracing.stop()
    processor.shutdown()  # type: ignore[no-untyped-call]
    assert "cannot send the last spans (AttributeError)" in said.text


def test_a_worker_starts_without_spans_of_another_sdk(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "exporting", lambda _: SimpleNamespace())
    assert pool._observer() is None
    assert "cannot record spans (AttributeError)" in said.text


def test_failed_steps_are_logged_once_in_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(3):
        with tracing.guarding("do what only this test does"):
            fail()
    assert caplog.text.count("only this test does") == 1


def test_repeated_records_are_left_out() -> None:
    sparse = tracing.Sparse()
    records = [
        logging.makeLogRecord({"msg": "cannot send: %s", "args": (number,)})
        for number in range(100)
    ]
    records.append(logging.makeLogRecord({"msg": "another"}))
    assert [record.getMessage() for record in filter(sparse.filter, records)] == [
        "cannot send: 0",
        "another",
    ]


def test_kinds_of_records_are_bounded() -> None:
    sparse = tracing.Sparse()
    for number in range(1000):
        sparse.filter(logging.makeLogRecord({"msg": f"cannot send {number}"}))
    assert len(sparse._passed) <= 100


@pytest.mark.parametrize("text", ["plain", "\ud800", "é" * 500, "a\x00b"])
def test_attributes_can_be_encoded(text: str) -> None:
    attribute = tracing.attribute(text)
    assert len(attribute) <= tracing.MAX_ATTRIBUTE_CHARACTERS
    attribute.encode()


def test_records_name_their_message() -> None:
    record = logging.makeLogRecord(
        {"msg": "two\nlines"} | fields_of("task-1", "monday", TRACE)
    )
    entry = json.loads(JsonFormatter().format(record))
    assert entry["message_id"] == "task-1"
    assert entry["run"] == "monday"
    assert entry["trace_id"] == TRACE.trace_id
    assert entry["span_id"] == TRACE.span_id
    text = TextFormatter("%(message)s").format(record)
    assert text == f"two (trace {TRACE.trace_id})\n    lines"


def test_records_of_a_task_name_its_message() -> None:
    record = logging.makeLogRecord({"msg": "of a task"})
    token = CURRENT_FIELDS.set(lambda: fields_of("task-2", None, None))
    try:
        entry = json.loads(JsonFormatter().format(record))
    finally:
        CURRENT_FIELDS.reset(token)
    assert entry["message_id"] == "task-2"
    assert "message_id" not in json.loads(JsonFormatter().format(record))


def test_celerys_records_name_their_message() -> None:
    record = logging.makeLogRecord({"msg": "Task failed", "data": {"id": "task-3"}})
    assert json.loads(JsonFormatter().format(record))["message_id"] == "task-3"
    record = logging.makeLogRecord({"msg": "odd", "data": {"id": 3}})
    assert "message_id" not in json.loads(JsonFormatter().format(record))


LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    "record",
    [
        {"msg": "ours", **fields_of(LONG, None, None)},
        {"msg": "of Celery", "data": {"id": LONG}},
        {"msg": "id %s", "args": (LONG,)},
        {"msg": "failed", "exc_info": (ValueError, ValueError(LONG), None)},
    ],
    ids=["fields", "data", "message", "traceback"],
)
@pytest.mark.parametrize(
    "formatter", [TextFormatter("%(message)s"), JsonFormatter()], ids=["text", "json"]
)
def test_long_ids_and_texts_are_cut(
    formatter: logging.Formatter, record: dict[str, Any]
) -> None:
    text = formatter.format(logging.makeLogRecord(record))
    assert len(text) < 31_000
    if "args" in record:
        assert len(text) > 30_000
