"""One request as different Celery clients write it to Redis: their protocols, headers, encodings
and compressions.
"""

import gzip
import json
import zlib
from base64 import b64encode
from typing import Any
from uuid import uuid4

from celery import Celery

from feedmill.shared.broker import CLASSIFY_TASK

APP: Any = Celery(set_as_current=False)
#: Each client, with the way in which it differs from others.
CLIENTS = (
    "celery",
    "celery, protocol 1",
    "celery, compressed",
    "celery, protocol 1, compressed",
    "gocelery",
    "celery.node",
    "short name of gzip",
    "text",
    "text, protocol 1",
    "text, protocol 1, no properties",
    "headers and protocol 1",
    "positional, protocol 1",
    "utf-8 as encoding",
    "reordered",
)


def message_of(
    client: str,
    kwargs: dict[str, Any],
    task_id: str | None = None,
    task: str = CLASSIFY_TASK,
) -> bytes:
    """Return the message of a client, as it is in the list of a queue."""
    task_id = task_id or str(uuid4())
    made = APP.amqp.as_task_v2(task_id, task, kwargs=kwargs)
    options: Any = made.body[2]
    message = _message(client, [[], kwargs, options], dict(made.headers), task_id)
    legacy = {
        "id": task_id,
        "task": task,
        "args": [],
        "kwargs": kwargs,
        "retries": 0,
        "eta": None,
        "expires": None,
    }
    if "protocol 1" in client:
        message = _message(
            client, APP.amqp.as_task_v1(task_id, task, kwargs=kwargs).body, {}, task_id
        )
    if client == "positional, protocol 1":
        others = {name: value for name, value in kwargs.items() if name != "posts"}
        message = _message(
            client, {**legacy, "args": [kwargs["posts"]], "kwargs": others}, {}, task_id
        )
    if client == "headers and protocol 1":
        message["headers"] = made.headers
    if client == "gocelery":
        message = _message(client, legacy, {}, task_id)
        # not the task's id, which only the body names
        message["properties"]["correlation_id"] = str(uuid4())
        del message["headers"]
    if client == "celery.node":
        message = _message(client, {**legacy, "utc": True}, {}, task_id)
    if "no properties" in client:
        del message["properties"]
    return json.dumps(message).encode()


def _message(
    client: str, body: Any, headers: dict[str, Any], task_id: str
) -> dict[str, Any]:
    """Return a message, with its body encoded as the client does it."""
    properties = {
        "correlation_id": task_id,
        "reply_to": str(uuid4()),
        "delivery_mode": 2,
        "delivery_info": {"exchange": "", "routing_key": "feedmill", "priority": 0},
        "priority": 0,
        "body_encoding": "base64",
        "delivery_tag": str(uuid4()),
    }
    data = json.dumps(body, ensure_ascii=client != "gocelery").encode()
    if "compressed" in client or "gzip" in client:
        headers["compression"] = (
            "gzip" if "short name" in client else "application/x-gzip"
        )
        data = zlib.compress(data)
    text = b64encode(data).decode()
    if client.startswith("text"):
        text = data.decode()
        del properties["body_encoding"]
    if client == "utf-8 as encoding":
        text, properties["body_encoding"] = data.decode(), "utf-8"
    if client == "reordered":
        headers = dict(sorted(headers.items(), reverse=True))
    return {
        "body": text,
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": headers,
        "properties": properties,
    }


def unreadable(kind: str, posts: list[dict[str, Any]]) -> bytes:
    """Return a message with these posts that no worker can read."""
    message = json.loads(message_of("celery", {"posts": posts}))
    body = json.dumps([[], {"posts": posts}, {}]).encode()
    match kind:
        case "another compression":
            message["headers"]["compression"] = "application/x-bz2"
        case "real gzip":  # kombu writes zlib's format under this name
            message["headers"]["compression"] = "application/x-gzip"
            body = gzip.compress(body)
        case "cut off":
            body = body[:-20]
        case "too many values":
            message["headers"]["compression"] = "application/x-gzip"
            body = zlib.compress(body[:-1] + b", [" + b"{}," * 21_000_000 + b"{}]]")
        case "too deep":
            body = body[:-1] + b", " + b"[" * 100_000 + b"]" * 100_000 + b"]"
        case "another encoding":
            body = body.decode().encode("utf-16")
        case "an envelope that is cut off":
            message["body"] = b64encode(body).decode()
            return json.dumps(message).encode()[:-1]
    message["body"] = b64encode(body).decode()
    return json.dumps(message).encode()


#: The kinds of `unreadable`.
UNREADABLE = (
    "another compression",
    "real gzip",
    "cut off",
    "too many values",
    "too deep",
    "another encoding",
    "an envelope that is cut off",
)
