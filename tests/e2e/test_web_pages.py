"""The pages in a browser, with a real worker: live, by keyboard, on a phone, in the dark."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from feedmill.shared.messages import Post
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import Settings
from tests.support import (
    RedisServer,
    make_classification,
    make_posts,
    push,
    running,
    wait_until,
    working,
)
from tests.unit.test_web_frame import HOSTILE
from tests.unit.test_web_stream import result_of

CHROMIUM = shutil.which("chromium")
WIDE = {"width": 1100, "height": 800}
PHONE = {"width": 400, "height": 800}
PASSWORD = "a good password"
#: Seconds of a busy machine, in milliseconds.
PATIENCE_MS = 120_000
#: Ratio of text to its background that is readable.
READABLE = 4.5
CSV = "Nr,Kommentar,more\n1,The keeper saved two penalties,x\n2,How to cook dried beans,y\n"


class House(NamedTuple):
    """A worker, a web server that asks for a password, and their Redis."""

    settings: Settings
    redis: RedisServer
    address: str
    folder: Path


@pytest.fixture(scope="module")
def house(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    environment = {"FEEDMILL_REDIS_URL": redis_server.url, "FEEDMILL_DEVICE": "cpu"}
    with (
        working(redis_server, folder, FEEDMILL_LABELS="sports,food", **environment),
        running(
            "web",
            "--port",
            "0",
            cwd=folder,
            FEEDMILL_WEB_PASSWORD=PASSWORD,
            **environment,
        ) as web,
    ):
        wait_until(lambda: web.says("web server at "), "the web server listens")
        (address,) = re.findall(r"web server at (http://\S+)", web.text())
        settings = Settings.model_validate({"redis_url": redis_server.url})
        yield House(settings, redis_server, address, folder)
        assert "Traceback" not in web.text()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs chromium: apt install chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@contextmanager
def opened(
    chromium: Any, house: House, path: str = "/", **options: Any
) -> Iterator[Any]:
    """Yield a page of somebody who has logged in. Fails if a script did."""
    context = chromium.new_context(base_url=house.address, **options)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    page.on(
        "console",
        lambda message: (
            problems.append(message.text)
            if "Content Security Policy" in message.text
            else None
        ),
    )
    try:
        page.goto(path)
        page.fill("[name=name]", "ann")
        page.fill("[name=password]", PASSWORD)
        page.keyboard.press("Enter")
        page.wait_for_selector("nav a")
        page.wait_for_load_state()
        yield page
    finally:
        context.close()
    assert problems == []


def store_of(house: House) -> ResultsStore:
    return ResultsStore(house.redis.client, house.settings)


def wait_for_keys(page: Any) -> None:
    """Press Shift until the page hears it: Chromium drops keys around a page's first paint."""
    page.evaluate(
        """() => {
          window.hears = false;
          const hear = () => { window.hears = true; };
          addEventListener("keydown", hear, { capture: true, once: true });
        }"""
    )

    def hears() -> bool:
        page.keyboard.press("Shift")
        heard: bool = page.evaluate("() => window.hears")
        return heard

    wait_until(hears, "keys reach the page")


def has_text(page: Any, text: str) -> None:
    page.wait_for_function("text => document.body.innerText.includes(text)", arg=text)


def test_labels_appear_live_and_can_be_paused(house: House, chromium: Any) -> None:
    with opened(chromium, house) as page:
        push(house.settings, [Post(id="live", title="The keeper saved a penalty")])
        has_text(page, "The keeper saved a penalty")
        page.wait_for_selector("#posts .tag[data-label=sports]")
        page.wait_for_selector("#chart .legend [data-label=sports]")
        page.keyboard.press("p")
        push(house.settings, [Post(id="paused", title="A soup of dried beans")])
        has_text(page, "Continue (1 new)")
        assert "A soup of dried beans" not in page.inner_text("#posts")
        page.keyboard.press("p")
        has_text(page, "A soup of dried beans")


def test_filter_applies_to_what_comes(house: House, chromium: Any) -> None:
    with opened(chromium, house, "/?label=food&words=filtered") as page:
        assert page.input_value("[name=label]") == "food"
        posts = [
            Post(id="no", title="filtered: the referee ended the match"),
            Post(id="yes", title="filtered: a recipe for tomato soup"),
        ]
        push(house.settings, posts)
        has_text(page, "a recipe for tomato soup")
        assert "the referee ended" not in page.inner_text("#posts")


def test_list_is_bounded_while_posts_come(house: House, chromium: Any) -> None:
    with opened(chromium, house, "/?run=many") as page:
        posts = [post.model_copy(update={"run": "many"}) for post in make_posts(600)]
        store_of(house).write([result_of(post) for post in posts])
        has_text(page, "600 since you opened")
        assert page.locator("#posts > li").count() <= 200


def test_nothing_of_a_post_runs(house: House, chromium: Any) -> None:
    with opened(chromium, house) as page:
        post = Post(id=HOSTILE, title=HOSTILE, topic=HOSTILE, run="<b>x</b>")
        store_of(house).write([result_of(post, HOSTILE, scores={HOSTILE: 0.9})])
        has_text(page, HOSTILE)
        page.wait_for_selector("#chart .legend [data-label*=onerror]")
        page.click(f"#posts a:text-is('{HOSTILE}')")
        page.wait_for_selector("svg.bar")
        assert page.locator("img, main b").count() == 0


def test_a_file_is_labelled_by_keyboard_alone(
    house: House, chromium: Any, tmp_path: Path
) -> None:
    file = tmp_path / "<b>posts.csv"
    file.write_text(CSV)
    with opened(chromium, house) as page:
        wait_for_keys(page)
        page.keyboard.press("g")
        page.keyboard.press("u")
        page.wait_for_url("**/runs")
        # Chromium asks the test for files some time after the test says that it listens.
        choosers: list[Any] = []

        def note(chooser: Any) -> None:
            choosers.append(chooser)

        page.on("filechooser", note)
        wait_for_keys(page)
        page.keyboard.press("n")
        wait_until(lambda: page.title() and choosers, "the browser asks for a file")
        choosers[0].set_files(str(file))
        page.wait_for_url("**/upload/*")
        wait_for_keys(page)
        has_text(page, "How to cook dried beans")
        page.focus("[name=body]")
        page.keyboard.type("Kommentar")
        page.focus("[name=id]")
        page.keyboard.type("Nr")
        page.focus("[name=run]")
        page.keyboard.press("Control+a")
        page.keyboard.type("by keyboard")
        page.keyboard.press("Enter")
        page.wait_for_url("**/runs/by%20keyboard")
        has_text(page, "2 of 2 labelled")
        with page.expect_download() as download:
            page.click("a[href*='form=csv']")
        text = Path(download.value.path()).read_text()
        assert download.value.suggested_filename == "by keyboard.csv"
        assert "sports" in text
        assert "more" in text.splitlines()[0]


def test_keys_open_the_help_and_the_pages(house: House, chromium: Any) -> None:
    with opened(chromium, house) as page:
        page.reload()
        wait_for_keys(page)
        page.keyboard.press("Tab")
        assert page.evaluate("() => document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        assert page.evaluate("() => document.activeElement.id") == "main"
        page.keyboard.press("?")
        page.wait_for_selector("#help[open]")
        assert "Pause" in page.inner_text("#help")
        page.keyboard.press("Escape")
        page.wait_for_selector("#help:not([open])", state="attached")
        page.keyboard.press("/")
        page.keyboard.type("gy?")
        assert page.input_value("[name=words]") == "gy?"
        page.keyboard.press("Escape")
        page.keyboard.press("g")
        page.keyboard.press("y")
        page.wait_for_url("**/system")
        wait_for_keys(page)
        page.focus("nav a")
        outline = "() => getComputedStyle(document.activeElement).outlineStyle"
        page.keyboard.press("Tab")
        assert page.evaluate(outline) == "solid"


PATHS = ("/", "/runs", "/system", "/posts/look", "/runs/look", "/nothing")
LUMINANCE = """
() => {
  const channel = value => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = colour => {
    const [r, g, b] = colour.match(/[0-9.]+/g).map(part => channel(part / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (!/, 0\\)$/.test(colour) && colour !== "transparent") return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  for (const element of document.querySelectorAll("main *, header *")) {
    const texts = [...element.childNodes].filter(node => node.nodeType === 3);
    const own = texts.some(node => node.textContent.trim());
    if (!own || !element.offsetParent || element.disabled) continue;
    const [a, b] = [light(getComputedStyle(element).color), light(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found.push([ratio, element.outerHTML.slice(0, 120)]);
  }
  return found;
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_readable_on_a_phone(
    house: House, chromium: Any, scheme: str
) -> None:
    long_name = "x" * 150
    post = Post(id="look", title="A look " + long_name, body=long_name * 9, run="look")
    result = make_classification(
        "look", long_name, scores={long_name: 0.6, "b": 0.4}, fingerprint="0f" * 16
    )
    store_of(house).write([result_of(post)._replace(classification=result)])
    push(house.settings, [Post(id="sent", title="A look", run="look")])
    with opened(chromium, house, viewport=PHONE, color_scheme=scheme) as page:
        dark = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        assert (dark == "rgb(20, 22, 26)") == (scheme == "dark")
        for path in PATHS:
            page.goto(path)
            width = page.evaluate("() => document.documentElement.scrollWidth")
            assert width <= PHONE["width"], path
            for ratio, element in page.evaluate(LUMINANCE):
                assert ratio >= READABLE, (path, element)


def test_logging_out_ends_the_session(house: House, chromium: Any) -> None:
    with opened(chromium, house) as page:
        page.click("text=Log out")
        page.wait_for_url("**/login")
        page.goto("/system")
        page.wait_for_url("**/login?next=%2Fsystem")
