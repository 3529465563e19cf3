"""Ingest ten thousand Reddit posts despite faults and kills (`python -m tests.soak_reddit`).

A loopback Reddit publishes posts in sixteen subreddits at different rates, and one in ten responses is faulty. Real
processes ingest and classify the posts: a worker, and `feedmill ingest reddit`, which is killed ten times with SIGKILL
at random times. Twice, once while the daemon is down and once while it is cut off from Reddit, a subreddit gets more
posts than its listing holds. The posts pushed out of the listing are the scripted gaps, and need not be found. With
`--heal`, the daemon fills them from a loopback Arctic Shift, and they must be found. With `--source arctic-shift` it
reads only that, and there are no gaps.

The last line is JSON: published, stored, missing, duplicated (posts), gaps_expected, gaps_recorded, gaps_open,
budget_exceeded (requests). Exits 1 if a post is missing or duplicated, a gap differs or, with `--heal`, remains open,
or the request budget was exceeded.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from feedmill.producers.live.state import Gap
from feedmill.producers.reddit.state import State
from feedmill.shared.keys import RESULTS_STREAM
from tests.fakes.arctic_shift import ArcticShift
from tests.fakes.reddit import Reddit
from tests.support import Feedmill, RedisServer, redis_servers, sent_marks, wait_until, working

SUBREDDITS = 16
#: Faults, all equally likely.
FAULTS = (
    "too_many", "too_many_bare", "too_many_word", "server_error_500", "server_error_502", "server_error_503",
    "server_error_504", "server_error_520", "html", "html_403", "redirect_nowhere", "token_expired", "cut", "cut_body",
    "reset_fractional", "reset_negative", "remaining_nan", "used_missing", "empty_listing", "dead_anchor", "no_data",
    "truncated_json", "sticky_head", "slow", "slow_body",
)  # fmt: skip
#: Faults of the archive.
ARCHIVE_FAULTS = ("too_many", "server_error_502", "server_error_503", "html", "truncated_json", "cut", "cut_body")
#: Seconds of Retry-After, and of the delay of slow responses.
FAULT_SECONDS = 0.5
#: Items of a listing, and posts of a burst while the daemon is down.
LISTING, BURST = 1000, 1300
#: Posts of a burst per second. The archive returns at most a hundred of one second.
BURST_RATE = 50
#: Requests per window, and the window in seconds: ten times Reddit's rate, like the posts here.
BUDGET, WINDOW = 170, 10.0
WORDS = (
    "river", "kettle", "goal", "budget", "novel", "teacher", "guitar", "vaccine",
    "senate", "galaxy", "ticket", "mortgage", "boss", "recipe", "storm", "patch",
)  # fmt: skip


class Soak:
    """A run of the test. seconds: the time over which posts are published. source, heal: see the options."""

    def __init__(
        self, posts: int, kills: int, bursts: int, seconds: float, seed: int, folder: Path, source: str, heal: bool
    ) -> None:
        self._random = random.Random(seed)
        self._posts, self._kills, self._bursts, self._seconds = posts, kills, bursts, seconds
        self._folder = folder
        self._names = [f"sub{number:02}" for number in range(SUBREDDITS)]
        #: Relative rates: each subreddit gets about 0.7 times the posts of the one before.
        self._weights = [2.0 ** -(number / 2) for number in range(SUBREDDITS)]
        self._reddit = Reddit(window=WINDOW, budget=BUDGET, seed=seed, listing_cap=LISTING)
        self._source, self._heal = source, heal
        # Late posts would count as missing, if they came after their gap was filled.
        late = 0.0 if heal else 0.05
        self._archive = ArcticShift(self._reddit, lag=0.5, late=late, latest=20.0, overload=0.01, seed=seed)
        self._published: list[str] = []
        self._unreachable: set[str] = set()
        #: (subreddit, end of the expected gap as Unix time) of each burst.
        self._expected: list[tuple[str, float]] = []
        self._daemon: Feedmill | None = None

    def run(self) -> dict[str, Any]:
        topics = "active = 1\n[topics]\n" + "".join(f'"about {name}" = ["{name}"]\n' for name in self._names)
        (self._folder / "topics.toml").write_text(topics)
        with ExitStack() as running:
            server = RedisServer(next(iter(redis_servers().values())), self._folder)
            running.callback(server.stop)
            running.enter_context(self._reddit)
            running.enter_context(self._archive)
            running.enter_context(working(server, self._folder, FEEDMILL_RESULTS_STREAM_LENGTH="1000000"))
            running.callback(self._kill)
            for name in self._names:
                self._reddit.add_subreddit(name)
                self._publish(name)
            self._let_reddit_fail()
            self._archive.faults.random(0.1, ARCHIVE_FAULTS, seconds=FAULT_SECONDS)
            self._start(server)
            wait_until(lambda: len(_stored(server)) == SUBREDDITS, "the first posts are stored", 240)
            self._publish_and_kill(server)
            if self._heal:
                self._unreachable.clear()  # the archive has them
            reachable = set(self._published) - self._unreachable
            _tell(f"{len(reachable):,} posts published; waiting until all are stored")
            self._wait_for_results(server, reachable)
            if self._heal:
                wait_until(lambda: not State(server.client).gaps.open(), "no gap is open", 300)
            return self._judge(server, reachable)

    def _let_reddit_fail(self) -> None:
        self._reddit.faults.random(0.1, FAULTS, seconds=FAULT_SECONDS)

    def _publish(self, name: str, created_utc: float | None = None) -> str:
        text = " ".join(self._random.choices(WORDS, k=self._random.randint(3, 60)))
        title = f"{len(self._published)} {text[:80]}"
        self._published.append(
            self._reddit.publish(name, title=title, body=text if len(text) > 80 else "", created_utc=created_utc)
        )
        return self._published[-1]

    def _publish_and_kill(self, server: RedisServer) -> None:
        """Publish for the given seconds, and kill the daemon at random times."""
        begun = time.monotonic()
        kills = sorted(self._random.uniform(0.03, 0.97) * self._seconds for _ in range(self._kills))
        with_burst = set(self._random.sample(range(self._kills), self._bursts))
        ordinary = self._posts - SUBREDDITS - self._bursts * LISTING
        for number, moment in enumerate([*kills, self._seconds]):
            while (passed := time.monotonic() - begun) < moment:
                while len(self._published) - len(self._unreachable) < self._due(passed, ordinary):
                    self._publish(self._random.choices(self._names, self._weights)[0])
                time.sleep(0.02)
            if number == self._kills:
                break
            self._kill()
            _tell(f"kill {number + 1} after {passed:.0f} s, {len(_stored(server)):,} stored")
            if number in with_burst:
                self._burst(server)
            else:
                self._start(server)
        while len(self._published) - len(self._unreachable) < self._posts:
            self._publish(self._random.choices(self._names, self._weights)[0])

    def _due(self, passed: float, ordinary: int) -> float:
        """Return the number of reachable posts due after the given seconds, including earlier bursts."""
        return SUBREDDITS + ordinary * passed / self._seconds + len(self._expected) * LISTING

    def _burst(self, server: RedisServer) -> None:
        """Publish more posts than a listing holds while the daemon is down, the second time while it is cut off from
        Reddit. Then wait until it has read the listing.
        """
        name = self._names[4 + len(self._expected)]
        state = State(server.client)
        # The gap begins at the newest post that was read, so all earlier posts must be read first.
        before = {each for each in self._published if self._reddit.ledger.published[each].subreddit == name}
        self._start(server)
        wait_until(lambda: before <= _known(server, name), f"r/{name} is read to its newest post", 240)
        cut_off = bool(self._expected)
        if cut_off:
            self._reddit.faults.always("cut", where=".")
        else:
            self._kill()
        gaps = len(state.gaps.all())
        # Reddit's times are whole seconds: the first unreachable post must be later than the last one read.
        time.sleep(1.1)
        begins = int(time.time())
        time.sleep(BURST / BURST_RATE + 1)
        burst = [self._publish(name, float(begins + number // BURST_RATE)) for number in range(BURST)]
        time.sleep(1.1)
        self._unreachable |= set(burst[:-LISTING])
        # The gap ends with the second in which the listing begins.
        self._expected.append((name, self._reddit.ledger.published[burst[-LISTING]].created_utc + 1))
        if cut_off:
            self._reddit.faults.clear()
            self._let_reddit_fail()
        else:
            self._start(server)
        wait_until(
            lambda: len(state.gaps.all()) > gaps and burst[-1] in _known(server, name), f"r/{name} is read again", 240
        )

    def _start(self, server: RedisServer) -> None:
        self._daemon = Feedmill(
            "ingest", "reddit", "--topics", "topics.toml", "--limit", "1000", "--source", self._source,
            cwd=self._folder, FEEDMILL_ARCTIC_SHIFT_URL=self._archive.url,
            FEEDMILL_ARCTIC_SHIFT_REQUESTS_PER_MINUTE="100000",
            **({"FEEDMILL_REDDIT_FILL_GAPS": "arctic-shift"} if self._heal else {}),
            FEEDMILL_REDIS_URL=server.url, FEEDMILL_REDDIT_URL=self._reddit.url, FEEDMILL_REDDIT_CLIENT_ID="id",
            FEEDMILL_REDDIT_CLIENT_SECRET="secret", FEEDMILL_REDDIT_USER_AGENT="linux:soak:1 (by /u/nobody)",
            FEEDMILL_REDDIT_POLL_INTERVAL="1", FEEDMILL_REDDIT_REQUESTS_PER_MINUTE="100000",
            FEEDMILL_REDDIT_TIMEOUT="5",
        )  # fmt: skip

    def _kill(self) -> None:
        if self._daemon is not None:
            if self._daemon.process.poll() is not None:
                raise AssertionError(f"the daemon exited unexpectedly:\n{self._daemon.text()}")
            self._daemon.process.kill()
            self._daemon.process.wait()
            self._daemon = None

    def _wait_for_results(self, server: RedisServer, expected: set[str]) -> None:
        """Wait until all posts are stored, or until no result arrives for two minutes."""
        stored, since = 0, time.monotonic()
        while stored < len(expected) and time.monotonic() - since < 120:
            now = len(_stored(server))
            if now != stored:
                stored, since = now, time.monotonic()
            time.sleep(0.5)

    def _judge(self, server: RedisServer, reachable: set[str]) -> dict[str, Any]:
        stored = _stored(server)
        gaps = State(server.client).gaps.all()
        found = [(gap.subreddit, gap.until) for gap in gaps]
        _tell(f"faults: {dict(self._reddit.ledger.faults)}")
        published = self._reddit.ledger.published
        for fullname in sorted(reachable - set(stored)):
            place, served = self._published.index(fullname), self._reddit.ledger.served[fullname]
            known = fullname in _known(server, published[fullname].subreddit)
            sent = bool(sent_marks(server.client, fullname))
            _tell(f"missing: {fullname} {published[fullname]}, number {place}, {served=} {known=} {sent=}")
        _tell(f"gaps: {[_described(gap) for gap in gaps]}")
        return {
            "published": len(reachable),
            "stored": len(set(stored) & reachable),
            "missing": len(reachable - set(stored)),
            "duplicated": sum(count - 1 for count in stored.values()),
            "gaps_expected": len(self._expected),
            "gaps_recorded": len(gaps),
            "gaps_open": sum(not gap.filled for gap in gaps),
            "gaps_as_expected": sorted(found) == sorted(self._expected),
            "unreachable": len(self._unreachable),
            "unreachable_stored": len(set(stored) & self._unreachable),
            "faults": self._reddit.ledger.faults.total(),
            "answers": self._reddit.ledger.total,
            "archive_faults": self._archive.ledger.faults.total(),
            "archive_answers": self._archive.ledger.total,
            "kills": self._kills,
            "budget_exceeded": self._reddit.ledger.over_budget,
        }


def _stored(server: RedisServer) -> Counter[str]:
    """Return the number of entries in the results stream of each post."""
    ids: Counter[str] = Counter()
    client: Any = server.client
    start = "-"
    while entries := client.xrange(RESULTS_STREAM, start, count=5000):
        ids.update(fields["id"] for _, fields in entries)
        start = f"({entries[-1][0]}"
    return ids


def _known(server: RedisServer, name: str) -> set[str]:
    return set(State(server.client).track(name).known)


def _described(gap: Gap) -> str:
    return f"{gap.subreddit} {gap.until - gap.since:.1f} s"


def _tell(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--posts", type=int, default=10_000, help="posts that can be read from listings")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--bursts", type=int, default=2, help="scripted gaps")
    parser.add_argument("--seconds", type=float, default=240, help="time over which posts are published")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--source", choices=("reddit", "arctic-shift"), default="reddit")
    parser.add_argument("--heal", action="store_true", help="fill gaps from Arctic Shift")
    given = parser.parse_args(arguments)
    bursts = given.bursts if given.source == "reddit" else 0  # the archive has no gaps
    with TemporaryDirectory(prefix="feedmill-soak-") as folder:
        soak = Soak(given.posts, given.kills, bursts, given.seconds, given.seed, Path(folder), given.source, given.heal)
        found = soak.run()
    sys.stdout.write(json.dumps(found) + "\n")
    bad = found["missing"] or found["duplicated"] or found["budget_exceeded"] or (given.heal and found["gaps_open"])
    return 1 if bad or not (found["gaps_as_expected"] or given.heal) else 0


if __name__ == "__main__":
    sys.exit(main())
