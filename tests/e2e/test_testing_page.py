"""docs/testing.md: the fixtures and examples, run in an application's own tests."""

import re
import sys
from pathlib import Path

import pytest

from tests.support import NEW_INTERPRETER, ROOT, _environment, run

LABELS = """
from celery import Celery

URL = "redis://nowhere.invalid:1/0"
app = Celery(broker=URL, backend=URL, set_as_current=False)


def classify(text):
    posts = [{"id": "1", "title": text}]
    kwargs = {"posts": posts, "labels": ["delivery", "refund"]}
    return app.signature("feedmill.classify", kwargs=kwargs, queue="feedmill")


def label_of(text):
    return classify(text).apply_async().get(timeout=60)[0]["label"]


@app.task(name="shop.note")
def note(outcomes):
    return f"noted: {outcomes[0]['label']}"
"""
WEB = """
from fastapi import Body, FastAPI
from shop.labels import label_of

api = FastAPI()


@api.post("/label")
def label(body: dict = Body()):
    return {"label": label_of(body["text"])}
"""
#: Fails the tests if one of these is imported.
FORBIDDEN = """
import sys

for name in ("torch", "transformers", "numpy"):
    sys.modules[name] = None
"""


def blocks() -> list[str]:
    page = (ROOT / "docs" / "testing.md").read_text()
    return re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A folder with the application of the page, and its tests."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").touch()
    (tmp_path / "shop" / "labels.py").write_text(LABELS)
    (tmp_path / "shop" / "web.py").write_text(WEB)
    conftest, *examples = blocks()
    (tmp_path / "conftest.py").write_text(FORBIDDEN + conftest)
    for number, example in enumerate(examples):
        name = "program" if "print(" in example else f"test_{number}"
        (tmp_path / f"{name}.py").write_text(example)
    return tmp_path


def test_examples_run_without_torch_redis_and_network(shop: Path) -> None:
    environment = _environment(shop) | NEW_INTERPRETER
    tests = run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
        ],
        shop,
        environment,
    )
    assert tests.returncode == 0, tests.stdout
    assert "5 passed" in tests.stdout
    program = run([sys.executable, "program.py"], shop, environment)
    assert program.stdout == "delivery\n", program.stderr


def test_application_is_connected_as_before(shop: Path) -> None:
    """Afterwards, and while two tests follow each other, no message is left over."""
    code = """
from celery.backends.redis import RedisBackend
from feedmill.testing import FakeWorker
from shop.labels import app, label_of

for label in ("delivery", "refund"):
    with FakeWorker(app, label) as worker:
        app.send_task("feedmill.classify", [[{"id": "1", "title": "t"}]], queue="elsewhere")
        assert label_of("text") == label
        assert len(worker.messages) == 1
assert app.connection_for_write().info()["hostname"] == "nowhere.invalid"
assert isinstance(app.backend, RedisBackend)
from celery import _state
assert _state._tls.current_app is None
"""
    environment = _environment(shop) | NEW_INTERPRETER
    said = run([sys.executable, "-c", code], shop, environment)
    assert said.returncode == 0, said.stderr
