"""`feedmill demo`: start the whole system, classify the bundled posts, show the labels, stop everything."""

import html
import json
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from feedmill.console import notes_console, output_console
from feedmill.monitoring.watch import worker_statistics
from feedmill.producers.push import Pusher
from feedmill.shared.broker import connect, make_app
from feedmill.shared.errors import StackError, printable
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from feedmill.stack.embedded import WORKER_NODE, Stack, start
from feedmill.stack.signals import note_signals

#: Maximum seconds to wait for another result. After that, the results so far are shown.
RESULTS_TIMEOUT_S = 300.0
#: Maximum seconds to wait for the worker's answer about its statistics.
PATIENCE_S = 10.0
#: Rows of the table, unless `--all` shows every post.
SAMPLE_ROWS = 16
#: Seed of the sample. Fixed before any result was seen, so that the rows are neither picked by hand nor different in
#: each run.
SAMPLE_SEED = 7
#: Labels in the examples of the next steps. Subjects, because the embedded model recognises a text's subject.
EXAMPLE_LABELS = "delivery,refund,password"


def sample_posts() -> list[Post]:
    """Return the bundled posts, written for this project: ten for each of the sixteen default topics."""
    text = (files("feedmill") / "samples.jsonl").read_text(encoding="utf-8")
    return [Post.model_validate_json(line) for line in text.splitlines()]


def run(settings: Settings, keep: bool, as_json: bool, show_all: bool) -> None:
    """Start the stack, classify the sample posts, print their labels, stop everything. Raises StackError."""
    console = output_console()
    notes = notes_console()
    with tempfile.TemporaryDirectory(prefix="feedmill-demo-") as folder, note_signals() as received:
        stack = Stack(settings, Path(folder), durable=False, signals=received)
        try:
            start(stack, notes)
            posts = sample_posts()
            seconds = _classify(stack, posts, notes)
            _report(stack, posts, seconds, console, as_json, show_all)
            if keep:
                notes.print(
                    f"Flower is at {stack.addresses.flower_url}; Ctrl-C stops everything. In another terminal, run:"
                )
                command = "feedmill" if _is_on_path() else shlex.quote(str(Path(sys.executable).parent / "feedmill"))
                notes.print(f"  FEEDMILL_DATA_FOLDER={folder} {command} status", markup=False)
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
        done, latest = 0, began
        while not progress.finished:
            counters = store.counters()
            if counters.stored + counters.failed > done:
                done, latest = counters.stored + counters.failed, time.monotonic()
                progress.update(bar, completed=done)
            elif time.monotonic() - latest > RESULTS_TIMEOUT_S:
                notes.print(f"[red]No result for {RESULTS_TIMEOUT_S:.0f} s; showing the results so far.[/]")
                break
            stack.check()
            time.sleep(0.02)
    return time.monotonic() - began


def _report(
    stack: Stack, posts: Sequence[Post], seconds: float, console: Console, as_json: bool, show_all: bool
) -> None:
    """Print the labels, how many are right, and what to run next; with `as_json` also the summary as a JSON line."""
    results = ResultsStore(connect(stack.settings), stack.settings).latest(len(posts))
    results = sorted(results, key=lambda result: result.post.id)
    shown = results if show_all else random_sample(results)
    console.print(_table(shown))
    console.print(
        f"\n[bold]{_share_right(results)}[/]. A label is right if it is the topic that the post was written for."
    )
    if not show_all:
        console.print(
            f"Shown: {len(shown)} drawn at random, of which {_count_right(shown)} are right. `--all` shows every post."
        )
    console.print(f"It took {seconds:.1f} s: {len(results) / seconds:.0f} posts per second.")
    console.print(_next_steps(), soft_wrap=True, markup=False)
    if as_json:
        statistics = worker_statistics(make_app(stack.settings), [WORKER_NODE], PATIENCE_S).get(WORKER_NODE)
        if statistics is None:
            raise StackError(f"The worker does not answer. See its log in {stack.settings.data_folder}.")
        summary = {
            "posts": len(posts),
            "classified": len(results),
            "correct": _count_right(results),
            "posts_per_s": round(len(results) / seconds, 1),
            "padding_efficiency": statistics["padding_efficiency"],
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
    return f"{right} of {len(results)} right{share}"


def _table(results: Sequence[Result]) -> Table:
    """Return a table with whole titles, wrapped at the terminal's width."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("", width=1)
    for name in ("label", "score"):
        table.add_column(name, no_wrap=True)
    table.add_column("post", overflow="fold")
    for post, found in results:
        is_right = found.label == post.topic
        text = Text(printable(" ".join(html.unescape(post.title or post.body).split())))
        if not is_right:
            text.append(f"\nwritten for: {post.topic}", "dim")
        colour, mark = ("green", "✓") if is_right else ("red", "✗")
        table.add_row(Text(mark, colour), Text(found.label, colour), f"{found.scores[found.label]:.2f}", text)
    return table


def _next_steps() -> str:
    """Return the commands to try next, with the user's own labels."""
    activate = Path(sys.executable).parent / "activate"
    steps = {
        f'feedmill classify "I want my money back" --labels {EXAMPLE_LABELS}': "label a text",
        f"feedmill classify posts.csv --labels {EXAMPLE_LABELS}": "label your own file, named posts.csv here",
        "feedmill up": "keep everything running",
    }
    if not _is_on_path() and activate.exists():
        steps = {f". {shlex.quote(_from_here(activate))}": "put feedmill on the PATH"} | steps
    width = max(map(len, steps))
    return "\n".join(["\nNext, with your own labels:", *(f"  {step:<{width}}  # {why}" for step, why in steps.items())])


def _is_on_path() -> bool:
    """Return whether the shell finds this installation's command by its name."""
    own = Path(sys.executable).parent / "feedmill"
    return not own.exists() or shutil.which("feedmill") == str(own)


def _from_here(path: Path) -> str:
    """Return the path relative to the current directory if it lies below it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
