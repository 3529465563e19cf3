"""shared/unread_lists.py: senders whose options name lists that no worker reads."""

from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from feedmill.monitoring.watch import HealthPart, check_health, status
from feedmill.shared.broker import CLASSIFY_TASK, queue_depth, queue_lists
from feedmill.shared.metrics import SystemMetrics, connect_for_monitoring
from feedmill.shared.settings import Settings
from feedmill.shared.unread_lists import find_unread_lists
from tests.support import RedisServer, standing_in, wait_until

pytestmark = pytest.mark.each_redis


def send(redis: RedisServer, priority: int = 0, **options: Any) -> None:
    app = Celery(broker=redis.url, set_as_current=False)
    app.conf.broker_transport_options = options
    posts = [{"id": "1", "title": "x"}]
    app.send_task(
        CLASSIFY_TASK, kwargs={"posts": posts}, queue="feedmill", priority=priority
    )
    app.close()


def test_counts_the_lists_of_all_priority_steps(redis: RedisServer) -> None:
    for priority in range(10):
        send(redis, priority, priority_steps=list(range(10)))
    assert queue_depth(redis.client, "feedmill").waiting == 10
    assert find_unread_lists(redis.client, ["feedmill"]) == []


def test_workers_read_the_lists_of_all_priority_steps(
    redis: RedisServer, tmp_path: Path
) -> None:
    for priority in range(10):
        send(redis, priority, priority_steps=list(range(10)))
    with standing_in(redis, tmp_path) as worker:
        wait_until(
            lambda: (
                worker.lives() and queue_depth(redis.client, "feedmill") == (0, 0, 0)
            ),
            "all are finished",
        )
    assert redis.client.hget("feedmill:counters", "repeated") == "9"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sep": ":"}, "sep=':'"),
        ({"global_keyprefix": "shop:"}, "global_keyprefix='shop:'"),
        (
            {"global_keyprefix": "a\n", "sep": "-"},
            "global_keyprefix='a\\n' and sep='-'",
        ),
    ],
)
def test_names_the_option_of_the_sender(
    redis: RedisServer, settings: Settings, options: dict[str, str], named: str
) -> None:
    for _ in range(3):
        send(redis, 6, **options)
    (found,) = find_unread_lists(redis.client, ["feedmill", "feedmill-moods"])
    assert (found.messages, found.queue, found.option) == (3, "feedmill", named)
    assert "\n" not in str(found)
    seen = status(connect_for_monitoring(settings), None, settings)
    assert [unread["messages"] for unread in seen.as_json()["unread"]] == [3]
    (finding,) = check_health(settings, [HealthPart.QUEUE])
    assert not finding.well
    assert "sender sets" in finding.said
    assert SystemMetrics(settings).values() == {
        "feedmill_queue_unread_messages": {found.key: 3}
    }


def test_lists_whose_names_are_not_text_end_nothing(
    redis: RedisServer, settings: Settings
) -> None:
    redis.client.lpush(b"feedmill-\xff\xfe", "x")
    redis.client.lpush(b"\xfffeedmill", "x")
    (unread,) = find_unread_lists(redis.client, ["feedmill"])
    assert (unread.messages, unread.option) == (1, "global_keyprefix='\\\\xff'")
    assert check_health(settings, [HealthPart.QUEUE])


def test_names_a_priority_step_that_workers_do_not_read(redis: RedisServer) -> None:
    """kombu sends at most step 9; other clients are free."""
    redis.client.lpush("feedmill\x06\x1612", "x")
    redis.client.lpush("feedmill\x06\x169", "x")
    (unread,) = find_unread_lists(redis.client, ["feedmill"])
    assert (unread.messages, unread.option) == (1, "priority_steps with 12")


def test_ignores_lists_of_others(redis: RedisServer) -> None:
    for name in (
        *queue_lists("feedmill"),
        "feedmill-other",
        "8f1.reply.celery.pidbox",
        "feedmill.celery.pidbox",
    ):
        redis.client.lpush(name, "x")
    redis.client.set("xfeedmill", "no list")
    assert find_unread_lists(redis.client, ["feedmill"]) == []


def test_searches_a_bounded_number_of_keys(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feedmill.shared.unread_lists.MAX_KEYS", 1000)
    monkeypatch.setattr("feedmill.shared.unread_lists.KEYS_PER_CALL", 10)
    monkeypatch.setattr("feedmill.shared.unread_lists.MAX_LISTS", 5)
    for number in range(50):
        redis.client.lpush(f"{number}feedmill", "x")
    assert len(find_unread_lists(redis.client, ["feedmill"])) == 5
