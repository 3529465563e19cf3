"""workers/runtime/request.py and `format_arguments` of shared/broker.py: requests never show a
post's text.
"""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import InvalidTaskError
from celery.worker import state

from feedmill.shared.broker import CLASSIFY_TASK, format_arguments
from feedmill.shared.settings import Settings
from feedmill.workers.app import make_worker_app
from feedmill.workers.runtime.request import ClassifyRequest, check, withdrawn
from tests.fakes.hostile_messages import good, protocol_1

BODY = "private text"


@pytest.mark.parametrize(
    ("kwargs", "shown"),
    [
        ({"posts": [{"id": f"t{name}", "body": BODY} for name in "abcd"]}, ("{'posts': <4 posts: "
                                                                           "ta, tb, tc>}")),
        ({"posts": [{"id": 7}, {"id": [BODY]}, BODY]}, "{'posts': <3 posts: 7>}"),
        ({"posts": [{"id": "x" * 1000}]}, "{'posts': <1 post: " + "x" * 40 + ">}"),
        ({"posts": [{"id": "a\x1b[31m\ud800"}]}, "{'posts': <1 post: a\\x1b[31m\\ud800>}"),
        ({"posts": BODY, "text": BODY, "more": {"x": BODY}}, ("{'posts': <str>, 'text': <str>, "
                                                             "'more': <dict>}")),
        ({"multi_label": True, "top_k": 3, "labels": ["a"]}, ("{'multi_label': True, 'top_k': 3, "
                                                             "'labels': <list>}")),
        ({f"name{number}": 0 for number in range(9)},
        "{" + ", ".join(f"'name{n}': 0" for n in range(8)) + "}"),
    ],
)  # fmt: skip
def test_shows_ids_and_sizes_of_arguments(kwargs: dict[str, Any], shown: str) -> None:
    assert format_arguments(kwargs) == shown


@pytest.mark.parametrize("start", [good, protocol_1])
def test_rejects_a_time_that_celery_cannot_convert(start: Any) -> None:
    """Celery would delete the message."""
    whole = start()
    message = SimpleNamespace(headers=whole["headers"], payload=whole["body"])
    for eta in (None, "2026-11-22T10:00:00", "0001-01-01T00:00:00"):
        (whole["headers"] or whole["body"])["eta"] = eta
        check(message)
    (whole["headers"] or whole["body"])["eta"] = "9999-12-31T23:59:59-12:00"
    with pytest.raises(OverflowError):
        check(message)


@pytest.mark.parametrize(
    "wrong", [{"shadow": {}}, {"stamped_headers": [[]]}, {"timelimit": [1]}]
)
@pytest.mark.parametrize("start", [good, protocol_1])
def test_rejects_what_would_end_the_worker(start: Any, wrong: dict[str, Any]) -> None:
    whole = start()
    (whole["headers"] or whole["body"]).update(wrong)
    with pytest.raises(InvalidTaskError):
        check(SimpleNamespace(headers=whole["headers"], payload=whole["body"]))


@pytest.mark.parametrize(
    "links",
    [
        {"errbacks": [1]}, {"errbacks": "9" * 100}, {"callbacks": [1]}, {"chain": "x"},
        {"chord": 5},
        {"callbacks": [{"task": "x", "options": {"queue": "feedmill:result:a"}}]},
    ],
)  # fmt: skip
def test_rejects_invalid_links(links: dict[str, Any]) -> None:
    whole = good()
    whole["body"][2] |= links
    with pytest.raises((InvalidTaskError, AttributeError)):
        check(SimpleNamespace(headers=whole["headers"], payload=whole["body"]))


def request(
    args: object,
    kwargs: object,
    events: list[tuple[str, dict[str, Any]]] | None = None,
    **headers: Any,
) -> ClassifyRequest:
    """Return a request like Celery's, with the descriptions of the arguments that the sender would
    add.
    """
    app = make_worker_app(Settings(redis_url="redis://127.0.0.1:1/0"))
    message = SimpleNamespace(
        headers={
            "id": "m1",
            "task": CLASSIFY_TASK,
            "argsrepr": repr(args),
            "kwargsrepr": repr(kwargs),
            **headers,
        },
        body=json.dumps([args, kwargs, {}]),
        payload=[args, kwargs, {}],
        content_type="application/json",
        content_encoding="utf-8",
        delivery_info={},
        properties={},
    )
    sent = [] if events is None else events
    eventer = SimpleNamespace(
        enabled=True,
        send=lambda type, **fields: sent.append((type, fields)),  # noqa: A006 - Celery's name
    )
    task = app.tasks[CLASSIFY_TASK]
    assert task.Request == "feedmill.workers.runtime.request:ClassifyRequest"
    return ClassifyRequest(
        message, app=app, task=task, eventer=eventer, hostname="worker@here"
    )


@pytest.mark.parametrize(
    ("args", "kwargs", "shown"),
    [
        ([], {"posts": [{"id": "a", "body": BODY}]}, "{'posts': <1 post: a>}"),
        ([[{"id": "a"}], ["x", "y"]], {}, "{'posts': <1 post: a>, 'labels': <list>}"),
        (BODY, BODY, "{}"),
    ],
)
def test_requests_never_show_posts(args: object, kwargs: object, shown: str) -> None:
    made = request(args, kwargs)
    assert (made.argsrepr, made.kwargsrepr) == ("()", shown)
    assert (made.request_dict["argsrepr"], made.request_dict["kwargsrepr"]) == (
        "()",
        shown,
    )
    for shown_text in (
        repr(made),
        str(made),
        str(made.info()),
        str(made.info(safe=True)),
    ):
        assert BODY not in shown_text
    # The arguments themselves are unchanged.
    assert (made.args, made.kwargs) == (args, kwargs)


@pytest.mark.parametrize(
    ("stamps", "revoked"),
    [
        ({"user": ["a", "b"]}, True),
        ({"user": "b"}, True),
        ({"user": ["a"]}, False),
        ({"user": [{"a": 1}, ["b"], {"b": 2}]}, True),
        ({"user": {"b": 2}}, True),
        ({"user": [{"a": 1}, [["a"]]]}, False),
        ({"user": None}, False),
        ({"other": [{"b": 2}, "b"]}, False),
        ({"other": [{"a": 1}], "user": ["b"]}, True),
    ],
)
def test_is_revoked_by_stamps_of_any_type(
    monkeypatch: pytest.MonkeyPatch, stamps: dict[str, Any], revoked: bool
) -> None:
    """Celery, which announces the revocation, must agree."""
    monkeypatch.setitem(state.revoked_stamps, "user", ["b", {"b": 2}])
    made = request([], {"posts": []}, stamped_headers=list(stamps), stamps=stamps)
    monkeypatch.setattr(made, "_announce_revoked", lambda *_: None)
    assert withdrawn(made) == made.revoked() == revoked
