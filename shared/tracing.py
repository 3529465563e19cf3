"""OpenTelemetry in this process: whether it is on, the exporter of spans, and the spans of
published messages.

Off unless an environment variable of OpenTelemetry names an OTLP endpoint or exporter: then
nothing of this module but `is_requested` runs, and no package is imported. An application that has
set its own tracer provider gets the spans of the messages that it publishes there.

Tracing never ends a process: what is wrong with it is a warning. While the collector is away,
spans wait in a queue of bounded length and are then dropped.

Relies on `_batch_processor` of the SDK's BatchSpanProcessor, whose `shutdown` has a time limit;
and on the names of the loggers in LOGGERS and SECRET_LOGGERS.
"""

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from feedmill.shared.log_secrets import Secrets, WithoutSecrets
from feedmill.shared.trace_context import TraceContext

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanContext, Tracer

logger = logging.getLogger(__name__)

#: Name of the instrumentation scope, and of the service of producers.
NAME = "feedmill"
#: Names of the services of workers and of the web server.
WORKER_SERVICE = "feedmill-worker"
WEB_SERVICE = "feedmill-web"
#: Variables that switch tracing on, unless OTEL_TRACES_EXPORTER or OTEL_SDK_DISABLED says no.
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
#: The only protocol that Feedmill sends with.
PROTOCOL = "http/protobuf"
#: Seconds that the end of a process waits until the last spans are sent.
EXIT_TIMEOUT_S = 5.0
#: Loggers of OpenTelemetry that speak for each failed export, and seconds between two records of
#: one kind.
LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.sdk._shared_internal",
)
LOG_INTERVAL_S = 600.0
#: Loggers whose records may have a header, or the address of a collector.
SECRET_LOGGERS = (
    *LOGGERS,
    "opentelemetry.exporter.otlp.common.http",
    "opentelemetry.exporter.otlp.proto.http._common",
    "opentelemetry.util.re",
    "urllib3.connectionpool",
)
#: Kinds to remember. A text with its arguments filled in is a kind of its own each time.
MAX_KINDS = 100
#: Most characters of a sender's text in an attribute.
MAX_ATTRIBUTE_CHARACTERS = 128


class Sparse(logging.Filter):
    """Let one record of each kind pass per LOG_INTERVAL_S: every failed export would be one."""

    def __init__(self) -> None:
        super().__init__()
        #: Monotonic time of the latest record by its text before arguments are filled in.
        self._passed: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        kind = str(record.msg)[:MAX_ATTRIBUTE_CHARACTERS]
        passed_at = self._passed.get(kind)
        if passed_at is not None and now - passed_at < LOG_INTERVAL_S:
            return False
        if len(self._passed) >= MAX_KINDS:
            self._passed.clear()
        self._passed[kind] = now
        return True


#: Speaks for each failed step, which may be one per message.
step_logger = logging.getLogger(f"{__name__}.steps")
step_logger.addFilter(Sparse())


@contextmanager
def guarding(step: str) -> Iterator[None]:
    """Log an error of a step of tracing instead of raising it. step: as in "cannot …".

    Tracers, samplers and processors of applications, and other versions of the SDK, may raise
    anything.
    """
    try:
        yield
    except Exception as error:
        warning = f"cannot {step} (%s). Continuing without traces"
        step_logger.warning(warning, type(error).__name__)


class Exporting:
    """This process' own tracer, whose spans are sent in the background.

    service: name of the service unless the environment has one.
    """

    def __init__(self, service: str) -> None:
        # An extra.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

        quieten()
        self.resource = resource_of(service)
        self.provider = TracerProvider(
            resource=self.resource,
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter()
        self.processor = BatchSpanProcessor(exporter)
        self.provider.add_span_processor(self.processor)
        self.tracer: Tracer = self.provider.get_tracer(NAME)
        atexit.register(self.stop)

    def stop(self) -> None:
        """Send the last spans, for at most EXIT_TIMEOUT_S. A failure is a warning: what the end
        of the process has left to do is more important.
        """
        atexit.unregister(self.stop)
        with guarding("send the last spans"):
            batches: Any = self.processor._batch_processor
            batches.shutdown(timeout_millis=int(EXIT_TIMEOUT_S * 1000))


def quieten() -> None:
    """Let OpenTelemetry's loggers say the same thing once in a while only, and no secrets."""
    for name in LOGGERS:
        _add_filter(name, Sparse)
    for name in SECRET_LOGGERS:
        _add_filter(name, WithoutSecrets)


def _add_filter(name: str, kind: type[logging.Filter]) -> None:
    """Add a filter to a logger that has none of its kind."""
    noisy = logging.getLogger(name)
    if not any(isinstance(present, kind) for present in noisy.filters):
        noisy.addFilter(kind())


@cache  # every call would have another `service.instance.id`
def resource_of(service: str) -> Any:
    """Return the description of this process for collectors. service: name of the service unless
    the environment has one.
    """
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource  # noqa: PLC0415 - an extra

    resource = Resource.create()
    name = str(resource.attributes.get(SERVICE_NAME, ""))
    if name.startswith("unknown_service"):
        return resource.merge(Resource({SERVICE_NAME: service}))
    return resource


def is_disabled() -> bool:
    """Return whether OTEL_SDK_DISABLED switches everything off."""
    return os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def is_requested() -> bool:
    """Return whether the environment asks for traces over OTLP."""
    if is_disabled():
        return False
    exporters = os.environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if exporters:
        names = [name.strip() for name in exporters.split(",")]
        return "otlp" in names
    return any(os.environ.get(name) for name in ENDPOINTS)


def has_protocol(variables: Sequence[str]) -> bool:
    """Return whether the environment asks for no other protocol than PROTOCOL; warn if it does."""
    for name in variables:
        protocol = os.environ.get(name, "").strip()
        if protocol == PROTOCOL:
            return True
        if protocol:
            logger.warning(
                "%s is %.40r, and Feedmill sends %s alone: nothing is sent. Set it to %s, and the "
                "endpoint to the collector's port for it, most often 4318",
                name,
                protocol,
                PROTOCOL,
                PROTOCOL,
            )
            return False
    return True


_lock = threading.Lock()
_exporting: Exporting | None = None
_is_decided = False


def exporting(service: str = NAME) -> Exporting | None:
    """Return this process' tracer; None if tracing is off or impossible. Started at the first
    call.

    service: name of the service unless the environment has one.
    """
    global _exporting, _is_decided  # noqa: PLW0603 - one per process
    if _is_decided:
        return _exporting
    with _lock:
        if not _is_decided and is_requested() and has_protocol(PROTOCOLS):
            _exporting = _start(service)
        _is_decided = True
    return _exporting


def _start(service: str) -> Exporting | None:
    try:
        return Exporting(service)
    except ModuleNotFoundError as missing:
        logger.warning(
            "OTEL_* variables ask for traces, but the package %s is missing: run `pip install "
            "'feedmill[otel]'`. Continuing without traces",
            missing.name,
        )
    except Exception as error:  # values of OTEL_* variables raise errors of any type
        logger.warning(
            "cannot start OpenTelemetry (%s: %.200s): check the OTEL_* variables. Continuing "
            "without traces",
            type(error).__name__,
            Secrets().hide(str(error)),
        )
    return None


def stop() -> None:
    """Send the last spans. Call before `os._exit`, which skips `atexit` handlers."""
    if _exporting is not None:
        _exporting.stop()


# Contexts.


def attribute(text: str) -> str:
    """Return a sender's text as a value that every exporter can encode, of bounded length."""
    short = text[:MAX_ATTRIBUTE_CHARACTERS]
    return short.encode("utf-8", "replace").decode()


def context_of(span_context: "SpanContext") -> TraceContext:
    """Return a span's context as it travels in headers."""
    state = ""
    if span_context.trace_state:
        state = span_context.trace_state.to_header()
    return TraceContext(
        trace_id=f"{span_context.trace_id:032x}",
        span_id=f"{span_context.span_id:016x}",
        flags=int(span_context.trace_flags),
        state=state,
    )


def parent_context(parent: TraceContext | None) -> "Context | None":
    """Return OpenTelemetry's form of a sender's context."""
    if parent is None:
        return None
    # An extra.
    from opentelemetry import trace  # noqa: PLC0415
    from opentelemetry.context import Context  # noqa: PLC0415

    remote = trace.SpanContext(
        trace_id=int(parent.trace_id, 16),
        span_id=int(parent.span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(parent.flags),
        trace_state=trace.TraceState.from_header([parent.state]),
    )
    span = trace.NonRecordingSpan(remote)
    return trace.set_span_in_context(span, Context())


def current_context() -> TraceContext | None:
    """Return the context of the application's current span; None without one."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    from opentelemetry import trace  # noqa: PLC0415 - imported already

    span_context = trace.get_current_span().get_span_context()
    if not span_context.is_valid:
        return None
    return context_of(span_context)


# Publishing.


def _publisher() -> "Tracer | None":
    """Return the tracer for published messages: the application's own, else this process'. None
    if it fails.
    """
    with guarding("get the tracer"):
        return _tracer()
    return None


def _tracer() -> "Tracer | None":
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry import trace  # noqa: PLC0415 - imported already

        provider = trace.get_tracer_provider()
        if not isinstance(provider, trace.ProxyTracerProvider):
            return provider.get_tracer(NAME)
    own = exporting()
    if own is None:
        return None
    return own.tracer


class Publication:
    """The spans of messages that are published together, one for each. They begin one after
    another, and end when Redis has answered.

    No error of a tracer gets out: a sender would take messages that are in the queue for unsent,
    and send them twice.
    """

    def __init__(self, tracer: "Tracer", queue: str) -> None:
        self._tracer = tracer
        self._queue = queue
        self._spans: list[Span] = []
        self._began_at = time.time_ns()

    def add(
        self, message: dict[str, Any], posts: int, parent: TraceContext | None = None
    ) -> None:
        """Begin the span of a message that was built since the one before, and put its context
        into the message's headers.

        posts: number of posts in the message. parent: None for the current span.
        """
        with guarding("begin a span"):
            self._begin(message, posts, parent)

    def _begin(
        self, message: dict[str, Any], posts: int, parent: TraceContext | None
    ) -> None:
        # An extra.
        from opentelemetry.trace import SpanKind  # noqa: PLC0415

        headers = message["headers"]
        span = self._tracer.start_span(
            f"publish {self._queue}",
            context=parent_context(parent),
            kind=SpanKind.PRODUCER,
            attributes=message_attributes("send", self._queue, headers["id"], posts),
            start_time=self._began_at,
        )
        self._spans.append(span)
        span_context = span.get_span_context()
        if span_context.is_valid:
            headers.update(context_of(span_context).headers())
        self._began_at = time.time_ns()

    def end(self, error: BaseException | None = None) -> None:
        """End the spans. error: the reason why nothing was published."""
        for span in self._spans:
            with guarding("end a span"):
                _end_span(span, error)


def _end_span(span: "Span", error: BaseException | None) -> None:
    from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415 - an extra

    if error is not None:
        span.set_status(Status(StatusCode.ERROR, type(error).__name__))
    span.end()


@contextmanager
def publishing(queue: str) -> Iterator[Publication | None]:
    """Run the block that publishes messages. Yields None while tracing is off."""
    tracer = _publisher()
    if tracer is None:
        yield None
        return
    publication = Publication(tracer, queue)
    try:
        yield publication
    except BaseException as error:
        publication.end(error)
        raise
    publication.end()


def message_attributes(
    operation: str, queue: str, message_id: str | None, posts: int
) -> Mapping[str, Any]:
    """Return the attributes of a message's span, by OpenTelemetry's names. operation: send or
    process. posts: number of posts.
    """
    attributes: dict[str, Any] = {
        "messaging.system": "celery",
        "messaging.operation.type": operation,
        "messaging.destination.name": attribute(queue),
        "feedmill.posts": posts,
    }
    if message_id is not None:
        attributes["messaging.message.id"] = attribute(message_id)
    return attributes
