"""Batches of a training: their sizes, and the order of examples."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from transformers.trainer_pt_utils import (
    LengthGroupedSampler,
    get_length_grouped_indices,
)

from feedmill.shared.errors import printable

#: Optimization steps whose examples are sorted by length together. More steps reduce padding;
#: fewer add randomness.
STEPS_SORTED_TOGETHER = 32
#: Target of a row that fills up a batch: the Trainer does not count it, and it has no loss.
IGNORED = -100.0


class BatchSize(NamedTuple):
    """Rows of a forward pass, forward passes of an optimization step, and processes that share the
    step.
    """

    rows: int
    accumulation: int
    processes: int = 1

    @property
    def effective(self) -> int:
        """Examples of an optimization step."""
        rows_of_process = self.rows * self.accumulation
        return rows_of_process * self.processes

    def smaller(self) -> "BatchSize | None":
        """Return half the rows with twice the accumulation, for the same step; None for a single
        row.

        If the rows are odd, the next smaller number that divides the step.
        """
        step = self.rows * self.accumulation
        half = self.rows // 2
        for rows in range(half, 0, -1):
            if step % rows == 0:
                accumulation = step // rows
                return self._replace(rows=rows, accumulation=accumulation)
        return None

    def __str__(self) -> str:
        text = f"{self.effective} = {self.rows} × {self.accumulation} accumulated"
        if self.processes > 1:
            text += f" × {self.processes} devices"
        return text


def said_of_smaller_batch(before: BatchSize, smaller: BatchSize, reason: str) -> str:
    """Return the line that a batch ran out of memory, and what replaces it."""
    first_line = reason.strip().partition("\n")[0]
    return (
        f"{before.rows} rows ran out of memory ({printable(first_line):.120}). Continuing with "
        f"{smaller.rows} rows × {smaller.accumulation} accumulated, from the last checkpoint: "
        f"the effective batch stays {smaller.effective}."
    )


class Order(LengthGroupedSampler):
    """A reproducible order of examples, different in each epoch and determined by the seed.

    batch: examples per optimization step. Examples of similar length are in one step, so that its
    forward passes need little padding. The longest example is in the first step, so that running
    out of memory shows at once; the others come in random order, but an incomplete one stays at
    the end.

    multiple: of which the number of examples must be one, so that all processes get equally many
    batches. What lacks is filled up with the number of examples, as the place of a row that is
    ignored.
    """

    def __init__(
        self, lengths: list[int], batch: int, seed: int, multiple: int = 1
    ) -> None:
        super().__init__(batch, lengths=lengths)
        self._seed = seed
        self._epoch = 0
        count = len(lengths)
        missing = -count % multiple
        self._fill = [count] * missing

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths) + len(self._fill)

    def __iter__(self) -> Iterator[int]:
        epoch_seed = 1_000_003 * self._seed
        epoch_seed += self._epoch
        generator = torch.Generator().manual_seed(epoch_seed)
        by_length: list[int] = get_length_grouped_indices(  # type: ignore[no-untyped-call]
            self.lengths,
            self.batch_size,
            STEPS_SORTED_TOGETHER,
            generator,
        )
        starts = range(0, len(by_length), self.batch_size)
        first, *others = [
            by_length[start : start + self.batch_size] for start in starts
        ]
        last = others[-1:]
        others = others[:-1]
        indexes = torch.randperm(len(others), generator=generator)
        shuffled = [others[index] for index in indexes.tolist()]
        steps = [
            first,
            *shuffled,
            *last,
            self._fill,
        ]
        return chain.from_iterable(steps)


def ignored_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a row without a target: the shortest one's tokens."""
    shortest = rows[0]
    for row in rows:
        if len(row["input_ids"]) < len(shortest["input_ids"]):
            shortest = row
    label_count = len(shortest["labels"])
    no_target = [IGNORED] * label_count
    return shortest | {"labels": no_target}
