"""`feedmill report`: the page in a real browser; it must never execute content of posts."""

import html
import json
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from feedmill.producers.live.state import Gap, Gaps
from feedmill.report.data import gather
from feedmill.report.page import page
from feedmill.shared import runs
from feedmill.shared.keys import RESULTS_STREAM
from feedmill.shared.messages import DeadLetter, Post
from feedmill.shared.purge import purge
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from tests.support import RedisServer, feedmill, make_classification

SECTIONS = ("figures", "time", "labels", "scores", "subreddits", "throughput", "waits", "dead", "gaps")
#: Markup that an author or a sender of posts may try to inject.
EVIL = (
    "</title></style></section><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">'"
)
LONG = "W" * 90
#: A page that shows the report at a phone's width, and lists overflowing elements, executed scripts and sections.
HARNESS = """<!doctype html><body style="margin:0"><iframe style="width:390px;height:2000px;border:0" srcdoc="{page}">
</iframe><pre id="found"></pre><script>
const frame = document.querySelector("iframe");
const look = () => {{
  const page = frame.contentDocument, wide = [];
  for (const each of page.querySelectorAll("body *:not(title):not(bdi)"))
    if (each.getBoundingClientRect().right > 390.5) wide.push(each.tagName + "." + each.className);
  document.getElementById("found").textContent = JSON.stringify({{
    width: page.documentElement.scrollWidth, wide, title: page.title,
    scripts: page.querySelectorAll("script, img, link, iframe").length,
    sections: [...page.querySelectorAll("main [id]")].map(each => each.id),
    texts: [...page.querySelectorAll("bdi")].map(each => each.textContent),
    bars: page.querySelectorAll("#time rect").length,
  }});
}};
frame.addEventListener("load", look);
</script></body>"""


@pytest.fixture(scope="session")
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("needs a headless browser: apt install chromium")
    return found


#: One label set, because a report never mixes several.
LABELS = (EVIL, LONG, "food", *(f"label {number}" for number in range(20)))


def look_at(chromium: str, page: str, folder: Path) -> dict[str, Any]:
    """Return what the browser measured on a page 390 pixels wide."""
    harness = folder / "harness.html"
    harness.write_text(HARNESS.format(page=html.escape(page)))
    said = subprocess.run(
        [
            chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=10000",
            "--window-size=390,844", "--dump-dom", harness.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = re.search(r'<pre id="found">(.*?)</pre>', said.stdout, re.DOTALL)
    assert found, said.stdout[-2000:]
    looked: dict[str, Any] = json.loads(html.unescape(found[1]))
    return looked


def result(
    post_id: str, label: str = "food", score: float = 0.9, labels: Sequence[str] = LABELS, **fields: Any
) -> Result:
    found = make_classification(
        post_id,
        label=label,
        scores=dict.fromkeys(labels, 0.0) | {label: score},
        model="a/model",
        classified_at=time.time(),
        queued_seconds=2.5,
    )
    return Result(Post(id=post_id, **{"title": f"title of {post_id}", "subreddit": "python", **fields}), found)


def fill(redis: RedisServer) -> None:
    results = [result(str(number), label=f"label {number % 20}", score=number / 40) for number in range(40)]
    results += [
        result("evil", EVIL, title=EVIL, subreddit=EVIL[:100]),
        result("long", LONG, title=LONG, subreddit=LONG),
    ]
    letter = DeadLetter(
        id="d1", reason=EVIL, post=json.dumps({"title": EVIL}), options="{}", message=None, worker="w",
        failed_at=time.time(),
    )  # fmt: skip
    ResultsStore(redis.client, Settings()).write(results, [letter, letter.model_copy(update={"post": "no JSON"})])
    now = time.time()
    gaps = Gaps(redis.client)
    gaps.record(Gap("reddit", "<i>gone</i>", now - 900, now - 300, now))
    gaps.record(Gap("reddit", "old", 5.0, 9.0, 9.0))


def test_page_fits_a_phone_and_runs_no_injected_markup(redis: RedisServer, tmp_path: Path, chromium: str) -> None:
    fill(redis)
    out = tmp_path / "report.html"
    said = feedmill("report", str(out), cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert said.returncode == 0, said.stderr
    assert re.match(rf"42 posts .*{out}", said.stdout)
    found = look_at(chromium, out.read_text(), tmp_path)
    assert tuple(found["sections"]) == SECTIONS
    assert (found["width"], found["wide"]) == (390, [])
    assert (found["title"], found["scripts"]) == ("Feedmill: 24 hours", 0)
    assert found["bars"] >= 16
    for words in (EVIL, LONG, "r/<i>gone</i>", "label 7", "a/model"):
        assert any(words in text for text in found["texts"]), words
    assert "r/old" not in found["texts"]


def test_page_is_self_contained(redis: RedisServer, tmp_path: Path) -> None:
    fill(redis)
    assert feedmill("report", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url).returncode == 0
    page = (tmp_path / "feedmill-report.html").read_text()
    markup = re.sub(r"<bdi>.*?</bdi>|<title>.*?</title>|title=\"[^\"]*\"", "", page)
    assert not re.search(r"<script|<img|<link|src=|href=|url\(|@import|https?:|onerror", markup)
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page


def test_report_omits_purged_posts(redis: RedisServer, tmp_path: Path) -> None:
    ResultsStore(redis.client, Settings()).write([result("1", title="keep this"), result("2", title="not this")])
    purge(redis.client, Settings(), ["2"])
    assert feedmill("report", "r.html", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url).returncode == 0
    page = (tmp_path / "r.html").read_text()
    assert "keep this" in page
    assert "not this" not in page


@pytest.mark.parametrize("flags", [(), ("--run", "after")])
def test_a_report_of_nothing_keeps_the_last_one(redis: RedisServer, tmp_path: Path, flags: tuple[str, ...]) -> None:
    runs.keep_columns(redis.client, "after", [], 60)  # nothing was classified yet
    url = {"FEEDMILL_REDIS_URL": redis.url}
    said = feedmill("report", *flags, cwd=tmp_path, **url)
    assert (said.returncode, said.stdout) == (1, "")
    assert re.match("No posts in the last 24 hours.* nothing written", said.stderr)
    assert all(value in said.stderr for value in flags[1:])
    (tmp_path / "feedmill-report.html").write_text("monday")
    said = feedmill("report", *flags, cwd=tmp_path, **url)
    assert said.returncode == 1
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
    largest = gather(redis.client, settings, hours=2)
    assert (largest.labels, largest.others) == ({"food": 3}, {"happy, or so, sad": 2})
    assert gather(redis.client, settings, hours=2, run="monday").labels == {"food": 3}
    of_monday = gather(redis.client, settings, hours=2, run="monday")
    assert of_monday.others == {}
    assert "<title>Feedmill, run monday: 2 hours</title>" in page(of_monday)
    assert gather(redis.client, settings, hours=2, labels="food, travel").labels == {"food": 3}
    assert gather(redis.client, settings, hours=2, run="none").posts == 0
    said = feedmill("report", "r.html", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert re.match("3 posts", said.stdout)
    assert all(words in said.stderr for words in ("2 posts: happy, or so, sad", "--label-set", "--run"))
    shown = (tmp_path / "r.html").read_text()
    assert "title of t2" in shown
    assert "a mood" not in shown
    assert "2 results of other label sets are left out" in shown
    said = feedmill("report", "--label-set", "travel,food", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert re.match("3 posts", said.stdout)
    assert gather(redis.client, settings, hours=2, labels="happy, or so, sad").labels == {"sad": 2}
    said = feedmill("report", "--run", "tuesday", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert re.match("2 posts", said.stdout)
    assert said.stderr == ""


def test_counts_include_trimmed_results_of_the_only_label_set(redis: RedisServer) -> None:
    store = ResultsStore(redis.client, Settings())
    store.write([result(str(number)) for number in range(3)])
    redis.client.xtrim(RESULTS_STREAM, 1, approximate=False)
    report = gather(redis.client, Settings(), hours=2)
    assert (report.posts, report.read) == (3, 1)
