"""`feedmill demo`: start the whole system, classify the bundled posts, show the labels, stop everything."""

import html
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from feedmill.monitoring.watch import worker_statistics
from feedmill.stack.embedded import WORKER_NODE, Stack
from feedmill.stack.signals import exit_on_signals
from producers.push import Pusher
from shared.broker import connect, make_app
from shared.errors import StackError
from shared.messages import ClassifyOptions, Post
from shared.results import Result, ResultsStore
from shared.settings import Settings

#: Maximum seconds to wait for all results. After that, the results so far are shown.
RESULTS_TIMEOUT_S = 300.0
#: Rows of the table, unless `--all` shows every post.
SAMPLE_ROWS = 16
#: Seed of the sample. Fixed before any result was seen, so that the rows are neither picked by hand nor different in
#: each run.
SAMPLE_SEED = 7


def sample_posts() -> list[Post]:
    """Return the bundled posts, written for this project: ten for each of the sixteen default topics."""
    text = (files("feedmill") / "samples.jsonl").read_text(encoding="utf-8")
    return [Post.model_validate_json(line) for line in text.splitlines()]


def run(settings: Settings, keep: bool, as_json: bool, show_all: bool) -> None:
    """Start the stack, classify the sample posts, print their labels, stop everything. Raises StackError."""
    console = Console()
    notes = Console(stderr=True, soft_wrap=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="feedmill-demo-") as folder, exit_on_signals():
        stack = Stack(settings, Path(folder), durable=False)
        try:
            for line in stack.start():
                notes.print("[green]✓[/]", Text(line))
            posts = sample_posts()
            seconds = _classify(stack, posts, notes)
            _report(stack, posts, seconds, console, as_json, show_all)
            if keep:
                notes.print(f"Flower is at {stack.flower_url}; Ctrl-C stops everything. In another terminal, run:")
                notes.print(f"  FEEDMILL_DATA_FOLDER={folder} feedmill status", markup=False)
                stack.stay(partial(notes.print, markup=False))
        finally:
            stack.stop()


def _classify(stack: Stack, posts: Sequence[Post], notes: Console) -> float:
    """Enqueue the posts, wait for their results and return the seconds from the first message to the last result."""
    redis = connect(stack.settings)
    store = ResultsStore(redis, stack.settings)
    columns = (TextColumn("classifying"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    began = time.monotonic()
    with Progress(*columns, console=notes) as progress:
        bar = progress.add_task("", total=len(posts))
        Pusher(make_app(stack.settings), redis, stack.settings, ClassifyOptions()).push(posts)
        while not progress.finished:
            counters = store.counters()
            progress.update(bar, completed=counters.stored + counters.failed)
            if time.monotonic() - began > RESULTS_TIMEOUT_S:
                notes.print(
                    f"[red]Not all posts were classified within {RESULTS_TIMEOUT_S:.0f} s; showing the results so "
                    "far.[/]"
                )
                break
            stack.check()
            time.sleep(0.02)
    return time.monotonic() - began


def _report(
    stack: Stack, posts: Sequence[Post], seconds: float, console: Console, as_json: bool, show_all: bool
) -> None:
    results = ResultsStore(connect(stack.settings), stack.settings).latest(len(posts))
    statistics = worker_statistics(make_app(stack.settings)).get(WORKER_NODE)
    if statistics is None:
        raise StackError(f"The worker does not answer. See its log in {stack.settings.data_folder}.")
    efficiency = statistics["padding_efficiency"]
    results = sorted(results, key=lambda result: result.post.id)
    title = f"All {len(results)} posts: {_share_right(results)}"
    if show_all:
        shown = results
    else:
        shown = random_sample(results)
        title = f"{len(shown)} posts drawn at random (seed {SAMPLE_SEED}): {_share_right(shown)}\n{title}"
    console.print(_table(shown, title, console.width))
    if not show_all:
        console.print(f"[dim]`feedmill demo --all` shows all {len(results)} posts.[/]", highlight=False)
    console.print(
        f"{len(results)} posts in {seconds:.1f} s · {len(results) / seconds:.0f} posts/s · "
        f"padding efficiency {efficiency:.2f}",
        highlight=False,
        soft_wrap=True,
    )
    if as_json:
        summary = {
            "posts": len(posts),
            "classified": len(results),
            "correct": _count_right(results),
            "posts_per_s": round(len(results) / seconds, 1),
            "padding_efficiency": efficiency,
            "seconds": round(seconds, 3),
        }
        sys.stdout.write(json.dumps(summary) + "\n")


def random_sample(results: Sequence[Result], rows: int = SAMPLE_ROWS) -> list[Result]:
    """Draw up to `rows` results at random. The same posts give the same sample, whatever their labels."""
    return random.Random(SAMPLE_SEED).sample(results, min(rows, len(results)))


def _count_right(results: Sequence[Result]) -> int:
    """Count the results whose label is the topic that the post was written for."""
    return sum(found.label == post.topic for post, found in results)


def _share_right(results: Sequence[Result]) -> str:
    right = _count_right(results)
    share = f" ({right / len(results):.0%})" if results else ""
    return f"{right} of {len(results)} labels are right{share}"


def _table(results: Sequence[Result], title: str, width: int) -> Table:
    table = Table(title=title, title_justify="left")
    # The other columns and the frame take 50 characters.
    table.add_column("post", no_wrap=True, overflow="ellipsis", max_width=max(20, width - 50))
    for name, least in (("topic", 14), ("label", 14), ("", 1), ("score", 5)):
        table.add_column(name, no_wrap=True, min_width=least)
    for post, found in results:
        text = " ".join(html.unescape(post.title or post.body).split())
        colour, mark = ("green", "✓") if found.label == post.topic else ("red", "")
        score = f"{found.scores[found.label]:.2f}"
        table.add_row(escape(text), post.topic, Text(found.label, colour), f"[{colour}]{mark}[/]", score)
    return table
