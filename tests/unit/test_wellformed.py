"""workers/runtime/incoming.py: rejecting messages that Celery cannot process."""

from datetime import datetime
from typing import Any
from unittest.mock import Mock

import pytest
from celery.exceptions import InvalidTaskError

from feedmill.workers.runtime.incoming import check
from tests.fakes.hostile_messages import good, protocol_1
from tests.support import naming


def message(whole: dict[str, Any]) -> Any:
    return Mock(headers=whole["headers"], payload=whole["body"])


@pytest.mark.parametrize("start", [good, protocol_1])
def test_accepts_valid_messages(start: Any) -> None:
    check(message(start()))


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("id", ["a"], ("str", "list")),
        ("retries", "1", ("int",)),
        ("timelimit", 5, ("list",)),
        ("stamped_headers", [["a"]], ()),
        ("stamped_headers", "ab", ("list",)),
        ("eta", "9999-12-31T23:59:59-12:00", ("range",)),
        ("eta", 5, ("ISO 8601", "5")),
        ("eta", "2026-02-30", ("ISO 8601", "'2026-02-30'")),
        ("expires", float("nan"), ("ISO 8601", "nan")),
    ],
)
def test_rejects_headers_of_the_wrong_type(name: str, value: Any, named: tuple[str, ...]) -> None:
    whole = good()
    whole["headers"][name] = value
    with pytest.raises(InvalidTaskError, match=naming(name, *named)):
        check(message(whole))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eta", "2026-11-22T10:00:00"),
        ("eta", datetime(2026, 11, 22)),
        ("eta", "0001-01-01T00:00:00"),
        ("eta", None),
        # Celery compares these without converting them to local time.
        ("expires", "9999-12-31T23:59:59-12:00"),
        ("expires", "0001-01-01T00:00:00+14:00"),
        ("stamped_headers", ["a"]),
    ],
)
def test_accepts_times_celery_can_use(name: str, value: Any) -> None:
    whole = good()
    whole["headers"][name] = value
    check(message(whole))


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ([5, {}, {}], naming("args", "list")),
        ([[], "kwargs", {}], naming("kwargs", "dict")),
        ([[], {}, "callbacks"], "body"),
        (None, "body"),
    ],
)
def test_rejects_bodies_of_the_wrong_shape(body: Any, named: str) -> None:
    with pytest.raises(InvalidTaskError, match=named):
        check(message(good() | {"body": body}))


def test_checks_protocol_1_messages() -> None:
    whole = protocol_1()
    whole["body"]["kwargs"] = 5
    with pytest.raises(InvalidTaskError, match=naming("kwargs", "dict")):
        check(message(whole))


def test_leaves_messages_without_a_task_to_celery() -> None:
    for body in ({"id": 5}, 5, [1, 2, 3]):
        check(message({"headers": {}, "body": body}))
