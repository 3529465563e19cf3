"""`feedmill web` as applications use it: over HTTP, with a real worker behind it."""

import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest

from tests.support import (
    RedisServer,
    fetch,
    free_port,
    running,
    standing_in,
    wait_until,
)

LABELS = ["sports", "cooking"]
GOAL = "The keeper saved two penalties in the final"
CAKE = "Bake the dough at 180 degrees for an hour"
TOKENS = "reader:read:0123456789abcdef,sender:send:fedcba9876543210"


@contextmanager
def serving(redis: RedisServer, folder: Path, **environment: str) -> Iterator[str]:
    """Run `feedmill web`, and yield its address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        with suppress(OSError):
            return fetch(f"{url}/health")[0] == 200
        return not server.lives()

    given = {"FEEDMILL_REDIS_URL": redis.url} | environment
    with running("web", "--port", str(port), cwd=folder, **given) as server:
        wait_until(answers, "the web server answers")
        yield url


@pytest.fixture(scope="module")
def web(served: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(served, tmp_path_factory.mktemp("web")) as url:
        yield url


def ask(url: str, body: object = None, **headers: str) -> tuple[int, Any]:
    """Return the status and the JSON of an answer. With a body, send a POST request."""
    content = None if body is None else json.dumps(body).encode()
    if content is not None:
        headers["Content-Type"] = "application/json"
    status, text, _ = fetch(url, content, **headers)
    return status, json.loads(text)


def error_of(answer: tuple[int, Any]) -> tuple[int, str]:
    status, content = answer
    return status, content["error"]["type"]


def test_labels_come_in_the_order_of_the_texts(web: str) -> None:
    texts = [GOAL, CAKE, " ", GOAL]
    status, answer = ask(f"{web}/v1/classify", {"texts": texts, "labels": LABELS})
    assert status == 200
    outcomes = answer["results"]
    assert [outcome.get("label") for outcome in outcomes] == [
        "sports",
        "cooking",
        None,
        "sports",
    ]
    assert "text" in outcomes[2]["error"]
    assert set(outcomes[0]["scores"]) == set(LABELS)


def test_a_post_without_a_text_keeps_its_id(web: str) -> None:
    for post in ({"id": "bare"}, {"id": "bare", "title": " "}):
        _, answer = ask(f"{web}/v1/classify", {"posts": [post], "labels": LABELS})
        (outcome,) = answer["results"]
        assert outcome["id"] == "bare"
        assert outcome["error"]


def test_a_post_that_fits_no_label_has_its_best_one_beside(web: str) -> None:
    body = {"texts": ["The senate passed the budget"], "labels": LABELS, "none": 1}
    _, answer = ask(f"{web}/v1/classify", body)
    (outcome,) = answer["results"]
    assert outcome["label"] is None
    assert outcome["best_label"] in LABELS
    assert outcome["label_score"] == max(outcome["scores"].values())
    assert "labels" not in outcome


def test_labels_that_are_scored_by_themselves_are_listed(web: str) -> None:
    body = {"texts": ["A football team"], "labels": LABELS, "multi_label": True}
    _, answer = ask(f"{web}/v1/classify", body)
    (outcome,) = answer["results"]
    threshold = outcome["labels_threshold"]
    scores = outcome["scores"].items()
    assert outcome["labels"] == [label for label, score in scores if score >= threshold]
    assert "sports" in outcome["labels"]


def test_posts_of_one_request_of_many_are_not_mixed_up(web: str) -> None:
    """600 requests at once: each gets the outcome of its own post."""

    def classify(number: int) -> str:
        post = {"id": f"mixed-{number}", "title": f"Post number {number}: {GOAL}"}
        body = {"posts": [post], "labels": LABELS, "timeout_s": 300}
        status, answer = ask(f"{web}/v1/classify", body)
        assert status == 200, answer
        (outcome,) = answer["results"]
        return str(outcome["id"])

    with ThreadPoolExecutor(60) as threads:
        ids = list(threads.map(classify, range(600)))
    assert ids == [f"mixed-{number}" for number in range(600)]


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/v1/classify", {}, 422, "invalid"),
        ("/v1/classify", {"texts": []}, 422, "invalid"),
        ("/v1/classify", {"texts": [GOAL], "posts": [{"title": GOAL}]}, 422, "invalid"),
        ("/v1/classify", {"texts": [GOAL], "labels": ["a", ""]}, 422, "invalid"),
        ("/v1/classify", {"texts": [GOAL], "template": "no place"}, 422, "invalid"),
        ("/v1/classify", {"texts": [GOAL], "timeout_s": 1e9}, 422, "invalid"),
        ("/v1/classify", {"texts": [GOAL], "unknown": 1}, 422, "invalid"),
        ("/v1/classify", {"texts": ["x"] * 1001}, 422, "invalid"),
        ("/v1/runs", {"texts": [GOAL], "run": "a\x00b"}, 422, "refused"),
        ("/v1/runs", {"texts": [GOAL], "webhook": "http://x/"}, 422, "refused"),
        ("/classify", {"input": GOAL, "model": "another"}, 404, "not_found"),
        ("/v1/nothing", {}, 404, "not_found"),
    ],
)
def test_a_mistake_is_named(
    web: str, path: str, body: object, status: int, kind: str
) -> None:
    answer = ask(f"{web}{path}", body)
    assert error_of(answer) == (status, kind)
    assert answer[1]["error"]["message"]


def test_a_body_that_is_no_json_is_named(web: str) -> None:
    status, text, _ = fetch(
        f"{web}/v1/classify", b"{", **{"Content-Type": "application/json"}
    )
    assert (status, json.loads(text)["error"]["type"]) == (400, "invalid_json")


def test_a_run_is_sent_followed_and_read(web: str) -> None:
    posts = [{"id": f"run-{number}", "title": GOAL} for number in range(3)]
    body = {"posts": posts, "labels": LABELS, "run": "monday"}
    assert ask(f"{web}/v1/runs", body) == (
        202,
        {"run": "monday", "sent": 3, "skipped": 0, "purged": 0, "refused": []},
    )
    wait_until(
        lambda: ask(f"{web}/v1/runs/monday")[1]["stored"] == 3, "the run is done"
    )
    sent_again = ask(f"{web}/v1/runs", body)[1]
    assert (sent_again["sent"], sent_again["skipped"]) == (0, 3)

    ids: list[str] = []
    cursor = "0-0"
    while True:
        _, page = ask(f"{web}/v1/results?run=monday&limit=2&after={cursor}")
        ids += [result["id"] for result in page["results"]]
        if page["ended"]:
            break
        cursor = page["cursor"]
    assert sorted(ids) == ["run-0", "run-1", "run-2"]
    assert "monday" in [run["run"] for run in ask(f"{web}/v1/runs")[1]["runs"]]
    assert error_of(ask(f"{web}/v1/runs/tuesday")) == (404, "not_found")


def test_a_post_is_read_and_purged(web: str) -> None:
    identity = "at://did:plc:abc/app.bsky.feed.post/3k"
    post = {"id": identity, "title": GOAL}
    ask(f"{web}/v1/classify", {"posts": [post], "labels": LABELS})
    address = f"{web}/v1/posts/{quote(identity, safe='')}"
    _, answer = ask(address)
    (result,) = answer["results"]
    assert (result["label"], result["post"]["title"]) == ("sports", GOAL)

    host = web.removeprefix("http://")
    connection = HTTPConnection(host, timeout=60)
    connection.request("DELETE", address.removeprefix(web))
    counts = json.loads(connection.getresponse().read())["counts"]
    connection.close()
    assert counts["results"] == 1
    assert error_of(ask(address)) == (404, "not_found")


class Events:
    """A reader of server-sent events."""

    def __init__(self, url: str, last_id: str = "") -> None:
        host, _, path = url.removeprefix("http://").partition("/")
        self._connection = HTTPConnection(host, timeout=60)
        headers = {"Last-Event-ID": last_id} if last_id else {}
        self._connection.request("GET", f"/{path}", headers=headers)
        self._answer = self._connection.getresponse()
        assert self._answer.headers["Content-Type"].startswith("text/event-stream")
        self._answer.readline()  # the time to try again
        #: The reader's place before the first event.
        self.place = self._answer.readline().decode().removeprefix("id: ").strip()

    def next(self) -> tuple[str, Any]:
        """Return the id and the content of the next event."""
        fields: dict[str, str] = {}
        while True:
            line = self._answer.readline().decode().strip()
            name, _, value = line.partition(": ")
            fields[name] = value
            if not line and "data" in fields:
                break
        return fields["id"], json.loads(fields["data"])

    def close(self) -> None:
        self._connection.close()


def test_results_come_as_they_are_stored_and_continue_where_they_stopped(
    web: str,
) -> None:
    def classify(identity: str) -> None:
        posts = [{"id": identity, "title": f"{GOAL} {identity}"}]
        ask(f"{web}/v1/classify", {"posts": posts, "labels": LABELS})

    live = Events(f"{web}/v1/results/stream?label=sports")
    classify("event-1")
    last_id, result = live.next()
    assert result["id"] == "event-1"
    live.close()
    early = Events(f"{web}/v1/results/stream?label=sports", live.place)
    assert early.next()[1]["id"] == "event-1"
    early.close()
    classify("event-2")
    classify("event-3")
    continued = Events(f"{web}/v1/results/stream?label=sports", last_id)
    assert [continued.next()[1]["id"] for _ in range(2)] == ["event-2", "event-3"]
    continued.close()


def test_clients_of_other_servers_get_what_they_expect(web: str) -> None:
    """vLLM's /classify and Text Embeddings Inference's /predict, by their documentation."""
    status, answer = ask(f"{web}/classify", {"input": [GOAL, CAKE], "extra": 1})
    assert status == 200
    assert answer["object"] == "list"
    labels = [item["label"] for item in answer["data"]]
    assert labels == ["sports", "food"]
    for item in answer["data"]:
        assert len(item["probs"]) == item["num_classes"] == 16

    _, one = ask(f"{web}/predict", {"inputs": GOAL})
    assert one[0]["label"] == "sports"
    assert one[0]["score"] == max(item["score"] for item in one)
    for inputs in ([GOAL, CAKE], [[GOAL], [CAKE]]):
        _, several = ask(f"{web}/predict", {"inputs": inputs, "truncate": True})
        assert [items[0]["label"] for items in several] == ["sports", "food"]


def test_the_description_is_true(web: str) -> None:
    """Answers are valid by the OpenAPI description."""
    _, description = ask(f"{web}/v1/openapi.json")
    content = description["paths"]["/v1/classify"]["post"]["responses"]["200"]
    schema = content["content"]["application/json"]["schema"]
    schema = {**schema, "components": description["components"]}
    _, answer = ask(f"{web}/v1/classify", {"texts": [GOAL, " "], "labels": LABELS})
    jsonschema.validate(answer, schema)
    assert all(path.startswith(("/v1/", "/classify", "/predict"))
               for path in description["paths"])  # fmt: skip


def test_scopes(served: RedisServer, tmp_path: Path) -> None:
    with serving(served, tmp_path, FEEDMILL_WEB_TOKENS=TOKENS) as url:
        reader = {"Authorization": "Bearer 0123456789abcdef"}
        sender = {"Authorization": "Bearer fedcba9876543210"}
        body = {"texts": [GOAL], "labels": LABELS}
        assert error_of(ask(f"{url}/v1/runs")) == (401, "unauthorized")
        assert error_of(ask(f"{url}/v1/runs", Authorization="Bearer wrong"))[0] == 401
        assert ask(f"{url}/v1/runs", **reader)[0] == 200
        assert error_of(ask(f"{url}/v1/classify", body, **reader)) == (403, "forbidden")
        assert ask(f"{url}/v1/classify", body, **sender)[0] == 200
        assert error_of(ask(f"{url}/v1/runs", **sender)) == (403, "forbidden")


def test_who_asks_too_long_is_told_why(redis: RedisServer, tmp_path: Path) -> None:
    with serving(redis, tmp_path) as url:
        body = {"texts": [GOAL], "timeout_s": 0.5}
        status, answer = ask(f"{url}/v1/classify", body)
        assert (status, answer["error"]["type"]) == (504, "timeout")
        assert "no worker serves queue feedmill" in answer["error"]["message"]


def test_a_caller_that_leaves_withdraws_its_posts(
    redis: RedisServer, tmp_path: Path
) -> None:
    """They are revoked: the worker that comes later does not classify them."""
    with serving(redis, tmp_path) as url:
        connection = HTTPConnection(url.removeprefix("http://"), timeout=60)
        body = json.dumps({"posts": [{"id": "left", "title": GOAL}]})
        headers = {"Content-Type": "application/json"}
        with standing_in(redis, tmp_path, STANDIN_ROW_SECONDS="10") as standin:
            wait_until(lambda: standin.says(" ready."), "it is ready")
            ask(f"{url}/v1/runs", {"texts": [GOAL]})  # keeps the device busy
            connection.request("POST", "/v1/classify", body, headers)
            wait_until(
                lambda: redis.client.hlen("feedmill:reserved") == 2, "both are taken"
            )
            connection.close()
            status, _ = ask(f"{url}/v1/classify", {"texts": [CAKE]})
            assert status == 200
            assert error_of(ask(f"{url}/v1/posts/left")) == (404, "not_found")


class Receiver:
    """A server that receives notices; it refuses the first one."""

    def __init__(self) -> None:
        self.notices: list[tuple[dict[str, str], bytes]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                body = self.rfile.read(length)
                receiver.notices.append((dict(self.headers), body))
                self.send_response(500 if len(receiver.notices) == 1 else 204)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", free_port()), Handler)
        self.host = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def test_a_finished_run_sends_a_signed_notice(
    served: RedisServer, tmp_path: Path
) -> None:
    secret = "a secret of the receiver"
    receiver = Receiver()
    given = {
        "FEEDMILL_WEB_WEBHOOK_SECRET": secret,
        "FEEDMILL_WEB_WEBHOOK_HOSTS": receiver.host,
    }
    body = {"texts": [GOAL, CAKE], "labels": LABELS, "run": "noticed"}
    try:
        with serving(served, tmp_path, **given) as url:
            for address in ("http://169.254.169.254/", "file:///etc/passwd"):
                refused = ask(f"{url}/v1/runs", {**body, "webhook": address})
                assert error_of(refused) == (422, "refused")
            address = f"http://{receiver.host}/hook?of=run"
            assert ask(f"{url}/v1/runs", {**body, "webhook": address})[0] == 202
            wait_until(lambda: len(receiver.notices) == 2, "it is sent again")
    finally:
        receiver.close()
    headers, content = receiver.notices[1]
    signed = headers["X-Feedmill-Time"].encode() + b"." + content
    digest = hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()
    assert headers["X-Feedmill-Signature"] == f"sha256={digest}"
    notice = json.loads(content)
    assert (notice["event"], notice["run"], notice["stored"]) == (
        "run.finished",
        "noticed",
        2,
    )
