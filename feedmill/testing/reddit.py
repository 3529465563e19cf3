"""Serve a Reddit on this machine, to try `feedmill ingest reddit` without a key.

    python -m feedmill.testing.reddit

It has the subreddits of a topics file, some posts in each, and publishes another one every two
seconds. An Arctic Shift with the same posts answers on the next port. Both accept connections from
this machine only.
"""

import argparse
import json
import random
import signal
import time
from collections.abc import Iterator, Sequence
from importlib.resources import files
from threading import Event
from typing import Any

from feedmill.producers.reddit import topics as topics_file
from feedmill.producers.reddit.topics import Topics
from feedmill.shared.errors import UserError
from feedmill.shared.settings import load
from feedmill.testing.fake_arctic_shift import ArcticShift
from feedmill.testing.fake_reddit import Reddit

#: Port of Reddit by default. Arctic Shift has the next one.
DEFAULT_PORT = 8765
#: Seconds over which the first posts are spread.
PAST_S = 3600.0
#: Maximum seconds between two posts.
MAX_INTERVAL_S = 86_400.0
#: Posts after which no more are published: they stay in memory.
MAX_POSTS = 100_000

ENVIRONMENT = """\
export FEEDMILL_REDDIT_URL={reddit}
export FEEDMILL_ARCTIC_SHIFT_URL={archive}
export FEEDMILL_REDDIT_CLIENT_ID=id FEEDMILL_REDDIT_CLIENT_SECRET=secret
export FEEDMILL_REDDIT_USER_AGENT='linux:trial:1.0 (by /u/nobody)'"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(
        "python -m feedmill.testing.reddit", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help=("port of Reddit; 0 chooses free ones"),
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=2.0,
        help=("seconds between two new posts"),
    )
    parser.add_argument(
        "--posts",
        type=int,
        default=20,
        help=("posts of each subreddit at the start"),
    )
    parser.add_argument(
        "--private",
        action="append",
        default=[],
        metavar="NAME",
        help="make a subreddit private",
    )
    parser.add_argument(
        "--missing",
        action="append",
        default=[],
        metavar="NAME",
        help="leave out a subreddit",
    )
    chosen = parser.parse_args(arguments)
    # A comparison with NaN is false.
    is_interval = 0 < chosen.interval <= MAX_INTERVAL_S
    if (
        not is_interval
        or not 0 <= chosen.posts <= MAX_POSTS
        or not 0 <= chosen.port < 65535
    ):
        parser.error(
            f"--interval must be positive and at most {MAX_INTERVAL_S:g}, --posts at most "
            f"{MAX_POSTS}, and --port below 65535"
        )
    try:
        topics = topics_file.read(load().reddit_topics)
        _serve(topics, chosen)
    except (OSError, OverflowError) as error:
        parser.error(
            f"cannot listen on port {chosen.port}: {error}; choose another --port"
        )
    except UserError as error:
        parser.error(str(error))


def _serve(topics: Topics, chosen: argparse.Namespace) -> None:
    ended = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    archive_port = chosen.port + 1 if chosen.port else 0
    with (
        Reddit(port=chosen.port) as reddit,
        ArcticShift(reddit, port=archive_port) as archive,
    ):
        names = _open_subreddits(
            reddit,
            topics,
            missing=chosen.missing,
            private=chosen.private,
        )
        posts = _posts(names)
        for _ in range(chosen.posts * len(names)):
            post = next(posts)
            age = random.uniform(0, PAST_S)
            _publish(reddit, post, time.time() - age)
        environment = ENVIRONMENT.format(
            reddit=reddit.url,
            archive=archive.url,
        )
        # A command.
        print(environment, flush=True)  # noqa: T201
        ledger = reddit.ledger
        while len(ledger.published) < MAX_POSTS and not ended.wait(chosen.interval):
            _publish(reddit, next(posts), time.time())
        ended.wait()


def _open_subreddits(
    reddit: Reddit, topics: Topics, missing: list[str], private: list[str]
) -> dict[str, str]:
    """Add the subreddits of the topics. Return the topic of each by its name."""
    absent = {name.lower() for name in missing}
    closed = {name.lower() for name in private}
    names: dict[str, str] = {}
    for topic, subreddits in topics.topics.items():
        for name in subreddits:
            if name.lower() in absent:
                continue
            kind = "private" if name.lower() in closed else "public"
            reddit.add_subreddit(name, kind)
            names[name] = topic
    return names


def _posts(names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield posts for the subreddits in turn, without end: the included samples, of the same topic
    if there are any.
    """
    samples_file = files("feedmill").joinpath("samples.jsonl")
    text = samples_file.read_text(encoding="utf-8")
    samples = [json.loads(line) for line in text.splitlines()]
    while True:
        for name, topic in names.items():
            matches = [sample for sample in samples if sample["topic"] == topic]
            sample = random.choice(matches or samples)
            yield {
                "subreddit": name,
                "title": sample["title"],
                "body": sample["body"],
                "score": sample["score"],
            }


def _publish(reddit: Reddit, post: dict[str, Any], created: float) -> None:
    reddit.publish(**post, created_utc=float(int(created)))


if __name__ == "__main__":
    main()
