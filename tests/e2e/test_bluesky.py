"""`feedmill ingest bluesky` and `ingest live`: real processes against the loopback Jetstream."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from feedmill.producers.live.state import LiveState, Position
from feedmill.shared.broker import queue_depth
from tests.fakes.jetstream import Jetstream
from tests.support import (
    RedisServer,
    feedmill,
    fetch,
    free_port,
    last_json,
    running,
    wait_until,
)


@pytest.fixture
def jetstream() -> Iterator[Jetstream]:
    with Jetstream() as jetstream:
        yield jetstream


def test_daemon_sends_posts_and_reports_its_state(
    redis: RedisServer, jetstream: Jetstream, tmp_path: Path
) -> None:
    port = free_port()
    environment = {
        "FEEDMILL_REDIS_URL": redis.url,
        "FEEDMILL_BLUESKY_URL": jetstream.url,
    }
    command = (
        "ingest",
        "bluesky",
        "--bluesky-languages",
        "en",
        "--labels",
        "food,sports",
        "--metrics-port",
        str(port),
    )
    # As if an earlier daemon had read an event that the server no longer has.
    LiveState(redis.client, "bluesky").advance(
        Position(1_700_000_000_000_000, 1_700_000_000.0)
    )
    with running(*command, cwd=tmp_path, **environment) as daemon:
        wait_until(lambda: jetstream.queries, "the daemon is connected")
        jetstream.post("a post about kettles", langs=["en"])
        jetstream.post("ein Kessel", langs=["de"])
        wait_until(
            lambda: queue_depth(redis.client, "feedmill").waiting, "the post is sent"
        )
        metrics = f"http://127.0.0.1:{port}/metrics"
        wait_until(
            lambda: (
                'live_posts_filtered_total{source="bluesky"} 1.0' in fetch(metrics)[1]
            ),
            "metrics",
        )
        # A post is counted after it is in the queue.
        wait_until(
            lambda: (
                'feedmill_live_posts_sent_total{source="bluesky"} 1.0'
                in fetch(metrics)[1]
            ),
            "the metrics count the post as sent",
        )
        wait_until(
            lambda: (
                "bluesky"
                in (
                    last_json(
                        feedmill("status", "--json", cwd=tmp_path, **environment).stdout
                    )["live"]
                )
            ),
            "the status is stored",
        )
        assert "bluesky" in feedmill("status", cwd=tmp_path, **environment).stdout
        wait_until(
            lambda: daemon.says("1 filtered · gaps: 1"), "the log has a status line"
        )
        assert daemon.end(signal.SIGTERM) == 0, daemon.text()
    assert "gap in bluesky" in daemon.text()
    assert "Traceback" not in daemon.text()
    listed = feedmill("ingest", "gaps", "--json", cwd=tmp_path, **environment)
    gap = last_json(listed.stdout)
    assert (gap["source"], gap["since"]) == ("bluesky", 1_700_000_000.0)
    said = feedmill("ingest", "gaps", "--clear", cwd=tmp_path, **environment)
    assert said.stdout.startswith("bluesky ")
    assert (
        feedmill("ingest", "gaps", cwd=tmp_path, **environment).stdout == "No gaps.\n"
    )


def test_unreachable_server_is_retried_until_the_signal(
    redis: RedisServer, tmp_path: Path
) -> None:
    url = f"ws://127.0.0.1:{free_port()}"
    environment = {"FEEDMILL_REDIS_URL": redis.url, "FEEDMILL_BLUESKY_URL": url}
    with running("ingest", "bluesky", cwd=tmp_path, **environment) as daemon:
        wait_until(lambda: daemon.text().count("retrying in") >= 2, "two attempts")
        assert daemon.end(signal.SIGINT) == 0
    assert "Traceback" not in daemon.text()
