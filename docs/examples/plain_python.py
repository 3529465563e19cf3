"""Classify posts with your own labels. Needs only `pip install 'celery[redis]'`.

    FEEDMILL_REDIS_URL=redis://:password@127.0.0.1:6379/0 python plain_python.py

Prints one line per post. Exits with status 1 if the whole message failed.
"""

import os
import sys

from celery import Celery

URL = os.environ["FEEDMILL_REDIS_URL"]
POSTS = [
    {"id": "a1", "title": "The keeper saved two penalties", "extra": {"row": 1}},
    {"id": "a2", "title": "Which kettle?", "body": "Mine leaks."},
    {"id": "a3", "title": "", "body": "[removed]"},
]
LABELS = {"sport": "sports and matches", "kitchen": "kitchen and cooking"}

app = Celery(broker=URL, backend=URL, set_as_current=False)
sent = app.send_task(
    "feedmill.classify",
    kwargs={"version": 1, "posts": POSTS, "labels": LABELS},
    queue="feedmill",
)
outcomes = sent.get(timeout=60, propagate=False)
if sent.failed():
    sys.exit(f"{type(outcomes).__name__}: {outcomes}")
for outcome in outcomes:
    if "error" in outcome:
        print(f"{outcome['id']}: no label: {outcome['error']}")
    else:
        print(f"{outcome['id']}: {outcome['label']}")
