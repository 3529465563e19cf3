"""`feedmill ingest feeds` and `ingest mastodon`: real processes against servers on loopback."""

import json
import signal
import time
from pathlib import Path

from feedmill.producers.live.state import LiveState, statuses
from tests.fakes import constants
from tests.fakes.feeds import Feeds
from tests.fakes.mastodon import Mastodon
from tests.support import RedisServer, feedmill, free_port, queued, running, wait_until


def write(folder: Path, **addresses: str) -> str:
    path = folder / "feeds.toml"
    lines = [f"{name} = {json.dumps(url)}\n" for name, url in addresses.items()]
    path.write_text("[feeds]\n" + "".join(lines))
    return str(path)


def test_daemon_reads_feeds_and_goes_on_after_kill(
    redis: RedisServer, tmp_path: Path
) -> None:
    with Feeds() as server:
        blog = server.add("blog")
        blog.publish("one", "<p>first</p>")
        server.replies["gone"] = (410, {})
        file = write(tmp_path, blog=f"{server.url}/blog", gone=f"{server.url}/gone")
        environment = {"FEEDMILL_REDIS_URL": redis.url}
        command = ("ingest", "feeds", file, "--labels", "food,sports")
        with running(*command, cwd=tmp_path, **environment) as daemon:
            wait_until(lambda: queued(redis), "the entry is sent")
            wait_until(
                lambda: "feed:blog" not in daemon.text() and server.asked[1:],
                "both feeds are read",
            )
            daemon.end(signal.SIGKILL)
        file = write(
            tmp_path,
            blog=f"{server.url}/blog",
            gone=f"{server.url}/gone",
            more=f"{server.url}/more",
        )
        server.add("more").publish("two")
        with running(*command, cwd=tmp_path, **environment) as daemon:
            wait_until(lambda: len(queued(redis)) == 2, "the new feed's entry is sent")
            wait_until(lambda: daemon.says("3 feeds"), "the status line is logged")
            wait_until(lambda: daemon.says("gone feeds: 1"), "the gone feed is named")
            assert daemon.end(signal.SIGTERM) == 0, daemon.text()
    assert [post["title"] for post in queued(redis)] == ["one", "two"]
    assert "Traceback" not in daemon.text()
    assert statuses(redis.client)["feeds"].report["gone_feeds"] == ["gone"]


def test_check_shows_each_feed_without_redis(tmp_path: Path) -> None:
    with Feeds() as server:
        server.add("blog").publish("one")
        server.replies["old"] = (301, {"Location": "/blog"})
        address = server.url.replace("://", "://user:secret@")
        file = write(
            tmp_path,
            blog=f"{address}/blog?token=secret",
            old=f"{address}/old?token=secret",
            none=f"{server.url}/none",
            away=f"http://127.0.0.1:{free_port()}/",
        )
        url = f"redis://127.0.0.1:{free_port()}/0"
        said = feedmill(
            "ingest", "feeds", file, "--check", cwd=tmp_path, FEEDMILL_REDIS_URL=url
        )
    blog, old, none, away = said.stdout.splitlines()
    assert said.returncode == 1
    assert "1 entries" in blog
    assert "has moved to" in old
    assert "status 404: correct its address" in none
    assert "no connection" in away
    assert "secret" not in said.stdout + said.stderr
    assert "Traceback" not in said.stderr


def test_writes_opml_that_it_can_read(tmp_path: Path) -> None:
    file = write(tmp_path, blog="https://example.org/feed")
    said = feedmill("ingest", "feeds", file, "--opml", "feeds.opml", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "https://example.org/feed" in (tmp_path / "feeds.opml").read_text()
    said = feedmill(
        "ingest", "feeds", "feeds.opml", "--opml", "again.opml", cwd=tmp_path
    )
    assert said.returncode == 0, said.stderr
    again = (tmp_path / "again.opml").read_text()
    assert again == (tmp_path / "feeds.opml").read_text()


def test_mistakes_are_explained(tmp_path: Path) -> None:
    said = feedmill("ingest", "feeds", "none.toml", cwd=tmp_path)
    assert (said.returncode, "none.toml cannot be read" in said.stderr) == (2, True)
    said = feedmill("ingest", "mastodon", "--tag", "#", cwd=tmp_path)
    assert (said.returncode, "--tag photography" in said.stderr) == (2, True)
    said = feedmill("ingest", "mastodon", "--mastodon-url", "mastodon", cwd=tmp_path)
    assert said.returncode != 0
    assert "https://mastodon.example" in said.stderr
    assert "Traceback" not in said.stderr


def test_mastodon_daemon_sends_posts(redis: RedisServer, tmp_path: Path) -> None:
    with Mastodon(time.time) as server:
        server.post("before the start")
        command = ("ingest", "mastodon", "--mastodon-url", server.url, "--local")
        often = {"feedmill.producers.mastodon.POLL_INTERVAL_S": 0.5}
        environment = {
            "FEEDMILL_REDIS_URL": redis.url,
            constants.VARIABLE: json.dumps(often),
        }
        with running(*command, cwd=tmp_path, **environment) as daemon:
            state = LiveState(redis.client, "mastodon")
            wait_until(state.position, "the newest post is known")
            server.post("a text")
            wait_until(lambda: queued(redis), "the post is sent")
            assert daemon.end(signal.SIGTERM) == 0, daemon.text()
    assert [post["body"] for post in queued(redis)] == ["a text"]
