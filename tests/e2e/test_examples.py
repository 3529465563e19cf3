"""docs/examples, run unchanged against a real worker and a real Flower."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_flower import flower
from tests.forkserver import ForkedChild
from tests.support import RedisServer, fetch, forks, free_port, run

EXAMPLES = Path(__file__).parent.parent.parent / "docs" / "examples"
POSTS = [
    {"id": "1", "title": "The keeper saved two penalties in the final"},
    {"id": "x"},
]


def environment(redis: RedisServer, **more: str) -> dict[str, str]:
    return os.environ | {"FEEDMILL_REDIS_URL": redis.url} | more


def ask(url: str, body: object = None) -> tuple[int, Any, Message]:
    """Return status, JSON and headers. With a body, send a POST request."""
    sent = None if body is None else json.dumps(body).encode()
    status, text, headers = fetch(url, sent, **{"Content-Type": "application/json"})
    return status, json.loads(text), headers


def answers(url: str) -> bool:
    with suppress(OSError):
        return fetch(url)[0] == 200
    return False


def test_plain_python_example(served: RedisServer, tmp_path: Path) -> None:
    said = run(
        [sys.executable, str(EXAMPLES / "plain_python.py")],
        tmp_path,
        environment(served),
    )
    assert said.stdout.splitlines() == [
        "a1: sport",
        "a2: kitchen",
        "a3: no label: title or body must contain text",
    ], said.stderr


@contextmanager
def web_server(folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """Serve docs/examples/fastapi_endpoint.py."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "--app-dir",
        str(EXAMPLES),
        "--port",
        str(port),
        "fastapi_endpoint:app",
    ]
    child = ForkedChild(forks(), "uvicorn", command, folder, environment)
    try:
        child.wait_until(lambda: answers(f"http://127.0.0.1:{port}/openapi.json"))
        yield f"http://127.0.0.1:{port}"
    finally:
        child.stop(10)


@pytest.fixture(scope="module")
def endpoint(
    served: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    with web_server(tmp_path_factory.mktemp("web"), environment(served)) as url:
        yield url


def test_endpoint_returns_outcomes(endpoint: str) -> None:
    status, answer, _ = ask(
        f"{endpoint}/classify", {"posts": POSTS, "labels": ["tea", "football"]}
    )
    assert status == 200
    good, bad = answer["outcomes"]
    assert (good["label"], bad["error"]) == (
        "football",
        "title or body must contain text",
    )
    assert ask(f"{endpoint}/results/{answer['id']}")[:2] == (200, answer)


def test_endpoint_serves_concurrent_requests(endpoint: str) -> None:
    def classify(number: int) -> Any:
        return ask(
            f"{endpoint}/classify",
            {"posts": [{"id": str(number), "title": f"Match number {number}"}]},
        )

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(classify, range(40)))
    assert [answer["outcomes"][0]["id"] for _, answer, _ in found] == [
        str(number) for number in range(40)
    ]


def test_endpoint_returns_422_with_the_reason(endpoint: str) -> None:
    detail = "MessageFailed: 1 of 2 posts failed: x: title or body must contain text"
    assert ask(f"{endpoint}/classify", {"posts": POSTS, "strict": True})[:2] == (
        422,
        {"detail": detail},
    )


def test_endpoint_answers_202_when_no_worker_responds(
    redis: RedisServer, tmp_path: Path
) -> None:
    # no worker serves this queue
    with web_server(tmp_path, environment(redis, PATIENCE="0.1")) as url:
        status, answer, headers = ask(f"{url}/classify", {"posts": POSTS})
        assert status == 202
        assert headers["location"] == f"/results/{answer['id']}"
        assert ask(f"{url}{headers['location']}")[:2] == (202, answer)


PASSWORD = 'a "quoted" \\ password: of words'


def test_curl_example_with_a_password(served: RedisServer, tmp_path: Path) -> None:
    if not shutil.which("curl"):
        pytest.skip("needs curl: apt install curl")
    password = {"FEEDMILL_FLOWER_PASSWORD": PASSWORD}
    with flower(served, tmp_path, **password) as (_, visitor):
        said = run(
            [str(EXAMPLES / "flower_curl.sh")],
            tmp_path,
            os.environ | {"FLOWER_URL": visitor.url} | password,
        )
    assert said.returncode == 0, said
    (outcome,) = json.loads(said.stdout)["result"]
    assert (outcome["id"], outcome["label"]) == ("c1", "sport")
    assert list(outcome["scores"]) == ["sport", "kitchen"]
