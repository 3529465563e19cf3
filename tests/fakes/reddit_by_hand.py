"""Run the fake Reddit as a command that publishes a file's posts, half of them while it runs.

    python -m tests.fakes.reddit --posts FILE [--port P] [--rate POSTS_PER_MINUTE] [--fault-rate 0.1]
                                 [--write-topics FILE]

The command prints the settings with which `feedmill ingest reddit` reads this Reddit, and then a status line per
minute.
"""

import argparse
import json
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from threading import Event

from feedmill.producers.files import Source
from feedmill.shared.errors import UserError
from feedmill.shared.messages import Post
from tests.fakes.reddit import Reddit

#: Seconds over which the initial posts were created.
PAST = 86400
#: Seconds between two status lines.
REPORT = 60.0
#: Maximum number of subreddits that `feedmill ingest reddit` reads per topic.
ACTIVE = 25


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fakes.reddit", description="Run a fake Reddit on loopback.")
    parser.add_argument("--posts", required=True, metavar="FILE", help="JSONL, a JSON array or CSV; plain or gzip")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any free port)")
    parser.add_argument("--rate", type=float, default=60.0, help="posts to publish per minute")
    parser.add_argument("--fault-rate", type=float, default=0.0, help="share of answers with a fault")
    parser.add_argument("--write-topics", metavar="FILE", type=Path, help="write a topics file for these posts")
    arguments = parser.parse_args()
    ending = Event()
    for ends in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ends, lambda *_: ending.set())
    try:
        posts = _posts(arguments.posts)
        if arguments.write_topics:
            arguments.write_topics.write_text(_topics(posts), encoding="utf-8")
        reddit = Reddit(port=arguments.port)
    except (UserError, OSError, OverflowError) as error:
        sys.exit(_sentence(error, arguments.port))
    with reddit:
        if arguments.fault_rate:
            reddit.faults.random(arguments.fault_rate)
        coming = _publish_past(reddit, posts)
        _say(_how_to_read(reddit, len(posts), arguments.write_topics))
        _run(reddit, coming, arguments.rate, ending)


def _sentence(error: Exception, port: int) -> str:
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.filename:
        return f"Cannot write {error.filename}: {error.strerror}."
    return f"Cannot listen on port {port}: {getattr(error, 'strerror', None) or error}. Choose another with --port."


def _say(text: str) -> None:
    with suppress(BrokenPipeError):
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def _posts(path: str) -> list[Post]:
    """Return the file's posts that have a subreddit, oldest first where known. Raises UserError."""
    found = [post for post in Source(path).items() if isinstance(post, Post)]
    posts = [post for post in found if post.subreddit]
    if not posts:
        raise UserError(f"{path} has no post with a subreddit, so there is nothing to publish.")
    if left_out := len(found) - len(posts):
        _say(f"Skipped {left_out:,} posts without a subreddit.")
    return sorted(posts, key=lambda post: post.created_utc or 0.0)


def _topics(posts: Iterable[Post]) -> str:
    """Return a topics file with each subreddit under its posts' most frequent topic, busiest subreddit first."""
    spelt: dict[str, str] = {}
    topics: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for post in posts:
        if post.subreddit and post.topic:
            name = spelt.setdefault(post.subreddit.lower(), post.subreddit)
            topics[name][post.topic] += 1
    subreddits: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, counted in topics.items():
        subreddits[counted.most_common(1)[0][0]][name] = counted.total()
    lines = [
        f"{json.dumps(topic, ensure_ascii=False)} = {json.dumps([name for name, _ in names.most_common(100)])}"
        for topic, names in sorted(subreddits.items())
    ]
    active = min(ACTIVE, max((len(names) for names in subreddits.values()), default=1))
    return "\n".join([f"active = {active}", "", "[topics]", *lines, ""])


def _publish_past(reddit: Reddit, posts: Sequence[Post]) -> Iterator[Post]:
    """Publish the older half of the posts as if created over the past day; return the newer half."""
    for name in {post.subreddit.lower(): post.subreddit for post in posts if post.subreddit}.values():
        reddit.add_subreddit(name)
    past = posts[: (len(posts) + 1) // 2]
    now = time.time()
    for number, post in enumerate(past, 1):
        _publish(reddit, post, float(int(now - PAST + PAST * number / len(past))))
    return iter(posts[len(past) :])


def _publish(reddit: Reddit, post: Post, created_utc: float | None = None) -> None:
    link = None if "reddit.com/" in (post.url or "") else post.url
    reddit.publish(
        post.subreddit or "", title=post.title, body=post.body, url=link, score=1 if post.score is None else post.score,
        stickied=post.stickied, over_18=post.nsfw, spoiler=post.spoiler, created_utc=created_utc,
    )  # fmt: skip


def _how_to_read(reddit: Reddit, count: int, topics: Path | None) -> str:
    settings = {
        "CLIENT_ID": "id",
        "CLIENT_SECRET": "secret",
        "USER_AGENT": "linux:feedmill-by-hand:1.0 (by /u/somebody)",
        "URL": reddit.url,
    }
    if topics:
        settings["TOPICS"] = str(topics.resolve())
    published = reddit.ledger.published
    names = len({post.subreddit for post in published.values()})
    lines = [f"Serving {len(published):,} of {count:,} posts in {names:,} subreddits so far. To read them:", ""]
    lines += [f"export FEEDMILL_REDDIT_{name}={quote(value)}" for name, value in settings.items()]
    return "\n".join([*lines, "feedmill ingest reddit", ""])


def _run(reddit: Reddit, coming: Iterator[Post], rate: float, ending: Event) -> None:
    """Publish the remaining posts at the given rate, with a status line each minute, until `ending` is set."""
    pause = 60.0 / rate if rate > 0 else REPORT
    publish_at = time.monotonic() + pause if rate > 0 else float("inf")
    report_at = time.monotonic() + REPORT
    while not ending.wait(max(0.0, min(publish_at, report_at) - time.monotonic())):
        now = time.monotonic()
        if now >= publish_at:
            post = next(coming, None)
            publish_at = publish_at + pause if post else float("inf")
            if post:
                _publish(reddit, post)
            else:
                _say("All posts are published.")
        if now >= report_at:
            report_at += REPORT
            _say(_report(reddit))
    _say(_report(reddit))


def _report(reddit: Reddit) -> str:
    ledger, now = reddit.ledger, time.strftime("%H:%M:%S")
    served = sum(count > 0 for count in list(ledger.served.values()))
    return (
        f"{now}  {served:,} of {len(ledger.published):,} posts served; {ledger.total:,} requests, "
        f"{ledger.faults.total():,} with a fault, {ledger.over_budget:,} beyond the budget"
    )
