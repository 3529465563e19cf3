"""shared/keys.py: looking up keys in the table."""

import pytest

from shared.keys import (
    COUNTERS,
    MARKS,
    REDDIT_RECHECKS,
    RESULTS_STREAM,
    STORED,
    TABLE,
    find,
    reddit_known_key,
    tombstone_key,
)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        (RESULTS_STREAM, "feedmill:results"),
        (COUNTERS, "feedmill:counters"),
        (f"{STORED}:3", "feedmill:stored:*"),
        (MARKS, "feedmill:sent-marks"),
        (f"{MARKS}:12", "feedmill:sent-marks:*"),
        (reddit_known_key("cooking"), "feedmill:reddit:known:*"),
        (REDDIT_RECHECKS, "feedmill:reddit:looks"),
        (tombstone_key("t3_x"), "feedmill:gone:*"),
        ("feedmill", "feedmill"),
        ("feedmill\x06\x163", "feedmill\x06\x16?"),
        ("feedmill:reserved", "feedmill:reserved"),
        ("celery-task-meta-1", "celery-task-meta-*"),
        ("1f.reply.celery.pidbox", "*.reply.celery.pidbox*"),
    ],
)
def test_finds_the_row_of_a_key(name: str, pattern: str) -> None:
    key = find(name)
    assert key
    assert key.pattern == pattern


def test_unknown_keys_have_no_row() -> None:
    assert find("session:42") is None
    assert find("feedmill:surprise") is None
    assert all(key.bound for key in TABLE)
