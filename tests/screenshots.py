"""Take the screenshots of docs/web.md: `python -m tests.screenshots`, with the bundled posts.

Needs Debian's chromium, a redis-server, and the embedded model.
"""

import argparse
import csv
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from feedmill.shared.messages import Post
from feedmill.shared.settings import Settings
from tests.support import RedisServer, push, redis_servers, running, wait_until, working

IMAGES = Path(__file__).parent.parent / "docs/images"
LABELS = (
    "business,climate change,education,food,gaming,health,politics,sports,technology"
)
COLUMNS = ("id", "title", "subreddit")
#: Rows of the file of the preview.
ROWS = 40
#: Posts of the bundled file, and those that come while the page is open.
LATER = 40
#: Posts that are answered before the lesson.
ANSWERS = 60


def bundled_posts() -> list[Post]:
    text = (files("feedmill") / "samples.jsonl").read_text(encoding="utf-8")
    return [Post.parse(json.loads(line)) for line in text.splitlines()]


@contextmanager
def browser() -> Iterator[Any]:
    """Yield Debian's chromium."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu"],
        )
        yield chromium
        chromium.close()


@contextmanager
def served_pages(folder: Path) -> Iterator[tuple[str, RedisServer]]:
    """Yield the address of a web server with a worker."""
    path = next(iter(redis_servers().values()))
    server = RedisServer(path, folder)
    environment = {
        "FEEDMILL_REDIS_URL": server.url,
        "FEEDMILL_DEVICE": "cpu",
        "FEEDMILL_ANSWERS": str(folder / "answers"),
    }
    with (
        working(server, folder, FEEDMILL_LABELS=LABELS, **environment),
        running("web", "--port", "0", cwd=folder, **environment) as web,
    ):
        wait_until(lambda: web.says("web server at "), "the web server listens")
        (address,) = re.findall(r"web server at (http://\S+)", web.text())
        yield address, server
    server.stop()


def write_file(path: Path, posts: list[Post]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for post in posts:
            writer.writerow([getattr(post, name) for name in COLUMNS])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=IMAGES)
    out: Path = parser.parse_args().out
    with tempfile.TemporaryDirectory() as name, browser() as chromium:
        folder = Path(name)
        posts = bundled_posts()
        with served_pages(folder) as (address, server):
            settings = Settings.model_validate({"redis_url": server.url})
            take(chromium, address, settings, posts, folder, out)


def take(
    chromium: Any,
    address: str,
    settings: Settings,
    posts: list[Post],
    folder: Path,
    out: Path,
) -> None:
    """Take the screenshots of all pages."""
    wide = {"width": 1100, "height": 760}
    page = chromium.new_page(viewport=wide, color_scheme="light")
    push(settings, posts[:-LATER])
    page.goto(address)
    page.wait_for_function("() => document.querySelectorAll('#posts li').length > 110")
    push(settings, posts[-LATER:])
    page.wait_for_function("() => /since you opened/.test(document.body.innerText)")
    page.wait_for_timeout(6000)  # the chart is drawn again
    page.screenshot(path=out / "web-stream.png")
    page.click("#posts li a")
    page.wait_for_load_state()
    page.screenshot(path=out / "web-post.png")
    file = folder / "comments.csv"
    write_file(file, posts[:ROWS])
    page.goto(f"{address}/runs")
    page.set_input_files("#file", str(file))
    page.wait_for_url("**/upload/*")
    page.fill(
        "[name=labels]", "sports: matches and athletes\nfood: cooking\nother: anything"
    )
    page.evaluate("() => { document.activeElement.blur(); scrollTo(0, 0); }")
    page.screenshot(path=out / "web-upload.png")
    page.click("text=Start")
    page.wait_for_function("() => /· done/.test(document.body.innerText)")
    page.goto(f"{address}/runs")
    page.screenshot(path=out / "web-runs.png")
    page.goto(f"{address}/system")
    page.screenshot(path=out / "web-system.png")
    take_teaching(page, address, posts, out)
    narrow = {"width": 400, "height": 760}
    phone = chromium.new_page(viewport=narrow, color_scheme="dark")
    phone.goto(address)
    phone.screenshot(path=out / "web-phone.png")


def take_teaching(page: Any, address: str, posts: list[Post], out: Path) -> None:
    """Answer posts by their topics, teach, and take the screenshots of both pages."""
    topics = {post.title: post.topic for post in posts}
    page.goto(f"{address}/review")
    page.wait_for_selector("#post:not([hidden])")
    for _ in range(ANSWERS):
        token = page.get_attribute("#post", "data-token")
        topic = topics[page.inner_text("#post-title")]
        button = page.locator(f'#choices button[data-label="{topic}"]')
        if button.count() == 0:
            button = page.locator("#choices button[data-what=none]")
        button.click()
        page.wait_for_function(
            "token => document.getElementById('post').dataset.token !== token",
            arg=token,
        )
    page.wait_for_function(
        "() => /accuracy [01][.]/.test(document.getElementById('progress').innerText)",
        timeout=300_000,
    )
    page.screenshot(path=out / "web-review.png")
    page.goto(f"{address}/teach")
    page.click("#start")
    page.wait_for_selector("#report", timeout=300_000)
    page.evaluate("document.getElementById('lesson').scrollIntoView()")
    page.screenshot(path=out / "web-teach.png")


if __name__ == "__main__":
    main()
