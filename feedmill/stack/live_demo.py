"""`feedmill demo --live`: start the whole system and label Bluesky's new posts for a minute."""

import json
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.text import Text

from feedmill.console import output_console
from feedmill.stack.embedded import Stack
from feedmill.stack.signals import note_signals
from feedmill.stack.start import start
from producers.live.clock import Clock
from producers.live.daemon import LiveDaemon
from producers.live.source import Source, SourceFailed
from producers.push import Pusher
from shared.broker import connect, make_app
from shared.errors import UserError, printable
from shared.messages import ClassifyOptions
from shared.results import ResultsStore
from shared.settings import Settings

#: Seconds for which posts are read; and at most, for the first post, and for the results at the end.
LIVE_S, FIRST_EVENT_S, RESULTS_S = 60.0, 15.0, 20.0
#: Posts shown per second, and the minimum characters of a post: most shorter ones are about nothing.
SHOWN_PER_S, MIN_CHARACTERS = 2, 40
#: Language unless one is set: the embedded model knows English only.
LANGUAGE = "en"
#: Labels in the summary.
TOP_LABELS = 8


def run_live(settings: Settings, as_json: bool) -> None:
    """Start the stack, label new posts for a minute, print some of them and a summary, stop everything.

    Raises UserError if Bluesky cannot be read, and StackError.
    """
    settings = settings.model_copy(
        update={
            "bluesky_languages": settings.bluesky_languages or LANGUAGE,
            "bluesky_min_characters": max(settings.bluesky_min_characters, MIN_CHARACTERS),
        }
    )
    clock = Clock()
    source = _source(settings, clock)
    console = output_console()
    notes = Console(stderr=True, soft_wrap=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="feedmill-demo-") as folder, note_signals() as received:
        stack = Stack(settings, Path(folder), durable=False, signals=received)
        try:
            start(stack, notes)
            _follow(stack, source, clock, console, as_json)
        finally:
            stack.stop()


def _source(settings: Settings, clock: Clock) -> Source:
    """Return Bluesky's posts as a source, once it has sent an event. Raises UserError."""
    if find_spec("websockets") is None:
        raise UserError("--live requires the package websockets: run `pip install 'feedmill[bluesky]'`.")
    from producers.bluesky import BlueskySource  # noqa: PLC0415 - needs websockets, an optional package

    source = BlueskySource(settings, clock)
    until = clock.monotonic() + FIRST_EVENT_S
    try:
        for event in source.events(None):
            if event is not None:
                return source
            if clock.monotonic() > until:
                raise SourceFailed("no event arrives")
    except SourceFailed as fault:
        raise UserError(
            f"Cannot read Bluesky's posts at {settings.bluesky_url}: {printable(str(fault))}. `feedmill demo --live` "
            "needs the internet; `feedmill demo` does not."
        ) from None
    raise AssertionError("a source's events do not end")


def _follow(stack: Stack, source: Source, clock: Clock, console: Console, as_json: bool) -> None:
    """Read posts for a minute, and print some of them with their labels."""
    settings = stack.settings
    redis = connect(settings)
    store = ResultsStore(redis, settings)
    pusher = Pusher(make_app(settings), redis, settings, ClassifyOptions(), wait=clock.wait)
    console.print(f"Labelling Bluesky's posts in {settings.bluesky_languages} for {LIVE_S:.0f} s:")
    shown: set[str] = set()
    began = time.monotonic()
    with closing(LiveDaemon(source, redis, pusher, settings, clock)) as daemon:
        while time.monotonic() - began < LIVE_S:
            clock.wait(min(daemon.step(), 1.0))
            stack.check()
            _show(store, shown, console)
    while (counts := store.counters()).stored + counts.failed < pusher.sent and (
        time.monotonic() - began < LIVE_S + RESULTS_S
    ):
        clock.wait(0.1)
        stack.check()
    seconds = time.monotonic() - began
    labels = Counter({name: count for hour in store.labels(2).values() for name, count in hour.items()})
    often = ", ".join(f"{name} {count:,}" for name, count in labels.most_common(TOP_LABELS))
    console.print(
        f"\n{counts.stored:,} of {pusher.sent:,} posts labelled in {seconds:.0f} s; {daemon.filtered:,} were too short "
        f"or in other languages. {often}",
        markup=False,
    )
    console.print("Next: `feedmill up`, and `feedmill ingest bluesky --labels …` in another terminal.", markup=False)
    if as_json:
        summary = {
            "posts": pusher.sent,
            "classified": counts.stored,
            "filtered": daemon.filtered,
            "posts_per_s": round(counts.stored / seconds, 1),
            "seconds": round(seconds, 3),
        }
        sys.stdout.write(json.dumps(summary) + "\n")


def _show(store: ResultsStore, shown: set[str], console: Console) -> None:
    """Print the newest results that were not shown, one line each. Posts marked as not safe for work are left out."""
    new = [found for found in store.latest(SHOWN_PER_S) if found.post.id not in shown and not found.post.nsfw]
    for post, found in new:
        shown.add(post.id)
        line = Text(f"{found.label:<12} ", "green") + Text(f"{found.scores[found.label]:.2f}  ")
        line.append(printable(" ".join(post.body.split())))
        line.truncate(console.width, overflow="ellipsis")
        console.print(line)
