"""Posts in the form of Reddit's API: their text, and whether they were deleted or removed."""

import logging
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given

from feedmill.producers.live.source import RequestBudget
from feedmill.producers.records import reddit_body, removal_of
from feedmill.producers.reddit.listing import parse_items
from feedmill.shared.messages import clean
from tests.fakes.clock import SimulatedClock
from tests.integration.test_live import JSON, changed


@pytest.mark.parametrize(
    ("record", "removal"),
    [
        ({}, ""),
        ({"removed_by_category": None, "title": "x", "selftext": "y"}, ""),
        ({"removed_by_category": "deleted"}, "deleted"),
        ({"removed_by_category": "copyright_takedown"}, "deleted"),
        ({"removed_by_category": "anti_evil_ops"}, "deleted"),
        ({"removed_by_category": "moderator"}, "removed"),
        ({"removed_by_category": "automod_filtered"}, "removed"),
        ({"removed_by_category": "reddit"}, "removed"),
        ({"selftext": "[removed]"}, "removed"),
        ({"selftext": " [deleted]"}, "deleted"),
        ({"title": "[deleted by user]"}, "deleted"),
        ({"selftext": "[ Removed by moderator ]"}, "removed"),
        (
            {"selftext": "[ Removed by Reddit in response to a copyright notice. ]"},
            "deleted",
        ),
        ({"title": "[ Removed by Reddit ]"}, "deleted"),
        ({"title": "[ Removed by moderator ]"}, "removed"),
        ({"_meta": {"was_deleted_later": True}}, "deleted"),
        ({"_meta": {"was_deleted_later": True, "removal_type": "removed"}}, "removed"),
        ({"_meta": None, "title": "[removed] from the menu"}, ""),
    ],
)
def test_distinguishes_removals_from_deletions(
    record: dict[str, Any], removal: str
) -> None:
    assert removal_of(record) == removal


@pytest.mark.parametrize(
    ("record", "body"),
    [
        ({"selftext": "own"}, "own"),
        (
            {"selftext": "[removed]", "poll_data": {"options": [{"text": "a"}]}},
            "[removed]",
        ),
        ({"selftext": "", "crosspost_parent_list": [{"selftext": "theirs"}]}, "theirs"),
        ({"selftext": "", "crosspost_parent_list": [{"selftext": "[deleted]"}]}, ""),
        (
            {
                "selftext": "",
                "crosspost_parent_list": [
                    {"gallery_data": {"items": [{"caption": "c"}]}}
                ],
            },
            "c",
        ),
        (
            {
                "selftext": "own",
                "poll_data": {"options": [{"text": "a"}, {"text": "b"}]},
            },
            "own\n\na\n\nb",
        ),
        (
            {
                "selftext": 5,
                "poll_data": 5,
                "gallery_data": {"items": 5},
                "crosspost_parent_list": 5,
            },
            "",
        ),
        (
            {
                "poll_data": {"options": [5, {}, {"text": None}]},
                "crosspost_parent_list": [None],
            },
            "",
        ),
    ],
)
def test_collects_the_texts_of_a_post(record: dict[str, Any], body: str) -> None:
    assert reddit_body(record) == body


def test_leaves_out_texts_that_would_make_a_post_too_long() -> None:
    record = {
        "selftext": "x" * 99_999,
        "poll_data": {"options": [{"text": "a long option"}]},
    }
    assert reddit_body(record) == "x" * 99_999


@pytest.mark.parametrize("raw", ["a & b", "&#x200B; a", "&amp;lt;", "<b>"])
def test_a_text_is_the_same_however_it_is_escaped(raw: str) -> None:
    escaped = raw.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert clean(escaped, escaped) == clean(raw, raw)


def test_unescaping_is_bounded() -> None:
    assert len(clean("&" + "amp;" * 1000, "")) == 1 + 4 * 996


@pytest.mark.parametrize("reset", ["30", "1800000030"])
def test_a_rate_limits_reset_may_be_a_time(reset: str) -> None:
    clock = SimulatedClock(1_800_000_000.0)
    budget = RequestBudget(clock, 60)
    budget.learn({"x-ratelimit-remaining": "0", "x-ratelimit-reset": reset})
    assert budget.pending() == 30.0


def test_the_extra_requires_a_urllib3_that_reads_what_has_arrived() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())[
        "project"
    ]
    assert "urllib3>=2.2" in project["optional-dependencies"]["reddit"]


ITEM = {
    "name": "t3_abc", "id": "abc", "title": "a title", "selftext": "a text",
    "subreddit": "birds", "score": 7,
    "created_utc": 1_800_000_000.0, "edited": False, "permalink": "/r/birds/comments/abc/",
    "url": "https://a.example",
    "crosspost_parent_list": [{"selftext": "x"}], "poll_data": {"options": [{"text": "y"}]},
    "gallery_data": {"items": [{"caption": "z"}]}, "removed_by_category": None, "over_18": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _few_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "feedmill.producers.reddit")


@given(changed(ITEM) | JSON)
@example(ITEM | {"created_utc": 10**400})
@example(ITEM | {"subreddit": "\ud800"})
@example(ITEM | {"score": 10**400, "edited": float("inf")})
def test_no_item_fails_its_page(item: Any) -> None:
    parsed = list(parse_items([item, ITEM], {"birds": "nature"}))
    assert parsed[-1].post
    assert parsed[-1].post.id == "t3_abc"
    for listed in parsed:
        assert math.isfinite(listed.created_utc)
        f"{listed.fullname} {listed.subreddit}".encode()
