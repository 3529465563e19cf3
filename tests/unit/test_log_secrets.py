"""Secrets of OpenTelemetry's variables do not reach logs."""

import logging

import pytest

from feedmill.shared import otlp_metrics, tracing
from feedmill.shared.log_secrets import Secrets
from feedmill.shared.logs import JsonFormatter, TextFormatter

KEY = "OTEL_EXPORTER_OTLP_HEADERS"
ADDRESS = "OTEL_EXPORTER_OTLP_ENDPOINT"
#: Each variable has this text in its secrets.
SECRET = "Tr0ub4dor"


@pytest.fixture(autouse=True)
def _own_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without filters: those of another test know its environment."""
    for name in tracing.SECRET_LOGGERS:
        monkeypatch.setattr(logging.getLogger(name), "filters", [])


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (KEY, f"api-key={SECRET}", f"sent {SECRET}"),
        (KEY, f"api-key: {SECRET}", f"malformed api-key: {SECRET}"),
        (KEY, f"api key={SECRET}", f"sent {SECRET}"),
        (KEY, f"a=b,{SECRET}", f"malformed {SECRET}"),
        (KEY, f"authorization=Bearer%20{SECRET}", f"sent {SECRET}"),
        (KEY, f"authorization=Basic {SECRET}==", f"sent {SECRET}=="),
        ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", f"a={SECRET}", SECRET),
        (ADDRESS, f"http://me:{SECRET}@collector", f"to http://me:{SECRET}@collector"),
        (ADDRESS, f"http://me:{SECRET}@collector", f"password {SECRET}"),
        (ADDRESS, f"http://{SECRET}@collector", f"user {SECRET}"),
        (ADDRESS, f"me:{SECRET}@collector", f"no scheme: me:{SECRET}@collector"),
        (ADDRESS, f"http://collector?key={SECRET}", f"url: /v1/traces?key={SECRET}"),
        (ADDRESS, f"http://c/?a=1&key=%2B{SECRET}", f"key +{SECRET}"),
    ],
)
def test_hides_secrets(
    name: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    hidden = Secrets().hide(text)
    assert SECRET not in hidden
    assert "[hidden]" in hidden


def test_other_texts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "tenant=a,empty=,=,")
    monkeypatch.setenv(ADDRESS, "http://collector:4318/v1?x=1")
    text = "tenant a of http://collector:4318/v1 is away"
    assert Secrets().hide(text) == text


def test_malformed_headers_are_not_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, f"api-key:{SECRET}")
    tracing.Exporting("tests").stop()
    assert "Header format invalid" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("name", tracing.SECRET_LOGGERS)
def test_records_about_exports_have_no_secrets(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADDRESS, f"http://collector?key={SECRET}")
    tracing.quieten()
    try:
        raise OSError(f"cannot reach /v1/traces?key={SECRET}")
    except OSError as error:
        logging.getLogger(name).exception("reason: %s", error)
    assert "reason: cannot reach" in caplog.text
    assert "OSError" in caplog.text
    assert SECRET not in caplog.text
    assert SECRET not in JsonFormatter().format(caplog.records[0])


@pytest.mark.parametrize(
    "formatter", [lambda: TextFormatter("%(message)s"), JsonFormatter]
)
def test_own_handlers_hide_secrets_of_any_logger(
    formatter: type[logging.Formatter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, f"api-key={SECRET}")
    error = ValueError(f"invalid header value {SECRET}")
    record = logging.makeLogRecord(
        {
            "msg": "cannot send %s",
            "args": (SECRET,),
            "exc_info": (ValueError, error, None),
        }
    )
    text = formatter().format(record)
    assert "invalid header value [hidden]" in text
    assert SECRET not in text


@pytest.mark.parametrize("signal", ["traces", "metrics"])
def test_a_failed_start_hides_secrets(
    signal: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is cut, also within a secret."""
    monkeypatch.setenv(KEY, f"api-key={SECRET}")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")

    def fail(*_: object) -> None:
        raise ValueError("x" * 195 + SECRET)

    if signal == "traces":
        monkeypatch.setattr(tracing, "Exporting", fail)
        assert tracing._start("tests") is None
    else:
        monkeypatch.setattr(otlp_metrics, "Sender", fail)
        otlp_metrics.start([], "tests")
    assert "check the OTEL_* variables" in caplog.text
    assert SECRET[:4] not in caplog.text
