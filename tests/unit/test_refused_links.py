"""A refused message's answers to its callers: workers/runtime/refusals.py and
workers/transport/leases.py.
"""

import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from feedmill.workers.runtime.refusals import (
    MAX_LINKS_BYTES,
    find_links,
    tell_failed,
    usable_links,
)
from feedmill.workers.transport.leases import MAX_UNDECODABLE_BYTES, stand_in

OWN = {
    "task": "told",
    "args": [],
    "kwargs": {},
    "options": {"queue": "feedmill:results"},
}
SAFE = {"task": "told", "args": [], "kwargs": {}, "options": {}}
LINKS = {"callbacks": None, "errbacks": [SAFE], "chain": None, "chord": None}


def body(links: object, text: str = "") -> bytes:
    return json.dumps([[], {"posts": [{"id": "1", "title": text}]}, links]).encode()


@pytest.mark.parametrize(
    "text",
    ["", '{"callbacks": [', '"}]}, {"errbacks": null}]', "x" * 2 * MAX_LINKS_BYTES],
)
def test_finds_links_at_the_end_of_a_body_whatever_posts_say(text: str) -> None:
    links = find_links(body(LINKS, text))
    assert links is not None
    assert links["errbacks"] == [SAFE]


@pytest.mark.parametrize(
    "other",
    [b"", b"\xff\xfe", b"[[], {}]", b'{"callbacks": ' * 1000, None, body(LINKS)[:-1]],
)
def test_finds_no_links_elsewhere(other: object) -> None:
    assert find_links(other) is None


@pytest.mark.parametrize(
    "links", [None, 7, [], "text", {"errbacks": 7, "chain": "x", "chord": ["y"]}]
)
def test_links_of_wrong_types_are_none(links: object) -> None:
    usable = usable_links(links)
    assert not any(usable.values())


def test_drops_only_links_that_cannot_be_used() -> None:
    chord = SAFE | {"options": {"link_error": [OWN, SAFE]}}
    links: dict[str, Any] = {
        "errbacks": [OWN, SAFE, "no signature", {"task": "bare"}],
        "chord": chord,
    }
    usable = usable_links(links)
    assert usable["errbacks"] == [
        SAFE,
        {"task": "bare", "args": [], "kwargs": {}, "options": {}},
    ]
    assert usable["chord"]["options"]["link_error"] == [SAFE]


def message(headers: object, text: str) -> bytes:
    properties = {
        "correlation_id": "id",
        "reply_to": "asker",
        "delivery_tag": "tag",
        "priority": 0,
    }
    return json.dumps(
        {"body": text, "headers": headers, "properties": properties}
    ).encode()


def test_a_stand_in_names_the_callers_of_an_undecodable_message() -> None:
    headers = {
        "task": "feedmill.classify",
        "id": "id",
        "group": "group",
        "group_index": 3,
        "eta": "soon",
    }
    made = stand_in(message(headers, "x" * 2 * MAX_UNDECODABLE_BYTES), "too large")
    assert made["headers"] == {"id": "id", "group": "group", "group_index": 3}
    assert made["properties"]["correlation_id"] == "id"
    assert made["properties"]["reply_to"] == "asker"
    assert made["properties"]["delivery_info"] == {}


@pytest.mark.parametrize(
    "headers", [None, [], "text", {"id": ["list"], "group": {}}, {"id": None}]
)
def test_a_stand_in_ignores_headers_of_wrong_types(headers: object) -> None:
    assert stand_in(message(headers, "text"), "reason")["headers"] == {}


@pytest.mark.parametrize(
    "whole",
    [
        b"",
        b"\xff",
        b'"headers":',
        b'"headers": {"id": "cut',
        b'"headers":' + b"[" * 5000,
    ],
)
def test_a_stand_in_of_anything_else_has_no_headers(whole: bytes) -> None:
    assert stand_in(whole, "reason")["headers"] == {}


@pytest.mark.parametrize(
    ("headers", "expected"),
    [({}, "of the body"), ({"task": "t", "id": "of the headers"}, "of the headers")],
    ids=["protocol 1", "protocol 2"],
)
def test_finds_the_id_of_a_message_that_must_not_be_decoded_here(
    headers: dict[str, Any], expected: str
) -> None:
    task = {"id": "of the body", "task": "t", "kwargs": {}}
    content = [[], {}, {"id": "no id"}] if headers else task
    backend = MagicMock()
    undecoded = SimpleNamespace(
        headers=headers,
        properties={"correlation_id": "other"},
        body=json.dumps(content),
    )
    assert tell_failed(backend, undecoded, ValueError(), unread=True) == expected
    assert backend.mark_as_failure.call_args.args[0] == expected
