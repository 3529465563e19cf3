"""Health checks: a worker's metrics port, `feedmill health` and `feedmill status`."""

import json
import re
import signal
import socket
from contextlib import suppress
from pathlib import Path

from feedmill.shared.keys import WORKERS
from feedmill.shared.model_routing import expected_workers, register
from feedmill.shared.settings import Settings
from tests import support
from tests.support import RedisServer, feedmill, make_posts, wait_until, working


def ask(port: int, path: str) -> tuple[int, str]:
    """Return status and body, or (0, "") if nothing answers."""
    with suppress(OSError):
        return support.fetch(f"http://127.0.0.1:{port}{path}")[:2]
    return 0, ""


def test_worker_serves_metrics_and_is_missed_when_stopped(
    redis: RedisServer, settings: Settings, tmp_path: Path
) -> None:
    port = support.free_port()
    with working(redis, tmp_path, FEEDMILL_METRICS_PORT=str(port)) as worker:
        assert f"http://127.0.0.1:{port}/metrics" in worker.text()
        wait_until(lambda: ask(port, "/readyz") == (200, "ok\n"), "the worker is ready")
        support.push(settings, make_posts(40))
        wait_until(
            lambda: (
                'feedmill_worker_posts_total{state="classified"} 40.0'
                in ask(port, "/metrics")[1]
            ),
            "the metrics count all posts as classified",
        )
        wait_until(
            lambda: "feedmill_results_stored_total 40.0" in ask(port, "/metrics")[1],
            "the metrics count all results as stored",
        )
        text = ask(port, "/metrics")[1]
        assert "feedmill_redis_up 1.0" in text
        assert "feedmill_worker_batch_rows_sum 40.0" in text
        wait_until(
            lambda: (
                "feedmill_results_lag_seconds_count 2.0" in ask(port, "/metrics")[1]
            ),
            "the lag is measured",
        )
        assert 'device="cpu"' in text
        wait_until(lambda: redis.client.hlen(WORKERS) == 1, "the worker is registered")
        register(
            redis.client, *expected_workers(redis.client)
        )  # another worker of this name
        # Cut every connection: the worker must reconnect, and registers again.
        redis.client.client_kill_filter(_type="normal", skipme=True)
        wait_until(
            lambda: ask(port, "/readyz") == (200, "ok\n"), "the worker is ready again"
        )
        assert ask(port, "/healthz") == (200, "ok\n")
        assert support.PASSWORD not in ask(port, "/metrics")[1]
        wait_until(
            lambda: "another worker is named" in worker.text(),
            ("the worker warns of the other one"),
        )
        worker.process.send_signal(signal.SIGSTOP)
        said = feedmill(
            "health", "--check", "workers", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url
        )
        seen = support.last_json(
            feedmill(
                "status", "--json", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url
            ).stdout
        )
        worker.process.send_signal(signal.SIGCONT)
        assert said.returncode == 1
        assert re.match(
            r"✗ workers  .*worker@\S+ .*\(last report \d+ s ago\)", said.stdout
        )
        assert [name.partition("@")[0] for name in seen["missing"]] == ["worker"]
        assert worker.end() == 0, worker.text()
    assert ask(port, "/metrics") == (0, "")
    assert redis.client.hlen(WORKERS) == 0, (
        "a worker that exited normally is no longer expected"
    )


def test_worker_fails_before_loading_if_its_port_is_taken(
    redis: RedisServer, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = feedmill(
            "worker",
            cwd=tmp_path,
            FEEDMILL_REDIS_URL=redis.url,
            FEEDMILL_METRICS_PORT=port,
            FEEDMILL_MODEL="/nothere",
        )
    assert ended.returncode == 1
    assert re.search(f"127.0.0.1:{port}.*Address already in use", ended.stderr)
    assert "/nothere" not in ended.stderr
    assert "Traceback" not in ended.stderr


def test_health_prints_text_or_json(
    served: RedisServer, redis: RedisServer, tmp_path: Path
) -> None:
    well = feedmill("health", cwd=tmp_path, FEEDMILL_REDIS_URL=served.url)
    assert well.returncode == 0, well.stdout + well.stderr
    assert [line.split()[:2] for line in well.stdout.splitlines()] == [
        ["✓", "redis"], ["✓", "memory"], ["✓", "queue"], ["✓", "workers"], ["✓", "live"],
        ["✓", "flower"],
    ]  # fmt: skip
    alone = feedmill("health", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
    assert alone.returncode == 1
    assert re.search("^✗ workers  .*`feedmill worker`", alone.stdout, re.MULTILINE)
    said = feedmill(
        "health",
        "--json",
        "--check",
        "workers",
        cwd=tmp_path,
        FEEDMILL_REDIS_URL=redis.url,
    )
    assert said.returncode == 1
    found = json.loads(said.stdout)
    (check,) = found["checks"]
    assert (found["healthy"], check["check"], check["healthy"]) == (
        False,
        "workers",
        False,
    )
    assert "`feedmill worker`" in check["said"]
    without = feedmill(
        "health",
        "--check",
        "queue",
        "--check",
        "redis",
        cwd=tmp_path,
        FEEDMILL_REDIS_URL=redis.url,
    )
    assert (without.returncode, len(without.stdout.splitlines())) == (0, 2)


def test_status_as_json(served: RedisServer, tmp_path: Path) -> None:
    once = support.last_json(
        feedmill("status", "--json", cwd=tmp_path, FEEDMILL_REDIS_URL=served.url).stdout
    )
    assert (once["asked"], once["missing"]) == (True, {})
    assert once["memory"]["limit"] > once["memory"]["used"] > 0
    assert once["memory"]["results"] == 0


def test_health_fails_while_redis_may_evict_messages(
    redis: RedisServer, tmp_path: Path
) -> None:
    """The policy is read each time, because it can be changed while Redis runs."""

    def health() -> tuple[int, str]:
        ended = feedmill(
            "health", "--check", "memory", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url
        )
        return ended.returncode, ended.stdout

    policies = [
        f"{keys}-{order}" for keys in ("allkeys", "volatile") for order in ("lru", "lfu", "random")
    ] + ["volatile-ttl"]  # fmt: skip
    try:
        for policy in policies:
            redis.client.config_set("maxmemory-policy", policy)
            status, text = health()
            assert status == 1, policy
            assert text.startswith("✗ memory")
            assert policy in text
            assert "maxmemory-policy noeviction" in text
        shown = feedmill("status", cwd=tmp_path, FEEDMILL_REDIS_URL=redis.url)
        assert policies[-1] in shown.stdout
    finally:
        redis.client.config_set("maxmemory-policy", "noeviction")
    assert health()[0] == 0
