"""`feedmill report`: figures and sections of the page, which must contain no markup of posts."""

import json
import re
import time
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from feedmill.producers.live.state import Gap, Gaps
from feedmill.report import gather, page
from feedmill.shared import keys, runs
from feedmill.shared.keys import RESULTS_STREAM
from feedmill.shared.messages import DeadLetter, Post, digest
from feedmill.shared.purge import purge
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from tests.support import RedisServer, feedmill, make_classification

SECTIONS = ["figures", "time", "labels", "scores", "subreddits", "dead", "gaps"]
#: Markup that an author or a sender of posts may try to inject.
EVIL = (
    "</title></style></section><script>document.title='owned'</script><img src=x "
    "onerror=\"document.title='owned'\">'"
)
#: One label set, because a report never mixes several.
LABELS = (EVIL, "food", *(f"label {number}" for number in range(20)))


class Page(HTMLParser):
    """The elements, attributes, ids and untrusted texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.ids: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] == ["bdi"]:
            self.texts.append(data)


def result(
    post_id: str,
    label: str = "food",
    score: float = 0.9,
    labels: Sequence[str] = LABELS,
    **fields: Any,
) -> Result:
    found = make_classification(
        post_id,
        label=label,
        scores=dict.fromkeys(labels, 0.0) | {label: score},
        model="a/model",
        classified_at=time.time(),
    )
    return Result(
        Post(
            id=post_id,
            **{"title": f"title of {post_id}", "subreddit": "python", **fields},
        ),
        found,
    )


def fill(redis: RedisServer) -> None:
    results = [
        result(str(number), label=f"label {number % 20}", score=number / 40)
        for number in range(40)
    ]
    results.append(result("evil", EVIL, title=EVIL, subreddit=EVIL[:100]))
    letter = DeadLetter(
        id="d1", reason=EVIL, post=json.dumps({"title": EVIL}), options="{}", message=None,
        worker="w",
        failed_at=time.time(),
    )  # fmt: skip
    ResultsStore(redis.client, Settings()).write(
        results, [letter, letter.model_copy(update={"post": "no JSON"})]
    )
    now = time.time()
    gaps = Gaps(redis.client)
    gaps.record(Gap("reddit", "<i>gone</i>", now - 900, now - 300, now))
    gaps.record(Gap("reddit", "old", 5.0, 9.0, 9.0))


def test_page_is_self_contained_and_escapes_what_senders_wrote(
    redis: RedisServer, tmp_path: Path
) -> None:
    fill(redis)
    said = feedmill("report", "report.html", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert said.returncode == 0, said.stderr
    assert re.match(r"41 posts .*report.html", said.stdout)
    text = (tmp_path / "report.html").read_text()
    assert "<title>Feedmill: 24 hours</title>" in text
    assert "default-src 'none'" in text
    assert not re.search(r"url\(|@import|https?:", text)
    found = Page(text)
    assert found.ids == SECTIONS
    assert not {"script", "img", "link", "iframe"} & set(found.tags)
    assert not {
        name
        for name in found.attributes
        if name.startswith("on") or name in ("src", "href")
    }
    assert found.tags.count("rect") >= 16
    for words in (EVIL, "r/<i>gone</i>", "label 7", "a/model"):
        assert any(words in text for text in found.texts), words
    assert "r/old" not in found.texts


def test_report_omits_purged_posts(redis: RedisServer, tmp_path: Path) -> None:
    ResultsStore(redis.client, Settings()).write(
        [result("1", title="keep this"), result("2", title="not this")]
    )
    purge(redis.client, Settings(), ["2"])
    assert (
        feedmill(
            "report", "r.html", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url
        ).returncode
        == 0
    )
    page = (tmp_path / "r.html").read_text()
    assert "keep this" in page
    assert "not this" not in page


def test_a_report_of_nothing_keeps_the_last_one(
    redis: RedisServer, tmp_path: Path
) -> None:
    runs.keep_columns(redis.client, "after", [], 60)  # nothing was classified yet
    (tmp_path / "feedmill-report.html").write_text("monday")
    said = feedmill(
        "report", "--run", "after", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url
    )
    assert (said.returncode, said.stdout) == (1, "")
    assert re.match(
        "No posts in the last 24 hours of after: nothing written", said.stderr
    )
    assert [path.read_text() for path in tmp_path.iterdir()] == ["monday"]


def test_omits_reddit_sections_without_reddit_data(redis: RedisServer) -> None:
    store, settings = ResultsStore(redis.client, Settings()), Settings()
    store.write([result("1", subreddit=None)])
    shown = page(gather(redis.client, settings, hours=2))
    assert "<b>1</b>" in shown
    for words in ('id="subreddits"', 'id="gaps"', "gaps</div>"):
        assert words not in shown
    Gaps(redis.client).record(
        Gap("reddit", "cooking", time.time() - 60, time.time(), time.time())
    )
    assert "1</b>gap<" in page(gather(redis.client, settings, hours=2))


def test_a_report_is_of_one_label_set_or_run(
    redis: RedisServer, tmp_path: Path
) -> None:
    topics, moods = ("food", "travel"), ("happy, or so", "sad")
    store = ResultsStore(redis.client, Settings())
    store.write(
        [
            result(f"t{number}", "food", labels=topics, run="monday")
            for number in range(3)
        ]
    )
    store.write(
        [
            result(f"m{number}", "sad", labels=moods, title="a mood", run="tuesday")
            for number in range(2)
        ]
    )
    settings = Settings()
    of_monday = gather(redis.client, settings, hours=2, run="monday")
    assert (of_monday.labels, of_monday.others) == ({"food": 3}, {})
    assert "<title>Feedmill, run monday: 2 hours</title>" in page(of_monday)
    assert gather(
        redis.client, settings, hours=2, labels="happy, or so, sad"
    ).labels == {"sad": 2}
    assert gather(redis.client, settings, hours=2, run="none").posts == 0
    said = feedmill("report", "r.html", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert re.match("3 posts", said.stdout)
    assert all(
        words in said.stderr
        for words in (
            "2 posts of the label set happy, or so, sad",
            "--label-set",
            "--run",
        )
    )
    shown = (tmp_path / "r.html").read_text()
    assert "title of t2" in shown
    assert "a mood" not in shown
    assert "2 results of other label sets are left out" in shown
    for flags, posts in (
        (("--label-set", "travel,food"), 3),
        (("--run", "tuesday"), 2),
    ):
        said = feedmill("report", *flags, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
        assert re.match(f"{posts} posts", said.stdout)


def test_counts_include_trimmed_results_of_the_only_label_set(
    redis: RedisServer,
) -> None:
    store = ResultsStore(redis.client, Settings())
    store.write([result(str(number)) for number in range(3)])
    redis.client.xtrim(RESULTS_STREAM, 1, approximate=False)
    report = gather(redis.client, Settings(), hours=2)
    assert (report.posts, report.read) == (3, 1)


def of_model(
    post_id: str, model: str, label: str = "food", text: str = "", **fields: Any
) -> Result:
    """Return a model's result of a post with this text."""
    post, found = result(post_id, label, **fields)
    return Result(
        post,
        found.model_copy(
            update={"model": model, "fingerprint": digest(post_id, model, text)}
        ),
    )


def test_a_post_counts_once_with_its_newest_result(
    redis: RedisServer, tmp_path: Path
) -> None:
    """However often it was classified: a report is of one model, with the newest text; in one run
    or another post of another.
    """
    store = ResultsStore(redis.client, Settings())
    store.write([of_model(str(number), "a/first", "label 1") for number in range(10)])
    store.write(
        [
            of_model(str(number), "a/second", "label 2", subreddit="rust")
            for number in range(4)
        ]
    )
    store.write([of_model("9", "a/first", "label 3", text="edited")])
    report = gather(redis.client, Settings(), hours=2)
    assert (report.posts, report.read, report.earlier) == (10, 10, 1)
    assert report.labels == {"label 1": 9, "label 3": 1}
    assert (report.models, report.other_models) == ({"a/first": 10}, {"a/second": 4})
    second = gather(redis.client, Settings(), hours=2, model="a/second")
    assert (second.labels, second.other_models) == ({"label 2": 4}, {"a/first": 10})
    for shown, name, posts in ((report, "python", 10), (second, "rust", 4)):
        [(subreddit, counts)] = shown.subreddits.items()
        assert (subreddit, counts.total()) == (name, posts)
    assert sum(sum(bins) for bins in report.scores.values()) == 10
    said = feedmill("report", "r.html", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert re.match("10 posts", said.stdout)
    text = (tmp_path / "r.html").read_text()
    assert "<b>10</b>posts" in text
    assert "1 earlier results of these posts" in text
    assert "Left out: 4 posts of the model a/second" in said.stderr
    said = feedmill(
        "report", "--model", "a/second", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url
    )
    assert re.match("4 posts", said.stdout)
    store.write(
        [of_model("0", "a/first", text=run, run=run) for run in ("monday", "tuesday")]
    )
    assert gather(redis.client, Settings(), hours=2).posts == 12


def test_other_label_sets_count_posts(redis: RedisServer, tmp_path: Path) -> None:
    store = ResultsStore(redis.client, Settings())
    store.write([result(str(number)) for number in range(3)])
    moods = ("happy", "sad")
    for model in ("a/first", "a/second", "a/third"):
        store.write(
            [of_model(str(number), model, "sad", labels=moods) for number in range(2)]
        )
    assert gather(redis.client, Settings(), hours=2).others == {"happy, sad": 2}
    said = feedmill("report", "r.html", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert "2 posts of the label set happy, sad" in said.stderr


@pytest.mark.parametrize("models", [("a/first",), ("a/first", "a/second")])
def test_trimmed_hours_are_counted_only_if_results_are_posts(
    redis: RedisServer, models: Sequence[str]
) -> None:
    store = ResultsStore(redis.client, Settings())
    for model in models:
        store.write([of_model(str(number), model) for number in range(6)])
    redis.client.xtrim(RESULTS_STREAM, len(models) * 6 - 2, approximate=False)
    report = gather(redis.client, Settings(), hours=2)
    assert report.posts == 6
    assert (report.cut_before is None) == (len(models) == 1)
    assert ("trimmed from the results stream are left out" in page(report)) == (
        len(models) == 2
    )


def test_counts_that_expired_hide_no_post(redis: RedisServer) -> None:
    """The stream of a quiet system is older than the hourly counts, which are kept for 30 days."""
    store = ResultsStore(redis.client, Settings())
    store.write([result(str(number)) for number in range(3)])
    redis.client.xtrim(RESULTS_STREAM, 2, approximate=False)
    for key in redis.client.scan_iter(keys.LABELS + "*"):
        redis.client.delete(key)
    assert gather(redis.client, Settings(), hours=2).posts == 2


def test_a_model_that_was_trained_again_is_another_one(redis: RedisServer) -> None:
    """It may keep its name; its weights have another digest."""
    store = ResultsStore(redis.client, Settings())
    for weights, count in (("a" * 64, 3), ("b" * 64, 2)):
        results = [
            of_model(str(number), "a/model", text=weights) for number in range(count)
        ]
        store.write(
            [
                Result(post, found.model_copy(update={"weights": weights}))
                for post, found in results
            ]
        )
    report = gather(redis.client, Settings(), hours=2)
    assert report.posts == 3
    assert report.other_models == {f"a/model ({'b' * 12})": 2}
    assert gather(redis.client, Settings(), hours=2, model="b" * 12).posts == 2
    assert gather(redis.client, Settings(), hours=2, model="none").posts == 0


def test_posts_of_files_are_placed_by_their_own_time(redis: RedisServer) -> None:
    """A dump of 2023 that was classified today was one bar at its end."""
    store = ResultsStore(redis.client, Settings())
    months = (1672531200, 1675209600, 1698796800)  # January, February and November 2023
    for index, month in enumerate(months):
        store.write(
            [
                result(f"{month}-{number}", created_utc=month + number, run="dump")
                for number in range(index + 1)
            ]
        )
    store.write(
        [result("undated", run="dump"), result("live", created_utc=1798761600.0)]
    )
    report = gather(redis.client, Settings(), hours=2, run="dump")
    assert report.axis is not None
    assert report.axis.unit == "month"
    counts = [column.total() for column in report.columns.values()]
    assert counts == [1, 2, *[0] * 8, 3]
    assert (report.posts, report.undated) == (7, {"food": 1})
    shown = page(report)
    assert (
        "per month, by label and the time at which they were written; 1 have none"
        in shown
    )
    assert "Nov 2023: food, 3" in shown
    # most posts of the period are of files
    assert gather(redis.client, Settings(), hours=2).axis is not None
    store.write(
        [result(f"live {number}", created_utc=1798761600.0) for number in range(9)]
    )
    assert gather(redis.client, Settings(), hours=2).axis is None


def test_subreddits_that_differ_in_case_are_one(redis: RedisServer) -> None:
    store = ResultsStore(redis.client, Settings())
    for number, name in enumerate(("AskReddit", "askreddit", "ASKREDDIT", "python")):
        store.write([result(str(number), subreddit=name)])
    report = gather(redis.client, Settings(), hours=2)
    totals = {name: counts.total() for name, counts in report.subreddits.items()}
    assert totals == {"AskReddit": 3, "python": 1}
