"""`feedmill demo`: the whole system on the bundled posts, started, shown and stopped."""

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from feedmill.processes import ended_by_signals
from feedmill.stack import WORKER_NODE, Stack
from feedmill.watch import worker_statistics
from producers.push import Pusher
from shared.broker import connect, make_app
from shared.errors import StackError
from shared.messages import ClassifyOptions, Post
from shared.results import Result, ResultsStore
from shared.settings import Settings

#: Seconds that the demo waits for its results.
LIMIT = 300.0


def sample_posts() -> list[Post]:
    """The bundled posts: ten for each of the sixteen default topics, written for this project."""
    text = (files("feedmill") / "samples.jsonl").read_text(encoding="utf-8")
    return [Post.model_validate_json(line) for line in text.splitlines()]


def run(settings: Settings, keep: bool, as_json: bool, show_all: bool) -> None:
    """Start the stack, classify the sample posts, show what came out, stop everything. Raises StackError."""
    console = Console()
    notes = Console(stderr=True, soft_wrap=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="feedmill-demo-") as folder, ended_by_signals():
        stack = Stack(settings, Path(folder), durable=False)
        try:
            for line in stack.start():
                notes.print("[green]✓[/]", Text(line))
            posts = sample_posts()
            seconds = _classify(stack, posts, notes)
            _report(stack, posts, seconds, console, as_json, show_all)
            if keep:
                notes.print(f"Flower is at {stack.flower_url}; Ctrl-C stops everything. In another terminal:")
                notes.print(f"  FEEDMILL_DATA_FOLDER={folder} feedmill status", markup=False)
                stack.stay(partial(notes.print, markup=False))
        finally:
            stack.stop()


def _classify(stack: Stack, posts: Sequence[Post], notes: Console) -> float:
    """Enqueue the posts and wait for their results; returns the seconds from the first message to the last result."""
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
            if time.monotonic() - began > LIMIT:
                notes.print(f"[red]Not finished after {LIMIT:.0f} s; here is what there is.[/]")
                break
            stack.check()
            time.sleep(0.02)
    return time.monotonic() - began


def _report(
    stack: Stack, posts: Sequence[Post], seconds: float, console: Console, as_json: bool, show_all: bool
) -> None:
    results = ResultsStore(connect(stack.settings), stack.settings).latest(len(posts))
    correct = sum(post.topic == found.label for post, found in results)
    statistics = worker_statistics(make_app(stack.settings)).get(WORKER_NODE)
    if statistics is None:
        raise StackError(f"the worker does not answer. See {stack.settings.data_folder}.")
    efficiency = statistics["padding_efficiency"]
    shown = sorted(results, key=lambda result: result.post.id)
    console.print(_table(shown if show_all else list(_one_a_topic(shown)), console.width))
    if not show_all:
        console.print(f"[dim]One post of each topic; `feedmill demo --all` shows all {len(results)}.[/]")
    console.print(
        f"{correct} of {len(results)} labels agree with the sample's topics · {len(results) / seconds:.0f} posts/s · "
        f"padding efficiency {efficiency:.2f}",
        highlight=False,
        soft_wrap=True,
    )
    if as_json:
        summary = {
            "posts": len(posts),
            "classified": len(results),
            "correct": correct,
            "posts_per_s": round(len(results) / seconds, 1),
            "padding_efficiency": efficiency,
            "seconds": round(seconds, 3),
        }
        sys.stdout.write(json.dumps(summary) + "\n")


def _one_a_topic(results: Sequence[Result]) -> Iterator[Result]:
    seen = set()
    for result in results:
        if result.post.topic not in seen:
            seen.add(result.post.topic)
            yield result


def _table(results: Sequence[Result], width: int) -> Table:
    table = Table()
    # The other columns and the frame take 50 characters.
    table.add_column("post", no_wrap=True, overflow="ellipsis", max_width=max(20, width - 50))
    for name, least in (("topic", 14), ("label", 14), ("", 1), ("score", 5)):
        table.add_column(name, no_wrap=True, min_width=least)
    for post, found in results:
        title = " ".join((post.title or post.body).split())
        colour, mark = ("green", "✓") if found.label == post.topic else ("red", "")
        score = f"{found.scores[found.label]:.2f}"
        table.add_row(escape(title), post.topic, Text(found.label, colour), f"[{colour}]{mark}[/]", score)
    return table
