"""Compare Flower's counts with the results store's over ten thousand messages (`python -m tests.soak_counts`).

Sends one post per message through the embedded stack and reads task states from Flower's REST API. The last line is
JSON: messages, stored, succeeded, failed, other (Flower's states), seconds. Exits 1 if the counts differ.
"""

import argparse
import base64
import json
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from feedmill.producers.push import Pusher
from feedmill.shared.broker import connect, make_app, queue_depth
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.results import ResultsStore
from feedmill.shared.settings import FLOWER_USER, Settings
from feedmill.stack.embedded import Stack
from tests.support import wait_until


def run(messages: int, folder: Path) -> dict[str, Any]:
    """Send the messages, wait for the last one, and return the counts."""
    stack = Stack(Settings(posts_per_message=1), folder, durable=False)
    try:
        for line in stack.start():
            sys.stderr.write(f"{line.partition(', user')[0]}\n")
        redis = connect(stack.settings)
        store = ResultsStore(redis, stack.settings)
        began = time.monotonic()
        posts = (Post(id=f"m{number}", title=f"message {number} about rain and trains") for number in range(messages))
        Pusher(make_app(stack.settings), redis, stack.settings, ClassifyOptions()).push(posts)
        wait_until(lambda: store.counters().stored >= messages, "all posts are stored", 1200)
        seconds = time.monotonic() - began
        wait_until(lambda: queue_depth(redis, stack.settings.queue) == (0, 0), "all messages are acknowledged", 60)
        wait_until(lambda: _states(stack)["SUCCESS"] >= messages, "Flower has seen all tasks", 60)
        states = _states(stack)
        return {
            "messages": messages,
            "stored": store.counters().stored,
            "succeeded": states.pop("SUCCESS"),
            "failed": states.pop("FAILURE", 0),
            "other": sum(states.values()),
            "seconds": round(seconds, 1),
        }
    finally:
        stack.stop()


def _states(stack: Stack) -> Counter[str]:
    """Return the number of Flower's tasks in each state."""
    given = f"{FLOWER_USER}:{stack.flower_password}"
    request = urllib.request.Request(  # noqa: S310 - our own address
        f"{stack.flower_url}/api/tasks?limit=1000000",
        headers={"Authorization": f"Basic {base64.b64encode(given.encode()).decode()}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        return Counter(task["state"] for task in json.load(answer).values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--messages", type=int, default=10_000)
    given = parser.parse_args(arguments)
    with TemporaryDirectory(prefix="feedmill-counts-") as folder:
        found = run(given.messages, Path(folder))
    sys.stdout.write(json.dumps(found) + "\n")
    return 0 if found["stored"] == found["succeeded"] == given.messages and not found["failed"] + found["other"] else 1


if __name__ == "__main__":
    sys.exit(main())
