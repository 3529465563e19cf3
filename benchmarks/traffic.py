"""Generated posts with lengths like those of real ones, and a simulated padded device that takes
them from the window.

Pure Python, independent of Celery, Redis and torch.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import pi, sin
from typing import NamedTuple

from feedmill.workers.models.shapes import Shapes
from feedmill.workers.pipeline.window import Window


@dataclass(eq=False, slots=True)
class LengthRow:
    """A row as the window sees it."""

    length: int


def lengths(
    source: random.Random, bodies: float = 0.5, most: int = 256
) -> Iterator[int]:
    """Yield lengths in tokens, cut at `most`: titles with a median of 16 tokens, a share `bodies`
    with a body.

    The default resembles listings of discussion subreddits: a median of 40 tokens, 75 on average,
    a tenth cut.
    """
    while True:
        title = min(64, max(4, round(source.lognormvariate(2.77, 0.45))))
        body = round(source.lognormvariate(4.6, 1.0)) if source.random() < bodies else 0
        yield min(most, title + body)


def texts(count: int, most: int = 256) -> list[str]:
    """Return texts of made-up words.

    A tokenizer trained on them gives about one token per word.
    """
    source = random.Random(11)
    syllables = [
        consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"
    ]
    words = [
        "".join(source.choices(syllables, k=source.randrange(1, 5)))
        for _ in range(20_000)
    ]
    # Few words are frequent and many are rare, as in real texts.
    drawn = [words[int(len(words) ** source.random()) - 1] for _ in range(200_000)]
    starts = source.choices(range(len(drawn) - most), k=count)
    spans = zip(starts, lengths(source), strict=False)
    return [" ".join(drawn[start : start + length]) for start, length in spans]


class Day(NamedTuple):
    """Micro-batches of a day. computed: tokens with all padding. padded: tokens if rows were
    padded to the longest.
    """

    shapes: Counter[tuple[int, int]]
    tokens: int
    padded: int
    computed: int


def day(
    shapes: Shapes,
    batches: int,
    token_budget: int,
    rows_per_s: float,
    window_rows: int = 8192,
    batch_rows: int = 256,
) -> Day:
    """Simulate a day with a padded device of about `rows_per_s` rows/s, and count at least
    `batches` micro-batches.

    Load varies from a trickle at night to 1.1 times what the device computes at noon. So the
    window is empty at first and full later. The day is sampled at regular moments, to be short.
    """
    source = random.Random(7)
    lengths_of_posts = lengths(source)
    window: Window[LengthRow] = Window(lambda: 0.0, shapes)
    tokens_per_s = rows_per_s * 80
    counted: Counter[tuple[int, int]] = Counter()
    tokens = padded = computed = 0
    for number in range(batches):
        load = 0.55 - 0.55 * 0.999 * sin(2 * pi * number / batches + pi / 2)
        if not window:
            window.add(LengthRow(next(lengths_of_posts)))
        batch = window.take(token_budget, batch_rows)
        longest = batch[-1].length
        counted[shapes.rows(len(batch)), shapes.length(longest)] += 1
        tokens += sum(row.length for row in batch)
        padded += len(batch) * longest
        computed += shapes.tokens(len(batch), longest)
        seconds = 0.002 + shapes.tokens(len(batch), longest) / tokens_per_s
        arriving = seconds * load * rows_per_s
        for _ in range(
            min(
                window_rows - len(window),
                int(arriving) + (source.random() < arriving % 1),
            )
        ):
            window.add(LengthRow(next(lengths_of_posts)))
    return Day(counted, tokens, padded, computed)


def backlog(
    row_lengths: Sequence[int],
    shapes: Shapes,
    waiting: int,
    token_budget: int,
    batch_rows: int = 256,
) -> tuple[float, int]:
    """Take micro-batches from a window of `waiting` rows that is refilled when a quarter is free,
    as a worker's is.

    Return the padding efficiency and the number of micro-batches.
    """
    window: Window[LengthRow] = Window(lambda: 0.0, shapes)
    tokens = computed = batches = 0
    coming = iter(row_lengths)
    while True:
        if 4 * (waiting - len(window)) >= waiting:
            for length in islice(coming, waiting - len(window)):
                window.add(LengthRow(length))
            if len(window) < waiting:
                return tokens / computed if computed else 1.0, batches
        batch = window.take(token_budget, batch_rows)
        tokens += sum(row.length for row in batch)
        computed += shapes.tokens(len(batch), batch[-1].length)
        batches += 1
