"""W3C trace context: read it from untrusted headers, and write it.

Knows nothing of OpenTelemetry's packages, which are an extra: a worker without them still logs the
trace id that a message came with. Baggage is never read.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

#: Names of the headers.
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
#: Most characters of each header that are read, and most members of `tracestate`.
MAX_TRACEPARENT_CHARACTERS = 128
MAX_TRACESTATE_CHARACTERS = 512
MAX_TRACESTATE_MEMBERS = 32
#: Version, trace id, span id and flags. Later versions may append fields.
FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
#: A member of `tracestate`: a key, with or without a tenant, and a value.
MEMBER = re.compile(
    r"[a-z][a-z0-9_\-*/]{0,255}=[!-+\--<>-~ ]{0,255}[!-+\--<>-~]"
    r"|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13}=[!-+\--<>-~ ]{0,255}[!-+\--<>-~]"
)
#: Flag of a trace whose spans are recorded.
SAMPLED = 1


class TraceContext(NamedTuple):
    """A span of a trace, as it travels in headers."""

    #: 32 and 16 hexadecimal digits, not all of them 0.
    trace_id: str
    span_id: str
    flags: int
    #: Further data of tracing systems, validated; "" for none.
    state: str = ""

    @property
    def is_sampled(self) -> bool:
        """True if the sender records the trace."""
        return bool(self.flags & SAMPLED)

    def headers(self) -> dict[str, str]:
        """Return the headers that carry the context."""
        headers = {
            TRACEPARENT: f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}",
        }
        if self.state:
            headers[TRACESTATE] = self.state
        return headers


def read_context(headers: Mapping[str, Any]) -> TraceContext | None:
    """Return the context that headers carry; None if there is none, or an invalid one.

    An invalid `tracestate` alone is dropped.
    """
    traceparent = headers.get(TRACEPARENT)
    if not isinstance(traceparent, str):
        return None
    if len(traceparent) > MAX_TRACEPARENT_CHARACTERS:
        return None
    match = FORM.fullmatch(traceparent.strip(" \t"))
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    is_unknown = version == "ff" or (version == "00" and rest is not None)
    is_empty = not (trace_id.strip("0") and span_id.strip("0"))
    if is_unknown or is_empty:
        return None
    state = headers.get(TRACESTATE)
    return TraceContext(
        trace_id=trace_id,
        span_id=span_id,
        flags=int(flags, 16) & SAMPLED,
        state=_read_state(state),
    )


def _read_state(state: object) -> str:
    """Return the value of `tracestate`; "" if it is missing, invalid or too long."""
    if not isinstance(state, str) or len(state) > MAX_TRACESTATE_CHARACTERS:
        return ""
    stripped = [member.strip(" \t") for member in state.split(",")]
    members = [member for member in stripped if member]
    if len(members) > MAX_TRACESTATE_MEMBERS:
        return ""
    keys: set[str] = set()
    for member in members:
        key, _, _ = member.partition("=")
        if key in keys or not MEMBER.fullmatch(member):
            return ""
        keys.add(key)
    return ",".join(members)
