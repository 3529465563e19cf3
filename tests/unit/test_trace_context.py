"""Trace context is read from untrusted headers, and written."""

from typing import Any

import pytest

from feedmill.shared.trace_context import TraceContext, read_context

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
VALID = f"00-{TRACE}-{SPAN}-01"


def test_context_travels_both_ways() -> None:
    context = TraceContext(TRACE, SPAN, 1, "vendor=a:1,tenant@other=b")
    headers = context.headers()
    assert headers["traceparent"] == VALID
    assert read_context(headers) == context
    assert context.is_sampled


@pytest.mark.parametrize(
    ("traceparent", "flags"),
    [
        (VALID, 1),
        (f"00-{TRACE}-{SPAN}-00", 0),
        (f"00-{TRACE}-{SPAN}-ff", 1),
        (f" {VALID}\t", 1),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be", 1),
    ],
)
def test_valid_forms_are_read(traceparent: str, flags: int) -> None:
    assert read_context({"traceparent": traceparent}) == TraceContext(
        TRACE, SPAN, flags
    )


@pytest.mark.parametrize(
    "traceparent",
    [
        None,
        "",
        7,
        [VALID],
        {"a": VALID},
        VALID.encode(),
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}",
        f"{VALID}\n",
        f"00-{TRACE[:-1]}\u0660-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01-{'x' * 1000}",
        "\ud800",
        "0" * 10_000_000,
    ],
)
def test_invalid_forms_are_ignored(traceparent: Any) -> None:
    assert read_context({"traceparent": traceparent, "tracestate": "a=1"}) is None


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("a=1,b=2", "a=1,b=2"),
        (" a=1 ,, b=2", "a=1,b=2"),
        ("t61@vendor=x y", "t61@vendor=x y"),
        (None, ""),
        (3, ""),
        (["a=1"], ""),
        ("A=1", ""),
        ("a", ""),
        ("a=1,a=2", ""),
        ("a=\x1b[31m", ""),
        ("a=\u00e9", ""),
        ("a=1\nb=2", ""),
        (",".join(f"k{number}=1" for number in range(33)), ""),
        ("a=" + "x" * 600, ""),
        ("a=1," * 10_000_000, ""),
    ],
)
def test_tracestate_is_bounded(state: Any, expected: str) -> None:
    context = read_context({"traceparent": VALID, "tracestate": state})
    assert context == TraceContext(TRACE, SPAN, 1, expected)
