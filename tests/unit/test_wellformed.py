"""workers/wellformed.py: what Celery could not run is told apart before Celery meets it."""

from datetime import datetime
from typing import Any
from unittest.mock import Mock

import pytest
from celery.exceptions import InvalidTaskError

from tests.fakes.hostile_messages import good, protocol_1
from workers.wellformed import check


def message(whole: dict[str, Any]) -> Any:
    return Mock(headers=whole["headers"], payload=whole["body"])


@pytest.mark.parametrize("start", [good, protocol_1])
def test_a_good_message_passes(start: Any) -> None:
    check(message(start()))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("id", None, "id must be a str, not a NoneType"),
        ("id", ["a"], "id must be a str, not a list"),
        ("shadow", [], "shadow must be a str"),
        ("retries", "1", "retries must be a int"),
        ("timelimit", 5, "timelimit must be a list"),
        ("timelimit", [5], "timelimit must have two values"),
        ("stamps", [], "stamps must be a dict"),
        ("stamped_headers", [["a"]], "stamped_headers must contain"),
        ("stamped_headers", "ab", "stamped_headers must be a list"),
        ("eta", "9999-12-31T23:59:59-12:00", "eta is out of range: it cannot be converted to local time"),
        ("eta", "0001-01-01T00:00:00+14:00", "eta is out of range"),
        ("eta", 5, "eta must be a time in ISO 8601, not 5"),
        ("eta", "", "eta must be a time in ISO 8601, not ''"),
        ("eta", "2026-02-30", "eta must be a time in ISO 8601, not '2026-02-30'"),
        ("expires", float("nan"), "expires must be a time in ISO 8601, not nan"),
        ("expires", {}, "expires must be a time in ISO 8601, not {}"),
    ],
)
def test_a_header_of_another_type_is_refused(name: str, value: Any, words: str) -> None:
    whole = good()
    whole["headers"][name] = value
    with pytest.raises(InvalidTaskError, match=words):
        check(message(whole))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eta", "2026-11-22T10:00:00"),
        ("eta", "2026-11-22T10:00:00.5+02:00"),
        ("eta", datetime(2026, 11, 22)),
        ("eta", "0001-01-01T00:00:00"),
        ("eta", None),
        # Compared, never converted.
        ("expires", "9999-12-31T23:59:59-12:00"),
        ("expires", "0001-01-01T00:00:00+14:00"),
        ("stamped_headers", ["a"]),
    ],
)
def test_a_time_that_celery_can_use_passes(name: str, value: Any) -> None:
    whole = good()
    whole["headers"][name] = value
    check(message(whole))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([5, {}, {}], "args must be a list"),
        ([[], "kwargs", {}], "kwargs must be a dict"),
        ([[], {}, "callbacks"], "its body must be a list"),
        ([[], {}], "its body must be a list"),
        (5, "its body must be a list"),
        (None, "its body must be a list"),
    ],
)
def test_a_body_of_another_shape_is_refused(body: Any, words: str) -> None:
    with pytest.raises(InvalidTaskError, match=words):
        check(message(good() | {"body": body}))


def test_protocol_1_is_looked_at_too() -> None:
    whole = protocol_1()
    whole["body"]["kwargs"] = 5
    with pytest.raises(InvalidTaskError, match="kwargs must be a dict"):
        check(message(whole))


def test_what_names_no_task_is_left_to_celery() -> None:
    for body in ({"id": 5}, 5, [1, 2, 3]):
        check(message({"headers": {}, "body": body}))
