"""`feedmill report`: figures and sections of the page, which must contain no markup of posts."""

import json
import re
import time
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from feedmill.producers.live.state import Gap, Gaps
from feedmill.report import gather, page
from feedmill.shared import runs
from feedmill.shared.keys import RESULTS_STREAM
from feedmill.shared.messages import DeadLetter, Post
from feedmill.shared.purge import purge
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from tests.support import RedisServer, feedmill, make_classification

SECTIONS = ["figures", "time", "labels", "scores", "subreddits", "dead", "gaps"]
#: Markup that an author or a sender of posts may try to inject.
EVIL = (
    "</title></style></section><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">'"
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
    post_id: str, label: str = "food", score: float = 0.9, labels: Sequence[str] = LABELS, **fields: Any
) -> Result:
    found = make_classification(
        post_id,
        label=label,
        scores=dict.fromkeys(labels, 0.0) | {label: score},
        model="a/model",
        classified_at=time.time(),
    )
    return Result(Post(id=post_id, **{"title": f"title of {post_id}", "subreddit": "python", **fields}), found)


def fill(redis: RedisServer) -> None:
    results = [result(str(number), label=f"label {number % 20}", score=number / 40) for number in range(40)]
    results.append(result("evil", EVIL, title=EVIL, subreddit=EVIL[:100]))
    letter = DeadLetter(
        id="d1", reason=EVIL, post=json.dumps({"title": EVIL}), options="{}", message=None, worker="w",
        failed_at=time.time(),
    )  # fmt: skip
    ResultsStore(redis.client, Settings()).write(results, [letter, letter.model_copy(update={"post": "no JSON"})])
    now = time.time()
    gaps = Gaps(redis.client)
    gaps.record(Gap("reddit", "<i>gone</i>", now - 900, now - 300, now))
    gaps.record(Gap("reddit", "old", 5.0, 9.0, 9.0))


def test_page_is_self_contained_and_escapes_what_senders_wrote(redis: RedisServer, tmp_path: Path) -> None:
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
    assert not {name for name in found.attributes if name.startswith("on") or name in ("src", "href")}
    assert found.tags.count("rect") >= 16
    for words in (EVIL, "r/<i>gone</i>", "label 7", "a/model"):
        assert any(words in text for text in found.texts), words
    assert "r/old" not in found.texts


def test_report_omits_purged_posts(redis: RedisServer, tmp_path: Path) -> None:
    ResultsStore(redis.client, Settings()).write([result("1", title="keep this"), result("2", title="not this")])
    purge(redis.client, Settings(), ["2"])
    assert feedmill("report", "r.html", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url).returncode == 0
    page = (tmp_path / "r.html").read_text()
    assert "keep this" in page
    assert "not this" not in page


def test_a_report_of_nothing_keeps_the_last_one(redis: RedisServer, tmp_path: Path) -> None:
    runs.keep_columns(redis.client, "after", [], 60)  # nothing was classified yet
    (tmp_path / "feedmill-report.html").write_text("monday")
    said = feedmill("report", "--run", "after", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert (said.returncode, said.stdout) == (1, "")
    assert re.match("No posts in the last 24 hours of after: nothing written", said.stderr)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["monday"]


def test_omits_reddit_sections_without_reddit_data(redis: RedisServer) -> None:
    store, settings = ResultsStore(redis.client, Settings()), Settings()
    store.write([result("1", subreddit=None)])
    shown = page(gather(redis.client, settings, hours=2))
    assert "<b>1</b>" in shown
    for words in ('id="subreddits"', 'id="gaps"', "gaps</div>"):
        assert words not in shown
    Gaps(redis.client).record(Gap("reddit", "cooking", time.time() - 60, time.time(), time.time()))
    assert "1</b>gap<" in page(gather(redis.client, settings, hours=2))


def test_a_report_is_of_one_label_set_or_run(redis: RedisServer, tmp_path: Path) -> None:
    topics, moods = ("food", "travel"), ("happy, or so", "sad")
    store = ResultsStore(redis.client, Settings())
    store.write([result(f"t{number}", "food", labels=topics, run="monday") for number in range(3)])
    store.write([result(f"m{number}", "sad", labels=moods, title="a mood", run="tuesday") for number in range(2)])
    settings = Settings()
    of_monday = gather(redis.client, settings, hours=2, run="monday")
    assert (of_monday.labels, of_monday.others) == ({"food": 3}, {})
    assert "<title>Feedmill, run monday: 2 hours</title>" in page(of_monday)
    assert gather(redis.client, settings, hours=2, labels="happy, or so, sad").labels == {"sad": 2}
    assert gather(redis.client, settings, hours=2, run="none").posts == 0
    said = feedmill("report", "r.html", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert re.match("3 posts", said.stdout)
    assert all(words in said.stderr for words in ("2 posts of the label set happy, or so, sad", "--label-set", "--run"))
    shown = (tmp_path / "r.html").read_text()
    assert "title of t2" in shown
    assert "a mood" not in shown
    assert "2 results of other label sets are left out" in shown
    for flags, posts in ((("--label-set", "travel,food"), 3), (("--run", "tuesday"), 2)):
        said = feedmill("report", *flags, cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
        assert re.match(f"{posts} posts", said.stdout)


def test_counts_include_trimmed_results_of_the_only_label_set(redis: RedisServer) -> None:
    store = ResultsStore(redis.client, Settings())
    store.write([result(str(number)) for number in range(3)])
    redis.client.xtrim(RESULTS_STREAM, 1, approximate=False)
    report = gather(redis.client, Settings(), hours=2)
    assert (report.posts, report.read) == (3, 1)
