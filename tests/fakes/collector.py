"""A collector of OpenTelemetry's data over HTTP, on loopback: keeps the spans and metrics that it
receives, decoded from protobuf.
"""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)


class Link(NamedTuple):
    trace_id: str
    span_id: str


class Span(NamedTuple):
    """A span as received. Times are nanoseconds since 1970."""

    name: str
    trace_id: str
    span_id: str
    #: "" for a root.
    parent_id: str
    began_at: int
    ended_at: int
    kind: int
    attributes: dict[str, Any]
    links: list[Link]
    is_error: bool
    #: Attributes of the process that sent it.
    resource: dict[str, Any]
    state: str


class Metric(NamedTuple):
    """A metric as received, with its points by their attributes' values."""

    name: str
    kind: str
    points: dict[tuple[Any, ...], Any]
    description: str


class Collector:
    """The received requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._metrics: dict[str, Metric] = {}

    def spans(self, name: str | None = None) -> list[Span]:
        """Return the spans received so far, or those whose names begin with a word."""
        with self._lock:
            spans = list(self._spans)
        if name is None:
            return spans
        return [span for span in spans if span.name.split()[0] == name]

    def metrics(self) -> dict[str, Metric]:
        """Return the latest value of each metric."""
        with self._lock:
            return dict(self._metrics)

    def receive(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            spans = list(_spans_in(body))
            with self._lock:
                self._spans += spans
        elif path == "/v1/metrics":
            metrics = {metric.name: metric for metric in _metrics_in(body)}
            with self._lock:
                self._metrics |= metrics


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            collector.receive(self.path, body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _spans_in(body: bytes) -> Iterator[Span]:
    request: Any = ExportTraceServiceRequest()
    request.ParseFromString(body)
    for of_resource in request.resource_spans:
        resource = _attributes(of_resource.resource.attributes)
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield Span(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    began_at=span.start_time_unix_nano,
                    ended_at=span.end_time_unix_nano,
                    kind=span.kind,
                    attributes=_attributes(span.attributes),
                    links=[
                        Link(link.trace_id.hex(), link.span_id.hex())
                        for link in span.links
                    ],
                    is_error=span.status.code == 2,
                    resource=resource,
                    state=span.trace_state,
                )


def _metrics_in(body: bytes) -> Iterator[Metric]:
    request: Any = ExportMetricsServiceRequest()
    request.ParseFromString(body)
    for of_resource in request.resource_metrics:
        for of_scope in of_resource.scope_metrics:
            for metric in of_scope.metrics:
                kind = metric.WhichOneof("data")
                points = {}
                for point in getattr(metric, kind).data_points:
                    values = tuple(_attributes(point.attributes).values())
                    if kind == "histogram":
                        value: Any = (list(point.bucket_counts), point.sum)
                    else:
                        value = getattr(point, point.WhichOneof("value"))
                    points[values] = value
                yield Metric(metric.name, kind, points, metric.description)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs
    }
