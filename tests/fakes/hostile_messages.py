"""Hostile elements of a queue's Redis list: valid Celery messages with damage, and arbitrary
bytes.

`HOSTILE` is the hypothesis strategy that draws them. Drawn messages contain placeholders, which
`Hostile.element` replaces: by the message's id, and by nesting and text that are too large to be
drawn.
"""

import base64
import json
import operator
import pickle
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from celery import Celery
from hypothesis import strategies as st

from feedmill.shared.broker import CLASSIFY_TASK, SENT_AT

APP: Any = Celery(set_as_current=False)

ID, DEEP, LONG = "<id>", "<deep>", "<long>"
#: Nesting depth and length in characters, both beyond every parser's limit.
DEPTH, LENGTH = 5_000, 100_000


class Hostile(NamedTuple):
    """A drawn message; `kind` names its defect."""

    kind: str
    drawn: dict[str, Any] | bytes

    def element(self, task_id: str) -> bytes:
        """Return the message as an element of the Redis list, with `task_id` in place of each id
        placeholder.
        """
        if isinstance(self.drawn, bytes):
            return _filled(self.drawn, task_id)
        return _written(self.drawn, task_id)


def _written(message: dict[str, Any], task_id: str) -> bytes:
    if "body" in message:
        body = _filled(json.dumps(message["body"]).encode(), task_id)
        properties = message.get("properties")
        encoded = (
            isinstance(properties, dict) and properties.get("body_encoding") == "base64"
        )
        message = message | {
            "body": (base64.b64encode(body) if encoded else body).decode()
        }
    return _filled(json.dumps(message).encode(), task_id)


def _filled(written: bytes, task_id: str) -> bytes:
    deep = b"[" * DEPTH + b"]" * DEPTH
    return (
        written.replace(b'"<deep>"', deep)
        .replace(b"<long>", b"x" * LENGTH)
        .replace(b"<id>", task_id.encode())
    )


def good(task: str = CLASSIFY_TASK) -> dict[str, Any]:
    """Return a valid message in Celery's protocol 2. Its `body` is not yet encoded."""
    posts = [{"id": ID, "title": "Rain on the coast", "body": "and wind"}]
    made = APP.amqp.as_task_v2(
        ID, task, kwargs={"posts": posts, "labels": ["rain", "sun"]}, root_id=ID,
        reply_to="elsewhere",
        origin="gen1@elsewhere", kwargsrepr="{}",
    )  # fmt: skip
    route = {
        "exchange": "", "routing_key": "feedmill",
        "redelivered": False, "delivery_count": 0, "consumer_tag": "1",
    }  # fmt: skip
    return {
        "body": [[], *made.body[1:]],
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": made.headers | {SENT_AT: 1.0},
        "properties": made.properties | {
            "delivery_mode": 2, "delivery_info": route, "priority": 0, "body_encoding": "base64",
            "delivery_tag": ID,
        },
    }  # fmt: skip


def protocol_1() -> dict[str, Any]:
    """Return a valid message in Celery's protocol 1, used before 4.0, which has all fields in the
    body.
    """
    message = good()
    args, kwargs, _ = message["body"]
    message["body"] = {
        "task": CLASSIFY_TASK,
        "id": ID,
        "args": args,
        "kwargs": kwargs,
        "retries": 0,
        "utc": True,
    }
    message["headers"] = {}
    return message


def gocelery() -> dict[str, Any]:
    """Return a valid message as gocelery writes it: protocol 1 without headers."""
    message = protocol_1()
    del message["headers"]
    return message


def both_protocols() -> dict[str, Any]:
    """Return a valid message with a body of protocol 1 and headers of protocol 2."""
    return protocol_1() | {"headers": good()["headers"]}


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with a body in plain JSON instead of Base64."""
    del message["properties"]["body_encoding"]
    return message


def elaborate() -> dict[str, Any]:
    """Return a valid message that uses rare features: an ETA, time limits, stamps and links."""
    message = good()
    link = {
        "task": "no.such",
        "args": [],
        "kwargs": {},
        "options": {"queue": "feedmill", "compression": None},
    }
    message["headers"] |= {
        "eta": "2020-01-01T00:00:00+01:00",
        "timelimit": [300, 200.5],
        "stamped_headers": ["user", "other"],
        "stamps": {"user": ["a", "b"], "other": "c"},
    }
    message["body"][2] = {
        "callbacks": [link],
        "errbacks": [link],
        "chain": [link],
        "chord": None,
    }
    return message


NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from(
        [
            0,
            -1,
            2**31,
            2**63,
            -(2**64),
            10**400,
            1e308,
            -0.0,
            float("nan"),
            float("inf"),
        ]
    ),
)
STRINGS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            "",
            "\x00",
            "\x1b[2J",
            "\ud800",
            "\udc00\ud83d",
            "feedmill.classify",
            "celery.chain",
            "celery.map",
            "2026-11-21T00:00:00",
            "0001-01-01T00:00:00+14:00",
            "9999-12-31T23:59:59-14:00",
            "9999-12-31T23:59:59-12:00",
            "gzip",
            "feedmill:results",
            "application/x-python-serialize",
            "application/json",
            "application/data",
            "base64",
            "zlib",
            "lzma",
            "utf-16",
            "rot13",
            "binary",
            DEEP,
            LONG,
        ]
    ),
)
#: JSON objects that kombu decodes to other Python types, such as datetime.
TYPED = st.builds(
    lambda kind, value: {"__type__": kind, "__value__": value},
    st.sampled_from(
        [
            "datetime",
            "date",
            "time",
            "decimal",
            "Decimal",
            "uuid",
            "bytes",
            "base64",
            "odd",
        ]
    ),
    st.one_of(STRINGS, NUMBERS, st.none(), st.lists(NUMBERS, max_size=3)),
)
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, STRINGS, TYPED),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(STRINGS, inner, max_size=4)
    ),
    max_leaves=6,
)


def _places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in the message that can be changed."""
    found = [place] if place else []
    if isinstance(value, dict | list):
        for key, inner in (
            value.items() if isinstance(value, dict) else enumerate(value)
        ):
            found += _places(inner, (*place, key))
    return found


def _change(message: Any, place: tuple[Any, ...], values: Sequence[Any]) -> None:
    """Set the value at the path, or delete it if `values` is empty.

    Skip a path that an earlier change removed.
    """
    *path, key = place
    try:
        for step in path:
            message = message[step]
        message[key]
    except (LookupError, TypeError):
        return
    if isinstance(message, str):
        return
    if values:
        message[key] = values[0]
    else:
        del message[key]


@st.composite
def changed(
    draw: st.DrawFn, starts: st.SearchStrategy[dict[str, Any]]
) -> dict[str, Any]:
    """Return a valid message with one to four values deleted or replaced."""
    message = draw(starts)
    changes = st.tuples(
        st.sampled_from(_places(message)), st.lists(ANYTHING, max_size=1)
    )
    for place, values in draw(st.lists(changes, min_size=1, max_size=4)):
        _change(message, place, values)
    return message


CONTENT_TYPES = (
    "application/json",
    "application/x-python-serialize",
    "application/x-yaml",
    "application/x-msgpack",
    "application/data",
    "text/plain",
    "text/odd",
)
COMPRESSIONS = ("zlib", "gzip", "bzip2", "xz", "lzma", "brotli", "odd")
ENCODINGS = ("utf-8", "binary", "utf-16", "odd", "hex", "zlib", None)


@st.composite
def with_body(draw: st.DrawFn) -> bytes:
    """Return a message whose body is damaged, or contradicts its content type, encoding or
    compression.
    """
    message = good()
    written = json.dumps(message["body"]).encode()
    body = draw(
        st.one_of(
            st.binary(max_size=100),
            st.just(pickle.dumps(message["body"])),
            st.just(zlib.compress(written)),
            st.just(10_000_000).map(lambda size: zlib.compress(b" " * size)),
            st.just(DEPTH).map(lambda depth: b"[" * depth),
            st.just(b'[[], {"posts": [NaN, -Infinity, 1e999]}, {}]'),
            st.just(b"[[], {}, {}, {}]"),
            st.integers(0, len(written)).map(lambda end: written[:end]),
            st.integers(0, len(written)).map(
                lambda at: written[:at] + b"\xff\xfe" + written[at:]
            ),
            st.sampled_from(["utf-16", "utf-32", "utf-7"]).map(written.decode().encode),
        )
    )
    message["content-type"] = draw(st.sampled_from(CONTENT_TYPES))
    message["content-encoding"] = draw(st.sampled_from(ENCODINGS))
    message["headers"]["compression"] = draw(st.none() | st.sampled_from(COMPRESSIONS))
    message["body"] = base64.b64encode(body).decode()
    return json.dumps(message).encode()


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Return a valid message as bytes, with some bytes changed or deleted."""
    whole = bytearray(_written(good(), ID))
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(whole) - 1))
        whole[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(whole)


NO_MESSAGES = st.one_of(
    st.binary(max_size=200),
    ANYTHING.map(lambda value: json.dumps(value).encode()),
    st.builds(
        operator.mul,
        st.sampled_from([b"[", b"{}", b'{"body":', b"9", b"\xff"]),
        st.integers(0, LENGTH),
    ),
)
#: Celery's own tasks, and unknown names.
TASKS = (
    "celery.chain",
    "celery.group",
    "celery.chord",
    "celery.map",
    "celery.starmap",
    "celery.chunks",
    "celery.accumulate",
    "celery.backend_cleanup",
    "no.such.task",
    "os.system",
    "",
    "__init__",
)

KINDS: dict[str, st.SearchStrategy[Any]] = {
    "changed": changed(st.builds(good)),
    "elaborate": changed(st.builds(elaborate)),
    "protocol 1": changed(st.builds(protocol_1)),
    "other client": changed(st.one_of(st.builds(gocelery), st.builds(both_protocols))),
    "plain body": changed(
        st.one_of(st.builds(good), st.builds(protocol_1), st.builds(gocelery)).map(
            plain
        )
    ),
    "another task": changed(st.builds(good, st.sampled_from(TASKS))),
    "body": with_body(),
    "damaged": damaged(),
    "no message": NO_MESSAGES,
}
HOSTILE = st.sampled_from(["changed"] * 5 + list(KINDS)).flatmap(
    lambda kind: KINDS[kind].map(lambda drawn: Hostile(kind, drawn))
)
