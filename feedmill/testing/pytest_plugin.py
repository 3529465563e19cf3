"""Fixtures of pytest for applications that send posts to Feedmill.

Import them in a `conftest.py`:

    from feedmill.testing.pytest_plugin import feedmill_app, feedmill_worker

They are no plugin that pytest finds by itself: it would load Feedmill into every run of every
project in the environment, and rewrite the assertions of all of Feedmill's modules.
"""

from collections.abc import Iterator

import pytest
from celery import Celery

from feedmill.testing.worker import FakeWorker


@pytest.fixture
def feedmill_app() -> Celery | None:
    """The Celery application that sends posts. Override it; by default, the current one."""
    return None


@pytest.fixture
def feedmill_worker(feedmill_app: Celery | None) -> Iterator[FakeWorker]:
    """A worker that answers the application's messages; set its `answer`."""
    with FakeWorker(feedmill_app) as worker:
        yield worker
