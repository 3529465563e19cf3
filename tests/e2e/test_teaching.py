"""Review, teach, deploy and go back, in a browser, with a real worker and the embedded model."""

import json
import re
import shutil
import signal
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import httpx2 as httpx
import pytest

from feedmill.shared.keys import RESULTS_STREAM
from feedmill.shared.messages import Post
from feedmill.shared.settings import Settings
from feedmill.teaching.answer_file import AnswerFile
from tests import support
from tests.support import (
    Feedmill,
    RedisServer,
    processes_in,
    running,
    wait_until,
    working,
)

CHROMIUM = shutil.which("chromium")
#: Seconds of a busy machine, in milliseconds.
PATIENCE_MS = 120_000
#: Names that say nothing about the posts: only answers can.
LABELS = ("blue", "red")
DISHES = ("sourdough bread", "tomato soup", "apple pie", "fried rice", "lentil curry")
QUESTIONS = (
    "How long should I cook {}?", "My recipe for {} with garlic", "Why is my {} so salty?",
    "{} for dinner, and what to serve with it", "Baking {} in an old oven",
    "Spices that go well with {}",
)  # fmt: skip
TEAMS = ("Arsenal", "the Lakers", "Bayern", "the Yankees", "Real Madrid")
REPORTS = (
    "{} won the match in overtime", "The coach of {} was fired after the defeat",
    "{} scored twice in the final", "Injury of the striker of {}",
    "Tickets for the game of {} tonight", "Season preview: can {} take the title?",
)  # fmt: skip
ROUNDS = ("yesterday", "today", "in 2025", "again", "this week", "at home")


def make_posts(name: str, rounds: tuple[str, ...]) -> list[Post]:
    """Return posts about cooking and sports, by turns."""
    posts: list[Post] = []
    for ending in rounds:
        for (question, dish), (report, team) in zip(
            product(QUESTIONS, DISHES), product(REPORTS, TEAMS), strict=True
        ):
            for text in (question.format(dish), report.format(team)):
                posts.append(Post(id=f"{name}{len(posts)}", title=f"{text} {ending}"))
    return posts


def truth(title: str) -> str:
    """Return the right label: cooking is blue, sports are red."""
    return "blue" if any(dish in title for dish in DISHES) else "red"


class House(NamedTuple):
    """A worker and its Redis."""

    redis: RedisServer
    settings: Settings
    models: Path

    def results(self) -> list[dict[str, Any]]:
        entries: Any = self.redis.client.xrange(RESULTS_STREAM)
        results: list[dict[str, Any]] = []
        for _, fields in entries:
            post = json.loads(fields["post"])
            results.append(
                json.loads(fields["classification"]) | {"title": post["title"]}
            )
        return results

    def classify(self, posts: list[Post]) -> list[dict[str, Any]]:
        """Send posts; return their results once all are stored."""
        ids = {post.id for post in posts}
        support.push(self.settings, posts)

        def results() -> list[dict[str, Any]]:
            return [result for result in self.results() if result["id"] in ids]

        wait_until(lambda: len(results()) == len(ids), "all posts have labels")
        return results()


def accuracy(results: list[dict[str, Any]]) -> float:
    right = [result for result in results if result["label"] == truth(result["title"])]
    return len(right) / len(results)


@pytest.fixture(scope="module")
def house(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    settings = Settings.model_validate({"redis_url": redis_server.url})
    models = folder / "models"
    environment = {
        "FEEDMILL_LABELS": ",".join(LABELS),
        "FEEDMILL_DEVICE": "cpu",
        "FEEDMILL_MODELS_FOLDER": str(models),
    }
    redis_server.client.flushall()
    with working(redis_server, folder, **environment):
        yield House(redis_server, settings, models)


class Server(NamedTuple):
    """A web server."""

    process: Feedmill
    address: str
    answers: Path
    #: Its working directory.
    folder: Path


@pytest.fixture
def web(house: House, tmp_path: Path) -> Iterator[Server]:
    """A web server without answers, over a stream without results."""
    house.redis.client.delete(RESULTS_STREAM)
    answers = tmp_path / "answers"
    environment = {
        "FEEDMILL_REDIS_URL": house.redis.url,
        "FEEDMILL_DEVICE": "cpu",
        "FEEDMILL_MODELS_FOLDER": str(house.models),
    }
    with running(
        "web", "--port", "0", "--answers", str(answers), cwd=tmp_path, **environment
    ) as process:
        wait_until(lambda: process.says("web server at "), "the web server listens")
        (address,) = re.findall(r"web server at (http://\S+)", process.text())
        yield Server(process, address, answers, tmp_path)
        assert "Traceback" not in process.text()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs chromium: apt install chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield made
        made.close()


def open_review(browser: Any, web: Server) -> Any:
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(f"{web.address}/review")
    page.wait_for_selector("#post:not([hidden])")
    return page


def press(page: Any, key: str) -> None:
    """Press a key, and wait for the next post."""
    token = page.get_attribute("#post", "data-token")
    page.keyboard.press(key)
    page.wait_for_function(
        "token => document.getElementById('post').dataset.token !== token", arg=token
    )


def wait_for_end(page: Any, section: str) -> None:
    page.wait_for_selector(f"{section}:not([data-state=running])", timeout=300_000)
    assert page.get_attribute(section, "data-state") == "done", page.inner_text("main")


@pytest.mark.timeout(900)
def test_answers_by_key_teach_a_better_model(
    house: House, web: Server, browser: Any
) -> None:
    """Two people answer at once; the taught model labels new posts until they go back."""
    first = house.classify(make_posts("a", ROUNDS[:3]))
    own_weights = {result["weights"] for result in first}
    ana = open_review(browser, web)
    ben = open_review(browser, web)
    keys = {label: str(place) for place, label in enumerate(LABELS, start=1)}
    seen: list[str] = []
    for _ in range(20):
        assert ana.get_attribute("#post", "data-token") != ben.get_attribute(
            "#post", "data-token"
        )
        for page in (ana, ben):
            title = page.inner_text("#post-title")
            seen.append(title)
            press(page, keys[truth(title)])
    assert len(set(seen)) == 40
    press(ana, "s")
    press(ana, "u")
    answers = AnswerFile(web.answers).read()
    assert [answer.label for answer in answers] == [truth(title) for title in seen]
    assert all(answer.was in LABELS for answer in answers)
    # The accuracy appears once it was measured.
    ana.wait_for_function(
        "() => /accuracy [01][.]\\d+ ± /.test(document.getElementById('progress').innerText)",
        timeout=300_000,
    )

    ana.goto(f"{web.address}/teach")
    ana.click("#start")
    ana.wait_for_selector("#bar")
    wait_for_end(ana, "#lesson")
    figures = ana.query_selector_all("#report td[data-after]")
    for figure in figures:
        assert float(figure.get_attribute("data-after")) > float(
            figure.get_attribute("data-before")
        )
    assert len(figures) == 2
    assert "would have another label" in ana.inner_text("#report")

    assert "No message is lost" in ana.inner_text("#deployment")
    ana.click("button[data-model]")
    wait_for_end(ana, "#deployment")
    second = house.classify(make_posts("b", ROUNDS[3:4]))
    taught_weights = {result["weights"] for result in second}
    assert taught_weights.isdisjoint(own_weights)
    unseen = [result for result in first if result["title"] not in seen]
    assert accuracy(second) > accuracy(unseen) + 0.2
    assert accuracy(second) > 0.9

    ana.reload()
    ana.click("#back")
    wait_for_end(ana, "#deployment")
    third = house.classify(make_posts("c", ROUNDS[4:5]))
    assert {result["weights"] for result in third} == own_weights
    assert ana.query_selector("#back") is None


def test_a_cancelled_lesson_leaves_no_model(house: House, web: Server) -> None:
    house.classify(make_posts("d", ROUNDS[5:]))
    before = sorted(house.models.glob("*"))
    with httpx.Client(base_url=web.address, timeout=60) as client:
        answers = [{"id": f"d{number}", "label": "red"} for number in range(20)]
        stored = client.post("/v1/answers", json={"answers": answers})
        assert stored.json() == {"stored": 20, "refused": []}
        started = client.post("/teach/start")
        assert started.status_code == 303, started.text
        again = client.post("/teach/start")
        assert again.status_code == 422
        assert "runs already" in again.text
        assert client.post("/teach/cancel").status_code == 303
        wait_until(
            lambda: client.get("/teach/state").json()["lesson"]["state"] == "cancelled",
            "the lesson is cancelled",
        )
        assert sorted(house.models.glob("*")) == before
        unknown = client.post("/teach/deploy", data={"model": "../../etc"})
        assert unknown.status_code == 422


def test_a_lesson_ends_with_the_server(house: House, web: Server) -> None:
    """Also if the server is killed: a lesson takes the workers' processors."""
    house.classify(make_posts("e", ("at last",)))
    with httpx.Client(base_url=web.address, timeout=60) as client:
        answers = [{"id": f"e{number}", "label": "red"} for number in range(20)]
        client.post("/v1/answers", json={"answers": answers})
        assert client.post("/teach/start").status_code == 303

    def lessons() -> list[str]:
        commands = processes_in(web.folder)
        return [command for command in commands if "teaching.lesson" in command]

    wait_until(lambda: bool(lessons()), "the lesson runs")
    web.process.end(signal.SIGKILL)
    wait_until(lambda: not lessons(), "the lesson has ended")
