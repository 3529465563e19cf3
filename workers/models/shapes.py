"""The shapes of padded micro-batches: how many rows and tokens a device computes for the rows that
it is given.

A GPU prepares each new shape: libraries choose kernels for it or build plans, and a CUDA graph has
exactly one shape. Lengths and rows as they come make thousands of shapes. So on a GPU,
micro-batches are padded to a few lengths and numbers of rows, and the window cuts micro-batches
that fill them. Pure Python, independent of torch.
"""

from functools import lru_cache
from typing import NamedTuple

#: Minimum step between two lengths, in tokens. Half-precision masks of such lengths are aligned in
#: memory.
LENGTH_STEP = 8
#: Minimum steps between a length and its double. More steps pad less and make more shapes.
STEPS_PER_DOUBLING = 16


class Shapes(NamedTuple):
    """The lengths and numbers of rows that micro-batches are padded to. few: false to pad rows
    only to the longest.
    """

    few: bool

    def length(self, tokens: int) -> int:
        """Return the length to which rows are padded if the longest has `tokens` tokens."""
        if self.few:
            return _length(tokens)
        return tokens

    def rows(self, rows: int) -> int:
        """Return the number of rows that the device computes for a micro-batch of `rows` rows."""
        if self.few:
            return _rows(rows)
        return rows

    def tokens(self, rows: int, longest: int) -> int:
        """Return the number of tokens that the device computes for `rows` rows, the longest of
        `longest` tokens.
        """
        row_count = self.rows(rows)
        length = self.length(longest)
        return row_count * length

    def fit(self, longest: int, token_budget: int, row_limit: int) -> int:
        """Return how many rows fill a micro-batch within both limits, at least 1."""
        length = self.length(longest)
        budget_rows = token_budget // max(1, length)
        most = max(1, min(row_limit, budget_rows))
        if self.few:
            return _rows_below(most)
        return most


#: Each micro-batch has its own shape, padded to its longest row.
EXACT = Shapes(few=False)
#: 32 lengths up to 256 tokens, and 16 numbers of rows up to 256.
FEW = Shapes(few=True)


@lru_cache(maxsize=4096)
def _length(tokens: int) -> int:
    power = _power_of_two(tokens)
    steps_per_power = 2 * STEPS_PER_DOUBLING
    step = max(LENGTH_STEP, power // steps_per_power)
    steps = -(-tokens // step)
    return max(1, steps) * step


@lru_cache(maxsize=4096)
def _rows(rows: int) -> int:
    """Return the next power of two, or three quarters of it."""
    power = _power_of_two(rows)
    three_quarters = power * 3 // 4
    if power >= 4 and rows <= three_quarters:
        return three_quarters
    return power


@lru_cache(maxsize=4096)
def _rows_below(rows: int) -> int:
    number = rows
    while _rows(number) != number:
        number -= 1
    return number


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below the number, at least 1."""
    below = max(0, number - 1)
    exponent = below.bit_length()
    return 1 << exponent
