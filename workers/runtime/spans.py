"""The spans of messages and micro-batches, with the times at which the worker did each step.

    publish                  the sender
    └─ wait                  from the message's own time of sending to its reservation
    └─ process               from its reservation to its acknowledgement
       └─ prepare            its posts become rows
       └─ forward            from the first micro-batch with one of its rows to the end of the last
       └─ store              results, dead letters and Celery's result are written
       └─ acknowledge        Celery finishes the message
    micro-batch              a trace of its own, with links to the `forward` of its messages

Celery's own instrumentation would begin a task's span when the tracer runs, which is after the
forward pass (in_flight.py). Without a sender's span, `process` is the root, and `wait` is its
child that begins before it. Spans never contain texts, labels or ids of posts.

Spans are made when a message ends, from times noted before. Only `process` goes through
OpenTelemetry's tracer, which takes fifteen times as long as making a span from known times: it
decides whether the trace is sampled.

Imports OpenTelemetry, an extra: only pool.py imports this module, if tracing is on.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec

from celery.signals import before_task_publish
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
)

from feedmill.shared.logs import FIELDS
from feedmill.shared.tracing import (
    NAME,
    Exporting,
    Sparse,
    attribute,
    context_of,
    current_context,
    message_attributes,
    parent_context,
)
from feedmill.workers.models.classifiers import Row
from feedmill.workers.pipeline.backlog import Computed
from feedmill.workers.pipeline.context import Observer
from feedmill.workers.pipeline.message import Message

logger = logging.getLogger(__name__)
logger.addFilter(Sparse())

#: Most links of a span: messages of a micro-batch, and micro-batches of a message.
MAX_LINKS = 128
NS_PER_S = 1_000_000_000
IDS = RandomIdGenerator()
UNSET = Status()

P = ParamSpec("P")


@dataclass(eq=False, slots=True)
class MessageSpans:
    """The times of a message's steps, in nanoseconds since 1970; 0 before the step."""

    process: Span
    #: Span of the sender; None without one.
    sender: SpanContext | None
    reserved_at: int
    prepare_at: int = 0
    prepared_at: int = 0
    #: Context of the span `forward`, to which micro-batches link; None before the first.
    forward: SpanContext | None = None
    forward_at: int = 0
    computed_at: int = 0
    store_at: int = 0
    stored_at: int = 0
    #: Links to the micro-batches, and their number.
    links: list[Link] = field(default_factory=list)
    micro_batches: int = 0


def guarded(step: Callable[P, None]) -> Callable[P, None]:
    """Log an error of a step, and go on: tracing never ends a worker."""

    @wraps(step)
    def guarded_step(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            step(*args, **kwargs)
        except Exception:
            logger.warning("cannot record spans", exc_info=True)

    return guarded_step


class Spans(Observer):
    """Records the spans of a worker."""

    def __init__(self, exporting: Exporting) -> None:
        self._tracer = exporting.tracer
        self._processor = exporting.processor
        self._resource = exporting.resource
        self._scope = InstrumentationScope(NAME)
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            # For spans of the owner's own tasks.
            trace.set_tracer_provider(exporting.provider)
        before_task_publish.connect(send_context, weak=False)

    # Steps of messages.

    @guarded
    def reserved(self, message: Message, at_ns: int) -> None:
        queue = message.queue or ""
        process = self._tracer.start_span(
            f"process {attribute(queue)}",
            context=parent_context(message.trace),
            kind=SpanKind.CONSUMER,
            attributes=_attributes_of(message, queue),
            start_time=at_ns,
        )
        sender = _sender_of(message)
        message.trace = context_of(process.get_span_context())
        if process.is_recording():
            message.spans = MessageSpans(process, sender, at_ns)

    @guarded
    def preparing(self, messages: Sequence[Message]) -> None:
        now = time.time_ns()
        for spans in _recorded(messages):
            spans.prepare_at = now

    @guarded
    def prepared(self, messages: Sequence[Message]) -> None:
        now = time.time_ns()
        for spans in _recorded(messages):
            spans.prepared_at = now

    @guarded
    def computed(self, computed: Computed) -> None:
        messages = {id(row.owner.message): row.owner.message for row in computed.rows}
        recorded = _recorded(messages.values())
        if not recorded:
            return
        ended_at = _end_of(computed)
        context = self._new_context(IDS.generate_trace_id())
        for spans in recorded:
            if spans.forward is None:
                spans.forward = self._child_of(spans.process)
                spans.forward_at = computed.began_at_ns
            spans.forward_at = min(spans.forward_at, computed.began_at_ns)
            spans.computed_at = max(spans.computed_at, ended_at)
            spans.micro_batches += 1
            if len(spans.links) < MAX_LINKS:
                spans.links.append(Link(context))
        links = [Link(spans.forward) for spans in recorded[:MAX_LINKS] if spans.forward]
        attributes = _attributes_of_batch(computed, len(messages))
        status = UNSET
        if isinstance(computed.outputs, Exception):
            status = Status(StatusCode.ERROR, type(computed.outputs).__name__)
        self._record(
            "micro-batch",
            context,
            None,
            computed.began_at_ns,
            ended_at,
            attributes=attributes,
            links=links,
            status=status,
        )

    @guarded
    def storing(self, messages: Sequence[Message]) -> None:
        now = time.time_ns()
        for spans in _recorded(messages):
            spans.store_at = now

    @guarded
    def stored(self, messages: Sequence[Message]) -> None:
        now = time.time_ns()
        for spans in _recorded(messages):
            spans.stored_at = now

    @guarded
    def ended(self, message: Message) -> None:
        spans: MessageSpans | None = message.spans
        if spans is None:
            return
        message.spans = None
        now = time.time_ns()
        process = spans.process
        own = process.get_span_context()
        self._record_wait(message, spans)
        self._record_step("prepare", own, spans.prepare_at, spans.prepared_at)
        if spans.forward is not None:
            self._record(
                "forward",
                spans.forward,
                own,
                spans.forward_at,
                spans.computed_at,
                attributes={"feedmill.micro_batches": spans.micro_batches},
                links=spans.links,
            )
        self._record_step("store", own, spans.store_at, spans.stored_at)
        self._record_step("acknowledge", own, spans.stored_at, now)
        _set_outcome(process, message)
        process.end(now)

    @contextmanager
    def running(self, message: Message) -> Iterator[None]:
        """Run the block with the message's span as the current one, for the owner's tasks and the
        messages that they send.
        """
        spans: MessageSpans | None = message.spans
        if spans is None:
            yield
            return
        with trace.use_span(
            spans.process,
            end_on_exit=False,
            record_exception=False,
            set_status_on_exception=False,
        ):
            yield

    # Making spans.

    def _record_wait(self, message: Message, spans: MessageSpans) -> None:
        if message.sent_at is None:
            return
        sent_at = int(message.sent_at * NS_PER_S)
        began_at = min(sent_at, spans.reserved_at)  # the sender's clock may be ahead
        parent = spans.sender or spans.process.get_span_context()
        self._record_step("wait", parent, began_at, spans.reserved_at)

    def _record_step(
        self, name: str, parent: SpanContext, began_at: int, ended_at: int
    ) -> None:
        """Record a step of a message, unless it did not take place."""
        if not began_at or not ended_at:
            return
        context = self._new_context(parent.trace_id)
        self._record(name, context, parent, began_at, ended_at)

    def _record(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        began_at: int,
        ended_at: int,
        *,
        attributes: Mapping[str, Any] | None = None,
        links: Sequence[Link] = (),
        status: Status = UNSET,
    ) -> None:
        """Hand a span to the exporter."""
        span = ReadableSpan(
            name=name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=attributes or {},
            links=links,
            kind=SpanKind.INTERNAL,
            status=status,
            start_time=began_at,
            end_time=max(began_at, ended_at),
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(span)

    def _child_of(self, parent: Span) -> SpanContext:
        trace_id = parent.get_span_context().trace_id
        return self._new_context(trace_id)

    def _new_context(self, trace_id: int) -> SpanContext:
        return SpanContext(
            trace_id=trace_id,
            span_id=IDS.generate_span_id(),
            is_remote=False,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
        )


def send_context(headers: dict[str, Any] | None = None, **_: Any) -> None:
    """Put the current span into the headers of a message that Celery sends, such as a link of a
    finished task.
    """
    current = current_context()
    if current is not None and headers is not None:
        headers.update(current.headers())


def _recorded(messages: Iterable[Message]) -> list[MessageSpans]:
    """Return the spans of the messages whose traces are recorded."""
    # Read once: another thread may end a message meanwhile.
    found = [message.spans for message in messages]
    return [spans for spans in found if spans is not None]


def _sender_of(message: Message) -> SpanContext | None:
    """Return the context of the sender's span."""
    context = parent_context(message.trace)
    if context is None:
        return None
    return trace.get_current_span(context).get_span_context()


def _attributes_of(message: Message, queue: str) -> dict[str, Any]:
    posts = len(message.raw_posts)
    attributes = dict(message_attributes("process", queue, message.task_id, posts))
    fields = message.log_fields()[FIELDS]
    if "run" in fields:
        attributes["feedmill.run"] = attribute(fields["run"])
    if message.attempts > 1:
        attributes["feedmill.deliveries"] = message.attempts
    return attributes


def _attributes_of_batch(computed: Computed, messages: int) -> dict[str, Any]:
    rows: Sequence[Row] = computed.rows
    classifier = computed.loaded.classifier
    weights = classifier.weights
    lengths = [row.length for row in rows]
    posts = {id(row.owner) for row in rows}
    padded_tokens = classifier.device.shapes.tokens(len(rows), max(lengths))
    return {
        "feedmill.posts": len(posts),
        "feedmill.messages": messages,
        "feedmill.rows": len(rows),
        "feedmill.tokens": sum(lengths),
        "feedmill.padded_tokens": padded_tokens,
        "feedmill.device": classifier.device.name,
        "feedmill.model": weights.name,
        "feedmill.weights": weights.sha256,
    }


def _end_of(computed: Computed) -> int:
    """Return the time at which the device had finished.

    A CPU computes within the call. A GPU is known to be done when its outputs have arrived, which
    is now.
    """
    now = time.time_ns()
    outputs = computed.outputs
    is_cpu = computed.loaded.classifier.device.torch.type == "cpu"
    if isinstance(outputs, Exception) or not is_cpu:
        return now
    ended_at = computed.began_at_ns + int(outputs.seconds * NS_PER_S)
    return min(now, ended_at)


def _set_outcome(process: Span, message: Message) -> None:
    """Note in a message's span what became of it: errors by their type, without their text."""
    fault = message.fault or message.refused
    failed_posts = len(message.errors())
    if failed_posts:
        process.set_attribute("feedmill.failed_posts", failed_posts)
    if fault is not None:
        process.set_status(Status(StatusCode.ERROR, type(fault).__name__))
