"""`feedmill demo`: start the whole system, classify the bundled posts, show the labels, stop
everything.
"""

import html
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from feedmill.console import Figures, LiveBar, notes_console, output_console
from feedmill.outcomes.followers import newest
from feedmill.producers.push import Pusher
from feedmill.shared.broker import connect, make_app
from feedmill.shared.errors import printable
from feedmill.shared.messages import ClassifyOptions, Post
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from feedmill.stack.embedded import Stack, start
from feedmill.stack.processes import note_signals

#: Rows of the table, unless `--all` shows every post.
SAMPLE_ROWS = 16
#: Seed of the sample. Fixed before any result was seen, so that the rows are neither picked by
#: hand nor different in each run.
SAMPLE_SEED = 7
#: Labels in the examples of the next steps. Subjects, because the embedded model recognises a
#: text's subject.
EXAMPLE_LABELS = "delivery,refund,password"


def sample_posts() -> list[Post]:
    """Return the bundled posts, written for this project: ten for each of the sixteen default
    topics.
    """
    file = files("feedmill") / "samples.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    return [Post.model_validate_json(line) for line in lines]


def run(settings: Settings, show_all: bool) -> None:
    """Start the stack, classify the sample posts, print their labels, stop everything.

    Raises StackError.
    """
    notes = notes_console()
    # The signals first: one that ended this process while the folder is created or deleted would
    # leave its passwords.
    with (
        note_signals() as received,
        tempfile.TemporaryDirectory(prefix="feedmill-demo-") as folder,
    ):
        stack = Stack(
            settings,
            Path(folder),
            durable=False,
            signals=received,
        )
        try:
            start(stack, notes)
            posts = sample_posts()
            seconds = _classify(stack, posts, notes)
            _report(stack, posts, seconds, show_all)
        finally:
            stack.stop()


def _classify(stack: Stack, posts: Sequence[Post], notes: Console) -> float:
    """Enqueue the posts, wait for their results and return the seconds from the first message to
    the last result.
    """
    redis = connect(stack.settings)
    began = time.monotonic()
    store = ResultsStore(redis, stack.settings)

    def progress(_: object) -> Figures:
        settled = store.counters().settled
        return Figures(
            "classifying",
            done=settled,
            total=len(posts),
        )

    app = make_app(stack.settings)
    pusher = Pusher(app, redis, stack.settings, ClassifyOptions())
    with LiveBar(notes, progress):
        pusher.push(posts)
        while store.counters().settled < len(posts):
            stack.check()
            time.sleep(0.02)
    return time.monotonic() - began


def _report(
    stack: Stack, posts: Sequence[Post], seconds: float, show_all: bool
) -> None:
    """Print the labels, how many are right, and what to run next."""
    console = output_console()
    results = newest(connect(stack.settings), len(posts))
    results = sorted(results, key=lambda result: result.post.id)
    sample = results if show_all else random_sample(results)
    console.print(_table(sample))
    _print_accuracy(console, results)
    if not show_all:
        console.print(
            f"Shown: {len(sample)} drawn at random, of which {_count_right(sample)} are right. "
            "`--all` shows every post."
        )
    _print_speed(console, len(results), seconds)
    console.print(
        _next_steps(),
        soft_wrap=True,
        markup=False,
    )


def _print_accuracy(console: Console, results: Sequence[Result]) -> None:
    right = _count_right(results)
    count = len(results)
    share = ""
    if results:
        share = f" ({right / count:.0%})"
    console.print(
        f"\n[bold]{right} of {count} right{share}[/]. A label is right if it is the topic "
        "that the post was written for."
    )


def _print_speed(console: Console, posts: int, seconds: float) -> None:
    rate = posts / seconds
    console.print(f"It took {seconds:.1f} s: {rate:.0f} posts per second.")


def random_sample(results: Sequence[Result], rows: int = SAMPLE_ROWS) -> list[Result]:
    """Draw up to `rows` results at random.

    The same posts give the same sample, whatever their labels.
    """
    generator = random.Random(SAMPLE_SEED)
    return generator.sample(results, min(rows, len(results)))


def _count_right(results: Sequence[Result]) -> int:
    """Count the results whose label is right."""
    right = [result for result in results if _is_right(result)]
    return len(right)


def _is_right(result: Result) -> bool:
    """Return whether the label is the topic that the post was written for."""
    return result.classification.label == result.post.topic


def _table(results: Sequence[Result]) -> Table:
    """Return a table with whole titles, wrapped at the terminal's width."""
    table = Table(
        box=None,
        header_style="dim",
        padding=(0, 2, 0, 0),
    )
    table.add_column("", width=1)
    for name in ("label", "score"):
        table.add_column(name, no_wrap=True)
    table.add_column("post", overflow="fold")
    for result in results:
        post = result.post
        label = result.classification.best_label
        score = result.classification.label_score
        words = html.unescape(post.title or post.body).split()
        text = Text(printable(" ".join(words)))
        colour = "green"
        mark = "✓"
        if not _is_right(result):
            colour = "red"
            mark = "✗"
            text.append(f"\nwritten for: {post.topic}", "dim")
        table.add_row(
            Text(mark, colour),
            Text(label, colour),
            f"{score:.2f}",
            text,
        )
    return table


def _next_steps() -> str:
    """Return the commands to try next, with the user's own labels."""
    steps = {
        f'classify "I want my money back" --labels {EXAMPLE_LABELS}': "label a text",
        f"classify posts.csv --labels {EXAMPLE_LABELS}": (
            "label your own file, named posts.csv here"
        ),
        "up": "keep everything running",
    }
    width = max(map(len, steps))
    lines = [f"  {_command()} {step:<{width}}  # {why}" for step, why in steps.items()]
    return "\n".join(["\nNext, with your own labels:", *lines])


def _command() -> str:
    """Return the name of this installation's command, or its path if the shell finds no or another
    one.
    """
    own = Path(sys.executable).parent / "feedmill"
    if not own.exists() or shutil.which("feedmill") == str(own):
        return "feedmill"
    folder = Path.cwd()
    if own.is_relative_to(folder):
        own = own.relative_to(folder)
    return shlex.quote(str(own))
