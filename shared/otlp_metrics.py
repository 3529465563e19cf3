"""Send a process' metrics to an OpenTelemetry collector: those of Prometheus, by the same names.

On only if OTEL_METRICS_EXPORTER names otlp: the same metrics may already be scraped. The values
are read at each interval, as for a scrape, and handed to OpenTelemetry's exporter as they are: its
meters have no histograms that are read instead of written.

A summary becomes a histogram without buckets: its count and its sum.

Relies on the classes of data points in opentelemetry.sdk.metrics.export.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from feedmill.shared.log_secrets import Secrets
from feedmill.shared.tracing import (
    NAME,
    PROTOCOL,
    has_protocol,
    is_disabled,
    quieten,
    resource_of,
)

if TYPE_CHECKING:
    from feedmill.shared.metrics import Metric, Source

logger = logging.getLogger(__name__)

PROTOCOLS = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
#: Variable with the milliseconds between two exports, and its default.
INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
DEFAULT_INTERVAL_MS = 60_000
MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 86_400.0


def is_requested() -> bool:
    """Return whether the environment asks for metrics over OTLP."""
    exporters = os.environ.get("OTEL_METRICS_EXPORTER", "")
    names = [name.strip() for name in exporters.split(",")]
    return "otlp" in names and not is_disabled()


def start(sources: Sequence["Source"], service: str) -> None:
    """Send the metrics of the sources from now on, if the environment asks for it.

    What is wrong with that is a warning. service: name of the service unless the environment has
    one.
    """
    if not is_requested() or not has_protocol(PROTOCOLS):
        return
    try:
        sender = Sender(sources, service)
    except ModuleNotFoundError as missing:
        logger.warning(
            "OTEL_METRICS_EXPORTER asks for metrics over %s, but the package %s is missing: run "
            "`pip install 'feedmill[otel]'`. Continuing without",
            PROTOCOL,
            missing.name,
        )
    except Exception as error:  # values of OTEL_* variables raise errors of any type
        logger.warning(
            "cannot start to send metrics (%s: %.200s): check the OTEL_* variables. Continuing "
            "without",
            type(error).__name__,
            Secrets().hide(str(error)),
        )
    else:
        threading.Thread(
            target=sender.run,
            name="otlp-metrics",
            daemon=True,
        ).start()


def interval_s() -> float:
    """Return the seconds between two exports. Raises ValueError if they are not a number."""
    interval_ms = float(os.environ.get(INTERVAL) or DEFAULT_INTERVAL_MS)
    if not math.isfinite(interval_ms):
        raise ValueError(f"{INTERVAL} is {interval_ms}, not a number of milliseconds")
    seconds = interval_ms / 1000
    return min(MAX_INTERVAL_S, max(MIN_INTERVAL_S, seconds))


class Sender:
    """Sends the metrics of sources at each interval."""

    def __init__(self, sources: Sequence["Source"], service: str) -> None:
        # An extra.
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import (  # noqa: PLC0415
            OTLPMetricExporter,
        )

        quieten()
        self._interval_s = interval_s()
        self._sources = sources
        self._exporter = OTLPMetricExporter()
        self._resource = resource_of(service)
        self._began_at = time.time_ns()

    def run(self) -> None:
        """Send until the process ends."""
        while True:
            time.sleep(self._interval_s)
            try:
                self._exporter.export(self._read())
            except Exception as error:
                logger.debug("cannot send metrics", exc_info=error)

    def _read(self) -> Any:
        """Return the current metrics in OpenTelemetry's form."""
        from opentelemetry.sdk.metrics import export  # noqa: PLC0415 - an extra
        from opentelemetry.sdk.util.instrumentation import (  # noqa: PLC0415
            InstrumentationScope,
        )

        scope = export.ScopeMetrics(
            scope=InstrumentationScope(NAME),
            metrics=list(self._metrics()),
            schema_url="",
        )
        of_resource = export.ResourceMetrics(
            resource=self._resource,
            scope_metrics=[scope],
            schema_url="",
        )
        return export.MetricsData(resource_metrics=[of_resource])

    def _metrics(self) -> Iterator[Any]:
        from opentelemetry.sdk.metrics import export  # noqa: PLC0415 - an extra

        for declared, read in self._sources:
            values = read()
            for metric in declared:
                if metric.name not in values:
                    continue
                points = list(self._points(metric, values[metric.name]))
                if points:
                    yield export.Metric(
                        name=metric.name,
                        description=metric.help,
                        unit="",
                        data=_data(metric.kind, points),
                    )

    def _points(self, metric: "Metric", values: Any) -> Iterator[Any]:
        """Yield a point for each combination of label values."""
        if not isinstance(values, dict):
            values = {(): values}
        for names, value in values.items():
            label_values = names if isinstance(names, tuple) else (names,)
            attributes = dict(zip(metric.labels, label_values, strict=True))
            if value is not None:
                yield self._point(metric.kind, attributes, value)

    def _point(self, kind: str, attributes: dict[str, Any], value: Any) -> Any:
        from opentelemetry.sdk.metrics import export  # noqa: PLC0415 - an extra

        now = time.time_ns()
        if kind in ("gauge", "counter"):
            return export.NumberDataPoint(
                attributes=attributes,
                start_time_unix_nano=self._began_at,
                time_unix_nano=now,
                value=value,
            )
        counts, bounds, total = _distribution(value)
        return export.HistogramDataPoint(
            attributes=attributes,
            start_time_unix_nano=self._began_at,
            time_unix_nano=now,
            count=sum(counts),
            sum=total,
            bucket_counts=counts,
            explicit_bounds=bounds,
            # Unknown; the exporter leaves them out.
            min=None,  # type: ignore[arg-type]
            max=None,  # type: ignore[arg-type]
        )


def _distribution(value: Any) -> tuple[list[int], Sequence[float], float]:
    """Return the counts of buckets, their bounds and the sum of a histogram or a summary."""
    if isinstance(value, tuple):
        count, total = value
        return [count], (), total
    return list(value.counts), value.bounds, value.total


def _data(kind: str, points: list[Any]) -> Any:
    """Return the points of a metric in the form of its kind. Counters count from the start."""
    from opentelemetry.sdk.metrics import export  # noqa: PLC0415 - an extra

    cumulative = export.AggregationTemporality.CUMULATIVE
    if kind == "gauge":
        return export.Gauge(data_points=points)
    if kind == "counter":
        return export.Sum(
            data_points=points,
            aggregation_temporality=cumulative,
            is_monotonic=True,
        )
    return export.Histogram(
        data_points=points,
        aggregation_temporality=cumulative,
    )
