"""A short differential test (tests/differential.py); `make long` runs it with ten thousand
messages.
"""

from pathlib import Path

import pytest

from tests.differential import run
from tests.fakes.differential_messages import FATES, TASKS, Draw
from tests.support import RedisServer, application, redis_servers, wait_until, working

SEED, MESSAGES, POSTS = 7, 200, 8


def test_messages_end_as_on_a_stock_worker(tmp_path: Path) -> None:
    if not redis_servers():
        pytest.skip("needs a redis-server of the system: apt install redis-server")
    found, differences = run(MESSAGES, POSTS, SEED, tmp_path)
    assert not differences, "\n".join(map(str, differences[:5]))
    assert found["incomplete_event_logs"] == 0
    assert found["by_state"].keys() >= {"SUCCESS", "FAILURE", "REVOKED", "no result"}


def test_seeded_draw_is_repeatable_and_covers_everything() -> None:
    sendings = list(Draw(SEED, MESSAGES, POSTS).sendings())
    assert sendings == list(Draw(SEED, MESSAGES, POSTS).sendings())
    calls = [call for sending in sendings for call in sending.calls]
    assert {call.task for call in calls} >= TASKS.keys()
    assert {call.fate for call in calls} == FATES.keys()
    shapes = {(sending.kind, sending.protocol) for sending in sendings}
    assert shapes == {
        (kind, protocol)
        for kind in ("single", "chain", "group", "chord")
        for protocol in (1, 2)
    }
    assert {name for call in calls for name in call.options} == {
        "ignore_result", "priority", "time_limit", "soft_time_limit", "countdown", "expires",
        "shadow", "headers",
        "compression",
    }  # fmt: skip
    assert any(call.stamps for call in calls)
    assert any(call.link for call in calls)
    assert any(call.errbacks for call in calls)


def test_a_failing_callback_does_not_stop_the_worker(
    redis: RedisServer, tmp_path: Path
) -> None:
    """A stock worker logs the failure and continues; an invalid callback must not stop ours
    either.
    """
    app = application(redis)
    posts = [{"id": "1", "title": "The keeper saved two penalties in the final"}]
    with working(
        redis, tmp_path, FEEDMILL_INCLUDE="tests.fakes.differential_tasks"
    ) as worker:
        takes_no_more_than_an_id = app.signature(
            "differential.failed", kwargs={"more": 1}
        )
        app.send_task(
            "differential.reject",
            kwargs={"posts": posts},
            link_error=takes_no_more_than_an_id,
        )
        assert app.send_task("feedmill.classify", kwargs={"posts": posts}).get(
            timeout=120
        )
        wait_until(lambda: worker.says("ERROR"), "the worker logs the failure")
        assert app.send_task("feedmill.classify", kwargs={"posts": posts}).get(
            timeout=120
        )
