"""`feedmill ingest bluesky` and `ingest live`: real processes against the loopback Jetstream."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from feedmill.producers.live.state import Gap, Gaps, LiveState, Position
from feedmill.shared.broker import queue_depth
from tests.fakes.jetstream import Jetstream
from tests.fakes.jetstream_archive import JetstreamArchive
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


def test_daemon_moves_to_another_server_and_says_which(
    redis: RedisServer, jetstream: Jetstream, tmp_path: Path
) -> None:
    dead = f"127.0.0.1:{free_port()}"
    host = jetstream.url.removeprefix("ws://")
    environment = {
        "FEEDMILL_REDIS_URL": redis.url,
        "FEEDMILL_BLUESKY_URL": f"ws://user:secret@{dead},{jetstream.url}",
    }
    accounts = ("--bluesky-accounts", "did:plc:alice")
    with running("ingest", "bluesky", *accounts, cwd=tmp_path, **environment) as daemon:
        wait_until(lambda: jetstream.hellos, "the second server is asked")
        jetstream.post("a post about kettles")
        jetstream.post("another author's", "did:plc:bob")
        wait_until(
            lambda: queue_depth(redis.client, "feedmill").waiting, "the post is sent"
        )
        wait_until(lambda: daemon.says(f"reading {host}"), "the log has a status line")
        wait_until(
            lambda: (
                f"reading {host}"
                in feedmill("status", cwd=tmp_path, **environment).stdout
            ),
            "the status names the server",
        )
        assert daemon.end(signal.SIGTERM) == 0, daemon.text()
    assert f"bluesky: {dead}: the connection failed" in daemon.text()
    assert f"the next server is {host}" in daemon.text()
    assert "server changes: 1" in daemon.text()
    assert "secret" not in daemon.text()
    assert "Traceback" not in daemon.text()


def test_wrong_accounts_are_explained(redis: RedisServer, tmp_path: Path) -> None:
    environment = {"FEEDMILL_REDIS_URL": redis.url}
    accounts = ("--bluesky-accounts", "did:plc:alice,alice.bsky.social")
    command = feedmill("ingest", "bluesky", *accounts, cwd=tmp_path, **environment)
    assert command.returncode == 2
    assert "FEEDMILL_BLUESKY_ACCOUNTS: 'alice.bsky.social' is not" in command.stderr
    assert "Traceback" not in command.stderr


def test_a_recorded_gap_is_filled_from_the_archive(
    redis: RedisServer, jetstream: Jetstream, tmp_path: Path
) -> None:
    sent = [jetstream.post(f"post {number}") for number in range(20)]
    jetstream.account("did:plc:anyone", None)
    texts = jetstream.texts()
    since, until = (json.loads(texts[place])["time_us"] / 1e6 for place in (0, 19))
    Gaps(redis.client).record(Gap("bluesky", "", since, until, noted=until))
    with JetstreamArchive() as archive:
        archive.key = "the key"
        archive.seal(texts)
        # so that the archive has reached the end of the gap, and begins before it
        archive.segments[0][0][0]["time_us"] -= 120_000_000
        archive.segments[-1][-1][-1]["time_us"] += 120_000_000
        environment = {
            "FEEDMILL_REDIS_URL": redis.url,
            "FEEDMILL_BLUESKY_URL": jetstream.url,
            "FEEDMILL_BLUESKY_ARCHIVE_URL": archive.url,
            "FEEDMILL_BLUESKY_ARCHIVE_KEY": "the key",
        }
        with running("ingest", "bluesky", cwd=tmp_path, **environment) as daemon:
            wait_until(lambda: daemon.says("filled the gap in bluesky"), "it is filled")
            assert daemon.end(signal.SIGTERM) == 0, daemon.text()
    assert "the key" not in daemon.text()
    assert "Traceback" not in daemon.text()
    said = feedmill("ingest", "gaps", cwd=tmp_path, **environment).stdout
    assert f"filled with {len(sent) - 1} posts" in said
